"""Results of slow computations, shared by all requests: predictions of the queue, and explanations of waiting jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

FRESH_S = 1.0  # highest age of a result, in seconds
TIMES = (
    4  # a result is used at least this many times as long as it took: the server computes a fifth of its time at most
)
PATIENCE_S = 3.0  # how long a request waits for the first result
HURRY_S = 0.3  # how long a request waits for a new result if there is an older one
MOST_KEPT = 100  # results

Result = TypeVar("Result")


@dataclass(slots=True)
class _Entry:
    result: Any = None
    known: bool = False
    error: Exception | None = None
    used_until: float = 0.0  # monotonic seconds: not computed again before
    fresh_until: float = 0.0
    changes: int = -1  # `Computed._changes` when the computation began
    ready: threading.Event | None = None  # set at the end of the computation that runs now


class Computed(Generic[Result]):
    """Results by key. Each is computed in a thread of its own, one at a time, and by one thread for all who ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_by_one = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}
        self._changes = 0

    def get(self, key: Hashable, compute: Callable[[], Result], patience_s: float = PATIENCE_S) -> Result | None:
        """Return the result for a key, at most `FRESH_S` seconds old if it can be computed quickly.

        If the computation takes longer than `HURRY_S`, return the previous result; without one, wait ``patience_s``
        seconds, and return None if it has not ended by then. Raises the error of the computation.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            if entry.ready is None and self._outdated(entry):
                self._make_room(key)
                entry.ready = threading.Event()
                entry.changes = self._changes
                work = (entry, entry.ready, compute)
                threading.Thread(target=self._compute, args=work, name="prediction", daemon=True).start()
            ready, known = entry.ready, entry.known
        if ready is not None:
            ready.wait(HURRY_S if known else patience_s)
        with self._lock:
            if entry.error is not None:
                raise entry.error
            result: Result | None = entry.result
            return result

    def changed(self) -> None:
        """Compute the results again when they are needed next: a request has changed the jobs or GPUs."""
        with self._lock:
            self._changes += 1

    def _outdated(self, entry: _Entry) -> bool:
        now = time.monotonic()
        return now >= entry.used_until and (now >= entry.fresh_until or entry.changes != self._changes)

    def _make_room(self, key: Hashable) -> None:
        """Forget results that nobody has asked for, if there are many."""
        if len(self._entries) > MOST_KEPT:
            self._entries = {
                one: entry
                for one, entry in self._entries.items()
                if one == key or entry.ready is not None or not self._outdated(entry)
            }

    def _compute(self, entry: _Entry, ready: threading.Event, compute: Callable[[], Result]) -> None:
        with self._one_by_one:
            begun, result, error = time.monotonic(), None, None
            try:
                result = compute()
            except Exception as raised:  # noqa: BLE001  raised again in the requests that wait for the result
                error = raised
        now = time.monotonic()
        with self._lock:
            entry.error, entry.used_until, entry.fresh_until = error, 0.0, 0.0
            if error is None:
                entry.result, entry.known = result, True
                entry.used_until = now + TIMES * (now - begun)
                entry.fresh_until = max(entry.used_until, now + FRESH_S)
            entry.ready = None
        ready.set()
