"""Slices of job traces for replays: reading, stretching of the arrivals, and bounds that no schedule can beat."""

from __future__ import annotations

import csv
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.core.gpu import WHOLE, ResourceRequest

SERVER = 8  # GPUs of a server
LONGEST_S = 48 * 3600.0  # longer jobs of a trace count as cut


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace. Times in seconds; ``priority``: lower is more urgent."""

    number: int
    submitted: float
    duration: float
    need: ResourceRequest
    priority: int

    @property
    def gpu_seconds(self) -> float:
        """The GPU time that it needs."""
        return self.duration * self.need.total / WHOLE


def slice_of(path: str, gpus: int, jobs: int, load: float, first: int) -> list[TraceJob]:
    """Return consecutive jobs of a trace, from the job with index ``first``, with arrivals at 0 s and later.

    Jobs that no server can run are left out before the counting. Run times are cut at 48 h. The times between arrivals
    are multiplied so that the jobs need the part ``load`` of the GPU time until the last arrival. Raises ValueError if the
    trace has too few jobs, or another form.
    """
    found = []
    with open(path, newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            count, parts = int(row["num_gpus"]), int(row["gpu_milli"])
            if count <= min(gpus, SERVER):
                need = ResourceRequest(count, parts)
                duration = min(float(row["duration_s"]), LONGEST_S)
                found.append(TraceJob(0, float(row["submit_s"]), duration, need, int(row["priority"])))
    chosen = found[first : first + jobs]
    if len(chosen) < jobs:
        raise ValueError(f"{path} has {len(found)} jobs that fit, not {first + jobs}")
    span = chosen[-1].submitted - chosen[0].submitted
    stretch = sum(job.gpu_seconds for job in chosen) / (gpus * load * span)
    begun = chosen[0].submitted
    return [
        replace(job, number=number, submitted=(job.submitted - begun) * stretch) for number, job in enumerate(chosen, 1)
    ]


def makespan_bound(jobs: Sequence[TraceJob], gpus: int) -> float:
    """Return a time before which no schedule has run all jobs.

    For each time r: the work that arrives at r or later, on all GPUs at once. A second bound counts jobs that need more than
    half of a GPU as whole ones, halves as halves, and smaller ones as nothing (a dual feasible function: two jobs of more
    than a half never share a GPU).
    """

    def rounded(job: TraceJob) -> float:
        half = WHOLE // 2
        return job.need.count * (1.0 if job.need.parts > half else 0.5 if job.need.parts == half else 0.0)

    exact: Callable[[TraceJob], float] = lambda job: job.need.total / WHOLE  # noqa: E731
    best = max(job.submitted + job.duration for job in jobs)
    for size in (exact, rounded):
        work = 0.0
        for job in sorted(jobs, key=lambda job: -job.submitted):
            work += job.duration * size(job)
            best = max(best, job.submitted + work / gpus)
    return best


def mean_jct_bound(jobs: Sequence[TraceJob], gpus: int) -> float:
    """Return a mean completion time (from submission to end) that no schedule can beat.

    All GPUs count as one machine that runs ``gpus`` times as fast and can interrupt jobs; it takes the job with the fewest
    GPU seconds first, which gives the least mean of the jobs' mean busy times (Goemans 1997). A job ends at least half of its
    run time after its mean busy time.
    """
    arrivals = sorted(jobs, key=lambda job: job.submitted)
    ready: list[tuple[float, int]] = []
    left = {job.number: job.gpu_seconds / gpus for job in jobs}
    weighted = dict.fromkeys(left, 0.0)  # ∫ t dt while the job is processed
    now, at = 0.0, 0
    while at < len(arrivals) or ready:
        if not ready:
            now = max(now, arrivals[at].submitted)
        while at < len(arrivals) and arrivals[at].submitted <= now:
            heapq.heappush(ready, (arrivals[at].gpu_seconds, arrivals[at].number))
            at += 1
        number = ready[0][1]
        until = min(now + left[number], arrivals[at].submitted if at < len(arrivals) else float("inf"))
        weighted[number] += (until - now) * (until + now) / 2.0
        left[number] -= until - now
        now = until
        if left[number] <= 1e-9:
            heapq.heappop(ready)
    total = sum(
        weighted[job.number] / max(job.gpu_seconds / gpus, 1e-12) + job.duration / 2.0 - job.submitted for job in jobs
    )
    return max(total / len(jobs), mean(job.duration for job in jobs))


def mean(values: Iterable[float]) -> float:
    """Return the mean; 0 if there are no values."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0
