"""The scheduler deletes old jobs and logs while it runs.

The deletion of a job does not make its line run again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.stories.harness import Scheduler, wait_for


def keep(s: Scheduler, **settings: str) -> None:
    """Write these settings into the config file, which the scheduler watches."""
    text = "".join(f"{name}: {value!r}\n" for name, value in settings.items())
    (s.folder / "config.yaml").write_text(text or "{}\n")


def ids(s: Scheduler) -> list[int]:
    return sorted(s.states())


@pytest.mark.smoke
def test_the_line_of_a_deleted_job_is_not_run_again(scheduler):
    """C, P1: Lines of deleted jobs do not run again after a restart or when an editor saves the jobs file.

    An equal line that is appended later does run.
    """
    s = scheduler(gpus=1)
    keep(s)
    lines = [s.line(key) for key in ("a", "b", "c", "b")]
    s.append(*lines)
    s.start()
    s.wait_ended(3)
    keep(s, keep_finished="1")
    wait_for(lambda: ids(s) == [3], "two are forgotten")
    wait_for(lambda: "removed 2 ended jobs" in s.said(), "it is said")
    assert s.rows("SELECT DISTINCT job FROM events") == [(3,)]
    assert len(os.listdir(s.folder / "gpu_scheduler_logs")) == 3, "keep_logs says nothing"
    s.stop()
    s.start()
    fresh = s.folder / "jobs.new"
    fresh.write_text("# edited\n" + "".join(line + "\n" for line in lines[::-1]))
    before = s.rows("SELECT inode FROM files")
    os.rename(fresh, s.jobs_file)
    wait_for(lambda: s.rows("SELECT inode, replaying FROM files") not in ([(before[0][0], 0)], []), "it is read anew")
    wait_for(lambda: s.rows("SELECT replaying, lines FROM files") == [(0, 5)], "it was read to its end")
    assert ids(s) == [3]
    s.append(s.line("d"))
    wait_for(lambda: s.starts("d") == 1, "a new line runs")
    s.append(s.line("a"))
    wait_for(lambda: s.starts("a") == 2, "one more such line runs")
    assert (s.starts("b"), s.starts("c")) == (1, 1)
    assert max(ids(s)) == 5, "no id is given out twice"


def test_keep_logs_removes_only_logs_of_ended_jobs(scheduler):
    """A19, S8: `keep_logs` removes only logs of ended jobs.

    It does not remove the log of a running job, of a job that waits for a retry, or of another scheduler. It does not
    remove a symbolic link.
    """
    s = scheduler(gpus=2, assign_retry_wait="600")
    keep(s)
    s.hold("run")
    s.append(s.line("run"), s.line("again", code=1) + ";retries=1", s.line("old"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(3, "done")
    wait_for(lambda: s.states()[2] == "pending" and s.job(2)["reason_code"] == "backoff", "it waits for its retry")
    folder = s.folder / "gpu_scheduler_logs"
    mine = {int(path.name.split("_")[1]): path for path in folder.iterdir()}
    alien, link = folder / "job_3_20010101_000000.log", folder / "job_9_20010101_000000.log"
    alien.write_text("another scheduler's")
    link.symlink_to(s.folder / "job.py")
    for path in (*mine.values(), alien):
        os.utime(path, (1, 1))
    mine[3].write_bytes(b"x" * 4096)
    keep(s, keep_logs="30d 2K")
    wait_for(lambda: not mine[3].exists(), "the log of the job that has ended")
    wait_for(lambda: "removed 4 KB of logs" in s.said(), "it is said")
    assert sorted(os.listdir(folder)) == sorted(p.name for p in (mine[1], mine[2], alien, link))
    assert (s.folder / "job.py").exists()
    error = s.cli("logs", "3", code=1).stderr
    assert "cannot read the log: it was removed, by keep_logs or by a user" in error
    s.release("run")
    s.wait_state(1, "done")
    assert s.job(3)["state"] == "done", "the job itself is remembered"


@pytest.mark.parametrize("point", ["prune.selected", "prune.deleted"])
@pytest.mark.parametrize("at", [1, 3])
def test_a19_a_daemon_killed_while_it_deletes_old_jobs_loses_no_other_job(scheduler, point, at):
    """A19: If the daemon is killed while it deletes old jobs, the next daemon deletes the remaining old jobs.

    No other job is lost. A running job and its log stay. If a waiting job depends on an old job, the old job stays,
    too.
    """
    s = scheduler(gpus=2)
    s.hold("run")
    s.append(s.line("run", gpus="0"), *(s.line(f"n{n}", gpus="1") for n in range(30)))
    s.append(s.line("child", gpus="0") + ";after_ok=2")
    s.start()
    wait_for(lambda: list(s.states().values()).count("done") == 30, "thirty have ended")
    submitted = int(s.cli("submit", "--cpu", "--wait", "--", "true").stdout)
    env = s.folder / ".gpujob" / "env"
    assert len(os.listdir(env)) == 1
    s.append(s.line("last", gpus="1"))
    s.wait_state(submitted + 1, "done")
    s.kill()
    everything = ids(s)
    keep(s, keep_finished="1", keep_logs="1s")
    logs = {n: Path(log) for n, log in s.rows("SELECT id, log FROM jobs")}
    for n, log in logs.items():
        if n not in (1, 32):
            os.utime(log, (1, 1))
    s.start(GPUJOB_CRASH_AT=f"{point}:{at}", ready=False)
    assert s.process.wait(60) == -9
    left = ids(s)
    assert {1, 2, 32, submitted + 1} <= set(left) <= set(everything) and s.states()[1] == "running"
    assert all(s.rows("SELECT 1 FROM events WHERE job=?", n) for n in left if n != 32), (
        "a job and its story go together"
    )
    s.start()
    wait_for(lambda: ids(s) == [1, 2, 32, submitted + 1], "it goes on")
    wait_for(lambda: not os.listdir(env), "the environment of a forgotten job goes")
    wait_for(lambda: not any(logs[n].exists() for n in range(3, 32)), "so do the logs")
    assert logs[1].exists()
    s.release("run")
    # Job 1 may be forgotten as soon as it has ended.
    wait_for(lambda: re.search(r"job 1 \(.*\) done: exit code 0", s.said()), "the end of job 1")
    s.wait_state(32, "done")
    assert s.starts("run") == s.starts("child") == 1 and all(s.starts(f"n{n}") == 1 for n in range(30))


def test_invalid_keep_logs_and_keep_finished_are_refused(scheduler):
    """With an invalid `keep_logs`, `start` exits with 2; a running scheduler keeps the last valid `keep_finished`."""
    s = scheduler(gpus=1)
    for value in ("30", "0G", "soon"):
        error = s.cli("start", "--gpus", "1", "--keep-logs", value, code=2).stderr
        assert "--keep-logs" in error and "write 30d, 20G or 30d 20G" in error
    keep(s, keep_finished="2")
    s.append(*(s.line(f"n{n}") for n in range(4)))
    s.start()
    wait_for(lambda: s.starts("n3") == 1 and set(s.states().values()) == {"done"}, "all done")
    assert ids(s) == [1, 2, 3, 4], "the next round is in an hour"
    keep(s, keep_finished="much")
    wait_for(lambda: "the previous settings stay in force" in s.said(), "it is said")
    keep(s, keep_finished="3")
    wait_for(lambda: ids(s) == [2, 3, 4], "mended")
