"""The verb `report`: waiting times, run times and GPU use of jobs, as tables, CSV or JSON."""

from __future__ import annotations

import csv as comma_separated
import os
import sys
import time
from dataclasses import replace
from datetime import datetime
from typing import Any

from scheduler.client.client import SCHEMA, SchedulerClient
from scheduler.client.locate import client_of, state_file_for
from scheduler.core.errors import UsageError
from scheduler.core.gpu import WHOLE
from scheduler.core.job import Job
from scheduler.core.job_text import how_it_ended
from scheduler.core.secrets import without_secrets
from scheduler.core.units import maybe_utc, seconds_of, span_text, utc
from scheduler.core.usage_report import GpuUse, Line, Report, Total
from scheduler.store.paths import name_of
from scheduler.views import render, terminal

HOUR_S = 3600
COLUMNS = (
    "id label command state outcome exit_code signal attempts lost gpus submitted_at started_at finished_at wait_s run_s gpu_s"
).split()
_FORMULA = ("=", "+", "-", "@")  # a spreadsheet takes a text that begins so for a formula


def report(
    *,
    json: bool = False,
    csv: bool = False,
    since: str = "",
    label: str = "",
    by: str = "",
    state_file: str | None = None,
    config: str | None = None,
) -> int:
    """Print the report and return the exit code 0, even if jobs have failed.

    ``since``: a duration or a date; ``label``: only jobs with this label; ``by``: ``user`` for the use of all users of
    this machine, by their shared bookings. Raises UsageError for a wrong ``since`` and
    for ``json`` with ``csv``. Raises NotFound if no job has the label.
    """
    if json and csv:
        raise UsageError("cannot combine --json and --csv", do="leave one of them out")
    if by:
        if by != "user" or csv or since or label:
            raise UsageError("--by user takes no other option than --json", do="write gpujob report --by user")
        return _by_user(json, client_of(state_file_for(state_file, config)))
    now = time.time()
    moment = _moment(since, now) if since else None
    client = client_of(state_file_for(state_file, config))
    if not client.alive():
        print("gpujob: no scheduler is running", file=sys.stderr)
    found = client.report(now, moment, label)
    if json:
        render.print_json(_as_json(found))
    elif csv:
        _print_csv(found)
    else:
        print("\n".join(_as_text(found)))
    return 0


def _moment(text: str, now: float) -> float:
    """Return the time that `--since` names, in seconds since 1970 (UTC).

    ``text``: a duration before ``now``, or a date. A date without a time of day means midnight at the beginning of this
    day. A date without a time zone is in local time. Raises UsageError if ``text`` is neither a duration nor a date, or
    if the time is after ``now``.
    """
    try:
        ago = seconds_of(text)
    except UsageError:
        ago = None
    if ago is not None:
        return now - ago
    try:
        spelled = f"{text[:-1]}+00:00" if text[-1] in "zZ" else text  # Python 3.10 does not read the Z
        found = datetime.fromisoformat(spelled).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{text[:40]!r} is neither a time span nor a date",
            where="--since",
            do="write 7d, 12h, 2026-11-15 or 2026-11-15T08:00",
        ) from None
    if found > now:
        raise UsageError(f"{text[:40]} is in the future", where="--since", do="give a time in the past")
    return found


def _by_user(json: bool, client: SchedulerClient) -> int:
    """Print the use of all users of this machine: by one queue for all of them, or by their shared bookings."""
    from scheduler.client.who import use_by_user

    if client.shared:
        me = name_of(os.getuid())
        found, half_life = client.shares()
        uses, problems = [replace(use, own=use.user == me) for use in found], list[str]()
    else:
        uses, half_life, problems = use_by_user(os.environ)
    if json:
        values = [
            {
                "user": use.user, "own": use.own, "gpu_s": use.used_h * HOUR_S, "share": use.share, "fair": use.fair,
                "booked": use.booked, "waiting": use.waiting,
            }
            for use in uses
        ]  # fmt: skip
        render.print_json({"schema": SCHEMA, "half_life_s": half_life, "users": values, "problems": problems})
        return 0
    for text in problems:
        print(f"gpujob: {render.safe(text)}", file=sys.stderr)
    rows = [
        (
            render.safe(use.user) + (" (you)" if use.own else ""), f"{use.used_h:.2f}", f"{use.share:.0%}",
            f"{use.fair:.0%}", f"{use.booked:g}", use.waiting,
        )
        for use in uses
    ]  # fmt: skip
    print("\n".join(render.table(("USER", "GPU-HOURS", "SHARE", "FAIR SHARE", "BOOKED NOW", "WAITING"), rows)))
    print(f"\nGPU-hours count half after {span_text(half_life)}")
    return 0


# -- for people -------------------------------------------------------------------------------------------


def _as_text(found: Report) -> list[str]:
    most = 48 if terminal.width() is not None else 1 << 30
    rows = [
        (
            line.job.id, line.job.state.value, how_it_ended(line.job), line.job.spec.shown_words(most), len(line.attempts),
            _ids(line), _span(line.wait_ms), _span(line.run_ms if line.attempts else None), _span(line.gpu_ms / WHOLE if line.attempts else None),
            _lost(line.lost),
        )
        for line in found.lines
    ]  # fmt: skip
    lines = render.table(("ID", "STATE", "HOW", "NAME", "RUNS", "GPU", "WAIT", "RUN", "GPU-TIME", ""), rows)
    if found.labels.keys() - {""}:
        sums = [
            (render.safe(without_secrets(label)) or "-", total.jobs, render.counts_text(total.states), *_sums(total))
            for label, total in found.labels.items()
        ]
        lines += ["", *render.table(("LABEL", "JOBS", "STATES", "WAIT", "RUN", "GPU-HOURS", ""), sums)]
    if found.gpus:
        uses = [
            (use.gpu, use.jobs, _span(use.run_ms), _hours(use.gpu_ms), "-" if use.busy is None else f"{use.busy:.1%}", _lost(use.lost))
            for use in found.gpus
        ]  # fmt: skip
        lines += ["", *render.table(("GPU", "JOBS", "RUN", "GPU-HOURS", "BUSY", ""), uses)]
    total, mean = found.total, found.total.mean_wait_ms
    said = f"total      {total.jobs} job{'s' * (total.jobs != 1)}"
    if total.jobs:
        said += f": {render.counts_text(total.states)}; run {_span(total.run_ms)}, {_hours(total.gpu_ms)} GPU-hours"
        said += "" if mean is None else f"; waited {_span(mean)} on average"
        said += f"; run time is an {_lost(total.lost)}" if total.lost else ""
    lines += ["", *terminal.folded(said, render.LABEL)]
    lines += terminal.folded(f"time       {utc(found.start)} to {utc(found.end)}", render.LABEL)
    if found.known_since is not None:
        text = (
            f"complete   since {maybe_utc(found.known_since)}: jobs that ended earlier may have been forgotten; "
            "forgotten jobs are not counted"
        )
        lines += terminal.folded(text, render.LABEL)
    return lines


def _sums(total: Total) -> tuple[str, str, str, str]:
    return _span(total.mean_wait_ms), _span(total.run_ms), _hours(total.gpu_ms), _lost(total.lost)


def _span(ms: float | None) -> str:
    return "-" if ms is None else span_text(ms / 1000)


def _hours(gpu_ms: int) -> str:
    hours = gpu_ms / WHOLE / 1000 / HOUR_S
    return f"{hours:.4f}" if hours < 1 else f"{hours:.2f}"


def _lost(number: int) -> str:
    return f"upper limit ({number} lost attempt{'s' * (number != 1)})" if number else ""


def _ids(line: Line) -> str:
    return ",".join(map(str, line.gpus)) or "-"


# -- for programs -----------------------------------------------------------------------------------------


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else round(ms / 1000, 3)


def _gpu_seconds(gpu_ms: int) -> float:
    return round(gpu_ms / WHOLE / 1000, 6)


def _last_end(job: Job) -> str | None:
    return maybe_utc(job.finished_at) if job.state.ended else None


def _as_json(found: Report) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "from": utc(found.start),
        "to": utc(found.end),
        "known_since": maybe_utc(found.known_since),
        "jobs": [_line_json(line) for line in found.lines],
        "labels": [{"label": without_secrets(label) or None, **_total_json(total)} for label, total in found.labels.items()],
        "gpus": [_gpu_json(use) for use in found.gpus],
        "total": _total_json(found.total),
    }  # fmt: skip


def _line_json(line: Line) -> dict[str, Any]:
    job = line.job
    return {
        "id": job.id,
        "label": without_secrets(job.spec.label) or None,
        "command": job.spec.written_text,
        "state": job.state.value,
        "outcome": job.outcome.value if job.outcome else None,
        "exit_code": job.exit_code if job.state.ended else None,
        "signal": job.signal if job.state.ended else None,
        "attempts": len(line.attempts),
        "lost": line.lost,
        "gpus": list(line.gpus),
        "submitted_at": utc(job.submitted_at),
        "started_at": maybe_utc(line.started_at),
        "finished_at": _last_end(job),
        "wait": _seconds(line.wait_ms),
        "run": _seconds(line.run_ms),
        "gpu_seconds": _gpu_seconds(line.gpu_ms),
    }


def _total_json(total: Total) -> dict[str, Any]:
    return {
        "jobs": total.jobs,
        "states": total.states,
        "outcomes": total.outcomes,
        "attempts": total.attempts,
        "lost": total.lost,
        "wait_mean": _seconds(total.mean_wait_ms),
        "run": _seconds(total.run_ms),
        "gpu_seconds": _gpu_seconds(total.gpu_ms),
        "gpu_hours": round(_gpu_seconds(total.gpu_ms) / HOUR_S, 6),
    }


def _gpu_json(use: GpuUse) -> dict[str, Any]:
    return {
        "index": use.gpu,
        "jobs": use.jobs,
        "lost": use.lost,
        "run": _seconds(use.run_ms),
        "gpu_seconds": _gpu_seconds(use.gpu_ms),
        "gpu_hours": round(_gpu_seconds(use.gpu_ms) / HOUR_S, 6),
        "busy": None if use.busy is None else round(use.busy, 6),
    }


def _print_csv(found: Report) -> None:
    out = comma_separated.writer(sys.stdout, lineterminator="\r\n")  # RFC 4180
    out.writerow(COLUMNS)
    for line in found.lines:
        value = _line_json(line)
        value |= {"label": _text(value["label"] or ""), "command": _text(value["command"])}
        value |= {"gpus": " ".join(map(str, line.gpus))}  # a spreadsheet would read 1-2 as a date, 1,2 as a number
        value |= {"wait_s": value["wait"], "run_s": value["run"], "gpu_s": value["gpu_seconds"]}
        out.writerow(["" if value[name] is None else value[name] for name in COLUMNS])


def _text(text: str) -> str:
    """Return user text for CSV: control characters escaped, and ``'`` before text that looks like a formula."""
    shown = render.safe(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
