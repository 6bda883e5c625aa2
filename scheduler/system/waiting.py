"""Waits for a condition about which there is no event: checks the condition repeatedly, up to a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(met: Callable[[], bool], limit_s: float, every_s: float = 0.005) -> bool:
    """Call ``met`` every ``every_s`` seconds until it returns True or ``limit_s`` seconds have passed.

    Return whether ``met`` returned True. ``met`` is called at least once, and a last time after the limit.
    """
    until = time.monotonic() + limit_s
    while not met():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True
