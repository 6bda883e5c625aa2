"""Actions of `ts` on jobs in the list and on the server: one method per action."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from scheduler.core.errors import SchedulerError
from scheduler.core.job import Job, JobState
from scheduler.core.secrets import without_secrets
from scheduler.system.terminal_text import safe
from scheduler.system.waiting import wait_until
from scheduler.ts import job_list
from scheduler.ts.spooler import NO_JOBS, RequestError, number_of
from scheduler.ts.words import Mistake

if TYPE_CHECKING:
    from scheduler.ts.spooler import Spooler

TAIL = 10
APPLIED_S = 10.0
NOT_RUN = "Job {} not finished or not running."

NAMES = {
    "l": "list", "M": "serialize", "C": "clear", "T": "kill_all", "R": "running", "q": "last", "g": "on_gpus",
    "S": "slots", "t": "tail", "c": "cat", "p": "pid", "o": "output", "i": "information", "s": "state", "r": "remove",
    "w": "wait", "k": "kill", "u": "urgent", "U": "swap", "a": "label", "F": "command", "getenv": "getenv",
    "setenv": "setenv", "unsetenv": "unsetenv", "set_gpu_free_perc": "set_free", "get_gpu_free_perc": "get_free",
    "get_logdir": "get_logdir", "set_logdir": "set_logdir",
}  # fmt: skip


class Actions:
    """The actions of `ts`.

    Each method takes the value of its option (None: no value is given) and returns the exit code. The methods raise
    Mistake, RequestError and SchedulerError.
    """

    def __init__(self, spooler: Spooler) -> None:
        self.spooler, self.server = spooler, spooler.server

    # -- reading ------------------------------------------------------------------------------------------

    def list(self, _value: str | None) -> int:
        """Print a header and all jobs."""
        live, ended = self.spooler.jobs()
        gpus, width = self.spooler.has_gpus(), job_list.terminal_width()
        print(job_list.header(_busy(live), self.server.slots(), gpus))
        for job in (*live, *ended):
            print(job_list.row(job, gpus, width))
        return 0

    def serialize(self, value: str | None) -> int:
        """Print all jobs in the format ``value``: default, json or tab."""
        if value in (None, "default"):
            return self.list(None)
        live, ended = self.spooler.jobs()
        gpus = self.spooler.has_gpus()
        if value == "json":
            print(job_list.as_json([*live, *ended], gpus))
        elif value == "tab":
            for line in job_list.as_tabs([*live, *ended], gpus):
                print(line)
        else:
            raise Mistake(f"Invalid argument for option M: {value}.")
        return 0

    def running(self, _value: str | None) -> int:
        """Print the number of running jobs."""
        live, _ = self.spooler.jobs()
        print(sum(job.state is not JobState.PENDING for job in live))
        return 0

    def last(self, _value: str | None) -> int:
        """Print the highest job id assigned so far; -1 before the first job."""
        print(self.spooler.client.last_id())
        return 0

    def on_gpus(self, _value: str | None) -> int:
        """Print the running jobs that have GPUs, with their GPU ids."""
        live, _ = self.spooler.jobs()
        print(f"{'ID':<4} GPU-IDs")
        for job in live:
            if job.state is not JobState.PENDING and job.gpus:
                print(f"{job.id:<4} {' '.join(map(str, job.gpus))}")
        return 0

    def pid(self, value: str | None) -> int:
        """Print the pid of a job that was started."""
        job = self._run(value)
        if job.process is None:
            raise RequestError(NOT_RUN.format(job.id))
        print(job.process.pid)
        return 0

    def output(self, value: str | None) -> int:
        """Print the path of a job's output file."""
        job = self._run(value)
        print(safe(self._log(job)))
        return 0

    def information(self, value: str | None) -> int:
        """Print all details of a job."""
        job = self.spooler.run_last(value, NO_JOBS, NOT_RUN)
        for line in job_list.details(job, self.spooler.has_gpus(), time.time()):
            print(line)
        return 0

    def state(self, value: str | None) -> int:
        """Print the state of a job."""
        print(job_list.state_of(self._added(value, "stated")))
        return 0

    def label(self, value: str | None) -> int:
        """Print the label of a job."""
        job = self.spooler.added_last(value, NO_JOBS, "The job {} is not in the queue.")
        print(safe(without_secrets(job.spec.label)))
        return 0

    def command(self, value: str | None) -> int:
        """Print the whole command of a job."""
        job = self.spooler.added_last(value, NO_JOBS, "The job {} is not in the queue.")
        print(safe(job_list.command_of(job)))
        return 0

    def _run(self, value: str | None) -> Job:
        """Return the job that `Spooler.run_last` chooses.

        If the job is starting, wait a short time until it has a pid and an output file.
        """
        job = self.spooler.run_last(value, "The last job has not finished or is not running.", NOT_RUN)
        return (self.spooler.client.begun(job.id) or job) if job.state is JobState.STARTING else job

    def _added(self, value: str | None, done: str) -> Job:
        return self.spooler.added_last(value, f"The last job cannot be {done}.", f"The job {{}} cannot be {done}.")

    def _log(self, job: Job) -> str:
        if job.state is JobState.SKIPPED:
            raise RequestError(f"Job {job.id} was skipped due to a dependency.")
        if job.spec.output == "none":
            raise RequestError("The output is not stored.")
        if not job.log or job.state is JobState.PENDING:
            raise RequestError(NOT_RUN.format(job.id))
        return job.log

    # -- waiting ------------------------------------------------------------------------------------------

    def wait(self, value: str | None) -> int:
        """Wait until a job has ended, and return its exit code."""
        return self.spooler.wait(self._added(value, "waited").id)

    def tail(self, value: str | None) -> int:
        """Print the last ten lines of a job's output, follow it until the job ends, and return the job's exit code."""
        return self._follow(self._run(value), TAIL)

    def cat(self, value: str | None) -> int:
        """Print all of a job's output, follow it until the job ends, and return the job's exit code."""
        return self._follow(self._run(value), None)

    def _follow(self, job: Job, most: int | None) -> int:
        from scheduler.ts.job_output import follow

        self._log(job)
        return follow(self.spooler, job, most)

    # -- changing jobs ------------------------------------------------------------------------------------

    def clear(self, _value: str | None) -> int:
        """Remove all finished jobs from the list."""
        _, ended = self.spooler.jobs()
        if ended:
            self.spooler.client.forget([job.id for job in ended])
        return 0

    def remove(self, value: str | None) -> int:
        """Cancel and remove a waiting job, or remove a finished job. Raises RequestError if the job runs."""
        job = self._added(value, "removed")
        if job.state is JobState.PENDING:
            self.spooler.ask("cancel", job.id)
            now = self.spooler.client.known([job.id]).get(job.id)
            if now is not None and not now.state.ended:  # it started just before the cancel, and is now being ended
                return 0
        elif not job.state.ended:
            raise RequestError(f"The job {job.id} cannot be removed: it is running (-k ends it).")
        self.spooler.client.forget([job.id])
        return 0

    def kill(self, value: str | None) -> int:
        """Send SIGTERM to all processes of a running job."""
        job = self._run(value)
        if job.state is JobState.PENDING:
            raise RequestError(f"The job {job.id} cannot be killed: it is not running.")
        if job.state.ended:
            return 0  # the job has already ended, as the user wants
        self.spooler.ask("cancel", job.id)
        return 0

    def kill_all(self, _value: str | None) -> int:
        """Send SIGTERM to all processes of all running jobs."""
        live, _ = self.spooler.jobs()
        running = tuple(job.id for job in live if job.state is not JobState.PENDING)
        if running:
            self.spooler.ask("cancel", *running)
        return 0

    def urgent(self, value: str | None) -> int:
        """Move a waiting job to the front of the queue."""
        job = self._added(value, "urged")
        if job.state is not JobState.PENDING:
            raise RequestError(f"The job {job.id} cannot be urged: it is {job_list.state_of(job)}.")
        self.spooler.ask("first", job.id)
        return 0

    def swap(self, value: str | None) -> int:
        """Exchange the places of two waiting jobs, given as ``ID-ID``."""
        first, dash, second = (value or "").partition("-")
        if not dash:
            raise Mistake("Wrong <id-id> for -U.")
        pair = number_of(first), number_of(second)
        for number in pair:
            job = self.spooler.find(number)
            if job is None or job.state is not JobState.PENDING:
                raise RequestError(f"The jobs {pair[0]} and {pair[1]} cannot be swapped: job {number} is not waiting.")
        self.spooler.ask("swap", *pair)
        return 0

    # -- the server ---------------------------------------------------------------------------------------

    def slots(self, value: str | None) -> int:
        """Set the number of slots for jobs without GPUs; print the number if ``value`` is None."""
        if value is None:
            print(self.server.slots())
            return 0
        number = int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else 0
        if number < 1:
            raise Mistake("You should set at minimum 1 slot.")
        self.server.set(cpu_slots=number)
        self._applied("cpu_slots", number)
        return 0

    def set_free(self, value: str | None) -> int:
        """Set the percentage of a GPU's memory that must be free before the GPU gets a job with -G."""
        text = (value or "").strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 100):
            raise RequestError(f"The percentage must be a whole number from 1 to 100, not {value!r}.")
        self.server.set_free_percent(int(text))
        self._applied("whole_gpu_tolerance", round(1 - int(text) / 100, 4))
        return 0

    def get_free(self, _value: str | None) -> int:
        """Print the percentage of a GPU's memory that must be free before the GPU gets a job with -G."""
        print(self.server.free_percent())
        return 0

    def _applied(self, name: str, value: float) -> None:
        """Wait until the daemon uses the new value of a setting. Raises SchedulerError after `APPLIED_S` seconds."""
        self.server.ready()

        def applied() -> bool:
            noted = self.spooler.client.settings().get(name)
            return noted is not None and noted[0] == value

        if not wait_until(applied, APPLIED_S):
            raise SchedulerError(
                f"cannot set {name}: the server has not applied it within {APPLIED_S:g} s", where=self.server.home
            )

    def get_logdir(self, _value: str | None) -> int:
        """Print the folder for the output files of new jobs."""
        print(safe(self.spooler.log_folder()))
        return 0

    def set_logdir(self, value: str | None) -> int:
        """Set the folder for the output files of new jobs. Raises RequestError if the folder is not writable."""
        if not value:
            raise RequestError("--set_logdir takes a folder.")
        path = os.path.abspath(os.path.expanduser(value))
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            raise RequestError(f"{path}: no such folder, or it is not writable.")
        self.spooler.client.note("ts_logdir", path)
        return 0

    def getenv(self, value: str | None) -> int:
        """Print a variable of the server's environment; an empty line if it is not set."""
        print(safe(self.server.server_environment().get(value or "", "")))
        return 0

    def setenv(self, value: str | None) -> int:
        """Set a variable of the server's environment, given as NAME=VALUE, or as NAME for an empty value."""
        name, _, text = (value or "").partition("=")
        if not name or "\0" in text:
            raise RequestError(f"{value!r} is not NAME=VALUE.")
        self.server.change_environment(name, text)
        return 0

    def unsetenv(self, value: str | None) -> int:
        """Remove a variable from the server's environment."""
        self.server.change_environment(value or "", None)
        return 0


def _busy(live: list[Job]) -> int:
    return sum(max(1, job.need.slots) for job in live if job.state is not JobState.PENDING)
