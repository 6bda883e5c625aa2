"""Handles store outages: while the store cannot be written, the daemon decides nothing; running jobs continue."""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler.core.backoff import doubled_s
from scheduler.core.errors import DECIDE_ANEW, DEFECT, StoreTrouble
from scheduler.core.observations import Now
from scheduler.daemon.context import Context
from scheduler.daemon.parts import NEVER

LONGEST_BREAK_S = 8.0
ANEW_S = 0.01  # after DECIDE_ANEW, which is no error: repeat the pass immediately
REFUSED_AFTER = 3  # failed passes in a row after which open requests are refused


class StoreOutage:
    """The store outages of a daemon.

    An outage begins when a pass fails. After a wait, the daemon calls ``retry``, which opens the store again and
    rebuilds the state. If ``retry`` succeeds, the daemon runs a pass. If this pass does not fail, the outage is over.
    If ``retry`` or this pass fails, the daemon waits and calls ``retry`` again.
    """

    def __init__(self, context: Context, retry: Callable[[], None]) -> None:
        self._context, self._retry = context, retry
        self._until = 0.0
        self._tries = 0
        self.error: StoreTrouble | None = None  # the error that was logged

    @property
    def lasts(self) -> bool:
        """Whether ``retry`` must succeed before the daemon can run a pass, because the last pass has failed."""
        return bool(self._until)

    @property
    def refuses(self) -> bool:
        """Whether at least ``REFUSED_AFTER`` passes in a row have failed. The daemon then refuses open requests."""
        return self._tries >= REFUSED_AFTER

    def begin(self, error: StoreTrouble) -> None:
        """Note a failed pass and schedule the next try with a growing back-off. Log each error once."""
        self._tries += 1
        anew = error.code == DECIDE_ANEW
        self._until = time.monotonic() + (ANEW_S if anew else doubled_s(1.0, self._tries, LONGEST_BREAK_S))
        if not anew and str(error) != str(self.error or ""):
            self.error = error
            self._context.say(
                f"{error}; no job is started until this is fixed, running jobs continue", 40, kind="store"
            )

    def step(self, now: Now) -> None:
        """Call ``retry`` if it is due. Raises what ``retry`` raises."""
        if self._until and now.mono >= self._until:
            self._retry()
            self._until = 0.0

    def decided(self) -> None:
        """Note that the decisions of a pass are recorded. This sets the number of failed passes to 0.

        Requests are then no longer refused, even if a part of the daemon fails later in the pass.
        """
        self._tries = 0

    def over(self) -> None:
        """End the outage after a pass without an error. If an error was logged, log that the outage is over."""
        if self.error is not None:
            text = "the scheduler works again" if self.error.code == DEFECT else "the scheduler can use the store again"
            self._context.say(text, 20, kind="store")
        self.error = None

    def due(self) -> float:
        """Return the monotonic time of the next try; ``NEVER`` if there is no outage."""
        return self._until or NEVER

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
