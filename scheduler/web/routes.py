"""Types of routes (`Call`) and requests (`Ask`), and the HTTP status of each kind of error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from scheduler.client.client import QueueFull
from scheduler.core.errors import NoDaemon, NotFound, Refused, SchedulerError, StoreTrouble, UsageError
from scheduler.web.source import Source

BODY = "gpujob.body"  # key in the scope: the whole body of a POST, stored by the gate
NONCE = "gpujob.nonce"  # key in the scope: the nonce that inline scripts and styles need
JSON = "application/json"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}", re.ASCII)


class Conflict(SchedulerError):
    """The request is not possible in the current state of the job, GPU or scheduler."""


class NotNow(SchedulerError):
    """Too many requests of this kind are being served; the client may try again later."""


# The first matching class counts; any other SchedulerError is answered with 500.
STATUS: tuple[tuple[type[SchedulerError], int], ...] = (
    (NotFound, 404),
    (Conflict, 409),
    (QueueFull, 409),
    (UsageError, 400),
    (Refused, 400),
    (NotNow, 503),
    (NoDaemon, 503),
    (StoreTrouble, 503),
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path or the query. ``schema``: JSON Schema of its value; ``about``: its description."""

    name: str
    where: str  # "path" or "query"
    schema: Mapping[str, Any]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A route: a row of a table from which the application, its checks and the OpenAPI document are made.

    ``path``: in Starlette's syntax (``/api/jobs/{id}``). A name in braces stands for a whole number; a request with any
    other text in its place is answered with 404.
    ``does``: function that returns the answer. It runs in a thread and may block; for its errors see `STATUS`.
    ``about``: summary. ``answers``: status → (meaning, JSON Schema of the body, or None if the body is not JSON).
    ``body``: JSON Schema of the request's body. ``media``: media type of a successful answer if it is not JSON.
    ``headers``: further headers of a successful answer → their meaning.
    ``page``: whether the route answers with an HTML page. If so, its errors are pages too, and OpenAPI omits the route.
    """

    method: str
    path: str
    does: Callable[[Ask], Response]
    about: str
    answers: Mapping[int, tuple[str, Mapping[str, Any] | None]] = field(default_factory=dict)
    parameters: Sequence[Parameter] = ()
    body: Mapping[str, Any] | None = None
    media: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    page: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that has passed the gate; argument of a route's function. ``numbers``: name in the path → number."""

    request: Request
    source: Source
    numbers: Mapping[str, int]

    def query(self, name: str) -> str | None:
        """Return a parameter of the query, or None if it is missing."""
        found = self.request.query_params.get(name)
        return None if found is None else str(found)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """Return a parameter of the query as a whole number; ``default`` if the parameter is missing.

        A number above ``most`` counts as ``most``. Raises UsageError if the parameter is not a whole number or is less
        than ``least``.
        """
        text = self.query(name)
        if text is None:
            return default
        found = number(text)
        if found is None or found < least:
            raise UsageError(f"must be a whole number of at least {least}, not {text[:40]!r}", where=name)
        return min(found, most)

    @property
    def nonce(self) -> str:
        """The nonce by which the Content-Security-Policy of this answer allows inline scripts and styles."""
        return str(self.request.scope.get(NONCE, ""))

    def body(self) -> dict[str, Any]:
        """Return the JSON object in the body. Raises UsageError if the body is not a JSON object."""
        try:
            found = json.loads(self.request.scope.get(BODY, b""), parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise UsageError(
                "cannot read the body: it is not JSON", do='send an object such as {"command": ["true"]}'
            ) from None
        if not isinstance(found, dict):
            raise UsageError(
                "cannot read the body: it is not a JSON object", do='send an object such as {"command": ["true"]}'
            )
        return found


def as_json(value: object, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer of the API with this value as JSON."""
    return Response(json.dumps(value), code, headers, media_type=JSON)


def number(text: str) -> int | None:
    """Return the number that the text spells (1 to 15 ASCII digits, no leading zero), else None."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def status_of(error: SchedulerError) -> int:
    """Return the HTTP status of an error: the first match in `STATUS`, else 500."""
    return next((code for kind, code in STATUS if isinstance(error, kind)), 500)
