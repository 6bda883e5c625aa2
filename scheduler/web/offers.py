"""Accepting an offer: the requests that would start a waiting job now, as `why` has shown them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from scheduler.client.edit_needs import needs_after
from scheduler.client.submission import model_table_for
from scheduler.core.errors import UsageError, did_you_mean
from scheduler.core.job import Job, JobState
from scheduler.core.job_options import JOB_OPTIONS, changed_fields
from scheduler.core.offered_requests import CANCEL, EDIT, FIRST, OPTIONS, QUEUE_RESUME, RELEASE, RESUME, VERBS
from scheduler.core.requests import Cancel, Edit, First, PauseQueue, Release, Request, Resume
from scheduler.web.commands import KINDS, acted, carry_out, check_keys
from scheduler.web.routes import Ask, Conflict

MOST = 10_000  # jobs or GPUs in a request
MOST_REQUESTS = 8
_NEEDED = {
    CANCEL: "jobs",
    RESUME: "gpus",
    EDIT: "options",
}  # verb → the key that it needs; the others are about the job
_NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MOST}
_REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "verb": {"type": "string", "enum": list(VERBS), "description": "What it does."},
        "jobs": {**_NUMBERS, "description": "Jobs to cancel; for first, release and edit only this job is possible."},
        "gpus": {**_NUMBERS, "description": "GPUs to resume."},
        "options": {
            "type": "object",
            "properties": {name: {"type": "string", "description": JOB_OPTIONS[name].help} for name in OPTIONS},
            "additionalProperties": False,
            "description": "Options to edit.",
        },
    },
    "required": ["verb"],
    "additionalProperties": False,
}
ACCEPTED: dict[str, Any] = {
    "type": "object",
    "properties": {"requests": {"type": "array", "items": _REQUEST, "minItems": 1, "maxItems": MOST_REQUESTS}},
    "required": ["requests"],
    "additionalProperties": False,
}


def accept(ask: Ask) -> Response:
    """Carry out the requests of an offer in their order, and answer with the job's state.

    If the job does not wait any more, nothing is done. The requests after one that fails are not carried out. Raises
    Conflict, NotFound, UsageError.
    """
    body = ask.body()
    check_keys(body, ("requests",))
    wanted = body.get("requests")
    if not isinstance(wanted, list) or not 1 <= len(wanted) <= MOST_REQUESTS:
        raise UsageError(
            f"must be a list of 1 to {MOST_REQUESTS} requests", where="requests", do="see the offers of why"
        )
    number = ask.numbers["id"]
    job = ask.source.client.states([number])[0]
    requests = [_request_of(ask, job, one) for one in wanted]  # all are checked before the first is carried out
    said: list[str] = []
    for request in requests:
        job = ask.source.client.states([number])[0]
        if job.state is not JobState.PENDING:
            rest = "the rest of the offer is not needed" if said else "nothing was done"
            if not said:
                raise Conflict(f"job {number} does not wait any more, it is {job.state.value}: {rest}")
            said.append(f"job {number} is {job.state.value}, so {rest}")
            break
        said.append(carry_out(ask, request))
    return acted(ask.source.client.states([number])[0], "; ".join(said))


def _request_of(ask: Ask, job: Job, given: Any) -> Request:
    """Return the request that an object in the body describes. Raises UsageError for a wrong key or value."""
    if not isinstance(given, dict):
        raise UsageError("must be a list of objects", where="requests")
    check_keys(given, _REQUEST["properties"])
    verb = given.get("verb")
    if verb not in VERBS:
        text = str(verb)[:40]
        raise UsageError(f"unknown verb {text!r}{did_you_mean(text, VERBS)}", do=f"known: {', '.join(VERBS)}")
    needed = _NEEDED.get(verb)
    for key in ("jobs", "gpus", "options"):
        if key == needed and not given.get(key):
            raise UsageError("is missing", where=key)
        if key != needed and given.get(key) and not (key == "jobs" and verb in (FIRST, RELEASE, EDIT)):
            raise UsageError(f"cannot be combined with {verb}", where=key)
    jobs = _numbers("jobs", given.get("jobs", []))
    if verb == QUEUE_RESUME:
        return PauseQueue(False)
    if verb == RESUME:
        return Resume(_numbers("gpus", given["gpus"]))
    if verb == CANCEL:
        if job.id in jobs:
            raise UsageError("must not contain the job that is to start", where="jobs")
        return Cancel(jobs)
    if jobs not in ((), (job.id,)):
        raise UsageError(f"must be the job that is to start: [{job.id}]", where="jobs")
    if verb == EDIT:
        return _edit(ask, job, given["options"])
    return First((job.id,)) if verb == FIRST else Release((job.id,))


def _edit(ask: Ask, job: Job, options: Any) -> Edit:
    if not isinstance(options, dict):
        raise UsageError('must be an object such as {"gpus": "0.5"}', where="options")
    check_keys(options, OPTIONS)
    texts: Mapping[str, str] = {name: KINDS[JOB_OPTIONS[name].kind][0](name, value) for name, value in options.items()}
    changes = changed_fields(texts)
    client = ask.source.client
    needs = needs_after(
        [job], changes, lambda: client.learned_table(model_table_for(client, ask.source.config)), client.gpus
    )
    return Edit((job.id,), changes, needs)


def _numbers(key: str, value: Any) -> tuple[int, ...]:
    """Return a list of job or GPU ids. Raises UsageError."""
    if not isinstance(value, list) or len(value) > MOST:
        raise UsageError(f"must be a list of at most {MOST} whole numbers", where=key)
    if any(not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < 1 << 53 for one in value):
        raise UsageError("must be a list of whole numbers", where=key)
    if len(set(value)) < len(value):
        raise UsageError("names one twice", where=key)
    return tuple(value)
