"""The environment of a soak: a small disk, a fake GPU driver, and one daemon after the other."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from scheduler.core.job import Process
from scheduler.system.processes import environment_of, seen, send
from tests import fork_server
from tests.environ import clean
from tests.gpus.stub import FakeDriver
from tests.screens import end_marked, marked
from tests.soak.history import GARBLED, Kill, Life, now
from tests.stories.harness import ROOT, wait_for

GPUS = 4
START_LIMIT_S = 90.0
EARLY_S = 1.0
SERVANTS = {b"supervisor.py": "supervisor", b"shim.py": "shim"}

# Arguments: KEY SECONDS END KIND LEDGER KEY.ok; END is an exit code or -SIGNAL. Each line is written with one write, so
# that the lines of the ledger are in order of time.
JOB = f"""\
#!/bin/sh
[ "$6" = "$1.ok" ] || exit {GARBLED}
key=$1 ledger=$5
note() {{
    read -r at rest < /proc/uptime
    printf '%s\\n' "$1 $key $GPUJOB_ID $GPUJOB_ATTEMPT $$ $PPID ${{GPUJOB_GPUS:--}} ${{GPUJOB_SHARE:-0}} $at" >> "$ledger"
}}
[ "$4" = deaf ] && trap '' TERM
note start
sleep "$2"
[ "$4" = loud ] && yes "$key is loud" 2>/dev/null | head -c 10000000 2>/dev/null
[ "$4" = orphan ] && ( trap '' HUP; sleep 0.4; note gone ) </dev/null >/dev/null 2>&1 &
note end
[ "$4" = deaf ] && trap - TERM
case $3 in
    -*) kill "$3" $$; sleep 30 ;;
esac
exit "$3"
"""


class World:
    """The environment of a soak. ``disk``: the scheduler's folder, a small file system if mounting is allowed."""

    def __init__(self, size_mib: int, screens: bool) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="gsoak", dir="/tmp"))
        self.disk = self.base / "disk"
        self.disk.mkdir(mode=0o700)
        self.ledger = self.base / "ledger"
        self.ledger.touch()
        self.job = self.base / "job.sh"
        self.job.write_text(JOB)
        self.job.chmod(0o755)
        self.sockets = self.base / "s"
        for folder in (self.sockets, self.base / "run"):
            folder.mkdir(mode=0o700)
        options = f"size={size_mib}m,mode=0700"
        self.mounted = os.geteuid() == 0 and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.disk)], capture_output=True
        ).returncode  # fmt: skip
        self.screens = screens
        self.jobs_file = self.disk / "jobs.txt"
        self.state_file = self.disk / "gpu_scheduler_state.json"
        self.driver = FakeDriver(self.base / "driver")
        with self.driver.together():
            for n in range(GPUS):
                self.driver.gpu(f"GPU-{n}", total=80_000, used=500, load=0)
        # With PYTHONDONTWRITEBYTECODE each of hundreds of daemons would compile the program again.
        drop = ("CUDA_VISIBLE_DEVICES", "STY", "SYSSCREENRC", "PYTHONDONTWRITEBYTECODE")
        self.environ = clean(*drop)
        self.environ |= {
            **self.driver.environ(), "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(self.base / "run"),
            "SCREENDIR": str(self.sockets), "PYTHONUNBUFFERED": "1",
            "TZ": "UTC0",  # names of logs contain the local time, and one hour occurs twice when summer time ends
        }  # fmt: skip
        self.environ["PATH"] = f"{self.base}/bin:{self.environ['PATH']}"  # hides this machine's nvidia-smi
        (self.base / "bin").mkdir()
        smi = self.base / "bin" / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho no devices >&2\nexit 9\n")
        smi.chmod(0o755)
        self.lives: list[Life] = []
        self.kills: list[Kill] = []
        self.refused_starts: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.cli("version")  # starts the fork server before the threads

    # -- the daemon -----------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """The daemon that runs, or the last one that ran."""
        return self.lives[-1]

    def start(self, mode: str, ready: bool = True) -> None:
        """Start a daemon in ``mode``, direct or screen. Wait until the daemon is ready, unless ``ready`` is False.

        If a start fails because the disk is full, its error is recorded in ``refused_starts``, and the start is tried
        again.
        """
        end = time.monotonic() + START_LIMIT_S
        words = [sys.executable, "-m", "scheduler", "start", "--kill-grace=1", "--cpu-slots=4", "--gpu-interval=1",
                 "--assign-retry-wait=0.2", "--max-assign-attempts=1000", f"--gpus={GPUS}", "--keep-logs=30M"]  # fmt: skip
        words += ["--screen"] if mode == "screen" else []
        while True:
            number = len(self.lives) + 1
            out = self.base / f"daemon.{number}"
            with out.open("wb") as stream:
                self.process = subprocess.Popen(
                    ["sh", "-c", 'ulimit -c 0; exec "$0" "$@"', *words],
                    cwd=self.disk, env=self.environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                )  # fmt: skip
            self.lives.append(Life(number, self.process.pid, mode, now()))
            if not ready:
                return
            found = None
            while not found and self.process.poll() is None:
                assert time.monotonic() < end, f"the daemon is not ready: {out.read_text()}"
                found = b"scheduler started" in out.read_bytes()
                time.sleep(0.005)
            if found:
                self.life.ready = now()
                threading.Timer(EARLY_S, self._read_early, [self.life, self.process.pid]).start()
                return
            self.life.ended = now()
            said = out.read_text()
            assert self.process.returncode == 1 and time.monotonic() < end, f"start: {self.process.returncode} {said}"
            self.refused_starts.append(said.strip())
            time.sleep(0.1)

    def _read_early(self, life: Life, pid: int) -> None:
        with contextlib.suppress(OSError):  # the daemon was killed in the meantime
            life.early = reading(pid)

    def kill_daemon(self) -> None:
        """Kill the daemon, wait for its end, and record the kill."""
        assert self.process is not None
        with contextlib.suppress(OSError):
            self.life.late = reading(self.process.pid)
        at = now()
        self.process.kill()
        self.process.wait()
        self.life.ended = now()
        self.kills.append(Kill("daemon", self.process.pid, at, self.life.number))

    def stop(self) -> int:
        """Send SIGTERM to the daemon; return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.life.ended = now()
        return code

    # -- supervisors and shims ----------------------------------------------------------------------------

    def servants(self) -> list[tuple[Process, str]]:
        """Return the daemon's supervisor and shims, and the parents of running jobs, as pairs (process, kind)."""
        assert self.process is not None
        pids = children(self.process.pid)
        pids += [below for pid in pids for below in children(pid)]
        pids += [int(entry[5]) for entry in self.running()]
        found = {}
        for pid in pids:
            one = seen(pid)
            kind = servant(pid)
            if one is not None and one.alive and kind and not servant(one.parent):  # otherwise a job before its exec
                found[Process(pid, one.ticks)] = kind
        return list(found.items())

    def running(self) -> list[list[str]]:
        """Return the ledger's start lines of jobs that have no end line.

        Only the last 8000 bytes of the ledger are read.
        """
        with self.ledger.open("rb") as stream:
            stream.seek(max(0, self.ledger.stat().st_size - 8000))
            lines = [line.split() for line in stream.read().decode().splitlines()[1:]]
        over = {entry[1] for entry in lines if entry[0] == "end"}
        return [entry for entry in lines if entry[0] == "start" and entry[1] not in over]

    def kill_servant(self, process: Process, kind: str) -> bool:
        """Kill this supervisor or shim and record the kill; return False if the process has ended."""
        one = seen(process.pid)
        if one is None or one.ticks != process.ticks or not one.alive:
            return False
        job = 0
        above = one.parent
        if kind == "shim":
            server = seen(above)
            above = server.parent if server is not None else 0
            for entry in environment_of(process.pid):
                if entry.startswith(b"STY=") and (match := re.search(rb"gpujob_[^_]*_unknown_(\d+)", entry)):
                    job = int(match[1])
        life = self.life.number if above == self.life.pid else 0
        kill = Kill(kind, process.pid, now(), life, job)
        if not send(process, signal.SIGKILL):
            return False
        self.kills.append(kill)
        return True

    # -- asking ---------------------------------------------------------------------------------------

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `gpujob WORDS…` in a forked interpreter; return the finished process."""
        return fork_server.run(words, self.disk, self.environ, "", 120)

    def rows(self, query: str) -> list[tuple]:
        """Return the rows of a query of the store."""
        connection = sqlite3.connect(f"file:{self.disk / '.gpujob/store.db'}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def said(self) -> str:
        """Return the output of all daemons."""
        return "".join((self.base / f"daemon.{life.number}").read_text(errors="replace") for life in self.lives)

    # -- the end --------------------------------------------------------------------------------------

    def left(self) -> list[Process]:
        """Return the living processes of jobs and sessions of this scheduler."""
        return marked(f"GPUJOB_STATE_FILE={self.state_file}", f"GPUJOB_LAUNCH={self.disk}/")

    def end(self, keep: bool) -> None:
        """End all processes and remove the folder; with ``keep``, keep the folder and copy the disk into it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_marked(f"GPUJOB_STATE_FILE={self.state_file}", f"GPUJOB_LAUNCH={self.disk}/", f"SCREENDIR={self.sockets}")
        if keep:
            shutil.copytree(
                self.disk, self.base / "kept", ignore=shutil.ignore_patterns("filler", "gpu_scheduler_logs")
            )
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)
        if not keep:
            shutil.rmtree(self.base)


def reading(pid: int) -> tuple[int, int]:
    """Return the number of open descriptors and the resident memory in KiB. Raises OSError if the process has ended."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    if found is None:  # a zombie
        raise ProcessLookupError(pid)
    return len(os.listdir(f"/proc/{pid}/fd")), int(found[1])


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process; empty if the process has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def servant(pid: int) -> str:
    """Return the kind of a process by its command line: ``supervisor``, ``shim``, or empty for other processes."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((kind for word in words[1:5] for name, kind in SERVANTS.items() if word.endswith(b"/" + name)), "")


@contextlib.contextmanager
def world(size_mib: int, screens: bool, keep: bool = False) -> Iterator[World]:
    """Yield the environment of a soak; remove it afterwards unless there was an error or ``keep`` is set."""
    made = World(size_mib, screens)
    try:
        yield made
    except BaseException:
        made.end(keep=True)
        print(f"kept: {made.base}", flush=True)
        raise
    made.end(keep=keep)


__all__ = ["World", "wait_for", "world"]
