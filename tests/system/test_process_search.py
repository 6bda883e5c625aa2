"""Tests of the search for the processes of attempts, and of signals to them, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.job import Process
from scheduler.system import process_search
from scheduler.system.process_search import ProcessTable, Target, members, signal_all
from scheduler.system.processes import Mark, seen
from tests.stories.harness import alive, wait_for

# A leader with a child in its group and a child in a session of its own. Each writes its pid.
SCRIPT = """sleep 600 & echo $! > {folder}/child
setsid sh -c 'echo $$ > {folder}/apart; exec sleep 600' &
wait
"""


class Attempt:
    """An attempt of a job whose processes are real. ``pids``: leader, child, and child in a session of its own."""

    def __init__(self, number: int, folder: Path) -> None:
        folder.mkdir()
        self.mark = Mark(number, 1, str(folder.parent / "state.json"))
        variables = dict(line.decode().split("=", 1) for line in self.mark.lines())
        self.popen = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT.format(folder=folder)], env={**os.environ, **variables}, start_new_session=True
        )
        for name in ("child", "apart"):
            wait_for(lambda name=name: (folder / name).exists() and (folder / name).read_text(), name)
        self.pids = {self.popen.pid, *(int((folder / name).read_text()) for name in ("child", "apart"))}
        found = seen(self.popen.pid)
        assert found is not None
        self.leader = Process(found.pid, found.ticks)


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[list[Attempt]]:
    made = [Attempt(number, tmp_path / str(number)) for number in (1, 2, 12)]
    yield made
    for attempt in made:
        for pid in attempt.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        attempt.popen.wait()


def test_one_table_gives_the_processes_of_each_attempt(attempts: list[Attempt]) -> None:
    """The processes are found by session, group, parent and mark; those of another attempt are not among them."""
    table = ProcessTable()
    for attempt in attempts:
        by_all = {process.pid for process in members(attempt.mark, attempt.leader, table=table)}
        by_mark = {process.pid for process in members(attempt.mark, None, table=table)}
        unmarked = {process.pid for process in members(Mark(99, 1, "/nowhere"), attempt.leader, table=table)}
        assert by_all == by_mark == unmarked == attempt.pids


def test_attempts_get_their_own_signals_after_one_search(
    attempts: list[Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM goes to all processes of one attempt, SIGKILL to those of another one, and none to those of the third.

    There is one search for the processes of all attempts. A second search makes sure that the attempt that got SIGKILL
    has no further process.
    """
    searches = 0
    usual = process_search.all_pids

    def count() -> list[int]:
        nonlocal searches
        searches += 1
        return usual()

    monkeypatch.setattr(process_search, "all_pids", count)
    killed, ended, other = attempts
    targets = [Target(killed.mark, killed.leader, hard=True), Target(ended.mark, ended.leader)]
    told = {process.pid for process in signal_all(targets)}
    assert told == killed.pids | ended.pids and searches == 2
    wait_for(lambda: not any(map(alive, told)), "the ends of both attempts")
    assert (killed.popen.wait(60), ended.popen.wait(60)) == (-signal.SIGKILL, -signal.SIGTERM)
    assert all(map(alive, other.pids))
