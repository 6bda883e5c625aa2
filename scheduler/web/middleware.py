"""The gate in front of the application: the checks of every request, and the headers of every answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.core.errors import word
from scheduler.web.auth import COOKIE_S, Key
from scheduler.web.auth_throttle import Guesses
from scheduler.web.login_form import login_page, page_of, refusal_page
from scheduler.web.routes import BODY, JSON, NONCE
from scheduler.web.user_keys import UserKeys

PASSED = "gpujob.passed"  # key that is in the scope once the request is authenticated
USER = "gpujob.user"  # key in the scope: user id of who has signed in; 0 on a page with one token
MOST_BODY = 1 << 20
MOST_HEAD = 16 << 10  # bytes of a request's path and headers
MOST_FORM = 4096
BODY_S = 10.0
STATIC_S = 3600
FORM = "application/x-www-form-urlencoded"
SAFE = frozenset({"GET", "HEAD"})
# The characters in the paths of our routes. A path with any other character, such as %, is refused.
_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~/-]*", re.ASCII)
_OURS = frozenset({b"server", b"date", b"cache-control"})


def headers_of(nonce: str, cache: str = "no-store") -> list[tuple[bytes, bytes]]:
    """Return the headers that every answer gets.

    ``nonce``: inline scripts and styles that have this nonce are allowed; empty for an answer that is no page.
    ``cache``: value of `Cache-Control`.
    """
    policy = (
        f"default-src 'self'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'nonce-{nonce}'; img-src 'self' data:; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        if nonce
        else "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", cache.encode()),
    ]


@dataclass(frozen=True)
class Entrance:
    """The address of the server, and what a request needs to pass the gate.

    ``hosts``: accepted values of `Host`, in lower case. ``token_file``: path shown to users. ``tell``: logs a sentence.
    ``any_address``: the server listens on all addresses of this machine, so `Host` may also be the address that the
    client has connected to. ``secure``: browsers reach the server by HTTPS only.
    """

    key: Key | UserKeys
    port: int
    hosts: frozenset[str]
    token_file: str
    tell: Callable[[str], None]
    any_address: bool = False
    secure: bool = False


class Refusal(Exception):
    """Raised when a request does not pass the gate.

    ``code`` and ``text``: status and text of the answer. ``close``: whether to close the connection after the answer.
    ``login``: whether a browser gets the sign-in form instead of the text. ``wrong``: error that the form shows.
    ``place``: path to which the browser is redirected after signing in (default: the requested path).
    """

    def __init__(
        self, code: int, text: str, *, login: bool = False, wrong: str = "", place: str = "", close: bool = False
    ) -> None:
        super().__init__(text)
        self.code, self.text, self.login, self.wrong, self.place, self.close = code, text, login, wrong, place, close


class _Disconnected(Exception):
    """Raised when the client disconnects before its request is complete."""


class _Asked:
    """The parts of a request that the middleware checks before it passes the request on."""

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path = scope.get("raw_path", b"").decode("latin-1")
        self.scheme: str = scope.get("scheme", "http")
        self.server: Sequence[object] = scope.get("server") or ()
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])

    def all(self, name: bytes) -> list[str]:
        return [value.decode("latin-1") for key, value in self._headers if key == name]

    def one(self, name: bytes) -> str:
        return next(iter(self.all(name)), "")

    def size(self) -> int:
        """Return the size of the path and the headers in bytes."""
        return len(self.raw_path) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def media_type(self) -> str:
        found = self.all(b"content-type")
        return found[0].partition(";")[0].strip().lower() if len(found) == 1 else ""

    def wants_page(self) -> bool:
        """Return whether the answer should be an HTML page.

        It should if the client accepts HTML and the path is neither an API path nor `/metrics`.
        """
        programs = self.path.startswith("/api/") or self.path == "/metrics"
        return not programs and "text/html" in self.one(b"accept").lower()


class _Answer:
    """Sends the answer to one request, and adds the headers that every answer gets.

    ``begun``: whether the answer has begun. ``complete``: whether the whole answer was sent.
    """

    def __init__(self, send: Send, path: str, nonce: str) -> None:
        self._send, self._path, self._nonce = send, path, nonce
        self.begun = self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            own = [
                (name.lower(), value)
                for name, value in message.get("headers", [])
                if name.lower() not in _OURS and not name.lower().startswith(b"access-control-")
            ]
            kept = self._path.startswith("/static/") and message["status"] in (200, 206, 304)
            cache = f"private, max-age={STATIC_S}" if kept else "no-store"
            common = headers_of(self._nonce, cache)
            names = {name for name, _ in common}
            message = {**message, "headers": [*((n, v) for n, v in own if n not in names), *common]}
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.complete = True
        await self._send(message)

    async def whole(self, code: int, media: str, body: bytes, more: Sequence[tuple[str, str]] = ()) -> None:
        """Send a whole answer. ``more``: further headers."""
        headers = [("content-type", media), ("content-length", str(len(body))), *more]
        start = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        await self({"type": "http.response.start", "status": code, "headers": start})
        await self({"type": "http.response.body", "body": body})


class Gate:
    """ASGI middleware in front of the application. Adds `NONCE` and the whole body of a POST (`BODY`) to the scope."""

    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self.app, self.entrance = app, entrance
        self.guesses = Guesses(entrance.tell)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        nonce = scope[NONCE] = secrets.token_urlsafe(16)
        asked = _Asked(scope)
        answer = _Answer(send, asked.path, nonce)
        try:
            try:
                if await self._judge(asked, scope, receive, answer):
                    await self.app(scope, _replayed(scope, receive), answer)
            except Refusal as refusal:
                await self._refuse(refusal, asked, answer, nonce)
        except _Disconnected:
            return
        except Exception as error:  # a defect: the details go to the log, not to the client
            self._note(error, asked)
            if not answer.begun:
                await answer.whole(
                    500, JSON, _problem("internal error in gpujob; please report it with the log of gpujob web")
                )
            elif not answer.complete:
                raise

    # -- the checks, in their order -------------------------------------------------------------------

    async def _judge(self, asked: _Asked, scope: Scope, receive: Receive, answer: _Answer) -> bool:
        """Check a request. Return True if the application has to answer the request, False if it was answered here.

        Raises Refusal if the request does not pass, and _Disconnected if the client disconnects before the end of the
        request.
        """
        if asked.all(b"transfer-encoding") and asked.all(b"content-length"):
            raise Refusal(
                400, "both Content-Length and Transfer-Encoding: the end of the request is ambiguous", close=True
            )
        self._check_host(asked)
        if asked.size() > MOST_HEAD:  # h11 limits only headers that arrive in several pieces
            raise Refusal(431, f"the headers exceed {MOST_HEAD >> 10} KiB", close=True)
        if asked.method == "POST" and asked.raw_path == "/login":
            await self._login(asked, receive, answer)
            return False
        by_cookie, scope[USER] = await self._check_token(asked)
        scope[PASSED] = True
        if asked.method == "POST" and asked.raw_path == "/logout":
            self._check_origin(asked)
            if not asked.all(b"origin"):
                self._check_mark(asked, by_cookie)
            for value in self._own_cookies(asked):
                self.entrance.key.revoke(value)
            await answer.whole(303, "text/plain", b"", [("location", "/"), ("set-cookie", self._cookie("", 0))])
            return False
        if asked.method not in SAFE:
            self._check_origin(asked)
            self._check_mark(asked, by_cookie)
        if not _PATH.fullmatch(asked.raw_path) or any(not part.strip(".") and part for part in asked.path.split("/")):
            raise Refusal(404, "not found")
        if asked.method == "POST":
            if asked.media_type() != JSON:
                raise Refusal(415, f"the Content-Type must be {JSON}")
            scope[BODY] = await _body(asked, receive, MOST_BODY)
        return True

    def _check_host(self, asked: _Asked) -> None:
        hosts = asked.all(b"host")
        if len(hosts) != 1:
            raise Refusal(400, f"exactly one Host header is needed, not {len(hosts)}", close=True)
        host = hosts[0].lower()
        entrance = self.entrance
        if host in entrance.hosts:
            return
        if entrance.any_address and asked.server:
            address = str(asked.server[0])
            literal = f"[{address}]" if ":" in address else address
            if host == f"{literal}:{entrance.port}":
                return
        port = entrance.port
        raise Refusal(
            421,
            f"this page can only be reached as 127.0.0.1:{port}, [::1]:{port} or localhost:{port}. From another machine, open a tunnel "
            f"with the same port number at both ends (ssh -L {port}:127.0.0.1:{port} SERVER) and go to http://127.0.0.1:{port}/ ; "
            "To accept the name that a proxy uses: gpujob web --name NAME",
        )

    async def _check_token(self, asked: _Asked) -> tuple[bool, int]:
        """Return whether a cookie authenticates the request (else the token does), and the user. Raises Refusal.

        A page with one token has only the user 0.
        """
        key = self.entrance.key
        said = asked.all(b"authorization")
        if said:
            scheme, _, token = said[0].strip().partition(" ")
            if len(said) == 1 and scheme.lower() == "bearer":
                user = key.user_of_token(token.strip().encode("latin-1"))
                if user is not None:
                    return False, user
            await self.guesses.wrong()
            raise Refusal(401, "the token is wrong", login=True)
        for cookie in self._own_cookies(asked):
            user = key.user_of_cookie(cookie)
            if user is not None:
                return True, user
        raise Refusal(
            401,
            f"the token is missing; send Authorization: Bearer T with the token T from {self.entrance.token_file or 'gpujob token'}",
            login=True,
        )

    def _own_cookies(self, asked: _Asked) -> list[str]:
        return _cookies(asked.all(b"cookie"), self.entrance.key.cookie_name)

    def _check_origin(self, asked: _Asked) -> None:
        """Raise Refusal if a page of another origin has sent the request.

        A request without the header `Origin` passes: it comes from a program, not from a page.
        """
        said = asked.all(b"origin")
        if not said:
            return
        schemes = {asked.scheme, "https" if self.entrance.secure else asked.scheme}
        if len(said) == 1 and said[0].lower() in {f"{scheme}://{asked.one(b'host').lower()}" for scheme in schemes}:
            return
        # Our referrer policy makes browsers send forms with the Origin "null". No script can set Sec-Fetch-Site.
        if said == ["null"] and asked.path in ("/login", "/logout") and asked.all(b"sec-fetch-site") == ["same-origin"]:
            return
        raise Refusal(403, "the change was requested by a page of another origin (Origin header)")

    @staticmethod
    def _check_mark(asked: _Asked, by_cookie: bool) -> None:
        if by_cookie and asked.one(b"x-gpujob") != "1":
            raise Refusal(403, "a change that is authenticated by cookie needs the header X-Gpujob: 1")

    # -- signing in -----------------------------------------------------------------------------------

    async def _login(self, asked: _Asked, receive: Receive, answer: _Answer) -> None:
        """Exchange the token of the form for a cookie. Raises Refusal."""
        self._check_origin(asked)
        if asked.media_type() != FORM:
            raise Refusal(415, f"the Content-Type must be {FORM}")
        data = await _body(asked, receive, MOST_FORM)
        try:
            form = parse_qs(data.decode("ascii"), max_num_fields=8)
        except ValueError:
            form = {}
        said, place = form.get("token", [""]), page_of(form.get("next", ["/"])[0])
        user = self.entrance.key.user_of_token(said[0].strip().encode("utf-8", "replace")) if len(said) == 1 else None
        if user is None:
            await self.guesses.wrong()
            wrong = "The token is wrong."
            raise Refusal(401, "the token is wrong", login=True, wrong=wrong, place=place)
        cookie = self._cookie(self.entrance.key.cookie_for(user), COOKIE_S)
        await answer.whole(303, "text/plain", b"", [("location", place), ("set-cookie", cookie)])

    def _cookie(self, value: str, seconds: int) -> str:
        secure = "; Secure" if self.entrance.secure else ""
        name = self.entrance.key.cookie_name
        return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"

    # -- answers --------------------------------------------------------------------------------------

    async def _refuse(self, refusal: Refusal, asked: _Asked, answer: _Answer, nonce: str) -> None:
        more = [("www-authenticate", 'Bearer realm="gpujob"')] if refusal.code == 401 else []
        if refusal.close:
            more.append(("connection", "close"))
        form = refusal.login and (asked.path in ("/", "/login") or asked.wants_page())
        if form:
            body = login_page(
                word(self.entrance.token_file) if self.entrance.token_file else "",
                nonce,
                refusal.place or asked.path,
                refusal.wrong,
            )
        elif asked.wants_page():
            body = refusal_page(refusal.code, refusal.text, nonce)
        else:
            await answer.whole(refusal.code, JSON, _problem(refusal.text), more)
            return
        await answer.whole(refusal.code, "text/html; charset=utf-8", body, more)

    def _note(self, error: Exception, asked: _Asked) -> None:
        where = " | ".join(line.strip() for line in traceback.format_exception(error)[-6:])
        self.entrance.tell(
            f"internal error in gpujob, please report it: {error!r} at {asked.method} {asked.path[:100]} ({where})"
        )


def _problem(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def _cookies(headers: Sequence[str], name: str) -> list[str]:
    """Return the values of the cookies with this name, four at most."""
    pairs = (pair.strip().partition("=") for header in headers for pair in header.split(";"))
    return [value for key, _, value in pairs if key == name][:4]


async def _body(asked: _Asked, receive: Receive, most: int) -> bytes:
    """Return the whole body. Raises Refusal if the body exceeds ``most`` bytes or does not arrive in time.

    Raises _Disconnected if the client disconnects before the end of the body.
    """
    length = asked.one(b"content-length")
    too_much = Refusal(413, f"the body exceeds {most >> 10} KiB")
    if length.isdigit() and int(length) > most:
        raise too_much
    body = bytearray()

    async def read() -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            body.extend(message.get("body", b""))
            if len(body) > most:
                raise too_much
            if not message.get("more_body"):
                return

    try:
        await asyncio.wait_for(read(), BODY_S)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_S:g} s", close=True) from None
    return bytes(body)


def _replayed(scope: Scope, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a replacement for the function ``receive``, for use by the application.

    If the gate has read the body, the first call of the replacement returns this body.
    """
    if BODY not in scope:
        return receive
    left = [scope[BODY]]

    async def again() -> Message:
        with contextlib.suppress(IndexError):
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again
