"""Draws what schedulers do with the same jobs during one day, as an SVG file: who runs on each GPU, and how many jobs wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from benchmarks.replay import Outcome
from benchmarks.trace import TraceJob
from scheduler.core.gpu import WHOLE
from scheduler.views.plan_timeline import lowest_place

DAY_S = 86_400.0
LEFT, WIDTH, ROW, GAP, CURVE = 60, 820, 18, 3, 46
COLOURS = ((1, "#9ecae1", "a part of a GPU"), (2, "#3182bd", "one GPU"), (9, "#e6550d", "several GPUs"))
STYLE = (
    "text{font:11px sans-serif;fill:#24292f}.title{font-weight:bold;font-size:13px}.small{fill:#57606a}"
    ".row{fill:#f0f2f4}.job{stroke:#fff;stroke-width:.4}.waits{fill:#cf222e;fill-opacity:.25;stroke:#cf222e}"
)


def _colour(job: TraceJob) -> str:
    width = job.need.total / WHOLE
    return next(colour for most, colour, _ in COLOURS if (width < most if most < 9 else True))


def _placed(jobs: Sequence[TraceJob], outcome: Outcome, gpu: int) -> Iterator[tuple[TraceJob, float]]:
    """Yield the jobs of a GPU with their vertical places (0 to 1)."""
    running: list[tuple[float, float, float]] = []
    mine = [job for job in jobs if gpu in outcome.gpus[job.number]]
    for job in sorted(mine, key=lambda job: outcome.started[job.number]):
        at, part = outcome.started[job.number], job.need.parts / WHOLE
        running = [one for one in running if one[0] > at]
        low = lowest_place(running, at, part)
        running.append((at + job.duration, low, part))
        yield job, low


def _panel(jobs: Sequence[TraceJob], outcome: Outcome, gpus: int, begin: float, title: str, top: int) -> Iterator[str]:
    scale = WIDTH / DAY_S
    day = [job for job in jobs if begin <= job.submitted < begin + DAY_S]
    mean_wait = sum(outcome.started[job.number] - job.submitted for job in day) / len(day)
    yield f'<text class="title" x="{LEFT}" y="{top}">{escape(title)}</text>'
    about = f"the {len(day)} jobs that arrive on this day wait {mean_wait / 3600:.1f} h on average"
    yield f'<text class="small" x="{LEFT + WIDTH}" y="{top}" text-anchor="end">{about}</text>'
    for gpu in range(gpus):
        y = top + 8 + gpu * (ROW + GAP)
        yield f'<text class="small" x="{LEFT - 6}" y="{y + 13}" text-anchor="end">GPU {gpu}</text>'
        yield f'<rect class="row" x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}"/>'
        for job, low in _placed(jobs, outcome, gpu):
            first = max(0.0, outcome.started[job.number] - begin)
            last = min(DAY_S, outcome.started[job.number] + job.duration - begin)
            if last > first:
                height = job.need.parts / WHOLE * ROW
                place = f'x="{LEFT + first * scale:.1f}" y="{y + low * ROW:.1f}"'
                size = f'width="{max(0.5, (last - first) * scale):.1f}" height="{height:.1f}"'
                yield f'<rect class="job" fill="{_colour(job)}" {place} {size}/>'
    yield from _waiting(jobs, outcome, begin, top + 8 + gpus * (ROW + GAP))


def _waiting(jobs: Sequence[TraceJob], outcome: Outcome, begin: float, top: int) -> Iterator[str]:
    steps = 200
    counts = []
    for step in range(steps + 1):
        at = begin + DAY_S * step / steps
        counts.append(sum(job.submitted <= at < outcome.started[job.number] for job in jobs))
    most = max(10, *counts)
    points = [f"{LEFT + WIDTH * i / steps:.1f},{top + CURVE - 40 * n / most:.1f}" for i, n in enumerate(counts)]
    path = f"M{LEFT},{top + CURVE} L{' L'.join(points)} L{LEFT + WIDTH},{top + CURVE} Z"
    yield f'<path class="waits" d="{path}"/>'
    yield f'<text class="small" x="{LEFT - 6}" y="{top + 18}" text-anchor="end">{most}</text>'
    yield f'<text class="small" x="{LEFT - 6}" y="{top + CURVE}" text-anchor="end">waiting 0</text>'


def drawing(jobs: Sequence[TraceJob], panels: Mapping[str, Outcome], gpus: int, begin: float) -> str:
    """Return an SVG document. ``panels``: title → what a scheduler did; ``begin``: start of the day, in seconds."""
    height = gpus * (ROW + GAP) + CURVE + 40
    total = height * len(panels) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {total}" role="img" '
        f'aria-label="One day on {gpus} GPUs: {escape(" and ".join(panels))}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, (title, outcome) in enumerate(panels.items()):
        out += _panel(jobs, outcome, gpus, begin, title, 18 + number * height)
    foot = total - 24
    for hour in range(0, 25, 3):
        x = LEFT + WIDTH * hour / 24
        out.append(f'<text class="small" x="{x:.0f}" y="{foot}" text-anchor="middle">{hour} h</text>')
    for number, (_, colour, name) in enumerate(COLOURS):
        x = LEFT + number * 130
        out.append(f'<rect fill="{colour}" x="{x}" y="{foot + 7}" width="12" height="10"/>')
        out.append(f'<text class="small" x="{x + 17}" y="{foot + 16}">{name}</text>')
    return "\n".join(out) + "\n</svg>\n"
