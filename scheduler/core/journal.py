"""Records of the journal: a job as one JSON line, with its command, status, GPUs, times, log and status history."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from scheduler.core.job import Job, JobState
from scheduler.core.units import utc

KEYS = (
    "id",
    "command",
    "status",
    "pid",
    "gpu_id",
    "start_time",
    "end_time",
    "log_file",
    "exit_code",
    "outcome",
    "history",
)
PENDING, RUNNING = "pending", "running"
Who = tuple[int, str]  # job id and time of acceptance; another scheduler or a new store may use the same id
ENDS = {
    JobState.DONE: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    JobState.SKIPPED: "skipped",
}
STATUSES = (PENDING, RUNNING, *ENDS.values())
# Kind of event → the status that a job has after it.
STATUS_AFTER = {
    "started": RUNNING,
    "retry_scheduled": PENDING,
    "unclaimed": PENDING,
    "requeued": PENDING,
    **{state.value: word for state, word in ENDS.items()},
}
SHOWN = frozenset({*STATUS_AFTER, "edited", "changed"})  # kinds of events that can change a job's record
# The start of a record from which the job id can be read, and a record cut off before its command.
_BEGINNING = re.compile(r'\{"id": (\d{1,18}), "c')
_SHORT = re.compile(r'(\{|\{"|\{"i|\{"id|\{"id"|\{"id":|\{"id": \d{0,18},?|\{"id": \d{1,18}, "?)')


def status_of(job: Job) -> str:
    """Return a job's status in the journal, one of `STATUSES`. A starting job is ``pending`` until its process runs."""
    if job.state in ENDS:
        return ENDS[job.state]
    return RUNNING if job.state.holds_gpus and job.began else PENDING


def history_of(job: Job, moments: Iterable[tuple[float, str]]) -> list[list[str]]:
    """Return the changes of a job's status, oldest first, each as [time (ISO 8601, UTC), status].

    ``moments``: time and kind of all events of the job, oldest first. For the last attempt, the times are the start and
    the end of its process. For earlier attempts, the times are those at which the daemon recorded the events.
    """
    found: list[tuple[float, str]] = [(job.submitted_at, PENDING)]
    for at, kind in moments:
        word = STATUS_AFTER.get(kind)
        if word is not None and word != found[-1][1]:
            found.append((at, word))
    status = status_of(job)
    if found[-1][1] != status:  # some events are lost, as after `gpujob recover`
        found.append((job.finished_at or job.started_at or found[-1][0], status))
    last = max(number for number, (_, word) in enumerate(found) if word in (PENDING, RUNNING))
    if last + 1 < len(found) and job.finished_at is not None:
        found[last + 1] = (job.finished_at, found[last + 1][1])
    if found[last][1] == RUNNING and job.started_at is not None:
        found[last] = (job.started_at, RUNNING)
    return [[utc(at), word] for at, word in found]


def record_of(job: Job, moments: Iterable[tuple[float, str]]) -> dict[str, Any]:
    """Return the journal record of a job, with the keys `KEYS` (docs/json.md, Journal)."""
    began = status_of(job) != PENDING
    gpus = job.gpus if began else ()
    return {
        "id": job.id,
        "command": _text(job.spec.written_text),
        "status": status_of(job),
        "pid": job.process.pid if began and job.process else None,
        "gpu_id": None if not gpus else gpus[0] if len(gpus) == 1 else list(gpus),
        "start_time": utc(job.started_at) if began and job.started_at is not None else None,
        "end_time": utc(job.finished_at) if job.state.ended and job.finished_at is not None else None,
        "log_file": _text(job.log) or None if job.state is not JobState.STARTING else None,  # it may not exist yet
        "exit_code": job.exit_code if job.state.ended else None,
        "outcome": job.outcome.value if job.state.ended and job.outcome else None,
        "history": history_of(job, moments),
    }


def line_of(record: dict[str, Any]) -> bytes:
    """Return a record as one line of ASCII JSON, with its newline."""
    return json.dumps(record).encode("ascii") + b"\n"


def read_line(line: bytes) -> Any:
    """Return the JSON value of a line. Raises ValueError if the line is not JSON or is nested too deeply."""
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def identity_of_record(value: Any) -> Who | None:
    """Return job id and acceptance time from a record of any gpujob version; None if ``value`` is no record."""
    if not isinstance(value, dict) or tuple(value)[:3] != KEYS[:3] or type(value["id"]) is not int or value["id"] < 0:
        return None
    match value.get("history"):
        case [[str(first), *_], *_]:
            return value["id"], first
    return None


def torn_id(torn: bytes) -> int | None:
    """Return the job id at the start of an incomplete record; None if no job id can be read from ``torn``."""
    found = _BEGINNING.match(torn[:40].decode("utf-8", "replace"))
    return int(found[1]) if found else None


def is_beginning(torn: bytes, job: Job | None) -> bool:
    """Return whether ``torn`` is an incomplete record of ``job``.

    If ``job`` is None, the job is not known. The result is then True if ``torn`` is the beginning of a record, cut off
    before the text of the command.
    """
    if job is None:
        return len(torn) <= 40 and _SHORT.fullmatch(torn.decode("utf-8", "replace")) is not None
    start = json.dumps({"id": job.id, "command": _text(job.spec.written_text)})[:-1].encode("ascii") + b', "status": "'
    if len(torn) <= len(start):
        return start.startswith(torn)
    return torn.startswith(start) and b"{" not in torn[len(start) :]  # a "{": another line follows the cut one


def _text(text: str) -> str:
    """Return ``text`` with surrogates escaped, because many JSON readers reject them.

    A surrogate stands for a byte that is not UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
