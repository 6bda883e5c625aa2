"""The last reading of each GPU in the store, for commands and the web page."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.gpu_admission import GpuAdmission
from scheduler.core.observations import Now

_COLUMNS = (
    "at state reason memory_total memory_used own load temperature read_at foreign_mib reserved power energy".split()
)


@dataclass(frozen=True, slots=True)
class LastReading:
    """The last reading of a GPU. Loads are between 0 and 1. A value that the driver did not report is None.

    ``at``: when the row was written (seconds since 1970); ``read_at``: when the GPU last answered, which may be long
    before ``at``. ``own_mib``: memory of this scheduler's jobs; ``foreign_mib``: memory of foreign processes;
    ``reserved_mib``: all other memory in use. This is the memory of the driver and of a display, and the memory of
    foreign processes that a user accepted (`resume --force`).
    """

    at: float
    state: str
    reason: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    own_mib: int
    load: float | None
    temperature_c: int | None
    read_at: float | None = None
    foreign_mib: int | None = None
    reserved_mib: int | None = None
    power_w: float | None = None
    energy_j: float | None = None


def save_readings(connection: sqlite3.Connection, cards: Iterable[GpuAdmission], now: Now) -> None:
    """Store the last reading of each of these GPUs."""
    connection.executemany(
        f"INSERT OR REPLACE INTO readings (gpu, {', '.join(_COLUMNS)}) VALUES (?{',?' * len(_COLUMNS)})",
        [_row(card, now) for card in cards],
    )


def _row(card: GpuAdmission, now: Now) -> tuple[object, ...]:
    told = card.reading
    read_at = None if card.read_at == -math.inf else now.wall - max(0.0, now.mono - card.read_at)
    if told is None:
        return (card.gpu.index, now.wall, card.state, card.reason, None, None, card.own_mib, None, None, read_at,
                None, None, None, None)  # fmt: skip
    return (
        card.gpu.index, now.wall, card.state, card.reason, told.memory_total_mib, told.memory_used_mib, card.own_mib,
        told.load, told.temperature_c, read_at, None if told.memory_used_mib is None else card.foreign_mib,
        card.reserved_mib, told.power_w, told.energy_j,
    )  # fmt: skip


def forget_readings(connection: sqlite3.Connection) -> None:
    """Delete all readings when a daemon starts, because it may manage other GPUs."""
    connection.execute("DELETE FROM readings")


def readings(connection: sqlite3.Connection) -> dict[int, LastReading]:
    """Return GPU index → last reading of this GPU. Values that a store of an older version lacks are None."""
    return {row[0]: LastReading(*row[1:]) for row in connection.execute("SELECT * FROM readings")}
