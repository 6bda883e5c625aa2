"""A tracked session: its commands in order, the changes of their states, and its JSON form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeGuard

from scheduler.core.endings import CANCELLED, NEVER_AGAIN, Meaning, after_loss, after_no_start, after_run
from scheduler.core.errors import SchedulerError, UsageError, said
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import ENDED, HOLDING, Job, JobSpec, JobState, Process
from scheduler.core.observations import Ended, Lost, NeverRan, Observation, Started, Unclaimed
from scheduler.core.states import Move, move
from scheduler.core.units import maybe_utc, utc

SCHEMA = 1
LINES_KEPT = 20  # last lines of a command's output in the session file
# Other names than those of a job: a tracked command may run inside a job and submit jobs to that job's scheduler.
MARK_NAMES = ("GPUJOB_TRACK_ID", "GPUJOB_TRACK_ATTEMPT", "GPUJOB_TRACK_SESSION")

PENDING, RUNNING, DONE, INTERRUPTED, SKIPPED = "pending", "running", "done", "interrupted", "skipped"
SYMBOLS = {PENDING: "○", RUNNING: "►", DONE: "✓", INTERRUPTED: "✗", SKIPPED: "⊘"}
WORDS: dict[JobState, str] = {
    JobState.PENDING: PENDING,
    JobState.STARTING: RUNNING,
    JobState.RUNNING: RUNNING,
    JobState.STOPPING: RUNNING,
    JobState.DONE: DONE,
    JobState.FAILED: INTERRUPTED,
    JobState.CANCELLED: INTERRUPTED,
    JobState.SKIPPED: SKIPPED,
}
_ID = re.compile(r"\d{8}-\d{6}(?:-[1-9]\d{0,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TrackerProcess:
    """The process of a tracker that runs a command, and the boot id of its machine."""

    process: Process
    boot: str


@dataclass(slots=True)
class Command:
    """A command of a session.

    ``job``: the state of the command. ``job.spec.cwd`` is relative to the session's root folder. ``job.log`` is
    relative to the session's log folder. ``last_output``: last lines of the command's log. ``tracker``: the tracker
    that has claimed the command, or None.
    """

    job: Job
    text: str  # as it was typed
    last_output: str = ""
    tracker: TrackerProcess | None = None

    @property
    def id(self) -> int:
        """Number of the command in its session."""
        return self.job.id

    @property
    def status(self) -> str:
        """State of the command in the tracker's words: pending, running, done, interrupted or skipped."""
        return WORDS[self.job.state]

    @property
    def symbol(self) -> str:
        """Symbol of the status."""
        return SYMBOLS[self.status]

    @property
    def in_hand(self) -> bool:
        """True from the claim by a tracker until the command's end is recorded."""
        return self.job.state in HOLDING

    @property
    def told(self) -> str:
        """Status with the exit code or signal, if known: ``done (exit=0)``, ``interrupted (signal=9)``."""
        code = f" (exit={self.job.exit_code})" if self.job.exit_code is not None else ""
        if self.job.signal is not None:
            code = f" (signal={self.job.signal})"
        return f"{self.status}{code}"

    def duration(self, now: float) -> float | None:
        """Return how many seconds the command ran, or has run until ``now``; None if it has not started."""
        if self.job.started_at is None:
            return None
        end = self.job.finished_at if self.job.state in ENDED else now
        return None if end is None else max(0.0, round(end - self.job.started_at, 3))


@dataclass(slots=True)
class Session:
    """A list of commands in the order in which they run."""

    id: str
    name: str
    created_at: float
    commands: list[Command] = field(default_factory=list)

    def command(self, number: int) -> Command:
        """Return the command with this number. Raises SchedulerError if there is none."""
        for command in self.commands:
            if command.id == number:
                return command
        raise SchedulerError(f"command {number} does not exist any more", where=f"session {self.id}")

    def having(self, *words: str) -> list[Command]:
        """Return the commands with one of these statuses, in their order."""
        return [command for command in self.commands if command.status in words]

    def first(self, word: str) -> Command | None:
        """Return the first command with this status; None if there is none."""
        return next(iter(self.having(word)), None)


@dataclass(slots=True)
class Tally:
    """Counts of the commands that one `run-all` ran.

    ``ran``: number of all these commands. ``failed``: number of commands that failed. ``skipped``: number of commands
    that failed and were then marked as skipped.
    """

    ran: int = 0
    skipped: int = 0
    failed: int = 0

    def count(self, command: Command) -> None:
        """Count a command that was run."""
        self.ran += 1
        self.skipped += command.status == SKIPPED
        self.failed += command.status == INTERRUPTED

    @property
    def told(self) -> str:
        """The line printed at the end of a `run-all`."""
        return f"Finished: {self.ran} ran, {self.skipped} skipped, {self.failed} failed"


# -- state changes of a command ---------------------------------------------------------------------------------


def added(session: Session, text: str, folder: str, now: float) -> Command:
    """Append a new command to the session and return it. Raises UsageError if ``text`` is empty.

    ``folder``: the command's working folder, relative to the session's root folder.
    """
    if not text.strip():
        raise UsageError("the command is empty", do='write it in quotes: gpujob track add "python train.py"')
    number = max((command.id for command in session.commands), default=0) + 1
    command = Command(_job(number, text, folder, now), text)
    session.commands.append(command)
    return command


def _job(number: int, text: str, folder: str, now: float) -> Job:
    spec = JobSpec(source="track", arguments=("sh", "-c", text), cwd=folder)
    return Job(id=number, spec=spec, need=ResourceRequest(0, 0), submitted_at=now)


def claim(command: Command, tracker: TrackerProcess, attempt: int, now: float) -> None:
    """Claim a command for a new attempt by ``tracker``. The command is pending or has ended.

    Raises InvalidMove if the command runs.
    """
    job = command.job
    if job.state is not JobState.PENDING:
        move(job, Move.REQUEUED, now)
    move(job, Move.PLACED, now)
    job.attempt, job.boot = attempt, tracker.boot
    job.log = f"{job.attempt_key}.log"
    job.started_at = now
    job.reason = job.stop_why = command.last_output = ""
    command.tracker = tracker


def stop_asked(command: Command, why: str, now: float) -> None:
    """Record that the tracker ends a running command because of a signal. Record ``why`` as the reason.

    The command then ends as interrupted, whatever its exit code is.
    """
    if command.job.state in (JobState.STARTING, JobState.RUNNING):
        move(command.job, Move.STOP_ASKED, now)
        command.job.stop_why, command.job.stop_at = why, now


def take(command: Command, observation: Observation, *, skip_errors: bool = False) -> None:
    """Change the command's state as an observation of its last attempt requires. Ignore observations of other attempts.

    The observation comes from the runner, or from the search for attempts after a crash. ``skip_errors``: if the
    command fails, mark it as skipped, unless `stop_asked` has recorded that the tracker ended the command.
    """
    job = command.job
    if not is_of(observation, job):
        return
    _restart(job)
    if isinstance(observation, Started):
        job.process, job.started_at = observation.process, observation.at
        if job.state is JobState.STARTING:
            move(job, Move.STARTED, observation.at)
    elif isinstance(observation, Ended):
        if job.state is JobState.STARTING:
            move(job, Move.STARTED, observation.at)
        job.exit_code, job.signal, job.finished_at = observation.exit_code, observation.signal, observation.at
        _settle(command, after_run(job, NEVER_AGAIN), observation.at, observation.note, skip_errors)
    elif isinstance(observation, NeverRan):
        job.started_at = None
        why = f"it could not be started: {observation.why}"
        _settle(
            command,
            after_no_start(job, observation.why, observation.lasting, NEVER_AGAIN),
            observation.at,
            why,
            skip_errors,
        )
    elif isinstance(observation, Lost):
        job.finished_at = observation.at
        _settle(command, after_loss(job), observation.at, observation.why, skip_errors)
    elif job.state is JobState.STOPPING:  # Unclaimed: it was stopped before it began
        at = job.stop_at or job.submitted_at
        job.started_at = None
        _settle(command, CANCELLED, at)
    else:
        move(job, Move.RETRY_SCHEDULED, job.submitted_at)
        command.tracker = None


def is_of(observation: Observation, job: Job) -> TypeGuard[Started | Ended | NeverRan | Unclaimed | Lost]:
    """Return whether an observation is about the last attempt of ``job``."""
    if not isinstance(observation, (Started, Ended, NeverRan, Unclaimed, Lost)):
        return False
    return (observation.job, observation.attempt) == (job.id, job.attempt)


def _restart(job: Job) -> None:
    """Move a pending or ended job back to STARTING, so that an observation of its last attempt can be applied.

    The recorded state may be wrong: a tracker in another container cannot see the job's processes, and may have
    recorded the job as lost although it runs.
    """
    started, process = job.started_at, job.process
    if job.state in ENDED:
        move(job, Move.REQUEUED, job.submitted_at)
    if job.state is JobState.PENDING:
        move(job, Move.PLACED, job.submitted_at)
        job.started_at, job.process = started, process


def _settle(command: Command, ending: Meaning, at: float, why: str = "", skip: bool = False) -> None:
    """Move a command to its final state.

    ``why``: reason of a failure. If the tracker ended the command because of a signal, the command keeps the reason
    that `stop_asked` has recorded, and ``why`` is ignored. ``skip``: mark a failed command as skipped.
    """
    why = {Move.STOPPED: command.job.stop_why, Move.SUCCEEDED: ""}.get(ending.how, why)
    move(command.job, ending.how, at)
    if skip and ending.how is Move.FAILED:
        move(command.job, Move.SKIPPED, at)
    command.job.reason = why  # after the moves, which clear it
    command.tracker = None


def passed_over(session: Session) -> list[Command]:
    """Skip all interrupted commands and return them."""
    found = session.having(INTERRUPTED)
    for command in found:
        why = command.job.reason
        move(command.job, Move.SKIPPED, command.job.finished_at or 0.0)
        command.job.reason = why
    return found


# -- as JSON ---------------------------------------------------------------------------------------------------


def report(session: Session, folder: str, now: float) -> dict[str, Any]:
    """Return the document that `track status --json` prints. ``folder``: the session's root folder."""
    return {
        "id": session.id,
        "name": session.name,
        "created_at": utc(session.created_at),
        "cwd": folder,
        "commands": [_reported(command, now) for command in session.commands],
    }


def _reported(command: Command, now: float) -> dict[str, Any]:
    job = command.job
    return {
        "id": job.id,
        "cmd": command.text,
        "status": command.status,
        "exit_code": job.exit_code,
        "started_at": maybe_utc(job.started_at),
        "finished_at": maybe_utc(job.finished_at) if job.state in ENDED else None,
        "duration_seconds": command.duration(now),
        "last_output": command.last_output.split("\n") if command.last_output else [],
    }


def stored(session: Session, folder: str, now: float) -> dict[str, Any]:
    """Return the contents of the session's file: the report, and the fields that only the tracker needs."""
    values = report(session, folder, now)
    commands = [{**shown, **_own(command)} for shown, command in zip(values["commands"], session.commands, strict=True)]
    return {"schema": SCHEMA, **values, "commands": commands}


def _own(command: Command) -> dict[str, Any]:
    job, tracker = command.job, command.tracker
    return {
        "state": job.state.value,
        "signal": job.signal,
        "reason": job.stop_why if job.state is JobState.STOPPING else job.reason,
        "added_at": utc(job.submitted_at),
        "cwd": job.spec.cwd,
        "log": job.log,
        "attempt": job.attempt,
        "process": _process(job.process),
        "boot": job.boot,
        "tracker": None if tracker is None else {**(_process(tracker.process) or {}), "boot": tracker.boot},
    }


def _process(process: Process | None) -> dict[str, Any] | None:
    return None if process is None else {"pid": process.pid, "ticks": process.ticks}


def session_of(values: object, name: str) -> Session:
    """Return the session from the parsed JSON of its file. ``name``: the id in the file's name. Raises UsageError."""
    whole = _Reader(values, "the session")
    schema = whole.number("schema", SCHEMA)
    if schema is not None and schema > SCHEMA:
        raise UsageError(f"a newer gpujob wrote it (schema {schema}; this gpujob supports {SCHEMA})")
    if whole.text("id", name) != name:
        raise UsageError(f"its id is {said(whole.text('id', name))}, and the file has another name")
    session = Session(name, whole.text("name"), whole.time("created_at") or 0.0)
    commands = whole.values.get("commands")
    if not isinstance(commands, list):
        raise UsageError("'commands' is not a list")
    known: set[int] = set()
    for one in commands:
        command = _command(_Reader(one, f"command {len(known) + 1}"))
        if command.id in known or command.id < 1:
            raise UsageError(
                f"two commands have the number {command.id}" if command.id > 0 else "a command has a number below 1"
            )
        known.add(command.id)
        session.commands.append(command)
    return session


def _command(read: _Reader) -> Command:
    number, text = read.number("id"), read.text("cmd")
    if number is None:
        raise UsageError(f"{read.what} has no number")
    job = _job(number, text, read.text("cwd", "."), read.time("added_at") or 0.0)
    job.state = read.state()
    job.exit_code, job.signal = read.number("exit_code", None), read.number("signal", None)
    job.started_at, job.finished_at = read.time("started_at"), read.time("finished_at")
    job.reason, job.log, job.boot = read.text("reason", ""), read.text("log", ""), read.text("boot", "")
    if job.state is JobState.STOPPING:
        job.stop_why, job.reason = job.reason, ""
    job.attempt = read.number("attempt", 0) or 0
    if "/" in job.log or job.log.startswith("."):
        raise UsageError(f"the log of {read.what} is not a plain file name: {said(job.log)}")
    job.process = read.process("process")
    process = read.process("tracker")
    tracker = None
    if process is not None:
        tracker = TrackerProcess(process, _Reader(read.values["tracker"], read.what).text("boot", ""))
    return Command(job, text, "\n".join(read.lines("last_output")), tracker)


_ANY: Any = object()  # stands for no default: the key is required


class _Reader:
    """Reader of typed values from a mapping. ``what``: name of the mapping in errors. The methods raise UsageError."""

    def __init__(self, values: object, what: str) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(f"{what} is not a JSON object")
        self.values: Mapping[str, Any] = values
        self.what = what

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], kind: str) -> Any:
        value = self.values.get(key, default)
        if value is _ANY:
            raise UsageError(f"{self.what} has no {key!r}")
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise UsageError(f"{key!r} of {self.what} is {said(value)}, not a {kind}")
        return default if value is None and default is not _ANY else value

    def text(self, key: str, default: str = _ANY) -> str:
        found = self._get(key, default, (str,), "text")
        if not isinstance(found, str):
            raise UsageError(f"{self.what} has no {key!r}")
        return found

    def lines(self, key: str) -> list[str]:
        found = self._get(key, [], (list, str), "list of lines")
        lines = found.split("\n") if isinstance(found, str) else found
        if not all(isinstance(line, str) for line in lines):
            raise UsageError(f"{key!r} of {self.what} is not a list of lines")
        return list(lines)

    def number(self, key: str, default: int | None = _ANY) -> int | None:
        found: int | None = self._get(key, default, (int,), "number")
        return found

    def time(self, key: str) -> float | None:
        text = self._get(key, None, (str,), "time")
        if text is None:
            return None
        try:
            at = datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith("Z") else text)
            return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
        except (ValueError, OverflowError):
            raise UsageError(f"{key!r} of {self.what} is {said(text)}, not a time") from None

    def state(self) -> JobState:
        word = self.text("state", "") or self.text("status")  # a file of another program has only the status
        try:
            return JobState.FAILED if word == INTERRUPTED else JobState(word)
        except ValueError:
            raise UsageError(f"'status' of {self.what} is {said(word)}, not a status") from None

    def process(self, key: str) -> Process | None:
        values = self.values.get(key)
        if values is None:
            return None
        inner = _Reader(values, f"{key!r} of {self.what}")
        pid, ticks = inner.number("pid"), inner.number("ticks")
        if pid is None or ticks is None or pid < 1:
            raise UsageError(f"{inner.what} has no valid pid and start time")
        return Process(pid, ticks)


# -- ids of sessions -------------------------------------------------------------------------------------------


def is_session_id(text: str) -> bool:
    """Return whether ``text`` has the form of a session id: ``20261122-091500`` or ``20261122-091500-2``."""
    return _ID.fullmatch(text) is not None


def age(name: str) -> tuple[str, int]:
    """Return the sort key of a session id. It sorts the sessions from the oldest to the newest."""
    return name[:15], int(name[16:] or 1)


def next_id(stamp: str, taken: Iterable[str]) -> str:
    """Return the id of a session that is created at ``stamp``.

    The id sorts after all ids in ``taken`` (see `age`), even if the clock was set back.
    """
    newest = max(map(age, taken), default=("", 1))
    if stamp > newest[0]:
        return stamp
    return f"{newest[0]}-{newest[1] + 1}"
