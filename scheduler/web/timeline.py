"""Layout of the Timeline. Each GPU has a band, and each attempt on the GPU is a bar in the band.

The height of a bar is the attempt's share of the GPU. If attempts run at the same time, their bars are drawn one above
the other.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.client.outlook import Expectation
from scheduler.core.gpu import WHOLE, Gpu

MOST_BARS = 2000
TOUCH_S = 2.0  # shorter overlaps are ignored: starts and ends are recorded with a delay
MERGED_BINS = 120
LATER = 0.1  # space after the end of the time shown (the future), as a share of that time
TICKS = 9
STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000)
THINNEST = 60  # thousandths of a GPU: the least height of a bar, so that small shares stay visible


@dataclass(frozen=True, slots=True)
class Run:
    """An attempt of a job, as it is drawn. Times are seconds since 1970.

    ``parts``: height of the bar in thousandths of a GPU; ``attempts``: number of attempts of the job; ``lost``: the end
    of this attempt is not known. ``expected``: the prediction for an attempt that runs, whose ``end`` is now, or that has
    not begun, whose ``end`` is its expected start.
    """

    job: int
    attempt: int
    start: float
    end: float
    gpus: tuple[int, ...]
    parts: int
    state: str
    attempts: int = 1
    lost: bool = False
    expected: Expectation | None = None

    @property
    def last(self) -> float:
        """The time until which the run keeps its place: its end, or its expected end (infinite if it is not known)."""
        if self.expected is None:
            return self.end
        return max(self.end, math.inf if self.expected.end is None else self.expected.end.likely)


@dataclass(frozen=True, slots=True)
class Bar:
    """A run in one band. ``end``: with the predicted part, up to the end of the time that is shown.

    ``pieces``: the vertical ranges (from, to) that the bar takes in the band, between 0 and 1. A bar has several pieces
    if no free range in the band is high enough for the whole bar.
    """

    run: Run
    start: float
    end: float
    pieces: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """A period in which short runs are not drawn as bars, but only counted. ``number``: the number of these runs."""

    start: float
    end: float
    number: int


@dataclass(frozen=True, slots=True)
class Band:
    """The runs on one GPU; if ``gpu`` is None, the runs that use no GPU.

    ``rows``: the highest number of runs at the same time, at least 1.
    """

    gpu: int | None
    bars: tuple[Bar, ...]
    merged: tuple[Merged, ...] = ()
    rows: int = 1


def layout(runs: Iterable[Run], start: float, end: float, gpus: Iterable[int], most: int = MOST_BARS) -> list[Band]:
    """Return a band for each GPU in ``gpus`` or in a run. If some runs use no GPU, the last band is for these runs.

    A run that overlaps the time from ``start`` to ``end`` (seconds since 1970) is in the band of each of its GPUs.
    There the run is either a bar or counted in ``merged``. Bars of a band do not overlap, and at any time their heights
    add up to at most 1. ``most``: largest number of bars in all bands together; the longest runs become bars.
    """
    seen = [run for run in runs if run.start < end and run.last >= start]
    bands: dict[int | None, list[Run]] = {gpu: [] for gpu in sorted(gpus)}
    for run in seen:
        for gpu in run.gpus or (None,):
            bands.setdefault(gpu, []).append(run)
    merged = _merged_ones(bands, start, end, most)
    order = sorted(gpu for gpu in bands if gpu is not None)
    out = []
    for key in (*order, *([None] if None in bands else [])):
        left = merged.get(key, set())
        shown = [run for place, run in enumerate(bands[key]) if place not in left]
        bars, rows = _stacked(shown, start, end, WHOLE if key is not None else 1, key is None)
        small = [run for place, run in enumerate(bands[key]) if place in left]
        out.append(Band(key, tuple(bars), tuple(_merged(small, start, end)), rows))
    return out


def by_server(runs: Iterable[Run], gpus: Iterable[Gpu]) -> list[Run]:
    """Return the runs with the server (`Gpu.server`) in place of the GPUs, and their share of all GPUs of the server."""
    found = list(gpus)
    server_of = {gpu.index: gpu.server for gpu in found}
    sizes = Counter(gpu.server for gpu in found)
    out = []
    for run in runs:
        servers = {server_of[gpu] for gpu in run.gpus if gpu in server_of}
        size = max(1, sum(sizes[server] for server in servers))
        out.append(replace(run, gpus=tuple(sorted(servers)), parts=max(1, run.parts * len(run.gpus) // size)))
    return out


def _length(run: Run, start: float, end: float) -> float:
    return min(run.last, end) - max(run.start, start)


def _merged_ones(
    bands: Mapping[int | None, Sequence[Run]], start: float, end: float, most: int
) -> dict[int | None, set[int]]:
    """Return band → indexes of the runs that get no bar. The ``most`` longest runs in all bands together get bars."""
    found: dict[int | None, set[int]] = {}
    if sum(map(len, bands.values())) <= most:
        return found
    every = [
        (_length(run, start, end), run.start, -1 if key is None else key, place)
        for key, band in bands.items()
        for place, run in enumerate(band)
    ]
    every.sort(reverse=True)
    for _, _, key, place in every[most:]:
        found.setdefault(None if key < 0 else key, set()).add(place)
    return found


def _merged(runs: Sequence[Run], start: float, end: float) -> Iterator[Merged]:
    width = (end - start) / MERGED_BINS
    bins: dict[int, list[Run]] = {}
    for run in runs:
        bins.setdefault(min(MERGED_BINS - 1, max(0, int((run.start - start) / width))), []).append(run)
    for number in sorted(bins):
        yield Merged(start + number * width, start + (number + 1) * width, len(bins[number]))


def _stacked(runs: Sequence[Run], start: float, end: float, least: int, cpu: bool) -> tuple[list[Bar], int]:
    """Return the bars of a band, and the highest number of runs at the same time.

    ``least``: minimum height of the band in thousandths of a GPU. ``cpu``: whether this is the band of the runs that
    use no GPU; all its bars have the height 1.
    """
    ordered = sorted(runs, key=lambda run: (run.start, run.job, run.attempt))
    touch = max(TOUCH_S, (end - start) / MOST_BARS)
    ends = [max(run.start, run.end - min(touch, (run.end - run.start) / 2)) for run in ordered]
    heights = [1 if cpu else max(THINNEST, run.parts) for run in ordered]
    lasts = [run.last for run in ordered] if cpu else ends  # predicted runs may overlap: they do not make a band higher
    room = max(least, _peak(ordered, lasts, heights))
    rows = max(1, _peak(ordered, lasts, [1] * len(ordered)))
    active: list[int] = []
    taken: dict[int, list[tuple[int, int]]] = {}
    until = [run.last for run in ordered]
    for number, run in enumerate(ordered):
        active = [other for other in active if until[other] > run.start]
        free = sum(high - low for low, high in _gaps(active, taken, room))
        for other in sorted(active, key=lambda other: (ends[other] > run.start, until[other])):
            if free >= heights[number] or ends[other] > run.start:
                break
            until[other] = run.start  # such a short overlap is ignored: this run had really ended, or will have ended
            free += sum(high - low for low, high in taken[other])
            active.remove(other)
        taken[number] = _fit(list(_gaps(active, taken, room)), heights[number])
        active.append(number)
    bars = []
    for number, run in enumerate(ordered):
        pieces = tuple((low / room, high / room) for low, high in taken[number])
        bars.append(Bar(run, max(run.start, start), max(run.start, start, min(until[number], end)), pieces))
    return bars, rows


def _peak(ordered: Sequence[Run], ends: Sequence[float], heights: Sequence[int]) -> int:
    """Return the highest total height of the runs at any time. ``ends``: the end of each run."""
    peak = 0
    active: list[int] = []
    for number, run in enumerate(ordered):
        active = [other for other in active if ends[other] > run.start]
        active.append(number)
        peak = max(peak, sum(heights[other] for other in active))
    return peak


def _gaps(active: Iterable[int], taken: dict[int, list[tuple[int, int]]], room: int) -> Iterator[tuple[int, int]]:
    at = 0
    for low, high in sorted(piece for number in active for piece in taken[number]):
        if low > at:
            yield at, low
        at = max(at, high)
    if at < room:
        yield at, room


def _fit(gaps: Sequence[tuple[int, int]], height: int) -> list[tuple[int, int]]:
    """Return the pieces (from, to) of a bar of this height. ``gaps``: the free ranges of the band.

    The bar is one piece in the first gap that is high enough. If no gap is high enough, the bar is divided over several
    gaps.
    """
    for low, high in gaps:
        if high - low >= height:
            return [(low, low + height)]
    found = []
    for low, high in gaps:
        found.append((low, min(high, low + height)))
        height -= found[-1][1] - low
        if height <= 0:
            break
    return found


def axis(start: float, end: float) -> list[tuple[float, str]]:
    """Return the ticks of the time axis as (seconds since 1970, label). Ticks are at round local times.

    The label is the time of day; at midnight, and if the ticks are days apart, it is the date.
    """
    step = next((step for step in STEPS_S if (end - start) / step <= TICKS), STEPS_S[-1])
    offset = time.localtime(start).tm_gmtoff
    moment = math.ceil((start + offset) / step) * step - offset
    ticks: list[tuple[float, str]] = []
    while moment <= end:
        local = time.localtime(moment)
        midnight = (local.tm_hour, local.tm_min) == (0, 0)
        form = "%d %b" if step >= 86400 or midnight else "%H:%M"
        ticks.append(
            (moment, time.strftime(form, local).lstrip("0") if form == "%d %b" else time.strftime(form, local))
        )
        moment += step
    return ticks
