"""The table of routes of the HTTP API (`CALLS`), and the functions of most routes that only read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from scheduler.client.client import SCHEMA, STATES
from scheduler.core.errors import UsageError, did_you_mean
from scheduler.core.job import Event, Job, JobState
from scheduler.core.log_names import logs_of
from scheduler.core.secrets import masked
from scheduler.core.units import utc
from scheduler.core.usage_report import attempts_of
from scheduler.views.log_glance import lines_of_a_failure
from scheduler.views.predictions import explanation_json, plan_json, why_json
from scheduler.views.render import in_pieces, job_json, status_json
from scheduler.web import commands, history, job_log, metrics, needs, offers, openapi
from scheduler.web import event_stream as live
from scheduler.web.openapi import ref
from scheduler.web.routes import JSON, Ask, Call, NotNow, Parameter, as_json

LONG_S = 20.0  # how long an answer waits for a prediction
Does = Callable[[Ask], Response]


def _status(ask: Ask) -> Response:
    return Response(ask.source.status(), media_type=JSON)


def _jobs(ask: Ask) -> Response:
    asked = ask.query("state")
    states = [] if asked is None else asked.split(",")
    for word in states:
        if word not in STATES:
            raise UsageError(f"unknown state {word[:40]!r}{did_you_mean(word, STATES)}", where="state",
                             do=f"known: {', '.join(STATES)}")  # fmt: skip
    found, reasons = ask.source.client.jobs(states)
    shown = {"schema": SCHEMA, "jobs": [job_json(job, reasons.get(job.id)) for job in found]}
    return Response(in_pieces(shown), media_type=JSON)


def _job(ask: Ask) -> Response:
    job, reason, _ = ask.source.client.job(ask.numbers["id"])
    return as_json(job_json(job, reason))


def _why(ask: Ask) -> Response:
    client = ask.source.client
    job, reason, _ = client.job(ask.numbers["id"])
    explanation = None
    if job.state is JobState.PENDING and client.alive():
        found = ask.source.explanation(job.id, LONG_S)
        if found is None:
            raise NotNow(f"the explanation takes longer than {LONG_S:g} s", do="try again later")
        explanation = explanation_json(found)
    last = [] if client.shared else lines_of_a_failure(job)
    return as_json({"schema": SCHEMA, "jobs": [why_json(job, reason, last, explanation)]})


def _plan(ask: Ask) -> Response:
    return as_json(plan_json(ask.source.outlook(LONG_S)))


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
    "properties": {
        "force": {
            "type": "boolean",
            "description": "Also start jobs despite the foreign processes and memory that are on the GPU now.",
        }
    },
}
_LEVEL = {
    **_EMPTY,
    "properties": {"priority": {"type": ["integer", "string"], "description": "Jobs with a lower number start first."}},
    "required": ["priority"],
}
_IN_STATE = {409: ("The state of the job or GPU does not allow the request.", ref("error"))}


def _read(path: str, does: Does, about: str, form: str, *parameters: Parameter) -> Call:
    return Call("GET", path, does, about, {200: (about, ref(form))}, parameters)


def _ask_job(verb: str, does: Does, about: str, body: Mapping[str, Any] = _EMPTY) -> Call:
    answers = {
        200: ("The request was carried out, or is recorded for the next start of the scheduler.", ref("acted")),
        **_IN_STATE,
    }
    return Call("POST", f"/api/jobs/{{id}}/{verb}", does, about, answers, (_ID,), body, headers=commands.HEADERS)


CALLS = (
    _read("/api/status", _status, "Current state of the scheduler, in the form of `gpujob status --json`.", "status"),
    _read(
        "/api/jobs", _jobs, "All jobs, or the jobs in the given states, sorted by id.", "jobs",
        Parameter("state", "query", {"type": "string", "pattern": _STATES_PATTERN}, "States, separated by commas."),
    ),
    _read("/api/jobs/{id}", _job, "One job.", "job", _ID),
    _read("/api/jobs/{id}/story", _story, "Event history and attempts of a job.", "story", _ID),
    Call(
        "GET", "/api/jobs/{id}/log", job_log.log, "Log of a job: its last lines, the part before or after a byte, or the lines that contain a text.",
        {200: ("Text as a terminal would finally show it; empty if there is no log yet.", None)},
        (
            _ID,
            Parameter("tail", "query", _WHOLE, f"Number of lines from the end: {job_log.DEFAULT_LINES} by default, at most {job_log.MOST_LINES}."),
            Parameter("from", "query", _WHOLE,
                      "Return the log from this byte on: send the X-Gpujob-Log-End of the previous answer."),
            Parameter("before", "query", _WHOLE,
                      "Return the last lines before this byte: send the X-Gpujob-Log-Start of an earlier answer."),
            Parameter("find", "query", {"type": "string", "minLength": 1, "maxLength": job_log.LONGEST_WORD},
                      "Return the last lines that contain this text, with their numbers; cannot be combined with the parameters 'from' and 'before'."),
            Parameter("attempt", "query", {"type": "integer", "minimum": 1}, "Number of the attempt; default: the last attempt."),
        ),
        media="text/plain", headers=job_log.HEADERS,
    ),
    _read("/api/jobs/{id}/history", history.job, "GPU memory and load of a job's attempts over time.", "job_history", _ID),
    _read(
        "/api/jobs/{id}/why", _why,
        "Why a job waits or how it ended, in the form of `gpujob why --json`; for a waiting job with offers that would start it now.",
        "why", _ID,
    ),
    _read("/api/plan", _plan, "When jobs are expected to start and end, in the form of `gpujob plan --json`.", "plan"),
    _read(
        "/api/needs", needs.needs,
        "For each model the need in the model table, what its runs used and a suggestion, in the form of `gpujob needs --json`.",
        "needs",
    ),
    _read("/api/gpus", _gpus, "All GPUs of the scheduler.", "gpus"),
    _read(
        "/api/history/gpus", history.gpus, "Memory, load and allocated share of the GPUs over time, and their pauses.", "gpu_history",
        Parameter("from", "query", _WHOLE, "Start of the time range in seconds since 1970; default: one hour before `to`."),
        Parameter("to", "query", {"type": "integer", "minimum": 1}, "End of the time range in seconds since 1970; default: now."),
        Parameter("step", "query", {"type": "integer", "minimum": 1}, "Seconds between two points."),
    ),
    Call(
        "GET", "/api/events", live.events,
        "Stream of changes as server-sent events. Event types: `job`, `gpus`, `queue`, `scheduler`, and `again` (reload all).",
        {200: ("A stream that stays open.", None)}, media="text/event-stream",
    ),
    Call("GET", "/api/openapi.json", _openapi, "This document.", {200: ("OpenAPI 3.1.", {"type": "object"})}),
    Call("GET", "/metrics", _metrics, "Metrics for Prometheus.", {200: ("Text format 0.0.4.", None)}, media="text/plain"),
    Call(
        "POST", "/api/jobs", commands.submit, "Queue a job.",
        {201: ("The job is queued.", ref("made")), 409: ("The queue is full.", ref("error"))}, body=commands.SUBMITTED,
    ),
    Call(
        "POST", "/api/preview", commands.would, "Preview: what would happen to this job if it were submitted now. Nothing is changed.",
        {200: ("What the scheduler would decide.", ref("preview"))}, body=commands.SUBMITTED,
    ),
    _ask_job("cancel", commands.cancel, "Cancel a job: a waiting job leaves the queue, all processes of a running job are ended."),
    _ask_job("retry", commands.retry, "Run an ended job again: same id, new attempt, new log."),
    _ask_job("hold", commands.hold, "Hold a waiting job: it does not start until it is released."),
    _ask_job("release", commands.release, "Release a held job: it may start again."),
    _ask_job("first", commands.first, "Put a waiting job before all other jobs."),
    _ask_job("priority", commands.priority, "Change the priority of a waiting job.", _LEVEL),
    Call(
        "POST", "/api/jobs/{id}/offer", offers.accept,
        "Accept an offer for a waiting job: carry out its requests, as GET /api/jobs/{id}/why returns them. If the job does not wait any more, nothing is done.",
        {200: ("The requests were carried out.", ref("acted")), **_IN_STATE}, (_ID,), offers.ACCEPTED, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/needs/apply", needs.apply,
        "Write suggested needs into the model table, as `gpujob needs --apply` does; a copy of the old file is kept.",
        {200: ("The changes; empty if nothing differs.", ref("needs_applied")),
         404: ("There is no such model.", ref("error")),
         409: ("The file of the model table cannot be written.", ref("error"))},
        body=needs.APPLIED, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/gpus/{n}/pause", commands.pause_gpu, "Pause a GPU: no new job starts on it; running jobs continue.",
        {200: ("The GPU is paused.", ref("paused"))}, (_GPU,), _EMPTY, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/gpus/{n}/resume", commands.resume_gpu, "Resume a GPU: jobs may start on it again.",
        {200: ("The GPU is not paused.", ref("paused")), **_IN_STATE}, (_GPU,), _FORCED, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/queue/pause", commands.pause_queue, "Pause the queue: no job starts; running jobs continue.",
        {200: ("The queue is paused.", ref("queue"))}, body=_EMPTY, headers=commands.HEADERS,
    ),
    Call(
        "POST", "/api/queue/resume", commands.resume_queue, "Resume the queue: jobs start again.",
        {200: ("The queue is not paused.", ref("queue"))}, body=_EMPTY, headers=commands.HEADERS,
    ),
)  # fmt: skip
