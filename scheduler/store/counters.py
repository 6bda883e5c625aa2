"""The tallies as rows: what is counted for ever, by name and label (`core/counters.py`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from scheduler.core.counters import counted
from scheduler.core.job import Event, Job


def count(connection: sqlite3.Connection, events: Iterable[Event], jobs: Mapping[int, Job]) -> None:
    """Add what these events count, in the transaction that writes them down, and before they are written."""

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
    """All tallies: name → label → number; none in a store that no scheduler of this version has opened yet."""
    try:
        rows = connection.execute("SELECT name, label, n FROM tallies").fetchall()
    except sqlite3.OperationalError:
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, label, number in rows:
        found.setdefault(name, {})[label] = number
    return found
