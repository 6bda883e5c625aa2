"""Requests carried out without a daemon: what needs none is done at once, the rest waits for the next start."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from scheduler.core.config import Config
from scheduler.core.decide import World, decide
from scheduler.core.facts import Asked, Now
from scheduler.core.gpu import ids_of, mask_of
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.requests import Answer, Cancel, Request, Requeue
from scheduler.engine.painting import Painter, open_state_file
from scheduler.engine.reloading import policy_of
from scheduler.store import jobs as rows
from scheduler.store import tallies
from scheduler.store.database import Database
from scheduler.store.office import Office
from scheduler.store.places import Places


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
    world = World(Fleet(gpus), lambda job: rows.get(connection, job), policy_of(config), may_start=False)
    world.blocker = lambda identity: rows.blocker_of(connection, identity)
    world.fleet.paused_mask = mask_of(rows.paused_gpus(connection))
    world.queue_paused = bool(rows.meta(connection, "queue_paused"))
    world.pauses = Pauses(0, rows.pause_changes(connection))
    world.front = rows.lowest_place(connection)
    in_hand = {job.id: job for job in rows.in_hand(connection)}
    later: tuple[int, ...] = ()
    if isinstance(request, (Cancel, Requeue)):
        later = tuple(job for job in request.jobs if job in in_hand)
        others = tuple(job for job in request.jobs if job not in later)
        if isinstance(request, Requeue):
            seen = request.seen()
            request = replace(request, jobs=others, after=tuple(seen[job] for job in others) if seen else ())
        else:
            request = Cancel(others)
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
        if later:
            # Nobody knows yet how these end: asked to run again, one that ends well meanwhile is not run twice.
            wish = Cancel(later) if isinstance(request, Cancel) else Requeue(later, unless_done=True)
            rows.ask(writing, wish, now.wall)
    if edit is not None:
        painter.took(edit)
    if plan.pauses_changed:
        for job in in_hand.values():
            if all(gpu in world.fleet.gpus for gpu in job.gpus):
                world.adopt(job, now)
        painter.paint(world, now)
    file.close()
    answer = plan.answers[0]
    then = "it is cancelled" if isinstance(request, Cancel) else "it is run again, if it has not ended well,"
    lines = (
        *answer.lines,
        *(f"job {job} was running at last; {then} when the scheduler starts again" for job in later),
        *said,
    )
    return Answer(0, 5 if later else answer.code, lines)
