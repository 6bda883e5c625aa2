"""What a submitter hands on to his job beside folder and environment: his limits, and what is to be remembered."""

from __future__ import annotations

import resource

from scheduler.core.errors import SchedulerError

LONGEST_SAID = 64 << 10


def limits_here() -> tuple[tuple[int, int, int], ...]:
    """This process's limits, for JobSpec; those that are none are left out."""
    known = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
    found = ((which, *resource.getrlimit(which)) for which in known)
    return tuple(limit for limit in found if limit[1:] != (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def said_by(command: str) -> str:
    """What this shell text prints, stdout and stderr. Raises SchedulerError when no shell can be had."""
    import subprocess  # few ask for it, and it costs those who do not

    try:
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)  # fmt: skip
    except OSError as error:
        raise SchedulerError(f"/bin/sh cannot be run: {error.strerror}") from None
    return done.stdout[:LONGEST_SAID].decode("utf-8", "replace").replace("\0", "")
