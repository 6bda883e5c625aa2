"""What every request has to pass, and what every answer carries."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.faces.web.calls import BODY


class Gate:
    """Stands before the application. Leaves the whole body of a POST in the scope (`BODY`), and ``gpujob.nonce``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            scope[BODY] = body
        await self.app(scope, receive, send)
