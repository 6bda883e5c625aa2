"""The usage report: how long jobs waited and ran and which GPUs they used, with sums by label, by GPU and in total.

Amounts are whole milliseconds and thousandths of a GPU, so that the parts add up to the totals exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.core.gpu import WHOLE
from scheduler.core.job import Event, Job, JobState, Outcome

_ENDINGS = frozenset({"retry_scheduled", "done", "failed", "cancelled"})
_MS = 1000


@dataclass(frozen=True, slots=True)
class AttemptUse:
    """Run time and GPUs of one attempt.

    ``lost``: the end of the attempt is not known. ``run_ms`` then counts up to the time when the loss was noticed.
    """

    number: int
    started_ms: int  # since 1970
    run_ms: int
    gpus: tuple[int, ...] = ()
    parts: int = 0  # thousandths of each of its GPUs
    lost: bool = False

    def since(self, moment_ms: int) -> AttemptUse | None:
        """Return the part of the attempt after ``moment_ms`` (since 1970); None if the attempt ended earlier."""
        end = self.started_ms + self.run_ms
        if end < moment_ms:
            return None
        start = max(self.started_ms, moment_ms)
        return AttemptUse(self.number, start, end - start, self.gpus, self.parts, self.lost)


@dataclass(frozen=True, slots=True)
class Line:
    """A job in the report. ``attempts``: the parts of its attempts within the reported period."""

    job: Job
    wait_ms: int | None  # from its submission to its first start; None if it never started
    started_at: float | None  # the first start, seconds since 1970
    attempts: tuple[AttemptUse, ...]

    @property
    def run_ms(self) -> int:
        """Run time of all attempts of the job within the period, in milliseconds."""
        return sum(attempt.run_ms for attempt in self.attempts)

    @property
    def gpu_ms(self) -> int:
        """GPU time of all attempts of the job within the period: thousandths of a GPU times milliseconds."""
        return sum(attempt.run_ms * attempt.parts * len(attempt.gpus) for attempt in self.attempts)

    @property
    def lost(self) -> int:
        """Number of attempts of the job whose end is not known."""
        return sum(attempt.lost for attempt in self.attempts)

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs that the attempts of the job used, ascending."""
        return tuple(sorted({gpu for attempt in self.attempts for gpu in attempt.gpus}))


@dataclass(slots=True)
class Total:
    """Sums over lines of the report.

    ``started``: number of jobs that have started; ``lost``: number of attempts whose end is not known.
    """

    jobs: int = 0
    states: dict[str, int] = field(default_factory=lambda: {state.value: 0 for state in JobState})
    outcomes: dict[str, int] = field(default_factory=lambda: {outcome.value: 0 for outcome in Outcome})
    attempts: int = 0
    lost: int = 0
    started: int = 0
    wait_ms: int = 0
    run_ms: int = 0
    gpu_ms: int = 0

    def add(self, line: Line) -> None:
        """Add a job to the sums."""
        self.jobs += 1
        self.states[line.job.state.value] += 1
        if line.job.outcome is not None:
            self.outcomes[line.job.outcome.value] += 1
        self.attempts += len(line.attempts)
        self.lost += line.lost
        self.run_ms += line.run_ms
        self.gpu_ms += line.gpu_ms
        if line.wait_ms is not None:
            self.started += 1
            self.wait_ms += line.wait_ms

    @property
    def mean_wait_ms(self) -> float | None:
        """Mean wait of the jobs that have started, in milliseconds; None if no job has started."""
        return self.wait_ms / self.started if self.started else None


@dataclass(slots=True)
class GpuUse:
    """Use of one GPU. If two jobs share the GPU, ``run_ms`` is the sum of their full run times.

    ``gpu_ms`` is the sum of run time times share (thousandths of the GPU).
    """

    gpu: int
    jobs: int = 0
    lost: int = 0
    run_ms: int = 0
    gpu_ms: int = 0
    busy: float | None = None  # used part of the period, 0 to 1; None: the period is empty


@dataclass(frozen=True, slots=True)
class Report:
    """Lines and sums of the period from ``start`` to ``end``, in seconds since 1970.

    ``known_since``: jobs that ended before this time may be missing because they were deleted. None: no job is missing.
    """

    start: float
    end: float
    known_since: float | None
    lines: Sequence[Line]
    labels: Mapping[str, Total]  # jobs without a label: ""
    gpus: Sequence[GpuUse]
    total: Total


def attempts_of(job: Job, events: Iterable[Event], now: float) -> tuple[AttemptUse, ...]:
    """Return the attempts of a job, oldest first.

    The last attempt is computed from ``job``, the earlier attempts from ``events``. A running attempt counts up to
    ``now`` (seconds since 1970). No duration is negative, even if the clock was set back.
    """
    booked = job.need.parts if job.need.count else 0
    found: dict[int, AttemptUse] = {}
    for event in events:
        number = event.detail.get("attempt", 0)
        if event.kind == "started":
            share = event.detail.get("share")
            parts = booked if share is None else round(share * WHOLE)
            gpus = tuple(event.detail.get("gpus", ()))
            found[number] = AttemptUse(number, round(event.at * _MS), 0, gpus, parts, lost=True)
        elif event.kind in _ENDINGS and number in found:
            begun = found[number]
            ran = event.detail.get("ran")
            run_ms = round(event.at * _MS) - begun.started_ms if ran is None else round(ran * _MS)
            lost = event.detail.get("outcome") == Outcome.LOST.value
            found[number] = AttemptUse(number, begun.started_ms, max(0, run_ms), begun.gpus, begun.parts, lost)
    if job.started_at is not None:
        start, end = round(job.started_at * _MS), round((now if job.finished_at is None else job.finished_at) * _MS)
        lost = job.outcome is Outcome.LOST
        if 0 < start - end <= _MS:  # the start of a short job may be recorded after its end
            start = end
        found[job.attempt] = AttemptUse(job.attempt, start, max(0, end - start), job.gpus, booked, lost)
    return tuple(found[number] for number in sorted(found))


def report_of(
    stories: Iterable[tuple[Job, Iterable[Event]]],
    *,
    gpus: Iterable[int] = (),
    now: float,
    since: float | None = None,
    known_since: float | None = None,
) -> Report:
    """Return the report over these jobs. ``stories``: each job with its events.

    ``since``: start of the period (seconds since 1970); None: the period starts with the first submission. Jobs that
    ended before the period are left out. If an attempt began before the period, only its part within the period counts.
    ``gpus``: GPUs that are listed even if no job used them.
    """
    lines: list[Line] = []
    labels: dict[str, Total] = {}
    total = Total()
    use = {gpu: GpuUse(gpu) for gpu in gpus}
    start = now if since is None else since
    for job, events in stories:
        if since is not None and job.state.ended and (job.finished_at or 0.0) < since:
            continue
        runs = attempts_of(job, events, now)
        first = runs[0].started_ms if runs else None
        wait_ms = None if first is None else max(0, first - round(job.submitted_at * _MS))
        if since is None:
            start = min(start, job.submitted_at, job.submitted_at if first is None else first / _MS)
        else:
            runs = tuple(part for part in (run.since(round(since * _MS)) for run in runs) if part is not None)
        line = Line(job, wait_ms, None if first is None else first / _MS, runs)
        lines.append(line)
        total.add(line)
        if job.spec.label not in labels:  # no `setdefault`: creating a Total costs more than all other work for a line
            labels[job.spec.label] = Total()
        labels[job.spec.label].add(line)
        for gpu in line.gpus:
            use.setdefault(gpu, GpuUse(gpu)).jobs += 1
        for run in runs:
            for gpu in run.gpus:
                one = use[gpu]
                one.lost += run.lost
                one.run_ms += run.run_ms
                one.gpu_ms += run.run_ms * run.parts
    span_ms = round((now - start) * _MS)
    for one in use.values():
        one.busy = min(1.0, one.gpu_ms / (span_ms * WHOLE)) if span_ms > 0 else None
    return Report(
        start, now, known_since, lines, dict(sorted(labels.items())), [use[gpu] for gpu in sorted(use)], total
    )
