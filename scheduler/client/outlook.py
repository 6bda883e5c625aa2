"""Predictions and explanations from the store: when jobs start and end, why a job waits, and what would start it now.

The scheduler itself makes no predictions. The process that asks computes them, so that a question never delays a decision.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.client.stored_state import as_running, queue_waiting, stored_state
from scheduler.core.config import Config
from scheduler.core.forecast import MOST_STARTS, SCENARIOS, Band, Forecast, Prediction
from scheduler.core.gpu import WHOLE, ids_of
from scheduler.core.job import Job, JobState
from scheduler.core.observations import Now
from scheduler.core.offered_requests import OfferedRequest, offered
from scheduler.core.offers import offers
from scheduler.core.placement_class import class_of
from scheduler.core.rights import Caller
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.users import Users
from scheduler.store.paths import Places

BUDGET_S = 1.0  # for all scenarios; of a long queue, fewer are simulated
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
    """The jobs on a GPU, the share (0 to 1) that they hold together, and when all of them are expected to have ended."""

    gpu: int
    jobs: tuple[int, ...]
    share: float
    until: float | None


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
    """Why a waiting job does not start. ``place``: in the queue, from 1; None: it waits outside of the queue.

    ``waiting``: number of jobs in the queue.
    """

    place: int | None = None
    waiting: int = 0
    holders: tuple[Holder, ...] = ()
    expected: Expectation | None = None
    offers: tuple[OfferedCommand, ...] = ()


class Predictor:
    """The state of a scheduler as its store has it, and the predictions from it.

    ``users``: in a scheduler of several users, whose turn it is. Raises sqlite3.Error.
    """

    def __init__(
        self, connection: sqlite3.Connection, places: Places, *, alive: bool, users: Users | None = None
    ) -> None:
        self.now = Now(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
        config = as_running(connection, Config(), alive)
        self.state = stored_state(connection, places, config, self.now, alive=alive)
        self.state.users = users
        queue_waiting(connection, self.state, self.now)
        self._predictions: dict[int, Prediction] | None = None

    def predictions(self, budget_s: float = BUDGET_S) -> dict[int, Prediction]:
        """Return job → prediction. ``budget_s``: time after which no further scenario is simulated."""
        if self._predictions is None:
            until = time.monotonic() + budget_s
            forecast = Forecast(self.state, self.now, MOST_STARTS)
            for scenario in SCENARIOS:
                forecast.simulate([scenario])
                if forecast.scenarios >= LEAST_SCENARIOS and time.monotonic() > until:
                    break
            self._predictions = forecast.predictions()
        return self._predictions

    def outlook(self, budget_s: float = BUDGET_S) -> Outlook:
        """Return the predictions for all jobs that have one."""
        found = {job: expectation_of(one, self.now) for job, one in self.predictions(budget_s).items()}
        return Outlook(self.now.wall, {job: one for job, one in found.items() if one.start or one.end or one.run_s})

    def explanation(self, job: Job, by: Caller | None = None) -> Explanation:
        """Return why a waiting job does not start. ``by``: who asks; offers that this user may not carry out are left out."""
        queue, found = self.state.queue, self.predictions().get(job.id)
        place = queue.place_of(job.id) if job.id in queue else None
        expected = expectation_of(found, self.now) if found is not None else None
        if expected is None:
            run = self.state.estimates.expected(job.spec, job.need)
            expected = None if run is None else Expectation(job.id, run_s=run.seconds, source=run.source)
        commands = [
            OfferedCommand(one.command, one.cost, tuple(map(offered, one.requests)))
            for one in offers(self.state, job, self.now, by)
        ]
        return Explanation(place, len(queue), tuple(self._holders(job)), expected, tuple(commands))

    def _holders(self, job: Job) -> list[Holder]:
        """Return what holds the GPUs that a waiting job may use, those that are free first."""
        if not job.need.total or job.id not in self.state.queue:
            return []
        found = []
        for gpu in ids_of(self.state.fleet.devices(class_of(job))):
            on_it = holders_of(self.state, gpu)
            if on_it:
                ends = [self._end_of(one.id) for one in on_it]
                known = [end for end in ends if end is not None]
                until = max(known) if len(known) == len(ends) else None
                found.append(Holder(gpu, tuple(one.id for one in on_it), self.state.fleet.booked(gpu) / WHOLE, until))
        found.sort(key=lambda one: (one.until is None, one.until or 0.0, one.gpu))
        return found[:MOST_HOLDERS]

    def _end_of(self, job: int) -> float | None:
        found = self.predictions().get(job)
        return None if found is None or found.end is None else self.now.wall + found.end.middle


def expectation_of(found: Prediction, now: Now) -> Expectation:
    """Return a prediction with times of the clock."""

    def moment(band: Band | None) -> Moment | None:
        if band is None:
            return None
        latest = None if band.last == float("inf") else now.wall + band.last
        return Moment(now.wall + band.middle, now.wall + band.first, latest)

    run = (None, "") if found.expected is None else (found.expected.seconds, found.expected.source)
    return Expectation(found.job, moment(found.start), moment(found.end), found.gpus, *run)


def holders_of(state: SchedulerState, gpu: int) -> Sequence[Job]:
    """Return the jobs that have a part of a GPU, by their ids."""
    holding = (job for job in state.live.values() if gpu in job.gpus and job.state is not JobState.PENDING)
    return sorted(holding, key=lambda job: job.id)
