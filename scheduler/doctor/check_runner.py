"""Checks of `gpujob doctor` that run beside each other: one that hangs, a driver too, costs only its own line."""

from __future__ import annotations

import contextlib
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping

from scheduler.core.observations import Readings
from scheduler.doctor.findings_machine import Finding, not_told
from scheduler.gpus.nvidia import NvidiaProbe

IN_TURN_S = 2.0


class Driver:
    """The driver, asked by a reader that may be killed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._probe = NvidiaProbe(environ)
        self.asked_at = time.monotonic()
        self._probe.ask()
        self._lock = threading.Lock()  # whoever still waits for an answer when it is closed
        self._closed = False

    @property
    def way(self) -> str:
        return self._probe.way

    @property
    def absent(self) -> bool:
        return self._probe.absent

    @property
    def unasked(self) -> bool:
        return self._probe.unasked

    @property
    def package(self) -> str:
        return self._probe.package

    def readings(self, until: float, anew: bool = False) -> Readings | None:
        """What it says, or None when it says nothing by then (monotonic)."""
        if anew:
            self._probe.ask()
        while True:
            with self._lock:
                found = None if self._closed else self._probe.look()
            if found is not None or self._closed or time.monotonic() >= until:
                return found
            select.select(self._probe.descriptors(), [], [], min(0.1, max(0.0, until - time.monotonic())))

    def close(self) -> None:
        """End the reader, also one that hangs."""
        with self._lock:
            self._closed = True
            self._probe.close()


class _Late(BaseException):
    """It has had its time; no ``except`` of a check takes it for something of its own."""


class Running:
    """A check that runs beside the others; whatever becomes of it, it has findings.

    Where no thread can be had (a limit on processes or memory) it is done at once, and what waits in it is interrupted
    after ``IN_TURN_S``: only a disk that does not even let itself be interrupted then holds up the others.
    """

    def __init__(self, check: str, what: str, look: Callable[[], list[Finding]]) -> None:
        self.check, self._what, self._look = check, what, look
        self._found: list[Finding] | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError):
            self._thread = None
            self._run_in_turn()

    def _run_in_turn(self) -> None:
        def late(_number: int, _frame: object) -> None:
            raise _Late

        before = signal.signal(signal.SIGALRM, late)
        with contextlib.suppress(_Late):
            signal.setitimer(signal.ITIMER_REAL, IN_TURN_S)
            try:
                self._run()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def _run(self) -> None:
        try:
            self._found = self._look()
        except Exception as error:  # noqa: BLE001  what goes wrong with one check is no reason to lose the others
            said = str(error) or type(error).__name__
            self._found = [not_told(self.check, self._what, " ".join(said.split()))]

    @property
    def ended(self) -> bool:
        return self._found is not None

    @property
    def in_turn(self) -> bool:
        """Whether there was no thread for it."""
        return self._thread is None

    def wait(self, until: float) -> None:
        """Until it has ended, but no longer than this (monotonic)."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def result(self, until: float) -> list[Finding]:
        """What it found."""
        self.wait(until)
        return [not_told(self.check, self._what, "no answer in time")] if self._found is None else self._found
