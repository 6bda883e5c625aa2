"""The OpenAPI document of the HTTP API, made from its table of routes: what is not in the table is not described."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scheduler import __version__
from scheduler.views.schemas import schema
from scheduler.web.history import OF_GPU, OF_JOB
from scheduler.web.routes import JSON, Call

HIGHEST = 10**15 - 1  # of the numbers in an address
ABOUT = (
    "The scheduler of one machine's GPUs. Reading is GET; each change is a POST of a JSON object. Sign in with the token "
    "that lies beside the scheduler's store, as `Authorization: Bearer`; a browser that has signed in also sends "
    "`X-Gpujob: 1` with each change."
)
_WHEN = {"type": ["string", "null"], "format": "date-time"}
_STATE = {"$ref": "job.schema.json#/properties/state"}
SCHEMA_NUMBER = {"const": 1, "description": "Version of this form."}


def _object(about: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """A closed object, all keys of which are always there."""
    return {
        "type": "object",
        "description": about,
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _samples(keys: Iterable[str], **more: Mapping[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Mapping[str, Any]] = {key: {"type": ["number", "null"]} for key in keys}
    point = _object("Means over a step; null where nothing was measured.", at={"type": "number"}, **numbers, **more)
    return {"type": "array", "items": point}


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
OWN: dict[str, dict[str, Any]] = {
    "error": _object("What went wrong, and what to do.", error={"type": "string"}),
    "made": _object("The job that was made.", id={"type": "integer", "minimum": 0}),
    "acted": _object("The job, as it is now.", id={"type": "integer", "minimum": 0}, state=_STATE),
    "paused": _object("The GPUs that are paused now.", paused_gpus=_IDS),
    "queue": _object("Whether the queue is paused now.", paused={"type": "boolean"}),
    "gpus": _object("The GPUs.", schema=SCHEMA_NUMBER, gpus={"$ref": "status.schema.json#/properties/gpus"}),
    "preview": _object(
        "What would happen.",
        schema=SCHEMA_NUMBER,
        would={"enum": ["start", "wait", "never"]},
        gpus=_IDS,
        reason={"type": ["string", "null"], "description": "Why it would wait, or never start."},
        reason_code={"type": ["string", "null"]},
        need={"type": ["number", "null"], "description": "GPUs it takes."},
        command={"type": "array", "items": {"type": "string"}},
        notes={"type": "array", "items": {"type": "string"}},
    ),
    "story": _object(
        "What happened to a job.",
        schema=SCHEMA_NUMBER,
        events={
            "type": "array",
            "items": _object("", at=_WHEN, kind={"type": "string"}, detail={"type": "object"}),
        },
        attempts={
            "type": "array",
            "items": _object(
                "A run.",
                attempt={"type": "integer"},
                started_at=_WHEN,
                run_seconds={"type": "number"},
                gpus=_IDS,
                share={"type": "number", "description": "Of each GPU."},
                lost={"type": "boolean"},
                log={"type": ["string", "null"]},
            ),
        },
    ),
}
_PAUSE: dict[str, Mapping[str, Any]] = {
    "gpu": {"type": ["integer", "null"]},
    "from": {"type": "number"},
    "to": {"type": ["number", "null"]},
}
OWN["gpu_history"] = _object(
    "Curves of the GPUs: memory in bytes, loads and shares 0 to 1, times in seconds since 1970.",
    schema=SCHEMA_NUMBER,
    gpus={
        "type": "array",
        "items": _object("A GPU.", index={"type": "integer"}, samples=_samples(OF_GPU, paused={"type": "boolean"})),
    },
    pauses={
        "type": "array",
        "items": _object("A pause of a GPU, or of the queue (null); it goes on where there is no end.", **_PAUSE),
    },
)
OWN["job_history"] = _object(
    "Curves of a job.",
    schema=SCHEMA_NUMBER,
    attempts={"type": "array", "items": _object("A run.", attempt={"type": "integer"}, samples=_samples(OF_JOB))},
)
PUBLISHED = ("job", "jobs", "status")
OF_THE_GATE = {
    400: "What was sent cannot be read, or holds an unknown key or a bad value.",
    401: "No token, or a wrong one.",
    421: "The Host header names another place.",
    431: "The headers are too long.",
    500: "A defect.",
    503: "The store cannot be used, no answer came in time, or too much is going on.",
}
OF_CHANGES = {
    403: "A foreign Origin; or with the cookie, no X-Gpujob: 1.",
    408: "The body did not come in time.",
    413: "The body is above 1 MiB.",
    415: "The body is not application/json.",
}


def ref(name: str) -> dict[str, str]:
    """A schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def document(calls: Iterable[Call]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    named = {name: schema(name) for name in PUBLISHED} | OWN
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpujob", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": {name: _inner(value) for name, value in named.items()},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "browser": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "gpujob",
                    "description": "Its name goes on with the port: gpujob_4004.",
                },
            },
        },
        "security": [{"token": []}, {"browser": []}],
    }


def _inner(value: Any) -> Any:
    """A schema with its references into this document."""
    if isinstance(value, Mapping):
        return {key: _inner(inner) for key, inner in value.items() if key != "$schema"}
    if isinstance(value, (list, tuple)):
        return [_inner(inner) for inner in value]
    if isinstance(value, str) and ".schema.json" in value:
        name, _, rest = value.partition(".schema.json")
        return f"#/components/schemas/{name}{rest.removeprefix('#')}"
    return value


def _operation(call: Call) -> dict[str, Any]:
    codes = dict(OF_THE_GATE) | (OF_CHANGES if call.method == "POST" else {})
    if any(one.where == "path" for one in call.parameters):
        codes[404] = "No such job or GPU here."
    answers: dict[str, Any] = {
        str(code): {"description": about, "content": {JSON: {"schema": ref("error")}}} for code, about in codes.items()
    }
    for code, (about, form) in call.answers.items():
        content = {JSON: {"schema": _inner(form)}} if form is not None else {call.media: {"schema": {"type": "string"}}}
        answers[str(code)] = {"description": about, "content": content}
        if call.headers and code == 200:
            answers[str(code)]["headers"] = {
                name: {"description": said, "schema": {"type": "string"}} for name, said in call.headers.items()
            }
    found: dict[str, Any] = {
        "operationId": _name(call),
        "summary": call.about,
        "parameters": [_parameter(one.name, one.where, one.schema, one.about) for one in call.parameters],
        "responses": dict(sorted(answers.items())),
    }
    if call.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": _inner(call.body)}}}
    return found


def _parameter(name: str, where: str, form: Mapping[str, Any], about: str) -> dict[str, Any]:
    if form.get("type") == "integer":
        form = {"maximum": HIGHEST, **form}
    return {"name": name, "in": where, "required": where == "path", "schema": dict(form), "description": about}


def _name(call: Call) -> str:
    words = [word.strip("{}") for word in call.path.removeprefix("/api").split("/") if word]
    return "_".join([call.method.lower(), *words]).replace(".", "_")
