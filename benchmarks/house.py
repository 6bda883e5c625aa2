"""A scheduler in a temporary folder for the measurements, and functions that wait for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import scheduler
from benchmarks.disk import settle

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(scheduler.__file__)))
QUIET_S = 0.1
STEP_S = 0.025
PATIENCE_S = 60.0


class Stuck(Exception):
    """Raised when an expected event did not happen in time, or when a command failed.

    The measurement is then invalid.
    """


def wait_until(happened: Callable[[], bool], what: str, patience_s: float = PATIENCE_S, step_s: float = 0.01) -> None:
    """Call ``happened`` every ``step_s`` seconds until it returns true.

    Raises Stuck if it has not returned true after ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while not happened():
        if time.monotonic() > deadline:
            raise Stuck(f"not within {patience_s:g} s: {what}")
        time.sleep(step_s)


def switches(pid: int) -> int:
    """Return how many context switches (voluntary and involuntary) all threads of a process have had so far."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):
            with open(f"/proc/{pid}/task/{task}/status", encoding="ascii", errors="replace") as stream:
                total += sum(int(line.split()[1]) for line in stream if "ctxt_switches" in line)
    return total


def wait_quiet(pids: tuple[int, ...], patience_s: float = PATIENCE_S) -> None:
    """Wait until all these processes have slept for QUIET_S seconds without a break.

    Raises Stuck if this has not happened after ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    before, since = -1, time.monotonic()
    while True:
        now = time.monotonic()
        count = sum(map(switches, pids))
        if count != before:
            before, since = count, now
        elif now - since >= QUIET_S:
            return
        if now > deadline:
            raise Stuck(f"processes {pids} do not come to rest")
        time.sleep(STEP_S)


def append(path: str, text: str) -> int:
    """Append ``text`` with one write. Return the monotonic time just before the write, in nanoseconds."""
    data = text.encode()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        at = time.monotonic_ns()
        if os.write(fd, data) != len(data):
            raise OSError(28, "short write", path)
        return at
    finally:
        os.close(fd)


def ledger(path: str) -> list[tuple[str, int, int]]:
    """Return (word, start, end) of each line that the job program has appended to a file.

    ``word`` is the job's argument. Start and end are monotonic times in nanoseconds. If there is no file, the result is
    empty.
    """
    try:
        with open(path, encoding="ascii") as stream:
            return [(word, int(start), int(end)) for word, start, end in (line.split() for line in stream)]
    except FileNotFoundError:
        return []


def end(process: subprocess.Popen[bytes], patience_s: float = 15.0) -> None:
    """End a child process: SIGTERM, and SIGKILL after ``patience_s`` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class House:
    """A scheduler in a temporary folder (a context manager). ``gpus``: declared GPUs; 0 on a cluster.

    The folder is not removed at exit: after the removal of many files ext4 creates new files more slowly, which would
    distort the next case.
    """

    def __init__(
        self, base: str, *, gpus: int, words: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="house-", dir=base)
        self.jobs_file = os.path.join(self.folder, "jobs.txt")
        self.store = os.path.join(self.folder, ".gpujob", "store.db")
        mine = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUJOB_") and k not in mine}
        search = os.pathsep.join([ROOT, *filter(None, [kept.get("PYTHONPATH")])])
        # Compiled code is used, as in an installed package, but it is not written into the checkout.
        compiled = os.path.join(base, "pycache")
        self.environ = {
            **kept, "PYTHONPATH": search, "XDG_RUNTIME_DIR": self.folder, "GPUJOB_BOOKINGS_FOLDER": self.folder,
            "GPUJOB_MACHINE_CONFIG": "/nonexistent/config.yaml", "PYTHONPYCACHEPREFIX": compiled, **(environ or {}),
        }  # fmt: skip
        self.gpus, self.words = gpus, words
        self.daemon: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0  # monotonic time at which the last start was complete
        self._log, self._log_start = os.path.join(self.folder, "gpu_scheduler.log"), 0
        self.supervisor = 0
        self._supervisor_fd = -1

    def __enter__(self) -> House:
        try:
            self.start()
            self.prepare()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def prepare(self) -> None:
        """Bring the file system and the scheduler into a state in which measurements can be repeated."""
        for name in (".gpujob/attempts", "logs"):  # each job has a file in both
            os.makedirs(self.path(name), mode=0o700, exist_ok=True)
            settle(self.path(name), self.path("spare"))
        self.wait_quiet()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.daemon is not None:
            end(self.daemon)
        if self._supervisor_fd >= 0:  # the supervisor ends after its last job
            if not select.select([self._supervisor_fd], [], [], 10.0)[0]:
                signal.pidfd_send_signal(self._supervisor_fd, signal.SIGKILL)
            os.close(self._supervisor_fd)

    def start(self) -> None:
        """Start the daemon, and set ``started_at``. May be called again after the daemon has ended. Raises Stuck."""
        open(self.jobs_file, "a", opener=lambda path, flags: os.open(path, flags, 0o600)).close()
        self._log_start = os.path.getsize(self._log) if os.path.exists(self._log) else 0
        logs = os.path.join(self.folder, "logs")
        gpus = ["--gpus", str(self.gpus)] if self.gpus else []
        words = [sys.executable, "-m", "scheduler", "start", *gpus, "--log-dir", logs, *self.words]
        with open(self.path("stderr"), "wb") as stderr:
            self.daemon = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        wait_until(self._is_started, "the daemon started", 120.0, 0.002)
        self.started_at = time.monotonic()
        with open(f"/proc/{self.pid}/task/{self.pid}/children", encoding="ascii") as stream:
            children = [int(word) for word in stream.read().split()]
        for child in children:
            with open(f"/proc/{child}/cmdline", "rb") as stream:
                if b"supervisor.py" in stream.read():
                    if self._supervisor_fd >= 0:
                        os.close(self._supervisor_fd)  # of the daemon before: it ends with its last job
                    self.supervisor, self._supervisor_fd = child, os.pidfd_open(child)
        if not self.supervisor and not {"--screen", "--engine"}.intersection(self.words):
            raise Stuck("the daemon has no supervisor")

    def _is_started(self) -> bool:
        if self.daemon is None or self.daemon.poll() is not None:
            with open(self.path("stderr"), encoding="utf-8", errors="replace") as stream:
                said = stream.read().strip().rsplit("\n", 1)[-1]
            raise Stuck(f"the daemon did not start: {said}")
        try:
            with open(self._log, encoding="utf-8") as stream:
                stream.seek(self._log_start)
                return "scheduler started" in stream.read()
        except FileNotFoundError:
            return False

    @property
    def pid(self) -> int:
        """Return the process id of the daemon."""
        assert self.daemon is not None
        return self.daemon.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the daemon and of its supervisor. In screen mode there is no supervisor."""
        return (self.pid, self.supervisor) if self.supervisor else (self.pid,)

    def path(self, name: str) -> str:
        """Return the path of a file in the scheduler's folder."""
        return os.path.join(self.folder, name)

    def wait_quiet(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until daemon and supervisor have slept for QUIET_S seconds without a break.

        Raises Stuck if this has not happened after ``patience_s`` seconds.
        """
        wait_quiet(self.pids, patience_s)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection to the store for the time of a with block."""
        connection = sqlite3.connect(f"file:{self.store}?mode=ro", uri=True, isolation_level=None, timeout=5.0)
        try:
            yield connection
        finally:
            connection.close()

    def wait_accepted(self, count: int, patience_s: float = 1800.0) -> None:
        """Wait until the store has ``count`` jobs. Raises Stuck after ``patience_s`` seconds."""
        with self.reading() as connection:
            question = "SELECT count(*) FROM jobs"
            wait_until(lambda: _one(connection, question) >= count, f"{count} lines accepted", patience_s)

    def wait_ended(self, count: int, patience_s: float = PATIENCE_S, step_s: float = 0.1) -> None:
        """Wait until ``count`` jobs have ended.

        Raises Stuck if this has not happened after ``patience_s`` seconds, or if the state of an ended job is not
        ``done``.
        """
        with self.reading() as connection:
            wait_until(
                lambda: _one(connection, "SELECT count(*) FROM jobs WHERE finished_at IS NOT NULL") >= count,
                f"{count} jobs ended",
                patience_s,
                step_s,
            )
            bad = _one(connection, "SELECT count(*) FROM jobs WHERE finished_at IS NOT NULL AND state<>'done'")
        if bad:
            raise Stuck(f"{bad} jobs did not end well")

    def command(self, *words: str) -> float:
        """Run a gpujob command in a new process and return the seconds it took. Raises Stuck when it fails."""
        return timed([sys.executable, "-m", "scheduler", *words], self.folder, self.environ)


def _one(connection: sqlite3.Connection, question: str) -> int:
    return int(connection.execute(question).fetchone()[0])


def timed(words: list[str], folder: str, environ: dict[str, str]) -> float:
    """Run a program and return the seconds from its start to its end.

    Raises Stuck if the program fails or takes longer than 60 s.
    """
    before = time.perf_counter()
    try:
        done = subprocess.run(words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise Stuck(f"not within 60 s: {' '.join(words)}") from None
    took = time.perf_counter() - before
    if done.returncode:
        raise Stuck(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()}")
    return took
