"""The last lines of a log, for a quick look."""

from __future__ import annotations

import errno
import os

from scheduler.core.job import Job
from scheduler.core.log_names import is_packed, stderr_log
from scheduler.core.secrets import without_secrets
from scheduler.system.log_reader import LogWindow
from scheduler.views.terminal_replay import Folder

LOOKED_AT = 256 << 10  # bytes at the end that are read: half a second of work for one line full of colours
LOOKED_AT_PACKED = 64 << 10
LONGEST_LINE = 2000  # characters
MOST_OF_A_FAILURE = 5  # lines of the log of a job that did not succeed


def last_lines(path: str, most: int) -> list[str]:
    """Return the last ``most`` lines of a log as a terminal would show them, without colours. Long lines are cut.

    Raises OSError if the log cannot be read. The error is EFBIG if a packed log unpacks to more than `MOST_UNPACKED`
    bytes (`system/log_reader.py`).
    """
    with LogWindow(path, keep=LOOKED_AT_PACKED) as log:
        if log.cut:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        start, entered = log.last_lines(most, LOOKED_AT_PACKED if is_packed(path) else LOOKED_AT)
        folder = Folder(longest=LONGEST_LINE)
        if entered:
            folder.enter()
        return folder.feed(log.read(start, log.size - start), last=True)[-most:] if most else []


def failed_log(job: Job) -> str:
    """Return the path of the job's stderr file. If this file is missing or empty, return the path of the job's log."""
    errors = stderr_log(job)
    return errors if errors and os.path.exists(errors) and os.path.getsize(errors) else job.log


def lines_of_a_failure(job: Job) -> list[str]:
    """Return the last lines of the log of a job that did not succeed, without secrets.

    Return an empty list for other jobs, and for a job without a readable log.
    """
    if not job.state.ended or job.succeeded or not job.log:
        return []
    try:
        return [without_secrets(line) for line in last_lines(failed_log(job), MOST_OF_A_FAILURE)]
    except OSError:
        return []
