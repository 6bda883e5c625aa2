"""Carries out requests without a daemon; stores the parts that only the next start of a daemon can carry out."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from scheduler.client.deferred_requests import Tried, divide
from scheduler.core.config import Config
from scheduler.core.decide import decide
from scheduler.core.gpu import ids_of
from scheduler.core.observations import Asked, Now
from scheduler.core.requests import Answer, JobsRequest, Request
from scheduler.daemon.state_writer import StateWriter, open_state_file
from scheduler.runners.recorded_end import as_recorded
from scheduler.store import counters
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import DaemonLock
from scheduler.store.database import Database
from scheduler.store.gpu_faults import save_faults
from scheduler.store.last_rules import last_rules
from scheduler.store.paths import Places
from scheduler.store.scheduler_state import book_active, read_state
from scheduler.system.proc import boot_id


def carry_out(places: Places, config: Config, request: Request) -> Answer:
    """Carry out a request while no scheduler runs, and return the answer.

    Raises Taken if a scheduler has just started.
    """
    places.make()
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": os.getpid(), "what": "a command without daemon"}, wait_s=2.0)
    try:
        database = Database(places)
        try:
            return _carry_out(database, config, request)
        finally:
            database.close()
    finally:
        daemon_lock.leave()


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
        trial = read_state(
            connection, config, gpus, fetch=lambda job: copies.get(job) or rows.get(connection, job), may_start=False
        )
        plan = decide(trial, [Asked(0, part)], now)
        return Tried(plan.answers[0], bool(plan.changed))

    state = read_state(connection, config, gpus, may_start=False)
    said: list[str] = []
    file = open_state_file(config.state_file, database, state, {gpu.uuid: gpu.index for gpu in gpus})
    painter = StateWriter(file, database, lambda text, _level, _kind: said.append(text))
    edit = painter.look(now, 0.0, heard=True)  # a user may have edited it since it was written
    asked = [] if edit is None else [Asked(0, edit.request)]
    with database.writing() as writing:
        divided = divide(request, recorded, [one.request for _, one in rows.asked(writing)], try_out)
        plan = decide(state, [*asked, Asked(0, divided.at_once)], now)
        rows.save(writing, plan.changed.values())
        for job in plan.respecs.values():
            rows.respec(writing, job)
        counters.count(writing, plan.events, plan.changed)
        rows.write_events(writing, plan.events)
        if plan.pauses_changed:
            rows.save_pauses(writing, ids_of(state.fleet.paused_mask), state.queue_paused, state.pauses.changes)
        if plan.faults_changed:
            save_faults(writing, state.faults.values(), boot_id())
        for later in divided.later:
            rows.ask(writing, later, now.wall)
    if edit is not None:
        painter.took(edit)
    if plan.pauses_changed:
        book_active(connection, state, boot_id(), now)
        painter.paint(state, now)
    file.close()
    answer = plan.answers[0]
    code = answer.code or divided.code or (5 if divided.later else 0)
    return Answer(0, code, (*answer.lines, *divided.lines, *said))
