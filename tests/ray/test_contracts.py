"""The contracts of engines and of runners (`tests/contracts`), tested with a real Ray."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from scheduler.runners import engine as engine_runner
from scheduler.runners.ray import Ray
from tests.bench import EngineBench
from tests.contracts import test_runner
from tests.contracts.of_engines import *  # noqa: F403
from tests.ray.conftest import PORT, RayCluster

# The tests of all runners, without those about leftover processes of this machine.
globals().update(
    (name, each)
    for name, each in vars(test_runner).items()
    if name.startswith("test_") and "bench" in inspect.signature(each).parameters
)


@pytest.fixture
def engine(cluster: RayCluster) -> Iterator[Ray]:
    with cluster.hosts.inside(1):
        made = Ray(f"http://127.0.0.1:{PORT}", cluster.token.read_text())
        made.report()
        yield made
        for name in made.jobs("gj-"):
            made.cancel(name, True)


@pytest.fixture
def bench(engine: Ray, tmp_path: Path) -> Iterator[EngineBench]:
    with mock.patch.object(engine_runner, "PATIENCE_S", 2.0):
        made = EngineBench(tmp_path, engine)
        try:
            yield made
        finally:
            made.close()
