"""Requests carried out without a daemon: what needs none is done at once, the rest waits for the next start."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from scheduler.core.config import Config
from scheduler.core.decide import World, decide
from scheduler.core.errors import SchedulerError
from scheduler.core.facts import Asked, Now
from scheduler.core.gpu import ids_of, mask_of
from scheduler.core.job import Job, JobState
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.requests import (
    Answer,
    Cancel,
    Edit,
    First,
    Hold,
    Pause,
    PauseQueue,
    Release,
    Request,
    Requeue,
    Resume,
    StateEdited,
    Swap,
)
from scheduler.engine.painting import Painter, open_state_file
from scheduler.engine.reloading import policy_of
from scheduler.runners.recorded_end import as_recorded
from scheduler.store import jobs as rows
from scheduler.store import tallies
from scheduler.store.database import Database
from scheduler.store.last_rules import last_rules
from scheduler.store.office import Office
from scheduler.store.places import Places

JobsRequest = Cancel | Requeue | Hold | Release | First | Swap | Edit
LATER = {
    Cancel: "it is cancelled", Requeue: "it is run again, if it has not ended well,", Hold: "it is held",
    Release: "it is released", First: "it is put first", Edit: "it is changed",
}  # fmt: skip


def carry_out(places: Places, config: Config, request: Request) -> Answer:
    """Do what was asked of a scheduler that does not run. Raises SchedulerError when one has started meanwhile."""
    places.make()
    office = Office(places)
    office.take({"pid": os.getpid(), "what": "a command without daemon"}, wait_s=2.0)
    try:
        database = Database(places)
        try:
            return _carry_out(database, config, request)
        finally:
            database.close()
    finally:
        office.leave()


def _carry_out(database: Database, config: Config, request: Request) -> Answer:
    connection = database.connection
    now = Now(time.time(), time.monotonic())
    gpus = rows.gpus(connection)
    rules = last_rules(connection)
    recorded = {job.id: as_recorded(job, database.places.attempts, rules)[0] for job in rows.in_hand(connection)}
    request, later = _put_off(request, recorded)

    def fetch(job: int) -> Job | None:
        return recorded.get(job) or rows.get(connection, job)

    world = World(Fleet(gpus), fetch, policy_of(config), may_start=False)
    world.blocker = lambda identity: rows.blocker_of(connection, identity)
    world.fleet.paused_mask = mask_of(rows.paused_gpus(connection))
    world.queue_paused = bool(rows.meta(connection, "queue_paused"))
    world.pauses = Pauses(0, rows.pause_changes(connection))
    world.front = rows.lowest_place(connection)
    said: list[str] = []
    file = open_state_file(config.state_file, database, world, {gpu.uuid: gpu.index for gpu in gpus})
    painter = Painter(file, database, lambda text, _level, _kind: said.append(text))
    edit = painter.look(now, 0.0, heard=True)  # somebody may have edited it since the last picture
    asked = [] if edit is None else [Asked(0, edit.request)]
    with database.writing() as writing:
        plan = decide(world, [*asked, Asked(0, request)], now)
        rows.save(writing, plan.changed.values())
        for job in plan.respecs.values():
            rows.respec(writing, job)
        tallies.count(writing, plan.events, plan.changed)
        rows.write_events(writing, plan.events)
        if plan.pauses_changed:
            rows.save_pauses(writing, ids_of(world.fleet.paused_mask), world.queue_paused, world.pauses.changes)
        if later is not None:
            rows.ask(writing, later, now.wall)
    if edit is not None:
        painter.took(edit)
    if plan.pauses_changed:
        for job in recorded.values():
            if job.state.holds_gpus and all(gpu in world.fleet.gpus for gpu in job.gpus):
                world.adopt(job, now)
        painter.paint(world, now)
    file.close()
    answer = plan.answers[0]
    if later is None:
        return Answer(0, answer.code, (*answer.lines, *said))
    lines = (*answer.lines, *(_later_line(recorded[job], later) for job in later.jobs), *said)
    return Answer(0, 5, lines)


def _later_line(job: Job, request: JobsRequest) -> str:
    now = "is to run again" if job.state is JobState.PENDING else "was running at last"
    return f"job {job.id} {now}; {LATER[type(request)]} when the scheduler starts again"


def _put_off(request: Request, recorded: Mapping[int, Job]) -> tuple[Request, JobsRequest | None]:
    """What can be done now, and what is left to the next scheduler, because only it takes note of how a run ended.

    ``recorded``: the jobs that ran when the last scheduler ended, each as its record tells it. Raises SchedulerError.
    """
    if isinstance(request, (Pause, Resume, PauseQueue, StateEdited)):
        return request, None
    again = {job.id for job in recorded.values() if job.state is JobState.PENDING}
    if isinstance(request, Swap):
        for job in request.jobs:
            if job in again:
                text = f"job {job} is to run again, and gets its place when the scheduler starts"
                raise SchedulerError(text, do="start it first: gpujob start")
        return request, None
    if isinstance(request, Requeue):
        later = _only(request, set(recorded))
        # Nobody knows yet how these end: one that ends well meanwhile is not run twice.
        return _without(request, later.jobs), Requeue(later.jobs, unless_done=True) if later.jobs else None
    if isinstance(request, Cancel):
        again = {job.id for job in recorded.values() if not job.state.ended}
    later = _only(request, again)
    return _without(request, later.jobs), later if later.jobs else None


def _without(request: JobsRequest, jobs: Iterable[int]) -> JobsRequest:
    return _only(request, set(request.jobs) - set(jobs))


def _only(request: JobsRequest, wanted: Collection[int]) -> JobsRequest:
    """The same request for those of its jobs that are ``wanted``."""
    at = [place for place, job in enumerate(request.jobs) if job in wanted]
    jobs = tuple(request.jobs[place] for place in at)
    if isinstance(request, Requeue):
        return replace(request, jobs=jobs, after=tuple(request.after[place] for place in at) if request.after else ())
    if isinstance(request, Edit):
        return replace(request, jobs=jobs, needs=tuple(request.needs[place] for place in at) if request.needs else ())
    return replace(request, jobs=jobs)
