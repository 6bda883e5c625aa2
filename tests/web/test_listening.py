"""Tests of the page with slow clients, invalid requests, too many connections and guessed tokens.

Further tests are about the port of the page, TLS, and the end of the page.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler.web import auth_throttle, connections
from tests.stories.harness import LONG, wait_for
from tests.web.page import Page, fixed_port, read_all

FLAT_KIB = 24 << 10  # KiB by which the page's memory may grow in a test


def head(page: Page, method: str = "GET", path: str = "/api/status", more: str = "", by_token: bool = True) -> bytes:
    """Return the head of a request as bytes. The head contains the token, unless ``by_token`` is False."""
    token = f"Authorization: Bearer {page.token}\r\n" if by_token else ""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n{token}{more}\r\n".encode()


def closed(connection: socket.socket) -> bool:
    """Return whether the server has closed this connection; data that has arrived is discarded."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            continue
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """Raise this process's limit of file descriptors to ``wanted`` or to its hard limit; restore it afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def many(page: Page, number: int) -> Iterator[list[socket.socket]]:
    """Yield ``number`` connections that send nothing; close them afterwards."""
    opened: list[socket.socket] = []
    try:
        for _ in range(number):
            opened.append(page.connect())
        yield opened
    finally:
        for one in opened:
            one.close()


# -- K10, S21: slow clients -------------------------------------------------------------------------------


@pytest.mark.waits
def test_k10_s21_a_slow_request_head_is_408_and_delays_no_other_client(page: Page) -> None:
    """K10, S21: If the head of a request arrives byte by byte (slowloris), it is answered with 408 at the time limit.

    Other clients are served meanwhile.
    """
    with page.connect() as slow, page.connect() as silent:
        over = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
                while not over.wait(0.2):
                    slow.sendall(b"x")

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        assert page.get("/api/status").status == 200
        try:
            answer = read_all(slow)
        finally:
            over.set()
            dripping.join()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")  # a reset of the connection may destroy the answer
        assert read_all(silent) == b""
    assert page.get("/api/status").status == 200


@pytest.mark.waits
def test_k10_an_incomplete_body_is_408_at_the_time_limit(page: Page) -> None:
    """K10: If a body is not complete within the time limit, the answer is 408."""
    with page.connect() as slow:
        slow.sendall(
            head(page, "POST", "/api/jobs", "Content-Type: application/json\r\nContent-Length: 1000\r\n") + b"{"
        )
        assert page.get("/api/status").status == 200
        assert read_all(slow).startswith(b"HTTP/1.1 408 ")


@pytest.mark.waits
def test_k10_an_idle_keep_alive_connection_is_closed(page: Page) -> None:
    """K10: The server closes a keep-alive connection on which no further request arrives."""
    with page.connect() as kept:
        kept.sendall(head(page))
        assert read_all(kept).startswith(b"HTTP/1.1 200 ")  # returns only because the server closed the connection


def test_k10_too_many_connections_close_the_oldest_idle_ones(page: Page) -> None:
    """K10, S21: If too many connections are open, the page closes the oldest idle connections and accepts new ones.

    Meanwhile the page answers requests, and jobs start.
    """
    before = page.rss_kib()
    with descriptors(4 * connections.MOST_OPEN), many(page, connections.MOST_OPEN + 100) as opened:
        assert page.get("/api/status").status == 200
        opened[-1].sendall(head(page))  # sent early: the page closes the connection after HEAD_S seconds
        assert opened[-1].recv(100).startswith(b"HTTP/1.1 200 ")
        page.scheduler.append(page.scheduler.line("k10"))
        wait_for(lambda: page.scheduler.starts("k10"), "a job starts meanwhile")
        wait_for(lambda: all(map(closed, opened[:50])), "the oldest are cut")
        fds = len(os.listdir(f"/proc/{page.pid}/fd"))
        assert fds < connections.MOST_OPEN + 50
    wait_for(lambda: len(os.listdir(f"/proc/{page.pid}/fd")) < 50, "they are gone")
    assert page.rss_kib() - before < FLAT_KIB


@pytest.mark.waits
def test_k10_a_client_that_reads_no_answers_is_disconnected(page: Page) -> None:
    """K10: A client that reads no answers is disconnected, and the answers to it take little memory in the page."""
    before = page.rss_kib()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(100)
        lazy.connect(("127.0.0.1", page.port))
        asks = head(page, path="/") * 100
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                lazy.sendall(asks)  # blocks when the buffers are full; fails when the server disconnects
        assert page.rss_kib() - before < FLAT_KIB
    assert page.get("/api/status").status == 200


# -- K11: invalid requests --------------------------------------------------------------------------------


def nonsense(page: Page) -> dict[str, bytes]:
    """Return invalid requests: name → bytes. In some of them, a second request is hidden behind the first."""
    host = f"Host: 127.0.0.1:{page.port}\r\n"
    post = f"POST /api/jobs HTTP/1.1\r\n{host}Authorization: Bearer {page.token}\r\nContent-Type: application/json\r\n"
    inner = f"GET /api/status HTTP/1.1\r\n{host}\r\n"
    return {name: text.encode("latin-1") for name, text in {
        "HTTP/0.9": "GET /\r\n",
        "HTTP/0.9 with headers": f"GET /\r\n{host}\r\n",
        "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/3.0": f"GET / HTTP/3.0\r\n{host}\r\n",
        "no words": "\r\n\r\n\r\n\r\n x",
        "TLS": "\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + "\x00" * 100 + "\r\n\r\n",
        "zero bytes": "GET /\x00 HTTP/1.1\r\n" + host + "\r\n",
        "huge line": "GET /" + "a" * (1 << 20) + " HTTP/1.1\r\n" + host + "\r\n",
        "huge header": f"GET / HTTP/1.1\r\n{host}X: " + "a" * (1 << 20) + "\r\n\r\n",
        "many headers": f"GET / HTTP/1.1\r\n{host}" + "X: y\r\n" * 100_000 + "\r\n",
        "space before the colon": f"GET / HTTP/1.1\r\n{host}Content-Length : 5\r\n\r\nhello",
        "folded first header": f"GET / HTTP/1.1\r\n X: y\r\n{host}\r\n",
        "both lengths": f"{post}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}",
        "both lengths, the other way": f"{post}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n{inner}",
        "two lengths": f"{post}Content-Length: 4\r\nContent-Length: 5\r\n\r\n{{}}  {inner}",
        "two lengths in one": f"{post}Content-Length: 4, 5\r\n\r\n{{}}  {inner}",
        "negative length": f"{post}Content-Length: -1\r\n\r\n{{}}",
        "signed length": f"{post}Content-Length: +2\r\n\r\n{{}}",
        "hex length": f"{post}Content-Length: 0x2\r\n\r\n{{}}",
        "endless length": f"{post}Content-Length: {'9' * 5000}\r\n\r\n{{}}",
        "unknown encoding": f"{post}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{inner}",
        "two encodings": f"{post}Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n{inner}",
        "hidden encoding": f"{post}Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n{inner}",
        "wrong chunk size": f"{post}Transfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n{inner}",
        "huge chunk size": f"{post}Transfer-Encoding: chunked\r\n\r\n{'f' * 5000}\r\n{{}}\r\n",
        "chunk longer than said": f"{post}Transfer-Encoding: chunked\r\n\r\n1\r\n{{}}xx\r\n0\r\n\r\n{inner}",
        "chunk with a long extension": f"{post}Transfer-Encoding: chunked\r\n\r\n1;{'x' * (1 << 20)}\r\n{{\r\n0\r\n\r\n",
        "bare CR": f"GET / HTTP/1.1\r\n{host}X: a\rHost: evil.test\r\n\r\n",
    }.items()}  # fmt: skip


@pytest.mark.waits
def test_k11_an_invalid_request_is_4xx_and_closes_the_connection(page: Page) -> None:
    """K11: An invalid request gets one answer with a code 4xx, and the page closes the connection.

    The page does not read the bytes after the invalid request.
    """
    before = page.rss_kib()
    told = nonsense(page)
    with ThreadPoolExecutor(len(told)) as pool:  # for some requests the server waits until its time limit
        answers = dict(zip(told, pool.map(page.raw, told.values()), strict=True))
    for name, answer in answers.items():
        if not answer and len(told[name]) > 100_000:
            continue  # the server closed the connection while the bytes were being sent
        assert re.match(rb"HTTP/1.1 4\d\d ", answer), (name, answer[:200])
        assert answer.count(b"HTTP/1.1 ") == 1, (name, answer)
        assert b"Traceback" not in answer
    assert page.get("/api/status").status == 200
    assert page.rss_kib() - before < FLAT_KIB


def test_k11_a_body_above_1_mib_is_413_and_not_kept_in_memory(page: Page) -> None:
    """K11: A body above 1 MiB is answered with 413, whether its length is declared or it arrives in chunks.

    The client gets the answer while it still sends, and the page does not keep the body in memory.
    """
    before = page.rss_kib()
    # No larger sizes: the page reads and discards the rest for 3 s at most, and then resets the connection.
    for size in ((1 << 20) + 1, 8 << 20):
        assert page.post("/api/jobs", {"command": ["x" * size]}).status == 413
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    kind = {**page.bearer, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    assert page.ask("POST", "/api/jobs", kind, piece * 100 + b"0\r\n\r\n").status == 413
    lied = head(page, "POST", "/api/jobs", f"Content-Type: application/json\r\nContent-Length: {10**18}\r\n")
    assert page.raw(lied + b"{").startswith(b"HTTP/1.1 413 ")
    assert page.ask("POST", "/api/jobs", {"Content-Type": "application/json"}, b" " * (4 << 20)).status == 401
    assert page.rss_kib() - before < FLAT_KIB


def test_k11_chunks_of_one_byte_and_a_body_of_exactly_1_mib_are_accepted(page: Page) -> None:
    """K11: Chunks of one byte and a body of exactly 1 MiB are accepted."""
    kind = {**page.bearer, "Content-Type": "application/json"}
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b"{" + b" " * 20_000 + b"}") + b"0\r\n\r\n"
    assert page.ask("POST", "/api/nothing", {**kind, "Transfer-Encoding": "chunked"}, chunks).status == 404
    assert page.ask("POST", "/api/nothing", kind, b"{}".ljust(1 << 20)).status == 404
    assert page.ask("POST", "/api/nothing", {**kind, "Expect": "100-continue"}, b"{}").status == 404


def test_k11_pipelined_requests_are_answered_in_order(page: Page) -> None:
    """K11: Pipelined requests are answered in order; the body of a refused request is not read as a request."""
    json = "Content-Type: application/json\r\n"
    inner = head(page).decode()
    text = (
        head(page).decode() * 2
        + head(page, "POST", "/api/nothing", f"{json}Content-Length: 2\r\n").decode() + "{}"
        + head(page, "POST", "/api/nothing", f"Content-Type: text/plain\r\nContent-Length: {len(inner)}\r\n").decode() + inner
        + head(page, "GET", "/api/nothing", f"Content-Length: {len(inner)}\r\n").decode() + inner
        + head(page, more="Connection: close\r\n").decode()
    )  # fmt: skip
    codes = re.findall(rb"HTTP/1.1 (\d+) ", page.raw(text.encode()))
    assert codes == [b"200", b"200", b"404", b"415", b"404", b"200"]


def test_k11_an_incomplete_request_is_400(page: Page) -> None:
    """K11: If the client stops sending before the declared length is reached, the answer is 400.

    A complete request is answered even if the client has closed the sending side of its connection.
    """
    for data in (
        head(page, "POST", "/api/jobs", "Content-Type: application/json\r\nContent-Length: 50\r\n") + b"{}",
        b"GET / HT",
    ):
        with page.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection).startswith(b"HTTP/1.1 400 "), data
    with page.connect() as connection:  # a complete request; its sender then closes its side, as `| nc` does
        connection.sendall(head(page))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


# -- K13: the port ----------------------------------------------------------------------------------------


def test_k13_a_port_in_use_is_one_error_line_that_names_the_process(page: Page, pages: Callable[[], Page]) -> None:
    """K13: If the port is in use, `gpujob web` prints one line that names the process (docs/json.md).

    It exits with 1.
    """
    other = pages().start("--port", str(page.port), ready=False)
    assert other.process is not None and other.process.wait(60) == 1
    said = other.said()
    assert said.count("\n") == 1 and f"port {page.port}: it is in use by pid {page.pid} " in said and "--port" in said
    assert page.get("/api/status").status == 200


def test_k13_the_port_can_be_used_again_immediately_after_a_kill(pages: Callable[[], Page]) -> None:
    """K13: If a page is killed, its port can be used again immediately, even if a client is still connected."""
    port = fixed_port()
    page = pages().start("--port", str(port))
    with page.connect() as left:
        left.sendall(head(page))
        assert left.recv(10)
        page.process.kill()  # type: ignore[union-attr]
        page.process.wait()  # type: ignore[union-attr]
    page.start("--port", str(port))
    assert page.port == port and page.get("/api/status").status == 200


@pytest.mark.parametrize("words", [("--port", "x"), ("--port", "65536"), ("--port", "-1"), ("--tls-cert", "x"), ("--host", "no such host", "--behind-proxy"), ("--tls-cert", "/dev/null", "--tls-key", "/dev/null")])  # fmt: skip
def test_k13_invalid_options_are_usage_errors_of_one_line(pages: Callable[[], Page], words: tuple[str, ...]) -> None:
    """P3: An invalid option is an error of one line with exit code 2."""
    page = pages().start(*words, ready=False)
    assert page.process is not None and page.process.wait(60) == 2
    assert page.said().count("\n") == 1


# -- K14: guesses -----------------------------------------------------------------------------------------


@pytest.mark.long_form
def test_k14_many_guessed_tokens_are_401_and_need_no_additional_memory(page: Page) -> None:
    """K14: A wrong token is answered with 401, and the right token stays valid.

    Many wrong tokens need no additional memory. The page logs only the number of wrong tokens.
    """
    before = page.rss_kib()
    guesses, workers = 10_000 if LONG else 1_000, 40
    request = b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer guess-%06d-%s\r\n\r\n"
    wrong = []

    def guess(worker: int) -> None:
        with page.connect() as connection, connection.makefile("rb") as stream:
            for number in range(guesses // workers):
                connection.sendall(request % (page.port, worker * 1000 + number, b"x" * 30))
                wrong.append(stream.readline().split()[1] != b"401")
                length = 0
                while (line := stream.readline().strip()) != b"":
                    name, _, value = line.lower().partition(b": ")
                    length = int(value) if name == b"content-length" else length
                stream.read(length)

    begun = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(guess, worker) for worker in range(workers)]
        while not all(one.done() for one in running):
            assert page.get("/api/status").status == 200
        for one in running:
            one.result()
    assert len(wrong) == guesses and not any(wrong)
    told = wait_for(
        lambda: re.findall(r"! (?:a|(\d+)) wrong tokens? w\w+ refused", page.errors.read_text()), "a line of the log"
    )
    assert len(told) <= 2 + (time.monotonic() - begun) / auth_throttle.EVERY_S
    assert "guess-" not in page.said()
    assert page.rss_kib() - before < FLAT_KIB


# -- end, TLS, printed lines ------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_k10_open_connections_do_not_delay_the_pages_end(pages: Callable[[], Page], number: int, code: int) -> None:
    """K10: Idle connections, incomplete requests and open streams do not delay the end of the page."""
    page = pages().start()
    with page.connect() as idle, page.connect() as half, page.connect() as body, page.connect() as stream:
        stream.sendall(head(page, path="/api/events"))
        assert stream.recv(100).startswith(b"HTTP/1.1 ")
        half.sendall(b"GET / HTTP/1.1\r\n")
        body.sendall(head(page, "POST", "/api/jobs", "Content-Type: application/json\r\nContent-Length: 9\r\n") + b"{")
        assert page.get("/api/status").status == 200
        assert page.stop(number) == code
        assert read_all(idle) == b""
    assert "Traceback" not in page.said()


def test_the_page_prints_its_address_token_file_and_tunnel_command(page: Page) -> None:
    """The page prints its address, the path of the token's file, and the command for an SSH tunnel."""
    # `Page.start` waits only for the first line.
    said = wait_for(lambda: (text := page.output.read_text()).count("\n") >= 3 and text, "all three lines")
    assert f"http://127.0.0.1:{page.port}/\n" in said
    assert f"cat {page.token_file}\n" in said
    assert f"ssh -L {page.port}:127.0.0.1:{page.port} " in said


def test_s1_the_page_can_listen_on_the_ipv6_loopback_address(pages: Callable[[], Page]) -> None:
    """S1: The page can listen on ::1, the loopback address of IPv6."""
    if (
        not Path("/proc/net/if_inet6").exists()
        or "00000000000000000000000000000001" not in Path("/proc/net/if_inet6").read_text()
    ):
        pytest.skip("no IPv6 here")
    page = pages().start("--host", "::1")
    with socket.create_connection(("::1", page.port), timeout=60) as connection:
        connection.sendall(
            head(page)
            .replace(b"Host: 127.0.0.1", b"Host: [::1]")
            .replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.waits
def test_s21_a_client_that_stops_in_its_handshake_delays_no_other(pages: Callable[[], Page], tmp_path: Path) -> None:
    """S1, S21: With a certificate the page uses HTTPS; a client that stops in its handshake delays no other client."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)], capture_output=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    page = pages().start("--tls-cert", str(cert), "--tls-key", str(key))
    assert f"https://127.0.0.1:{page.port}/" in page.said()
    context = ssl.create_default_context(cafile=str(cert))
    with page.connect() as half:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
        with page.connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as secure:
            form = f"token={page.token}"
            secure.sendall(
                f"POST /login HTTP/1.1\r\nHost: localhost:{page.port}\r\nOrigin: https://localhost:{page.port}\r\nConnection: close\r\n"
                f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(form)}\r\n\r\n{form}".encode()
            )
            answer = read_all(secure)  # type: ignore[arg-type]
        assert answer.startswith(b"HTTP/1.1 303 ") and b"; Secure" in answer
        assert read_all(half) == b""
    assert page.stop() == 0


def test_s1_without_its_libraries_the_page_prints_the_install_command(tmp_path: Path) -> None:
    """P3: Without its libraries, `gpujob web` prints one line with the install command and creates no files."""
    program = "import sys; sys.modules['uvicorn'] = None\nfrom scheduler.command_line import main\nsys.exit(main(['web', '--port', '0']))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr
        == "gpujob: web: cannot start the web page: the library uvicorn is not installed; pip install 'gpujob[web]'\n"
    )
    assert not (tmp_path / ".gpujob").exists()


def test_k12_jobs_start_and_all_requests_are_answered_in_a_flood(page: Page) -> None:
    """K12: 3,000 requests over six connections, sent without waiting for answers, are all answered.

    Jobs start meanwhile.
    """
    stat = Path(f"/proc/{page.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[16]) > 0, "it is nicer than the scheduler and its jobs"
    request, last = head(page), head(page, more="Connection: close\r\n")

    def flood(_worker: int) -> int:
        with page.connect() as connection:
            sending = threading.Thread(target=lambda: connection.sendall(request * 499 + last), daemon=True)
            sending.start()
            answers = read_all(connection)
            sending.join()
        return answers.count(b"HTTP/1.1 200 ")

    with ThreadPoolExecutor(6) as pool:
        answered = pool.map(flood, range(6))
        for number in range(5):
            page.scheduler.append(page.scheduler.line(f"k12-{number}"))
            wait_for(lambda key=f"k12-{number}": page.scheduler.starts(key), "a job starts")  # type: ignore[misc]
        assert list(answered) == [500] * 6
