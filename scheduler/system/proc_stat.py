"""When a process started, for those who must be quick and import nothing: a number alone may be another's by now.

`system/processes.py` knows all else of processes; `supervisor.py`, which imports nothing of ours, has its own.
"""

from __future__ import annotations


def ticks_of(pid: int) -> int:
    """The start time in clock ticks since boot of a process that lives; 0 if there is none, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # The name stands in parentheses and may hold anything, also a parenthesis.
            fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])
