"""Requests carried out without a daemon: what needs none is done at once, the rest waits for the next start."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.core.config import Config
from scheduler.core.decide import World, decide
from scheduler.core.facts import Asked, Now
from scheduler.core.gpu import Gpu, ids_of, mask_of
from scheduler.core.job import Job
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.requests import Answer, JobsRequest, Request
from scheduler.engine.left_for_start import Tried, divide
from scheduler.engine.painting import Painter, open_state_file
from scheduler.engine.reloading import policy_of
from scheduler.runners.recorded_end import as_recorded
from scheduler.store import jobs as rows
from scheduler.store import tallies
from scheduler.store.database import Database
from scheduler.store.last_rules import last_rules
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
    in_hand = list(rows.in_hand(connection))
    named = set(request.jobs) if isinstance(request, JobsRequest) else set()
    rules = last_rules(connection)
    recorded = {job.id: as_recorded(job, database.places.attempts, rules)[0] for job in in_hand if job.id in named}

    def try_out(part: JobsRequest) -> Tried:
        copies = {number: replace(job) for number, job in recorded.items()}
        trial = _world(connection, config, gpus, lambda job: copies.get(job) or rows.get(connection, job))
        plan = decide(trial, [Asked(0, part)], now)
        return Tried(plan.answers[0], bool(plan.changed))

    world = _world(connection, config, gpus, lambda job: rows.get(connection, job))
    said: list[str] = []
    file = open_state_file(config.state_file, database, world, {gpu.uuid: gpu.index for gpu in gpus})
    painter = Painter(file, database, lambda text, _level, _kind: said.append(text))
    edit = painter.look(now, 0.0, heard=True)  # somebody may have edited it since the last picture
    asked = [] if edit is None else [Asked(0, edit.request)]
    with database.writing() as writing:
        divided = divide(request, recorded, [wish for _, _, wish in rows.asked(writing)], try_out)
        plan = decide(world, [*asked, Asked(0, divided.at_once)], now)
        rows.save(writing, plan.changed.values())
        for job in plan.respecs.values():
            rows.respec(writing, job)
        tallies.count(writing, plan.events, plan.changed)
        rows.write_events(writing, plan.events)
        if plan.pauses_changed:
            rows.save_pauses(writing, ids_of(world.fleet.paused_mask), world.queue_paused, world.pauses.changes)
        for later in divided.later:
            rows.ask(writing, later, now.wall)
    if edit is not None:
        painter.took(edit)
    if plan.pauses_changed:
        for job in in_hand:
            if all(gpu in world.fleet.gpus for gpu in job.gpus):
                world.adopt(job, now)
        painter.paint(world, now)
    file.close()
    answer = plan.answers[0]
    code = answer.code or divided.code or (5 if divided.later else 0)
    return Answer(0, code, (*answer.lines, *divided.lines, *said))


def _world(
    connection: sqlite3.Connection, config: Config, gpus: Sequence[Gpu], fetch: Callable[[int], Job | None]
) -> World:
    world = World(Fleet(gpus), fetch, policy_of(config), may_start=False)
    world.blocker = lambda identity: rows.blocker_of(connection, identity)
    world.fleet.paused_mask = mask_of(rows.paused_gpus(connection))
    world.queue_paused = bool(rows.meta(connection, "queue_paused"))
    world.pauses = Pauses(0, rows.pause_changes(connection))
    world.front = rows.lowest_place(connection)
    return world
