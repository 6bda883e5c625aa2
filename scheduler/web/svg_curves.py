"""Readings over time as SVG paths and as hourly means. The functions are pure. Gaps in the readings stay gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Points = Sequence[tuple[float, "float | None"]]
WIDTH, HEIGHT = 1000, 100


def paths(points: Points, start: float, end: float, top: float, gap_s: float) -> tuple[str, str]:
    """Return two SVG paths: a curve, and the area below the curve. Both paths are empty if there are no readings.

    The paths are values of the attribute ``d``, for a box of 1000 by 100. ``points``: (time, value or None), in order
    of time. ``start`` and ``end``: times at the left and right edge. ``top``: value at the upper edge. Readings that
    are more than ``gap_s`` seconds apart are not joined.
    """
    line, area = [], []
    for piece in _pieces(points, start, end, gap_s):
        spots = [(_x(at, start, end), _y(value, top)) for at, value in piece]
        if len(spots) == 1:
            x, y = spots[0]
            spots = [(x - 0.5, y), (x + 0.5, y)]
        text = " L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        line.append(f"M{text}")
        area.append(f"M{spots[0][0]:.1f} {HEIGHT} L{text} L{spots[-1][0]:.1f} {HEIGHT} Z")
    return " ".join(line), " ".join(area)


def gap_of(points: Points) -> float:
    """Return the argument ``gap_s`` of `paths` for these points, in seconds.

    It is three times the shortest time between two neighbouring ``points``.
    """
    return 3 * min((later[0] - earlier[0] for earlier, later in pairwise(points)), default=60.0)


def _pieces(points: Points, start: float, end: float, gap_s: float) -> list[list[tuple[float, float]]]:
    found: list[list[tuple[float, float]]] = []
    last = None
    for at, value in points:
        if not start <= at <= end:
            continue
        if value is None:
            last = None
            continue
        if last is None or at - last > gap_s:
            found.append([])
        found[-1].append((at, value))
        last = at
    return found


def _x(at: float, start: float, end: float) -> float:
    return WIDTH * (at - start) / (end - start) if end > start else 0.0


def _y(value: float, top: float) -> float:
    return HEIGHT * (1 - min(1.0, max(0.0, value / top))) if top > 0 else float(HEIGHT)


def by_hour(points: Points, first: float, hours: int) -> list[float | None]:
    """Return the mean of each hour from ``first`` on (seconds since 1970); None for an hour without readings."""
    sums = [0.0] * hours
    numbers = [0] * hours
    for at, value in points:
        hour = int((at - first) // 3600)
        if value is not None and 0 <= hour < hours:
            sums[hour] += value
            numbers[hour] += 1
    return [total / number if number else None for total, number in zip(sums, numbers, strict=True)]


def booked_by_hour(runs: Iterable[tuple[float, float, float]], first: float, hours: int, now: float) -> list[float]:
    """Return for each hour the mean share of a GPU (0 to 1) that was booked.

    ``runs``: (start, end, share of the GPU) of each attempt on the GPU. ``first``: start of the first hour. For the
    current hour, only the time up to ``now`` counts.
    """
    booked = [0.0] * hours
    for start, end, share in runs:
        for hour in range(max(0, int((start - first) // 3600)), min(hours, int((end - first) // 3600) + 1)):
            low = first + hour * 3600
            lasted = max(1.0, min(3600.0, now - low))
            booked[hour] += share * max(0.0, min(end, low + 3600) - max(start, low)) / lasted
    return [min(1.0, value) for value in booked]
