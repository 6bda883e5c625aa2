"""What the end of a job's log tells about how the job ended."""

from __future__ import annotations

import zlib

from scheduler.core.failure_patterns import failure_in, warning_in
from scheduler.core.job import Failure, Job
from scheduler.core.log_names import errors_of, is_packed
from scheduler.system.safe_open import tail_of

TAIL_BYTES = 16 * 1024
MOST_PACKED, MOST_UNPACKED = 1 << 20, 8 << 20  # of a packed log: more would hold up whoever asks


def log_finding_of(job: Job, exit_code: int | None) -> Failure | None:
    """The cause that the log names, or of a job that ended with 0 what it should not have said; None if there is neither."""
    if not job.log:
        return None
    look = warning_in if exit_code == 0 else failure_in
    return look(_end_of(job), job.need)


def _end_of(job: Job) -> str:
    try:
        if job.spec.stderr_apart:
            end = tail_of(errors_of(job.log), TAIL_BYTES)
        elif is_packed(job.log):
            unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
            end = unpack.decompress(tail_of(job.log, MOST_PACKED), MOST_UNPACKED)
            end = b"" if unpack.unconsumed_tail else end[-TAIL_BYTES:]
        else:
            end = tail_of(job.log, TAIL_BYTES)
        return end.decode("utf-8", "replace")
    except (OSError, zlib.error):  # or too large to be unpacked from its beginning
        return ""  # no log, no cause: the exit code stands all the same
