"""Dry run of a submission: the scheduler's own decision (`core/decide.py`) on a state that is read from the store."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.client.admission_checks import check_parents
from scheduler.core.admission import LEAST_BASELINE_MIB, MOST_BASELINE, Admission
from scheduler.core.config import OPTIONS, Config
from scheduler.core.decide import decide
from scheduler.core.decision_pass import Plan
from scheduler.core.gpu import WHOLE, Gpu, decimal_text
from scheduler.core.gpu_admission import GpuAdmission, Verdict
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Job, JobSpec, JobState, Reason
from scheduler.core.launch import filled
from scheduler.core.model_table import ModelTable, booking_memory, need_of
from scheduler.core.observations import Arrived, Now
from scheduler.core.placement_class import class_of, reason_with_place
from scheduler.core.policy import thresholds_of
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.environments.resolve import Environments, Missing
from scheduler.store import jobs as rows
from scheduler.store.database import NothingYet, open_for_reading, trouble
from scheduler.store.paths import Places
from scheduler.store.readings import LastReading, readings
from scheduler.store.scheduler_state import book_active, read_state
from scheduler.system.proc import boot_id

MOST_WAITING = 5000  # waiting jobs that are considered, from the front of the queue


@dataclass(frozen=True, slots=True)
class Preview:
    """The result of a dry run. Secrets in it are masked.

    ``would``: ``start``, ``wait`` or ``never``. ``gpus``: the GPUs on which the job would start. ``reason_code`` and
    ``reason``: why the job would not start. ``need``: the job's need in GPUs, e.g. 0.5. ``command``: the words to run.
    ``notes``: remarks about the need.
    """

    would: str
    gpus: tuple[int, ...] = ()
    reason_code: str = ""
    reason: str = ""
    need: float | None = None
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def preview(
    places: Places,
    config: Config,
    spec: JobSpec,
    environment: Mapping[str, str],
    table: ModelTable,
    *,
    alive: bool,
    files: bool = True,
) -> Preview:
    """Return what the scheduler would do with this job now. Writes nothing and starts nothing.

    The decision uses the last GPU readings. It may ignore a reservation that the running scheduler has made for another
    job, because the store does not hold how often each job was overtaken. ``alive``: whether a daemon runs. ``files``:
    whether to check that the files of the job exist. Raises Refused for an impossible need, NotFound for an unknown
    dependency, StoreTrouble.
    """
    try:
        connection = open_for_reading(places) if places.exist() else None
    except NothingYet:
        connection = None
    if connection is None:
        need, notes = need_of(spec, table)
        return Preview("wait", (), "no-scheduler", _not_yet(), need.total / WHOLE, _words(spec.arguments), notes)
    try:
        connection.execute("BEGIN")
        return _decided(
            connection, places, _as_running(connection, config, alive), spec, environment, table, alive, files
        )
    except sqlite3.Error as error:
        raise trouble(error, places.store) from error
    finally:
        connection.close()


def _not_yet() -> str:
    return "no scheduler is running: the job waits until a scheduler starts (gpujob start)"


def _as_running(connection: sqlite3.Connection, config: Config, alive: bool) -> Config:
    """Return ``config`` with the settings that the running scheduler has recorded; unchanged if none runs."""
    noted: dict[str, Any] = json.loads(rows.meta(connection, "settings") or "{}")
    known = {key: _settled(value) for key, (value, _) in noted.items() if key in OPTIONS}
    return replace(config, **known) if alive else config


def _settled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _decided(
    connection: sqlite3.Connection,
    places: Places,
    config: Config,
    spec: JobSpec,
    environment: Mapping[str, str],
    table: ModelTable,
    alive: bool,
    files: bool,
) -> Preview:
    now = Now(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
    check_parents(connection, spec)
    gpus = rows.gpus(connection)
    spec = booking_memory(spec, config.min_free_mem_mb or 0, read=any(gpu.memory_mib for gpu in gpus))
    need, notes = need_of(spec, table, gpus)
    number = rows.last_id(connection) + 1
    job = Job(number, spec, need, order=number, priority=spec.priority, allowed=spec.allowed, submitted_at=now.wall)
    job.notes = notes
    state = _state(connection, config, gpus, now, alive)
    fetch = state.fetch
    state.fetch = lambda wanted: job if wanted == number else fetch(wanted)
    environments = Environments(environment, config.python)
    environments.mode = config.conda_mode
    state.missing = lambda one: _missing(environments, one) if files and one.id == number else _missed(one)
    never = state.fleet.can_ever_hold(class_of(job)) if gpus or rows.meta(connection, "settings") else ""
    if never:
        return _told("never", job, Reason("never", never))
    waiting = rows.first_pending(connection, MOST_WAITING)
    plan = decide(state, [Arrived(one) for one in (*waiting, job)], now)
    if job.state is JobState.SKIPPED:
        return _told("never", job, Reason("depends", _why_skipped(plan, number)))
    if job.state is JobState.PENDING and not alive:
        return _told("wait", job, Reason("no-scheduler", _not_yet()))
    if job.state is not JobState.PENDING:
        return _told("start", job, None)
    if job.reason_code:
        return _told("wait", job, Reason(job.reason_code, job.reason))
    reason = state.class_reasons()[class_of(job).key]
    before = sum(one.turn < job.turn for one in waiting if one.id in state.queue and class_of(one) == class_of(job))
    return _told("never" if reason.code == "never" else "wait", job, reason_with_place(reason, before))


def _state(connection: sqlite3.Connection, config: Config, gpus: list[Gpu], now: Now, alive: bool) -> SchedulerState:
    """Return the scheduler's state, built from the store.

    The state has the bookings and, if a daemon runs, the last GPU readings.
    """
    state = read_state(connection, config, gpus, may_start=alive)
    book_active(connection, state, boot_id(), now)
    state.timers.clear()  # a dry run carries out no timers
    read = readings(connection) if alive else {}
    if read:
        state.fleet.admission = _LastAdmission.of_last(gpus, read, config, now)
        state.watch_admission()
    return state


class _LastAdmission(Admission):
    """Admission that uses the stored GPU readings and the daemon's verdicts on these readings."""

    @classmethod
    def of_last(cls, gpus: Sequence[Gpu], read: Mapping[int, LastReading], config: Config, now: Now) -> _LastAdmission:
        """Return an admission with a `GpuAdmission` for each GPU that has a stored reading.

        GPUs without a stored reading are not blocked.
        """
        made = cls({}, thresholds_of(config))
        for gpu in gpus:
            last = read.get(gpu.index)
            if last is None:
                continue
            total, used = last.memory_total_mib, last.memory_used_mib
            others = max(0, (used or 0) - last.own_mib)
            # What is reserved contains the memory in use of the driver, a display and accepted processes.
            kept = max(0, (last.reserved_mib or 0) - max(0, others - (last.foreign_mib or 0)))
            seen = GpuSnapshot(
                gpu.uuid, gpu.index, gpu.name, total, used, last.load, last.temperature_c, reserved_mib=kept
            )
            card = made.cards[gpu.index] = GpuAdmission(gpu, seen, now.mono, now.mono, own_mib=last.own_mib)
            driver = min((total or 0) // 4, max(LEAST_BASELINE_MIB, int(MOST_BASELINE * (total or 0))))
            if others <= driver and not last.reason:
                card.baseline_mib = others
            else:
                card.foreign_mib = others
            bit = 1 << gpu.index
            if last.state:
                card.verdict = Verdict(last.state.lower(), last.reason)
                made.blocked_mask |= bit
            elif last.reason:
                card.whole_blocked, card.whole = True, Verdict("foreign", last.reason)
                made.whole_blocked_mask |= bit
                slack = made.thresholds.tolerance * (total or 0)
                if not made.thresholds.by_memory and total and others > slack:
                    card.overcommit, card.overcommit_mib = math.ceil(WHOLE * (others - slack) / total), others
                    card.why_overcommit = card.whole
                    made.tight_mask |= bit
        return made

    def judge(self, now: Now) -> None:
        """Do nothing: the stored verdicts are final."""


def _missing(environments: Environments, job: Job) -> str:
    found = environments.find(job)
    return found.sentence if isinstance(found, Missing) else ""


def _missed(job: Job) -> str:
    """Return the stored sentence about the file or folder that a waiting job lacks; empty if it lacks none."""
    return job.reason if job.reason_code == "missing" else ""


def _why_skipped(plan: Plan, number: int) -> str:
    return next((str(event.detail.get("why", "")) for event in plan.events if event.job == number), "")


def _words(words: Sequence[str]) -> tuple[str, ...]:
    return words_without_secrets(words)


def _told(would: str, job: Job, reason: Reason | None) -> Preview:
    words: tuple[str, ...] = (job.spec.script, *job.spec.arguments) if job.spec.script else job.spec.arguments
    if would == "start" and not job.spec.script:
        words = filled(words, ",".join(map(str, job.gpus)), decimal_text(job.need.parts if job.need.count else 0))
    return Preview(
        would,
        job.gpus if would == "start" else (),
        reason.code if reason else "",
        without_secrets(reason.sentence) if reason else "",
        job.need.total / WHOLE,
        _words(words),
        tuple(without_secrets(note) for note in job.notes),
    )
