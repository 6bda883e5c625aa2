"""The Starlette application: a route for each row of the route tables, and answers for errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from scheduler.core.errors import SchedulerError, StoreTrouble, UsageError, did_you_mean
from scheduler.core.secrets import without_secrets
from scheduler.system.terminal_text import safe
from scheduler.web import api, pages
from scheduler.web.event_stream import Hub
from scheduler.web.routes import Ask, Call, number, status_of
from scheduler.web.source import Source

# Highest number of requests of each kind that run at the same time. A slow kind does not delay the other kinds.
AT_ONCE = {"page": 8, "change": 16, "reading": 24}


def all_calls() -> tuple[Call, ...]:
    """Return all routes: those of the HTTP API and those of the pages."""
    return (*api.CALLS, *pages.CALLS)


def make_app(source: Source, more: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the application, without the gate. The caller puts the gate (`middleware.Gate`) in front of it.

    ``more``: further routes; they are matched before the routes of the tables.
    """
    app = Starlette(
        routes=[*more, *(Route(call.path, _endpoint(call), methods=[call.method]) for call in all_calls())],
        exception_handlers={HTTPException: _refuse, Exception: _defect},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False
    app.state.source = source
    app.state.lanes = {}
    app.state.hub = Hub(source.client)  # its close() ends all event streams
    return app


def problem(code: int, text: str) -> Response:
    """Return an error in the form of the API, ``{"error": "…"}``: secrets are masked, control characters escaped."""
    return Response(json.dumps({"error": safe(without_secrets(text))}), code, media_type="application/json")


def check_query(call: Call, request: Request) -> None:
    """Raise UsageError if the query has a parameter that this route does not know, or the same parameter twice."""
    known = [parameter.name for parameter in call.parameters if parameter.where == "query"]
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            do = f"known: {', '.join(known)}" if known else "this address takes no parameters"
            raise UsageError(f"unknown parameter {name[:40]!r}{did_you_mean(name, known)}", do=do)
        if name in seen:
            raise UsageError(f"the parameter {name} is given twice", do="give it once")
        seen.add(name)


def _kind(call: Call) -> str:
    return "page" if call.page else "change" if call.method == "POST" else "reading"


async def _in_thread(ask: Ask, kind: str, does: Callable[..., Response], *words: object) -> Response:
    lanes: dict[str, CapacityLimiter] = ask.request.app.state.lanes
    lane = lanes.get(kind) or lanes.setdefault(kind, CapacityLimiter(AT_ONCE[kind]))
    return await to_thread.run_sync(does, ask, *words, limiter=lane)


def _answer(call: Call, ask: Ask) -> Response:
    """Call the route's function and return its answer. Raises SchedulerError.

    First checks that the state folder exists. Without this check, the page would show a scheduler without jobs after
    the state folder was removed.
    """
    if not call.path.startswith("/static/"):
        ask.source.check_there()
    return call.does(ask)


def _endpoint(call: Call) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        found = {name: number(text) for name, text in request.path_params.items()}
        numbers = {name: value for name, value in found.items() if value is not None}
        ask = Ask(request, request.app.state.source, numbers)
        if len(numbers) < len(found):
            return await _said(ask, call.page, 404, "not found: an id is a whole number")
        try:
            if not call.page:
                check_query(call, request)
            return await _in_thread(ask, _kind(call), partial(_answer, call))
        except SchedulerError as error:
            if not isinstance(error, StoreTrouble) and error.where == ask.source.client.places.state_file:
                error.where = ""  # the page shows only one scheduler, so its state file need not be named
            return await _said(ask, call.page, status_of(error), str(error))

    return run


async def _said(ask: Ask, page: bool, code: int, text: str) -> Response:
    """Return an error answer: an HTML page if ``page`` is true, else JSON."""
    return await _in_thread(ask, "page", pages.trouble, code, text) if page else problem(code, text)


async def _defect(_request: Request, _error: Exception) -> Response:
    """Return the answer to a request that failed with an unexpected exception. The gate logs the exception."""
    return problem(500, "internal error in gpujob; please report it with the log of gpujob web")


async def _refuse(request: Request, error: HTTPException) -> Response:
    people = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
    answer = await _said(Ask(request, request.app.state.source, {}), people, error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    if error.status_code == 405:  # one path may have several routes, each with its own methods
        here = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        answer.headers["Allow"] = ", ".join(sorted({method for route in here for method in route.methods or ()}))
    return answer
