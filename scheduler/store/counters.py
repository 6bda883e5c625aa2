"""Reads and updates the permanent counters in the store, by name and label (`core/counters.py`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from scheduler.core.counters import counted
from scheduler.core.job import Event, Job


def count(connection: sqlite3.Connection, events: Iterable[Event], jobs: Mapping[int, Job]) -> None:
    """Add these events to the counters.

    The function reads the stored events of a job to find out whether the job had started before these events. So the
    caller must store these events after the call, in the same transaction.
    """

    def began_before(job: int) -> bool:
        kinds = "SELECT 1 FROM events WHERE job=? AND kind IN ('started', 'done', 'failed') LIMIT 1"
        return connection.execute(kinds, (job,)).fetchone() is not None

    found = counted(events, jobs, began_before)
    if found:
        connection.executemany(
            "INSERT INTO tallies VALUES (?,?,?) ON CONFLICT (name, label) DO UPDATE SET n=n+excluded.n",
            [(name, label, number) for (name, label), number in found.items()],
        )


def tallies(connection: sqlite3.Connection) -> dict[str, dict[str, float]]:
    """Return all counters: name → label → number. The result is empty if an older gpujob made the store."""
    try:
        rows = connection.execute("SELECT name, label, n FROM tallies").fetchall()
    except sqlite3.OperationalError:
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, label, number in rows:
        found.setdefault(name, {})[label] = number
    return found
