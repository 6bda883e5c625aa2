"""Tests of deleting ended jobs: which jobs are deleted, which are kept, and which data of a deleted job remain."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.client import SchedulerClient
from scheduler.core.file_offsets import Refusal
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import ENDED, Event, Holding, Job, JobSpec, JobState, Process
from scheduler.core.model_table import ModelTable
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.deletion import ended_with_logs, forget_finished, old_logs, sweep_environments
from scheduler.store.paths import Places
from tests.builders import examples

WHOLE = ResourceRequest(1, 1000)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(Places(str(tmp_path / "gpu_scheduler_state.json")))
    yield made
    made.close()


def put(database: Database, state: JobState, at: float | None = None, log: str = "", **spec: Any) -> Job:
    """Insert a job in this state that ended at the time ``at`` (None: it has not ended); return the job."""
    with database.writing() as connection:
        job = rows.insert(connection, JobSpec(script="/x.py", **spec), WHOLE, "", (), 1.0)
        job.state, job.finished_at, job.log, job.attempt = state, at, log, 1
        rows.save(connection, [job])
        rows.write_events(connection, [Event(job.id, 1.0, "started"), Event(job.id, 2.0, state.value)])
    return job


def left(database: Database) -> list[int]:
    return [row[0] for row in database.connection.execute("SELECT id FROM jobs ORDER BY id")]


def forget(database: Database, **limits: Any) -> int:
    with database.writing() as connection:
        return forget_finished(connection, **limits)


def test_ended_jobs_are_selected_by_number_and_age(database: Database) -> None:
    for at in (10, 20, 30, 30, 40, 50):
        put(database, JobState.DONE, at)
    assert forget(database, keep=5) == 1 and left(database) == [2, 3, 4, 5, 6]
    assert forget(database, before=30) == 1 and left(database) == [3, 4, 5, 6]
    assert forget(database, keep=3, before=20, most=1) == 1 and left(database) == [4, 5, 6]
    assert forget(database, keep=9) == forget(database, before=0) == 0
    assert forget(database, keep=0, most=1) == 1 and left(database) == [5, 6]
    assert database.connection.execute("SELECT DISTINCT job FROM events ORDER BY job").fetchall() == [(5,), (6,)]


def test_without_limits_all_unprotected_ended_jobs_and_refused_lines_are_deleted(database: Database) -> None:
    """Without limits, one call deletes the refused lines and all ended jobs that are not protected, as `reset` does."""
    for state in JobState:
        put(database, state, 10.0 if state in ENDED else None)
    put(database, JobState.STOPPING, 11.0)  # its main process has ended, but leftover processes run
    parent, other = put(database, JobState.DONE, 12.0), put(database, JobState.FAILED, 13.0)
    put(database, JobState.PENDING, after=(parent.id,))
    put(database, JobState.STOPPING, 14.0, after_ok=(other.id,))
    holder = put(database, JobState.DONE, 15.0)
    for _ in range(450):
        put(database, JobState.DONE, 16.0)
    newest = put(database, JobState.CANCELLED, 17.0)
    with database.writing() as connection:
        rows.save_holdings(connection, [Holding("x", holder.id, WHOLE, (0,), 0, (Process(1, 1),))], [], "boot")
        kept.refuse(connection, Refusal("jobs.txt", 1, "text", "why"))
        kept.count_lines(connection, "jobs.txt", ["identity"])
    assert forget(database, keep=10_000) == 0 and len(kept.refused(database.connection)) == 1
    assert forget(database) == 4 + 451
    living = [row[0] for row in database.connection.execute("SELECT id FROM jobs WHERE state IN ('pending','starting','running','stopping')")]  # fmt: skip
    assert left(database) == sorted([*living, parent.id, other.id, holder.id])
    assert kept.refused(database.connection) == []
    assert database.connection.execute("SELECT n FROM line_counts").fetchall() == [(1,)]
    with database.writing() as connection:
        assert rows.insert(connection, JobSpec(script="/y.py"), WHOLE, "", (), 1.0).id == newest.id + 1


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(list(JobState)), st.integers(1, 9)), min_size=1, max_size=12),
    st.none() | st.integers(0, 12), st.none() | st.integers(0, 10), st.none() | st.integers(1, 4),
)  # fmt: skip
def test_the_jobs_that_ended_first_are_deleted_first(
    database: Database, jobs: list[tuple[JobState, int]], keep: int | None, before: int | None, most: int | None
) -> None:
    """The jobs that ended first are deleted first. One call deletes at most ``most`` jobs.

    A simple model computes which jobs must remain.
    """
    with database.writing() as connection:
        connection.execute("DELETE FROM jobs")
        connection.execute("DELETE FROM meta WHERE key='last_id'")
    made = [put(database, state, float(at) if state in ENDED else None) for state, at in jobs]
    ended = sorted((job for job in made if job.state in ENDED), key=lambda job: (job.finished_at, job.id))
    rank = {job.id: len(ended) - place for place, job in enumerate(ended)}  # 1: the job that ended last
    may_go = [
        job.id
        for job in ended
        if (keep is None and before is None)
        or (keep is not None and rank[job.id] > keep)
        or (before is not None and job.finished_at is not None and job.finished_at < before)
    ]
    gone = may_go[:most]
    assert forget(database, keep=keep, before=before, most=most) == len(gone)
    assert left(database) == sorted({job.id for job in made} - set(gone))
    assert rows.last_id(database.connection) == made[-1].id, "ids are not given out twice"


def test_the_logs_of_all_attempts_of_a_deleted_job_are_recorded(database: Database) -> None:
    job = put(database, JobState.DONE, 10.0, "/logs/b")
    with database.writing() as connection:
        rows.write_events(connection, [Event(job.id, 1.0, "retry_scheduled", {"attempt": 1, "log": "/logs/a"})])
        job.attempt = 2
        rows.save(connection, [job])
    put(database, JobState.FAILED, 20.0)
    assert ended_with_logs(database.connection, (99.0, 0), 5) == [(20.0, 2, []), (10.0, 1, ["/logs/b", "/logs/a"])]
    assert ended_with_logs(database.connection, (20.0, 2), 5) == [(10.0, 1, ["/logs/b", "/logs/a"])]
    assert forget(database, keep=1) == 1
    assert old_logs(database.connection, (99.0, ""), 5) == [(10.0, "/logs/b"), (10.0, "/logs/a")]


def test_an_environment_is_deleted_with_its_last_job(tmp_path: Path, database: Database) -> None:
    """A stored environment is deleted together with the last job that uses it. Until then it is kept."""
    client = SchedulerClient(database.places.state_file)
    spec = JobSpec(source="submit", arguments=("true",), gpus="0")
    first = client.submit(spec, {"A": "1"}, ModelTable())
    client.submit(spec, {"A": "2"}, ModelTable())
    shared = client.submit(spec, {"A": "1"}, ModelTable())
    client.submit(spec, {"A": "3"}, ModelTable())
    assert first.spec.env_file == shared.spec.env_file
    folder = database.places.environments
    Path(folder, "packet").touch()  # a file that is no environment must stay

    def end(*ids: int) -> None:
        with database.writing() as connection:
            for number in ids:
                connection.execute("UPDATE jobs SET state='done', finished_at=? WHERE id=?", (number, number))
        forget(database, keep=0)
        for _ in sweep_environments(database, database.places):
            continue

    end(1, 2)
    assert len(os.listdir(folder)) == 3 and os.path.exists(shared.spec.env_file)
    end(3)
    assert len(os.listdir(folder)) == 2 and not os.path.exists(shared.spec.env_file)
    connection = database.connection
    assert rows.meta(connection, "unswept") == "" and list(sweep_environments(database, database.places)) == []


def test_an_environment_is_saved_while_the_store_is_locked(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    """A submission holds the lock of the store while it saves the job's environment.

    Without the lock, a second submission could find the incomplete file and take it for a file that a crash has cut
    off.
    """
    keep, locked = SchedulerClient._keep_environment, []

    def watched(self: SchedulerClient, environment: Any) -> str:
        with open(database.places.store_lock) as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(keep(self, environment))
        return locked[-1]

    monkeypatch.setattr(SchedulerClient, "_keep_environment", watched)
    client = SchedulerClient(database.places.state_file)
    job = client.submit(JobSpec(source="submit", arguments=("true",), gpus="0"), {"A": "9"}, ModelTable())
    assert locked == [job.spec.env_file] and Path(job.spec.env_file).read_bytes() == b"A=9"
