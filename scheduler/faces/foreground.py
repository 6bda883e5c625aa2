"""A job in the foreground: it gets descriptors of its caller, who stays until it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

from scheduler.core.errors import NoDaemon, SchedulerError
from scheduler.core.requests import Cancel
from scheduler.desk import Desk
from scheduler.proc import ticks_of

EVERY_S = 0.1


class Caller:
    """This process as the one that waits for a job in the foreground: gives it our stdin, and with ``output`` the other two.

    A socket in the scheduler's private folder, where the keeper asks for them. Raises SchedulerError.
    """

    def __init__(self, desk: Desk, *, output: bool) -> None:
        desk.places.make()
        self.path = os.path.join(desk.places.house, f"caller-{os.getpid()}-{os.urandom(4).hex()}")
        self._given = (0, 1, 2) if output else (0,)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(desk.places.house, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{folder}/{os.path.basename(self.path)}")  # else it may be too long a path
        except OSError as error:
            raise SchedulerError(f"a socket cannot be made: {error.strerror}", where=self.path) from None
        finally:
            os.close(folder)
        self._socket.listen()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for that thread: Ctrl-C is for this one
        threading.Thread(target=self._give, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hold_ctrl_c(self) -> None:
        """Let it wait for `Interrupts`, or `close`: until then nobody knows what it has to end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def let_ctrl_c(self) -> None:
        """Ctrl-C ends us again: there is no job yet."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @property
    def word(self) -> str:
        """What JobSpec.caller says of it."""
        return f"{os.getpid()} {ticks_of(os.getpid())} {self.path}"

    def _give(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:
                return  # closed: it has begun, or will not
            with asking, contextlib.suppress(OSError):  # asked again, if it was not there to take them
                socket.send_fds(asking, [bytes(self._given)], list(self._given))

    def close(self) -> None:
        """Nobody is asked for any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket.close()
        self.let_ctrl_c()


class Interrupts:
    """While it is entered, Ctrl-C goes to the job: one that waits is cancelled, a running one is told as by its terminal."""

    def __init__(self, desk: Desk, number: int) -> None:
        self.desk, self.number = desk, number
        self.cancelled = False  # before it ran

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pass_on(self, _number: int, _frame: FrameType | None) -> None:
        job = self.desk.begun(self.number)
        if job is None or job.state.ended:
            return
        if job.process is not None and ticks_of(job.process.pid) == job.process.ticks:
            os.killpg(job.process.pid, signal.SIGINT)  # it leads a group of its own
            return
        from scheduler.faces.cli.control import do

        self.cancelled = True
        try:
            do(self.desk, Cancel((self.number,)))
        except SchedulerError as error:  # one starts or ends this moment: Ctrl-C can be pressed again
            print(f"gpujob: {error}", file=sys.stderr)


def stay(desk: Desk, number: int, caller: Caller) -> int:
    """Wait for a foreground job, whatever becomes of the scheduler: it has our descriptors, or will ask for them.

    Its exit code, or 130 if it was given up by Ctrl-C before it ran.
    """
    from scheduler.faces.cli.control import wait_for

    said = False
    with contextlib.closing(caller), Interrupts(desk, number) as interrupts:
        while True:
            try:
                code = wait_for(desk, (number,), None, time.monotonic())
                break
            except NoDaemon:
                if not said:
                    said_once = (
                        f"gpujob: no scheduler is running; staying with job {number} until one is started: gpujob start"
                    )
                    print(said_once, file=sys.stderr)
                said = True
                time.sleep(EVERY_S)
    return 130 if interrupts.cancelled else code
