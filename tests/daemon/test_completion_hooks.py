"""Tests of completion hooks when the store cannot record them, or when one of them cannot be started."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.errors import StoreTrouble
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.core.observations import Now
from scheduler.daemon.completion_hooks import NEVER, CompletionHooks, JobActions
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.paths import Places

NOW = Now(1.0, 1.0)


class Hooks(CompletionHooks):
    """The completion hooks of the jobs in a new store. ``said``: the warnings that were logged."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        db = Database(Places(str(folder / "state.json")))
        self.folder = str(folder)
        log = str(folder / ".gpujob" / "on_finish.log")
        own = JobActions({"PATH": self.folder}, self.folder, log, lambda job, text: None)
        super().__init__(db, own, lambda text, _level, _job: self.said.append(text))

    def ended(self, program: str, *, begun: bool = False) -> int:
        """Store an ended job whose on_finish is ``program``; return the job's id.

        ``begun``: the store says that a scheduler has started the program.
        """
        spec = JobSpec(arguments=("true",), source="submit", on_finish=program, cwd=self.folder)
        with self.db.writing() as connection:
            job = rows.insert(connection, spec, ResourceRequest(0, 0), "", (), 1.0)
            job.state, job.attempt, job.finished_at, job.exit_code = JobState.DONE, 1, 2.0, 0
            rows.save(connection, [job])
            rows.note_calls(connection, [job.id])
            if begun:
                rows.begin_call(connection, job.id, 3.0)
        return job.id

    def warned(self) -> list[int]:
        """Return the ids of the jobs with a warning in their event history."""
        found = self.db.connection.execute("SELECT job FROM events WHERE kind='afterwards' ORDER BY job")
        return [job for (job,) in found]


@pytest.fixture
def hooks(tmp_path: Path) -> Iterator[Hooks]:
    made = Hooks(tmp_path)
    yield made
    made.db.close()


def test_a_hook_that_was_started_is_recorded_when_the_store_can_be_written_again(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store cannot record that a hook was started, this is recorded later.

    The hook is not started a second time. A warning about the hook is not lost.
    """
    job = hooks.ended("no-such-program")
    strike, calls = rows.strike_calls, [0]

    def full_disk(connection: sqlite3.Connection, numbers: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise sqlite3.OperationalError("database or disk is full")
        strike(connection, numbers)

    monkeypatch.setattr(rows, "strike_calls", full_disk)
    with pytest.raises((StoreTrouble, sqlite3.Error)):
        hooks.step(NOW)
    assert hooks.due() == 0.0
    hooks.step(NOW)
    assert hooks.due() == NEVER and rows.calls(hooks.db.connection) == []
    assert hooks.warned() == [job] and len(hooks.said) == 1, hooks.said


def test_a_hook_that_raises_does_not_drop_the_hooks_of_other_jobs(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the start of one hook raises an unexpected error, the next step starts the hooks of the other jobs."""
    jobs = [hooks.ended(program) for program in ("broken", "no-such-program")]
    usual = JobActions._call

    def call(self: JobActions, job: Job) -> None:
        if job.spec.on_finish == "broken":
            raise KeyError("defect")
        usual(self, job)

    monkeypatch.setattr(JobActions, "_call", call)
    with pytest.raises(KeyError):
        hooks.step(NOW)
    assert hooks.due() == 0.0
    hooks.step(NOW)
    assert hooks.warned() == jobs[1:] and rows.calls(hooks.db.connection) == [] and hooks.due() == NEVER


def test_a_hook_is_not_lost_if_its_job_cannot_be_read_for_a_moment(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store cannot be read after a hook was marked as begun, a later step starts the hook."""
    job = hooks.ended("no-such-program")
    usual, calls = rows.get, [0]

    def get(connection: sqlite3.Connection, number: int) -> Job | None:
        calls[0] += 1
        if calls[0] == 1:
            raise sqlite3.OperationalError("disk I/O error")
        return usual(connection, number)

    monkeypatch.setattr(rows, "get", get)
    with pytest.raises((StoreTrouble, sqlite3.Error)):
        hooks.step(NOW)
    hooks.step(NOW)
    assert hooks.warned() == [job] and rows.calls(hooks.db.connection) == [] and hooks.due() == NEVER


def test_a_hook_without_free_descriptors_gets_a_warning(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    job = hooks.ended("/bin/true")

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    hooks.step(NOW)
    monkeypatch.undo()
    assert hooks.warned() == [job] and "Too many open files" in hooks.said[0]


def test_the_warning_about_a_hook_of_a_killed_scheduler_is_recorded(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a scheduler was killed while its hook ran, a warning about the hook is recorded and logged.

    The warning is recorded in the same transaction that deletes the stored call of the hook.
    """
    job = hooks.ended("/bin/true", begun=True)

    def full_disk(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as full:
        full.setattr(rows, "write_events", full_disk)
        with pytest.raises((StoreTrouble, sqlite3.Error)):
            hooks.step(NOW)
    assert rows.calls(hooks.db.connection) != [] and hooks.said == []
    hooks.step(NOW)
    assert hooks.warned() == [job] and rows.calls(hooks.db.connection) == []
    assert len(hooks.said) == 1 and "was killed" in hooks.said[0]
