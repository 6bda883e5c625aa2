"""Opens only plain files. A FIFO, device or link that a job put in a file's place cannot block the scheduler.

Usage: ``open(path, opener=plain)``. `supervisor.py` has its own copy of `plain`, because it must not import anything
of the program.
"""

from __future__ import annotations

import errno
import os
import stat


def plain(path: str, flags: int) -> int:
    """Open a plain file that is not a link; return its descriptor. For the scheduler's own files. Raises OSError."""
    return plain_or_link(path, flags | os.O_NOFOLLOW)


def plain_or_link(path: str, flags: int) -> int:
    """Open a plain file, or a link to a plain file, and return its descriptor. For users' files. Raises OSError.

    The file is opened in non-blocking mode, so reads do not block either. Otherwise they could block on a file in /proc
    that counts as a plain file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def tail_of(path: str, most: int) -> bytes:
    """Return the last ``most`` bytes of a plain file that is not a link. Raises OSError."""
    fd = plain(path, os.O_RDONLY)
    try:
        return os.pread(fd, most, max(0, os.fstat(fd).st_size - most))
    finally:
        os.close(fd)
