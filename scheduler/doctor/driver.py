"""Reads the GPU driver in a separate process, which can be killed if the driver hangs."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping

from scheduler.core.observations import Readings
from scheduler.gpus.nvidia import NvidiaProbe


class Driver:
    """Access to the GPU driver through a reader process (`gpus/nvidia.py`). The constructor begins a reading."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._probe = NvidiaProbe(environ)
        self.asked_at = time.monotonic()
        self._probe.ask()
        self._lock = threading.Lock()  # `close` may be called while a check waits for readings
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
        """Return the readings; None if none arrive by ``until`` (monotonic seconds). ``anew``: request new readings."""
        if anew:
            self._probe.ask()
        while True:
            with self._lock:
                found = None if self._closed else self._probe.look()
            if found is not None or self._closed or time.monotonic() >= until:
                return found
            select.select(self._probe.descriptors(), [], [], min(0.1, max(0.0, until - time.monotonic())))

    def close(self) -> None:
        """Kill the reader process, even if it hangs."""
        with self._lock:
            self._closed = True
            self._probe.close()
