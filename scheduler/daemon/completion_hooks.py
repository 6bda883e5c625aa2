"""Actions at the end of a job: run a program (`on_finish`), and send the job's output by mail (`mail`).

The transaction that records the end of the job also records the job's actions. The scheduler marks the actions as begun
before it runs them, and deletes the record afterwards. So each action runs once, even if no scheduler ran when the job
ended. If the scheduler is killed after the mark and before the deletion, it is not known whether the actions ran: the
next scheduler logs this and does not run them again.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from scheduler.core.job import Event, Job, JobState
from scheduler.core.log_names import is_packed
from scheduler.core.observations import Now
from scheduler.core.secrets import without_secrets
from scheduler.daemon.parts import NEVER
from scheduler.environments.discovery import program_in
from scheduler.environments.resolve import stored_environment
from scheduler.runners import exec_limited, mailer
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.system.crash_points import crash_point
from scheduler.system.processes import own_children, seen
from scheduler.system.safe_open import plain

LARGEST_SAID = 1 << 20  # bytes of `.gpujob/on_finish.log`, the actions' output; a larger file is emptied
MARKS = ("GPUJOB_ID", "GPUJOB_ATTEMPT")  # not passed on: they may be from a job that submitted this job
KILLED = "the scheduler was killed at the end of the job: it is unknown whether on_finish or mail ran"
SENDMAIL = ("/usr/sbin", "/usr/lib", "/usr/bin")


def wanted_of(changed: Iterable[Job]) -> list[int]:
    """Return the ids of the jobs in ``changed`` that have ended and have actions.

    Skipped jobs and jobs that were never started are left out.
    """
    return [
        job.id
        for job in changed
        if job.state.ended
        and job.state is not JobState.SKIPPED
        and job.attempt
        and (job.spec.on_finish or job.spec.mail_to)
    ]


def no_warning(job: Job, text: str) -> None:
    """Do nothing: the default until `CompletionHooks` or an agent sets a function that records warnings."""


class Actions(Protocol):
    """Runs the actions of a job (``what``: on_finish or mail), and calls ``warn`` if one of them cannot be run."""

    warn: Callable[[Job, str], None]

    def run(self, job: Job, what: str) -> None:
        """Start an action of the job."""

    def unsure(self) -> set[int]:
        """Return the jobs whose actions are not started yet, though `run` has returned."""

    def sessions(self) -> set[int]:
        """Return the POSIX sessions of the actions' processes, which belong to no job."""


class JobActions:
    """Runs actions as children of this process.

    If a job has no stored environment, its actions run in the environment ``environ``. If the working folder of a job
    does not exist, its actions run in ``folder``. ``log``: path of the file for their output.
    """

    def __init__(self, environ: Mapping[str, str], folder: str, log: str, warn: Callable[[Job, str], None]) -> None:
        self.environ, self.folder, self.log, self.warn = environ, folder, log, warn
        self._mine: set[int] = set()

    def unsure(self) -> set[int]:
        """Return an empty set: `run` starts the actions."""
        return set()

    def sessions(self) -> set[int]:
        """Return the POSIX sessions of the actions' processes, which belong to no job."""
        if self._mine:
            self._mine &= {found.session for pid in own_children() if (found := seen(pid)) is not None}
        return set(self._mine)

    def run(self, job: Job, what: str) -> None:
        """Start an action of the job, if the job has it. ``what``: on_finish or mail."""
        if what == "on_finish" and job.spec.on_finish:
            self._call(job)
        elif what == "mail" and job.spec.mail_to:
            self._mail(job)

    def _call(self, job: Job) -> None:
        environ = self._environment(job)
        program = job.spec.on_finish
        path = program if "/" in program else program_in(environ.get("PATH") or os.defpath, program)
        if not path:
            beside = os.path.join(job.spec.cwd, program)
            do = f"; for the program in the job's folder, write ./{program}" if os.path.isfile(beside) else ""
            self.warn(job, f"on_finish: program {program!r} not found in PATH{do}")
            return
        words = [program, str(job.id), str(job.error_level), job.log, command_text(job)]
        self._spawn(job, "on_finish", path, words, environ)

    def _mail(self, job: Job) -> None:
        environ = self._environment(job)
        sendmail = program_in(os.pathsep.join((environ.get("PATH") or os.defpath, *SENDMAIL)), "sendmail")
        if not sendmail:
            self.warn(job, "mail: sendmail not found; install a mail program (Debian: apt-get install msmtp-mta)")
            return
        subject = f"gpujob: job {job.id} ({without_secrets(job.spec.label) or job.spec.shown_words()}) ended with {job.error_level}"
        words = [
            sys.executable,
            "-I",
            "-S",
            mailer.__file__,
            sendmail,
            job.spec.mail_to,
            subject,
            job.log,
            "packed" * is_packed(job.log),
        ]
        self._spawn(job, "mail", sys.executable, words, environ)

    def _environment(self, job: Job) -> dict[str, str]:
        own = stored_environment(job.spec.env_file) if job.spec.env_file else None
        made = {**(own or self.environ), **dict(item.split("=", 1) for item in job.spec.variables)}
        return {name: value for name, value in made.items() if name not in MARKS}

    def _spawn(self, job: Job, what: str, path: str, words: list[str], environ: dict[str, str]) -> None:
        opened: list[int] = []
        try:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.append(self._log())
            os.set_blocking(opened[1], True)
            actions = [(os.POSIX_SPAWN_DUP2, opened[0], 0), *((os.POSIX_SPAWN_DUP2, opened[1], fd) for fd in (1, 2))]
            folder = job.spec.cwd if os.path.isdir(job.spec.cwd) else self.folder
            # posix_spawn cannot set the working folder, so exec_limited.py does.
            argv = [sys.executable, "-I", "-S", exec_limited.__file__, folder, "-", path, *words]
            pid = os.posix_spawn(sys.executable, argv, environ, file_actions=actions, setsid=True, setsigmask=())
            self._mine.add(pid)
        except OSError as error:
            self.warn(job, f"{what}: {path}: {error.strerror}")
        finally:
            for fd in opened:
                os.close(fd)

    def _log(self) -> int:
        fd = plain(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if os.fstat(fd).st_size > LARGEST_SAID:
            os.ftruncate(fd, 0)
        return fd


class CompletionHooks:
    """Runs the recorded actions after each pass."""

    def __init__(self, db: Database, actions: Actions, say: Callable[[str, int, Job], None]) -> None:
        self.db, self.actions, self.say = db, actions, say
        actions.warn = self._warn
        self.wanted = True  # actions may be recorded; a previous daemon may have left some
        self._to_start: deque[tuple[int, str]] = deque()  # jobs whose actions are marked as begun, but not started yet
        self._done: list[int] = []  # jobs whose actions were started; `_record` has still to delete their rows
        self._events: list[Event] = []

    def sessions(self) -> set[int]:
        """Return the POSIX sessions of the actions' processes, which belong to no job."""
        return self.actions.sessions()

    def step(self, _now: Now) -> None:
        """Run all recorded actions. Raises StoreTrouble, sqlite3.Error."""
        if self._has_work():  # the last step failed, or a warning or a confirmation came later
            self._start()
        if not self.wanted:
            return
        wanted = rows.calls(self.db.connection)
        if wanted:
            fresh = [number for number, begun in wanted if begun is None]
            mine = {*self._done, *(number for number, _ in self._to_start)}
            unsure = [number for number, begun in wanted if begun is not None and number not in mine]
            jobs = self._jobs(unsure)
            with self.db.writing() as connection:
                for number in fresh:
                    rows.begin_call(connection, number, time.time())
                rows.write_events(connection, [_warning(job, KILLED) for job in jobs])
                rows.strike_calls(connection, unsure)
            self._to_start.extend((number, what) for number in fresh for what in ("on_finish", "mail"))
            for job in jobs:
                self._say(job, KILLED)
            crash_point("afterwards.begun")
        self.wanted = False
        if wanted:
            self._start()

    def _start(self) -> None:
        """Start the actions of the jobs in ``_to_start``, and then delete the records of these actions.

        If this method raises an error, a later step does the remaining work.
        """
        while self._to_start:
            number, what = self._to_start[0]
            jobs = self._jobs([number])
            self._to_start.popleft()  # before the start: no action is started twice
            self._done.append(number)
            for job in jobs:
                self.actions.run(job, what)
        crash_point("afterwards.done")
        self._record()

    def _record(self) -> None:
        """Delete the records of the started actions, and add the collected warnings to the event histories of the jobs.

        If this raises StoreTrouble, nothing is lost: a later step tries again.
        """
        unsure = self.actions.unsure()
        with self.db.writing(sync=False) as connection:
            rows.strike_calls(connection, [number for number in self._done if number not in unsure])
            # A job that was forgotten in the meantime has no event history.
            rows.write_events(connection, [one for one in self._events if rows.get(connection, one.job)])
        self._done = [number for number in self._done if number in unsure]
        self._events.clear()

    def _has_work(self) -> bool:
        return bool(self._to_start or self._events or set(self._done) - self.actions.unsure())

    def due(self) -> float:
        """Return 0 (due now) if there may be actions to run or records of actions to delete, else ``NEVER``."""
        return 0.0 if self.wanted or self._has_work() else NEVER

    def close(self) -> None:
        """Do nothing: the programs that were started continue."""

    def _warn(self, job: Job, text: str) -> None:
        """Log a warning, and add it to the event history of the job, where the job's owner sees it."""
        self._say(job, text)
        self._events.append(_warning(job, text))

    def _say(self, job: Job, text: str) -> None:
        self.say(f"job {job.id} ({job.spec.shown_name}): {text}", 30, job)

    def _jobs(self, numbers: Iterable[int]) -> list[Job]:
        """Return the jobs with these ids, except for jobs that were deleted in the meantime."""
        found = (rows.get(self.db.connection, number) for number in numbers)
        return [job for job in found if job is not None]


def _warning(job: Job, text: str) -> Event:
    return Event(job.id, time.time(), "afterwards", {"why": text})


def command_text(job: Job) -> str:
    """Return the command of a job as shell text.

    The words are quoted. If the job is a script, its interpreter comes first. For a job that was submitted with `ts`,
    the words are joined without quotes.
    """
    spec = job.spec
    if spec.source == "ts":
        return " ".join(spec.arguments)
    return shlex.join(job.argv or (spec.script, *spec.arguments) if spec.script else spec.arguments)
