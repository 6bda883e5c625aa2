"""Tests of NvidiaProbe with reader processes that hang repeatedly or cannot be killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.errors import NoGpuData
from scheduler.gpus import nvidia
from scheduler.gpus.nvidia import LONGEST_WITHOUT_NVML_S, NVML_AGAIN_S
from tests.gpus.stub import FakeDriver, FakeSmi
from tests.gpus.test_nvidia import (
    FOR_EVER_S,
    Make,
    driver,
    good,
    hasty,
    look,
    probe,
    reader_asked,
    smi,
)  # fmt: skip
from tests.screens import marked
from tests.stories.harness import alive, wait_for

__all__ = ["driver", "hasty", "probe", "smi"]


# -- NVML hangs, nvidia-smi serves ------------------------------------------------------------------------


def test_a_hanging_nvml_is_tried_less_often_while_nvidia_smi_answers(
    hasty: None, driver: FakeDriver, smi: FakeSmi, probe: Make
) -> None:
    """While nvidia-smi answers, a hanging NVML is tried less and less often.

    Each try takes the full time limit.
    """
    driver.gpu("GPU-1")
    smi.gpu("GPU-1")
    driver.hang("nvmlInitWithFlags")
    made = probe(driver, smi)
    made.ask()
    assert made._reader is not None and made._reader.way == "nvml", "the better way first"
    made._due = 0.0  # its time limit has passed
    assert look(made).gpus[0].processes is None
    asked: list[str] = []
    spawn = made._spawn

    def noted(way: str) -> nvidia._Reader:
        asked.append(way)
        return spawn(way)

    made._spawn = noted  # type: ignore[method-assign]
    for _ in range(5):
        good(made)
    assert set(asked) <= {"smi"}, "NVML is not asked at every reading"
    for wait in [NVML_AGAIN_S * 2**i for i in range(8)]:
        assert made._nvml_wait == min(wait, LONGEST_WITHOUT_NVML_S)
        made._nvml_at = time.monotonic() - made._nvml_wait + 30
        made.ask()
        assert reader_asked(made).way == "smi", "its time has not come"
        look(made)
        made._nvml_at -= 60
        made.ask()
        assert reader_asked(made).way == "nvml"
        made._due = 0.0
        assert look(made).gpus
    driver.clear_errors()
    made._nvml_at -= made._nvml_wait + 1
    assert good(made)[0].processes == (), "NVML serves again"
    assert made._nvml_wait == NVML_AGAIN_S and not made._no_nvml


def test_after_a_first_answer_a_new_reader_has_the_normal_limit(driver: FakeDriver, smi: FakeSmi, probe: Make) -> None:
    """After the driver has answered once, a new reader process has the normal time limit: the driver is awake."""
    driver.gpu("GPU-1")
    made = probe(driver, deadline_s=1.0)
    made.ask()
    assert made._reader is not None and made._limit(made._reader) == nvidia.FIRST_DEADLINE_S
    assert look(made).gpus
    made._end(made._reader)
    made.deadline_s = 3.0
    made.ask()
    fresh = reader_asked(made)
    assert not fresh.answered and made._limit(fresh) == 3.0
    made._due = 0.0


def test_a_killed_reader_process_that_dies_late_loses_no_reading(
    hasty: None, driver: FakeDriver, smi: FakeSmi, probe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I02, I03: If a killed reader process dies late, as on a busy machine, it is not reported as stuck."""
    driver.gpu("GPU-1")
    smi.gpu("GPU-1")
    driver.hang("nvmlInitWithFlags")
    made = probe(driver, smi)
    kill = os.killpg
    later: list[threading.Timer] = []

    def slow_kill(pid: int, number: int) -> None:
        later.append(threading.Timer(0.5, kill, (pid, number)))
        later[-1].start()

    made.ask()
    made._due = 0.0  # its time limit has passed
    with monkeypatch.context() as patched:
        patched.setattr(nvidia.os, "killpg", slow_kill)
        found = look(made)
    assert found.gpus and not found.problem and made.way == "smi" and len(later) == 1
    for timer in later:
        timer.join()


def test_a_failure_of_nvidia_smi_is_reported_in_its_own_words(smi: FakeSmi, probe: Make) -> None:
    smi.exit(9, "NVIDIA-SMI has failed because it couldn't communicate with the driver.")
    with pytest.raises(NoGpuData) as raised:
        probe(smi).first()
    text = str(raised.value)
    assert "NVIDIA-SMI has failed because it couldn't communicate with the driver." in text
    assert "invalid literal" not in text and "\\n" not in text


def test_a_slow_driver_is_reported_once_at_the_start(
    driver: FakeDriver, probe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "SLOW_S", 0.0)
    driver.gpu("GPU-1")
    told: list[str] = []
    made = probe(driver)
    real, nothing_yet = made.look, [None]  # the first look finds no answer, however fast the reader process is
    monkeypatch.setattr(made, "look", lambda: nothing_yet.pop() if nothing_yet else real())
    assert made.first(lambda: told.append("slow")).gpus and told == ["slow"]
    monkeypatch.setattr(nvidia, "SLOW_S", FOR_EVER_S)
    made._end(made._reader)  # type: ignore[arg-type]
    assert made.first(lambda: told.append("slow")).gpus and told == ["slow"]


# -- packages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "program", "absent"), [(True, False, False), (False, True, False), (False, False, True)]
)
def test_packages_that_cannot_be_imported_do_not_make_the_driver_absent(
    tmp_path: Path, driver: FakeDriver, smi: FakeSmi, probe: Make, library: bool, program: bool, absent: bool
) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    for name in ("pynvml", "GPUtil"):
        (shadow / f"{name}.py").write_text("raise ImportError('broken')\n")
    made = probe(*([smi] if program else []))
    made.environ["PYTHONPATH"] = str(shadow)
    if library:
        made.environ |= driver.environ()
    else:
        made.environ["LD_LIBRARY_PATH"] = ""
        found = subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"], env=made.environ, check=False
        ).returncode
        if found == 0:
            pytest.skip("a machine with NVIDIA's library")
    # Without a driver, the error names the missing driver, and no package is imported.
    with pytest.raises(NoGpuData, match="Library Not Found" if absent else "cannot be imported: broken"):
        made.first()
    assert made.absent is absent


# -- an nvidia-smi that leaves its group ------------------------------------------------------------------


@pytest.fixture
def stray(tmp_path: Path, smi: FakeSmi) -> Iterator[Path]:
    """Replace nvidia-smi by a program that hangs in a new session while a file exists. Return the path of this file.

    Signals to the reader's process group do not reach the program. If the file does not exist, the program runs the
    fake nvidia-smi.
    """
    hold = tmp_path / "hold"
    program = smi.program_folder / "nvidia-smi"
    real = program.resolve()
    program.unlink()
    setsid, sleep = shutil.which("setsid"), shutil.which("sleep")
    program.write_text(
        f'#!/bin/sh\n[ ! -e {hold} ] || exec {setsid} sh -c "echo \\$\\$ >> {hold}; exec {sleep} 10000"\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    yield hold
    for pid in hold.read_text().split() if hold.exists() else ():
        if f"NVIDIA_SMI_FILE={smi.file}".encode() in _environ(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def test_at_most_one_unkillable_nvidia_smi_remains(hasty: None, smi: FakeSmi, stray: Path, probe: Make) -> None:
    smi.gpu("GPU-1")
    made = probe(smi)
    good(made)
    stray.touch()
    for _ in range(6):
        made.ask()
        if made._reader is not None and made._reader.way == "smi":
            wait_for(lambda: stray.read_text().endswith("\n"), "the stray nvidia-smi")
            made._due = 0.0
        told = look(made)
        assert not told.gpus and told.problem and not made.absent
    (pid,) = map(int, stray.read_text().split())
    assert alive(pid) and [p.pid for p in marked(f"{nvidia.READER}=")].count(pid) == 1, "it is known as no job's"
    assert "hangs in the driver and cannot be killed" in told.problem
    stray.unlink()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid), "its end")
    assert [gpu.uuid for gpu in good(made)] == ["GPU-1"]
