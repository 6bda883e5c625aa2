"""Tests of SchedulerClient: a store that a daemon is just creating, and the reasons why jobs wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.client import SchedulerClient
from scheduler.client.overview import reason_of, reasons_of
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec, Reason
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import DaemonLock
from scheduler.store.database import Database, NothingYet
from scheduler.store.paths import Places
from tests.builders import examples


def test_a_store_that_is_being_made_is_empty_and_one_that_nobody_makes_is_trouble(tmp_path: Path) -> None:
    """An unfinished store counts as empty while a daemon holds the lock; without a daemon NothingYet is raised.

    `demo` and other commands can read the store right after a start.
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
def test_the_reason_of_one_is_its_reason_among_all(tmp_path_factory: pytest.TempPathFactory, wishes: list[Any]) -> None:
    """For each job, `reason_of` and `reasons_of` give the same reason, with the same number of jobs before it."""
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
