"""The contracts of engines and of runners (`tests/contracts`), tested with a real Slurm."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from scheduler.runners import engine as engine_runner
from scheduler.runners.slurm import Slurm
from tests.bench import EngineBench
from tests.contracts import test_runner
from tests.contracts.of_engines import *  # noqa: F403
from tests.slurm_cluster import SlurmCluster

# The tests of all runners, without those about leftover processes of this machine.
globals().update(
    (name, each)
    for name, each in vars(test_runner).items()
    if name.startswith("test_") and "bench" in inspect.signature(each).parameters
)


@pytest.fixture
def engine(cluster: SlurmCluster) -> Slurm:
    made = Slurm(cluster.environ)
    made.report()
    return made


@pytest.fixture
def bench(engine: Slurm, tmp_path: Path) -> Iterator[EngineBench]:
    with mock.patch.object(engine_runner, "PATIENCE_S", 0.5):
        made = EngineBench(tmp_path, engine)
        try:
            yield made
        finally:
            made.close()
