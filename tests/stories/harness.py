"""A real scheduler in a temporary folder: started, asked, killed; and jobs that keep their own ledger."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import fork_server

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = [sys.executable, "-m", "scheduler"]
# Sweeps and soaks in their long form: `make test-long`.
LONG = os.environ.get("GPUJOB_LONG") == "1"
PATIENCE_S = 60.0
LOOK_S = 30.0  # a job that came this moment is looked at in the next

# Writes "start" and "end" lines that the scheduler never sees; waits for a file if told to.
LEDGER_JOB = """\
import os, sys, time, signal
folder, key, code, seconds = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
def note(what):
    fd = os.open(os.path.join(folder, "ledger"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    gpus = os.environ.get("GPUJOB_GPUS"); share = os.environ.get("GPUJOB_SHARE"); n = os.environ.get("GPUJOB_ATTEMPT")
    text = f"{what} {key} {os.getpid()} {gpus or '-'} {share} {n} {time.monotonic():.6f} {os.environ.get('GPUJOB_ID')}\\n"
    os.write(fd, text.encode()); os.close(fd)
note("start")
until = time.monotonic() + seconds
while time.monotonic() < until or os.path.exists(os.path.join(folder, f"hold-{key}")):
    time.sleep(0.01)
note("end")
if code.startswith("s"):
    signal.signal(int(code[1:]), signal.SIG_DFL) if int(code[1:]) != 9 else None
    os.kill(os.getpid(), int(code[1:])); time.sleep(30)
sys.exit(int(code))
"""


def wait_for(condition: Callable[[], Any], what: str, limit: float = PATIENCE_S) -> Any:
    """The first true answer of ``condition``; fails with ``what`` when it does not come.

    The longer it waits, the less often it asks: workers that ask all the time would leave the scheduler no processor.
    """
    begun = time.monotonic()
    while True:
        found = condition()
        if found:
            return found
        waited = time.monotonic() - begun
        if waited > limit:
            raise AssertionError(f"not within {limit:g} s: {what}")
        time.sleep(min(0.05, max(0.01, 0.1 * waited)))


def alive(pid: int) -> bool:
    """Whether a process with this number runs (zombies do not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"


REPLACED = "_state.json.new-"  # in the name of a picture of the state file that was replaced a moment ago


def open_names(pid: int) -> list[str]:
    """What a process has open: paths, and sockets and pipes without their numbers."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0])
    return found


def open_files(pid: int) -> Counter[str]:
    """What a process has open, but for what comes and goes by itself: the files of the history, and replaced pictures of the
    state file (a few at most).
    """
    return Counter(name for name in open_names(pid) if "/history.db" not in name and REPLACED not in name)


def none_more_open(before: dict[int, Counter[str]]) -> None:
    """Wait until these processes (pid → what was open) have nothing open beyond that."""

    def more() -> dict[int, Counter[str]]:
        return {pid: extra for pid, then in before.items() if (extra := open_files(pid) - then)}

    try:
        wait_for(lambda: not more(), "no file more is open", 20)
    except AssertionError as error:
        raise AssertionError(f"{error}: {more()}") from None


def stopped(pid: int) -> bool:
    """Whether it stands still (SIGSTOP): the signal is sent before it has its effect."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def freeze(pid: int, store_lock: Path) -> None:
    """SIGSTOP of a daemon, at a moment at which it does not keep everybody out of the store."""

    def frozen() -> bool:
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: stopped(pid), "a stop")
        with store_lock.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.kill(pid, signal.SIGCONT)
                return False
        return True

    wait_for(frozen, "stopped between two transactions")


class Scheduler:
    """One scheduler in ``folder``."""

    def __init__(self, folder: Path, gpus: int | None = 2, **settings: Any) -> None:
        """``gpus`` None: whatever is detected."""
        self.folder, self.gpus, self.settings = folder, gpus, settings
        self.process: fork_server.ForkedProcess | subprocess.Popen[bytes] | None = None
        self.jobs_file = folder / "jobs.txt"
        self.script = folder / "job.py"
        self.script.write_text(LEDGER_JOB)
        self.output = folder / "daemon.out"
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("GPUJOB_")}
        self.environ.update(PYTHONPATH=str(ROOT), XDG_RUNTIME_DIR=str(folder / "run"), PYTHONUNBUFFERED="1")
        (folder / "run").mkdir(exist_ok=True, mode=0o700)
        self.supervisors: set[int] = set()
        self.command = INTERPRETER  # another one gets a new interpreter for its schedulers

    # -- the daemon -----------------------------------------------------------------------------------

    def start(self, *words: str, ready: bool = True, **environ: str) -> Scheduler:
        """Start it and wait until it says so."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        flags += [] if self.gpus is None else [f"--gpus={self.gpus}"]
        before = self.said().count("scheduler started")
        words = ("start", *flags, *words)
        environ = {**self.environ, **environ}
        with self.output.open("ab") as out:
            if self.command == INTERPRETER:
                self.process = fork_server.start(words, self.folder, environ, out, out)
            else:
                self.process = subprocess.Popen(
                    [*self.command, *words],
                    cwd=self.folder,
                    env=environ,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                )
        if ready:
            wait_for(
                lambda: self.said().count("scheduler started") > before or self.process.poll() is not None, "start"
            )
            assert self.process.poll() is None, self.said()
            self.in_office()
        return self

    def in_office(self) -> None:
        """After each start: remember who is there."""
        self.supervisors.add(self.supervisor_pid())

    def said(self) -> str:
        """All output so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def says(self, text: str, times: int | None = None) -> None:
        """Wait until it has said this (``times``: so often, and not more): its output comes a moment after what it tells of."""
        wait_for(lambda: self.said().count(text) >= (times or 1), f"{text!r} in\n{self.said()[-3000:]}")
        assert times is None or self.said().count(text) == times, self.said()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def supervisor_pid(self) -> int:
        """Pid of the supervisor of this daemon."""

        def find() -> int:
            for child in _children(self.pid):
                try:
                    if b"supervisor.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return child
                except OSError:
                    continue
            return 0

        return int(wait_for(find, "a supervisor"))

    def kill(self) -> None:
        """kill -9, and wait for the corpse."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP, at a moment at which it does not keep everybody out of the store."""
        freeze(self.pid, self.folder / ".gpujob" / "store.lock")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            if isinstance(self.process, fork_server.ForkedProcess):
                self.process.send_signal(signal.SIGUSR2)  # it writes the stacks of its threads
                time.sleep(1)
            raise AssertionError(f"not within 20 s: the end of the scheduler\n{self.said()[-6000:]}") from None

    def end_all(self) -> None:
        """End the daemon and every process of its jobs (those that carry this scheduler's mark)."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        mark = f"GPUJOB_STATE_FILE={self.folder}/".encode()
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    if b"\0" + mark in b"\0" + Path(f"/proc/{name}/environ").read_bytes():
                        os.kill(int(name), signal.SIGKILL)
                except OSError:
                    continue

    # -- asking ---------------------------------------------------------------------------------------

    def cli(self, *words: str, code: int | None = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the scheduler's folder; its exit code must be ``code`` (None: any)."""
        done = fork_server.run(words, self.folder, self.environ, stdin or "", 90)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def status(self) -> dict[str, Any]:
        """`status --json`."""
        value: dict[str, Any] = json.loads(self.cli("status", "--json").stdout)
        return value

    def rows(self, query: str, *values: Any) -> list[Any]:
        """A look into the store."""
        path = self.folder / ".gpujob" / "store.db"
        if not path.exists():
            return []
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
        try:
            return connection.execute(query, values).fetchall()
        except sqlite3.OperationalError:
            return []
        finally:
            connection.close()

    def states(self) -> dict[int, str]:
        """Id → state of all jobs."""
        return dict(self.rows("SELECT id, state FROM jobs"))

    def job(self, job_id: int) -> dict[str, Any]:
        """A job as `show --json` gives it, when it has been looked at."""
        end = time.monotonic() + LOOK_S
        while True:
            found = self.cli("show", str(job_id), "--json", code=None)
            value: dict[str, Any] = json.loads(found.stdout) if found.returncode == 0 else {"reason_code": "new"}
            if value["reason_code"] != "new" or time.monotonic() > end:
                assert found.returncode == 0, found.stderr
                return value

    def log(self, job_id: int) -> str:
        """The log of the job's last attempt."""
        return Path(self.rows("SELECT log FROM jobs WHERE id=?", job_id)[0][0]).read_text()

    def wait_state(self, job_id: int, *states: str, limit: float = PATIENCE_S) -> str:
        """Wait until the job is in one of these states."""
        return str(
            wait_for(
                lambda: (s := self.states().get(job_id)) in states and s,
                f"job {job_id} in {states}, is {self.states().get(job_id)}\n{self.said()[-3000:]}",
                limit,
            )
        )

    def wait_ended(self, number: int, limit: float = PATIENCE_S) -> dict[int, str]:
        """Wait until ``number`` jobs exist and all have ended."""
        ended = {"done", "failed", "cancelled", "skipped"}

        def check() -> dict[int, str] | None:
            states = self.states()
            return states if len(states) >= number and set(states.values()) <= ended else None

        try:
            found: dict[int, str] = wait_for(check, f"{number} ended jobs", limit)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.states()}\n{self.said()[-3000:]}") from None
        return found

    # -- jobs -----------------------------------------------------------------------------------------

    def line(
        self, key: str, code: object = 0, seconds: float = 0.0, *, priority: int = 0, more: str = "", gpus: str = ""
    ) -> str:
        """A jobs line of the ledger job."""
        return f"{priority},{self.script},,{self.folder} {key} {code} {seconds} {more},{gpus}"

    def append(self, *lines: str) -> None:
        """As `echo >>` does."""
        with self.jobs_file.open("a") as stream:
            stream.write("".join(line + "\n" for line in lines))

    def hold(self, key: str) -> None:
        """The ledger job of this key runs until released."""
        (self.folder / f"hold-{key}").touch()

    def release(self, key: str) -> None:
        """Let it end."""
        (self.folder / f"hold-{key}").unlink(missing_ok=True)

    def ledger(self) -> list[list[str]]:
        """What the jobs wrote: what, key, pid, gpus, share, attempt, time, id."""
        path = self.folder / "ledger"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self, key: str) -> int:
        """How often the command of this key was really executed."""
        return sum(1 for entry in self.ledger() if entry[0] == "start" and entry[1] == key)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
