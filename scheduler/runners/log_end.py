"""Finds known causes of failure at the end of a job's log."""

from __future__ import annotations

import os

from scheduler.core.failure_patterns import failure_in, warning_in
from scheduler.core.job import Failure, Job
from scheduler.core.log_names import errors_of
from scheduler.system.log_reader import LogWindow

TAIL_BYTES = 16 * 1024
MOST_UNPACKED = 8 << 20  # bytes; a packed log that unpacks to more is not read, as that would take too long


def log_finding_of(job: Job, exit_code: int | None) -> Failure | None:
    """Return the known cause of the failure that the log shows, or None.

    After exit code 0, the log is searched only for signs that GPU memory ran out.
    """
    if not job.log:
        return None
    look = warning_in if exit_code == 0 else failure_in
    return look(_end_of(job), job.need)


def _end_of(job: Job) -> str:
    try:
        path = errors_of(job.log) if job.spec.stderr_apart else job.log
        if not os.stat(path, follow_symlinks=False).st_size:
            return ""  # most jobs that end within milliseconds print nothing
        with LogWindow(path, keep=TAIL_BYTES, most_unpacked=MOST_UNPACKED, ours=True) as log:
            end = b"" if log.cut else log.read(max(0, log.size - TAIL_BYTES), TAIL_BYTES)
        return end.decode("utf-8", "replace")
    except OSError:
        return ""  # without a log the cause is unknown
