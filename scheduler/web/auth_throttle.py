"""Wrong tokens: answered late, counted, and told of in the log as a number, never as what was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONGEST_S = 0.025  # a token cannot be guessed in any time; but a flood of tries is not to be worth the noise
STEP_S = 0.0005
FORGET_S = 60.0
MOST_WAITING = 64
EVERY_S = 10.0


class Guesses:
    """Some numbers, however many guesses there are. ``tell`` takes a sentence for the log."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._recent = 0
        self._last = 0.0
        self._waiting = 0
        self._untold = 0
        self._timer: asyncio.TimerHandle | None = None

    async def wrong(self) -> None:
        """One more: returns when it may be answered. So many wait at once that waiting costs nothing; the others do not."""
        now = time.monotonic()
        self._recent = self._recent + 1 if now - self._last < FORGET_S else 1
        self._last = now
        self._untold += 1
        if self._timer is None:
            self.say()
        if self._waiting >= MOST_WAITING:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(min(LONGEST_S, STEP_S * self._recent))
        finally:
            self._waiting -= 1

    def say(self) -> None:
        """Tell what has not been told; again in `EVERY_S` when there is more by then."""
        self._timer = None
        if self._untold:
            times = "a wrong token was" if self._untold == 1 else f"{self._untold} wrong tokens were"
            self._tell(f"{times} refused")
            self._untold = 0
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self.say)
