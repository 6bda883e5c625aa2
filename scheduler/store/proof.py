"""What tells that a store is the one that was used last: records, the highest id, an unfinished rebuild."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3

from scheduler.core.errors import Damaged
from scheduler.store.places import Places

_RECORD = re.compile(r"(\d{1,18})\.(\d{1,18})")


def high(places: Places) -> int:
    """The highest id that was ever given out, as far as the note beside the store tells; else 0."""
    try:
        with open(places.high, "rb") as stream:
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
            found = _RECORD.fullmatch(entry.name)
            if found:
                job = int(found[1])
                newest[job] = max(newest.get(job, 0), int(found[2]))
    return newest


def evidence(places: Places) -> str:
    """What shows that jobs were here before, as the end of a sentence; empty in a new house."""
    if newest_attempts(places):
        return "attempt records stand beside it"
    given = high(places)
    return f"jobs up to {given} were given out" if given else ""


def check_begun(places: Places) -> None:
    """Raise Damaged when a rebuild was interrupted, or the store of a used house is gone or empty."""
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
        raise Damaged(f"the store is older than what happened since ({sentence}; an old copy?)", where=places.store)


def _older(connection: sqlite3.Connection, places: Places, given: int, records: bool) -> str:
    """What happened that the store does not know of; empty when it knows everything."""
    last = connection.execute("SELECT coalesce(max(id), 0) FROM jobs").fetchone()[0]
    if given > last:
        return f"job {given} was given out, the last one it knows is {last}"
    newest = newest_attempts(places) if records else {}
    if newest:
        known = dict(connection.execute("SELECT id, attempt FROM jobs"))
        for job, attempt in sorted(newest.items()):
            # Of an older job without a row nothing is proven: it may have been forgotten on purpose.
            if attempt > known.get(job, 0) and (job > last or job in known):
                return f"attempt {attempt} of job {job} was started, it knows {known.get(job, 'none')}"
    return ""
