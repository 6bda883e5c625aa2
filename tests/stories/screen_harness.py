"""A real scheduler in screen mode, with its screen sessions, and terminals in which commands run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from scheduler.system.processes import seen
from tests.screens import Terminal, end_marked, listed, marked, sessions_in, tell
from tests.stories.harness import Scheduler, alive, wait_for


class ScreenScheduler(Scheduler):
    """A scheduler started with --screen.

    ``sockets``: the folder that is given to screen as SCREENDIR. If it is None, screen uses its default folder for this
    user.
    """

    def __init__(self, folder: Path, gpus: int, sockets: Path | None, **settings: Any) -> None:
        super().__init__(folder, gpus, **settings)
        self.mode = "--screen"
        self.terminals: list[Terminal] = []
        for name in ("STY", "SCREENDIR", "SYSSCREENRC"):
            self.environ.pop(name, None)
        if sockets is not None:
            self.environ["SCREENDIR"] = str(sockets)
        self.sockets = sockets or Path(re.findall(r" in (/.+?)\.\s*$", listed(self.environ), re.MULTILINE)[0])

    def start(self, *words: str, ready: bool = True, **environ: str) -> ScreenScheduler:
        super().start(self.mode, *words, ready=ready, **environ)
        return self

    def in_office(self) -> None:
        """Do nothing: screen mode has no supervisor."""

    def sit(self, *argv: str, rows: int = 24, columns: int = 80) -> Terminal:
        """Run a command in a new terminal, as a user does; return the terminal."""
        self.terminals.append(Terminal(argv, self.environ, rows, columns))
        return self.terminals[-1]

    def gpujob(self, *words: str) -> Terminal:
        """Run a gpujob command for this scheduler in a new terminal; return the terminal."""
        state_file = str(self.folder / "gpu_scheduler_state.json")
        return self.sit(sys.executable, "-m", "scheduler", *words, "--state-file", state_file)

    # -- sessions -------------------------------------------------------------------------------------

    def sessions(self) -> dict[str, int]:
        """Return the live sessions in the socket folder: name → pid of the screen process."""
        return sessions_in(self.sockets)

    def session(self, job_id: int) -> str:
        """Return the session of a job as PID.name; wait until the daemon has recorded that the job runs."""

        def find() -> str:
            rows = self.rows("SELECT session FROM jobs WHERE id=? AND pid IS NOT NULL", job_id)
            return str(rows[0][0]) if rows else ""

        return str(wait_for(find, f"session of job {job_id}"))

    def server(self, job_id: int) -> int:
        """Return the pid of the screen process of a running job."""
        return int(self.session(job_id).partition(".")[0])

    def job_pid(self, job_id: int) -> int:
        """Return the pid of a running job; wait until the daemon has recorded it."""
        return int(
            wait_for(lambda: self.rows("SELECT pid FROM jobs WHERE id=? AND pid IS NOT NULL", job_id), "pid")[0][0]
        )

    def shim(self, job_id: int) -> int:
        """Return the pid of a running job's shim."""
        found = seen(self.job_pid(job_id))
        assert found is not None
        assert b"shim.py" in Path(f"/proc/{found.parent}/cmdline").read_bytes()
        return found.parent

    def tell(self, job_id: int, *words: str) -> None:
        """Send a screen command to the session of a running job."""
        tell(self.environ, self.session(job_id), *words)

    def raw(self, job_id: int) -> bytes:
        """Return the job's log as bytes; return empty bytes if there is no log file."""
        path = Path(self.rows("SELECT log FROM jobs WHERE id=?", job_id)[0][0])
        return path.read_bytes() if path.exists() else b""

    def log(self, job_id: int) -> str:
        """Return the job's log as text with plain line ends."""
        return self.raw(job_id).decode(errors="replace").replace("\r\n", "\n")

    def wait_log(self, job_id: int, text: str) -> None:
        """Wait until the job's log contains ``text``."""
        wait_for(lambda: text in self.log(job_id), f"{text!r} in the log of job {job_id}")

    def wait_no_session(self) -> None:
        """Wait until all sessions have ended."""
        wait_for(lambda: not self.sessions(), f"the end of all sessions: {self.sessions()}")

    def script_of(self, name: str, text: str) -> str:
        """Write a shell script beside the jobs file; return its name."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return name

    def judge(self, codes: dict[int, int]) -> None:
        """P1, P2: Assert that no attempt was started twice, and that each recorded state and exit code is true.

        ``codes``: job id → exit code with which the job's command ends.
        """
        attempts = [(entry[1], entry[5], entry[7]) for entry in self.ledger() if entry[0] == "start"]
        assert len(attempts) == len(set(attempts)), self.ledger()
        ended = {int(entry[7]) for entry in self.ledger() if entry[0] == "end"}
        for job_id, state, outcome, code in self.rows("SELECT id, state, outcome, exit_code FROM jobs"):
            if state == "done":
                assert job_id in ended and codes[job_id] == 0, (job_id, self.ledger(), self.said())
            if outcome == "exit":
                assert job_id in ended and code == codes[job_id], (job_id, code, self.ledger())

    # -- the end --------------------------------------------------------------------------------------

    def end_all(self) -> None:
        """End all terminals, the daemon, and the sessions with their shims and jobs."""
        for terminal in self.terminals:
            terminal.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        marks = (f"GPUJOB_LAUNCH={self.folder}/", f"GPUJOB_STATE_FILE={self.folder}/")
        servers = [process.pid for process in marked(marks[0])]
        end_marked(*marks)
        for entry in os.listdir(self.sockets):
            number = entry.partition(".")[0]
            if number.isdigit() and int(number) in servers:
                with contextlib.suppress(FileNotFoundError):
                    (self.sockets / entry).unlink()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process; after SIGKILL, wait until the process has ended."""
    os.kill(pid, number)
    if number == signal.SIGKILL:
        wait_for(lambda: not alive(pid), f"the end of {pid}")
