"""Waits until this process is in the cgroup of its job, and then executes the command of the job.

A program of its own, which imports nothing of the package: ``in_cgroup.py NAME PROGRAM WORD…``. The scheduler moves the
process into the cgroup as soon as it knows its pid. If that takes too long, the command runs without a cgroup.
"""

import os
import sys
import time

PATIENCE_S = 20.0
LOOK_S = 0.002


def inside(name: str) -> bool:
    """Return whether this process is in a cgroup (v2) with this name."""
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as stream:
        return any(line.startswith("0::") and line.rstrip("\n").endswith(f"/{name}") for line in stream)


def main() -> None:
    """Wait, and execute the command."""
    name, program, words = sys.argv[1], sys.argv[2], sys.argv[2:]
    until = time.monotonic() + PATIENCE_S
    while not inside(name) and time.monotonic() < until:
        time.sleep(LOOK_S)
    if not inside(name):
        print("gpujob: this job has no cgroup of its own, so mem= and cpus= do not limit it", file=sys.stderr)
    try:
        os.execv(program, words)
    except OSError as error:
        print(f"gpujob: cannot start {program}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
