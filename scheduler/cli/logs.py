"""The verb `logs`: prints job logs as a terminal would show them, decompressed if necessary, or as raw bytes."""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import client_of, state_file_for
from scheduler.core.errors import NoDaemon, NotFound, Refused, SchedulerError, UsageError
from scheduler.core.job import Event, Job, JobState, Process
from scheduler.core.log_names import is_packed, logs_of
from scheduler.core.rights import HIDDEN_COMMAND
from scheduler.system.forked_command import need_own_process
from scheduler.system.log_reader import LogReader
from scheduler.system.proc import ticks_of
from scheduler.system.terminal_text import upright
from scheduler.views import render, terminal
from scheduler.views.terminal_replay import RESET, Folder, clipped, without_colours

EVERY_S = 0.1
MATCH = "\x1b[1;31m"


def logs(
    job: str,
    *,
    follow: bool = False,
    lines: str = "",
    raw: bool = False,
    grep: str | None = None,
    attempt: str = "",
    state_file: str | None = None,
    config: str | None = None,
) -> int:
    """Print the logs of jobs and return the exit code.

    The exit code is 1 in two cases: ``grep`` matches no line, or several jobs are named and none of them has a log.
    Otherwise it is 0.

    ``follow``: continue until the job ends; ``lines``: number of last lines to print; ``raw``: print the bytes
    unchanged; ``attempt``: number of the attempt, empty: the last attempt. Raises UsageError, NotFound, NoDaemon,
    SchedulerError.
    """
    most = _whole(lines, "-n") if lines else None
    wanted = _whole(attempt, "--attempt") if attempt else None
    pattern = _pattern(grep) if grep is not None else None
    if raw and pattern is not None:
        raise UsageError("cannot combine --raw and --grep", do="pipe --raw into grep -a, or leave --raw out")
    if raw and sys.stdout.isatty():
        raise UsageError(
            "cannot print --raw to a terminal: control characters would take effect",
            do=f"write it to a file: gpujob logs {job} --raw > FILE",
        )
    if follow:
        need_own_process()
    client = client_of(state_file_for(state_file, config))
    numbers = client.select([job])
    if follow and len(numbers) > 1:
        raise UsageError(f"cannot follow {job}: it names {len(numbers)} jobs", do="name one job")
    printer = Printer(raw, pattern)
    try:
        if len(numbers) > 1:
            shown = _several(client, numbers, printer, most, wanted)
            return 0 if shown and (pattern is None or printer.matched) else 1
        found, reason, events = client.job(numbers[0])
        if client.shared and HIDDEN_COMMAND in (found.spec.script, *found.spec.arguments):
            raise Refused(f"job {found.id} belongs to user {found.spec.user}", do="only this user can read its log")
        path = _log(found, events, wanted, printer)
        if follow and (wanted is None or wanted == found.attempt):
            _Following(client, found, printer, once=wanted is not None).run(most)
        elif not path:
            why = f"it is {found.state.value}" + (f" ({reason.code}: {reason.sentence})" if reason else "")
            raise SchedulerError(f"job {found.id} has no log: {why}", do=f"see gpujob why {found.id}")
        else:
            _print_log(path, printer, most)
    finally:
        printer.leave()
    return 0 if pattern is None or printer.matched else 1


def _whole(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UsageError(f"{text[:40]!r} is not a whole number", where=where, do=f"write {where} 20")
    return int(text)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about patterns that a later Python may read differently
            return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        at = getattr(error, "pos", None)
        where = f" at position {at}" if at is not None else ""
        what = getattr(error, "msg", error)
        raise UsageError(
            f"{text[:60]!r} is not a regular expression: {what}{where}",
            where="--grep",
            do="put \\ before . ( [ * + ? |",
        ) from None


def _log(job: Job, events: Sequence[Event], wanted: int | None, printer: Printer) -> str:
    """Return the path of the log of attempt ``wanted``. Raises NotFound if this attempt has no log.

    If ``wanted`` is None, return the path of the last attempt's log, or an empty text if the last attempt has no log.
    In this case also print a note if earlier attempts have logs.
    """
    known = logs_of(job, events)
    if wanted is None:
        earlier = [str(number) for number in sorted(known) if number != job.attempt]
        if earlier:
            which = ", ".join(earlier) if len(earlier) < 6 else f"{earlier[0]} to {earlier[-1]}"
            printer.say(
                f"this is attempt {job.attempt} of job {job.id}; earlier attempts ({which}): gpujob logs {job.id} --attempt N"
            )
        return job.log
    if wanted not in known:
        has = f"it has logs of attempts {', '.join(map(str, sorted(known)))}" if known else f"it is {job.state.value}"
        raise NotFound(f"job {job.id} has no log of attempt {wanted}: {has}", do=f"see gpujob show {job.id}")
    return known[wanted]


def _several(
    client: SchedulerClient, numbers: Sequence[int], printer: Printer, most: int | None, wanted: int | None
) -> int:
    """Print the logs of several jobs, each below a header. Return the number of logs that were printed."""
    shown = 0
    for number in numbers:
        try:
            job, _, events = client.job(number)
            path = _log(job, events, wanted, printer)
            if not path:
                printer.say(f"job {number} has no log: it is {job.state.value}")
                continue
            printer.headed(f"==> job {job.id} ({render.safe(job.spec.shown_name)}), {job.state.value} <==")
            _print_log(path, printer, most)
            shown += 1
        except SchedulerError as error:
            printer.say(str(error))
    return shown


def _opened(path: str, printer: Printer) -> LogReader:
    """Open a log. Raises SchedulerError."""
    try:
        return LogReader(path, unpack=not printer.raw)
    except FileNotFoundError:
        raise SchedulerError("cannot read the log: it was removed, by keep_logs or by a user", where=path) from None
    except OSError as error:
        what = "not a regular file" if error.errno == errno.EINVAL else error.strerror
        raise SchedulerError(f"cannot read the log: {what}", where=path) from None


def _print_log(path: str, printer: Printer, most: int | None) -> None:
    """Print the present contents of a log; with ``most``, print only the last ``most`` lines."""
    with _opened(path, printer) as log:
        end = log.size  # a fixed end: the job may write faster than we print
        printer.begin(log, most)
        for data in log.new(until=end):
            printer.feed(data)
        printer.end(log)


class Printer:
    """Prints log data as the user asked: all lines, only matching lines, or raw bytes."""

    def __init__(self, raw: bool, pattern: re.Pattern[str] | None) -> None:
        self.raw, self.pattern = raw, pattern
        self.terminal = sys.stdout.isatty()
        self.highlights = self.terminal and pattern is not None and not os.environ.get("NO_COLOR")
        self.redraws = self.terminal and pattern is None and os.environ.get("TERM", "dumb") != "dumb"
        self.matched = False
        self._folder = Folder(self.terminal)
        self._last: deque[str] | None = None  # the last (matching) lines, collected until the log is read
        self._drawn = ""  # the unfinished line as drawn on the terminal
        self._header = ""
        self._any = False
        self._said: set[str] = set()
        self._reader: select.poll | None = None

    def headed(self, header: str) -> None:
        """Set the header of the next log.

        The header is printed before the first output of the log. If the log has no output, the header is printed when
        `end` is called, unless only matching lines are wanted.
        """
        self._header = header

    def begin(self, log: LogReader, most: int | None) -> None:
        """Begin to print a log. Print only its last ``most`` lines, or all lines if ``most`` is None.

        Raises UsageError if ``most`` is given and the packed data of a log is printed raw: the lines of packed data
        cannot be counted.
        """
        if most is None:
            return
        if self.raw and is_packed(log.path):
            raise UsageError(
                "cannot combine -n and --raw for a compressed log: its lines are not counted",
                do="leave one of them out",
            )
        if self.raw:
            log.to_last_lines(most, sys.maxsize)
        elif self.pattern is not None or log.packed:
            self._last = deque(maxlen=most)
        elif log.to_last_lines(most):
            self._folder.enter()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log. Print the lines that they complete, or, if raw, the bytes themselves.

        If only the last lines are wanted, the lines are collected until `caught_up` or `end` is called.
        """
        if self.raw:
            self._print_header()
            sys.stdout.buffer.write(data)
        else:
            self._take(self._folder.feed(data))

    def caught_up(self) -> None:
        """Print the last lines collected so far.

        Called when the end of the log is reached. Later lines are printed as they arrive.
        """
        if self._last is not None:
            lines, self._last = list(self._last), None
            self._print(lines)

    def end(self, log: LogReader | None = None) -> None:
        """Finish the log: print its last line, even if the line is incomplete.

        Also print a note if a line was too long and was cut, or if the log is damaged.
        """
        if log is not None and (trouble := log.trouble()):
            self.say(trouble)
        if not self.raw:
            self._take(self._folder.feed(b"", last=True))
            if self._folder.cut_any:
                self.say(
                    "lines longer than a million characters are cut; for the whole lines: gpujob logs --raw > FILE"
                )
            self._folder = Folder(self.terminal)
        self.caught_up()
        if self.pattern is None:
            self._print_header()
        self._header = ""

    def draw(self) -> None:
        """Redraw the unfinished line on a terminal and flush stdout. Raises BrokenPipeError if stdout has no reader."""
        if self.redraws:
            line = self._folder.unfinished()
            if line or self._drawn:
                width = terminal.width() or 80
                text = clipped(upright(line), max(1, width - 1)) + (RESET if "\x1b" in line else "")
                if text != self._drawn:
                    self._drawn = text  # set first: Ctrl-C in between must not leave the line open
                    sys.stdout.write(f"\r{text}\x1b[K")
        sys.stdout.flush()
        if self._reader is None:
            self._reader = select.poll()
            self._reader.register(sys.stdout.fileno(), 0)
        if any(what & (select.POLLERR | select.POLLHUP) for _, what in self._reader.poll(0)):
            raise BrokenPipeError  # else a reader that is gone would be noticed only at the next line

    def say(self, text: str) -> None:
        """Print a note on stderr; each note once."""
        if text not in self._said:
            self._said.add(text)
            self._undraw()
            sys.stdout.flush()
            print(f"gpujob: {render.safe(text)}", file=sys.stderr)

    def leave(self) -> None:
        """End the line that `draw` left open on the terminal."""
        if self._drawn:
            self._drawn = ""
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _take(self, lines: list[str]) -> None:
        if self.pattern is not None:
            search = self.pattern.search
            lines = [line for line in lines if search(without_colours(line))]
            self.matched = self.matched or bool(lines)
        if self._last is not None:
            self._last.extend(lines)
        else:
            self._print(lines)

    def _print(self, lines: list[str]) -> None:
        if not lines:
            return
        self._undraw()
        self._print_header()
        if self.highlights:
            lines = [self._highlighted(line) for line in lines]
        elif self.terminal:
            lines = [upright(line) for line in lines]
        sys.stdout.write("\n".join(lines) + "\n")

    def _highlighted(self, line: str) -> str:
        assert self.pattern is not None
        plain, out, at = without_colours(line), [], 0
        for found in self.pattern.finditer(plain):
            out += [upright(plain[at : found.start()]), MATCH, upright(found.group()), RESET] if found.group() else []
            at = found.end() if found.group() else at
        return "".join(out) + upright(plain[at:])

    def _print_header(self) -> None:
        if self._header:
            between = "\n" if self._any else ""
            header, self._header, self._any = self._header, "", True
            print(between + header, file=sys.stderr if self.raw else sys.stdout)

    def _undraw(self) -> None:
        if self._drawn:
            sys.stdout.write("\r\x1b[K")
            self._drawn = ""


class _Following:
    """Prints the output of one job until the job ends.

    If the log is truncated, removed or replaced, or if a new attempt has a new log, the output continues. ``once``:
    stop at the end of the current attempt.
    """

    def __init__(self, client: SchedulerClient, job: Job, printer: Printer, once: bool) -> None:
        self.client, self.job, self.printer, self.once = client, job, printer, once
        self.number, self.attempt = job.id, job.attempt
        self.path, self.near = "", ""
        self.log: LogReader | None = None
        self.ever_read = False
        self.waits_said = -1  # number of the attempt after which the reason to wait was printed

    def run(self, most: int | None) -> None:
        """Print the logs until the job ends.

        Raises NoDaemon if the job waits and no scheduler runs, and SchedulerError if the job ends without a log.
        """
        try:
            while True:
                over = self._look()
                self._read(most)
                if self.log is not None:
                    most = None
                    self.printer.caught_up()
                if over:
                    break
                self._say_why_it_waits()
                self.printer.draw()
                time.sleep(EVERY_S)
            self.printer.end(self.log)
        finally:
            self._close()
        if not self.ever_read:
            if self.job.log:
                _opened(self.job.log, self.printer).close()  # raises the error that says why
            raise SchedulerError(
                f"job {self.number} has no log: it is {self.job.state.value}", do=f"see gpujob why {self.number}"
            )

    def _look(self) -> bool:
        """Read the job's state. If a new attempt has a log, switch to that log. Return True if no more output will come.

        Raises NoDaemon if the job waits and no scheduler runs.
        """
        try:
            self.job = job = self.client.states([self.number])[0]
        except NotFound:
            self.printer.say(f"job {self.number} has ended and was forgotten in the meantime")
            return True
        if job.log and job.log != self.path:
            if self.once and job.attempt != self.attempt:
                return True
            if self.path:
                self._read(None)
                self.printer.end(self.log)
                self.printer.say(f"job {self.number} runs again: attempt {job.attempt}, {render.near(job.log)}")
            self._close()
            self.path, self.near, self.attempt = job.log, render.near(job.log), job.attempt
        if job.state.ended or (self.once and job.state is JobState.PENDING and bool(job.log)):
            return True
        if self.client.alive():
            return False
        if job.state is JobState.PENDING:
            self._read(None)
            raise NoDaemon(f"job {self.number} waits, and no scheduler is running", do=self.client.to_start)
        if not job.runner_kind.owns_gpus:
            return False  # its node writes the log, and its attempt record tells its end
        if job.process is None or not _lives(job.process):
            self.printer.say(
                f"no scheduler is running; job {self.number} has ended, and the next start of the scheduler records how "
                "it ended"
            )
            return True
        self.printer.say(f"no scheduler is running; job {self.number} continues without it")
        return False

    def _say_why_it_waits(self) -> None:
        """Print why the job waits. Do this once per attempt, and only after the scheduler has considered the job."""
        if self.job.state is not JobState.PENDING or self.waits_said == self.job.attempt:
            return
        job, reason, _ = self.client.job(self.number)
        if job.state is JobState.PENDING and reason is not None and reason.code != "new":
            self.waits_said = job.attempt
            if self.path:
                self.printer.end(self.log)
            after = f"attempt {job.attempt} is over; " if job.attempt else ""
            self.printer.say(f"{after}job {job.id} waits ({reason.code}): {reason.sentence}")

    def _read(self, most: int | None) -> None:
        """Print new output, and handle a log that was removed or replaced."""
        log = self.log or (self._begin(most) if self.path else None)
        if log is None:
            return
        self._read_on(log)
        try:
            replaced = log.is_replaced()
        except OSError as error:
            self.printer.say(
                f"{self.near} was removed or moved ({error.strerror}); what the job writes into it is still shown"
            )
            return
        if replaced:
            self._read_on(log)
            self.printer.end(log)
            self.printer.say(f"{self.near} was replaced; following the new file from its start")
            self._close()
            if (log := self._begin(None)) is not None:
                self._read_on(log)

    def _begin(self, most: int | None) -> LogReader | None:
        try:
            self.log = log = _opened(self.path, self.printer)
        except SchedulerError as error:
            if self.job.state.holds_gpus and self.job.began:
                self.printer.say(f"{error}; waiting for a new log")
            return None
        self.ever_read = True
        self.printer.begin(log, most)
        return log

    def _read_on(self, log: LogReader) -> None:
        if log.is_cut():
            self.printer.end(log)
            self.printer.say(f"{self.near} was truncated; following it from its start")
            log.restart()
        for data in log.new():
            self.printer.feed(data)

    def _close(self) -> None:
        if self.log is not None:
            self.log.close()
            self.log = None


def _lives(process: Process) -> bool:
    """Return whether this process (pid and start time) still runs.

    Used while no scheduler runs, because nobody then updates the job's state.
    """
    return ticks_of(process.pid) == process.ticks
