"""The web page of the scheduler of all users, with the rights of the service user.

A child of the scheduler: ``python -I -m scheduler.gpujobd.page SETTINGS``. Each user signs in with a token of their own,
and has an application of their own, whose client may do what the user may do (`user_client.py`).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.client.outlook import Outlook
from scheduler.core.errors import SchedulerError
from scheduler.daemon.helper_child import LIFE, PORT_TAKEN
from scheduler.gpujobd.calls import Calls
from scheduler.gpujobd.front import limit_memory
from scheduler.gpujobd.user_client import UserClient
from scheduler.store.paths import Places
from scheduler.system.typed_json import from_json, typed
from scheduler.web.app import make_app
from scheduler.web.computed import Computed
from scheduler.web.event_stream import Hub
from scheduler.web.middleware import USER
from scheduler.web.server import PortTaken, Way, serve_users
from scheduler.web.source import Source
from scheduler.web.user_keys import read_tokens, tokens_file

MOST_OF_A_USER = 32  # requests at the same time


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the page. ``state_file``: of the scheduler; ``port``: on 127.0.0.1."""

    state_file: str
    port: int


class UserApps:
    """The applications of the users. To the server it is one application and one hub of event streams.

    Each user has a limited number of requests at the same time, event streams included.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._apps: dict[int, Starlette] = {}
        self._outlooks: Computed[Outlook] = Computed()
        self._open: Counter[int] = Counter()

    def app_of(self, uid: int) -> ASGIApp:
        """Return the application of a user."""
        if uid not in self._apps:
            self._apps[uid] = make_app(Source(UserClient(self._calls, uid), outlooks=self._outlooks))
        return self._apps[uid]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        uid = scope[USER]
        if self._open[uid] >= MOST_OF_A_USER:
            text = f"you have {MOST_OF_A_USER} requests at the same time; try again later"
            await JSONResponse({"error": text}, 503)(scope, receive, send)
            return
        self._open[uid] += 1
        try:
            await self.app_of(uid)(scope, receive, send)
        finally:
            self._open[uid] -= 1

    def end_users(self, uids: set[int]) -> None:
        """End the event streams of users whose tokens have changed."""
        for uid in uids & self._apps.keys():
            self._hub(uid).end_all()

    def close(self) -> None:
        """End all event streams."""
        for uid in self._apps:
            self._hub(uid).close()

    def _hub(self, uid: int) -> Hub:
        hub: Hub = self._apps[uid].state.hub
        return hub


def main() -> int:
    """Run the page. Return the exit code."""
    settings = typed(from_json(sys.argv[1]), Settings)
    limit_memory()
    way = Way("127.0.0.1", settings.port, "", "", False, (), int(os.environ.pop(LIFE)))
    path = tokens_file(Places(settings.state_file))
    apps = UserApps(Calls(settings.state_file, os.environ))
    try:
        return serve_users(apps, way, lambda: read_tokens(path))
    except PortTaken as error:
        print(f"{PORT_TAKEN}{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except SchedulerError as error:
        print(f"! {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
