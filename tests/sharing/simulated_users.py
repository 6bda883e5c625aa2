"""Several users with a scheduler each on simulated GPUs: real decisions, simulated time, no processes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.config import Config
from scheduler.core.decide import decide
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.job import Job, JobSpec, Process
from scheduler.core.neighbours import Neighbour, Neighbours, Sharing
from scheduler.core.observations import Arrived, Ended, Now, Observation, Started
from scheduler.core.own_document import own_document
from scheduler.core.placement import Fleet
from scheduler.core.policy import policy_of
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.shared_bookings import Document

EPOCH = 1_700_000_000.0
REACTION_S = 0.01  # from a change until the other schedulers look


@dataclass
class User:
    """A user with a scheduler. ``durations``: job → its run time; ``starts``: job → its first start; ``used``: GPU seconds."""

    name: str
    state: SchedulerState
    document: Document
    durations: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    used: float = 0.0
    jobs: dict[int, Job] = field(default_factory=dict)


class World:
    """Users and GPUs. Time is in seconds; `run` handles events in order."""

    def __init__(self, gpus: int, weights: Mapping[str, float], seed: int = 1, max_overtakes: int = 0) -> None:
        self.max_overtakes = max_overtakes
        self.gpus = [Gpu(n, f"GPU-{n}", memory_mib=80_000) for n in range(gpus)]
        self.dice = random.Random(seed)
        self.time = 1000.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.weights = weights
        self.users: dict[str, User] = {}
        self._planned: dict[tuple[str, str], float] = {}  # (user, why) → time of the planned look
        self.idle_s = 0.0  # GPU seconds during which a waiting job would have fitted
        self._looked_at = self.time
        for name in weights:
            self.add(name)

    def add(self, name: str) -> User:
        """Add a user."""
        jobs: dict[int, Job] = {}
        state = SchedulerState(Fleet(self.gpus), jobs.get, policy_of(Config(max_overtakes=self.max_overtakes)))
        state.sharing = Sharing(name, weights=self.weights)
        user = User(name, state, own_document(state, self.now(), "1", "boot", None, (), 0), jobs=jobs)
        self.users[name] = user
        return user

    def now(self) -> Now:
        return Now(EPOCH + self.time, self.time, self.time)

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self.events, (time, self._serial, what))

    def submit(self, name: str, need: str, duration_s: float) -> None:
        """Add a job to the queue of a user."""
        user = self.users[name]
        number = len(user.jobs) + 1
        spec = JobSpec(script="/train.py", arguments=(str(number),))
        job = Job(number, spec, ResourceRequest.parse(need), order=number, submitted_at=EPOCH + self.time)
        user.jobs[number], user.durations[number], user.arrived[number] = job, duration_s, self.time
        self.turn(user, [Arrived(job)])

    def turn(self, user: User, observations: list[Observation]) -> None:
        """Let a scheduler decide; the others look after a moment if something has changed."""
        others = tuple(Neighbour(one.name, False, one.document) for one in self.users.values() if one is not user)
        told: list[Observation] = [Neighbours(self.time, others), *observations]
        while told:
            plan, told = decide(user.state, told, self.now()), []
            for job in plan.starts:
                user.jobs[job.id] = job
                user.starts.setdefault(job.id, self.time)
                told.append(Started(job.id, job.attempt, Process(job.id, int(self.time * 100)), EPOCH + self.time))
                self.at(self.time + user.durations[job.id], lambda job=job: self._end(user, job))  # type: ignore[misc]
        before, user.document = user.document, own_document(user.state, self.now(), "1", "boot", None, (), 0)
        self.check()
        if replace(before, used=0.0, used_at=0.0) != replace(user.document, used=0.0, used_at=0.0):
            for other in self.users.values():
                if other is not user and other.state.waiting():
                    self._plan(other, "change", self.time + REACTION_S * self.dice.random())
        if user.state.sharing is not None and user.state.sharing.due is not None:
            self._plan(user, "patience", user.state.sharing.due + 0.001)

    def _plan(self, user: User, why: str, time: float) -> None:
        """Let a scheduler look at a time, unless an earlier look for the same reason is planned."""
        if self._planned.get((user.name, why), -1.0) > self.time:
            return
        self._planned[user.name, why] = time
        self.at(time, lambda: self.turn(user, []))

    def _end(self, user: User, job: Job) -> None:
        user.used += user.durations[job.id] * job.need.total / WHOLE
        self.turn(user, [Ended(job.id, job.attempt, 0, None, EPOCH + self.time)])

    def wait(self, user: User, job: int) -> float:
        """Return how long a job waited for its start, until now if it still waits."""
        return user.starts.get(job, self.time) - user.arrived[job]

    def check(self) -> None:
        """Raise AssertionError if a GPU is given away twice."""
        booked = dict.fromkeys((gpu.uuid for gpu in self.gpus), 0)
        for user in self.users.values():
            for one in user.document.bookings:
                booked[one.gpu] += one.parts
        assert max(booked.values()) <= WHOLE, booked

    def fits(self) -> float:
        """Return how many GPUs could be used by a waiting job of any user."""
        free = dict.fromkeys((gpu.uuid for gpu in self.gpus), WHOLE)
        for user in self.users.values():
            for one in user.document.bookings:
                free[one.gpu] -= one.parts
        wants = [want for user in self.users.values() for want in user.document.wants]
        least = min((want.parts for want in wants if want.count == 1), default=WHOLE + 1)
        return sum(parts for parts in free.values() if parts >= least) / WHOLE

    def run(self, until: float) -> None:
        """Handle all events up to a time."""
        while self.events and self.events[0][0] <= until:
            time, _, what = heapq.heappop(self.events)
            self.idle_s += self.fits() * (time - self.time)
            self.time = time
            what()
        self.idle_s += self.fits() * (until - self.time)
        self.time = until
