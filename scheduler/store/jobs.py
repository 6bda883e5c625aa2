"""Jobs, events, holdings, reasons and requests as rows."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from scheduler.core.errors import UsageError
from scheduler.core.gpu import Gpu, ResourceRequest, gpu_ids_text
from scheduler.core.job import FIRST, Event, Holding, Job, JobSpec, JobState, Process, Reason
from scheduler.store.integrity import LAST_ID
from scheduler.store.job_columns import CHANGED, NEW, OF_SPEC, SELECT, WHOLE, ids_of, ids_text, job_of

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from scheduler.core.requests import Answer, Request

_UPDATE = f"UPDATE jobs SET {', '.join(f'{name}=?' for name in CHANGED.names)} WHERE id=?"
_RESPEC = f"UPDATE jobs SET {', '.join(f'{name}=?' for name in OF_SPEC.names)} WHERE id=?"
_RESTORE = f"INSERT INTO jobs ({', '.join(WHOLE.names)}) VALUES ({','.join('?' * len(WHOLE.names))})"
_INSERT = f"INSERT INTO jobs (id, {', '.join(NEW.names)}) VALUES (1+({LAST_ID}), {','.join('?' * len(NEW.names))})"
_LIVE = frozenset({JobState.PENDING.value, JobState.STARTING.value, JobState.RUNNING.value})
AT_ONCE = 500  # jobs in one question
BLOCKED = "blocked"  # in `meta`: how many jobs wait for what, by reason code
FORGOTTEN_UNTIL = "forgotten_until"  # in `meta`: when the forgotten job ended that ended last
_IN_HAND = ", ".join(f"'{state.value}'" for state in JobState if state.holds_gpus)  # as the index has it


def insert(
    connection: sqlite3.Connection,
    spec: JobSpec,
    need: ResourceRequest,
    identity: str,
    notes: tuple[str, ...],
    now: float,
) -> Job:
    """A new PENDING job with the next id. Raises sqlite3.IntegrityError when an equal one blocks it."""
    job = Job(
        id=0, spec=spec, need=need, identity=identity, priority=spec.priority, allowed=spec.allowed, submitted_at=now, notes=notes
    )  # fmt: skip
    job.id = job.order = connection.execute(_INSERT, NEW.row(job)).lastrowid or 0
    return job


def save(connection: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Write what may have changed of these jobs."""
    connection.executemany(_UPDATE, [(*CHANGED.row(job), job.id) for job in jobs])


def restore(connection: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Write whole jobs with the ids they have, into a store that does not hold them."""
    connection.executemany(_RESTORE, map(WHOLE.row, jobs))


def respec(connection: sqlite3.Connection, job: Job) -> None:
    """Write a waiting job's changed spec."""
    connection.execute(_RESPEC, (*OF_SPEC.row(job), job.id))


def write_events(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    """Append to the story of the jobs."""
    connection.executemany(
        "INSERT INTO events (job, n, at, kind, detail)"
        " SELECT ?1, coalesce(max(n), 0) + 1, ?2, ?3, ?4 FROM events WHERE job=?1",
        [(e.job, e.at, e.kind, json.dumps(e.detail) if e.detail else "") for e in events],
    )


def events_of(connection: sqlite3.Connection, job: int) -> list[Event]:
    """The story of one job, oldest first."""
    rows = connection.execute("SELECT job, at, kind, detail FROM events WHERE job=? ORDER BY n", (job,))
    return [Event(row[0], row[1], row[2], json.loads(row[3]) if row[3] else {}) for row in rows]


def with_events(connection: sqlite3.Connection, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Event]]]:
    """The same jobs in their order, each with its story; asked for `AT_ONCE` together."""
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
    """When the oldest job that is known was submitted; None where none is."""
    row = connection.execute("SELECT submitted_at FROM jobs ORDER BY id LIMIT 1").fetchone()
    return float(row[0]) if row else None


def get(connection: sqlite3.Connection, job: int) -> Job | None:
    """One job, or None."""
    row = connection.execute(f"{SELECT} WHERE id=?", (job,)).fetchone()
    return job_of(row) if row else None


def page(connection: sqlite3.Connection, after: int, most: int) -> list[Job]:
    """The next jobs with an id above ``after``, by id."""
    return [job_of(row) for row in raw_new(connection, after, most)]


def accepted_at(connection: sqlite3.Connection, job: int) -> float | None:
    """When a job was accepted; None where there is none."""
    row = connection.execute("SELECT submitted_at FROM jobs WHERE id=?", (job,)).fetchone()
    return float(row[0]) if row else None


def moments_of(connection: sqlite3.Connection, job: int) -> list[tuple[float, str]]:
    """Time and kind of all events of a job, oldest first."""
    return connection.execute("SELECT at, kind FROM events WHERE job=? ORDER BY n", (job,)).fetchall()


def blocker_of(connection: sqlite3.Connection, identity: str) -> Job | None:
    """The waiting, running or succeeded job with this identity, or None."""
    row = connection.execute(f"{SELECT} WHERE blocking=?", (identity,)).fetchone()
    return job_of(row) if row else None


def live(connection: sqlite3.Connection) -> Iterator[Job]:
    """All jobs that have not ended, by id."""
    for row in connection.execute(f"{SELECT} WHERE finished_at IS NULL ORDER BY id"):
        yield job_of(row)


def in_hand(connection: sqlite3.Connection) -> Iterator[Job]:
    """Jobs that are STARTING, RUNNING or STOPPING."""
    return map(job_of, raw_in_hand(connection))


def pending(connection: sqlite3.Connection, after: int = -1) -> Iterator[Job]:
    """Waiting jobs with an id above ``after``, by id."""
    for row in connection.execute(
        f"{SELECT} WHERE finished_at IS NULL AND state='pending' AND id>? ORDER BY id", (after,)
    ):
        yield job_of(row)


def new_pending(connection: sqlite3.Connection, after: int) -> Iterator[Job]:
    """The same, found by id alone: cheap when only the newest few are asked for."""
    for row in connection.execute(f"{SELECT} WHERE id>? AND state='pending' ORDER BY id", (after,)).fetchall():
        yield job_of(row)


def last_id(connection: sqlite3.Connection) -> int:
    """The highest id ever given out; before the first, the number below it (0, or -1 where jobs are numbered from 0)."""
    return int(connection.execute(LAST_ID).fetchone()[0])


def keep_last_id(connection: sqlite3.Connection, last: int) -> None:
    """Let the next job get the id after ``last``, whatever is left of those before it."""
    set_meta(connection, "last_id", str(last))


def number_from_zero(connection: sqlite3.Connection) -> None:
    """Let the first job be number 0, where none was before."""
    if not meta(connection, "last_id") and last_id(connection) == 0:
        keep_last_id(connection, -1)


def unfinished(connection: sqlite3.Connection) -> int:
    """How many jobs wait or run."""
    return int(connection.execute("SELECT count(*) FROM jobs WHERE finished_at IS NULL").fetchone()[0])


def id_back(connection: sqlite3.Connection, steps: int) -> int | None:
    """The newest id, or the one so many jobs before it; None if there is none."""
    row = connection.execute("SELECT id FROM jobs ORDER BY id DESC LIMIT 1 OFFSET ?", (steps,)).fetchone()
    return int(row[0]) if row else None


def last_ended(connection: sqlite3.Connection, most: int) -> list[Job]:
    """The jobs that ended last, newest first."""
    rows = connection.execute(f"{SELECT} WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?", (most,))
    return [job_of(row) for row in rows]


def first_pending(connection: sqlite3.Connection, most: int) -> list[Job]:
    """The waiting jobs that come first by priority and place."""
    return [job_of(row) for row in raw_first_pending(connection, most)]


def waiting_before(connection: sqlite3.Connection, job: Job) -> int:
    """How many jobs of the same class (`core/placement_class.py`) wait for room before this one (`Job.turn`)."""
    allowed = gpu_ids_text(job.allowed) if job.need.count and job.allowed is not None else None
    found = connection.execute(
        "SELECT count(*) FROM jobs WHERE finished_at IS NULL AND state='pending' AND reason_code=''"
        " AND need_count=? AND need_parts=? AND (need_count=0 OR allowed IS ?) AND vram_mib=?"
        " AND (CASE WHEN place<0 THEN ? ELSE priority END, CASE place WHEN 0 THEN id ELSE place END) < (?,?)",
        (job.need.count, job.need.parts, allowed, job.spec.vram_mib or 0, FIRST, *job.turn),
    )
    return int(found.fetchone()[0])


# `raw_…`: rows as `job_of` takes them: where two are equal, nothing has changed (`store/change_feed.py`).


def raw_first_pending(connection: sqlite3.Connection, most: int) -> list[tuple[Any, ...]]:
    """The same as rows."""
    return connection.execute(
        f"{SELECT} WHERE finished_at IS NULL AND state='pending' ORDER BY min(place, 0), priority,"
        " CASE place WHEN 0 THEN id ELSE place END LIMIT ?",
        (most,),
    ).fetchall()


def raw_in_hand(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Those of `in_hand`."""
    return connection.execute(f"{SELECT} WHERE state IN ({_IN_HAND}) ORDER BY id").fetchall()


def raw_new(connection: sqlite3.Connection, after: int, most: int) -> list[tuple[Any, ...]]:
    """The next jobs with an id above ``after``, by id."""
    return connection.execute(f"{SELECT} WHERE id>? ORDER BY id LIMIT ?", (after, most)).fetchall()


def raw_ended_since(connection: sqlite3.Connection, at: float, most: int) -> list[tuple[Any, ...]]:
    """Jobs that ended at this moment or later, the newest of them."""
    return connection.execute(f"{SELECT} WHERE finished_at>=? ORDER BY finished_at DESC LIMIT ?", (at, most)).fetchall()


def raw_of(connection: sqlite3.Connection, jobs: Sequence[int]) -> list[tuple[Any, ...]]:
    """These jobs, as far as they are not forgotten."""
    found: list[tuple[Any, ...]] = []
    for at in range(0, len(jobs), 500):
        some = jobs[at : at + 500]
        found += connection.execute(f"{SELECT} WHERE id IN ({','.join('?' * len(some))})", tuple(some))
    return found


def ended_last(connection: sqlite3.Connection) -> float:
    """When the job ended that ended last; 0 where none has."""
    return float(connection.execute("SELECT max(finished_at) FROM jobs").fetchone()[0] or 0.0)


def select(connection: sqlite3.Connection, states: Sequence[str] = (), most: int | None = None) -> Iterator[Job]:
    """All jobs, or those in these states, by id; ``most``: only the newest of them."""
    where = f" WHERE state IN ({','.join('?' * len(states))})" if states else ""
    if states and _LIVE.issuperset(states):
        where += " AND finished_at IS NULL"  # an index knows these: those that have ended may be a million
    if most is None:
        found = connection.execute(f"{SELECT}{where} ORDER BY id", tuple(states))
    else:
        newest = f"SELECT id FROM jobs{where} ORDER BY id DESC LIMIT ?"
        found = connection.execute(f"{SELECT} WHERE id IN ({newest}) ORDER BY id", (*states, most))
    for row in found:
        yield job_of(row)


def ended_since(connection: sqlite3.Connection, at: float) -> Iterator[Job]:
    """Jobs that have not ended, or did so at this moment or later, by id."""
    for row in connection.execute(f"{SELECT} WHERE finished_at IS NULL OR finished_at>=? ORDER BY id", (at,)):
        yield job_of(row)


def known_since(connection: sqlite3.Connection) -> float | None:
    """Since when all jobs are known: those that ended earlier may be forgotten. None where none is."""
    told = meta(connection, FORGOTTEN_UNTIL)
    if told:
        return float(told)
    number, first, oldest = connection.execute("SELECT count(*), min(id), min(submitted_at) FROM jobs").fetchone()
    if number >= last_id(connection) + (first == 0):
        return None
    return None if oldest is None else float(oldest)  # by an earlier version, or lost with a damaged store


def labelled(connection: sqlite3.Connection, label: str) -> list[Job]:
    """Jobs with this label, by id."""
    rows = connection.execute(f"{SELECT} WHERE spec LIKE ? ORDER BY id", (f"%{json.dumps(label)}%",))
    return [job for job in map(job_of, rows) if job.spec.label == label]


def newest_labelled(
    connection: sqlite3.Connection, label: str, states: Sequence[str], most: int
) -> tuple[list[Job], int]:
    """The newest jobs in these states with this label, by id, and how many there are: a label may be a million jobs'."""
    # As specs are written; within a text its quotes would stand behind backslashes.
    where = f"WHERE instr(spec, ?)>0 AND state IN ({','.join('?' * len(states))})"
    asked = (f'"label": {json.dumps(label)}', *states)
    newest = f"SELECT id FROM jobs {where} ORDER BY id DESC LIMIT ?"
    found = connection.execute(f"{SELECT} WHERE id IN ({newest}) ORDER BY id", (*asked, most))
    jobs = [job_of(row) for row in found]
    return jobs, connection.execute(f"SELECT count(*) FROM jobs {where}", asked).fetchone()[0]


def labels(connection: sqlite3.Connection, states: Sequence[str], most: int) -> dict[str, list[int]]:
    """Labels and the jobs in these states that have them, the newest first."""
    rows = connection.execute(
        f"SELECT id, spec FROM jobs WHERE spec LIKE '%\"label\"%' AND state IN ({','.join('?' * len(states))})"
        " ORDER BY id DESC LIMIT ?",
        (*states, most),
    )
    found: dict[str, list[int]] = {}
    for job_id, spec in rows:
        label = json.loads(spec).get("label")
        if label:
            found.setdefault(label, []).append(job_id)
    return found


def newest(connection: sqlite3.Connection, states: Sequence[str], prefix: str, most: int) -> list[Job]:
    """The newest jobs in these states whose id begins with ``prefix``."""
    rows = connection.execute(
        f"{SELECT} WHERE state IN ({','.join('?' * len(states))}) AND substr(id, 1, ?) = ? ORDER BY id DESC LIMIT ?",
        (*states, len(prefix), prefix, most),
    )
    return [job_of(row) for row in rows]


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """How many jobs are in each state (all eight, 0 where none)."""
    try:
        found = dict(connection.execute("SELECT state, n FROM counts").fetchall())
    except sqlite3.OperationalError:  # a store that no scheduler of this version has opened yet
        found = dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
    return {state.value: found.get(state.value, 0) for state in JobState}


def ask(connection: sqlite3.Connection, request: Request, now: float) -> int:
    """Write a request down; returns its row."""
    from scheduler.core.requests import to_row

    return ask_for(connection, *to_row(request), now)


def ask_for(connection: sqlite3.Connection, kind: str, arguments: Mapping[str, Any], now: float) -> int:
    """The same of what `core/requests.py: to_row` has made, or would make."""
    row = connection.execute(
        "INSERT INTO requests (kind, arguments, made_at) VALUES (?,?,?)", (kind, json.dumps(arguments), now)
    ).lastrowid
    return row or 0


def asked(connection: sqlite3.Connection) -> list[tuple[float, int, Request]]:
    """Requests that nobody has answered, oldest first: (when, row, request).

    One of a kind that only another version knows is answered with a refusal: it must not come back for ever.
    """
    from scheduler.core.requests import Answer, from_row

    found: list[tuple[float, int, Request]] = []
    rows = connection.execute("SELECT made_at, id, kind, arguments FROM requests WHERE code IS NULL ORDER BY id")
    for at, row, kind, arguments in rows.fetchall():
        try:
            found.append((at, row, from_row(kind, json.loads(arguments))))
        except (UsageError, ValueError, TypeError, AttributeError) as error:
            text = f"the scheduler that runs is of another version and cannot do that: {error}; restart it"
            answer(connection, [Answer(row, 1, (text,))])
    return found


def answer(connection: sqlite3.Connection, answers: Iterable[Answer]) -> None:
    """Write the answers beside their requests."""
    connection.executemany(
        "UPDATE requests SET code=?, lines=? WHERE id=?", [(a.code, json.dumps(a.lines), a.row) for a in answers]
    )


def answer_of(connection: sqlite3.Connection, row: int) -> Answer | None:
    """The answer to a request, once there is one."""
    from scheduler.core.requests import Answer

    found = answered(connection, row)
    return Answer(row, *found) if found else None


def answered(connection: sqlite3.Connection, row: int) -> tuple[int, tuple[str, ...]] | None:
    """Code and lines of the answer to a request, once there is one."""
    found = connection.execute("SELECT code, lines FROM requests WHERE id=? AND code IS NOT NULL", (row,)).fetchone()
    return (found[0], tuple(json.loads(found[1]))) if found else None


def paused_gpus(connection: sqlite3.Connection) -> tuple[int, ...]:
    """The paused GPUs, ascending; also those that are not managed now."""
    return tuple(row[0] for row in connection.execute("SELECT gpu FROM pauses ORDER BY gpu"))


def save_pauses(
    connection: sqlite3.Connection, gpus: Iterable[int], queue_paused: bool, changes: list[tuple[int, int, bool]]
) -> None:
    """Write all pauses, and what verbs changed since which picture of the state file (`core/pauses.py`)."""
    connection.execute("DELETE FROM pauses")
    connection.executemany("INSERT INTO pauses VALUES (?)", [(gpu,) for gpu in gpus])
    set_meta(connection, "queue_paused", "1" if queue_paused else "")
    set_meta(connection, "pause_changes", json.dumps(changes))


def pause_changes(connection: sqlite3.Connection) -> list[tuple[int, int, bool]]:
    """The inverse of the last part of ``save_pauses``."""
    text = meta(connection, "pause_changes")
    return [(revision, what, before) for revision, what, before in json.loads(text)] if text else []


def lowest_place(connection: sqlite3.Connection) -> int:
    """The place of the waiting job that was put first last, 0 if none was."""
    found = connection.execute("SELECT min(place) FROM jobs WHERE finished_at IS NULL AND place < 0").fetchone()[0]
    return int(found or 0)


def meta(connection: sqlite3.Connection, key: str) -> str:
    """A remembered text, empty if there is none."""
    row = connection.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
    return str(row[0]) if row else ""


def set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Remember a text."""
    connection.execute(
        "INSERT INTO meta VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value=excluded.value", (key, value)
    )


def gpus(connection: sqlite3.Connection) -> list[Gpu]:
    """The GPUs managed by the last daemon."""
    rows = connection.execute("SELECT id, uuid, name, server, memory_mib FROM gpus ORDER BY id")
    return [Gpu(*row) for row in rows]


def save_gpus(connection: sqlite3.Connection, found: Iterable[Gpu]) -> None:
    """Write which GPUs are managed now."""
    connection.execute("DELETE FROM gpus")
    connection.executemany(
        "INSERT INTO gpus VALUES (?,?,?,?,?)", [(g.index, g.uuid, g.name, g.server, g.memory_mib) for g in found]
    )


def holdings(connection: sqlite3.Connection) -> list[tuple[Holding, str]]:
    """GPUs held by processes that outlived their job, each with its boot id."""
    rows = connection.execute("SELECT key, job, need_count, need_parts, gpus, vram_mib, processes, boot FROM holdings")
    return [
        (
            Holding(
                r[0],
                r[1],
                ResourceRequest(r[2], r[3]),
                ids_of(r[4]),
                r[5],
                tuple(Process(*p) for p in json.loads(r[6])),
            ),
            r[7],
        )
        for r in rows
    ]


def save_holdings(connection: sqlite3.Connection, held: Iterable[Holding], freed: Iterable[str], boot: str) -> None:
    """Write new holdings, remove those whose processes are gone."""
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
    """These jobs have ended, and something is to be done now (`daemon/completion_hooks.py`)."""
    connection.executemany("INSERT OR REPLACE INTO calls VALUES (?, NULL)", [(job,) for job in jobs])


def calls(connection: sqlite3.Connection) -> list[tuple[int, float | None]]:
    """Jobs at whose end something is still to be done, and when it was begun."""
    return connection.execute("SELECT job, begun FROM calls ORDER BY job").fetchall()


def begin_call(connection: sqlite3.Connection, job: int, now: float) -> None:
    """It is done from here on."""
    connection.execute("UPDATE calls SET begun=? WHERE job=?", (now, job))


def strike_calls(connection: sqlite3.Connection, jobs: Iterable[int]) -> None:
    """It was done, or is not to be done any more."""
    connection.executemany("DELETE FROM calls WHERE job=?", [(job,) for job in jobs])


def class_reasons(connection: sqlite3.Connection) -> dict[str, Reason]:
    """Why each class of waiting jobs waits, as the daemon last saw it."""
    return {r[0]: Reason(r[1], r[2]) for r in connection.execute("SELECT class, code, sentence FROM reasons")}


def save_class_reasons(connection: sqlite3.Connection, reasons: dict[str, Reason]) -> None:
    """Write all class reasons."""
    connection.execute("DELETE FROM reasons")
    connection.executemany("INSERT INTO reasons VALUES (?,?,?)", [(k, r.code, r.sentence) for k, r in reasons.items()])
