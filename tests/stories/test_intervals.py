"""--monitor-interval and --state-interval.

Changes that the kernel reports take effect at once; other changes take effect at the end of the interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.stories.harness import INTERPRETER, REPLACED, Scheduler, alive, open_names, wait_for

NEVER_S = 600.0  # longer than any test runs
AT_ONCE_S = 20.0  # limit for a busy machine; an immediate reaction takes 0.1 s
FOUND_S = 10.0  # limit for what is found at an interval of 0.5 s; less than the default intervals (20 and 30 s)
# Before a command: runs the command without inotify watches, because a user namespace has its own limit on watches.
DEAF = ["unshare", "-U", "--map-root-user", "sh", "-c", 'echo 0 >/proc/sys/user/max_inotify_watches && exec "$@"', "sh"]


def edit_pauses(s: Scheduler, *gpus: int) -> None:
    """Write these GPUs to `paused_gpus` in the state file, at a moment when the scheduler does not write that file.

    Before each of its own writes, the scheduler looks for edits. If it found the edit in this way, the test would not
    show whether the kernel reported the edit.
    """
    path = s.folder / "gpu_scheduler_state.json"

    def idle() -> bool:
        shown = json.loads(path.read_text())["jobs"]
        # While a replaced version is open, the scheduler still reads edits from it.
        looking = any(REPLACED in name for name in open_names(s.pid))
        return not looking and Counter(s.states().values()) == {state: n for state, n in shown.items() if n}

    wait_for(idle, "an idle scheduler", AT_ONCE_S)
    document = json.loads(path.read_text())
    document["paused_gpus"] = list(gpus)
    path.write_text(json.dumps(document))


def save_as_editors_do(s: Scheduler, line: str) -> None:
    """Write a copy of the jobs file with one more line, and rename the copy to the jobs file."""
    aside = s.folder / "jobs.new"
    aside.write_text(s.jobs_file.read_text() + line + "\n")
    os.replace(aside, s.jobs_file)


def waits_paused(s: Scheduler, job_id: int) -> None:
    """Wait until the job exists and waits because its GPU is paused."""
    wait_for(
        lambda: s.rows("SELECT 1 FROM jobs WHERE id=?", job_id) and s.job(job_id)["reason_code"] == "paused",
        f"job {job_id} waits for a paused GPU",
        AT_ONCE_S,
    )


def watches(pid: int) -> int:
    """Return the number of inotify watches of a process."""
    found = 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.read_text().count("inotify wd:")
    return found


def test_s2_9_s3_10_s3_30_reported_changes_take_effect_immediately(scheduler):
    """S2.9, S3.10, S3.30: Each change that the kernel reports takes effect at once, even with intervals of ten minutes.

    Appended lines, and lines of a file that is renamed into place, start jobs. A job that is killed from outside fails,
    and its GPU is allocated again. Pauses by a verb and by an edit of the state file take effect.
    """
    s = scheduler(gpus=2, monitor_interval=NEVER_S, state_interval=NEVER_S, gpu_interval=NEVER_S)
    s.start()
    assert watches(s.pid) > 0
    for key in ("killed", "goes-on"):
        s.hold(key)
    s.append(s.line("killed", gpus="0"))
    s.wait_state(1, "running", limit=AT_ONCE_S)
    save_as_editors_do(s, s.line("goes-on", code=6, gpus="1"))
    s.wait_state(2, "running", limit=AT_ONCE_S)
    s.append(s.line("next", gpus="0"))
    wait_for(lambda: 3 in s.states(), "a job that waits for GPU 0", AT_ONCE_S)

    pid = s.job(1)["pid"]
    os.kill(pid, signal.SIGKILL)
    s.wait_state(1, "failed", limit=AT_ONCE_S)
    s.wait_state(3, "done", limit=AT_ONCE_S)
    killed = s.job(1)
    assert (killed["outcome"], killed["signal"], killed["exit_code"]) == ("signal", signal.SIGKILL, None)
    assert not alive(pid) and s.job(3)["gpus"] == [0]
    wait_for(lambda: s.status()["gpus"][0]["allocated"] == 0.0, "GPU 0 is free", AT_ONCE_S)

    s.cli("pause", "0", "1")
    s.append(s.line("by-verb"))
    waits_paused(s, 4)
    assert s.states()[2] == "running", "a pause ends no job"
    s.cli("resume", "0")
    s.wait_state(4, "done", limit=AT_ONCE_S)
    edit_pauses(s, 0, 1)
    wait_for(lambda: [gpu["paused"] for gpu in s.status()["gpus"]] == [True, True], "the edit is obeyed", AT_ONCE_S)
    s.append(s.line("by-edit"))
    waits_paused(s, 5)
    edit_pauses(s)
    s.wait_state(5, "done", limit=AT_ONCE_S)
    s.release("goes-on")
    s.wait_state(2, "failed")
    assert s.job(2)["exit_code"] == 6 and s.starts("goes-on") == 1


def test_s3_10_s3_30_unreported_changes_are_found_at_the_interval(scheduler):
    """S3.10, S3.30: Without inotify watches, changes of the files are found at the interval.

    The changes: appended lines, saves by rename, and edits of the state file.
    """
    s = scheduler(gpus=1, monitor_interval=0.5, state_interval=0.5)
    s.command = [*DEAF, *INTERPRETER]
    if not os.environ.get("CI") and subprocess.run([*DEAF, "true"], check=False).returncode:
        pytest.skip("user namespaces are switched off on this machine")
    s.start()
    assert watches(s.pid) == 0
    s.append(s.line("appended"))
    s.wait_state(1, "done", limit=FOUND_S)
    save_as_editors_do(s, s.line("renamed"))
    s.wait_state(2, "done", limit=FOUND_S)
    edit_pauses(s, 0)
    wait_for(lambda: s.status()["gpus"][0]["paused"], "the pause", FOUND_S)
    s.append(s.line("waits"))
    waits_paused(s, 3)
    s.cli("resume", "0")
    s.wait_state(3, "done", limit=AT_ONCE_S)
