"""Cycles with a fault at one of a few selected system calls; `make sweep` tests all calls."""

from __future__ import annotations

import marshal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.breaking import order
from tests.breaking.cycle import Cycle
from tests.breaking.forge import Forge, until
from tests.breaking.sweep import LIMIT_S, Point, Verdict, hold, strike
from tests.breaking.tracing import recorded

# Points that have revealed a defect, and one point of each kind of fault: see docs/reliability.md.
POINTS = [
    "daemon:write:SIGKILL:1",
    "daemon:write:SIGKILL:3",
    "daemon:renameat2:SIGKILL:2",
    "daemon:fdatasync:EIO:9",
    "daemon:pwrite64:EIO:60",
    "daemon:pwrite64:ENOSPC:50",
    "daemon:pwrite64:nothing written:50",
    "daemon:write:nothing written:3",
    "supervisor:pwrite64:nothing written:2",
    "submit:pwrite64:nothing written:30",
    "daemon:clone3:SIGKILL:1",
    "daemon:clone3:EAGAIN:1",
    "daemon:pread64:EIO:39",
    "daemon:sendto:ENOBUFS:2",
    "supervisor:pwrite64:SIGKILL:2",
    "supervisor:openat:EMFILE:4",
    "exec:execve:EAGAIN:1",
    "submit:fdatasync:SIGKILL:5",
]


@pytest.fixture
def traced_forge(tracing: None, tmp_path: Path) -> Iterator[Forge]:
    made = Forge(recorded(tmp_path / "strace", order.CALLS))
    yield made
    made.close()


@pytest.mark.parametrize("name", POINTS)
def test_a21_e09_e10_no_job_is_lost_or_run_twice_with_a_fault_at_a_system_call(
    tracing: None, forge: Forge, tmp_path: Path, name: str
) -> None:
    """A21, E09, E10: The program's promises hold if a process is killed at a system call, or if the call fails."""
    target, call, fault, number = name.split(":")
    result = strike(forge, tmp_path / "cycle", Point(target, call, fault, number))
    assert not result.verdict.broken, (result.point, result.how)


@pytest.mark.parametrize(
    ("call", "fault", "when"),
    [("pread64", "EIO", when) for when in ("1", "2", "3", "4", "5", "1..3")]
    + [("openat", "EIO", "1..2"), ("openat", "EMFILE", "1"), ("newfstatat", "ESTALE", "8..10")],
)
def test_a21_e09_a_failed_read_of_the_jobs_file_is_repeated(
    tracing: None, forge: Forge, tmp_path: Path, call: str, fault: str, when: str
) -> None:
    """A21, E09: If a read of the jobs file fails, this is logged once, and the read is tried again.

    A scheduler with --drain does not end before it has read the lines.
    """
    point = Point("daemon", call, fault, when, path="jobs.txt")
    result = strike(forge, tmp_path / "cycle", point)
    assert result.hit and not result.verdict.broken, (result.point, result.how)
    log = (tmp_path / "cycle/gpu_scheduler.log").read_text()
    assert log.count("jobs.txt: cannot be read: ") == log.count("jobs.txt now") == 1
    assert log.rindex("accepted from jobs.txt") < log.index("no job is left to run")


def test_a21_the_judge_detects_each_kind_of_error(forge: Forge, tmp_path: Path) -> None:
    """A21: The judge finds a second start, a wrong exit code, a leftover file, and the loss of an acknowledged job."""
    cycle = Cycle(forge, tmp_path)
    try:
        cycle.acknowledge(_ended(cycle.submit("c")))
        cycle.lines("a", "b")
        cycle.finish()
        assert cycle.judge() == Verdict([], Counter(exit=3))
        ledger = (tmp_path / "ledger").read_text()
        (tmp_path / "ledger").write_text(ledger + "start a 1 1\n")
        assert any("a started 2 times" in text for text in cycle.judge().broken)
        (tmp_path / "ledger").write_text(ledger.replace("end b 3", "end b 0"))
        assert any("(b): exit 3" in text for text in cycle.judge().broken)
        (tmp_path / "ledger").write_text(ledger)
        (cycle.house / ".daemon.json.new-1").touch(0o600)
        cycle.acknowledged.append(99)
        broken = cycle.judge().broken
        assert [text.partition(":")[0] for text in broken] == ["acknowledged and gone", "left behind"]
    finally:
        cycle.end()


def _ended(process):  # type: ignore[no-untyped-def]
    until(process.ended, "it ends", LIMIT_S)
    return process


def test_a06_the_store_is_synced_before_a_start_is_sent(traced_forge: Forge, tmp_path: Path) -> None:
    """A06, E15: The store's log is synced before a start is sent, and a start is sent before its command is executed.

    The id of a submitted job is printed after the sync of its row.
    """
    cycle = Cycle(traced_forge, tmp_path / "cycle")
    try:
        cycle.acknowledge(_ended(cycle.submit("c")))
        cycle.lines("a", "b")
        cycle.finish()
        assert not cycle.judge().broken
    finally:
        cycle.end()
        traced_forge.close()
    wrong, sent = order.unsynced_starts(tmp_path / "strace", str(cycle.folder / "job"))
    assert (wrong, sent) == ([], 3)
    wrong, told = order.unsynced_words(tmp_path / "strace", order.STORE)
    assert (wrong, told) == ([], 1)


@pytest.mark.parametrize("number", [6, 7])  # 6: the pass that reads the lines; 7: the pass that starts the jobs
def test_e09_after_a_failed_sync_no_job_starts_before_the_next_successful_sync(
    tracing: None, forge: Forge, tmp_path: Path, number: int
) -> None:
    """E09: After a failed sync of the store's write-ahead log, no job starts before the store file itself is synced.

    A second sync of the write-ahead log is not enough: the kernel reports a failed write only once, so this sync may
    succeed although the data is not on the disk.
    """
    cycle = Cycle(forge, tmp_path / "cycle")
    try:
        cycle.acknowledge(_ended(cycle.submit("c")))
        cycle.lines("a", "b")
        daemon = cycle.start("--drain", held=True)
        fault = ["-e", f"trace={order.CALLS}", "-e", f"inject=fdatasync:error=EIO:when={number}"]
        tracer = hold(daemon, tmp_path / "strace", ["-f", "-y", "-xx", "-s", "400", *fault])
        _ended(daemon)
        tracer.done()
        assert daemon.code() == 1 and len(cycle.rows("SELECT 1 FROM jobs WHERE outcome='exit'")) == 3, daemon.said()
        cycle.finish()
        assert not cycle.judge().broken
    finally:
        cycle.end()
    text = (tmp_path / "strace").read_text()
    assert "(INJECTED)" in text and not order.syncs_after_failure(tmp_path / "strace")


@pytest.mark.parametrize("number", [5, 8])
def test_e09_a_commit_whose_sync_failed_is_not_acknowledged(
    tracing: None, forge: Forge, tmp_path: Path, number: int
) -> None:
    """E09, P3, P4: If a sync fails, `submit` prints one line with the error and no job id, and exits with 1."""
    cycle = Cycle(forge, tmp_path / "cycle")
    try:
        submitted = cycle.submit("c", held=True)
        tracer = hold(submitted, tmp_path / "strace", Point("submit", "fdatasync", "EIO", str(number)).words(tmp_path))
        _ended(submitted)
        tracer.done()
        cycle.acknowledge(submitted)
        assert (submitted.code(), cycle.acknowledged) == (1, [])
        assert submitted.said().count("\n") == 1 and "disk I/O error" in submitted.said()
    finally:
        cycle.end()


@pytest.mark.parametrize("call", ["unlink:1", "fdatasync:4"])
def test_a21_an_interrupted_creation_of_the_store_is_completed(
    tracing: None, forge: Forge, tmp_path: Path, call: str
) -> None:
    """A21, E15: The next writer completes a store whose creation was interrupted; readers report the interruption."""
    name, number = call.split(":")
    cycle = Cycle(forge, tmp_path / "cycle")
    try:
        submitted = cycle.submit("c", held=True)
        tracer = hold(submitted, tmp_path / "strace", Point("submit", name, "SIGKILL", number).words(tmp_path))
        _ended(submitted)  # before `done`, which detaches strace after a time
        tracer.done()
        assert (cycle.house / "store.db-journal").stat().st_size
        status = cycle.forge.run(["status"], cycle.folder, cycle.environ, tmp_path / "out")
        assert (
            "cannot read the store: its creation was interrupted" in status.said() and "gpujob start" in status.said()
        )
        cycle.lines("a", "b")
        cycle.finish()
        assert not cycle.judge().broken
    finally:
        cycle.end()


def test_a06_each_start_in_a_packet_is_counted() -> None:
    """A06: `order._starts` counts each start in a packet, although marshal writes a repeated word as a reference."""
    word = "start"
    assert order._starts(marshal.dumps([(word, "1.1"), (word, "2.1")])) == 2
    assert order._starts(b"no packet") == order._starts(marshal.dumps([("env", ())])) == 0
