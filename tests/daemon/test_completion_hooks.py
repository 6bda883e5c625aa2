"""Tests of completion hooks when the store cannot record that they were started."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.errors import StoreTrouble
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.core.observations import Now
from scheduler.daemon.completion_hooks import NEVER, CompletionHooks
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.paths import Places

NOW = Now(1.0, 1.0)


def test_a_hook_that_was_started_is_recorded_when_the_store_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook whose start could not be recorded is recorded later: it is not started again, and its warning is kept."""
    db = Database(Places(str(tmp_path / "state.json")))
    spec = JobSpec(arguments=("true",), source="submit", on_finish="no-such-program")
    with db.writing() as connection:
        job = rows.insert(connection, replace(spec, cwd=str(tmp_path)), ResourceRequest(0, 0), "", (), 1.0)
        job.state, job.attempt, job.finished_at, job.exit_code = JobState.DONE, 1, 2.0, 0
        rows.save(connection, [job])
        rows.note_calls(connection, [job.id])
    said: list[str] = []

    def say(text: str, _level: int, _job: Job) -> None:
        said.append(text)

    hooks = CompletionHooks(db, db.places, {"PATH": str(tmp_path)}, str(tmp_path), say)
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
    assert hooks.due() == NEVER and rows.calls(db.connection) == []
    events = db.connection.execute("SELECT count(*) FROM events WHERE kind='afterwards'").fetchone()
    assert events == (1,) and len(said) == 1, said
    db.close()
