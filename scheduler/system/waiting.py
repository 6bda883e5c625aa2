"""Polls for a condition that no event announces, up to a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(met: Callable[[], bool], limit_s: float, every_s: float = 0.005) -> bool:
    """Call ``met`` every ``every_s`` seconds until it holds, for up to ``limit_s`` seconds; return whether it holds.

    It is called at least once, and once more when the time is over.
    """
    until = time.monotonic() + limit_s
    while not met():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True
