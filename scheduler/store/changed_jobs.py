"""Finds the jobs that changed in the store since the last call, without reading all jobs again.

The cost of a call grows with the number of running and changed jobs, not with the number of waiting or ended jobs.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

from scheduler.core.job import JobState
from scheduler.store import jobs as rows
from scheduler.store.database import NothingYet, open_for_reading
from scheduler.store.integrity import check_begun
from scheduler.store.job_columns import FINISHED_AT, STATE_AT
from scheduler.store.paths import Places

MOST_AT_ONCE = 500  # new jobs, and ended jobs, that one look returns
MOST_WAITING = 200  # waiting jobs that are watched: the first ones of the queue
OVERLAP_S = 10.0  # the end of a job may be recorded this much later than it happened
MOST_COST = 0.05  # share of the time that may be spent on sorting a long queue

Raw = tuple[Any, ...]  # a row for `store/job_columns.py: job_of`


class Changes:
    """Finds changed jobs. The read-only connection to the store stays open between the calls.

    Only one thread may use an object of this class. The methods raise StoreTrouble or sqlite3.Error if the store cannot
    be read.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.first: tuple[Raw, ...] = ()  # the first waiting jobs of the queue, as of the last look
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, ...] = ()
        self._version = -1
        self._again = False  # the next look is needed even if nothing changes
        self._seen: dict[int, Raw] = {}  # last known rows of jobs that run, wait first, or ended recently
        self._unsorted: dict[int, Raw] = {}  # waiting jobs that were returned since the queue was sorted
        self._last_id: int | None = None
        self._ended_at = 0.0
        self._first_due = 0.0

    def close(self) -> None:
        """Close the connection. The next call of `moment` opens it again.

        The rows of the last call of `jobs` are kept, so the next call still returns all changes since then.
        """
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        self._connection, self._version = None, -1

    @contextlib.contextmanager
    def moment(self, force: bool = False) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection in a read transaction; None if there is no store or no change since the last call.

        ``force``: yield the connection even if nothing changed.
        """
        connection = self._open()
        if connection is None:
            yield None
            return
        version = int(connection.execute("PRAGMA data_version").fetchone()[0])
        if version == self._version and not force and not self._again:
            yield None
            return
        connection.execute("BEGIN")
        try:
            yield connection
            self._version = version
        finally:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")

    def _open(self) -> sqlite3.Connection | None:
        """Return the connection, or None if there is no store.

        The connection is opened again if the store or its write-ahead log was replaced. A new log is normal: the last
        process that closes the store deletes the log, and the next process that opens the store creates a new log.
        """
        there = _files(self.places.store)
        if self._connection is not None and there == self._file:
            return self._connection
        self.close()
        if not self.places.exist():
            check_begun(self.places)
            return None
        try:
            self._connection = open_for_reading(self.places)
        except NothingYet:
            return None
        self._file = _files(self.places.store)
        return self._connection

    def jobs(self, connection: sqlite3.Connection) -> list[Raw]:
        """Return the rows of jobs that changed since the last call, ordered by id. The first call returns no rows."""
        begun = self._last_id is not None
        if not begun:
            self._last_id = rows.last_id(connection)
            self._ended_at = rows.ended_last(connection)
        assert self._last_id is not None
        ended = [n for n in rows.ids_ended_since(connection, self._ended_at - OVERLAP_S) if n not in self._seen]
        more = begun and len(ended) > MOST_AT_ONCE
        found = {row[0]: row for row in rows.raw_of(connection, ended[:MOST_AT_ONCE] if more else ended)}
        new = rows.raw_new(connection, self._last_id, MOST_AT_ONCE)
        self._again = more or len(new) == MOST_AT_ONCE
        found.update((row[0], row) for row in new)
        in_hand = rows.active_rows(connection)
        found.update((row[0], row) for row in in_hand)
        is_sorted = self._look_at_first(connection, found)
        found.update((row[0], row) for row in self.first)
        gone = [number for number in self._seen if number not in found]
        found.update((row[0], row) for row in rows.raw_of(connection, gone))
        known = self._unsorted | self._seen
        changed = [row for number, row in sorted(found.items()) if known.get(number) != row]
        if new:
            self._last_id = new[-1][0]
        if not more:  # else the next look finds the other jobs that have ended
            self._ended_at = max([self._ended_at, *(row[FINISHED_AT] or 0.0 for row in found.values())])
        self._seen = {row[0]: row for row in (*in_hand, *self.first)}
        recent = self._ended_at - OVERLAP_S
        self._seen.update((n, row) for n, row in found.items() if (row[FINISHED_AT] or 0.0) >= recent)
        if is_sorted:
            self._unsorted.clear()
        for row in () if is_sorted else changed:
            if row[STATE_AT] == JobState.PENDING.value:
                self._unsorted[row[0]] = row
            else:
                self._unsorted.pop(row[0], None)
        return changed if begun else []

    def _look_at_first(self, connection: sqlite3.Connection, found: dict[int, Raw]) -> bool:
        """Update ``first``, the rows of the first waiting jobs in the queue.

        ``found``: rows that were already read. In a store of an older version, SQLite must sort the queue to find the
        first jobs, which takes long for a long queue. So most calls only read the rows of the jobs in ``first`` again,
        and remove the jobs that no longer wait. Return whether this call has looked for the first jobs.
        """
        now = time.monotonic()
        if now >= self._first_due:
            self.first = tuple(rows.raw_first_pending(connection, MOST_WAITING))
            took = time.monotonic() - now
            self._first_due = now + took / MOST_COST
            return True
        known = [row[0] for row in self.first]
        there = {row[0]: row for row in rows.raw_of(connection, known)}
        first = (found.get(number) or there.get(number) for number in known)
        self.first = tuple(row for row in first if row is not None and row[STATE_AT] == JobState.PENDING.value)
        self._again = True
        return False


def _files(store: str) -> tuple[int, ...]:
    """Return device and inode of the store and of its write-ahead log; zeros for a missing file."""
    found: list[int] = []
    for path in (store, f"{store}-wal"):
        try:
            status = os.stat(path)
        except OSError:
            found += (0, 0)
        else:
            found += (status.st_dev, status.st_ino)
    return tuple(found)
