"""The scheduler that the page shows. All requests share short-lived caches of its overview and of its predictions."""

from __future__ import annotations

import os
import threading
import time

from scheduler.client.client import SchedulerClient
from scheduler.client.outlook import Explanation, Outlook
from scheduler.client.overview import Overview
from scheduler.client.send_request import do, revision_of, until_shown
from scheduler.core.errors import StoreTrouble
from scheduler.core.requests import Answer, Pause, PauseQueue, Request, Resume
from scheduler.views.predictions import outlook_json
from scheduler.views.render import in_pieces, status_json
from scheduler.web.computed import PATIENCE_S, Computed

FRESH_S = 0.2  # highest age of a cached overview: all requests together read the store at most 5 times a second
PREDICT_S = 0.25  # for the scenarios of a prediction; of a long queue, fewer are simulated
MOST_WAITING = 200  # waiting jobs that pages show; `counts` counts all of them


class Source:
    """The scheduler that the page shows. The methods block, and may be called from any thread."""

    def __init__(
        self, client: SchedulerClient, config: str | None = None, outlooks: Computed[Outlook] | None = None
    ) -> None:
        """``config``: the config file named by `--config`, or None.

        ``outlooks``: predictions that several sources of one scheduler share; they are the same for all its users.
        """
        self.client, self.config = client, config
        self._outlooks: Computed[Outlook] = outlooks or Computed()
        self._explanations: Computed[Explanation] = Computed()
        self._lock = threading.Lock()
        self._seen: Overview | None = None
        self._seen_at = 0.0
        self._status_lock = threading.Lock()
        self._status: bytes | None = None
        self._status_until = 0.0
        self._changes = 0  # number of changes by this process
        self._status_after = 0  # ``_changes`` before ``_status`` was read
        self._one_by_one = threading.Lock()
        self._was_there = False

    def check_there(self) -> None:
        """Raise StoreTrouble if the state folder was removed while the page was open."""
        folder = self.client.places.state_dir
        if os.path.isdir(folder):
            self._was_there = True
        elif self._was_there:
            raise StoreTrouble("cannot read the state folder: it was removed while gpujob web was running", where=folder,
                               do="restore it, or stop gpujob web and start it again in the folder of the scheduler")  # fmt: skip

    def overview(self) -> Overview:
        """Return the overview, at most `FRESH_S` seconds old. Raises SchedulerError if the store cannot be read."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at >= FRESH_S:
                self._seen = self.client.overview(MOST_WAITING)
                self._seen_at = time.monotonic()
            return self._seen

    def status(self) -> bytes:
        """Return the JSON of `gpujob status --json`. Raises SchedulerError if the store cannot be read.

        With 100,000 waiting jobs, making the JSON takes seconds. So the JSON is cached for `FRESH_S` seconds, or for
        the time that it took to make the JSON, whichever is longer. The server therefore spends at most half of its
        time on making the JSON.
        """
        with self._status_lock:
            outdated = self._status_after != self._changes or time.monotonic() >= self._status_until
            if self._status is None or outdated:
                # A change after this line makes the status outdated, also if it comes before the status is stored.
                before, begun = self._changes, time.monotonic()
                self._status = in_pieces(status_json(self.client.overview(), outlook_json(self.outlook())))
                self._status_after, now = before, time.monotonic()
                self._status_until = now + max(FRESH_S, now - begun)
            return self._status

    def outlook(self, patience_s: float = PATIENCE_S) -> Outlook:
        """Return when jobs are expected to start and end; without predictions if they take longer than ``patience_s``.

        Raises SchedulerError if the store cannot be read.
        """
        found = self._outlooks.get("outlook", lambda: self.client.outlook(PREDICT_S), patience_s)
        return Outlook(time.time()) if found is None else found

    def explanation(self, job: int, patience_s: float = PATIENCE_S) -> Explanation | None:
        """Return why a waiting job does not start, and offers; None if they take longer than ``patience_s``.

        Raises NotFound, and SchedulerError if the store cannot be read.
        """
        return self._explanations.get(job, lambda: self.client.explain(job), patience_s)

    def do(self, request: Request) -> Answer:
        """Have the daemon carry out a request, or carry it out here if no daemon runs. Raises SchedulerError.

        After a pause or a resume, waits briefly until the state file shows the change.
        """
        before = revision_of(self.client.places.state_file)
        try:
            answer, by_daemon = do(self.client, request, self.config, self._one_by_one)
        finally:
            self.changed()
        if by_daemon and not answer.code and isinstance(request, (Pause, Resume, PauseQueue)):
            until_shown(self.client.places.state_file, request, before)
        return answer

    def changed(self) -> None:
        """Drop the cached overview, status and predictions after a change."""
        self._changes += 1
        self._outlooks.changed()
        self._explanations.changed()
        with self._lock:
            self._seen = None
