"""What stands in a packed log, as it is read: piece by piece, in bounded memory, whatever is wrong with it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

AT_ONCE = 1 << 20  # of what is unpacked: a few bytes may stand for a gigabyte
STEP = 512  # so much is lost before a damage
_MAGIC = b"\x1f\x8b"


class Unpacker:
    """Takes the bytes of a log as they come and gives what they stand for.

    A log that does not begin as a packed one is given as it is: of a job that could not be started it may hold the reason alone.
    """

    def __init__(self) -> None:
        self._head = b""
        self._plain: bool | None = None  # not known before two bytes are there
        self._machine = _machine()
        self.damaged = False  # what stands behind cannot be had

    @property
    def has_end(self) -> bool:
        """Whether what was fed is whole."""
        return self._plain is not False or self._machine.eof

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What is whole with these bytes; behind damage nothing."""
        if self._plain is None:
            self._head += data
            if len(self._head) < len(_MAGIC):
                return
            data, self._plain = self._head, not self._head.startswith(_MAGIC)
        if self._plain:
            yield data
            return
        for at in range(0, len(data), STEP):
            yield from self._unpacked(data[at : at + STEP])

    def _unpacked(self, data: bytes) -> Iterator[bytes]:
        while data and not self.damaged:
            if self._machine.eof:
                if not data.startswith(_MAGIC[:1]):
                    return  # padding
                self._machine = _machine()  # several, one behind the other, are one
            try:
                piece = self._machine.decompress(data, AT_ONCE)
            except zlib.error:
                self.damaged = True
                return
            data = self._machine.unused_data if self._machine.eof else self._machine.unconsumed_tail
            yield piece


def _machine() -> zlib._Decompress:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)
