"""Placement classes: groups of jobs that placement treats alike, and the reasons why jobs of a class wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.core.allowed import Allowed, allowed_text
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, Reason


@dataclass(frozen=True, slots=True)
class PlacementClass:
    """The jobs with the same need, allowed GPUs (None: any) and memory per GPU: if one job fits, each of them fits.

    ``user``: in a scheduler of several users, the user of the jobs: users take turns, and have limits.
    """

    need: ResourceRequest
    allowed: Allowed = None
    vram_mib: int = 0
    user: str = ""

    @property
    def key(self) -> str:
        """The class as text. The store's table of reasons uses this text as key."""
        allowed = "*" if self.allowed is None else allowed_text(self.allowed)
        owner = f"/{self.user}" if self.user else ""
        return f"{self.need.count}x{self.need.parts}/{allowed}/{self.vram_mib}{owner}"


class WaitingJob(NamedTuple):
    """The facts about a waiting job that determine its place in the queue, if no estimates are used (`Order.key`)."""

    id: int
    kind: PlacementClass
    priority: int
    order: int
    submitted_at: float


def class_of(job: Job) -> PlacementClass:
    """Return the placement class of a job."""
    return PlacementClass(job.need, job.allowed if job.need.count else None, job.spec.vram_mib or 0, job.spec.user)


def reason_with_place(reason: Reason, before: int) -> Reason:
    """Return why a job waits. ``before``: the number of jobs of the same class that come before it in the queue.

    ``reason``: why the first job of the class waits. If ``before`` is 0, this reason is returned unchanged.
    """
    if before <= 0:
        return reason
    is_are = "is" if before == 1 else "are"
    jobs = "job" if before == 1 else "jobs"
    text = f"{before} {jobs} with the same request {is_are} before it; the first of them: {reason.sentence}"
    return replace(reason, code="behind", sentence=text)
