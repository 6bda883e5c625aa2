"""The OpenAPI document of the HTTP API, generated from its table of routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scheduler import __version__
from scheduler.views.documents import JobDocument
from scheduler.views.json_schema import schema_of
from scheduler.web.documents import FORMS
from scheduler.web.routes import JSON, Call

HIGHEST = 10**15 - 1  # largest value of an integer parameter
ABOUT = (
    "The scheduler of one machine's GPUs. A GET request reads; each change is a POST request with a JSON object. Sign "
    "in with the token that lies beside the scheduler's store, as `Authorization: Bearer`; a browser that has signed "
    "in also sends `X-Gpujob: 1` with each change."
)
OF_THE_GATE = {
    400: "The request cannot be read, or has an unknown key or an invalid value.",
    401: "The token is missing or wrong.",
    421: "The Host header names another server.",
    431: "The headers are too long.",
    500: "Internal error.",
    503: "The store cannot be used, the scheduler did not answer in time, or too many requests are being served.",
}
OF_CHANGES = {
    403: "The request comes from another origin, or has the cookie but no X-Gpujob: 1.",
    408: "The body did not arrive in time.",
    413: "The body exceeds 1 MiB.",
    415: "The body is not application/json.",
}


def ref(name: str) -> dict[str, str]:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def document(calls: Iterable[Call]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document that describes these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    forms = {name: described(form) for name, form in FORMS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpujob", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": forms,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "browser": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "gpujob",
                    "description": "The name of the cookie ends with the port: gpujob_4004.",
                },
            },
        },
        "security": [{"token": []}, {"browser": []}],
    }


def described(form: Any) -> dict[str, Any]:
    """Return the JSON Schema of a document type.

    Where a document contains a job, the schema has a reference to the job schema of the OpenAPI document.
    """
    made = schema_of(form, {} if form is JobDocument else {JobDocument: "job"})
    return {"description": form.__doc__, **_here(made)}


def _here(value: Any) -> Any:
    """Return a schema, or a part of a schema, with its references adapted to the OpenAPI document.

    All references in ``value`` point to the file of the job schema. Each reference in the result points to the job
    schema inside the OpenAPI document.
    """
    if isinstance(value, dict):
        return ref("job") if "$ref" in value else {key: _here(inner) for key, inner in value.items()}
    return [_here(inner) for inner in value] if isinstance(value, list) else value


def _operation(call: Call) -> dict[str, Any]:
    codes = dict(OF_THE_GATE) | (OF_CHANGES if call.method == "POST" else {})
    if any(one.where == "path" for one in call.parameters):
        codes[404] = "There is no such job or GPU."
    answers: dict[str, Any] = {
        str(code): {"description": about, "content": {JSON: {"schema": ref("error")}}} for code, about in codes.items()
    }
    for code, (about, form) in call.answers.items():
        content = {JSON: {"schema": form}} if form is not None else {call.media: {"schema": {"type": "string"}}}
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
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": call.body}}}
    return found


def _parameter(name: str, where: str, form: Mapping[str, Any], about: str) -> dict[str, Any]:
    if form.get("type") == "integer":
        form = {"maximum": HIGHEST, **form}
    return {"name": name, "in": where, "required": where == "path", "schema": dict(form), "description": about}


def _name(call: Call) -> str:
    words = [word.strip("{}") for word in call.path.removeprefix("/api").split("/") if word]
    return "_".join([call.method.lower(), *words]).replace(".", "_")
