"""Runs one command in a fork of the warm process, as a new interpreter would run it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from scheduler.system.forked_command import ForkedCommand, NeedsOwnProcess
from scheduler.warm import client
from scheduler.warm.callers_world import DifferentWorldError, take_over

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def run_command(
    main: Callable[[], int],
    words: list[str],
    environment: bytes,
    caller: socket.socket,
    channel: socket.socket,
    pid: int,
) -> NoReturn:
    """Run the command line ``words`` in this process, a new fork, and end with its exit code.

    ``caller``: connection to the process that asked for the command. ``pid``: the pid of that process.
    ``channel``: another socket to the same process. If this process cannot run the command, it closes ``channel``
    without an answer. Otherwise it answers, and the caller then sends its standard streams and its working folder. If
    the caller closes ``channel`` without sending them, it has given up, and this process ends without running the
    command.
    """
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            take_over(pid)
        except DifferentWorldError:
            os._exit(code)
        channel.settimeout(None)
        channel.send(bytes((client.READY,)))
        data, files, _, _ = socket.recv_fds(channel, 1, 4)
        if data and len(files) == 4:
            _become(words, environment, files, caller)
            code = _exit_code(main, caller)
    except OSError:
        traceback.print_exc()  # the caller or its folder is gone
    finally:
        os._exit(code)


def _become(words: list[str], environment: bytes, files: list[int], caller: socket.socket) -> None:
    """Take over the caller's folder, standard streams, environment and words. Raises OSError."""
    os.setpgid(0, 0)
    os.fchdir(files[3])
    for number in range(3):
        os.dup2(files[number], number)
    kept = {0, 1, 2, caller.fileno()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(int(name))
    os.environ.clear()
    for entry in environment.split(b"\0"):
        variable, equals, value = entry.partition(b"=")
        if variable and equals:
            os.environb[variable] = value
    time.tzset()
    for fd, stream in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, stream, _opened(fd, getattr(sys, stream)))
    sys.argv[:] = words
    gc.enable()


def _opened(fd: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """Open a standard stream on the descriptor, as an interpreter does at its start.

    ``old``: the same stream of the warm process. The new stream has the encoding and the error handling of ``old``.
    """
    unbuffered = bool(fd and os.environ.get("PYTHONUNBUFFERED"))
    raw = open(fd, "wb" if fd else "rb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115  used until the end
    return io.TextIOWrapper(
        raw, old.encoding, old.errors, "\n" if fd else None,
        line_buffering=fd == 2 or raw.isatty(), write_through=unbuffered,
    )  # fmt: skip


def _exit_code(main: Callable[[], int], caller: socket.socket) -> int:
    """Run the command as the interpreter would, and return its exit code (0-255)."""
    ForkedCommand.here = True
    code = 1
    try:
        code = main()
    except NeedsOwnProcess:
        caller.send(bytes((client.ORDINARY,)))
        os._exit(0)
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code
        elif error.code is None:
            code = 0
        else:
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  an interpreter prints it and ends with 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # closed by its reader, or by the command
        sys.stdout.flush()
        sys.stderr.flush()
    return code & 0xFF
