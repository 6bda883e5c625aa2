"""The columns of the table `jobs`: SQL type, and the conversions of the value from and to a Job.

`store/jobs.py` uses this list to read and write jobs, and `store/migrations.py` uses it to add columns.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any

from scheduler.core.allowed import Allowed, allowed_text, parse_allowed
from scheduler.core.errors import Damaged, SchedulerError
from scheduler.core.failure_signs import usual_hint
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import HOLDING, Failure, Job, JobSpec, JobState, Outcome, Process
from scheduler.store.run_facts import facts_of, facts_text

# Values of `Column.when`: when a column is written.
ONCE = "once"  # when the job is inserted
SPEC = "spec"  # when the job is inserted, and by `jobs.respec`
STATE = "state"  # when the job is inserted, and by each `jobs.save`
LATER = "later"  # by each `jobs.save`; a new job has the SQL default, which equals the default of Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table `jobs`.

    ``write``: the attribute of Job that is stored (`need.count`), or a function that makes the stored value from a Job.
    ``field``: the field of Job that is filled from the column. It is empty if the column is only used in queries, or
    only as the ``second`` of another column. ``read``: a function that converts the stored value into the value of the
    field; None: no conversion. ``second``: the name of another column, whose value is the second argument of ``read``;
    empty: ``read`` has one argument. ``made_from``: the field of Job that decides the value; empty: ``field``.
    ``since``: the version of the store that introduced the column.
    """

    name: str
    sql: str
    write: Any
    field: str = ""
    read: Callable[..., Any] | None = None
    second: str = ""
    third: str = ""
    when: str = STATE
    made_from: str = ""
    since: int = 1


def _plain(name: str, sql: str, *, when: str = STATE, since: int = 1) -> Column:
    """Return a column that holds a field of Job unchanged."""
    return Column(name=name, sql=sql, write=name, field=name, when=when, since=since)


def ids_text(gpus: Sequence[int]) -> str:
    """Return GPU ids joined by commas. The given order is kept, because CUDA numbers the GPUs in this order."""
    return ",".join(map(str, gpus))


def ids_of(text: str) -> tuple[int, ...]:
    """Parse a text that `ids_text` returned into GPU ids."""
    return tuple(int(piece) for piece in text.split(",")) if text else ()


def _visible(text: str) -> str:
    """Return a text that SQLite can store. Bytes that are not UTF-8, as in some paths, become backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _spec(job: Job) -> str:
    return json.dumps(job.spec.as_dict(), ensure_ascii=True)


def _words(words: Sequence[str]) -> str:
    return json.dumps(words) if words else ""


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text else ()


def _allowed(job: Job) -> str | None:
    return None if job.allowed is None else allowed_text(job.allowed)


def allowed_of(text: str | None) -> Allowed:
    """Return the allowed GPUs, nodes or types that a stored text names; None: any GPU is allowed."""
    return parse_allowed(text) if text else None


def _process_of(pid: int | None, ticks: int) -> Process | None:
    return None if pid is None else Process(pid, ticks)


# A new field goes to the end: older rows have only the first ones.
_FINDING = tuple((one.name, None if one.default is MISSING else one.default) for one in fields(Failure))


def _finding(job: Job) -> str:
    """Return the cause of a failure as JSON: its fields in order, without the last ones that have their defaults.

    A hint is stored only if it is not the usual one of the class: with many failed jobs, hints would fill the store.
    """
    found = job.log_finding
    if found is None:
        return ""
    values = [getattr(found, name) for name, _ in _FINDING]
    if found.hint == usual_hint(found.kind):
        values[2] = None
    while len(values) > 1 and values[-1] == _FINDING[len(values) - 1][1]:
        values.pop()
    return json.dumps(values)


def _finding_of(text: str) -> Failure | None:
    if not text:
        return None
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in json.loads(text)]
    if len(values) > 2 and values[2] is None:
        values[2] = usual_hint(values[0])
    return Failure(*values)


def _outcome_of(text: str | None) -> Outcome | None:
    return Outcome(text) if text else None


_BLOCKING = frozenset({JobState.PENDING, *HOLDING, JobState.DONE})


def blocks(job: Job) -> bool:
    """Return whether a line with the identity of this job repeats the job, and so does not become a new job."""
    return bool(job.identity) and job.state in _BLOCKING


COLUMNS: tuple[Column, ...] = (
    # Never reused: when the newest row is deleted, `meta` keeps its id.
    _plain("id", "INTEGER PRIMARY KEY", when=ONCE),
    Column(name="state", sql="TEXT NOT NULL", write="state.value", field="state",
           read={state.value: state for state in JobState}.__getitem__),
    Column(name="spec", sql="TEXT NOT NULL", write=_spec, field="spec", read=lambda text: JobSpec.from_dict(json.loads(text)), when=SPEC),
    _plain("identity", "TEXT NOT NULL", when=ONCE),
    # The identity while equal lines are repetitions of the job, else NULL.
    Column(name="blocking", sql="TEXT UNIQUE", write=lambda job: job.identity if blocks(job) else None, made_from="state"),
    Column(name="need_count", sql="INTEGER NOT NULL", write="need.count", field="need", read=ResourceRequest, second="need_parts", third="need_profile"),
    Column(name="need_parts", sql="INTEGER NOT NULL", write="need.parts", made_from="need"),
    _plain("priority", "INTEGER NOT NULL"),
    # Order among equal priorities; 0 stands for the id.
    Column(name="place", sql="INTEGER NOT NULL", write="order", field="order", read=lambda place, number: place or number, second="id"),
    Column(name="allowed", sql="TEXT", write=_allowed, field="allowed", read=allowed_of),
    Column(name="vram_mib", sql="INTEGER NOT NULL DEFAULT 0", write=lambda job: job.spec.vram_mib or 0, when=SPEC),
    Column(name="waits_for", sql="INTEGER NOT NULL DEFAULT 0", write=lambda job: 1 if job.spec.after or job.spec.after_ok else 0, when=SPEC),
    _plain("submitted_at", "REAL NOT NULL", when=ONCE),
    _plain("started_at", "REAL", when=LATER),
    _plain("finished_at", "REAL", when=LATER),  # NULL until the main process has ended
    _plain("attempt", "INTEGER NOT NULL DEFAULT 0", when=LATER),
    _plain("start_failures", "INTEGER NOT NULL DEFAULT 0", when=LATER),
    _plain("runs_failed", "INTEGER NOT NULL DEFAULT 0", when=LATER),
    _plain("oom_retries", "INTEGER NOT NULL DEFAULT 0", when=LATER),
    _plain("not_before", "REAL", when=LATER),
    Column(name="gpus", sql="TEXT NOT NULL DEFAULT ''", write=lambda job: ids_text(job.gpus), field="gpus", read=ids_of, when=LATER),
    Column(name="pid", sql="INTEGER", write=lambda job: job.process.pid if job.process else None, field="process", read=_process_of, second="ticks", when=LATER),
    Column(name="ticks", sql="INTEGER", write=lambda job: job.process.ticks if job.process else None, when=LATER, made_from="process"),
    _plain("boot", "TEXT NOT NULL DEFAULT ''", when=LATER),
    _plain("runner", "TEXT NOT NULL DEFAULT 'direct'", when=LATER),
    _plain("session", "TEXT", when=LATER),
    Column(name="argv", sql="TEXT NOT NULL DEFAULT ''", write=lambda job: _words(job.argv), field="argv", read=_words_of, when=LATER),
    _plain("log", "TEXT NOT NULL DEFAULT ''", when=LATER),
    Column(name="outcome", sql="TEXT", write=lambda job: job.outcome.value if job.outcome else None, field="outcome", read=_outcome_of, when=LATER),
    _plain("exit_code", "INTEGER", when=LATER),
    _plain("signal", "INTEGER", when=LATER),
    _plain("reason_code", "TEXT NOT NULL DEFAULT ''", when=LATER),
    Column(name="reason", sql="TEXT NOT NULL DEFAULT ''", write=lambda job: _visible(job.reason), field="reason", when=LATER),
    _plain("stop_why", "TEXT NOT NULL DEFAULT ''", when=LATER),
    _plain("stop_at", "REAL", when=LATER),
    Column(name="held", sql="INTEGER NOT NULL DEFAULT 0", write=lambda job: 1 if job.held else 0, field="held", read=bool),
    Column(name="notes", sql="TEXT NOT NULL DEFAULT ''", write=lambda job: _words(job.notes), field="notes", read=_words_of),
    Column(name="failure", sql="TEXT NOT NULL DEFAULT ''", write=_finding, field="log_finding", read=_finding_of, when=LATER),
    _plain("interpreter", "TEXT NOT NULL DEFAULT ''", when=LATER, since=2),
    _plain("node", "TEXT NOT NULL DEFAULT ''", when=LATER, since=9),
    _plain("partition", "TEXT NOT NULL DEFAULT ''", when=LATER, since=9),
    _plain("engine_job", "TEXT NOT NULL DEFAULT ''", when=LATER, since=9),
    Column(name="user", sql="TEXT NOT NULL DEFAULT ''", write="spec.user", when=SPEC, since=10),
    _plain("gpu_retries", "INTEGER NOT NULL DEFAULT 0", when=LATER, since=12),
    Column(name="need_profile", sql="TEXT NOT NULL DEFAULT ''", write="need.profile", made_from="need", since=13),
    Column(name="link", sql="TEXT NOT NULL DEFAULT ''", write="spec.link", when=SPEC, since=13),
    Column(name="facts", sql="TEXT NOT NULL DEFAULT ''", write=lambda job: facts_text(job.facts), field="facts", read=facts_of, when=LATER, since=15),
)  # fmt: skip


class Writer:
    """Converts jobs into rows of the given columns. ``names``: the names of these columns, in the order of a row.

    For speed, a single `attrgetter` reads all values that are plain attributes of Job.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        direct = [column for column in columns if isinstance(column.write, str)]
        made = [column for column in columns if not isinstance(column.write, str)]
        self.names = [column.name for column in (*direct, *made)]
        self._direct = attrgetter(*[column.write for column in direct]) if direct else None
        self._only_one = len(direct) == 1
        self._made = [column.write for column in made]

    def row(self, job: Job) -> tuple[Any, ...]:
        """Return the job's values in the order of ``names``."""
        made = tuple([make(job) for make in self._made])
        if self._direct is None:
            return made
        direct = self._direct(job)
        return (direct, *made) if self._only_one else (*direct, *made)


_FURTHER = {name for column in COLUMNS for name in (column.second, column.third)}
READ = [column.name for column in COLUMNS if column.field or column.name in _FURTHER]
_AT = {name: place for place, name in enumerate(READ)}
_OF_FIELD = {column.field: column for column in COLUMNS if column.field}
_FIELDS = tuple(field.name for field in fields(Job) if field.init)  # in the order of the arguments of Job
_IN_ORDER = itemgetter(*[_AT[_OF_FIELD[field].name] for field in _FIELDS])
_READ_BY: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = [
    (place, column.read, tuple(_AT[name] for name in (column.second, column.third) if name))
    for place, column in enumerate(_OF_FIELD[field] for field in _FIELDS)
    if column.read is not None
]
_ONE = [(place, read) for place, read, more in _READ_BY if not more]
_TWO = [(place, read, more[0]) for place, read, more in _READ_BY if len(more) == 1]
_THREE = [(place, read, *more) for place, read, more in _READ_BY if len(more) == 2]
_DEFAULTS = {
    column.name: ast.literal_eval(column.sql.partition(" DEFAULT ")[2] or "None") for column in COLUMNS
}  # values that SQLite gives to existing rows when a column is added
NEWEST = max(column.since for column in COLUMNS)  # a store of an earlier version lacks columns that are read
SELECT = f"SELECT {', '.join(READ)} FROM jobs"
STATE_AT, FINISHED_AT = _AT["state"], _AT["finished_at"]

WHOLE = Writer(COLUMNS)
NEW = Writer([column for column in COLUMNS if column.when != LATER and column.name != "id"])
OF_SPEC = Writer([column for column in COLUMNS if column.when == SPEC])
_CHANGEABLE = [column for column in COLUMNS if column.when in (STATE, LATER)]
_WATCHED = list(dict.fromkeys(column.made_from or column.field for column in _CHANGEABLE))  # fields of Job
values_of = attrgetter(*_WATCHED)  # job → the values of the fields that `jobs.save` writes


class Update:
    """An SQL statement that updates the columns of some fields of Job; ``values`` returns its parameters.

    ``changed``: the places of these fields in the result of `values_of`. The statement names no other column, because
    SQLite rewrites the index of each column that an UPDATE names, even if the value stays the same.
    """

    def __init__(self, changed: Sequence[int]) -> None:
        names = {_WATCHED[place] for place in changed}
        writer = Writer([column for column in _CHANGEABLE if (column.made_from or column.field) in names])
        self.sql = f"UPDATE jobs SET {', '.join(f'{name}=?' for name in writer.names)} WHERE id=?"
        self._row = writer.row

    def values(self, job: Job) -> tuple[Any, ...]:
        """Return the parameters of the statement ``sql`` for this job."""
        return (*self._row(job), job.id)


ALL_CHANGEABLE = tuple(range(len(_WATCHED)))


def job_of(row: Sequence[Any]) -> Job:
    """Return the Job that a row of the query ``SELECT`` describes. Raises Damaged if the row holds invalid values."""
    try:
        values = list(_IN_ORDER(row))
        for place, read in _ONE:
            values[place] = read(values[place])
        for place, read, second in _TWO:
            values[place] = read(values[place], row[second])
        for place, read, second, third in _THREE:
            values[place] = read(values[place], row[second], row[third])
        job = Job(*values)
        job.stored = values_of(job)
        return job
    except (SchedulerError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Damaged(f"the store is damaged (job {row[0]!r}: {error!r})") from error


def job_of_row(row: Mapping[str, Any]) -> Job:
    """Return the Job that a row describes. ``row``: column → value. A missing column gets its default.

    Raises Damaged if the row holds invalid values.
    """
    return job_of([row.get(name, _DEFAULTS[name]) for name in READ])
