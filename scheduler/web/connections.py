"""HTTP connections: uvicorn's protocol with a limit on their number, and time limits against slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import sys
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from scheduler.web.middleware import PASSED, headers_of

MOST_OPEN = 1000  # connections
HEAD_S = 10.0  # from connecting, or from the first byte of a further request, to the end of the headers
KEEP_ALIVE_S = 15
READER_S = 30.0  # a connection is aborted if the client does not read its answer for this time
LINGER_S = 3.0  # for reading and dropping the rest of a request after an early answer: a reset could destroy the answer
MOST_LINGER = 64 << 20  # bytes that are dropped at most
FLUSH_S = 10.0  # for sending the rest of an answer before a connection is closed


class Connections:
    """All open connections of a server, the least recently active first."""

    def __init__(self) -> None:
        self._all: dict[Connection, None] = {}

    def active(self, one: Connection) -> None:
        """Make this connection the most recently active one.

        Called when the connection is opened, and when one of its requests was answered.
        """
        self._all.pop(one, None)
        self._all[one] = None

    def gone(self, one: Connection) -> None:
        """Remove a closed connection."""
        self._all.pop(one, None)

    def make_room(self, newcomer: Connection) -> bool:
        """Return whether the connection ``newcomer`` may stay open.

        It may stay open if at most `MOST_OPEN` connections are open. If more are open, this method aborts the least
        recently active of the other connections that are not being served, and ``newcomer`` may stay open. If all other
        connections are being served, returns False.
        """
        if len(self._all) <= MOST_OPEN:
            return True
        idle = next((one for one in self._all if not one.served and one is not newcomer), None)
        if idle is not None:
            idle.cut()
        return idle is not None


class _Polite:
    """The transport that uvicorn sees: `close` calls `Connection.close_politely`.

    All other methods are the methods of the real transport.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.close_politely()

    def is_closing(self) -> bool:
        return self._connection.closing or self._transport.is_closing()


class Connection(H11Protocol):
    """One HTTP connection. An error in it leaves other connections open. ``among``: all connections of the server."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        among: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.closing = False
        self._among = among
        self._head: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._thrown = 0
        self._half_closed = False

    @property
    def served(self) -> bool:
        """Whether an authenticated request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and bool(self.cycle.scope.get(PASSED))

    # -- opening and closing --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._real = transport
        super().connection_made(_Polite(transport, self))  # type: ignore[arg-type]
        self._among.active(self)
        if not self._among.make_room(self):
            self._answer_itself(503, "too many connections; try again later")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._among.gone(self)
        for timer in (self._head, self._reader, self._end):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def cut(self) -> None:
        """Abort the connection; data that was not sent yet is lost."""
        self.closing = True
        self._among.gone(self)
        self._real.abort()

    def close_politely(self) -> None:
        """Close the connection once the rest of the answer is sent, at the latest after `FLUSH_S` seconds.

        If more bytes of the request may arrive, they are read and discarded for up to `LINGER_S` seconds.
        """
        if self.closing:
            return
        self.closing = True
        self._real.resume_reading()
        if self._half_closed or self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            self._real.close()
            self._end = self.loop.call_later(FLUSH_S, self._real.abort)
            return
        if self._real.can_write_eof():
            self._real.write_eof()
        self._end = self.loop.call_later(LINGER_S, self._real.abort)

    # -- receiving ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.closing or self._end is not None:
            self._thrown += len(data)
            if self._thrown > MOST_LINGER:
                self.cut()
        if self.closing:
            return
        super().data_received(data)
        if self._end is not None and not self.closing and self.conn.their_state is not h11.SEND_BODY:
            self._end.cancel()  # the rest of a request that was answered early has arrived
            self._end, self._thrown = None, 0
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._have_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's data. If the request is incomplete, answer with an error.

        Without TLS, returns True if a complete request still waits for its answer: the connection then stays open. In
        all other cases, returns None or False, and the transport closes the connection.
        """
        if self.closing:
            return None
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._answer_itself(400, "incomplete request")
            return None
        self._half_closed = self.scheme == "http" and self.cycle is not None and not self.cycle.response_started
        return self._half_closed

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._no_head)

    def _have_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _no_head(self) -> None:
        self._head = None
        if self.conn.trailing_data[0]:
            self._answer_itself(408, f"the headers did not arrive within {HEAD_S:g} s")
        else:
            self.close_politely()

    # -- sending --------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is None:
            self._reader = self.loop.call_later(READER_S, self.cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def on_response_complete(self) -> None:
        self._among.active(self)
        if self._half_closed:
            self.close_politely()
        elif not self.closing and self.conn.their_state is h11.SEND_BODY:
            if self.conn.they_are_waiting_for_100_continue:  # what arrives next could be the body or a new request
                self.close_politely()
            else:
                self._end = self.loop.call_later(LINGER_S, self.cut)
        super().on_response_complete()

    def shutdown(self) -> None:
        if self.closing:
            self.cut()
        elif self.cycle is None or self.cycle.response_complete:
            self.close_politely()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        self.close_politely()

    def send_400_response(self, msg: str) -> None:
        """Send an error to a client whose bytes are not valid HTTP."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        self._answer_itself(hint if 400 <= hint < 500 else 400, "not a valid HTTP request")

    def _answer_itself(self, code: int, text: str) -> None:
        """Send an error that does not come from the application, and close the connection.

        If an answer has already begun, only closes the connection.
        """
        if not self.closing and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": text}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                *headers_of(""),
            ]
            lines = [
                f"HTTP/1.1 {code} {http.HTTPStatus(code).phrase}".encode(),
                *(b": ".join(pair) for pair in headers),
            ]
            self._real.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with contextlib.suppress(h11.LocalProtocolError):
            self.conn.send_failed()
        self.close_politely()
