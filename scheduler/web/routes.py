"""What a route is: one row each of a table, from which the routes, their checks and the OpenAPI document are made."""

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

BODY = "gpujob.body"  # where the gate leaves the whole body of a POST in the scope
NONCE = "gpujob.nonce"  # and what a script or style of the page has to carry
JSON = "application/json"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}", re.ASCII)


class Conflict(SchedulerError):
    """It is there, but not in a state in which this can be done."""


class NotNow(SchedulerError):
    """It cannot be had now: as many are at it as may be, or something is not installed."""


# The first that fits; whatever else goes wrong for a reason that we know is the server's trouble.
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
    """A word of the path or of the query. ``schema``: JSON Schema."""

    name: str
    where: str  # "path" or "query"
    schema: Mapping[str, Any]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A route. ``does`` runs in a thread and may block; it raises SchedulerError, which `STATUS` turns into an answer.

    ``path`` in Starlette's words (``/api/jobs/{id}``): every name in braces is a plain number, else the answer is 404.
    ``answers``: status → (what it means, JSON Schema of the body, or None where it is no JSON). ``body``: JSON Schema of
    what is sent. ``media``: of a good answer that is no JSON; ``headers``: of a good answer, and what they say. ``page``: for people; its errors are pages, and it does not stand in the OpenAPI document.
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
    """A request, as a route is given it: past the gate, its path's numbers read."""

    request: Request
    source: Source
    numbers: Mapping[str, int]

    def query(self, name: str) -> str | None:
        """A word of the query, or None where it is not given."""
        found = self.request.query_params.get(name)
        return None if found is None else str(found)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A number of the query within bounds; one above is taken for the highest. Raises UsageError."""
        text = self.query(name)
        if text is None:
            return default
        found = number(text)
        if found is None or found < least:
            raise UsageError(f"{text[:40]!r} is not a whole number from {least} on", where=name)
        return min(found, most)

    @property
    def nonce(self) -> str:
        """What the Content-Security-Policy of this answer lets a script or style of the page carry."""
        return str(self.request.scope.get(NONCE, ""))

    def body(self) -> dict[str, Any]:
        """The JSON object that was sent. Raises UsageError."""
        try:
            found = json.loads(self.request.scope.get(BODY, b""), parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise UsageError("the body is no JSON", do='send an object, say {"command": ["true"]}') from None
        if not isinstance(found, dict):
            raise UsageError("the body is no JSON object", do='send an object, say {"command": ["true"]}')
        return found


def as_json(value: object, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of the API."""
    return Response(json.dumps(value), code, headers, media_type=JSON)


def number(text: str) -> int | None:
    """A plain number of ASCII digits, or None."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def status_of(error: SchedulerError) -> int:
    """The HTTP status that says what went wrong."""
    return next((code for kind, code in STATUS if isinstance(error, kind)), 500)
