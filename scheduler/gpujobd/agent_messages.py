"""The messages between the scheduler of all users and the agents of the users.

To an agent: ``{"do": KIND, …}``. From an agent: ``{"say": KIND, …}``. An agent belongs to its user, who can make it say
anything: `observation_of` accepts only what has exactly the types of an observation, and bounds each value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from scheduler.core.check_spec import is_utf8
from scheduler.core.job import Process
from scheduler.core.observations import Ended, Gone, Lost, Missing, NeverRan, Observation, Started, Unclaimed
from scheduler.system.processes import real_uid, seen
from scheduler.system.typed_json import plain, typed

SAYS: dict[str, Any] = {
    kind.__name__.lower(): kind for kind in (Started, Ended, NeverRan, Unclaimed, Lost, Gone, Missing)
}
OTHERS = frozenset({"ready", "pong", "file", "trouble", "cannot", "warning", "acted", "found"})
MOST_MIB = 1 << 24  # 16 TiB
LONGEST_TEXT = 2000  # characters
MOST_WORDS = 4000
MOST_PROCESSES = 1024
# What a message that is not valid raises, or one that cannot be checked now (no free descriptor).
INVALID = (ValueError, RecursionError, OSError)
MOST_PID, MOST_TICKS = 1 << 22, 1 << 62


def said(observation: Observation) -> dict[str, Any]:
    """Return the message for an observation."""
    return {"say": type(observation).__name__.lower(), "value": plain(observation)}


def is_known(message: Any) -> bool:
    """Return whether a message is of a known kind."""
    return isinstance(message, dict) and (str(message.get("say")) in SAYS or str(message.get("say")) in OTHERS)


def attempt_of(message: Any) -> str | None:
    """Return the key of the attempt that a message is about, before anything else in it is read; None: of no attempt."""
    value = message.get("value") if isinstance(message, dict) else None
    kind = str(message.get("say")) if isinstance(message, dict) else ""
    if not isinstance(value, dict) or kind not in SAYS or SAYS[kind] is Gone:
        return None
    return f"{value.get('job')}.{value.get('attempt')}"


def observation_of(message: Any, uid: int, now: float) -> Observation | None:
    """Return the observation in a message of the agent of user ``uid``; None if the message is about something else.

    ``now``: seconds since 1970. Raises ValueError if the message is not valid.
    """
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    kind = SAYS.get(str(message.get("say")))
    if kind is None:
        return None
    found = typed(message.get("value"), kind)
    changes: dict[str, Any] = {}
    for name, value in ((name, getattr(found, name)) for name in kind.__slots__):
        if isinstance(value, str):
            changes[name] = value[:LONGEST_TEXT]
        elif isinstance(value, float):
            changes[name] = min(value, now) if math.isfinite(value) and value > 0 else now
        elif name in ("leftovers", "unsure"):
            changes[name] = tuple(own_processes(value, uid))
        elif name == "argv":
            changes[name] = tuple(word[:LONGEST_TEXT] for word in value[:MOST_WORDS])
    if isinstance(found, Started):
        process = next(iter(own_processes([found.process], uid)), None) if found.process is not None else None
        changes |= {"process": process, "place": None}
    if isinstance(found, Ended):
        if (found.exit_code is None) == (found.signal is None):
            raise ValueError("an ending has either an exit code or a signal")
        if not 0 <= (found.exit_code or 0) <= 255 or not 0 <= (found.signal or 0) <= 64:
            raise ValueError("no such exit code or signal")
        if found.failure is not None:
            told = found.failure
            changes["failure"] = replace(
                told, kind=told.kind[:100], line=told.line[:LONGEST_TEXT], hint=told.hint[:LONGEST_TEXT],
                peak_mib=_size(told.peak_mib), asked_mib=None, tried_mib=_size(told.tried_mib),
                free_mib=_size(told.free_mib), others_mib=_size(told.others_mib), oom="",
                error=told.error[:LONGEST_TEXT], good_run=None, good_at=None, differs=(),
            )  # fmt: skip
    if isinstance(found, Gone):
        changes.pop("key", None)
    result: Observation = replace(found, **changes)
    return result


def _size(mib: int | None) -> int | None:
    """Return a size that a log tells; None if no GPU is so large."""
    return mib if mib is not None and 0 <= mib <= MOST_MIB else None


def without_surrogates(value: Any) -> Any:
    """Return a JSON value with readable characters in place of lone surrogates, which the store could not record."""
    if isinstance(value, str):
        return value if value.isascii() or is_utf8(value) else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def of_user(uid: int) -> str:
    """Return how a problem begins that only this user and administrators see."""
    return f"user {uid}: "


def own_processes(processes: Iterable[Process], uid: int) -> list[Process]:
    """Return the processes that have ended or have the real user ``uid``: an agent may name no process of others."""
    return [process for process in [*processes][:MOST_PROCESSES] if _may_be_of(process, uid)]


def _may_be_of(process: Process, uid: int) -> bool:
    if not 0 < process.pid <= MOST_PID or not 0 <= process.ticks <= MOST_TICKS:
        return False
    found = seen(process.pid)
    if found is None or found.ticks != process.ticks:
        return True  # it has ended
    owner = real_uid(process.pid)
    return owner in (uid, None) or (owner == 0 and real_uid(found.parent) == uid)  # such as sudo, started by the user
