"""The last lines of a log, for a quick look."""

from __future__ import annotations

import errno
import os

from scheduler.core.log_names import is_packed
from scheduler.system.log_reader import LogWindow
from scheduler.views.terminal_replay import Folder

LOOKED_AT = 256 << 10  # bytes at the end that are read: half a second of work for one line full of colours
LOOKED_AT_PACKED = 64 << 10
LONGEST_LINE = 2000  # characters


def last_lines(path: str, most: int) -> list[str]:
    """Return the last ``most`` lines of a log as a terminal would show them, without colours. Long lines are cut.

    Raises OSError if the log cannot be read. The error is EFBIG if a packed log unpacks to more than `MOST_UNPACKED`
    bytes (`system/log_reader.py`).
    """
    with LogWindow(path, keep=LOOKED_AT_PACKED) as log:
        if log.cut:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        start, entered = log.last_lines(most, LOOKED_AT_PACKED if is_packed(path) else LOOKED_AT)
        folder = Folder(longest=LONGEST_LINE)
        if entered:
            folder.enter()
        return folder.feed(log.read(start, log.size - start), last=True)[-most:] if most else []
