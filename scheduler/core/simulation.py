"""Simulations: `decide` on a virtual clock, with run times that a function gives.

Replays of traces (`benchmarks/replay.py`) and predictions (`core/forecast.py`) use the same simulation. So a prediction
is made by the code that will make the decision.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from scheduler.core.decide import MOST_STARTS_A_TURN, decide
from scheduler.core.decision_pass import Plan
from scheduler.core.engine_placement import EngineFleet
from scheduler.core.frozen_admission import FrozenAdmission
from scheduler.core.job import Job, JobState, Process
from scheduler.core.observations import Arrived, Ended, EnginePlace, Now, Observation, Started
from scheduler.core.pauses import Pauses
from scheduler.core.placement_class import class_of
from scheduler.core.scheduler_state import SchedulerState

Decide = Callable[[SchedulerState, Iterable[Observation], Now], Plan]
ENDS, ARRIVES = 0, 1  # order of events at the same time


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of a simulation. ``what``: arrival, start or end; ``at``: seconds since the start of the simulation."""

    at: float
    what: str
    job: Job


class Simulation:
    """A scheduler on a virtual clock. ``state`` is changed.

    ``run_s``: returns the run time of a job in seconds, when it starts; infinite: it does not end.
    """

    def __init__(self, state: SchedulerState, now: Now, run_s: Callable[[Job], float], decide: Decide = decide) -> None:
        self.state, self._start, self._run_s, self._decide = state, now, run_s, decide
        self._events: list[tuple[float, int, int, int]] = []  # heap: at, ENDS or ARRIVES, job, attempt
        self._arriving: dict[int, Job] = {}

    def arrive(self, job: Job, at: float) -> None:
        """Let a waiting job arrive. ``at``: seconds since the start of the simulation."""
        self._arriving[job.id] = job
        heapq.heappush(self._events, (at, ARRIVES, job.id, 0))

    def end(self, job: Job, at: float) -> None:
        """Let a running job end with success. ``at``: seconds since the start of the simulation."""
        if at < math.inf:
            heapq.heappush(self._events, (at, ENDS, job.id, job.attempt))

    def run(self, until: float = math.inf) -> Iterator[Happening]:
        """Run until nothing can happen any more, or until ``until``; yield what happens.

        Arrivals and ends are yielded before the decision about them, starts after it. The first decision is made at 0.
        """
        told: list[Observation] = []
        at = 0.0
        while at <= until:
            while self._events and self._events[0][0] <= at:
                _, kind, job_id, attempt = heapq.heappop(self._events)
                if kind == ARRIVES:
                    job = self._arriving.pop(job_id)
                    yield Happening(at, "arrival", job)
                    told.append(Arrived(job))
                    continue
                running = self.state.live.get(job_id)
                if running is not None and running.attempt == attempt:
                    yield Happening(at, "end", running)
                    told.append(Ended(job_id, attempt, 0, None, self._start.wall + at))
            again = True
            while again:
                plan = self._decide(self.state, told, self._now(at))
                told = []
                for job in plan.starts:
                    place = self._place(job)
                    told.append(Started(job.id, job.attempt, Process(job.id, 1), self._start.wall + at, place=place))
                    yield Happening(at, "start", job)
                    self.end(job, at + max(0.0, self._run_s(job)))
                for stop in plan.stops:
                    self.end(stop.job, at)
                again = len(plan.starts) >= MOST_STARTS_A_TURN
            timer = self.state.next_timer()
            following = min(
                self._events[0][0] if self._events else math.inf,
                math.inf if timer is None else seconds_until(timer, self._start.mono),
            )
            if following == math.inf:
                return
            at = max(at, following)

    def _now(self, at: float) -> Now:
        return Now(self._start.wall + at, self._start.mono + at, None)

    def _place(self, job: Job) -> EnginePlace | None:
        fleet = self.state.fleet
        if not isinstance(fleet, EngineFleet):
            return None
        gpus = [fleet.gpus[i] for i in self.state.released.get(job.id) or ()]
        return EnginePlace(gpus[0].node if gpus else "node", tuple(gpu.uuid for gpu in gpus))


def seconds_until(timer: float, start: float) -> float:
    """Return the seconds from ``start`` to ``timer``, such that ``start`` plus these seconds is not before ``timer``.

    The plain difference may be too small by rounding. A simulation that continues at that time never reaches the timer.
    """
    seconds = timer - start
    return seconds if start + seconds >= timer else seconds + math.ulp(max(timer, start))


def copy_of(state: SchedulerState, most: int | None = None) -> SchedulerState:
    """Return a copy of a state for a simulation. What is done with the copy does not change the original.

    ``most``: of each placement class, only the first waiting jobs are copied, this many; None: all.

    The readings are frozen (`core/frozen_admission.py`), and bookings of other schedulers stay.
    """
    copies: dict[int, Job] = {job_id: replace(job) for job_id, job in state.live.items()}

    def fetch(job_id: int) -> Job | None:
        if job_id not in copies:
            found = state.fetch(job_id)
            if found is None:
                return None
            copies[job_id] = replace(found)
        return copies[job_id]

    fleet = state.fleet.copy()
    fleet.admission = FrozenAdmission.of_now(state.fleet.admission)
    made = SchedulerState(
        fleet,
        fetch,
        replace(state.policy, release_ahead=0),
        state.missing,
        queue=state.queue.copy(most),
        live={job_id: copies[job_id] for job_id in state.live},
        holdings=dict(state.holdings),
        parked=dict(state.parked),
        children={parent: dict(found) for parent, found in state.children.items()},
        queue_paused=state.queue_paused,
        pauses=Pauses(state.pauses.revision, list(state.pauses.changes), dict(state.pauses.edited)),
        front=state.front,
        estimates=state.estimates.frozen(),
        timers=list(state.timers),
        killed=dict(state.killed),
        leader_ended=set(state.leader_ended),
        unbooked=set(state.unbooked),
        released=dict(state.released),
        users=None if state.users is None else state.users.copy(),
        faults=dict(state.faults),
    )
    _queue_unplaced(made)
    return made


def _queue_unplaced(state: SchedulerState) -> None:
    """Queue the jobs that an engine has, but for which no GPU is booked: they wait, as jobs of the queue do."""
    for job_id in [one for one, gpus in state.released.items() if gpus is None]:
        job = state.live.pop(job_id)
        del state.released[job_id]
        job.state = JobState.PENDING
        state.queue.push(job_id, class_of(job), state.policy.order.key(job.priority, job.order, job.submitted_at, None))
