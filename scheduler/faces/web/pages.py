"""The pages for people: whole without scripts, and kept up to date by one that fetches them again."""

from __future__ import annotations

from starlette.responses import HTMLResponse, Response

from scheduler.faces.web.calls import Ask, Call


def _now(ask: Ask) -> Response:
    return HTMLResponse("<!doctype html><title>gpujob</title>")


def trouble(ask: Ask, code: int, text: str) -> Response:
    """What went wrong, as a page."""
    return HTMLResponse("<!doctype html><title>gpujob</title>", code)


CALLS = (Call("GET", "/", _now, "What there is now.", page=True),)
