"""The interface of the daemon's parts."""

from __future__ import annotations

from typing import Protocol

from scheduler.core.observations import Now

NEVER = float("inf")


class Part(Protocol):
    """A background task of the daemon, such as the journal. The loop calls `step` after a pass and wakes at `due`."""

    def step(self, now: Now, /) -> None:
        """Do what is due, within milliseconds. Raises StoreTrouble or sqlite3.Error if the store cannot be used."""

    def due(self) -> float:
        """Return when the next step is due even without an event (monotonic seconds); ``NEVER`` if only events matter."""

    def close(self) -> None:
        """End the task and release its resources. The daemon calls it once."""
