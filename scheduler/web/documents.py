"""Types of the JSON that only the HTTP API returns. For JSON of commands see `views/documents.py`."""

from __future__ import annotations

from typing import Annotated, Any, Optional, TypedDict

from scheduler.views.documents import (
    ExpectedDocument,
    GpuDocument,
    JobDocument,
    JobsDocument,
    NeedsAppliedDocument,
    NeedsDocument,
    PlanDocument,
    State,
    StatusDocument,
    Version,
    WhyDocument,
)
from scheduler.views.json_schema import Field
from scheduler.web.history import OF_GPU, OF_JOB

Number = Annotated[int, Field(minimum=0)]
When = Annotated[Optional[str], Field(format="date-time")]


class Error(TypedDict):
    """An error: the reason, and what to do."""

    error: str


class Made(TypedDict):
    """The job that was queued."""

    id: Number


class Acted(TypedDict):
    """The job's state after the request."""

    id: Number
    state: State


class Paused(TypedDict):
    """The GPUs that are paused after the request."""

    paused_gpus: list[Number]


class Queue(TypedDict):
    """Whether the queue is paused after the request."""

    paused: bool


class Gpus(TypedDict):
    """The GPUs of the scheduler."""

    schema: Version
    gpus: list[GpuDocument]


class PreviewAnswer(TypedDict):
    """Preview of a job: what would happen if it were submitted now."""

    schema: Version
    would: Annotated[str, Field(choices=("start", "wait", "never"))]
    gpus: list[Number]
    reason: Annotated[Optional[str], Field("Why the job would wait, or could never start.")]
    reason_code: Optional[str]
    need: Annotated[Optional[float], Field("Number of GPUs that the job needs.")]
    command: list[str]
    notes: list[str]
    expected: Annotated[
        Optional[ExpectedDocument],
        Field("When it would start and end; null if nothing is known, or without a scheduler."),
    ]


class StoryEvent(TypedDict):
    """An event of a job."""

    at: When
    kind: str
    detail: dict[str, Any]


class StoryAttempt(TypedDict):
    """An attempt of a job."""

    attempt: int
    started_at: When
    run_seconds: float
    gpus: list[Number]
    share: Annotated[float, Field("Share of each of its GPUs, 0 to 1.")]
    lost: bool
    log: Optional[str]


class Story(TypedDict):
    """The event history and the attempts of a job."""

    schema: Version
    events: list[StoryEvent]
    attempts: list[StoryAttempt]


# A point has the keys of the table in `history.py` from which it is made: `OF_GPU` or `OF_JOB`.
GpuPoint = TypedDict("GpuPoint", {"at": float, **dict.fromkeys(OF_GPU, Optional[float]), "paused": bool})  # type: ignore[misc]
JobPoint = TypedDict("JobPoint", {"at": float, **dict.fromkeys(OF_JOB, Optional[float])})  # type: ignore[misc]
PauseSpan = TypedDict("PauseSpan", {"gpu": Optional[int], "from": float, "to": Optional[float]})


class GpuCurve(TypedDict):
    """The curve of a GPU."""

    index: int
    samples: Annotated[list[GpuPoint], Field("Mean values of each step; null where nothing was measured.")]


class GpuHistory(TypedDict):
    """Curves of the GPUs (memory in bytes, load and share 0 to 1, °C, W) and pauses; times in seconds since 1970."""

    schema: Version
    gpus: list[GpuCurve]
    pauses: Annotated[
        list[PauseSpan],
        Field("Pauses; gpu is null for a pause of the whole queue, to is null while the pause lasts."),
    ]


class JobCurve(TypedDict):
    """The curve of an attempt."""

    attempt: int
    samples: Annotated[list[JobPoint], Field("Mean values of each step; null where nothing was measured.")]


class JobHistory(TypedDict):
    """Curves of the attempts of a job: memory in bytes, load 0 to 1, times in seconds since 1970."""

    schema: Version
    attempts: list[JobCurve]


# Name in the OpenAPI document → form of the JSON.
FORMS: dict[str, Any] = {
    "job": JobDocument, "jobs": JobsDocument, "status": StatusDocument, "error": Error, "made": Made, "acted": Acted, "paused": Paused,
    "queue": Queue, "gpus": Gpus, "preview": PreviewAnswer, "story": Story, "plan": PlanDocument, "why": WhyDocument, "needs": NeedsDocument, "needs_applied": NeedsAppliedDocument, "gpu_history": GpuHistory, "job_history": JobHistory,
}  # fmt: skip
