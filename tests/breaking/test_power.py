"""Power cuts: all processes of a machine are killed simultaneously, then it boots again. Long form: `make power`."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.breaking.forge import ROOT, until
from tests.breaking.power import SEED, Machine, storm

CUTS = 3

# PID 1 of a namespace kills all other processes, gives the job's pid to a foreign process, and starts a daemon.
_REUSE = """
import os, re, signal, subprocess, sys, time
folder, start = sys.argv[1], [sys.executable, "-m", "scheduler", "start", "--gpus=1", "--gpu-interval=0"]
daemon = subprocess.Popen(start)
record = f"{folder}/.gpujob/attempts/1.1"
while not (os.path.exists(record) and (found := re.search(r"pid (\\d+) ticks (\\d+)", open(record, errors="replace").read()))):
    time.sleep(0.01)
while not (os.path.exists(f"{folder}/ledger") and "start a" in open(f"{folder}/ledger").read()):
    time.sleep(0.01)
assert os.getpid() == 1
os.kill(-1, signal.SIGKILL)  # all at once: one after the other, a shell could still fork
try:
    while True:
        os.waitpid(-1, 0)
except ChildProcessError:
    pass
# Start times are told in hundredths of a second: within the same one, pid and start time do not tell two processes apart.
while time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") < int(found[2]) + 1:
    time.sleep(0.001)
with open("/proc/sys/kernel/ns_last_pid", "w") as stream:
    stream.write(str(int(found[1]) - 1))
stranger = subprocess.Popen(["sleep", "600"])
daemon = subprocess.Popen([*start, "--drain"])
code = daemon.wait()
print("reused", stranger.pid == int(found[1]), "alive", stranger.poll() is None, "code", code, flush=True)
"""

# Runs in another boot: writes pid and start time of a foreign process into the interrupted job's attempt record.
_SAME_NUMBERS = """
import subprocess, sys
from scheduler.core.job import Process
from scheduler.runners import attempt_record
path, boot = sys.argv[1:]
subprocess.run(["mount", "--bind", boot, "/proc/sys/kernel/random/boot_id"], check=True)
stranger = subprocess.Popen(["sleep", "600"])
ticks = int(open(f"/proc/{stranger.pid}/stat").read().rpartition(")")[2].split()[19])
attempt_record.write_pid(path, Process(stranger.pid, ticks), attempt_record.read(path).boot, 1, 0)
code = subprocess.call([sys.executable, "-m", "scheduler", "start", "--gpus=2", "--gpu-interval=0", "--drain"])
print("alive", stranger.poll() is None, "code", code, flush=True)
"""


def _in_a_namespace(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script as PID 1 of a PID namespace, and return its result."""
    space = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.run(
        [*space, sys.executable, "-c", script, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _boot(folder: Path) -> str:
    path = folder / "boot"
    path.write_text(f"{uuid.uuid4()}\n")
    return str(path)


@pytest.fixture
def machine(other_boots: None, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "disk")


def test_h01_no_job_runs_twice_after_power_cuts(machine: Machine) -> None:
    """H01, P1: After a power cut, each job that was running is lost, and the waiting jobs run.

    A job starts again only as a retry.
    """
    broken, how = storm(machine, CUTS, random.Random(SEED))
    assert not broken, (SEED, broken, how)
    assert how["exit"] + how["lost"] == len(machine.codes)


def _cut_while_it_runs(machine: Machine) -> str:
    machine.line("a", 0, 600)
    machine.on()
    until(lambda: ["start", "a", "1", "0"] in machine.ledger(), "a runs")
    until(lambda: machine.rows("SELECT 1 FROM jobs WHERE state='running' AND pid IS NOT NULL"), "it is written down")
    machine.cut()
    machine.line("b", 3, 0)
    return str(machine.folder / ".gpujob" / "attempts" / "1.1")


@pytest.mark.parametrize("state", ["running", "starting"])
def test_h20_a_missing_record_after_a_reboot_does_not_prove_that_the_job_never_ran(
    machine: Machine, state: str
) -> None:
    """H20: After a reboot, a job without an attempt record is lost, not queued again: it may have run."""
    path = Path(_cut_while_it_runs(machine))
    path.unlink()
    if state == "starting":  # the commit of the running state was not synced, and is lost too
        with sqlite3.connect(machine.folder / ".gpujob" / "store.db") as connection:
            connection.execute("UPDATE jobs SET state='starting', pid=NULL, ticks=NULL WHERE id=1")
        connection.close()
    machine.on("--drain")
    machine.off()
    broken, how = machine.judge()
    assert not broken and how["lost"] == 1 and how["exit"] == 1, (broken, how)
    notes = machine.rows("SELECT notes FROM jobs WHERE id=1")[0][0]
    assert "the machine was rebooted before the start of the job was recorded" in notes
    assert [entry[:2] for entry in machine.ledger()].count(["start", "a"]) == 1


def test_h03_a_process_with_the_same_pid_and_start_time_in_another_boot_is_not_the_job(machine: Machine) -> None:
    """H03: After a reboot, a process with the recorded pid and start time is not mistaken for the job."""
    path = _cut_while_it_runs(machine)
    done = _in_a_namespace(machine.folder, _SAME_NUMBERS, path, _boot(machine.folder))
    assert "alive True code 1" in done.stdout, (done.stdout, done.stderr)
    assert machine.rows("SELECT outcome, exit_code FROM jobs") == [("lost", None), ("exit", 3)]
    assert machine.judge()[0] == []


@pytest.mark.smoke
def test_h02_a_process_with_a_reused_pid_is_not_the_job(other_boots: None, tmp_path: Path) -> None:
    """H02: If a foreign process has got the pid of an ended job, it is neither mistaken for the job nor signalled."""
    machine = Machine(tmp_path / "disk")
    machine.line("a", 0, 600)
    done = _in_a_namespace(machine.folder, _REUSE, str(machine.folder))
    assert "reused True alive True code 1" in done.stdout, (done.stdout, done.stderr)
    assert machine.rows("SELECT outcome FROM jobs") == [("lost",)]
    assert [entry[:2] for entry in machine.ledger()].count(["start", "a"]) == 1
