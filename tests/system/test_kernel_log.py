"""Tests of the reader of the kernel's log. A pipe in packet mode gives one record a read, as /dev/kmsg does."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.system import kernel_log
from scheduler.system.kernel_log import PATH, KernelLog, shows_pids

WORDS = (b"Killed process",)


class Pipe:
    """A log into which the test writes."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK)
        self.log = KernelLog(f"/proc/self/fd/{self.read_end}")

    def write(self, text: str, at: int = 2_500_000, priority: int = 6) -> None:
        os.write(self.write_end, f"{priority},17,{at},-;{text}\n SUBSYSTEM=Killed process\n".encode())


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.log.close()
    os.close(made.read_end)
    os.close(made.write_end)


def test_new_records_with_a_word_are_read_once(pipe: Pipe) -> None:
    assert pipe.log.read(WORDS) == []
    pipe.write("usb 1-1: new device")
    pipe.write("Killed process 1 (a)")
    pipe.write("Killed process 2 (b)", 3_000_000, priority=3)
    assert pipe.log.read(WORDS) == [(2.5, "Killed process 1 (a)"), (3.0, "Killed process 2 (b)")]
    assert pipe.log.read(WORDS) == []
    pipe.write("Killed process 3 (c)")
    assert pipe.log.read(WORDS) == [(2.5, "Killed process 3 (c)")]


def test_records_of_programs_and_nonsense_are_not_the_kernels_word(pipe: Pipe) -> None:
    """Root's programs may write into the log, too; the kernel marks their records with a facility."""
    pipe.write("Killed process 1 (a)", priority=14)
    os.write(pipe.write_end, b"Killed process 2")
    os.write(pipe.write_end, b"x,y,z;Killed process 3")
    os.write(pipe.write_end, b"\xff\xfe,;;Killed process")
    pipe.write("Killed process " + "x" * 3000)
    ((_, text),) = pipe.log.read(WORDS) or []
    assert len(text) == kernel_log.LONGEST_TEXT


def test_a_read_is_bounded_and_the_next_one_continues(pipe: Pipe) -> None:
    for number in range(8):
        pipe.write(f"Killed process {number}")
    assert len(pipe.log.read(WORDS, most_bytes=100) or []) == 2
    assert pipe.log.read(WORDS, limit_s=0) == []
    assert [text for _, text in pipe.log.read(WORDS) or []] == [f"Killed process {number}" for number in range(2, 8)]


def test_overwritten_and_too_long_records_are_passed_over(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, read = [errno.EPIPE, errno.EINVAL], os.read

    def failing(fd: int, size: int) -> bytes:
        if errors:
            raise OSError(errors.pop(), "no")
        return read(fd, size)

    monkeypatch.setattr(os, "read", failing)
    pipe.write("Killed process 1")
    assert pipe.log.read(WORDS) == [(2.5, "Killed process 1")]
    errors += [errno.EPIPE] * 1000
    assert pipe.log.read(WORDS) == [], "it gives up"


def test_a_log_that_cannot_be_read_is_told_apart_from_an_empty_one(tmp_path: Path) -> None:
    assert KernelLog(str(tmp_path / "none")).read(WORDS) is None
    KernelLog(str(tmp_path / "none")).close()


@pytest.mark.skipif(not os.access(PATH, os.R_OK), reason="this user may not read the kernel's log (dmesg_restrict)")
def test_the_log_of_this_machine_is_read() -> None:
    log = KernelLog()
    found = log.read((b"",), limit_s=5)
    assert found is not None and all(at >= 0 for at, _ in found)
    log.close()
    assert shows_pids() == (os.readlink("/proc/self/ns/pid") == "pid:[4026531836]")


def test_the_time_that_other_processes_take_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the wall clock may advance by more than the limit between two records."""
    path = tmp_path / "kmsg"
    path.write_bytes(b"4,1,1000000,-;Killed process 7\n")
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert KernelLog(str(path)).read([b"Killed process"]) == [(1.0, "Killed process 7")]
