"""Reads the retry rules of the last daemon. They are part of the settings in the store."""

from __future__ import annotations

import json
import sqlite3

from scheduler.core.allowed import allowed_mask
from scheduler.core.endings import Rules
from scheduler.core.gpu_faults import fault_of
from scheduler.core.job import Job
from scheduler.core.own_classes import read_own_classes
from scheduler.store import jobs as rows
from scheduler.store.gpu_faults import faults
from scheduler.system.proc import boot_id


def last_rules(connection: sqlite3.Connection) -> Rules:
    """Return the last daemon's retry rules. They apply to jobs that ended while no daemon ran."""
    settings = {key: value for key, (value, _) in json.loads(rows.meta(connection, "settings") or "{}").items()}
    tolerance = settings.get("whole_gpu_tolerance", 0.0)
    gpus = rows.gpus(connection)

    known = faults(connection, boot_id()) if settings.get("hold_on_errors", True) else {}
    by_index = {gpu.index: gpu for gpu in gpus}

    def most_mib(job: Job) -> int:
        mask = allowed_mask(job.allowed, gpus)
        may = (gpu.memory_mib or 0 for gpu in gpus if mask >> gpu.index & 1)
        return int(max(may, default=0) * (1 - tolerance))

    return Rules(
        starts=settings.get("max_assign_attempts", 0),
        oom_retries=settings.get("oom_retries", 0),
        most_mib=most_mib,
        gpus=by_index,
        gpu_fault=lambda job: fault_of(job, by_index, known),
        own_classes=read_own_classes(settings.get("failure_classes")) or (),
    )
