"""Readers of job logs. A log may be packed, or larger than memory. A job may truncate or replace its log.

`LogReader` reads forwards and follows a growing log; `LogWindow` reads at any position up to the current end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from scheduler.core.log_names import is_packed
from scheduler.system.packed_log import Unpacker
from scheduler.system.safe_open import plain, plain_or_link

CHUNK = 1 << 18
STEP_BACK = 8 << 20  # bytes that the search for the last lines goes back within one line
MOST_UNPACKED = 256 << 20  # most bytes to unpack of a packed log, always from its start; takes about a second
LONGEST_LINE_SHOWN = 64 << 10  # bytes shown of the end of a line whose start is too far back


class LogReader:
    """An open log that is read forwards. Raises OSError if ``path`` is no plain file or cannot be opened.

    ``unpack``: whether a packed log is unpacked; ``ours``: whether the scheduler has made the file, so that a link at
    ``path`` is an error; ``at``: position in the file, which is the number of bytes read so far.
    """

    def __init__(self, path: str, *, unpack: bool = True, ours: bool = False) -> None:
        self.path, self.at = path, 0
        self._opener, self._fd = plain if ours else plain_or_link, -1
        self._unpacker = Unpacker() if unpack and is_packed(path) else None
        self.open()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the file again after `close`, at the same position. Raises OSError."""
        if self._fd < 0:
            self._fd = self._opener(self.path, os.O_RDONLY)

    def close(self) -> None:
        """Close the descriptor. The position in the log stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def closed(self) -> bool:
        """Whether the descriptor is closed."""
        return self._fd < 0

    @property
    def packed(self) -> bool:
        """Whether this reader unpacks the log."""
        return self._unpacker is not None

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self._fd).st_size

    def new(self, until: int | None = None) -> Iterator[bytes]:
        """Yield the unread part of the log in pieces, up to byte ``until`` of the file (None: up to its end)."""
        while True:
            room = CHUNK if until is None else min(CHUNK, until - self.at)
            data = os.pread(self._fd, room, self.at) if room > 0 else b""
            if not data:
                return
            self.at += len(data)
            if self._unpacker is None:
                yield data
            else:
                yield from self._unpacker.feed(data)

    def is_cut(self) -> bool:
        """Return whether the file was truncated: it is shorter than the part that was already read."""
        return self.size < self.at

    def is_replaced(self) -> bool:
        """Return whether the path now names another file. Raises OSError if the path names no file."""
        there, held = os.stat(self.path), os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino)

    def restart(self) -> None:
        """Go back to the start of the log."""
        self.at = 0
        self._unpacker = Unpacker() if self._unpacker is not None else None

    def trouble(self) -> str:
        """Return why a packed log cannot be shown completely; empty if there is no such problem.

        The result depends on the part of the log that was read so far. A log that is not packed has no such problem.
        """
        if self._unpacker is None:
            return ""
        if self._unpacker.damaged:
            return "the compressed log is damaged; the part after the damage cannot be shown"
        return (
            "" if self._unpacker.has_end
            else "the compressed log is incomplete: its job still writes to it, or its compression was interrupted"
        )  # fmt: skip

    def to_last_lines(self, most: int, step_back: int = STEP_BACK) -> bool:
        """Go to the start of the last ``most`` lines. Return whether the new position is inside a line.

        The search runs backwards from the end of the log, so its cost does not depend on the size of the log. If a line
        is longer than about ``step_back`` bytes, the search stops inside this line. The log must not be packed.
        """
        end = position = newest = self.size
        found = 0
        while position > 0 and most:
            step = min(CHUNK, position)
            position -= step
            data = os.pread(self._fd, step, position)
            at = len(data)
            if position + step == end and data.endswith(b"\n"):
                at -= 1
            while (at := data.rfind(b"\n", 0, at)) >= 0:
                found, newest = found + 1, position + at
                if found >= most:
                    self.at = position + at + 1
                    return False
            if newest - position >= step_back:
                self.at = position
                return True
        self.at = 0 if most else end
        return False


class LogWindow:
    """A log that can be read at any position. What a job writes after the log was opened is not read.

    ``keep``: how many bytes of the end of a packed log are kept in memory; ``size``: length of the unpacked log in
    bytes; ``cut``: whether a packed log is only read in part, because it unpacks to ``most_unpacked`` bytes or more.
    Raises OSError if ``path`` is no plain file or cannot be read.
    """

    def __init__(self, path: str, *, keep: int, most_unpacked: int = MOST_UNPACKED, ours: bool = False) -> None:
        self._fd = (plain if ours else plain_or_link)(path, os.O_RDONLY)
        try:
            # The end is fixed: otherwise the reading would never finish if a job writes faster than we read.
            self._file_size = os.fstat(self._fd).st_size
            self._packed, self.cut, self.size = is_packed(path), False, self._file_size
            self._end = bytearray()
            if self._packed:
                self._unpack_all(keep, most_unpacked)
            self._whole = self.size
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> LogWindow:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def at_hand(self) -> int:
        """Number of bytes at the end of the log that can be read without unpacking the log again."""
        return len(self._end) if self._packed else self.size

    def _unpack_all(self, keep: int, most: int) -> None:
        self.size = 0
        for data in self._unpacked():
            self.size += len(data)
            self._end += data
            if len(self._end) > 2 * keep:
                del self._end[:-keep]
            if self.size >= most:
                self.cut = True
                return

    def _unpacked(self) -> Iterator[bytes]:
        unpacker, at = Unpacker(), 0
        while at < self._file_size and (data := os.pread(self._fd, CHUNK, at)):
            at += len(data)
            yield from unpacker.feed(data)

    def read(self, at: int, most: int) -> bytes:
        """Return the bytes of the log from position ``at`` on, at most ``most`` bytes. Raises OSError."""
        most = max(0, min(most, self.size - at))
        found = bytearray()
        if not self._packed:
            while len(found) < most and (data := os.pread(self._fd, most - len(found), at + len(found))):
                found += data
            return bytes(found)
        known_from = self._whole - len(self._end)
        if at >= known_from:
            return bytes(self._end[at - known_from :][:most])
        before = 0
        for data in self._unpacked():
            found += data[max(0, at - before) :]
            before += len(data)
            if len(found) >= most or before >= self.size:
                break
        return bytes(found[:most])

    def last_lines(self, most: int, within: int) -> tuple[int, bool]:
        """Return the position where the last ``most`` lines begin, and whether this position is inside a line.

        Only the last ``within`` bytes of the log are searched. If these bytes hold fewer than ``most`` whole lines, the
        position is the beginning of the first whole line in these bytes. If these bytes hold no whole line, the
        position is inside the last line.
        """
        if not most:
            return self.size, False
        first = max(0, self.size - within)
        data = self.read(first, within)
        at = len(data) - data.endswith(b"\n")
        found = 0
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            found += 1
            if found == most:
                return first + at + 1, False
        if not first:
            return 0, False
        begins = data.find(b"\n") + 1
        if 0 < begins < len(data):
            return first + begins, False
        return max(first, self.size - LONGEST_LINE_SHOWN), True  # a single line, of which only the end is shown
