"""A real `gpujob web` process over a real scheduler, and an HTTP client for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
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
    """The HTTP answer to a request."""

    status: int
    headers: Mapping[str, str]  # names in lower case; the last value of a repeated header
    body: bytes
    pairs: Sequence[tuple[str, str]] = ()

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Page:
    """A `gpujob web` process on a free port.

    ``scheduler``: the scheduler of the same folder, which need not be running.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.folder = scheduler.folder
        self.process: fork_server.ForkedProcess | subprocess.Popen[bytes] | None = None
        self.port = 0
        self.output = self.folder / "web.out"
        self.errors = self.folder / "web.err"

    # -- the process ----------------------------------------------------------------------------------

    def start(self, *words: str, ready: bool = True, under: Sequence[str] = (), **environ: str) -> Page:
        """Start the process. Unless ``ready`` is False, wait for its first line, which contains the address.

        ``under``: a command that runs the process, such as strace with its options. If ``under`` is given, the process
        runs in a new interpreter.
        """
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
        """Return everything that the process has printed so far."""
        return self.output.read_text(errors="replace") + self.errors.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end of the process, and return its exit code.

        Raises subprocess.TimeoutExpired if the process has not ended 20 s after the signal.
        """
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)

    def end(self) -> None:
        """Kill the process if it still runs, and wait for its end."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def rss_kib(self) -> int:
        """Return the resident memory of the process in KiB."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", text)
        assert found is not None
        return int(found[1])

    # -- requests -------------------------------------------------------------------------------------

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
        """Send one request on a new connection and return the answer.

        Only ``headers``, `Host` and the length of ``body`` are sent; a header with the value None is left out.
        """
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
        """Send a GET request with the token. ``headers``: names of headers, written with ``_`` in place of ``-``."""
        return self.ask("GET", path, {**self.bearer, **_named(headers)})

    def post(self, path: str, value: Any = None, **headers: str) -> Answer:
        """Send a POST request with the token and ``value`` as JSON. If ``value`` is None, ``{}`` is sent."""
        body = json.dumps({} if value is None else value).encode()
        return self.ask("POST", path, {**self.bearer, "Content-Type": "application/json", **_named(headers)}, body)

    def login(self, token: str | None = None, **headers: str) -> Answer:
        """Send the sign-in form with ``token``. None stands for the right token."""
        form = urlencode({"token": self.token if token is None else token}).encode()
        media = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.ask("POST", "/login", {**media, **_named(headers)}, form)

    def cookie(self) -> dict[str, str]:
        """Sign in, and return the `Cookie` header for later requests."""
        answer = self.login()
        assert answer.status == 303, answer
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}

    def connect(self) -> socket.socket:
        """Return a new connection on which nothing was sent."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def raw(self, data: bytes) -> bytes:
        """Send these bytes, and return the bytes that arrive until the server closes or resets the connection.

        If the connection is reset while the bytes are being sent, return empty bytes.
        """
        with self.connect() as connection:
            try:
                connection.sendall(data)
                return read_all(connection)
            except (ConnectionResetError, BrokenPipeError):
                return b""


def fixed_port() -> int:
    """Return a free port from a range from which the kernel assigns no ports by itself.

    A test can therefore release the port and use it again later: the kernel does not assign it to another process
    meanwhile.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def read_all(connection: socket.socket) -> bytes:
    """Return the bytes that arrive until the other side closes or resets the connection."""
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
    """Return a page in this folder; neither the page nor its scheduler is started."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
    return Page(Scheduler(folder))
