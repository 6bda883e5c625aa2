"""The HTML pages. They are complete without scripts; `static/live.js` keeps them up to date."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import HTMLResponse, Response

from scheduler.client.client import STATES
from scheduler.client.needs import table_path
from scheduler.client.outlook import Outlook
from scheduler.client.overview import Overview
from scheduler.core.errors import NoGpuData, NotFound, UsageError, did_you_mean
from scheduler.core.gpu import WHOLE
from scheduler.core.job import ENDED, Job, JobState
from scheduler.core.job_options import SUBMIT_OPTIONS
from scheduler.core.needs_to_apply import changes_of
from scheduler.core.runner_kinds import kind_of
from scheduler.core.usage_report import Report, attempts_of
from scheduler.store.paths import name_of
from scheduler.views.log_glance import last_lines
from scheduler.views.needs import suggested_text
from scheduler.views.terminal_replay import without_colours
from scheduler.web import svg_curves, timeline, view_models
from scheduler.web.expected_runs import WAITS, edge_of, expected_rows, expected_words, future_of, with_expected
from scheduler.web.needs import may_be_applied, shown_needs
from scheduler.web.rendering import STATIC, number, render, static_file
from scheduler.web.routes import Ask, Call
from scheduler.web.source import MOST_WAITING

MOST_ENDED = 20
MOST_LISTED = 200
MOST_LINES = 200
MOST_REPORTED = 500
HOUR_S, DAY_S = 3600.0, 86400.0
ZOOMS = (("1 h", 1.0), ("6 h", 6.0), ("24 h", 24.0), ("7 d", 168.0), ("30 d", 720.0))
LEAST_H, MOST_H = 1 / 60, 24 * 366.0
HEAT_RANGES = (("24 h", 24), ("7 d", 168), ("30 d", 720))
MEASURES = {"load": "load", "booked": "allocated share", "memory": "memory in use"}
SPANS = (("today", "24 h", DAY_S), ("week", "7 d", 7 * DAY_S), ("month", "30 d", 30 * DAY_S), ("all", "all", None))
CURVE_S = 30.0  # time between two points of the curves of the last hour
BAND_PX, HEAD_PX, STRIP_PX, GAP_PX, AXIS_PX, LANE_PX, MOST_LANES_PX, PAUSE_PX = 46, 17, 7, 8, 22, 15, 180, 7
# Fields of the submit form; the working folder, a field of full width, comes last.
FORM_OPTIONS = sorted((option for option in SUBMIT_OPTIONS if option.form), key=lambda option: option.name == "cwd")
THIN = 1.2  # per cent of the width: narrower bars are drawn at least 3 pixels wide


def _page(ask: Ask, template: str, status: int = 200, **names: Any) -> Response:
    """Return a whole page.

    ``names``: variables of the template. One of them is ``here``, the name of the page's entry in the navigation.
    """
    places = ask.source.client.places
    values = {"now": time.time(), "nonce": ask.nonce, "folder": os.path.dirname(places.state_file) or "/", **names}
    values.setdefault("machine", os.uname().nodename)
    return HTMLResponse(render(template, **values).encode("utf-8", "replace"), status)


# -- Now --------------------------------------------------------------------------------------------------


def _now(ask: Ask) -> Response:
    now = time.time()
    view = ask.source.overview()
    waiting = sorted((job for job in view.jobs if job.state is JobState.PENDING), key=lambda job: job.turn)
    ended = [job for job in view.jobs if job.state.ended]
    need = view_models.in_need(view)
    outlook = ask.source.outlook()
    return _page(
        ask,
        "now.html",
        here="now",
        view=view,
        outlook=outlook,
        cards=[] if any(gpu.gpu.node for gpu in view.gpus) else view_models.gpu_cards(view),
        nodes=view_models.node_cards(view),
        how=kind_of(view.runner).in_words,
        hours=_last_hour(ask, view, now),
        running=[view_models.row(job, None, need.get(job.id, ())) for job in view.jobs if job.state.holds_gpus],
        waiting=[
            view_models.row(job, view.reasons.get(job.id), need.get(job.id, ())) for job in waiting[:MOST_WAITING]
        ],
        more_waiting=max(0, view.counts.get("pending", 0) - min(len(waiting), MOST_WAITING)),
        ended=[view_models.row(job) for job in ended[:MOST_ENDED]],
        older=max(0, sum(view.counts.get(state.value, 0) for state in ENDED) - min(len(ended), MOST_ENDED)),
        jobs_file=ask.source.client.remembered("jobs_file"),
        now=now,
    )


def _last_hour(ask: Ask, view: Overview, now: float) -> dict[int, dict[str, str]]:
    """Return GPU → SVG paths of its curves of the last hour. GPUs without readings are left out."""
    sizes = {gpu.gpu.index: gpu.gpu.memory_mib for gpu in view.gpus}
    found: dict[int, dict[str, str]] = {}
    for gpu, samples in ask.source.client.gpu_history(now - HOUR_S, now, CURVE_S).items():
        load = [(one.at, one.load) for one in samples]
        memory = [(one.at, one.used_mib) for one in samples]
        top = sizes.get(gpu) or max([1.0, *(value or 0.0 for _, value in memory)])
        line, area = svg_curves.paths(load, now - HOUR_S, now, 1.0, 4 * CURVE_S)
        used, _ = svg_curves.paths(memory, now - HOUR_S, now, top, 4 * CURVE_S)
        if line or used:
            found[gpu] = {"load": line, "load_area": area, "memory": used}
    return found


# -- jobs by state ----------------------------------------------------------------------------------------


def _jobs(ask: Ask) -> Response:
    """Answer with the newest jobs, filtered by state and label. Raises UsageError for an unknown state."""
    query = ask.request.query_params
    text, label = query.get("state", ""), query.get("label", "")
    states = text.split(",") if text else []
    for word in states:
        if word not in STATES:
            raise UsageError(
                f"unknown state {word[:40]!r}{did_you_mean(word, STATES)}", do=f"known: {', '.join(STATES)}"
            )
    view = ask.source.overview()
    found, number = ask.source.client.newest_in(states, label, MOST_LISTED)
    need = view_models.in_need(view)
    return _page(
        ask,
        "jobs.html",
        here="",
        view=view,
        rows=[view_models.row(job, view.reasons.get(job.id), need.get(job.id, ())) for job in found],
        number=number,
        text=text,
        label=label,
        choices=dict.fromkeys(["", text, *STATES, ",".join(state.value for state in JobState if state.ended)]),
        labels=_labels(view),
        now=time.time(),
    )


# -- a job ------------------------------------------------------------------------------------------------


def _job(ask: Ask) -> Response:
    now = time.time()
    job, reason, events = ask.source.client.job(ask.numbers["id"])
    view = ask.source.overview()
    parents = ask.source.client.known(dict.fromkeys((*job.spec.after, *job.spec.after_ok)))
    lines, trouble = ([], f"see gpujob logs {job.id}") if ask.source.client.shared else _last_lines(job.log)
    runs = attempts_of(job, events, now)
    declared = frozenset(gpu.gpu.index for gpu in view.gpus if gpu.gpu.name == "declared")
    waits = job.state is JobState.PENDING and view.alive
    explanation = ask.source.explanation(job.id) if waits else None
    return _page(
        ask,
        "job.html",
        here="",
        job=job,
        row=view_models.row(job, reason, view_models.in_need(view).get(job.id, ())),
        reason=reason,
        card=view_models.failure_card(job),
        facts=view_models.facts(job),
        parents=[(number, parents.get(number), number in job.spec.after_ok) for number in
                 dict.fromkeys((*job.spec.after, *job.spec.after_ok))],
        children=view_models.related(job, view),
        attempts=runs,
        waited_s=max(0.0, runs[0].started_ms / 1000 - job.submitted_at) if runs else None,
        never_ran=view_models.never_ran(job),
        no_readings=view_models.why_no_readings(job, len(runs), declared),
        commands=view_models.without_scripts(job),
        story=view_models.story(job, events),
        lines=lines,
        log_trouble=trouble,
        charts=_job_charts(ask, job.id),
        alive=view.alive,
        waits=waits,
        explanation=explanation,
        offers=view_models.offer_rows(job, explanation.offers, view) if explanation else [],
        expected=ask.source.outlook().jobs.get(job.id) if job.state.holds_gpus else None,
        now=now,
    )  # fmt: skip


def _last_lines(path: str) -> tuple[list[str], str]:
    """Return the last lines of a log, for browsers without scripts, and an error message (empty if there is none)."""
    if not path:
        return [], ""
    try:
        return [without_colours(line) for line in last_lines(path, MOST_LINES)], ""
    except OSError as error:
        return [], f"cannot read the log {path}: {error.strerror}"


def _job_charts(ask: Ask, job_id: int) -> list[dict[str, Any]]:
    """Return a chart for each attempt that has readings."""
    charts = []
    for attempt, samples in sorted(ask.source.client.job_history(job_id).items()):
        if not samples:
            continue
        memory = [(one.at, one.memory_mib) for one in samples]
        load = [(one.at, one.load) for one in samples]
        start, end = samples[0].at, max(samples[-1].at, samples[0].at + 60)
        top = max([1.0, *(value or 0.0 for _, value in memory)]) * 1.1
        gap = svg_curves.gap_of(memory)
        line, memory_area = svg_curves.paths(memory, start, end, top, gap)
        load_line, load_area = svg_curves.paths(load, start, end, 1.0, gap)
        charts.append(
            {"attempt": attempt, "start": start, "end": end, "top": top, "memory": line, "memory_area": memory_area,
             "load": load_line, "load_area": load_area, "peak": max((v for _, v in memory if v is not None), default=None),
             "mean_load": _mean([v for _, v in load if v is not None])}
        )  # fmt: skip
    return charts


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# -- Timeline ---------------------------------------------------------------------------------------------


def _timeline(ask: Ask) -> Response:
    now = time.time()
    hours = _asked(ask, "hours", _first_zoom(ask, now), LEAST_H, MOST_H)
    end = _asked(ask, "end", now, DAY_S, 4e9)
    live = end >= now - 1
    end = now if live else end
    start = end - hours * HOUR_S
    view = ask.source.overview()
    jobs, runs = _runs(ask, view, start, now)
    outlook = ask.source.outlook() if live else Outlook(now)
    edge = edge_of(start, end, outlook)
    if live:
        jobs |= ask.source.client.known(number for number in outlook.jobs if number not in jobs)
        runs = with_expected(runs, outlook, jobs, {gpu.gpu.index: gpu.gpu.memory_mib for gpu in view.gpus})
    nodes = {gpu.gpu.server: gpu.gpu.node for gpu in view.gpus if gpu.gpu.node}
    pauses = _pauses(ask, start, end)
    if nodes:  # a band for each node: a cluster has too many GPUs for a band each
        gpus, names = sorted(nodes), nodes
        runs = timeline.by_server(runs, [gpu.gpu for gpu in view.gpus])
        pauses = [(gpu, low, up) for gpu, low, up in pauses if gpu is None]
    else:
        gpus, names = [gpu.gpu.index for gpu in view.gpus], {gpu.gpu.index: gpu.gpu.name for gpu in view.gpus}
    bands = timeline.layout([run for run in runs if run.start < end or run.expected], start, edge, gpus)
    drawn, height = _drawn(bands, start, edge, names, pauses)
    drawn_runs = {(bar.run.job, bar.run.attempt): bar.run for band in bands for bar in band.bars}.values()
    seen = sorted((run for run in drawn_runs if run.state != WAITS), key=lambda run: -run.start)
    drawn_jobs = {run.job for run in drawn_runs}
    expected = expected_rows(outlook, jobs)
    return _page(
        ask,
        "timeline.html",
        here="timeline",
        bands=drawn,
        by_node=bool(nodes),
        height=height + AXIS_PX,
        ticks=[(100 * (at - start) / (edge - start), text) for at, text in timeline.axis(start, edge)],
        now_at=100 * (now - start) / (edge - start) if start <= now <= edge else None,
        end_at=100 * (end - start) / (edge - start),
        runs=seen[:MOST_REPORTED],
        name_of={number: jobs[number].spec.shown_words(view_models.LONGEST_NAME) for number in drawn_jobs},
        more=max(0, len(seen) - MOST_REPORTED),
        expected_rows=expected[:MOST_REPORTED],
        outlook=outlook,
        expected_words=lambda run: expected_words(run, outlook.at),
        merged=sum(part.number for band in bands for part in band.merged),
        start=start,
        end=end,
        edge=edge,
        live=live,
        hours=hours,
        zooms=ZOOMS,
        link=lambda h, e=None: _timeline_link(h, e),
        now=now,
    )


def _first_zoom(ask: Ask, now: float) -> float:
    """Return the number of hours that the Timeline shows by default.

    This is 1 if the oldest job was submitted in the last hour. It is 6 in all other cases, also without any job.
    """
    first = ask.source.client.first_submitted()
    return 1.0 if first is not None and now - first < HOUR_S else 6.0


def _timeline_link(hours: float, end: float | None) -> str:
    hours = min(MOST_H, max(LEAST_H, hours))
    return f"/timeline?hours={number(hours, 4)}" + ("" if end is None else f"&end={end:.0f}")


def _asked(ask: Ask, name: str, default: float, least: float, most: float) -> float:
    """Return a parameter of the query as a number; ``default`` if the parameter is missing or empty.

    Raises UsageError if the parameter is no number, or if the number is not between ``least`` and ``most``.
    """
    text = ask.request.query_params.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise UsageError(f"{name} must be a number between {number(least)} and {number(most)}, not {text[:40]!r}")
    return value


def _runs(ask: Ask, view: Overview, start: float, now: float) -> tuple[dict[int, Job], list[timeline.Run]]:
    """Return (job id → job, attempts). Attempts that had ended before ``start`` are left out, and so are their jobs."""
    memory = {gpu.gpu.index: gpu.gpu.memory_mib for gpu in view.gpus}
    report = ask.source.client.report(now, start)
    runs = [
        view_models.run_of(line.job, attempt, len(line.attempts), now, memory)
        for line in report.lines
        for attempt in line.attempts
    ]
    return {line.job.id: line.job for line in report.lines}, runs


def _pauses(ask: Ask, start: float, end: float) -> list[tuple[int | None, float, float]]:
    """Return the pauses between ``start`` and ``end`` as (GPU or None for the whole queue, from, to)."""
    spans = ask.source.client.pause_spans(start, end)
    return [(one.gpu, max(start, one.start), min(end, end if one.end is None else one.end)) for one in spans]


def _drawn(
    bands: Iterable[timeline.Band],
    start: float,
    edge: float,
    names: Mapping[int, str],
    pauses: Iterable[tuple[int | None, float, float]],
) -> tuple[list[dict[str, Any]], int]:
    """Return the bands with positions, and their total height in pixels.

    The x positions are in per cent of the width, and the y positions in pixels.
    """

    def x(at: float) -> float:
        return 100 * (at - start) / (edge - start)

    out, top = [], 0
    spans = list(pauses)
    for band in bands:
        cpu = band.gpu is None
        paused = (
            []
            if cpu
            else [(x(low), max(0.08, x(up) - x(low))) for gpu, low, up in spans if gpu is None or gpu == band.gpu]
        )
        strip = PAUSE_PX if paused else 0  # a strip below the band, because bars may cover a hatching in the band
        high = min(MOST_LANES_PX, max(LANE_PX, LANE_PX * band.rows)) if cpu else BAND_PX
        inner = top + HEAD_PX
        bars = []
        for bar in band.bars:
            ended = bar.end if bar.run.expected is None else min(bar.end, bar.run.end)
            future = future_of(bar, edge)
            bars.append(
                {"run": bar.run, "x": x(bar.start), "w": max(0.08, x(ended) - x(bar.start)), "thin": x(ended) - x(bar.start) < THIN,
                 "future": None if future is None else (x(future.start), max(0.08, x(future.end) - x(future.start))),
                 "pale": [(x(low), x(up) - x(low)) for low, up in (future.pale if future else ()) if up > low],
                 "pieces": [(inner + low * high, max(1.0, (up - low) * high - 1)) for low, up in bar.pieces]}
            )  # fmt: skip
        out.append(
            {"gpu": band.gpu, "name": names.get(band.gpu, "") if band.gpu is not None else "", "top": top, "inner": inner,
             "height": high, "bars": bars, "strip": inner + high + 1 + strip,
             "merged": [{"x": x(m.start), "w": x(m.end) - x(m.start), "number": m.number} for m in band.merged],
             "pauses": paused, "pause_strip": inner + high + 1, "pause_px": strip - 1}
        )  # fmt: skip
        top = inner + high + strip + (STRIP_PX if band.merged else 0) + GAP_PX
    return out, top


# -- heat map ---------------------------------------------------------------------------------------------


def _heatmap(ask: Ask) -> Response:
    now = time.time()
    measure = ask.request.query_params.get("measure", "load")
    if measure not in MEASURES:
        raise UsageError(f"unknown measure {measure[:40]!r}", do=f"known: {', '.join(MEASURES)}")
    hours = int(_asked(ask, "hours", 24, 1, 720))
    first = (now // HOUR_S - hours + 1) * HOUR_S
    view = ask.source.overview()
    rows = _heat(ask, view, measure, first, hours, now)
    names = {gpu.gpu.index: gpu.gpu.name for gpu in view.gpus}
    starts = [first + hour * HOUR_S for hour in range(hours)]
    ticks = [(100 * (at - first) / (hours * HOUR_S), text) for at, text in timeline.axis(first, first + hours * HOUR_S)]
    return _page(
        ask,
        "heatmap.html",
        here="heatmap",
        rows=[{"gpu": gpu, "name": names.get(gpu, ""), "cells": [(at, value) for at, value in zip(starts, values, strict=True)]}
              for gpu, values in rows.items()],
        known=any(value is not None for values in rows.values() for value in values),
        table=_heat_table(rows, starts),
        measure=measure,
        measures=MEASURES,
        ranges=HEAT_RANGES,
        hours=hours,
        ticks=ticks,
        now=now,
    )  # fmt: skip


def _heat(
    ask: Ask, view: Overview, measure: str, first: float, hours: int, now: float
) -> dict[int, list[float | None]]:
    """Return GPU → the hourly means of ``measure``, which is a key of `MEASURES`.

    The means are between 0 and 1. They are None for hours without data.
    """
    gpus = [gpu.gpu.index for gpu in view.gpus]
    out: dict[int, list[float | None]] = {gpu: [None] * hours for gpu in gpus}
    step = 60.0 if hours <= 24 else 300.0 if hours <= 168 else 1800.0
    kept = ask.source.client.gpu_history(first, now, step)
    for gpu, samples in kept.items():
        if gpu not in out:
            continue
        if measure == "memory":
            points = [(one.at, one.used_mib) for one in samples]
            total = next((one.gpu.memory_mib for one in view.gpus if one.gpu.index == gpu), None)
            points = [(at, None if value is None or not total else value / total) for at, value in points]
        else:
            points = [(one.at, one.load if measure == "load" else one.booked) for one in samples]
        out[gpu] = svg_curves.by_hour(points, first, hours)
    if measure == "booked":
        _, runs = _runs(ask, view, first, now)
        begun = min((run.start for run in runs), default=now)
        for gpu in gpus:  # hours without recorded readings are computed from the attempts
            mine = [(run.start, run.end, run.parts / WHOLE) for run in runs if gpu in run.gpus]
            told = svg_curves.booked_by_hour(mine, first, hours, now)
            out[gpu] = [
                told[n] if value is None and first + (n + 1) * HOUR_S > begun else value
                for n, value in enumerate(out[gpu])
            ]
    return out


def _heat_table(rows: Mapping[int, list[float | None]], starts: list[float]) -> list[tuple[str, list[Any]]]:
    """Return the heat map as table rows, newest first. A row is (hour or day, cells), with a cell for each GPU.

    A row stands for an hour if at most 24 hours are shown, else for a day. A cell is (mean, highest mean of an hour).
    """
    form = "%a %H:%M" if len(starts) <= 24 else "%a %d %b"
    spans: dict[str, list[int]] = {}
    for place, at in enumerate(starts):
        spans.setdefault(time.strftime(form, time.localtime(at)), []).append(place)
    out = []
    for words, places in reversed(spans.items()):
        cells = [[v for v in (values[place] for place in places) if v is not None] for values in rows.values()]
        out.append((words, [(_mean(found), max(found, default=None)) for found in cells]))
    return out


# -- submit, report ---------------------------------------------------------------------------------------


def _submit(ask: Ask) -> Response:
    view = ask.source.overview()
    return _page(ask, "submit.html", here="submit", view=view, labels=_labels(view), options=FORM_OPTIONS)


def _labels(view: Overview) -> list[str]:
    return sorted({job.spec.label for job in view.jobs if job.spec.label})[:50]


def _report(ask: Ask) -> Response:
    now = time.time()
    query = ask.request.query_params
    span, label = query.get("since", "week"), query.get("label", "")
    known = {name: seconds for name, _, seconds in SPANS}
    if span not in known:
        raise UsageError(f"unknown time range {span[:40]!r}", do=f"known: {', '.join(known)}")
    seconds = known[span]
    problem, found = "", None
    try:
        found = ask.source.client.report(now, None if seconds is None else now - seconds, label)
    except NotFound:
        problem = "There is no job with this label."
    lines = [] if found is None else sorted(found.lines, key=lambda line: -line.job.id)
    return _page(
        ask,
        "report.html",
        404 if problem else 200,
        here="report",
        report=found,
        problem=problem,
        lines=[(view_models.row(line.job), line) for line in lines[:MOST_REPORTED]],
        more=max(0, len(lines) - MOST_REPORTED),
        spans=SPANS,
        span=span,
        label=label,
        labels=_labels(ask.source.overview()),
        hours=_hours,
        busiest=_busiest(found),
        now=now,
    )


def _hours(gpu_ms: int) -> str:
    hours = gpu_ms / WHOLE / 1000 / HOUR_S
    return f"{hours:.4f}" if 0 < hours < 0.1 else f"{hours:.2f}"


def _busiest(report: Report | None) -> float:
    return max([1.0, *(float(total.gpu_ms) for total in (report.labels.values() if report else ()))])


# -- users of the machine ---------------------------------------------------------------------------------


def _users(ask: Ask) -> Response:
    from scheduler.client.queue_use import with_queue
    from scheduler.client.who import use_by_user, who

    problem = ""
    client = ask.source.client
    if client.shared:
        uses, half_life = client.shares()
        problems = list[str]()
    else:
        uses, half_life, problems = use_by_user(os.environ)
    try:
        gpus, holders, _ = who(os.environ)
        if client.shared:
            me = name_of(os.getuid())
            holders = with_queue(holders, client.overview(0), me, "")
    except NoGpuData as error:
        gpus, holders, problem = [], [], error.what
    taken = {holder.gpu.index for holder in holders}
    return _page(
        ask, "users.html", here="users", holders=holders, free=[gpu for gpu in gpus if gpu.index not in taken], uses=uses,
        half_life=half_life, problems=[*problems, *([problem] if problem else [])],
    )  # fmt: skip


# -- needs of models --------------------------------------------------------------------------------------


def _needs(ask: Ask) -> Response:
    rows, may_apply, problems = shown_needs(ask)
    return _page(
        ask, "needs.html", here="needs", rows=rows[:MOST_REPORTED], more=max(0, len(rows) - MOST_REPORTED), problems=problems,
        path=table_path(ask.source.client, ask.source.config), may_apply=may_apply, suggested=suggested_text,
        offered=may_be_applied, body=lambda model: json.dumps({"models": [model]}), differ=len(changes_of(rows, ())[0]),
    )  # fmt: skip


# -- files, errors ----------------------------------------------------------------------------------------


def trouble(ask: Ask, code: int, text: str) -> Response:
    """Return a page that shows an error."""
    return _page(ask, "trouble.html", code, here="", code=code, text=text)


def _static(name: str) -> Call:
    def give(_ask: Ask) -> Response:
        return Response(static_file(name), media_type=STATIC[name])

    return Call("GET", f"/static/{name}", give, f"A file used by the web pages: {name}.", page=True)


CALLS = (
    Call("GET", "/", _now, "Overview: the GPUs, the running and waiting jobs, and the last ended jobs.", page=True),
    Call("GET", "/jobs", _jobs, "The newest jobs, by state and label.", page=True),
    Call("GET", "/jobs/{id}", _job, "All facts about one job, with its log.", page=True),
    Call("GET", "/timeline", _timeline, "The jobs that ran on each GPU, over time.", page=True),
    Call("GET", "/heatmap", _heatmap, "How busy the GPUs were, by the hour.", page=True),
    Call("GET", "/submit", _submit, "A form for a new job.", page=True),
    Call("GET", "/report", _report, "Waiting times, run times and GPU use of jobs.", page=True),
    Call("GET", "/users", _users, "The users of this machine: bookings, use and fair shares.", page=True),
    Call("GET", "/needs", _needs, "The needs of models: in the model table, as seen, and as suggested.", page=True),
    *map(_static, STATIC),
)
