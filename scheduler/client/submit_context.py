"""Resource limits of the submitter, and the output of a command that describes the job (`JobSpec.info`)."""

from __future__ import annotations

import resource

from scheduler.core.errors import SchedulerError

LONGEST_SAID = 64 << 10  # bytes


def limits_here() -> tuple[tuple[int, int, int], ...]:
    """Return the resource limits of this process for JobSpec.limits, as (resource, soft, hard).

    Resources without any limit are left out.
    """
    known = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
    found = ((which, *resource.getrlimit(which)) for which in known)
    return tuple(limit for limit in found if limit[1:] != (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def output_of_shell(command: str) -> str:
    """Return the first 64 KiB that a shell command prints. Raises SchedulerError if /bin/sh cannot be run."""
    import subprocess  # slow to import, and few submissions need it

    try:
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)  # fmt: skip
    except OSError as error:
        raise SchedulerError(f"cannot run /bin/sh: {error.strerror}") from None
    return done.stdout[:LONGEST_SAID].decode("utf-8", "replace").replace("\0", "")
