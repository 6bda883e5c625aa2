"""The verb `lease`: GPUs for interactive work."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduler.core.errors import NoGpuData, Refused, UsageError, said
from scheduler.core.gpu import WHOLE, is_are, named_gpus, parse_gpu_ids
from scheduler.core.job import Process
from scheduler.core.take_turns import PATIENCE_S
from scheduler.core.units import seconds_of, span_text
from scheduler.system.forked_command import need_own_process
from scheduler.system.processes import become_subreaper
from scheduler.views.render import safe

if TYPE_CHECKING:
    from scheduler.client.lease_booking import Lease
    from scheduler.core.gpu_snapshot import GpuSnapshot

WARN_S = 600.0  # before the end of the lease, or a sixth of its time if that is less
KILL_S = 15.0  # from SIGTERM to SIGKILL
AGAIN_S = 1.0  # between two tries to get GPUs
SAMPLE_S = 15.0  # between two readings for --idle
NOT_BUSY = 0.05  # load at or below which a GPU counts as idle


def lease(
    command: Sequence[str],
    *,
    gpus: str = "1",
    allowed: str = "",
    for_: str = "",
    idle: str = "",
    wait: bool = True,
    pid: str = "",
) -> int:
    """Book GPUs, run a command on them, and return its exit code (128 + the signal that ended it).

    ``gpus``: number or share of GPUs; ``allowed``: GPU ids; ``for_``, ``idle``: durations; ``wait``: whether to wait
    until GPUs are free; ``pid``: book the GPUs that this process uses, and run nothing. Raises SchedulerError.
    """
    from scheduler.client.lease_booking import Lease, lease_of_process, process_of, request_of
    from scheduler.intake.settings import load

    need_own_process()
    limit = _duration("--for", for_)
    idle_s = _duration("--idle", idle)
    if pid:
        if not (pid.isascii() and pid.isdigit() and len(pid) < 10):
            raise UsageError(f"--pid must be a process id, not {said(pid)}")
        if command or idle:
            raise UsageError("--pid books GPUs for a process that runs already", do="leave out the command and --idle")
        made = lease_of_process(int(pid), os.environ, limit)
        print(f"{_gpus(made)} {is_are(made.gpus)} booked until process {pid} ends{_until(made)}")
        return 0
    kind = request_of(gpus, parse_gpu_ids(allowed) if allowed else None)
    if idle_s is not None:
        _check_load_is_known()
    ignored = load({}, os.environ).config.ignore_users
    made = Lease(
        f"lease-{os.getpid()}", process_of(os.getpid()), os.environ, ignored=tuple(filter(None, ignored.split(",")))
    )
    left: tuple[Process, ...] = ()
    try:
        told, begun = "", time.monotonic()
        while (why := made.try_to_book(kind, limit)) is not None:
            if not wait and (why.code != "fair-share" or time.monotonic() - begun > 2 * PATIENCE_S):
                raise Refused(f"no GPU for a lease now: {why.sentence}", do="without --no-wait gpujob waits for one")
            if why.sentence != told:
                _say(f"waiting for {kind.need.in_words()}: {why.sentence}")
                told = why.sentence
            time.sleep(AGAIN_S)
        _say(f"{_gpus(made)} {is_are(made.gpus)} booked; the lease ends with its command{_until(made)}")
        code = _run(made, list(command), idle_s)
        left = _orphans()
        return code
    finally:
        _end(made, left)


def _duration(option: str, text: str) -> float | None:
    seconds = seconds_of(text) if text else None
    if seconds is not None and seconds <= 0:
        raise UsageError(f"{option} must be more than 0, not {said(text)}")
    return seconds


def _orphans() -> tuple[Process, ...]:
    """Return the processes that the command of the lease has left behind: all descendants of this process."""
    from scheduler.system.processes import seen

    found = [seen(one.pid) for one in _descendants()]
    return tuple(Process(one.pid, one.ticks) for one in found if one is not None and one.alive)


def _descendants() -> list[Any]:
    """Return all descendants of this process, as psutil.Process; the deepest ones last."""
    import psutil

    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def _reap_orphans(command: int) -> None:
    """Reap the children of this process that have ended, except the command of the lease (pid ``command``).

    Orphans of the command become children of this process, because it is the subreaper.
    """
    from scheduler.system.processes import own_children

    for pid in own_children():
        if pid != command:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end(made: Lease, left: tuple[Process, ...]) -> None:
    """End the lease. While processes ``left`` live, its GPUs stay booked. A problem with the folder is only reported."""
    try:
        if left:
            pids = ", ".join(str(one.pid) for one in left)
            _say(f"processes {pids} still run; {_gpus(made)} {is_are(made.gpus)} booked until they end")
        made.end(left)
    except OSError as error:
        _say(f"the end of the lease is not recorded: {error.strerror}")


def _check_load_is_known() -> None:
    from scheduler.client.machine_gpus import machine_gpus

    try:
        machine_gpus(os.environ, None)
    except NoGpuData as error:
        raise Refused(f"--idle needs GPUs whose load can be read: {error.what}", do="leave out --idle") from None


def _gpus(made: Lease) -> str:
    return named_gpus([gpu.index for gpu in made.gpus])


def _until(made: Lease) -> str:
    from scheduler.sharing.bookings_folder import time_of_day

    return "" if made.until is None else f", at the latest at {time_of_day(made.until)}"


def _say(text: str) -> None:
    print(f"gpujob lease: {safe(text)}", file=sys.stderr, flush=True)


class _Command:
    """The command of a lease. It begins only when `begin` is called: until then the booking does not name it.

    ``code``: its exit code, 128 + the signal that ended it; None while it runs. Raises Refused if it cannot be run.
    """

    def __init__(self, words: list[str], environ: dict[str, str]) -> None:
        self.code: int | None = None
        self._words = words
        go, self._go = os.pipe()
        self._failed, failed = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._go)
            try:
                if os.read(go, 1):  # nothing to read: the lease was killed before it named this process
                    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                        signal.signal(number, signal.SIG_DFL)
                    os.execvpe(words[0], words, environ)
            except (OSError, ValueError) as error:
                code = error.errno if isinstance(error, OSError) else None
                os.write(failed, str(code or errno.EINVAL).encode())
            finally:
                os._exit(127)
        os.close(go)
        os.close(failed)
        self.pidfd = os.pidfd_open(self.pid)

    def begin(self) -> None:
        os.write(self._go, b"x")
        os.close(self._go)
        told = os.read(self._failed, 16)
        os.close(self._failed)
        if told:
            self.wait()
            os.close(self.pidfd)
            raise Refused(f"cannot run {self._words[0]}: {os.strerror(int(told))}")

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until the command has ended, at most ``limit_s`` seconds; return whether it has."""
        if self.code is None and (limit_s is None or select.select([self.pidfd], [], [], limit_s)[0]):
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.code = code if code >= 0 else 128 - code
        return self.code is not None

    def end(self, first: signal.Signals) -> None:
        """End the command and its descendants: by ``first`` and SIGTERM, then by SIGKILL."""
        import psutil

        processes = sorted(_descendants(), key=lambda one: one.pid != self.pid)
        for number in dict.fromkeys((first, signal.SIGTERM)):
            for process in processes:
                _signal(process, number)
        until = time.monotonic() + KILL_S
        self.wait(KILL_S)
        others = [one for one in processes if one.pid != self.pid]
        _, left = psutil.wait_procs(others, timeout=max(0.0, until - time.monotonic()))
        for process in [*(one for one in processes if one.pid == self.pid and self.code is None), *left]:
            _signal(process, signal.SIGKILL)
        self.wait()


def _signal(process: Any, number: int) -> None:
    import psutil

    try:
        process.send_signal(number)  # psutil compares the start time first
    except psutil.Error:
        return  # it has ended


def _run(made: Lease, words: list[str], idle_s: float | None) -> int:
    from scheduler.client.lease_booking import process_of

    words = words or [os.environ.get("SHELL") or "/bin/sh"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the exit code of the command would be lost
    become_subreaper()  # so that processes that the command leaves behind are known
    command = _Command(words, {**os.environ, "CUDA_VISIBLE_DEVICES": made.visible(), "GPUJOB_LEASE": made.ids()})
    made.children = (process_of(command.pid),)
    made.publish()
    stopped: list[int] = []
    terminal = _terminal_settings()
    kept = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        # The terminal sends Ctrl-C to the command, too; it decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if kept[number] is not signal.SIG_IGN:  # ignored: for example by nohup
                signal.signal(number, lambda number, _: stopped.append(number))
        command.begin()
        if _watch(made, command, idle_s, stopped) and terminal is not None:
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, terminal)  # a program that was ended may have changed them
    finally:
        for number, before in kept.items():
            signal.signal(number, before)
    os.close(command.pidfd)
    assert command.code is not None
    return command.code


def _terminal_settings() -> list[Any] | None:
    try:
        return termios.tcgetattr(0)
    except termios.error:
        return None  # stdin is no terminal


def _watch(made: Lease, command: _Command, idle_s: float | None, stopped: list[int]) -> bool:
    """Wait for the command; end it when the time is over, when the GPUs are idle, or when this process is told to end.

    Return whether the command was ended here.
    """
    begun = time.monotonic()
    end = None if made.until is None else begun + made.until - made.since
    warn = None if end is None else max(begun, end - min(WARN_S, (end - begun) / 6))
    watcher = _IdleWatch(made, idle_s) if idle_s is not None else None
    while True:
        now = time.monotonic()
        made.stay_published()
        _reap_orphans(command.pid)
        if stopped:
            command.end(signal.Signals(stopped[0]))
            return True
        if end is not None and now >= end:
            _say("the time of the lease is over; its command is ended")
            command.end(signal.SIGHUP)
            return True
        if warn is not None and end is not None and now >= warn:
            _say(f"the lease ends in {span_text(max(1.0, end - now))}")
            warn = None
        if watcher is not None and watcher.is_over(now):
            _say(f"{_gpus(made)} {is_are(made.gpus)} idle; the lease ends")
            command.end(signal.SIGHUP)
            return True
        due = [moment for moment in (end, warn, watcher.due if watcher else None) if moment is not None]
        if command.wait(min([1.0, *(max(0.0, moment - now) for moment in due)])):
            return False


class _IdleWatch:
    """Tells when the GPUs of a lease were idle for a time, and warns before."""

    def __init__(self, made: Lease, limit_s: float) -> None:
        self._made, self._limit = made, limit_s
        self.due = self._busy_at = time.monotonic()
        self._warned = False

    def is_over(self, now: float) -> bool:
        """Read the GPUs if it is due; return whether they were idle for the whole limit."""
        if now < self.due:
            return False
        if self._busy():
            self._busy_at, self._warned = now, False
        idle, told_before = now - self._busy_at, self._warned
        warn_s = min(WARN_S, self._limit / 6)
        if idle >= self._limit - warn_s and not self._warned:
            self._warned = True
            _say(
                f"{_gpus(self._made)} {is_are(self._made.gpus)} idle for {span_text(idle)}; the lease ends in "
                f"{span_text(max(warn_s, self._limit - idle))} unless {'it is' if len(self._made.gpus) == 1 else 'they are'} used"
            )
        self.due = now + min(SAMPLE_S, self._limit / 6)
        return told_before and idle >= self._limit

    def _busy(self) -> bool:
        """Return whether a GPU of the lease is in use, or cannot be read now."""
        from scheduler.client.machine_gpus import machine_gpus

        try:
            found = machine_gpus(os.environ, None)
        except NoGpuData:
            return True
        loads = [_load(found.snapshots.get(gpu.uuid), self._made.parts) for gpu in self._made.gpus]
        return any(load is None or load > NOT_BUSY for load in loads)


def _load(one: GpuSnapshot | None, parts: int) -> float | None:
    """Return the load of a GPU; of a part of a GPU, the load by the processes of this user. None: not known."""
    from scheduler.sharing.bookings_folder import user_name

    if one is None:
        return None
    me, processes = user_name(os.getuid()), one.processes or ()
    if parts == WHOLE or all(process.load is None for process in processes):  # none: there may be no such counter
        return one.load
    return sum(process.load or 0.0 for process in processes if process.user == me)
