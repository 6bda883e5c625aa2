"""Tests of the access to the page: token, cookie, `Host`, `Origin`, token file, and headers of every answer."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scheduler.store.paths import Places
from scheduler.web.app import all_calls
from scheduler.web.auth import COOKIE_S, Key, token_of
from tests.stories.harness import wait_for
from tests.web.page import Answer, Page, read_all

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
ROUTES = sorted(
    {re.sub(r"\{\w+\}", "1", call.path) for call in all_calls()} | {"/api/events", "/static/x.js", "/metrics"}
)
UNKNOWN = ("/nothing", "/api", "/api/nothing", "/static/", "/login/x", "/logout", "/favicon.ico", "/.gpujob/web-token")
JSON = {"Content-Type": "application/json"}


def check_headers(answer: Answer) -> None:
    """Assert the security headers that every answer must have."""
    headers = answer.headers
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert policy.startswith(("default-src 'self'", "default-src 'none'"))
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert not [name for name in headers if name.startswith("access-control") or name in ("server", "date")]


# -- S1, S2: the token, methods, origins ------------------------------------------------------------------


@pytest.mark.parametrize("path", [*ROUTES, *UNKNOWN, "/login"])
def test_s1_every_route_and_method_without_token_is_401(page: Page, path: str) -> None:
    """S1: A request without a token is answered with 401, whatever its path and method are."""
    for method in METHODS:
        if (method, path) == ("POST", "/login"):
            continue
        for headers in ({}, {"Origin": "http://evil.test"}, {**JSON, "X-Gpujob": "1"}):
            answer = page.ask(method, path, headers, b"{}" if method == "POST" else None)
            assert answer.status == 401, (method, path, headers)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            check_headers(answer)


def test_s1_the_page_listens_only_on_loopback_by_default(page: Page) -> None:
    """S1, S2.11: By default the page listens on 127.0.0.1 only."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{page.port:04X}")}
    assert listening == {f"0100007F:{page.port:04X}"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_s1_another_address_needs_tls_or_a_proxy(pages: Callable[[], Page], host: str) -> None:
    """S1: Without TLS or a proxy, the page refuses to listen on an address other than loopback.

    It refuses before it creates any file.
    """
    page = pages().start("--host", host, ready=False)
    assert page.process is not None and page.process.wait(60) == 2
    assert "without TLS: others on the network could read the token" in page.said() and "--behind-proxy" in page.said()
    assert not page.token_file.exists()


def test_s1_the_first_page_without_a_token_is_a_sign_in_form(page: Page) -> None:
    """S1: Without a token, `/` is a sign-in form without scripts; its style has the nonce of the answer."""
    answer = page.ask("GET", "/")
    assert answer.status == 401 and answer.headers["content-type"] == "text/html; charset=utf-8"
    found: dict[str, dict[str, str | None]] = {}

    class Look(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.setdefault(tag, dict(attrs))

    Look().feed(answer.text)
    assert found["form"] == {"method": "post", "action": "/login"}
    assert found["input"]["name"] == "token" and found["input"]["type"] == "password"
    assert f"'nonce-{found['style']['nonce']}'" in answer.headers["content-security-policy"]
    assert "script" not in found and page.token not in answer.text
    assert page.ask("GET", "/").headers["content-security-policy"] != answer.headers["content-security-policy"]
    assert page.ask("HEAD", "/").body == b""


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Basic T",
        "T",
        "Bearer T T",
        "Token T",
        "Bearer \xff",
        "Bearer T\t",
        "bearerT",
    ],
)
def test_s1_k14_any_value_other_than_the_token_is_401(page: Page, said: str) -> None:
    """S1, K14: Any value other than the exact token is answered with 401.

    The exact token in a URL or in a cookie is answered with 401, too.
    """
    token = page.token
    headers = {"Authorization": said.replace("T", token[:-1])}
    assert page.ask("GET", "/api/status", headers).status == 401
    assert page.ask("GET", f"/api/status?token={token}").status == 401
    assert page.ask("GET", f"/?token={token}").status == 401
    assert page.ask("GET", "/api/status", {"Cookie": f"gpujob_{page.port}={token}"}).status == 401


def test_s2_only_a_json_post_of_the_own_origin_can_change_something(page: Page) -> None:
    """S2: A change is accepted only as a POST of JSON. An `Origin` in the request must be the page's own origin.

    A request with the cookie also needs the header X-Gpujob.
    """
    own = f"http://127.0.0.1:{page.port}"
    cookie = page.cookie()
    origins: tuple[str | None, ...] = (None, own, "http://evil.test", "null", f"http://localhost:{page.port}", f"{own}.evil.test", "http://127.0.0.1", f"https://127.0.0.1:{page.port}")  # fmt: skip
    kinds = (
        "application/json",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
    )
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        for origin in origins:
            for kind in kinds:
                for by, marked in ((page.bearer, False), (cookie, False), (cookie, True)):
                    headers = {**by, "Origin": origin, "Content-Type": kind or None}
                    if marked:
                        headers["X-Gpujob"] = "1"
                    answer = page.ask(method, "/api/status", headers, b"{}")
                    foreign = origin is not None and origin != own
                    unmarked = by is cookie and not marked
                    wanted = (
                        403 if foreign or unmarked else 415 if method == "POST" and kind != "application/json" else 405
                    )
                    assert answer.status == wanted, (method, origin, kind, marked, answer)
                    check_headers(answer)


@pytest.mark.parametrize("mark", [None, "", "0", "2", "11", "true"])
def test_s2_only_the_exact_header_value_allows_a_change(page: Page, mark: str | None) -> None:
    """S2: With the cookie, a change needs the header X-Gpujob with the value 1."""
    headers = {**page.cookie(), **JSON, "X-Gpujob": mark}
    assert page.ask("POST", "/api/nothing", headers, b"{}").status == 403
    assert page.ask("POST", "/api/nothing", {**headers, "X-Gpujob": "1"}, b"{}").status == 404


def test_s2_a_cors_preflight_of_another_origin_is_refused(page: Page) -> None:
    """S2: A CORS preflight of another origin is refused, with and without the token."""
    asks = {
        "Origin": "http://evil.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-gpujob",
    }
    for by, code in (({}, 401), (page.cookie(), 403), (page.bearer, 403)):
        answer = page.ask("OPTIONS", "/api/status", {**asks, **by})
        assert answer.status == code
        check_headers(answer)


def test_s2_json_may_name_its_charset(page: Page) -> None:
    """S2: A change is accepted if its content type is JSON with a charset."""
    assert page.post("/api/nothing", Content_Type="application/json; charset=utf-8").status == 404


# -- S3: Host ---------------------------------------------------------------------------------------------


def test_s3_a_host_that_is_no_name_of_the_page_is_421(page: Page) -> None:
    """S3: If `Host` is not one of the page's names, the answer is 421, with or without the token (DNS rebinding)."""
    port = page.port
    good = [f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"LocalHost:{port}", f"[::1]:{port}"]
    bad = [
        "evil.test", f"evil.test:{port}", "127.0.0.1", "localhost", f"127.0.0.1:{port + 1}", f"localhost.:{port}", f"127.0.0.1.:{port}",
        f"127.0.0.1:{port}.", f"127.0.0.2:{port}", f"0.0.0.0:{port}", f"[::1%25lo]:{port}", f"::1:{port}", f"[::]:{port}",
        f"127.1:{port}", f"0x7f000001:{port}", f"x@127.0.0.1:{port}", f"127.0.0.1:0{port}", f"127.0.0.1:{port}, evil.test", "",
        f"localhost:{port}:{port}", f"evil.test#127.0.0.1:{port}", f"localhost\xa0:{port}",
    ]  # fmt: skip
    for host in good:
        assert page.ask("GET", "/api/status", {**page.bearer, "Host": host}).status == 200, host
    for host in bad:
        for by in (page.bearer, {}):
            answer = page.ask("GET", "/api/status", {**by, "Host": host})
            assert answer.status == 421, (host, answer)
            check_headers(answer)
    assert f"ssh -L {port}:127.0.0.1:{port}" in page.ask("GET", "/", {"Host": "127.0.0.1:5005"}).json()["error"]
    assert page.ask("POST", "/login", {"Host": f"evil.test:{port}"}, b"token=x").status == 421


def test_s3_a_request_without_host_or_with_two_is_refused(page: Page) -> None:
    """S3: A request without a `Host` header or with two `Host` headers is refused."""
    host = f"Host: 127.0.0.1:{page.port}\r\n"
    token = f"Authorization: Bearer {page.token}\r\n"
    for version, hosts in (
        ("1.1", ""),
        ("1.1", host * 2),
        ("1.1", host + "Host: evil.test\r\n"),
        ("1.0", ""),
        ("1.0", host * 2),
    ):
        answer = page.raw(f"GET /api/status HTTP/{version}\r\n{hosts}{token}\r\n".encode())
        assert re.match(rb"HTTP/1.1 (400|421) ", answer), answer


def test_s3_exactly_the_given_names_of_a_proxy_are_accepted(pages: Callable[[], Page]) -> None:
    """S3: In addition to the page's own names, exactly the names given with `--name` are accepted, each with its port.

    Behind a proxy, browsers send the cookie only over HTTPS.
    """
    page = pages().start("--behind-proxy", "--name", "gpu.example.org", "--name", "other.example.org:8443")
    for host, code in (
        ("gpu.example.org", 200), ("GPU.example.org", 200), ("other.example.org:8443", 200), ("other.example.org", 421),
        ("gpu.example.org.", 421), ("x.gpu.example.org", 421),
    ):  # fmt: skip
        assert page.ask("GET", "/api/status", {**page.bearer, "Host": host}).status == code, host
    answer = page.login(Host="gpu.example.org", Origin="https://gpu.example.org")
    assert answer.status == 303 and "; Secure" in answer.headers["set-cookie"]
    assert page.login(Host="gpu.example.org", Origin="https://other.example.org").status == 403


# -- signing in and out -----------------------------------------------------------------------------------


def test_s4_signing_in_gives_a_cookie_that_is_not_the_token(page: Page) -> None:
    """S4: After the sign-in form, the browser gets a signed cookie that is not the token.

    The cookie is HttpOnly and SameSite=Strict. Its name contains the port.
    """
    answer = page.login()
    assert (answer.status, answer.headers["location"]) == (303, "/")
    pair, *flags = answer.headers["set-cookie"].split("; ")
    assert set(flags) == {"Path=/", f"Max-Age={COOKIE_S}", "HttpOnly", "SameSite=Strict"}
    name, _, value = pair.partition("=")
    assert name == f"gpujob_{page.port}" and page.token not in value
    check_headers(answer)
    assert page.ask("GET", "/api/status", {"Cookie": f"theme=dark; {pair}; x=y"}).status == 200
    assert page.ask("HEAD", "/", {"Cookie": pair}).status == 200
    assert Key(page.token, page.port).is_cookie(value)


def test_s4_a_changed_or_expired_cookie_is_401(page: Page) -> None:
    """S4: A changed or expired cookie is answered with 401. The cookie of another port is answered with 401, too."""
    key = Key(page.token, page.port)
    good = key.cookie()
    version, end, nonce, seal = good.split(".")
    later = ".".join((version, str(int(end) + 1), nonce, seal))
    old = key.cookie(time.time() - COOKIE_S - 1)
    other = Key(page.token, page.port + 1).cookie()
    for value in (later, old, other, good[:-1], good.replace("v1", "v2"), "", ".", "v1...", good + "0", good.upper()):
        assert page.ask("GET", "/api/status", {"Cookie": f"gpujob_{page.port}={value}"}).status == 401, value
    assert page.ask("GET", "/api/status", {"Cookie": f"gpujob={good}"}).status == 401
    assert page.ask("GET", "/api/status", {"Cookie": f"gpujob_{page.port}={good}"}).status == 200
    assert (
        page.ask("GET", "/api/status", {"Cookie": f"gpujob_{page.port}={good}", "Authorization": "Bearer x"}).status
        == 401
    )


def test_s4_a_wrong_token_in_the_form_is_401_with_the_form(page: Page) -> None:
    """S4, K14: A wrong token in the form is answered with 401 and the form.

    Blanks around the correct token are ignored.
    """
    for token in ("", "x", page.token[:-1], f"{page.token}x", page.token.swapcase(), "é" * 40, "%00"):
        answer = page.login(token)
        assert answer.status == 401 and 'role="alert"' in answer.text and "set-cookie" not in answer.headers
        assert "The token is wrong." in answer.text and (len(token) < 9 or token not in answer.text)
        check_headers(answer)
    assert page.login(f"  {page.token}\n").status == 303  # as copied from a terminal
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert 'name="next" value="/jobs/3"' in page.ask("POST", "/login", kind, b"token=x&next=/jobs/3").text


def test_k16_signing_in_at_another_spelling_of_the_path_is_401(page: Page) -> None:
    """K16, S4: The sign-in form is accepted only at the exact path `/login`. Other spellings are answered with 401."""
    kind, form = {"Content-Type": "application/x-www-form-urlencoded"}, f"token={page.token}".encode()
    for path in ("/%6cogin", "/login/", "//login", "/./login", "/LOGIN"):
        assert page.ask("POST", path, kind, form).status == 401, path


def test_k11_too_many_or_too_long_headers_are_431(page: Page) -> None:
    """K11: Too many or too long headers are answered with 431, even if they arrive in one packet."""
    for more in ({"X-Long": "x" * 17_000}, {f"X-{n}": "y" * 20 for n in range(800)}):
        assert page.ask("GET", "/api/status", {**page.bearer, **more}).status == 431


def test_s2_signing_in_from_another_origin_is_403(page: Page) -> None:
    """S2: Signing in from another origin is answered with 403.

    `Origin: null` is accepted if the browser reports that the request has the same origin.
    """
    own = f"http://127.0.0.1:{page.port}"
    for origin in ("http://evil.test", "null", f"http://localhost:{page.port}"):
        assert page.login(Origin=origin).status == 403, origin
        assert page.login(Origin=origin, Sec_Fetch_Site="cross-site").status == 403
    assert page.login(Origin=own).status == 303
    assert page.login(Origin="null", Sec_Fetch_Site="same-origin").status == 303
    assert page.login(Content_Type="application/json").status == 415
    assert (
        page.ask(
            "POST", "/login", {"Content-Type": "application/x-www-form-urlencoded"}, b"token=" + b"x" * 5000
        ).status
        == 413
    )


@pytest.mark.parametrize(
    ("path", "place"),
    [("/jobs/3", "/jobs/3"), ("/timeline", "/timeline"), ("//evil.test", "/"), ("https://evil.test", "/"), ("/\\evil.test", "/"),
     ("/jobs/3/../../x", "/"), ("/a\r\nSet-Cookie: x=y", "/"), ("/login", "/"), ("/jobs/３", "/"), ("", "/")],
)  # fmt: skip
def test_s3_signing_in_redirects_only_to_own_pages(page: Page, path: str, place: str) -> None:
    """S3: After signing in, `next` redirects only to pages of this server."""
    from urllib.parse import urlencode

    form = urlencode({"token": page.token, "next": path}).encode()
    answer = page.ask("POST", "/login", {"Content-Type": "application/x-www-form-urlencoded"}, form)
    assert (answer.status, answer.headers["location"]) == (303, place)
    assert len([name for name, _ in answer.pairs if name == "set-cookie"]) == 1


def test_s4_signing_out_revokes_the_cookie_on_the_server(page: Page) -> None:
    """S4: Signing out revokes the cookie on the server.

    The request needs the page's own origin or the header X-Gpujob.
    """
    own = {"Origin": f"http://127.0.0.1:{page.port}"}
    cookie, other = page.cookie(), page.cookie()
    assert page.ask("POST", "/logout", {}, b"").status == 401
    assert page.ask("POST", "/%6cogout", {**cookie, **own, "X-Gpujob": "1"}, b"").status == 404
    assert page.ask("POST", "/logout", cookie, b"").status == 403
    assert page.ask("POST", "/logout", {**cookie, "Origin": "http://evil.test", "X-Gpujob": "1"}, b"").status == 403
    for more in (own, {"X-Gpujob": "1"}, {"Origin": "null", "Sec-Fetch-Site": "same-origin"}):
        cookie = page.cookie()
        answer = page.ask("POST", "/logout", {**cookie, **more}, b"")
        assert page.ask("GET", "/api/status", cookie).status == 401, "a copy of it lets nobody in either"
        assert page.ask("GET", "/api/status", other).status == 200
        assert answer.status == 303 and f"gpujob_{page.port}=; Path=/; Max-Age=0" in answer.headers["set-cookie"]


@pytest.mark.waits
def test_s4_removing_the_token_file_signs_everybody_out(pages: Callable[[], Page]) -> None:
    """S4: If the token file is removed, a new token is created. The old token and its cookies are answered with 401.

    The event streams that were opened with the old token end.
    """
    page = pages()
    page.scheduler.start()
    page.start()
    token, cookie, bearer = page.token, page.cookie(), page.bearer
    stream = page.connect()
    stream.sendall(
        b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %b\r\n\r\n"
        % (page.port, token.encode())
    )
    assert b"200 OK" in stream.recv(65536)
    page.token_file.unlink()
    wait_for(lambda: page.ask("GET", "/api/status", bearer).status == 401, "the old token is none any more")
    assert page.ask("GET", "/api/status", cookie).status == 401
    assert page.token != token and page.get("/api/status").status == 200
    read_all(stream)
    stream.close()
    os.chmod(page.token_file, 0o644)
    wait_for(lambda: "other users have access to it" in page.errors.read_text(), "what is wrong with it")
    assert page.ask("GET", "/api/status", {"Authorization": f"Bearer {page.token}"}).status == 200


# -- S4, S5: the token file -------------------------------------------------------------------------------


def test_s4_the_token_is_only_in_its_file(pages: Callable[[], Page]) -> None:
    """S4: The token is in no other file or log, and in no command line, environment or answer."""
    page = pages()
    page.scheduler.start()
    page.start()
    token = page.token
    job = page.scheduler.cli("submit", "--", "true").stdout.strip()
    page.scheduler.wait_state(int(job), "done")
    answers = [page.login(), page.login("wrong"), page.get("/api/status"), page.get("/"), page.get("/nothing"), page.get(f"/{token}"),
               page.ask("GET", f"/?token={token}"), page.post("/api/nothing", {"token": token}), page.ask("GET", "/", {"Host": token}),
               page.ask("GET", "/", {"Authorization": f"Bearer {token}x"})]  # fmt: skip
    page.raw(f"{token}\r\n\r\n".encode())
    for answer in answers:
        assert token not in answer.text and token not in str(answer.pairs)
        assert answer.headers["referrer-policy"] == "no-referrer"
    processes = [page.pid, page.scheduler.pid, page.scheduler.supervisor_pid()]
    for pid in processes:
        for what in ("cmdline", "environ", "comm"):
            assert token.encode() not in Path(f"/proc/{pid}/{what}").read_bytes(), (pid, what)
    assert page.stop() == 0 and page.scheduler.stop() == 0  # a running process could remove temporary files
    holding = [str(one) for one in page.folder.rglob("*") if one.is_file() and token.encode() in one.read_bytes()]
    assert holding == [str(page.token_file)]


def test_s5_the_token_file_is_created_private(tmp_path: Path) -> None:
    """S5: Under umask 000 the token file is created with mode 0600. No file has a wider mode at any time."""
    trace = tmp_path / "trace"
    program = "import os,sys; os.umask(0); from scheduler.web.auth import token_of; from scheduler.store.paths import Places; token_of(Places(sys.argv[1]))"
    folder = tmp_path / "here"
    folder.mkdir(mode=0o700)
    words = [
        "strace",
        "-f",
        "-qq",
        "-s",
        "200",
        "-e",
        "trace=openat,open,creat,chmod,fchmod,fchmodat,linkat,link,renameat2,rename",
        "-o",
        str(trace),
    ]
    done = subprocess.run(
        [*words, sys.executable, "-c", program, str(folder / "gpu_scheduler_state.json")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    made = [line for line in lines if "O_CREAT" in line and "web-token" in line]
    assert made and all(re.search(r"O_EXCL.*, 0600\)", line) and "O_NOFOLLOW" in line for line in made), made
    changed = [line for line in lines if "chmod" in line and "0600" not in line and "0700" not in line]
    assert not changed
    status = (folder / ".gpujob" / "web-token").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 1


def test_s5_pages_that_start_together_share_one_complete_token(tmp_path: Path) -> None:
    """S5: 40 processes ask for the token at the same time, and 40 others wait for the token file and read it.

    All 80 processes get the same complete token.
    """
    folder = tmp_path / "here"
    folder.mkdir(mode=0o700)
    places = Places(str(folder / "gpu_scheduler_state.json"))
    places.make()
    read, write = os.pipe()
    go_read, go_write = os.pipe()
    children = []
    for number in range(80):
        pid = os.fork()
        if not pid:
            os.umask(0)
            os.close(go_write)
            os.read(go_read, 1)
            code = 1
            try:
                if number % 2:
                    os.write(write, token_of(places).encode() + b"\n")
                else:
                    path = Path(places.web_token)
                    until = time.monotonic() + 60
                    while time.monotonic() < until and not path.exists():
                        continue
                    assert stat.S_IMODE(path.stat().st_mode) == 0o600
                    os.write(write, path.read_bytes())
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(go_read)
    os.close(go_write)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read().split("\n")[:-1]
    assert codes == [0] * 80
    assert len(said) == 80 and len(set(said)) == 1 and len(said[0]) >= 32
    assert sorted(os.listdir(places.state_dir)) == ["attempts", "env", "sessions", "web-token"]


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can be another user too")
def test_s5_another_user_cannot_open_the_token_file_while_it_is_created() -> None:
    """S5: Another user can never open the token file or its folder while they are created.

    The umask is 000 here, and all users may write to the folder above.
    """
    place = Path(tempfile.mkdtemp(prefix="gpujob-s5-"))  # not in pytest's folders, which other users cannot enter
    place.chmod(0o755)
    marks, folder = place / "marks", place / "open"
    for one in (marks, folder):
        one.mkdir()
        one.chmod(0o777)
    watcher = os.fork()
    if not watcher:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        house = folder / ".gpujob"
        (marks / "begun").touch()
        while True:
            for path in (house / "web-token", house, folder / "control"):
                try:
                    fd = os.open(path, os.O_RDONLY)
                except OSError:
                    continue
                (marks / f"opened-{path.name}").touch()
                os.close(fd)
    old = os.umask(0)
    try:
        wait_for((marks / "begun").exists, "the watcher")
        for _ in range(100):
            places = Places(str(folder / "gpu_scheduler_state.json"))
            assert len(token_of(places)) >= 32
            os.unlink(places.web_token)
        (folder / "control").touch()
        wait_for((marks / "opened-control").exists, "the watcher opens what it may")
        assert sorted(os.listdir(marks)) == ["begun", "opened-control"]
    finally:
        os.umask(old)
        os.kill(watcher, 9)
        os.waitpid(watcher, 0)
        shutil.rmtree(place)


@pytest.mark.parametrize("what", ["mode", "group", "short", "empty", "link", "folder", "fifo", "words", "binary"])
def test_s5_an_unsafe_token_file_is_refused_and_not_changed(tmp_path: Path, what: str) -> None:
    """S5: A token file with an unsafe mode, type or content is refused with one line, and not changed."""
    places = Places(str(tmp_path / "gpu_scheduler_state.json"))
    tmp_path.chmod(0o700)
    places.make()
    path = Path(places.web_token)
    token = "t" * 43 + "\n"
    path.write_text(
        {"short": "t" * 31, "empty": "", "words": "two words " * 10, "binary": "\x01" * 40}.get(what, token)
    )
    path.chmod({"mode": 0o644, "group": 0o640}.get(what, 0o600))
    if what in ("link", "folder", "fifo"):
        path.unlink()
        other = tmp_path / "other"
        other.write_text(token)
        other.chmod(0o600)
        {"link": lambda: path.symlink_to(other), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path, 0o600)}[what]()
    before = path.lstat()
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "web", "--port", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert str(path) in done.stderr and "remove the file; gpujob web creates a new token" in done.stderr
    assert path.lstat().st_mtime == before.st_mtime and path.lstat().st_ino == before.st_ino


# -- S6, S20, K16: names and paths ------------------------------------------------------------------------


def test_s6_names_that_are_not_in_the_table_of_routes_are_404(page: Page) -> None:
    """S6: A name that is not in the table of routes is answered with 404.

    Examples are attributes, dots and random names.
    """
    names = [
        "__class__",
        "__init__",
        "client.__class__",
        "places.make",
        "..",
        "...",
        "os.system",
        "constructor",
        "toString",
    ]
    dice = random.Random(6)
    names += [
        "".join(dice.choices("abcdefghijklmnopqrstuvwxyz_.0123456789-~", k=dice.randint(1, 30))) for _ in range(150)
    ]
    known = {part for path in ROUTES for part in path.split("/")}
    for name in names:
        if name in known:
            continue
        assert page.get(f"/{name}").status == 404, name
        assert page.post(f"/api/jobs/1/{name}").status == 404, name
        assert page.post(f"/api/queue/{name}").status == 404, name


@pytest.mark.parametrize(
    "path",
    ["/..", "/../etc/passwd", "/static/../api/status", "/%2e%2e/etc/passwd", "/static/%2e%2e%2f%2e%2e%2fetc/passwd", "//api/status", "/api//status",
     "/api/%73tatus", "/api/status/", "/api/status%00", "/api/status;x", "/api/./status", "/api/status/..", "/\\api\\status", "/API/status",
     "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/api/jobs/%31", "http://127.0.0.1/api/status", "*"],
)  # fmt: skip
def test_k16_s20_a_path_in_another_spelling_is_404(page: Page, path: str) -> None:
    """K16, S20: If a path is not written exactly as in the table of routes, the answer is 404."""
    answer = page.get(path)
    assert answer.status == 404, answer
    assert "root:" not in answer.text
    check_headers(answer)


# -- S15, S19: headers of answers, errors -----------------------------------------------------------------


@pytest.mark.smoke
def test_s19_every_answer_has_the_security_headers(page: Page) -> None:
    """S19: Pages, API answers and errors of all kinds have the security headers."""
    port = page.port
    answers = [page.get("/"), page.get("/api/status"), page.get("/nothing"), page.ask("DELETE", "/api/status", page.bearer), page.login(),
               page.ask("POST", "/api/jobs", {**page.bearer, **JSON}, b"{"), page.ask("GET", "/", {"Host": "x"})]  # fmt: skip
    for answer in answers:
        check_headers(answer)
    for data in (
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX Y: z\r\n\r\n".encode(),
    ):
        head = page.raw(data).partition(b"\r\n\r\n")[0].decode().split("\r\n")
        assert head[0].startswith("HTTP/1.1 400 "), head
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        check_headers(Answer(400, headers, b""))


def test_s19_errors_are_json_for_programs_and_pages_for_people(page: Page) -> None:
    """S19, P3: Errors of the API are JSON; errors of pages are HTML for a browser."""
    people = {"Accept": "text/html,application/xhtml+xml"}
    assert page.ask("GET", "/api/status", people).json()["error"]
    assert "<form" in page.ask("GET", "/jobs/3", people).text
    refused = page.ask("GET", "/", {**people, "Host": f"<b>evil</b>:{page.port}"})
    assert refused.status == 421 and "<h1>" in refused.text and "<b>" not in refused.text


# -- S22, S23 ---------------------------------------------------------------------------------------------


def test_s23_the_page_imports_no_module_from_the_project_folder(pages: Callable[[], Page]) -> None:
    """S23: Python files in the project's folder are not imported in place of libraries."""
    page = pages()
    for name in ("starlette", "uvicorn", "h11", "token", "calls", "ssl", "logging"):
        (page.folder / f"{name}.py").write_text("open('stolen', 'w').close()\n")
    page.start()
    assert page.get("/api/status").status == 200
    assert not (page.folder / "stolen").exists()


def test_the_page_works_without_a_scheduler_and_notices_a_later_one(pages: Callable[[], Page]) -> None:
    """Without a scheduler the page shows the store; it notices a scheduler that starts later."""
    page = pages().start()
    assert page.get("/api/status").json()["daemon"]["alive"] is False
    page.scheduler.start()
    wait_for(lambda: page.get("/api/status").json()["daemon"]["alive"], "the page sees the scheduler")
