"""Test benches for the runners. A bench has a runner in a temporary folder, its jobs, and the runner's observations."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.core.launch import Launch
from scheduler.core.observations import Ended, Observation, Started
from scheduler.runners import engine, screen
from scheduler.runners.direct import DirectRunner
from scheduler.runners.engine import EngineRunner
from scheduler.runners.screen import ScreenRunner
from scheduler.system.proc import boot_id
from scheduler.system.processes import lives, own_children, seen
from tests.fake_engine import FakeEngine
from tests.screens import socket_folder

LIMIT_S = 30.0


class Bench:
    """A runner in its own folder, and the observations that this runner returned.

    ``observations``: all observations so far; ``leaders``: the main processes of the jobs. A subclass creates the
    runner.
    """

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("attempts", "logs", "sessions"):
            (folder / name).mkdir()
        self.runner: Any = self.make()
        self.observations: list[Observation] = []
        self.leaders: list[Any] = []

    def make(self) -> Any:
        """Return a new runner that uses the folder of this bench."""
        raise NotImplementedError

    def job(self, number: int, *argv: str, attempt: int = 1, **more: Any) -> tuple[Job, Launch]:
        log = str(self.folder / "logs" / f"{number}.{attempt}.log")
        job = Job(
            id=number, spec=JobSpec(arguments=argv), need=ResourceRequest(1, 1000), state=JobState.STARTING, attempt=attempt,
            gpus=(0,), log=log, boot=boot_id(), runner=self.name, session=more.pop("session", None),
        )  # fmt: skip
        environment = {
            "GPUJOB_ID": str(number), "GPUJOB_ATTEMPT": str(attempt),
            "GPUJOB_STATE_FILE": str(self.folder / "state.json"), **more.pop("environment", {}),
        }  # fmt: skip
        return job, Launch(job.attempt_key, argv, environment, more.pop("cwd", str(self.folder)), log, **more)

    def start(self, number: int, *argv: str, **more: Any) -> Job:
        job, launch = self.job(number, *argv, **more)
        self.runner.start(job, launch)
        self.runner.flush()
        return job

    def look(self) -> None:
        """Wait up to 20 ms for an event, and append the runner's new observations to ``observations``."""
        select.select(self.runner.descriptors(), [], [], 0.02)
        found = self.runner.look()
        self.leaders += [observation.process for observation in found if isinstance(observation, Started)]
        self.observations += found

    def until(self, kind: type, job: int = 0) -> Any:
        """Call `look` until an observation has this type; return the observation.

        If ``job`` is not 0, the observation must also belong to this job. Raises AssertionError after ``LIMIT_S``
        seconds.
        """
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for observation in self.observations:
                if isinstance(observation, kind) and (not job or getattr(observation, "job", job) == job):
                    return observation
            self.look()
        raise AssertionError(f"no {kind.__name__} of job {job}: {self.observations}")

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Call `look` until ``condition`` returns a true value; return this value.

        ``what``: a description of the condition for the error message. Raises AssertionError after ``LIMIT_S`` seconds.
        """
        end = time.monotonic() + LIMIT_S
        while not (found := condition()):
            assert time.monotonic() < end, f"not seen: {what}: {self.observations}"
            self.look()
        return found

    def raw(self, number: int, attempt: int = 1) -> bytes:
        """Return the contents of an attempt's log; empty if the log does not exist."""
        path = self.folder / "logs" / f"{number}.{attempt}.log"
        return path.read_bytes() if path.exists() else b""

    def text(self, number: int) -> str:
        """Return the log of the job's first attempt as text. CR LF, which a terminal writes, is converted to LF."""
        return self.raw(number).decode(errors="surrogateescape").replace("\r\n", "\n")

    def whole(self, number: int) -> str:
        """Wait for the end of the job, and return its log."""
        self.until(Ended, number)
        return self.text(number)

    def record(self, number: int, attempt: int = 1) -> str:
        """Return the path of an attempt record."""
        return str(self.folder / "attempts" / f"{number}.{attempt}")

    def orphan(self, runner: Any) -> None:
        """Close this runner, to imitate a daemon that was killed. The test process continues."""
        runner.close()

    def close(self) -> None:
        """Kill the process groups of all jobs that still run."""
        for process in self.leaders:
            if lives(process):
                with contextlib.suppress(ProcessLookupError):  # a supervisor may reap it before this call
                    os.killpg(process.pid, signal.SIGKILL)


class DirectBench(Bench):
    """A bench whose runner starts jobs as children of a supervisor, without GNU Screen."""

    name = "direct"

    def make(self) -> DirectRunner:
        runner = DirectRunner(
            str(self.folder / "attempts"),
            str(self.folder / "state.json"),
            dict(os.environ),
            str(self.folder / "supervisor.err"),
        )
        # Other children of the test process, such as a browser, are not jobs.
        others = (seen(pid) for pid in own_children() if pid != runner.supervisor_pid)
        runner.leave_alone({found.session for found in others if found is not None and found.session == found.pid})
        return runner

    def orphan(self, runner: Any) -> None:
        runner.close()  # its supervisor continues to record how jobs end

    def close(self) -> None:
        super().close()
        supervisor = self.runner.supervisor_pid
        self.runner.close()
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:  # the supervisor ends with its last job
            try:
                if os.waitpid(supervisor, os.WNOHANG)[0]:
                    break
            except ChildProcessError:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("the supervisor did not end")
        reap_all()


class ScreenBench(Bench):
    """A bench whose runner starts each job in a terminal session. ``sockets``: the socket folder of these sessions."""

    name = "screen"

    def __init__(self, folder: Path, sockets: Path, **environ: str) -> None:
        self.sockets = sockets
        self.environ = {**os.environ, "SCREENDIR": str(sockets), **environ}
        super().__init__(folder)

    def make(self) -> ScreenRunner:
        return ScreenRunner(
            str(self.folder / "attempts"),
            str(self.folder / "state.json"),
            self.environ,
            str(self.folder / "sessions"),
            "abcd",
        )

    def close(self) -> None:
        super().close()
        self.runner.close()


class EngineBench(Bench):
    """A bench whose runner hands jobs to an engine: a real one, or a stand-in that runs them as processes here."""

    name = "slurm"

    def __init__(self, folder: Path, engine: Any) -> None:
        self.engine = engine
        super().__init__(folder)

    def make(self) -> EngineRunner:
        prefix = f"gj-{self.folder.name[:40]}-"  # a real engine also has the jobs of other tests
        return EngineRunner(
            self.engine, str(self.folder / "attempts"), str(self.folder), prefix, dict(os.environ), lambda: 0.1
        )

    def job(self, number: int, *argv: str, attempt: int = 1, **more: Any) -> tuple[Job, Launch]:
        job, launch = super().job(number, *argv, attempt=attempt, **more)
        job.need = ResourceRequest(0, 0)
        job.gpus = ()
        return job, launch

    def name_of(self, job: Job) -> str:
        """Return the name that the attempt of this job has in the engine."""
        return str(self.runner._name_of(job))

    def close(self) -> None:
        self.runner.close()


@contextlib.contextmanager
def engine_bench(folder: Path) -> Iterator[EngineBench]:
    """Yield an EngineBench with a stand-in for one test. Close the bench after the test."""
    with mock.patch.object(engine, "PATIENCE_S", 0.5):
        made = EngineBench(folder, FakeEngine({"g1": 4, "g2": 2}))
        try:
            yield made
        finally:
            made.close()
            made.engine.close()


@contextlib.contextmanager
def direct_bench(folder: Path) -> Iterator[DirectBench]:
    """Yield a DirectBench for one test. Close the bench after the test."""
    made = DirectBench(folder)
    yield made
    made.close()


@contextlib.contextmanager
def screen_bench(folder: Path, **environ: str) -> Iterator[ScreenBench]:
    """Yield a ScreenBench for one test. After the test, close the bench and end its sessions.

    When a job ends, the runner waits until the job's session has written the log, and then reports `Ended`. Here the
    runner waits up to 5 seconds, longer than usual, because tests read the log as soon as they get `Ended`.
    """
    with socket_folder() as sockets, mock.patch.object(screen, "LOG_PATIENCE_S", 5.0):
        made = ScreenBench(folder, sockets, **environ)
        try:
            yield made
        finally:
            made.close()
    reap_all()


def reap_all() -> None:
    """Reap all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
