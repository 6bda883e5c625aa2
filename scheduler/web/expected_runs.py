"""The predicted part of the Timeline: the rest of running jobs, and the runs of jobs that wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scheduler.client.outlook import Expectation, Outlook
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Job, JobState
from scheduler.views.predictions import band_text, start_order
from scheduler.web.timeline import LATER, Bar, Run
from scheduler.web.view_models import parts_of

AHEAD = 0.5  # space for predicted runs, as a share of the time that is shown
WAITS = JobState.PENDING.value


def with_expected(
    runs: Iterable[Run], outlook: Outlook, jobs: Mapping[int, Job], memory: Mapping[int, int | None]
) -> list[Run]:
    """Return the runs, with the predicted ends of running jobs, and the predicted runs of jobs that wait.

    ``jobs``: id → job, of all jobs with a prediction; ``memory``: GPU → its total memory in MiB.
    """
    on = {number for number, job in jobs.items() if job.state.holds_gpus}
    found = [
        replace(run, expected=outlook.jobs.get(run.job, Expectation(run.job)))
        if run.job in on and run.attempt == jobs[run.job].attempt
        else run
        for run in runs
    ]
    for number, one in outlook.jobs.items():
        job = jobs.get(number)
        if job is None or job.state is not JobState.PENDING or one.start is None or (job.need.count and not one.gpus):
            continue
        start = max(outlook.at, one.start.likely)
        parts = parts_of(job, job.need.parts, one.gpus, memory)
        found.append(Run(number, job.attempt + 1, start, start, one.gpus, parts, WAITS, expected=one))
    return found


def edge_of(start: float, end: float, outlook: Outlook) -> float:
    """Return the end of the time axis: there is more space after now if a predicted time needs it."""
    times = [at.likely for one in outlook.jobs.values() for at in (one.start, one.end) if at is not None]
    usual = end + LATER * (end - start)
    return end + AHEAD * (end - start) if max(times, default=0.0) > usual else usual


@dataclass(frozen=True, slots=True)
class Future:
    """The predicted part of a bar: from, to (seconds since 1970). ``pale``: times at which the job perhaps runs."""

    start: float
    end: float
    pale: tuple[tuple[float, float], ...]


def future_of(bar: Bar, edge: float) -> Future | None:
    """Return the predicted part of a bar up to ``edge``; None if there is none."""
    run, one = bar.run, bar.run.expected
    if one is None or (one.end is None and run.state != WAITS):
        return None
    start = max(bar.start, run.end)
    pale = []
    if run.state == WAITS and one.start is not None and one.start.earliest < start:
        pale.append((one.start.earliest, start))
    if one.end is not None and bar.end < edge:
        latest = edge if one.end.latest is None else min(edge, one.end.latest)
        pale.append((bar.end, max(bar.end, latest)))
    return Future(start, max(start, bar.end), tuple(pale))


def expected_words(run: Run, now: float) -> str:
    """Return what is expected of a run, for tooltips and screen readers; empty if nothing is."""
    one = run.expected
    if one is None:
        return ""
    end = "it is not known when it ends" if one.end is None else f"expected to end {band_text(one.end, now)}"
    if one.start is None or run.state != WAITS:
        return end
    return f"expected to start {band_text(one.start, now)}, {end}"


@dataclass(frozen=True, slots=True)
class ExpectedRow:
    """A row in the table of the expected runs. ``job``: None if it was deleted meanwhile."""

    number: int
    job: Job | None
    gpus: str
    expected: Expectation


def expected_rows(outlook: Outlook, jobs: Mapping[int, Job]) -> list[ExpectedRow]:
    """Return the predictions as rows of a table, as far as a time is known."""
    known = sorted((one for one in outlook.jobs.values() if one.start or one.end), key=start_order)
    return [ExpectedRow(one.job, jobs.get(one.job), gpu_ids_text(one.gpus), one) for one in known]
