"""File locks of the kernel (flock).

The kernel releases a lock when the last descriptor of the locked file is closed, also after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import time

POLL_S = 0.002
_TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EINTR})


def try_lock(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock a file. Return False if another process has the lock. Raises OSError if the file system has no locks.

    ``how``: LOCK_EX for an exclusive lock, LOCK_SH for a shared lock.
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def lock_within(fd: int, wait_s: float, poll_s: float = POLL_S) -> bool:
    """Wait up to ``wait_s`` seconds for the lock of a file. Return whether this process now has the lock.

    Raises OSError if the file system has no locks.
    """
    until = time.monotonic() + wait_s
    while not try_lock(fd):
        if time.monotonic() >= until:
            return False
        time.sleep(poll_s)
    return True


def unlock(fd: int) -> None:
    """Release the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)
