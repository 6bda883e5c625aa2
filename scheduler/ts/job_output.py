"""-t and -c: what a job has written, and what it goes on to write, until it ends."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from typing import TYPE_CHECKING

from scheduler.core.job import Job
from scheduler.core.log_names import is_packed
from scheduler.system.safe_open import plain_or_link
from scheduler.ts.spooler import ERROR, RequestError, code_of
from scheduler.views.packed_log import Unpacker
from scheduler.views.terminal_replay import CHUNK, seek_last_lines

if TYPE_CHECKING:
    from scheduler.ts.spooler import Spooler

EVERY_S = 0.05


def follow(spooler: Spooler, job: Job, most: int | None) -> int:
    """Print it as it is, only the last ``most`` lines of what is there; the job's exit code. Raises RequestError."""
    try:
        fd = plain_or_link(job.log, os.O_RDONLY)
    except OSError as error:
        raise RequestError(f"{job.log}: {error.strerror}") from None
    with contextlib.closing(os.fdopen(fd, "rb", buffering=0)):
        unpack = Unpacker() if is_packed(job.log) else None
        if most is not None and unpack is None:
            seek_last_lines(fd, most, sys.maxsize)
        skipping = most is not None and unpack is not None
        kept = b""
        while True:
            now = spooler.under_way(job.id)
            over = now is None or now.state.ended
            while data := os.read(fd, CHUNK):
                for piece in unpack.feed(data) if unpack is not None else (data,):
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
            if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size < os.lseek(fd, 0, os.SEEK_CUR):
                os.lseek(fd, 0, os.SEEK_SET)  # it was cut


def _last_lines(data: bytes, most: int) -> bytes:
    return b"".join(data.splitlines(keepends=True)[-most:])


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
