"""Reconstructs the jobs of a damaged store from its rows, the attempt records, living processes and logs.

Nothing is guessed: a job that may have run, but has no recorded ending, is `lost`. Only a job that certainly has not
run keeps waiting.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.endings import NEVER_AGAIN, Meaning, after_loss, after_no_start, after_run
from scheduler.core.errors import Damaged, SchedulerError
from scheduler.core.gpu import ResourceRequest, parse_gpu_ids
from scheduler.core.job import HOLDING, Holding, Job, JobSpec, JobState, Outcome, Process
from scheduler.core.observations import Ended
from scheduler.core.recovery import Found, Record, Verdict
from scheduler.core.states import Move, move
from scheduler.runners import attempt_record
from scheduler.runners.adoption import ending, look, not_started, why_lost
from scheduler.store import integrity
from scheduler.store.job_columns import blocks, job_of_row
from scheduler.store.paths import Places
from scheduler.system.proc import boot_id
from scheduler.system.processes import Seen, environment_of, seen, session_of

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_SINCE_BOOT = time.CLOCK_BOOTTIME
FORGOTTEN = JobSpec(source="recover", arguments=("(command unknown)",))
_LOG = re.compile(r"job_(\d{1,18})_\d{8}_\d{6}(?:_a(\d{1,9}))?(?:_\d{1,9})?\.log(?:\.gz)?")


@dataclass(slots=True)
class Rebuilt:
    """The reconstructed jobs, and lists of job ids. Each list holds the jobs with one result of the reconstruction."""

    jobs: dict[int, Job] = field(default_factory=dict)
    from_records: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # ids that were assigned and left no trace
    holdings: list[Holding] = field(default_factory=list)
    stale: str = ""  # evidence that the rows are out of date; empty: there is none
    whole: bool = True  # every row was read and is up to date


@dataclass(frozen=True, slots=True)
class Alive:
    """Living processes. ``marked``: processes of our jobs by (job, attempt); ``sessions``: all processes by session."""

    marked: Mapping[tuple[int, int], Sequence[Process]]
    sessions: Mapping[int, Sequence[Seen]]

    def of(self, job: Job, leader: Process | None) -> tuple[Process, ...]:
        """Return the processes of the job's last attempt.

        These are the processes with the mark of the attempt, and the processes in the POSIX session of ``leader``, the
        main process of the attempt. If the kernel has reused the session's id for a new session, all processes in the
        new session were started after the job ended. So the session counts only if one of its processes was started
        before the job ended.
        """
        found = set(self.marked.get((job.id, job.attempt), ()))
        if leader is not None:
            inside = [one for one in self.sessions.get(leader.pid, ()) if one.ticks >= leader.ticks]
            at_end = TICKS_A_SECOND * ((job.finished_at or time.time()) - time.time() + time.clock_gettime(_SINCE_BOOT))
            if any(one.ticks <= at_end for one in inside):
                found |= {Process(one.pid, one.ticks) for one in inside}
        return tuple(sorted(found, key=lambda process: process.pid))


def alive(state_file: str) -> Alive:
    """Return all living processes, from one scan of /proc."""
    marked: dict[tuple[int, int], list[Process]] = {}
    sessions: dict[int, list[Seen]] = {}
    ours = b"GPUJOB_STATE_FILE=" + os.fsencode(state_file)
    for name in os.listdir("/proc"):
        found = seen(int(name)) if name.isdigit() and int(name) != os.getpid() else None
        if found is None or not found.alive:
            continue
        sessions.setdefault(found.session, []).append(found)
        entries = environment_of(found.pid)
        if ours in entries:
            with contextlib.suppress(KeyError, ValueError):  # the job has changed its variables: not marked
                said = dict(entry.split(b"=", 1) for entry in entries if entry.startswith(b"GPUJOB_"))
                key = int(said[b"GPUJOB_ID"]), int(said[b"GPUJOB_ATTEMPT"])
                marked.setdefault(key, []).append(Process(found.pid, found.ticks))
    return Alive(marked, sessions)


def logs_in(folders: Iterable[str], places: Places) -> dict[tuple[int, int], str]:
    """Return (job, attempt) → log path, from the file names. Leaves out logs of other schedulers in the same folder."""
    others: dict[int, int] = {}
    beside = os.path.dirname(places.state_dir)
    for name in os.listdir(beside):
        folder = os.path.join(beside, name)
        if name.startswith(".gpujob") and folder != places.state_dir and os.path.isdir(folder):
            stem = name.removeprefix(".gpujob-") if name != ".gpujob" else "gpu_scheduler_state"
            for job, attempt in integrity.newest_attempts(Places(os.path.join(beside, f"{stem}.json"))).items():
                others[job] = max(others.get(job, 0), attempt)
    logs = {}
    for folder in set(folders):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                found = _LOG.fullmatch(entry.name)
                if found and int(found[2] or 1) > others.get(int(found[1]), 0):
                    logs[int(found[1]), int(found[2] or 1)] = entry.path
    return logs


def put_together(
    left: Sequence[Mapping[str, Any]],
    whole: bool,
    held: Sequence[Holding],
    places: Places,
    log_dir: str,
    now: float,
    last: int = 0,
) -> Rebuilt:
    """Reconstruct all jobs that have left a row, an attempt record, a process or a log.

    ``left``: the readable rows of the jobs table; ``whole``: whether all rows of this table are readable. ``held``: the
    GPUs that leftover processes hold, according to the store. ``last``: the highest job id ever assigned, according to
    the store. ``now``: seconds since 1970.
    """
    out = Rebuilt()
    for row in left:
        try:
            out.jobs[int(row["id"])] = job_of_row(row)
        except (Damaged, TypeError, ValueError):
            out.unreadable.append(row["id"] if isinstance(row["id"], int) else 0)
    last = max((last, *out.jobs))
    high = integrity.high(places)
    if high > max(0, last):  # 0 also means that no id was assigned
        out.stale = f"job id {high} was assigned, but the last job id in the store is {last}"
    living = alive(places.state_file)
    _take_records(out, places, whole, last)
    _take_processes(out, living)
    folders = {log_dir, *(os.path.dirname(job.log) for job in out.jobs.values() if job.log)}
    logs = logs_in(folders, places)
    newest_log = dict(sorted(logs))
    for job in out.jobs.values():
        if job.state in HOLDING:
            _settle(out, job, places, logs, now)
        elif job.state is JobState.PENDING and newest_log.get(job.id, 0) > job.attempt:
            job.attempt = newest_log[job.id]
            job.log = logs[job.id, job.attempt]
            _lose(out, job, "only its log was found", now)
    _hold(out, living, held)
    top = max((*out.jobs, high, *(number for number, _ in logs)), default=0)
    out.gone = [number for number in range(1, top + 1) if number not in out.jobs] if out.stale or not whole else []
    if top > last and top not in out.jobs:
        # New ids are assigned above the newest row, so the highest assigned id needs a row.
        job = out.jobs[top] = Job(
            id=top, spec=FORGOTTEN, need=ResourceRequest(0, 0), submitted_at=now, state=JobState.RUNNING
        )
        job.log = next((path for (number, _), path in sorted(logs.items()) if number == top), "")
        _lose(out, job, "no trace of it was found" if not job.log else "only its log was found", now)
        if top in out.gone:
            out.lost.remove(top)  # reported once, as gone
    _one_for_each_line(out, now)
    out.whole = whole and not out.stale and not out.unreadable
    return out


def _take_records(out: Rebuilt, places: Places, whole: bool, last: int) -> None:
    """Add each job that has an attempt record but no row in the store, or only a row with an older attempt.

    If the row of a job is missing but no row can have been lost, the job was deleted on purpose and is not added.
    ``whole``, ``last``: as in `put_together`.
    """
    sure = whole and not out.stale
    for number, attempt in sorted(integrity.newest_attempts(places).items()):
        job = out.jobs.get(number)
        if job is not None and job.attempt >= attempt:
            continue
        if job is None and sure and number <= last and number not in out.unreadable:
            continue  # the user or `keep_finished` has removed the job
        if job is not None or (whole and number > last):
            known = job.attempt if job is not None else "none"
            out.stale = (
                out.stale
                or f"attempt {attempt} of job {number} was started, but its last attempt in the store is {known}"
            )
        path = os.path.join(places.attempts, f"{number}.{attempt}")
        found = _of_record(number, attempt, path)
        if found is None or (found.spec is FORGOTTEN and job is not None):
            base = job or Job(id=number, spec=FORGOTTEN, need=ResourceRequest(0, 0))
            found = Job(id=number, spec=base.spec, need=base.need, identity=base.identity, priority=base.priority,
                        allowed=base.allowed, submitted_at=base.submitted_at, attempt=attempt)  # fmt: skip
        found.state, found.notes = JobState.RUNNING, ("rebuilt from its attempt record",)
        out.jobs[number] = found
        out.from_records.append(number)


def _of_record(number: int, attempt: int, path: str) -> Job | None:
    try:
        said = attempt_record.spec_of(path)
        spec = JobSpec.from_dict(said["spec"])
        return Job(
            id=number, spec=spec if spec.arguments or spec.script else FORGOTTEN, need=ResourceRequest(*said["need"]),
            identity=str(said["identity"]), priority=int(said["priority"]),
            allowed=said["allowed"] if said["allowed"] is None else tuple(said["allowed"]),
            submitted_at=float(said["submitted_at"]), attempt=attempt, gpus=tuple(map(int, said["gpus"])),
            boot=str(said["boot"]), log=str(said["log"]), runner=str(said.get("runner") or "direct"),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _take_processes(out: Rebuilt, living: Alive) -> None:
    """Add each job that has living processes of an attempt, if no row and no attempt record shows this attempt.

    The GPUs of such a job are read from the environment of one of these processes.
    """
    for (number, attempt), processes in sorted(living.marked.items()):
        job = out.jobs.get(number)
        if job is not None and job.attempt >= attempt:
            continue
        gpus, need = _booked(processes[0])
        out.stale = out.stale or (
            f"attempt {attempt} of job {number} is running, but is not in the store" if job else ""
        )
        out.jobs[number] = Job(
            id=number, spec=job.spec if job else FORGOTTEN, need=need, identity=job.identity if job else "",
            attempt=attempt, gpus=gpus, boot=boot_id(), state=JobState.RUNNING, notes=("rebuilt from its processes",),
            submitted_at=job.submitted_at if job else 0.0,
        )  # fmt: skip


def _booked(process: Process) -> tuple[tuple[int, ...], ResourceRequest]:
    """Return GPUs and need of an attempt from the environment of a process. Invalid values give no GPUs."""
    said = {name: os.fsdecode(value) for name, _, value in (e.partition(b"=") for e in environment_of(process.pid))}
    try:
        gpus = parse_gpu_ids(said.get(b"GPUJOB_GPUS", "")) or ()
        parts = round(float(said.get(b"GPUJOB_SHARE", "1")) * 1000)
    except (ValueError, SchedulerError):
        return (), ResourceRequest(0, 0)
    return gpus, ResourceRequest(len(gpus), min(1000, max(0, parts)) if gpus else 0)


def _settle(out: Rebuilt, job: Job, places: Places, logs: Mapping[tuple[int, int], str], now: float) -> None:
    """End a job if its attempt has ended or is lost, according to the table of verdicts in `core/recovery.py`.

    If the row of the job is up to date and the attempt record holds an ending or a failed start, this function does not
    end the job: the next start of the scheduler applies the attempt record. The next start also decides about all other
    jobs that this function does not end.
    """
    if not job.runner_kind.owns_gpus:
        return  # its processes are on another machine: the next start asks the engine
    there = look(os.path.join(places.attempts, job.attempt_key), job, places.state_file)
    found, verdict = there.record, there.verdict(job.state)
    if there.process is not None:
        job.process, job.boot = there.process, found.boot or job.boot
        job.started_at = job.started_at or found.started_at
        if there.living is not Found.NOTHING and session_of(there.process):
            job.runner, job.session = "screen", session_of(there.process)
    sure = job.id not in out.from_records and not out.stale
    if sure and found.kind in (Record.ENDED, Record.NEVER_RAN):
        return  # the row is up to date: the next start applies this ending with all its rules
    if verdict in (Verdict.FINISH, Verdict.FINISH_HOLDING):
        _finish(job, ending(job.id, job.attempt, found.how, found.code, found.ended_at or now, ()))
    elif verdict is Verdict.NOT_STARTED:
        why = getattr(not_started(job.id, job.attempt, found, now), "why", "its start was withdrawn")
        job.notes += (why,)
        _end(job, after_no_start(job, why, True, NEVER_AGAIN), found.ended_at or now)
    elif verdict is Verdict.LOST:
        _lose(out, job, why_lost(found.kind, there.same_boot), now)
    elif verdict is Verdict.ADOPT and job.state is JobState.STARTING:
        # The old store was written before the start was recorded. The next start takes a job with a process as started.
        move(job, Move.STARTED, found.started_at or now)
    elif verdict is Verdict.REQUEUE and (job.id, job.attempt) in logs:
        job.log = logs[job.id, job.attempt]
        _lose(out, job, "its record was removed", now)


def _finish(job: Job, observation: Ended) -> None:
    job.exit_code, job.signal = observation.exit_code, observation.signal
    job.notes += (observation.note,) if observation.note else ()
    if job.state is JobState.STARTING:
        move(job, Move.STARTED, observation.at)
    _end(job, after_run(job, NEVER_AGAIN), observation.at)


def _end(job: Job, means: Meaning, at: float) -> None:
    move(job, means.how, at)
    job.outcome, job.not_before = means.outcome, None


def _lose(out: Rebuilt, job: Job, why: str, now: float) -> None:
    """End a job as lost: the job may have run, nothing shows how it ended, and it is not run again."""
    if job.state is JobState.PENDING:
        move(job, Move.PLACED, now)
    job.notes = (*job.notes, f"lost: {why}")
    means = after_loss(job)
    _end(job, means, now)
    if means.outcome is Outcome.LOST:
        out.lost.append(job.id)


def _hold(out: Rebuilt, living: Alive, held: Sequence[Holding]) -> None:
    """Add to ``out.holdings`` the GPUs of ended attempts that still have living processes, which may use these GPUs."""
    keys = {holding.key for holding in held}
    here = boot_id()
    found = {(job.id, job.attempt): living.of(job, job.process) for job in out.jobs.values()
             if job.state.ended and job.boot in ("", here) and job.attempt}  # fmt: skip
    for (number, attempt), processes in {**living.marked, **found}.items():
        job = out.jobs[number]
        key = f"{number}.{attempt}"
        if not processes or key in keys or (attempt == job.attempt and job.state.holds_gpus):
            continue
        gpus, need = (job.gpus, job.need) if attempt == job.attempt and job.gpus else _booked(processes[0])
        if gpus:
            vram = job.spec.vram_mib or 0
            out.holdings.append(Holding(key, number, need, gpus, vram, tuple(processes)))


def _one_for_each_line(out: Rebuilt, now: float) -> None:
    """If a new line would repeat several jobs (`job_columns.blocks`), let it repeat only the newest of these jobs.

    For this purpose, each older one of these jobs is changed. If the older job waits, the older job is ended as lost:
    the scheduler accepted the newer job, so the older job must have ended before, and nothing shows how. If the older
    job does not wait, the identity of the older job is deleted.
    """
    taken: set[str] = set()
    for number in sorted(out.jobs, reverse=True):
        job = out.jobs[number]
        if not job.identity or not blocks(job):
            continue
        if job.identity in taken and job.state is JobState.PENDING:
            _lose(
                out,
                job,
                "an equal line became a later job, which is possible only after the end of this job",
                now,
            )
        elif job.identity in taken:
            job.identity = ""
        else:
            taken.add(job.identity)
