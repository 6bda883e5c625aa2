"""Reads the kernel's log (/dev/kmsg) where this process may: as root, or with dmesg_restrict=0."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence

PATH = "/dev/kmsg"
MOST_BYTES = 4 << 20  # of one `read`; the kernel keeps between 128 KiB and a few MiB
LIMIT_S = 0.05  # of CPU time: a read never sleeps, and on a busy machine this process may have to wait for its turn
LONGEST_RECORD = 8192  # the kernel's own limit; with a smaller buffer a read fails (EINVAL)
MOST_ERRORS = 16
LONGEST_TEXT = 1000
FACILITY = 8  # a priority below it is of the kernel itself; /dev/kmsg also accepts records of root's programs
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the number is fixed (PROC_PID_INIT_INO)


def shows_pids() -> bool:
    """Return whether the pids in the kernel's log are those that this process sees: it is in no container with own pids."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return False


class KernelLog:
    """The kernel's log from its oldest record on. It stays open, so each record is read once, however many jobs end."""

    def __init__(self, path: str = PATH) -> None:
        self.path = path
        self._fd = -1
        self._open()

    def _open(self) -> bool:
        """Open the log if it is not open; return whether it is."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        return self._fd >= 0

    def read(
        self, words: Sequence[bytes], most_bytes: int = MOST_BYTES, limit_s: float = LIMIT_S
    ) -> list[tuple[float, str]] | None:
        """Return the new records of the kernel that have one of ``words``, as (seconds since boot, text).

        None: the log cannot be read. At ``most_bytes`` or after ``limit_s`` seconds of CPU time, the rest is left to the next call.
        """
        if not self._open():
            return None
        found: list[tuple[float, str]] = []
        size = errors = 0
        until = time.thread_time() + limit_s
        while size < most_bytes and errors < MOST_ERRORS and time.thread_time() < until:
            try:
                record = os.read(self._fd, LONGEST_RECORD)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EINVAL, errno.EINTR):
                    break  # EAGAIN: there are no more
                errors += (
                    1  # EPIPE: it was overwritten meanwhile; EINVAL: it is too long; a next read gets the next one
                )
                continue
            if not record:
                break
            size += len(record)
            found += _parsed(record, words)
        return found

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _parsed(record: bytes, words: Sequence[bytes]) -> list[tuple[float, str]]:
    """Return the time and text of a record "priority,number,microseconds,flags…;text"; empty if it has no such word."""
    if not any(word in record for word in words):
        return []
    head, _, text = record.partition(b";")
    fields = head.split(b",")
    if len(fields) < 3 or not (fields[0].isdigit() and fields[2].isdigit()) or int(fields[0]) >= FACILITY:
        return []
    line = text.partition(b"\n")[0][:LONGEST_TEXT]  # further lines have the kernel's own keys, such as DEVICE=
    if not any(word in line for word in words):
        return []
    return [(int(fields[2]) / 1e6, line.decode("utf-8", "replace"))]
