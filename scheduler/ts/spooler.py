"""The scheduler that a call of `ts` uses, its jobs, and the errors in the original's words."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Mapping

from scheduler.client.client import SchedulerClient
from scheduler.core.job import Job, JobState
from scheduler.system.proc import ticks_of
from scheduler.ts.server import Server, temporary

ERROR = 255
FULL = 2
NO_JOBS = "No jobs."
FIRST_WAIT_S = 0.01
LONGEST_WAIT_S = 0.25
ANSWER_S = 20.0
RECORDED_S = 8.0  # so long at most a supervisor waits with an ending, for a packed log to be whole


class RequestError(Exception):
    """What cannot be done, in the original's words."""


class NoSuchJob(RequestError):
    """The job that is named is not in the list, or there is none to choose."""


def give_up_stdout() -> None:
    """After it could not be written: else what was not written is tried again, and complained of, at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Spooler:
    """One call. ``environ``: this process's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.server = Server(environ)

    @property
    def client(self) -> SchedulerClient:
        return SchedulerClient(self.server.state_file)

    # -- jobs ---------------------------------------------------------------------------------------------

    def jobs(self) -> tuple[list[Job], list[Job]]:
        """Unfinished jobs as they stand in the queue, and those that have ended, as they did."""
        found, hidden = self.client.listed()
        live = [job for job in found if not job.state.ended]
        live.sort(
            key=lambda job: (
                job.state is JobState.PENDING,
                job.turn if job.state is JobState.PENDING else (0, 0),
                job.started_at or 0.0,
                job.id,
            )
        )
        ended = [job for job in found if job.state.ended and job.id not in hidden]
        ended.sort(key=lambda job: (job.finished_at or 0.0, job.id))
        most = int(self.server.settings().get("keep_finished", "1000"))
        return live, ended[-most:]

    def find(self, number: int) -> Job | None:
        """A job of the list."""
        live, ended = self.jobs()
        return next((job for job in (*live, *ended) if job.id == number), None)

    def added_last(self, value: str | None, none: str, unknown: str) -> Job:
        """The job that is named, else the last of the queue, else the one that ended last.

        Raises NoSuchJob: with ``none`` where no job is named, with ``unknown`` and the number of the one that is.
        """
        return self._chosen(value, none, unknown, lambda live, ended: (live or ended)[-1])

    def run_last(self, value: str | None, none: str, unknown: str) -> Job:
        """The job that is named, else the first that runs, else the one that ended last.

        Raises NoSuchJob: ``NO_JOBS`` of an empty list, ``none`` where jobs wait and none has run.
        """

        def pick(live: list[Job], ended: list[Job]) -> Job:
            if not live and not ended:
                raise NoSuchJob(NO_JOBS)
            running = [job for job in live if job.state is not JobState.PENDING]
            return running[0] if running else ended[-1]

        return self._chosen(value, none, unknown, pick)

    def _chosen(self, value: str | None, none: str, unknown: str, pick: Callable[[list[Job], list[Job]], Job]) -> Job:
        if value is None:
            try:
                return pick(*self.jobs())
            except IndexError:
                raise NoSuchJob(none) from None
        number = number_of(value)
        found = self.find(number)
        if found is None:
            raise NoSuchJob(unknown.format(number))
        return found

    def wait(self, number: int) -> int:
        """Wait until a job has ended: its code. One that is removed meanwhile counts as one that failed."""
        pause = FIRST_WAIT_S
        while True:
            job = self.under_way(number)
            if job is None:
                return ERROR
            if job.state.ended:
                return code_of(job)
            time.sleep(pause)
            pause = min(LONGEST_WAIT_S, pause * 1.3)

    def under_way(self, number: int) -> Job | None:
        """The job as it is now, of a server that goes on: one that was killed is started again, and takes its jobs over.

        Of one that -K has ended, jobs that ran go on, and their records tell how they end; None if the job is there no
        more, or nobody will ever know.
        """
        goes_on = self.server.go_on()  # before the look: what -K leaves is settled by then
        job = self.client.known([number]).get(number)
        if goes_on or job is None or job.state.ended:
            return job
        runs = job.process is not None and ticks_of(job.process.pid) == job.process.ticks
        return job if runs else self._settled(number)

    def _settled(self, number: int) -> Job | None:
        """A job of a server that was ended, whose process lives no more: its supervisor may be writing how it ended."""
        end = time.monotonic() + RECORDED_S
        while time.monotonic() < end:
            job = self.client.known([number]).get(number)
            if job is None or job.state.ended:
                return job
            time.sleep(FIRST_WAIT_S)
        return None

    def ask(self, what: str, *jobs: int) -> str:
        """Have the scheduler do something (``what``: in `core/requests.py: KINDS`) with jobs; what it says.

        Raises RequestError if it cannot.
        """
        self.server.ready()
        code, lines = self.client.ask_for(what, {"jobs": jobs}, ANSWER_S)
        if code:
            raise RequestError("; ".join(lines))
        return "; ".join(lines)

    def log_folder(self) -> str:
        """Where the output of new jobs is kept."""
        return self.client.remembered("ts_logdir") or temporary(self.environ)

    def has_gpus(self) -> bool:
        """Whether the server has GPUs at all. A server that has just been started is waited for until it has looked."""
        end = time.monotonic() + ANSWER_S
        while not self.client.remembered("settings") and time.monotonic() < end:  # noted together with the GPUs
            self.server.ready()
            time.sleep(FIRST_WAIT_S)
        return bool(self.client.managed())


def number_of(value: str) -> int:
    """A job's number. Raises RequestError."""
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestError(f"{value[:40]!r} is not the number of a job.")
    return int(text)


def code_of(job: Job) -> int:
    """What -w, -f, -c and -t end with: the job's own exit code, 255 if it has none."""
    return job.exit_code if job.exit_code is not None else ERROR


def user_name() -> str:
    """Who gets the mail."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
