"""Predictions and explanations as sentences and as JSON: `why`, `plan --json`, the expected times in `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from scheduler.client.outlook import Expectation, Explanation, Holder, Moment, Outlook
from scheduler.core.gpu import decimal_text, gpu_ids_text
from scheduler.core.job import Job, JobState, Reason
from scheduler.core.offered_requests import OfferedRequest
from scheduler.core.units import local_time, maybe_utc, span_text, utc
from scheduler.system.terminal_text import safe
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

NO_OFFER = "no command is known that would start it now: what becomes free may go to other waiting jobs"
SOON_S = 60.0  # a time that is nearer is told in seconds from now


def at_text(moment: Moment | None, now: float) -> str:
    """Return a predicted time: ``now``, ``in 12 s``, or ``14:20``; ``-`` if it is not known."""
    if moment is None:
        return "-"
    left = moment.likely - now
    if left < SOON_S:
        return "now" if left < 1.0 else f"in {left:.0f} s"
    return local_time(moment.likely, now)


def start_order(one: Expectation) -> tuple[float, float, int]:
    """Return the sort key of a prediction: first the running jobs, by their ends, then the others by their starts."""
    end = one.end.likely if one.end is not None else float("inf")
    return (one.start.likely if one.start is not None else 0.0, end, one.job)


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
    """Return what holds a GPU, or slots: ``GPU 0: jobs 12 and 14 hold 0.7 until about 14:20``."""
    if not one.jobs:
        return "; ".join(one.others)
    names = [str(job) for job in one.jobs]
    who = f"job {names[0]} holds" if len(names) == 1 else f"jobs {', '.join(names[:-1])} and {names[-1]} hold"
    until = "; its end is not known" if one.until is None else f" until about {local_time(one.until, now)}"
    if one.gpu is None:
        return f"{who} {one.share:g} slot{'s' * (one.share != 1)}{until}"
    if one.until is None:
        until = "; when it is free is not known"
    return "; ".join((f"GPU {one.gpu}: {who} {decimal_text(round(one.share * 1000))}{until}", *one.others))


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
        lines.append(f"expected start: not known: {found.unknown}")
    if expected is not None and expected.end is not None:
        lines.append(f"expected end: {band_text(expected.end, now)}")
    if expected is not None and expected.run_s is not None:
        run = span_text(expected.run_s) if expected.run_s >= 1.0 else "under 1 s"
        lines.append(f"expected run time: {run} ({expected.source})")
    if found.offers:
        lines.append("it would start now with:")
        lines += [f"  {one.command}   # {one.cost}" for one in found.offers]
    elif found.place is not None and not _starts_soon(expected, now):
        lines.append(NO_OFFER)
    return [piece for line in lines for piece in terminal.folded(f"  {safe(line)}", 4)]


def _starts_soon(expected: Expectation | None, now: float) -> bool:
    return expected is not None and expected.start is not None and expected.start.likely - now < SOON_S


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
            {
                "gpu": one.gpu,
                "jobs": list(one.jobs),
                "share": one.share,
                "until": maybe_utc(one.until),
                "others": list(one.others),
            }
            for one in found.holders
        ],
        "expected": None if found.expected is None else expected_json(found.expected),
        "unknown": found.unknown or None,
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
