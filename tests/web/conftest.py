"""Fixtures for the tests of the web page: a page shared by a module, and pages for single tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stories.harness import Scheduler
from tests.web.page import Page, alone


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Yield the page of a running scheduler with two declared GPUs (`page.scheduler`).

    The tests of a module share it.
    """
    folder = tmp_path_factory.mktemp("page")
    folder.chmod(0o700)
    scheduler = Scheduler(folder, 2)
    made = Page(scheduler)
    try:
        scheduler.start()
        made.start()
        yield made
    finally:
        made.end()
        scheduler.end_all()


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Callable[[], Page]]:
    """Return a function that creates a page in a new folder. No scheduler runs in this folder.

    After the test, all pages and the schedulers in their folders are ended.
    """
    made: list[Page] = []

    def make() -> Page:
        made.append(alone(tmp_path / f"alone-{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.end()
        one.scheduler.end_all()
