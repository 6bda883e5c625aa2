"""Case decide: the cost of scheduling decisions alone, without a store, a disk or a process.

The time of the model stands still; so the expected starts of all classes, which a scheduler computes again every 1 to 60
seconds, are measured apart: the longest of five decisions that compute all of them. In the rows with a reservation, run times are known, GPUs are reserved for a job of 8 GPUs, and in each decision up to 100 jobs
of each class are tried on the reserved GPUs (`core/backfill.py`).
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace

from benchmarks.figures import Report, median, p99, progress
from benchmarks.plan import Plan
from scheduler.core.decide import decide
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState, Process
from scheduler.core.observations import Arrived, Ended, Now, Started
from scheduler.core.placement import Fleet
from scheduler.core.scheduler_state import SchedulerState

SERVER = 8  # GPUs of one server
YEAR_S = 365 * 86_400.0
BATCH = 256  # jobs that arrive in one decision
DECISIONS = 2000
MOST_S = 20.0
ONE = ResourceRequest(1, WHOLE)
NEEDS = (ONE, ONE, ONE, ResourceRequest(2, WHOLE), ResourceRequest(4, WHOLE), ONE)


def job_of(number: int, gpus: int, timed: bool = False) -> Job:
    """Return the waiting job with this number. ``timed``: it has a time limit, which is its expected run time.

    The jobs request 1, 2 or 4 whole GPUs and have ten priorities; one job in six may run on one GPU only.
    """
    need = NEEDS[number % len(NEEDS)]
    allowed = (number % gpus,) if number % len(NEEDS) == 5 else None
    limit = 3600.0 + number % 1000 if timed else None
    spec = JobSpec(
        script="/work/train.py", arguments=("--seed", str(number)), priority=number % 10, allowed=allowed,
        time_limit_s=limit,
    )  # fmt: skip
    return Job(number, spec, need, order=number, priority=spec.priority, allowed=allowed, submitted_at=float(number))


def decide_case(plan: Plan) -> Report:
    """Measure the cost of a decision, and of adding a job to the queue.

    In each decision one job ends and one job starts, while many jobs wait.
    """
    sizes = [(plan.count(1_000), 8, False), (plan.count(100_000), 8, False)]
    sizes += [(plan.count(1_000), 8, True), (plan.count(100_000), 1024, True)]
    if plan.million:
        sizes += [(plan.count(1_000_000), 1024, False), (plan.count(1_000_000), 1024, True)]
    report = Report(
        "decide",
        "one job ends, one starts; core objects alone",
        ("waiting", "GPUs", "reservation", "mean ms", "p99 ms", "max ms", "all starts ms", "µs per enqueue"),
    )
    for waiting, gpus, reserved in sizes:
        progress(f"decide: {waiting} on {gpus}{', with a reservation' if reserved else ''}")
        enqueue_us, took, starts_ms = _measure(waiting, gpus, reserved)
        mean = sum(took) / len(took)
        report.row(f"{waiting:,}", gpus, "yes" if reserved else "no", mean, p99(took), max(took), starts_ms, enqueue_us)
        report.figures[f"{waiting}/{gpus}{'/reserved' if reserved else ''}"] = {
            "mean_ms": mean, "median_ms": median(took), "p99_ms": p99(took), "max_ms": max(took),
            "all_starts_ms": starts_ms, "enqueue_us": enqueue_us, "decisions": len(took),
        }  # fmt: skip
    return report


def _wide(number: int) -> Job:
    """Return a job of a whole server, the most urgent of all."""
    spec = JobSpec(script="/work/wide.py", priority=-1, time_limit_s=60.0)
    return Job(number, spec, ResourceRequest(SERVER, WHOLE), order=number, priority=-1)


def _measure(waiting: int, gpus: int, reserved: bool) -> tuple[float, list[float], float]:
    """Return the microseconds for each added job (their mean), and the milliseconds for each decision.

    Third: the milliseconds of a decision that computes the expected starts of all classes.
    """
    fleet = Fleet(Gpu(n, f"declared:{n}", server=n // SERVER) for n in range(gpus))
    wide = _wide(10 * waiting + gpus)
    state = SchedulerState(fleet, lambda number: wide if number == wide.id else job_of(number, gpus, reserved))
    now = Now(1e9, 1e9)
    running = []
    for n in range(gpus):  # every GPU is allocated when the waiting jobs arrive
        job = replace(
            job_of(waiting + n, gpus, reserved), need=ONE, allowed=None, state=JobState.RUNNING, attempt=1, gpus=(n,)
        )
        job.process, job.started_at = Process(n + 1, 1), now.wall
        state.adopt(job, now)
        running.append(job)
    spent = 0
    for first in range(0, waiting, BATCH):
        observations = [Arrived(job_of(number, gpus, reserved)) for number in range(first, min(first + BATCH, waiting))]
        before = time.perf_counter_ns()
        decide(state, observations, now)
        spent += time.perf_counter_ns() - before
    enqueue_us = spent / waiting / 1e3
    if reserved:
        decide(state, [Arrived(wide)], Now(now.wall - YEAR_S, now.mono - YEAR_S))  # it has waited so long
        decide(state, [], now)
        assert [one.job for one in state.fleet.reserved] == [wide.id], "nothing is reserved"
    dice = random.Random(1)
    took: list[float] = []
    gc.collect()
    deadline = time.monotonic() + MOST_S
    while len(took) < min(DECISIONS, waiting // 4) and time.monotonic() < deadline:
        at = dice.randrange(len(running))
        ended = [Ended(running[at].id, running[at].attempt, 0, None, now.wall)]
        before = time.perf_counter_ns()
        plan = decide(state, ended, now)
        took.append((time.perf_counter_ns() - before) / 1e6)
        if len(took) == 1:  # the first end makes run times known
            state.queue.expected_starts.clear()
        assert len(plan.starts) == 1, f"{len(plan.starts)} jobs started on one free GPU"
        running[at] = plan.starts[0]
        decide(state, [Started(running[at].id, running[at].attempt, Process(1, 1), now.wall)], now)
    slow: list[float] = []
    for _ in range(5):
        state.queue.expected_starts.clear()
        before = time.perf_counter_ns()
        decide(state, [], now)
        slow.append((time.perf_counter_ns() - before) / 1e6)
    return enqueue_us, took, max(slow)
