"""Checks of `gpujob doctor` that run beside each other: one that hangs, a driver too, costs only its own line."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Mapping

from scheduler.core.facts import Readings
from scheduler.core.health import Finding, not_told
from scheduler.probes.nvidia import NvidiaProbe


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


class Running:
    """A check that runs beside the others; whatever becomes of it, it has findings."""

    def __init__(self, check: str, what: str, look: Callable[[], list[Finding]]) -> None:
        self.check, self._what, self._look = check, what, look
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._look()
        except Exception as error:  # noqa: BLE001  what goes wrong with one check is no reason to lose the others
            said = str(error) or type(error).__name__
            self._found = [not_told(self.check, self._what, " ".join(said.split()))]

    @property
    def ended(self) -> bool:
        return self._found is not None

    def wait(self, until: float) -> None:
        """Until it has ended, but no longer than this (monotonic)."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def result(self, until: float) -> list[Finding]:
        """What it found."""
        self.wait(until)
        return [not_told(self.check, self._what, "no answer in time")] if self._found is None else self._found
