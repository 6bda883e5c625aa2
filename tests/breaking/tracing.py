"""Functions that attach strace to processes, and functions that read the logs of strace.

strace records the system calls of a process, or makes selected system calls fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.breaking.forge import until

STRACE = shutil.which("strace")
_LINE = re.compile(r"(?P<pid>\d+) +(?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<args>.*)\) += (?P<result>-?\d+|\?|0x[0-9a-f]+)(?P<more>.*)", re.DOTALL)
_FD = re.compile(r"(\d+)<((?:\\.|[^>\\])*)>")


@dataclass(frozen=True, slots=True)
class Call:
    """A system call in strace's log.

    ``args``: the arguments as strace shows them; ``result``: the return value, negative if the call failed; ``more``:
    the rest of the line.
    """

    pid: int
    name: str
    args: str
    result: int
    more: str = ""

    @property
    def fd_path(self) -> str:
        """The path of the file whose descriptor is the first argument of the call.

        If the first argument is no descriptor, the path is empty.
        """
        found = _FD.match(self.args)
        return unhex(found[2]) if found else ""

    @property
    def failed(self) -> bool:
        return self.result < 0


def unhex(text: str) -> str:
    """Decode a name that strace -xx has written."""
    return os.fsdecode(bytes_of(text)) if "\\x" in text else text


def bytes_of(text: str) -> bytes:
    """Decode a string that strace -xx has written."""
    return bytes.fromhex(text.replace("\\x", ""))


def calls(log: Path) -> Iterator[Call]:
    """Yield the finished calls of a log (strace -f) in the order in which they returned."""
    begun: dict[str, str] = {}
    with log.open(errors="surrogateescape") as stream:
        for line in stream:
            found = _LINE.match(line)
            if found is None:
                continue
            pid, rest = found["pid"], found["rest"]
            if rest.endswith("<unfinished ...>"):
                begun[pid] = rest[: -len("<unfinished ...>")].rstrip()
                continue
            if rest.startswith("<... "):
                rest = begun.pop(pid, "") + rest.partition(" resumed>")[2]
            call = _CALL.match(rest)
            if call is not None and call["result"] != "?":
                yield Call(int(pid), call["name"], call["args"], int(call["result"], 0), call["more"])


@dataclass(slots=True)
class Tracer:
    """A strace that is attached to a running process."""

    process: subprocess.Popen[bytes]
    log: Path

    def done(self, limit: float = 10.0) -> None:
        """Wait until the traced process has ended and the log is complete.

        If this takes longer than ``limit`` seconds, detach from the process.
        """
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.let_go()

    def let_go(self) -> None:
        """Detach from the traced process. The process continues."""
        self.process.terminate()
        self.process.wait()


def attach(pid: int, log: Path, words: Iterable[str]) -> Tracer:
    """Attach strace to a process; return when the process is traced.

    Raises RuntimeError if strace ends before the process is traced.
    """
    assert STRACE is not None
    process = subprocess.Popen(
        [STRACE, "-qq", "-o", str(log), *words, "-p", str(pid)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def held() -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        if process.poll() is not None:
            raise RuntimeError(f"strace failed with {process.returncode}: may a process be traced here?")
        return "TracerPid:\t0\n" not in status

    until(held, f"strace holds {pid}")
    return Tracer(process, log)


def recorded(log: Path, trace: str) -> list[str]:
    """Return the words to put before a command so that strace records the command's system calls and their data.

    The calls of child processes are recorded, too. ``trace``: the names of the calls, separated by commas.
    """
    assert STRACE is not None
    return [STRACE, "-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "8000000", "-e", f"trace={trace}", "-o", str(log)]
