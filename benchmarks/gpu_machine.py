"""The GPU on which `python -m benchmarks.on_gpu` works: a real one, or one of the stub library of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.gpus import reader_process
from scheduler.system.processes import seen

FIRST_READING_S, READING_S, TORCH_S = 60.0, 20.0, 180.0  # limits
READINGS = 20  # measured
MOST_USED = 0.1  # part of the memory that may be in use before the benchmark begins
STEP_S = 0.02
STUB_MIB, STUB_IDLE_MIB = 81920, 500


class NoGpu(Exception):
    """Raised when there is no GPU on which the benchmark can work."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPU, and how its programs are started.

    ``backend``: how jobs take memory (`gpu_job.py: BACKENDS`). ``environ``: further variables of the scheduler, its jobs
    and other programs. ``first_ms``, ``reading_ms``: durations of readings by the scheduler's reader process. ``interval_s``:
    time between two readings in the checks. ``patience_s``: limit of each wait.
    """

    index: int
    uuid: str
    gpu_name: str
    total_mib: int
    driver: str
    backend: str
    environ: Mapping[str, str]
    first_ms: float
    reading_ms: tuple[float, ...]
    interval_s: float
    patience_s: float

    @property
    def stub(self) -> bool:
        """Return whether the GPU is one of the stub library."""
        return self.backend == "stub"


def read_gpus(environ: Mapping[str, str], times: int = 1) -> tuple[dict[str, Any], list[float]]:
    """Return the last of ``times`` readings, and how long each took in ms, from a process as the scheduler uses it.

    Raises NoGpu if the driver cannot be read.
    """
    words = [sys.executable, reader_process.__file__, "nvml"]
    pipe = subprocess.PIPE
    answer: dict[str, Any] = {"trouble": "no reading"}
    took = []
    with subprocess.Popen(words, env=dict(environ), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for _ in range(times):
                began = time.perf_counter()
                with contextlib.suppress(BrokenPipeError):  # it has answered that there is no driver
                    process.stdin.write(b"\n")
                    process.stdin.flush()
                answer = _answer(process.stdout, READING_S if took else FIRST_READING_S)
                took.append((time.perf_counter() - began) * 1e3)
                if "trouble" in answer:
                    raise NoGpu(str(answer["trouble"]))
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
    return answer, took


def _answer(stream: Any, limit_s: float) -> dict[str, Any]:
    while True:
        if not select.select([stream], [], [], limit_s)[0]:
            raise NoGpu(f"the driver did not answer within {limit_s:g} s")
        line = stream.readline()
        if not line:
            raise NoGpu("the reader process ended without an answer")
        found: dict[str, Any] = json.loads(line)
        if "xids" not in found:
            return found


def _machine(environ: Mapping[str, str], index: int | None, backend: str, **more: Any) -> Machine:
    """Read the GPUs of the driver. Raises NoGpu if the GPU does not exist, or is in use."""
    found, took = read_gpus({**os.environ, **environ}, 1 + READINGS)
    gpus = {gpu["ordinal"]: gpu for gpu in found["gpus"] if not gpu.get("parent") and not gpu["mig"] and gpu["total"]}
    if not gpus:
        raise NoGpu("no GPU without MIG mode whose memory can be read")
    gpu = gpus.get(max(gpus) if index is None else index)
    if gpu is None:
        raise NoGpu(f"no GPU {index}; there are {', '.join(map(str, gpus))}")
    busy = [process[0] for process in gpu["processes"] or () if process[2]]
    if busy or gpu["used"] > MOST_USED * gpu["total"]:
        who = f"processes {', '.join(map(str, busy))}" if busy else f"{gpu['used']} MiB"
        raise NoGpu(f"GPU {gpu['ordinal']} is in use ({who}); choose a free one with --gpu")
    return Machine(
        gpu["ordinal"], gpu["uuid"], gpu["name"], int(gpu["total"]), found["driver"] or "unknown", backend,
        {**environ, "ON_GPU_TOTAL_MIB": str(int(gpu["total"])), "ON_GPU_BACKEND": backend},
        took[0], tuple(took[1:]), **more,
    )  # fmt: skip


def real_machine(folder: str, index: int | None, python: str) -> Machine:
    """Return a real GPU: number ``index``, else the last one. ``python``: interpreter of the jobs. Raises NoGpu.

    ``folder``: where the jobs look for the files that end them.
    """
    made = _machine({"ON_GPU_FOLDER": folder}, index, "driver", interval_s=1.0, patience_s=240.0)
    words = [python, "-c", "import torch; print(torch.cuda.is_available())"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"{python} did not import torch within {TORCH_S:g} s") from None
    except OSError as error:
        raise NoGpu(f"cannot run {python}: {error.strerror}") from None
    if done.returncode == 0 and done.stdout.strip() == "True":
        return replace(made, backend="torch", environ={**made.environ, "ON_GPU_BACKEND": "torch"})
    return made


@contextlib.contextmanager
def stub_machine(folder: str) -> Iterator[Machine]:
    """Compile the stub library of the tests, and let it show two GPUs while the ``with`` block runs.

    ``folder``: an empty folder, where the jobs also look for the files that end them. A thread gives the stub library the memory that the jobs report, and takes it back when their processes have ended.
    Raises NoGpu if there is no C compiler, or if the packages of the tests are not installed.
    """
    if not (shutil.which("gcc") or shutil.which("cc")):
        raise NoGpu("the stub library needs a C compiler: as root run: apt-get install -y gcc libc6-dev")
    try:
        from tests.gpus.stub import FakeDriver
    except ImportError as error:
        raise NoGpu(f"the stub library needs the packages of the tests: make quick installs them ({error})") from None
    driver = FakeDriver(Path(folder, "driver"))
    uuids = ("GPU-stub-a", "GPU-stub-b")
    with driver.together():
        for uuid in uuids:
            driver.gpu(uuid, total=STUB_MIB, used=STUB_IDLE_MIB, load=0)
    use = Path(folder, "use")
    use.mkdir()
    ending = threading.Event()
    thread = threading.Thread(target=_follow, args=(driver, use, uuids, ending))
    thread.start()
    try:
        environ = {**driver.environ(), "ON_GPU_FOLDER": folder, "ON_GPU_UUIDS": ",".join(uuids)}
        yield _machine(environ, None, "stub", interval_s=0.25, patience_s=40.0)
    finally:
        ending.set()
        thread.join()


def _follow(driver: Any, use: Path, uuids: tuple[str, ...], ending: threading.Event) -> None:
    """Show the memory of live processes in the stub library until ``ending`` is set.

    Each file in ``use`` is named after a process, and holds the UUID of a GPU and a number of MiB.
    """
    shown: dict[int, tuple[str, int]] = {}
    while not ending.wait(STEP_S):
        found: dict[int, tuple[str, int]] = {}
        for path in use.iterdir():
            if path.name.isdigit() and seen(int(path.name)) is not None:
                uuid, mib = path.read_text("ascii").split()
                found[int(path.name)] = uuid, int(mib)
        if found != shown:
            with driver.together():
                for pid in shown.keys() - found.keys():
                    driver.no_process(pid)
                for pid, (uuid, mib) in found.items():
                    driver.process(uuid, pid, mib, util=30)
                for uuid in uuids:
                    mine = [mib for on, mib in found.values() if on == uuid]
                    driver.gpu(uuid, used=STUB_IDLE_MIB + sum(mine), load=30 * len(mine))
            shown = found
