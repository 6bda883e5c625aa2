"""Runs tracked commands one after another to their ends: claims, starts, watches, records, and ends them when told to."""

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
from scheduler.system.processes import Mark, members, seen
from scheduler.track import plan
from scheduler.track.plan import Command, Session, TrackerProcess
from scheduler.track.session import Tracker, left_alone

FLUSH_S = 5.0  # so often at least what a command has written last is saved
EVERY_S = 0.05  # so often its log is looked at
CHUNK = 1 << 16
MOST_BEHIND = 1 << 20  # of what a command wrote that was interrupted: so much of it is still shown
ONCE_S = 0.2  # what comes so soon after the first is the same Ctrl-C, told twice
SOFT_S, HARD_S = 2.0, 3.5  # after a signal: SIGTERM, SIGKILL to what is left
AGAIN_S = 0.1
SHORT_WAIT_S = 0.3  # so long somebody who holds the files keeps us from the command
UNKILLABLE_S = 10.0  # what does not even end by SIGKILL is left to the kernel
MOST_STARTS = 3
GONE = (errno.EPIPE, errno.EIO)  # what writing says when nobody will ever read
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Show = Callable[[bytes], None]
Pick = Callable[[Session], "Command | None"]


class Gives(Protocol):
    """Somebody who gives the command our stdin."""

    @property
    def word(self) -> str:
        """How the supervisor finds him."""

    def close(self) -> None:
        """He gives no more."""


class Signals:
    """While it is entered, signals that would end us are noted, for the command has to end first.

    ``keep``: SIGHUP is none of them. What was ignored when we were started stays so (nohup, a shell's background).
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
        self._write = -1  # a thread that is still held up by a terminal must not write into whatever gets its number

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.caught.append(number)

    def hang_up(self) -> None:
        """Nobody takes our output any more: as if the terminal had said so. Called by the thread that found it out."""
        if not self.caught:  # else it is our end, or that of our reader, which it already knows of
            self.caught.append(signal.SIGHUP)
            self.wake()

    def wake(self) -> None:
        """Have the loop look."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def emptied(self) -> None:
        """Take the wake-ups away."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.read, 4096)


class Follower(threading.Thread):
    """Shows a log as it grows, in a thread of its own: a terminal that takes nothing must not hold up the rest."""

    def __init__(self, path: str, at: int, show: Show) -> None:
        super().__init__(name="gpujob-follower", daemon=True)
        self.path, self.at, self.show = path, at, show
        self._over, self._cut = threading.Event(), False

    def run(self) -> None:
        """Until the command is over, and all is shown."""
        with contextlib.suppress(OSError):  # it cannot be read: the command had no log, or somebody removed it
            with LogReader(self.path, unpack=False, ours=True) as log:
                log.at = self.at
                while True:
                    over = self._over.is_set()
                    self._new(log)
                    if over:
                        return
                    self._over.wait(EVERY_S)

    def _new(self, log: LogReader) -> None:
        size = log.size  # not more in one go: somebody may write faster than we show
        if size < log.at:  # somebody cut it
            log.restart()
        while (behind := size - log.at) > 0:
            if self._cut and behind > MOST_BEHIND:
                log.at = size - MOST_BEHIND
                text = b"\n... %d MB not shown; all of it: %b\n"
                self.show(text % ((behind - MOST_BEHIND) >> 20, os.fsencode(self.path)))
            before = log.at
            for data in log.new(until=min(size, before + CHUNK)):
                self.show(data)
            if log.at == before:  # cut meanwhile
                return

    def finish(self, cut: bool) -> None:
        """The command is over; ``cut``: and nobody waits for all that it wrote."""
        self._cut = cut
        self._over.set()


class Foreground:
    """A tracker at work. ``show``: takes what commands write; ``gives``: makes who gives them our stdin, in a folder.

    ``begun`` is told of each command that is run.
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
    def told_to_end(self) -> int:
        """The signal that ends us; 0 while none came."""
        return self.signals.caught[0] if self.signals.caught else 0

    @property
    def runner(self) -> DirectRunner:
        """Ours, with a supervisor of its own; made when it is needed."""
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
        """Run the command that ``pick`` chooses of the session, to its end; how it is then. None: there is none.

        Raises SchedulerError, OSError.
        """
        runner = self.runner
        command = self._claim(pick)
        if command is None:
            return None
        self.begun(command)
        return _Run(self, runner, command, skip_errors).until_ended(self._start)

    def adopt(self, number: int, *, skip_errors: bool = False) -> Command | None:
        """Watch a command whose tracker was killed to its end. None: it has ended, or somebody has it.

        Raises SchedulerError, OSError.
        """
        with self.tracker.files.changing(self.tracker.name) as session:
            command = session.command(number)
            if not left_alone(command):
                return None
            command.tracker = self.me
            shown = _size(self.tracker.log(command))  # by who watched it before us
        self.begun(command)
        return _Run(self, self.runner, command, skip_errors).until_ended(None, max(0, shown))

    def _claim(self, pick: Pick) -> Command | None:
        """Taken under the lock, so no two trackers ever take the same."""
        with self.tracker.files.changing(self.tracker.name) as session:
            self.tracker.settle(session)
            command = pick(session)
            if command is not None:
                self._take_up(command)
        return command

    def _take_up(self, command: Command) -> None:
        attempt = command.job.attempt + 1
        while any(os.path.lexists(f"{self.tracker.log_folder}/{command.id}.{attempt}{end}") for end in ("", ".log")):
            attempt += 1  # the session's file is an old copy
        plan.claim(command, self.me, attempt, time.time())

    def claim_again(self, number: int, observation: Observation) -> Command:
        """The supervisor was killed before it began, as the observation tells: another attempt at the same command."""
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
            environment["PYTHONUNBUFFERED"] = "1"  # else a script's output comes in blocks, for it sees no terminal
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
    """One command from its start, or its adoption, to its recorded end."""

    def __init__(self, at: Foreground, runner: DirectRunner, command: Command, skip_errors: bool) -> None:
        self.at, self.runner, self.command, self.skip_errors = at, runner, command, skip_errors
        self.tracker, self.signals = at.tracker, at.signals
        self.follower: Follower | None = None
        self.ending: Observation | None = None  # what is to be recorded once nothing of the command is left
        self.waits_for_rest = False
        self.starts = 0
        self.heard = 0  # signals that were acted on
        self.stopped_at = 0.0
        self.steps: list[tuple[float, bool]] = []  # when, and whether by SIGKILL, what is left is told next
        self.flushed, self.size = time.monotonic(), -1

    @property
    def job(self) -> Job:
        return self.command.job

    def until_ended(self, start: Callable[[Command], None] | None, shown: int = 0) -> Command:
        """``start``: how it is begun, if it is not adopted; ``shown``: so much of its log is not shown (again).

        Raises SchedulerError, OSError: then how it ended stands in its record, and the next look finds it there.
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

    # -- what the runner tells ----------------------------------------------------------------------------

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
            if self.steps:  # told to end before it was known who it is
                self.runner.stop(self.job, hard=False, soft=self.signals.caught[0])
        elif (
            isinstance(observation, Unclaimed)
            and not self.heard
            and self.start is not None
            and self.starts < MOST_STARTS
        ):
            self.starts += 1
            self.command = self.at.claim_again(self.command.id, observation)
            self.start(self.command)
        else:
            self.ending = observation
            if isinstance(observation, Unclaimed) and not self.heard:
                why = "its supervisor ended before it could start it, several times"
                self.ending = NeverRan(self.job.id, self.job.attempt, why, False, time.time())
            elif isinstance(observation, (Ended, Lost)) and not self.tracker.is_written_down(self.command):
                self.ending = self.tracker.dated(self.command, observation)
                self.waits_for_rest = bool(
                    observation.leftovers
                )  # something of it lives on, so it is no one's turn yet
            if isinstance(observation, (Ended, Lost)) and observation.leftovers:
                self.runner.watch_leftovers(self.job.attempt_key, self.job.id, self.job.attempt, observation.leftovers)
                if self.heard:  # what showed no mark is known only now
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
            raise  # nothing more is shown

    # -- ending it ----------------------------------------------------------------------------------------

    def _act_on_signals(self) -> None:
        """The first is passed on at once, sharper ones follow; Ctrl-C once more kills."""
        now = time.monotonic()
        if len(self.signals.caught) > self.heard:
            first, more = self.heard == 0, self.signals.caught[self.heard :]
            self.heard += len(more)  # not the length of now: one more may have come since
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
                self.steps = [(now + AGAIN_S, True)]  # who was forked meanwhile

    def _give_up(self) -> None:
        """Raises SchedulerError for a command that does not end: it is running, so that is what `status` shows."""
        if self.ending is None and self.heard and time.monotonic() - self.stopped_at > UNKILLABLE_S:
            which = f" (pid {self.job.process.pid})" if self.job.process is not None else ""
            what = f"command {self.job.id}{which} does not end, not even by SIGKILL"
            raise SchedulerError(what, do="see when it has: gpujob track status")

    def _tell(self, number: int) -> None:
        self.runner.stop(self.job, hard=number == signal.SIGKILL, soft=number)

    def _left(self) -> bool:
        """Whether processes of an interrupted command are still there. One that ended by itself may leave some behind."""
        if not self.heard or time.monotonic() - self.stopped_at > UNKILLABLE_S:
            return False
        mark = Mark(self.job.id, self.job.attempt, self.tracker.files.path(self.tracker.name), plan.MARK_NAMES)
        known = self.ending.leftovers if isinstance(self.ending, (Ended, Lost)) else ()
        return bool(members(mark, self.job.process, known))

    # -- what is written ----------------------------------------------------------------------------------

    def _save(self, change: Callable[[Command], None]) -> None:
        """Write down something on the way; where that cannot be, it is known by the record."""
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
                    plan.stop_asked(command, stopped, time.time())  # if that could not be written before
                plan.take(command, ending, skip_errors=self.skip_errors)
                if command.job.attempt == self.job.attempt:
                    command.last_output = output
        except (OSError, SchedulerError) as error:
            why = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)
            what = f"command {self.job.id} has ended, but that could not be written down: {why}"
            raise SchedulerError(what, do="its record tells how: gpujob track status") from None
        if self.follower is None and not isinstance(ending, Unclaimed):
            self._follow(0)
        if self.follower is not None:
            self._all_shown(self.follower)
        return command

    def _all_shown(self, follower: Follower) -> None:
        """Let it show the rest; a terminal that takes nothing is waited for until somebody wants us to end."""
        follower.finish(cut=bool(self.heard))
        until = time.monotonic() + HARD_S
        while follower.is_alive():
            follower.join(EVERY_S)
            if len(self.signals.caught) > self.heard or (self.heard and time.monotonic() > until):
                return


def _size(path: str) -> int:
    """-1 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
