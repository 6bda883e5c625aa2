"""What stands in the store, as people are shown it: all at once, with reasons, shares and endings that nobody noted."""

from __future__ import annotations

import glob
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.job import HOLDING, Job, JobState, Outcome, Reason
from scheduler.core.job_class import class_of, reason_with_place
from scheduler.core.marks import Refusal
from scheduler.core.recovery import Record
from scheduler.core.secrets import without_secrets
from scheduler.runners import record
from scheduler.store import jobs as rows
from scheduler.store import marks as kept
from scheduler.store.office import holder
from scheduler.store.places import Places
from scheduler.store.readings import LastReading, readings

LAST_ENDED = 100


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as status shows it."""

    gpu: Gpu
    state: str
    allocated: float
    jobs: tuple[int, ...]
    paused: bool
    reading: LastReading | None = None  # None: declared, or no scheduler is running


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything `status` shows, read in one go."""

    alive: bool
    pid: int | None
    counts: Mapping[str, int]
    gpus: Sequence[GpuView]
    jobs: Sequence[Job]  # all live ones, then the last ended
    reasons: Mapping[int, Reason]
    refused: Sequence[Refusal]
    repeated: int
    queue_paused: bool
    held: Mapping[int, str]  # GPU → by what processes it is still held
    started_at: float | None = None  # of the daemon that runs
    runner: str = ""  # direct or screen, as that daemon runs its jobs
    set_aside: str = ""  # what somebody saved last that was no state file, if it is still there
    dispatcher: bool = False  # it was begun by `gpujob run`
    trouble: Sequence[str] = ()  # what holds it up: files that are not read, a stopped keeper; each with what mends it


def overview_of(
    connection: sqlite3.Connection | None, places: Places, alive: bool, most_waiting: int | None
) -> Overview:
    """What there is now; of a store that is not there yet (None) nothing. ``most_waiting``: as `Desk.overview` has it."""

    def now(jobs: Iterable[Job]) -> list[Job]:
        return list(jobs) if alive else as_recorded(list(jobs), places.attempts)

    told = holder(places) if alive else {}
    pid, since, runner = told.get("pid"), _moment(told.get("started_at")), str(told.get("runner") or "")
    if connection is None:
        return Overview(alive, pid, {s.value: 0 for s in JobState}, [], [], {}, [], 0, False, {}, since, runner)
    if most_waiting is None:
        seen = now(rows.live(connection))
    else:
        seen = [*now(rows.in_hand(connection)), *rows.first_pending(connection, most_waiting)]
    live = [job for job in seen if not job.state.ended]
    ended = [*(job for job in seen if job.state.ended), *rows.last_ended(connection, LAST_ENDED)]
    ended.sort(key=lambda job: job.finished_at or 0.0, reverse=True)
    counts = _counts(connection, seen)
    paused = set(rows.paused_gpus(connection))
    queue_paused = bool(rows.meta(connection, "queue_paused"))
    held = {
        gpu: f"processes {', '.join(str(p.pid) for p in holding.processes)} of job {holding.job}"
        for holding, _ in rows.holdings(connection)
        for gpu in holding.gpus
    }
    booked = _booked(connection, live)
    read = readings(connection) if alive else {}
    views = []
    for gpu in rows.gpus(connection):
        parts, on_it = booked.get(gpu.index, (0, ()))
        reading = read.get(gpu.index)
        state = "BUSY" if parts else "AVAILABLE"
        if gpu.index in paused:
            state = "PAUSED"
        elif reading is not None and reading.state:
            state = reading.state
        views.append(GpuView(gpu, state, parts / WHOLE, on_it, gpu.index in paused, reading))
    return Overview(
        alive, pid, counts, views, [*live, *ended[:LAST_ENDED]], reasons_of(connection, live),
        kept.refused(connection), kept.duplicates(connection), queue_paused, held, since, runner,
        max(glob.glob(f"{glob.escape(places.state_file)}.bad-*"), default=""),
        rows.meta(connection, "begun_by") == "run",
        json.loads(rows.meta(connection, "trouble") or "[]") if alive else (),
    )  # fmt: skip


def as_recorded(jobs: Sequence[Job], attempts: str) -> list[Job]:
    """The same jobs while no scheduler runs: of those that ran at last, as their records say it. What would be tried again
    is left as it was.
    """
    return [_recorded(job, attempts) if job.state in HOLDING else job for job in jobs]


def _recorded(job: Job, attempts: str) -> Job:
    """A job that was running at last, with the ending that its attempt's record tells; as it was if there is none."""
    try:
        told = record.read(os.path.join(attempts, job.attempt_key))
    except OSError:
        return job  # what cannot be read now says nothing
    if told.kind is not Record.ENDED:
        return job
    code, number, note = record.meaning(told.how, told.code)
    stopped = job.stop_why if job.state is JobState.STOPPING else ""
    if stopped == "cancelled":
        state, outcome = JobState.CANCELLED, Outcome.CANCELLED
    elif code == 0 and stopped != "time_limit":
        state, outcome = JobState.DONE, Outcome.EXIT
    elif job.runs_failed < job.spec.retries:
        job.finished_at = told.ended_at  # its state stays: it will be tried again
        return job
    else:
        state, outcome = JobState.FAILED, Outcome.EXIT if code is not None else Outcome.SIGNAL
        outcome = Outcome.TIME_LIMIT if stopped == "time_limit" else outcome
    job.state, job.outcome, job.exit_code, job.signal = state, outcome, code, number
    job.started_at, job.finished_at = job.started_at or told.started_at, told.ended_at
    job.notes = (*job.notes, *([note] if note else ()), "it ended while no scheduler was running")
    return job


def _counts(connection: sqlite3.Connection, seen: Iterable[Job]) -> dict[str, int]:
    """How many jobs are in each state; ``seen``: live rows, some of which have ended all the same."""
    counts = rows.counts(connection)
    for job in seen:
        if job.state.ended:
            before = rows.get(connection, job.id)
            if before is not None:
                counts[before.state.value] -= 1
                counts[job.state.value] += 1
    return counts


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
    """Why each waiting job waits: its own reason, else that of its class with its place in it."""
    classes = rows.class_reasons(connection)
    before: dict[str, int] = {}
    reasons: dict[int, Reason] = {}
    waiting = [job for job in live if job.state is JobState.PENDING]
    for job in sorted(waiting, key=lambda job: job.turn):
        if job.reason_code:
            reasons[job.id] = Reason(job.reason_code, without_secrets(job.reason))
            continue
        key = class_of(job).key
        reason = classes.get(key) or Reason("new", "it has not been looked at yet")
        reasons[job.id] = reason_with_place(reason, before.get(key, 0))
        before[key] = before.get(key, 0) + 1
    return reasons


def words_run(job: Job) -> list[str]:
    """The command of a job as it is run: with its `--cuda` and `{gpus}`, once it has GPUs."""
    spec = job.spec
    if job.argv and job.state is not JobState.PENDING:  # one that waits again may get other GPUs
        return list(job.argv)
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
