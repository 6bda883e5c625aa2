"""Terminal output of a daemon in the foreground: its messages, and the output of its jobs with job ids."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.log_message import LogMessage
from scheduler.system.log_reader import LogReader
from scheduler.system.terminal_text import safe
from scheduler.views.terminal_replay import Folder

EVERY_S = 0.05  # seconds between two reads of the logs
MOST_BYTES = 1 << 18  # bytes that are read from a log at a time
MOST_KEPT = 1 << 16  # characters that are kept to be printed together
MOST_BEHIND = 1 << 22  # if a log has more unread bytes, only its end is printed
LONGEST_LINE = 1 << 16  # characters


@dataclass(slots=True)
class _Log:
    job: int
    path: str
    reader: LogReader | None = None
    start: int = 0  # offset of the first byte to print; an earlier scheduler has printed the bytes before it
    folder: Folder = field(default_factory=lambda: Folder(longest=LONGEST_LINE))
    over: bool = False


class ForegroundOutput:
    """Prints messages and job output from its own thread, so that a blocked terminal does not block the daemon.

    The job output is read from the logs, because there is no pipe between a job and its log. ``write``: function that
    prints a text (default: on stdout). ``follow``: whether to print job output.
    """

    def __init__(self, write: Callable[[str], None] | None = None, follow: bool = True) -> None:
        self._said: queue.SimpleQueue[LogMessage | None] = queue.SimpleQueue()
        self._logs: dict[int, _Log] = {}
        self._open = 0
        self._print_text = write or _to_stdout
        self._texts: list[str] = []  # not printed yet
        self._kept = 0  # their characters
        self._follow, self._closed, self._ending = follow, False, False
        self._thread = threading.Thread(target=self._run, name="gpujob-output", daemon=True)
        self._thread.start()

    def __call__(self, said: LogMessage) -> None:
        """Queue a message for printing. Never blocks. Does nothing after `close`."""
        if not self._closed:
            self._said.put(said)

    def close(self, wait_s: float = 3.0) -> None:
        """Print the queued messages and the parts of job logs that were not printed yet, then end the thread.

        If the thread has not ended after ``wait_s`` seconds, return without waiting longer.
        """
        self._closed = True
        self._said.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            try:
                self._print_all()
                return
            except Exception as error:  # noqa: BLE001  a defect in gpujob must not stop the output
                self._logs.clear()
                self._write(
                    safe(f"gpujob: ! internal error of gpujob, please report it: {error!r} while showing output\n")
                )
                self._print_texts()

    def _write(self, text: str) -> None:
        """Keep a text for `_print_texts`. If more than ``MOST_KEPT`` characters are kept, print all of them."""
        self._texts.append(text)
        self._kept += len(text)
        if self._kept > MOST_KEPT:
            self._print_texts()

    def _print_texts(self) -> None:
        """Print all kept texts with one write. During a write, the daemon's main thread may have to wait."""
        texts, self._texts, self._kept = "".join(self._texts), [], 0
        if texts:
            self._print_text(texts)

    def _print_all(self) -> None:
        """Print messages and logs until `close` is called."""
        while not self._ending:
            self._print_texts()
            try:
                said = self._said.get(timeout=EVERY_S if self._logs else None)
            except queue.Empty:
                self._print_logs()
                continue
            if said is not None and not self._closed:
                time.sleep(EVERY_S)  # collect, so that this thread seldom takes the interpreter from the daemon
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
        self._print_texts()

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
        """Print the new part of a log. ``last``: whether this is the last call for this log.

        If the new part is longer than `MOST_BEHIND` bytes, only its last `MOST_BYTES` bytes are printed, and all bytes
        before them are skipped. If the new part is not longer, nothing is skipped: the last call prints the whole part;
        any other call prints at most the first `MOST_BYTES` bytes of the part, and the next call continues there.
        """
        try:
            reader = self._opened(log)
            behind = reader.size - reader.at
            if behind < 0:  # the file was truncated
                reader.restart()
                self._print(log.job, log.folder.feed(b"", last=True))
                log.folder = Folder(longest=LONGEST_LINE)
            elif behind > MOST_BEHIND:
                reader.at = reader.size - MOST_BYTES
                log.folder = Folder(longest=LONGEST_LINE)
                self._write(f"[{log.job}] … skipped {behind >> 20} MB; for all output: gpujob logs {log.job}\n")
            for data in reader.new(until=reader.at + (MOST_BEHIND if last else MOST_BYTES)):
                self._print(log.job, log.folder.feed(data))
            if last:
                self._print(log.job, log.folder.feed(b"", last=True))
            if last or self._open > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
                reader.close()  # thousands of jobs must not use up the descriptors; the next call opens it again
                self._open -= 1
        except OSError:
            return  # there is no log yet, or it was removed; `gpujob logs` reports that

    def _opened(self, log: _Log) -> LogReader:
        """Return the open reader of a log. Raises OSError."""
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
    """Return a line in which characters that could control the terminal are made visible."""
    return "".join(c if c == "\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _to_stdout(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads stdout any more; the main log has the messages, too
        sys.stdout.write(text)
        sys.stdout.flush()
