"""Deletes ended jobs, and the stored environments that no job uses any more."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence

from scheduler.core.job import ENDED, Job
from scheduler.core.log_names import errors_of, logs_of
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.good_runs import forget_job
from scheduler.store.migrations import ENDING
from scheduler.store.paths import Places
from scheduler.system.crash_points import crash_point

UNSWEPT = "unswept"  # key in `meta`: last deleted job with a stored environment; empty after the next sweep
_ENVIRONMENT = re.compile(r'"env_file": "[^"]*?([0-9a-f]{32})"')
_ENDED = "finished_at IS NOT NULL AND state IN ({})".format(", ".join(f"'{state.value}'" for state in ENDED))
_SCANNED = 400
_REMOVED = 50
_PAGE = 200


def forget_finished(
    connection: sqlite3.Connection, *, keep: int | None = None, before: float | None = None, most: int | None = None
) -> int:
    """Delete ended jobs and their event histories. Return the number of deleted jobs.

    ``keep``: delete all ended jobs except the ``keep`` jobs that ended last. ``before``: delete all jobs that ended
    before this time (seconds since 1970). With both, a job is deleted if at least one of the two rules applies. With
    neither, all ended jobs are deleted, and also the stored refused lines. ``most``: delete at most this many jobs,
    beginning with the earliest end.

    A job is not deleted if its leftover processes hold GPUs, or if an unfinished job names it in ``after`` or
    ``after_ok``. Ids are not reused. The line counts of watched files stay, so a line that was run is not run again.
    """
    if keep is None and before is None:
        connection.execute("DELETE FROM refused")
        return forget_until(connection, (math.inf, 0), most)
    return forget_until(connection, last_to_go(connection, keep, before), most)


def last_to_go(connection: sqlite3.Connection, keep: int | None, before: float | None) -> tuple[float, int]:
    """Return the bound (end, id) up to which `forget_until` has to delete jobs.

    For the meaning of ``keep`` and ``before``, see `forget_finished`. The function is fast: it reads only indexes.
    """
    bound = (-math.inf if before is None else before, 0)
    if keep is not None:
        # A STOPPING job has an end time, too, once its main process has ended.
        ending = connection.execute(f"SELECT count(*) FROM jobs INDEXED BY jobs_ending WHERE {ENDING}").fetchone()[0]
        found = connection.execute(
            "SELECT finished_at, id FROM jobs WHERE finished_at IS NOT NULL ORDER BY finished_at DESC, id DESC"
            " LIMIT 1 OFFSET ?",
            (keep + ending,),
        ).fetchone()
        bound = max(bound, found or bound)
    return bound


def forget_until(connection: sqlite3.Connection, bound: tuple[float, int], most: int | None = None) -> int:
    """Delete at most ``most`` jobs that ended at or before ``bound`` (end, id), beginning with the earliest end.

    Jobs with leftover processes, and jobs on which unfinished jobs depend, are not deleted. Return the number of
    deleted jobs.
    """
    parents = _parents(connection)
    chosen: list[int] = []
    after = (-1.0, 0)
    while most is None or len(chosen) < most:
        page = connection.execute(
            f"SELECT finished_at, id FROM jobs WHERE {_ENDED} AND (finished_at, id) > (?, ?)"
            " AND (finished_at, id) <= (?, ?)"
            " AND id NOT IN (SELECT job FROM holdings)"
            " ORDER BY finished_at, id LIMIT ?",
            (*after, *bound, _PAGE if most is None else most),
        ).fetchall()
        if not page:
            break
        after = page[-1]
        chosen += [number for _, number in page if number not in parents]
    chosen = chosen[:most]
    crash_point("prune.selected")
    forget(connection, chosen)
    if chosen:
        crash_point("prune.deleted")
    return len(chosen)


def forget(connection: sqlite3.Connection, jobs: Sequence[int]) -> None:
    """Delete these ended jobs and their event histories, even jobs on which unfinished jobs depend."""
    last = rows.last_id(connection)
    before = until = float(rows.meta(connection, rows.FORGOTTEN_UNTIL) or "-inf")
    for number in jobs:
        until = max(until, _forget(connection, number))
    if until > before:
        rows.set_meta(connection, rows.FORGOTTEN_UNTIL, repr(until))
    if rows.last_id(connection) != last:
        rows.keep_last_id(connection, last)


def may_be_forgotten(connection: sqlite3.Connection, number: int) -> bool:
    """Return whether a job has ended, has no leftover processes on GPUs, and no unfinished job depends on it."""
    job = rows.get(connection, number)
    held = connection.execute("SELECT 1 FROM holdings WHERE job=?", (number,)).fetchone()
    return job is not None and job.state.ended and held is None and number not in _parents(connection)


def _parents(connection: sqlite3.Connection) -> set[int]:
    """Return the ids of the jobs that unfinished jobs name in ``after`` or ``after_ok``."""
    found: set[int] = set()
    for (spec,) in connection.execute(f"SELECT spec FROM jobs WHERE waits_for=1 AND NOT ({_ENDED})"):
        asked = json.loads(spec)
        found.update(asked.get("after", ()), asked.get("after_ok", ()))
    return found


def _forget(connection: sqlite3.Connection, number: int) -> float:
    """Delete a job and its event history. Return the job's end (seconds since 1970), minus infinity if it has no end.

    The paths of the job's logs are kept in the table `old_logs`, so that `keep_logs` still applies to these files.
    """
    job = rows.get(connection, number)
    if job is None:
        return -math.inf
    logs = _files(job, logs_of(job, rows.events_of(connection, number)).values())
    connection.executemany(
        "INSERT OR IGNORE INTO old_logs (at, path) VALUES (?,?)", [(job.finished_at, log) for log in logs]
    )
    connection.execute("DELETE FROM events WHERE job=?", (number,))
    connection.execute("DELETE FROM jobs WHERE id=?", (number,))
    forget_job(connection, number)
    if job.spec.env_file:
        rows.set_meta(connection, UNSWEPT, str(number))
    return -math.inf if job.finished_at is None else job.finished_at


def ended_with_logs(
    connection: sqlite3.Connection, before: tuple[float, int], most: int
) -> list[tuple[float, int, list[str]]]:
    """Return (end, id, paths of all logs) of ended jobs, latest end first.

    At most ``most`` jobs are returned, and only jobs whose (end, id) is below ``before``. Jobs with leftover processes
    on GPUs are left out.
    """
    page = connection.execute(
        f"SELECT finished_at, id FROM jobs WHERE {_ENDED} AND (finished_at, id) < (?, ?)"
        " AND id NOT IN (SELECT job FROM holdings) ORDER BY finished_at DESC, id DESC LIMIT ?",
        (*before, most),
    ).fetchall()
    found = []
    for at, number in page:
        job = rows.get(connection, number)
        known = logs_of(job, rows.events_of(connection, number)) if job is not None else {}
        newest_first = [known[attempt] for attempt in sorted(known, reverse=True)]
        found.append((at, number, newest_first if job is None else _files(job, newest_first)))
    return found


def _files(job: Job, logs: Iterable[str]) -> list[str]:
    """Return the paths of these logs. If the job writes stderr to separate files, the paths of those are added."""
    return [path for log in logs for path in ((log, errors_of(log)) if job.spec.stderr_apart else (log,))]


def old_logs(connection: sqlite3.Connection, before: tuple[float, str], most: int) -> list[tuple[float, str]]:
    """Return (end of the job, path) of the logs of deleted jobs, latest end first.

    At most ``most`` entries are returned, and only entries below ``before`` (end of the job, path).
    """
    return connection.execute(
        "SELECT at, path FROM old_logs WHERE (at, path) < (?, ?) ORDER BY at DESC, path DESC LIMIT ?", (*before, most)
    ).fetchall()


def drop_old_logs(connection: sqlite3.Connection, gone: Sequence[tuple[float, str]]) -> None:
    """Delete these entries of `old_logs` (end of the job, path), because the log files no longer exist."""
    connection.executemany("DELETE FROM old_logs WHERE at=? AND path=?", gone)


def sweep_environments(db: Database, places: Places) -> Iterator[None]:
    """Remove the stored environments that no job uses any more, a few at each step.

    Files are removed under the store's lock. A submission holds the same lock when it checks its environment file.
    """
    asked = rows.meta(db.connection, UNSWEPT)
    if not asked:
        return
    unused = {name for name in _names(places.environments) if re.fullmatch("[0-9a-f]{32}", name)}
    position = -1
    while unused and position < rows.last_id(db.connection):
        unused -= _used(db.connection, position, position + _SCANNED)
        position += _SCANNED
        yield
    while unused:
        with db.writing(sync=False) as connection:
            unused -= _used(connection, position, rows.last_id(connection))
            position = rows.last_id(connection)
            for _ in range(min(_REMOVED, len(unused))):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(places.environments, unused.pop()))
        yield
    with db.writing(sync=False) as connection:
        if rows.meta(connection, UNSWEPT) == asked:  # else more jobs were deleted in between: the next sweep continues
            rows.set_meta(connection, UNSWEPT, "")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _used(connection: sqlite3.Connection, low: int, high: int) -> set[str]:
    specs = connection.execute("SELECT spec FROM jobs WHERE id>? AND id<=? AND spec LIKE '%env_file%'", (low, high))
    return {name for (spec,) in specs for name in _ENVIRONMENT.findall(spec)}
