"""Named places where a test may have the program killed, to show that nothing is lost there.

``GPUJOB_CRASH_AT=name[:n[:stop]]``: at the n-th pass of each process; ``stop``: a supervisor or shim waits there for SIGCONT instead. Each name has its test (`tests/stories/test_crash_points.py`).
"""

from __future__ import annotations

import os
import signal

_wanted, _count, *_ = (*os.environ.get("GPUJOB_CRASH_AT", "").split(":"), "")
_left = int(_count or 1) if _wanted else 0


def crash_point(name: str) -> None:
    """Kill this very process (SIGKILL, nothing is tidied up), if that is what the test asked for."""
    global _left
    if name == _wanted:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
