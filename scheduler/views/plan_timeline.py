"""The predicted timeline of the queue, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from scheduler.client.outlook import Expectation, Moment, Outlook
from scheduler.core.gpu import Gpu, gpu_ids_text
from scheduler.core.job import Job, JobState
from scheduler.core.units import local_time
from scheduler.system.terminal_text import safe, shown
from scheduler.views import terminal
from scheduler.views.predictions import at_text, band_text, start_order

LEAST_COLUMNS, USUAL_COLUMNS, MOST_COLUMNS = 16, 60, 120  # of the timeline
RUNS, MAY_RUN, MAY_WAIT = "█", "▒", "░"
IN_ASCII = str.maketrans({RUNS: "#", MAY_RUN: "+", MAY_WAIT: "-"})
LEGEND = f"{RUNS} expected to run   {MAY_WAIT} may have started   {MAY_RUN} may still run"
NAME, SHORTEST_NAME = 24, 8  # columns
ROW, LEFT, WIDTH = 22, 90, 800  # of the picture
MOST_LANES = 16


def _in_order(outlook: Outlook) -> list[Expectation]:
    """Return the predictions in the order of their starts: first the running jobs, by their ends."""
    return sorted(outlook.jobs.values(), key=start_order)


def _horizon(rows: Iterable[Expectation], now: float) -> float:
    """Return the end of the timeline: a little after the last of the most likely ends."""
    ends = [one.end.likely for one in rows if one.end is not None]
    return max(now + 60.0, now + 1.25 * (max(ends) - now)) if ends else now + 3600.0


def plan_lines(outlook: Outlook, jobs: Mapping[int, Job], more: int) -> list[str]:
    """Return the predicted timeline of the queue as text. ``jobs``: id → job; ``more``: waiting jobs without a prediction."""
    rows, now = _in_order(outlook), outlook.at
    if not rows:
        return [_unknown(more) if more else "no job runs or waits"]
    cells: list[tuple[str, ...]] = [
        (
            str(one.job),
            terminal.shortened(safe(jobs[one.job].spec.shown_words() if one.job in jobs else ""), NAME),
            gpu_ids_text(one.gpus) or "-",
            "-" if one.start is None else at_text(one.start, now),
        )
        for one in rows
    ]
    ends = [
        ("not known", "not known") if one.end is None else (band_text(one.end, now), at_text(one.end, now))
        for one in rows
    ]
    head = ("JOB", "NAME", "GPU", "STARTS")
    widths = [max(map(terminal.cells, column)) for column in zip(head, *cells, strict=True)]
    left = sum(widths) + 2 * len(widths) + 2
    texts = [text for text, _ in ends]
    most = terminal.width() or left + USUAL_COLUMNS + max(len("ENDS"), *map(len, texts))
    if most - left - max(map(len, texts)) < LEAST_COLUMNS:  # no room for the bands
        texts = [text for _, text in ends]
    columns = min(most - left - max(len("ENDS"), *map(len, texts)), MOST_COLUMNS)
    if columns < LEAST_COLUMNS:  # then names are shortened
        widths[1] = max(SHORTEST_NAME, widths[1] - (LEAST_COLUMNS - columns))
        cells = [(number, terminal.shortened(name, widths[1]), *rest) for number, name, *rest in cells]
        columns = LEAST_COLUMNS
    until = _horizon(rows, now)
    bars = [_scale(now, until, columns), *(_bar(one, now, until, columns) for one in rows)]
    lines = []
    for row, bar, text in zip((head, *cells), bars, ("ENDS", *texts), strict=True):
        padded = [cell + " " * (width - terminal.cells(cell)) for cell, width in zip(row, widths, strict=True)]
        lines.append(terminal.cut(_drawn("  ".join((*padded, bar, text)).rstrip()), terminal.width()))
    lines += ["", *terminal.folded(_drawn(LEGEND), 0)]
    return lines if not more else [*lines, *terminal.folded(_unknown(more), 2)]


def _drawn(text: str) -> str:
    """Return a text with bars in the characters that the output has."""
    return text if shown(RUNS) == RUNS else text.translate(IN_ASCII)


def _unknown(more: int) -> str:
    them = "1 job waits" if more == 1 else f"{more} jobs wait"
    return f"{them} without a prediction: the start is not known, or far away (gpujob why JOB)"


def _scale(now: float, until: float, columns: int) -> str:
    """Return the header of the timeline: the times at its begin, its middle and its end."""
    first, middle, last = (local_time(at, now) for at in (now, (now + until) / 2, until))
    gap = columns - len(first) - len(middle) - len(last)
    if gap < 4:
        return f"{first}{' ' * max(1, columns - len(first) - len(last))}{last}"[:columns].ljust(columns)
    before = max(1, columns // 2 - len(first) - len(middle) // 2)
    return f"{first}{' ' * before}{middle}{' ' * (gap - before)}{last}"


def _bar(one: Expectation, now: float, until: float, columns: int) -> str:
    def column(at: float | None) -> int:
        """Return the column of a time; the last one for a time that is not known."""
        return columns if at is None else max(0, min(columns, round((at - now) / (until - now) * columns)))

    start = one.start or Moment(now, now, now)
    may, begin = column(start.earliest), column(start.likely)
    end = columns if one.end is None else column(one.end.likely)
    last = columns if one.end is None else column(one.end.latest)
    end = max(end, min(columns, begin + 1))
    bar = " " * may + MAY_WAIT * (begin - may) + RUNS * (end - begin) + MAY_RUN * (last - end)
    return bar[:columns].ljust(columns)


# -- the timeline as a picture -------------------------------------------------------------------------------------

_STYLE = (
    "text{font:12px sans-serif;fill:#24292f}.small{fill:#57606a;font-size:11px}.row{fill:#f3f4f6}"
    ".runs{fill:#3182bd}.later{fill:url(#hatched);stroke:#3182bd}.band{fill:#3182bd;fill-opacity:.15}.name{fill:#fff}.dark{fill:#24292f}"
)
HATCH = (
    '<pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#deebf7"/><line x1="0" y1="0" x2="0" y2="6" stroke="#3182bd" stroke-width="2"/></pattern>'
)


def plan_svg(outlook: Outlook, jobs: Mapping[int, Job], gpus: Sequence[Gpu]) -> str:
    """Return the predicted timeline as an SVG document: a row for each GPU; jobs that are still to start are hatched.

    Jobs without a GPU have rows below, at most `MOST_LANES` beside each other.
    """
    rows, now = _in_order(outlook), outlook.at
    until = _horizon(rows, now)
    tops = {gpu.index: 26 + number * (ROW + 4) for number, gpu in enumerate(gpus)}
    below, lanes = 26 + len(tops) * (ROW + 4), [0.0] * MOST_LANES  # when the last job of each lane ends
    used = 0
    taken: dict[int, list[tuple[float, float, float]]] = {gpu: [] for gpu in tops}
    body = [f'<text x="{LEFT}" y="16">expected runs; hatched: not started yet; pale: may still run</text>']
    for gpu, top in tops.items():
        body.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">GPU {gpu}</text>')
        body.append(f'<rect class="row" x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW}"/>')
    for one in rows:
        job = jobs.get(one.job)
        begin = now if one.start is None else min(until, max(now, one.start.likely))
        end = until if one.end is None else max(begin, one.end.likely)
        latest = until if one.end is None or one.end.latest is None else max(end, min(until, one.end.latest))
        columns = [LEFT + (at - now) / (until - now) * WIDTH for at in (begin, end, latest)]
        lane = next((number for number, free in enumerate(lanes) if free <= begin), None) if not one.gpus else None
        if lane is not None:
            lanes[lane], used = latest, max(used, lane + 1)
            body += _boxes(one.job, job, columns, below + lane * (ROW + 4), ROW)
        part = 1.0 if job is None or not job.need.parts else job.need.parts / 1000
        for gpu in (gpu for gpu in one.gpus if gpu in tops):
            low = lowest_place(taken[gpu], begin, part)
            taken[gpu].append((latest, low, part))
            body += _boxes(one.job, job, columns, tops[gpu] + low * ROW, part * ROW)
    for lane in range(used):
        body.append(f'<text x="{LEFT - 8}" y="{below + lane * (ROW + 4) + 15}" text-anchor="end">no GPU</text>')
    foot = below + used * (ROW + 4) + 14
    for quarter in range(5):
        x, at = LEFT + WIDTH * quarter / 4, now + (until - now) * quarter / 4
        body.append(f'<text class="small" x="{x:.0f}" y="{foot}" text-anchor="middle">{local_time(at, now)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {foot + 10}" role="img"'
    head += f' aria-label="Predicted timeline of {len(tops)} GPUs"><style>{_STYLE}</style><defs>{HATCH}</defs>'
    return head + '<rect width="100%" height="100%" fill="#fff"/>' + "\n".join([*body, "</svg>\n"])


def _boxes(number: int, job: Job | None, columns: Sequence[float], y: float, height: float) -> list[str]:
    """Return the boxes of a job on one GPU. ``columns``: its start, its end, and its latest end, in pixels."""
    begin, end, latest = columns
    wide, waits = max(1.0, end - begin), job is not None and job.state is JobState.PENDING
    title = f"<title>job {number}{escape(safe(': ' + job.spec.shown_words() if job else ''))}</title>"
    tall = f'y="{y:.1f}" height="{height:.1f}"'
    found = [
        f'<rect class="band" x="{begin + wide:.1f}" width="{max(0.0, latest - end):.1f}" {tall}/>',
        f'<rect class="{"later" if waits else "runs"}" x="{begin:.1f}" width="{wide:.1f}" {tall}>{title}</rect>',
    ]
    if wide > 22 and height > 11:
        ink = "dark" if waits else "name"
        found.append(f'<text class="small {ink}" x="{begin + 4:.1f}" y="{y + height / 2 + 4:.1f}">{number}</text>')
    return found


def lowest_place(taken: Sequence[tuple[float, float, float]], begin: float, part: float) -> float:
    """Return the vertical place (0 to 1) of a job on a GPU: the lowest with room beside the jobs that are drawn there.

    ``taken``: the end, the place and the part of the GPU (0 to 1) of each job that is drawn. If the free parts are too
    small, jobs are drawn over each other.
    """
    low = 0.0
    for _, first, height in sorted((one for one in taken if one[0] > begin + 1e-6), key=lambda one: one[1]):
        if first - low >= part - 1e-6:
            break
        low = max(low, first + height)
    return max(0.0, min(low, 1.0 - part))
