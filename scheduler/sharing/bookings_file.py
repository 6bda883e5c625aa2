"""One file of bookings: two slots that are written in turn, so that a writer that is killed leaves the document before."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
import time

from scheduler.core.shared_bookings import HEAD, LONGEST, Document, document_from

SLOT = 2 * LONGEST  # distance of the two slots
RESERVED = 64 * 1024  # bytes of each slot that are allocated in advance, so that a full disk cannot stop a booking
STEP_S = 0.002  # between two tries to lock


class Unfinished(ValueError):
    """The file has no document yet."""


@functools.cache
def own_space() -> int:
    """Return the number of the pid namespace of this process; 0 if it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_own(fd: int) -> bool:
    """Return whether a file is a plain file of this user."""
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def space_of(fd: int) -> int:
    """Return the pid namespace of the scheduler that wrote a file; 0 if it is not known."""
    try:
        document = newest(fd, None)[2]
    except ValueError:
        return 0
    return 0 if document is None else document.space


def locked(fd: int) -> bool:
    """Lock a file, which shows processes of other containers that it is in use; return whether that was possible.

    Processes that read the file lock it for a moment, too.
    """
    for _ in range(25):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(STEP_S)
            continue
        return True
    return False


def newest(fd: int, known: bytes | None) -> tuple[bytes, int, Document | None]:
    """Return the first line, the slot and the document of the newest whole slot; no document if the line is ``known``.

    Raises ValueError if no slot has a whole document, and OSError.
    """
    heads, empty = [], True
    for slot in (0, 1):
        first = os.pread(fd, 80, SLOT * slot)
        empty = empty and not first.strip(b"\0")
        line, end, _ = first.partition(b"\n")
        fields = line[len(HEAD) :].split()
        if (
            end
            and line.startswith(HEAD)
            and len(fields) == 3
            and all(one.isdigit() and len(one) < 20 for one in fields)
        ):
            heads.append((int(fields[0]), slot, line, int(fields[1])))
    for _, slot, line, length in sorted(heads, reverse=True):
        if line == known:
            return line, slot, None
        if length > LONGEST:
            continue
        with contextlib.suppress(ValueError):
            return line, slot, document_from(os.pread(fd, len(line) + 1 + length, SLOT * slot))
    if empty:
        raise Unfinished("it has no document")
    raise ValueError("it has no whole document" if not heads else "its document is incomplete or wrong")
