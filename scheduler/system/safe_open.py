"""Opens only plain files: what a job has put in the place of one (a FIFO, a device, a link) must not hold us up.

As ``open(path, opener=plain)``. `supervisor.py`, which imports nothing of ours, has its own.
"""

from __future__ import annotations

import errno
import os
import stat


def plain(path: str, flags: int) -> int:
    """A descriptor of the plain file at ``path``, which is no link: of a file of ours. Raises OSError for anything else."""
    return plain_or_link(path, flags | os.O_NOFOLLOW)


def plain_or_link(path: str, flags: int) -> int:
    """The same through links, of a file of people's. Never blocks: some of /proc call themselves plain, and do."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return fd


def tail_of(path: str, most: int) -> bytes:
    """The last bytes of a file of ours. Raises OSError."""
    fd = plain(path, os.O_RDONLY)
    try:
        return os.pread(fd, most, max(0, os.fstat(fd).st_size - most))
    finally:
        os.close(fd)
