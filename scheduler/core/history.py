"""What of the GPUs' and jobs' readings is kept for curves: means over ten seconds for a day, over five minutes for 90 days.

Times are seconds since 1970, memory in MiB, loads and shares 0 to 1. What was not measured is None and no part of a mean; a
time of which nothing is known (no scheduler, a machine that slept) has no sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.admission import GpuAdmission
from scheduler.core.counters import INF, TICK_BUCKETS, label_of

SHORT_S, LONG_S = 10.0, 300.0
KEEP_SHORT_S, KEEP_LONG_S = 86_400.0, 90 * 86_400.0
MOST_ROWS = 500_000  # of each of the four tables; of more the oldest go: 16 GPUs for 90 days, 57 jobs for a day
MOST_POINTS = 2000  # of one GPU or attempt, in one answer
QUEUE = -1  # in place of a GPU: the whole queue

Values = tuple[float | None, ...]
Row = tuple[float | None, ...]
GPU_COLUMNS = "used own others reserved load temperature power booked paused used_most load_most".split()
JOB_COLUMNS = "memory load memory_most load_most".split()


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A GPU over some time from ``at``: means, and the most of memory in use and of load. ``paused``: at some moment of it."""

    at: float
    used_mib: float | None
    own_mib: float | None
    foreign_mib: float | None
    reserved_mib: float | None  # neither ours nor of others: the driver's, a display's
    load: float | None
    temperature_c: float | None
    power_w: float | None
    booked: float | None
    paused: bool
    used_max_mib: float | None
    load_max: float | None


@dataclass(frozen=True, slots=True)
class JobSample:
    """An attempt of a job over some time from ``at``, on all its GPUs together; the load is the mean of them."""

    at: float
    memory_mib: float | None
    load: float | None
    memory_max_mib: float | None
    load_max: float | None


@dataclass(frozen=True, slots=True)
class PauseSpan:
    """A GPU (None: the whole queue) was paused from ``start`` to ``end`` (None: it still is)."""

    gpu: int | None
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be written at once: the rows of a bucket, what was paused since when, and how long turns took.

    ``gpus``: index, at, and a GpuSample's fields; ``jobs``: job, attempt, at, and a JobSample's. ``ticks``: since the start
    of the scheduler, by bucket.
    """

    at: float
    gpus: tuple[Row, ...] = ()
    jobs: tuple[Row, ...] = ()
    pauses: tuple[tuple[float, frozenset[int]], ...] = ()
    ticks: tuple[int, ...] = ()
    tick_sum: float = 0.0


class Mean:
    """Means and greatest values of what was added, column by column; None where nothing was measured."""

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
        """Of this column."""
        number = self._numbers[column]
        return round(self._sums[column] / number, digits) if number else None

    def most(self, column: int) -> float | None:
        """Of this column."""
        return self._most[column]


class GpuMean(Mean):
    """What one GPU was like in a bucket."""

    DIGITS = (0, 0, 0, 0, 3, 1, 1, 3, 0)  # memory four times, load, temperature, power, booked share, paused

    def __init__(self) -> None:
        super().__init__(len(self.DIGITS))

    def row(self, gpu: int, at: float) -> Row:
        """As it is written."""
        means = [self.mean(column, digits) for column, digits in enumerate(self.DIGITS[:-1])]
        return (gpu, at, *means, self.most(8), self.most(0), self.most(4))


class JobMean(Mean):
    """What one attempt was like in a bucket."""

    def __init__(self) -> None:
        super().__init__(2)

    def row(self, job: int, attempt: int, at: float) -> Row:
        """As it is written."""
        return (job, attempt, at, self.mean(0, 0), self.mean(1, 3), self.most(0), self.most(1))


def gpu_values(card: GpuAdmission | None, booked: float, paused: bool) -> Values:
    """What is known of a GPU now; ``card`` None: it is only declared, and nobody measures it."""
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
    """Memory and load of an attempt on these GPUs, as far as the driver tells them; promised memory is not measured."""
    memory: float | None = None
    loads: list[float] = []
    for card in cards:
        reading = card.reading if card.verdict.code != "stale" else None
        if reading is None or reading.processes is None or reading.memory_used_mib is None:
            continue
        mine = [process for process in reading.processes if process.owner == key]
        if any(process.memory_mib is not None for process in mine):
            memory = (memory or 0.0) + card.own.get(key, 0.0)
        elif not mine and key not in card.own:  # it is there, and has taken no memory yet
            memory = memory or 0.0
        told = [process.load for process in mine if process.load is not None]
        if told:
            loads.append(min(1.0, sum(told)))
    return (memory, sum(loads) / len(loads) if loads else None)


class Ticks:
    """How long turns took: a histogram that only grows."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(TICK_BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """A turn took so long."""
        self.counts[bisect_left(TICK_BUCKETS, seconds)] += 1
        self.total += seconds


TICK_LABELS = (*map(label_of, TICK_BUCKETS), INF)


def bucket_of(at: float, step_s: float) -> float:
    """Where the bucket begins that a moment lies in."""
    return math.floor(at / step_s) * step_s


@dataclass(frozen=True, slots=True)
class Question:
    """From when to when rows are asked for, over how long they are averaged, and whether of the short table."""

    since: float
    until: float
    step_s: float
    short: bool


def question(since: float, until: float, step_s: float, now: float) -> Question:
    """How to answer for this time and step with at most ``MOST_POINTS``: from the short table as long as that reaches back."""
    until = min(until, now + SHORT_S)
    since = max(since, now - KEEP_LONG_S)
    wanted = max(step_s, (until - since) / MOST_POINTS)
    short = since >= now - KEEP_SHORT_S and wanted < LONG_S
    base = SHORT_S if short else LONG_S
    return Question(bucket_of(since, base), until, base * max(1, math.ceil(wanted / base)), short)


def pause_spans(changes: Iterable[tuple[float, int, bool]], since: float, until: float) -> list[PauseSpan]:
    """The pauses that reach into this time; ``changes``: when, GPU (or ``QUEUE``), paused from then on; oldest first."""
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
