"""What a person may ask of a scheduler that runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Union

from scheduler.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cancel:
    """End these jobs: a waiting one at once, a running one with its whole tree."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Run these ended jobs again: same id, new attempt, new log; ``unless_done``: not those that ended well."""

    jobs: tuple[int, ...]
    unless_done: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """No new job on these GPUs; those that run go on."""

    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """These GPUs take jobs again; ``force``: also beside what others have on them now."""

    gpus: tuple[int, ...]
    force: bool = False


@dataclass(frozen=True, slots=True)
class PauseQueue:
    """Start nothing at all (``on``), or go on."""

    on: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell whoever asked: an exit code and one line for each thing asked."""

    row: int
    code: int
    lines: tuple[str, ...]


Request = Union[Cancel, Requeue, Pause, Resume, PauseQueue]
KINDS: dict[str, type[Any]] = {cls.__name__.lower(): cls for cls in (Cancel, Requeue, Pause, Resume, PauseQueue)}


def to_row(request: Request) -> tuple[str, dict[str, Any]]:
    """The request as (kind, arguments) for the store."""
    return type(request).__name__.lower(), asdict(request)


def from_row(kind: str, arguments: dict[str, Any]) -> Request:
    """The inverse of ``to_row``. Raises UsageError for a kind this version does not know."""
    cls = KINDS.get(kind)
    if cls is None:
        raise UsageError(f"unknown request {kind!r}", do=f"known: {', '.join(sorted(KINDS))}")
    known = {f.name for f in fields(cls)}
    request: Request = cls(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in arguments.items()
            if name in known
        }
    )
    return request
