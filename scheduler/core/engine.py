"""Interface of an engine such as Slurm or Ray: submit, list all jobs in one call, cancel, list nodes, logs."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.core.gpu import ResourceRequest


class EngineDown(Exception):
    """The engine did not answer, or its answer was not understood. A request may have been carried out or not."""


class EngineBusy(Exception):
    """The engine refuses all jobs at present, for example because of a limit or a wrong setting: try again later."""


class EngineRefused(Exception):
    """The engine refuses this job, and will refuse it again."""


class JobPhase(enum.Enum):
    """The state of a job in an engine."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EngineJob:
    """A job as the engine lists it.

    ``word``: the engine's own word for the state, such as NODE_FAIL; ``exit_code``, ``signal``: how the job ended, None
    if the engine does not know it; ``ended_badly``: the engine ended the job, or lost it, for the reason ``word``;
    ``lost``: the engine cannot know how the job ended; ``why``: why the job waits.
    """

    name: str
    engine_job: str
    phase: JobPhase
    word: str = ""
    node: str = ""
    partition: str = ""
    exit_code: int | None = None
    signal: int | None = None
    ended_badly: bool = False
    lost: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class EngineNode:
    """A node of the cluster.

    ``types``: the type of each GPU, by its number on the node; ``used``: the numbers of the GPUs that have an allocation
    of any user; ``shards``: number of shards of all GPUs of the node; ``problem``: why it gets no jobs; empty: none.
    """

    name: str
    partition: str = ""
    types: tuple[str, ...] = ()
    used: frozenset[int] = frozenset()
    shards: int = 0
    cpus: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job for the engine.

    ``name``: unique for the attempt; ``comment``: for people; ``command``: the words to run on the node; ``output``:
    file for messages before the job has its own log; ``nodes``: run on one of these nodes (empty: on any);
    ``type``: type of the GPUs (empty: any).
    """

    name: str
    comment: str
    command: Sequence[str]
    output: str
    need: ResourceRequest
    priority: int = 0
    time_limit_s: float | None = None
    nodes: tuple[str, ...] = ()
    type: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A report of the engine about its nodes. ``shards``: see `core/engine_placement.py: EngineRules`.

    ``notes``: warnings about the configuration of the engine.
    """

    nodes: Sequence[EngineNode] = ()
    shards: int | None = None
    notes: Sequence[str] = field(default_factory=tuple)


class Engine(Protocol):
    """An engine. All methods may block up to their time limits; they are called by one thread. Each raises EngineDown."""

    name: str  # as in the setting `engine`
    title: str  # for people
    gone_after_s: float  # an engine that does not answer for this long has lost its jobs; infinite: it keeps them
    tied: bool  # the engine signals only the process that it started, not the processes of the job

    def submit(self, work: Submission) -> str:
        """Submit a job, and return the engine's id of it. Raises EngineBusy or EngineRefused."""

    def jobs(self, prefix: str) -> Mapping[str, EngineJob]:
        """Return name → job, for all jobs whose names begin with ``prefix``, also those that ended not long ago."""

    def history(self, names: Sequence[str]) -> Mapping[str, EngineJob]:
        """Return the jobs that a second record of the engine (accounting) has; empty if there is no such record."""

    def cancel(self, name: str, hard: bool) -> None:
        """End a job. ``hard``: by SIGKILL. A job that is not known or has ended is no error."""

    def report(self) -> Report:
        """Return the nodes and their GPUs."""

    def logs(self, name: str) -> str:
        """Return the output of a job, as far as the engine has it; empty if it has none."""
