"""Passes this process's stdin, stdout and stderr to a job, over a Unix socket to which the supervisor connects."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

from scheduler.core.errors import SchedulerError
from scheduler.system.proc import ticks_of


class Caller:
    """The Unix socket from which the supervisor gets descriptors of this process for a foreground job.

    The descriptors are stdin, and with ``output`` also stdout and stderr. The socket is created in the private folder
    ``folder``. Raises SchedulerError if the socket cannot be created.
    """

    def __init__(self, folder: str, *, output: bool) -> None:
        self.path = os.path.join(folder, f"caller-{os.getpid()}-{os.urandom(4).hex()}")
        self._given = (0, 1, 2) if output else (0,)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{place}/{os.path.basename(self.path)}")  # the full path may be too long
        except OSError as error:
            raise SchedulerError(f"cannot create a socket: {error.strerror}", where=self.path) from None
        finally:
            os.close(place)
        self._socket.listen()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the thread
        threading.Thread(target=self._give, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hold_ctrl_c(self) -> None:
        """Block SIGINT before the job is submitted.

        If Ctrl-C is pressed during the submission, it takes effect later: when `Interrupts`, `let_ctrl_c` or `close`
        unblocks SIGINT.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def let_ctrl_c(self) -> None:
        """Unblock SIGINT, so that Ctrl-C ends this process. For use while this process waits for no job."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @property
    def word(self) -> str:
        """The value of JobSpec.caller: pid, start time in clock ticks since boot, and path of the socket."""
        return f"{os.getpid()} {ticks_of(os.getpid())} {self.path}"

    def _give(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:
                return  # `close` was called
            with asking, contextlib.suppress(OSError):  # if the supervisor ended first, the next one asks again
                socket.send_fds(asking, [bytes(self._given)], list(self._given))

    def close(self) -> None:
        """Remove the socket and unblock SIGINT."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket.close()
        self.let_ctrl_c()
