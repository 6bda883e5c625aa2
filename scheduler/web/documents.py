"""The JSON of the HTTP API that no verb prints, one typed form a document (as `views/documents.py`)."""

from __future__ import annotations

from typing import Annotated, Any, Optional, TypedDict

from scheduler.views.documents import GpuDocument, JobDocument, JobsDocument, State, StatusDocument, Version
from scheduler.views.json_schema import Field
from scheduler.web.history import OF_GPU, OF_JOB

Number = Annotated[int, Field(minimum=0)]
When = Annotated[Optional[str], Field(format="date-time")]


class Error(TypedDict):
    """What went wrong, and what to do."""

    error: str


class Made(TypedDict):
    """The job that was made."""

    id: Number


class Acted(TypedDict):
    """The job, as it is now."""

    id: Number
    state: State


class Paused(TypedDict):
    """The GPUs that are paused now."""

    paused_gpus: list[Number]


class Queue(TypedDict):
    """Whether the queue is paused now."""

    paused: bool


class Gpus(TypedDict):
    """The GPUs."""

    schema: Version
    gpus: list[GpuDocument]


class PreviewAnswer(TypedDict):
    """What would happen."""

    schema: Version
    would: Annotated[str, Field(choices=("start", "wait", "never"))]
    gpus: list[Number]
    reason: Annotated[Optional[str], Field("Why it would wait, or never start.")]
    reason_code: Optional[str]
    need: Annotated[Optional[float], Field("GPUs it takes.")]
    command: list[str]
    notes: list[str]


class StoryEvent(TypedDict):
    """Something that happened."""

    at: When
    kind: str
    detail: dict[str, Any]


class StoryAttempt(TypedDict):
    """A run."""

    attempt: int
    started_at: When
    run_seconds: float
    gpus: list[Number]
    share: Annotated[float, Field("Of each GPU.")]
    lost: bool
    log: Optional[str]


class Story(TypedDict):
    """What happened to a job."""

    schema: Version
    events: list[StoryEvent]
    attempts: list[StoryAttempt]


# The keys of a point are those of the tables that make it.
GpuPoint = TypedDict("GpuPoint", {"at": float, **dict.fromkeys(OF_GPU, Optional[float]), "paused": bool})  # type: ignore[misc]
JobPoint = TypedDict("JobPoint", {"at": float, **dict.fromkeys(OF_JOB, Optional[float])})  # type: ignore[misc]
PauseSpan = TypedDict("PauseSpan", {"gpu": Optional[int], "from": float, "to": Optional[float]})


class GpuCurve(TypedDict):
    """A GPU."""

    index: int
    samples: Annotated[list[GpuPoint], Field("Means over a step; null where nothing was measured.")]


class GpuHistory(TypedDict):
    """Curves of the GPUs: memory in bytes, loads and shares 0 to 1, times in seconds since 1970."""

    schema: Version
    gpus: list[GpuCurve]
    pauses: Annotated[
        list[PauseSpan], Field("Pauses of a GPU, or of the queue (null); one goes on where there is no end.")
    ]


class JobCurve(TypedDict):
    """A run."""

    attempt: int
    samples: Annotated[list[JobPoint], Field("Means over a step; null where nothing was measured.")]


class JobHistory(TypedDict):
    """Curves of a job."""

    schema: Version
    attempts: list[JobCurve]


# Name in the OpenAPI document → form.
FORMS: dict[str, Any] = {
    "job": JobDocument, "jobs": JobsDocument, "status": StatusDocument, "error": Error, "made": Made, "acted": Acted, "paused": Paused,
    "queue": Queue, "gpus": Gpus, "preview": PreviewAnswer, "story": Story, "gpu_history": GpuHistory, "job_history": JobHistory,
}  # fmt: skip
