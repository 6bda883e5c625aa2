"""Waiting for what is not told: looking again and again, for a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(met: Callable[[], bool], limit_s: float, every_s: float = 0.005) -> bool:
    """Whether the condition was met within the time. It is looked at once at least, and once more at the end."""
    until = time.monotonic() + limit_s
    while not met():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True
