"""`gpujob ts …`: each action of GPU Task Spooler, done by one of our schedulers (docs/ts.md)."""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from scheduler.core.errors import SchedulerError
from scheduler.core.job import Job, JobState
from scheduler.desk import Desk
from scheduler.faces.terminal import safe
from scheduler.faces.ts.server import Server, temporary
from scheduler.faces.ts.words import Mistake, Typed, read

ERROR = 255
FULL = 2
ONLY_TELLING = "iaF"  # of a job that is not there these say so on stdout and end with 0, as in the original
FIRST_WAIT_S = 0.01
LONGEST_WAIT_S = 0.25
ANSWER_S = 20.0


class RequestError(Exception):
    """What cannot be done, in the original's words."""


class NoSuchJob(RequestError):
    """The job that is named is not in the list."""


def run(words: Sequence[str]) -> int:
    """Do what was typed; the exit code."""
    environ = dict(os.environ)
    try:
        return Spooler(environ).do(read(words))
    except Mistake as error:
        print(f"{safe(str(error))}\nTry ts -h", file=sys.stderr)
    except RequestError as error:
        print(f"Error in the request: {safe(str(error))}", file=sys.stderr)
    except SchedulerError as error:
        print(f"Error in the request: {safe(' '.join(error.lines))}", file=sys.stderr)
    return ERROR


class Spooler:
    """One call. ``environ``: this process's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.server = Server(environ)

    def do(self, typed: Typed) -> int:
        """Raises Mistake, RequestError, SchedulerError."""
        action = typed.action
        if action == "h":
            from scheduler.faces.ts.manual import USAGE

            print(USAGE, end="")
            return 0
        if action == "V":
            from scheduler import __version__

            print(f"Task Spooler, as gpujob {__version__} does it")
            return 0
        if action == "K":
            self.server.retire()
            return 0
        self.server.begin()
        if action == "add":
            from scheduler.faces.ts.queueing import queue

            return queue(self, typed)
        try:
            return self._act(action)(typed.value)
        except NoSuchJob as error:
            if action not in ONLY_TELLING:
                raise
            print(safe(str(error)))
            return 0

    def _act(self, action: str) -> Callable[[str | None], int]:
        from scheduler.faces.ts import acting

        found: Callable[[str | None], int] = getattr(acting.Acting(self), acting.NAMES[action])
        return found

    @property
    def desk(self) -> Desk:
        return Desk(self.server.state_file)

    # -- jobs ---------------------------------------------------------------------------------------------

    def jobs(self) -> tuple[list[Job], list[Job]]:
        """Unfinished jobs as they stand in the queue, and those that have ended, as they did."""
        found, hidden = self.desk.listed()
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

        Raises RequestError with ``none`` where no job is named, NoSuchJob with ``unknown`` and the number of the one that is.
        """
        return self._chosen(value, none, unknown, lambda live, ended: (live or ended)[-1])

    def run_last(self, value: str | None, none: str, unknown: str) -> Job:
        """The job that is named, else the first that runs, else the one that ended last. Raises RequestError likewise."""

        def pick(live: list[Job], ended: list[Job]) -> Job:
            running = [job for job in live if job.state is not JobState.PENDING]
            return running[0] if running else ended[-1]

        return self._chosen(value, none, unknown, pick)

    def _chosen(self, value: str | None, none: str, unknown: str, pick: Callable[[list[Job], list[Job]], Job]) -> Job:
        if value is None:
            try:
                return pick(*self.jobs())
            except IndexError:
                raise RequestError(none) from None
        number = number_of(value)
        found = self.find(number)
        if found is None:
            raise NoSuchJob(unknown.format(number))
        return found

    def wait(self, number: int) -> int:
        """Wait until a job has ended: its code. One that is removed meanwhile counts as one that failed."""
        pause = FIRST_WAIT_S
        while True:
            job = self.desk.known([number]).get(number)
            if job is None:
                return ERROR
            if job.state.ended:
                return code_of(job)
            if not self.server.alive():
                self.server.begin()  # it was killed: another one takes the jobs over
            time.sleep(pause)
            pause = min(LONGEST_WAIT_S, pause * 1.3)

    def ask(self, what: str, *jobs: int) -> str:
        """Have the scheduler do something (of `core/requests.py`) with jobs; what it says. Raises RequestError if it cannot."""
        from scheduler.core import requests  # here: looking and queueing ask for nothing, and are to be quick

        self.server.ready()
        answer = self.desk.ask(getattr(requests, what)(jobs), ANSWER_S)
        if answer.code:
            raise RequestError("; ".join(answer.lines))
        return "; ".join(answer.lines)

    def log_folder(self) -> str:
        """Where the output of new jobs is kept."""
        return self.desk.remembered("ts_logdir") or temporary(self.environ)

    def has_gpus(self) -> bool:
        """Whether the server has GPUs at all."""
        return bool(self.desk.managed())


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
