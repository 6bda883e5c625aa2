"""Builders of jobs, GPUs and requests with default values, and a scheduler state with a simulated store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from hypothesis import settings

from scheduler.core.config import Config
from scheduler.core.decide import decide
from scheduler.core.decision_pass import Plan
from scheduler.core.engine_placement import EngineFleet
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.job import Failure, Job, JobSpec, JobState, Process
from scheduler.core.observations import Arrived, Asked, Ended, Lost, NeverRan, Now, Observation, Started
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass, class_of, made_class
from scheduler.core.policy import Policy, policy_of
from scheduler.core.requests import Request
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.topology import Link

T0 = 1_000_000.0  # wall clock at the beginning of a test: seconds since 1970 (UTC)
M0 = 50.0  # monotonic seconds at the beginning of a test
SPEC_FIELDS = frozenset(f.name for f in fields(JobSpec))
JOB_FIELDS = frozenset(f.name for f in fields(Job))
OOM = Failure("oom", "torch.OutOfMemoryError: CUDA out of memory.", "")


def examples(number: int) -> settings:
    """Return settings for an expensive property test: ``number`` examples if other property tests have 100 each."""
    return settings(max_examples=number * settings().max_examples // 100)


def a_spec(**changes: Any) -> JobSpec:
    """Return the JobSpec of a job that runs ``/data/train.py`` without arguments.

    ``changes``: other values of its fields.
    """
    return replace(JobSpec(script="/data/train.py"), **changes)


def a_job(id: int = 1, need: str = "1", **changes: Any) -> Job:
    """Return a waiting job. ``changes``: values of the fields of Job and of its JobSpec.

    Job and JobSpec both have the fields ``allowed`` and ``priority``: a change of them is made in both. With ``on``,
    the job requests these GPUs by name. With ``need="0"``, the job requests ``slots`` CPU slots.
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
    """Return a declared GPU of server 0. ``changes``: other values of its fields."""
    return replace(Gpu(index, f"declared:{index}"), **changes)


def some_gpus(*servers: int, memory_mib: int | None = None, links: Iterable[int] = ()) -> list[Gpu]:
    """Return the GPUs of several servers. Each argument is the number of GPUs of one server.

    `some_gpus(8, 4)` returns the GPUs of two servers. ``links``: links of the pairs of GPUs 0 and 1, 0 and 2, 1 and 2,
    0 and 3 ...; the other pairs have no link. Links between servers have no effect.
    """
    gpus: list[Gpu] = []
    for server, count in enumerate(servers):
        gpus += [a_gpu(len(gpus) + i, server=server, memory_mib=memory_mib) for i in range(count)]
    of_pair = zip(((one, other) for other in range(len(gpus)) for one in range(other)), links, strict=False)
    found = {pair: link for pair, link in of_pair if link < Link.SYSTEM}
    return [replace(gpu, links=tuple((a, link) for (a, b), link in found.items() if b == gpu.index)) for gpu in gpus]


def a_kind(need: str = "1", allowed: Iterable[int] | None = None, vram_mib: int = 0, link: str = "") -> PlacementClass:
    """Return the placement class of jobs with this need, these allowed GPUs, this GPU memory and this link."""
    return made_class(ResourceRequest.parse(need), None if allowed is None else tuple(allowed), vram_mib, "", link)


def an_instance(index: int = 100, profile: str = "1g.10gb", **changes: Any) -> Gpu:
    """Return a MIG instance. ``changes``: other values of its fields."""
    return a_gpu(index, **{"uuid": f"MIG-{index}", "profile": profile, "memory_mib": 9_856, **changes})


class Play:
    """A scheduler state and a simulated store. Each call of `tell` is one pass.

    When the scheduler reads a job from the store, it gets a copy, as in the daemon. The copy has the values that were
    recorded at the end of the previous pass. If the job arrives in the current pass, the scheduler does not get a copy,
    but the object of the `Arrived` observation.

    ``rows``: id → job in the store; ``started``: ids of started jobs; ``journal``: (job, kind) of all events.
    """

    def __init__(self, fleet: Fleet, **of_world: Any) -> None:
        self.rows: dict[int, Job] = {}
        self.fresh: dict[int, Job] = {}
        self.wall, self.mono = T0, M0
        self.scheduler = SchedulerState(fleet, self._fetch, **{"policy": a_policy(), **of_world})
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
        """Advance the clock by ``after`` seconds, decide on these observations, and record the plan.

        Return the plan.
        """
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
        """Let these waiting jobs arrive, all in one pass; return the plan of this pass."""
        return self.tell(*(Arrived(job) for job in jobs), after=after)

    def ask(self, request: Request, after: float = 0.0) -> Plan:
        """Apply a request in its own pass; return the plan."""
        return self.tell(Asked(1, request), after=after)

    def job(self, job: int) -> Job:
        """Return the job with this id from the store."""
        return self.rows[job]

    def state(self, job: int) -> JobState:
        return self.rows[job].state

    def began(self, job: int, pid: int | None = None) -> Started:
        """Return the observation that the current attempt of a job runs."""
        return Started(job, self.rows[job].attempt, Process(pid or 1000 + job, 77), self.wall)

    def ended(self, job: int, code: int | None = 0, **changes: Any) -> Ended:
        """Return the observation that the current attempt of a job ended."""
        return replace(Ended(job, self.rows[job].attempt, code, None, self.wall), **changes)

    def never_ran(self, job: int, why: str = "fork refused", lasting: bool = False) -> NeverRan:
        """Return the observation that the current attempt of a job could not be started."""
        return NeverRan(job, self.rows[job].attempt, why, lasting, self.wall)

    def lost(self, job: int, **changes: Any) -> Lost:
        """Return the observation that nobody can know how the current attempt of a job ended."""
        return replace(Lost(job, self.rows[job].attempt, "nobody saw its end", self.wall), **changes)

    def run(self, *jobs: Job) -> None:
        """Let these jobs arrive and start. Fail unless all of them are then RUNNING."""
        self.arrive(*jobs)
        self.tell(*(self.began(job.id) for job in jobs))
        assert all(self.state(job.id) is JobState.RUNNING for job in jobs)

    def reason(self, job: int) -> str:
        """Return the reason code of a waiting job.

        If the job has no reason code, return that of its placement class.
        """
        found = self.rows[job]
        return found.reason_code or self.scheduler.class_reasons()[class_of(found).key].code


def a_policy(**changes: Any) -> Policy:
    """Return the default settings, but without a limit on overtaking. ``changes``: other values of its fields."""
    return replace(policy_of(Config()), **{"max_overtakes": 0, **changes})


def a_world(
    *servers: int, cpu_slots: int = 1 << 30, missing: Callable[[Job], str] | None = None, **policy: Any
) -> Play:
    """Return a Play with these servers. Each positional argument is the number of GPUs of one server.

    Without a positional argument, there is one server with one GPU. ``policy``: values of the fields of Policy.
    """
    more = {"missing": missing} if missing else {}
    return Play(Fleet(some_gpus(*(servers or (1,))), cpu_slots), policy=a_policy(**policy), **more)


def check_ledger(state: SchedulerState) -> None:
    """Assert that the ledger matches the jobs: the free part of a GPU is 1000 minus the thousandths that jobs hold.

    Attempts that could not be booked (``SchedulerState.unbooked``), such as those whose GPUs other jobs hold, are left
    out. A GPU is claimed if a job that requested this GPU by name holds the GPU. On a cluster, a released job holds the
    GPUs that are booked for it until the engine tells its choice, and each job holds what the engine can grant.
    """
    free = dict.fromkeys(state.fleet.gpus, WHOLE)
    slots = state.fleet.cpu_slots
    claims: dict[int, int] = {}
    live = [job for job in state.live.values() if job.attempt_key not in state.unbooked]
    for holder in (*live, *(held for held in state.holdings.values() if held.key not in state.unbooked)):
        need, gpus = holder.need, holder.gpus
        if isinstance(state.fleet, EngineFleet):
            need = state.fleet.rules.booked(need)
            expected = state.released.get(holder.id, gpus) if isinstance(holder, Job) else gpus
            if expected is None:
                continue
            gpus = expected
        slots -= need.slots
        for gpu in gpus:
            free[gpu] -= need.parts
            if need.by_name:
                claims[gpu] = claims.get(gpu, 0) + 1
    assert state.fleet.free == free
    assert all(0 <= parts <= WHOLE for parts in free.values())
    assert state.fleet.cpu_free == slots
    assert state.fleet.claims == claims
