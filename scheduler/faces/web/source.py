"""What all requests of one page share: the scheduler it shows, and the last look at it."""

from __future__ import annotations

import threading
import time

from scheduler.desk import Desk
from scheduler.overview import Overview

FRESH_S = 0.2  # a look so old still counts: a flood of requests reads the store five times a second
MOST_WAITING = 200  # jobs of the queue that pages and `/api/status` show; `counts` has them all


class Source:
    """One scheduler as the page sees it. Its methods block, and may be called from any thread."""

    def __init__(self, desk: Desk, config: str | None = None) -> None:
        """``config``: the config file that `--config` named."""
        self.desk, self.config = desk, config
        self._lock = threading.Lock()
        self._seen: Overview | None = None
        self._seen_at = 0.0

    def overview(self) -> Overview:
        """What there is now, at most `FRESH_S` old. Raises SchedulerError when the store cannot be read."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at >= FRESH_S:
                self._seen = self.desk.overview(MOST_WAITING)
                self._seen_at = time.monotonic()
            return self._seen

    def changed(self) -> None:
        """Something was just done: the next look is a new one."""
        with self._lock:
            self._seen = None
