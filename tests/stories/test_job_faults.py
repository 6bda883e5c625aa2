"""Jobs that end in unusual ways, leave processes behind, cannot be killed, or come in great numbers."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stories.harness import LONG, Scheduler, _children, alive, none_more_open, open_files, wait_for
from tests.stories.machine import machine  # noqa: F401  a fixture

LOADERS = """\
import multiprocessing, os, time
def load():
    open(f"loader-{os.getpid()}", "w").close()
    time.sleep(600)
if __name__ == "__main__":
    for _ in range(3):
        multiprocessing.Process(target=load).start()
    time.sleep(600)
"""
ZOMBIES = """\
import os, sys, time
for _ in range(5):
    if os.fork() == 0:
        os._exit(0)
if sys.argv[1] == "leave" and os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)  # a zombie below what is left behind
    open("survivor.new", "w").write(str(os.getpid()))
    os.rename("survivor.new", "survivor")  # who sees it finds the number in it
    time.sleep(600)
while sys.argv[1] == "leave" and not os.path.exists("survivor"):
    time.sleep(0.01)
"""


def script(s: Scheduler, name: str, text: str) -> None:
    path = s.folder / name
    path.write_text(text if text.startswith("#!") or name.endswith(".py") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def a_turn(s: Scheduler) -> None:
    """Run a job without GPU and wait for its end. Meanwhile at least one pass has tried to place the waiting jobs."""
    s.cli("submit", "--cpu", "--wait", "--", "true")


def test_b08_data_loaders_keep_the_gpu_of_their_killed_parent_until_they_end(scheduler):
    """B08, P7: Data loaders that outlive their killed parent keep its GPU until they end; `status` names them."""
    s = scheduler(gpus=1)
    script(s, "train.py", LOADERS)
    s.append("0,train.py,,", s.line("next"))
    s.start()
    loaders = wait_for(lambda: len(f := list(s.folder.glob("loader-*"))) == 3 and f, "three loaders")
    pids = [int(path.name.partition("-")[2]) for path in loaders]
    s.wait_state(1, "running")
    os.kill(s.job(1)["pid"], signal.SIGKILL)
    s.wait_state(1, "failed")
    assert s.job(1)["signal"] == 9
    a_turn(s)
    assert s.states()[2] == "pending" and all(map(alive, pids))
    text = s.cli("status").stdout
    assert all(str(pid) in text for pid in pids) and "of job 1" in text
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    s.wait_ended(3)
    assert s.starts("next") == 1


def test_b09_zombies_hold_no_gpu(scheduler):
    """B09: Zombies of a job or of its leftover processes hold no GPU, and the daemon keeps no zombies."""
    s = scheduler(gpus=1)
    script(s, "zombies.py", ZOMBIES)
    s.append("0,zombies.py,,end;cuda=none", s.line("a"))
    s.start()
    s.wait_ended(2)
    assert s.states() == {1: "done", 2: "done"}
    s.append("0,zombies.py,,leave;cuda=none", s.line("b"))
    s.wait_state(3, "done")
    a_turn(s)
    assert s.states()[4] == "pending"
    os.kill(int((s.folder / "survivor").read_text()), signal.SIGKILL)
    s.wait_ended(5)
    assert s.starts("b") == 1
    wait_for(lambda: _children(s.pid) == [s.supervisor_pid()], "no corpse is left to the daemon")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """Return a cgroup that can be frozen.

    SIGKILL does not end a frozen process. A process that is stuck in the kernel behaves in the same way.
    """
    group = Path(f"/sys/fs/cgroup/freezer/gpujob-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no freezer (cgroup v1) that may be used here")
    yield group
    (group / "freezer.state").write_text("THAWED")
    wait_for(lambda: not (group / "tasks").read_text(), "the group is empty")
    group.rmdir()


def test_b10_a_process_that_survives_sigkill_keeps_its_gpu(scheduler, freezer):
    """B10: If SIGKILL does not end a process, the process is reported once and keeps its GPU. Other jobs run."""
    s = scheduler(gpus=2, kill_grace="0.2")
    s.hold("stuck")
    s.append(s.line("stuck", gpus="0"), s.line("waits", gpus="0"))
    s.start()
    s.wait_state(1, "running")
    (freezer / "tasks").write_text(str(s.job(1)["pid"]))
    (freezer / "freezer.state").write_text("FROZEN")
    s.cli("cancel", "1")
    s.append(s.line("other", gpus="1"))
    s.wait_state(3, "done")
    wait_for(lambda: "does not end after SIGKILL" in s.said(), "it is said")
    assert "does not end after SIGKILL" in s.cli("cancel", "1").stdout + s.cli("why", "1").stdout
    assert s.states() == {1: "stopping", 2: "pending", 3: "done"}
    s.says("does not end after SIGKILL", times=1)
    (freezer / "freezer.state").write_text("THAWED")
    s.wait_ended(3)
    assert s.states() == {1: "cancelled", 2: "done", 3: "done"} and s.starts("waits") == 1


@pytest.fixture
def few_processes() -> Iterator[Path]:
    """Return a cgroup in which the number of processes can be limited."""
    group = Path(f"/sys/fs/cgroup/pids/gpujob-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "pids.max").touch()
    except OSError:
        pytest.skip("no pids group (cgroup v1) that may be used here")
    yield group
    (group / "pids.max").write_text("max")
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
    group.rmdir()


def test_b18_f11_starts_are_retried_while_fork_fails(scheduler, few_processes):
    """B18, F11, P1: While no process can be created, the start of a job is tried again with growing waits.

    If the fifth try fails, the job fails. If a try succeeds, the job runs once.
    """
    s = scheduler(gpus=2, assign_retry_wait="0.05")
    (s.folder / "config.yaml").write_text("max_assign_attempts: 5\n")
    s.start()
    (few_processes / "cgroup.procs").write_text(str(s.supervisor_pid()))
    (few_processes / "pids.max").write_text("1")
    s.append(s.line("never"))
    s.wait_state(1, "failed")
    job = s.job(1)
    assert job["outcome"] == "could_not_start" and "Resource temporarily unavailable (5 tries)" in " ".join(
        job["notes"]
    )
    s.cli("edit", "--help")  # verbs still work: only the supervisor is limited
    # Five tries take less than a second: the job could fail before the test lifts the limit.
    (s.folder / "config.yaml").write_text("max_assign_attempts: 1000\n")
    s.says("config reloaded: max_assign_attempts 5 -> 1000")
    s.append(s.line("later"))
    wait_for(
        lambda: len(re.findall(r"job 2 \(job\.py\) is tried again .*: start failed", s.said())) >= 2, "it was tried"
    )
    (few_processes / "pids.max").write_text("max")
    s.wait_ended(2)
    assert s.job(2)["state"] == "done" and s.starts("later") == 1 and s.starts("never") == 0
    wait_for(lambda: all(g["allocated"] == 0 for g in s.status()["gpus"]), "GPUs free")
    s.end_all()


def test_b21_b22_closed_streams_change_no_ending_and_oom_with_code_0_is_done(scheduler):
    """B21: A job that closes stdout and stderr ends like any other.

    B22: Exit code 0 after GPU memory ran out is `done`, with a warning.
    """
    s = scheduler(gpus=1)
    script(s, "closes", "exec 1>&- 2>&-\nsleep 0.1\nexit 5")
    script(s, "oom", "echo 'RuntimeError: CUDA out of memory. Tried to allocate'\necho 'trying the next batch'\nexit 0")
    s.append("0,closes", "0,oom", "0,oom,,;gpus=0.5;retries=3")
    s.start()
    s.wait_ended(2)
    assert s.job(1)["exit_code"] == 5
    job = s.job(2)
    assert (job["state"], job["exit_code"], job["attempt"], job["failure"]) == ("done", 0, 1, None)
    shown = s.cli("show", "2").stdout
    assert "warning       from its log: RuntimeError: CUDA out of memory" in shown and "failure" not in shown
    assert "exit 0 (oom?)" in s.cli("status").stdout and "exit 0 (oom?)" in s.cli("jobs").stdout
    s.says("job 2 (oom) done: exit code 0, but its log shows an error: RuntimeError: CUDA out of memory")


def test_b24_a_job_has_kill_grace_to_end_after_sigterm(scheduler):
    """B24: After SIGTERM a job has `kill_grace` seconds to save its work, and its exit code is kept.

    After that time it gets SIGKILL.
    """
    s = scheduler(gpus=2, kill_grace="5")
    script(s, "saves", "trap 'sleep 2; echo saved; exit 7' TERM\ntouch up-$1\nwhile :; do sleep 0.05; done")
    script(s, "never", "trap '' TERM\ntouch up-$1\nwhile :; do sleep 0.05; done")
    s.append("0,saves,,1", "0,never,,2")
    s.start()
    wait_for(lambda: (s.folder / "up-1").exists() and (s.folder / "up-2").exists(), "both")
    s.cli("cancel", "1", "2")
    s.wait_ended(2)
    saved, never = s.job(1), s.job(2)
    assert (saved["state"], saved["exit_code"]) == ("cancelled", 7)
    assert s.log(1).removeprefix("Terminated\n") == "saved\n", "the shell may say what became of its sleep"
    assert (never["state"], never["signal"]) == ("cancelled", 9)


def memory(pid: int) -> int:
    """Return the resident memory of a process in KiB."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def files(pid: int) -> list[str]:
    """Return the paths of the open files of a process."""
    return [file for fd in os.listdir(f"/proc/{pid}/fd") if (file := _open_file(pid, fd))]


def _open_file(pid: int, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except FileNotFoundError:
        return ""  # closed in the meantime


@pytest.mark.long
def test_b25_f08_f09_many_short_jobs_leak_no_descriptors_or_memory(scheduler):
    """B25, F08, F09: Each of 300 short jobs (in the long form of the test: 10,000) has its own exit code.

    Afterwards the daemon and the supervisor have no more files open than before, and use less than 20 MB more memory.
    """
    number, warm = (10_000, 500) if LONG else (300, 60)
    s = scheduler(gpus=1)
    script(s, "short", "sleep 0.01\nexit $(($1 % 256))")
    s.start()
    s.append(*(f"0,short,,{n}" for n in range(warm)))
    s.wait_ended(warm)
    supervisor = s.supervisor_pid()
    open_before = {pid: open_files(pid) for pid in (s.pid, supervisor)}
    before, began = (memory(s.pid), memory(supervisor)), time.monotonic()
    s.append(*(f"0,short,,{n}" for n in range(warm, warm + number)))
    s.wait_ended(warm + number, 1500 if LONG else 120)
    took = time.monotonic() - began
    after = (memory(s.pid), memory(supervisor))
    print(f"{number} jobs of 10 ms in {took:.1f} s, {number / took:.0f} a second; KiB {before} -> {after}")
    none_more_open(open_before)
    for one, other in zip(before, after, strict=True):
        assert other - one < 20_000, (before, after)
    assert s.rows("SELECT count(*) FROM jobs WHERE exit_code IS NOT (id-1)%256") == [(0,)]
    assert s.supervisor_pid() == supervisor


def test_b26_a_job_on_a_gpu_not_allocated_to_it_counts_as_foreign(machine):  # noqa: F811
    """B26: If a process of a job uses a GPU that is not allocated to that job, the process counts as foreign there.

    The reason that is shown for the GPU's state names the process or the job.
    """
    m = machine().cards("GPU-a", "GPU-b")
    m.add("strays", gpus="0")
    m.s.start()
    pid = m.running("strays")
    m.use("GPU-b", pid, 70_000)
    assert m.gpu(0)["jobs"] == [1]
    said = m.state(1, "FOREIGN")
    assert str(pid) in said["reason"] or "job 1" in said["reason"], said
    m.add("waits", gpus="1")
    m.still_waits(2)


def test_f07_more_jobs_than_descriptors_are_adopted(scheduler):
    """F07, P6: A scheduler that may open 32 files adopts 40 running jobs, and all their exit codes are recorded."""
    s = scheduler(gpus=1, cpu_slots=100)
    s.environ["GPUJOB_SET_HISTORY"] = "false"  # the history would open files later
    s.start()
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        s.hold(key)
    s.append(*(s.line(key, code=3) + ";gpus=0" for key in keys))
    wait_for(lambda: list(s.states().values()).count("running") == 40, "forty jobs")
    s.kill()
    command = s.command
    s.command = ["prlimit", "--nofile=32:32", *command]
    s.start()
    assert set(s.states().values()) == {"running"}
    s.append(s.line("new"))
    s.wait_state(41, "done")
    for key in keys[:20]:
        s.release(key)
    wait_for(lambda: list(s.states().values()).count("failed") == 20, "twenty ends")
    s.append(s.line("more"))
    s.wait_state(42, "done")
    running = {log for (log,) in s.rows("SELECT log FROM jobs WHERE state='running'")}
    folder = f"{s.folder}/gpu_scheduler_logs/"
    wait_for(lambda: {f for f in files(s.pid) if f.startswith(folder)} <= running, "no log of an ended job is open")
    wait_for(lambda: sum("pidfd" in f for f in files(s.pid)) == 0, "no ended process is held open")
    s.kill()
    s.command = command
    s.start()
    for key in keys[20:]:
        s.release(key)
    s.wait_ended(42)
    assert s.rows("SELECT count(*) FROM jobs WHERE exit_code=3") == [(40,)], s.said()[-3000:]
    assert all(s.starts(key) == 1 for key in keys)


def test_f10_no_job_starts_under_a_very_low_file_size_limit(scheduler):
    """F10: `start` fails with one line if the limit on the size of files is very low.

    If such a limit is set while the scheduler runs, no job starts. When the limit is lifted, jobs start again.
    """
    s = scheduler(gpus=1)
    done = subprocess.run(
        ["prlimit", "--fsize=4096", *s.command, "start", "--gpus=1"],
        cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (
        done.returncode == 1 and "cannot use the store: disk I/O error" in done.stderr and done.stderr.count("\n") == 1
    )
    s.hold("a")
    s.append(s.line("a", code=4))
    s.start()
    s.wait_state(1, "running")
    unlimited = resource.prlimit(s.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    s.append(s.line("b"))
    wait_for(lambda: re.search("cannot use the store|bookings cannot be published", s.said()), "it is said")
    s.release("a")
    assert s.starts("b") == 0
    resource.prlimit(s.pid, resource.RLIMIT_FSIZE, unlimited)
    s.wait_ended(2)
    assert s.job(1)["exit_code"] == 4 and s.starts("b") == 1 and "Traceback" not in s.said()
