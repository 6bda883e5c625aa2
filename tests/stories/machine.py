"""A real scheduler with simulated GPUs: a fake driver, a fake nvidia-smi, and foreign processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpus.stub import FakeDriver, FakeSmi
from tests.stories.harness import Scheduler, wait_for

TOTAL = 80_000
IDLE = 500  # MiB in use on a GPU without processes
INTERVAL_S = 0.25


class Machine:
    """A scheduler, a fake driver and a fake nvidia-smi.

    The scheduler reads the GPUs ``GPU-a``, ``GPU-b``, … from the driver or from nvidia-smi.
    """

    def __init__(self, make: Callable[..., Scheduler], folder: Path, gpus: int | None, **settings: Any) -> None:
        self.driver = FakeDriver(folder / "driver")
        self.smi = FakeSmi(folder / "smi")
        self.smi.exit(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        settings.setdefault("gpu_interval", INTERVAL_S)
        self.s = make(gpus, folder, **settings)
        self.s.environ |= {**self.driver.environ(), **self.smi.environ()}
        self.s.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self._on: dict[str, dict[int, int]] = {}
        self.others: list[subprocess.Popen[bytes]] = []

    def cards(self, *uuids: str) -> Machine:
        """Add these GPUs to the driver. No process uses them."""
        with self.driver.together():
            for uuid in uuids:
                self.driver.gpu(uuid, total=TOTAL, used=IDLE, load=0)
        return self

    def only_smi(self, *uuids: str) -> Machine:
        """Remove NVML, and let nvidia-smi show these GPUs."""
        self.s.environ["NVML_STUB_FILE"] = str(self.s.folder / "no such file")
        self.smi.clear()
        with self.smi.together():
            for uuid in uuids:
                self.smi.gpu(uuid, total=TOTAL, used=IDLE, load=0)
        return self

    def use(self, uuid: str, pid: int, mib: int, load: int | None = None, total_load: int | None = None) -> None:
        """Let a process use ``mib`` MiB and ``load`` % of a GPU. ``total_load``: load of the whole GPU in %."""
        on = self._on.setdefault(uuid, {})
        on[pid] = mib
        with self.driver.together():
            self.driver.process(uuid, pid, mib, util=load)
            self.driver.gpu(uuid, used=IDLE + sum(on.values()))
            if total_load is not None:
                self.driver.gpu(uuid, load=total_load)

    def unuse(self, uuid: str, *pids: int) -> None:
        """Remove these processes from the GPU."""
        on = self._on.setdefault(uuid, {})
        with self.driver.together():
            for pid in pids:
                on.pop(pid, None)
                self.driver.no_process(pid)
            self.driver.gpu(uuid, used=IDLE + sum(on.values()), load=0)

    def foreign_process(self) -> int:
        """Start a process that belongs to no job; return its pid."""
        self.others.append(subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True))
        return self.others[-1].pid

    def end(self) -> None:
        for other in self.others:
            other.kill()
            other.wait()

    # -- looking --------------------------------------------------------------------------------------

    def gpu(self, index: int) -> dict[str, Any]:
        """Return a GPU as `status --json` shows it."""
        (found,) = (gpu for gpu in self.s.status()["gpus"] if gpu["index"] == index)
        return found

    def state(self, index: int, *states: str) -> dict[str, Any]:
        """Wait until the GPU is in one of these states; return the GPU in the form that `gpu` returns."""
        found: dict[str, Any] = wait_for(
            lambda: (gpu := self.gpu(index))["state"] in states and gpu,
            f"GPU {index} {states}, is {self.gpu(index)}\n{self.s.said()[-2000:]}",
        )
        return found

    def readings(self, more: int) -> None:
        """Wait until ``more`` new readings of the GPUs are in the store."""
        seen: set[float] = set(self._at())
        wait_for(lambda: seen.update(self._at()) or len(seen) > more, f"{more} readings\n{self.s.said()[-2000:]}")

    def _at(self) -> list[float]:
        return [row[0] for row in self.s.rows("SELECT max(at) FROM readings") if row[0] is not None]

    def waits(self, job: int, code: str, text: str = "") -> dict[str, Any]:
        """Wait until the job waits with reason code ``code`` and its reason contains ``text``; return the job."""
        wait_for(lambda: job in self.s.states(), f"job {job} is taken in")
        found: dict[str, Any] = wait_for(
            lambda: (it := self.s.job(job))["reason_code"] == code and text in it["reason"] and it,
            f"job {job} to wait with {code} {text}: {self.s.job(job)}\n{self.s.said()[-2000:]}",
        )
        return found

    def still_waits(self, job: int, readings: int = 5) -> None:
        """Wait for ``readings`` further readings; assert that the job still waits and has never run."""
        self.readings(readings)
        assert self.s.states()[job] == "pending" and self.s.job(job)["attempt"] == 0, self.s.said()

    def running(self, key: str) -> int:
        """Wait until the ledger job with this key runs; return its pid."""
        entry = wait_for(
            lambda: [e for e in self.s.ledger() if e[0] == "start" and e[1] == key],
            f"start of {key}\n{self.s.said()[-2000:]}\n{self.s.cli('status').stdout}",
        )
        return int(entry[-1][2])

    def add(self, *keys: str, need: str = "1", gpus: str = "") -> None:
        """Append ledger jobs that run until `release`. ``need``: GPUs for each; ``gpus``: allowed GPUs."""
        for key in keys:
            self.s.hold(key)
        self.s.append(*(self.s.line(key, more=f";gpus={need}", gpus=gpus) for key in keys))


@pytest.fixture
def machine(scheduler: Callable[..., Scheduler], tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Return a function that creates a machine. The scheduler of the machine is not started yet.

    The argument ``gpus`` of this function is the value of the scheduler's option --gpus.
    """
    made: list[Machine] = []

    def make(gpus: int | None = None, folder: Path | None = None, **settings: Any) -> Machine:
        place = folder or tmp_path
        place.mkdir(exist_ok=True)
        made.append(Machine(scheduler, place, gpus, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


def processes_with(text: str) -> list[int]:
    """Return the pids of live processes whose command line contains ``text``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if text in Path(f"/proc/{name}/cmdline").read_bytes().decode("utf-8", "replace"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def kill_all(pids: list[int]) -> None:
    """Send SIGKILL to each of these processes that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
