"""The last lines of a log, for a glance."""

from __future__ import annotations

import errno
import os

from scheduler.core.log_names import is_packed
from scheduler.system.log_reader import LogWindow
from scheduler.views.terminal_replay import Folder

LOOKED_AT = 256 << 10  # bytes at the end: to fold a line of colours as long as this takes half a second
LOOKED_AT_PACKED = 64 << 10
LONGEST_LINE = 2000  # characters


def last_lines(path: str, most: int) -> list[str]:
    """The last lines of a log as a terminal would show them, without colours and not too long.

    Raises OSError; also for a packed one of more than `MOST_UNPACKED` bytes, which is too large for a glance.
    """
    with LogWindow(path, keep=LOOKED_AT_PACKED) as log:
        if log.cut:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        start, entered = log.last_lines(most, LOOKED_AT_PACKED if is_packed(path) else LOOKED_AT)
        folder = Folder(longest=LONGEST_LINE)
        if entered:
            folder.enter()
        return folder.feed(log.read(start, log.size - start), last=True)[-most:] if most else []
