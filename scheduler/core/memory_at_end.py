"""The GPU memory of an attempt at its end: the memory that it asked for and used, and the memory of all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.core.admission import Admission
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.job import Failure, Job
from scheduler.core.out_of_memory import VICTIM, MemorySeen, whose_fault

VICTIM_HINT = "other processes on its GPU used memory that it had asked for; gpujob who shows who uses the GPUs"


def with_memory(job: Job, failure: Failure | None, gpus: Mapping[int, Gpu], admission: Admission) -> Failure | None:
    """Return a copy of the cause of a failure, with the sizes of GPU memory that are known; None if ``failure`` is None.

    If GPU memory ran out, it also tells whose fault this was (`Failure.oom`). ``gpus``: by index.
    """
    if failure is None:
        return None
    mine = [gpu for gpu in job.gpus if gpu in gpus]
    known = [size for size in (gpus[gpu].memory_mib for gpu in mine) if size is not None]
    vram, share = job.spec.vram_mib or 0, min(known) * job.need.parts // WHOLE if known else 0
    asked = max(vram, share) if job.oom_retries else vram or share  # the share may have been raised
    # The readings are taken at intervals; the log may tell more.
    peaks = [peak for peak in (admission.peak_mib(job.attempt_key), failure.peak_mib) if peak is not None]
    failure = replace(failure, peak_mib=max(peaks, default=None), asked_mib=asked or None)
    if failure.kind != OUT_OF_MEMORY or not job.need.parts:
        return failure
    capacity = min((admission.capacity_mib(gpu) or gpus[gpu].memory_mib or 0 for gpu in mine), default=0) or None
    driver = max(0, min(known) - capacity) if known and capacity else 0
    told = failure.others_mib
    if told is None:
        seen = [others for others in (admission.others_mib(gpu, job.attempt_key) for gpu in mine) if others is not None]
        told = max(seen, default=None)
    others = None if told is None else max(0, told - driver)
    memory = MemorySeen(
        min(asked, capacity) if asked and capacity else asked or None,
        failure.peak_mib, failure.tried_mib, capacity, failure.free_mib, others,
    )  # fmt: skip
    whose = whose_fault(memory)
    return replace(failure, oom=whose, others_mib=others, hint=VICTIM_HINT if whose == VICTIM else failure.hint)
