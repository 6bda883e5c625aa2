"""Recomputes the needs of waiting jobs after a change of the settings, the model table or the GPUs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler import __version__
from scheduler.core.config import Config
from scheduler.core.gpu import Gpu
from scheduler.core.job import Job
from scheduler.core.model_table import ModelTable, booking_memory, need_of, with_need_notes
from scheduler.store import jobs as rows
from scheduler.store.waiting_jobs import with_uncertain_need

BASIS = "needs_basis"  # key in `meta`: what the needs of the waiting jobs were last computed from


def rebooked(config: Config, gpus: Sequence[Gpu], table: ModelTable, waiting: Iterable[Job]) -> list[Job]:
    """Recompute the needs of waiting jobs after a change of the settings. Return the jobs whose need has changed.

    Only jobs from a commands file are recomputed. Jobs that were started before or edited by a user are left out.
    """
    found = []
    for job in waiting:
        if job.spec.source != "commands" or job.attempt or job.spec.edited:
            continue
        wish = replace(job.spec, gpus="", vram_mib=None)
        spec = booking_memory(wish, config.min_free_mem_mb, read=any(gpu.memory_mib for gpu in gpus))
        if spec != job.spec:
            job.spec, job.need = spec, need_of(spec, table, gpus)[0]
            found.append(job)
    return found


def update_needs(
    connection: sqlite3.Connection, gpus: Sequence[Gpu], table: ModelTable, *, at_start: bool = False
) -> list[Job]:
    """Recompute and store the needs of waiting jobs. Return the jobs whose need has changed.

    Runs in the caller's transaction. ``at_start``: the daemon is starting. At the start, the last call of this function
    was made by an earlier daemon. If GPUs, model table and program version have not changed since that call, only the
    jobs of `with_uncertain_need` are read. With 100,000 waiting lines of a jobs file this saves a second.
    """
    basis = json.dumps(
        [
            __version__,
            table.as_json(),
            _learned(table),
            [(gpu.index, gpu.server, gpu.memory_mib, gpu.profile) for gpu in gpus],
        ]
    )
    same = at_start and rows.meta(connection, BASIS) == basis
    changed = changed_needs(gpus, table, with_uncertain_need(connection) if same else rows.pending(connection))
    rows.save(connection, changed)
    rows.set_meta(connection, BASIS, basis)
    return changed


def _learned(table: ModelTable) -> list[list[object]] | None:
    if table.learned is None:
        return None
    return sorted([*key, sorted(seen.peaks.items())] for key, seen in table.learned.items())


def changed_needs(gpus: Sequence[Gpu], table: ModelTable, waiting: Iterable[Job]) -> list[Job]:
    """Recompute the needs of waiting jobs from the model table and the GPUs. Return the jobs whose need has changed.

    A job that states its own need (``gpus=``, without ``vram=``) keeps it. A job that is retried after it ran out of
    GPU memory also keeps its need.
    """
    found = []
    for job in waiting:
        if (job.spec.gpus and not job.spec.vram_mib) or job.oom_retries:
            continue
        need, notes = need_of(job.spec, table, gpus)
        told = with_need_notes(job.notes, notes)
        if need != job.need or told != job.notes:
            job.need, job.notes = need, told
            found.append(job)
    return found
