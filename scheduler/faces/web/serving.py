"""`gpujob web`: listens, tells how to get there, and serves until it is told to end."""

from __future__ import annotations

import uvicorn

from scheduler.desk import Desk
from scheduler.faces.web.app import make_app
from scheduler.faces.web.gate import Gate
from scheduler.faces.web.source import Source

PORT = 4004
LOOPBACK = "127.0.0.1"


def serve(state_file: str, *, host: str = LOOPBACK, port: int = PORT, config: str | None = None) -> int:
    """Serve the page until SIGINT or SIGTERM."""
    app = Gate(make_app(Source(Desk(state_file), config)))
    uvicorn.run(app, host=host, port=port, log_level="warning")
    return 0
