"""The server of `gpujob web`: opens the port, prints how to reach the page, and serves it until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.client.client import SchedulerClient
from scheduler.core.errors import SchedulerError, UsageError, word
from scheduler.core.secrets import without_secrets
from scheduler.store.paths import Places
from scheduler.system.terminal_text import safe
from scheduler.views.ssh_tunnel import LOOPBACK, tunnel
from scheduler.web.app import make_app
from scheduler.web.auth import Key, token_of
from scheduler.web.connections import KEEP_ALIVE_S, Connection, Connections
from scheduler.web.event_stream import Hub
from scheduler.web.middleware import MOST_HEAD, Entrance, Gate
from scheduler.web.port_holder import holder_of
from scheduler.web.source import Source
from scheduler.web.user_keys import UserKeys

PORT = 4004
HIGHEST_PORT = 65535
BACKLOG = 1024
DESCRIPTORS = 4096
HANDSHAKE_S = 10.0
TOKEN_EVERY_S = 2.0  # between two checks of the token file
END_S = 1  # time to finish answers that are being sent when the server is stopped
NICE = 5
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Way:
    """The address and options under which the page is served.

    ``cert`` and ``key``: PEM files for TLS, empty without TLS. ``names``: further accepted values of `Host`; a proxy
    may need them. ``until``: descriptor of a pipe that the daemon holds open while it lives; -1 if the daemon has not
    started this process.
    """

    host: str = LOOPBACK
    port: int = PORT
    cert: str = ""
    key: str = ""
    behind_proxy: bool = False
    names: Sequence[str] = ()
    until: int = -1

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the page."""
        address = _address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    @property
    def any_address(self) -> bool:
        """Whether the server listens on all addresses of this machine."""
        address = _address(self.host)
        return address is not None and address.is_unspecified

    def check(self) -> None:
        """Raise UsageError if an option is invalid, or if the token would cross the network without encryption."""
        if not 0 <= self.port <= HIGHEST_PORT:
            raise UsageError(
                f"must be 0 to {HIGHEST_PORT}, not {self.port}", where="--port", do="use 0 for any free port"
            )
        if bool(self.cert) != bool(self.key):
            missing = "--tls-key" if self.cert else "--tls-cert"
            raise UsageError(
                "cannot use TLS: certificate and key are both needed", where="web", do=f"add {missing} FILE"
            )
        if not self.loopback and not self.cert and not self.behind_proxy:
            raise UsageError(
                f"cannot listen on {self.host} without TLS: others on the network could read the token", where="--host",
                do="give a certificate (--tls-cert, --tls-key), or --behind-proxy if the page can only be reached through your TLS proxy; "
                f"from your laptop a tunnel is enough: {tunnel(self.port)}",
            )  # fmt: skip


def serve(state_file: str, way: Way, *, config: str | None = None) -> int:
    """Serve the page until a signal arrives or, if the daemon has started this process, until the daemon ends.

    Returns 130 after SIGINT, 0 after SIGTERM or the end of the daemon.

    Raises SchedulerError if the server cannot start.
    """
    way.check()
    tls = _tls(way)
    client = SchedulerClient(state_file)
    token = token_of(client.places)
    listening = _listen(way)
    port = int(listening.getsockname()[1])
    said = _Log(token)
    key = Key(token, port)
    place = client.places.web_token if way.loopback and not way.behind_proxy else ".gpujob/web-token"
    app = make_app(Source(client, config))
    hub: Hub = app.state.hub
    token_file = _TokenFile(client.places, token, key, said, hub)
    words = _words(way, port, client.places.web_token)
    return _serve(way, tls, listening, app, _entrance(way, port, key, place, said), hub, token_file.look, words)


class UserApplication(Protocol):
    """The application of a page with several users (`gpujobd/page.py`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of the user in the scope (`middleware.USER`)."""

    def end_users(self, uids: set[int]) -> None:
        """End the event streams of these users."""

    def close(self) -> None:
        """End all event streams."""


def serve_users(app: UserApplication, way: Way, tokens: Callable[[], Mapping[int, bytes]]) -> int:
    """Serve a page on which each user signs in with a token of their own. See `serve`.

    ``tokens``: returns user id → hash of the token; raises SchedulerError.
    """
    way.check()
    listening = _listen(way)
    port = int(listening.getsockname()[1])
    said, keys = _Log("no such token"), UserKeys(port)
    keys.renew(tokens())

    def look() -> None:
        try:
            app.end_users(keys.renew(tokens()))
        except SchedulerError as error:
            said.tell(str(error))

    words = [f"web page: http://127.0.0.1:{port}/ ; each user signs in with a token: gpujob token"]
    return _serve(way, None, listening, app, _entrance(way, port, keys, "", said), app, look, words)


def _entrance(way: Way, port: int, key: Key | UserKeys, token_file: str, said: _Log) -> Entrance:
    return Entrance(
        key=key,
        port=port,
        hosts=_hosts(way, port),
        token_file=token_file,
        tell=said.tell,
        any_address=way.any_address,
        secure=bool(way.cert) or way.behind_proxy,
    )


class _Streams(Protocol):
    """The event streams of a page."""

    def close(self) -> None:
        """End all event streams."""


def _serve(
    way: Way,
    tls: ssl.SSLContext | None,
    listening: socket.socket,
    app: ASGIApp,
    entrance: Entrance,
    hub: _Streams,
    look: Callable[[], None],
    words: Iterable[str],
) -> int:
    """Serve until a signal arrives or the daemon ends. ``look``: called at intervals, to read changed tokens."""
    _be_modest()
    if way.until >= 0:
        # The pipe ``until`` ends with the daemon. SIGCONT continues a stopped process, so that it notices this end.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    server = _Server(Gate(app, entrance), tls, way.until, hub, look)
    for line in words:
        print(safe(line), flush=True)
    server.run([listening])
    sys.stdout.flush()
    if threading.active_count() > 1:  # a thread may still wait for the daemon; no client needs its answer any more
        os._exit(server.code)
    return server.code


class _TokenFile:
    """A watcher of the token file. If the file is removed or its token is changed, all users are signed out."""

    def __init__(self, places: Places, token: str, key: Key, log: _Log, hub: Hub) -> None:
        self._places, self._token, self._key, self._log, self._hub = places, token, key, log, hub
        self._trouble = ""

    def look(self) -> None:
        """Read the token file and apply a changed token.

        If the file cannot be read or trusted, logs this once and keeps the previous token.
        """
        if not os.path.isdir(self._places.state_dir):
            return  # the state folder was removed, and `token_of` would create it again
        trouble = ""
        try:
            found = token_of(self._places)
        except SchedulerError as error:
            found, trouble = self._token, f"{error.what}; the previous token stays valid; {error.do}"
        if found != self._token:
            self._token = self._log.token = found
            self._key.renew(found)
            self._hub.end_all()
            self._log.tell(f"the token has changed, everybody has to sign in again: cat {word(self._places.web_token)}")
        if trouble and trouble != self._trouble:
            self._log.tell(trouble)
        self._trouble = trouble


class _Server(uvicorn.Server):
    """uvicorn's server with our `Connection`, and with a main loop that wakes up only to check the token file."""

    def __init__(
        self, app: Gate, tls: ssl.SSLContext | None, until: int, hub: _Streams, look: Callable[[], None]
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=END_S,
            h11_max_incomplete_event_size=MOST_HEAD,
        )
        super().__init__(config)
        self.code = 0
        self._tls, self._until, self._hub, self._look = tls, until, hub, look
        self._told = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, and to watch for signals and the daemon's end."""
        loop = asyncio.get_running_loop()
        make = partial(Connection, self.config, self.server_state, {}, among=Connections())
        handshake = HANDSHAKE_S if self._tls is not None else None
        self.servers = [
            await loop.create_server(make, sock=one, ssl=self._tls, backlog=BACKLOG, ssl_handshake_timeout=handshake)
            for one in sockets or []
        ]
        for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
            loop.add_signal_handler(number, self._stop, code)
        if self._until >= 0:
            loop.add_reader(self._until, self._stop, 0)
        self.started = True

    def _stop(self, code: int) -> None:
        if self._until >= 0:
            asyncio.get_running_loop().remove_reader(self._until)
        self.code, self.should_exit = code, True
        self._hub.close()
        self._told.set()

    async def main_loop(self) -> None:
        """Wait until the server is stopped; check the token file every `TOKEN_EVERY_S` seconds."""
        while not self._told.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), TOKEN_EVERY_S)
            self._look()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `startup` installs the signal handlers."""
        yield


class _Log(logging.Handler):
    """The log on stderr. Each message is one line. The token is masked.

    At most `MOST` messages are printed in `EVERY_S` seconds. The next message then says how many messages were omitted.
    """

    MOST, EVERY_S, LONGEST = 10, 10.0, 2000

    def __init__(self, token: str) -> None:
        super().__init__(logging.WARNING)
        self.token = token
        self._left, self._since, self._lost = self.MOST, 0.0, 0
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)  # any client can make uvicorn log messages
        logging.getLogger().handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of a library."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({record.exc_info[1]!r})"
        self.tell(" | ".join(text.split("\n")))

    def tell(self, text: str) -> None:
        """Print a sentence. If too many were printed in this interval of `EVERY_S` seconds, only count the sentence."""
        now = time.monotonic()
        if now - self._since >= self.EVERY_S:
            self._since, self._left = now, self.MOST
        if not self._left:
            self._lost += 1
            return
        self._left -= 1
        if self._lost:
            text, self._lost = f"{text} ({self._lost} messages before this one were omitted)", 0
        shown = safe(without_secrets(text.replace(self.token, "***")))[: self.LONGEST]
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(f"gpujob: ! {shown}", file=sys.stderr, flush=True)


# -- preparations -----------------------------------------------------------------------------------------


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the host as an IP address, or None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class PortTaken(SchedulerError):
    """Another process listens on the port of the page."""


def _listen(way: Way) -> socket.socket:
    """Return a listening socket. Raises SchedulerError if that is not possible.

    If the port is in use, raises PortTaken, which names the process or the user that uses it, if known.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            way.host, way.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise UsageError(f"unknown host {way.host}", where="--host", do="give an address of this machine") from None
    listening = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            who = holder_of(way.port)
            raise PortTaken(
                f"cannot listen on port {way.port}: it is in use{f' by {who}' if who else ''}", where="web",
                do="if this web page runs there, open it; else use another port (gpujob web --port 0: any free port)",
            ) from None  # fmt: skip
        do = "use a port above 1023" if error.errno == errno.EACCES else "name an address of this machine with --host"
        raise SchedulerError(
            f"cannot listen on {way.host} port {way.port}: {error.strerror}", where="web", do=do
        ) from None
    return listening


def _tls(way: Way) -> ssl.SSLContext | None:
    if not way.cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(way.cert, way.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(f"cannot use certificate or key: {error}", where=f"{way.cert}, {way.key}",
                         do="give PEM files that belong together, and a key without a password") from None  # fmt: skip
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


def _hosts(way: Way, port: int) -> frozenset[str]:
    """Return the accepted values of the `Host` header, in lower case."""
    usual = 443 if way.cert else 80
    names = [LOOPBACK, "[::1]", "localhost"]
    if not way.any_address:
        names.append(f"[{way.host}]" if ":" in way.host else way.host)
    found = {f"{name}:{port}".lower() for name in names}
    if port == usual:
        found |= {name.lower() for name in names}
    for name in way.names:
        low = name.lower()
        found |= {low} if low.rpartition(":")[2].isdigit() and not low.endswith("]") else {low, f"{low}:{port}"}
    return frozenset(found)


def _be_modest() -> None:
    """Give this process a lower CPU priority than jobs and daemon have, and a higher limit on open descriptors."""
    os.nice(NICE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _words(way: Way, port: int, token_file: str) -> list[str]:
    """Return the lines to print: the page's address, how to show its token, and a tunnel command or a warning."""
    scheme = "https" if way.cert else "http"
    host = f"[{way.host}]" if ":" in way.host else way.host
    lines = [f"gpujob: web page: {scheme}://{host}:{port}/", f"gpujob: token to sign in: cat {word(token_file)}"]
    if way.loopback and not way.behind_proxy:
        target = host if way.host != "localhost" else LOOPBACK
        lines.append(f"gpujob: from your laptop: {tunnel(port, target)}")
        if way.host != LOOPBACK or way.cert:
            lines[-1] += f"  # then {scheme}://{LOOPBACK}:{port}/"
    elif not way.loopback:
        lines.append("gpujob: ! other machines can reach this address: anybody with the token can run commands as you")
    return lines
