"""The calls that a client may make to the scheduler of all users, and how they travel through its socket.

A call is a method of `SchedulerClient`. It travels as a length (4 bytes, big-endian) and a JSON object: ``{"call": NAME,
"with": {PARAMETER: VALUE}}``; its answer as ``{"value": …}`` or ``{"error": {…}}``. The annotations of the methods are the
types that both ends check. Who asks is not in the call: the kernel tells it (SO_PEERCRED).
"""

from __future__ import annotations

import functools
import inspect
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from scheduler.client import client as client_module
from scheduler.client.client import SchedulerClient
from scheduler.client.dry_run import Preview
from scheduler.client.outlook import Explanation, Outlook
from scheduler.client.overview import Overview
from scheduler.client.who import UserUse
from scheduler.core import errors
from scheduler.core.errors import SchedulerError
from scheduler.core.history import GpuSample, JobSample, PauseSpan
from scheduler.core.learned_needs import Advice
from scheduler.core.model_table import ModelTable
from scheduler.core.rights import Caller
from scheduler.core.usage_report import Report
from scheduler.system.typed_json import plain, typed

READING = frozenset({
    "alive", "gpus", "managed", "remembered", "settings", "overview", "jobs", "newest_in", "job", "newest", "pauses",
    "states", "known", "sessions", "select", "report", "shares", "first_submitted", "gpu_history", "job_history", "pause_spans",
    "ticks", "tallies", "last_id", "watched", "outlook", "explain", "preview", "needs",
})  # fmt: skip
CHANGING = frozenset({"ask_for", "submit", "reset", "watch", "new_token"})
CALLS = READING | CHANGING
# Texts of the store that a client may read by `remembered`.
MEMORIES = frozenset({"llm_config", "model_table", "cluster", "begun_by", "screen_folder", "jobs_file"})
LONGEST_CALL = 8 << 20  # bytes
LONGEST_ANSWER = 1 << 30
BUSY = "busy"  # code of the error for a connection too many: nothing was carried out
_TYPES = {
    **vars(client_module), "Overview": Overview, "GpuSample": GpuSample, "JobSample": JobSample, "PauseSpan": PauseSpan,
    "ModelTable": ModelTable, "Outlook": Outlook, "Explanation": Explanation, "Preview": Preview, "Advice": Advice, "Report": Report, "Caller": Caller, "UserUse": UserUse, "Iterable": Sequence, "Mapping": Mapping,
}  # fmt: skip
_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SchedulerError)
}


class Gone(Exception):
    """The other end has closed the connection, or it takes too long."""


@functools.cache
def types_of(call: str) -> Mapping[str, Any]:
    """Return parameter → type of a call; ``return`` → type of the result."""
    return get_type_hints(getattr(SchedulerClient, call), _TYPES)


def arguments_of(call: str, given: Any) -> dict[str, Any]:
    """Return the arguments of a call with their types. Raises ValueError if a value is missing or has a wrong type."""
    known = inspect.signature(getattr(SchedulerClient, call)).parameters
    if not isinstance(given, dict) or not set(given) <= set(known) - {"self", "by"}:  # the kernel tells who asks
        raise ValueError("unknown arguments")
    types = types_of(call)
    missing = [name for name, one in known.items() if name not in ("self", *given) and one.default is one.empty]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return {name: typed(value, types[name]) for name, value in given.items()}


def error_as_json(error: SchedulerError) -> dict[str, str]:
    """Return an error as a JSON value."""
    kind = type(error).__name__ if type(error) in _ERRORS.values() else "SchedulerError"
    return {"kind": kind, "what": error.what, "where": error.where, "do": error.do, "code": error.code}


def error_from_json(given: Mapping[str, Any]) -> SchedulerError:
    """Return the error that `error_as_json` wrote."""
    kind = _ERRORS.get(str(given.get("kind")), SchedulerError)
    made = SchedulerError.__new__(kind)  # some classes build their texts from other arguments
    SchedulerError.__init__(
        made, str(given.get("what")), where=str(given.get("where") or ""), do=str(given.get("do") or ""),
        code=str(given.get("code") or ""),
    )  # fmt: skip
    return made


def result_as_json(value: Any) -> Any:
    """Return an argument or the result of a call as a JSON value. An iterator becomes an array."""
    return plain([*value] if isinstance(value, Iterator) else value)


def result_from_json(call: str, value: Any) -> Any:
    """Return the result of a call with its type. Raises ValueError."""
    return typed(value, types_of(call)["return"])


def send(connection: socket.socket, data: bytes) -> None:
    """Send a call or an answer. Raises Gone."""
    try:
        connection.sendall(len(data).to_bytes(4, "big") + data)
    except OSError:
        raise Gone from None


def receive(connection: socket.socket, longest: int, deadline: float | None = None) -> bytes:
    """Receive a call or an answer. Raises Gone, also if it has more than ``longest`` bytes.

    ``deadline``: when all of it must have arrived (monotonic seconds); None: the timeout of the socket counts for each part.
    """
    length = int.from_bytes(_exactly(connection, 4, deadline), "big")
    if length > longest:
        raise Gone
    return _exactly(connection, length, deadline)


def _exactly(connection: socket.socket, number: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while number:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Gone
            connection.settimeout(left)
        try:
            part = connection.recv(min(number, 1 << 20))
        except OSError:
            raise Gone from None
        if not part:
            raise Gone
        parts.append(part)
        number -= len(part)
    return b"".join(parts)
