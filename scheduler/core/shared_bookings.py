"""Bookings that the schedulers of one machine share: the document that each of them publishes, as values and as text.

A document names GPUs by UUID and says nothing about commands or files. Times are seconds since boot, a clock that all
processes of a machine share and nobody can set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.gpu import WHOLE
from scheduler.core.job import Process

HEAD = b"gpujob bookings 1 "
LONGEST = 1 << 18  # bytes of a document
MOST_BOOKINGS = 1024
MOST_WANTS = 64
LARGEST_NUMBER = 1e11  # of seconds, and of GPU seconds: 3,000 years
MOST_PROCESSES = 64  # of one booking
LONGEST_NAME = 100
SCHEDULER, LEASE = "scheduler", "lease"


@dataclass(frozen=True, slots=True)
class Booking:
    """A part of one GPU that a job or a lease has.

    ``parts``: thousandths; ``memory_mib``: MiB that the job asked for (0: none); ``since`` and ``until`` (None: not
    known): start and expected end; ``processes``: while one of them lives, the booking counts.
    """

    gpu: str
    parts: int
    memory_mib: int = 0
    since: float = 0.0
    until: float | None = None
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """Waiting jobs with the same need. ``gpus``: UUIDs of the allowed GPUs; empty: any GPU of the scheduler."""

    count: int
    parts: int
    memory_mib: int = 0
    gpus: tuple[str, ...] = ()
    number: int = 1


@dataclass(frozen=True, slots=True)
class Document:
    """The facts that a scheduler or a lease publishes.

    ``key``: tells the documents of a user apart; ``process``: the scheduler or lease; ``supervisors``: processes that
    start and watch its jobs; ``space``: pid namespace of these processes; ``gpus``: UUIDs of the GPUs that it manages;
    ``waiting``: number of waiting jobs; ``used``: decayed GPU seconds until ``used_at`` (`core/fair_shares.py`);
    ``reserved``: parts of GPUs that nothing uses, reserved until a job fits (`core/take_turns.py: Turns.reserves`).
    """

    key: str
    boot: str
    kind: str = SCHEDULER
    process: Process | None = None
    supervisors: tuple[Process, ...] = ()
    space: int = 0
    gpus: tuple[str, ...] = ()
    waiting: int = 0
    wants: tuple[Want, ...] = ()
    used: float = 0.0
    used_at: float = 0.0
    bookings: tuple[Booking, ...] = field(default=())
    reserved: tuple[Booking, ...] = field(default=())


def text_of(document: Document, sequence: int) -> bytes:
    """Return a document as bytes: a line with ``sequence``, length and checksum, then JSON.

    ``sequence``: is higher in a later document of the same writer.
    """
    values = {
        "key": document.key, "boot": document.boot, "kind": document.kind,
        "process": None if document.process is None else _pair(document.process),
        "supervisors": [_pair(one) for one in document.supervisors], "space": document.space, "gpus": list(document.gpus),
        "waiting": document.waiting,
        "wants": [[one.count, one.parts, one.memory_mib, list(one.gpus), one.number] for one in document.wants],
        "used": document.used, "used_at": document.used_at,
        "bookings": [_values(one) for one in document.bookings], "reserved": [_values(one) for one in document.reserved],
    }  # fmt: skip
    body = json.dumps(values, separators=(",", ":")).encode()
    return HEAD + b"%d %d %d\n" % (sequence, len(body), _checksum(body)) + body


def document_from(data: bytes) -> Document:
    """Return the document in ``data``; bytes after it are ignored. Raises ValueError, with the reason, for any other data."""
    line, _, rest = data.partition(b"\n")
    numbers = line[len(HEAD) :].split()
    if not line.startswith(HEAD) or len(numbers) != 3 or not all(one.isdigit() and len(one) < 20 for one in numbers):
        raise ValueError("it is not a document of this version")
    _, length, checksum = map(int, numbers)
    body = rest[:length]
    if len(body) != length or _checksum(body) != checksum:
        raise ValueError("it is incomplete")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    try:
        return _document(values)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a value is wrong: {str(error)[:100]}") from None


def _checksum(body: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(body, digest_size=7).digest(), "big")


def _values(one: Booking) -> list[Any]:
    return [one.gpu, one.parts, one.memory_mib, one.since, one.until, [_pair(process) for process in one.processes]]


def _pair(process: Process) -> list[int]:
    return [process.pid, process.ticks]


def _document(values: Any) -> Document:
    if not isinstance(values, dict):
        raise ValueError("no object")
    kind = values["kind"]
    if kind not in (SCHEDULER, LEASE):
        raise ValueError("kind")
    return Document(
        _name(values["key"]), _name(values["boot"]), kind,
        None if values["process"] is None else _process(values["process"]),
        tuple(map(_process, _list(values["supervisors"], 16))), _whole(values["space"], 1 << 62),
        tuple(map(_name, _list(values["gpus"], MOST_BOOKINGS))),
        _whole(values["waiting"], 1 << 40), tuple(map(_want, _list(values["wants"], MOST_WANTS))),
        _number(values["used"]), _number(values["used_at"]),
        tuple(map(_booking, _list(values["bookings"], MOST_BOOKINGS))),
        tuple(map(_booking, _list(values["reserved"], MOST_BOOKINGS))),
    )  # fmt: skip


def _booking(values: Any) -> Booking:
    gpu, parts, memory, since, until, processes = _list(values, 6)
    return Booking(
        _name(gpu), _whole(parts, WHOLE, 1), _whole(memory, 1 << 40), _number(since),
        None if until is None else _number(until), tuple(map(_process, _list(processes, MOST_PROCESSES))),
    )  # fmt: skip


def _want(values: Any) -> Want:
    count, parts, memory, gpus, number = _list(values, 5)
    return Want(
        _whole(count, MOST_BOOKINGS), _whole(parts, WHOLE), _whole(memory, 1 << 40),
        tuple(map(_name, _list(gpus, MOST_BOOKINGS))), _whole(number, 1 << 40),
    )  # fmt: skip


def _process(values: Any) -> Process:
    pid, ticks = _list(values, 2)
    if not pid:
        raise ValueError("pid 0")
    return Process(_whole(pid, 1 << 22), _whole(ticks, 1 << 62))


def _list(values: Any, most: int) -> Sequence[Any]:
    if not isinstance(values, list) or len(values) > most:
        raise ValueError("a list is missing or too long")
    return values


def _name(value: Any) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= LONGEST_NAME
        or not value.isascii()
        or not value.isprintable()
    ):
        raise ValueError("a name is wrong")
    return value


def _whole(value: Any, most: int, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError("a number is wrong")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= LARGEST_NUMBER:
        raise ValueError("a time is wrong")
    return float(value)
