"""The verbs of `gpujob track`, which run the commands of a session one after another (docs/track.md)."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence

from scheduler.core.errors import NotFound, SchedulerError, UsageError
from scheduler.core.secrets import without_secrets
from scheduler.core.units import span_text
from scheduler.system.forked_command import need_own_process
from scheduler.system.log_reader import LogReader
from scheduler.system.terminal_text import charset, safe
from scheduler.track.cli_words import HELP, Typed, read
from scheduler.track.plan import (
    DONE,
    INTERRUPTED,
    PENDING,
    RUNNING,
    SKIPPED,
    SYMBOLS,
    Command,
    Session,
    Tally,
    report,
)
from scheduler.track.run import GONE, Foreground, Gives
from scheduler.track.session import Tracker, is_abandoned
from scheduler.views import terminal
from scheduler.views.log_glance import last_lines

WAIT_S = 0.1
LAST_WORD_S = 0.5  # seconds for which a signalled tracker waits for a blocked stdout
BY_SIGNAL = 128


def run(words: Sequence[str]) -> int:
    """Run a `gpujob track` command line and return the exit code. Raises SchedulerError."""
    typed = read(words)
    if typed.verb == "help":
        print(HELP, end="")
        return 0
    if typed.verb == "init":
        return init(typed)
    tracker = Tracker.here(os.getcwd(), typed.id if typed.verb == "delete" else typed.session, last_lines)
    return {
        "add": add,
        "run": run_one,
        "run-all": run_all,
        "next": next_one,
        "status": status,
        "log": log,
        "remaining": remaining,
        "retry": retry,
        "skip": skip,
        "list": list_all,
        "delete": delete,
    }[typed.verb](tracker, typed)


def init(typed: Typed) -> int:
    """Create a session in the current folder."""
    tracker = Tracker.begin(os.getcwd(), typed.text, last_lines)
    print(f"Session {tracker.name} ({safe(typed.text)}) in {safe(tracker.files.sessions_dir)}")
    return 0


def add(tracker: Tracker, typed: Typed) -> int:
    """Add a command to the session, without running it."""
    command = tracker.add(typed.text, os.getcwd())
    print(f"Added [{command.id}]: {shown(command)}")
    return 0


# -- running -------------------------------------------------------------------------------------------------


def run_one(tracker: Tracker, typed: Typed) -> int:
    """Add a command and run it in one step, so that no other tracker can claim the command in between."""
    folder = os.getcwd()
    with Work(tracker, typed) as work:
        return work.one(lambda session: tracker.planned(session, typed.text, folder))


def next_one(tracker: Tracker, typed: Typed) -> int:
    """Show the next pending command, or run it (``--run``)."""
    if typed.run:
        with Work(tracker, typed) as work:
            return work.one(lambda session: session.first(PENDING), "No pending commands.")
    command = tracker.session().first(PENDING)
    print("No pending commands." if command is None else f"Next [{command.id}]: {shown(command)}")
    return 0


def retry(tracker: Tracker, typed: Typed) -> int:
    """Run the first interrupted command again."""
    with Work(tracker, typed) as work:
        return work.one(lambda session: session.first(INTERRUPTED), "No interrupted commands.")


def run_all(tracker: Tracker, typed: Typed) -> int:
    """Run all pending commands one after another.

    If another `run-all` runs commands of this session, first wait for the end of that `run-all`.
    """
    with Work(tracker, typed) as work, tracker.files.running_all(tracker.name) as turn:
        said = False
        while not turn.come():
            if not said:
                print(f"gpujob: run-all with pid {turn.whose()} is running; waiting for its end", file=sys.stderr)
            said = True
            time.sleep(WAIT_S)
            if work.at.ending_signal:
                return BY_SIGNAL + work.at.ending_signal
        return work.all()


class Work:
    """Runs commands in the foreground. Shows the output of each command, then prints a line about the result."""

    def __init__(self, tracker: Tracker, typed: Typed) -> None:
        need_own_process()
        self.tracker, self.typed = tracker, typed
        self.out = Out()
        self.at = Foreground(tracker, keep=typed.keep, show=self.out.raw, begun=self._begun, gives=self._gives)
        self.out.ending_signal = lambda: self.at.ending_signal

    def __enter__(self) -> Work:
        self.at.__enter__()
        if not self.typed.keep:
            self.out.gone_too = self.at.signals.hang_up
        return self

    def __exit__(self, *_: object) -> None:
        self.at.__exit__()

    def _begun(self, command: Command) -> None:
        self.out.line(f"Running [{command.id}]: {shown(command)}")

    def _gives(self, folder: str) -> Gives | None:
        nothing = os.stat(os.devnull).st_rdev
        if os.fstat(0).st_rdev == nothing or _in_background():
            return None
        from scheduler.client.foreground_caller import Caller

        try:
            return Caller(folder, output=False)
        except (SchedulerError, OSError) as error:
            print(safe(f"gpujob: the command gets no input: {error}"), file=sys.stderr)
            return None

    def _ended(self, command: Command) -> None:
        self.out.line(f"{command.symbol} [{command.id}] {command.told}")
        if command.status == INTERRUPTED and command.job.reason:
            self.out.aside(f"[{command.id}] {command.job.reason}")

    def _code(self, failed: bool) -> int:
        number = self.at.ending_signal
        return BY_SIGNAL + number if number else int(failed)

    def one(self, pick: Callable[[Session], Command | None], none: str = "") -> int:
        """Run the command that ``pick`` chooses and return the exit code.

        ``none``: text to print if ``pick`` finds no command; the exit code is then 0.
        """
        self._note_running()
        command = self.at.run(pick)
        if command is None:
            self.out.line(none)
            return 0
        self._ended(command)
        return self._code(command.status != DONE)

    def _note_running(self) -> None:
        """Print a note for each command that still runs, because it may use the GPU that the next command needs."""
        for command in self.tracker.session().having(RUNNING):
            who = f"pid {command.job.process.pid}" if command.job.process is not None else "starting"
            self.out.aside(f"[{command.id}] still runs ({who}); only run-all waits for its end")

    def all(self) -> int:
        """Watch commands of killed trackers to their ends, then run all pending commands; return the exit code.

        Stop early if one of these commands ends as interrupted; the commands after it are then not run.
        """
        skip, tally = self.typed.skip_errors, Tally()
        left = [command.id for command in self.tracker.session().commands if is_abandoned(command)]
        before = [command.id for command in self.tracker.session().having(INTERRUPTED)]
        while not self.at.ending_signal:
            if left:
                command = self.at.adopt(left.pop(0), skip_errors=skip)
                if command is None:
                    continue
            else:
                command = self.at.run(lambda session: session.first(PENDING), skip_errors=skip)
                if command is None:
                    break
            self._ended(command)
            tally.count(command)
            if command.status == INTERRUPTED:
                break
        if not tally.ran and not self.at.ending_signal:
            self.out.line("No pending commands.")
        self.out.line(tally.told)
        if tally.failed and not self.at.ending_signal:
            wait = len(self.tracker.session().having(PENDING))
            interrupted = self.tracker.session().having(INTERRUPTED)  # with commands that were interrupted earlier
            several = len(interrupted) > 1
            again = f"[{interrupted[0].id}]" if several else "the failed command"
            skipped = "all interrupted commands" if several else "it"
            self.out.aside(
                f"stopped with {wait} command{'s' * (wait != 1)} pending: gpujob track retry runs {again} again, "
                f"gpujob track skip skips {skipped}, gpujob track run-all continues"
            )
        if before and not self.at.ending_signal:
            which = ", ".join(f"[{number}]" for number in before)
            self.out.aside(
                f"not run, because interrupted earlier: {which} (gpujob track retry runs the first of them again, "
                "gpujob track skip skips all of them)"
            )
        return self._code(tally.failed > 0)


def _in_background() -> bool:
    """Return whether stdin is a terminal on which this process is in the background.

    If so, a command gets no stdin. The reason: the kernel suspends a background process that reads from its terminal,
    but would not suspend the command, because the command runs in its own session. So the command would read input
    that is meant for the shell. The result is also True if stdin is a terminal that does not control this process.
    """
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return True  # the terminal does not control this process


class Out:
    """The tracker's stdout, for its own lines and the output of commands.

    `line` raises no error if stdout has no reader.
    """

    def __init__(self) -> None:
        self.gone = False
        self.gone_too: Callable[[], object] = bool  # called when stdout has no reader any more
        self.ending_signal: Callable[[], int] = int
        self._fresh = True

    def raw(self, data: bytes) -> None:
        """Write output of a command. Raises OSError if stdout has no reader; further calls then do nothing."""
        if self.gone:
            return
        self._fresh = data.endswith(b"\n")
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[os.write(1, view) :]
                except BlockingIOError:  # the caller has made our stdout non-blocking
                    select.select((), (1,), ())
        except OSError:
            self.gone = True
            raise

    def line(self, text: str) -> None:
        """Print a line of the tracker. If the output of a command ended inside a line, begin a new line first."""
        if self.ending_signal() and not select.select((), (1,), (), LAST_WORD_S)[1]:
            self.gone = True  # stdout is blocked, and a signal asked us to end
        whole = f"{'' if self._fresh else chr(10)}{text}\n"
        try:
            self.raw(whole.encode(sys.stdout.encoding, sys.stdout.errors or "strict"))
        except OSError as error:
            if error.errno in GONE:
                self.gone_too()

    def aside(self, text: str) -> None:
        """Print a note on stderr."""
        try:
            print(f"gpujob: {safe(text)}", file=sys.stderr, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# -- showing -------------------------------------------------------------------------------------------------


def shown(command: Command) -> str:
    """Return the command's text on one line, with passwords and tokens masked."""
    return safe(without_secrets(command.text))


def status(tracker: Tracker, typed: Typed) -> int:
    """Print the session and its commands with their current states."""
    session = tracker.session()
    if typed.json:
        values = report(session, tracker.files.root, time.time())
        for command in values["commands"]:
            command["cmd"] = without_secrets(command["cmd"])
        print(json.dumps(values, indent=2, ensure_ascii=charset() == "ascii"))
        return 0
    print(f"{safe(session.name)}  (session {session.id}, {safe(tracker.files.root)})")
    told = max((len(command.told) for command in session.commands), default=0)
    number = max((len(str(command.id)) for command in session.commands), default=0) + 2
    for command in session.commands:
        print("\n".join(_lines(tracker, command, number, told)))
    print(_counts(session) if session.commands else 'No commands; add one: gpujob track add "COMMAND"')
    return 0


def _lines(tracker: Tracker, command: Command, number: int, told: int) -> list[str]:
    duration = command.duration(time.time())
    ran = "-" if duration is None else span_text(duration)
    line = f"{command.symbol} {f'[{command.id}]':<{number}} {command.told:<{told}}  {ran:>10}  {shown(command)}"
    lines = [terminal.cut(line, terminal.width()).replace(command.status, terminal.painted(command.status), 1)]
    beside = " " * (number + 3)
    if command.status == RUNNING:
        who = f"pid {command.job.process.pid}" if command.job.process is not None else "starting"
        if is_abandoned(command):
            who += "; its tracker was killed, but the command continues"
        lines.append(f"{beside}{who}")
    elif command.status in (INTERRUPTED, SKIPPED) and command.job.attempt:
        if command.job.reason:
            lines.append(beside + safe(command.job.reason))
        last = command.last_output.rpartition("\n")[2]
        if last:
            lines.append(terminal.cut(f"{beside}last line: {safe(last)}", terminal.width()))
        if command.job.log:
            lines.append(f"{beside}log: {safe(_near(tracker.log(command)))}")
    return lines


def _near(path: str) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else path


def _counts(session: Session) -> str:
    found = ((word, len(session.having(word))) for word in (DONE, RUNNING, INTERRUPTED, SKIPPED, PENDING))
    return ", ".join(f"{number} {word}" for word, number in found if number)


def log(tracker: Tracker, typed: Typed) -> int:
    """Print the log of a command's last attempt; without a number, the log of the command that started last.

    Raises NotFound if there is no log, SchedulerError if the log cannot be read.
    """
    session = tracker.session()
    if typed.id:
        command = next((one for one in session.commands if str(one.id) == typed.id), None)
    else:
        command = max(session.commands, key=lambda one: one.job.started_at or 0.0, default=None)
    if command is None or not command.job.log:
        what = f"command {typed.id} has no log" if typed.id else "no command has a log"
        raise NotFound(what, where=f"session {session.id}", do="see gpujob track status")
    out, path = Out(), tracker.log(command)
    try:
        with LogReader(path, unpack=False, ours=True) as reader:
            for data in reader.new(until=reader.size):
                out.raw(data)
    except OSError as error:
        if not out.gone:
            raise SchedulerError(f"cannot read the log: {error.strerror}", where=path) from None
    return 0


def remaining(tracker: Tracker, _: Typed) -> int:
    """Print the commands that run, were interrupted or are pending."""
    found = tracker.session().having(RUNNING, INTERRUPTED, PENDING)
    for command in found:
        print(f"{command.symbol} [{command.id}] {command.told}: {shown(command)}")
    if not found:
        print("No commands remain.")
    return 0


def skip(tracker: Tracker, _: Typed) -> int:
    """Skip all interrupted commands."""
    found = tracker.skip()
    for command in found:
        print(f"{SYMBOLS[SKIPPED]} [{command.id}] {command.told}: {shown(command)}")
    print(f"Skipped {len(found)} command{'s' if len(found) != 1 else ''}." if found else "No interrupted commands.")
    return 0


def list_all(tracker: Tracker, _: Typed) -> int:
    """Print all sessions of the folder. If a session is unreadable, report it on stderr and return exit code 1."""
    names = tracker.files.names()
    damaged: list[SchedulerError] = []
    for name in names:
        try:
            session = Tracker(tracker.files, name, last_lines).session()
        except SchedulerError as error:
            damaged.append(error)
            continue
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(session.created_at))
        mark = "*" if name == names[-1] else " "
        print(f"{mark} {name:<15}  {made}  {safe(session.name)}: {_counts(session) or 'no commands'}")
    sys.stdout.flush()
    for one in damaged:
        print(safe(f"gpujob: {one}"), file=sys.stderr)
    return int(bool(damaged))


def delete(tracker: Tracker, typed: Typed) -> int:
    """Delete a session with its logs and records. Raises SchedulerError while one of its commands runs."""
    if not typed.id:
        raise UsageError("no session is named", do="write gpujob track delete ID; see gpujob track list")
    tracker.delete()
    print(f"Deleted session {typed.id}.")
    return 0
