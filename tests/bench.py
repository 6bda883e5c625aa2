"""A runner in a folder, and jobs to give it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.core.launch import Launch
from scheduler.core.observations import Ended, Observation, Started
from scheduler.runners.direct import DirectRunner
from scheduler.runners.screen import ScreenRunner
from scheduler.system.proc import boot_id
from scheduler.system.processes import lives
from tests.screens import socket_folder

LIMIT_S = 30.0


class Bench:
    """The observations of a runner, and what it takes to ask for them."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("attempts", "logs", "sessions"):
            (folder / name).mkdir()
        self.runner: Any = self.make()
        self.observations: list[Observation] = []
        self.leaders: list[Any] = []

    def make(self) -> Any:
        """Another runner on the same folder."""
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
        """One turn of an event loop."""
        select.select(self.runner.descriptors(), [], [], 0.02)
        found = self.runner.look()
        self.leaders += [observation.process for observation in found if isinstance(observation, Started)]
        self.observations += found

    def until(self, kind: type, job: int = 0) -> Any:
        """Look until an observation of this kind (about this job) is there."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for observation in self.observations:
                if isinstance(observation, kind) and (not job or getattr(observation, "job", job) == job):
                    return observation
            self.look()
        raise AssertionError(f"no {kind.__name__} of job {job}: {self.observations}")

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Look on until it holds."""
        end = time.monotonic() + LIMIT_S
        while not (found := condition()):
            assert time.monotonic() < end, f"not seen: {what}: {self.observations}"
            self.look()
        return found

    def raw(self, number: int, attempt: int = 1) -> bytes:
        """The log as it is."""
        path = self.folder / "logs" / f"{number}.{attempt}.log"
        return path.read_bytes() if path.exists() else b""

    def text(self, number: int) -> str:
        """The log, its lines ending as a pipe would have them."""
        return self.raw(number).decode(errors="surrogateescape").replace("\r\n", "\n")

    def whole(self, number: int) -> str:
        """The log of a job that has ended."""
        self.until(Ended, number)
        return self.text(number)

    def record(self, number: int, attempt: int = 1) -> str:
        """Path of the attempt's record."""
        return str(self.folder / "attempts" / f"{number}.{attempt}")

    def orphan(self, runner: Any) -> None:
        """As far as can be within one process: the daemon of this runner is gone."""
        runner.close()

    def close(self) -> None:
        """End what was started."""
        for process in self.leaders:
            if lives(process):
                os.killpg(process.pid, signal.SIGKILL)


class DirectBench(Bench):
    """Jobs below a supervisor."""

    name = "direct"

    def make(self) -> DirectRunner:
        return DirectRunner(
            str(self.folder / "attempts"),
            str(self.folder / "state.json"),
            dict(os.environ),
            str(self.folder / "supervisor.err"),
        )

    def orphan(self, runner: Any) -> None:
        runner.close()  # its supervisor writes the ending all the same

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
    """Jobs in terminal sessions, in a socket folder of their own."""

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


@contextlib.contextmanager
def direct_bench(folder: Path) -> Iterator[DirectBench]:
    """For one test."""
    made = DirectBench(folder)
    yield made
    made.close()


@contextlib.contextmanager
def screen_bench(folder: Path, **environ: str) -> Iterator[ScreenBench]:
    """For one test; no session is left."""
    with socket_folder() as sockets:
        made = ScreenBench(folder, sockets, **environ)
        try:
            yield made
        finally:
            made.close()
    reap_all()


def reap_all() -> None:
    """Take the endings of all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
