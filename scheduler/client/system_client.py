"""Client of the scheduler of all users (`gpujobd`): the calls of `SchedulerClient`, through its socket."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from scheduler.client import remote_calls
from scheduler.client.client import SchedulerClient
from scheduler.client.remote_calls import CALLS, LONGEST_ANSWER, READING, Gone, result_as_json
from scheduler.core.errors import NoDaemon, SchedulerError
from scheduler.core.job import Job, JobSpec
from scheduler.core.log_names import user_logs
from scheduler.core.model_table import ModelTable
from scheduler.core.placement import Fleet
from scheduler.core.rights import LEAST_UID
from scheduler.store.paths import SYSTEM_SOCKET, Places, name_of
from scheduler.system.typed_json import from_json, to_json
from scheduler.warm.client import peer_of

NOBODY = 65534  # user id of `nobody`, as which `gpujob system run` runs without a user gpujob; nobody signs in with it
ANSWER_S = 60.0  # for an answer; a request itself waits at most 5 s for the scheduler
RESTART_S = 15.0  # for a scheduler that is just starting again


class _Again(Exception):
    """The scheduler has not carried out the call, so it can be repeated."""


class SystemClient(SchedulerClient):
    """Client of the scheduler of all users. ``path``: its socket. Raises NoDaemon, SchedulerError."""

    shared = True
    to_start = "see gpujob system status"

    def __init__(self, path: str) -> None:
        self.path = path
        self.restart_s = RESTART_S
        self.places = Places(path)
        self._connection: socket.socket | None = None
        check_socket(path)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Make a call and return its result. Raises NoDaemon, or the error of the scheduler."""
        data = to_json({"call": name, "with": dict(arguments)})
        until = time.monotonic() + self.restart_s
        while True:
            try:
                return remote_calls.result_from_json(name, self._answer(name, data, again=time.monotonic() < until))
            except _Again:
                time.sleep(0.05)

    def _answer(self, name: str, data: bytes, *, again: bool) -> Any:
        """Return the answer to a call. Raises SchedulerError; _Again instead if ``again`` and the call can be repeated."""
        try:
            connection = self._connected()
            with contextlib.suppress(Gone):  # a scheduler with too many connections has answered, and closed this one
                remote_calls.send(connection, data)
            answer = from_json(remote_calls.receive(connection, LONGEST_ANSWER))
        except (Gone, ValueError):
            self.close()
            if name in READING and again:
                raise _Again from None  # it is just starting again; to ask twice changes nothing
            unsure = "" if name in READING else "; it is not known whether it has carried out the request"
            raise NoDaemon(
                f"the scheduler of this machine has closed the connection{unsure}", where=self.path,
                do="look at gpujob status before you repeat the command",
            ) from None  # fmt: skip
        if "error" not in answer:
            return answer["value"]
        error = remote_calls.error_from_json(answer["error"])
        if error.code == remote_calls.BUSY:
            self.close()
            if again:
                raise _Again  # it has not looked at the call
        raise error

    def _connected(self) -> socket.socket:
        if self._connection is None:
            try:
                made = _connect(self.path, self.restart_s)
                owner, peer = os.stat(self.path).st_uid, peer_of(made)[1]
            except OSError as error:
                raise NoDaemon(
                    f"the scheduler of this machine does not answer: {error.strerror}", where=self.path,
                    do="see systemctl status gpujobd",
                ) from None  # fmt: skip
            if peer not in (owner, 0):
                made.close()
                raise SchedulerError(f"user {name_of(peer)} answers in place of user {name_of(owner)}", where=self.path)
            self._connection = made
        return self._connection

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def submit(
        self,
        spec: JobSpec,
        environment: Mapping[str, str] | None,
        table: ModelTable,
        *,
        forgiving: bool = False,
        most: int | None = None,
    ) -> Job:
        """Add a job; see `SchedulerClient.submit`. The scheduler uses its own model table."""
        if not spec.log_dir and spec.output != "none":
            spec = replace(spec, log_dir=user_logs(os.path.expanduser("~")))
        given = {"spec": spec, "environment": environment, "table": ModelTable(), "forgiving": forgiving, "most": most}
        job: Job = self.call("submit", given)
        return job

    def sessions(self) -> list[Job]:
        """Return the own running jobs that have a terminal session."""
        found: list[Job] = self.call("sessions", {})
        return [job for job in found if job.spec.uid == os.getuid()]

    def fleet(self) -> Fleet | None:
        """Return a ledger without bookings of the GPUs; None if there are none."""
        gpus = self.gpus()
        return Fleet(gpus) if gpus else None

    def on_cluster(self) -> bool:
        """Return False: this scheduler uses only this machine."""
        return False

    def caller_folder(self) -> str:
        """Return a private folder of the user, for the socket of a job in the foreground."""
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        above = runtime if runtime.startswith("/") and os.path.isdir(runtime) else ""
        # Another user can take the name in /tmp; then the folder is in the home folder.
        folders = [f"{above}/gpujob" if above else f"/tmp/gpujob-{os.getuid()}", os.path.expanduser("~/.gpujob-calls")]  # noqa: S108
        for folder in folders:
            try:
                os.makedirs(folder, 0o700, exist_ok=True)
                found = os.lstat(folder)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return folder
        raise SchedulerError(
            f"no private folder for the socket of the job: {' and '.join(folders)} cannot be used",
            do="make one of them yours, with mode 700",
        )


def _connect(path: str, wait_s: float) -> socket.socket:
    """Return a connection. Wait while the scheduler is just starting again, or has many new connections. Raises OSError."""
    until = time.monotonic() + wait_s
    while True:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(ANSWER_S)
        try:
            made.connect(path)
            return made
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            made.close()
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)
        except OSError:
            made.close()
            raise


def check_socket(path: str) -> None:
    """Raise SchedulerError if the socket belongs to another person, or if other users could replace it.

    Commands send their variables to it. Only root can make the folder of the usual socket.
    """
    try:
        found, above = os.lstat(path), os.stat(os.path.dirname(path))
    except OSError as error:
        raise NoDaemon(f"there is no scheduler of this machine: {error.strerror}", where=path) from None
    if not stat.S_ISSOCK(found.st_mode):
        raise SchedulerError("this is no socket", where=path)
    trusted = found.st_uid in (0, os.getuid(), NOBODY) or found.st_uid < LEAST_UID or path == SYSTEM_SOCKET
    if not trusted:
        raise SchedulerError(
            f"this is no scheduler of the machine: it belongs to user {name_of(found.st_uid)}", where=path
        )
    if above.st_uid not in (0, found.st_uid) or above.st_mode & 0o022:
        raise SchedulerError(
            f"cannot trust this socket: other users can write to the folder {os.path.dirname(path)}", where=path
        )


def _remote(name: str) -> Callable[..., Any]:
    own = getattr(SchedulerClient, name)
    signature = inspect.signature(own)

    @functools.wraps(own)
    def call(self: SystemClient, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        return self.call(name, {key: result_as_json(value) for key, value in given.items()})

    return call


def _not_here(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(SchedulerClient, name))
    def call(self: SystemClient, *args: Any, **kwargs: Any) -> Any:
        raise SchedulerError(f"the scheduler of all users does not offer this ({name})", where=self.path)

    return call


for _name in CALLS - set(vars(SystemClient)):
    setattr(SystemClient, _name, _remote(_name))
for _name in (
    "_reading", "changes", "lines_read", "listed", "forget", "number_from_zero", "note", "settle_at_home"
):  # fmt: skip
    setattr(SystemClient, _name, _not_here(_name))
