"""What the end of a job's log tells about how the job ended."""

from __future__ import annotations

from scheduler.core.failure_patterns import failure_in, warning_in
from scheduler.core.job import Failure, Job
from scheduler.core.log_names import errors_of
from scheduler.system.log_reader import LogWindow

TAIL_BYTES = 16 * 1024
MOST_UNPACKED = 8 << 20  # of a packed log: more would hold up whoever asks


def log_finding_of(job: Job, exit_code: int | None) -> Failure | None:
    """The cause that the log names, or of a job that ended with 0 what it should not have said; None if there is neither."""
    if not job.log:
        return None
    look = warning_in if exit_code == 0 else failure_in
    return look(_end_of(job), job.need)


def _end_of(job: Job) -> str:
    try:
        path = errors_of(job.log) if job.spec.stderr_apart else job.log
        with LogWindow(path, keep=TAIL_BYTES, most_unpacked=MOST_UNPACKED, ours=True) as log:
            end = b"" if log.cut else log.read(max(0, log.size - TAIL_BYTES), TAIL_BYTES)
        return end.decode("utf-8", "replace")
    except OSError:
        return ""  # no log, no cause: the exit code stands all the same
