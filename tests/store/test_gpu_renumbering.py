"""Tests of the GPU numbers in the store after the driver has renumbered the GPUs."""

from __future__ import annotations

from pathlib import Path

from scheduler.client.client import SchedulerClient
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec, JobState
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.gpu_renumbering import follow_moved
from scheduler.store.paths import Places


def test_a_stopping_job_keeps_its_gpu_after_renumbering(tmp_path: Path) -> None:
    """If the GPUs get other numbers while a job is stopping, the job keeps its GPU and gets the new number of this GPU.

    The store contains the end of the job's main process, but the job itself counts as not ended, because its state is
    still STOPPING.
    """
    db = Database(Places(str(tmp_path / "state.json")))
    with db.writing() as connection:
        job = rows.insert(connection, JobSpec(script="/x.py"), ResourceRequest(1, 1000), "", (), 1.0)
        job.state, job.attempt, job.gpus, job.finished_at = JobState.STOPPING, 1, (0,), 5.0
        rows.save(connection, [job])
        follow_moved(connection, {0: 3, 3: 0})
    found = rows.get(db.connection, job.id)
    assert found is not None and found.gpus == (3,)
    assert [one.id for one in rows.last_ended(db.connection, 10)] == []
    db.close()
    shown = SchedulerClient(str(tmp_path / "state.json")).overview()
    assert [one.id for one in shown.jobs] == [job.id]
