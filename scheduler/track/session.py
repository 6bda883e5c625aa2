"""A tracked session as it truly is: what trackers that were killed left behind is settled before anybody sees or uses it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from scheduler.core.errors import SchedulerError
from scheduler.core.observations import Ended, Lost, Observation
from scheduler.core.recovery import Record, Verdict
from scheduler.runners import attempt_record
from scheduler.runners.adoption import settle
from scheduler.system.proc import boot_id
from scheduler.system.processes import lives
from scheduler.track.plan import LINES_KEPT, MARK_NAMES, RUNNING, Command, Session, added, passed_over, take
from scheduler.track.session_file import SessionDamaged, SessionFiles, find_root

Tail = Callable[[str, int], list[str]]  # the last lines of a log, with nothing in them that could play a terminal


class Tracker:
    """One session, or the newest of its folder. ``tail``: reads the last lines of a log."""

    def __init__(self, files: SessionFiles, name: str, tail: Tail) -> None:
        self.files, self.name, self.tail = files, name, tail

    @classmethod
    def here(cls, folder: str, name: str, tail: Tail) -> Tracker:
        """The session ``name`` of this folder or the nearest one above, or the newest. Raises NoSession."""
        files = SessionFiles(find_root(folder))
        return cls(files, name or files.newest(), tail)

    @classmethod
    def begin(cls, folder: str, name: str, tail: Tail) -> Tracker:
        """A new session in this very folder. Raises OSError."""
        files = SessionFiles(folder)
        return cls(files, files.create(name, time.time()).id, tail)

    @property
    def log_folder(self) -> str:
        """Where logs and records lie."""
        return self.files.folder(self.name)

    def log(self, command: Command) -> str:
        """The path of its last log."""
        return os.path.join(self.log_folder, command.job.log)

    def record(self, command: Command) -> str:
        """The path of its last attempt's record."""
        return os.path.join(self.log_folder, command.job.attempt_key)

    def last_output(self, command: Command) -> str:
        """The end of its log; what was known of it before, where the log cannot be read."""
        try:
            return "\n".join(self.tail(self.log(command), LINES_KEPT)) if command.job.log else ""
        except OSError:
            return command.last_output

    # -- what is so ---------------------------------------------------------------------------------------

    def session(self) -> Session:
        """The session as it is: read, and what nobody supervises any more looked at. Raises SchedulerError."""
        session = self.files.read(self.name)
        if not any(map(left_alone, session.commands)):
            return session
        try:
            with self.files.changing(self.name) as session:
                self.settle(session)
        except OSError:  # a disk that is full or may not be written: what is so can be said all the same
            with contextlib.suppress(OSError):
                self.settle(session)
        return session

    def settle(self, session: Session) -> None:
        """Give each command whose tracker was killed the state that its record and its processes tell."""
        for command in filter(left_alone, session.commands):
            self._settle(command)

    def _settle(self, command: Command) -> None:
        job, now = command.job, time.time()
        verdict, observations, _ = settle(self.record(command), job, self.files.path(self.name), now, MARK_NAMES)
        something_lives = verdict in (Verdict.WATCH_LOST, Verdict.FINISH_HOLDING)
        if not something_lives or self.is_written_down(command):  # else nobody may start it a second time
            for observation in observations:
                take(command, self.dated(command, observation))
        command.last_output = self.last_output(command)

    def is_written_down(self, command: Command) -> bool:
        """Whether a supervisor wrote down how the last attempt ended."""
        return attempt_record.read(self.record(command)).kind is Record.ENDED

    def dated(self, command: Command, observation: Observation) -> Observation:
        """``observation`` with its time and reason. Where no supervisor wrote the ending down, both are the best that can be told now."""
        if not isinstance(observation, (Lost, Ended)) or self.is_written_down(command):
            return observation
        if isinstance(observation, Ended):
            return replace(observation, at=self.last_sign(command))
        why = observation.why.replace("the scheduler", "the tracker")
        if command.job.boot not in ("", boot_id()):
            why = "the machine or pod in which it ran was started anew, or is gone"
        return replace(observation, at=self.last_sign(command), why=why)

    def last_sign(self, command: Command) -> float:
        """When it last showed that it lived: its end, where nobody saw that."""
        started = command.job.started_at or time.time()
        try:
            return max(started, min(os.stat(self.log(command)).st_mtime, time.time()))
        except OSError:
            return started

    # -- what can be done with it -------------------------------------------------------------------------

    def add(self, text: str, folder: str) -> Command:
        """A new command, to be run in ``folder``. Raises SchedulerError."""
        with self.files.changing(self.name) as session:
            return self.planned(session, text, folder)

    def planned(self, session: Session, text: str, folder: str) -> Command:
        """A new command in a session that is being changed. Raises UsageError."""
        return added(session, text, os.path.relpath(folder, self.files.root), time.time())

    def skip(self) -> list[Command]:
        """Pass over all that were interrupted. Raises SchedulerError."""
        with self.files.changing(self.name) as session:
            self.settle(session)
            return passed_over(session)

    def delete(self) -> None:
        """Forget it. Raises SchedulerError while a command runs."""
        self.files.delete(self.name, self._check_idle)

    def _check_idle(self) -> None:
        """Raises SchedulerError while a command runs."""
        try:
            session = self.files.read(self.name)
            self.settle(session)
            running = [command.id for command in session.having(RUNNING)]
        except SessionDamaged:
            running = self._running_by_records()
        if running:
            which = f"command {running[0]} runs" if len(running) == 1 else f"{len(running)} commands run"
            raise SchedulerError(f"{which}", where=f"session {self.name}", do="end it first, or wait for it")

    def _running_by_records(self) -> list[int]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(self.log_folder):
                number, _, attempt = entry.partition(".")
                if number.isdigit() and attempt.isdigit():
                    seen = attempt_record.read(os.path.join(self.log_folder, entry))
                    if seen.process is not None and seen.boot == boot_id() and lives(seen.process):
                        found.append(int(number))
        return found


def left_alone(command: Command) -> bool:
    """Whether it is in the hand of a tracker that lives no more."""
    return command.in_hand and not supervised(command)


def supervised(command: Command) -> bool:
    """Whether the tracker that took it lives."""
    who = command.tracker
    return who is not None and who.boot == boot_id() and lives(who.process)
