"""The faults of GPUs in the store: which GPUs get no new job until a user resumes them or the machine is booted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from scheduler.core.gpu_faults import GpuFault

_COLUMNS = "uuid, what, at, last_at, memory_errors, active"


def faults(connection: sqlite3.Connection, boot: str) -> dict[str, GpuFault]:
    """Return UUID → fault, without the faults of other boots. ``boot``: id of the current boot."""
    found = connection.execute(f"SELECT {_COLUMNS} FROM gpu_faults WHERE boot=?", (boot,))
    return {row[0]: GpuFault(row[0], row[1], row[2], row[3], row[4], bool(row[5])) for row in found}


def save_faults(connection: sqlite3.Connection, found: Iterable[GpuFault], boot: str) -> None:
    """Store these faults in place of the earlier ones. ``boot``: id of the current boot."""
    connection.execute("DELETE FROM gpu_faults")
    connection.executemany(
        f"INSERT INTO gpu_faults ({_COLUMNS}, boot) VALUES (?,?,?,?,?,?,?)",
        [(one.uuid, one.what, one.at, one.last_at, one.memory_errors, int(one.active), boot) for one in found],
    )
