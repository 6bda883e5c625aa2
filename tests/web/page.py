"""A real `gpujob web` over a real scheduler, and what a client of it does."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests import fork_server
from tests.stories.harness import Scheduler, wait_for

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]  # names in small letters; of several the last
    body: bytes
    pairs: Sequence[tuple[str, str]] = ()

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Page:
    """`gpujob web` on a free port, beside ``scheduler`` (which may run or not)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.folder = scheduler.folder
        self.process: fork_server.ForkedProcess | subprocess.Popen[bytes] | None = None
        self.port = 0
        self.output = self.folder / "web.out"
        self.errors = self.folder / "web.err"

    # -- its process ----------------------------------------------------------------------------------

    def start(self, *words: str, ready: bool = True, under: Sequence[str] = (), **environ: str) -> Page:
        """Start it, and wait until it says where it is."""
        port = () if "--port" in words else ("--port", "0")
        self.output.write_bytes(b"")
        with self.output.open("ab") as out, self.errors.open("ab") as errors:
            words, environ = ("web", *port, *words), {**self.scheduler.environ, **environ}
            if under:
                self.process = subprocess.Popen(
                    [*under, sys.executable, "-m", "scheduler", *words],
                    cwd=self.folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                )  # fmt: skip
            else:
                self.process = fork_server.start(words, self.folder, environ, out, errors)
        if ready:
            found = wait_for(lambda: self._address() or self.process.poll() is not None, "the page")
            assert self.process.poll() is None, self.said()
            self.port = int(found[1])
        return self

    def _address(self) -> re.Match[str] | None:
        return re.search(r"https?://\S+:(\d+)/\n", self.output.read_text())

    def said(self) -> str:
        """All that it printed."""
        return self.output.read_text(errors="replace") + self.errors.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)

    def end(self) -> None:
        """Be sure that it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def rss_kib(self) -> int:
        """Memory that it has now."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", text)
        assert found is not None
        return int(found[1])

    # -- asking ---------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token_file(self) -> Path:
        return self.folder / ".gpujob" / "web-token"

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def ask(
        self, method: str, path: str, headers: Mapping[str, str | None] | None = None, body: bytes | None = None
    ) -> Answer:
        """One request with just these headers beside Host (which may be given; None: leave one out)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            given = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            if body is not None and not {"Content-Length", "Transfer-Encoding"} & set(given):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            pairs = [(name.lower(), value) for name, value in response.getheaders()]
            return Answer(response.status, dict(pairs), response.read(), pairs)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """GET with the token. ``headers``: names with ``_`` for ``-``."""
        return self.ask("GET", path, {**self.bearer, **_named(headers)})

    def post(self, path: str, value: Any = None, **headers: str) -> Answer:
        """POST of JSON with the token; ``{}`` where no value is given."""
        body = json.dumps({} if value is None else value).encode()
        return self.ask("POST", path, {**self.bearer, "Content-Type": "application/json", **_named(headers)}, body)

    def login(self, token: str | None = None, **headers: str) -> Answer:
        """Send the form."""
        form = urlencode({"token": self.token if token is None else token}).encode()
        media = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.ask("POST", "/login", {**media, **_named(headers)}, form)

    def cookie(self) -> dict[str, str]:
        """The header of a browser that has signed in."""
        answer = self.login()
        assert answer.status == 303, answer
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}

    def connect(self) -> socket.socket:
        """A connection on which nothing was said yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def raw(self, data: bytes) -> bytes:
        """All that comes back for these bytes until the other side ends it (a reset ends it too)."""
        with self.connect() as connection:
            try:
                connection.sendall(data)
                return read_all(connection)
            except (ConnectionResetError, BrokenPipeError):
                return b""


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the other side ends it."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        return data
    return data


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def alone(folder: Path) -> Page:
    """A page in this folder, where no scheduler ran."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
    return Page(Scheduler(folder))
