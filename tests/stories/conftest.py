"""Fixtures of tests that run a real scheduler with real processes and declared GPUs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.screens import need_screen, socket_folder
from tests.stories.harness import Scheduler
from tests.stories.people import daemon_of, loaded, place, users  # noqa: F401  fixtures
from tests.stories.screen_harness import ScreenScheduler
from tests.stories.spooler import Spooler
from tests.stories.tracking import Tracked


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    """Return a function that creates schedulers. After the test, end them and all processes of their jobs."""
    made: list[Scheduler] = []

    def make(gpus: int | None = 2, folder: Path | None = None, **settings: Any) -> Scheduler:
        where = folder or tmp_path
        where.mkdir(exist_ok=True)
        made.append(Scheduler(where, gpus, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end_all()


@pytest.fixture
def spooler(tmp_path: Path) -> Iterator[Callable[..., Spooler]]:
    """Return a function that creates a `ts` server for a folder. After the test, end the servers and their jobs."""
    made: list[Spooler] = []

    def make(folder: Path | None = None, **environ: str) -> Spooler:
        where = folder or tmp_path
        where.mkdir(mode=0o700, exist_ok=True)
        where.chmod(0o700)  # private, so that `ts` keeps the files of its server in this folder
        made.append(Spooler(where, **environ))
        return made[-1]

    yield make
    for one in made:
        one.end_all()


@pytest.fixture
def tracked(tmp_path: Path) -> Iterator[Tracked]:
    """Return a folder for `gpujob track`. After the test, end all trackers and commands that were started in it."""
    one = Tracked(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP, and trackers inherit that
    yield one
    signal.signal(signal.SIGHUP, before)
    one.end_all()


@pytest.fixture
def screens(tmp_path: Path) -> Iterator[Callable[..., ScreenScheduler]]:
    """Return a function that creates screen-mode schedulers. After the test, end all their sessions.

    The schedulers share one socket folder, which belongs to the test.
    """
    made: list[ScreenScheduler] = []
    with socket_folder() as sockets:

        def make(gpus: int = 2, folder: Path | None = None, **settings: Any) -> ScreenScheduler:
            where = folder or tmp_path
            where.mkdir(exist_ok=True)
            made.append(ScreenScheduler(where, gpus, sockets, **settings))
            return made[-1]

        yield make
        for one in made:
            one.end_all()


@pytest.fixture
def plain_screens(tmp_path: Path) -> Iterator[ScreenScheduler]:
    """Return a scheduler in screen mode that uses the user's own socket folder.

    Its sessions are beside the user's other sessions.
    """
    need_screen()
    made = ScreenScheduler(tmp_path, 2, None)
    yield made
    made.end_all()
