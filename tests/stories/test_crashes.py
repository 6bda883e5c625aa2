"""Kills of daemon, supervisor and jobs: no job runs twice or is lost without notice, and recorded endings are true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest

from scheduler.runners import attempt_record
from tests.stories.harness import alive, wait_for
from tests.stories.test_crash_points import SUPERVISOR


def kill_supervisor(s) -> None:
    os.kill(s.supervisor_pid(), signal.SIGKILL)


def job_pid(s, key: str) -> int:
    return int(wait_for(lambda: [e[2] for e in s.ledger() if e[:2] == ["start", key]], f"{key} runs")[0])


@pytest.mark.smoke
def test_a11_a_running_job_is_adopted_after_a_kill_of_the_daemon(scheduler):
    """S3.35, A11: After kill -9 the next start adopts a running job with its GPU, and records its true exit code."""
    s = scheduler(gpus=2)
    s.hold("long")
    s.append(s.line("long", code=7))
    s.start()
    s.wait_state(1, "running")
    s.kill()
    s.append(s.line("second"))
    s.start()
    s.wait_state(2, "done")
    status = s.status()
    assert [g["allocated"] for g in status["gpus"]] == [1.0, 0.0]
    assert s.job(1)["state"] == "running" and s.job(2)["gpus"] == [1]
    s.release("long")
    s.wait_ended(2)
    assert (s.job(1)["exit_code"], s.starts("long")) == (7, 1)


@pytest.mark.smoke
def test_a10_the_ending_of_a_job_is_recorded_while_no_daemon_runs(scheduler):
    """A10: The supervisor outlives the daemon and records the ending of a job."""
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=42))
    s.start()
    s.wait_state(1, "running")
    s.kill()
    s.release("a")
    pid = job_pid(s, "a")
    wait_for(lambda: not alive(pid), "the job's end")
    s.start()
    s.wait_ended(1)
    job = s.job(1)
    assert (job["state"], job["exit_code"], s.starts("a")) == ("failed", 42, 1)


@pytest.mark.smoke
def test_the_daemon_inherits_jobs_of_a_dead_supervisor(scheduler):
    """The daemon inherits the jobs of a dead supervisor, records their exit codes, and starts another supervisor."""
    s = scheduler(gpus=2)
    s.hold("a")
    s.hold("b")
    s.append(s.line("a", code=3, gpus="0"), s.line("b", code="s6", gpus="1"), s.line("c", code=5, gpus="0"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    first = s.supervisor_pid()
    os.kill(first, signal.SIGKILL)
    assert wait_for(lambda: (k := s.supervisor_pid()) != first and k, "another supervisor")
    s.release("a")
    s.release("b")
    s.wait_ended(3)
    assert [s.job(n)["exit_code"] for n in (1, 3)] == [3, 5] and s.job(2)["signal"] == 6
    assert [s.starts(k) for k in "abc"] == [1, 1, 1]


def test_b02_after_daemon_and_supervisor_died_the_ending_is_lost(scheduler):
    """B02: If daemon and supervisor were killed, a running job keeps its GPU until it ends; its outcome is then `lost`.

    There is one exception: in a container whose PID 1 does not reap orphans, the ended job stays a zombie. The next
    daemon then reads the exit code of the zombie from the kernel, and the job is not lost.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=5), s.line("b"))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    s.kill()
    os.kill(supervisor, signal.SIGKILL)
    s.start()
    assert s.job(1)["state"] == "running" and s.job(2)["state"] == "pending"
    s.cli("submit", "--cpu", "--wait", "--", "true")  # completes a pass, in which b must not start
    s.release("a")
    s.wait_ended(3)
    told = [entry[:2] for entry in s.ledger()]
    assert told == [["start", "a"], ["end", "a"], ["start", "b"], ["end", "b"]], "the GPU was held until the end of a"
    job = s.job(1)
    assert (job["state"], job["outcome"], job["exit_code"]) in (("failed", "lost", None), ("failed", "exit", 5))
    assert s.job(2)["state"] == "done" and s.starts("a") == 1


def test_h01_h03_a_job_that_ran_before_a_reboot_is_lost_and_not_run_again(scheduler):
    """H01, H03: A job that ran before a reboot is lost and does not run again.

    The scheduler detects the reboot by the boot id in the attempt record, even if a process with the recorded pid
    exists.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    s.kill()
    os.kill(supervisor, signal.SIGKILL)
    other = str(uuid.uuid4())
    path = s.folder / ".gpujob" / "attempts" / "1.1"
    text = path.read_bytes()
    boot = attempt_record.read(str(path)).boot.encode()
    path.write_bytes(text.replace(boot, other.encode()))
    s.start()  # the old process still runs here, but must not be adopted: the boot id differs
    s.wait_state(1, "failed")
    assert s.job(1)["outcome"] == "lost" and "the machine was rebooted" in " ".join(s.job(1)["notes"])
    s.wait_state(2, "done")
    assert s.starts("a") == 1


def test_h02_a_reused_pid_is_not_adopted(scheduler):
    """H02: A process with the recorded pid but another start time is neither adopted nor signalled."""
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    s.kill()
    os.kill(supervisor, signal.SIGKILL)
    os.kill(job_pid(s, "a"), signal.SIGKILL)
    foreign_process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        path = s.folder / ".gpujob" / "attempts" / "1.1"
        found = attempt_record.read(str(path))
        attempt_record.write_pid(
            str(path), type(found.process)(foreign_process.pid, found.process.ticks), found.boot, 1, 0
        )
        s.start()
        s.wait_state(1, "failed")
        assert s.job(1)["outcome"] == "lost"
        assert foreign_process.poll() is None
    finally:
        foreign_process.kill()
        foreign_process.wait()


@pytest.mark.parametrize("point", SUPERVISOR)
def test_exit_codes_survive_kills_of_the_supervisor_while_the_daemon_lives(scheduler, point):
    """If only supervisors are killed, at any crash point, the exit code of every job that ran is recorded."""
    s = scheduler(gpus=1, assign_retry_wait="0.05")
    s.append(*(s.line(f"k{n}", code=n) for n in range(4)))
    s.start("--drain", GPUJOB_CRASH_AT=point, ready=False)
    # Each supervisor dies at that point of its first job; at the two earliest points no job ever starts.
    if point in ("supervisor.before_claim", "supervisor.claimed"):
        wait_for(
            lambda: s.said().count("its start was interrupted before the command ran") >= 3,
            "the daemon takes the starts back",
        )
        assert s.ledger() == []
        return
    s.wait_ended(4)
    rows = s.rows("SELECT outcome, exit_code FROM jobs ORDER BY id")
    assert rows == [("exit", n) for n in range(4)], s.said()
    assert [s.starts(f"k{n}") for n in range(4)] == [1] * 4


@pytest.mark.smoke
def test_second_daemon_is_refused_and_stale_locks_do_not_block(scheduler):
    """S3.37, H04, H06: A second daemon is refused, and the error names the pid of the first.

    After kill -9 of the first daemon, the next one starts.
    """
    s = scheduler(gpus=1)
    s.start()
    first = s.pid
    error = s.cli("start", "--gpus", "1", code=1).stderr
    assert str(first) in error and error.count("\n") == 1
    s.kill()
    s.start()
    assert s.pid != first


def test_h08_a_copied_folder_adopts_nothing(scheduler, tmp_path):
    """H08: `start` refuses a copy of a scheduler's folder until `recover` has run in the copy.

    `recover` fails while a scheduler runs in the original folder, and the job that runs there is not adopted.
    """
    s = scheduler(gpus=1, folder=tmp_path / "one")
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    # The daemon rewrites the state file meanwhile: cp may fail on its temporary file, which does not matter here.
    subprocess.run(["cp", "-r", str(tmp_path / "one"), str(tmp_path / "two")], check=False, capture_output=True)
    assert (tmp_path / "two" / ".gpujob" / "store.db").exists()
    copy = scheduler(gpus=1, folder=tmp_path / "two")
    error = copy.cli("start", "--gpus", "1", code=1).stderr
    assert "gpujob recover" in error
    for words in (["recover", "--dry-run"], ["recover"]):
        error = copy.cli(*words, code=1).stderr
        assert (
            f"cannot adopt the jobs of a copy: a scheduler runs on the original (pid {s.pid})" in error
            and error.count("\n") == 1
        ), error
    copy.cli("start", "--gpus", "1", code=1)
    pid = job_pid(s, "a")
    assert alive(pid) and s.starts("a") == 1
    s.release("a")
    s.wait_ended(1)
    assert s.job(1)["state"] == "done"
    s.stop()
    copy.cli("recover")  # the original is no longer in use
    copy.start()
    copy.wait_state(1, "done", "failed")
    assert copy.job(1)["outcome"] in ("exit", "lost") and s.starts("a") >= 1


@pytest.mark.waits
def test_e06_the_scheduler_continues_after_the_store_was_locked(scheduler):
    """E06: While another program locks the store no job starts; afterwards the scheduler continues."""
    import sqlite3

    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=4))
    s.start()
    s.wait_state(1, "running")
    other = sqlite3.connect(s.folder / ".gpujob" / "store.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    s.release("a")
    s.append(s.line("b"))
    wait_for(lambda: "cannot use the store" in s.said(), "the report")
    error = s.cli("submit", "--cpu", "--", "true", code=1).stderr
    assert "cannot use the store: database is locked" in error and error.count("\n") == 1
    assert s.starts("b") == 0
    s.says("cannot use the store", times=1)
    other.execute("ROLLBACK")
    other.close()
    s.wait_ended(2)
    assert s.job(1)["exit_code"] == 4 and s.starts("a") == 1 and s.starts("b") == 1
    s.says("the scheduler can use the store again")
