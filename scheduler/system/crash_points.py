"""Crash points: named places where a test has the program kill itself, to show that nothing is lost.

``GPUJOB_CRASH_AT=name[:n[:stop]]``: each process is killed when it passes the place for the n-th time. ``stop``: a
supervisor or shim waits there for SIGCONT instead. Each name has its test (`tests/stories/test_crash_points.py`).
"""

from __future__ import annotations

import os
import signal

_wanted, _count, *_ = (*os.environ.get("GPUJOB_CRASH_AT", "").split(":"), "")
_left = int(_count or 1) if _wanted else 0


def crash_point(name: str) -> None:
    """Kill this process with SIGKILL, without any cleanup, if GPUJOB_CRASH_AT names this place."""
    global _left
    if name == _wanted:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
