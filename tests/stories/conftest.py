"""Stories: a real daemon, real processes, declared GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stories.harness import Scheduler


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers; ends all that was started."""
    made: list[Scheduler] = []

    def make(gpus: int | None = 2, folder: Path | None = None, **settings: Any) -> Scheduler:
        place = folder or tmp_path
        place.mkdir(exist_ok=True)
        made.append(Scheduler(place, gpus, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end_all()
