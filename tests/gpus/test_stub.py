"""Tests of the fakes: seen through pynvml and GPUtil, they behave like the real driver and nvidia-smi."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.gpus import stub
from tests.gpus.stub import FakeDriver, FakeSmi
from tests.stories.harness import wait_for

pytestmark = pytest.mark.long  # they test only the fakes

MIB = 1 << 20
ANSWER_S = 30
SOON_S = 0.5

# Evaluates each line of stdin, and prints the value, or the classes of the exception, as JSON.
CHILD = """\
import json, sys
import pynvml
def handle(index): return pynvml.nvmlDeviceGetHandleByIndex(index)
names = {**vars(pynvml), "handle": handle, "kept": {}}
for line in sys.stdin:
    try:
        answer = {"value": eval(line, names)}
    except Exception as error:
        answer = {"error": [kind.__name__ for kind in type(error).__mro__]}
    print(json.dumps(answer, default=lambda each: each.decode() if isinstance(each, bytes) else repr(each)), flush=True)
"""

GPUTIL = """\
import json, GPUtil
print(json.dumps([vars(gpu) for gpu in GPUtil.getGPUs()]))
"""
QUERY = ["--query-gpu=index,uuid", "--format=csv,noheader,nounits"]


class Failed(Exception):
    """An expression in the child raised an exception.

    ``kinds``: the names of the exception's class and base classes.
    """

    def __init__(self, kinds: list[str]) -> None:
        super().__init__(kinds[0])
        self.kinds = kinds


class Child:
    """A Python process that has loaded pynvml with the fake NVML. It evaluates expressions."""

    def __init__(self, driver: FakeDriver, start: str = "nvmlInit()") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env={**os.environ, **driver.environ()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if start:
            self(start)

    def __call__(self, expression: str) -> Any:
        """Evaluate a Python expression in the child, and return its value.

        Raises Failed if the expression raises an error.
        """
        self.send(expression)
        return self.answer()

    def send(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        told = json.loads(line)
        if "error" in told:
            raise Failed(told["error"])
        return told["value"]

    def error(self, expression: str) -> str:
        """Evaluate an expression that must fail, and return the name of the exception's class."""
        with pytest.raises(Failed) as raised:
            self(expression)
        return raised.value.kinds[0]

    def end(self) -> str:
        """Kill the child, and return what it printed on stderr."""
        self.process.kill()
        _, said = self.process.communicate(timeout=ANSWER_S)
        return said

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path / "driver")


@pytest.fixture
def two(driver: FakeDriver) -> FakeDriver:
    """Return a fake driver with GPU-1 and GPU-2."""
    with driver.together():
        driver.gpu("GPU-1", used=1024, load=35)
        driver.gpu("GPU-2")
    return driver


@pytest.fixture
def ask(two: FakeDriver) -> Iterator[Child]:
    """Return a child that sees GPU-1 and GPU-2."""
    with Child(two) as child:
        yield child


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    return FakeSmi(tmp_path / "smi")


# -- NVML: GPUs and their values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 16])
def test_the_fake_driver_lists_all_gpus_in_the_given_order(driver: FakeDriver, count: int) -> None:
    uuids = [f"GPU-{number:04x}" for number in range(count)]
    with driver.together():
        for number, uuid in enumerate(uuids):
            driver.gpu(uuid, used=number)
    with Child(driver) as ask:
        assert ask("nvmlDeviceGetCount()") == count
        assert ask("[nvmlDeviceGetUUID(handle(i)) for i in range(nvmlDeviceGetCount())]") == uuids
        used = ask(
            "[nvmlDeviceGetMemoryInfo(handle(i), version=nvmlMemory_v2).used for i in range(nvmlDeviceGetCount())]"
        )
        assert used == [number * MIB for number in range(count)]
        assert ask(f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(b'{uuids[-1]}'))") == count - 1
        buses = ask("[nvmlDeviceGetPciInfo_v3(handle(i)).busId for i in range(nvmlDeviceGetCount())]")
        assert len(set(buses)) == count and buses[0] == "00000000:01:00.0"
        assert ask.error(f"handle({count})") == "NVMLError_InvalidArgument"
        assert ask.error("nvmlDeviceGetHandleByUUID(b'GPU-of-nobody')") == "NVMLError_NotFound"


def test_the_fake_driver_reports_every_value_of_a_gpu(driver: FakeDriver) -> None:
    driver.version("570.86.10")
    driver.gpu("GPU-1", name="NVIDIA H200", load=35, temp=61, power=412, energy=90, ecc=2, bus=0xAB)
    with Child(driver) as ask:
        assert ask("nvmlSystemGetDriverVersion()") == "570.86.10"
        assert ask("nvmlSystemGetCudaDriverVersion_v2()") == ask("nvmlSystemGetCudaDriverVersion()") == 12040
        assert ask("nvmlDeviceGetName(handle(0))") == "NVIDIA H200"
        assert ask("nvmlDeviceGetUtilizationRates(handle(0)).gpu") == 35
        assert ask("nvmlDeviceGetTemperature(handle(0), NVML_TEMPERATURE_GPU)") == 61
        assert ask("nvmlDeviceGetPowerUsage(handle(0))") == 412_000
        assert ask("nvmlDeviceGetTotalEnergyConsumption(handle(0))") == 90_000
        assert ask("nvmlDeviceGetMigMode(handle(0))") == [0, 0]
        assert ask("nvmlDeviceGetTotalEccErrors(handle(0), NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)") == 2
        assert ask("nvmlDeviceGetTotalEccErrors(handle(0), NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC)") == 0
        assert ask("nvmlDeviceGetPciInfo_v3(handle(0)).bus") == 0xAB


def test_the_fake_driver_counts_reserved_memory_as_used_only_in_version_one(driver: FakeDriver) -> None:
    driver.gpu("GPU-1", total=81559, used=1024, reserved=534)
    with Child(driver) as ask:
        first = "(lambda m: [m.total, m.used, m.free])(nvmlDeviceGetMemoryInfo(handle(0)))"
        second = "(lambda m: [m.total, m.used, m.free, m.reserved])(nvmlDeviceGetMemoryInfo(handle(0), nvmlMemory_v2))"
        assert ask(first) == [81559 * MIB, 1558 * MIB, 80001 * MIB]
        assert ask(second) == [81559 * MIB, 1024 * MIB, 80001 * MIB, 534 * MIB]
        assert ask.error("nvmlDeviceGetMemoryInfo(handle(0), 0x03000028)") == "NVMLError_ArgumentVersionMismatch"


def test_the_fake_driver_refuses_unsupported_calls_and_answers_the_others(driver: FakeDriver) -> None:
    driver.gpu("GPU-1", total=None, load=None, temp=None, power=None, energy=None, ecc=None, mig=None)
    with Child(driver) as ask:
        for call in (
            "nvmlDeviceGetMemoryInfo(handle(0))",
            "nvmlDeviceGetMemoryInfo(handle(0), nvmlMemory_v2)",
            "nvmlDeviceGetUtilizationRates(handle(0))",
            "nvmlDeviceGetTemperature(handle(0), 0)",
            "nvmlDeviceGetPowerUsage(handle(0))",
            "nvmlDeviceGetTotalEnergyConsumption(handle(0))",
            "nvmlDeviceGetTotalEccErrors(handle(0), 1, 0)",
            "nvmlDeviceGetMigMode(handle(0))",
        ):
            assert ask.error(call) == "NVMLError_NotSupported", call
        assert ask("nvmlDeviceGetUUID(handle(0))") == "GPU-1"
        driver.gpu("GPU-1", total=81559, used=None)
        assert ask.error("nvmlDeviceGetMemoryInfo(handle(0), nvmlMemory_v2)") == "NVMLError_NotSupported"


def test_the_fake_driver_reports_no_load_in_mig_mode(two: FakeDriver, ask: Child) -> None:
    two.gpu("GPU-1", mig=1)
    assert ask("nvmlDeviceGetMigMode(handle(0))") == [1, 1]
    assert ask.error("nvmlDeviceGetUtilizationRates(handle(0))") == "NVMLError_NotSupported"
    assert ask("nvmlDeviceGetUtilizationRates(handle(1)).gpu") == 0


def test_the_fake_driver_reports_the_topology_of_gpus(driver: FakeDriver) -> None:
    with driver.together():
        for number in range(8):
            driver.gpu(f"GPU-{number}")
        driver.topology("GPU-1", "GPU-0", 10)
    with Child(driver) as ask:
        levels = ask("[nvmlDeviceGetTopologyCommonAncestor(handle(0), handle(i)) for i in range(8)]")
        assert levels == [0, 10, 40, 40, 50, 50, 50, 50]


# -- NVML: edits ----------------------------------------------------------------------------------------------------


def test_a_running_process_sees_every_edit_of_the_fake_driver(two: FakeDriver, ask: Child) -> None:
    ask("kept.update(first=handle(0))")
    for load in range(100):  # faster than the resolution of file times; the size of the file stays equal
        two.gpu("GPU-1", load=load + 100)
        assert ask("nvmlDeviceGetUtilizationRates(kept['first']).gpu") == load + 100
    two.gpu("GPU-3")
    assert ask("nvmlDeviceGetCount()") == 3


def test_a_handle_means_the_same_gpu_after_the_indices_change(two: FakeDriver, ask: Child) -> None:
    ask("kept.update(first=handle(0))")
    two.order(["GPU-2", "GPU-1"])
    assert ask("nvmlDeviceGetUUID(kept['first'])") == "GPU-1"
    assert ask("nvmlDeviceGetIndex(kept['first'])") == 1
    assert ask("nvmlDeviceGetUUID(handle(0))") == "GPU-2"


def test_a_removed_gpu_is_lost_for_a_process_with_a_handle(two: FakeDriver, ask: Child) -> None:
    ask("kept.update(first=handle(0))")
    two.process("GPU-1", 4711, 10)
    two.remove("GPU-1")
    assert ask("nvmlDeviceGetCount()") == 1
    assert ask.error("nvmlDeviceGetUUID(kept['first'])") == "NVMLError_GpuIsLost"
    two.gpu("GPU-1")
    assert ask("nvmlDeviceGetIndex(kept['first'])") == 1
    assert ask("nvmlDeviceGetComputeRunningProcesses(kept['first'])") == []


# -- NVML: processes ------------------------------------------------------------------------------------------------


def test_the_fake_driver_lists_processes_with_memory_kind_and_load(two: FakeDriver, ask: Child) -> None:
    compute = "[[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetComputeRunningProcesses(handle(0))]"
    graphics = "[[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetGraphicsRunningProcesses(handle(0))]"
    loads = "[[p.pid, p.smUtil] for p in nvmlDeviceGetProcessUtilization(handle(0), 0)]"
    assert ask(compute) == ask(graphics) == []
    assert ask.error(loads) == "NVMLError_NotFound"
    with two.together():
        two.process("GPU-1", 4711, 1024, util=30)
        two.process("GPU-1", 4712, None)
        two.process("GPU-1", 4713, 5, type="G", util=1)
        two.process("GPU-2", 4711, 7)
    assert ask(compute) == [[4711, 1024 * MIB], [4712, None]]
    assert ask(compute.replace("Processes", "Processes_v2")) == [[4711, 1024 * MIB], [4712, None]]
    assert ask(graphics) == [[4713, 5 * MIB]]
    assert ask(loads) == [[4711, 30], [4713, 1]]
    assert ask(compute.replace("(0)", "(1)")) == [[4711, 7 * MIB]]
    two.no_process(4711)
    assert ask(compute) == [[4712, None]]
    assert ask(compute.replace("(0)", "(1)")) == []


def test_the_fake_driver_lists_a_hundred_processes(two: FakeDriver, ask: Child) -> None:
    with two.together():
        for pid in range(1000, 1100):
            two.process("GPU-2", pid, 1)
    assert ask("[p.pid for p in nvmlDeviceGetComputeRunningProcesses(handle(1))]") == list(range(1000, 1100))


# -- NVML: errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (4, "NVMLError_NoPermission"),
        (9, "NVMLError_DriverNotLoaded"),
        (10, "NVMLError_Timeout"),
        (15, "NVMLError_GpuIsLost"),
        (18, "NVMLError_LibRmVersionMismatch"),
        (999, "NVMLError_Unknown"),
    ],
)
def test_an_error_code_of_the_fake_driver_raises_the_matching_exception(two: FakeDriver, code: int, kind: str) -> None:
    two.error("nvmlInitWithFlags", code)
    with Child(two, start="") as ask:
        assert ask.error("nvmlInit()") == kind
        assert ask.error("nvmlDeviceGetCount()") == "NVMLError_Uninitialized"
        two.clear_errors()
        ask("nvmlInit()")
        assert ask("nvmlDeviceGetCount()") == 2


def test_an_error_of_one_function_does_not_affect_the_others(two: FakeDriver, ask: Child) -> None:
    two.error("nvmlDeviceGetPowerUsage", 3)
    assert ask.error("nvmlDeviceGetPowerUsage(handle(0))") == "NVMLError_NotSupported"
    assert ask.error("nvmlDeviceGetPowerUsage(handle(1))") == "NVMLError_NotSupported"
    assert ask("nvmlDeviceGetTemperature(handle(0), 0)") == 40


def test_an_error_of_one_gpu_does_not_affect_the_others(two: FakeDriver, ask: Child) -> None:
    two.error("nvmlDeviceGetMemoryInfo_v2", 15, "GPU-1")
    assert ask.error("nvmlDeviceGetMemoryInfo(handle(0), nvmlMemory_v2)") == "NVMLError_GpuIsLost"
    assert ask("nvmlDeviceGetMemoryInfo(handle(0)).used") == 1558 * MIB
    assert ask("nvmlDeviceGetMemoryInfo(handle(1), nvmlMemory_v2).used") == 0


def test_a_lost_gpu_of_the_fake_driver_fails_in_every_call(two: FakeDriver, ask: Child) -> None:
    ask("kept.update(first=handle(0))")
    two.error("*", 15, "GPU-1")
    for call in (
        "handle(0)",
        "nvmlDeviceGetHandleByUUID(b'GPU-1')",
        "nvmlDeviceGetUUID(kept['first'])",
        "nvmlDeviceGetMemoryInfo(kept['first'])",
        "nvmlDeviceGetTopologyCommonAncestor(handle(1), kept['first'])",
    ):
        assert ask.error(call) == "NVMLError_GpuIsLost", call
    assert ask("nvmlDeviceGetCount()") == 2
    assert ask("nvmlDeviceGetUUID(handle(1))") == "GPU-2"


def test_a_hanging_call_of_the_fake_driver_ends_only_by_sigkill(two: FakeDriver) -> None:
    two.hang("nvmlDeviceGetUtilizationRates", "GPU-1")
    with Child(two) as ask:
        assert ask("nvmlDeviceGetUtilizationRates(handle(1)).gpu") == 0
        begun = Path(f"{two.file}.begun")
        ask.send(f"[open({str(begun)!r}, 'w').close(), nvmlDeviceGetUtilizationRates(handle(0)).gpu]")
        wait_for(begun.exists, "the call")
        time.sleep(SOON_S)
        two.clear_errors()  # has no effect on the hanging call
        ask.process.send_signal(signal.SIGINT)  # Python runs its handler only after the call has returned
        time.sleep(SOON_S)
        assert ask.process.poll() is None
        ask.end()
        assert ask.process.returncode == -signal.SIGKILL


def test_a_hanging_call_of_the_fake_driver_does_not_block_other_threads(two: FakeDriver, ask: Child) -> None:
    two.hang("nvmlDeviceGetPowerUsage")
    ask("__import__('threading').Thread(target=nvmlDeviceGetPowerUsage, args=(handle(0),), daemon=True).start()")
    time.sleep(SOON_S)
    assert ask("nvmlDeviceGetUtilizationRates(handle(0)).gpu") == 35


def test_without_its_file_the_fake_driver_counts_as_not_loaded(two: FakeDriver, ask: Child) -> None:
    ask("kept.update(first=handle(0))")
    two.file.unlink()
    assert ask.error("nvmlDeviceGetCount()") == "NVMLError_DriverNotLoaded"
    assert ask.error("nvmlDeviceGetUUID(kept['first'])") == "NVMLError_GpuIsLost"
    with Child(two, start="") as other:
        assert other.error("nvmlInit()") == "NVMLError_DriverNotLoaded"


def test_calls_before_init_or_after_shutdown_are_refused(two: FakeDriver) -> None:
    with Child(two) as ask:
        ask("nvmlShutdown()")
        assert ask.error("nvmlDeviceGetCount()") == "NVMLError_Uninitialized"


@pytest.mark.parametrize(
    "line",
    [
        "gpu",
        "gpu GPU-1 lode=3",
        "gpu GPU-1 load=x",
        "proc GPU-1 mem=3",
        "error nvmlInit_v2",
        "hang",
        "xid GPU-1",
        "gpus 3",
    ],
)
def test_the_error_for_an_invalid_line_of_the_fake_driver_names_the_line(two: FakeDriver, line: str) -> None:
    two.file.write_text(f"# a machine\n\ngpu GPU-0\n{line}\n")
    with Child(two, start="") as ask:
        assert ask.error("nvmlInit()") == "NVMLError_Unknown"
        assert f"{two.file} line 4: " in ask.end()


def test_an_invalid_function_field_or_order_in_a_test_is_refused(two: FakeDriver) -> None:
    with pytest.raises(ValueError, match="no nvmlDeviceGetMemory;"):
        two.error("nvmlDeviceGetMemory", 3)
    with pytest.raises(TypeError, match="no lode; it has name, total"):
        two.gpu("GPU-1", lode=3)
    with pytest.raises(ValueError, match="not an order"):
        two.order(["GPU-1"])


# -- NVML: events ---------------------------------------------------------------------------------------------------


def test_the_fake_driver_reports_an_xid_event_once(two: FakeDriver, ask: Child) -> None:
    event = "(lambda e: [nvmlDeviceGetIndex(e.device), e.eventType, e.eventData])(nvmlEventSetWait_v2(kept['set'], {}))"
    two.xid("GPU-2", 48)  # before the registration
    assert ask("nvmlDeviceGetSupportedEventTypes(handle(1))") & ask("nvmlEventTypeXidCriticalError")
    ask("kept.update(set=nvmlEventSetCreate())")
    ask("nvmlDeviceRegisterEvents(handle(1), nvmlEventTypeXidCriticalError, kept['set'])")
    assert ask.error(event.format(20)) == "NVMLError_Timeout"
    ask.send(event.format(ANSWER_S * 1000))
    two.xid("GPU-1", 13)  # on a GPU without registered events
    two.xid("GPU-2", 79)
    assert ask.answer() == [1, 8, 79]
    assert ask.error(event.format(20)) == "NVMLError_Timeout"
    two.xid("GPU-2", 79)
    assert ask(event.format(ANSWER_S * 1000)) == [1, 8, 79]
    two.gpu("GPU-1", load=3)
    assert ask.error(event.format(20)) == "NVMLError_Timeout"
    ask("nvmlEventSetFree(kept['set'])")
    assert ask.error("nvmlEventSetWait_v2(kept['set'], 0)") == "NVMLError_InvalidArgument"


# -- NVML: an old driver, and the compilation -----------------------------------------------------------------------


def test_an_old_fake_driver_lacks_the_newer_calls(tmp_path: Path) -> None:
    old = FakeDriver(tmp_path / "old", old=True)
    old.gpu("GPU-1", used=1024)
    old.process("GPU-1", 4711, 12, util=4)
    with Child(old) as ask:
        with pytest.raises(Failed) as raised:
            ask("nvmlDeviceGetComputeRunningProcesses(handle(0))")
        assert raised.value.kinds[0] == "NVMLLibraryMismatchError"
        assert "NVMLError" not in raised.value.kinds  # `except NVMLError` does not catch it
        missing = "NVMLError_FunctionNotFound"
        assert ask.error("nvmlDeviceGetMemoryInfo(handle(0), nvmlMemory_v2)") == missing
        assert ask.error("nvmlDeviceGetProcessUtilization(handle(0), 0)") == missing
        assert ask("nvmlDeviceGetMemoryInfo(handle(0)).used") == 1558 * MIB
        assert ask("[p.pid for p in nvmlDeviceGetComputeRunningProcesses_v2(handle(0))]") == [4711]


def test_parallel_builds_of_the_fake_library_all_succeed(tmp_path: Path) -> None:
    program = (
        "import ctypes; from tests.gpus.stub import library_folder, LIBRARY;"
        " ctypes.CDLL(str(library_folder() / LIBRARY)).nvmlInit_v2"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(stub.HERE.parents[1])}

    def build(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
        )

    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(build, range(4)):
            assert done.returncode == 0, done.stderr
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in made] == [stub.LIBRARY]
    assert {path.parent.stat().st_mode & 0o077 for path in made} == {0}


def test_a_cache_folder_that_others_could_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planted = tmp_path / f"gpujob-tests-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted.symlink_to(elsewhere)
    assert stub._cache_folder() not in (planted, elsewhere)
    planted.unlink()
    planted.mkdir()
    planted.chmod(0o777)
    assert stub._cache_folder() != planted
    planted.chmod(0o700)
    assert stub._cache_folder() == planted


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_a_compiler_the_message_names_the_packages_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="apt-get install -y gcc libc6-dev"):
        stub.library_folder.__wrapped__()


# -- nvidia-smi -----------------------------------------------------------------------------------------------------


def by_gputil(smi: FakeSmi) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GPUTIL],
        env={**os.environ, **smi.environ()},
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )


def run_smi(smi: FakeSmi, *words: str) -> subprocess.CompletedProcess[str]:
    # The fake needs no other program in PATH.
    return subprocess.run(
        ["nvidia-smi", *words],
        env=smi.environ(path="/nonexistent"),
        executable=str(smi.program_folder / "nvidia-smi"),
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )


def test_gputil_reads_two_gpus_from_the_fake_nvidia_smi(smi: FakeSmi) -> None:
    smi.version("570.86.10")
    smi.gpu("GPU-1", name="NVIDIA H200", total=143771, used=1024, reserved=534, load=35, temp=61)
    smi.gpu("GPU-2")
    done = by_gputil(smi)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["id"], first["uuid"], first["name"], first["driver"]) == (0, "GPU-1", "NVIDIA H200", "570.86.10")
    assert (first["memoryTotal"], first["memoryUsed"], first["memoryFree"]) == (143771, 1024, 143771 - 1024 - 534)
    assert (first["load"], first["temperature"]) == (0.35, 61)
    assert (second["id"], second["uuid"], second["memoryUsed"], second["load"]) == (1, "GPU-2", 0, 0)


def test_gputil_reads_unsupported_values_as_nan(smi: FakeSmi) -> None:
    smi.gpu("GPU-1", total=None, used=None, load=None, temp=None)
    smi.gpu("GPU-2", mig=1)
    done = by_gputil(smi)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    for key in ("memoryTotal", "memoryUsed", "memoryFree", "memoryUtil", "load", "temperature"):
        assert math.isnan(first[key]), key
    assert math.isnan(second["load"]) and second["memoryTotal"] == 81559
    assert "[N/A]" in run_smi(smi, "--query-gpu=power.draw,utilization.gpu", "--format=csv,noheader,nounits").stdout


def test_gputil_fails_if_the_fake_driver_is_down(smi: FakeSmi) -> None:
    smi.gpu("GPU-1")
    smi.exit(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    done = by_gputil(smi)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ValueError: invalid literal for int()")
    smi.clear()
    assert by_gputil(smi).returncode == 0


def test_the_fake_nvidia_smi_prints_and_exits_as_configured(smi: FakeSmi) -> None:
    smi.gpu("GPU-1")
    assert run_smi(smi, *QUERY).stdout == "0, GPU-1\n"
    smi.text("1, GPU-2, größer, *", "  indented")
    smi.cut("2, GP")
    assert run_smi(smi, *QUERY).stdout == "0, GPU-1\n1, GPU-2, größer, *\n  indented\n2, GP"
    smi.clear()
    smi.exit(15, "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\nReboot.")
    done = run_smi(smi, *QUERY)
    assert done.returncode == 15
    assert done.stdout.splitlines()[1:] == [
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.",
        "Reboot.",
    ]


def test_the_fake_nvidia_smi_reports_invalid_arguments(smi: FakeSmi) -> None:
    assert (run_smi(smi, *QUERY).returncode, run_smi(smi, *QUERY).stdout) == (6, "No devices were found\n")
    smi.gpu("GPU-1")
    asked = run_smi(smi, "--query-gpu=index,colour", "--format=csv,noheader,nounits")
    assert (asked.returncode, asked.stdout.splitlines()[0]) == (2, 'Field "colour" is not a valid field to query.')
    assert run_smi(smi, "--query-gpu=index", "--format=csv").returncode == 2
    assert run_smi(smi, "--list-the-gpus").returncode == 2
    smi.file.write_text("gpus GPU-1\n")
    assert run_smi(smi, *QUERY).returncode == 64
    smi.file.unlink()
    done = run_smi(smi, *QUERY)
    assert done.returncode == 9 and done.stdout.startswith("NVIDIA-SMI has failed because")


@pytest.mark.parametrize(
    ("told", "ends_by"),
    [
        (FakeSmi.hang, signal.SIGTERM),
        (lambda smi: smi.hang(deaf=True), signal.SIGKILL),
        (FakeSmi.stop, signal.SIGKILL),
    ],
    ids=["hang", "deaf", "stop"],
)
def test_the_fake_nvidia_smi_can_hang(smi: FakeSmi, told: Callable[[FakeSmi], None], ends_by: signal.Signals) -> None:
    smi.gpu("GPU-1")
    told(smi)
    process = subprocess.Popen(
        ["nvidia-smi", *QUERY],
        env=smi.environ(path="/nonexistent"),
        executable=str(smi.program_folder / "nvidia-smi"),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0, GPU-1\n"
        time.sleep(SOON_S)
        assert process.poll() is None
        want = "T" if told is FakeSmi.stop else "S"

        def state() -> str:
            status = Path(f"/proc/{process.pid}/stat").read_text()
            return status[status.rindex(")") + 2]

        wait_for(lambda: state() == want, want)
        assert not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()  # a child could hold the pipe
        if ends_by is signal.SIGKILL:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
            time.sleep(SOON_S)
            assert process.poll() is None
        process.send_signal(ends_by)
        assert process.wait(ANSWER_S) == -ends_by
        assert process.stdout.read() == b""
    finally:
        process.kill()
        process.communicate(timeout=ANSWER_S)
