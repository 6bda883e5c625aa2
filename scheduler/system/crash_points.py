"""Crash points: named places where tests make the program kill itself, to show that a crash loses nothing.

``GPUJOB_CRASH_AT=name[:n[:stop]]``: each process kills itself when it reaches the place ``name`` for the n-th time.
With ``stop``, a supervisor or shim does not kill itself but waits there for SIGCONT. The crash points are tested in
`tests/stories/test_crash_points.py`.
"""

from __future__ import annotations

import os
import signal

_wanted, _count, *_ = (*os.environ.get("GPUJOB_CRASH_AT", "").split(":"), "")
_left = int(_count or 1) if _wanted else 0


def crash_point(name: str) -> None:
    """Kill this process with SIGKILL if GPUJOB_CRASH_AT has this name and this is the n-th call with this name."""
    global _left
    if name == _wanted:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
