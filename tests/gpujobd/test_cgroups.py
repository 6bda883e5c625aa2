"""A cgroup for each job, in a hierarchy of cgroup v2 that the test mounts. Limits need controllers, which not each machine has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, Process
from scheduler.gpujobd.cgroups import JobCgroups, _mount
from tests.gpujobd.machine import CONFIG, Machine
from tests.stories.harness import alive, wait_for
from tests.stories.people import ROOT_ONLY

HERE = Process(os.getpid(), int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]))


def a_job(**also: object) -> Job:
    spec = JobSpec(source="submit", arguments=("x",), uid=1, user="u", **also)  # type: ignore[arg-type]
    return Job(id=12, spec=spec, need=ResourceRequest(1, 1000), attempt=1)


def test_limits_are_written_where_there_are_controllers(tmp_path: Path) -> None:
    """`mem=` and `cpus=` become memory.max and cpu.max; without the controller it is said what is not limited."""
    folder = tmp_path / "12.1"
    folder.mkdir()
    cgroups, job = JobCgroups(str(tmp_path)), a_job(mem_mib=64 << 10, cpus=2.5)
    assert cgroups.enter(job, HERE) == "mem=64 GiB and cpus=2.5 not limited: this machine has no such controller"
    for name in ("memory.max", "cpu.max"):
        (folder / name).touch()
    assert cgroups.enter(job, HERE) == ""
    assert (folder / "memory.max").read_text() == str(64 << 30)
    assert (folder / "cpu.max").read_text() == "250000 100000"
    assert (folder / "cgroup.procs").read_text() == str(os.getpid())


def test_the_out_of_memory_killer_is_recognized(tmp_path: Path) -> None:
    """The counter oom_kill of memory.events tells that the kernel ended a process because memory ran out."""
    cgroups, folder = JobCgroups(str(tmp_path)), tmp_path / "12.1"
    assert not cgroups.killed_for_memory("12.1")
    folder.mkdir()
    for text, killed in (
        ("low 0\noom 1\noom_kill 0\n", False),
        ("low 0\noom 1\noom_kill 2\n", True),
        ("nonsense", False),
    ):
        (folder / "memory.events").write_text(text)
        assert cgroups.killed_for_memory("12.1") is killed


def test_a_cgroup_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """Without a cgroup the job runs all the same, and it is said."""
    assert "the job has no cgroup of its own: No such file" in JobCgroups(str(tmp_path / "none")).enter(a_job(), HERE)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine(f"{CONFIG}kill_grace: 1\n", cgroups=True) as made:
        for name in ("ada", "eve"):
            made.add_user(name)
        made.install()
        made.start()
        yield made


@ROOT_ONLY
def test_each_job_has_a_cgroup_and_its_end_ends_everything_in_it(machine: Machine) -> None:
    """Issue 25, 3: all processes of a job are in its cgroup; a cancel ends also those that hide from it."""
    hide = "setsid env -i sleep 311 & trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 312' & sleep 313; sleep 314"
    number = machine.submit("ada", "--mem", "1G", "--cpus", "2", "--", "sh", "-c", hide)
    machine.in_state(number, "running")
    procs = f"{machine.cgroup}/jobs/{number}.1/cgroup.procs"
    wait_for(lambda: len(machine.root("cat", procs).out.split()) >= 4, "the processes in the cgroup", 60)
    pids = [int(pid) for pid in machine.root("cat", procs).out.split()]
    machine.gpujob("ada", "cancel", str(number))
    assert machine.ended(number, 90)["state"] == "cancelled"
    wait_for(lambda: not any(map(alive, pids)), "the end of all processes", 60)
    wait_for(
        lambda: machine.root("ls", f"{machine.cgroup}/jobs", check=False).out.count(f"{number}.1") == 0, "no cgroup", 60
    )
    if not (
        Path("/sys/fs/cgroup/cgroup.controllers").exists()
        and "memory" in Path("/sys/fs/cgroup/cgroup.controllers").read_text()
    ):
        assert "not limited: this machine has no such controller" in machine.gpujob("ada", "show", str(number)).out


@ROOT_ONLY
def test_a_hidden_process_keeps_the_gpu(machine: Machine) -> None:
    """A process that left session and environment of its job is known by the cgroup: the GPU stays booked until it ends."""
    number = machine.submit("ada", "--", "sh", "-c", "setsid env -i sleep 3 & exit 4")
    assert machine.ended(number)["exit_code"] == 4
    assert "leftover processes" in machine.gpujob("ada", "status").out
    wait_for(lambda: "leftover processes" not in machine.gpujob("ada", "status").out, "the free GPU", 60)


@ROOT_ONLY
def test_the_service_can_start_again_beside_live_jobs() -> None:
    """Issue 25, 7: systemd starts it in its own cgroup, which the kernel refuses while controllers are enabled there (EBUSY)."""
    base = _mount()
    top = f"{base}/gj-{os.getpid()}"
    text = f"import os; open('{top}/.control/cgroup.procs', 'w').write(str(os.getpid()))\n"
    text += "from scheduler.gpujobd.cgroups import release; release()"

    def write(path: str, value: object) -> None:
        Path(path).write_text(str(value))

    there = Path(f"{base}/cgroup.controllers").read_text().split()
    enabled = Path(f"{base}/cgroup.subtree_control").read_text().split()
    job, main = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        for folder in (top, f"{top}/.control", f"{top}/jobs", f"{top}/jobs/1.1"):
            os.mkdir(folder)
        for folder in (base, top, f"{top}/jobs"):
            for name in there:
                write(f"{folder}/cgroup.subtree_control", f"+{name}")
        write(f"{top}/jobs/1.1/cgroup.procs", job.pid)
        if there:
            with pytest.raises(OSError, match="busy"):
                write(f"{top}/cgroup.procs", main.pid)
        subprocess.run([sys.executable, "-I", "-c", text], check=True)
        assert not Path(f"{top}/cgroup.subtree_control").read_text().split()
        write(f"{top}/cgroup.procs", main.pid)
        assert str(job.pid) in Path(f"{top}/jobs/1.1/cgroup.procs").read_text().split()
    finally:
        for child in (job, main):
            child.kill()
            child.wait()
        for folder in (f"{top}/jobs/1.1", f"{top}/jobs", f"{top}/.control", top):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(folder)
        for name in set(there) - set(enabled):
            with contextlib.suppress(OSError):  # another test uses it
                write(f"{base}/cgroup.subtree_control", f"-{name}")
