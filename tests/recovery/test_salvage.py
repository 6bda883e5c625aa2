"""Tests that read rows of a damaged store. The rows are read from a copy of the store.

If the first page is damaged, the first page of a new store replaces it in the copy.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.recovery.salvage import copy_store, read_what_is_left
from scheduler.store import jobs as rows
from scheduler.store.database import PAGE, Database
from scheduler.store.job_columns import job_of_row
from scheduler.store.migrations import VERSION, migrate
from scheduler.store.paths import Places


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(str(tmp_path / "gpu_scheduler_state.json"))


def fill(places: Places, number: int, seed: int = 1) -> dict[int, Job]:
    """Create a store with ``number`` jobs and close it; return the jobs by id. Some rows are larger than a page."""
    dice = random.Random(seed)
    database = Database(places, checkpoints=True)
    with database.writing() as connection:
        for n in range(number):
            words = tuple("é" * dice.choice([1, 30, 300, 3000]) for _ in range(dice.randint(1, 3)))
            rows.insert(
                connection, JobSpec(script="/s.py", arguments=words), ResourceRequest(1, 500), f"id{n}", (), float(n)
            )
        rows.set_meta(connection, "jobs_file", "/jobs.txt")
        connection.executemany("INSERT INTO events VALUES (?,1,0.5,'accepted','')", [(n + 1,) for n in range(number)])
    jobs = {job.id: job for job in rows.select(database.connection)}
    database.close()
    return jobs


def salvage(places: Places, tmp_path: Path, top: int = 0):
    before = Path(places.store).read_bytes()
    copy = str(tmp_path / "copy.db")
    for ending in ("", "-wal", "-shm", ".fresh"):
        Path(copy + ending).unlink(missing_ok=True)
    copy_store(places.store, copy)
    left = read_what_is_left(copy, top)
    assert Path(places.store).read_bytes() == before, "the original is only read"
    return left, {row["id"]: job_of_row(row) for row in left.rows["jobs"]}


def damage(places: Places, page: int, data: bytes | None = None) -> None:
    with open(places.store, "r+b") as stream:
        stream.seek((page - 1) * PAGE)
        stream.write(random.Random(page).randbytes(PAGE) if data is None else data)


def layout(places: Places) -> list[tuple[int, str, str]]:
    """Return the page number, the table or index, and the kind of each page of the store."""
    connection = sqlite3.connect(places.store)
    try:
        return connection.execute("SELECT pageno, name, pagetype FROM dbstat").fetchall()
    except sqlite3.OperationalError:
        pytest.skip("this SQLite has no dbstat")
    finally:
        connection.close()


@pytest.mark.long
def test_e02_a_damaged_leaf_page_loses_only_its_rows(places: Places, tmp_path: Path) -> None:
    """E02: If a leaf page of the jobs table is damaged, only the rows in this page are lost. Other rows are unchanged.

    If an inner page is damaged, the jobs in the pages below it may be lost. All events and settings are read.
    """
    jobs = fill(places, 60)
    whole = Path(places.store).read_bytes()
    for page, name, kind in layout(places):
        if name != "jobs":
            continue
        Path(places.store).write_bytes(whole)
        in_it = _rows_in(whole, page) if kind == "leaf" else len(jobs) if kind == "internal" else 1
        damage(places, page)
        left, found = salvage(places, tmp_path, 60)
        assert "jobs" in left.trouble
        assert len(found) >= len(jobs) - in_it, (page, kind)
        assert all(job == jobs[number] for number, job in found.items()), page
        assert len(left.rows["events"]) == len(jobs) and left.rows["meta"]


def _rows_in(data: bytes, page: int) -> int:
    return int.from_bytes(data[(page - 1) * PAGE + 3 : (page - 1) * PAGE + 5], "big")


@pytest.mark.parametrize("size", [16, 100, PAGE])
@pytest.mark.parametrize("what", ["zeros", "noise"])
def test_e01_a_damaged_first_page_loses_no_row(places: Places, tmp_path: Path, size: int, what: str) -> None:
    """E01: All jobs and settings are read from a store whose first page is damaged.

    In the copy that is read, the first page of a new store replaces the damaged one. This works because the tables of
    the first migration start at the same pages in every store.
    """
    jobs = fill(places, 20)
    damage(places, 1, bytes(size) if what == "zeros" else random.Random(size).randbytes(size))
    left, found = salvage(places, tmp_path)
    assert found == jobs and left.trouble.keys() <= {"sqlite_master"}
    assert {row["key"]: row["value"] for row in left.rows["meta"]} == {"jobs_file": "/jobs.txt"}


@pytest.mark.parametrize("version", range(1, VERSION))
def test_e01_jobs_of_a_store_of_an_older_version_are_read(places: Places, tmp_path: Path, version: int) -> None:
    """E01, E14: Jobs are read from a store of an older version, also if its first page is damaged.

    A column that a later version added has its default.
    """
    places.make()
    connection = sqlite3.connect(places.store, isolation_level=None)
    migrate(connection, 0, version)
    spec = json.dumps(JobSpec(arguments=("true",)).as_dict())
    for n in range(1, 4):
        connection.execute(
            "INSERT INTO jobs (id, state, spec, identity, need_count, need_parts, priority, place, submitted_at)"
            " VALUES (?, 'pending', ?, '', 0, 0, 0, 0, 1.0)",
            (n, spec),
        )
    connection.close()
    left, found = salvage(places, tmp_path)
    assert len(found) == 3 and not left.trouble
    assert {job.interpreter for job in found.values()} == {""}, "the default of a column that came later"
    damage(places, 1)
    left, found = salvage(places, tmp_path)
    assert {job.state for job in found.values()} == {JobState.PENDING} and len(found) == 3


@pytest.mark.parametrize("seed", range(12))
def test_e02_reading_a_store_with_random_damage_raises_no_error(places: Places, tmp_path: Path, seed: int) -> None:
    """E02, E03: Reading a store that is overwritten or cut off at random places raises no error."""
    jobs = fill(places, 40, seed)
    dice = random.Random(seed)
    with open(places.store, "r+b") as stream:
        size = os.path.getsize(places.store)
        for _ in range(dice.randint(1, 12)):
            stream.seek(dice.randrange(size))
            stream.write(dice.randbytes(dice.choice([1, 40, 5000])))
        if dice.random() < 0.5:
            stream.truncate(dice.randrange(size))
    left, _ = read_both(places, tmp_path)
    for row in left.rows["jobs"]:
        assert isinstance(row["id"], int)
    assert len(jobs) == 40


def read_both(places: Places, tmp_path: Path):
    copy = str(tmp_path / "noise.db")
    copy_store(places.store, copy)
    return read_what_is_left(copy, 40), copy


def test_e03_a_job_in_the_write_ahead_log_of_an_emptied_store_is_read(places: Places, tmp_path: Path) -> None:
    """E03: A job that is still in the write-ahead log is read, although the store's own file is empty."""
    database = Database(places, checkpoints=True)
    with database.writing() as connection:
        rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(0, 0), "", (), 1.0)
    os.truncate(places.store, 0)
    left, found = salvage(places, tmp_path)
    assert list(found) == [1] and not left.trouble.keys() - {"sqlite_master"}
    database.close()


def test_e05_a_store_below_the_recorded_highest_job_id_is_refused(places: Places) -> None:
    """E05: A store whose highest job id is lower than the recorded one is refused: the store is out of date.

    The highest job id is recorded in a file of its own. A job of a failed transaction does not count.
    """
    from scheduler.core.errors import Damaged
    from scheduler.store import integrity

    database = Database(places)
    with database.writing() as connection:
        rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(0, 0), "", (), 1.0)
    assert integrity.high(places) == 1
    with pytest.raises(RuntimeError), database.writing() as connection:
        rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(0, 0), "", (), 1.0)
        raise RuntimeError
    assert integrity.high(places) == 1
    database.close()
    old = Path(places.store).read_bytes()
    database = Database(places)
    with database.writing() as connection:
        rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(0, 0), "", (), 1.0)
    database.close()
    Path(places.store).write_bytes(old)
    with pytest.raises(Damaged, match="the store is out of date"):
        Database(places)
    assert Path(places.store).read_bytes() == old
    os.unlink(places.high)  # without this file nothing proves that the store is old, so it opens
    Database(places).close()
