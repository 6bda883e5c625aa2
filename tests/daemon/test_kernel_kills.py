"""Tests of the judge of ends by SIGKILL: the kernel's log (a pipe of the test) and the counter of the cgroup."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from scheduler.core.job import Failure, Job, JobState, Process
from scheduler.core.observations import Ended, Lost, Started
from scheduler.daemon.failure_diagnosis import with_causes
from scheduler.daemon.kernel_kills import KernelKills
from scheduler.system.kernel_log import KernelLog
from tests.builders import a_job

PLAIN, SURE, PROBABLE = "killed", "host_memory: the kernel", "host_memory: probably"


class Machine:
    """Jobs whose main processes have the pids 100 + id and began ``AGE_S`` seconds ago, and the kernel's log."""

    AGE_S = 60.0

    def __init__(self, readable: bool = True) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK)
        log = KernelLog(f"/proc/self/fd/{self.read_end}") if readable else None
        self.kills = KernelKills(log)
        self.live: dict[int, Job] = {}

    def run(self, number: int, age: float = AGE_S, **changes: object) -> None:
        job = a_job(number, **{"state": JobState.RUNNING, "attempt": 1, **changes})
        self.live[number] = job
        ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - age) * 100)
        with_causes(self.live, [Started(number, 1, Process(100 + number, ticks), time.time())], (), self.kills)

    def kernel_kills(self, pid: int, ago: float = 0.0) -> None:
        at = int((time.monotonic() - ago) * 1e6)
        text = f"Out of memory: Killed process {pid} (python) total-vm:9kB, anon-rss:1048576kB, file-rss:0kB, shmem-rss:0kB"
        os.write(self.write_end, f"3,9,{at},-;{text}, UID:0 pgtables:9kB oom_score_adj:0\n".encode())

    def ends(self, number: int, oom_kills: int = 0, exit_code: int | None = None) -> str | None:
        end = Ended(number, 1, exit_code, 9 if exit_code is None else None, time.time(), oom_kills=oom_kills)
        (found,) = with_causes(self.live, [end], (), self.kills)
        del self.live[number]
        assert isinstance(found, Ended)
        return _short(found.failure)


def _short(failure: Failure | None) -> str | None:
    if failure is None or failure.kind != "host_memory":
        return failure and failure.kind
    return f"{failure.kind}: {' '.join(failure.hint.split()[: 1 if failure.hint.startswith('probably') else 2])}"


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    os.close(made.write_end)
    os.close(made.read_end)


def test_the_kernels_word_about_the_main_process_is_certain(machine: Machine) -> None:
    """Also without a counter: the job may have moved itself into a cgroup of its own."""
    for number in (1, 2, 3):
        machine.run(number)
    machine.kernel_kills(101)
    assert (machine.ends(2), machine.ends(1), machine.ends(3, 1, exit_code=137)) == (PLAIN, SURE, PLAIN)


def test_of_two_killed_jobs_the_kernel_names_the_one(machine: Machine) -> None:
    """The counter of the cgroup rose by one for both; the order of their ends does not matter."""
    for number in range(1, 5):
        machine.run(number)
    machine.kernel_kills(101)
    assert (machine.ends(2, 1), machine.ends(1, 1), machine.ends(3, 1)) == (PLAIN, SURE, PLAIN)
    assert machine.ends(4, 2) == PROBABLE, "a second process was ended, and no job of ours had it"
    machine.run(5, age=-0.05)
    assert machine.ends(5, 1) == PROBABLE, "the other job had ended before this one began"


def test_a_child_that_the_log_of_the_job_names_is_known(machine: Machine, tmp_path: object) -> None:
    log = f"{tmp_path}/log"
    with open(log, "w") as stream:
        stream.write("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.\n")
    machine.run(1, log=log)
    machine.run(2, log=log)
    assert machine.ends(2, 0, exit_code=1) == "host_memory: it ran", "the log alone"
    machine.kernel_kills(4242)
    assert machine.ends(1, 1, exit_code=1) == SURE


def test_a_pid_that_another_process_had_does_not_count(machine: Machine) -> None:
    """Before the start of the job, or after its end; or in another boot."""
    machine.run(1)
    machine.kernel_kills(101, ago=10_000)
    assert machine.ends(1) == PLAIN
    machine.run(2, boot="another boot")
    machine.kernel_kills(102)
    assert machine.ends(2) == PLAIN


@pytest.mark.parametrize("state", [JobState.STOPPING, JobState.RUNNING])
def test_a_job_that_the_scheduler_ended_is_not_judged(machine: Machine, state: JobState) -> None:
    machine.run(1, state=state, stop_why="cancelled")
    assert machine.ends(1, 1) == (PROBABLE if state is JobState.RUNNING else None)


def test_without_the_kernels_log_the_counter_makes_it_probable() -> None:
    machine = Machine(readable=False)
    for number in range(1, 5):
        machine.run(number)
    assert (machine.ends(1), machine.ends(2, 1), machine.ends(3, 1)) == (PLAIN, PROBABLE, PROBABLE)
    assert machine.ends(4, 5, exit_code=0) is None
    os.close(machine.write_end)
    os.close(machine.read_end)


def test_attempts_that_have_ended_are_forgotten(machine: Machine) -> None:
    machine.run(1)
    machine.run(2)
    machine.ends(1)
    with_causes(machine.live, [Lost(2, 1, "", time.time())], (), machine.kills)
    assert not machine.kills._leaders


def test_agents_count_only_after_a_sigkill() -> None:
    """Other users have processes in the cgroup of an agent, and it does not read the kernel's log."""
    job = a_job(1, state=JobState.RUNNING, attempt=1)
    for exit_code, kind in ((None, PROBABLE), (137, PROBABLE), (1, None)):
        end = Ended(1, 1, exit_code, 9 if exit_code is None else None, 5.0, oom_kills=1)
        (found,) = with_causes({1: job}, [end])
        assert isinstance(found, Ended) and _short(found.failure) == kind
