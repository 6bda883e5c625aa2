"""The requests of an offer as data: an interface shows them, and sends them back if the user accepts the offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.job_options import EDITABLE
from scheduler.core.requests import Cancel, Edit, First, PauseQueue, Release, Request, Resume

CANCEL, EDIT, FIRST, QUEUE_RESUME, RELEASE, RESUME = "cancel", "edit", "first", "queue resume", "release", "resume"
VERBS = (CANCEL, EDIT, FIRST, QUEUE_RESUME, RELEASE, RESUME)
OPTIONS = ("after", "after_ok", "allowed", "gpus", "link")  # options that an offer may change


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """A request of an offer.

    ``verb``: one of `VERBS`; ``jobs``: the jobs that it is about; ``gpus``: the GPUs that it resumes; ``options``: the
    options that it changes, as texts of `gpujob edit`.
    """

    verb: str
    jobs: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def offered(request: Request) -> OfferedRequest:
    """Return a request of an offer as data. Raises ValueError for a request that no offer makes."""
    match request:
        case Cancel(jobs):
            return OfferedRequest(CANCEL, jobs)
        case First(jobs):
            return OfferedRequest(FIRST, jobs)
        case Release(jobs):
            return OfferedRequest(RELEASE, jobs)
        case Edit(jobs, changes):
            return OfferedRequest(
                EDIT, jobs, (), {EDITABLE[name].name: _text(value) for name, value in changes.items()}
            )
        case Resume(gpus, False):
            return OfferedRequest(RESUME, (), gpus)
        case PauseQueue(False):
            return OfferedRequest(QUEUE_RESUME)
    raise ValueError(f"no offer makes this request: {request}")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
