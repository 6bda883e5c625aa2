"""Out of GPU memory: whether a job's own need was too low, or others took its memory; and the need of its next attempt."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import BY_MEMORY, WHOLE, ResourceRequest
from scheduler.core.job import Failure, Job
from scheduler.core.suggested_need import STEP
from scheduler.core.units import mib_text

OWN, VICTIM = "own", "victim"  # values of `Failure.oom`
MARGIN = 1.2  # the next attempt gets this multiple of the memory that was seen: the program would have used more
TOLERANCE = 0.02  # of the GPU's memory, for contexts and rounding; at least LEAST_SLACK_MIB
LEAST_SLACK_MIB = 512


@dataclass(frozen=True, slots=True)
class MemorySeen:
    """The memory of a GPU around the end of an attempt that ran out of it. MiB; None: not known.

    ``asked``: the share or memory that the job had; ``used``: the most that it used; ``tried``: the allocation that failed;
    ``capacity``: of the GPU, for jobs; ``free``: left when the allocation failed; ``others``: used by all other processes,
    without the driver.
    """

    asked: int | None = None
    used: int | None = None
    tried: int | None = None
    capacity: int | None = None
    free: int | None = None
    others: int | None = None

    @property
    def demand(self) -> int | None:
        """The least memory with which the attempt would have got further; None: not known."""
        if self.used is None and self.tried is None:
            return None
        return (self.used or 0) + (self.tried or 0)


def whose_fault(seen: MemorySeen) -> str:
    """Return `VICTIM` if other processes used memory that the job had asked for, else `OWN`.

    A job that wanted more than it had asked for is its own fault, even if others used too much as well.
    """
    if seen.asked is None:
        return OWN
    slack = max(LEAST_SLACK_MIB, TOLERANCE * (seen.capacity or seen.asked))
    if seen.demand is not None and seen.demand > seen.asked + slack:
        return OWN
    if seen.free is not None and seen.tried is not None and seen.free >= seen.tried:
        return OWN  # there was room: the program limits itself, or its memory is fragmented
    if seen.others is not None and seen.capacity is not None:
        return VICTIM if seen.others > seen.capacity - seen.asked + slack else OWN
    # Without a word about the others, only a program that told its whole demand can be a victim.
    return VICTIM if seen.used is not None and seen.tried is not None and seen.demand is not None else OWN


@dataclass(frozen=True, slots=True)
class NextNeed:
    """The need of the next attempt. ``need``, ``vram_mib``: its new request; None or 0: as before. ``words``: for people."""

    need: ResourceRequest | None
    vram_mib: int
    words: str


def next_need(job: Job, failure: Failure, sizes: Collection[int], most_mib: int) -> NextNeed | None:
    """Return the need of the next attempt of a job that ran out of GPU memory; None: there is none that could help.

    ``sizes``: MiB of the GPUs that the job may use; empty: not known. ``most_mib``: the most MiB that it can get on one of
    them, for jobs that book MiB (0: not known).
    """
    need, before = job.need, job.spec.vram_mib or 0
    if not need.count or not need.parts:
        return None  # it has no GPU, or those that it names
    if failure.oom == VICTIM:
        return _alone(need, before, most_mib)
    seen = demand_of(failure, ())
    wanted = math.ceil(seen * MARGIN) if seen else 0
    # The job decides, not the present setting: the setting may have changed while the job ran.
    if before and need.parts == BY_MEMORY:
        after = min(most_mib, max(wanted, before + before * STEP // WHOLE) if wanted else 2 * before)
        return NextNeed(None, after, mib_text(after)) if after > before else None
    if not wanted or not sizes or not failure.asked_mib:
        raised = replace(need, parts=min(WHOLE, 2 * need.parts))
        return NextNeed(raised, 0, str(raised)) if raised != need else None
    return _raised(need, before, failure.asked_mib, wanted, sizes)


def demand_of(failure: Failure, sizes: Collection[int]) -> int | None:
    """Return the MiB that an attempt wanted on one GPU; None if nothing was seen. ``sizes``: see `next_need`.

    An allocation that fits on no GPU is left out: it tells nothing about the need.
    """
    wanted = (failure.peak_mib or 0) + (failure.tried_mib or 0)
    return wanted if wanted and (not sizes or wanted <= max(sizes)) else failure.peak_mib


def _alone(need: ResourceRequest, before: int, most_mib: int) -> NextNeed:
    """Return the need of a job that must have its GPUs for itself."""
    words = "alone on its GPU" if need.count == 1 else "alone on its GPUs"
    if before and need.parts == BY_MEMORY:
        return NextNeed(None, max(before, most_mib), words)
    return NextNeed(replace(need, parts=WHOLE), 0, words)


def _raised(need: ResourceRequest, before: int, asked: int, wanted: int, sizes: Collection[int]) -> NextNeed | None:
    """Return a need of ``wanted`` MiB, or of the largest GPU; None if this is no more than ``asked``."""
    wanted = max(wanted, math.ceil(asked * (need.parts + STEP) / need.parts))  # at least one step more
    fitting = [size for size in sizes if size >= wanted]
    target = min(fitting) if fitting else max(sizes)
    parts = min(WHOLE, math.ceil(wanted * WHOLE / target / STEP) * STEP)
    if target * parts // WHOLE <= asked:
        return None
    raised = replace(need, parts=parts)
    larger = min(sizes) < target  # a share of a smaller GPU would be too little
    vram = max(before, min(wanted, target)) if larger or before else 0
    words = str(raised) + (f" ({mib_text(vram)})" if larger else "")
    return NextNeed(raised, vram, words)


def memory_text(job: Job, failure: Failure) -> str:
    """Return a text such as ``asked 0.25 (20 GiB), peaked at 31 GiB``, for a job that ran out of GPU memory."""
    peak, asked = failure.peak_mib, failure.asked_mib
    if failure.oom == VICTIM:
        used = f"used {mib_text(peak)}" if peak else "used no more than it asked for"
        of = f" of the {mib_text(asked)} that it asked for" if peak and asked else ""
        return f"{used}{of}; other processes used the rest"
    size = f" ({mib_text(asked)})" if asked else ""
    by_memory = job.need.parts == BY_MEMORY and job.spec.vram_mib
    need = mib_text(job.spec.vram_mib or 0) if by_memory else f"{job.need}{size}"
    parts = [f"asked {need}" if job.need.count else "had no GPU"]
    if peak:
        parts.append(f"peaked at {mib_text(peak)}")
    if failure.tried_mib:
        parts.append(f"tried to get {mib_text(failure.tried_mib)}" + (" more" if peak else ""))
    return ", ".join(parts)


def retry_note(job: Job, failure: Failure, after: NextNeed) -> str:
    """Return the sentence about a retry, such as ``oom: asked 0.25 (20 GiB), peaked at 31 GiB; tried again with 0.5``."""
    how = after.words if failure.oom == VICTIM else f"with {after.words}"
    return f"{OUT_OF_MEMORY}: {memory_text(job, failure)}; tried again {how}"
