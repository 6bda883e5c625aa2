"""Replays a trace on a virtual clock: ``python -m benchmarks.replay TRACE.csv --gpus 8 --jobs 2400 --load 0.7 --first 0``.

All policies but the last two run the real queue, passes and ledger (`scheduler/core`) on a virtual clock; only the starts
and the ends are simulated.

fifo: the default settings. short: `order: short`. hold: `order: short` and `aging: 168`, with run times known for all jobs. greedy: as fifo,
but nothing is reserved for a job that waits (`max_overtakes: 0`). strict: no job passes a more urgent one. seed: polling.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from benchmarks.figures import p99
from benchmarks.trace import SERVER, TraceJob, makespan_bound, mean, mean_jct_bound, slice_of
from scheduler.core.decide import decide
from scheduler.core.decision_pass import Plan
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.observations import Now, Observation
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.queue import Key, Order
from scheduler.core.runtime_estimate import Estimates, Expected, RunKind
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.simulation import Simulation

Fetch = Callable[[int], "Job | None"]

T0, M0 = 1e9, 1e6  # wall and monotonic time of the first arrival
POLLING_S, MOST_TRIES = 5.0, 10
AGING_H = 168.0
KNOWN, SPREAD = 0.6, 0.8  # part of the jobs with an expected run time, and its error: a factor of at most e^0.8
POLICIES = ("fifo", "short", "hold", "greedy", "strict", "seed")
BASELINES = ("strict", "seed")


@dataclass(slots=True)
class Outcome:
    """When each job started; how each start was decided. Times in seconds from the first arrival."""

    started: dict[int, float] = field(default_factory=dict)
    gpus: dict[int, tuple[int, ...]] = field(default_factory=dict)
    passed_over: int = 0  # starts before a more urgent waiting job
    passed_over_fit: int = 0  # of them: the more urgent job would have fitted
    decision_s: list[float] = field(default_factory=list)


class Watch:
    """Watches starts: counts those that pass over a more urgent job. Knows what is free, and the first job of each class."""

    def __init__(self, gpus: int, outcome: Outcome) -> None:
        self.fleet = fleet_of(gpus)
        self.outcome = outcome
        self._heads: dict[PlacementClass, list[tuple[Key, int]]] = {}
        self._keys: dict[int, Key] = {}  # of waiting jobs

    def arrive(self, job: TraceJob, key: Key) -> None:
        """Take in a waiting job. ``key``: jobs with smaller keys are more urgent."""
        self._keys[job.number] = key
        heapq.heappush(self._heads.setdefault(kind_of(job), []), (key, job.number))

    def start(self, job: TraceJob, gpus: tuple[int, ...], at: float) -> None:
        """Take in a start, before which the ledger is as the scheduler saw it."""
        key, passed, fitted = (self._keys.pop(job.number), job.number), False, False
        for kind, heap in list(self._heads.items()):
            while heap and heap[0][1] not in self._keys:
                heapq.heappop(heap)
            if not heap:
                del self._heads[kind]
            elif heap[0] < key:
                passed = True
                fitted = fitted or self.fleet.find(kind) is not None
        self.outcome.passed_over += passed
        self.outcome.passed_over_fit += fitted
        self.fleet.take(job.need, gpus)
        self.outcome.started[job.number] = at
        self.outcome.gpus[job.number] = gpus

    def end(self, job: TraceJob) -> None:
        """Take in an end."""
        self.fleet.give_back(job.need, self.outcome.gpus[job.number])


def fleet_of(gpus: int) -> Fleet:
    """Return a ledger of servers of 8 GPUs."""
    return Fleet(Gpu(n, f"declared:{n}", server=n // SERVER) for n in range(gpus))


def kind_of(job: TraceJob) -> PlacementClass:
    """Return the placement class of a job."""
    return PlacementClass(job.need, None)


class KnownTimes(Estimates):
    """Expected run times: given for a part of the jobs, learned by the scheduler for the others."""

    def __init__(self, jobs: Iterable[TraceJob], seed: int, known: float) -> None:
        super().__init__()
        dice = random.Random(seed)
        self._given = {
            str(job.number): job.duration * math.exp(dice.uniform(-SPREAD, SPREAD))
            for job in jobs
            if dice.random() < known
        }

    def kind_of(self, spec: JobSpec, need: ResourceRequest) -> RunKind:
        """Return the run kind of a job, which has a group of its own if its run time is given."""
        kind, number = super().kind_of(spec, need), spec.arguments[0]
        return replace(kind, groups=(("given", number), *kind.groups)) if number in self._given else kind

    def expected_of(self, kind: RunKind) -> Expected | None:
        """Return the given time of a job, else what is known of jobs with the same need."""
        if kind.groups and kind.groups[0][0] == "given":
            return Expected(self._given[kind.groups[0][1]], "given")
        return super().expected_of(kind)


def state_for(jobs: Iterable[TraceJob], gpus: int, policy: str, seed: int, fetch: Fetch) -> SchedulerState:
    """Return the state of a scheduler without jobs, with the settings of a policy."""
    state = SchedulerState(fleet_of(gpus), fetch)
    order = Order("short" if policy in ("short", "hold") else "fifo", AGING_H if policy == "hold" else 0.0)
    overtakes = 0 if policy == "greedy" else state.policy.max_overtakes
    state.policy = replace(state.policy, order=order, max_overtakes=overtakes)
    state.estimates = KnownTimes(jobs, seed, 1.0 if policy == "hold" else KNOWN)
    return state


def replay(jobs: list[TraceJob], gpus: int, policy: str, seed: int = 1) -> Outcome:
    """Run the real scheduling code against the jobs; return what it did."""
    outcome = Outcome()
    watch = Watch(gpus, outcome)
    made = {job.number: job for job in jobs}
    records: dict[int, Job] = {}
    state = state_for(jobs, gpus, policy, seed, records.get)

    def timed(state: SchedulerState, told: Iterable[Observation], now: Now) -> Plan:
        before = time.perf_counter()
        plan = decide(state, told, now)
        outcome.decision_s.append(time.perf_counter() - before)
        return plan

    simulation = Simulation(state, Now(T0, M0), lambda job: made[job.id].duration, timed)
    for job in jobs:
        records[job.number] = record_of(job)
        simulation.arrive(records[job.number], job.submitted)
    order = state.policy.order
    for one in simulation.run():
        if one.what == "arrival":
            estimate = state.estimates.of(one.job.spec, one.job.need) if order.rule == "short" else None
            watch.arrive(made[one.job.id], order.key(one.job.priority, one.job.order, one.job.submitted_at, estimate))
        elif one.what == "start":
            watch.start(made[one.job.id], one.job.gpus, one.at)
        else:
            watch.end(made[one.job.id])
    return outcome


def record_of(job: TraceJob) -> Job:
    """Return the waiting job of the scheduler."""
    script = f"/trace/{job.need}.py"  # jobs with the same need are similar jobs
    spec = JobSpec(script=script, arguments=(str(job.number),), priority=job.priority)
    return Job(job.number, spec, job.need, order=job.number, priority=job.priority, submitted_at=T0 + job.submitted)


def baseline(jobs: list[TraceJob], gpus: int, policy: str) -> Outcome:
    """Run a baseline. ``strict``: no job starts before a more urgent one. ``seed``: polling.

    The polling scheduler takes the jobs in order. It tries to place a job on the first GPUs with room; if there are none, it
    waits 5, 10, 20, … s between its tries and does nothing else meanwhile. After `MOST_TRIES` it goes to the next job.
    """
    outcome = Outcome()
    watch = Watch(gpus, outcome)
    made = {job.number: job for job in jobs}
    arrivals = sorted(jobs, key=lambda job: job.submitted)
    ends: list[tuple[float, int]] = []
    waiting: list[tuple[int, int]] = []
    at, arrived = 0.0, 0
    place = watch.fleet.find if policy == "strict" else lambda kind: first_fit(watch.fleet, kind.need)

    def advance(to: float) -> None:
        """Take in all ends and arrivals until a time."""
        nonlocal at, arrived
        at = to
        while ends and ends[0][0] <= at:
            watch.end(made[heapq.heappop(ends)[1]])
        while arrived < len(arrivals) and arrivals[arrived].submitted <= at:
            watch.arrive(arrivals[arrived], (arrivals[arrived].priority, arrivals[arrived].number))
            heapq.heappush(waiting, (arrivals[arrived].priority, arrivals[arrived].number))
            arrived += 1

    def try_to_start(job: TraceJob) -> bool:
        before = time.perf_counter()
        found = place(kind_of(job))
        outcome.decision_s.append(time.perf_counter() - before)
        if found is not None:
            watch.start(job, found, at)
            heapq.heappush(ends, (at + job.duration, job.number))
        return found is not None

    def next_event() -> float:
        times = [ends[0][0]] if ends else []
        times += [arrivals[arrived].submitted] if arrived < len(arrivals) else []
        return min(times)

    while len(outcome.started) < len(jobs):
        if policy == "strict":
            while waiting and try_to_start(made[waiting[0][1]]):
                heapq.heappop(waiting)
            if len(outcome.started) < len(jobs):
                advance(next_event())
            continue
        if not waiting:
            advance(math.ceil(next_event() / POLLING_S) * POLLING_S)
            continue
        for priority, number in sorted(waiting):
            for attempt in range(MOST_TRIES):
                if try_to_start(made[number]):
                    waiting.remove((priority, number))
                    heapq.heapify(waiting)
                    break
                advance(at + POLLING_S * 2**attempt)
    return outcome


def first_fit(fleet: Fleet, need: ResourceRequest) -> tuple[int, ...] | None:
    """Return the first GPUs of a server with room for a need; None if there are none."""
    fitting: dict[int, list[int]] = {}
    for index, gpu in fleet.gpus.items():
        if fleet.free[index] >= need.parts:
            here = fitting.setdefault(gpu.server, [])
            here.append(index)
            if len(here) == need.count:
                return tuple(here)
    return None


def figures_of(jobs: list[TraceJob], gpus: int, outcome: Outcome) -> dict[str, float]:
    """Return the figures of a replay by their names. Times in seconds; decision times in milliseconds."""
    ends = {job.number: outcome.started[job.number] + job.duration for job in jobs}
    times = sorted(ends[job.number] - job.submitted for job in jobs)
    waits = {job.number: outcome.started[job.number] - job.submitted for job in jobs}
    wide = [waits[job.number] for job in jobs if job.need.count > 1]
    slow = mean(max(1.0, (ends[job.number] - job.submitted) / max(job.duration, 10.0)) for job in jobs)
    took = [one * 1e3 for one in outcome.decision_s]
    return {
        "makespan": max(ends.values()),
        "makespan_bound": makespan_bound(jobs, gpus),
        "mean_jct": mean(times),
        "mean_jct_bound": mean_jct_bound(jobs, gpus),
        "p95_jct": times[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)],
        "slowdown": slow,
        "passed_over": outcome.passed_over / len(jobs),
        "passed_over_fit": outcome.passed_over_fit / len(jobs),
        "max_wait": max(waits.values()),
        "max_wait_wide": max(wide, default=0.0),
        "decision_ms_mean": mean(took),
        "decision_ms_p99": p99(took),
    }


def outcome_of(jobs: list[TraceJob], gpus: int, policy: str, seed: int = 1) -> Outcome:
    """Return what a policy does with jobs. ``seed``: of the errors of expected run times."""
    return baseline(jobs, gpus, policy) if policy in BASELINES else replay(jobs, gpus, policy, seed)


def run(jobs: list[TraceJob], gpus: int, policy: str, seed: int = 1) -> dict[str, float]:
    """Replay jobs by a policy, and return the figures."""
    return figures_of(jobs, gpus, outcome_of(jobs, gpus, policy, seed))


def main() -> int:
    """Replay a slice of a trace and print the figures; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("trace", metavar="TRACE.csv")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2400)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument(
        "--first", type=int, default=0, help="index of the first job, without the jobs that no server can run"
    )
    parser.add_argument("--policy", choices=POLICIES, default="fifo")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    try:
        jobs = slice_of(asked.trace, asked.gpus, asked.jobs, asked.load, asked.first)
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot replay {asked.trace}: {error}", file=sys.stderr)
        return 2
    figures = run(jobs, asked.gpus, asked.policy)
    if asked.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<17} {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
