"""Starts `gpujob` commands and schedulers as forks of one process that has imported the program.

The imports of a new interpreter take a quarter of a second, and the suite starts thousands of commands and hundreds of
schedulers. A fork has the arguments, folder, environment and standard streams that a new interpreter would have; its
parent process is the fork server. There is one fork server for each combination of locale and Python variables. `demo`,
`attach`, and commands with a preloaded library, a time zone or another PYTHONPATH run in new interpreters. An earlier
command does not influence later commands.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias, cast

File: TypeAlias = "IO[bytes] | int"
ROOT = Path(__file__).resolve().parents[1]
NEW_INTERPRETER_VERBS = frozenset({"demo", "attach"})
# An interpreter reads all these variables only at its start. A command with one of the first set needs a new
# interpreter; for variables with one of the prefixes in SERVER_VARIABLES, a server with the same values is enough.
NEW_INTERPRETER_VARIABLES = frozenset({"PYTHONHOME", "TZ", "LD_PRELOAD"})
SERVER_VARIABLES = ("PYTHON", "LC_", "LANG")
# Imported beside the modules of the verbs that the warm process runs: those of the daemon and of the other verbs.
MODULES = (
    "scheduler.doctor.checks", "scheduler.daemon.process", "scheduler.cli.doctor", "scheduler.cli.run", "scheduler.cli.serve",
)  # fmt: skip
WEB_MODULES = ("scheduler.web.server", "scheduler.web.command")


# -- the server ---------------------------------------------------------------------------------------------


def serve(listener_fd: int) -> None:
    """Fork a command for each request, until stdin ends.

    The server answers each request with the pid of the command. When the command has ended, it also sends the exit
    code.
    """
    for name in MODULES:
        importlib.import_module(name)
    from scheduler.command_line import import_all

    import_all()
    gc.disable()
    gc.freeze()  # a garbage collection in a fork would copy each page that it visits
    listener = socket.socket(fileno=listener_fd)
    wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listener, wakeup], [], [])
        if 0 in ready:
            return  # the test process has ended
        if wakeup in ready:
            os.read(wakeup, 4096)
            _tell_ends(waiting)
        if listener in ready:
            connection, _ = listener.accept()
            received = _receive(connection)
            if received is None:
                connection.close()
                continue
            request, files = received
            if request["words"][:1] == ["web"]:
                for name in WEB_MODULES:
                    importlib.import_module(name)  # in the server, so that later forks have them too
                gc.freeze()
            child = os.fork()
            if not child:
                try:
                    _become(request, files)
                except KeyboardInterrupt:
                    _die_of_ctrl_c()
                finally:
                    os._exit(1)
            for fd in files:
                os.close(fd)
            waiting[child] = connection
            with contextlib.suppress(OSError):  # the client may have ended
                connection.sendall(b"%d\n" % child)


def _tell_ends(waiting: dict[int, socket.socket]) -> None:
    """Reap the children that have ended, and send their exit codes to the clients."""
    while waiting:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with waiting.pop(child) as connection, contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request, and the descriptors of its three standard streams.

    None if the client ended during the request.
    """
    data, files = b"", array.array("i")
    while not data.endswith(b"\n"):
        piece, beside, *_ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * files.itemsize))
        for _, _, held in beside:
            files.frombytes(held[: len(held) - len(held) % files.itemsize])
        if not piece:
            return None
        data += piece
    return json.loads(data), list(files)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Run the command in this process, and exit with its code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.enable()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _opened(fd, getattr(sys, name)))
    from scheduler import command_line
    from scheduler.system import crash_points

    if "GPUJOB_CRASH_AT" in os.environ:
        importlib.reload(crash_points)
    words = request["words"]
    if words[:1] == ["start"]:
        import faulthandler

        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # prints the stacks of a scheduler that hangs
    sys.argv = [command_line.__file__ or "", *words]
    code: int = 1
    try:
        code = command_line.main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_of_ctrl_c() -> None:
    """Die by SIGINT, as an interpreter does when nothing catches KeyboardInterrupt."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # a SIGINT may arrive before the default action is set
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def _opened(fd: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a new standard stream for this descriptor, with the properties that an interpreter would give it.

    ``old``: the stream of the fork server. Its encoding and error handling are used.
    """
    unbuffered = bool(fd and os.environ.get("PYTHONUNBUFFERED"))
    raw = open(fd, "wb" if fd else "rb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115  it stays open
    by_line = fd == 2 or raw.isatty()
    newline = "\n" if fd else None
    return io.TextIOWrapper(
        cast(BinaryIO, raw), old.encoding, old.errors, newline, line_buffering=by_line, write_through=unbuffered
    )


# -- the client ---------------------------------------------------------------------------------------------


class ForkedProcess:
    """A running command with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._data = connection, b""
        self.returncode: int | None = None
        self.pid = int(self._line(60.0))

    def _line(self, timeout: float) -> bytes:
        """Return the next line from the fork server. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while b"\n" not in self._data:
            self._connection.settimeout(max(0.0, end - time.monotonic()))
            try:
                piece = self._connection.recv(4096)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"forked process {getattr(self, 'pid', '')}", timeout) from None
            if not piece:
                raise AssertionError("the fork server lost a process")
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit code, or the negative number of the signal that killed it.

        Raises subprocess.TimeoutExpired if the process runs longer than ``timeout`` seconds (None: an hour).
        """
        if self.returncode is None:
            self.returncode = int(self._line(3600.0 if timeout is None else timeout))
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while it runs.

        For a process that a signal killed, return the negative number of the signal.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send the process SIGTERM."""
        self.send_signal(signal.SIGTERM)


class _Server:
    """A running fork server. It ends when this process ends.

    Its environment is that of this process, but its locale and Python variables are ``variables``. The server gets no
    other variable of its first command: a crash point, for example, would affect later commands.
    """

    def __init__(self, variables: frozenset[tuple[str, str]]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gjf", dir="/tmp")
        self.path = os.path.join(self.folder.name, "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(listener.fileno())],
                env={k: v for k, v in os.environ.items() if not k.startswith(SERVER_VARIABLES)} | dict(variables), cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[listener.fileno()],
                umask=0o022,  # a test that changes its own umask must not change that of later schedulers
            )  # fmt: skip

    def fork(
        self, words: Sequence[str], folder: Path, environ: Mapping[str, str], files: Sequence[int]
    ) -> ForkedProcess:
        """Start a command as a fork. ``files``: the descriptors of its stdin, stdout and stderr."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self.path)
            request = {"words": list(words), "folder": str(folder), "environ": dict(environ)}
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(connection, [data], list(files))
            if sent < len(data):  # once the command has ended, even an empty send fails
                connection.sendall(data[sent:])
            return ForkedProcess(connection)
        except BaseException:
            connection.close()
            raise


_servers: dict[frozenset[tuple[str, str]], _Server] = {}


def _server_for(words: Sequence[str], environ: Mapping[str, str]) -> _Server | None:
    """Return the fork server for the locale and Python variables in ``environ``; start it if it does not run.

    None if the command needs a new interpreter.
    """
    own_modules = environ.get("PYTHONPATH") != str(ROOT)
    if own_modules or set(words) & NEW_INTERPRETER_VERBS or not NEW_INTERPRETER_VARIABLES.isdisjoint(environ):
        return None
    variables = frozenset(item for item in environ.items() if item[0].startswith(SERVER_VARIABLES))
    if variables not in _servers:
        _servers[variables] = _Server(variables)
    return _servers[variables]


def start(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], out: File, errors: File, given: File | None = None
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start `gpujob WORDS…` in the background.

    ``given``: the command's stdin, as a file or a descriptor. If it is None, stdin is empty.
    """
    server = _server_for(words, environ)
    if server is None:
        return subprocess.Popen(
            [sys.executable, "-m", "scheduler", *words],
            cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL if given is None else given, stdout=out, stderr=errors,
        )  # fmt: skip
    with open(os.devnull, "rb") as nothing:
        files = (nothing if given is None else given, out, errors)
        return server.fork(words, folder, environ, [f if isinstance(f, int) else f.fileno() for f in files])


def run(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], given: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `gpujob WORDS…` to its end with the text ``given`` on its stdin.

    Raises subprocess.TimeoutExpired if the command runs longer than ``timeout`` seconds; the command is then killed.
    """
    server = _server_for(words, environ)
    if server is None:
        return subprocess.run(
            [sys.executable, "-m", "scheduler", *words],
            cwd=folder, env=dict(environ), capture_output=True, text=True, timeout=timeout, input=given,
        )  # fmt: skip
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given.encode("utf-8", "surrogateescape"))
        stdin.seek(0)
        process = server.fork(words, folder, environ, (stdin.fileno(), stdout.fileno(), stderr.fileno()))
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
            raise
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "surrogateescape"))
    return subprocess.CompletedProcess(list(words), code, *texts)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
