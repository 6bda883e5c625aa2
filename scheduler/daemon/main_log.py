"""The main log: one record per line, mode 0600, rotated by size."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import stat
import time

from scheduler.core.job_text import harmless
from scheduler.core.log_message import LogMessage

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})  # file systems without locks


class MainLog:
    """The main log. It collects the records of a pass and writes them with one system call.

    It replaces the rotating handler of the standard library. For each record, that handler formats a text, calls `stat`
    and flushes the file. This takes 75 µs per record, and no job can start in this time (docs/performance.md).
    """

    def __init__(self, path: str, most_bytes: int = 10 << 20, kept: int = 5) -> None:
        """Open the log file ``path``. Raises OSError.

        The file is rotated before it exceeds ``most_bytes``. ``kept``: the number of old files that are kept.
        """
        self.path, self.most_bytes, self.kept = path, most_bytes, kept
        self._lines: list[str] = []
        self._fd = -1
        self._lost, self._why, self._torn = 0, "", False
        self._open()

    def _open(self) -> None:
        # O_NONBLOCK: a FIFO at this path must not block the scheduler.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o600)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", self.path)
        if status.st_mode & 0o777 != 0o600:
            os.fchmod(fd, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._inode, self._torn = fd, status.st_size, status.st_ino, False

    def __call__(self, said: LogMessage) -> None:
        """Collect a record, which the next `flush` writes."""
        self._lines.append(_record(said.text, said.level))

    def flush(self) -> None:
        """Write the collected records. Raises OSError, for example on a full disk, and then drops the records.

        The next successful flush also writes how many records were dropped, and why.
        """
        if not self._lines:
            return
        number = len(self._lines)
        if self._lost:
            self._lines.insert(0, _record(f"lost log records: {self._lost} ({self._why})", logging.WARNING))
        data = "".join(self._lines).encode("utf-8", "backslashreplace")
        self._lines.clear()
        try:
            if not self._in_place():
                self._open()
            if self._size + len(data) > self.most_bytes:
                with contextlib.suppress(PermissionError):  # a read-only folder: the log grows
                    self._rotate()
            if self._torn:
                data = b"\n" + data  # end the incomplete line of the last write
            written = os.write(self._fd, data)
            self._size += written
            if written < len(data):
                self._torn = data[:written][-1:] != b"\n"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        except OSError as error:
            self._lost += number
            self._why = str(error.strerror)
            raise
        self._lost, self._torn = 0, False

    def _in_place(self) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        self._size = there.st_size  # somebody may have truncated it
        return there.st_ino == self._inode

    def _rotate(self) -> None:
        """Rename the log files and open a new file, unless another scheduler with the same log is doing this now.

        The files are renamed under a lock. Without it, two schedulers that rotate at the same time would overwrite an
        old log file.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another scheduler is rotating the log; the records go into the file that it renames
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if not self._in_place():  # another scheduler has rotated the log in the meantime
            self._open()
            return
        for number in range(self.kept - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        with contextlib.suppress(FileNotFoundError):  # somebody removed the log: there is nothing to keep
            os.replace(self.path, f"{self.path}.1")
        self._open()

    def close(self) -> None:
        """Write the collected records and close the file."""
        with contextlib.suppress(OSError):
            self.flush()
        os.close(self._fd)


def _record(text: str, level: int) -> str:
    return f"{_stamp(int(time.time()))} {logging.getLevelName(level)} {harmless(text)}\n"


@functools.lru_cache(maxsize=1)
def _stamp(now: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
