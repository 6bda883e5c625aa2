"""Tests of the reading of waiting jobs for a start of the daemon."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.errors import Damaged
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Event, JobSpec
from scheduler.core.placement_class import WaitingJob, class_of
from scheduler.store import jobs as rows
from scheduler.store import waiting_jobs
from scheduler.store.database import Database
from tests.store.test_rows import CHANGES, SPECS, a_new_job

WAITING = ("priority", "order", "allowed", "attempt", "not_before", "reason_code", "held")


@given(
    jobs=st.lists(
        st.tuples(
            SPECS,
            st.builds(ResourceRequest, st.integers(0, 9), st.integers(0, 1000), st.sampled_from(["", "*"])),
            st.fixed_dictionaries({}, optional={name: CHANGES[name] for name in WAITING}),
        ),
        max_size=4,
    )
)
def test_waiting_jobs_are_read_for_a_start_of_the_scheduler(
    database: Database, jobs: list[tuple[JobSpec, ResourceRequest, dict[str, Any]]]
) -> None:
    """`ready` returns a `WaitingJob` for each job that waits only for room. `not_ready` returns the other waiting jobs.

    `with_uncertain_need` returns the waiting jobs that have run before or do not come from a jobs file: the scheduler
    computes their needs again at a start.
    """
    with database.writing(sync=False) as connection:
        connection.execute("DELETE FROM jobs")
        for spec, need, changes in jobs:
            job = rows.insert(connection, spec, need, "", (), 1.0)
            for name, value in changes.items():
                setattr(job, name, value)
            rows.save(connection, [job])
    connection = database.connection
    waiting = {job.id: job for job in rows.pending(connection)}
    ready = list(waiting_jobs.ready(connection))
    others = list(waiting_jobs.not_ready(connection, len(ready)))
    assert sorted([job.id for job in ready] + [job.id for job in others]) == list(waiting)
    for found in ready:
        job = waiting[found.id]
        assert found == WaitingJob(job.id, class_of(job), job.priority, job.order, job.submitted_at)
        assert not (job.held or job.reason_code or job.spec.after or job.spec.after_ok) and job.not_before is None
    assert all(
        job.held or job.reason_code or job.spec.after or job.spec.after_ok or job.not_before is not None
        for job in others
    )
    of_commands = [job for job in waiting.values() if job.spec.source == "commands"]
    assert list(waiting_jobs.from_commands_file(connection)) == of_commands
    elsewhere = [job for job in waiting.values() if job.attempt or job.spec.source != "line"]
    assert list(waiting_jobs.with_uncertain_need(connection)) == elsewhere
    if waiting:
        last = max(waiting)
        with database.writing(sync=False):
            rows.write_events(connection, [Event(last, 2.0, "requeued")])
        assert waiting[last] in waiting_jobs.with_uncertain_need(connection)
        with database.writing(sync=False):
            connection.execute("DELETE FROM events")


@pytest.mark.parametrize(
    ("column", "text"),
    [("spec", "{"), ("spec", "[]"), ("spec", ""), ("notes", "{"), ("notes", "5"), ("argv", "{"), ("failure", "x"), ("outcome", "y")],
)  # fmt: skip
def test_a_damaged_waiting_job_is_not_read_by_its_facts(database: Database, column: str, text: str) -> None:
    """E02: `ready` leaves out the row of a damaged waiting job. `not_ready` reads this row and raises Damaged.

    So the scheduler does not start with a damaged job.
    """
    with database.writing(sync=False) as connection:
        a_new_job(connection)
        assert len(list(waiting_jobs.ready(connection))) == 1
        connection.execute(f"UPDATE jobs SET {column}=?", (text,))
    assert list(waiting_jobs.ready(database.connection)) == []
    with pytest.raises(Damaged):
        list(waiting_jobs.not_ready(database.connection, 0))
