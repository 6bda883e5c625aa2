"""Use and users of the scheduler of all users, for `report --by user` and `who`."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import replace

from scheduler.client.overview import Overview
from scheduler.client.who import Holder, UserUse
from scheduler.core.gpu import WHOLE
from scheduler.core.users import HALF_LIVES, Users
from scheduler.intake.machine_settings import machine_settings
from scheduler.store import jobs as rows


def shares_in(connection: sqlite3.Connection) -> tuple[list[UserUse], float]:
    """Return the use of each user by the jobs in the store, and the half-life in seconds. Raises sqlite3.Error."""
    settings, now = machine_settings(os.environ), time.time()
    users = Users(weights=settings.weights)
    users.half_life_s = settings.fair_half_life or users.half_life_s
    runs = rows.runs_by_user(connection, now - HALF_LIVES * users.half_life_s)
    users.add_past(runs, now)
    for user, _, finished, parts in runs:
        users.standing(user).rate += parts / WHOLE if finished is None else 0.0
    waiting = rows.waiting_by_user(connection)
    for user in waiting:
        users.standing(user)
    standings = sorted(users.standings.items())
    total, weights = sum(one.used for _, one in standings), sum(one.weight for _, one in standings)
    return [
        UserUse(
            user, one.used / 3600, one.used / total if total else 0.0, one.weight / weights, one.rate, waiting.get(user, 0), False
        )
        for user, one in standings
    ], users.half_life_s  # fmt: skip


def with_queue(holders: Iterable[Holder], queue: Overview, service: str, me: str) -> list[Holder]:
    """Return the holders, with the users of the queue in place of the service user.

    ``queue``: what the scheduler of all users runs; ``service``: its user, in whose name the bookings are.
    """
    kept: dict[tuple[str, str, str], Holder] = {}
    for one in holders:
        if (one.user, one.kind) != (service, "jobs"):
            kept[one.gpu.uuid, one.user, one.kind] = one
    on = {job.id: job for job in queue.jobs}
    for view in queue.gpus:
        for job in (on[number] for number in view.jobs if number in on):
            user = job.spec.user
            seen = kept.pop((view.gpu.uuid, user, "foreign"), None)
            if seen is not None:
                seen.kind, seen.since = "jobs", None
                kept[view.gpu.uuid, user, "jobs"] = seen
            held = kept.setdefault((view.gpu.uuid, user, "jobs"), Holder(view.gpu, user, kind="jobs", own=user == me))
            held.share = min(1.0, held.share + job.need.parts / WHOLE)
            held.since = min(held.since or job.started_at or 0.0, job.started_at or 0.0) or None
            if job.spec.time_limit_s is not None and job.started_at is not None:
                held.until = max(held.until or 0.0, job.started_at + job.spec.time_limit_s)
    return sorted((replace(one) for one in kept.values()), key=lambda one: (one.gpu.index, one.user, one.kind))
