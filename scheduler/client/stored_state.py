"""The state of a scheduler, built from its store by another process: for dry runs, predictions and explanations.

What only the running scheduler knows is missing: how often jobs were overtaken, and what it has promised (`core/backfill.py`).
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler.client.overview import booked_by_others, ignored_users
from scheduler.core.admission import LEAST_BASELINE_MIB, MOST_BASELINE, Admission
from scheduler.core.config import OPTIONS, Config
from scheduler.core.decision_pass import DecisionPass
from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.gpu_admission import GpuAdmission, Verdict
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Job
from scheduler.core.observations import Now
from scheduler.core.policy import thresholds_of
from scheduler.core.scheduler_state import SchedulerState
from scheduler.store import jobs as rows
from scheduler.store.paths import Places
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
        state.fleet.admission = _LastAdmission.of_last(gpus, read, config, now)
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
    decision = DecisionPass(state, now, 0.5)
    for job in waiting:
        decision.enqueue(job)
    return waiting


def as_running(connection: sqlite3.Connection, config: Config, alive: bool) -> Config:
    """Return ``config`` with the settings that the running scheduler has recorded; unchanged if none runs."""
    noted: dict[str, Any] = json.loads(rows.meta(connection, "settings") or "{}")
    known = {key: _settled(value) for key, (value, _) in noted.items() if key in OPTIONS}
    return replace(config, **known) if alive else config


def _settled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def missed(job: Job) -> str:
    """Return the stored sentence about the file or folder that a waiting job lacks; empty if it lacks none."""
    return job.reason if job.reason_code == "missing" else ""


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
