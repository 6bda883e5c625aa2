"""Tests of `start --web`: the page is a child process of the daemon, which never waits for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stories.harness import alive, wait_for
from tests.web.page import Page, fixed_port


def begin(page: Page, *words: str, port: int = 0) -> Page:
    """Start the scheduler with its page; return the page once the scheduler has printed the address."""
    page.scheduler.start("--web", f"--web-port={port}", *words)
    return found(page)


def found(page: Page, before: int = 0) -> Page:
    """Wait until the scheduler has printed more than ``before`` addresses; set the page's port from the last one."""
    told = wait_for(lambda: re.findall(r"web page: http://127.0.0.1:(\d+)/", page.scheduler.said())[before:], "a page")
    page.port = int(told[-1])
    return page


def pid_of(page: Page) -> int:
    """Return the pid of the page, which is a child of the daemon."""
    words = (b"\0web\0--state-file\0" + bytes(page.folder) + b"/").replace(b"//", b"/")
    children = Path(f"/proc/{page.scheduler.pid}/task/{page.scheduler.pid}/children").read_text().split()
    return next(int(pid) for pid in children if words in Path(f"/proc/{pid}/cmdline").read_bytes())


def links(pid: int) -> set[str]:
    """Return the targets of the open descriptors of a process.

    Descriptors that the process closes during the call are left out.
    """
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


@pytest.mark.smoke
def test_start_web_starts_and_ends_the_page(pages: Callable[[], Page]) -> None:
    """`start --web` prints how to reach the page, and the page ends with the scheduler."""
    page = begin(pages())
    assert page.get("/api/status").json()["daemon"]["pid"] == page.scheduler.pid
    pid = pid_of(page)
    page.scheduler.says(f"cat {page.token_file}")  # printed as a separate line after the address
    assert page.scheduler.stop() == 0
    wait_for(lambda: not alive(pid), "the page ends too")


def test_the_page_ends_when_the_scheduler_is_killed(pages: Callable[[], Page]) -> None:
    """If the scheduler is killed, its page ends, though a running job and the supervisor live on."""
    page = begin(pages())
    page.scheduler.hold("long")
    page.scheduler.append(page.scheduler.line("long"))
    wait_for(lambda: page.scheduler.starts("long"), "a job runs")
    pid, supervisor = pid_of(page), page.scheduler.supervisor_pid()
    job = int(page.scheduler.ledger()[0][2])
    ends = links(page.scheduler.pid)
    life = os.readlink(f"/proc/{pid}/fd/3")
    assert life.startswith("pipe:") and life in ends
    for other in (supervisor, job):
        assert life not in links(other)
    page.scheduler.kill()
    wait_for(lambda: not alive(pid), "the page ends too")
    assert alive(job)
    page.scheduler.release("long")


def test_k13_jobs_run_while_the_port_of_the_page_is_in_use(pages: Callable[[], Page]) -> None:
    """K13: If the port is in use, this is reported once, with the process that uses the port. Jobs run.

    The page starts when the port is free.
    """
    page = pages()
    with socket.socket() as taken:
        port = fixed_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        page.scheduler.start("--web", f"--web-port={port}")
        wait_for(
            lambda: f"port {port}: it is in use by pid {os.getpid()} " in page.scheduler.said(), "who has the port"
        )
        page.scheduler.append(page.scheduler.line("a"))
        page.scheduler.wait_ended(1)
        wait_for(lambda: page.scheduler.said().count(": it is in use") == 1, "said once")
    found(page)
    assert page.port == port and page.get("/api/status").status == 200
    assert page.scheduler.said().count(": it is in use") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_k10_a_page_that_dies_is_started_again(pages: Callable[[], Page], number: int) -> None:
    """A page that dies is started again; running jobs are not affected."""
    page = begin(pages())
    page.scheduler.hold("long")
    page.scheduler.append(page.scheduler.line("long"))
    wait_for(lambda: page.scheduler.starts("long"), "a job runs")
    first = pid_of(page)
    os.kill(first, number)
    found(page, before=1)
    assert pid_of(page) != first and page.get("/api/status").status == 200
    page.scheduler.release("long")
    assert set(page.scheduler.wait_ended(1).values()) == {"done"}


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_k12_a_stopped_page_delays_no_job_and_no_verb(pages: Callable[[], Page], end: str) -> None:
    """K10, K12: A stopped page (SIGSTOP) delays neither jobs nor verbs nor the end of the scheduler.

    The page ends after the scheduler has ended.
    """
    page = begin(pages())
    pid = pid_of(page)
    os.kill(pid, signal.SIGSTOP)
    try:
        with page.connect() as waiting:
            waiting.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode())
            page.scheduler.append(page.scheduler.line("a"), page.scheduler.line("b"))
            assert set(page.scheduler.wait_ended(2).values()) == {"done"}
            page.scheduler.cli("pause", "0")
            assert page.scheduler.status()["gpus"][0]["paused"] is True
            if end == "SIGKILL":
                page.scheduler.kill()
            else:
                assert page.scheduler.stop() == 0
        wait_for(lambda: not alive(pid), "it goes on, and ends")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_k13_jobs_run_if_the_libraries_of_the_page_are_missing(pages: Callable[[], Page]) -> None:
    """P3: Without the page's libraries, the scheduler prints how to install them, and runs jobs."""
    page = pages()
    broken = page.folder / "broken"
    broken.mkdir(mode=0o700)
    (broken / "uvicorn.py").write_text("raise ImportError('no uvicorn here', name='uvicorn')\n")
    page.scheduler.start("--web", "--web-port=0", PYTHONPATH=f"{broken}:{page.scheduler.environ['PYTHONPATH']}")
    wait_for(lambda: "pip install 'gpujob[web]'" in page.scheduler.said(), "what to install")
    page.scheduler.append(page.scheduler.line("a"))
    page.scheduler.wait_ended(1)


def test_s4_output_of_the_page_is_logged_and_limited(pages: Callable[[], Page]) -> None:
    """S4, K12: If a page prints without end, the scheduler logs only part of the output, and still runs jobs."""
    page = pages()
    loud = page.folder / "loud"
    loud.mkdir(mode=0o700)
    (loud / "uvicorn.py").write_text(
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nn = 0\n"
        "while True:\n    n += 1\n    os.write(2, b'line %d \\x1b[31m of very many\\n' % n * 100)\n"
    )
    page.scheduler.start("--web", "--web-port=0", PYTHONPATH=f"{loud}:{page.scheduler.environ['PYTHONPATH']}")
    wait_for(lambda: "of very many" in page.scheduler.said(), "a line of it")
    page.scheduler.append(*(page.scheduler.line(str(number)) for number in range(5)))
    page.scheduler.wait_ended(5)
    assert page.scheduler.said().count("of very many") < 100
    assert "\x1b" not in page.scheduler.said()
    assert page.scheduler.stop() == 0


def test_the_page_is_off_by_default_and_can_be_set_in_the_config(pages: Callable[[], Page]) -> None:
    """S1, S3.1: There is no page by default; `web: true` in the config starts one, except for `gpujob run`."""
    plain = pages()
    plain.scheduler.start()
    assert "the page" not in plain.scheduler.said() and not plain.token_file.exists()
    page = pages()
    (page.folder / "config.yaml").write_text("web: true\nweb_port: 0\n")
    (page.folder / "config.yaml").chmod(0o600)
    page.scheduler.start()
    found(page)
    assert page.get("/api/status").status == 200
    done = page.scheduler.cli("start", "--web-port", "70000", code=2)
    assert "65535" in done.stderr
    dispatcher = pages()
    (dispatcher.folder / "config.yaml").write_text("web: true\nweb_port: 0\n")
    (dispatcher.folder / "config.yaml").chmod(0o600)
    (dispatcher.folder / "commands.txt").write_text("true\n")
    said = dispatcher.scheduler.cli("run", "--gpus", "1")
    assert "the page" not in said.stdout + said.stderr
    assert not dispatcher.token_file.exists()


def test_b02_the_page_is_not_mistaken_for_a_job_when_the_supervisor_dies(pages: Callable[[], Page]) -> None:
    """B02: If the supervisor dies before it starts a claimed attempt, the page is not mistaken for the job's process.

    A mistake would be possible because the page is the newest child of the daemon.
    """
    page = pages()
    page.scheduler.start("--web", "--web-port=0", GPUJOB_CRASH_AT="supervisor.claimed:2")
    pid = pid_of(found(page))
    page.scheduler.append(page.scheduler.line("a"))
    page.scheduler.wait_ended(1)
    supervisor = page.scheduler.supervisor_pid()
    page.scheduler.append(page.scheduler.line("b"))
    wait_for(lambda: not alive(supervisor), "the supervisor dies")
    assert set(page.scheduler.wait_ended(2).values()) == {"done"}
    assert page.scheduler.starts("b") == 1
    assert page.get("/api/status").status == 200 and pid_of(page) == pid


def test_start_detach_prints_the_address(pages: Callable[[], Page]) -> None:
    """`start --detach --web` prints address, token file and tunnel, although the page has not started yet."""
    page = pages()
    page.port = fixed_port()
    done = page.scheduler.cli(
        "start", "--gpus", "1", "--gpu-interval", "0", "--detach", "--web", "--web-port", str(page.port)
    )
    pid = int(re.findall(r"kill (\d+)", done.stdout)[0])
    try:
        for words in (
            f"web page: http://127.0.0.1:{page.port}/",
            f"token: cat {page.token_file}",
            f"ssh -L {page.port}:127.0.0.1:{page.port} ",
        ):
            assert words in done.stdout, done.stdout
        wait_for(lambda: page.token_file.exists() and _answers(page), "the page")
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not alive(pid), "its end")


def _answers(page: Page) -> bool:
    try:
        return page.get("/api/status").status == 200
    except OSError:
        return False
