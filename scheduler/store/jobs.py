"""Reads and writes the rows of jobs, events, requests, pauses, GPUs, holdings and reasons."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from scheduler.core.allowed import allowed_text
from scheduler.core.errors import UsageError
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import ENDED, FIRST, Event, Holding, Job, JobSpec, JobState, Process, Reason
from scheduler.store.integrity import LAST_ID
from scheduler.store.job_columns import (
    ALL_CHANGEABLE,
    NEW,
    OF_SPEC,
    SELECT,
    WHOLE,
    Update,
    ids_of,
    ids_text,
    job_of,
    values_of,
)
from scheduler.store.migrations import QUEUE_ORDER

if TYPE_CHECKING:
    from scheduler.core.observations import Asked
    from scheduler.core.requests import Answer, Request
    from scheduler.core.rights import Caller

_RESPEC = f"UPDATE jobs SET {', '.join(f'{name}=?' for name in OF_SPEC.names)} WHERE id=?"
_RESTORE = f"INSERT INTO jobs ({', '.join(WHOLE.names)}) VALUES ({','.join('?' * len(WHOLE.names))})"
_INSERT = f"INSERT INTO jobs (id, {', '.join(NEW.names)}) VALUES ({','.join('?' * (1 + len(NEW.names)))})"
_LIVE = frozenset({JobState.PENDING.value, JobState.STARTING.value, JobState.RUNNING.value})
AT_ONCE = 500  # jobs in one query
CALLER = "caller"  # key in the arguments of a stored request: who asks (`core/rights.py: Caller`)
BLOCKED = "blocked"  # key in `meta`: number of waiting jobs by reason code
KEEP_ANSWERS_S = 3600.0  # answers to requests; their clients are gone long since
FORGOTTEN_UNTIL = "forgotten_until"  # key in `meta`: the latest end of a deleted job, seconds since 1970
_IN_HAND = ", ".join(f"'{state.value}'" for state in JobState if state.holds_gpus)  # as in the index `jobs_in_hand`


def insert(
    connection: sqlite3.Connection,
    spec: JobSpec,
    need: ResourceRequest,
    identity: str,
    notes: tuple[str, ...],
    now: float,
    new_id: int | None = None,
) -> Job:
    """Insert a PENDING job and return it with its new id.

    ``new_id``: the id that follows the highest assigned id, if the caller knows it. Raises sqlite3.IntegrityError if a
    waiting, running or succeeded job has the same identity.
    """
    if new_id is None:
        new_id = last_id(connection) + 1
    job = Job(
        id=new_id, spec=spec, need=need, identity=identity, priority=spec.priority, allowed=spec.allowed, submitted_at=now, notes=notes,
        held=spec.hold,
    )  # fmt: skip
    connection.execute(_INSERT, (new_id, *NEW.row(job)))
    job.order = new_id
    job.stored = values_of(job)
    return job


def save(connection: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Write the columns whose values have changed since the job was inserted, read or saved.

    Of a copy (`dataclasses.replace`), all changeable columns are written. For the columns that come from the spec, see
    `respec`. If the transaction is rolled back, the caller must read the jobs again, because ``Job.stored`` is wrong then.
    """
    for job in jobs:
        now, before = values_of(job), job.stored
        changed = ALL_CHANGEABLE
        if before is not None:
            changed = tuple([place for place, value in enumerate(now) if value != before[place]])
            if not changed:
                continue
        update = _update(changed)
        connection.execute(update.sql, update.values(job))
        job.stored = now


@functools.lru_cache(maxsize=128)
def _update(changed: tuple[int, ...]) -> Update:
    return Update(changed)


def restore(connection: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Insert complete jobs with the ids that they have, for `gpujob recover`. The store must not have these ids yet."""
    connection.executemany(_RESTORE, map(WHOLE.row, jobs))


def respec(connection: sqlite3.Connection, job: Job) -> None:
    """Update the columns that come from the spec of a waiting job."""
    connection.execute(_RESPEC, (*OF_SPEC.row(job), job.id))


def write_events(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    """Append events to the event histories of their jobs."""
    connection.executemany(
        "INSERT INTO events (job, n, at, kind, detail)"
        " SELECT ?, coalesce(max(n), 0) + 1, ?, ?, ? FROM events WHERE job=?",
        [(e.job, e.at, e.kind, json.dumps(e.detail) if e.detail else "", e.job) for e in events],
    )


def events_of(connection: sqlite3.Connection, job: int) -> list[Event]:
    """Return the event history of a job, oldest first."""
    rows = connection.execute("SELECT job, at, kind, detail FROM events WHERE job=? ORDER BY n", (job,))
    return [Event(row[0], row[1], row[2], json.loads(row[3]) if row[3] else {}) for row in rows]


def with_events(connection: sqlite3.Connection, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Event]]]:
    """Yield each job with its event history, in the given order. Each query reads the events of `AT_ONCE` jobs."""
    jobs = iter(jobs)
    while some := list(islice(jobs, AT_ONCE)):
        stories: dict[int, list[Event]] = {job.id: [] for job in some}
        found = connection.execute(
            f"SELECT job, at, kind, detail FROM events WHERE job IN ({','.join('?' * len(stories))}) ORDER BY job, n",
            tuple(stories),
        )
        for job, at, kind, detail in found:
            stories[job].append(Event(job, at, kind, json.loads(detail) if detail else {}))
        for one in some:
            yield one, stories[one.id]


def first_submitted(connection: sqlite3.Connection) -> float | None:
    """Return the submission time of the job with the lowest id (seconds since 1970); None if there are no jobs."""
    row = connection.execute("SELECT submitted_at FROM jobs ORDER BY id LIMIT 1").fetchone()
    return float(row[0]) if row else None


def get(connection: sqlite3.Connection, job: int) -> Job | None:
    """Return the job with this id; None if there is no such job."""
    row = connection.execute(f"{SELECT} WHERE id=?", (job,)).fetchone()
    return job_of(row) if row else None


def page(connection: sqlite3.Connection, after: int, most: int) -> list[Job]:
    """Return the next ``most`` jobs with an id above ``after``, ordered by id."""
    return [job_of(row) for row in raw_new(connection, after, most)]


def accepted_at(connection: sqlite3.Connection, job: int) -> float | None:
    """Return the submission time of a job (seconds since 1970), or None if there is no such job."""
    row = connection.execute("SELECT submitted_at FROM jobs WHERE id=?", (job,)).fetchone()
    return float(row[0]) if row else None


def moments_of(connection: sqlite3.Connection, job: int) -> list[tuple[float, str]]:
    """Return (seconds since 1970, kind) of all events of a job, oldest first."""
    return connection.execute("SELECT at, kind FROM events WHERE job=? ORDER BY n", (job,)).fetchall()


def blocker_of(connection: sqlite3.Connection, identity: str) -> Job | None:
    """Return the waiting, running or succeeded job with this identity; None if there is no such job."""
    row = connection.execute(f"{SELECT} WHERE blocking=?", (identity,)).fetchone()
    return job_of(row) if row else None


def live(connection: sqlite3.Connection) -> list[Job]:
    """Return all jobs that have not ended, ordered by id: waiting, STARTING, RUNNING and STOPPING jobs.

    A STOPPING job counts as not ended even if it has an end time: its leftover processes may still use the GPUs.
    """
    return sorted((*in_hand(connection), *pending(connection)), key=lambda job: job.id)


def in_hand(connection: sqlite3.Connection) -> Iterator[Job]:
    """Yield the jobs that are STARTING, RUNNING or STOPPING, ordered by id."""
    return map(job_of, active_rows(connection))


def pending(connection: sqlite3.Connection, after: int = -1) -> Iterator[Job]:
    """Yield the waiting jobs with an id above ``after``, ordered by id."""
    query = f"{SELECT} WHERE finished_at IS NULL AND state='pending' AND id>? ORDER BY id"
    return map(job_of, connection.execute(query, (after,)))


def new_pending(connection: sqlite3.Connection, after: int) -> Iterator[Job]:
    """Yield the same jobs as `pending`, in the same order. This query is faster if few ids are above ``after``."""
    for row in connection.execute(f"{SELECT} WHERE id>? AND state='pending' ORDER BY id", (after,)).fetchall():
        yield job_of(row)


def last_id(connection: sqlite3.Connection) -> int:
    """Return the highest assigned id. If no id was assigned yet, return 0, or -1 if ids start at 0."""
    return int(connection.execute(LAST_ID).fetchone()[0])


def keep_last_id(connection: sqlite3.Connection, last: int) -> None:
    """Store ``last`` as the highest assigned id, so that new jobs get higher ids even if old jobs are deleted."""
    set_meta(connection, "last_id", str(last))


def number_from_zero(connection: sqlite3.Connection) -> None:
    """Let the ids start at 0. If an id was already assigned, do nothing."""
    if not meta(connection, "last_id") and last_id(connection) == 0:
        keep_last_id(connection, -1)


def unfinished(connection: sqlite3.Connection) -> int:
    """Return the number of jobs that wait, or whose main process has not ended."""
    return int(connection.execute("SELECT count(*) FROM jobs WHERE finished_at IS NULL").fetchone()[0])


def _of_user(user: str) -> tuple[str, tuple[str, ...]]:
    """Return a condition for the jobs of a user, and its values; for all jobs if there is no name."""
    return ("user=?", (user,)) if user else ("1", ())


def known_ids(connection: sqlite3.Connection, jobs: Collection[int]) -> set[int]:
    """Return which of these jobs exist."""
    wanted = json.dumps([*jobs])
    return {
        row[0]
        for row in connection.execute("SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(?))", (wanted,))
    }


def ids_between(connection: sqlite3.Connection, low: int, high: int) -> list[int]:
    """Return the ids of the jobs from ``low`` to ``high``, in order."""
    return [
        row[0] for row in connection.execute("SELECT id FROM jobs WHERE id BETWEEN ? AND ? ORDER BY id", (low, high))
    ]


def id_back(connection: sqlite3.Connection, steps: int, user: str = "") -> int | None:
    """Return the id of the job that comes ``steps`` jobs before the newest job; None if there is no such job.

    ``user``: only the jobs of this user count.
    """
    mine, values = _of_user(user)
    row = connection.execute(
        f"SELECT id FROM jobs WHERE {mine} ORDER BY id DESC LIMIT 1 OFFSET ?", (*values, steps)
    ).fetchone()
    return int(row[0]) if row else None


def last_ended(connection: sqlite3.Connection, most: int) -> list[Job]:
    """Return the ``most`` jobs that ended last, latest first."""
    states = ", ".join(f"'{state.value}'" for state in ENDED)
    rows = connection.execute(
        f"{SELECT} WHERE finished_at IS NOT NULL AND state IN ({states}) ORDER BY finished_at DESC LIMIT ?", (most,)
    )
    return [job_of(row) for row in rows]


def ended_runs(connection: sqlite3.Connection, since: float) -> list[tuple[float, float, int]]:
    """Return start, end and thousandths of GPUs of the last attempts that ended after ``since`` (seconds since 1970)."""
    found = connection.execute(
        "SELECT started_at, finished_at, need_count * need_parts FROM jobs WHERE finished_at > ? AND started_at IS NOT NULL"
        " AND need_count > 0",
        (since,),
    )
    return list(found)


def runs_by_user(connection: sqlite3.Connection, since: float) -> list[tuple[str, float, float | None, int]]:
    """Return user, start, end (None: it runs) and thousandths of GPUs of the last attempts after ``since`` (since 1970)."""
    found = connection.execute(
        "SELECT user, started_at, finished_at, need_count * need_parts FROM jobs"
        " WHERE finished_at > ? AND started_at IS NOT NULL AND need_count > 0",
        (since,),
    ).fetchall()
    live = [job for job in in_hand(connection) if job.started_at and job.need.total and job.finished_at is None]
    return [*found, *((job.spec.user, job.started_at or 0.0, None, job.need.total) for job in live)]


def waiting_by_user(connection: sqlite3.Connection) -> dict[str, int]:
    """Return user → number of waiting jobs, of users with a name (`JobSpec.user`)."""
    found = connection.execute("SELECT user, count(*) FROM jobs WHERE user<>'' AND state='pending' GROUP BY user")
    return dict(found.fetchall())


def first_pending(connection: sqlite3.Connection, most: int) -> list[Job]:
    """Return the first ``most`` waiting jobs in the order of the queue."""
    return [job_of(row) for row in raw_first_pending(connection, most)]


def waiting_before(connection: sqlite3.Connection, job: Job) -> int:
    """Return how many jobs of the same placement class (`core/placement_class.py`) are ahead of this job in the queue.

    Jobs that wait for something other than free GPUs or CPU slots are not counted.
    """
    allowed = allowed_text(job.allowed) if job.need.count and job.allowed is not None else None
    found = connection.execute(
        "SELECT count(*) FROM jobs WHERE finished_at IS NULL AND state='pending' AND reason_code=''"
        " AND need_count=? AND need_parts=? AND (need_count=0 OR allowed IS ?) AND vram_mib=? AND user=?"
        " AND need_profile=? AND (need_count<2 OR need_parts=0 OR link=?)"
        " AND (CASE WHEN place<0 THEN ? ELSE priority END, CASE place WHEN 0 THEN id ELSE place END) < (?,?)",
        (
            job.need.count,
            job.need.parts,
            allowed,
            job.spec.vram_mib or 0,
            job.spec.user,
            job.need.profile,
            job.spec.link,
            FIRST,
            *job.turn,
        ),
    )
    return int(found.fetchone()[0])


# The `raw_…` functions return rows for `job_of`. Two equal rows mean an unchanged job (`store/changed_jobs.py`).


def raw_first_pending(connection: sqlite3.Connection, most: int) -> list[tuple[Any, ...]]:
    """Return the rows of the jobs that `first_pending` returns."""
    return connection.execute(
        # The + keeps SQLite from the index on finished_at, with which it would have to sort.
        f"{SELECT} WHERE state='pending' AND +finished_at IS NULL ORDER BY {QUEUE_ORDER} LIMIT ?",
        (most,),
    ).fetchall()


def active_rows(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Return the rows of the jobs that `in_hand` yields."""
    return connection.execute(f"{SELECT} WHERE state IN ({_IN_HAND}) ORDER BY id").fetchall()


def raw_new(connection: sqlite3.Connection, after: int, most: int) -> list[tuple[Any, ...]]:
    """Return the rows of the next ``most`` jobs with an id above ``after``, ordered by id."""
    return connection.execute(f"{SELECT} WHERE id>? ORDER BY id LIMIT ?", (after, most)).fetchall()


def ids_ended_since(connection: sqlite3.Connection, at: float) -> list[int]:
    """Return the ids of the jobs that ended at ``at`` (seconds since 1970) or later, earliest end first."""
    query = "SELECT id FROM jobs WHERE finished_at>=? ORDER BY finished_at, id"  # reads only the index
    return [number for (number,) in connection.execute(query, (at,))]


def raw_of(connection: sqlite3.Connection, jobs: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return the rows of these jobs in no particular order. Deleted jobs are left out."""
    found: list[tuple[Any, ...]] = []
    for at in range(0, len(jobs), 500):
        some = jobs[at : at + 500]
        found += connection.execute(f"{SELECT} WHERE id IN ({','.join('?' * len(some))})", tuple(some))
    return found


def ended_last(connection: sqlite3.Connection) -> float:
    """Return the latest end of any job (seconds since 1970), 0 if no job has ended."""
    return float(connection.execute("SELECT max(finished_at) FROM jobs").fetchone()[0] or 0.0)


def select(connection: sqlite3.Connection, states: Sequence[str] = (), most: int | None = None) -> Iterator[Job]:
    """Yield the jobs whose state is in ``states`` (empty: any state), ordered by id.

    ``most``: yield only this number of them, the newest; None: no limit.
    """
    where = f" WHERE state IN ({','.join('?' * len(states))})" if states else ""
    if states and _LIVE.issuperset(states):
        where += " AND finished_at IS NULL"  # for the index on finished_at: a million jobs may have ended
    if most is None:
        found = connection.execute(f"{SELECT}{where} ORDER BY id", tuple(states))
    else:
        newest = f"SELECT id FROM jobs{where} ORDER BY id DESC LIMIT ?"
        found = connection.execute(f"{SELECT} WHERE id IN ({newest}) ORDER BY id", (*states, most))
    for row in found:
        yield job_of(row)


def ended_since(connection: sqlite3.Connection, at: float) -> Iterator[Job]:
    """Yield the jobs that ended at ``at`` (seconds since 1970) or later, and the unfinished jobs, ordered by id."""
    for row in connection.execute(f"{SELECT} WHERE finished_at IS NULL OR finished_at>=? ORDER BY id", (at,)):
        yield job_of(row)


def known_since(connection: sqlite3.Connection) -> float | None:
    """Return a time (seconds since 1970). The store still has all jobs that ended after this time.

    Jobs that ended earlier may have been deleted. The result is None if no job is missing, or if the time is unknown
    because the store has no jobs.
    """
    told = meta(connection, FORGOTTEN_UNTIL)
    if told:
        return float(told)
    number, first, oldest = connection.execute("SELECT count(*), min(id), min(submitted_at) FROM jobs").fetchone()
    if number >= last_id(connection) + (first == 0):
        return None
    return None if oldest is None else float(oldest)  # jobs deleted by an earlier version, or lost with a damaged store


def labelled(connection: sqlite3.Connection, label: str, user: str = "") -> list[Job]:
    """Return the jobs with this label, ordered by id. ``user``: only jobs of this user."""
    mine, values = _of_user(user)
    said = f'"label": {json.dumps(label)}'
    rows = connection.execute(f"{SELECT} WHERE instr(spec, ?)>0 AND {mine} ORDER BY id", (said, *values))
    return [job for job in map(job_of, rows) if job.spec.label == label]


def newest_labelled(
    connection: sqlite3.Connection, label: str, states: Sequence[str], most: int, user: str = ""
) -> tuple[list[Job], int]:
    """Return the newest jobs with this label and one of these states, ordered by id, and the number of all such jobs.

    ``most``: how many jobs are returned at most. ``user``: only jobs of this user.
    """
    mine, values = _of_user(user)
    # Matches the JSON of the spec; inside another value the quotes would be escaped with backslashes.
    where = f"WHERE instr(spec, ?)>0 AND state IN ({','.join('?' * len(states))}) AND {mine}"
    asked = (f'"label": {json.dumps(label)}', *states, *values)
    newest = f"SELECT id FROM jobs {where} ORDER BY id DESC LIMIT ?"
    found = connection.execute(f"{SELECT} WHERE id IN ({newest}) ORDER BY id", (*asked, most))
    jobs = [job_of(row) for row in found]
    return jobs, connection.execute(f"SELECT count(*) FROM jobs {where}", asked).fetchone()[0]


def labels(connection: sqlite3.Connection, states: Sequence[str], most: int, user: str = "") -> dict[str, list[int]]:
    """Return label → ids of the jobs with this label, newest first. ``user``: only jobs of this user.

    Only the ``most`` newest jobs with a label and one of these states are read.
    """
    mine, values = _of_user(user)
    rows = connection.execute(
        f"SELECT id, spec FROM jobs WHERE spec LIKE '%\"label\"%' AND state IN ({','.join('?' * len(states))})"
        f" AND {mine} ORDER BY id DESC LIMIT ?",
        (*states, *values, most),
    )
    found: dict[str, list[int]] = {}
    for job_id, spec in rows:
        label = json.loads(spec).get("label")
        if label:
            found.setdefault(label, []).append(job_id)
    return found


def newest(connection: sqlite3.Connection, states: Sequence[str], prefix: str, most: int, user: str = "") -> list[Job]:
    """Return the ``most`` newest jobs with one of these states and an id that begins with ``prefix``, newest first.

    ``user``: only jobs of this user.
    """
    mine, values = _of_user(user)
    rows = connection.execute(
        f"{SELECT} WHERE state IN ({','.join('?' * len(states))}) AND substr(id, 1, ?) = ?"
        f" AND {mine} ORDER BY id DESC LIMIT ?",
        (*states, len(prefix), prefix, *values, most),
    )
    return [job_of(row) for row in rows]


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """Return state → number of jobs in this state. The result has all eight states, also those without jobs."""
    try:
        found = dict(connection.execute("SELECT state, n FROM counts").fetchall())
    except sqlite3.OperationalError:  # a store of an older version, which does not count them
        found = dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
    return {state.value: found.get(state.value, 0) for state in JobState}


def ask(connection: sqlite3.Connection, request: Request, now: float) -> int:
    """Store a request. Return the id of its row."""
    from scheduler.core.requests import to_row

    return ask_for(connection, *to_row(request), now)


def ask_for(
    connection: sqlite3.Connection, kind: str, arguments: Mapping[str, Any], now: float, by: Caller | None = None
) -> int:
    """Store a request. Return the id of its row. ``kind``, ``arguments``: see `core/requests.py: to_row`."""
    if by is not None:
        arguments = {**arguments, CALLER: (by.uid, by.user, by.admin)}
    connection.execute("DELETE FROM requests WHERE code IS NOT NULL AND made_at < ?", (now - KEEP_ANSWERS_S,))
    row = connection.execute(
        "INSERT INTO requests (kind, arguments, made_at) VALUES (?,?,?)", (kind, json.dumps(arguments), now)
    ).lastrowid
    return row or 0


def asked(connection: sqlite3.Connection) -> list[tuple[float, Asked]]:
    """Return the unanswered requests, oldest first: (time in seconds since 1970, request).

    A request that this version does not know is not returned. It gets the answer that it cannot be carried out.
    """
    from scheduler.core.observations import Asked
    from scheduler.core.requests import Answer, from_row
    from scheduler.core.rights import Caller

    found: list[tuple[float, Asked]] = []
    rows = connection.execute("SELECT made_at, id, kind, arguments FROM requests WHERE code IS NULL ORDER BY id")
    for at, row, kind, arguments in rows.fetchall():
        try:
            given = json.loads(arguments)
            by = Caller(*given[CALLER]) if CALLER in given else None
            found.append((at, Asked(row, from_row(kind, given), by)))
        except (UsageError, ValueError, TypeError, AttributeError) as error:
            text = f"cannot carry out the request: the running scheduler is of another version ({error}); restart it"
            answer(connection, [Answer(row, 1, (text,))])
    return found


def answer(connection: sqlite3.Connection, answers: Iterable[Answer]) -> None:
    """Store answers in the rows of their requests."""
    connection.executemany(
        "UPDATE requests SET code=?, lines=? WHERE id=?", [(a.code, json.dumps(a.lines), a.row) for a in answers]
    )


def answer_of(connection: sqlite3.Connection, row: int) -> Answer | None:
    """Return the answer to a request, or None if the request is unanswered."""
    from scheduler.core.requests import Answer

    found = answered(connection, row)
    return Answer(row, *found) if found else None


def answered(connection: sqlite3.Connection, row: int) -> tuple[int, tuple[str, ...]] | None:
    """Return exit code and lines of the answer to a request, or None if the request is unanswered."""
    found = connection.execute("SELECT code, lines FROM requests WHERE id=? AND code IS NOT NULL", (row,)).fetchone()
    return (found[0], tuple(json.loads(found[1]))) if found else None


def paused_gpus(connection: sqlite3.Connection) -> tuple[int, ...]:
    """Return the indexes of the paused GPUs, ascending, including GPUs that are not managed now."""
    return tuple(row[0] for row in connection.execute("SELECT gpu FROM pauses ORDER BY gpu"))


def save_pauses(
    connection: sqlite3.Connection, gpus: Iterable[int], queue_paused: bool, changes: list[tuple[int, int, bool]]
) -> None:
    """Store the current pauses in place of the earlier ones. ``gpus``: indexes of the paused GPUs.

    ``changes``: the latest pauses and resumes by verbs (`core/pauses.py: Pauses`). They replace the earlier list.
    """
    connection.execute("DELETE FROM pauses")
    connection.executemany("INSERT INTO pauses VALUES (?)", [(gpu,) for gpu in gpus])
    set_meta(connection, "queue_paused", "1" if queue_paused else "")
    set_meta(connection, "pause_changes", json.dumps(changes))


def pause_changes(connection: sqlite3.Connection) -> list[tuple[int, int, bool]]:
    """Return the latest pauses and resumes by verbs, as stored by `save_pauses`, oldest first.

    Each entry is (first revision of the state file that shows the change, index of the GPU or -1 for the queue, whether
    the GPU or the queue was paused before the change).
    """
    text = meta(connection, "pause_changes")
    return [(revision, what, before) for revision, what, before in json.loads(text)] if text else []


def lowest_place(connection: sqlite3.Connection) -> int:
    """Return the lowest place of all unfinished jobs that a user put first; 0 if there are no such jobs.

    The place (`Job.order`) of a job that was put first is below 0. The job with the lowest place starts first.
    """
    running = connection.execute(f"SELECT min(place) FROM jobs WHERE state IN ({_IN_HAND})").fetchone()[0] or 0
    waiting = connection.execute(
        f"SELECT place FROM jobs WHERE state='pending' ORDER BY {QUEUE_ORDER} LIMIT 1"
    ).fetchone()
    return min(0, int(running), int(waiting[0]) if waiting else 0)


def meta(connection: sqlite3.Connection, key: str) -> str:
    """Return the text stored under ``key``, empty if no text is stored."""
    row = connection.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
    return str(row[0]) if row else ""


def set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Store a text under ``key``."""
    connection.execute(
        "INSERT INTO meta VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value=excluded.value", (key, value)
    )


_GPU_COLUMNS = (
    "id, uuid, name, server, memory_mib, node, partition, links, profile"  # in the order of the fields of Gpu
)


def gpus(connection: sqlite3.Connection) -> list[Gpu]:
    """Return the GPUs that the last daemon managed, ordered by index."""
    return [
        replace(Gpu(*row), links=tuple((other, link) for other, link in json.loads(links or "[]")), profile=profile)
        for *row, links, profile in connection.execute(f"SELECT {_GPU_COLUMNS} FROM gpus ORDER BY id")
    ]


def save_gpus(connection: sqlite3.Connection, found: Iterable[Gpu]) -> None:
    """Replace the stored GPUs with the GPUs that are managed now."""
    connection.execute("DELETE FROM gpus")
    for gpu in found:
        *plain, links, profile = (getattr(gpu, each.name) for each in fields(Gpu))
        values = (*plain, json.dumps(links) if links else "", profile)
        connection.execute(f"INSERT INTO gpus ({_GPU_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)", values)


def holdings(connection: sqlite3.Connection) -> list[tuple[Holding, str]]:
    """Return the holdings (GPUs of leftover processes), each with the id of the boot in which it was stored."""
    rows = connection.execute(
        "SELECT key, job, need_count, need_parts, gpus, vram_mib, processes, boot,"
        " coalesce((SELECT user FROM jobs WHERE id=job), '') FROM holdings"
    )
    return [
        (
            Holding(
                r[0],
                r[1],
                ResourceRequest(r[2], r[3]),
                ids_of(r[4]),
                r[5],
                tuple(Process(*p) for p in json.loads(r[6])),
                r[8],
            ),
            r[7],
        )
        for r in rows
    ]


def save_holdings(connection: sqlite3.Connection, held: Iterable[Holding], freed: Iterable[str], boot: str) -> None:
    """Store the new holdings ``held`` with the boot id ``boot``. Delete the holdings whose key is in ``freed``."""
    connection.executemany(
        "INSERT OR REPLACE INTO holdings VALUES (?,?,?,?,?,?,?,?)",
        [
            (
                h.key, h.job, h.need.count, h.need.parts, ids_text(h.gpus), h.vram_mib,
                json.dumps([[p.pid, p.ticks] for p in h.processes]), boot,
            )
            for h in held
        ],
    )  # fmt: skip
    connection.executemany("DELETE FROM holdings WHERE key=?", [(key,) for key in freed])


def note_calls(connection: sqlite3.Connection, jobs: Iterable[int]) -> None:
    """Record that the completion hooks of these ended jobs have to be run (`daemon/completion_hooks.py`)."""
    connection.executemany("INSERT OR REPLACE INTO calls VALUES (?, NULL)", [(job,) for job in jobs])


def calls(connection: sqlite3.Connection) -> list[tuple[int, float | None]]:
    """Return (job id, start of the hooks) of each job whose completion hooks are not finished.

    The start is in seconds since 1970, or None if the hooks have not been started.
    """
    return connection.execute("SELECT job, begun FROM calls ORDER BY job").fetchall()


def begin_call(connection: sqlite3.Connection, job: int, now: float) -> None:
    """Record that the completion hooks of a job are started at ``now`` (seconds since 1970)."""
    connection.execute("UPDATE calls SET begun=? WHERE job=?", (now, job))


def strike_calls(connection: sqlite3.Connection, jobs: Iterable[int]) -> None:
    """Delete the records of `note_calls` for these jobs, because their hooks have run or must not run again."""
    connection.executemany("DELETE FROM calls WHERE job=?", [(job,) for job in jobs])


def class_reasons(connection: sqlite3.Connection) -> dict[str, Reason]:
    """Return the stored reasons: key of the placement class → reason why the jobs of this class wait."""
    return {r[0]: Reason(r[1], r[2]) for r in connection.execute("SELECT class, code, sentence FROM reasons")}


def save_class_reasons(connection: sqlite3.Connection, reasons: dict[str, Reason]) -> None:
    """Replace the stored reasons of all placement classes."""
    connection.execute("DELETE FROM reasons")
    connection.executemany("INSERT INTO reasons VALUES (?,?,?)", [(k, r.code, r.sentence) for k, r in reasons.items()])
