"""Actions -t and -c of `ts`: print the existing output of a job, then its new output until the job ends."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from scheduler.core.job import Job
from scheduler.system.forked_command import need_own_process
from scheduler.system.log_reader import LogReader
from scheduler.ts.spooler import ERROR, RequestError, code_of

if TYPE_CHECKING:
    from scheduler.ts.spooler import Spooler

EVERY_S = 0.05


def follow(spooler: Spooler, job: Job, most: int | None) -> int:
    """Print the bytes of a job's output until the job ends, and return the job's exit code. Raises RequestError.

    ``most``: number of existing lines to print, counted from the end of the output; None: all lines.
    """
    if not job.state.ended:
        need_own_process()
    try:
        reader = LogReader(job.log)
    except OSError as error:
        raise RequestError(f"{job.log}: {error.strerror}") from None
    with reader as log:
        skipping = most is not None and log.packed
        if most is not None and not skipping:
            log.to_last_lines(most, sys.maxsize)
        kept = b""
        while True:
            now = spooler.current_state(job.id)
            over = now is None or now.state.ended
            if log.is_cut():
                log.restart()
            for piece in log.new():
                if skipping:
                    kept = _last_lines(kept + piece, most or 0)
                else:
                    _write(piece)
            if skipping:
                _write(kept)
                skipping = False
            if over:
                return code_of(now) if now is not None else ERROR
            time.sleep(EVERY_S)


def _last_lines(data: bytes, most: int) -> bytes:
    return b"".join(data.splitlines(keepends=True)[-most:])


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
