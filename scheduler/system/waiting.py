"""Polling for a condition that no event announces, up to a limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(met: Callable[[], bool], limit_s: float, every_s: float = 0.005) -> bool:
    """Poll ``met`` every so many seconds; False if it does not hold within the limit. It is called at least once, and once more at the end."""
    until = time.monotonic() + limit_s
    while not met():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True
