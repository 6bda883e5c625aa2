"""Small builders with defaults, and a state with a pretended store, so that a test names only what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from hypothesis import settings

from scheduler.core.decide import decide
from scheduler.core.decision_pass import Plan
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.job import Failure, Job, JobSpec, JobState, Process
from scheduler.core.observations import Arrived, Asked, Ended, Lost, NeverRan, Now, Observation, Started
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass, class_of
from scheduler.core.requests import Request
from scheduler.core.scheduler_state import Policy, SchedulerState

T0 = 1_000_000.0  # wall time at which stories begin
M0 = 50.0  # monotonic time at which they begin
SPEC_FIELDS = frozenset(f.name for f in fields(JobSpec))
JOB_FIELDS = frozenset(f.name for f in fields(Job))
OOM = Failure("oom", "torch.OutOfMemoryError: CUDA out of memory.", "")


def examples(number: int) -> settings:
    """For a property whose examples are expensive: so many where others have 100 (see tests/conftest.py)."""
    return settings(max_examples=number * settings().max_examples // 100)


def a_spec(**changes: Any) -> JobSpec:
    """A line of the jobs file: ``/data/train.py`` without arguments."""
    return replace(JobSpec(script="/data/train.py"), **changes)


def a_job(id: int = 1, need: str = "1", **changes: Any) -> Job:
    """A waiting job. Fields of the spec and of the job by name; ``allowed`` and ``priority`` go into both.

    ``on`` and ``slots`` make its need one of the two other forms.
    """
    if changes.get("on"):
        changes.setdefault("allowed", changes["on"])
    spec = a_spec(**{name: value for name, value in changes.items() if name in SPEC_FIELDS})
    unknown = set(changes) - SPEC_FIELDS - JOB_FIELDS
    assert not unknown, f"no such field: {unknown}"
    own = {name: value for name, value in changes.items() if name in JOB_FIELDS}
    own.setdefault("order", id)
    own.setdefault("submitted_at", T0)
    wanted = ResourceRequest.parse(need)
    if spec.on:
        wanted = ResourceRequest(len(spec.on), 0)
    elif not wanted.count:
        wanted = ResourceRequest.of_slots(spec.slots)
    return Job(id, spec, wanted, **own)


def a_gpu(index: int = 0, **changes: Any) -> Gpu:
    """A declared GPU of the only server."""
    return replace(Gpu(index, f"declared:{index}"), **changes)


def some_gpus(*servers: int, memory_mib: int | None = None) -> list[Gpu]:
    """GPUs 0, 1, … of servers with so many GPUs each: ``some_gpus(8, 4)`` is two servers."""
    gpus: list[Gpu] = []
    for server, count in enumerate(servers):
        gpus += [a_gpu(len(gpus) + i, server=server, memory_mib=memory_mib) for i in range(count)]
    return gpus


def a_kind(need: str = "1", allowed: Iterable[int] | None = None, vram_mib: int = 0) -> PlacementClass:
    """A placement class."""
    return PlacementClass(ResourceRequest.parse(need), None if allowed is None else tuple(allowed), vram_mib)


class Play:
    """A state and the store around it: each ``tell`` is one turn of the loop.

    As in the daemon, rows are read as copies and hold what the turns before have recorded, never what this very
    turn has only decided; only jobs that arrive with this turn are handed out as they are.
    """

    def __init__(self, fleet: Fleet, **of_world: Any) -> None:
        self.rows: dict[int, Job] = {}
        self.fresh: dict[int, Job] = {}
        self.wall, self.mono = T0, M0
        self.scheduler = SchedulerState(fleet, self._fetch, **of_world)
        self.started: list[int] = []
        self.journal: list[tuple[int, str]] = []
        self.plan = Plan()

    def _fetch(self, job: int) -> Job | None:
        if job in self.fresh:
            return self.fresh[job]
        row = self.rows.get(job)
        return None if row is None else replace(row)

    @property
    def now(self) -> Now:
        return Now(self.wall, self.mono)

    def tell(self, *observations: Observation, after: float = 0.0) -> Plan:
        """Let ``after`` seconds pass, decide, and record what was decided."""
        self.wall += after
        self.mono += after
        self.fresh = {
            observation.job.id: observation.job for observation in observations if isinstance(observation, Arrived)
        }
        for job in self.fresh.values():
            self.rows[job.id] = replace(job)
        self.plan = plan = decide(self.scheduler, observations, self.now)
        for job in plan.changed.values():
            self.rows[job.id] = replace(job)
        self.fresh = {}
        self.started += [job.id for job in plan.starts]
        self.journal += [(event.job, event.kind) for event in plan.events]
        check_ledger(self.scheduler)
        return plan

    def arrive(self, *jobs: Job, after: float = 0.0) -> Plan:
        """New waiting jobs, all in one turn."""
        return self.tell(*(Arrived(job) for job in jobs), after=after)

    def ask(self, request: Request, after: float = 0.0) -> Plan:
        """Somebody asks for something."""
        return self.tell(Asked(1, request), after=after)

    def job(self, job: int) -> Job:
        """The job as the store holds it."""
        return self.rows[job]

    def state(self, job: int) -> JobState:
        return self.rows[job].state

    def began(self, job: int, pid: int | None = None) -> Started:
        """The observation that the present attempt runs."""
        return Started(job, self.rows[job].attempt, Process(pid or 1000 + job, 77), self.wall)

    def ended(self, job: int, code: int | None = 0, **changes: Any) -> Ended:
        """The observation that the present attempt ended."""
        return replace(Ended(job, self.rows[job].attempt, code, None, self.wall), **changes)

    def never_ran(self, job: int, why: str = "fork refused", lasting: bool = False) -> NeverRan:
        """The observation that the present attempt could not be started."""
        return NeverRan(job, self.rows[job].attempt, why, lasting, self.wall)

    def lost(self, job: int, **changes: Any) -> Lost:
        """The observation that the end of the present attempt cannot be known."""
        return replace(Lost(job, self.rows[job].attempt, "nobody saw its end", self.wall), **changes)

    def run(self, *jobs: Job) -> None:
        """Let these jobs arrive and start, so that they are RUNNING."""
        self.arrive(*jobs)
        self.tell(*(self.began(job.id) for job in jobs))
        assert all(self.state(job.id) is JobState.RUNNING for job in jobs)

    def reason(self, job: int) -> str:
        """The code of the reason why a waiting job waits: its own, else its class's."""
        found = self.rows[job]
        return found.reason_code or self.scheduler.class_reasons()[class_of(found).key].code


def a_world(
    *servers: int, cpu_slots: int = 1 << 30, missing: Callable[[Job], str] | None = None, **policy: Any
) -> Play:
    """A state with one server of one GPU, or with the servers given; ``policy`` by the names of Policy."""
    more = {"missing": missing} if missing else {}
    return Play(Fleet(some_gpus(*(servers or (1,))), cpu_slots), policy=Policy(**policy), **more)


def check_ledger(state: SchedulerState) -> None:
    """What is free is what nobody holds, and no GPU holds more than 1000 parts; bookings that cannot be count nothing.

    GPUs are claimed by just those jobs that named them, and are on them.
    """
    free = dict.fromkeys(state.fleet.gpus, WHOLE)
    slots = state.fleet.cpu_slots
    claims: dict[int, int] = {}
    live = [job for job in state.live.values() if job.attempt_key not in state.unbooked]
    for holder in (*live, *(held for held in state.holdings.values() if held.key not in state.unbooked)):
        slots -= holder.need.slots
        for gpu in holder.gpus:
            free[gpu] -= holder.need.parts
            if holder.need.by_name:
                claims[gpu] = claims.get(gpu, 0) + 1
    assert state.fleet.free == free
    assert all(0 <= parts <= WHOLE for parts in free.values())
    assert state.fleet.cpu_free == slots
    assert state.fleet.claims == claims
