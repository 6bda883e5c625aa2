"""Detects when no waiting job of a draining scheduler (`start --drain`) can start any more."""

from __future__ import annotations

import time

from scheduler.core.admission import PASSING
from scheduler.core.scheduler_state import SchedulerState

HOPE_S = 30.0  # seconds that a drain waits for a GPU that is gone or unhealthy
LASTING = frozenset({"gone", "unhealthy"})
# Other users decide how long these last, but they end.
OF_OTHERS = frozenset({"booked-outside", "fair-share", "keep-free", "no-bookings"})


class Drain:
    """Finds out whether any waiting job can still start.

    The loop calls `is_stuck` between passes, after the state has been updated with all observations.
    """

    def __init__(self) -> None:
        self._hopeless_since: float | None = None

    def is_stuck(self, state: SchedulerState) -> bool:
        """Return whether jobs wait, but no job runs and no waiting job can start without a change from outside."""
        if state.live or state.holdings or not state.waiting() or "backoff" in state.parked.values():
            self._hopeless_since = None
            return False
        codes = {reason.code for reason in state.class_reasons().values()}
        if codes & (PASSING | OF_OTHERS) or any(state.fleet.find(kind) is not None for kind in state.queue.classes()):
            self._hopeless_since = None
            return False
        if not codes & LASTING:
            return True
        now = time.monotonic()  # one bad reading must not end a drain
        self._hopeless_since = self._hopeless_since or now
        return now - self._hopeless_since >= HOPE_S
