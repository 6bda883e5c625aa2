"""Fixtures of the tests of the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.store.database import Database
from scheduler.store.paths import Places


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(Places(str(tmp_path / "gpu_scheduler_state.json")))
    yield made
    made.close()
