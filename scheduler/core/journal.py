"""A job as one line of the journal (`journal`): command, status, GPU, times, code, log and the history of its status."""

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
Who = tuple[int, str]  # id and time of acceptance: a scheduler begun anew, or another one, gives the same ids
ENDS = {
    JobState.DONE: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    JobState.SKIPPED: "skipped",
}
STATUSES = (PENDING, RUNNING, *ENDS.values())
# Kinds of events that give a job another status.
STATUS_AFTER = {
    "started": RUNNING,
    "retry_scheduled": PENDING,
    "unclaimed": PENDING,
    "requeued": PENDING,
    **{state.value: word for state, word in ENDS.items()},
}
SHOWN = frozenset({*STATUS_AFTER, "edited", "changed"})  # kinds of events after which the line may be another
_BEGINNING = re.compile(r'\{"id": (\d{1,18}), "c')
_SHORT = re.compile(r'(\{|\{"|\{"i|\{"id|\{"id"|\{"id":|\{"id": \d{0,18},?|\{"id": \d{1,18}, "?)')


def status_of(job: Job) -> str:
    """The word for where a job is; one that was only placed has no process yet and still counts as pending."""
    if job.state in ENDS:
        return ENDS[job.state]
    return RUNNING if job.state.holds_gpus and job.process is not None else PENDING


def history_of(job: Job, moments: Iterable[tuple[float, str]]) -> list[list[str]]:
    """What the status was from when on. ``moments``: time and kind of all events of the job, oldest first.

    Of the last attempt start and end are those of its process; of earlier ones the moments at which they were taken
    note of, which is all that is kept of them.
    """
    found: list[tuple[float, str]] = [(job.submitted_at, PENDING)]
    for at, kind in moments:
        word = STATUS_AFTER.get(kind)
        if word is not None and word != found[-1][1]:
            found.append((at, word))
    status = status_of(job)
    if found[-1][1] != status:  # a story that was lost in part (`recover`)
        found.append((job.finished_at or job.started_at or found[-1][0], status))
    last = max(number for number, (_, word) in enumerate(found) if word in (PENDING, RUNNING))
    if last + 1 < len(found) and job.finished_at is not None:
        found[last + 1] = (job.finished_at, found[last + 1][1])
    if found[last][1] == RUNNING and job.started_at is not None:
        found[last] = (job.started_at, RUNNING)
    return [[utc(at), word] for at, word in found]


def record_of(job: Job, moments: Iterable[tuple[float, str]]) -> dict[str, Any]:
    """The job as the journal has it (docs/formats.md, Journal)."""
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
        "log_file": _text(job.log) or None if job.state is not JobState.STARTING else None,  # a name alone as yet
        "exit_code": job.exit_code if job.state.ended else None,
        "outcome": job.outcome.value if job.state.ended and job.outcome else None,
        "history": history_of(job, moments),
    }


def line_of(record: dict[str, Any]) -> bytes:
    """A record as a line, with its newline; plain ASCII, whatever the command holds."""
    return json.dumps(record).encode("ascii") + b"\n"


def read_line(line: bytes) -> Any:
    """What stands in a line. Raises ValueError when that is no JSON."""
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def who_is(value: Any) -> Who | None:
    """Whom a record of ours is about, also one of another version; None for whatever else a line may hold."""
    if not isinstance(value, dict) or tuple(value)[:3] != KEYS[:3] or type(value["id"]) is not int or value["id"] < 0:
        return None
    match value.get("history"):
        case [[str(first), *_], *_]:
            return value["id"], first
    return None


def torn_id(torn: bytes) -> int | None:
    """The job that a line which is no JSON seems to begin with; None when it begins like none, or ends before its id does."""
    found = _BEGINNING.match(torn[:40].decode("utf-8", "replace"))
    return int(found[1]) if found else None


def is_beginning(torn: bytes, job: Job | None) -> bool:
    """Whether ``torn`` is what was cut off of a line about ``job`` (None: of any job, when not even its id is whole)."""
    if job is None:
        return len(torn) <= 40 and _SHORT.fullmatch(torn.decode("utf-8", "replace")) is not None
    start = json.dumps({"id": job.id, "command": _text(job.spec.written_text)})[:-1].encode("ascii") + b', "status": "'
    if len(torn) <= len(start):
        return start.startswith(torn)
    return torn.startswith(start) and b"{" not in torn[len(start) :]  # else somebody has written on behind it


def _text(text: str) -> str:
    """Bytes of a path that is no UTF-8 made visible: half a surrogate pair is no text to most readers of JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
