"""Observations: the input of `decide` in a pass, one class for each kind.

``job`` is a job id, ``at`` is in seconds since 1970 (UTC) unless a class says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from scheduler.core.gpu_faults import Xid
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Failure, Job, Process
from scheduler.core.neighbours import Neighbours
from scheduler.core.placement_class import WaitingJob
from scheduler.core.requests import Request
from scheduler.core.rights import Caller


@dataclass(frozen=True, slots=True)
class Now:
    """The current time. ``wall``: seconds since 1970, for records; ``mono``: monotonic seconds, for waiting.

    ``since_boot``: seconds since boot, the clock of process start times; None: unknown. This clock never jumps, like
    ``mono``, but it also runs while the machine sleeps.
    """

    wall: float
    mono: float
    since_boot: float | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A PENDING job in the store is new, or was changed while it waited. `decide` has to queue or park it."""

    job: Job


@dataclass(frozen=True, slots=True)
class Restored:
    """After a start of the scheduler: the waiting jobs in the store that may start as soon as there is room.

    Jobs that wait for another reason, such as a back-off or a hold, come as `Arrived`. For speed, ``jobs`` has only the
    facts that the queue needs: a million complete jobs would take four times as long to read.
    """

    jobs: Sequence[WaitingJob]


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """The machine and the GPUs of an attempt on a cluster.

    ``node``: name of the machine; ``gpus``: UUIDs of the GPUs that the engine gave (`core/gpu.py: Gpu.uuid`);
    ``engine_job``: the engine's own id of the job.
    """

    node: str
    gpus: tuple[str, ...] = ()
    engine_job: str = ""
    partition: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The command of an attempt has started. ``process``: its main process; None if it runs on another machine."""

    job: int
    attempt: int
    process: Process | None
    at: float
    session: str | None = None  # "PID.NAME" of its terminal session
    place: EnginePlace | None = None  # where an engine started it
    argv: tuple[str, ...] = ()  # its command, if only the starter knows it: an agent finds the program (`gpujobd`)
    interpreter: str = ""  # the interpreter that the starter found


@dataclass(frozen=True, slots=True)
class Ended:
    """The main process of an attempt ended: exactly one of ``exit_code`` and ``signal`` is set.

    ``leftovers``: processes of the attempt that still live; ``failure``: the cause of failure found in the log;
    ``oom_kills``: processes that the kernel ended in the attempt's memory cgroup, which other jobs may share, while it
    ran, because memory ran out.
    """

    job: int
    attempt: int
    exit_code: int | None
    signal: int | None
    at: float
    leftovers: tuple[Process, ...] = ()
    failure: Failure | None = None
    note: str = ""  # a sentence added to the job's notes
    oom_kills: int = 0
    unsure: tuple[Process, ...] = ()  # ``leftovers`` that may be another job's: they hold GPUs, but delay no cancel


@dataclass(frozen=True, slots=True)
class NeverRan:
    """The command could not be started. ``lasting``: another start would fail too, for example with a wrong script."""

    job: int
    attempt: int
    why: str
    lasting: bool
    at: float


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """The attempt was not started, and no process can start it any more.

    The attempt record prevents a start, because it says that the attempt was given up.
    """

    job: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt has ended, and its outcome is unknown. ``leftovers``: processes of the attempt that still live."""

    job: int
    attempt: int
    why: str
    at: float
    leftovers: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of the attempt ``key`` (such as ``12.1``) lives any more."""

    key: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A waiting job lacks its script, environment or working folder; ``sentence`` names the missing item.

    ``attempt``: an agent noticed it before it started this attempt, which so never begins (`gpujobd`); 0: there is none.
    """

    job: int
    sentence: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a user, from row ``row`` of the table of requests; the answer belongs to the same row.

    ``by``: who asks, in a scheduler of several users; None: the user of the scheduler.
    """

    row: int
    request: Request
    by: Caller | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """One reading of all GPUs; ``problem``: why it failed, empty if it succeeded."""

    at: float  # when the reading was requested (monotonic seconds)
    gpus: tuple[GpuSnapshot, ...] = ()
    problem: str = ""
    xids: tuple[Xid, ...] = ()  # errors that the driver has reported since the reading before
    watches_errors: bool = False  # the driver reports such errors (NVML does, nvidia-smi does not)


@dataclass(frozen=True, slots=True)
class GpuErrors:
    """Errors that the driver has reported. They are read once, so they are kept until they are recorded."""

    xids: tuple[Xid, ...]


Observation = Union[
    Arrived, Restored, Started, Ended, NeverRan, Unclaimed, Lost, Gone, Missing, Asked, Readings, GpuErrors, Neighbours
]
