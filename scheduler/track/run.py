"""Runs tracked commands to their ends: claims, starts, watches and records them, and stops them after a signal."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from scheduler.core.errors import SchedulerError
from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch, Streams
from scheduler.core.observations import Ended, Gone, Lost, NeverRan, Observation, Started, Unclaimed
from scheduler.runners.direct import DirectRunner
from scheduler.system.log_reader import LogReader
from scheduler.system.proc import boot_id
from scheduler.system.process_search import members
from scheduler.system.processes import Mark, seen
from scheduler.track import plan
from scheduler.track.plan import Command, Session, TrackerProcess
from scheduler.track.session import Tracker, is_abandoned

FLUSH_S = 5.0  # seconds after which a command's new output is saved in the session file
EVERY_S = 0.05  # seconds between two looks at a command's log
CHUNK = 1 << 16
MOST_BEHIND = 1 << 20  # bytes of an interrupted command's output to show if more is not shown yet
ONCE_S = 0.2  # a SIGINT within this time after the first signal comes from the same Ctrl-C
SOFT_S, HARD_S = 2.0, 3.5  # seconds after a signal: SIGTERM, SIGKILL to the remaining processes
AGAIN_S = 0.1
SHORT_WAIT_S = 0.3  # seconds to wait for the session's lock while a command has to be watched
UNKILLABLE_S = 10.0  # after this time the tracker no longer waits for a process that survives SIGKILL
MOST_STARTS = 3
GONE = (errno.EPIPE, errno.EIO)  # errors of a write if the reader or the terminal is gone
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Show = Callable[[bytes], None]
Pick = Callable[[Session], "Command | None"]


class Gives(Protocol):
    """Interface of an object that gives the tracker's stdin to commands (`client/foreground_caller.py: Caller`)."""

    @property
    def word(self) -> str:
        """Text ``PID TICKS PATH``: the process that gives stdin, its start time, and the path of its socket.

        The supervisor needs these three values to fetch the descriptor of stdin.
        """

    def close(self) -> None:
        """Give stdin to no further command."""


class Signals:
    """Context in which a signal does not end the tracker, but is only recorded, because the command must end first.

    ``keep``: if True, SIGHUP is ignored. A signal that was ignored when the tracker started (by nohup, or by a shell
    for a background process) stays ignored.
    """

    def __init__(self, keep: bool) -> None:
        self.caught: list[int] = []
        self.keep = keep
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self.read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                ignored = self.keep and number == signal.SIGHUP
                self._before[number] = signal.signal(number, signal.SIG_IGN if ignored else self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.read)
        os.close(self._write)
        self._write = -1  # a follower that a terminal still blocks must not write into a reused descriptor

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.caught.append(number)

    def hang_up(self) -> None:
        """Treat a failed write to stdout like a SIGHUP. Called by the thread whose write failed."""
        if not self.caught:  # otherwise a signal has already asked the tracker to end
            self.caught.append(signal.SIGHUP)
            self.wake()

    def wake(self) -> None:
        """Wake the main loop."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def emptied(self) -> None:
        """Read all bytes out of the wake-up pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.read, 4096)


class Follower(threading.Thread):
    """Thread that shows a log as it grows. A blocked terminal blocks only this thread, and not the tracker.

    ``at``: offset in bytes at which the thread begins to read the log.
    """

    def __init__(self, path: str, at: int, show: Show) -> None:
        super().__init__(name="gpujob-follower", daemon=True)
        self.path, self.at, self.show = path, at, show
        self._over, self._cut = threading.Event(), False

    def run(self) -> None:
        """Show the log until `finish` was called and the whole log is shown."""
        with contextlib.suppress(OSError):  # no log, an unreadable log, or no reader of our output
            with LogReader(self.path, unpack=False, ours=True) as log:
                log.at = self.at
                while True:
                    over = self._over.is_set()
                    self._new(log)
                    if over:
                        return
                    self._over.wait(EVERY_S)

    def _new(self, log: LogReader) -> None:
        size = log.size  # a fixed end: the command may write faster than we show
        if size < log.at:  # it was truncated
            log.restart()
        while (behind := size - log.at) > 0:
            if self._cut and behind > MOST_BEHIND:
                log.at = size - MOST_BEHIND
                text = b"\n... %d MB not shown; the whole log: %b\n"
                self.show(text % ((behind - MOST_BEHIND) >> 20, os.fsencode(self.path)))
            before = log.at
            for data in log.new(until=min(size, before + CHUNK)):
                self.show(data)
            if log.at == before:  # truncated in the meantime
                return

    def finish(self, cut: bool) -> None:
        """Tell the thread that the command has ended.

        ``cut``: if more than `MOST_BEHIND` bytes of the log are not shown yet, show only the last `MOST_BEHIND` bytes.
        """
        self._cut = cut
        self._over.set()


class Foreground:
    """Runs commands of a session in the foreground. ``keep``: see `Signals`.

    ``show``: called with the output of commands. ``begun``: called with each command that is started or adopted.
    ``gives``: called with the log folder; returns the `Gives` object that passes stdin to the commands, or None if the
    commands get no stdin.
    """

    def __init__(
        self, tracker: Tracker, *, keep: bool, show: Show, begun: Callable[[Command], None], gives: Callable[[str], Gives | None]
    ) -> None:  # fmt: skip
        self.tracker, self.show, self.begun = tracker, show, begun
        self.signals = Signals(keep)
        self._gives = gives
        self._giver: Gives | None = None
        self._runner: DirectRunner | None = None
        me = seen(os.getpid())
        assert me is not None
        self.me = TrackerProcess(Process(me.pid, me.ticks), boot_id())

    def __enter__(self) -> Foreground:
        self.signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()
        if self._giver is not None:
            self._giver.close()
        self.signals.__exit__()

    @property
    def ending_signal(self) -> int:
        """Number of the signal that asked the tracker to end; 0 if no signal has arrived."""
        return self.signals.caught[0] if self.signals.caught else 0

    @property
    def runner(self) -> DirectRunner:
        """The tracker's own runner and supervisor, created at the first use."""
        if self._runner is None:
            folder = self.tracker.files.make_folder(self.tracker.name)
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            errors = os.path.join(folder, "supervisor.err")
            path = self.tracker.files.path(self.tracker.name)
            self._runner = DirectRunner(folder, path, os.environ, errors, files, plan.MARK_NAMES)
            self._giver = self._gives(folder)
        return self._runner

    # -- a command ----------------------------------------------------------------------------------------

    def run(self, pick: Pick, *, skip_errors: bool = False) -> Command | None:
        """Run the command that ``pick`` chooses. After its end, return the command with its new state.

        Return None if ``pick`` finds no command. ``skip_errors``: if the command fails, mark it as skipped. Raises
        SchedulerError, OSError.
        """
        runner = self.runner
        command = self._claim(pick)
        if command is None:
            return None
        self.begun(command)
        return _Run(self, runner, command, skip_errors).until_ended(self._start)

    def adopt(self, number: int, *, skip_errors: bool = False) -> Command | None:
        """Adopt a command whose tracker was killed, watch it to its end, and return it with its new state.

        Return None if the command has ended in the meantime or another tracker has it. Raises SchedulerError, OSError.
        """
        with self.tracker.files.changing(self.tracker.name) as session:
            command = session.command(number)
            if not is_abandoned(command):
                return None
            command.tracker = self.me
            shown = _size(self.tracker.log(command))  # bytes shown by the previous tracker
        self.begun(command)
        return _Run(self, self.runner, command, skip_errors).until_ended(None, max(0, shown))

    def _claim(self, pick: Pick) -> Command | None:
        """Claim the command that ``pick`` chooses, under the lock, so that no two trackers claim the same command."""
        with self.tracker.files.changing(self.tracker.name) as session:
            self.tracker.settle(session)
            command = pick(session)
            if command is not None:
                self._take_up(command)
        return command

    def _take_up(self, command: Command) -> None:
        attempt = command.job.attempt + 1
        while any(os.path.lexists(f"{self.tracker.log_folder}/{command.id}.{attempt}{end}") for end in ("", ".log")):
            attempt += 1  # files of this attempt exist: the session file is an old copy
        plan.claim(command, self.me, attempt, time.time())

    def claim_new_attempt(self, number: int, observation: Observation) -> Command:
        """Claim a new attempt of a command, and record that its last attempt never began.

        ``observation``: the observation which says that the last attempt never began.
        """
        with self.tracker.files.changing(self.tracker.name) as session:
            command = session.command(number)
            plan.take(command, observation)
            self._take_up(command)
        return command

    def _start(self, command: Command) -> None:
        job, log = command.job, self.tracker.log(command)
        values = (str(job.id), str(job.attempt), self.tracker.files.path(self.tracker.name))
        environment: dict[str, str | None] = dict(zip(plan.MARK_NAMES, values, strict=True))
        if "PYTHONUNBUFFERED" not in os.environ:
            environment["PYTHONUNBUFFERED"] = "1"  # without a terminal, Python would write its output in blocks
        words = ("/bin/sh", "-c", command.text)
        caller = None
        if self._giver is not None:
            pid, ticks, path = self._giver.word.split(" ", 2)
            caller = (int(pid), int(ticks), path)
        folder = os.path.normpath(os.path.join(self.tracker.files.root, job.spec.cwd))
        launch = Launch(job.attempt_key, words, environment, folder, log, words=words, streams=Streams(caller=caller))
        self.runner.start(job, launch)
        self.runner.flush()


class _Run:
    """The run of one command, from its start or adoption until its end is recorded."""

    def __init__(self, at: Foreground, runner: DirectRunner, command: Command, skip_errors: bool) -> None:
        self.at, self.runner, self.command, self.skip_errors = at, runner, command, skip_errors
        self.tracker, self.signals = at.tracker, at.signals
        self.follower: Follower | None = None
        self.ending: Observation | None = None  # recorded once no process of the command has to be waited for
        self.waits_for_rest = False
        self.starts = 0
        self.heard = 0  # number of signals handled
        self.stopped_at = 0.0
        self.steps: list[tuple[float, bool]] = []  # next signals: monotonic seconds, and whether it is SIGKILL
        self.flushed, self.size = time.monotonic(), -1

    @property
    def job(self) -> Job:
        return self.command.job

    def until_ended(self, start: Callable[[Command], None] | None, shown: int = 0) -> Command:
        """Start or adopt the command, watch it until its end is recorded, and return it.

        ``start``: function that starts the command; None: adopt the command. ``shown``: number of bytes of the
        command's log that were shown before. Raises SchedulerError, OSError. After an error the supervisor still writes
        the end to the attempt record, and the next call of `track` reads it there.
        """
        self.start = start
        if start is not None:
            self.starts = 1
            start(self.command)
            observations: list[Observation] = []
        else:
            self._follow(shown)
            observations = self.runner.adopt(self.job)
        while True:
            for observation in observations:
                self._hear(observation)
            if self.ending is not None and not self.waits_for_rest and not self._left():
                break
            self._act_on_signals()
            self._give_up()
            self._flush()
            self._wait()
            observations = self.runner.look()
        return self._record()

    def _wait(self) -> None:
        due = [self.flushed + FLUSH_S, *(when for when, _ in self.steps[:1])]
        look = self.runner.next_look()
        if look is not None:
            due.append(look)
        if self.ending is not None:
            due.append(time.monotonic() + EVERY_S)
        poll = select.poll()
        for fd in (*self.runner.descriptors(), self.signals.read):
            poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, min(due) - time.monotonic()) * 1000)
        self.signals.emptied()

    # -- observations of the runner -----------------------------------------------------------------------

    def _hear(self, observation: Observation) -> None:
        if isinstance(observation, Gone):
            self.waits_for_rest = self.waits_for_rest and observation.key != self.job.attempt_key
            return
        if not plan.is_of(observation, self.job):
            return
        if isinstance(observation, Started):
            plan.take(self.command, observation)
            self._follow(0)
            self._save(lambda command: plan.take(command, observation))
            if self.steps:  # a signal came before the pid was known
                self.runner.stop([(self.job, False)], self.signals.caught[0])
        elif (
            isinstance(observation, Unclaimed)
            and not self.heard
            and self.start is not None
            and self.starts < MOST_STARTS
        ):
            self.starts += 1
            self.command = self.at.claim_new_attempt(self.command.id, observation)
            self.start(self.command)
        else:
            self.ending = observation
            if isinstance(observation, Unclaimed) and not self.heard:
                why = "its supervisor ended several times before it started the command"
                self.ending = NeverRan(self.job.id, self.job.attempt, why, False, time.time())
            elif isinstance(observation, (Ended, Lost)) and not self.tracker.is_written_down(self.command):
                self.ending = self.tracker.dated(self.command, observation)
                self.waits_for_rest = bool(
                    observation.leftovers
                )  # leftover processes live: the next command must wait for their end
            if isinstance(observation, (Ended, Lost)) and observation.leftovers:
                self.runner.watch_leftovers(self.job.attempt_key, self.job.id, self.job.attempt, observation.leftovers)
                if self.heard:  # leftover processes without the mark are known only now
                    self._tell(self.signals.caught[0])

    def _follow(self, at: int) -> None:
        if self.follower is None:
            self.follower = Follower(self.tracker.log(self.command), at, self._show)
            self.follower.start()

    def _show(self, data: bytes) -> None:
        try:
            self.at.show(data)
        except OSError as error:
            if error.errno in GONE and not self.signals.keep:
                self.signals.hang_up()
            raise  # ends the follower

    # -- signals and stopping -----------------------------------------------------------------------------

    def _act_on_signals(self) -> None:
        """Pass the first signal on to the command. If processes of the command survive, send SIGTERM and later SIGKILL.

        A second Ctrl-C sends SIGKILL immediately.
        """
        now = time.monotonic()
        if len(self.signals.caught) > self.heard:
            first, more = self.heard == 0, self.signals.caught[self.heard :]
            self.heard += len(more)  # not len(caught): a signal may have arrived since `more` was read
            if first:
                number = self.signals.caught[0]
                self.stopped_at = now
                self.steps = [(now + SOFT_S, False), (now + HARD_S, True)]
                self._tell(number)
                why = f"interrupted by {signal.Signals(number).name}"
                plan.stop_asked(self.command, why, time.time())
                self._save(lambda command: plan.stop_asked(command, why, time.time()))
            elif signal.SIGINT in more and now - self.stopped_at > ONCE_S and not all(hard for _, hard in self.steps):
                self.steps = [(now, True)]
        while self.steps and self.steps[0][0] <= now:
            _, hard = self.steps.pop(0)
            self._tell(signal.SIGKILL if hard else signal.SIGTERM)
            if hard and not self.steps:
                self.steps = [(now + AGAIN_S, True)]  # for processes forked in the meantime

    def _give_up(self) -> None:
        """Raise SchedulerError if the command survives SIGKILL; `status` then shows the command as running."""
        if self.ending is None and self.heard and time.monotonic() - self.stopped_at > UNKILLABLE_S:
            which = f" (pid {self.job.process.pid})" if self.job.process is not None else ""
            what = f"cannot end command {self.job.id}{which}: it survives SIGKILL"
            raise SchedulerError(what, do="see later whether it has ended: gpujob track status")

    def _tell(self, number: int) -> None:
        self.runner.stop([(self.job, number == signal.SIGKILL)], number)

    def _left(self) -> bool:
        """Return whether to wait longer for processes of the command that got a signal and still live.

        Return False if no signal was sent. Also return False, even if processes still live, once the first signal was
        sent more than `UNKILLABLE_S` seconds ago.
        """
        if not self.heard or time.monotonic() - self.stopped_at > UNKILLABLE_S:
            return False
        mark = Mark(self.job.id, self.job.attempt, self.tracker.files.path(self.tracker.name), plan.MARK_NAMES)
        known = self.ending.leftovers if isinstance(self.ending, (Ended, Lost)) else ()
        return bool(members(mark, self.job.process, known))

    # -- session file -------------------------------------------------------------------------------------

    def _save(self, change: Callable[[Command], None]) -> None:
        """Apply ``change`` to the command in the session file.

        Errors are ignored, because the attempt record and the log contain the same facts.
        """
        with contextlib.suppress(OSError, SchedulerError):
            with self.tracker.files.changing(self.tracker.name, SHORT_WAIT_S) as session:
                change(session.command(self.command.id))

    def _flush(self) -> None:
        now = time.monotonic()
        if now < self.flushed + FLUSH_S:
            return
        self.flushed = now
        size = _size(self.tracker.log(self.command))
        if size != self.size:
            self.size = size
            output = self.tracker.last_output(self.command)
            self._save(lambda command: setattr(command, "last_output", output))

    def _record(self) -> Command:
        assert self.ending is not None
        ending, stopped = self.ending, self.command.job.stop_why
        output = self.tracker.last_output(self.command)
        try:
            with self.tracker.files.changing(self.tracker.name) as session:
                command = session.command(self.command.id)
                if stopped:
                    plan.stop_asked(command, stopped, time.time())  # in case `_save` failed
                plan.take(command, ending, skip_errors=self.skip_errors)
                if command.job.attempt == self.job.attempt:
                    command.last_output = output
        except (OSError, SchedulerError) as error:
            why = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)
            what = f"cannot record the end of command {self.job.id}: {why}"
            raise SchedulerError(what, do="remove the cause, then see how it ended: gpujob track status") from None
        if self.follower is None and not isinstance(ending, Unclaimed):
            self._follow(0)
        if self.follower is not None:
            self._all_shown(self.follower)
        return command

    def _all_shown(self, follower: Follower) -> None:
        """Wait until the follower has shown the part of the log that is not shown yet.

        A new signal ends the wait. If a signal came before this call, the wait lasts `HARD_S` seconds at most.
        """
        follower.finish(cut=bool(self.heard))
        until = time.monotonic() + HARD_S
        while follower.is_alive():
            follower.join(EVERY_S)
            if len(self.signals.caught) > self.heard or (self.heard and time.monotonic() > until):
                return


def _size(path: str) -> int:
    """Return the size of a file in bytes, -1 if there is no file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
