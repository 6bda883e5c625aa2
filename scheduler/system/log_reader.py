"""Reading the log of a job: it may be packed, cut, replaced, a FIFO in its place, or larger than any memory.

`LogReader` reads forwards and goes on as the log grows; `LogWindow` reads at any place what is there now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from scheduler.core.log_names import is_packed
from scheduler.system.packed_log import Unpacker
from scheduler.system.safe_open import plain, plain_or_link

CHUNK = 1 << 18
STEP_BACK = 8 << 20  # the last lines are looked for no further back than this within one line
MOST_UNPACKED = 256 << 20  # a packed log is unpacked from its beginning, and no further than this: a second
LONGEST_LINE_SHOWN = 64 << 10  # of a line without a beginning in sight


class LogReader:
    """An open log, read from a place on. ``unpack``: give a packed one as what it stands for; ``ours``: follow no link.

    Raises OSError where no plain file can be opened.
    """

    def __init__(self, path: str, *, unpack: bool = True, ours: bool = False) -> None:
        self.path, self.at = path, 0  # bytes of the file that were read
        self._opener, self._fd = plain if ours else plain_or_link, -1
        self._unpacker = Unpacker() if unpack and is_packed(path) else None
        self.open()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the file, if it was closed meanwhile; the place stays. Raises OSError."""
        if self._fd < 0:
            self._fd = self._opener(self.path, os.O_RDONLY)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def closed(self) -> bool:
        """Whether `close` was called last."""
        return self._fd < 0

    @property
    def packed(self) -> bool:
        """Whether it is unpacked as it is read."""
        return self._unpacker is not None

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._fd).st_size

    def new(self, until: int | None = None) -> Iterator[bytes]:
        """What was not read yet, piece by piece. ``until``: up to this byte of the file, else up to its end."""
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
        """Whether the file is shorter than what was read of it."""
        return self.size < self.at

    def is_replaced(self) -> bool:
        """Whether another file stands at the path now. Raises OSError where none does."""
        there, held = os.stat(self.path), os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino)

    def restart(self) -> None:
        """Read from the beginning again."""
        self.at = 0
        self._unpacker = Unpacker() if self._unpacker is not None else None

    def trouble(self) -> str:
        """Why a packed log is not shown whole, so far as it was read; empty if it is."""
        if self._unpacker is None:
            return ""
        if self._unpacker.damaged:
            return "the packed log is damaged: what stands behind the damage cannot be shown"
        return (
            "" if self._unpacker.has_end
            else "the packed log has no end: its job still writes, or what packed it was killed"
        )  # fmt: skip

    def to_last_lines(self, most: int, step_back: int = STEP_BACK) -> bool:
        """Go to where the last ``most`` lines begin; True: that is within a line, which is too long to be read whole.

        Of a log that is not unpacked. Looks from the end: a log of many gigabytes costs no more than its last lines.
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
    """A log as it is now, read at any place. ``keep``: so many bytes at the end of a packed one are kept at hand.

    ``size``: bytes in it, unpacked; ``cut``: it is packed and longer than ``most_unpacked``, and ends there. Raises OSError.
    """

    def __init__(self, path: str, *, keep: int, most_unpacked: int = MOST_UNPACKED, ours: bool = False) -> None:
        self._fd = (plain if ours else plain_or_link)(path, os.O_RDONLY)
        try:
            # Taken once: a job that writes faster than we read must not keep us for ever.
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
        """How many bytes at the end are read without unpacking it again."""
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
        """Up to so many bytes from ``at`` on, and none behind ``size``. Raises OSError."""
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
        """Where the last ``most`` lines begin, as far as they stand in the last ``within`` bytes; and whether that is within a line."""
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
        return max(first, self.size - LONGEST_LINE_SHOWN), True  # one line, of which only the end can be shown
