"""Tests of the history writer: problems of the history file never disturb the daemon's loop."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from scheduler.core.history import SHORT_S, bucket_of
from scheduler.core.observations import Now
from scheduler.core.placement import Fleet
from scheduler.core.scheduler_state import SchedulerState
from scheduler.daemon import history_writer
from scheduler.daemon.history_writer import HistoryWriter
from scheduler.store import history_db
from tests.builders import a_gpu
from tests.stories.harness import wait_for

START = bucket_of(1_800_000_000.0, SHORT_S)


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait up to a minute until the thread has written all samples, because the disk may be busy."""
    monkeypatch.setattr(history_writer, "END_S", 60.0)


@pytest.fixture
def state() -> SchedulerState:
    return SchedulerState(Fleet([a_gpu(0), a_gpu(1)]), lambda _: None)


class Clock:
    """A history writer with a simulated clock. ``at``: seconds on this clock; ``said``: logged texts."""

    def __init__(self, path: Path, state: SchedulerState) -> None:
        self.path, self.state, self.at = str(path), state, 0.0
        self.said: list[str] = []
        self.kept = HistoryWriter(self.path, lambda: self.state, lambda text, _: self.said.append(text))

    def turn(self, after: float, wall: float = 0.0) -> None:
        self.at += after
        self.kept.step(Now(START + wall + self.at, self.at))

    def times(self) -> list[float]:
        found = history_db.gpu_history(self.path, START - 1000, START + 10_000, 0, START + 10_000)
        return [sample.at - START for sample in found.get(0, [])]


def test_the_history_has_one_sample_for_each_interval_and_none_for_a_gap(tmp_path: Path, state: SchedulerState) -> None:
    """The history has one sample for each interval. It has no sample for the time in which the machine slept.

    If the clock is changed, the next samples have the new time.
    """
    loop = Clock(tmp_path / "history.db", state)
    loop.kept.begin()
    for after in (0, 1, 1, 8, 10, 10):
        loop.turn(after)
        assert loop.at < loop.kept.due() <= loop.at + SHORT_S
    loop.turn(10, wall=500)  # the machine slept
    loop.turn(10, wall=-100)
    loop.kept.close()
    assert {0, 10, 20, 30, 540, -50} == set(loop.times()) and not loop.said


def test_a_locked_history_file_loses_only_samples(tmp_path: Path, state: SchedulerState) -> None:
    """While another process locks the history file, the daemon's loop does not wait.

    When the lock is released, the newest samples are written; older samples may be lost.
    """
    loop = Clock(tmp_path / "history.db", state)
    loop.kept.begin()
    loop.turn(0)
    loop.turn(10)
    wait_for(lambda: loop.times() == [0], "a first sample")
    other = sqlite3.connect(loop.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for _ in range(100):
        loop.turn(10)
    wait_for(lambda: loop.turn(0.1) or loop.said, "it is said")
    assert "history.db: database is locked" in loop.said[0] and loop.said[0].startswith("cannot write /")
    other.close()
    loop.turn(10)
    newest = bucket_of(START + loop.at, SHORT_S) - START
    loop.turn(10)  # ends the newest interval; more intervals could push it out of the queue of a late thread
    wait_for(lambda: newest in loop.times(), "the newest are written")
    assert len([at for at in loop.times() if 10 <= at < 1000]) <= 31  # only the newest batches are kept in memory
    wait_for(lambda: loop.turn(10) or len(loop.said) == 2, "it is over")
    assert loop.said[1].startswith("the scheduler can write ")
    loop.kept.close()


def test_closing_the_history_reports_a_failed_write(tmp_path: Path, state: SchedulerState) -> None:
    loop = Clock(tmp_path / "nowhere" / "history.db", state)  # without this folder each write fails immediately
    loop.kept.begin()
    loop.turn(0)
    loop.kept.close()
    loop.kept.close()
    loop.turn(10)
    assert len(loop.said) == 1 and "No such file" in loop.said[0]


def test_without_a_thread_the_scheduler_continues_without_a_history(
    tmp_path: Path, state: SchedulerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the thread cannot be started, the error is logged once, and the scheduler continues without a history."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    loop = Clock(tmp_path / "history.db", state)
    loop.kept.begin()
    for _ in range(5):
        loop.turn(10)
    loop.kept.close()
    assert loop.said == ["no history is kept: can't start new thread"] and loop.kept.due() > time.monotonic() + 1e9
    assert not Path(loop.path).exists()


def test_a_defect_of_the_history_does_not_stop_the_scheduler(tmp_path: Path, state: SchedulerState) -> None:
    loop = Clock(tmp_path / "history.db", state)
    loop.kept.begin()
    loop.turn(0)
    loop.state = None  # type: ignore[assignment]
    loop.turn(10)
    loop.turn(10)
    assert len(loop.said) == 1 and "please report it" in loop.said[0]
