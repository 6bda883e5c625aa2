"""Facts about placement that only a running scheduler knows, stored for predictions and explanations by other processes.

They are stored with the reasons why jobs wait, and are as old as these.
"""

from __future__ import annotations

import json
import sqlite3

from scheduler.core.observations import Now
from scheduler.core.queue import Promise
from scheduler.core.scheduler_state import SchedulerState
from scheduler.store import jobs as rows

KEY = "placement"  # in the table `meta`


def placement_facts(state: SchedulerState, now: Now) -> str:
    """Return what keeps jobs off GPUs beside bookings and readings, as a text for `save_placement_facts`."""
    fleet, wall = state.fleet, now.wall - now.mono
    reserved = []
    for one in fleet.reserved:
        promise = state.queue.promises.get(one.job)
        told = None if promise is None else [round(promise.until + wall), round(promise.length_s), promise.missed]
        reserved.append([one.job, told])
    return json.dumps([fleet.keep_free, fleet.others_mask, fleet.closed, reserved])


def save_placement_facts(connection: sqlite3.Connection, facts: str) -> None:
    """Store the result of `placement_facts`. Raises sqlite3.Error."""
    rows.set_meta(connection, KEY, facts)


def restore_placement_facts(connection: sqlite3.Connection, state: SchedulerState, now: Now) -> None:
    """Apply the stored facts to a state with its waiting jobs. Raises sqlite3.Error."""
    text = rows.meta(connection, KEY)
    if not text:
        return
    fleet = state.fleet
    fleet.keep_free, fleet.others_mask, fleet.closed, reserved = json.loads(text)
    for job, told in reserved:
        if job not in state.queue:
            continue
        if told is None:
            state.queue.set_overtaken(job, state.policy.max_overtakes)
        else:
            until, length, missed = told
            state.queue.promises[job] = Promise(until - now.wall + now.mono, length, missed)
