"""Tests of NvidiaProbe: a request for a reading never blocks, and unknown values are reported as unknown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.errors import NoGpuData
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.observations import Readings
from scheduler.core.protocols import Probe
from scheduler.core.topology import Link
from scheduler.gpus import nvidia
from scheduler.gpus.nvidia import NvidiaProbe
from tests.gpus.stub import FakeDriver, FakeSmi
from tests.stories.harness import alive, wait_for

PATIENCE_S = 60.0
FOR_EVER_S = 10_000.0
LOST, MISMATCH, NOT_SUPPORTED, NOT_LOADED = 15, 18, 3, 9
BASE = {name: value for name, value in os.environ.items() if name not in ("PATH", "LD_LIBRARY_PATH")}

Make = Callable[..., NvidiaProbe]


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path / "driver")


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    return FakeSmi(tmp_path / "smi")


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Make]:
    """Return a function that creates GPU readers. They use the given fakes, and not the driver of this machine."""
    made: list[NvidiaProbe] = []

    def make(*standins: FakeDriver | FakeSmi, deadline_s: float = PATIENCE_S) -> NvidiaProbe:
        environ = {**BASE, "PATH": "/nonexistent"}
        none = FakeDriver(tmp_path / "none")
        environ |= {**none.environ(), "NVML_STUB_FILE": str(tmp_path / "no such file")}
        for each in standins:
            environ |= each.environ() if isinstance(each, FakeDriver) else each.environ("/bin:/usr/bin")
        made.append(NvidiaProbe(environ, deadline_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a new reader process only the normal time limit for its first answer."""
    monkeypatch.setattr(nvidia, "FIRST_DEADLINE_S", 0.0)


def look(probe: NvidiaProbe) -> Readings:
    """Wait for the reading that was requested before, as the daemon's loop waits, and return this reading."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = probe.look()
        if found is not None:
            return found
        left = (probe.next_look() or end) - time.monotonic()
        probe._epoll.poll(max(0.001, min(left, 1.0)))
    raise AssertionError("no reading")


def read(probe: NvidiaProbe) -> Readings:
    """Request a reading, wait for the answer, and return it."""
    probe.ask()
    return look(probe)


def good(probe: NvidiaProbe) -> tuple[GpuSnapshot, ...]:
    found = read(probe)
    assert not found.problem and found.gpus
    return found.gpus


def one(probe: NvidiaProbe) -> GpuSnapshot:
    (found,) = good(probe)
    return found


def reader_asked(probe: NvidiaProbe) -> nvidia._Reader:
    """Wait until the GPU reader has passed its request to a reader process; return this process.

    If an earlier reader process was killed, the GPU reader first waits until that process is dead.
    """
    wait_for(lambda: probe._reader is not None or probe.look() is not None, "a reader")
    assert probe._reader is not None
    return probe._reader


def reader_of(probe: NvidiaProbe) -> int:
    return reader_asked(probe).pid


def family(pid: int) -> list[int]:
    """Return the pids of the living processes in the session of the process ``pid``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and alive(int(name)):
            try:
                if os.getsid(int(name)) == pid:
                    found.append(int(name))
            except ProcessLookupError:
                continue
    return found


def test_nvidia_probe_has_all_methods_of_the_protocol(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    made: Probe = probe(driver)
    assert made.first().gpus and made.descriptors() and made.sessions() and made.next_look() is None
    for name in (each for each in vars(Probe) if not each.startswith("_")):
        assert callable(getattr(made, name)), name


# -- NVML -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_all_gpus_are_reported_in_the_order_of_the_driver(driver: FakeDriver, probe: Make, count: int) -> None:
    with driver.together():
        for i in range(count):
            driver.gpu(f"GPU-{i}", used=100 * i, load=i, temp=40 + i, total=81_559)
    made = probe(driver)
    found = made.first().gpus
    assert [(g.ordinal, g.uuid, g.memory_used_mib, g.temperature_c) for g in found] == [
        (i, f"GPU-{i}", 100 * i, 40 + i) for i in range(count)
    ]
    assert [g.load for g in found] == [i / 100 for i in range(count)]
    assert all(g.memory_total_mib == 81_559 and g.processes == () and not g.problem for g in found)
    driver.order([f"GPU-{i}" for i in reversed(range(count))])
    assert [(g.ordinal, g.uuid) for g in good(made)] == [(i, f"GPU-{count - 1 - i}") for i in range(count)]


def test_processes_are_reported_with_memory_kind_and_load(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1", used=9_000)
    driver.process("GPU-1", 11, 5_000, util=70)
    driver.process("GPU-1", 12, None)
    driver.process("GPU-1", 13, 300, type="G")
    driver.process("GPU-1", 14, 100, type="G")
    driver.process("GPU-1", 14, 100, type="C")
    found = one(probe(driver)).processes
    assert found is not None
    told = {process.pid: process for process in found}
    assert told[11] == GpuProcess(11, 5_000, True, 0.7)
    assert told[12] == GpuProcess(12, None, True, None)
    assert told[13] == GpuProcess(13, 300, False, None)
    assert told[14].compute, "who computes and draws, computes"


def test_a_gpu_lost_during_a_reading_is_reported_with_its_uuid(driver: FakeDriver, probe: Make) -> None:
    """I06: If a GPU is lost during a reading, the reading has its UUID but no values. The other GPUs are read."""
    with driver.together():
        driver.gpu("GPU-1")
        driver.gpu("GPU-2", used=7)
    made = probe(driver)
    good(made)
    driver.error("*", LOST, "GPU-1")
    gone, there = good(made)
    assert (gone.uuid, gone.ordinal, gone.lost) == ("GPU-1", 0, True) and "lost" in gone.problem.lower()
    assert gone.memory_used_mib is None and gone.load is None
    assert (there.uuid, there.lost, there.memory_used_mib) == ("GPU-2", False, 7)
    driver.clear_errors()
    assert not good(made)[0].lost, "back again"


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates"]
)
def test_a_gpu_lost_in_any_driver_call_is_reported_as_lost(driver: FakeDriver, probe: Make, call: str) -> None:
    with driver.together():
        driver.gpu("GPU-1")
        driver.gpu("GPU-2")
    made = probe(driver)
    good(made)
    driver.error(call, LOST, "GPU-1")
    if call == "nvmlDeviceGetMemoryInfo":
        driver.error("nvmlDeviceGetMemoryInfo_v2", LOST, "GPU-1")
    gone, there = good(made)
    assert gone.lost and gone.uuid == "GPU-1" and not there.lost


def test_a_gpu_that_the_driver_no_longer_lists_is_missing_until_listed_again(driver: FakeDriver, probe: Make) -> None:
    """I06, I08: A GPU that the driver no longer lists is missing from the reading until the driver lists it again."""
    for i in range(3):
        driver.gpu(f"GPU-{i}")
    made = probe(driver)
    good(made)
    driver.remove("GPU-1")
    assert [(g.uuid, g.ordinal) for g in good(made)] == [("GPU-0", 0), ("GPU-2", 1)]
    driver.gpu("GPU-1")
    driver.order(["GPU-0", "GPU-1", "GPU-2"])
    assert [(g.uuid, g.ordinal) for g in good(made)] == [(f"GPU-{i}", i) for i in range(3)]


def test_a_lost_gpu_that_was_never_read_is_reported_without_a_uuid(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    driver.error("*", LOST, "GPU-1")
    found = one(probe(driver))
    assert found.lost and found.uuid == ""


@pytest.mark.parametrize("when", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_version_mismatch_of_library_and_driver_is_reported(driver: FakeDriver, probe: Make, when: str) -> None:
    """I05: If the versions of library and driver differ, this is reported as the cause.

    Once fixed, readings succeed.
    """
    driver.gpu("GPU-1")
    made = probe(driver)
    before = 0
    if when == "nvmlDeviceGetCount_v2":
        good(made)
        before = reader_of(made)
    driver.error(when, MISMATCH)
    for _ in range(2):
        told = read(made)
        assert not told.gpus and told.problem.startswith("NVML: driver/library version mismatch")
        assert "kernel module" in told.problem and "nvidia-smi" not in told.problem
        assert not made.absent, "a driver that cannot be asked is not taken for none"
    driver.clear_errors()
    assert good(made)[0].uuid == "GPU-1" and reader_of(made) != before


def test_the_first_reading_reports_the_error_of_each_source(driver: FakeDriver, smi: FakeSmi, probe: Make) -> None:
    driver.error("nvmlInitWithFlags", MISMATCH)
    smi.exit(9, "no driver")
    with pytest.raises(NoGpuData) as raised:
        probe(driver, smi).first()
    assert "NVML: driver/library version mismatch" in str(raised.value) and "nvidia-smi: " in str(raised.value)
    assert "--gpus N" in str(raised.value)


def test_without_a_driver_the_reader_reports_the_driver_as_absent(probe: Make) -> None:
    """I01: Without a driver, the first reading raises NoGpuData, and the reader reports the driver as absent."""
    made = probe()
    with pytest.raises(NoGpuData):
        made.first()
    assert made.absent


def test_a_driver_without_gpus_is_reported_as_absent(driver: FakeDriver, probe: Make) -> None:
    made = probe(driver)
    told = read(made)
    assert not told.gpus and "shows no GPU" in told.problem and made.absent


def test_an_old_driver_gives_all_values_that_it_supports(tmp_path: Path, probe: Make) -> None:
    driver = FakeDriver(tmp_path / "driver", old=True)
    driver.gpu("GPU-1", used=1_000, reserved=500, load=30)
    driver.process("GPU-1", 11, 900)
    found = one(probe(driver))
    assert found.load == 0.3 and found.memory_used_mib is not None and found.memory_used_mib >= 1_000
    assert found.problem == "" and found.processes is not None
    assert [(p.pid, p.memory_mib, p.load) for p in found.processes] == [(11, 900, None)]


def test_mig_mode_is_no_problem_of_the_gpu(driver: FakeDriver, probe: Make) -> None:
    with driver.together():
        driver.gpu("GPU-1", mig=1)
        driver.gpu("GPU-2", mig=None)
    with_mig, without = good(probe(driver))
    assert (with_mig.mig, with_mig.problem, without.mig, without.problem) == (True, "", False, "")


def test_a_gpu_without_its_own_memory_reports_the_memory_of_the_machine(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1", total=None)
    found = one(probe(driver))
    assert found.memory_total_mib and found.memory_used_mib and found.memory_used_mib < found.memory_total_mib


def test_an_error_in_reading_the_memory_is_a_problem_of_the_gpu(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1", used=5)
    for call in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        driver.error(call, 999)
    found = one(probe(driver))
    assert found.memory_used_mib is None and found.problem and not found.lost


def test_an_unsupported_load_is_reported_as_unknown(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1", load=None, temp=None)
    found = one(probe(driver))
    assert found.load is None and found.temperature_c is None and found.problem == ""


def test_a_refused_process_list_is_reported_as_unknown_not_as_empty(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    driver.process("GPU-1", 11, 900)
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        driver.error(name, 4)
    assert one(probe(driver)).processes is None


def test_memory_errors_and_xid_events_are_reported(driver: FakeDriver, probe: Make) -> None:
    """I09: Uncorrected memory errors are reported with each reading, each XID event once, with GPU, number and time."""
    with driver.together():
        driver.gpu("GPU-1")
        driver.gpu("GPU-2", ecc=None)
        driver.gpu("GPU-3")
    made = probe(driver)
    assert [g.errors for g in good(made)] == ["", "", ""]
    before = time.time()
    driver.gpu("GPU-1", ecc=2)
    driver.xid("GPU-2", 79)
    driver.xid("GPU-3", 31)  # an error of an application
    driver.xid("GPU-3", 9999)  # no known number
    found = read(made)
    assert found.watches_errors and [g.errors for g in found.gpus] == ["2 uncorrected memory errors", "", ""]
    assert [(xid.uuid, xid.number) for xid in found.xids] == [("GPU-2", 79), ("GPU-3", 31), ("GPU-3", 9999)]
    assert all(before <= xid.at <= time.time() for xid in found.xids)
    again = read(made)
    assert again.gpus == found.gpus and again.xids == (), "an event is told once"


def test_an_xid_event_of_a_gpu_that_is_lost_names_the_gpu(driver: FakeDriver, probe: Make) -> None:
    with driver.together():
        driver.gpu("GPU-1")
        driver.gpu("GPU-2")
    made = probe(driver)
    good(made)
    with driver.together():
        driver.xid("GPU-2", 79)
        driver.error("*", LOST, "GPU-2")
    found = read(made)
    assert [(xid.uuid, xid.number) for xid in found.xids] == [("GPU-2", 79)]
    assert [g.lost for g in found.gpus] == [False, True]


@pytest.mark.usefixtures("hasty")
def test_xid_events_are_kept_although_the_driver_then_hangs(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    made = probe(driver)
    good(made)
    made.deadline_s = 1.0
    with driver.together():
        driver.xid("GPU-1", 79)
        driver.hang("nvmlDeviceGetUtilizationRates")
    found = read(made)
    assert found.problem and [(xid.uuid, xid.number) for xid in found.xids] == [("GPU-1", 79)]


# -- hanging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUtilizationRates"])
def test_ask_and_look_return_while_the_reader_process_hangs(driver: FakeDriver, probe: Make, call: str) -> None:
    """I02: `ask` and `look` return while the reader process hangs in the driver."""
    driver.gpu("GPU-1")
    driver.hang(call)
    made = probe(driver, deadline_s=FOR_EVER_S)
    made.ask()
    for _ in range(50):
        made.ask()
        assert made.look() is None
    assert family(reader_of(made)) == [reader_of(made)]
    pid = reader_of(made)
    made.close()
    wait_for(lambda: not alive(pid), "the end of the reader process")  # `close` waits only briefly for it
    made._epoll = nvidia.select.epoll()  # the fixture closes it again


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUtilizationRates"])
def test_a_hanging_reader_is_killed_and_reported(hasty: None, driver: FakeDriver, probe: Make, call: str) -> None:
    """I02: If a reader process does not answer in time, it is killed, and this is reported. Later readings succeed."""
    driver.gpu("GPU-1")
    made = probe(driver, deadline_s=PATIENCE_S)
    if call != "nvmlInitWithFlags":
        good(made)
    driver.hang(call)
    made.deadline_s = 0.3
    pids = set()
    for _ in range(3):
        made.ask()
        pids.add(reader_of(made))
        told = look(made)
        assert not told.gpus and "NVML: no answer within" in told.problem and not made.absent
    assert not any(map(alive, pids)), "the hanging ones are gone"
    assert not made.sessions()
    driver.clear_errors()
    made.deadline_s = PATIENCE_S
    assert good(made)[0].uuid == "GPU-1"


def test_the_first_answer_of_a_reader_process_has_a_longer_limit(driver: FakeDriver, probe: Make) -> None:
    """The first answer of a reader process has a longer time limit: an idle driver takes seconds to wake up."""
    driver.gpu("GPU-1")
    made = probe(driver, deadline_s=0.001)
    made.ask()
    assert (made.next_look() or 0) - time.monotonic() > 1
    assert not look(made).problem
    made.ask()
    assert (made.next_look() or 0) - time.monotonic() < 1


def test_no_second_reader_process_is_started_until_a_killed_one_has_ended(
    hasty: None, driver: FakeDriver, smi: FakeSmi, probe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I03: While a reader process that was killed has not ended, no other reader process is started."""
    driver.gpu("GPU-1")
    smi.gpu("GPU-1")
    driver.hang("nvmlDeviceGetCount_v2")
    made = probe(driver, smi, deadline_s=0.2)
    made.ask()
    stuck = reader_of(made)
    with monkeypatch.context() as patched:
        patched.setattr(nvidia.os, "killpg", lambda *_: None)
        assert not look(made).gpus
        spawned: list[Any] = []
        patched.setattr(made, "_spawn", lambda way: spawned.append(way))
        for _ in range(5):
            told = read(made)
            assert not told.gpus and f"pid {stuck}, hangs in the driver and cannot be killed" in told.problem
            assert not made.absent and made.sessions() == {stuck}
        assert not spawned and alive(stuck)
    os.kill(stuck, signal.SIGKILL)
    wait_for(lambda: not alive(stuck), "its end")
    driver.clear_errors()
    made.deadline_s = PATIENCE_S
    assert good(made) and made.sessions() == {reader_of(made)}


def test_a_stopped_reader_process_is_killed_after_its_limit(hasty: None, driver: FakeDriver, probe: Make) -> None:
    """I03: A reader process that is stopped (SIGSTOP) is killed when its time limit is over."""
    driver.gpu("GPU-1")
    made = probe(driver)
    good(made)
    stopped = reader_of(made)
    os.kill(stopped, signal.SIGSTOP)
    made.deadline_s = 0.3
    assert "no answer within" in read(made).problem and not alive(stopped)
    made.deadline_s = PATIENCE_S
    assert good(made)


# -- its process ------------------------------------------------------------------------------------------


def test_a_killed_reader_process_is_replaced_without_a_missed_reading(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    made = probe(driver)
    good(made)
    killed = reader_of(made)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not alive(killed), "its end")
    assert good(made) and reader_of(made) != killed


def test_a_reader_process_that_ends_unexpectedly_wakes_the_loop_once(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    made = probe(driver)
    good(made)
    killed = reader_of(made)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not alive(killed), "its end")
    assert made._epoll.poll(0), "the loop wakes"
    assert made.look() is None
    assert not made._epoll.poll(0), "and sleeps again"
    assert not made.sessions()


def test_an_invalid_answer_of_a_reader_process_is_reported_as_a_problem(driver: FakeDriver, probe: Make) -> None:
    made = probe(driver)
    for text in (b"\n", b"{\n", b"[]\n", b'"x"\n', b"null\n", b"{}\n", b"\xff\xfe\n"):
        made.ask()
        reader_asked(made).text = text
        told = look(made)
        assert not told.gpus and "answer" in told.problem, text


def test_no_descriptor_and_no_process_remains_after_200_readings(
    hasty: None, driver: FakeDriver, smi: FakeSmi, probe: Make
) -> None:
    driver.gpu("GPU-1")
    smi.gpu("GPU-1")
    made = probe(driver, smi)
    good(made)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(200):
        if i % 20 == 10:
            os.kill(reader_of(made), signal.SIGKILL)
        elif i % 20 == 15:
            driver.error("nvmlDeviceGetCount_v2", MISMATCH)  # nvidia-smi answers
        elif i % 20 == 16:
            driver.clear_errors()
            made._nvml_at = -FOR_EVER_S
        good(made)
        assert len(made.sessions()) <= 1
    assert len(os.listdir("/proc/self/fd")) == before
    made._end(made._reader)  # type: ignore[arg-type]
    wait_for(lambda: not made._bury() and not made._stuck, "its burial")
    assert len(os.listdir("/proc/self/fd")) == before - 3 and not made.sessions()


PARENT = """\
import json, os, sys, time
from scheduler.gpus.nvidia import NvidiaProbe
probe = NvidiaProbe(json.loads(sys.argv[1]), 10_000)
probe.ask()
print(probe._reader.pid, flush=True)
if sys.argv[2] == "answered":
    while probe.look() is None: time.sleep(0.01)
    print("read", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("state", ["answered", "hanging"])
@pytest.mark.parametrize("way", ["nvml", "smi"])
def test_a_reader_dies_with_its_parent(driver: FakeDriver, smi: FakeSmi, tmp_path: Path, way: str, state: str) -> None:
    """If the parent of a reader process is killed, the reader process and its nvidia-smi die too."""
    driver.gpu("GPU-1")
    smi.gpu("GPU-1")
    environ = {**BASE, **driver.environ(), "PATH": "/nonexistent"}
    if way == "smi":
        environ |= {**smi.environ("/bin:/usr/bin"), "NVML_STUB_FILE": str(tmp_path / "no such file")}
    if state == "hanging":
        driver.hang("nvmlDeviceGetCount_v2")
        smi.hang(deaf=True)
    words = [sys.executable, "-c", PARENT, json.dumps(environ), state]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**BASE, "PYTHONPATH": os.getcwd()})
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        if state == "answered":
            assert parent.stdout.readline() == "read\n"
        elif way == "smi":  # the first reader process only reports that NVML is missing
            parent.kill()
            parent.wait()
            wait_for(lambda: not family(pid), "the end of the first reader")
            _smi_dies_with_its_parent(environ)
            return
        else:
            wait_for(lambda: "pause" in _where(pid) or not _where(pid), "the hang")
        parent.kill()
        parent.wait()
        wait_for(lambda: not family(pid) and not alive(pid), "the reader's end")
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def _where(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""


DIRECT = """\
import os, subprocess, sys, time
reader = subprocess.Popen([sys.executable, sys.argv[1], "smi"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          start_new_session=True)
reader.stdin.write(b"read\\n"); reader.stdin.flush()
print(reader.pid, flush=True)
time.sleep(1000)
"""


def _smi_dies_with_its_parent(environ: dict[str, str]) -> None:
    words = [sys.executable, "-c", DIRECT, nvidia.reader_process.__file__]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: len(family(pid)) == 2, "nvidia-smi beside the reader")
        both = family(pid)
        parent.kill()
        wait_for(lambda: not any(map(alive, both)), "the end of both")


# -- nvidia-smi -------------------------------------------------------------------------------------------


@pytest.fixture
def two(smi: FakeSmi) -> FakeSmi:
    """Return a fake nvidia-smi with two GPUs."""
    with smi.together():
        smi.gpu("GPU-1", used=1_024, load=35)
        smi.gpu("GPU-2", used=0, load=0, temp=50)
    return smi


def test_nvidia_smi_is_used_if_nvml_is_not_available(two: FakeSmi, probe: Make) -> None:
    made = probe(two)
    one, other = made.first().gpus
    assert (one.ordinal, one.uuid, one.memory_total_mib, one.memory_used_mib) == (0, "GPU-1", 81_559, 1_024)
    assert one.load == pytest.approx(0.35) and one.processes is None and one.problem == ""
    assert (other.uuid, other.load, other.memory_used_mib, other.temperature_c) == ("GPU-2", 0.0, 0, 50)
    assert not made.absent


def test_a_failed_nvml_is_retried_at_the_next_reading(driver: FakeDriver, two: FakeSmi, probe: Make) -> None:
    """After a failure of NVML, the next reading tries NVML again, because only NVML lists processes."""
    driver.gpu("GPU-1")
    driver.gpu("GPU-2")
    driver.error("nvmlInitWithFlags", MISMATCH)
    made = probe(driver, two)
    assert good(made)[0].processes is None
    driver.clear_errors()
    assert good(made)[0].processes == ()


def test_a_missing_nvml_is_retried_only_after_a_longer_time(driver: FakeDriver, two: FakeSmi, probe: Make) -> None:
    driver.gpu("GPU-1")
    driver.gpu("GPU-2")
    driver.error("nvmlInitWithFlags", 9)  # no driver loaded
    made = probe(driver, two)
    assert good(made)[0].processes is None
    driver.clear_errors()
    assert good(made)[0].processes is None, "not at every reading"
    made._nvml_at = -FOR_EVER_S
    assert good(made)[0].processes == ()


def test_a_value_that_nvidia_smi_reports_as_not_available_is_unknown(smi: FakeSmi, probe: Make) -> None:
    """I04: A value that nvidia-smi reports as N/A is unknown; an unknown memory value is a problem of the GPU."""
    with smi.together():
        smi.gpu("GPU-1", load=None)
        smi.gpu("GPU-2", used=None)
        smi.gpu("GPU-3", total=None)
        smi.gpu("GPU-4", temp=None)
    load, used, total, temp = good(probe(smi))
    assert load.load is None and load.memory_used_mib == 0 and load.problem == ""
    assert used.memory_used_mib is None and used.problem == "nvidia-smi does not report its memory"
    assert total.memory_total_mib is None and total.problem
    assert temp.temperature_c is None and temp.problem == ""


STRANGE: list[tuple[str, Callable[[FakeSmi], None]]] = [
    ("no-driver", lambda smi: smi.exit(9, "NVIDIA-SMI has failed because it couldn't communicate with the driver.")),
    ("mismatch", lambda smi: smi.exit(18, "Failed to initialize NVML: Driver/library version mismatch")),
    ("rows-then-failure", lambda smi: smi.exit(15, "Unable to determine the device handle for GPU: GPU is lost.")),
    ("localised", lambda smi: smi.text("0, GPU-1, 35 %, 81559 MiB, frei")),
    ("german", lambda smi: smi.text("Keine Geräte gefunden")),
    ("fewer-columns", lambda smi: smi.text("0, GPU-9, 35, 81559, 1024")),
    ("cut", lambda smi: smi.cut("2, GPU-3, 35, 815")),
    ("cut-inside-a-row", lambda smi: smi.text("2, GPU-3, 35, 815")),
    ("blank", lambda smi: smi.text("")),
    ("binary", lambda smi: smi.text("\x01\x02 \ufffd")),
    ("index-first-missing", lambda smi: smi.text("GPU-1, 0, 35, 81559, 0, 81025, 550, a, b, c, d, 40")),
]


@pytest.mark.parametrize(("name", "strange"), STRANGE, ids=[name for name, _ in STRANGE])
def test_unexpected_output_of_nvidia_smi_is_a_failed_reading(
    two: FakeSmi, probe: Make, name: str, strange: Callable[[FakeSmi], None]
) -> None:
    """I04: Unexpected output of nvidia-smi is a failed reading, never a GPU with 0 % in use."""
    made = probe(two)
    good(made)
    strange(two)
    told = read(made)
    if told.gpus:
        assert name in ("cut",) and [gpu.uuid for gpu in told.gpus] == ["GPU-1", "GPU-2"]
    else:
        assert told.problem.startswith("nvidia-smi: no readable answer") and not made.absent
    two.clear()
    assert [gpu.uuid for gpu in good(made)] == ["GPU-1", "GPU-2"]


@pytest.mark.parametrize(
    "row",
    [
        "0, GPU-1, Default, 35, 81559, 1024, 80535, 550.54, a, b, c, d, 40",  # an additional column before the load
        "0, GPU-1, 81559, 70000, 11559, 550.54, a, b, c, d, 40, x",  # the load is missing
        "0, GPU-1, 35, 70000, 81559, 11559, 550.54, a, b, c, d, 40",  # two columns are exchanged
    ],
)
def test_unexpected_columns_of_nvidia_smi_never_give_a_free_gpu(smi: FakeSmi, probe: Make, row: str) -> None:
    """I04: A row of nvidia-smi with unexpected columns gives a GPU with a problem, or no reading."""
    smi.text(row)
    told = read(probe(smi))
    for gpu in told.gpus:
        assert gpu.problem


def test_nvidia_smi_without_devices_is_a_failed_reading(smi: FakeSmi, probe: Make) -> None:
    made = probe(smi)
    told = read(made)
    assert not told.gpus and told.problem


@pytest.mark.parametrize("how", ["hang", "deaf", "stop"])
def test_an_nvidia_smi_that_does_not_end_is_killed(hasty: None, two: FakeSmi, probe: Make, how: str) -> None:
    """I02, I03: An nvidia-smi that does not end is killed together with its reader process.

    `ask` does not wait for this.
    """
    made = probe(two)
    good(made)
    {"hang": two.hang, "deaf": lambda: two.hang(deaf=True), "stop": two.stop}[how]()
    made.deadline_s = FOR_EVER_S
    made.ask()
    pid = reader_of(made)
    wait_for(lambda: len(family(pid)) == 2, "nvidia-smi beside the reader")
    both = family(pid)
    for _ in range(20):
        made.ask()
        assert made.look() is None and family(pid) == both
    made._due = 0.0  # its time limit has passed
    told = look(made)
    assert not told.gpus and "nvidia-smi: no answer within" in told.problem
    wait_for(lambda: not any(map(alive, both)), "the end of both")
    two.clear()
    made.deadline_s = PATIENCE_S
    assert good(made)


def test_the_reader_process_gets_no_variables_of_a_job(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-1")
    made = NvidiaProbe({**BASE, **driver.environ(), "GPUJOB_STATE_FILE": "/x", "GPUJOB_ID": "1"})
    try:
        good(made)
        environ = Path(f"/proc/{reader_of(made)}/environ").read_bytes().split(b"\0")
        ours = [entry for entry in environ if entry.startswith(b"GPUJOB_")]
        assert len(ours) == 1 and ours[0].startswith(b"GPUJOB_READER="), "what tells that it is a reader, no more"
    finally:
        made.close()


# -- topology -------------------------------------------------------------------------------------------------------


def links_of(probe: NvidiaProbe) -> dict[str, Link]:
    """Return the links of all pairs of GPUs: ``ab`` is the link between GPU-a and GPU-b."""
    found = {}
    for reading in good(probe):
        assert reading.links is not None
        for other, link in reading.links.items():
            found["".join(sorted(reading.uuid[-1] + other[-1]))] = Link(link)
    return found


def test_all_gpus_of_a_dgx_are_joined_by_nvlink(driver: FakeDriver, probe: Make) -> None:
    for letter in "abcdefgh":
        driver.gpu(f"GPU-{letter}")
    driver.dgx()
    found = links_of(probe(driver))
    assert len(found) == 28 and set(found.values()) == {Link.NVLINK}


def test_nvlink_islands_and_pcie_switches_are_told_apart(driver: FakeDriver, probe: Make) -> None:
    for letter in "abcdefgh":
        driver.gpu(f"GPU-{letter}")
    driver.islands()
    first = links_of(probe(driver))
    assert {pair for pair, link in first.items() if link is Link.NVLINK} == {
        "ab", "ac", "ad", "bc", "bd", "cd", "ef", "eg", "eh", "fg", "fh", "gh",
    }  # fmt: skip
    assert first["ae"] is Link.SYSTEM
    driver.pcie_pairs()
    second = links_of(probe(driver))
    assert {pair for pair, link in second.items() if link is Link.PCIE} == {"ab", "cd", "ef", "gh"}
    assert (second["ac"], second["de"]) == (Link.NUMA, Link.SYSTEM) and Link.NVLINK not in second.values()


def test_without_nvlink_each_pair_is_far(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-a"), driver.gpu("GPU-b")
    driver.no_links()
    assert links_of(probe(driver)) == {"ab": Link.SYSTEM}


@pytest.mark.parametrize("old", [False, True])
def test_nvlinks_to_gpus_that_are_not_shown_join_nothing(tmp_path: Path, probe: Make, old: bool) -> None:
    """In a container that shows one GPU of each of two pairs, the two GPUs are not joined: no switch is in between."""
    driver = FakeDriver(tmp_path / "old", old=old)
    driver.gpu("GPU-a"), driver.gpu("GPU-b")
    driver.nvlink("GPU-a", "GPU-y"), driver.nvlink("GPU-b", "GPU-z")
    assert links_of(probe(driver)) == {"ab": Link.NUMA}
    driver.dgx()
    assert links_of(probe(driver)) == {"ab": Link.NVLINK}, "here it is a switch"


@pytest.mark.parametrize("what", ["topology", "nvlink", "all"])
def test_errors_of_the_topology_calls_mean_not_known(driver: FakeDriver, probe: Make, what: str) -> None:
    driver.gpu("GPU-a"), driver.gpu("GPU-b")
    driver.dgx()
    if what in ("topology", "all"):
        driver.error("nvmlDeviceGetTopologyCommonAncestor", NOT_SUPPORTED)
    if what in ("nvlink", "all"):
        driver.error("nvmlDeviceGetNvLinkState", NOT_SUPPORTED)
    expected = {"topology": {"ab": Link.NVLINK}, "nvlink": {"ab": Link.NUMA}, "all": {}}
    assert links_of(probe(driver)) == expected[what]


def test_links_are_asked_again_only_for_other_gpus(driver: FakeDriver, probe: Make) -> None:
    """A process asks for the links once: later errors and changes do not matter until there are other GPUs."""
    driver.gpu("GPU-a"), driver.gpu("GPU-b")
    driver.dgx()
    reader = probe(driver)
    assert links_of(reader) == {"ab": Link.NVLINK}
    driver.no_links()
    assert links_of(reader) == {"ab": Link.NVLINK}
    driver.gpu("GPU-c")
    assert links_of(reader)["ab"] is Link.SYSTEM


def test_nvidia_smi_tells_no_links(smi: FakeSmi, probe: Make) -> None:
    smi.gpu("GPU-a")
    assert one(probe(smi)).links is None


# -- MIG ------------------------------------------------------------------------------------------------------------


def test_the_instances_of_a_gpu_in_mig_mode_follow_it(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-a", used=1000, load=50)
    driver.gpu("GPU-b", mig=1, ecc=2)
    driver.instance("GPU-b", "MIG-x", "1g.10gb", total=9856, used=12)
    driver.instance("GPU-b", "MIG-y", "3g.40gb", total=40_000, used=3000)
    driver.process("MIG-y", 4711, 2900)
    card, parent, small, large = good(probe(driver))
    assert (card.mig, card.profile, parent.mig, parent.problem, parent.load) == (False, "", True, "", None)
    assert (small.uuid, small.ordinal, small.profile, small.parent) == ("MIG-x", 200, "1g.10gb", "GPU-b")
    assert (small.memory_total_mib, small.memory_used_mib, small.load, small.problem) == (9856, 12, None, "")
    assert small.processes == () and small.errors == "2 uncorrected memory errors"
    assert (large.ordinal, large.profile) == (201, "3g.40gb")
    assert large.processes == (GpuProcess(4711, 2900),)


def test_the_mig_mode_is_asked_at_each_reading_and_an_error_keeps_the_last(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-a")
    driver.instance("GPU-a", "MIG-x")
    reader = probe(driver)
    assert [gpu.uuid for gpu in good(reader)] == ["GPU-a"]
    driver.gpu("GPU-a", mig=1)
    assert [(gpu.uuid, gpu.mig) for gpu in good(reader)] == [("GPU-a", True), ("MIG-x", False)]
    driver.error("nvmlDeviceGetMigMode", NOT_SUPPORTED)
    assert [(gpu.uuid, gpu.mig) for gpu in good(reader)] == [("GPU-a", True), ("MIG-x", False)]
    driver.clear_errors()
    driver.gpu("GPU-a", mig=0)
    assert [(gpu.uuid, gpu.mig) for gpu in good(reader)] == [("GPU-a", False)]


def test_an_instance_whose_memory_cannot_be_read_has_a_problem(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-a", mig=1)
    driver.instance("GPU-a", "MIG-x")
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        driver.error(function, NOT_SUPPORTED, "MIG-x")
    _, instance = good(probe(driver))
    assert instance.problem == "Not Supported" and instance.memory_total_mib is None


def told(readings: Readings) -> list[tuple[str, int]]:
    return [(xid.uuid, xid.number) for xid in readings.xids]


def test_an_xid_event_of_a_divided_gpu_concerns_the_instance_that_it_names_or_all(
    driver: FakeDriver, probe: Make
) -> None:
    driver.gpu("GPU-a")
    driver.gpu("GPU-b", mig=1)
    driver.instance("GPU-b", "MIG-x")
    driver.instance("GPU-b", "MIG-y")
    reader = probe(driver)
    good(reader)
    driver.xid("GPU-b", 79)
    assert told(read(reader)) == [("GPU-b", 79), ("MIG-x", 79), ("MIG-y", 79)]
    driver.xid("MIG-y", 94)
    driver.xid("GPU-a", 48)
    assert told(read(reader)) == [("GPU-b", 94), ("MIG-y", 94), ("GPU-a", 48)]
    driver.error("nvmlDeviceGetGpuInstanceId", NOT_SUPPORTED)
    good(reader)
    driver.xid("MIG-x", 94)
    assert told(read(reader)) == [("GPU-b", 94), ("MIG-x", 94), ("MIG-y", 94)], "not known which instance it is"
    driver.gpu("GPU-b", mig=0)
    good(reader)
    driver.xid("GPU-b", 79)
    assert told(read(reader)) == [("GPU-b", 79)]


def test_the_instances_of_a_lost_gpu_are_lost(driver: FakeDriver, probe: Make) -> None:
    driver.gpu("GPU-b", mig=1)
    driver.instance("GPU-b", "MIG-x", used=12)
    reader = probe(driver)
    good(reader)
    with driver.together():
        driver.xid("GPU-b", 79)
        driver.error("*", LOST)
    found = read(reader)
    assert told(found) == [("GPU-b", 79), ("MIG-x", 79)]
    assert [(gpu.uuid, gpu.lost, gpu.mig) for gpu in found.gpus] == [("GPU-b", True, True), ("MIG-x", True, False)]
    instance = found.gpus[1]
    assert (instance.ordinal, instance.profile, instance.parent) == (100, "1g.10gb", "GPU-b")
    assert instance.memory_used_mib is None and instance.problem == found.gpus[0].problem != ""
    driver.clear_errors()
    assert [(gpu.uuid, gpu.lost) for gpu in good(reader)] == [("GPU-b", False), ("MIG-x", False)]


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMemoryInfo_v2"]
)
@pytest.mark.parametrize("code", [LOST, 999])
def test_an_error_hides_no_instance(driver: FakeDriver, probe: Make, function: str, code: int) -> None:
    """After an error it does not look as if instances were deleted."""
    driver.gpu("GPU-b", mig=1)
    driver.instance("GPU-b", "MIG-x")
    driver.instance("GPU-b", "MIG-y")
    reader = probe(driver)
    good(reader)
    driver.error(function, code, "MIG-y" if "Memory" in function else "GPU-b")
    if "Memory" in function:
        driver.error("nvmlDeviceGetMemoryInfo", code, "MIG-y")
    found = {gpu.uuid: gpu for gpu in read(reader).gpus}
    assert set(found) == {"GPU-b", "MIG-x", "MIG-y"} and found["MIG-y"].problem
    assert found["MIG-y"].lost == found["MIG-x"].lost == found["GPU-b"].lost == (code == LOST)
