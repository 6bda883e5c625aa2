"""Facts about placement that only a running scheduler knows, stored for predictions and explanations by other processes.

They are stored with the reasons why jobs wait, and are as old as these.
"""

from __future__ import annotations

import json
import math
import sqlite3

from scheduler.core.gpu_admission import Verdict
from scheduler.core.observations import Now
from scheduler.core.queue import Promise
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.tenants import overcommit, promised, use_beyond
from scheduler.store import jobs as rows

KEY = "placement"  # in the table `meta`
ROUGH_MIB = 512  # memory in use is stored rounded, because the text is written again when it changes


def placement_facts(state: SchedulerState, now: Now) -> str:
    """Return what keeps jobs off GPUs beside bookings and readings, as a text for `save_placement_facts`."""
    fleet, wall = state.fleet, now.wall - now.mono
    reserved = []
    for one in fleet.reserved:
        promise = state.queue.promises.get(one.job)
        told = None if promise is None else [round(promise.until + wall), round(promise.length_s), promise.missed]
        reserved.append([one.job, told])
    return json.dumps([fleet.keep_free, fleet.others_mask, fleet.closed, reserved, _use_beyond(state)])


def _use_beyond(state: SchedulerState) -> list[list[object]]:
    """Return (GPU, attempt, MiB) for each attempt that uses more memory of a GPU than it was promised, roughly."""
    found: list[list[object]] = []
    for gpu, card in state.fleet.admission.cards.items():
        for tenant in state.tenants(gpu) if card.own else ():
            used = card.own.get(tenant.key, 0.0)
            if used > promised(tenant, card.capacity_mib):
                found.append([gpu, tenant.key, math.ceil(used / ROUGH_MIB) * ROUGH_MIB])
    return found


def _restore_use(state: SchedulerState, beyond: list[tuple[int, str, int]]) -> None:
    """Count the memory that attempts use beyond what they were promised, as `core/admission.py` does."""
    admission = state.fleet.admission
    for gpu, card in admission.cards.items():
        mine = {key: float(mib) for index, key, mib in beyond if index == gpu}
        if not mine:
            continue
        capacity = float(card.capacity_mib)
        card.own = {one.key: mine.get(one.key, promised(one, capacity)) for one in state.tenants(gpu)}
        more = 0.0 if admission.thresholds.by_memory else use_beyond(state.tenants(gpu), card.own, capacity)
        if more:
            card.overcommit_mib = int(card.foreign_mib + more)
            card.overcommit = overcommit(card.foreign_mib + more, capacity, admission.thresholds.tolerance)
            admission.tight_mask |= 1 << gpu
            if more >= card.foreign_mib:  # the reason of the reading is about the job, not about foreign processes
                card.why_overcommit, card.whole_blocked = Verdict("over-share", card.whole.sentence), False
                admission.whole_blocked_mask &= ~(1 << gpu)


def save_placement_facts(connection: sqlite3.Connection, facts: str) -> None:
    """Store the result of `placement_facts`. Raises sqlite3.Error."""
    rows.set_meta(connection, KEY, facts)


def restore_placement_facts(connection: sqlite3.Connection, state: SchedulerState, now: Now) -> None:
    """Apply the stored facts to a state with its waiting jobs. Raises sqlite3.Error."""
    text = rows.meta(connection, KEY)
    if not text:
        return
    fleet = state.fleet
    fleet.keep_free, fleet.others_mask, fleet.closed, reserved, beyond = json.loads(text)
    _restore_use(state, beyond)
    for job, told in reserved:
        if job not in state.queue:
            continue
        if told is None:
            state.queue.set_overtaken(job, state.policy.max_overtakes)
        else:
            until, length, missed = told
            state.queue.promises[job] = Promise(until - now.wall + now.mono, length, missed)
