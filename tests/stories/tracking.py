"""`gpujob track` as users call it: a folder with its sessions, and methods to read them and to end all processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from scheduler.system.locks import try_lock
from scheduler.track.plan import age
from tests import fork_server
from tests.environ import clean
from tests.stories.harness import ROOT, stopped, wait_for

# A command that creates begun.KEY, runs until go.KEY exists, and ends with an exit code.
GATED = "echo begun {key}; touch begun.{key}; while [ ! -e go.{key} ]; do sleep 0.05; done; echo over; exit {code}"


def gated(key: str, code: int = 0) -> str:
    """Return a command that runs until `Tracked.go` is called with this key, and exits with ``code``."""
    return GATED.format(key=key, code=code)


class Tracked:
    """A folder with sessions of `gpujob track`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = clean()
        self.environ = {**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        self.trackers: list[subprocess.Popen[str]] = []

    def run(
        self, *words: str, folder: Path | None = None, stdin: str = "", code: int | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `gpujob track WORDS` to its end and return the result. Its exit code must be ``code`` (None: any)."""
        done = fork_server.run(("track", *words), folder or self.folder, {**self.environ, **environ}, stdin, 60)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def lines(self, *words: str, code: int = 0, **how: Any) -> list[str]:
        """Return the lines that `gpujob track WORDS` prints."""
        return self.run(*words, code=code, **how).stdout.splitlines()

    def popen(self, *words: str, environ: dict[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
        """Start `gpujob track WORDS` in a new interpreter and return the process."""
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True, **how}
        command = [sys.executable, "-m", "scheduler", "track", *words]
        one = subprocess.Popen(command, cwd=self.folder, env={**self.environ, **(environ or {})}, **how)
        self.trackers.append(one)
        return one

    def freeze(self, one: subprocess.Popen[str]) -> None:
        """Stop a running tracker (SIGSTOP) while it does not hold the lock of the sessions."""
        with (self.folder / ".gpu-tracker" / "lock").open("rb") as held:
            wait_for(lambda: try_lock(held.fileno()), "the lock of the sessions")
            one.send_signal(signal.SIGSTOP)
            wait_for(lambda: stopped(one.pid), "it stands still")

    def begin(self, *commands: str, name: str = "a session") -> Tracked:
        """Create a session with these commands."""
        self.run("init", name, code=0)
        for command in commands:
            self.run("add", command, code=0)
        return self

    # -- looking --------------------------------------------------------------------------------------

    def json(self, *words: str) -> dict[str, Any]:
        """Return the output of `status --json`."""
        found: dict[str, Any] = json.loads(self.run("status", "--json", *words, code=0).stdout)
        return found

    def command(self, number: int) -> dict[str, Any]:
        """Return the command with this id in the form that `status --json` prints."""
        return next(one for one in self.json()["commands"] if one["id"] == number)

    def statuses(self) -> list[str]:
        """Return the statuses of all commands, in their order."""
        return [one["status"] for one in self.json()["commands"]]

    def wait_status(self, number: int, word: str) -> dict[str, Any]:
        """Wait until a command has this status; return the command."""

        def look() -> dict[str, Any] | None:
            one = next((one for one in self.json()["commands"] if one["id"] == number), None)
            return one if one is not None and one["status"] == word else None

        return dict(wait_for(look, f"command {number} {word}"))  # not read again: its status may already have changed

    def pid_of(self, number: int) -> int:
        """Return the pid of a command; wait until the session file contains it."""

        def look() -> int:
            found = next((one for one in self.stored()["commands"] if one["id"] == number), {})
            return int((found.get("process") or {}).get("pid", 0))

        return int(wait_for(look, f"the process of command {number}"))

    def exists(self, name: str) -> None:
        """Wait for a file in the folder."""
        wait_for((self.folder / name).exists, name)

    def go(self, key: str) -> None:
        """Let a gated command end."""
        (self.folder / f"go.{key}").touch()

    @property
    def files(self) -> list[Path]:
        """Return the session files, oldest first."""
        return sorted((self.folder / ".gpu-tracker").glob("*.json"), key=lambda path: age(path.stem))

    def stored(self) -> dict[str, Any]:
        """Return the contents of the newest session file."""
        found: dict[str, Any] = json.loads(self.files[-1].read_text())
        return found

    # -- processes ------------------------------------------------------------------------------------

    def marked(self, *more: bytes) -> list[int]:
        """Return the pids of the live processes of commands in this folder's sessions.

        ``more``: entries that the environment of each process must also have.
        """
        start = b"GPUJOB_TRACK_SESSION=" + os.fsencode(self.folder) + b"/"
        return _carrying(start, *more)

    def supervisors(self) -> list[int]:
        """Return the pids of live supervisors of this folder's trackers."""
        return [
            pid
            for pid in _carrying(b"GPUJOB_SUPERVISOR=" + os.fsencode(self.folder) + b"/")
            if b"supervisor.py" in _read(f"/proc/{pid}/cmdline")
        ]

    def end_all(self) -> None:
        """End all trackers, and kill their supervisors and commands."""
        for one in self.trackers:
            if one.poll() is None:
                one.kill()
            one.wait()
            for stream in (one.stdin, one.stdout, one.stderr):
                if stream is not None:
                    stream.close()
        for pid in (*self.marked(), *self.supervisors()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _carrying(start: bytes, *more: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            entries = _read(f"/proc/{name}/environ").split(b"\0")
            if any(entry.startswith(start) for entry in entries) and all(one in entries for one in more):
                found.append(int(name))
    return found
