"""A time in which nothing can be recorded: nothing is decided then, and running jobs go on."""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler.core.errors import DECIDE_ANEW, DEFECT, StoreTrouble
from scheduler.core.observations import Now
from scheduler.daemon.context import Context
from scheduler.daemon.parts import NEVER

LONGEST_BREAK_S = 8.0
ANEW_S = 0.01  # the store has changed under a decision: it is made again at once
REFUSED_AFTER = 3  # tries in vain, after which open requests are refused


class StoreOutage:
    """Begins with a pass that failed. ``retry`` opens the store again and may raise, which prolongs the outage."""

    def __init__(self, context: Context, retry: Callable[[], None]) -> None:
        self._context, self._retry = context, retry
        self._until = 0.0
        self._tries = 0
        self.error: StoreTrouble | None = None  # what the user was told

    @property
    def lasts(self) -> bool:
        """Whether the last pass failed, and none was tried since."""
        return bool(self._until)

    @property
    def refuses(self) -> bool:
        """Whether it lasts so long that open requests are to be refused."""
        return self._tries >= REFUSED_AFTER

    def begin(self, error: StoreTrouble) -> None:
        """A pass failed: wait before the next try, longer each time. An error is told once."""
        self._tries += 1
        anew = error.code == DECIDE_ANEW
        self._until = time.monotonic() + (ANEW_S if anew else min(LONGEST_BREAK_S, 2.0 ** (self._tries - 1)))
        if not anew and str(error) != str(self.error or ""):
            self.error = error
            self._context.say(f"{error}; running jobs go on, nothing is started until then", 40, kind="store")

    def step(self, now: Now) -> None:
        """Try again if it is time. Raises what ``retry`` raises."""
        if self._until and now.mono >= self._until:
            self._retry()
            self._until = 0.0

    def over(self) -> None:
        """A pass was recorded."""
        self._tries = 0
        if self.error is not None:
            text = "all goes on as before" if self.error.code == DEFECT else "the store can be used again"
            self._context.say(text, 20, kind="store")
        self.error = None

    def due(self) -> float:
        """When to try again (``mono``)."""
        return self._until or NEVER

    def close(self) -> None:
        """Nothing is held."""
