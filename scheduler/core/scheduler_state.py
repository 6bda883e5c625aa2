"""The scheduler's state: jobs in hand, bookings, the queue, and all else that decisions are made from."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.core.admission import Tenant
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import TICKS_A_SECOND, Holding, Job, JobState, Reason
from scheduler.core.observations import (
    Now,
)
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.policy import Policy
from scheduler.core.queue import Queue
from scheduler.core.runtime_estimate import Estimates

LEAST_GRACE_S = 3.0  # after a restart, when the SIGTERM may never have been sent


def never_missing(job: Job) -> str:
    """Every script is there (for worlds without a disk)."""
    return ""


def no_blocker(identity: str) -> Job | None:
    """No job repeats another (for worlds without a store)."""
    return None


@dataclass(slots=True)
class SchedulerState:
    """All that decisions are made from. Only ``decide`` changes it.

    ``fetch`` gives the whole Job for an id (the store's row), or None; ``missing`` says what a job about to
    start lacks on disk, or an empty text. Both only read.
    """

    fleet: Fleet
    fetch: Callable[[int], Job | None]
    policy: Policy = field(default_factory=Policy)
    missing: Callable[[Job], str] = never_missing
    blocker: Callable[[str], Job | None] = no_blocker
    queue: Queue = field(default_factory=Queue)
    live: dict[int, Job] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    parked: dict[int, str] = field(default_factory=dict)  # waiting, but not for room: id → reason code
    children: dict[int, list[int]] = field(default_factory=dict)
    queue_paused: bool = False
    pauses: Pauses = field(default_factory=Pauses)  # who changed what since which picture of the state file
    front: int = 0  # the lowest place given out: whoever comes first is put before it
    may_start: bool = True  # False where requests are carried out without a daemon
    estimates: Estimates = field(default_factory=Estimates)
    timers: list[tuple[float, str, int, int]] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)  # STOPPING jobs that were sent SIGKILL: since when (mono)
    leader_ended: set[int] = field(default_factory=set)  # STOPPING jobs whose leader is gone, others not
    unbooked: set[str] = field(default_factory=set)  # attempts found in the store with GPUs that others have booked
    told: dict[int, str] = field(default_factory=dict)  # what was last said of each GPU: a verdict's code, or `trouble`

    def __post_init__(self) -> None:
        self.fleet.admission.tenants = self.tenants

    def tenants(self, gpu: int) -> list[Tenant]:
        """The attempts of ours that have parts of a GPU, also those whose leader has ended."""
        found = [
            Tenant(job.attempt_key, job.id, job.need.parts, job.spec.vram_mib or 0, job.started_at)
            for job in self.live.values()
            if gpu in job.gpus
        ]
        found += [
            Tenant(held.key, held.job, held.need.parts, held.vram_mib, 0.0)
            for held in self.holdings.values()
            if gpu in held.gpus
        ]
        return found

    def next_timer(self) -> float | None:
        """The ``mono`` time at which something falls due by itself."""
        due = [self.timers[0][0]] if self.timers else []
        look = self.fleet.admission.next_look
        return min([*due, look], default=None) if look is not None else (due[0] if due else None)

    def waiting(self) -> int:
        """How many jobs wait, for whatever reason."""
        return len(self.queue) + len(self.parked)

    def class_reasons(self) -> dict[str, Reason]:
        """Why each class of waiting jobs is not served, as placement sees it now."""
        if self.queue_paused:
            paused = Reason("paused", "the whole queue is paused; `gpujob queue resume` lets it go on")
            return {kind.key: paused for kind in self.queue.classes()}
        return {kind.key: self.fleet.why_not(kind) for kind in self.queue.classes()}

    def blocked(self, reasons: Mapping[str, Reason]) -> dict[str, int]:
        """How many jobs wait for each reason, by its code; ``reasons``: those of the classes. Costs a look at each parked job."""
        found = Counter(self.parked.values())
        for kind, number in self.queue.sizes().items():
            found[reasons[kind.key].code] += number
        return dict(found)

    def adopt(self, job: Job, now: Now) -> None:
        """Count a STARTING, RUNNING or STOPPING job read from the store, with its GPUs."""
        try:
            self.fleet.take(job.need, job.gpus, job.spec.vram_mib or 0)
        except ValueError:  # a booking that cannot be: the job runs all the same, and must not keep us from all others
            self.unbooked.add(job.attempt_key)
            job.notes = (*job.notes, f"its GPUs ({gpu_ids_text(job.gpus)}) are booked by others as well")
        self.live[job.id] = job
        self._watch_limit(job, now)
        if job.state is JobState.STOPPING:
            asked = job.stop_at if job.stop_at is not None else now.wall
            left = min(self.policy.kill_grace_s, max(LEAST_GRACE_S, asked + self.policy.kill_grace_s - now.wall))
            self.at(now.mono, "term", job)  # whoever was killed before it may not have sent the SIGTERM
            self.at(now.mono + left, "kill", job)

    def hold(self, holding: Holding) -> None:
        """Count GPUs held by processes that outlived their job."""
        try:
            self.fleet.take(holding.need, holding.gpus, holding.vram_mib)
        except ValueError:
            self.unbooked.add(holding.key)
        self.holdings[holding.key] = holding

    def at(self, mono: float, kind: str, job: Job) -> None:
        """Remember that something falls due."""
        heapq.heappush(self.timers, (mono, kind, job.id, job.attempt))

    def _watch_limit(self, job: Job, now: Now) -> None:
        if job.spec.time_limit_s is not None and job.started_at is not None:
            ran = now.wall - job.started_at
            if job.process is not None and now.since_boot is not None:  # the clock may have been set meanwhile
                ran = now.since_boot - job.process.ticks / TICKS_A_SECOND
            self.at(now.mono + max(0.0, job.spec.time_limit_s - max(0.0, ran)), "limit", job)
