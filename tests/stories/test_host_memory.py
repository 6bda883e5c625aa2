"""Jobs of a real scheduler in a small memory cgroup: the kernel ends those that allocate too much."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.runners.supervisor import OomCounter
from scheduler.system.kernel_log import PATH, shows_pids
from tests.stories.harness import INTERPRETER, Scheduler, wait_for

LIMIT = 160 << 20  # the scheduler and its helpers need about 60 MiB of it
MOUNTS = (  # folder of the memory controller, the file with the limit, and the file that forbids swap (its contents)
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.swappiness", "0"),
    ("/sys/fs/cgroup", "memory.max", "memory.swap.max", "0"),
    ("/sys/fs/cgroup/unified", "memory.max", "memory.swap.max", "0"),
)
# The kernel takes the process with the highest score: never the scheduler.
HOG = "echo 1000 > /proc/self/oom_score_adj; "
ALLOCATE = f"{shlex.quote(sys.executable)} -c 'kept = bytearray({4 * LIMIT})'"


def _made() -> tuple[Path, str] | None:
    for mount, limit, swap, none in MOUNTS:
        group = Path(mount, f"gpujob-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            with contextlib.suppress(OSError):  # v2: without it, the new group has no memory controller
                Path(mount, "cgroup.subtree_control").write_text("+memory")
            group.mkdir()
            try:
                (group / limit).write_text(str(LIMIT))
            except OSError:
                group.rmdir()
                continue
            with contextlib.suppress(OSError):
                (group / swap).write_text(none)
            return group, limit
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Return a memory cgroup with a limit of `LIMIT` bytes."""
    made = _made()
    if made is None:
        pytest.skip("no memory cgroup may be made here (it needs root, and the controller of v1 or v2)")
    group, limit = made
    yield group

    def empty() -> bool:
        return not (group / "cgroup.procs").read_text()

    try:
        wait_for(empty, "the group is empty")
    finally:
        if not empty():
            (group / limit).write_text(str(8 * LIMIT))
    group.rmdir()


def enter(s: Scheduler, group: Path) -> None:
    """Let the scheduler run in this cgroup."""
    s.command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *INTERPRETER]


def submit(s: Scheduler, text: str) -> int:
    """Submit a job that runs a shell text on a part of a GPU; return its id."""
    return int(s.cli("submit", "--gpus", "0.1", "--", "/bin/sh", "-c", text).stdout.split()[0])


def failure(s: Scheduler, job: int) -> dict[str, Any]:
    s.wait_state(job, "failed")
    found: dict[str, Any] = s.job(job)["failure"] or {"class": None}
    return found


def names_pids() -> bool:
    """Return whether the kernel's log tells the scheduler which process was ended."""
    return shows_pids() and os.access(PATH, os.R_OK)


def told(found: dict[str, Any]) -> None:
    """Check the failure of a job whose main process the kernel has ended."""
    assert found["class"] == "host_memory"
    if names_pids():
        assert found["line"].startswith("kernel: ") and "Killed process" in found["line"]
        assert "the limit of its cgroup ran out" in found["hint"]
    else:
        assert found["line"] == "" and found["hint"].startswith("probably the kernel ended it")


def test_b23_a_job_that_the_kernel_ended_is_told_from_one_that_somebody_killed(
    small_group: Path, scheduler: Callable[..., Scheduler]
) -> None:
    """B23; issue 27, 2: in one cgroup, the kernel ends a job, and a job gets a plain SIGKILL."""
    s = scheduler(gpus=1)
    enter(s, small_group)
    s.start()
    plain = submit(s, "kill -9 $$")
    assert failure(s, plain)["class"] == "killed"
    go = s.folder / "go"
    waits = f"while [ ! -e {go} ]; do sleep 0.05; done; "
    beside = {  # they run while the kernel ends another job
        "killed": submit(s, f"{waits}kill -9 $$"),
        "traceback": submit(s, f"{waits}{sys.executable} -c 'raise LookupError(3)'"),
        "": submit(s, f"{waits}exit 0"),
    }
    for job in beside.values():
        s.wait_state(job, "running")
    hog = submit(s, f"{HOG}exec {ALLOCATE}")
    told(failure(s, hog))
    go.touch()
    assert failure(s, beside["traceback"])["class"] == "traceback"
    assert failure(s, beside["killed"])["class"] == ("killed" if names_pids() else "host_memory")
    s.wait_state(beside[""], "done")
    assert s.job(beside[""])["failure"] is None
    after = submit(s, "kill -9 $$")
    assert failure(s, after)["class"] == "killed"


@pytest.mark.parametrize("rest", ["exit $?", "exit 1"])
def test_a_child_that_the_kernel_ended_is_the_probable_cause(
    small_group: Path, scheduler: Callable[..., Scheduler], rest: str
) -> None:
    """The log of the job tells nothing, and only a child of it was ended: the counter of its cgroup tells the cause."""
    s = scheduler(gpus=1)
    enter(s, small_group)
    s.start()
    found = failure(s, submit(s, f"{{ {HOG}{ALLOCATE}; }} 2>/dev/null; {rest}"))
    assert found["class"] == "host_memory" and found["hint"].startswith("probably the kernel ended it"), found


@pytest.mark.parametrize("supervised", [True, False], ids=["direct", "dead-supervisor"])
def test_the_end_of_a_job_whose_daemon_or_supervisor_is_dead_is_told(
    small_group: Path, scheduler: Callable[..., Scheduler], supervised: bool
) -> None:
    """The attempt record keeps the kernel's counter: the next daemon, or a daemon without its supervisor, knows the cause."""
    s = scheduler(gpus=1)
    enter(s, small_group)
    s.start()
    go = s.folder / "go"
    job = submit(s, f"{HOG}while [ ! -e {go} ]; do sleep 0.05; done; exec {ALLOCATE}")
    s.wait_state(job, "running")
    if supervised:
        s.kill()
        go.touch()
        wait_for(lambda: s.job(job)["state"] == "failed", "the end, shown without a daemon")
        assert s.job(job)["failure"]["class"] == "host_memory"
        s.command = INTERPRETER  # the new daemon runs in another cgroup
        s.start()
    else:
        os.kill(s.supervisor_pid(), 9)
        go.touch()
    told(failure(s, job))


def test_screen_mode_tells_it_too(small_group: Path, screens: Callable[..., Any]) -> None:
    s = screens(1)
    enter(s, small_group)
    s.start()
    plain, hog = submit(s, "kill -9 $$"), submit(s, f"{HOG}exec {ALLOCATE}")
    assert failure(s, plain)["class"] == "killed"
    told(failure(s, hog))


def test_the_counter_of_this_machine_can_be_read(small_group: Path) -> None:
    """A process in a memory cgroup finds its counter by itself."""
    pid = os.fork()
    if not pid:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))
        os._exit(0 if OomCounter().read() == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
