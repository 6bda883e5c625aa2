"""The shapes of the plugs: what a runner or a probe must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Observation, Readings


class Runner(Protocol):
    """Starts attempts, reports what becomes of them, ends them. Chooses nothing and knows no store.

    Facts are reported exactly once, in order (Started before Ended), by ``look``; ``descriptors`` are what an
    event loop has to wait on. Nothing here may block for longer than it takes to write to a pipe.
    """

    name: str  # what the store keeps beside each attempt: direct, screen

    def start(self, job: Job, launch: Launch) -> None:
        """Have the attempt started; what came of it is reported by ``look``. Never raises for a bad command."""

    def flush(self) -> None:
        """Send all starts that were asked for since the last flush."""

    def look(self) -> list[Observation]:
        """What happened since the last look."""

    def adopt(self, job: Job) -> list[Observation]:
        """Take over an attempt found in the store: the observations that follow; it is watched if it still lives."""

    def stop(self, job: Job, hard: bool) -> None:
        """Send SIGTERM (or SIGKILL when ``hard``) to every process of the attempt, wherever it went."""

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Report Gone(key) once none of these, nor any other process of the attempt, lives."""

    def leave_alone(self, sessions: Set[int]) -> None:
        """Processes of these sessions belong to no job, though they may become our children."""

    def descriptors(self) -> list[int]:
        """File descriptors that become readable when ``look`` has something to say."""

    def next_look(self) -> float | None:
        """A monotonic time at which to look again even without a readable descriptor."""

    def trouble(self) -> str:
        """What holds up all starts and endings just now, and what mends it, as a sentence; empty if nothing does."""

    def close(self) -> None:
        """Let go; attempts live on."""


class Probe(Protocol):
    """Says which GPUs there are and what is on them. Asking never blocks; an error is never read as "none"."""

    absent: bool  # the last reading failed because there is no driver at all

    def first(self, slow: Callable[[], None] | None = None, meanwhile: Callable[[], None] | None = None) -> Readings:
        """The first reading, waited for at the start (``slow`` is called once if that takes more than a moment).

        ``meanwhile`` is called several times a second, and at the end; what it raises ends the wait. Raises NoGpuData when no
        GPU can be seen.
        """

    def ask(self) -> None:
        """Begin a reading, unless one is under way."""

    def look(self) -> Readings | None:
        """The reading that was asked for, once it is there or has failed."""

    def sessions(self) -> set[int]:
        """Sessions of the probe's own processes, which belong to no job."""

    def descriptors(self) -> list[int]:
        """File descriptors that become readable when ``look`` has something to say."""

    def next_look(self) -> float | None:
        """A monotonic time at which to look again even without a readable descriptor."""

    def close(self) -> None:
        """Let go."""
