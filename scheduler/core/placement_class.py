"""Placement classes: groups of jobs that placement treats alike, and the reasons why jobs of a class wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.core.allowed import Allowed, allowed_text
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, Reason
from scheduler.core.topology import Link, link_of


@dataclass(frozen=True, slots=True)
class PlacementClass:
    """The jobs with the same need, allowed GPUs (None: any) and memory per GPU: if one job fits, each of them fits.

    ``user``: in a scheduler of several users, the user of the jobs: users take turns, and have limits. ``link``: the
    GPUs of a job must be joined pairwise at least as well as this.
    """

    need: ResourceRequest
    allowed: Allowed = None
    vram_mib: int = 0
    user: str = ""
    link: Link = Link.SYSTEM

    @property
    def key(self) -> str:
        """The class as text. The store's table of reasons uses this text as key."""
        allowed = "*" if self.allowed is None else allowed_text(self.allowed)
        owner = f"/{self.user}" if self.user else ""
        link = f"/link={self.link.word}" if self.link.word else ""
        profile = f"/mig={self.need.profile}" if self.need.profile else ""
        return f"{self.need.count}x{self.need.parts}/{allowed}/{self.vram_mib}{owner}{link}{profile}"


class WaitingJob(NamedTuple):
    """The facts about a waiting job that determine its place in the queue, if no estimates are used (`Order.key`)."""

    id: int
    kind: PlacementClass
    priority: int
    order: int
    submitted_at: float


def class_of(job: Job) -> PlacementClass:
    """Return the placement class of a job."""
    return class_for(job.need, job.allowed, job.spec)


def class_for(need: ResourceRequest, allowed: Allowed, spec: JobSpec) -> PlacementClass:
    """Return the placement class of a job with this need, these allowed GPUs and this spec."""
    return made_class(need, allowed, spec.vram_mib or 0, spec.user, spec.link)


def made_class(need: ResourceRequest, allowed: Allowed, vram_mib: int, user: str, link: str) -> PlacementClass:
    """Return the placement class of a job with these values. ``link``: the word of a link, which one GPU does not need."""
    kind = PlacementClass(need, allowed if need.count else None, vram_mib, user)
    return replace(kind, link=link_of(link)) if link and need.count > 1 and not need.by_name else kind


def reason_with_place(reason: Reason, before: int) -> Reason:
    """Return why a job waits. ``before``: the number of jobs of the same class that come before it in the queue.

    ``reason``: why the first job of the class waits. If ``before`` is 0, this reason is returned unchanged.
    """
    if before <= 0:
        return reason
    if before == 1:
        text = f"1 job with the same request is before it, and waits too: {reason.sentence}"
    else:
        text = f"{before} jobs with the same request are before it; the first of them waits: {reason.sentence}"
    return replace(reason, code="behind", sentence=text)


def remedy(kind: PlacementClass) -> str:
    """Return what a user can change in a request that this machine can never fulfill."""
    if not kind.need.count:
        return "request fewer slots"
    ways = ["request less" if not kind.need.instance else "request another MIG instance, or a share of a GPU"]
    if kind.link is not Link.SYSTEM:
        ways.append("leave out link")
    if kind.allowed is not None:
        ways.append("allow other GPUs")
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
