"""Predictions and explanations as text, JSON and pictures: `plan`, `why`, and the expected times in `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, cast

from scheduler.client.outlook import Expectation, Explanation, Holder, Moment, Outlook
from scheduler.core.gpu import Gpu, decimal_text, gpu_ids_text
from scheduler.core.job import Job, JobState, Reason
from scheduler.core.offered_requests import OfferedRequest
from scheduler.core.units import local_time, maybe_utc, span_text, utc
from scheduler.system.terminal_text import safe, shown
from scheduler.views import terminal
from scheduler.views.render import job_json

if TYPE_CHECKING:
    from scheduler.views.documents import (
        ExpectedDocument,
        ExplainedJob,
        ExplanationDocument,
        OfferedRequestDocument,
        PlanDocument,
    )

_WHY = "id state reason_code reason outcome exit_code signal failure notes log".split()  # keys of `why --json`

LEAST_COLUMNS, USUAL_COLUMNS = 20, 60  # of the timeline
RUNS, MAY_RUN, MAY_WAIT = "█", "▒", "░"
LEGEND = f"{RUNS} expected to run   {MAY_WAIT} may have started   {MAY_RUN} may still run"
NAME = 24  # columns
ROW, LEFT, WIDTH = 22, 90, 800  # of the picture
SOON_S = 60.0  # a time that is nearer is told in seconds from now


def at_text(moment: Moment | None, now: float) -> str:
    """Return a predicted time: ``now``, ``in 12 s``, or ``14:20``; ``-`` if it is not known."""
    if moment is None:
        return "-"
    left = moment.likely - now
    if left < SOON_S:
        return "now" if left < 1.0 else f"in {left:.0f} s"
    return local_time(moment.likely, now)


def expected_texts(outlook: Outlook, jobs: Iterable[Job]) -> dict[int, str]:
    """Return id of a running job → its expected end, of a waiting job → its expected start, as texts."""
    found = {}
    for job in jobs:
        one = outlook.jobs.get(job.id)
        if one is not None:
            found[job.id] = at_text(one.start if job.state is JobState.PENDING else one.end, outlook.at)
    return found


def band_text(moment: Moment, now: float) -> str:
    """Return a predicted time with its band: ``about 14:20 (14:02 to 15:10)``; without it if it is narrower than a minute."""
    likely = at_text(moment, now)
    about = likely if moment.likely - now < SOON_S else f"about {likely}"
    earliest = local_time(max(now, moment.earliest), now)
    latest = "open" if moment.latest is None else local_time(moment.latest, now)
    return about if earliest == latest else f"{about} ({earliest} to {latest})"


def holder_text(one: Holder, now: float) -> str:
    """Return what holds a GPU: ``GPU 0: jobs 12 and 14 hold 0.7 until about 14:20``."""
    names = [str(job) for job in one.jobs]
    who = f"job {names[0]} holds" if len(names) == 1 else f"jobs {', '.join(names[:-1])} and {names[-1]} hold"
    until = "; when it is free is not known" if one.until is None else f" until about {local_time(one.until, now)}"
    return f"GPU {one.gpu}: {who} {decimal_text(round(one.share * 1000))}{until}"


def explanation_lines(found: Explanation, now: float) -> list[str]:
    """Return the lines that `why` prints below the reason of a waiting job."""
    lines = [holder_text(one, now) for one in found.holders]
    if found.place is not None:
        lines.append(f"place in the queue: {found.place} of {found.waiting}")
    expected = found.expected
    if expected is not None and expected.start is not None:
        on = f" on GPU {gpu_ids_text(expected.gpus)}" if expected.gpus else ""
        lines.append(f"expected start: {band_text(expected.start, now)}{on}")
    elif found.place is not None:
        lines.append("expected start: not known")
    if expected is not None and expected.run_s is not None:
        lines.append(f"expected run time: {span_text(expected.run_s)} ({expected.source})")
    if found.offers:
        lines.append("it would start now with:")
        lines += [f"  {one.command}   # {one.cost}" for one in found.offers]
    return [piece for line in lines for piece in terminal.folded(f"  {safe(line)}", 4)]


# -- JSON --------------------------------------------------------------------------------------------------------


def expected_json(one: Expectation) -> ExpectedDocument:
    """Return the prediction for a job as an object for JSON."""
    start, end = one.start, one.end
    return {
        "id": one.job,
        "start": None if start is None else utc(start.likely),
        "start_earliest": None if start is None else utc(start.earliest),
        "start_latest": None if start is None else maybe_utc(start.latest),
        "end": None if end is None else utc(end.likely),
        "end_earliest": None if end is None else utc(end.earliest),
        "end_latest": None if end is None else maybe_utc(end.latest),
        "gpus": list(one.gpus),
        "run_s": one.run_s,
        "source": one.source or None,
    }


def outlook_json(outlook: Outlook) -> list[ExpectedDocument]:
    """Return the predictions for all jobs, by id."""
    return [expected_json(one) for _, one in sorted(outlook.jobs.items())]


def plan_json(outlook: Outlook) -> PlanDocument:
    """Return the object of `plan --json`."""
    return {"schema": 1, "at": utc(outlook.at), "jobs": outlook_json(outlook)}


def explanation_json(found: Explanation) -> ExplanationDocument:
    """Return the explanation of a waiting job as an object for JSON."""
    return {
        "place": found.place,
        "queue": found.waiting,
        "holders": [
            {"gpu": one.gpu, "jobs": list(one.jobs), "share": one.share, "until": maybe_utc(one.until)}
            for one in found.holders
        ],
        "expected": None if found.expected is None else expected_json(found.expected),
        "offers": [
            {"command": one.command, "cost": one.cost, "requests": [offered_json(each) for each in one.requests]}
            for one in found.offers
        ],
    }


def offered_json(one: OfferedRequest) -> OfferedRequestDocument:
    """Return a request of an offer as an object for JSON."""
    options: Any = dict(one.options)
    return {"verb": one.verb, "jobs": list(one.jobs), "gpus": list(one.gpus), "options": options}


def why_json(
    job: Job, reason: Reason | None, last_lines: Sequence[str], explanation: ExplanationDocument | None
) -> ExplainedJob:
    """Return why a job waits or how it ended, as an object for JSON. ``last_lines``: of the log of a failed job."""
    facts: Mapping[str, Any] = job_json(job, reason)
    told = {key: facts[key] for key in _WHY}
    return cast("ExplainedJob", {**told, "last_lines": [*last_lines], "explanation": explanation})


# -- the timeline as text ------------------------------------------------------------------------------------------


def _in_order(outlook: Outlook) -> list[Expectation]:
    """Return the predictions in the order of their starts: first the running jobs, by their ends."""

    def key(one: Expectation) -> tuple[float, float, int]:
        end = one.end.likely if one.end is not None else float("inf")
        return (one.start.likely if one.start is not None else 0.0, end, one.job)

    return sorted((one for one in outlook.jobs.values() if one.start or one.end), key=key)


def _horizon(rows: Iterable[Expectation], now: float) -> float:
    """Return the end of the timeline: a little after the last of the most likely ends."""
    ends = [one.end.likely for one in rows if one.end is not None]
    return max(now + 60.0, now + 1.25 * (max(ends) - now)) if ends else now + 3600.0


def plan_lines(outlook: Outlook, jobs: Mapping[int, Job], more: int) -> list[str]:
    """Return the predicted timeline of the queue as text. ``jobs``: id → job; ``more``: waiting jobs without a prediction."""
    rows, now = _in_order(outlook), outlook.at
    if not rows:
        lines = ["no job runs or waits" if not more else "nothing can be predicted: no run time is known"]
        return lines if not more else [*lines, _unknown(more)]
    names = {
        one.job: terminal.shortened(safe(jobs[one.job].spec.shown_words()), NAME) for one in rows if one.job in jobs
    }
    places = {one.job: gpu_ids_text(one.gpus) or "-" for one in rows}
    ids = max(3, *(len(str(one.job)) for one in rows))
    gpus = max(3, *(len(text) for text in places.values()))
    left = ids + NAME + gpus + 6
    columns = max(LEAST_COLUMNS, min((terminal.width() or left + USUAL_COLUMNS + 24) - left - 24, 120))
    until = _horizon(rows, now)
    lines = [f"{'JOB':<{ids}}  {'NAME':<{NAME}}  {'GPU':<{gpus}}  {_scale(now, until, columns)}  ENDS"]
    for one in rows:
        name = names.get(one.job, "")
        padded = name + " " * (NAME - terminal.cells(name))
        ends = "not known" if one.end is None else band_text(one.end, now)
        bar = _bar(one, now, until, columns)
        lines.append(f"{one.job:<{ids}}  {padded}  {places[one.job]:<{gpus}}  {bar}  {ends}".rstrip())
    lines += ["", shown(LEGEND)]
    return lines if not more else [*lines, _unknown(more)]


def _unknown(more: int) -> str:
    them = "1 more job waits" if more == 1 else f"{more} more jobs wait"
    return f"{them}; when they start is not known, or far away"


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
    return shown(bar[:columns].ljust(columns))


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
    """Return the predicted timeline as an SVG document: a row for each GPU; jobs that are still to start are hatched."""
    rows, now = _in_order(outlook), outlook.at
    until = _horizon(rows, now)
    tops = {gpu.index: 26 + number * (ROW + 4) for number, gpu in enumerate(gpus)}
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
        part = 1.0 if job is None or not job.need.parts else job.need.parts / 1000
        for gpu in (gpu for gpu in one.gpus if gpu in tops):
            low = _lane(taken[gpu], begin, part)
            taken[gpu].append((latest, low, part))
            columns = [LEFT + (at - now) / (until - now) * WIDTH for at in (begin, end, latest)]
            body += _boxes(one.job, job, columns, tops[gpu] + low * ROW, part * ROW)
    foot = 26 + len(tops) * (ROW + 4) + 14
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
    title = f"<title>job {number}{escape(': ' + job.spec.shown_words() if job else '')}</title>"
    tall = f'y="{y:.1f}" height="{height:.1f}"'
    found = [
        f'<rect class="band" x="{begin + wide:.1f}" width="{max(0.0, latest - end):.1f}" {tall}/>',
        f'<rect class="{"later" if waits else "runs"}" x="{begin:.1f}" width="{wide:.1f}" {tall}>{title}</rect>',
    ]
    if wide > 22 and height > 11:
        ink = "dark" if waits else "name"
        found.append(f'<text class="small {ink}" x="{begin + 4:.1f}" y="{y + height / 2 + 4:.1f}">{number}</text>')
    return found


def _lane(taken: Sequence[tuple[float, float, float]], begin: float, part: float) -> float:
    """Return the vertical place (0 to 1) of a job on a GPU: the lowest with room beside the jobs that are drawn there."""
    low = 0.0
    for _, first, height in sorted((one for one in taken if one[0] > begin + 1e-6), key=lambda one: one[1]):
        if first - low >= part - 1e-6:
            break
        low = max(low, first + height)
    return max(0.0, min(low, 1.0 - part))
