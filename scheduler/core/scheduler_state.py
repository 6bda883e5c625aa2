"""The scheduler's state in memory, from which decisions are made: running jobs, bookings, queue, timers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.core.config import Config
from scheduler.core.gpu import WHOLE, gpu_ids_text
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.job import TICKS_A_SECOND, Holding, Job, JobState, Reason
from scheduler.core.neighbours import Neighbours, Sharing
from scheduler.core.observations import (
    Ended,
    Lost,
    Now,
)
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.policy import Policy, policy_of
from scheduler.core.queue import Queue
from scheduler.core.runtime_estimate import Estimates
from scheduler.core.take_turns import why_others_first
from scheduler.core.tenants import Tenant, user_key
from scheduler.core.users import Users

OF_ROOM = frozenset({"no-room", "no-wide-room", "reserved"})  # reasons to wait that depend on whose turn it is
LEAST_GRACE_S = 3.0  # from SIGTERM to SIGKILL after a restart: the first SIGTERM may never have been sent


def never_missing(job: Job) -> str:
    """Return an empty text, which means that all files that the job needs exist.

    This is the default of ``SchedulerState.missing``, for a scheduler state without access to the disk.
    """
    return ""


def no_blocker(identity: str) -> Job | None:
    """Return None, which means that there is no job with the same identity.

    This is the default of ``SchedulerState.blocker``, for a scheduler state without a store.
    """
    return None


@dataclass(slots=True)
class OpenEnd:
    """The end of an attempt that is decided on after the next reading of the GPUs, because this may show its cause.

    ``since``: the reading must have begun at this time or later (monotonic seconds).
    """

    end: Ended | Lost
    since: float


@dataclass(slots=True)
class SchedulerState:
    """The data that ``decide`` reads and changes: GPUs, jobs, queue, timers, settings.

    Three fields are functions, which change nothing. ``fetch``: returns the stored job with this id; None if there is
    no such job. ``missing``: returns a sentence about a file or folder that the job lacks; empty if the job lacks
    nothing. ``blocker``: returns a job with this identity that waits, runs or is done; None if there is no such job.
    """

    fleet: Fleet
    fetch: Callable[[int], Job | None]
    policy: Policy = field(default_factory=lambda: policy_of(Config()))
    missing: Callable[[Job], str] = never_missing
    blocker: Callable[[str], Job | None] = no_blocker
    queue: Queue = field(default_factory=Queue)
    live: dict[int, Job] = field(default_factory=dict)  # STARTING, RUNNING and STOPPING jobs
    holdings: dict[str, Holding] = field(default_factory=dict)  # of leftover processes, by attempt key
    parked: dict[int, str] = field(default_factory=dict)  # waiting jobs outside the queue: id → reason code
    children: dict[int, dict[int, None]] = field(default_factory=dict)  # job → jobs that depend on it, in order
    queue_paused: bool = False
    pauses: Pauses = field(default_factory=Pauses)  # by verbs and by edits of the state file
    front: int = 0  # the lowest ``order`` of a job so far; `gpujob first` uses a lower one
    may_start: bool = True  # False: requests are carried out without a daemon
    estimates: Estimates = field(default_factory=Estimates)
    timers: list[tuple[float, str, int, int]] = field(default_factory=list)  # heap: mono, kind, job, attempt
    killed: dict[int, float] = field(default_factory=dict)  # STOPPING jobs → time of their first SIGKILL (``mono``)
    leader_ended: set[int] = field(default_factory=set)  # STOPPING jobs: only the main process ended
    unbooked: set[str] = field(default_factory=set)  # attempts whose GPUs could not be booked: other jobs have them
    # STARTING jobs that an engine has, in this order → GPUs booked for them until the engine tells its choice; None:
    # they do not fit now, and wait in the engine's queue.
    released: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    sharing: Sharing | None = None  # None: bookings are not shared with other schedulers of this machine
    users: Users | None = None  # with jobs of several users
    faults: dict[str, GpuFault] = field(default_factory=dict)  # UUID of a GPU → its fault in this boot
    open_ends: dict[int, OpenEnd] = field(default_factory=dict)  # by job, which is still RUNNING or STARTING
    strays: set[tuple[str, int]] = field(
        default_factory=set
    )  # (attempt, GPU outside its allocation) of the last reading
    told: dict[int, str] = field(default_factory=dict)  # GPU → last reported verdict code, or `trouble`

    def __post_init__(self) -> None:
        self.watch_admission()

    def bound_to(self, job: Job) -> str:
        """Return the node of a cluster that must run a released job; empty if the engine may choose the node.

        The engine knows no pauses, so while GPUs are paused, it may choose only the GPUs of the node.
        """
        gpus = self.released.get(job.id)
        return self.fleet.gpus[gpus[0]].node if gpus and self.fleet.paused_mask & self.fleet.all_mask else ""

    def watch_admission(self) -> None:
        """Give the admission of the fleet access to the allocations and to the faults of the GPUs."""
        self.fleet.admission.faults = self.faults
        self.fleet.admission.tenants, self.fleet.admission.booked = self.tenants, self.is_booked

    def is_booked(self, gpu: int) -> bool:
        """Return whether a part of ``gpu`` is booked."""
        return self.fleet.free[gpu] < WHOLE

    def tenants(self, gpu: int) -> list[Tenant]:
        """Return the attempts with an allocation on ``gpu``, including ended attempts with leftover processes."""
        found = [
            Tenant(job.attempt_key, job.id, job.need.parts, job.spec.vram_mib or 0, job.started_at, job.spec.user)
            for job in self.live.values()
            if gpu in job.gpus
        ]
        found += [
            Tenant(held.key, held.job, held.need.parts, held.vram_mib, 0.0)
            for held in self.holdings.values()
            if gpu in held.gpus
        ]
        if self.sharing is not None:
            found += [
                Tenant(user_key(one.user), 0, one.parts, one.memory_mib, 0.0)
                for one in self.sharing.outside.get(gpu, ())
            ]
        return found

    def take_neighbours(self, neighbours: Neighbours) -> list[int]:
        """Take in what other schedulers of this machine have booked. Return the GPUs on which they have less than before."""
        if self.sharing is None:
            return []
        before = self.fleet.outside
        self.sharing.take(neighbours, self.fleet.managed)
        self.fleet.set_outside(self.sharing.booked())
        self.fleet.closed, self.fleet.others_mask = neighbours.closed, self.sharing.job_mask()
        return [gpu for gpu, (parts, _, _) in before.items() if self.fleet.outside.get(gpu, (0, 0, ""))[0] < parts]

    def next_timer(self) -> float | None:
        """Return when the next timer is due or a GPU reading becomes stale (monotonic seconds); None: never."""
        due = [self.timers[0][0]] if self.timers else []
        if self.sharing is not None and self.sharing.due is not None:
            due.append(self.sharing.due)
        look = self.fleet.admission.next_look
        return min(due if look is None else [*due, look], default=None)

    def waiting(self) -> int:
        """Return how many jobs wait, for whatever reason."""
        return len(self.queue) + len(self.parked)

    def class_reasons(self) -> dict[str, Reason]:
        """Return key of the placement class → the reason why jobs of this class wait at present."""
        if self.queue_paused:
            paused = Reason("paused", "the queue is paused; resume it: gpujob queue resume")
            return {kind.key: paused for kind in self.queue.classes()}
        return {kind.key: self._why_not(kind) for kind in self.queue.classes()}

    def _why_not(self, kind: PlacementClass) -> Reason:
        if (
            self.sharing is not None
            and self.sharing.waits_for
            and kind.need.count
            and self.fleet.find(kind) is not None
        ):
            return why_others_first(self.sharing)
        users = self.users
        if users is None:
            return self.fleet.why_not(kind)
        kept = users.keeps_back(kind.user, kind.need)
        if kept is not None:
            return kept
        reason = self.fleet.why_not(kind)
        if reason.code not in OF_ROOM:
            return reason
        waiting = {
            one.user for one in self.queue.classes() if one.need.total and not users.keeps_back(one.user, one.need)
        }
        return users.with_turn(kind.user, reason, waiting)

    def blocked(self, reasons: Mapping[str, Reason]) -> dict[str, int]:
        """Return reason code → number of waiting jobs. ``reasons``: from `class_reasons`. Cost: O(parked jobs)."""
        found = Counter(self.parked.values())
        for kind, number in self.queue.sizes().items():
            found[reasons[kind.key].code] += number
        return dict(found)

    def adopt(self, job: Job, now: Now) -> None:
        """Add a STARTING, RUNNING or STOPPING job from the store: book its GPUs and set its timers.

        A job that an engine has not started yet has no GPUs; `decide` books GPUs for it if there is room.
        """
        if not job.runner_kind.owns_gpus and not job.began:
            self.released[job.id] = None
        else:
            self.book(job)
        self.live[job.id] = job
        self._watch_limit(job, now)
        if job.state is JobState.STOPPING:
            asked = job.stop_at if job.stop_at is not None else now.wall
            left = min(self.policy.kill_grace_s, max(LEAST_GRACE_S, asked + self.policy.kill_grace_s - now.wall))
            self.at(now.mono, "term", job)  # the previous daemon may have been killed before it sent the SIGTERM
            self.at(now.mono + left, "kill", job)

    def book(self, job: Job) -> None:
        """Book the GPUs of a job that runs. If they cannot be booked, add the attempt to ``unbooked``, and a note."""
        try:
            self.fleet.take(job.need, job.gpus, job.spec.vram_mib or 0)
        except ValueError:  # the job runs all the same, and the daemon has to start
            self.unbooked.add(job.attempt_key)
            why = f"its GPUs ({gpu_ids_text(job.gpus)}) are also allocated to other jobs"
            if not job.gpus and not job.runner_kind.owns_gpus:
                why = "the engine gave it GPUs that are not managed here"
            job.notes = (*job.notes, why)

    def book_unbooked(self) -> None:
        """Book the GPUs of attempts in ``unbooked`` for which there is room now, because other jobs have ended."""
        for key in sorted(self.unbooked):
            holding, job = self.holdings.get(key), self.live.get(int(key.partition(".")[0]))
            if holding is not None:
                need, gpus, vram = holding.need, holding.gpus, holding.vram_mib
            elif job is not None and job.attempt_key == key:
                need, gpus, vram = job.need, job.gpus, job.spec.vram_mib or 0
            else:
                continue
            try:
                self.fleet.take(need, gpus, vram)
            except ValueError:
                continue  # there is no room yet
            self.unbooked.discard(key)

    def hold(self, holding: Holding) -> None:
        """Add an allocation that leftover processes hold, and book its GPUs.

        If the GPUs cannot be booked, the attempt is added to ``unbooked``.
        """
        try:
            self.fleet.take(holding.need, holding.gpus, holding.vram_mib)
        except ValueError:
            self.unbooked.add(holding.key)
        self.holdings[holding.key] = holding

    def at(self, mono: float, kind: str, job: Job) -> None:
        """Set a timer of this kind (retry, limit, term, kill, end) for a job. ``mono``: monotonic seconds."""
        heapq.heappush(self.timers, (mono, kind, job.id, job.attempt))

    def _watch_limit(self, job: Job, now: Now) -> None:
        if job.spec.time_limit_s is not None and job.started_at is not None:
            ran = now.wall - job.started_at
            if job.process is not None and now.since_boot is not None:  # this clock is never set
                ran = now.since_boot - job.process.ticks / TICKS_A_SECOND
            self.at(now.mono + max(0.0, job.spec.time_limit_s - max(0.0, ran)), "limit", job)
