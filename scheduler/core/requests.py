"""Requests of users to the scheduler, and its answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from scheduler.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cancel:
    """End these jobs: waiting jobs immediately, running jobs with all their processes."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Run these ended jobs again: same id, new attempt, new log. ``unless_done``: leave out jobs in state DONE.

    ``after``: for each job, the number of the last attempt that the user knows. If the job has had a later attempt, it
    is not run again. So several equal requests at the same time start only one attempt. If ``after`` is empty, each job
    is run again.
    """

    jobs: tuple[int, ...]
    unless_done: bool = False
    after: tuple[int, ...] = ()

    def seen(self) -> dict[int, int]:
        """Return ``after`` as a mapping: job id → number of the last attempt that the user knows."""
        return dict(zip(self.jobs, self.after, strict=False))


@dataclass(frozen=True, slots=True)
class Pause:
    """Start no new jobs on these GPUs. Running jobs continue."""

    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Start jobs on these GPUs again. ``force``: the present foreign processes there no longer keep jobs away."""

    gpus: tuple[int, ...]
    force: bool = False


@dataclass(frozen=True, slots=True)
class PauseQueue:
    """Pause the whole queue (``on``), so that no job starts, or resume the queue."""

    on: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """Do not start these waiting jobs until they are released."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Release held jobs: they may start again when there is room."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class First:
    """Start these waiting jobs before all other jobs, in this order."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap the priorities and places of two waiting jobs."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """The request to change waiting jobs. ``changes``: field of JobSpec → new value.

    ``needs``: the new need of each job, as the fields of ResourceRequest; empty if the needs stay the same.
    """

    jobs: tuple[int, ...]
    changes: dict[str, Any]
    needs: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StateEdited:
    """An edit of the state file by a user. It is applied immediately and never stored as a request.

    ``gpus``: the GPUs that are to be paused; all other GPUs are to be resumed. ``paused``: whether the whole queue is
    to be paused. If the file lacks the key for ``gpus`` or ``paused``, the field is None, and the pauses that it stands
    for stay unchanged. ``read``: the revision of the file that the user edited; None if the file has no revision.
    """

    gpus: tuple[int, ...] | None
    paused: bool | None
    read: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the request in row ``row``: an exit code, and one line for each job or GPU."""

    row: int
    code: int
    lines: tuple[str, ...]


JobsRequest = Cancel | Requeue | Hold | Release | First | Swap | Edit  # each has ``jobs``
GpuRequest = Pause | Resume | PauseQueue
Request = JobsRequest | GpuRequest | StateEdited
KINDS: dict[str, type[Any]] = {cls.__name__.lower(): cls for cls in (*get_args(JobsRequest), *get_args(GpuRequest))}


def to_row(request: Request) -> tuple[str, dict[str, Any]]:
    """Return the request as (kind, arguments) for the store."""
    return type(request).__name__.lower(), asdict(request)


def from_row(kind: str, arguments: dict[str, Any]) -> Request:
    """Return the request that ``to_row`` stored. Raises UsageError for a kind that this version does not know."""
    cls = KINDS.get(kind)
    if cls is None:
        raise UsageError(f"unknown request {kind!r}", do=f"known: {', '.join(sorted(KINDS))}")
    known = {f.name for f in fields(cls)}
    request: Request = cls(
        **{
            name: _as_tuples(value) if isinstance(value, list) else value
            for name, value in arguments.items()
            if name in known
        }
    )
    return request


def _as_tuples(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_as_tuples(item) if isinstance(item, list) else item for item in value)
