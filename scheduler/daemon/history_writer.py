"""Writes the history for curves and `/metrics`: the loop collects numbers, a thread writes them every ten seconds.

Problems with the history file (a full disk, a lock, a disk that hangs) do not affect the loop: numbers that the thread
cannot write in time are dropped.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable

from scheduler.core.gpu import WHOLE, ids_of
from scheduler.core.history import QUEUE, SHORT_S, Batch, GpuMean, JobMean, Ticks, bucket_of, gpu_values, job_values
from scheduler.core.observations import Now
from scheduler.core.scheduler_state import SchedulerState
from scheduler.store.history_db import HistoryFile

MOST_WAITING = 30  # batches kept while the disk hangs: five minutes
LEAST_BETWEEN_S = 1.0  # between two samples; readings may come every 50 ms
END_S = 1.0  # how long `close` waits for the last batch


class HistoryWriter:
    """Collects and writes the history of a running scheduler.

    A step takes about 2 µs, and about 10 µs more for each GPU with a new sample.

    ``state`` returns the current state. ``say`` logs a text at a level; it is called in the loop's thread.
    """

    def __init__(self, path: str, state: Callable[[], SchedulerState], say: Callable[[str, int], None]) -> None:
        self.path, self._state, self.say = path, state, say
        self._due = 0.0  # monotonic time of the next sample; infinite when the history is off
        self._ticks = Ticks()
        self._gpus: dict[int, GpuMean] = {}
        self._jobs: dict[tuple[int, int], JobMean] = {}
        self._pauses: tuple[int, bool] | None = None
        self._changes: list[tuple[float, frozenset[int]]] = []
        self._bucket: float | None = None
        self._read_at = self._sampled_at = -math.inf
        self._sampled_wall = 0.0
        self._batches: deque[Batch] = deque(maxlen=MOST_WAITING)
        self._told: deque[tuple[str, int]] = deque(maxlen=10)
        self._work = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="gpujob-history", daemon=True)

    def begin(self) -> None:
        """Start the writing thread. If it cannot be started, log that no history is kept."""
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            self._off(f"no history is kept: {error}")

    def step(self, now: Now) -> None:
        """Count the duration of the pass that began at ``now``. Take a sample of GPUs and jobs if one is due."""
        if self._due == math.inf:
            return
        try:
            self._look(self._state(), now, time.monotonic() - now.mono)
        except Exception as error:  # noqa: BLE001  an error of the curves must not delay jobs
            self._off(f"no history is kept any more: internal error of gpujob, please report it: {error!r}")

    def due(self) -> float:
        """Return the monotonic time of the next sample; infinite if no history is kept."""
        return self._due

    def close(self) -> None:
        """Write the last batch, and wait at most ``END_S`` seconds for this. A second call does nothing."""
        if self._due == math.inf:
            return
        self._close_bucket(self._sampled_wall)
        self._due = math.inf
        self._ending = True
        self._work.set()
        self._thread.join(END_S)
        self._say()

    # -- in the loop --------------------------------------------------------------------------------------

    def _off(self, why: str) -> None:
        self._due, self._ending = math.inf, True
        self._work.set()
        self.say(why, 30)

    def _look(self, state: SchedulerState, now: Now, took_s: float) -> None:
        self._ticks.add(took_s)
        fleet = state.fleet
        paused = (fleet.paused_mask, state.queue_paused)
        if paused != self._pauses:
            self._pauses = paused
            self._changes.append((now.wall, frozenset((*ids_of(paused[0]), *((QUEUE,) if paused[1] else ())))))
        cards = fleet.admission.cards
        read_at = next(iter(cards.values())).read_at if cards else -math.inf
        fresh = read_at != self._read_at and now.mono - self._sampled_at >= LEAST_BETWEEN_S
        if now.mono < self._due and not fresh:
            return
        self._read_at, self._sampled_at = read_at, now.mono
        bucket = bucket_of(now.wall, SHORT_S)
        if bucket != self._bucket:
            self._close_bucket(now.wall)
            self._bucket = bucket
        self._sampled_wall = now.wall
        self._due = now.mono + max(0.1, bucket + SHORT_S - now.wall)
        for index, gpu in fleet.gpus.items():
            if fleet.manages(index):
                booked = fleet.booked(index) / WHOLE
                mean = self._gpus.get(index) or self._gpus.setdefault(index, GpuMean())
                mean.add(gpu_values(cards.get(gpu.index), booked, bool(paused[0] >> index & 1)))
        if cards:
            for job in state.live.values():
                values = job_values(job.attempt_key, [cards[gpu] for gpu in job.gpus if gpu in cards])
                if values != (None, None):
                    key = (job.id, job.attempt)
                    (self._jobs.get(key) or self._jobs.setdefault(key, JobMean())).add(values)
        if self._told:
            self._say()

    def _close_bucket(self, now: float) -> None:
        """Pass the current bucket to the writing thread and begin a new one."""
        bucket = self._bucket
        if bucket is None:
            return
        self._batches.append(
            Batch(
                now,
                tuple(mean.row(gpu, bucket) for gpu, mean in self._gpus.items()),
                tuple(mean.row(*key, bucket) for key, mean in self._jobs.items()),
                tuple(self._changes),
                tuple(self._ticks.counts),
                self._ticks.total,
            )
        )
        self._gpus, self._jobs, self._bucket = {}, {}, None
        self._changes = self._changes[-1:]  # the next batch repeats the last change, in case this one is dropped
        self._work.set()

    def _say(self) -> None:
        while self._told:
            self.say(*self._told.popleft())

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001  logged by the loop; the thread itself cannot log
            text = f"no history is kept any more: internal error of gpujob, please report it: {error!r}"
            self._told.append((text, 30))

    def _write_all(self) -> None:
        file = HistoryFile(self.path)
        trouble = ""
        while not (self._ending and not self._batches):
            self._work.wait()
            self._work.clear()
            while self._batches:
                try:
                    file.write(self._batches.popleft())
                    now = ""
                except (OSError, sqlite3.Error) as error:
                    now = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._told.extend((text, 30) for text in file.told)
                file.told.clear()
                if now and not trouble:
                    self._told.append(
                        (
                            f"cannot write {self.path}: {now}; the curves have a gap until the scheduler can write this file again",
                            30,
                        )
                    )
                elif trouble and not now:
                    self._told.append((f"the scheduler can write {self.path} again", 20))
                trouble = now
        file.close()
