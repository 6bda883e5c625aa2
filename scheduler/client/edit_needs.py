"""The new needs of jobs that are edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler.core.gpu import Gpu
from scheduler.core.job import Job
from scheduler.core.job_options import check_launch
from scheduler.core.model_table import ModelTable, need_of


def needs_after(
    jobs: Sequence[Job], changes: Mapping[str, Any], table: Callable[[], ModelTable], gpus: Callable[[], Sequence[Gpu]]
) -> tuple[tuple[int, int, str], ...]:
    """Return the new need of each job as (count, parts, profile); empty if no need changes.

    ``changes``: field of JobSpec → new value; ``table``: reads the model table; ``gpus``: returns the managed GPUs.
    Raises UsageError, Refused.
    """
    specs = [replace(job.spec, **changes) for job in jobs]
    if "launch" in changes:
        for spec in specs:
            check_launch(spec)
    if not {"gpus", "vram_mib", "allowed"} & set(changes):
        return ()
    # The share of a job that asks for GPU memory depends on that memory and on the sizes of its allowed GPUs. After a
    # lack of memory, the job has a larger share than it asked for.
    computed = [
        "gpus" in changes or (not spec.on and ("vram_mib" in changes or (bool(spec.vram_mib) and not job.oom_retries)))
        for spec, job in zip(specs, jobs, strict=True)
    ]
    models = (
        table() if any(wanted and not spec.gpus for wanted, spec in zip(computed, specs, strict=True)) else ModelTable()
    )
    managed = list(gpus())
    needs = [
        need_of(spec, models, managed)[0] if wanted else job.need
        for spec, wanted, job in zip(specs, computed, jobs, strict=True)
    ]
    return tuple((need.count, need.parts, need.profile) for need in needs)
