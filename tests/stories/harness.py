"""Start, query and kill a real scheduler in a temporary folder; its jobs record their runs in a ledger file."""

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
from tests.environ import clean
from tests.screens import end_marked

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = [sys.executable, "-m", "scheduler"]
# True in `make test-long`: sweeps and soaks run in their long form.
LONG = os.environ.get("GPUJOB_LONG") == "1"
PATIENCE_S = 60.0
BRIEF_S = 2.0
LOOK_S = 30.0  # longest wait until the daemon has considered a new job

# Appends "start" and "end" lines to the file `ledger`, which the scheduler does not read. Runs while `hold-KEY` exists.
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
    """Call ``condition`` repeatedly until its result is true; return this result.

    Raises AssertionError with the text ``what`` if no result is true within ``limit`` seconds. The pause between two
    calls grows from 10 to 50 ms: polling without pauses would take CPU time from the scheduler.
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
    """Return whether a process with this pid exists and is not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"


REPLACED = "_state.json.new-"  # part of the name of an old version of the state file that is still open


def open_names(pid: int) -> list[str]:
    """Return the names of the open files of a process: paths, or words such as `socket` without the inode number."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0])
    return found


def open_files(pid: int) -> Counter[str]:
    """Count the open files of a process by name.

    The files of the history, and old versions of the state file that are still open, are not counted: their number
    varies.
    """
    return Counter(name for name in open_names(pid) if "/history.db" not in name and REPLACED not in name)


def none_more_open(before: dict[int, Counter[str]]) -> None:
    """Wait until no process has more files open than in ``before`` (pid → its open files)."""

    def more() -> dict[int, Counter[str]]:
        return {pid: extra for pid, then in before.items() if (extra := open_files(pid) - then)}

    try:
        wait_for(lambda: not more(), "no file more is open", 20)
    except AssertionError as error:
        raise AssertionError(f"{error}: {more()}") from None


def stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP. The signal takes effect some time after it was sent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def freeze(pid: int, store_lock: Path) -> None:
    """Stop a daemon (SIGSTOP) at a moment when it does not hold the store lock.

    A stopped daemon that holds the lock would block all commands.
    """

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
    """A scheduler that runs in ``folder``. ``settings``: options of `gpujob start`, written with `_` instead of `-`."""

    def __init__(self, folder: Path, gpus: int | None = 2, **settings: Any) -> None:
        """Prepare the folder; do not start the daemon. ``gpus``: number of declared GPUs, or None to detect them."""
        self.folder, self.gpus, self.settings = folder, gpus, settings
        self.process: fork_server.ForkedProcess | subprocess.Popen[bytes] | None = None
        self.jobs_file = folder / "jobs.txt"
        self.script = folder / "job.py"
        self.script.write_text(LEDGER_JOB)
        self.output = folder / "daemon.out"
        self.environ = clean()
        self.environ.update(PYTHONPATH=str(ROOT), XDG_RUNTIME_DIR=str(folder / "run"), PYTHONUNBUFFERED="1")
        (folder / "run").mkdir(exist_ok=True, mode=0o700)
        self.environ["GPUJOB_BOOKINGS_FOLDER"] = str(folder / "run")
        self.supervisors: set[int] = set()
        self.command = INTERPRETER  # with another command, `start` runs a new interpreter instead of a fork

    # -- the daemon -----------------------------------------------------------------------------------

    def start(self, *words: str, ready: bool = True, **environ: str) -> Scheduler:
        """Start the daemon; with ``ready``, wait until it prints that it has started. ``words``: further options."""
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
        """Add the pid of the supervisor to ``supervisors``; `start` calls this method."""
        self.supervisors.add(self.supervisor_pid())

    def said(self) -> str:
        """Return all output of the daemons so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def says(self, text: str, times: int | None = None) -> None:
        """Wait until the output contains ``text``.

        With ``times``, also assert that the output contains ``text`` exactly that many times. The wait is necessary
        because the daemon prints a message only after it has committed the change.
        """
        wait_for(lambda: self.said().count(text) >= (times or 1), f"{text!r} in\n{self.said()[-3000:]}")
        assert times is None or self.said().count(text) == times, self.said()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def supervisor_pid(self) -> int:
        """Return the pid of the supervisor of this daemon; wait until there is one."""

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
        """Kill the daemon (SIGKILL) and wait until it is reaped."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop the daemon (SIGSTOP) at a moment when it does not hold the lock of the store."""
        freeze(self.pid, self.folder / ".gpujob" / "store.lock")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the daemon a signal (default: SIGTERM), wait for its end and return its exit code.

        Raises AssertionError if the daemon has not ended 20 s after the signal.
        """
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            if isinstance(self.process, fork_server.ForkedProcess):
                self.process.send_signal(signal.SIGUSR2)  # prints the stacks of its threads
                time.sleep(1)
            raise AssertionError(f"not within 20 s: the end of the scheduler\n{self.said()[-6000:]}") from None

    def end_all(self) -> None:
        """Kill the daemon and all processes of its jobs.

        The processes are found by the name of the state file in their environment.
        """
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_marked(f"GPUJOB_STATE_FILE={self.folder}/")

    # -- asking ---------------------------------------------------------------------------------------

    def cli(self, *words: str, code: int | None = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the scheduler's folder and return the result. Its exit code must be ``code`` (None: any)."""
        done = fork_server.run(words, self.folder, self.environ, stdin or "", 90)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def status(self) -> dict[str, Any]:
        """Return the output of `status --json`."""
        value: dict[str, Any] = json.loads(self.cli("status", "--json").stdout)
        return value

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Return the rows of a query on the store. Return [] if there is no store or SQLite cannot run the query."""
        path = self.folder / ".gpujob" / "store.db"
        if not path.exists():
            return []
        try:  # `recover` may move the store away before it is opened
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
                return connection.execute(query, values).fetchall()
        except sqlite3.OperationalError:
            return []

    def states(self) -> dict[int, str]:
        """Return the state of each job: id → state."""
        return dict(self.rows("SELECT id, state FROM jobs"))

    def job(self, job_id: int) -> dict[str, Any]:
        """Return a job in the form that `show --json` prints.

        First wait until the daemon has considered the job: until then, the reason code of the job is `new`. The wait
        ends after ``LOOK_S`` seconds at the latest, or after ``BRIEF_S`` seconds if no daemon runs.
        """
        running = self.process is not None and self.process.poll() is None
        end = time.monotonic() + (LOOK_S if running else BRIEF_S)  # without a daemon the reason stays "new"
        while True:
            found = self.cli("show", str(job_id), "--json", code=None)
            value: dict[str, Any] = json.loads(found.stdout) if found.returncode == 0 else {"reason_code": "new"}
            if value["reason_code"] != "new" or time.monotonic() > end:
                assert found.returncode == 0, found.stderr
                return value
            time.sleep(0.02)

    def log(self, job_id: int) -> str:
        """Return the log of the job's last attempt."""
        return Path(self.rows("SELECT log FROM jobs WHERE id=?", job_id)[0][0]).read_text()

    def wait_state(self, job_id: int, *states: str, limit: float = PATIENCE_S) -> str:
        """Wait until the job is in one of these states; return the state."""
        try:
            return str(
                wait_for(lambda: (s := self.states().get(job_id)) in states and s, f"job {job_id} in {states}", limit)
            )
        except AssertionError as error:
            raise AssertionError(f"{error}, is {self.states().get(job_id)}\n{self.said()[-3000:]}") from None

    def wait_ended(self, number: int, limit: float = PATIENCE_S) -> dict[int, str]:
        """Wait until at least ``number`` jobs exist and all jobs have ended; return id → state."""
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
        """Return a line for the jobs file. Its job runs the ledger script for ``seconds``.

        The script writes its start and its end to the ledger file. ``code``: exit code of the script, or "s6" to let it
        end by signal 6. ``more``: text after the script's arguments.
        """
        return f"{priority},{self.script},,{self.folder} {key} {code} {seconds} {more},{gpus}"

    def append(self, *lines: str) -> None:
        """Append lines to the jobs file, as `echo >>` does."""
        with self.jobs_file.open("a") as stream:
            stream.write("".join(line + "\n" for line in lines))

    def hold(self, key: str) -> None:
        """Make the ledger job with this key run until `release`."""
        (self.folder / f"hold-{key}").touch()

    def release(self, key: str) -> None:
        """Let the ledger job with this key end."""
        (self.folder / f"hold-{key}").unlink(missing_ok=True)

    def ledger(self) -> list[list[str]]:
        """Return the ledger lines as words: start or end, key, pid, GPUs, share, attempt, monotonic time, job id."""
        path = self.folder / "ledger"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # a line may be written only in part
        return [line.split() for line in whole.splitlines()]

    def starts(self, key: str) -> int:
        """Return how often the command with this key was executed, counted by the job itself."""
        return sum(1 for entry in self.ledger() if entry[0] == "start" and entry[1] == key)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
