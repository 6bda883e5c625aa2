"""GPUs that report errors, jobs that died of these errors, and jobs on GPUs that they were not given.

The tests run a real scheduler with a fake driver.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from contextlib import closing

import pytest

from tests.stories.harness import wait_for
from tests.stories.machine import machine

__all__ = ["machine"]

FELL_OFF = "XID 79 (GPU has fallen off the bus)"
LOST = 15  # NVML_ERROR_GPU_IS_LOST


def runs_again(m, key: str, times: int = 2) -> int:
    """Wait until the job has been started this many times; return the pid of the last start."""
    wait_for(lambda: m.s.starts(key) == times, f"start {times} of {key}\n{m.s.said()[-3000:]}")
    return m.running(key)


def events(m, job: int, kind: str) -> list[dict]:
    story = json.loads(m.s.cli("show", str(job), "--json").stdout)["events"]
    return [event for event in story if event["kind"] == kind]


@pytest.mark.smoke
@pytest.mark.parametrize("when", ["before", "after", "lost"])
def test_a_job_that_died_of_its_gpu_runs_again_on_the_other_gpu(machine, when):
    """An XID that is read before or after the death of the job, or a lost GPU: the job runs elsewhere and ends well."""
    m = machine(gpu_interval=60 if when == "after" else 0.25).cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("a", gpus="0,1")
    pid = m.running("a")
    m.s.wait_state(1, "running")
    (first,) = m.s.job(1)["gpus"]
    uuid = ("GPU-a", "GPU-b")[first]
    if when == "lost":
        m.driver.error("*", LOST, uuid)
    else:
        m.driver.xid(uuid, 79)
    if when == "before":
        m.state(first, "UNHEALTHY")
    os.kill(pid, signal.SIGKILL)
    runs_again(m, "a")
    assert m.s.job(1)["gpus"] == [1 - first]
    m.s.release("a")
    m.s.wait_state(1, "done")
    why = f"GPU {first} reported {FELL_OFF}" if when != "lost" else f"GPU {first} ({uuid}) is gone"
    (event,) = events(m, 1, "retry_scheduled")
    assert event["cause"] == "gpu_error" and why in event["why"] and event["signal"] == 9
    assert why in m.s.cli("why", "1").stdout and why in m.s.cli("show", "1").stdout
    m.s.says("is tried again immediately: " + why)
    if when != "lost":
        text = rf"{re.escape(why)} at (?:\d{4}-\d\d-\d\d )?\d\d:\d\d; no new job starts there; after a repair: gpujob resume {first}"
        assert re.search(text, m.s.cli("status").stdout) and re.search(text, m.gpu(first)["reason"])
        assert re.search(text, m.s.said())


def test_a_second_death_fails_the_job_and_without_another_gpu_a_job_waits(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("a")
    m.add("b", gpus="0")
    pid = m.running("a")
    m.s.wait_state(1, "running")
    m.driver.xid("GPU-a", 79)
    m.state(0, "UNHEALTHY")
    os.kill(pid, signal.SIGKILL)
    pid = runs_again(m, "a")
    m.s.wait_state(1, "running")
    m.driver.xid("GPU-b", 48)
    m.state(1, "UNHEALTHY")
    os.kill(pid, signal.SIGKILL)
    m.s.wait_state(1, "failed")
    assert (m.s.job(1)["outcome"], m.s.job(1)["attempt"]) == ("signal", 2)
    m.s.says("(during its run (attempt 2): GPU 1 reported XID 48 (double-bit memory error))")
    m.waits(2, "unhealthy", f"GPU 0 reported {FELL_OFF}")
    m.s.cli("retry", "1")
    assert "GPU" in m.waits(1, "unhealthy")["reason"]


@pytest.mark.parametrize("restart", ["stop", "kill", "driver"])
def test_the_hold_survives_restarts_and_a_resume_ends_it(machine, restart):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.driver.xid("GPU-a", 9999)
    m.state(0, "UNHEALTHY")
    if restart == "driver":  # the reader process ends, and the next one hears of no old event
        m.driver.error("nvmlDeviceGetCount_v2", 999)
        m.state(0, "STALE")
        m.driver.clear_errors()
    else:
        m.s.stop() if restart == "stop" else m.s.kill()
        m.s.start()
    m.add("a", gpus="0")
    m.waits(1, "unhealthy", "GPU 0 reported XID 9999 at ")
    m.still_waits(1, 3)
    if restart == "stop":  # also while no scheduler runs
        m.s.stop()
    assert "its errors no longer count (XID 9999)" in m.s.cli("resume", "0").stdout
    if restart == "stop":
        m.s.start()
    m.running("a")


def test_a_fault_of_an_earlier_boot_holds_nothing(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    m.driver.xid("GPU-a", 79)
    m.state(0, "UNHEALTHY")
    assert "gpujob resume 0" in m.s.cli("doctor", code=1).stdout
    m.s.stop()
    with closing(sqlite3.connect(m.s.folder / ".gpujob" / "store.db")) as connection, connection:
        assert connection.execute("UPDATE gpu_faults SET boot='another'").rowcount == 1
    m.s.start()
    m.add("a")
    m.running("a")


def test_an_application_level_xid_is_only_a_note(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("a", gpus="0")
    pid = m.running("a")
    m.s.wait_state(1, "running")
    m.driver.xid("GPU-a", 31)
    note = "during its run: GPU 0 reported XID 31 (GPU memory page fault)"
    wait_for(lambda: m.s.job(1)["notes"] == [note], "the note")
    assert note in m.s.cli("why", "1").stdout
    assert m.gpu(0)["state"] == "BUSY"
    os.kill(pid, signal.SIGKILL)
    m.s.wait_state(1, "failed")
    assert m.s.job(1)["attempt"] == 1
    m.s.says(f"failed: signal 9 ({note})")


def test_hold_on_errors_false_holds_and_retries_nothing(machine):
    m = machine(hold_on_errors="false").cards("GPU-a")
    m.s.start()
    m.add("a")
    pid = m.running("a")
    m.s.wait_state(1, "running")
    m.driver.xid("GPU-a", 79)
    wait_for(lambda: m.s.job(1)["notes"], "the note")
    os.kill(pid, signal.SIGKILL)
    m.s.wait_state(1, "failed")
    m.add("b")
    m.running("b")


# -- while the end waits for a reading --------------------------------------------------------------------


def waiting_end(m, *words: str) -> None:
    """Let job 1, on which job 2 depends, die while the driver does not answer."""
    m.s.start(*words)
    m.add("a")
    pid = m.running("a")
    m.s.wait_state(1, "running")
    m.s.append(m.s.line("b") + ";after_ok=1")
    m.waits(2, "depends")
    m.driver.hang("nvmlDeviceGetUtilizationRates")
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("then", ["nothing", "cancel", "crash"])
def test_an_end_is_not_lost_while_it_waits_for_a_driver_that_hangs(machine, then):
    """The end is decided on after some seconds at the latest; a cancel, or a crash of the scheduler, loses nothing."""
    m = machine(gpu_interval=60).cards("GPU-a")
    waiting_end(m)
    if then == "cancel":
        m.s.cli("cancel", "1")
    elif then == "crash":
        m.s.kill()
        m.driver.clear_errors()
        m.s.start()
    m.s.wait_state(1, "cancelled" if then == "cancel" else "failed")
    m.s.wait_state(2, "skipped")
    assert m.s.job(1)["signal"] == 9 and m.s.job(1)["attempt"] == 1
    assert len(events(m, 1, "cancelled" if then == "cancel" else "failed")) == 1


def test_an_end_that_waits_outlives_a_change_of_the_managed_gpus(machine):
    """New managed GPUs make the daemon build its state again from the store, which knows nothing of the end."""
    m = machine(gpu_interval=60).cards("GPU-a", "GPU-b")
    config = m.s.folder / "own.yaml"
    config.write_text("gpu_ids: [0]\n...\n")
    waiting_end(m, "--config", "own.yaml")
    wait_for(lambda: "Z" in _state(m) or not _state(m), "the end of the process")
    config.write_text("gpu_ids: [0, 1]\n...\n")
    wait_for(lambda: len(m.s.status()["gpus"]) == 2, "both GPUs")
    m.s.wait_state(1, "failed")
    m.s.wait_state(2, "skipped")
    assert m.s.job(1)["signal"] == 9 and len(events(m, 1, "failed")) == 1


def _state(m) -> str:
    """Return the state of the main process of job 1; empty if the process is gone."""
    try:
        with open(f"/proc/{m.running('a')}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_death_by_an_xid_that_a_crashed_scheduler_has_recorded_is_tried_again_after_the_restart(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("a")
    pid = m.running("a")
    m.s.wait_state(1, "running")
    m.driver.xid("GPU-a", 79)
    m.state(0, "UNHEALTHY")
    m.s.kill()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "GPU 0 reported XID 79" in (m.s.job(1)["reason"] or ""), "what status shows without a scheduler")
    m.s.start()
    runs_again(m, "a")
    assert m.s.job(1)["gpus"] == [1] and len(events(m, 1, "retry_scheduled")) == 1


# -- jobs on GPUs that they were not given ----------------------------------------------------------------


def test_a_trespass_is_flagged_and_with_kill_the_job_is_ended(machine):
    m = machine(on_trespass="flag").cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("a", gpus="0")
    pid = m.running("a")
    m.use("GPU-b", pid, 300)
    note = "uses GPU 1 without an allocation on it"
    wait_for(lambda: m.s.job(1)["notes"] == [note], "the note")
    for words in (("why", "1"), ("show", "1"), ("status",)):
        assert note in m.s.cli(*words).stdout, words
    m.s.says(f"its process {pid} uses GPU 1 (300 MiB), which is not allocated to the job; it was given GPU 0")
    (event,) = events(m, 1, "stray")
    assert (event["gpu"], event["pid"], event["gpus"]) == (1, pid, [0])
    m.readings(3)
    assert m.s.states()[1] == "running", "flag ends no job"
    m.s.stop()
    m.s.start("--on-trespass=kill")
    m.s.wait_state(1, "failed")
    job = m.s.job(1)
    assert (job["outcome"], job["attempt"]) == ("trespass", 1)
    why = f"ended, because its process {pid} used GPU 1, and it was given GPU 0 (on_trespass: kill)"
    assert why in job["notes"] and why in m.s.cli("why", "1").stdout
    m.s.says(f"failed: it used a GPU that it was not given (signal 15) ({why})")
