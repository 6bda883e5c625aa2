"""Tests of `save_list`: this setting writes a shell script that submits the unfinished jobs again."""

from __future__ import annotations

from scheduler.daemon.queue_export import script_of
from tests.builders import a_job


def test_s4_28_a_job_comes_after_its_dependencies_in_the_exported_script() -> None:
    """S4.28: In the script, the line of a job comes after the lines of the job's dependencies.

    This holds for any order of the queue. It is necessary because the line of a job uses the new ids that earlier lines
    of the script give to the dependencies.
    """
    jobs = [a_job(3, after_ok=(1,)), a_job(2, after=(3,)), a_job(1)]
    lines = [line for line in script_of(jobs, [], 0.0).splitlines() if line.startswith("cd ")]
    assert ["job1=" in lines[0], "job3=" in lines[1], "job2=" in lines[2]] == [True] * 3, lines
    assert '-W "$job1"' in lines[1] and '-D "$job3"' in lines[2] and "-W" not in lines[0]


def test_a_long_chain_of_dependencies_is_exported() -> None:
    jobs = [a_job(number, after=(number - 1,) if number else ()) for number in range(5000)]
    lines = [line for line in script_of(reversed(jobs), [], 0.0).splitlines() if line.startswith("cd ")]
    assert len(lines) == 5000 and "job0=" in lines[0] and "job4999=" in lines[-1]
