"""Tests of SchedulerClient: a store that is being created, reasons to wait, the newest jobs, foreground jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client import foreground
from scheduler.client.client import SchedulerClient
from scheduler.client.overview import reason_of, reasons_of
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState, Outcome, Reason
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import DaemonLock
from scheduler.store.database import Database, NothingYet
from scheduler.store.paths import Places
from tests.builders import examples


def test_an_unfinished_store_counts_as_empty_only_while_a_daemon_holds_the_lock(tmp_path: Path) -> None:
    """While a daemon holds the lock, a store that is not finished yet counts as empty. Otherwise NothingYet is raised.

    So `demo` and other commands can read the store right after the start of a daemon.
    """
    places = Places(str(tmp_path / "state.json"))
    places.make()
    Path(places.store).touch()
    client = SchedulerClient(places.state_file)
    with pytest.raises(NothingYet):
        client.overview()
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": 1})
    try:
        view = client.overview()
        assert view.alive and view.jobs == [] and client.jobs() == ([], {})
    finally:
        daemon_lock.leave()


@examples(20)
@given(
    wishes=st.lists(
        st.tuples(
            st.sampled_from(["0", "0.5", "1", "2"]),
            st.sampled_from([None, (0,), (0, 1)]),
            st.integers(-1, 1),
            st.sampled_from([None, 1024]),
            st.sampled_from([0, 0, -1, -2]),
            st.sampled_from(["", "", "depends"]),
        ),
        max_size=12,
    )
)
def test_reason_of_agrees_with_reasons_of(tmp_path_factory: pytest.TempPathFactory, wishes: list[Any]) -> None:
    """`reason_of` gives the same reason for a job as `reasons_of`, which returns the reasons of all jobs.

    Some reasons contain the number of jobs ahead of the job; this number is also the same.
    """
    database = Database(Places(str(tmp_path_factory.mktemp("reasons") / "state.json")))
    try:
        with database.writing() as connection:
            for gpus, allowed, priority, vram, place, code in wishes:
                spec = JobSpec(arguments=("true",), gpus=gpus, allowed=allowed, priority=priority, vram_mib=vram)
                job = rows.insert(
                    connection,
                    spec,
                    ResourceRequest.parse(gpus) if gpus != "0" else ResourceRequest.of_slots(1),
                    "",
                    (),
                    1.0,
                )
                job.order, job.reason_code = place * 100 - job.id if place else job.id, code
                rows.save(connection, [job])
            rows.save_class_reasons(connection, {"1x1000/*/0": Reason("no-room", "all are in use")})
        found = list(rows.live(database.connection))
        among_all = reasons_of(database.connection, found)
        assert {job.id: reason_of(database.connection, job) for job in found} == among_all
    finally:
        database.close()


class Open:
    """A caller of a foreground job. It has only the method `close`, which the test needs."""

    def close(self) -> None:
        """Do nothing."""


def stored(client: SchedulerClient, *states: JobState) -> list[Job]:
    """Store one job in each of these states, and return these jobs. A DONE job has exit code 0."""
    database = Database(client.places)
    try:
        with database.writing() as connection:
            found = []
            for state in states:
                spec = JobSpec(arguments=("true",), label="x")
                job = rows.insert(connection, spec, ResourceRequest.of_slots(1), "", (), 1.0)
                job.state, job.attempt = state, 1
                if state is JobState.DONE:
                    job.outcome, job.exit_code, job.finished_at = Outcome.EXIT, 0, 2.0
                if state is JobState.CANCELLED:
                    job.outcome, job.finished_at = Outcome.CANCELLED, 2.0
                rows.save(connection, [job])
                found.append(job)
        return found
    finally:
        database.close()


@pytest.mark.parametrize("label", ["", "x"])
def test_without_a_daemon_newest_in_skips_jobs_stored_as_running(tmp_path: Path, label: str) -> None:
    client = SchedulerClient(str(tmp_path / "state.json"))
    stored(client, JobState.DONE, JobState.DONE, JobState.RUNNING, JobState.RUNNING)
    found, _ = client.newest_in(["done"], label, 1)
    assert [job.id for job in found] == [2]
    assert [job.id for job in client.newest_in(["done"], label, 5)[0]] == [2, 1]


@pytest.mark.parametrize(("state", "code"), [(JobState.DONE, 0), (JobState.CANCELLED, 130)])
def test_a_late_ctrl_c_does_not_change_the_exit_code_of_submit_foreground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: JobState, code: int
) -> None:
    """After Ctrl-C `submit --foreground` exits with 130 if the job was cancelled.

    Otherwise it exits with the job's exit code.
    """
    client = SchedulerClient(str(tmp_path / "state.json"))
    (job,) = stored(client, state)

    def interrupted(self: foreground.Interrupts) -> foreground.Interrupts:
        self.cancel_sent = True
        return self

    monkeypatch.setattr(foreground.Interrupts, "__enter__", interrupted)
    monkeypatch.setattr(foreground.Interrupts, "__exit__", lambda *_: None)
    assert foreground.stay(client, job.id, Open()) == code  # type: ignore[arg-type]
