"""A supervisor or a shim starts a job late, after the next daemon has started.

The next daemon neither loses the job nor starts it a second time.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scheduler.system.processes import environment_of, seen
from tests.stories.harness import alive, wait_for

LOOKS = 3


def late(s, code: int) -> int:
    """Start a scheduler with one job. The process that starts the job suspends itself before the start; return its pid.

    The process is the supervisor or, in screen mode, the shim. It is suspended after it has claimed the attempt.
    ``code``: the exit code of the job.
    """
    shim = hasattr(s, "sessions")
    s.append(s.line("late", code))
    s.start(GPUJOB_CRASH_AT=f"{'shim' if shim else 'supervisor'}.claimed:1:stop")

    record = s.folder / ".gpujob" / "attempts" / "1.1"

    def stopped() -> int:
        ours = b"GPUJOB_SUPERVISOR=" + os.fsencode(f"{s.folder}/")
        for name in os.listdir("/proc") if record.exists() and record.stat().st_size else ():
            found = seen(int(name)) if name.isdigit() else None
            if found and found.state == ("S" if shim else "T") and ours in b"".join(environment_of(int(name))):
                if (b"shim.py" if shim else b"supervisor.py") in Path(f"/proc/{name}/cmdline").read_bytes():
                    return int(name)
        return 0

    return int(wait_for(stopped, "its starter is stopped"))


def seen_again(s) -> None:
    """Wait until the daemon has run several passes, each of which starts a job that needs no GPU."""
    for _ in range(LOOKS):
        key = f"look{len(s.states())}"
        s.append(s.line(key) + ";gpus=0")
        wait_for(lambda key=key: s.starts(key), "a line that needs no GPU")


@pytest.mark.parametrize("mode", ["direct", "screen"])
def test_a08_a_claimed_attempt_keeps_its_gpu_and_runs_once_after_a_late_start(scheduler, screens, mode):
    """A08, P1, P7: If the daemon is killed, an attempt that is claimed but not yet started keeps its GPU.

    The supervisor or shim that has claimed the attempt is suspended. When it continues, the job runs once, and the exit
    code of the job is recorded.
    """
    s = scheduler(gpus=1) if mode == "direct" else screens(gpus=1)
    starter = late(s, 7)
    s.kill()
    s.start()
    seen_again(s)
    assert s.states()[1] == "starting" and s.status()["gpus"][0]["allocated"] == 1.0
    s.kill()
    s.start()
    seen_again(s)
    assert s.states()[1] == "starting" and s.starts("late") == 0
    os.kill(starter, signal.SIGCONT)
    s.wait_state(1, "failed")
    job = s.job(1)
    assert (job["outcome"], job["exit_code"], job["attempt"], s.starts("late")) == ("exit", 7, 1, 1), job


def test_a08_a_claimed_attempt_is_lost_if_it_is_killed_before_its_start(scheduler):
    """If the daemon and the supervisor are killed after the claim and before the start of an attempt, the job is lost.

    The job does not run again, and its GPU becomes free.
    """
    s = scheduler(gpus=1)
    starter = late(s, 7)
    s.kill()
    s.start()
    seen_again(s)
    assert s.states()[1] == "starting"
    os.kill(starter, signal.SIGKILL)
    s.wait_state(1, "failed")
    assert s.job(1)["outcome"] == "lost" and s.starts("late") == 0
    wait_for(lambda: s.status()["gpus"][0]["allocated"] == 0, "the GPU is free")


def test_a07_the_next_daemon_withdraws_a_start_that_was_not_claimed(scheduler):
    """A06, A07: If a start was sent but not claimed, the next daemon withdraws it and starts the job itself.

    When the suspended supervisor continues, it does not start the job.
    """
    s = scheduler(gpus=1)
    s.start()
    slow = s.supervisor_pid()
    os.kill(slow, signal.SIGSTOP)
    s.append(s.line("a", 5))
    s.wait_state(1, "starting")
    s.kill()
    s.start()
    s.wait_ended(1)
    assert (s.job(1)["exit_code"], s.job(1)["attempt"], s.starts("a")) == (5, 2, 1)
    os.kill(slow, signal.SIGCONT)
    wait_for(lambda: not alive(slow), "the late supervisor reads out what it was sent, and ends")
    assert s.starts("a") == 1


def test_b05_a_job_that_is_cancelled_during_a_late_start_ends(scheduler):
    """A14, B05: If a job is cancelled while the supervisor that starts the job is suspended, the job still ends.

    The job ends after the supervisor continues.
    """
    s = scheduler(gpus=1, kill_grace="0.2")
    s.hold("late")
    starter = late(s, 7)
    s.kill()
    s.start()
    s.cli("cancel", "1", code=None)
    s.wait_state(1, "stopping")
    os.kill(starter, signal.SIGCONT)
    s.wait_state(1, "cancelled")
    wait_for(lambda: s.status()["gpus"][0]["allocated"] == 0, "the GPU is free")


def test_a_stopped_supervisor_is_reported_until_it_continues(scheduler):
    """While the supervisor is stopped (SIGSTOP), log and `status` report this with the command that continues it.

    No job is lost, started twice or cancelled.
    """
    s = scheduler(gpus=2, monitor_interval="0.1")
    s.hold("a")
    s.append(s.line("a", 6, gpus="0"))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)
    s.append(s.line("b", 5, gpus="1"))
    text = f"the supervisor is stopped; continue it with: kill -CONT {supervisor}"
    wait_for(lambda: any(text in line for line in s.status()["trouble"]), "it is in the status")
    assert text in s.cli("status").stdout
    s.says(text, times=1)
    s.release("a")
    s.wait_state(2, "starting")
    os.kill(supervisor, signal.SIGCONT)
    s.wait_ended(2)
    assert [(s.job(n)["exit_code"], s.starts(key)) for n, key in ((1, "a"), (2, "b"))] == [(6, 1), (5, 1)]
    wait_for(lambda: not s.status()["trouble"], "it is over")
    s.says("jobs can start again, and their ends are recorded")
