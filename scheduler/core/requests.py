"""What a person may ask of a scheduler that runs."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, get_args

from scheduler.core.errors import UsageError

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from scheduler.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Cancel:
    """End these jobs: a waiting one at once, a running one with its whole tree."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Run these ended jobs again: same id, new attempt, new log. ``unless_done``: only those that did not end with DONE.

    ``after``: for each job, the number of the attempt that the user saw end. A job with a later attempt is not started again,
    so that several users who ask at the same time start one attempt. Empty: each job is started again, whatever its attempt.
    """

    jobs: tuple[int, ...]
    unless_done: bool = False
    after: tuple[int, ...] = ()

    def seen(self) -> dict[int, int]:
        """Job id → number of the attempt that the user saw end, for the first ``len(after)`` of the jobs."""
        return dict(zip(self.jobs, self.after, strict=False))


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
class Hold:
    """Do not start these waiting jobs until they are released."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Let held jobs wait for room again."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class First:
    """Start these waiting jobs before all others, in this order."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Let two waiting jobs change places."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """Change waiting jobs: ``changes`` holds fields of JobSpec; ``needs`` each job's new need as (count, parts)."""

    jobs: tuple[int, ...]
    changes: dict[str, Any]
    needs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StateEdited:
    """Somebody saved the state file: just these GPUs are to be paused. Never stored: the file itself is the wish.

    None for what the file does not say: that stays as it is. ``read``: the revision of the picture that was edited, None if the file does not say.
    """

    gpus: tuple[int, ...] | None
    paused: bool | None
    read: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell whoever asked: an exit code and one line for each thing asked."""

    row: int
    code: int
    lines: tuple[str, ...]


JobsRequest = Cancel | Requeue | Hold | Release | First | Swap | Edit  # each has ``jobs``
GpuRequest = Pause | Resume | PauseQueue
Request = JobsRequest | GpuRequest | StateEdited
KINDS: dict[str, type[Any]] = {cls.__name__.lower(): cls for cls in (*get_args(JobsRequest), *get_args(GpuRequest))}


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
            name: _as_tuples(value) if isinstance(value, list) else value
            for name, value in arguments.items()
            if name in known
        }
    )
    return request


def _as_tuples(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_as_tuples(item) if isinstance(item, list) else item for item in value)
