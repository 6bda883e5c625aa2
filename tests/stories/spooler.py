"""`ts` as users call it: a link named `ts` in PATH, a private TS_SOCKET, and a server that the first call starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from scheduler.client.client import SchedulerClient
from scheduler.core.job import JobState
from scheduler.ts.job_list import state_of
from scheduler.ts.server import Server
from tests import fork_server
from tests.environ import clean
from tests.stories.harness import ROOT, alive, wait_for

PROGRAM = f"""#!{sys.executable}
from scheduler.entrypoint import entry

entry()
"""


class Spooler:
    """`ts` with a TS_SOCKET in ``folder``. The server has no GPUs unless the variables in ``environ`` declare GPUs."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.bin = folder / "bin"
        for made in (self.tmp, self.bin, folder / "run", folder / "home"):
            made.mkdir(mode=0o700, exist_ok=True)
        self.program = self.bin / "gpujob"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)
        for name in ("ts", "tsp"):
            with contextlib.suppress(FileExistsError):
                (self.bin / name).symlink_to("gpujob")
        kept = clean("TS_", "CUDA_")
        self.environ = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self.bin}:{kept.get('PATH', os.defpath)}",
            "HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "XDG_STATE_HOME": str(folder / "home" / "state"),
            "TMPDIR": str(self.tmp),
            "TS_SOCKET": str(folder / "socket"),
            **environ,
        }
        self.servers: set[int] = set()

    # -- calling --------------------------------------------------------------------------------------

    def popen(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        """Start `ts WORDS` and return the process."""
        environ = {**self.environ, **how.pop("environ", {})}
        how = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            "text": True,
            "cwd": self.folder,
            **how,
        }
        return subprocess.Popen([str(self.bin / "ts"), *words], env=environ, **how)

    def run(self, *words: str, stdin: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `ts WORDS` to its end and return the result; any exit code is accepted."""
        done = fork_server.run(("ts", *words), self.folder, {**self.environ, **environ}, stdin or "", 60)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def ts(self, *words: str, code: int = 0, **environ: str) -> str:
        """Return the output of `ts WORDS` without its last newline.

        Asserts that the exit code is ``code`` and, if this is 0, that stderr is empty.
        """
        done = self.run(*words, **environ)
        assert done.returncode == code, f"ts {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code or not done.stderr, done.stderr
        return done.stdout.removesuffix("\n")

    def add(self, *words: str, **environ: str) -> int:
        """Queue a job; return its id."""
        return int(self.ts(*words, **environ))

    def held(self, key: str, then: str = "") -> tuple[str, ...]:
        """Return the command of a job that waits for `release` with this key and then runs the shell text ``then``."""
        return ("sh", "-c", f"while ! [ -e go-{key} ]; do sleep 0.05; done; {then}")

    def release(self, key: str) -> None:
        """Let the job with this key continue."""
        (self.folder / f"go-{key}").touch()

    def said_in(self, name: str) -> list[str]:
        """Return the complete lines that jobs have written to a file of the folder so far."""
        path = self.folder / name
        return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []

    def gpujob(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run `gpujob WORDS` for the same scheduler; return the result. Its exit code must be ``code`` (None: any)."""
        environ = {**self.environ, "GPUJOB_STATE_FILE": self.server.state_file}
        done = fork_server.run(words, self.folder, environ, "", 60)
        assert code is None or done.returncode == code, (
            f"gpujob {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    # -- looking --------------------------------------------------------------------------------------

    def states(self) -> dict[int, str]:
        """Return the state of each job as `ts -M json` prints it: id → state."""
        return {job["ID"]: job["State"] for job in self.jobs()}

    def jobs(self) -> list[dict[str, Any]]:
        """Return the output of `ts -M json`."""
        found: list[dict[str, Any]] = json.loads(self.ts("-M", "json"))
        return found

    def wait_state(self, number: int, *states: str) -> None:
        """Wait until the job is in one of these states, named as `ts` does.

        `ts` already shows a job as running while it is being started. This method waits until the job has started.
        """

        def found() -> bool:
            job = SchedulerClient(self.server.state_file).known([number]).get(number)
            return job is not None and job.state is not JobState.STARTING and state_of(job) in states

        wait_for(found, f"job {number} {' or '.join(states)}")

    def ended(self, number: int) -> int:
        """Wait for a job's end with `ts -w`; return the exit code of that command."""
        return self.run("-w", str(number)).returncode

    def output(self, number: int) -> str:
        """Return the output that a job has written so far."""
        return Path(self.ts("-o", str(number))).read_text()

    # -- the server -----------------------------------------------------------------------------------

    @property
    def server(self) -> Server:
        """Return the server of the current TS_SOCKET."""
        return Server(self.environ)

    def pid(self) -> int:
        """Return the pid of the server's scheduler; wait until the scheduler runs."""
        found = int(
            wait_for(
                lambda: self.server.exists() and self.server.in_office(),
                "a server",
            )
        )
        self.servers.add(found)
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the server's scheduler and wait until the scheduler has ended."""
        pid = self.pid()
        os.kill(pid, number)
        # `alive` is false as soon as the first thread has ended; other threads may still hold the lock.
        wait_for(lambda: not alive(pid) and not self.server.alive(), "the server is gone")

    def end_all(self) -> None:
        """End all jobs and the server."""
        server = self.server
        with contextlib.suppress(AssertionError, OSError):
            if server.exists():
                self.run("-T")
        for life in Path(server.folder).glob("*/gpu_scheduler_state.json"):
            mark = b"GPUJOB_STATE_FILE=" + os.fsencode(life)
            _kill_marked(mark)
        self.run("-K")
        _kill_marked(b"TS_SOCKET=" + os.fsencode(self.environ["TS_SOCKET"]))


def _kill_marked(mark: bytes) -> None:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    os.kill(int(name), signal.SIGKILL)
