"""Tests of the change feed: each job that changes is returned, even if many jobs change at the same time."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState, Outcome
from scheduler.store import changed_jobs
from scheduler.store import jobs as rows
from scheduler.store.changed_jobs import MOST_AT_ONCE, MOST_WAITING, Changes
from scheduler.store.database import Database
from scheduler.store.paths import Places


def looks(feed: Changes, number: int) -> tuple[list[int], int]:
    """Look ``number`` times.

    Return the ids of all returned jobs, and the largest number of jobs that one look returned.
    """
    found = []
    for _ in range(number):
        with feed.moment() as connection:
            found.append([] if connection is None else [row[0] for row in feed.jobs(connection)])
    return list(chain(*found)), max(map(len, found))


def test_each_job_of_a_long_queue_that_ends_at_once_is_returned_once(tmp_path: Path) -> None:
    """If all jobs of a long queue are cancelled together, each of them is returned once by one of the following looks.

    Each look returns a limited number of jobs.
    """
    database = Database(Places(str(tmp_path / "state.json")))
    feed = Changes(database.places)
    number = MOST_WAITING + 3 * MOST_AT_ONCE
    try:
        jobs: list[Job] = []
        with database.writing() as connection:
            for _ in range(number):
                jobs.append(
                    rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(1, 1000), "", (), 1.0)
                )
        assert looks(feed, 1) == ([], 0)
        with database.writing() as connection:
            for job in jobs:
                job.state, job.outcome, job.finished_at = JobState.CANCELLED, Outcome.CANCELLED, 100.0
            rows.save(connection, jobs)
        found, most = looks(feed, 8)
        assert sorted(found) == [job.id for job in jobs] and most <= MOST_WAITING + MOST_AT_ONCE
        with database.writing() as connection:
            jobs[0].state, jobs[0].finished_at = JobState.PENDING, None
            rows.save(connection, jobs[:1])
        assert looks(feed, 3) == ([jobs[0].id], 1)
    finally:
        feed.close()
        database.close()


def test_a_job_that_waits_again_is_returned_once_if_the_queue_is_sorted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job and a new job are returned once. A later look sorts the queue, but does not return them again."""
    database = Database(Places(str(tmp_path / "state.json")))
    feed = Changes(database.places)
    now = [100.0]
    monkeypatch.setattr(changed_jobs.time, "monotonic", lambda: now.append(now[-1] + 1.0) or now[-1])
    try:
        with database.writing() as connection:
            old = rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(1, 1000), "", (), 1.0)
            old.state, old.outcome, old.finished_at = JobState.CANCELLED, Outcome.CANCELLED, 100.0
            rows.save(connection, [old])
        assert looks(feed, 1) == ([], 0)  # sorts the queue; this seems to take 1 s, so the next time is 20 s later
        with database.writing() as connection:
            old.state, old.outcome, old.finished_at = JobState.PENDING, None, None
            rows.save(connection, [old])
            new = rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(1, 1000), "", (), 1.0)
        assert looks(feed, 1) == ([old.id, new.id], 2)
        assert feed.first == ()
        now.append(now[-1] + 20.0)
        assert looks(feed, 2) == ([], 0)
        assert [row[0] for row in feed.first] == [old.id, new.id]
    finally:
        feed.close()
        database.close()


def test_a_job_that_is_requeued_with_the_same_row_is_returned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job is returned also if its row equals the row of its last wait, which was returned before."""
    database = Database(Places(str(tmp_path / "state.json")))
    feed = Changes(database.places)
    monkeypatch.setattr(changed_jobs, "OVERLAP_S", 0.0)
    try:
        with database.writing() as connection:
            job = rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(1, 1000), "", (), 1.0)
            job.state, job.outcome, job.finished_at = JobState.CANCELLED, Outcome.CANCELLED, 100.0
            rows.save(connection, [job])
            other = rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(1, 1000), "", (), 1.0)
        looks(feed, 1)
        monkeypatch.setattr(feed, "_first_due", float("inf"))  # the queue is not sorted again

        def move(state: JobState, outcome: Outcome | None, finished_at: float | None, ended: float) -> list[int]:
            job.state, job.outcome, job.finished_at = state, outcome, finished_at
            other.state, other.outcome, other.finished_at = JobState.CANCELLED, Outcome.CANCELLED, ended
            with database.writing() as connection:
                rows.save(connection, [job, other])
            return looks(feed, 1)[0]

        assert job.id in move(JobState.PENDING, None, None, 101.0)
        assert job.id in move(JobState.CANCELLED, Outcome.CANCELLED, 102.0, 103.0)
        move(JobState.CANCELLED, Outcome.CANCELLED, 102.0, 104.0)  # the feed forgets the older end
        assert job.id not in move(JobState.PENDING, None, None, 105.0)  # only the next sort finds it
        feed._first_due = 0.0
        assert job.id in looks(feed, 1)[0]
    finally:
        feed.close()
        database.close()
