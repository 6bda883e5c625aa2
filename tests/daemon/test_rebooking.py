"""Tests of the start of the scheduler, which computes the needs of some or all waiting jobs again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.model_table import ModelTable
from scheduler.daemon.rebooking import update_needs
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.paths import Places
from tests.builders import some_gpus

HALF, WHOLE = ModelTable(models={"small": "0.5"}), ModelTable(models={"small": "1"})


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A store with two waiting jobs whose stored need is 0.3: job 1 from a jobs file, job 2 from `submit`."""
    made = Database(Places(str(tmp_path / "state.json")))
    with made.writing() as connection:
        for source in ("line", "submit"):
            spec = JobSpec(source=source, script="/train.py", arguments=("--llm", "small"))
            rows.insert(connection, spec, ResourceRequest(1, 300), "", (), 1.0)
    yield made
    made.close()


def needs(database: Database) -> list[int]:
    return [job.need.parts for job in rows.pending(database.connection)]


def test_a_start_with_another_table_or_other_gpus_recomputes_all_needs(database: Database) -> None:
    gpus = some_gpus(2, memory_mib=24_000)
    with database.writing() as connection:
        assert len(update_needs(connection, gpus, HALF, at_start=True)) == 2
        assert needs(database) == [500, 500]
        assert len(update_needs(connection, gpus, WHOLE, at_start=True)) == 2
        assert needs(database) == [1000, 1000]
        rows.save(connection, [_with_need(job, 300) for job in rows.pending(connection)])
        assert len(update_needs(connection, some_gpus(2, memory_mib=48_000), WHOLE, at_start=True)) == 2


def test_a_start_with_the_same_table_and_gpus_recomputes_the_needs_of_submitted_jobs(database: Database) -> None:
    """If the model table and the GPUs are unchanged, a start of the scheduler computes only some needs again.

    It computes the needs of jobs added with `gpujob submit`, and of jobs that already had an attempt. A job from a jobs
    file that had no attempt keeps the need that the last scheduler computed.
    """
    gpus = some_gpus(2)
    with database.writing() as connection:
        update_needs(connection, gpus, HALF)
        rows.save(connection, [_with_need(job, 300) for job in rows.pending(connection)])
        assert [job.id for job in update_needs(connection, gpus, HALF, at_start=True)] == [2]
        assert needs(database) == [300, 500]
        line = next(rows.pending(connection))
        line.attempt = 1
        rows.save(connection, [line])
        assert [job.id for job in update_needs(connection, gpus, HALF, at_start=True)] == [1]


def test_the_share_of_a_job_with_memory_follows_the_size_of_the_gpus(database: Database) -> None:
    spec = JobSpec(arguments=("x",), gpus="0.25", vram_mib=12_000)
    with database.writing() as connection:
        job = rows.insert(connection, spec, ResourceRequest(1, 500), "", ("another note",), 1.0)
        for total, need, note in (
            (24_000, 500, "vram=12000M is 0.5"),
            (48_000, 250, ""),
            (12_000, 1000, "vram=12000M is all of the smallest allowed GPU"),
        ):
            update_needs(connection, some_gpus(2, memory_mib=total), HALF)
            found = rows.get(connection, job.id)
            assert found is not None and found.need.parts == need
            assert found.notes[0] == "another note" and "".join(found.notes[1:]).startswith(note)
            assert len(found.notes) == 1 + bool(note)


def _with_need(job: Job, parts: int) -> Job:
    job.need = ResourceRequest(1, parts)
    return job
