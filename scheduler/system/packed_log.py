"""Unpacks packed (gzip) logs piece by piece and in bounded memory. The logs may be incomplete or damaged."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

AT_ONCE = 1 << 20  # unpacked bytes in one piece: a few packed bytes may unpack to a gigabyte
STEP = 512  # packed bytes in one step; intact data before damage in the same step is lost
_MAGIC = b"\x1f\x8b"


class Unpacker:
    """Unpacks one log. The caller passes the bytes of the log piece by piece to `feed`.

    Data that are not packed are returned unchanged. If a job could not be started, its log may hold only the reason, as
    text that is not packed.
    """

    def __init__(self) -> None:
        self._head = b""
        self._plain: bool | None = None  # None: unknown until two bytes have been fed
        self._machine = _machine()
        self.damaged = False  # the rest of the log cannot be unpacked

    @property
    def has_end(self) -> bool:
        """Whether the data passed so far are complete: the last gzip stream has ended, or the data are not packed."""
        return self._plain is not False or self._machine.eof

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the unpacked contents of ``data`` in pieces. The contents after a damaged place are not yielded."""
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
                    return  # padding after the last stream
                self._machine = _machine()  # several streams one after the other form one log
            try:
                piece = self._machine.decompress(data, AT_ONCE)
            except zlib.error:
                self.damaged = True
                return
            data = self._machine.unused_data if self._machine.eof else self._machine.unconsumed_tail
            yield piece


def _machine() -> zlib._Decompress:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)
