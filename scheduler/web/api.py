"""The table of routes of the HTTP API (`CALLS`), and the functions of most routes that only read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from scheduler.client.client import SCHEMA, STATES
from scheduler.core.errors import UsageError, did_you_mean
from scheduler.core.job import Event, Job
from scheduler.core.log_names import logs_of
from scheduler.core.secrets import masked
from scheduler.core.units import utc
from scheduler.core.usage_report import attempts_of
from scheduler.views.render import in_pieces, job_json, status_json
from scheduler.web import commands, history, job_log, metrics, openapi
from scheduler.web import events as live
from scheduler.web.openapi import ref
from scheduler.web.routes import JSON, Ask, Call, Parameter, as_json

Does = Callable[[Ask], Response]


def _status(ask: Ask) -> Response:
    return Response(ask.source.status(), media_type=JSON)


def _jobs(ask: Ask) -> Response:
    asked = ask.query("state")
    states = [] if asked is None else asked.split(",")
    for word in states:
        if word not in STATES:
            raise UsageError(f"no state {word[:40]!r}{did_you_mean(word, STATES)}", where="state",
                             do=f"known: {', '.join(STATES)}")  # fmt: skip
    found, reasons = ask.source.client.jobs(states)
    shown = {"schema": SCHEMA, "jobs": [job_json(job, reasons.get(job.id)) for job in found]}
    return Response(in_pieces(shown), media_type=JSON)


def _job(ask: Ask) -> Response:
    job, reason, _ = ask.source.client.job(ask.numbers["id"])
    return as_json(job_json(job, reason))


def _gpus(ask: Ask) -> Response:
    return as_json({"schema": SCHEMA, "gpus": status_json(ask.source.overview())["gpus"]})


def _story(ask: Ask) -> Response:
    job, _, events = ask.source.client.job(ask.numbers["id"])
    return as_json(
        {
            "schema": SCHEMA,
            "events": [{"at": utc(e.at), "kind": e.kind, "detail": masked(e.detail)} for e in events],
            "attempts": _attempts(job, events),
        }
    )


def _attempts(job: Job, events: list[Event]) -> list[dict[str, Any]]:
    """Return the attempts of a job as JSON objects, oldest first."""
    logs = logs_of(job, events)
    return [
        {
            "attempt": run.number,
            "started_at": utc(run.started_ms / 1000),
            "run_seconds": run.run_ms / 1000,
            "gpus": list(run.gpus),
            "share": run.parts / 1000,
            "lost": run.lost,
            "log": logs.get(run.number),
        }
        for run in attempts_of(job, events, time.time())
    ]


def _metrics(ask: Ask) -> Response:
    return Response(metrics.metrics(ask.source.client), headers={"Content-Type": metrics.CONTENT_TYPE})


def _openapi(ask: Ask) -> Response:
    return as_json(openapi.document(CALLS))


_ID = Parameter("id", "path", {"type": "integer", "minimum": 0}, "Number of the job.")
_GPU = Parameter("n", "path", {"type": "integer", "minimum": 0}, "Number of the GPU.")
_STATES_PATTERN = f"^({'|'.join(STATES)})(,({'|'.join(STATES)}))*$"
_WHOLE: dict[str, Any] = {"type": "integer", "minimum": 0}
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FORCED = {
    **_EMPTY,
    "properties": {"force": {"type": "boolean", "description": "Also beside what others have on it now."}},
}
_LEVEL = {
    **_EMPTY,
    "properties": {"priority": {"type": ["integer", "string"], "description": "Lower starts first."}},
    "required": ["priority"],
}
_IN_STATE = {409: ("Not possible in the state it is in.", ref("error"))}


def _read(path: str, does: Does, about: str, form: str, *parameters: Parameter) -> Call:
    return Call("GET", path, does, about, {200: (about, ref(form))}, parameters)


def _ask_job(verb: str, does: Does, about: str, body: Mapping[str, Any] = _EMPTY) -> Call:
    answers = {200: ("Done, or asked for.", ref("acted")), **_IN_STATE}
    return Call("POST", f"/api/jobs/{{id}}/{verb}", does, about, answers, (_ID,), body, headers=commands.HEADERS)


CALLS = (
    _read("/api/status", _status, "What there is now, as `gpujob status --json` has it.", "status"),
    _read(
        "/api/jobs", _jobs, "All jobs, or those in some states, by id.", "jobs",
        Parameter("state", "query", {"type": "string", "pattern": _STATES_PATTERN}, "States, comma-joined."),
    ),
    _read("/api/jobs/{id}", _job, "A job.", "job", _ID),
    _read("/api/jobs/{id}/story", _story, "What happened to a job, and its runs.", "story", _ID),
    Call(
        "GET", "/api/jobs/{id}/log", job_log.log, "A job's log: its last lines, what came since, or the lines with a word.",
        {200: ("Text as a terminal would end up showing it; empty where there is no log yet.", None)},
        (
            _ID,
            Parameter("tail", "query", _WHOLE, f"Last lines; {job_log.DEFAULT_LINES} without it, {job_log.MOST_LINES} at most."),
            Parameter("from", "query", _WHOLE, "What stands from this byte on (X-Gpujob-Log-End of the answer before)."),
            Parameter("before", "query", _WHOLE, "The last lines of what stands before this byte (X-Gpujob-Log-Start of an answer)."),
            Parameter("find", "query", {"type": "string", "minLength": 1, "maxLength": job_log.LONGEST_WORD},
                      "The last lines that hold this, with their numbers; not together with from or before."),
            Parameter("attempt", "query", {"type": "integer", "minimum": 1}, "Another attempt than the last."),
        ),
        media="text/plain", headers=job_log.HEADERS,
    ),
    _read("/api/jobs/{id}/history", history.job, "GPU memory and load of a job over its runs.", "job_history", _ID),
    _read("/api/gpus", _gpus, "The GPUs.", "gpus"),
    _read(
        "/api/history/gpus", history.gpus, "Memory, load and use of the GPUs over time, and when they were paused.", "gpu_history",
        Parameter("from", "query", _WHOLE, "Seconds since 1970; an hour before to without it."),
        Parameter("to", "query", {"type": "integer", "minimum": 1}, "Seconds since 1970; now without it."),
        Parameter("step", "query", {"type": "integer", "minimum": 1}, "Seconds of a point."),
    ),
    Call(
        "GET", "/api/events", live.events, "What changes, as it changes: server-sent events job, gpus, queue, scheduler, again.",
        {200: ("A stream without end.", None)}, media="text/event-stream",
    ),
    Call("GET", "/api/openapi.json", _openapi, "This document.", {200: ("OpenAPI 3.1.", {"type": "object"})}),
    Call("GET", "/metrics", _metrics, "For Prometheus.", {200: ("Text format 0.0.4.", None)}, media="text/plain"),
    Call(
        "POST", "/api/jobs", commands.submit, "Queue a job.",
        {201: ("It is queued.", ref("made")), 409: ("No more jobs may wait.", ref("error"))}, body=commands.SUBMITTED,
    ),
    Call(
        "POST", "/api/preview", commands.would, "What would happen if this were submitted now; nothing is changed.",
        {200: ("What the scheduler would decide.", ref("preview"))}, body=commands.SUBMITTED,
    ),
    _ask_job("cancel", commands.cancel, "End a job: a waiting one at once, a running one with all its processes."),
    _ask_job("retry", commands.retry, "Run an ended job again: same id, new attempt, new log."),
    _ask_job("hold", commands.hold, "Do not start a waiting job until it is released."),
    _ask_job("release", commands.release, "Let a held job wait for room again."),
    _ask_job("first", commands.first, "Start a waiting job before all others."),
    _ask_job("priority", commands.priority, "Give a waiting job another priority.", _LEVEL),
    Call(
        "POST", "/api/gpus/{n}/pause", commands.pause_gpu, "No new job on a GPU; those that run go on.",
        {200: ("It is paused.", ref("paused"))}, (_GPU,), _EMPTY, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/gpus/{n}/resume", commands.resume_gpu, "Jobs on a GPU again.",
        {200: ("It is not paused.", ref("paused")), **_IN_STATE}, (_GPU,), _FORCED, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/queue/pause", commands.pause_queue, "Start nothing at all; running jobs go on.",
        {200: ("It is paused.", ref("queue"))}, body=_EMPTY, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/queue/resume", commands.resume_queue, "Start jobs again.",
        {200: ("It goes on.", ref("queue"))}, body=_EMPTY, headers=commands.HEADERS,
    ),
)  # fmt: skip
