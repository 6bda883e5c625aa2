"""Tests of the kernel's counter of processes ended for lack of memory: where it is, and how attempt records keep it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler.core.job import Process
from scheduler.core.observations import Ended
from scheduler.runners import attempt_record
from scheduler.runners import supervisor as supervisor_file
from scheduler.runners.supervisor import OomCounter
from tests.bench import Bench, direct_bench, screen_bench
from tests.builders import a_job

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("0::/user.slice/s.scope\n", {"user.slice/s.scope/memory.events": V2}, 3),
        ("0::/\n", {"memory.events": V2}, 3),  # in a container with a namespace of its own
        ("0::/docker/ab\n", {"memory.events": V2}, 3),  # in a container that sees the path outside
        ("0::/../../other\n", {"memory.events": V2, "../other/memory.events": "oom_kill 9\n"}, 3),
        ("9:memory:/a\n0::/\n", {"memory/a/memory.oom_control": V1}, 3),
        ("9:cpu,memory:/docker/ab\n", {"memory/memory.oom_control": V1}, 3),
        ("9:memory:/a\n0::/s\n", {"memory/a/memory.oom_control": V1, "unified/s/cgroup.procs": ""}, 3),
        ("9:cpu:/a\n0::/s\n", {"unified/s/memory.events": V2, "cpu/a/cgroup.procs": ""}, 3),
        ("9:memory:/a\n", {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, -1),  # before Linux 4.13
        ("0::/s\n", {"s/cgroup.procs": ""}, -1),  # no memory controller
        ("0::/s\n", {"s/memory.events": "oom_kill many\n"}, -1),
        ("nonsense\n", {}, -1),
        ("", {}, -1),
    ],
)  # fmt: skip
def test_the_counter_of_the_own_cgroup_is_found(tmp_path: Path, own: str, files: dict[str, str], count: int) -> None:
    """cgroup v2, v1, both (hybrid), none; inside and outside of containers."""
    mounts = tmp_path / "cgroup"
    for name, text in files.items():
        (mounts / name).parent.mkdir(parents=True, exist_ok=True)
        (mounts / name).write_text(text)
    (tmp_path / "own").write_text(own)
    counter = OomCounter(str(mounts), str(tmp_path / "own"))
    assert counter.read() == count and (counter.fd >= 0) == (count >= 0)
    assert (counter.since(count), counter.since(1)) == (0, 2 if count >= 0 else 0)
    counter.close()
    assert counter.read() == -1 and counter.since(count) == 0


def test_the_rise_is_counted_from_the_open_file(tmp_path: Path) -> None:
    own, events = tmp_path / "own", tmp_path / "memory.events"
    own.write_text("0::/\n")
    events.write_text("oom_kill 2\n")
    counter = OomCounter(str(tmp_path), str(own))
    before = counter.read()
    events.write_text("oom 7\noom_kill 4\n")
    assert (before, counter.since(before), counter.since(-1), counter.since(9)) == (2, 2, 0, 0)
    counter.close()


def test_without_the_file_of_the_own_cgroups_nothing_is_known(tmp_path: Path) -> None:
    assert OomCounter(str(tmp_path), str(tmp_path / "none")).read() == -1


OLD_END = re.compile(rb"(exit|signal|hangup|never) (\d+) at (\d+) sum (\d+)")  # of releases without the counter


def test_records_keep_the_rise_and_older_readers_understand_them(tmp_path: Path) -> None:
    path = tmp_path / "3.1"
    for kills in (0, 1, 10**9):
        path.write_bytes(attempt_record.blank(a_job(3, attempt=1), "b"))
        attempt_record.write_end(str(path), "hangup", 1009, 10**18, sync=False, oom_kills=kills)
        found = attempt_record.read(str(path))
        assert (found.how, found.code, found.ended_at, found.oom_kills) == ("hangup", 1009, 1e9, kills)
        data = path.read_bytes()
        end = OLD_END.match(data, attempt_record.END_AT)
        assert end is not None
        old = data[attempt_record.END_AT : end.end()].rsplit(b" sum ", 1)[0]
        assert (int(end[2]), attempt_record.checksum(old)) == (1009, int(end[4]))
        assert data[attempt_record.SPEC_AT - 1 : attempt_record.SPEC_AT + 1] == b"\n{"


def test_a_torn_counter_does_not_count(tmp_path: Path) -> None:
    """The ending before it does."""
    path = tmp_path / "3.1"
    line = attempt_record.end_line("signal", 9, 10**18, 12)
    for torn in (line.replace(b"oom_kills 12", b"oom_kills 13"), line[: line.index(b" sum", 40)].ljust(95) + b"\n"):
        data = attempt_record.blank(a_job(3, attempt=1), "b")
        path.write_bytes(data[: attempt_record.END_AT] + torn + data[attempt_record.SPEC_AT :])
        found = attempt_record.read(str(path))
        assert (found.how, found.code, found.oom_kills) == ("signal", 9, 0)


@pytest.mark.parametrize("kills", [-1, 0, 123_456])
def test_the_counter_before_the_start_is_in_the_record(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "3.1"
    data = attempt_record.blank(a_job(3, attempt=1), "b")
    field = supervisor_file.pid_bytes(1 << 22, 10**11, 10**19, "x" * 36, kills)
    assert len(field) == attempt_record.PID_SIZE
    path.write_bytes(data[: attempt_record.PID_AT] + field + data[attempt_record.END_AT :])
    found = attempt_record.read(str(path))
    assert (found.process, found.boot, found.oom_kills_before) == (Process(1 << 22, 10**11), "x" * 36, kills)
    attempt_record.write_pid(str(path), Process(5, 6), "b", 7, 8)  # by a daemon whose supervisor died before it did
    assert attempt_record.read(str(path)).oom_kills_before == -1


def test_supervisor_and_package_write_the_same_ending() -> None:
    for kills in (0, 7):
        made = supervisor_file.end_bytes("signal", 9, kills)
        at = int(made.split()[3])
        assert made == attempt_record.end_line("signal", 9, at, kills)


@pytest.mark.parametrize("make", [direct_bench, screen_bench], ids=["direct", "screen"])
def test_a_plain_sigkill_does_not_count(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bench: Bench
    with make(tmp_path) as bench:
        bench.start(1, "/bin/sh", "-c", "kill -9 $$")
        ended = bench.until(Ended, 1)
        assert (ended.signal, ended.oom_kills) == (9, 0)
        found = attempt_record.read(bench.record(1))
        assert found.oom_kills_before == OomCounter().read() and found.oom_kills == 0
