"""Finds the cause of failure of an attempt, from the end of its log and from how it ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from scheduler.core.endings import ended_by_request, reached_time_limit
from scheduler.core.failure_classes import classify, warning_in
from scheduler.core.failure_clues import last_error
from scheduler.core.failure_signs import INTERRUPTED, KILLED
from scheduler.core.job import Failure, Job
from scheduler.core.log_names import errors_of
from scheduler.core.own_classes import OwnClass
from scheduler.system.log_reader import LogWindow

TAIL_BYTES = 16 * 1024
MOST_UNPACKED = 8 << 20  # bytes; a packed log that unpacks to more is not read, as that would take too long


def log_finding_of(job: Job, exit_code: int | None, signal: int | None, own: Sequence[OwnClass] = ()) -> Failure | None:
    """Return the cause of the failure of an attempt, or None. ``job``: as it was when its command ended.

    After exit code 0, the log is searched only for signs that GPU memory ran out. ``own``: the user's classes.
    """
    tail = _end_of(job)
    if exit_code == 0 and not reached_time_limit(job):
        return warning_in(tail, job.need)
    found = classify(tail, job.need, exit_code, signal, timed_out=reached_time_limit(job), own=own)
    if found is not None and found.kind in (INTERRUPTED, KILLED) and ended_by_request(job):
        return None  # the signal came from the scheduler
    error = last_error(tail) if found is not None else ""
    return replace(found, error=error) if found is not None and error and error != found.line else found


def _end_of(job: Job) -> str:
    if not job.log:
        return ""
    try:
        path = errors_of(job.log) if job.spec.stderr_apart else job.log
        if not os.stat(path, follow_symlinks=False).st_size:
            return ""  # most jobs that end within milliseconds print nothing
        with LogWindow(path, keep=TAIL_BYTES, most_unpacked=MOST_UNPACKED, ours=True) as log:
            end = b"" if log.cut else log.read(max(0, log.size - TAIL_BYTES), TAIL_BYTES)
        return end.decode("utf-8", "replace")
    except OSError:
        return ""  # without a log the cause is unknown
