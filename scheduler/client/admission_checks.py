"""Checks of a job that is about to be submitted, against the store of its scheduler."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import replace
from typing import Any

from scheduler.core.errors import NotFound, Refused
from scheduler.core.gpu import Gpu
from scheduler.core.job import Job, JobSpec
from scheduler.store import jobs as rows


def without_strangers(connection: sqlite3.Connection, spec: JobSpec) -> JobSpec:
    """Return the spec without dependencies on jobs that do not exist (see `SchedulerClient.submit`, ``forgiving``)."""
    last, known = rows.last_id(connection), rows.known_ids(connection, spec.after)
    after = tuple(parent for parent in spec.after if parent in known)
    return replace(spec, after=after, after_ok=tuple(parent for parent in spec.after_ok if parent <= last))


def check_parents(connection: sqlite3.Connection, spec: JobSpec) -> None:
    """Raise NotFound if a job that the spec depends on does not exist."""
    parents = (*spec.after, *spec.after_ok)
    known = rows.known_ids(connection, parents)
    for parent in parents:
        if parent not in known:
            raise NotFound(f"cannot wait for job {parent}: there is no such job", do="see gpujob jobs")


def check_possible(connection: sqlite3.Connection, gpus: list[Gpu], job: Job) -> None:
    """Raise Refused if the job could never run on the GPUs and slots that the last daemon recorded."""
    from scheduler.core.allowed import check_nodes
    from scheduler.core.placement_class import class_of, remedy
    from scheduler.store.cluster import cluster_of, fleet_of

    check_nodes(job.allowed, cluster_of(connection) is not None)

    if gpus or rows.meta(connection, "settings"):
        never = fleet_of(connection, gpus, _cpu_slots(connection)).can_ever_hold(class_of(job))
        if never:
            raise Refused(never, do=remedy(class_of(job)))


def _noted(connection: sqlite3.Connection, setting: str) -> Any:
    """Return the value of a setting that the last daemon recorded; None if the value is not known."""
    noted = rows.meta(connection, "settings")
    return json.loads(noted).get(setting, [None])[0] if noted else None


def with_memory(connection: sqlite3.Connection, gpus: list[Gpu], spec: JobSpec) -> JobSpec:
    """Return the spec, changed so that the job books GPU memory if `min_free_mem_mb` is set.

    A spec that states its GPU need or names its GPUs is returned unchanged. For jobs of watched files,
    `daemon/ingest.py` does this.
    """
    from scheduler.core.model_table import booking_memory

    mib = _noted(connection, "min_free_mem_mb")
    return booking_memory(spec, int(mib), read=any(gpu.memory_mib for gpu in gpus)) if mib else spec


def _cpu_slots(connection: sqlite3.Connection) -> int:
    """Return the number of slots for jobs without GPUs.

    This is the setting of the last daemon, or the number of CPUs if that daemon had no such setting. If no daemon has
    run yet, the returned number is so large that it is no limit.
    """
    from scheduler.store.cluster import cluster_of

    noted = bool(rows.meta(connection, "settings"))
    slots, cluster = _noted(connection, "cpu_slots"), cluster_of(connection)
    if slots is not None:
        return int(slots)
    if cluster is not None:
        return cluster.cpus
    return os.cpu_count() or 1 if noted else 1 << 30
