"""What a daemon in the foreground shows: its own sentences, and the output of its jobs with their number before it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.log_message import LogMessage
from scheduler.system.log_reader import LogReader
from scheduler.system.terminal_text import safe
from scheduler.views.terminal_replay import Folder

EVERY_S = 0.05
MOST_BYTES = 1 << 18
MOST_BEHIND = 1 << 22
LONGEST_LINE = 1 << 16


@dataclass(slots=True)
class _Log:
    job: int
    path: str
    reader: LogReader | None = None
    start: int = 0  # what stands before it was shown by the scheduler before us
    folder: Folder = field(default_factory=lambda: Folder(longest=LONGEST_LINE))
    over: bool = False


class Stream:
    """Prints from a thread of its own: a terminal that takes nothing must not hold up the loop.

    The logs are followed as files; no pipe of ours stands between a job and its log.
    """

    def __init__(self, write: Callable[[str], None] | None = None, follow: bool = True) -> None:
        self._said: queue.SimpleQueue[LogMessage | None] = queue.SimpleQueue()
        self._logs: dict[int, _Log] = {}
        self._open = 0
        self._write = write or _to_stdout
        self._follow, self._closed, self._ending = follow, False, False
        self._thread = threading.Thread(target=self._run, name="gpujob-stream", daemon=True)
        self._thread.start()

    def __call__(self, said: LogMessage) -> None:
        """Take a sentence; never blocks. After the close nobody reads it any more."""
        if not self._closed:
            self._said.put(said)

    def close(self, wait_s: float = 3.0) -> None:
        """Print what is left, for at most ``wait_s``."""
        self._closed = True
        self._said.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            try:
                self._print_all()
                return
            except Exception as error:  # noqa: BLE001  a defect of ours: what follows is to be shown all the same
                self._logs.clear()
                self._write(safe(f"gpujob: ! a defect of gpujob, please report it: {error!r} while output was shown\n"))

    def _print_all(self) -> None:
        """Until the end is said."""
        while not self._ending:
            try:
                said = self._said.get(timeout=EVERY_S if self._logs else None)
            except queue.Empty:
                self._print_logs()
                continue
            while True:
                if said is None:
                    self._ending = True
                else:
                    self._take(said)
                try:
                    said = self._said.get_nowait()
                except queue.Empty:
                    break
        self._print_logs()
        for log in self._logs.values():
            self._print_log(log, last=True)

    def _take(self, said: LogMessage) -> None:
        if said.job >= 0 and said.kind in ("started", "adopted") and said.log and self._follow:
            self._logs[said.job] = log = _Log(said.job, said.log)
            if said.kind == "adopted":
                with contextlib.suppress(OSError):
                    log.start = os.stat(log.path).st_size
        ended = said.kind in ("done", "failed", "cancelled", "retry_scheduled")
        if ended and said.job in self._logs:
            log = self._logs.pop(said.job)
            self._print_log(log, last=True)
        elif ended and said.log and self._follow and said.kind != "cancelled":
            self._print_log(_Log(said.job, said.log), last=True)
        mark = "! " if said.level >= logging.WARNING else ""
        self._write(safe(f"gpujob: {mark}{said.text}") + "\n")

    def _print_logs(self) -> None:
        for log in self._logs.values():
            self._print_log(log, last=False)

    def _print_log(self, log: _Log, last: bool) -> None:
        """Print what is new, at most MOST_BYTES a round; of a log that runs ahead too far, only its end."""
        try:
            reader = self._opened(log)
            behind = reader.size - reader.at
            if behind < 0:  # somebody emptied it
                reader.restart()
            elif behind > MOST_BEHIND:
                reader.at = reader.size - MOST_BYTES
                log.folder = Folder(longest=LONGEST_LINE)
                self._write(f"[{log.job}] … {behind >> 20} MB skipped here; all of it: gpujob logs {log.job}\n")
            for data in reader.new(until=reader.at + (MOST_BEHIND if last else MOST_BYTES)):
                self._print(log.job, log.folder.feed(data))
            if last:
                self._print(log.job, log.folder.feed(b"", last=True))
            if last or self._open > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
                reader.close()  # thousands of jobs must not take every descriptor: opened again at the next look
                self._open -= 1
        except OSError:
            return  # not there (yet, or any more): `gpujob logs` says so when asked

    def _opened(self, log: _Log) -> LogReader:
        """Its reader, open. Raises OSError."""
        if log.reader is None:
            log.reader = LogReader(log.path, unpack=False, ours=True)
            log.reader.at = log.start
            self._open += 1
        elif log.reader.closed:
            log.reader.open()
            self._open += 1
        return log.reader

    def _print(self, job: int, lines: list[str]) -> None:
        if lines:
            self._write("".join(f"[{job}] {_line(line)}\n" for line in lines))


def _line(text: str) -> str:
    """A line without what could play the terminal."""
    return "".join(c if c == "\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _to_stdout(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more; the main log has it all the same
        sys.stdout.write(text)
        sys.stdout.flush()
