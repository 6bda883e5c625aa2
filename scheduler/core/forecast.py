"""Predictions: when waiting jobs are expected to start, and when jobs are expected to end.

The queue is simulated (`core/simulation.py`) in several scenarios. In a scenario, each job runs as long as its estimate
tells, times an error that earlier estimates had. Most scenarios draw the error of each job apart; in some, all jobs are
faster or slower than expected together. The band of a time reaches from the first to the last of the scenarios.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.core.engine_placement import EngineFleet
from scheduler.core.job import Job, JobState
from scheduler.core.observations import Now
from scheduler.core.runtime_estimate import Expected
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.simulation import Simulation, copy_of

MOST_STARTS = 400  # starts that a scenario simulates; jobs that start later get no prediction
MIXED = 11  # scenarios in which the errors of jobs are independent
ALIKE = (0.1, 0.35, 0.65, 0.9)  # scenarios in which all jobs have this quantile of the errors
GOLDEN = 0.6180339887498949  # multiples of it, without their whole part, fill [0, 1) evenly
Scenario = Callable[[int], float]  # job → quantile of the errors of its estimate


def _mixed(number: int) -> Scenario:
    def quantile(job: int) -> float:
        place = number + int(job * GOLDEN % 1.0 * MIXED)  # each job has each quantile in one scenario
        return (place % MIXED + 0.5) / MIXED

    return quantile


def _alike(quantile: float) -> Scenario:
    return lambda job: quantile


# Alternating, so that a part of the scenarios has both kinds.
SCENARIOS: tuple[Scenario, ...] = tuple(
    scenario for number in range(MIXED) for scenario in (_mixed(number), *map(_alike, ALIKE[number : number + 1]))
)


@dataclass(frozen=True, slots=True)
class Band:
    """A predicted time in seconds from now: the middle of the scenarios, the first and the last. Infinite: not in sight."""

    middle: float
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected start and end of a job. None: not known, or too far away.

    ``gpus``: where it runs, or would start in most scenarios; ``expected``: its expected run time, and what that is based on.
    """

    job: int
    start: Band | None
    end: Band | None
    gpus: tuple[int, ...] = ()
    expected: Expected | None = None


@dataclass(slots=True)
class _Seen:
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    places: Counter[tuple[int, ...]] = field(default_factory=Counter)


class Forecast:
    """The scenarios that were simulated from one state, which is not changed.

    `simulate` may be called for some of the `SCENARIOS` only, if there is little time: the bands are then narrower.
    """

    def __init__(self, state: SchedulerState, now: Now, most_starts: int = MOST_STARTS) -> None:
        self._state, self._now, self._most = state, now, most_starts
        self._seen: dict[int, _Seen] = {}
        self._expected: dict[int, Expected | None] = {}
        self._running: dict[int, tuple[int, ...]] = {}  # job → its GPUs
        self.scenarios = 0

    def simulate(self, scenarios: Iterable[Scenario] = SCENARIOS) -> None:
        """Simulate the queue in further scenarios."""
        for scenario in scenarios:
            self._simulate(scenario)
            self.scenarios += 1

    def _simulate(self, quantile: Scenario) -> None:
        state = copy_of(self._state, self._most)
        planned: dict[int, float] = {}

        def run_s(job: Job, ran_s: float = 0.0) -> float:
            expected = self._expected_of(job)
            return math.inf if expected is None else state.estimates.run_s(expected, quantile(job.id), ran_s)

        simulation = Simulation(state, self._now, run_s)
        for job in list(state.live.values()):
            ran = 0.0 if job.started_at is None else max(0.0, self._now.wall - job.started_at)
            left = state.policy.kill_grace_s if job.state is JobState.STOPPING else max(0.0, run_s(job, ran) - ran)
            planned[job.id] = left
            simulation.end(job, left)
            self._running[job.id] = job.gpus or state.released.get(job.id) or ()
        starts = 0
        for one in simulation.run():
            if one.what == "start":
                seen = self._seen.setdefault(one.job.id, _Seen())
                seen.starts.append(one.at)
                gpus = one.job.gpus
                if isinstance(state.fleet, EngineFleet):
                    gpus = state.released.get(one.job.id) or ()
                seen.places[gpus] += 1
                planned[one.job.id] = one.at + run_s(one.job)
                starts += 1
                if starts >= self._most:
                    break
        for job_id, at in planned.items():
            self._seen.setdefault(job_id, _Seen()).ends.append(at)

    def _expected_of(self, job: Job) -> Expected | None:
        if job.id not in self._expected:
            self._expected[job.id] = self._state.estimates.expected(job.spec, job.need)
        return self._expected[job.id]

    def predictions(self) -> dict[int, Prediction]:
        """Return job → prediction, for the running jobs and the waiting jobs that start in a scenario."""
        found = {}
        for job_id, seen in self._seen.items():
            start = None
            place = self._running.get(job_id)
            if place is None:
                start, place = self._band(seen.starts), min(seen.places, key=lambda gpus: (-seen.places[gpus], gpus))
            found[job_id] = Prediction(job_id, start, self._band(seen.ends), place, self._expected.get(job_id))
        return found

    def _band(self, times: Sequence[float]) -> Band | None:
        """Return the band of a time; None if it is not in sight in half of the scenarios."""
        every = sorted([*times, *[math.inf] * (self.scenarios - len(times))])
        if not every or every[len(every) // 2] == math.inf:
            return None
        return Band(every[len(every) // 2], every[0], every[-1])
