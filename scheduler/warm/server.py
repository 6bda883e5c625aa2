"""The warm process: waits for requests on its socket and forks a process for each command."""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import marshal
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.system.own_process import start_own
from scheduler.warm import client
from scheduler.warm.forked import run_command

IDLE_S = 600.0
LOOK_S = 60.0  # between checks that the socket file still exists
REQUEST_LIMIT_S = 2.0  # for a whole request to arrive; on a busy machine the caller may wait long for a CPU
MOST_REQUEST = 8 << 20  # bytes; the kernel limits words and environment of a process to less by default

Main = Callable[[], int]  # runs the command line in sys.argv and returns its exit code


@dataclass(slots=True)
class Command:
    """A forked command. ``caller``: the connection to the process that asked for it."""

    pid: int
    caller: socket.socket


def start(program: Sequence[str]) -> None:
    """Start the warm process for the identity of this process (`client.identity`), unless it already runs.

    ``program``: the command line that starts the warm process. An OSError is ignored.
    The warm process gets only the variables that it must share with its callers, so that it keeps no secret of the
    first caller.
    """
    with contextlib.suppress(OSError):  # the next command tries again; this command has done its work
        environment = client.own_environment()
        path = client.socket_path(client.identity(environment))
        if len(path) > client.MOST_PATH or not _make_folder(os.path.dirname(path)) or _lock(path, probe=True) is None:
            return
        shared = (*client.READ_ONCE, b"PATH=", b"XDG_RUNTIME_DIR=", b"GPUJOB_WARM=")
        kept = [os.fsdecode(entry) for entry in environment.split(b"\0") if entry.startswith(shared)]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            start_own([*program], dict(entry.split("=", 1) for entry in kept), files={1: null, 2: null}, folder="/")
        finally:
            os.close(null)


def _make_folder(folder: str) -> bool:
    """Create the folder of the socket; return whether only this user can use it. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    return client.is_private(folder)


def _lock(path: str, *, probe: bool = False) -> int | None:
    """Take the lock of the warm process for this socket. Return the descriptor of the lock file.

    Return None if another process holds the lock. ``probe``: only find out whether the lock is free. In this case the
    lock is released immediately, and the returned number is not an open descriptor. Raises OSError.
    """
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if probe:
        os.close(fd)
    return fd


def serve(main: Main, prepare: Callable[[], None]) -> int:
    """Run the warm process. Return 0 when it has been idle for IDLE_S, or when its program or socket file has changed.

    Returns 0 immediately if another process holds the lock. ``prepare`` imports the program.
    """
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # a descriptor of the caller may hold a lock
    own = client.identity(client.own_environment())
    path = client.socket_path(own)
    lock = _lock(path)
    if lock is None:
        return 0
    installed = _installed()
    prepare()
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would copy each page that it visits
    os.umask(0o077)
    with socket.socket(socket.AF_UNIX) as listener:
        fresh = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        listener.bind(fresh)
        listener.listen(64)
        os.rename(fresh, path)
        _Server(main, own, path, listener, installed, lock).run()
    return 0


def _installed() -> dict[str, tuple[int, int, int]]:
    """Return path → (inode, size in bytes, time of change in ns).

    The paths are those of the program's files and of the folders in which Python looks for libraries.
    """
    program = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [
        os.path.join(folder, name) for folder, _, names in os.walk(program) for name in names if name.endswith(".py")
    ]
    paths += [path for path in sys.path if os.path.isdir(path)]
    return {path: _stamp(path) for path in paths}


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return found.st_ino, found.st_size, found.st_mtime_ns


class _Server:
    """The loop of the warm process.

    It accepts requests until ``closed`` is True. Then it waits until all its commands have ended.
    """

    def __init__(
        self,
        main: Main,
        own: bytes,
        path: str,
        listener: socket.socket,
        installed: dict[str, tuple[int, int, int]],
        lock: int,
    ) -> None:
        self.main, self.own, self.path, self.listener, self.installed = main, own, path, listener, installed
        self.lock = lock
        self.socket_file = _stamp(path)[0]
        self.commands: dict[int, Command] = {}  # by the descriptor of the caller's connection
        self.used = time.monotonic()
        self.closed = False
        self.wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poll = select.poll()
        for fd in (listener.fileno(), self.wakeup):
            self.poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Serve requests until the loop is closed and all commands have ended."""
        while self.commands or not self.closed:
            for fd, _ in self.poll.poll(LOOK_S * 1000):
                if fd == self.wakeup:
                    os.read(fd, 4096)
                    self._reap()
                elif fd == self.listener.fileno():
                    self._accept()
                elif fd in self.commands:
                    self._pass_on(self.commands[fd])
            idle = not self.commands and time.monotonic() - self.used >= IDLE_S
            if not self.closed and (idle or _stamp(self.path)[0] != self.socket_file):
                self._close()

    def _close(self) -> None:
        """Accept no more requests. The next command starts another warm process."""
        self.closed = True
        self.poll.unregister(self.listener.fileno())
        if _stamp(self.path)[0] == self.socket_file:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.listener.close()
        os.close(self.lock)  # another warm process may start, even if a command of this one still runs

    def _accept(self) -> None:
        """Accept one request and fork its command."""
        try:
            caller, _ = self.listener.accept()
        except OSError:
            return  # the caller has given up
        self.used = time.monotonic()
        channel: socket.socket | None = None
        try:
            caller.settimeout(REQUEST_LIMIT_S)
            pid, user = client.peer_of(caller)
            if user != os.getuid():
                raise ValueError("another user")
            request, channel = _receive(caller)
            own, words, environment = marshal.loads(request)
            if own != self.own:
                raise ValueError("another interpreter or program")
            if any(_stamp(path) != stamp for path, stamp in self.installed.items()):
                self._close()
                raise ValueError("the program changed")
            child = os.fork()
            if not child:
                run_command(self.main, words, environment, caller, channel, pid)
            caller.settimeout(0)
            self.commands[caller.fileno()] = Command(child, caller)
            self.poll.register(caller.fileno(), select.POLLIN)
        except (OSError, ValueError, EOFError, TypeError):
            caller.close()
        finally:
            if channel is not None:
                channel.close()  # without an answer it means a refusal

    def _pass_on(self, command: Command) -> None:
        """Pass the signals of the caller on to the command. If the caller has ended, send SIGKILL to the command."""
        try:
            numbers = command.caller.recv(64) or bytes((signal.SIGKILL,))
        except BlockingIOError:
            return
        except OSError:
            numbers = bytes((signal.SIGKILL,))
        if numbers[-1] == signal.SIGKILL:
            self.poll.unregister(command.caller.fileno())
        for number in numbers:
            os.kill(command.pid, number)  # our own child, which nobody else reaps

    def _reap(self) -> None:
        """Collect the commands that have ended, and tell their callers how they ended."""
        for fd, command in list(self.commands.items()):
            pid, status = os.waitpid(command.pid, os.WNOHANG)
            if not pid:
                continue
            del self.commands[fd]
            with contextlib.suppress(KeyError):  # unregistered when the caller was gone
                self.poll.unregister(fd)
            with command.caller, contextlib.suppress(OSError):
                command.caller.send(bytes((client.ENDED,)) + status.to_bytes(4, "big"))
            self.used = time.monotonic()


def _receive(caller: socket.socket) -> tuple[bytes, socket.socket]:
    """Receive a request, and the channel (a socket) that the caller sends together with the request. Return both.

    Raises OSError if the connection fails, ValueError if the request is too long or has no channel, EOFError if the
    caller closes the connection too early.
    """
    data, files = b"", array.array("i")
    need = 4
    try:
        while len(data) < need:
            piece, beside, *_ = caller.recvmsg(1 << 18, socket.CMSG_SPACE(files.itemsize), socket.MSG_CMSG_CLOEXEC)
            for _, _, held in beside:
                files.frombytes(held)
            if not piece:
                raise EOFError
            data += piece
            if len(data) >= 4:
                need = 4 + int.from_bytes(data[:4], "big")
                if need > MOST_REQUEST:
                    raise ValueError("the request is too long")
        if len(files) != 1:
            raise ValueError("the channel is missing")
        channel = socket.socket(fileno=files[0])
    except BaseException:
        for fd in files:
            os.close(fd)
        raise
    return data[4:], channel
