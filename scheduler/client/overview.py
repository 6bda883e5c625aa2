"""Overview of a scheduler, read from its store and its attempt records. `Watch` reports changes of the overview."""

from __future__ import annotations

import glob
import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.client.neighbours import booked_outside, outside_text
from scheduler.core.file_offsets import Refusal
from scheduler.core.gpu import WHOLE, Gpu, gpu_state
from scheduler.core.job import HOLDING, Event, Job, JobState, Reason
from scheduler.core.neighbours import Outside
from scheduler.core.placement_class import class_of, reason_with_place
from scheduler.core.secrets import without_secrets
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows
from scheduler.store.changed_jobs import Changes
from scheduler.store.daemon_lock import daemon_alive, holder
from scheduler.store.database import trouble
from scheduler.store.job_columns import job_of
from scheduler.store.paths import Places
from scheduler.store.readings import LastReading, readings

LAST_ENDED = 100  # ended jobs in an overview
NOT_YET = Reason("new", "the scheduler has not considered it yet")
ALIVE_EVERY_S = 1.0  # seconds between checks of whether a daemon runs


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as `status` shows it.

    ``allocated``: the booked share of the GPU, 0 to 1. ``jobs``: ids of the jobs that hold the GPU. These include ended
    jobs whose leftover processes hold the GPU.
    """

    gpu: Gpu
    state: str
    allocated: float
    jobs: tuple[int, ...]
    paused: bool
    reading: LastReading | None = None  # None: not read (a declared GPU), or no scheduler runs
    outside: tuple[Outside, ...] = ()  # what other schedulers and leases of this machine have booked

    @property
    def reason(self) -> str:
        """Why new jobs are kept off all or a part of the GPU; empty if it is free for them."""
        told = self.reading.reason if self.reading is not None else ""
        return "; ".join(filter(None, (told, outside_text(self.gpu.index, self.outside))))


@dataclass(frozen=True, slots=True)
class Overview:
    """Data of `gpujob status`, read in one transaction."""

    alive: bool
    pid: int | None
    counts: Mapping[str, int]
    gpus: Sequence[GpuView]
    jobs: Sequence[Job]  # live jobs, then the jobs that ended last, newest first
    reasons: Mapping[int, Reason]
    refused: Sequence[Refusal]
    repeated: int  # lines of watched files that were not run because each repeats a job
    queue_paused: bool
    held: Mapping[int, str]  # GPU → text that names the leftover processes that hold it
    started_at: float | None = None  # start of the running daemon, in seconds since 1970
    runner: str = ""  # of the running daemon: direct or screen
    set_aside: str = ""  # path of the newest invalid state file that was set aside and still exists
    dispatcher: bool = False  # started by `gpujob run`
    trouble: Sequence[str] = ()  # current problems of the daemon, such as a file that is not read; each with its fix


def overview_of(connection: sqlite3.Connection, places: Places, alive: bool, most_waiting: int | None) -> Overview:
    """Return everything that `status` shows. ``most_waiting``: see `SchedulerClient.overview`."""
    told = holder(places) if alive else {}
    pid, since, runner = told.get("pid"), _moment(told.get("started_at")), str(told.get("runner") or "")
    if most_waiting is None:
        seen = rows.live(connection)
    else:
        seen = [*rows.in_hand(connection), *rows.first_pending(connection, most_waiting)]
    counts = rows.counts(connection)
    if not alive:
        seen = _recount(counts, seen, as_recorded(connection, seen, places.attempts))
    live = [job for job in seen if not job.state.ended]
    ended = [*(job for job in seen if job.state.ended), *rows.last_ended(connection, LAST_ENDED)]
    ended.sort(key=lambda job: job.finished_at or 0.0, reverse=True)
    queue_paused = bool(rows.meta(connection, "queue_paused"))
    held = {
        gpu: f"leftover processes {', '.join(str(p.pid) for p in holding.processes)} of job {holding.job}"
        for holding, _ in rows.holdings(connection)
        for gpu in holding.gpus
    }
    views = _gpu_views(connection, places, alive, live)
    return Overview(
        alive, pid, counts, views, [*live, *ended[:LAST_ENDED]], reasons_of(connection, live),
        kept.refused(connection), kept.duplicates(connection), queue_paused, held, since, runner,
        max(glob.glob(f"{glob.escape(places.state_file)}.bad-*"), default=""),
        rows.meta(connection, "begun_by") == "run",
        json.loads(rows.meta(connection, "trouble") or "[]") if alive else (),
    )  # fmt: skip


def _gpu_views(connection: sqlite3.Connection, places: Places, alive: bool, live: Sequence[Job]) -> list[GpuView]:
    """Return the managed GPUs. ``live``: jobs, among them all jobs that hold GPUs."""
    paused = set(rows.paused_gpus(connection))
    booked = _booked(connection, live)
    read = readings(connection) if alive else {}
    gpus, views = list(rows.gpus(connection)), []
    others = booked_by_others(ignored_users(connection), gpus, places)
    for gpu in gpus:
        parts, on_it = booked.get(gpu.index, (0, ()))
        reading = read.get(gpu.index)
        admission = reading.state if reading is not None else ""
        outside = others.get(gpu.index, ())
        full = sum(one.parts for one in outside) >= WHOLE
        state = gpu_state(paused=gpu.index in paused, admission=admission, booked=bool(parts), outside=full)
        views.append(GpuView(gpu, state, parts / WHOLE, on_it, gpu.index in paused, reading, outside))
    return views


def ignored_users(connection: sqlite3.Connection) -> tuple[str, ...] | None:
    """Return the users whose bookings the scheduler ignores; None if it ignores everybody."""
    noted: dict[str, Any] = json.loads(rows.meta(connection, "settings") or "{}")
    if not noted.get("share_bookings", [True])[0]:
        return None
    return tuple(filter(None, str(noted.get("ignore_users", [""])[0] or "").split(",")))


def booked_by_others(
    ignored: Collection[str] | None, gpus: Sequence[Gpu], places: Places
) -> dict[int, tuple[Outside, ...]]:
    """Return GPU → what others have booked on it. ``ignored``: as `ignored_users` returns it."""
    if ignored is None or any(gpu.node for gpu in gpus):
        return {}
    return booked_outside(gpus, places, os.environ, ignored)


def as_recorded(connection: sqlite3.Connection, jobs: Sequence[Job], attempts: str) -> list[Job]:
    """Return the jobs. A job that is stored as running gets the state that its attempt record shows.

    For use while no scheduler runs. See `runners/recorded_end.py`.
    """
    if not any(job.state in HOLDING for job in jobs):
        return list(jobs)
    from scheduler.runners import recorded_end
    from scheduler.store.last_rules import last_rules

    rules = last_rules(connection)
    return [recorded_end.as_recorded(job, attempts, rules)[0] if job.state in HOLDING else job for job in jobs]


def story_as_recorded(
    connection: sqlite3.Connection, job: Job, events: Sequence[Event], attempts: str
) -> tuple[Job, Sequence[Event]]:
    """Return a job with the state that its attempt record shows, and its event history.

    If the next scheduler will run the job again, the event of that retry is added to the history.
    """
    from scheduler.runners import recorded_end
    from scheduler.store.last_rules import last_rules

    now, fell = recorded_end.as_recorded(job, attempts, last_rules(connection))
    return now, events if fell is None else [*events, fell]


def _recount(counts: dict[str, int], rows_: Sequence[Job], now: list[Job]) -> list[Job]:
    """Correct ``counts`` for jobs whose actual state differs from their stored state, and return ``now``.

    ``counts``: state → number of jobs, according to the stored states. ``rows_``: jobs with their stored states.
    ``now``: the same jobs, in the same order, with their actual states.
    """
    for row, job in zip(rows_, now, strict=True):
        counts[row.state.value] -= 1
        counts[job.state.value] += 1
    return now


def _moment(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e11 else None


def _booked(connection: sqlite3.Connection, live: Sequence[Job]) -> dict[int, tuple[int, tuple[int, ...]]]:
    booked: dict[int, tuple[int, tuple[int, ...]]] = {}
    shares = [(job.gpus, job.need.parts, job.id) for job in live if job.state.holds_gpus]
    shares += [(holding.gpus, holding.need.parts, holding.job) for holding, _ in rows.holdings(connection)]
    for gpus, parts, job_id in shares:
        for gpu in gpus:
            taken, jobs = booked.get(gpu, (0, ()))
            booked[gpu] = (taken + parts, (*jobs, job_id))
    return booked


def reasons_of(connection: sqlite3.Connection, live: Sequence[Job]) -> dict[int, Reason]:
    """Return id → reason, for each waiting job.

    If the store has a reason for the job itself, this reason is returned. Otherwise it is the reason of the job's
    placement class, with the position of the job in this class if `_order_is_stored`.
    """
    classes, in_order = rows.class_reasons(connection), _order_is_stored(connection)
    before: dict[str, int] = {}
    reasons: dict[int, Reason] = {}
    waiting = [job for job in live if job.state is JobState.PENDING]
    for job in sorted(waiting, key=lambda job: job.turn):
        if job.reason_code:
            reasons[job.id] = Reason(job.reason_code, without_secrets(job.reason))
            continue
        key = class_of(job).key
        reason = classes.get(key) or NOT_YET
        reasons[job.id] = reason_with_place(reason, before.get(key, 0))
        before[key] = before.get(key, 0) + in_order
    return reasons


def _order_is_stored(connection: sqlite3.Connection) -> bool:
    """Return whether the store tells the order of the queue. With `order: short` or `aging`, only the scheduler knows it."""
    noted = json.loads(rows.meta(connection, "settings") or "{}")
    return noted.get("order", ["fifo"])[0] == "fifo" and not noted.get("aging", [0.0])[0]


def reason_of(connection: sqlite3.Connection, job: Job) -> Reason:
    """Return the reason of one waiting job. The result is the same as in `reasons_of`, but fewer jobs are read."""
    if job.reason_code:
        return Reason(job.reason_code, without_secrets(job.reason))
    reason = rows.class_reasons(connection).get(class_of(job).key) or NOT_YET
    return reason_with_place(reason, rows.waiting_before(connection, job) if _order_is_stored(connection) else 0)


def words_run(job: Job) -> list[str]:
    """Return the words of a job's command as the scheduler runs them.

    Before a job has GPUs, `{gpus}` is not replaced and `--cuda` is missing.
    """
    spec = job.spec
    if job.argv and job.state is not JobState.PENDING:  # a job that waits for a retry may get other GPUs
        if job.runner_kind.owns_gpus:
            return list(job.argv)
        from scheduler.core.launch import GPU_PLACEHOLDER

        return [word.replace(GPU_PLACEHOLDER, "{gpus}") for word in job.argv]
    if not spec.is_script:
        return list(spec.arguments)
    if not spec.script.endswith(".py"):
        return [spec.script, *spec.arguments]
    from scheduler.core.launch import LAUNCHERS, script_words, with_cuda

    arguments = spec.arguments
    if job.gpus and spec.cuda != "none":
        ids = range(len(job.gpus)) if spec.cuda == "local" else job.gpus
        arguments = with_cuda(arguments, ",".join(map(str, ids)), add=LAUNCHERS[spec.launch].adds_cuda)
    return list(script_words(spec, "python", arguments, len(job.gpus) or job.need.count))


@dataclass(slots=True)
class News:
    """Changes since the last look of a `Watch`.

    ``jobs``: each changed job, with the reason why it waits (None if it does not wait or has no reason). The other
    fields are None if they have not changed.
    """

    jobs: list[tuple[Job, Reason | None]] = field(default_factory=list)
    gpus: Sequence[GpuView] | None = None
    queue: tuple[bool, Mapping[str, int]] | None = None  # whether it is paused; state → number of jobs
    alive: bool | None = None


class Watch:
    """Reads a store repeatedly and returns only what has changed. For use by one thread.

    For the first waiting jobs in the queue (`store/changed_jobs.py: MOST_WAITING`), it returns every change. For the
    waiting jobs behind them, it returns only that a job was added, was started or has ended.
    """

    def __init__(self, places: Places) -> None:
        self._places, self._changes = places, Changes(places)
        self._alive: bool | None = None
        self._alive_due = 0.0
        self._gpus: Sequence[GpuView] = ()
        self._queue: tuple[bool, Mapping[str, int]] | None = None
        self._reasons: dict[int, Reason] = {}
        self._recorded: dict[int, JobState] = {}
        self._ignored: Collection[str] | None = None

    def close(self) -> None:
        """Close the connection to the store."""
        self._changes.close()

    def look(self) -> News:
        """Return the changes since the last call; the first call reports the GPUs, the queue and ``alive`` as changes.

        Raises SchedulerError.
        """
        news = News()
        now = time.monotonic()
        force = False
        if now >= self._alive_due:
            alive = daemon_alive(self._places)
            force = alive is not self._alive or not alive  # without a daemon only records show that jobs end
            news.alive = alive if alive is not self._alive else None
            self._alive, self._alive_due = alive, now + ALIVE_EVERY_S
            force = force or self._neighbours_changed()
        try:
            with self._changes.moment(force) as connection:
                if connection is not None:
                    self._ask(connection, news)
        except sqlite3.Error as error:
            self._changes.close()
            raise trouble(error, self._places.store) from error
        return news

    def _neighbours_changed(self) -> bool:
        """Return whether other users have booked something else: the store does not change then."""
        found = booked_by_others(self._ignored, [view.gpu for view in self._gpus], self._places)
        return any(found.get(view.gpu.index, ()) != view.outside for view in self._gpus)

    def _ask(self, connection: sqlite3.Connection, news: News) -> None:
        self._ignored = ignored_users(connection)
        changed = {job.id: job for job in map(job_of, self._changes.jobs(connection))}
        in_hand = list(rows.in_hand(connection))
        counts = rows.counts(connection)
        if not self._alive:
            in_hand = _recount(counts, in_hand, as_recorded(connection, in_hand, self._places.attempts))
            over = {job.id: job.state for job in in_hand if job.state not in HOLDING}
            changed |= {
                job.id: job for job in in_hand if job.id in changed or over.get(job.id) != self._recorded.get(job.id)
            }
            self._recorded = over
        first = [job_of(row) for row in self._changes.first]
        reasons = reasons_of(connection, first)
        for job in first:
            if reasons.get(job.id) != self._reasons.get(job.id) and self._queue is not None:
                changed[job.id] = job
        self._reasons = reasons
        for number, job in sorted(changed.items()):
            own = Reason(job.reason_code, without_secrets(job.reason)) if job.reason_code else None
            waits = job.state is JobState.PENDING
            news.jobs.append((job, (reasons.get(number) or own) if waits else None))
        gpus = _gpu_views(
            connection, self._changes.places, bool(self._alive), [job for job in in_hand if job.state in HOLDING]
        )
        if _reported_values(gpus) != _reported_values(self._gpus) or self._queue is None:
            news.gpus = self._gpus = gpus
        queue = (bool(rows.meta(connection, "queue_paused")), counts)
        if queue != self._queue:
            news.queue = self._queue = queue


def _reported_values(gpus: Iterable[GpuView]) -> list[tuple[object, ...]]:
    """Return the values whose changes `Watch` reports, for each GPU.

    Changes of memory, load and temperature are not reported.
    """
    return [(one.gpu.uuid, one.state, one.paused, one.allocated, one.jobs, one.outside) for one in gpus]
