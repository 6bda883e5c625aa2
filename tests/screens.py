"""Helpers for GNU Screen: a socket folder for each test, a terminal, and functions that find and end sessions."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from scheduler.core.job import Process
from scheduler.system.processes import environment_of, seen, send

LIMIT_S = 60.0


def need_screen() -> str:
    """Return the path of the program `screen`. If `screen` is not installed, skip the test; in CI, fail the test."""
    found = shutil.which("screen")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("GNU screen is not installed")
        pytest.skip("GNU screen is not installed")
    return found


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Yield a private folder for the sockets of GNU Screen (SCREENDIR). At the end, kill all sessions in the folder.

    The folder's path is short, because the path of a socket has a limited length.
    """
    need_screen()
    folder = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))  # mode 700
    try:
        yield folder
    finally:
        end_marked(f"SCREENDIR={folder}")
        shutil.rmtree(folder)


def marked(*marks: str) -> list[Process]:
    """Return the living processes in whose environment an entry begins with one of ``marks``."""
    found = []
    wanted = tuple(os.fsencode(mark) for mark in marks)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            one = seen(int(name))
            if one is not None and one.alive and any(e.startswith(wanted) for e in environment_of(one.pid)):
                found.append(Process(one.pid, one.ticks))
    return found


def end_marked(*marks: str) -> None:
    """Kill the processes that `marked` returns (servers, shims, jobs), until `marked` finds none."""
    end = time.monotonic() + LIMIT_S
    while found := marked(*marks):
        for process in found:
            send(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        assert time.monotonic() < end, f"not ended: {found}"
        time.sleep(0.01)


def sessions_in(folder: Path | str) -> dict[str, int]:
    """Return name → pid for each living session whose socket is in this folder."""
    made = {}
    for entry in os.listdir(folder):
        number, _, name = entry.partition(".")
        one = seen(int(number)) if number.isdigit() else None
        if one is not None and one.alive:
            made[name] = int(number)
    return made


def listed(environ: Mapping[str, str]) -> str:
    """Return the output of `screen -ls`."""
    done = subprocess.run(["screen", "-ls"], env=dict(environ), capture_output=True, text=True, timeout=LIMIT_S)
    return done.stdout + done.stderr


def tell(environ: Mapping[str, str], session: str, *words: str) -> None:
    """Send a command of GNU Screen to a session.

    ``session`` must be PID.NAME. If only NAME were given, `screen` would also choose a session whose name merely begins
    with NAME.
    """
    number, dot, _ = session.partition(".")
    assert dot and number.isdigit(), session
    done = subprocess.run(
        ["screen", "-S", session, "-X", *words], env=dict(environ), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done


def foreign_session(environ: Mapping[str, str], name: str, *argv: str) -> int:
    """Start a session that belongs to no scheduler; return the pid of the session's `screen` process."""
    subprocess.run(["screen", "-c", os.devnull, "-dmS", name, *argv], env=dict(environ), check=True, timeout=LIMIT_S)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for line in listed(environ).splitlines():
            word = line.split()[0] if line.split() else ""
            if word.partition(".")[2] == name and "Dead" not in line:
                return int(word.partition(".")[0])
        time.sleep(0.02)
    raise AssertionError(f"no session {name}: {listed(environ)}")


class Terminal:
    """A terminal in which one command runs.

    ``text``: the output that the terminal has shown; ``code``: the exit code of the command, None while it runs.
    """

    def __init__(self, argv: Iterable[str], environ: Mapping[str, str], rows: int = 24, columns: int = 80) -> None:
        argv = list(argv)
        self.fd, slave = pty.openpty()
        self.resize(rows, columns)
        program = shutil.which(argv[0], path=environ.get("PATH"))
        assert program
        self.pid = os.posix_spawn(
            program,
            argv,
            {**environ, "TERM": "xterm"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.ttyname(slave), os.O_RDWR, 0),  # becomes its controlling terminal
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, 0, 2),
            ],
            setsid=True,
        )
        os.close(slave)
        self.text = b""
        self.code: int | None = None

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal, as a window manager does."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Send these bytes to the command, as if a user typed them."""
        os.write(self.fd, keys)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Read the terminal's output until ``condition`` returns a true value; fail after ``LIMIT_S`` seconds."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"not seen: {what}: {self.text[-2000:]!r}"
            self.read()

    def read(self) -> None:
        """Append the available output to ``text``; wait at most 20 ms for output."""
        if not select.select([self.fd], [], [], 0.02)[0]:
            return
        with contextlib.suppress(OSError):  # the other side is closed
            self.text += os.read(self.fd, 65536)

    def shows(self, text: str) -> None:
        """Wait until the terminal has shown this text."""
        self.until(lambda: text.encode() in self.text, text)

    def ended(self) -> int:
        """Wait for the end of the command; return its exit code."""

        def check() -> bool:
            if self.code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
            return self.code is not None

        self.until(check, "the end of the command")
        assert self.code is not None
        return self.code

    def close(self) -> None:
        """Close the terminal, so that the command gets SIGHUP, and wait for the command's end.

        After ``LIMIT_S`` seconds, kill the command.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        end = time.monotonic() + LIMIT_S
        while self.code is None and time.monotonic() < end:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)  # the pid still belongs to this child, since it was not reaped
            os.waitpid(self.pid, 0)
