"""Tests of `adoption.settle` on an attempt whose record and processes change while the function runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.core.job import Job, JobState, Process
from scheduler.core.recovery import Record, Verdict
from scheduler.runners import adoption, attempt_record
from scheduler.system.proc import boot_id
from scheduler.system.processes import JOB_NAMES, seen
from tests.builders import a_job

COMMAND = [sys.executable, "-c", "import time; time.sleep(600)"]


class Attempt:
    """A claimed attempt and its processes. The test process does the work of the supervisor."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.job, self.state_file = job, str(folder / "state.json")
        self.path = str(folder / job.attempt_key)
        Path(self.path).write_bytes(attempt_record.blank(job, job.boot))
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        names = dict(zip(JOB_NAMES, (str(self.job.id), str(self.job.attempt), self.state_file), strict=True))
        self.started.append(subprocess.Popen(COMMAND, env=names, start_new_session=True))
        return self.started[-1]

    def write_pid(self) -> None:
        found = seen(self.started[0].pid)
        assert found is not None
        process = Process(self.started[0].pid, found.ticks)
        attempt_record.write_pid(self.path, process, self.job.boot, time.time_ns(), 0)

    def end(self) -> None:
        """Kill the main process, record an exit code, and reap the process.

        A supervisor does this in the same order.
        """
        self.started[0].kill()
        attempt_record.write_end(self.path, "exit", 7, time.time_ns(), sync=False)
        self.started[0].wait()

    def settle(self) -> Verdict:
        return adoption.settle(self.path, self.job, self.state_file, time.time())[0]


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path, a_job(3, state=JobState.STARTING, attempt=1, gpus=(0,), boot=boot_id()))
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def once(monkeypatch: pytest.MonkeyPatch, name: str, after: Callable[[], None]) -> None:
    """Replace the function ``name`` of `adoption` by one that also calls ``after`` at the end of its first call."""
    real, left = getattr(adoption, name), [after]

    def call(*words: object, **named: object) -> object:
        found = real(*words, **named)
        if left:
            left.pop()()
        return found

    monkeypatch.setattr(adoption, name, call)


@pytest.mark.parametrize("children", [0, 1])
def test_an_attempt_that_ends_during_the_check_is_not_lost(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, children: int
) -> None:
    """A08, P3: If an attempt ends after its record was read and before its processes are searched for, it is not lost.

    ``children``: the number of processes of the attempt that outlive its main process.
    """
    for _ in range(1 + children):
        attempt.start()
    attempt.write_pid()
    once(monkeypatch, "read_ending", attempt.end)
    assert attempt.settle() is (Verdict.FINISH_HOLDING if children else Verdict.FINISH)


@pytest.mark.parametrize("step", ["boot_id", "read_ending", "members", "starter_lives"])
def test_an_attempt_that_starts_during_the_check_is_adopted(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A08: If a claimed attempt starts after the given step of the check, it is adopted."""

    def begin() -> None:
        attempt.start()
        attempt.write_pid()

    once(monkeypatch, step, begin)
    assert attempt.settle() is Verdict.ADOPT


def test_an_attempt_that_runs_and_ends_during_the_check_is_not_lost(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A08: If the pid and the end of an attempt are recorded during the check, the attempt is finished, not lost."""
    attempt.start()

    def go_on() -> None:
        attempt.write_pid()
        attempt.end()

    once(monkeypatch, "members", go_on)
    assert attempt.settle() is Verdict.FINISH


def test_an_attempt_without_a_recorded_end_is_lost(attempt: Attempt) -> None:
    attempt.start().kill()
    attempt.write_pid()
    attempt.started[0].wait()
    assert attempt_record.read(attempt.path).kind is Record.RUNNING
    assert attempt.settle() is Verdict.LOST
