"""Builds the scheduler's state from the store, for the daemon, for dry runs, and for requests without a daemon."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence

from scheduler.core.config import Config
from scheduler.core.gpu import Gpu, mask_of
from scheduler.core.job import Holding, Job
from scheduler.core.observations import Now
from scheduler.core.pauses import Pauses
from scheduler.core.policy import policy_of
from scheduler.core.scheduler_state import SchedulerState, never_missing
from scheduler.store import jobs as rows
from scheduler.store.cluster import cluster_of, fleet_of
from scheduler.store.gpu_faults import faults
from scheduler.system.proc import boot_id

LEARNED_FROM = 300  # last ended jobs, read for the estimates of run times


def cpu_slots_of(config: Config, connection: sqlite3.Connection) -> int:
    """Return the number of slots for jobs without GPUs: the setting `cpu_slots`, by default the number of CPUs.

    With an engine, these are the CPUs of all nodes.
    """
    if config.cpu_slots is not None:
        return config.cpu_slots
    cluster = cluster_of(connection)
    return cluster.cpus if cluster is not None else os.cpu_count() or 1


def read_state(
    connection: sqlite3.Connection,
    config: Config,
    gpus: Sequence[Gpu],
    *,
    fetch: Callable[[int], Job | None] | None = None,
    missing: Callable[[Job], str] = never_missing,
    may_start: bool = True,
) -> SchedulerState:
    """Return the scheduler's state: GPUs, pauses, the lowest place in the queue, estimates of run times; no jobs yet.

    ``fetch``: the function with which the state later looks up a job by its id; None: the state looks in the store.
    ``missing``: returns a sentence about a file that a job lacks; empty if the job lacks no file. ``may_start``:
    whether jobs may be started. A GPU that is no longer managed stays in the ledger while jobs or leftover processes
    use this GPU. Raises sqlite3.Error.
    """
    in_use = {gpu for job in rows.in_hand(connection) for gpu in job.gpus}
    in_use |= {gpu for holding, _ in rows.holdings(connection) for gpu in holding.gpus}
    fleet = fleet_of(connection, gpus, cpu_slots_of(config, connection), in_use - {gpu.index for gpu in gpus})
    state = SchedulerState(
        fleet,
        fetch or (lambda job: rows.get(connection, job)),
        policy_of(config),
        missing,
        lambda identity: rows.blocker_of(connection, identity),
        may_start=may_start,
    )
    fleet.paused_mask = mask_of(rows.paused_gpus(connection))
    state.queue_paused = bool(rows.meta(connection, "queue_paused"))
    state.pauses = Pauses(0, rows.pause_changes(connection))
    state.faults.update(faults(connection, boot_id()))
    state.front = rows.lowest_place(connection)
    for job in rows.last_ended(connection, LEARNED_FROM)[::-1]:
        if job.succeeded and job.started_at and job.finished_at:
            state.estimates.learn(job.spec, job.need, job.finished_at - job.started_at)
    return state


def book_active(
    connection: sqlite3.Connection, state: SchedulerState, boot: str, now: Now
) -> tuple[list[Job], list[Holding], list[str]]:
    """Book the GPUs of starting, running and stopping jobs, and the GPUs of leftover processes. Raises sqlite3.Error.

    Return (these jobs, the holdings of the current boot, the keys of the holdings of earlier boots). For holdings of
    earlier boots no GPU is booked, because no process survives a reboot. ``boot``: id of the current boot.
    """
    in_hand, held, stale = list(rows.in_hand(connection)), [], []
    for holding, its_boot in rows.holdings(connection):
        if its_boot == boot:
            state.hold(holding)
            held.append(holding)
        else:
            stale.append(holding.key)
    for job in in_hand:
        state.adopt(job, now)
    return in_hand, held, stale
