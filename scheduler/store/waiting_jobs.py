"""Reads the waiting jobs for a start of the daemon: only as much of each job as the start needs.

To read 100,000 jobs as objects takes seconds. The functions that yield Job raise Damaged if a row has invalid values.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

from scheduler.core.errors import Damaged, SchedulerError
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobState
from scheduler.core.placement_class import PlacementClass, WaitingJob, made_class
from scheduler.store.job_columns import SELECT, allowed_of, job_of
from scheduler.store.jobs import counts

_WAITING = "finished_at IS NULL AND state='pending'"
# False for a line of a jobs file. This is faster than the functions for JSON. Values of a spec cannot contain the searched
# text, because quotes in values are escaped.
_HAS_SOURCE = "instr(spec, '\"source\":')>0"
# SQLite's functions for JSON raise an error for invalid JSON, so `json_valid` is called before them.
_SOURCE = "CASE WHEN json_valid(spec) THEN json_extract(spec, '$.source') ELSE 'damaged' END"
_DOCUMENTS = {"spec": "{", "notes": "[", "argv": "[", "failure": "["}  # columns with JSON → its first character
_SOUND = " AND ".join(
    f"CASE WHEN {name}='' THEN {int(name != 'spec')} ELSE coalesce(substr({name}, 1, 1)='{first}' AND json_valid({name}), 0) END"
    for name, first in _DOCUMENTS.items()
)
# A damaged row is not ready: it is read as a job, and that raises Damaged.
_READY = f"held=0 AND not_before IS NULL AND waits_for=0 AND reason_code='' AND outcome IS NULL AND {_SOUND}"


def ready(connection: sqlite3.Connection) -> Iterator[WaitingJob]:
    """Yield the facts about each waiting job that can start as soon as there is room, ordered by id.

    For these jobs no other reason to wait is stored. Raises Damaged if a row has an invalid list of allowed GPUs or an unknown link.
    """
    kinds: dict[tuple[Any, ...], PlacementClass] = {}
    for row in connection.execute(
        "SELECT id, priority, place, submitted_at, need_count, need_parts, need_profile, allowed, vram_mib, user, link FROM jobs"
        f" WHERE {_WAITING} AND {_READY} ORDER BY id"
    ):
        kind = kinds.get(row[4:])
        if kind is None:
            count, parts, profile, allowed, vram_mib, user, link = row[4:]
            try:
                ids = allowed_of(allowed) if count else None
                kind = made_class(ResourceRequest(count, parts, profile), ids, vram_mib, user, link)
            except (SchedulerError, ValueError) as error:
                raise Damaged(f"the store is damaged (job {row[0]}: {error})") from error
            kinds[row[4:]] = kind
        yield WaitingJob(row[0], kind, row[1], row[2] or row[0], row[3])


def not_ready(connection: sqlite3.Connection, ready: int) -> Iterator[Job]:
    """Yield the waiting jobs that `ready` leaves out, ordered by id. ``ready``: the number of jobs that it has yielded."""
    if counts(connection)[JobState.PENDING.value] == ready:
        return iter(())  # without another look at all waiting jobs
    return _where(connection, f"NOT ({_READY})")


def from_commands_file(connection: sqlite3.Connection) -> Iterator[Job]:
    """Yield the waiting jobs from a commands file, ordered by id."""
    return _where(connection, f"{_HAS_SOURCE} AND {_SOURCE}='commands'")


def with_uncertain_need(connection: sqlite3.Connection) -> Iterator[Job]:
    """Yield the waiting jobs whose need was possibly not computed from the last daemon's model table and GPUs.

    The need of a submitted or edited job was computed by another process. A job that ended and waits again has kept its
    old need. Only these waiting jobs are left out: jobs from a jobs file that were never started and have no event,
    which shows that nothing has happened to them since their lines were read. The jobs are ordered by id.
    """
    changed = "EXISTS (SELECT 1 FROM events WHERE job=jobs.id)"
    return _where(connection, f"(attempt>0 OR {_HAS_SOURCE} OR {changed})")


def _where(connection: sqlite3.Connection, condition: str) -> Iterator[Job]:
    return map(job_of, connection.execute(f"{SELECT} WHERE {_WAITING} AND {condition} ORDER BY id"))
