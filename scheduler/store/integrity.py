"""What tells that a store is the one that was used last: records, the highest id, an unfinished rebuild."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator

from scheduler.core.errors import OLDER, Damaged
from scheduler.store.paths import Places
from scheduler.system.safe_open import plain

# The highest id ever given out. The newest jobs may have been forgotten: then `meta` keeps it (-1: the first job is number 0).
LAST_ID = (
    "SELECT max(coalesce((SELECT max(id) FROM jobs), -1),"
    " coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key='last_id'), 0))"
)
_RECORD = r"(\d{1,18})\.(\d{1,18})"


def high(places: Places) -> int:
    """The highest id that was ever given out, as far as the note beside the store tells; else 0."""
    try:
        with open(places.high, "rb", opener=plain) as stream:
            return int(stream.read(32) or b"0")
    except (OSError, ValueError):
        return 0  # no note proves nothing


def note_high(fd: int, job: int) -> None:
    """Note the highest id, in place; a disk that cannot take it costs only this proof."""
    with contextlib.suppress(OSError):
        os.pwrite(fd, b"%020d\n" % job, 0)


def newest_attempts(places: Places) -> dict[int, int]:
    """Job → its newest attempt, by the names of the records."""
    newest: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(places.attempts) as entries:
        for entry in entries:
            found = re.fullmatch(_RECORD, entry.name)
            if found:
                job = int(found[1])
                newest[job] = max(newest.get(job, 0), int(found[2]))
    return newest


def evidence(places: Places) -> str:
    """What shows that jobs were here before, as the end of a sentence; empty in a new state folder."""
    if newest_attempts(places):
        return "attempt records stand beside it"
    given = high(places)
    return f"jobs up to {given} were given out" if given else ""


def check_begun(places: Places) -> None:
    """Raise Damaged when a rebuild was interrupted, or the store of a used state folder is gone or empty."""
    if os.path.exists(places.recovering):
        raise Damaged("gpujob recover was interrupted", where=places.store)
    size = _size(places.store)
    if size <= 0:
        # SQLite would remove a log beside an empty file, and it may hold everything.
        found = "its log is there" if _size(f"{places.store}-wal") > 0 else evidence(places)
        if found:
            raise Damaged(f"is {'missing' if size < 0 else 'empty'}, but {found}", where=places.store)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def check_not_older(connection: sqlite3.Connection, places: Places, given: int, *, records: bool) -> None:
    """Raise Damaged when the store is older than what happened (an old copy, a lost log).

    ``given``: what `high` said before; ``records``: look at the attempt records too. Every id and every attempt is
    committed before it is noted or started.
    """
    sentence = _older(connection, places, given, records)
    if sentence:
        raise Damaged(
            f"the store is older than what happened since ({sentence}; an old copy?)", where=places.store, code=OLDER
        )


def _older(connection: sqlite3.Connection, places: Places, given: int, records: bool) -> str:
    """What happened that the store does not know of; empty when it knows everything."""
    last = connection.execute(LAST_ID).fetchone()[0]
    if given > max(0, last):  # the note says 0 also where nothing was given out
        return f"job {given} was given out, the last one it knows is {last}"
    for job, attempt in sorted(_begun(connection, places, last) if records else ()):
        known = connection.execute("SELECT attempt FROM jobs WHERE id=?", (job,)).fetchone()
        # Of an older job without a row nothing is proven: it may have been forgotten on purpose.
        if (known and attempt > known[0]) or (not known and job > last):
            return f"attempt {attempt} of job {job} was started, it knows {known[0] if known else 'none'}"
    return ""


def _begun(connection: sqlite3.Connection, places: Places, last: int) -> Iterator[tuple[int, int]]:
    """The attempts whose records may say more than the store. Of a million jobs that ran once nothing is asked: a
    first attempt is news only of a job that never ran, or that nobody knows.
    """
    try:
        names = os.listdir(places.attempts)
    except FileNotFoundError:
        return
    never_ran = {f"{job}.1" for (job,) in connection.execute("SELECT id FROM jobs WHERE attempt=0")}
    for name in names:
        if name[-2:] == ".1" and name not in never_ran and name[:-2].isdecimal() and int(name[:-2]) <= last:
            continue
        found = re.fullmatch(_RECORD, name)
        if found:
            yield int(found[1]), int(found[2])
