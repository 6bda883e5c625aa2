"""Predictions and explanations from the store: when jobs start and end, why a job waits, and what would start it now.

The scheduler itself makes no predictions. The process that asks computes them, so that a question never delays a decision.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.client.stored_state import as_running, queue_waiting, stored_state
from scheduler.core.config import Config
from scheduler.core.forecast import SCENARIOS, Band, Forecast, Prediction
from scheduler.core.gpu import WHOLE, decimal_text, ids_of
from scheduler.core.job import Job
from scheduler.core.observations import Now
from scheduler.core.offered_requests import OfferedRequest, offered
from scheduler.core.offers import offers
from scheduler.core.placement_class import class_of
from scheduler.core.rights import Caller
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.users import Users
from scheduler.store.paths import Places

LEAST_SCENARIOS = 3
MOST_HOLDERS = 8  # GPUs that an explanation names


@dataclass(frozen=True, slots=True)
class Moment:
    """A predicted time, in seconds since 1970: the most likely, the earliest and the latest; None: not in sight."""

    likely: float
    earliest: float
    latest: float | None


@dataclass(frozen=True, slots=True)
class Expectation:
    """When a job is expected to start (None: it runs, or this is not known) and to end, and on which GPUs.

    ``run_s``: its expected run time in seconds; ``source``: what that is based on, such as "median of 3 runs of the same script".
    """

    job: int
    start: Moment | None = None
    end: Moment | None = None
    gpus: tuple[int, ...] = ()
    run_s: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predictions for all running jobs and the first waiting ones. ``at``: when they were made (seconds since 1970)."""

    at: float
    jobs: Mapping[int, Expectation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holder:
    """The jobs on a GPU, the share (0 to 1) that they hold together, and when all of them are expected to have ended.

    ``gpu``: None for a job without a GPU; then ``share`` is the number of its slots. ``others``: what else holds a part of the
    GPU, as sentences: leftover processes, and bookings of other schedulers.
    """

    gpu: int | None
    jobs: tuple[int, ...]
    share: float
    until: float | None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OfferedCommand:
    """A command that would start a job now.

    ``cost``: what it costs, and whom, as a clause; ``requests``: the requests of the command, in their order.
    """

    command: str
    cost: str
    requests: tuple[OfferedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a waiting job does not start.

    ``place``: in the queue (of its user, if there are several), from 1; None: the job waits for something else than room, or
    behind the first `MOST_WAITING` jobs, of which alone the place is known. ``waiting``: number of jobs in this queue.
    ``unknown``: why its start is not known, as a clause; empty if it is known, or if the job is not in the queue.
    """

    place: int | None = None
    waiting: int = 0
    holders: tuple[Holder, ...] = ()
    expected: Expectation | None = None
    offers: tuple[OfferedCommand, ...] = ()
    unknown: str = ""


class Predictor:
    """The state of a running scheduler as its store has it, and what is predicted from it.

    ``users``: in a scheduler of several users, whose turn it is. Raises sqlite3.Error.
    """

    def __init__(self, connection: sqlite3.Connection, places: Places, users: Users | None = None) -> None:
        self.now = Now(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
        config = as_running(connection, Config(), True)
        self.state = stored_state(connection, places, config, self.now, alive=True)
        self.state.users = users
        queue_waiting(connection, self.state, self.now)

    def outlook(self, budget_s: float) -> Outlook:
        """Return the predictions for the running jobs, and for the waiting jobs whose start is in sight."""
        predictions = predicted(self.state, self.now, budget_s)
        found = {job: expectation_of(one, self.now) for job, one in predictions.items()}
        return Outlook(self.now.wall, {job: one for job, one in found.items() if one.start or job in self.state.live})

    def explanation(self, job: Job, budget_s: float, by: Caller | None = None) -> Explanation:
        """Return why a waiting job does not start. ``by``: who asks; offers that this user may not carry out are left out."""
        return explanation_of(self.state, self.now, job, budget_s, by)


def predicted(state: SchedulerState, now: Now, budget_s: float) -> dict[int, Prediction]:
    """Return the predictions by job id. ``budget_s``: seconds after which no further scenario is simulated."""
    until = time.monotonic() + budget_s
    forecast = Forecast(state, now)
    for scenario in SCENARIOS:
        forecast.simulate([scenario])
        if forecast.scenarios >= LEAST_SCENARIOS and time.monotonic() > until:
            break
    return forecast.predictions()


def explanation_of(state: SchedulerState, now: Now, job: Job, budget_s: float, by: Caller | None = None) -> Explanation:
    """Return why a waiting job of ``state`` does not start. ``by``: who asks, as in `offers`."""
    predictions = predicted(state, now, budget_s)
    found = predictions.get(job.id)
    expected = expectation_of(found, now) if found is not None else None
    if expected is None:
        run = state.estimates.expected(job.spec, job.need)
        expected = None if run is None else Expectation(job.id, run_s=run.seconds, source=run.source)
    commands = [
        OfferedCommand(one.command, one.cost, tuple(map(offered, one.requests))) for one in offers(state, job, now, by)
    ]
    in_queue = job.id in state.queue
    place = state.queue.place_of(job.id) if in_queue else None
    waiting = sum(number for kind, number in state.queue.sizes().items() if kind.user == job.spec.user)
    holders = _holders(state, now, job, predictions) if in_queue else []
    known = not in_queue or (expected is not None and expected.start is not None)
    return Explanation(
        place, waiting, tuple(holders), expected, tuple(commands), "" if known else _why_unknown(state, job)
    )


def _why_unknown(state: SchedulerState, job: Job) -> str:
    """Return why it cannot be said when a job of the queue starts."""
    able = state.fleet.able(class_of(job)) if job.need.count else 0
    if able and not able & ~state.fleet.paused_mask:
        return "its GPUs are paused"
    for one in state.live.values():
        beside = any(able >> gpu & 1 for gpu in one.gpus) if job.need.count else not one.need.count
        if beside and state.estimates.expected(one.spec, one.need) is None:
            return f"it is not known how long job {one.id} runs"
    return "it is too far away, or it is not known how long a job before it runs"


def _holders(state: SchedulerState, now: Now, job: Job, predictions: Mapping[int, Prediction]) -> list[Holder]:
    """Return what holds the GPUs, or slots, that a waiting job may use; those that are free first come first."""
    found = [] if job.need.count else _holders_of_slots(state, now, predictions)
    for gpu in ids_of(state.fleet.able(class_of(job))) if job.need.total else ():
        jobs = sorted((one for one in state.live.values() if gpu in one.gpus and not one.need.by_name), key=_id)
        ends = [predictions[one.id].end if one.id in predictions else None for one in jobs]
        known = [now.wall + end.middle for end in ends if end is not None]
        others = [
            f"leftover processes of job {held.job} hold {decimal_text(held.need.parts)} of GPU {gpu}"
            for held in state.holdings.values()
            if gpu in held.gpus
        ]
        others += [state.fleet.outside[gpu][2]] if gpu in state.fleet.outside else []
        if jobs or others:
            parts = sum(one.need.parts for one in jobs)
            until = max(known) if known and len(known) == len(jobs) else None
            found.append(Holder(gpu, tuple(one.id for one in jobs), parts / WHOLE, until, tuple(others)))
    found.sort(key=lambda one: (one.until is None, one.until or 0.0, one.gpu or 0, one.jobs))
    return found[:MOST_HOLDERS]


def _holders_of_slots(state: SchedulerState, now: Now, predictions: Mapping[int, Prediction]) -> list[Holder]:
    found = []
    for one in state.live.values():
        if not one.need.count:
            end = predictions[one.id].end if one.id in predictions else None
            until = None if end is None else now.wall + end.middle
            found.append(Holder(None, (one.id,), one.need.slots, until))
    return found


def _id(job: Job) -> int:
    return job.id


def expectation_of(found: Prediction, now: Now) -> Expectation:
    """Return a prediction with times of the clock."""

    def moment(band: Band | None) -> Moment | None:
        if band is None:
            return None
        latest = None if band.last == float("inf") else now.wall + band.last
        return Moment(now.wall + band.middle, now.wall + band.first, latest)

    run = (None, "") if found.expected is None else (found.expected.seconds, found.expected.source)
    return Expectation(found.job, moment(found.start), moment(found.end), found.gpus, *run)
