"""A connection between the scheduler of all users and an agent: messages in JSON through a socket that never blocks.

A message is sent in packets of at most `PIECE` bytes. The first byte of a packet tells whether more packets follow.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from scheduler.system.typed_json import from_json, to_json

PIECE = 60_000  # bytes in a packet: below the kernel's limit for a socket buffer
LONGEST = 32 << 20  # bytes of a message
MOST_UNSENT = 64 << 20  # bytes that the other end has not read
MORE, LAST = b"+", b"."


class Closed(Exception):
    """The other end is gone, does not read, or has sent something that is no message."""


class Channel:
    """One end of a connection. ``connection``: a connected SOCK_SEQPACKET socket.

    ``longest``, ``most_parts``: bytes, arrays and objects of a message to us.
    """

    def __init__(self, connection: socket.socket, longest: int = LONGEST, most_parts: int = LONGEST) -> None:
        self._longest, self._most_parts = longest, most_parts
        self._socket = connection
        self._socket.setblocking(False)
        self._outbox: deque[bytes] = deque()
        self._unsent = 0
        self._parts: list[bytes] = []
        self._received = 0

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """True if packets wait until the other end has read."""
        return bool(self._outbox)

    def send(self, message: Any) -> None:
        """Send a message, now or with a later `flush`. Raises Closed."""
        data = to_json(message)
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            self._outbox.append((MORE if at + PIECE < len(data) else LAST) + piece)
            self._unsent += len(piece) + 1
        if self._unsent > MOST_UNSENT:
            raise Closed("the other end does not read")
        self.flush()

    def flush(self) -> None:
        """Send the packets that wait. Raises Closed."""
        while self._outbox:
            try:
                self._socket.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed(str(error.strerror)) from None
            self._unsent -= len(self._outbox.popleft())

    def receive(self, most: int = 256) -> list[Any]:
        """Return the messages that have arrived, from at most ``most`` packets. Raises Closed."""
        found: list[Any] = []
        for _ in range(most):
            try:
                packet = self._socket.recv(PIECE + 2)
            except BlockingIOError:
                return found
            except OSError as error:
                raise Closed(str(error.strerror)) from None
            if not packet:
                if found:
                    return found  # the next call reports the end
                raise Closed("it has ended")
            self._received += len(packet)
            if packet[:1] not in (MORE, LAST) or self._received > self._longest:
                raise Closed("it sent something that is no message")
            self._parts.append(packet[1:])
            if packet[:1] == LAST:
                data = b"".join(self._parts)
                self._parts.clear()
                self._received = 0
                if data.count(b"[") + data.count(b"{") > self._most_parts:
                    raise Closed("it sent a message with very many parts")
                try:
                    found.append(from_json(data))
                except ValueError:
                    raise Closed("it sent something that is no message") from None
        return found

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
