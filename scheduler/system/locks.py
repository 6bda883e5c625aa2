"""Locks of the kernel (flock): held by an open file, and given back when its last descriptor is closed, however that comes."""

from __future__ import annotations

import errno
import fcntl
import time

POLL_S = 0.002
_TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EINTR})


def try_lock(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock this file, unless somebody else has. Raises OSError where locks are not known."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def lock_within(fd: int, wait_s: float, poll_s: float = POLL_S) -> bool:
    """Lock this file as soon as it is free, for so long at most. Raises OSError."""
    until = time.monotonic() + wait_s
    while not try_lock(fd):
        if time.monotonic() >= until:
            return False
        time.sleep(poll_s)
    return True


def unlock(fd: int) -> None:
    """Give the lock back."""
    fcntl.flock(fd, fcntl.LOCK_UN)
