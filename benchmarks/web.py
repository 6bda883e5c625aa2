"""Case web: the delay of job starts while clients load the page."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append, end, ledger, wait_until
from benchmarks.page import Page
from benchmarks.plan import Plan

IDLE, RATE, FLOOD_S, WAYS = 1000, 1000.0, 60.0, 16
PAUSE_S = 0.05


@contextlib.contextmanager
def _idle(page: Page, number: int) -> Iterator[dict[str, object]]:
    """Keep ``number`` connections open, on which nothing is sent. Replace each connection that the page closes."""
    opened: list[socket.socket] = []
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            while len(opened) < number and not over.is_set():
                with contextlib.suppress(OSError):
                    opened.append(socket.create_connection(("127.0.0.1", page.port), timeout=10))
            watch = select.poll()
            by_fd = {one.fileno(): one for one in opened}
            for fd in by_fd:
                watch.register(fd, select.POLLIN | select.POLLHUP)
            for fd, _ in watch.poll(200):
                opened.remove(by_fd[fd])
                by_fd[fd].close()

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    wait_until(lambda: len(opened) >= number, "idle connections", 60.0)
    try:
        yield {}
    finally:
        over.set()
        holding.join(20.0)
        for one in opened:
            one.close()


@contextlib.contextmanager
def _slow(page: Page) -> Iterator[dict[str, object]]:
    """Run two slow clients. When the page closes the connection of a client, the client connects again.

    One client sends a header byte every 0.5 s. The other client sends requests and never reads the answers.
    """
    over = threading.Event()
    ask = f"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode()

    def drip() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", page.port), timeout=5) as one:
                one.sendall(b"GET / HTTP/1.1\r\nX: ")
                while not over.wait(0.5):
                    one.sendall(b"x")

    def glut() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", page.port), timeout=1) as one:
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        one.sendall(ask)

    threads = [threading.Thread(target=what, daemon=True) for what in (drip, glut)]
    for one in threads:
        one.start()
    try:
        yield {}
    finally:
        over.set()
        for one in threads:
            one.join(10.0)


@contextlib.contextmanager
def _flood(page: Page, seconds: float) -> Iterator[dict[str, object]]:
    """Run the flooding client in another process. After the with block, the yielded dict holds the client's results."""
    words = [sys.executable, "-m", "benchmarks.flooding", str(page.port), str(RATE), str(seconds), str(WAYS)]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    client.stdin.write(page.token.encode() + b"\n")
    client.stdin.close()
    client.stdin = None
    told: dict[str, object] = {"client": client}
    try:
        yield told
        out, _ = client.communicate(timeout=seconds + 60)
        told.update(json.loads(out))
    finally:
        end(client)


def web(plan: Plan) -> Report:
    """Measure the time from the append of a line to the first instruction of its job.

    Measures without a page, with a page that nobody uses, and with clients that load the page.
    """
    count = plan.count(60)
    seconds = max(3.0, FLOOD_S * plan.scale)
    found: dict[str, list[float]] = {}
    rss: dict[str, float] = {}
    said: dict[str, object] = {}
    with House(plan.folder, gpus=2) as house:
        numbers = iter(range(10**6))

        def measure(name: str, enough: Callable[[int], bool]) -> None:
            found[name] = []
            while not enough(len(found[name])):
                progress(f"web, {name}: {len(found[name])}")
                found[name].append(_one(plan, house, f"n{next(numbers)}"))

        def some(done: int) -> bool:
            return done >= count

        _one(plan, house, "warm")
        measure("no page", some)
        page = Page(house)
        try:
            measure("a page nobody looks at", some)
            with _idle(page, IDLE):
                measure(f"{IDLE} idle connections", some)
                rss["idle"] = page.rss_mib
            with _slow(page):
                measure("slow clients", some)
                rss["slow"] = page.rss_mib
            with _flood(page, seconds) as told:
                client = told["client"]
                assert isinstance(client, subprocess.Popen)
                until = time.monotonic() + seconds
                measure(f"{RATE:.0f} requests/s for {seconds:g} s", lambda done: time.monotonic() > until)
                rss["flood"] = page.rss_mib
            said = {name: value for name, value in told.items() if name != "client"}
            measure("afterwards", some)
        finally:
            end(page.process)
    before = found["no page"]
    report = Report("web", "append to the job's first instruction, ms", ("", "p50", "p99", "worst", "p50 to no page"))
    for name, values in found.items():
        report.row(name, median(values), p99(values), max(values), median(values) / median(before))
    report.row(f"of the flood {said['sent']} sent in {said['seconds']:.0f} s; answered {said['answered']} by {said['whole_s']:.0f} s", "", "", "", "")  # fmt: skip
    report.row(
        f"memory of the page, MiB: {' '.join(f'{name} {value:.0f}' for name, value in rss.items())}", "", "", "", ""
    )
    report.figures = {**{name: spread(values) for name, values in found.items()}, "flood": said, "rss_mib": rss}
    return report


def _one(plan: Plan, house: House, word: str) -> float:
    """Append a line. Return the milliseconds from the append to the first instruction of the line's job."""
    path = house.path("web.ledger")
    before = os.path.getsize(path) if os.path.exists(path) else 0
    at = append(house.jobs_file, plan.programs.lines([f"{path} {word}"]))
    wait_until(lambda: os.path.exists(path) and os.path.getsize(path) > before, f"the job of {word}", step_s=0.01)
    name, began, _ = ledger(path)[-1]
    assert name == word
    time.sleep(PAUSE_S)
    return (began - at) / 1e6
