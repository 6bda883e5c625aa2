"""What happened, as one plain sentence a record, for the main log and the terminal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.answering import UNDYING
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Event, Job
from scheduler.core.units import mib_text

_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Said:
    """One sentence, and the job it is about, for whoever shows it."""

    text: str
    level: int = logging.INFO
    kind: str = ""
    job: int = -1  # none
    name: str = ""
    log: str = ""


Listener = Callable[[Said], None]
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})  # disks without them
PLAIN = {"held": "is held", "released": "is released", "first": "comes first", "requeued": "waits again"}


def harmless(text: str) -> str:
    """``text`` with control and direction-changing characters made visible, so that it cannot play the terminal."""
    return _UNSAFE.sub(
        lambda found: f"\\x{ord(found.group()):02x}" if ord(found.group()) < 256 else f"\\u{ord(found.group()):04x}",
        text,
    )


def sentence(event: Event, job: Job) -> tuple[str, int]:
    """An event as a sentence, and its log level."""
    name = f"job {job.id} ({harmless(job.spec.shown_name)})"
    detail = event.detail
    gpus = f"GPU {gpu_ids_text(detail['gpus'])}" if detail.get("gpus") else "no GPU"
    attempt = f", attempt {detail['attempt']}" if detail.get("attempt", 1) != 1 else ""
    if event.kind == "started":
        session = f"; gpujob attach {job.id}, or screen -r {job.session_name}" if job.session else ""
        return f"{name} runs on {gpus}, pid {detail['pid']}{attempt}{session}", logging.INFO
    if event.kind == "gpu_gone":
        return f"{name} runs on GPU {detail['gpu']}, which is gone; it is left alone", logging.WARNING
    if event.kind == "stray":
        used = f" ({mib_text(detail['memory'] >> 20)})" if detail.get("memory") else ""
        return (
            f"{name}: its process {detail['pid']} uses GPU {detail['gpu']}{used}, which it was not given",
            logging.WARNING,
        )
    if event.kind == "done":
        if job.log_finding is not None:
            return (
                f"{name} done: exit code 0{attempt}, but its log says: {harmless(job.log_finding.line)}",
                logging.WARNING,
            )
        return f"{name} done: exit code 0{attempt}", logging.INFO
    if event.kind == "failed":
        hint = f"; hint: {job.failure.hint}" if job.failure else ""
        note = (
            f" ({harmless(job.notes[-1])})"
            if job.notes and detail.get("outcome") in ("could_not_start", "lost", "signal")
            else ""
        )
        return f"{name} failed: {ending(detail)}{note}{attempt}{hint}", logging.WARNING
    if event.kind == "cancelled":
        return f"{name} cancelled", logging.INFO
    if event.kind == "skipped":
        return f"{name} skipped: {detail.get('why')}", logging.WARNING
    if event.kind == "fell":
        when = f"in {detail['wait']:.0f} s" if detail.get("wait") else "at once"
        return f"{name}: {harmless(str(detail.get('why')))}; tried again {when}", logging.WARNING
    if event.kind == "adopted":
        return f"{name} goes on, on {gpus}, pid {detail['pid']}{attempt}", logging.INFO
    if event.kind == "leader_ended":
        return f"{name}: its first process ended, others of it are still being ended", logging.INFO
    if event.kind == "leftovers":
        return f"{name} left processes {detail.get('pids')} behind: {gpus} stays taken until they end", logging.WARNING
    if event.kind == "missing":
        return f"{name} waits: {harmless(str(detail.get('why')))}", logging.WARNING
    if event.kind == "stopping":
        why = "its time limit is over" if detail.get("why") == "time_limit" else "it was cancelled"
        return f"{name} is being ended: {why}", logging.INFO
    if event.kind == "swapped":
        return f"{name} has changed places with job {detail.get('with_job')}", logging.INFO
    if event.kind == "edited":
        what = ", ".join(map(str, detail.get("what") or ["its need"]))
        return f"{name} edited: {harmless(what)}", logging.INFO
    if event.kind == "undying":
        return f"{name}: {UNDYING}", logging.WARNING
    if event.kind in PLAIN:
        return f"{name} {PLAIN[event.kind]}", logging.INFO
    if event.kind == "unclaimed":
        return f"{name}: its start was cut off before it began; it waits again", logging.WARNING
    return f"{name}: {event.kind}", logging.INFO


def ending(detail: dict[str, object]) -> str:
    """How an attempt ended, in words."""
    outcome = detail.get("outcome")
    how = (
        f"exit code {detail.get('exit_code')}"
        if detail.get("exit_code") is not None
        else f"signal {detail.get('signal')}"
    )
    if outcome == "time_limit":
        return f"its time limit was over ({how})"
    if outcome == "could_not_start":
        return "it could not be started"
    if outcome == "lost":
        return "lost, its ending is not known"
    return how


def accepted(job: Job) -> str:
    """What is said of a new job."""
    notes = f" ({'; '.join(map(harmless, job.notes))})" if job.notes else ""
    return f"job {job.id} ({harmless(job.spec.shown_name)}) accepted from {job.spec.origin or job.spec.source}{notes}"


class MainLog:
    """The main log: one record a line, private, rotated. All records of a turn are one write.

    Our own, because the standard library's rotating handler formats, stats and flushes once a record: 75 µs each on
    the path between two jobs (docs/performance.md).
    """

    def __init__(self, path: str, most_bytes: int = 10 << 20, kept: int = 5) -> None:
        """Open ``path``. Raises OSError."""
        self.path, self.most_bytes, self.kept = path, most_bytes, kept
        self._lines: list[str] = []
        self._fd = -1
        self._lost, self._why, self._torn = 0, "", False
        self._open()

    def _open(self) -> None:
        # O_NONBLOCK: a FIFO in its place must not hold up the scheduler.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o600)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a plain file", self.path)
        if status.st_mode & 0o777 != 0o600:
            os.fchmod(fd, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._inode, self._torn = fd, status.st_size, status.st_ino, False

    def __call__(self, said: Said) -> None:
        """Keep a record for the next ``flush``."""
        self._lines.append(_record(said.text, said.level))

    def flush(self) -> None:
        """Write what was kept. Raises OSError (a full disk); the records are dropped then, jobs matter more.

        How many were dropped is said as soon as there is room again.
        """
        if not self._lines:
            return
        number = len(self._lines)
        if self._lost:
            self._lines.insert(0, _record(f"{self._lost} records could not be written: {self._why}", logging.WARNING))
        data = "".join(self._lines).encode("utf-8", "backslashreplace")
        self._lines.clear()
        try:
            if not self._in_place():
                self._open()
            if self._size + len(data) > self.most_bytes:
                with contextlib.suppress(PermissionError):  # a folder that we may not change: it grows
                    self._rotate()
            if self._torn:
                data = b"\n" + data  # what was cut short is a line of its own
            written = os.write(self._fd, data)
            self._size += written
            if written < len(data):
                self._torn = data[:written][-1:] != b"\n"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        except OSError as error:
            self._lost += number
            self._why = str(error.strerror)
            raise
        self._lost, self._torn = 0, False

    def _in_place(self) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        self._size = there.st_size  # somebody may have emptied it
        return there.st_ino == self._inode

    def _rotate(self) -> None:
        """Another scheduler may log here, too: of two that move the files at once, one would overwrite what is full."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # it is being moved by the other one, and what is written now goes along with it
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if not self._in_place():  # it has been done meanwhile
            self._open()
            return
        for number in range(self.kept - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        with contextlib.suppress(FileNotFoundError):  # somebody removed it: there is nothing to keep
            os.replace(self.path, f"{self.path}.1")
        self._open()

    def close(self) -> None:
        """Write the rest and let go."""
        with contextlib.suppress(OSError):
            self.flush()
        os.close(self._fd)


def _record(text: str, level: int) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    return f"{stamp} {logging.getLevelName(level)} {harmless(text)}\n"
