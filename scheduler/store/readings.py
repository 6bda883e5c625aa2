"""What the GPUs said last, for those who only look."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.telemetry import Card


@dataclass(frozen=True, slots=True)
class LastReading:
    """What a GPU last said: memory in MiB, load 0 to 1, None where it would not say."""

    at: float
    state: str
    reason: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    own_mib: int
    load: float | None
    temperature_c: int | None


def save_readings(connection: sqlite3.Connection, cards: Iterable[Card], at: float) -> None:
    """Write what the GPUs said last."""
    connection.executemany(
        "INSERT OR REPLACE INTO readings VALUES (?,?,?,?,?,?,?,?,?)",
        [
            (
                card.gpu.index, at, card.state, card.reason,
                card.reading.memory_total_mib if card.reading else None,
                card.reading.memory_used_mib if card.reading else None, card.own_mib,
                card.reading.load if card.reading else None, card.reading.temperature_c if card.reading else None,
            )
            for card in cards
        ],
    )  # fmt: skip


def forget_readings(connection: sqlite3.Connection) -> None:
    """A new daemon knows nothing yet, and perhaps other GPUs."""
    connection.execute("DELETE FROM readings")


def readings(connection: sqlite3.Connection) -> dict[int, LastReading]:
    """What the GPUs said last, by index."""
    return {row[0]: LastReading(*row[1:]) for row in connection.execute("SELECT * FROM readings")}
