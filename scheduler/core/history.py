"""Samples of GPUs and jobs for history curves: 10-second means are kept for a day, 5-minute means for 90 days.

Times are seconds since 1970, memory is in MiB, loads and shares are 0 to 1. A value that was not measured is None,
and is left out when a mean is computed. An interval without measurements (no scheduler, a sleeping machine) has no
sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.counters import INF, TICK_BUCKETS, label_of
from scheduler.core.gpu_admission import GpuAdmission

SHORT_S, LONG_S = 10.0, 300.0
KEEP_SHORT_S, KEEP_LONG_S = 86_400.0, 90 * 86_400.0
# Limit of each of the four tables; further rows replace the oldest ones. Enough for the 5-minute means of 16 GPUs in
# 90 days, or the 10-second means of 57 attempts that run for a day.
MOST_ROWS = 500_000
MOST_POINTS = 2000  # samples of one GPU or attempt in one answer
QUEUE = -1  # stands for the whole queue in place of a GPU's index

Values = tuple[float | None, ...]
Row = tuple[float | None, ...]
GPU_COLUMNS = "used own others reserved load temperature power booked paused used_most load_most".split()
JOB_COLUMNS = "memory load memory_most load_most".split()


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A sample of one GPU over an interval that begins at ``at``.

    ``used_max_mib`` and ``load_max`` are maxima in the interval, the other numbers are means. ``booked``: the share
    that is booked in the ledger; ``paused``: whether the GPU was paused at any time in the interval.
    """

    at: float
    used_mib: float | None
    own_mib: float | None
    foreign_mib: float | None
    reserved_mib: float | None  # used by neither jobs nor foreign processes: driver, display
    load: float | None
    temperature_c: float | None
    power_w: float | None
    booked: float | None
    paused: bool
    used_max_mib: float | None
    load_max: float | None


@dataclass(frozen=True, slots=True)
class JobSample:
    """A sample of one attempt over an interval that begins at ``at``.

    The memory is the sum over the GPUs of the attempt, the load is the mean over these GPUs.
    """

    at: float
    memory_mib: float | None
    load: float | None
    memory_max_mib: float | None
    load_max: float | None


@dataclass(frozen=True, slots=True)
class PauseSpan:
    """A period in which a GPU was paused (``gpu`` None: the whole queue). ``end`` None: the pause still lasts."""

    gpu: int | None
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one transaction: samples of an interval, changes of pauses, durations of passes.

    ``at``: time of writing. ``gpus``: rows of index, interval start, GPU_COLUMNS; ``jobs``: rows of job, attempt,
    interval start, JOB_COLUMNS. ``pauses``: for each change of pauses, the time, and the set of all GPUs that are
    paused after the change (with QUEUE if the queue is paused). ``ticks``: for each bucket of durations, the number of
    passes since the scheduler's start; ``tick_sum``: seconds that these passes took together.
    """

    at: float
    gpus: tuple[Row, ...] = ()
    jobs: tuple[Row, ...] = ()
    pauses: tuple[tuple[float, frozenset[int]], ...] = ()
    ticks: tuple[int, ...] = ()
    tick_sum: float = 0.0


class Mean:
    """Computes means and maxima of samples, column by column. The result is None for a column without a value."""

    __slots__ = ("_most", "_numbers", "_sums")

    def __init__(self, columns: int) -> None:
        self._sums, self._numbers = [0.0] * columns, [0] * columns
        self._most: list[float | None] = [None] * columns

    def add(self, values: Sequence[float | None]) -> None:
        """Add a sample."""
        for column, value in enumerate(values):
            if value is not None:
                self._sums[column] += value
                self._numbers[column] += 1
                most = self._most[column]
                self._most[column] = value if most is None or value > most else most

    def mean(self, column: int, digits: int) -> float | None:
        """Return the mean of a column, rounded to ``digits`` decimal places; None for a column without a value."""
        number = self._numbers[column]
        return round(self._sums[column] / number, digits) if number else None

    def most(self, column: int) -> float | None:
        """Return the maximum of a column; None for a column without a value."""
        return self._most[column]


class GpuMean(Mean):
    """Means and maxima of one GPU in one interval."""

    DIGITS = (0, 0, 0, 0, 3, 1, 1, 3, 0)  # decimal places: memory (4 columns), load, temperature, power, booked, paused

    def __init__(self) -> None:
        super().__init__(len(self.DIGITS))

    def row(self, gpu: int, at: float) -> Row:
        """Return the means and maxima as a row for `Batch.gpus`. ``at``: start of the interval (seconds since 1970)."""
        means = [self.mean(column, digits) for column, digits in enumerate(self.DIGITS[:-1])]
        return (gpu, at, *means, self.most(8), self.most(0), self.most(4))


class JobMean(Mean):
    """Means and maxima of one attempt in one interval."""

    def __init__(self) -> None:
        super().__init__(2)

    def row(self, job: int, attempt: int, at: float) -> Row:
        """Return the row for `Batch.jobs`."""
        return (job, attempt, at, self.mean(0, 0), self.mean(1, 3), self.most(0), self.most(1))


def gpu_values(card: GpuAdmission | None, booked: float, paused: bool) -> Values:
    """Return the current values of a GPU, in the columns of GpuMean. ``card``: None for a declared GPU."""
    reading = card.reading if card is not None and card.verdict.code != "stale" else None
    if card is None or reading is None or reading.lost:
        return (None, None, None, None, None, None, None, booked, float(paused))
    used = reading.memory_used_mib
    known = used is not None
    return (
        used, card.own_mib if known else None, card.foreign_mib if known else None, card.reserved_mib, reading.load,
        reading.temperature_c, reading.power_w, booked, float(paused),
    )  # fmt: skip


def job_values(key: str, cards: Iterable[GpuAdmission]) -> Values:
    """Return memory (MiB) and load of an attempt on these GPUs; None for a value that the driver does not give.

    Only measured values count. If the driver gives no memory figure for an attempt, `core/admission.py` estimates one.
    This function does not use the estimate.
    """
    memory: float | None = None
    loads: list[float] = []
    for card in cards:
        reading = card.reading if card.verdict.code != "stale" else None
        if reading is None or reading.processes is None or reading.memory_used_mib is None:
            continue
        mine = [process for process in reading.processes if process.owner == key]
        if any(process.memory_mib is not None for process in mine):
            memory = (memory or 0.0) + card.own.get(key, 0.0)
        elif not mine and key not in card.own:  # it uses no memory of this GPU yet
            memory = memory or 0.0
        told = [process.load for process in mine if process.load is not None]
        if told:
            loads.append(min(1.0, sum(told)))
    return (memory, sum(loads) / len(loads) if loads else None)


class Ticks:
    """Histogram of the durations of passes since the scheduler's start. ``total``: sum of the durations in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(TICK_BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a pass that took ``seconds``."""
        self.counts[bisect_left(TICK_BUCKETS, seconds)] += 1
        self.total += seconds


TICK_LABELS = (*map(label_of, TICK_BUCKETS), INF)


def bucket_of(at: float, step_s: float) -> float:
    """Return the start of the interval of ``step_s`` seconds in which ``at`` lies."""
    return math.floor(at / step_s) * step_s


@dataclass(frozen=True, slots=True)
class Question:
    """A query for samples: the rows from ``since`` to ``until``, averaged over ``step_s`` seconds.

    ``short``: True for the table of 10-second means, False for the table of 5-minute means.
    """

    since: float
    until: float
    step_s: float
    short: bool


def question(since: float, until: float, step_s: float, now: float) -> Question:
    """Return the query for samples from ``since`` to ``until``.

    The time between two samples is ``step_s`` seconds, or more if there would otherwise be more than about
    ``MOST_POINTS`` samples. If this time is below 5 minutes, and the 10-second means reach back to ``since``, the query
    reads the 10-second means. In all other cases it reads the 5-minute means.
    """
    until = min(until, now + SHORT_S)
    since = max(since, now - KEEP_LONG_S)
    wanted = max(step_s, (until - since) / MOST_POINTS)
    short = since >= now - KEEP_SHORT_S and wanted < LONG_S
    base = SHORT_S if short else LONG_S
    return Question(bucket_of(since, base), until, base * max(1, math.ceil(wanted / base)), short)


def pause_spans(changes: Iterable[tuple[float, int, bool]], since: float, until: float) -> list[PauseSpan]:
    """Return the pauses that overlap the time from ``since`` to ``until``, sorted by their start.

    ``changes``: (time, GPU or ``QUEUE``, True for a pause and False for its end), oldest first.
    """
    begun: dict[int, float] = {}
    found: list[PauseSpan] = []
    for at, gpu, paused in changes:
        if paused:
            begun.setdefault(gpu, at)
        elif gpu in begun:
            found.append(PauseSpan(None if gpu == QUEUE else gpu, begun.pop(gpu), at))
    found += [PauseSpan(None if gpu == QUEUE else gpu, at, None) for gpu, at in begun.items()]
    inside = [span for span in found if span.start < until and (span.end is None or span.end > since)]
    return sorted(inside, key=lambda span: (span.start, -1 if span.gpu is None else span.gpu))
