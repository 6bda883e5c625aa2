"""Throttling of wrong tokens: delays the answers, and logs how many tokens were wrong, never the tokens themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONGEST_S = 0.025  # longest delay; it only slows down floods of guesses, as tokens are too long to be guessed
STEP_S = 0.0005
FORGET_S = 60.0
MOST_WAITING = 64
EVERY_S = 10.0


class Guesses:
    """Counts wrong tokens, delays the answers to them, and logs their number. ``tell``: logs a sentence."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._recent = 0
        self._last = 0.0
        self._waiting = 0
        self._untold = 0
        self._timer: asyncio.TimerHandle | None = None

    async def wrong(self) -> None:
        """Count a wrong token, and delay the answer to its request by at most `LONGEST_S` seconds.

        The delay grows with the number of recent wrong tokens. If `MOST_WAITING` answers are already delayed, the
        method returns immediately, so that the delays use few resources.
        """
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
        """Log how many tokens were wrong since the last message, and schedule the next call of this method.

        The next call is `EVERY_S` seconds later. If no token was wrong, nothing is logged and no call is scheduled. The
        method `wrong` then makes the next call, when a wrong token arrives.
        """
        self._timer = None
        if self._untold:
            times = "a wrong token was" if self._untold == 1 else f"{self._untold} wrong tokens were"
            self._tell(f"{times} refused")
            self._untold = 0
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self.say)
