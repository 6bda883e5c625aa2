"""The HTTP API for programs and for the page's own scripts."""

from __future__ import annotations

import json

from starlette.responses import Response

from scheduler.faces.render import status_json
from scheduler.faces.web.calls import JSON, Ask, Call


def _json(value: object, code: int = 200) -> Response:
    return Response(json.dumps(value), code, media_type=JSON)


def _status(ask: Ask) -> Response:
    return _json(status_json(ask.source.overview()))


CALLS = (Call("GET", "/api/status", _status, "What there is now, as `gpujob status --json` has it."),)
