"""Runs a part of gpujob as a child process, such as the web page (setting `web`), and restarts it when it dies."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping

from scheduler.core.backoff import Backoff
from scheduler.core.observations import Now
from scheduler.daemon.parts import NEVER
from scheduler.system.own_process import own_command, start_own

# Environment variable: number of a descriptor that is at end-of-file when the daemon is gone.
LIFE = "GPUJOB_WEB_CHILD"
LIFE_FD = 3
PORT_TAKEN = "!port "  # begins the last line of the page if its port is in use
FIRST_BREAK_S, LONGEST_BREAK_S, LONGEST_FOR_A_PORT_S = 1.0, 600.0, 30.0
LONG_LIFE_S = 60.0  # a child that lived this long is restarted without a longer back-off
PIECE = 4096
EVERY_S, MOST_LINES, MOST_BYTES = 10.0, 16, 1 << 16  # period in seconds; most lines and bytes of output in a period
LONGEST_LINE = 500


def web_child(
    state_file: str,
    config_file: str,
    port: int,
    environ: Mapping[str, str],
    epoll: select.epoll,
    tell: Callable[[str, int], None],
) -> HelperChild:
    """Return `gpujob web` as a child process."""
    options = {"state_file": state_file, "port": port, **({"config": config_file} if config_file else {})}
    return HelperChild("the web page", own_command("web", options), environ, epoll, tell)


class HelperChild:
    """A child process in its own POSIX session. No method blocks.

    ``what``: its name for people; ``tell`` logs a sentence at a level. ``epoll`` wakes the loop when the child prints a
    line or dies. ``longest_break_s``: the longest wait before a restart, in seconds.
    """

    def __init__(
        self,
        what: str,
        words: list[str],
        environ: Mapping[str, str],
        epoll: select.epoll,
        tell: Callable[[str, int], None],
        longest_break_s: float = LONGEST_BREAK_S,
    ) -> None:
        self._longest_s = longest_break_s
        self._what, self._words = what, words
        kept = {name: value for name, value in environ.items() if name != "GPUJOB_CRASH_AT"}
        self._environ = {**kept, LIFE: str(LIFE_FD), "PYTHONUNBUFFERED": "1"}
        self._epoll, self._tell = epoll, tell
        self._pid = 0
        self._life = self._said = -1  # our ends of two pipes: one is closed when we end, one carries the child's output
        self._rest = b""
        self._begun = self._due = 0.0
        self._break = Backoff(min(FIRST_BREAK_S, longest_break_s), longest_break_s)
        self._told: set[str] = set()  # lines already logged; cleared after a long life
        self._window, self._lines, self._bytes, self._deaf = 0.0, 0, 0, False
        self._port_taken = False

    def sessions(self) -> set[int]:
        """Return the POSIX session of the child, which belongs to no job; empty if there is no child."""
        return {self._pid} if self._pid else set()

    def due(self) -> float:
        """Return when the next step is due even without an event (monotonic seconds).

        The result is ``NEVER`` while the child runs normally.
        """
        if self._pid:
            return self._window + EVERY_S if self._deaf else NEVER
        return self._due

    def step(self, _now: Now) -> None:
        """Start the child when it is due, log its output, and notice when it dies."""
        now = time.monotonic()
        if not self._pid:
            if now >= self._due:
                self._start(now)
            return
        if now - self._window >= EVERY_S:
            self._window, self._lines, self._bytes = now, 0, 0
            if self._deaf:
                self._epoll.modify(self._said, select.EPOLLIN)
                self._deaf = False
        if not self._deaf:
            self._listen(now)

    def close(self) -> None:
        """Close the pipes. The child then ends, as it does when the daemon is killed."""
        self._forget()

    def _start(self, now: float) -> None:
        fds: list[int] = []
        try:
            fds += os.pipe2(os.O_CLOEXEC)
            fds += os.pipe2(os.O_CLOEXEC)
            theirs, ours, said, talk = fds
            os.set_blocking(said, False)
            if theirs == LIFE_FD:
                os.set_inheritable(theirs, True)
            self._pid = start_own(self._words, self._environ, files={1: talk, 2: talk, LIFE_FD: theirs})
        except OSError as error:
            for fd in fds:
                os.close(fd)
            self._rise(now, f"cannot start {self._what}: {error.strerror}")
            return
        for fd in (theirs, talk):
            os.close(fd)
        self._life, self._said, self._begun = ours, said, now
        self._epoll.register(said, select.EPOLLIN)

    def _listen(self, now: float) -> None:
        try:
            data = os.read(self._said, PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._died(now)
            return
        self._bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:PIECE]
        for line in lines:
            self._read_line(line)
        if self._bytes > MOST_BYTES:  # too much output: read no more until the next period
            self._epoll.modify(self._said, 0)
            self._deaf = True

    def _read_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()[:LONGEST_LINE].removeprefix("gpujob: ")
        self._port_taken = text.startswith(PORT_TAKEN)
        bad = text.startswith((PORT_TAKEN, "! ", "web: "))
        text = text.removeprefix(PORT_TAKEN).removeprefix("! ").removeprefix("web: ")
        self._lines += 1
        if not text or self._lines > MOST_LINES or text in self._told:
            return
        self._told.add(text)
        self._tell(text, 30 if bad else 20)

    def _died(self, now: float) -> None:
        """Schedule a restart after the child has died.

        If the child has lived for at least `LONG_LIFE_S` seconds, the back-off begins again with the shortest wait.
        """
        if self._rest:
            self._read_line(self._rest)
        lived = now - self._begun
        self._forget()
        if lived >= LONG_LIFE_S:
            self._break.reset()
            self._told.clear()
        most = LONGEST_FOR_A_PORT_S if self._port_taken else self._longest_s
        text = f"{self._what} ended and is restarted, each time after a longer wait; jobs are not affected"
        self._rise(now, "" if self._port_taken else text, most)

    def _rise(self, now: float, text: str, most: float | None = None) -> None:
        """Set the time of the next start of the child. The wait doubles with each call, up to ``most`` seconds
        (None: the longest wait).

        ``text`` is logged if it is not empty and was not logged before.
        """
        self._due = now + self._break.next(most or self._longest_s)
        if text and text not in self._told:
            self._told.add(text)
            self._tell(text, 30)

    def _forget(self) -> None:
        if self._said >= 0:
            if not self._epoll.closed:
                self._epoll.unregister(self._said)
            os.close(self._said)
            os.close(self._life)
        self._pid, self._life, self._said, self._rest, self._deaf = 0, -1, -1, b"", False
