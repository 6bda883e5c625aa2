"""A server that has imported the program and forks daemons and commands, so that they start without imports.

A forked process can be stopped until a tracer is attached, and can get another boot id (as root).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.environ import clean

ROOT = Path(__file__).resolve().parents[2]

_SERVER = """
import ctypes, json, os, signal, sys, traceback
from scheduler import command_line
import scheduler.client.offline, scheduler.recovery.rebuild, scheduler.cli.app, scheduler.cli.serve
import scheduler.cli.control


def other_boot(path):
    libc = ctypes.CDLL(None, use_errno=True)
    boot = b"/proc/sys/kernel/random/boot_id"
    CLONE_NEWNS, MS_BIND, MS_PRIVATE, MS_REC = 0x20000, 4096, 1 << 18, 16384
    if (libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None)
            or libc.mount(os.fsencode(path), boot, None, MS_BIND, None)):
        raise OSError(ctypes.get_errno(), "no boot id of its own")


def run(words, folder, environ, out, held, boot):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    fd = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.closerange(3, 256)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [command_line.__file__, *words]
    code = 1
    if held:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if boot:
            other_boot(boot)
        code = command_line.main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        with open(out + ".code", "w") as stream:
            stream.write(str(code))
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        pass  # a fault of the sweep's that hit the sweep itself
    os._exit(code)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    wanted = json.loads(line)
    pid = os.fork()
    if not pid:
        run(*wanted)
    print(pid, flush=True)
"""


@dataclass(slots=True)
class Forked:
    """A forked daemon or command. ``output``: the file with its output."""

    pid: int
    pidfd: int
    output: Path

    def ended(self, limit: float = 0.0) -> bool:
        """Return whether the process has ended; wait up to ``limit`` seconds for its end."""
        return bool(select.select([self.pidfd], [], [], limit)[0])

    def signal(self, number: int) -> None:
        """Send a signal to the process; do nothing if it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def code(self) -> int | None:
        """Return the exit code; None if the process was killed or still runs."""
        path = Path(f"{self.output}.code")
        text = path.read_text() if path.exists() else ""
        return int(text) if text else None

    def said(self) -> str:
        """Return the output of the process so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def close(self) -> None:
        """Kill the process if it still runs, wait up to 10 s for its end, and close its descriptor."""
        self.signal(signal.SIGKILL)
        self.ended(10.0)
        os.close(self.pidfd)


class Forge:
    """The forking server. It ends with `close` or with this process.

    ``under``: words to put before the server's command, for example a strace command line.
    """

    def __init__(self, under: Sequence[str] = ()) -> None:
        environ = clean()
        environ["PYTHONPATH"] = str(ROOT)
        self.process = subprocess.Popen(
            [*under, sys.executable, "-c", _SERVER], env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        output: Path,
        *,
        held: bool = False,
        boot: str = "",
    ) -> Forked:
        """Fork `gpujob WORDS…` and return the process.

        ``held``: the process stops itself until it gets SIGCONT. ``boot``: a file with the boot id that the process
        sees. If it is empty, the process sees the machine's boot id.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        Path(f"{output}.code").unlink(missing_ok=True)
        wanted = [list(words), str(folder), dict(environ), str(output), held, boot]
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        try:
            return Forked(pid, os.pidfd_open(pid), output)
        except ProcessLookupError:  # it has ended: use a pipe at end-of-file, which is readable like its pidfd
            read, write = os.pipe()
            os.close(write)
            return Forked(pid, read, output)

    def run(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        output: Path,
        limit: float = 30.0,
        **how: str,
    ) -> Forked:
        """Fork a command, wait for its end and return the ended process.

        ``how``: further arguments of `start`. Raises TimeoutError if the command has not ended after ``limit`` seconds.
        """
        made = self.start(words, folder, environ, output, **how)  # type: ignore[arg-type]
        try:
            if not made.ended(limit):
                raise TimeoutError(f"{words}: not within {limit:g} s\n{made.said()}")
        finally:
            made.close()
        return made

    def close(self) -> None:
        """End the forking server. The forked processes continue."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def until(condition, what: str, limit: float = 60.0):  # type: ignore[no-untyped-def]
    """Call ``condition`` repeatedly until its result is true; return this result.

    ``what``: a description of the condition for the error. Raises TimeoutError if no result is true within ``limit``
    seconds.
    """
    end = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit:g} s: {what}")
        time.sleep(0.003)
    return found
