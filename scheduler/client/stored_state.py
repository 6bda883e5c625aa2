"""The state of a scheduler, built from its store by another process: for dry runs, predictions and explanations.

Reservations are those of the scheduler's last pass. How often jobs were overtaken is known only for jobs with a reservation.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler.client.overview import booked_by_others, ignored_users
from scheduler.core.admission import LEAST_BASELINE_MIB, MOST_BASELINE
from scheduler.core.config import OPTIONS, Config
from scheduler.core.decision_pass import DecisionPass
from scheduler.core.frozen_admission import FrozenAdmission
from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.gpu_admission import GpuAdmission, Thresholds, Verdict
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Job
from scheduler.core.observations import Now
from scheduler.core.policy import thresholds_of
from scheduler.core.scheduler_state import SchedulerState
from scheduler.store import jobs as rows
from scheduler.store.paths import Places
from scheduler.store.placement_facts import restore_placement_facts
from scheduler.store.readings import LastReading, readings
from scheduler.store.scheduler_state import book_active, read_state
from scheduler.system.proc import boot_id

MOST_WAITING = 5000  # waiting jobs that are considered, from the front of the queue


def stored_state(
    connection: sqlite3.Connection, places: Places, config: Config, now: Now, *, alive: bool
) -> SchedulerState:
    """Return the scheduler's state without its waiting jobs: bookings and, if a daemon runs, the last GPU readings.

    Bookings of other schedulers of this machine are taken from the folder of shared bookings.
    """
    gpus = rows.gpus(connection)
    state = read_state(connection, config, gpus, missing=missed, may_start=alive)
    book_active(connection, state, boot_id(), now)
    state.timers.clear()  # a dry run carries out no timers
    read = readings(connection) if alive else {}
    if read:
        state.fleet.admission = last_admission(gpus, read, state.faults, config, now)
        state.watch_admission()
    others = booked_by_others(ignored_users(connection), gpus, places)
    state.fleet.set_outside(
        {
            gpu: (
                min(WHOLE, sum(one.parts for one in ones)),
                sum(one.memory_mib for one in ones),
                ones[0].sentence(gpu),
            )
            for gpu, ones in others.items()
            if ones
        }
    )
    return state


def queue_waiting(connection: sqlite3.Connection, state: SchedulerState, now: Now) -> list[Job]:
    """Queue or park the first waiting jobs as the scheduler does, without placing any. Return them."""
    waiting = list(rows.first_pending(connection, MOST_WAITING))
    known, fetch = {job.id: job for job in waiting}, state.fetch
    state.fetch = lambda job: known.get(job) or fetch(job)
    missing, lacks = state.missing, {job.id: state.missing(job) for job in waiting}  # as they are before any change
    state.missing = lambda job: lacks.get(job.id) or missing(job)
    decision = DecisionPass(state, now, 0.5)
    for job in waiting:
        decision.enqueue(job, since=now.mono - max(0.0, now.wall - job.submitted_at))
    restore_placement_facts(connection, state, now)
    return waiting


def as_running(connection: sqlite3.Connection, config: Config, alive: bool) -> Config:
    """Return ``config`` with the settings that the running scheduler has recorded; unchanged if none runs."""
    noted: dict[str, Any] = json.loads(rows.meta(connection, "settings") or "{}")
    known = {key: _settled(value) for key, (value, _) in noted.items() if key in OPTIONS}
    return replace(config, **known) if alive else config


def _settled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def missed(job: Job) -> str:
    """Return a sentence about the file or folder that a waiting job lacks; empty if it lacks none.

    The scheduler has stored it. It does not look at jobs that are held or wait for others, so their script, folder and
    environment (if it is a path) are looked for here.
    """
    if job.reason_code == "missing":
        return job.reason
    spec = job.spec
    if spec.uid is None and (job.held or spec.after or spec.after_ok):
        for path in (spec.script, spec.cwd, spec.conda_env if os.path.isabs(spec.conda_env) else ""):
            if path and not os.path.exists(path):
                return f"no such file {path}; the job waits until it exists"
    return ""


def last_admission(
    gpus: Sequence[Gpu], read: Mapping[int, LastReading], faults: Mapping[str, GpuFault], config: Config, now: Now
) -> FrozenAdmission:
    """Return an admission with the stored readings of the GPUs, and the scheduler's verdicts on them.

    GPUs without a stored reading are not blocked. ``faults``: UUID → errors that the GPU reported.
    """
    made = FrozenAdmission({}, thresholds_of(config), faults=faults)
    for gpu in gpus:
        if gpu.index in read:
            made.cards[gpu.index] = _card_of(gpu, read[gpu.index], made.thresholds, now)
    for index, card in made.cards.items():
        bit = 1 << index
        if card.verdict.code:
            made.blocked_mask |= bit
        if card.verdict.code in ("gone", "unhealthy", "drained"):
            made.lasting_mask |= bit
        if card.verdict.code == "gone" or card.gpu.uuid in faults:
            made.sick_mask |= bit
        if card.whole_blocked:
            made.whole_blocked_mask |= bit
        if card.overcommit:
            made.tight_mask |= bit
    return made


def _card_of(gpu: Gpu, last: LastReading, thresholds: Thresholds, now: Now) -> GpuAdmission:
    """Return the state of a GPU from its stored reading."""
    total, used = last.memory_total_mib, last.memory_used_mib
    others = max(0, (used or 0) - last.own_mib)
    # What is reserved contains the memory in use of the driver, a display and accepted processes.
    kept = max(0, (last.reserved_mib or 0) - max(0, others - (last.foreign_mib or 0)))
    seen = GpuSnapshot(gpu.uuid, gpu.index, gpu.name, total, used, last.load, last.temperature_c, reserved_mib=kept)
    card = GpuAdmission(gpu, seen, now.mono, now.mono, own_mib=last.own_mib)
    driver = min((total or 0) // 4, max(LEAST_BASELINE_MIB, int(MOST_BASELINE * (total or 0))))
    if others <= driver and not last.reason:
        card.baseline_mib = others
    else:
        card.foreign_mib = others
    if last.state:
        # A cluster reports drained nodes; on this machine, a GPU drains after the end of a job.
        code = last.state.lower() if last.state != "DRAINING" else "drained" if gpu.node else "releasing"
        card.verdict = Verdict(code, last.reason)
    elif last.reason:
        card.whole_blocked, card.whole = True, Verdict("foreign", last.reason)
        slack = thresholds.tolerance * (total or 0)
        if not thresholds.by_memory and total and others > slack:
            card.overcommit, card.overcommit_mib = math.ceil(WHOLE * (others - slack) / total), others
            card.why_overcommit = card.whole
    return card
