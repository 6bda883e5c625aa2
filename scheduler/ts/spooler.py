"""One call of `ts`: the server that it uses, the jobs in the list, and errors in the words of GPU Task Spooler."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Mapping

from scheduler.client.client import SchedulerClient
from scheduler.core.job import Job, JobState
from scheduler.system.forked_command import need_own_process
from scheduler.system.proc import ticks_of
from scheduler.ts.server import Server, temporary

ERROR = 255
FULL = 2
NO_JOBS = "No jobs."
FIRST_WAIT_S = 0.01
LONGEST_WAIT_S = 0.25
ANSWER_S = 20.0
RECORDED_S = 8.0  # seconds to wait for a job's end to be recorded: its supervisor first completes a packed log


class RequestError(Exception):
    """Raised if a request cannot be carried out. The message is in the words of GPU Task Spooler."""


class NoSuchJob(RequestError):
    """Raised if the named job is not in the list, or if no job was named and the list has no suitable job."""


def give_up_stdout() -> None:
    """Redirect stdout to /dev/null after a failed write, so that the interpreter does not repeat the write on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Spooler:
    """One call of `ts`. ``environ``: the environment of this process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.server = Server(environ)

    @property
    def client(self) -> SchedulerClient:
        return SchedulerClient(self.server.state_file)

    # -- jobs ---------------------------------------------------------------------------------------------

    def jobs(self) -> tuple[list[Job], list[Job]]:
        """Return the unfinished jobs and the finished jobs.

        The unfinished jobs are sorted: first the running jobs, then the waiting jobs in queue order. The finished jobs
        are sorted by the time of their end, oldest first.
        """
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
        most = self.server.most_ended()
        return live, ended if most is None else ended[-most:]

    def find(self, number: int) -> Job | None:
        """Return the job with this id; None if it is not in the list."""
        live, ended = self.jobs()
        return next((job for job in (*live, *ended) if job.id == number), None)

    def added_last(self, value: str | None, none: str, unknown: str) -> Job:
        """Return the job with the id ``value``. If ``value`` is None, return the last unfinished job in the list.

        If ``value`` is None and all jobs have ended, return the job that ended last.
        Raises NoSuchJob if there is no such job. The text of this error is ``none`` if ``value`` is None. Otherwise it
        is ``unknown``, a format text into which the id is put. Raises RequestError if ``value`` is no number.
        """
        return self._chosen(value, none, unknown, lambda live, ended: (live or ended)[-1])

    def run_last(self, value: str | None, none: str, unknown: str) -> Job:
        """Return the job with the id ``value``. If ``value`` is None, return the first running job.

        If ``value`` is None and no job runs, return the job that ended last.
        Raises NoSuchJob if there is no such job. If ``value`` is None, the text of this error is ``NO_JOBS`` for an
        empty list, and ``none`` if all jobs wait. Otherwise the text is ``unknown``, a format text into which the id is
        put. Raises RequestError if ``value`` is no number.
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
        """Wait until a job has ended and return its exit code; 255 if it was removed in the meantime."""
        pause = FIRST_WAIT_S
        while True:
            job = self.current_state(number)
            if job is None:
                return ERROR
            if job.state.ended:
                return code_of(job)
            need_own_process()
            time.sleep(pause)
            pause = min(LONGEST_WAIT_S, pause * 1.3)

    def current_state(self, number: int) -> Job | None:
        """Return the job with its current state. Raises SchedulerError.

        If the daemon was killed, it is started again. After -K, the daemon is not started again: running jobs continue,
        and their attempt records show how they ended. Returns None if the job was removed. Also returns None if the job
        has ended after -K and its end is not recorded in time.
        """
        goes_on = self.server.go_on()  # before the job is read: after False, -K has cancelled the waiting jobs
        job = self.client.known([number]).get(number)
        if goes_on or job is None or job.state.ended:
            return job
        runs = job.process is not None and ticks_of(job.process.pid) == job.process.ticks
        return job if runs else self._settled(number)

    def _settled(self, number: int) -> Job | None:
        """Wait until the end of a job is recorded, and return the job.

        Returns None if the job was removed, or if its end is not recorded within `RECORDED_S` seconds. For use after
        -K: the job's process has ended, and the supervisor may still be recording the end.
        """
        end = time.monotonic() + RECORDED_S
        while time.monotonic() < end:
            job = self.client.known([number]).get(number)
            if job is None or job.state.ended:
                return job
            time.sleep(FIRST_WAIT_S)
        return None

    def ask(self, what: str, *jobs: int) -> str:
        """Send the daemon a request about jobs and return its answer. ``what``: a name in `core/requests.py: KINDS`.

        Raises RequestError if the daemon refuses, and SchedulerError if the daemon does not run or does not answer.
        """
        self.server.ready()
        code, lines = self.client.ask_for(what, {"jobs": jobs}, ANSWER_S)
        if code:
            raise RequestError("; ".join(lines))
        return "; ".join(lines)

    def log_folder(self) -> str:
        """Return the folder for the output files of new jobs."""
        return self.client.remembered("ts_logdir") or temporary(self.environ)

    def has_gpus(self) -> bool:
        """Return whether the server manages GPUs. Waits for a daemon that was just started to record them."""
        end = time.monotonic() + ANSWER_S
        while not self.client.remembered("settings") and time.monotonic() < end:  # recorded together with the GPUs
            self.server.ready()
            time.sleep(FIRST_WAIT_S)
        return bool(self.client.managed())


def number_of(value: str) -> int:
    """Return the job id in ``value``. Raises RequestError if it is no number."""
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestError(f"{value[:40]!r} is not the number of a job.")
    return int(text)


def code_of(job: Job) -> int:
    """Return the exit code that -w, -f, -c and -t give for an ended job: the job's exit code; 255 if it has none."""
    return job.exit_code if job.exit_code is not None else ERROR


def user_name() -> str:
    """Return the name of this user, who gets the mail by default; the uid if the user has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
