"""Ending all processes of a job; a GPU is free only when no process of its last job lives."""

from __future__ import annotations

import os
import signal

import pytest

from tests.stories.harness import alive, wait_for

TREE = """\
import os, signal, subprocess, sys, time
folder = sys.argv[1]
def child(name, program, **how):
    p = subprocess.Popen([sys.executable, "-c", program], **how)
    open(os.path.join(folder, "pid-" + name), "w").write(str(p.pid))
child("plain", "import time; time.sleep(600)")
child("deaf", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
child("away", "import time; time.sleep(600)", start_new_session=True)
# in a session of its own, its parent dead, its environment swept: found by its place in the tree alone
child("bare", "import time; time.sleep(600)", start_new_session=True, env={"PATH": os.environ["PATH"]})
open(os.path.join(folder, "ready"), "w").close()
if sys.argv[2] == "leave":
    sys.exit(4)
time.sleep(600)
"""


def pids(s, *names: str) -> list[int]:
    wait_for(lambda: (s.folder / "ready").exists(), "the tree")
    return [int((s.folder / f"pid-{name}").read_text()) for name in names]


@pytest.mark.smoke
def test_b05_b07_cancel_ends_all_processes_of_a_job(scheduler):
    """B05, B07: `cancel` ends all processes of a job.

    The processes are a plain child, a child that ignores SIGTERM, a child in another session, and a child in another
    session without the mark of the job.
    """
    s = scheduler(gpus=1, kill_grace="0.5")
    (s.folder / "tree.py").write_text(TREE)
    s.append(f"0,tree.py,,{s.folder} stay")
    s.start()
    tree = pids(s, "plain", "deaf", "away", "bare")
    s.wait_state(1, "running")
    assert "SIGTERM" in s.cli("cancel", "1").stdout
    s.wait_ended(1)
    job = s.job(1)
    assert (job["state"], job["outcome"]) == ("cancelled", "cancelled")
    assert not any(alive(pid) for pid in tree)
    assert "has already ended" in s.cli("cancel", "1").stdout


@pytest.mark.smoke
def test_b06_b07_s3_35_a_gpu_stays_allocated_while_a_process_of_its_job_lives(scheduler):
    """B06, B07, S3.35: A GPU stays allocated while any process of its last job lives, also after a restart.

    The exit code of the main process is recorded as soon as the main process ends.
    """
    s = scheduler(gpus=1)
    (s.folder / "tree.py").write_text(TREE)
    s.append(f"0,tree.py,,{s.folder} leave", s.line("next"))
    s.start()
    s.wait_state(1, "failed")
    assert s.job(1)["exit_code"] == 4
    tree = pids(s, "plain", "deaf", "away", "bare")
    s.cli("submit", "--cpu", "--wait", "--", "true")  # after this the daemon has run a pass
    assert s.states()[2] == "pending" and "in use by leftover processes" in s.cli("status").stdout
    for pid in tree[:-1]:
        os.kill(pid, signal.SIGKILL)
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert s.states()[2] == "pending"
    s.kill()  # the same after a restart of the scheduler
    s.start()
    s.cli("submit", "--cpu", "--wait", "--", "true")
    marked_gone = s.states()[2]
    os.kill(tree[-1], signal.SIGKILL)
    s.wait_ended(2)
    assert marked_gone == "pending" and s.starts("next") == 1


@pytest.mark.smoke
def test_time_limit_ends_a_job(scheduler):
    """With `;time=`, a job gets SIGTERM at the limit and SIGKILL after the grace period; its outcome is time_limit."""
    s = scheduler(gpus=1, kill_grace="0.3")
    s.hold("slow")
    s.append(s.line("slow") + ";time=2s")
    s.start()
    s.wait_ended(1)
    job = s.job(1)
    assert (job["state"], job["outcome"]) == ("failed", "time_limit")
    assert job["attempt"] == 1 and s.starts("slow") <= 1  # on a busy machine it may end before it writes


def test_b11_cancel_continues_and_ends_a_stopped_job(scheduler):
    """B11: `cancel` continues a job stopped by SIGSTOP, so that the job can act on SIGTERM."""
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    pid = int(wait_for(s.ledger, "the start")[0][2])
    os.kill(pid, signal.SIGSTOP)
    s.cli("cancel", "@")
    s.wait_ended(1)
    assert s.job(1)["state"] == "cancelled"


def test_a14_a15_the_next_daemon_completes_the_cancel_of_a_killed_daemon(scheduler):
    """A14, A15: If the daemon is killed after it sent SIGTERM to a job, the next daemon completes the cancel.

    It sends SIGKILL to the job.
    """
    s = scheduler(gpus=1, kill_grace="1")
    script = s.folder / "deaf.py"
    script.write_text(
        "import signal,time,os\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up','w').close()\ntime.sleep(600)\n"
    )
    s.append("0,deaf.py,,;cwd=.")
    s.start(GPUJOB_CRASH_AT="cancel.term_sent")
    wait_for(lambda: (s.folder / "up").exists(), "the job")
    s.wait_state(1, "running")
    s.cli("cancel", "1", code=None)
    assert s.process.wait(30) == -signal.SIGKILL
    assert s.states()[1] == "stopping"
    s.start()
    s.wait_ended(1)
    assert s.job(1)["state"] == "cancelled"


def test_waiting_jobs_are_cancelled_and_retried_immediately_without_a_daemon(scheduler):
    """Contract 3: While no daemon runs, `cancel` and `retry` of a waiting job take effect immediately.

    A running job is cancelled at the next start of the daemon; its `cancel` exits with 5.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_state(1, "running")
    s.stop()
    s.cli("cancel", "2")
    assert s.states()[2] == "cancelled"
    done = s.cli("cancel", "1", code=5)
    assert "at the next start of the scheduler" in done.stderr
    s.cli("retry", "2")
    s.start()
    s.wait_ended(2)
    assert s.states() == {1: "cancelled", 2: "done"}


DAEMONIZES = """
import os, sys, time
folder, key, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
if os.fork():
    os._exit(4)
os.setsid()
time.sleep(delay)
if os.fork():
    time.sleep(delay)
    os._exit(0)
with open(os.path.join(folder, "pid-" + key + ".new"), "w") as stream:
    stream.write(str(os.getpid()))
os.rename(os.path.join(folder, "pid-" + key + ".new"), os.path.join(folder, "pid-" + key))
for number in range(3):
    os.close(number)
os.execve("/bin/sleep", ["sleep", "600"], {})
"""


def test_b07_a_daemonized_process_of_a_job_holds_its_gpu(scheduler):
    """B07, P7: If a job leaves a background process behind, this process holds the job's GPU until the process ends.

    The process forks twice, after different delays. It leads its own session and has an empty environment.
    """
    delays = ("0", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "0")
    s = scheduler(gpus=len(delays) + 1)
    odd = s.folder / "odd.py"
    odd.write_text(DAEMONIZES)
    free = len(delays)
    s.append(*(f"0,{odd},,{s.folder} {n} {delay},{n};cuda=none" for n, delay in enumerate(delays)))
    s.start()
    pids = [
        int(wait_for(lambda n=n: (p := s.folder / f"pid-{n}").exists() and p.read_text(), f"{n} sleeps"))
        for n in range(free)
    ]
    s.wait_ended(free)
    s.append(*(s.line(f"next{n}", gpus=str(n)) for n in range(free)))
    for look in range(3):
        s.append(s.line(f"look{look}", gpus=str(free)))
        wait_for(lambda look=look: s.starts(f"look{look}"), "a job on the GPU that nobody holds")
    assert [s.starts(f"next{n}") for n in range(free)] == [0] * free, "a GPU was given out beside what its job left"
    assert [gpu["allocated"] for gpu in s.status()["gpus"]][:free] == [1.0] * free
    for pid in pids:  # each process may belong to any of the jobs: all GPUs are held until all processes have ended
        os.kill(pid, signal.SIGKILL)
    for number in range(free):
        wait_for(lambda number=number: s.starts(f"next{number}"), "its GPU is free again")
