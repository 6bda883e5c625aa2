"""Interfaces of the exchangeable parts: runners and GPU readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Observation, Readings


class Runner(Protocol):
    """Starts attempts, reports their progress and ends them. A runner decides nothing and does not use the store.

    ``look`` reports each fact exactly once and in order (Started before Ended). The daemon's event loop waits on
    ``descriptors``. No method may block for longer than a write to a pipe takes.
    """

    name: str  # stored with each attempt: direct, screen

    def start(self, job: Job, launch: Launch) -> None:
        """Request the start of an attempt. ``look`` reports the result, also if the command cannot be started."""

    def flush(self) -> None:
        """Send all starts requested since the last flush."""

    def look(self) -> list[Observation]:
        """Return the observations since the last call."""

    def adopt(self, job: Job) -> list[Observation]:
        """Adopt the attempt of a job in the store. Return the observations about it, and watch it if it still runs."""

    def stop(self, jobs: Iterable[tuple[Job, bool]]) -> None:
        """Send a signal to every process of the jobs' attempts, also in other sessions and groups.

        ``jobs``: pairs of a job and whether the signal is SIGKILL instead of SIGTERM. One search finds the processes of
        all jobs: to cancel 1,000 jobs must not take 1,000 searches.
        """

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Watch the leftover processes of an attempt. When all of them have ended, ``look`` reports Gone(key).

        ``processes``: the leftover processes that are known now. All other processes of the attempt are watched, too.
        """

    def leave_alone(self, sessions: Set[int]) -> None:
        """Treat the processes of these POSIX sessions as belonging to no job, even if they become children of the daemon."""

    def descriptors(self) -> list[int]:
        """Return file descriptors that become readable when ``look`` has something to report."""

    def next_look(self) -> float | None:
        """Return the time (monotonic seconds) to call ``look`` even if no descriptor is readable; None: never."""

    def supervisors(self) -> list[Process]:
        """Return the processes that start and watch all attempts; empty if each attempt has its own."""

    def trouble(self) -> str:
        """Return a sentence that says why no job can start now, and what to do; empty if jobs can start.

        The ends of jobs may go unnoticed for the same reason; the sentence then says so.
        """

    def close(self) -> None:
        """Release all resources. Attempts continue to run."""


class Probe(Protocol):
    """GPU reader: reports which GPUs exist, and which processes use them. Only ``first`` blocks.

    A failed reading is reported as a failure, never as a machine without GPUs.
    """

    absent: bool  # the last reading failed because there is no driver at all

    def first(self, slow: Callable[[], None] | None = None, meanwhile: Callable[[], None] | None = None) -> Readings:
        """Wait for the first reading, at the start of the daemon, and return it. Raises NoGpuData if the reading fails.

        ``slow``: called once if the wait takes more than 2 s. ``meanwhile``: called several times a second during the
        wait and once at the end; an exception from ``meanwhile`` ends the wait.
        """

    def ask(self) -> None:
        """Start a reading, unless one is in progress."""

    def look(self) -> Readings | None:
        """Return the result of the requested reading; None while the reading runs or if none was requested."""

    def sessions(self) -> set[int]:
        """Return the POSIX sessions of the processes that read the GPUs. These processes belong to no job."""

    def descriptors(self) -> list[int]:
        """Return file descriptors that become readable when ``look`` has something to report."""

    def next_look(self) -> float | None:
        """Return the time (monotonic seconds) to call ``look`` even if no descriptor is readable; None: never."""

    def close(self) -> None:
        """End the reader's processes and release all resources."""
