"""The curves and counters of a scheduler: what was measured over time, read from its history and its store."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from scheduler.store import jobs as rows
from scheduler.store.paths import Places

if TYPE_CHECKING:
    from scheduler.core.history import GpuSample, JobSample, PauseSpan


class CurvesClient:
    """The part of `SchedulerClient` that reads curves and counters."""

    places: Places

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Return a context with a read-only connection to the store (`SchedulerClient`)."""
        raise NotImplementedError

    def gpu_history(self, since: float, until: float, step_s: float) -> dict[int, list[GpuSample]]:
        """Return GPU index → its samples between ``since`` and ``until`` (seconds since 1970); see `core/history.py`.

        Each sample is a mean over ``step_s`` seconds or more.
        """
        from scheduler.store.history_db import gpu_history

        return gpu_history(self.places.history, since, until, step_s, time.time())

    def job_history(self, job: int) -> dict[int, list[JobSample]]:
        """Return attempt number → samples of the GPU memory and load of that attempt."""
        from scheduler.store.history_db import job_history

        return job_history(self.places.history, job)

    def pause_spans(self, since: float, until: float) -> list[PauseSpan]:
        """Return the pauses of GPUs and of the queue that overlap ``since`` to ``until`` (seconds since 1970)."""
        from scheduler.store.history_db import pauses

        return pauses(self.places.history, since, until)

    def ticks(self) -> tuple[dict[str, float], float] | None:
        """Return a histogram of the durations of passes, and the sum of these durations in seconds.

        The histogram maps each bucket of durations to the number of passes. Returns None if there is no readable
        history.
        """
        from scheduler.store.history_db import ticks

        return ticks(self.places.history)

    def tallies(self) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
        """Return the counters (`core/counters.py`), and reason code → number of waiting jobs."""
        from scheduler.store.counters import tallies

        with self._reading() as connection:
            blocked = json.loads(rows.meta(connection, rows.BLOCKED) or "{}")
            return tallies(connection), {str(code): int(number) for code, number in blocked.items()}
