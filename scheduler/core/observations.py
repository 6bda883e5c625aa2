"""What runners and readers report to the decision: typed, one class a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Failure, Job, Process
from scheduler.core.requests import Request


@dataclass(frozen=True, slots=True)
class Now:
    """The time: ``wall`` for records (seconds since 1970), ``mono`` for waiting (never jumps).

    ``since_boot``: what the start times of processes are counted in; like ``mono`` it never jumps, but goes on while
    the machine sleeps.
    """

    wall: float
    mono: float
    since_boot: float | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A job that the store holds as PENDING is to be queued (new, or changed while it waited)."""

    job: Job


@dataclass(frozen=True, slots=True)
class Started:
    """The command of this attempt runs."""

    job: int
    attempt: int
    process: Process
    at: float
    session: str | None = None  # "PID.NAME" of its terminal session


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt's leader ended: exactly one of ``exit_code`` and ``signal`` is set."""

    job: int
    attempt: int
    exit_code: int | None
    signal: int | None
    at: float
    leftovers: tuple[Process, ...] = ()
    failure: Failure | None = None
    note: str = ""  # what else is to be said about it
    unsure: tuple[Process, ...] = ()  # of ``leftovers``: may be another job's; they hold GPUs, and are not waited for


@dataclass(frozen=True, slots=True)
class NeverRan:
    """The command could not be started: ``lasting`` tells a wrong script from a full process table."""

    job: int
    attempt: int
    why: str
    lasting: bool
    at: float


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """Proven after a crash: nobody began this attempt, and nobody can any more."""

    job: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt is over and how it ended cannot be known."""

    job: int
    attempt: int
    why: str
    at: float
    leftovers: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of the attempt lives any more."""

    key: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A waiting job whose script or environment is not there (yet)."""

    job: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody asks for something; the answer goes to row ``row`` of the requests."""

    row: int
    request: Request


@dataclass(frozen=True, slots=True)
class Readings:
    """What the GPUs said at one moment, or why they said nothing."""

    at: float  # when they were asked, ``mono``
    gpus: tuple[GpuSnapshot, ...] = ()
    problem: str = ""


Observation = Union[Arrived, Started, Ended, NeverRan, Unclaimed, Lost, Gone, Missing, Asked, Readings]
