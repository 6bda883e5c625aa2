"""Contract of engines, tested with the stand-in; `tests/slurm` and `tests/ray` test it with the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.of_engines import *  # noqa: F403
from tests.fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine({"g1": 2, "g2": 1})
    yield made
    made.close()
