"""Recomputes the needs of waiting jobs after a change of the settings, the model table or the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler.core.config import Config
from scheduler.core.gpu import Gpu
from scheduler.core.job import Job
from scheduler.core.model_table import ModelTable, booking_memory, need_of


def rebooked(config: Config, gpus: Sequence[Gpu], table: ModelTable, waiting: Iterable[Job]) -> list[Job]:
    """Recompute from the settings the needs of waiting jobs of a commands file. Return the changed jobs."""
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


def changed_needs(gpus: Sequence[Gpu], table: ModelTable, waiting: Iterable[Job]) -> list[Job]:
    """Recompute from model table and GPUs the needs of waiting jobs without ``gpus=``. Return the changed jobs."""
    found = []
    for job in waiting:
        if job.spec.gpus or job.oom_retries:
            continue
        need, _ = need_of(job.spec, table, gpus)
        if need != job.need:
            job.need = need
            found.append(job)
    return found
