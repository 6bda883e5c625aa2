"""Asks the warm process of this user to run a command, so that the command need not import the program.

Every command imports this module first, so the module imports only modules that are built in or small. If the warm
process cannot be used for any reason, `run` returns None, and the command runs in this process, with the same result.
"""

import _signal  # type: ignore[import-not-found]  # `signal` imports enum and re, which take 5 ms
import _socket
import marshal
import os
import sys

ANSWER_LIMIT_S = 0.05  # for the warm process to fork; after that, running the command here is faster
# Variables that an interpreter, the C library or a library reads only once: the warm process must have the same values.
READ_ONCE = (
    b"PYTHON", b"LC_", b"LANG", b"LD_", b"GLIBC_", b"MALLOC_", b"TYPER_", b"_TYPER_", b"TERMINAL_WIDTH=", b"LOCPATH=", b"GCONV_PATH="
)  # fmt: skip
# Verbs that never run in the warm process; asking it first would only cost time.
STAYING = frozenset({"start", "run", "web", "demo", "doctor", "lease", "warm-process"})
FORWARDED = tuple(
    getattr(_signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "TSTP")
)
READY, ORDINARY, ENDED = b"roe"  # answers of the warm process: fork ready; run it in the caller; ended with status
PEER = 12  # bytes of a struct ucred: pid, user id, group id
MOST_PATH = 107  # bytes of a socket's path


class Connection:
    """A connection to the warm process, and the signals that this process passes on through it."""

    def __init__(self, connection: _socket.socket) -> None:
        self.socket = connection
        self.before: dict[int, object] = {}
        self.missed: list[int] = []

    def catch(self) -> None:
        """Pass the signals in FORWARDED on to the command, except those that this process ignores."""
        for number in FORWARDED:
            before = _signal.getsignal(number)
            if before is not _signal.SIG_IGN:
                self.before[number] = before
                _signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _: object) -> None:
        self.missed.append(number)
        stop = number == _signal.SIGTSTP
        try:
            self.socket.send(bytes((_signal.SIGSTOP if stop else number,)))
            if stop:  # Ctrl-Z: both processes stop, and continue together
                os.kill(os.getpid(), _signal.SIGSTOP)
                self.socket.send(bytes((_signal.SIGCONT,)))
        except OSError:
            return  # the command has ended, and its exit code is on the way

    def release(self) -> None:
        """Disconnect and restore the signal handlers. Raise again the signals that have arrived since `catch`."""
        for number, before in self.before.items():
            _signal.signal(number, before)
        self.socket.close()
        for number in self.missed:
            os.kill(os.getpid(), number)


def own_environment() -> bytes:
    """Return the environment that this process was started with, NUL after each entry. Raises OSError."""
    fd = os.open("/proc/self/environ", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = piece = os.read(fd, 1 << 17)
        while piece:
            piece = os.read(fd, 1 << 17)
            data += piece
        return data
    finally:
        os.close(fd)


def identity(environment: bytes) -> bytes:
    """Return the properties that must be equal in a warm process and its caller, as bytes.

    These are the interpreter, the program and the variables in READ_ONCE.
    """
    fixed = sorted(entry for entry in environment.split(b"\0") if entry.startswith(READ_ONCE))
    program = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return repr((sys.version, sys.executable, program, fixed)).encode("utf-8", "surrogateescape")


def socket_path(identity: bytes) -> str:
    """Return the path of the socket for this identity. Only this user should have access to the folder of the socket.

    This function does not check the folder. `connect` and the start of the warm process check it.
    """
    user = os.getuid()
    named = os.environ.get("GPUJOB_WARM", "")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usual = f"{runtime}/gpujob" if runtime.startswith("/") and os.path.isdir(runtime) else f"/tmp/gpujob-{user}"  # noqa: S108  `connect` and `start` check who owns it
    folder = named if named.startswith("/") else usual
    return f"{folder}/warm-{int.from_bytes(identity, 'big') % (2**64 - 59):016x}"


def is_private(folder: str) -> bool:
    """Return whether only this user can enter the folder and put files into it. Raises OSError."""
    found = os.lstat(folder)
    return found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000


def usable(words: list[str]) -> bool:
    """Return whether a warm process can be used or started for this command line (program name first).

    It cannot if GPUJOB_WARM=0 switches it off, if a crash point is set, if this process has the rights of another user,
    or if the interpreter was started with options. It also cannot if a word names a file of this process (in /proc or
    /dev). The reason: a fork of the warm process has another pid, no terminal, and only the descriptors 0, 1 and 2.
    """
    if os.environ.get("GPUJOB_WARM") == "0" or "GPUJOB_CRASH_AT" in os.environ:
        return False
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        return False
    if len(sys.orig_argv) > 1 and sys.orig_argv[1].startswith("-") and sys.orig_argv[1] != "-m":
        return False
    return not any("/fd/" in word or "/dev/tty" in word or "/proc/" in word for word in words)


def connect(path: str) -> _socket.socket | None:
    """Return a connection to the process that listens at ``path``.

    Return None if the process belongs to another user, or if other users have access to the folder of the socket.
    Raises OSError if no process listens, or if the process does not answer in time.
    """
    if not is_private(os.path.dirname(path)):
        return None
    made = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        made.settimeout(ANSWER_LIMIT_S)
        made.connect(path)
        if peer_of(made)[1] == os.getuid():
            return made
    except OSError:
        made.close()
        raise
    made.close()
    return None


def peer_of(connection: _socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process that connected or listens at the other end. Raises OSError."""
    found = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, PEER)
    return int.from_bytes(found[:4], sys.byteorder), int.from_bytes(found[4:8], sys.byteorder)


def run(words: list[str]) -> int | None:
    """Run the command line ``words`` (program name first) in the warm process; return its exit code.

    If a signal ended the command, the same signal ends this process. Return None if the command must run in this
    process. That is the case if there is no warm process, if the warm process refuses, or if the command needs its own
    process.
    """
    try:
        if (words[1:2] and words[1] in STAYING) or not usable(words):
            return None
        environment = own_environment()
        own = identity(environment)
        made = connect(socket_path(own))
    except OSError:
        return None
    if made is None:
        return None
    connection = Connection(made)
    try:
        if not _begin(connection, (own, words, environment)):
            made.close()
            return None
    except OSError:
        connection.release()
        return None
    except KeyboardInterrupt:
        return 130
    return _end_of(connection)


def _begin(connection: Connection, request: tuple[bytes, list[str], bytes]) -> bool:
    """Ask for a fork and pass it our standard streams and folder; return whether the command runs. Raises OSError.

    The descriptors are sent only after the fork has answered. If they were sent with the request, a suspended
    (SIGSTOP) warm process would keep them open, and a reader of our output would wait until the warm process ends.
    """
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ours.settimeout(ANSWER_LIMIT_S)
        data = marshal.dumps(request)
        _send(connection.socket, len(data).to_bytes(4, "big") + data, (theirs.fileno(),))
        theirs.close()
        answer = ours.recv(1)
        if not answer or answer[0] != READY:
            return False
        connection.catch()
        connection.socket.settimeout(None)
        _send(ours, b"g", (0, 1, 2, folder))  # the fork waits for this, so that a command never runs in two processes
        return True
    finally:
        ours.close()
        theirs.close()
        os.close(folder)


def _send(to: _socket.socket, data: bytes, files: tuple[int, ...]) -> None:
    """Send data and descriptors. Raises OSError."""
    numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
    sent = to.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    if sent < len(data):
        to.sendall(data[sent:])


def _end_of(connection: Connection) -> int | None:
    """Wait until the command has ended. Return its exit code, or None if the command must run in this process.

    If the connection ends without an exit code, it is not known how the command ended: print an error and return 1.
    """
    data = b""
    while len(data) < 5:
        try:
            piece = connection.socket.recv(5 - len(data))
        except OSError:
            piece = b""
        if not piece:
            break
        data += piece
        if data[0] == ORDINARY:
            connection.release()
            return None
    if len(data) < 5 or data[0] != ENDED:
        os.write(2, b"gpujob: the process of this command was killed; look at gpujob status before you repeat it\n")
        return 1
    status = int.from_bytes(data[1:], "big")
    number = status & 0x7F
    if not number:
        return status >> 8
    if number != _signal.SIGKILL:
        _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
