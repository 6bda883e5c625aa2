"""A client of the page's event stream (server-sent events), which collects the events in a thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tests.stories.harness import PATIENCE_S, wait_for
from tests.web.page import Page


class Listening:
    """An event stream that a thread reads.

    ``events``: (name, value) in order; ``raw``: all lines; ``over``: set when the stream has ended.
    """

    def __init__(self, page: Page, **headers: str) -> None:
        self.events: list[tuple[str, Any]] = []
        self.raw: list[str] = []
        self.over = threading.Event()
        self.connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE_S)
        self.connection.request("GET", "/api/events", headers={**page.bearer, **headers})
        self._socket = self.connection.sock
        self.response = self.connection.getresponse()
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in self.response.getheaders()}
        self.status = self.response.status
        if self.status == 200:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        name = ""
        try:
            for line in self.response:
                text = line.decode().rstrip("\n")
                self.raw.append(text)
                if text.startswith("event: "):
                    name = text[7:]
                elif text.startswith("data: "):
                    self.events.append((name, json.loads(text[6:])))
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            pass  # the test closed the connection, or the server ended
        self.over.set()

    def close(self) -> None:
        """Close the connection abruptly."""
        with contextlib.suppress(OSError):  # the server closed the connection first
            self._socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def until(self, name: str, like: Callable[[Any], Any], what: str) -> Any:
        """Wait for an event with this name whose value satisfies ``like``; return the first such value."""

        def look() -> Any:
            return next(([value] for kind, value in list(self.events) if kind == name and like(value)), None)

        return wait_for(look, f"{what}; came: {[(k, str(v)[:120]) for k, v in self.events[-12:]]}")[0]

    def states(self, number: int) -> list[str]:
        """Return the states of a job in the order of its events."""
        return [value["state"] for kind, value in self.events if kind == "job" and value["id"] == number]
