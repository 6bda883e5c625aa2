"""A tracked session. Each read of the session first corrects the states of commands whose tracker was killed."""

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
from scheduler.system.process_search import members
from scheduler.system.processes import Mark, lives, starter_lives
from scheduler.track.plan import LINES_KEPT, MARK_NAMES, RUNNING, Command, Session, added, passed_over, take
from scheduler.track.session_file import SessionDamaged, SessionFiles, find_root

Tail = Callable[[str, int], list[str]]  # path, number → the last lines of a log, without control characters


class Tracker:
    """One session, with the actions on it. ``tail``: reads the last lines of a log."""

    def __init__(self, files: SessionFiles, name: str, tail: Tail) -> None:
        self.files, self.name, self.tail = files, name, tail

    @classmethod
    def here(cls, folder: str, name: str, tail: Tail) -> Tracker:
        """Return the tracker of a session in ``folder``, or else in the nearest folder above that has sessions.

        ``name``: id of the session; empty: the newest session. Raises NoSession.
        """
        files = SessionFiles(find_root(folder))
        return cls(files, name or files.newest(), tail)

    @classmethod
    def begin(cls, folder: str, name: str, tail: Tail) -> Tracker:
        """Create a session in ``folder`` itself. Raises SchedulerError, OSError."""
        files = SessionFiles(folder)
        return cls(files, files.create(name, time.time()).id, tail)

    @property
    def log_folder(self) -> str:
        """Folder of the session's logs and attempt records."""
        return self.files.folder(self.name)

    def log(self, command: Command) -> str:
        """Return the path of the log of the command's last attempt."""
        return os.path.join(self.log_folder, command.job.log)

    def record(self, command: Command) -> str:
        """Return the path of the record of the command's last attempt."""
        return os.path.join(self.log_folder, command.job.attempt_key)

    def last_output(self, command: Command) -> str:
        """Return the last lines of the command's log. If it cannot be read, return the lines in the session file."""
        try:
            return "\n".join(self.tail(self.log(command), LINES_KEPT)) if command.job.log else ""
        except OSError:
            return command.last_output

    # -- true states --------------------------------------------------------------------------------------

    def session(self) -> Session:
        """Read the session and settle the commands of killed trackers. Raises SchedulerError."""
        session = self.files.read(self.name)
        if not any(map(is_abandoned, session.commands)):
            return session
        try:
            with self.files.changing(self.name) as session:
                self.settle(session)
        except OSError:  # a full or read-only disk: the true states can be shown, but not saved
            with contextlib.suppress(OSError):
                self.settle(session)
        return session

    def settle(self, session: Session) -> None:
        """Give each command of a killed tracker the state that follows from its attempt record and processes."""
        for command in filter(is_abandoned, session.commands):
            self._settle(command)

    def _settle(self, command: Command) -> None:
        job, now = command.job, time.time()
        verdict, observations, _ = settle(self.record(command), job, self.files.path(self.name), now, MARK_NAMES)
        something_lives = verdict in (Verdict.WATCH_LOST, Verdict.FINISH_HOLDING)
        # Otherwise the command counts as running, so that nobody starts it again.
        if not something_lives or self.is_written_down(command):
            for observation in observations:
                take(command, self.dated(command, observation))
        command.last_output = self.last_output(command)

    def is_written_down(self, command: Command) -> bool:
        """Return whether the attempt record says how the command's last attempt ended."""
        return attempt_record.read(self.record(command)).kind is Record.ENDED

    def dated(self, command: Command, observation: Observation) -> Observation:
        """Return ``observation``; a corrected copy of an Ended or Lost if the attempt record has no ending.

        The time in the copy is the time of the command's last output (`last_sign`). For Lost, the reason in the copy
        says "the tracker" in place of "the scheduler". If the machine was restarted, the reason is the restart.
        """
        if not isinstance(observation, (Lost, Ended)) or self.is_written_down(command):
            return observation
        if isinstance(observation, Ended):
            return replace(observation, at=self.last_sign(command))
        why = observation.why.replace("the scheduler", "the tracker")
        if command.job.boot not in ("", boot_id()):
            why = "the machine or pod in which it ran was restarted or is gone"
        return replace(observation, at=self.last_sign(command), why=why)

    def last_sign(self, command: Command) -> float:
        """Return the time of the command's last output, in seconds since 1970 (UTC).

        If the command has written nothing, return the time of its start. If the end of a command is not recorded, the
        returned time counts as the time of its end.
        """
        started = command.job.started_at or time.time()
        try:
            return max(started, min(os.stat(self.log(command)).st_mtime, time.time()))
        except OSError:
            return started

    # -- changes ------------------------------------------------------------------------------------------

    def add(self, text: str, folder: str) -> Command:
        """Append a command, to be run in ``folder``, and return it. Raises SchedulerError."""
        with self.files.changing(self.name) as session:
            return self.planned(session, text, folder)

    def planned(self, session: Session, text: str, folder: str) -> Command:
        """Append a command to ``session`` and return it. Raises UsageError.

        The caller must hold the lock of the session, and save the session afterwards.
        """
        return added(session, text, os.path.relpath(folder, self.files.root), time.time())

    def skip(self) -> list[Command]:
        """Skip all interrupted commands and return them. Raises SchedulerError."""
        with self.files.changing(self.name) as session:
            self.settle(session)
            return passed_over(session)

    def delete(self) -> None:
        """Delete the session. Raises SchedulerError while one of its commands runs."""
        self.files.delete(self.name, self._check_idle)

    def _check_idle(self) -> None:
        """Raise SchedulerError if a command runs.

        If the session file is damaged, the attempt records show which commands run.
        """
        try:
            session = self.files.read(self.name)
            self.settle(session)
            running = [command.id for command in session.having(RUNNING)]
        except SessionDamaged:
            running = self._running_by_records()
        if running:
            which = f"command {running[0]} runs" if len(running) == 1 else f"{len(running)} commands run"
            what, it = f"cannot delete the session: {which}", "it" if len(running) == 1 else "them"
            raise SchedulerError(what, where=f"session {self.name}", do=f"end {it} first, or wait for {it}")

    def _running_by_records(self) -> list[int]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(self.log_folder):
                number, _, attempt = entry.partition(".")
                if number.isdigit() and attempt.isdigit():
                    if self._lives_by_record(int(number), int(attempt)):
                        found.append(int(number))
        return found

    def _lives_by_record(self, number: int, attempt: int) -> bool:
        """Return whether an attempt runs, or is just being started, according to its record and its processes."""
        seen = attempt_record.read(os.path.join(self.log_folder, f"{number}.{attempt}"))
        if seen.process is not None:
            return seen.boot == boot_id() and lives(seen.process)
        path = self.files.path(self.name)
        return seen.kind is Record.CLAIMED and (
            starter_lives(f"{number}.{attempt}", path) or bool(members(Mark(number, attempt, path, MARK_NAMES), None))
        )


def is_abandoned(command: Command) -> bool:
    """Return whether the tracker that claimed the command has ended without recording the command's end."""
    return command.in_hand and not supervised(command)


def supervised(command: Command) -> bool:
    """Return whether the process of `gpujob track` that claimed this command is alive."""
    who = command.tracker
    return who is not None and who.boot == boot_id() and lives(who.process)
