"""The shape of the daemon's parts."""

from __future__ import annotations

from typing import Protocol

from scheduler.core.observations import Now

NEVER = float("inf")


class Part(Protocol):
    """One task of the daemon. The loop steps it in each pass, and wakes up when it is due."""

    def step(self, now: Now, /) -> None:
        """Do what is due, in milliseconds. Raises StoreTrouble or sqlite3.Error when the store cannot be used."""

    def due(self) -> float:
        """The ``mono`` time of the next step, should nothing happen before; ``NEVER`` if only events matter."""

    def close(self) -> None:
        """End, and let go of what is held. Called once."""
