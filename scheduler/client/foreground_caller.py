"""Gives this process's stdin, stdout and stderr to a job: the supervisor fetches them from a socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

from scheduler.core.errors import SchedulerError
from scheduler.system.proc import ticks_of


class Caller:
    """This process as the one that waits for a job in the foreground: gives it our stdin, and with ``output`` the other two.

    A socket in ``folder``, a private one, where the supervisor asks for them. Raises SchedulerError.
    """

    def __init__(self, folder: str, *, output: bool) -> None:
        self.path = os.path.join(folder, f"caller-{os.getpid()}-{os.urandom(4).hex()}")
        self._given = (0, 1, 2) if output else (0,)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{place}/{os.path.basename(self.path)}")  # else it may be too long a path
        except OSError as error:
            raise SchedulerError(f"a socket cannot be made: {error.strerror}", where=self.path) from None
        finally:
            os.close(place)
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
