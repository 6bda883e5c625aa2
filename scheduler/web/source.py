"""What all requests of one page share: the scheduler it shows, and the last look at it."""

from __future__ import annotations

import os
import threading
import time

from scheduler.client.client import SchedulerClient
from scheduler.client.overview import Overview
from scheduler.client.send_request import do, revision_of, until_shown
from scheduler.core.errors import StoreTrouble
from scheduler.core.requests import Answer, Pause, PauseQueue, Request, Resume
from scheduler.views.render import in_pieces, status_json

FRESH_S = 0.2  # a look so old still counts: a flood of requests reads the store five times a second
MOST_WAITING = 200  # jobs of the queue that pages show; `counts` has them all


class Source:
    """One scheduler as the page sees it. Its methods block, and may be called from any thread."""

    def __init__(self, client: SchedulerClient, config: str | None = None) -> None:
        """``config``: the config file that `--config` named."""
        self.client, self.config = client, config
        self._lock = threading.Lock()
        self._seen: Overview | None = None
        self._seen_at = 0.0
        self._status_lock = threading.Lock()
        self._status: bytes | None = None
        self._status_until = 0.0
        self._changes = 0  # counts what was done here: a look that began before it is not kept
        self._one_by_one = threading.Lock()
        self._was_there = False

    def check_there(self) -> None:
        """Raise StoreTrouble when the folder that this page was started for is gone (its token lay there)."""
        folder = self.client.places.state_dir
        if os.path.isdir(folder):
            self._was_there = True
        elif self._was_there:
            raise StoreTrouble("no such folder: it was removed while the page was open", where=folder,
                               do="put it back, or end this page and start it where the scheduler is")  # fmt: skip

    def overview(self) -> Overview:
        """What there is now, at most `FRESH_S` old. Raises SchedulerError when the store cannot be read."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at >= FRESH_S:
                self._seen = self.client.overview(MOST_WAITING)
                self._seen_at = time.monotonic()
            return self._seen

    def status(self) -> bytes:
        """The JSON of `gpujob status --json`, whole. Raises SchedulerError likewise.

        At most `FRESH_S` old, or as old as it took: one that takes seconds (100,000 waiting jobs) leaves others as much time.
        """
        with self._status_lock:
            if self._status is None or time.monotonic() >= self._status_until:
                before, begun = self._changes, time.monotonic()
                found = in_pieces(status_json(self.client.overview()))
                if before != self._changes:
                    return found
                now = time.monotonic()
                self._status, self._status_until = found, now + max(FRESH_S, now - begun)
            return self._status

    def do(self, request: Request) -> Answer:
        """What was asked, done by the daemon or, where none runs, here. Raises SchedulerError."""
        before = revision_of(self.client.places.state_file)
        try:
            answer, by_daemon = do(self.client, request, self.config, self._one_by_one)
        finally:
            self.changed()
        if by_daemon and not answer.code and isinstance(request, (Pause, Resume, PauseQueue)):
            until_shown(self.client.places.state_file, request, before)
        return answer

    def changed(self) -> None:
        """Something was just done: the next look is a new one."""
        self._changes += 1
        with self._lock:
            self._seen = None
        self._status_until = 0.0
