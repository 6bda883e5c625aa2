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
WAIT_S = 0.05
LONGEST_WAIT_S = 0.25
ANSWER_S = 20.0


class RequestError(Exception):
    """What cannot be done, in the original's words."""


def run(words: Sequence[str]) -> int:
    """Do what was typed; the exit code."""
    environ = dict(os.environ)
    try:
        typed = read(words)
    except Mistake as error:
        print(f"ts: {safe(str(error))}\nTry ts -h", file=sys.stderr)
        return ERROR
    try:
        return Spooler(environ).do(typed)
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
        """Raises RequestError, SchedulerError."""
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
            return self._end()
        self.server.begin()
        if action == "add":
            from scheduler.faces.ts.queueing import queue

            return queue(self, typed)
        return self._act(action)(typed.value)

    def _act(self, action: str) -> Callable[[str | None], int]:
        from scheduler.faces.ts import acting

        found: Callable[[str | None], int] = getattr(acting.Acting(self), acting.NAMES[action])
        return found

    def _end(self) -> int:
        from scheduler.faces.ts.ending import cancel_waiting

        self.server.retire(cancel_waiting)
        return 0

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

    def added_last(self, value: str | None, done: str) -> Job:
        """The job that is named, else the last of the queue, else the one that ended last. Raises RequestError: it cannot be ``done``."""
        return self._chosen(value, done, lambda live, ended: (live or ended)[-1])

    def run_last(self, value: str | None, done: str) -> Job:
        """The job that is named, else the first that runs, else the one that ended last. Raises RequestError."""

        def pick(live: list[Job], ended: list[Job]) -> Job:
            running = [job for job in live if job.state is not JobState.PENDING]
            return running[0] if running else ended[-1]

        return self._chosen(value, done, pick)

    def _chosen(self, value: str | None, done: str, pick: Callable[[list[Job], list[Job]], Job]) -> Job:
        live, ended = self.jobs()
        if value is None:
            try:
                return pick(live, ended)
            except IndexError:
                raise RequestError(f"The last job cannot be {done}: there is none.") from None
        number = number_of(value)
        found = next((job for job in (*live, *ended) if job.id == number), None)
        if found is None:
            raise RequestError(f"The job {number} cannot be {done}: it is not in the queue.")
        return found

    def wait(self, number: int) -> int:
        """Wait until a job has ended: its code. One that is removed meanwhile counts as one that failed."""
        pause = WAIT_S / 5
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
