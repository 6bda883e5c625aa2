"""The client of the page of a user: makes the calls with the rights of this user, in the process of the page."""

from __future__ import annotations

import inspect
import os
import pwd
from collections.abc import Callable, Mapping
from typing import Any

from scheduler.client.client import SchedulerClient
from scheduler.client.overview import News, Watch
from scheduler.client.remote_calls import CALLS
from scheduler.core.errors import Refused
from scheduler.gpujobd.calls import Calls
from scheduler.gpujobd.visible import job_news


class UserClient(SchedulerClient):
    """The client of the page of a user, with the rights of the user. For use in the process of the scheduler's service."""

    shared = True

    def __init__(self, calls: Calls, uid: int) -> None:
        super().__init__(calls.state_file)
        self.calls, self.uid = calls, uid

    def changes(self) -> Watch:
        """Return a `Watch` that shows what the user may see."""
        return _UserWatch(self)

    def submission_place(self) -> tuple[str, Mapping[str, str]] | None:
        """Return home folder and variables of the user."""
        try:
            user = pwd.getpwuid(self.uid)
        except KeyError:
            raise Refused("your user does not exist any more") from None
        environ = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
        return user.pw_dir, {"PATH": os.defpath, **environ}


class _UserWatch(Watch):
    """Changes of the store, as a user may see them."""

    def __init__(self, client: UserClient) -> None:
        super().__init__(client.places)
        self._client = client

    def look(self) -> News:
        """Return the changes since the last call."""
        news, calls = super().look(), self._client.calls
        caller = calls.caller_of(self._client.uid)
        hide = calls.settings().hide_commands
        news.jobs[:] = [job_news(caller, job, reason, hide) for job, reason in news.jobs]
        return news


def _as_user(name: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(SchedulerClient, name))

    def call(self: UserClient, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        return self.calls.call(self.calls.caller_of(self.uid), name, given)

    return call


for _name in CALLS:
    setattr(UserClient, _name, _as_user(_name))
