"""Counters that are never reset, for `/metrics`: endings, retries, waiting times and run times of jobs.

The daemon computes the increments from the events of a pass, and adds them to the store in the transaction that
records these events. So the counters always agree with the recorded events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from scheduler.core.job import Event, Job, JobState, Outcome

# Upper bounds of histogram buckets in seconds; a bucket without bound follows. Never change them: counts are stored.
WAIT_BUCKETS = (0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)
RUN_BUCKETS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 172800.0, 604800.0)
TICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
INF = "+Inf"
SUM = "sum"
# Causes of another attempt: the job's `retries`, the settings `oom_retries` and `max_assign_attempts`, an error of its
# GPU, a crash before the attempt was claimed, `gpujob retry`.
RETRY_FAILED, RETRY_OUT_OF_MEMORY, RETRY_COULD_NOT_START = "failed", "out_of_memory", "could_not_start"
RETRY_GPU_ERROR, RETRY_UNCLAIMED, RETRY_ASKED = "gpu_error", "unclaimed", "asked"
RETRIES = (RETRY_FAILED, RETRY_OUT_OF_MEMORY, RETRY_COULD_NOT_START, RETRY_GPU_ERROR, RETRY_UNCLAIMED, RETRY_ASKED)
FINISHED, ENDED, RETRIED, WAITED, RAN = "finished", "ended", "retried", "waited", "ran"  # names of the counters
OUTCOMES = tuple(outcome.value for outcome in Outcome)
ENDINGS = (JobState.DONE.value, JobState.FAILED.value, JobState.CANCELLED.value, JobState.SKIPPED.value)

Key = tuple[str, str]  # name and label of a counter


def label_of(bound: float) -> str:
    """Return the label of the bucket with this upper bound in seconds."""
    return f"{bound:g}" if bound < 1e6 else str(int(bound))


def bucket(bounds: Sequence[float], seconds: float) -> str:
    """Return the label of the bucket for a duration. The upper bound of a bucket belongs to the bucket."""
    place = bisect_left(bounds, seconds)
    return label_of(bounds[place]) if place < len(bounds) else INF


def counted(events: Iterable[Event], jobs: Mapping[int, Job], began_before: Callable[[int], bool]) -> dict[Key, float]:
    """Return what these events add to the counters.

    ``jobs``: the jobs that the events changed, by id; ``began_before``: returns whether a job had started before these
    events. A job's waiting time is counted once, from its submission to its first start.
    """
    found: dict[Key, float] = {}
    begun: set[int] = set()

    def add(name: str, label: str, number: float = 1.0) -> None:
        found[name, label] = found.get((name, label), 0.0) + number

    for event in events:
        kind, detail = event.kind, event.detail
        job = jobs.get(event.job)
        ran = detail.get("ran")
        if kind in ENDINGS:
            outcome = detail.get("outcome") or (Outcome.DEPENDENCY.value if kind == "skipped" else kind)
            add(FINISHED, str(outcome))
            add(ENDED, kind)
        elif kind == "retry_scheduled":
            add(RETRIED, str(detail.get("cause", RETRY_FAILED)))
        elif kind == "unclaimed":
            add(RETRIED, RETRY_UNCLAIMED)
        elif kind == "requeued":
            add(RETRIED, RETRY_ASKED)
        if ran is not None:
            add(RAN, bucket(RUN_BUCKETS, ran))
            add(RAN, SUM, ran)
        if job is not None and (kind == "started" or ran is not None) and job.id not in begun:
            begun.add(job.id)
            if (kind == "started" and job.attempt == 1) or not began_before(job.id):
                started_at = job.started_at if job.started_at is not None else event.at - (ran or 0.0)
                waited = max(0.0, started_at - job.submitted_at)
                add(WAITED, bucket(WAIT_BUCKETS, waited))
                add(WAITED, SUM, waited)
    return found


def cumulative(bounds: Sequence[float], counts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the buckets as Prometheus defines them, ascending.

    Each bucket is (label, number of all values up to the upper bound of the bucket). ``counts``: label → number of the
    values in this bucket alone.
    """
    total, out = 0.0, []
    for label in (*map(label_of, bounds), INF):
        total += counts.get(label, 0.0)
        out.append((label, total))
    return out
