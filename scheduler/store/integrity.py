"""Detects a missing, empty or outdated store, by comparison with attempt records and the highest assigned id."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator

from scheduler.core.errors import OLDER, Damaged
from scheduler.store.paths import Places
from scheduler.system.safe_open import plain

# The highest assigned id. `meta` keeps it when the newest jobs are deleted; -1 there gives the first job the id 0.
LAST_ID = (
    "SELECT max(coalesce((SELECT max(id) FROM jobs), -1),"
    " coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key='last_id'), 0))"
)
FEW = 1000  # attempt records that are compared one by one
_RECORD = r"(\d{1,18})\.(\d{1,18})"


def high(places: Places) -> int:
    """Return the highest assigned job id from the file beside the store; 0 if this file cannot be read."""
    try:
        with open(places.high, "rb", opener=plain) as stream:
            return int(stream.read(32) or b"0")
    except (OSError, ValueError):
        return 0  # a missing file proves nothing


def note_high(fd: int, job: int) -> None:
    """Write the highest assigned job id into the open file ``fd``. A failed write is ignored."""
    with contextlib.suppress(OSError):
        os.pwrite(fd, b"%020d\n" % job, 0)


def newest_attempts(places: Places) -> dict[int, int]:
    """Return job id → number of the newest attempt of the job, from the names of the attempt records."""
    newest: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(places.attempts) as entries:
        for entry in entries:
            found = re.fullmatch(_RECORD, entry.name)
            if found:
                job = int(found[1])
                newest[job] = max(newest.get(job, 0), int(found[2]))
    return newest


def evidence(places: Places) -> str:
    """Return the evidence that the state folder has had jobs, as a part of a sentence; empty for a new state folder."""
    if newest_attempts(places):
        return "there are attempt records beside it"
    given = high(places)
    return f"job ids up to {given} were assigned" if given else ""


def check_begun(places: Places) -> None:
    """Raise Damaged if a rebuild was interrupted, or if the store of a used state folder is missing or empty."""
    if os.path.exists(places.recovering):
        raise Damaged("cannot use the store: gpujob recover was interrupted", where=places.store)
    size = _size(places.store)
    if size <= 0:
        # SQLite would delete the write-ahead log beside an empty file, and the log may hold all jobs.
        found = "its write-ahead log exists" if _size(f"{places.store}-wal") > 0 else evidence(places)
        if found:
            raise Damaged(
                f"cannot use the store: it is {'missing' if size < 0 else 'empty'}, but {found}", where=places.store
            )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def check_not_older(connection: sqlite3.Connection, places: Places, given: int, *, records: bool) -> None:
    """Raise Damaged if the store lacks a known id or attempt: the store is an old copy, or its log was lost.

    ``given``: the result of `high`, which the caller must get before it reads the store; ``records``: also compare the
    store with the attempt records. An up-to-date store has all ids and attempts, because each id and each attempt is
    committed to the store before it is written to a file.
    """
    sentence = _older(connection, places, given, records)
    if sentence:
        raise Damaged(f"the store is out of date ({sentence}); is it an old copy?", where=places.store, code=OLDER)


def _older(connection: sqlite3.Connection, places: Places, given: int, records: bool) -> str:
    """Return the first id or attempt that the store lacks, as a sentence; empty if nothing is missing."""
    last = connection.execute(LAST_ID).fetchone()[0]
    if given > max(0, last):  # ``given`` is 0 without a note, while ``last`` may be -1
        return f"job id {given} was assigned, but the last job id in the store is {last}"
    for job, attempt in sorted(_begun(connection, places, last) if records else ()):
        known = connection.execute("SELECT attempt FROM jobs WHERE id=?", (job,)).fetchone()
        # A lower id without a row proves nothing: the job may have been deleted on purpose.
        if (known and attempt > known[0]) or (not known and job > last):
            newest = known[0] if known else "none"
            return f"attempt {attempt} of job {job} was started, but its last attempt in the store is {newest}"
    return ""


def _begun(connection: sqlite3.Connection, places: Places, last: int) -> Iterator[tuple[int, int]]:
    """Yield (job, attempt) of the attempt records that have to be compared with the store.

    If the store says that a job has started, the record of its first attempt is left out, because the store has this
    attempt. This saves one query for each of perhaps a million records. For a few records, the queries are faster than the
    search for the jobs that have not started. ``last``: the highest id in the store.
    """
    try:
        names = os.listdir(places.attempts)
    except FileNotFoundError:
        return
    many = len(names) > FEW
    never_ran = {f"{job}.1" for (job,) in connection.execute("SELECT id FROM jobs WHERE attempt=0")} if many else ()
    for name in names:
        if many and name[-2:] == ".1" and name not in never_ran and name[:-2].isdecimal() and int(name[:-2]) <= last:
            continue
        found = re.fullmatch(_RECORD, name)
        if found:
            yield int(found[1]), int(found[2])
