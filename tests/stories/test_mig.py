"""MIG instances as GPUs: who gets them, what a job sees, and changes of the MIG mode while the scheduler runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.stories.harness import alive, wait_for
from tests.stories.machine import TOTAL, machine

__all__ = ["machine"]


def divided(machine, **settings):
    """Return a machine with one whole card (GPU 0), and a card that is divided into three MIG instances."""
    m = machine(**settings).cards("GPU-a", "GPU-b")
    with m.driver.together():
        m.driver.gpu("GPU-b", mig=1)
        m.driver.instance("GPU-b", "MIG-x", "1g.10gb", used=12)
        m.driver.instance("GPU-b", "MIG-y", "1g.10gb", used=12)
        m.driver.instance("GPU-b", "MIG-z", "3g.40gb", total=40_000, used=20)
    return m


@pytest.mark.smoke
def test_instances_are_gpus_and_a_job_gets_the_uuid_of_its_instance(machine):
    m = divided(machine)
    m.s.start()
    shown = {gpu["index"]: (gpu["uuid"], gpu["memory_total"] >> 20) for gpu in m.s.status()["gpus"]}
    assert shown == {0: ("GPU-a", TOTAL), 200: ("MIG-x", 9856), 201: ("MIG-y", 9856), 202: ("MIG-z", 40_000)}
    (m.s.folder / "show.py").write_text(
        "import os, sys; print('sees', os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])\n"
    )
    m.s.append(
        "0,show.py,,a ;gpus=mig-1g.10gb,", "0,show.py,,b ;gpus=mig-3g.40gb;cuda=unset,", "0,show.py,,c ;gpus=0.5,"
    )
    m.s.wait_ended(3)
    assert "sees MIG-x ['a', '--cuda', '0']" in m.s.log(1)
    assert "sees MIG-z ['b', '--cuda', '0']" in m.s.log(2)
    assert "sees 0 ['c', '--cuda', '0']" in m.s.log(3)
    assert m.s.job(1)["gpus"] == [200]
    status = m.s.cli("status").stdout
    assert re.search(r"^202 .*", status, re.M), status


def test_plain_jobs_never_use_an_instance_and_jobs_by_memory_use_the_smallest(machine):
    m = divided(machine)
    m.s.start()
    m.add("plain")
    m.running("plain")
    m.add("second")
    m.waits(2, "no-room")
    for key in "uvw":
        m.s.hold(key)
        m.s.append(m.s.line(key, more=";vram=8G"))
    m.running("u"), m.running("v"), m.running("w")
    assert [m.s.job(job)["gpus"] for job in (3, 4, 5)] == [[200], [201], [202]]
    m.still_waits(2, 3)
    m.s.hold("x")
    m.s.append(m.s.line("x", more=";gpus=mig-1g.10gb"))
    m.waits(6, "no-room", "needs one MIG instance 1g.10gb")
    m.s.release("v")
    m.running("x")
    assert m.s.job(6)["gpus"] == [201]
    assert "need" in m.s.cli("show", "6").stdout and "one MIG instance 1g.10gb" in m.s.cli("show", "6").stdout
    m.s.stop()
    m.s.start()
    m.s.wait_state(6, "running")
    assert m.s.job(6)["gpus"] == [201]


def test_impossible_requests_for_instances_are_refused(machine):
    m = divided(machine)
    m.s.start()
    for words, told in (
        (("--gpus", "2xmig-1g.10gb"), "a job cannot have several MIG instances"),
        (("--gpus", "mig-7g.80gb"), "those here are 1g.10gb, 3g.40gb"),
        (("--allowed", "1"), "GPU 1 is divided into MIG instances: 200-202"),
        (("--allowed", "200"), "gpus=mig-1g.10gb"),
        (("--on", "200,201"), "a process can use only one MIG instance"),
    ):
        assert told in m.s.cli("submit", *words, "--", "true", code=3).stderr
    m.s.cli("submit", "--gpus", "mig-1g.10gb", "--", "true")
    m.s.wait_state(1, "done")
    m.s.cli("queue", "pause")
    m.s.cli("submit", "--gpus", "mig-1g.10gb", "--", "true")
    m.s.cli("edit", "2", "--gpus", "mig-3g.40gb")
    m.s.cli("queue", "resume")
    m.s.wait_state(2, "done")
    assert m.s.job(2)["gpus"] == [202]


def test_a_machine_with_only_instances_says_what_to_write(machine):
    m = machine().cards("GPU-a")
    with m.driver.together():
        m.driver.gpu("GPU-a", mig=1)
        m.driver.instance("GPU-a", "MIG-x", "1g.10gb", used=12)
    m.s.start()
    told = "all GPUs here are MIG instances, which are given only to jobs that ask for one (gpus=mig-1g.10gb)"
    assert told in m.s.cli("submit", "--", "true", code=3).stderr
    m.s.cli("submit", "--vram", "5G", "--", "true")
    m.s.wait_state(1, "done")


def test_a_machine_in_mig_mode_without_instances_has_no_gpu(machine):
    m = machine().cards("GPU-a")
    m.driver.gpu("GPU-a", mig=1)
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "start"],
        cwd=m.s.folder, env=m.s.environ, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 4 and "GPU 0 is in MIG mode and without instances" in done.stderr


@pytest.mark.parametrize(("option", "expected"), [("gpu_ids", "1"), ("gpu_ids", "200,202")])
def test_settings_name_instances_or_the_card_that_they_are_on(machine, option, expected):
    m = divided(machine, **{option: expected})
    m.s.start()
    found = [gpu["index"] for gpu in m.s.status()["gpus"]]
    assert found == ([200, 201, 202] if expected == "1" else [200, 202])


def test_a_card_that_is_switched_to_mig_mode_gets_no_further_job_until_a_restart(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("a")
    m.add("b")
    pid = m.running("a")
    m.running("b")
    with m.driver.together():
        m.driver.gpu("GPU-a", mig=1)
        m.driver.instance("GPU-a", "MIG-x", "1g.10gb", used=12)
    m.state(0, "GONE")
    told = "GPU 0 (GPU-a) was switched to MIG mode, so only its instances can take jobs; restart the scheduler"
    m.s.says(told)
    assert alive(pid) and m.s.states()[1] == "running"
    m.s.release("a")
    m.s.wait_state(1, "done")
    m.add("c", gpus="0")
    m.waits(3, "gone", told)
    m.still_waits(3, 3)
    m.s.stop()
    m.s.start()
    assert [gpu["index"] for gpu in m.s.status()["gpus"]] == [1, 100]
    m.s.cli("submit", "--gpus", "mig-1g.10gb", "--", "true")
    m.s.wait_state(4, "done")
    m.waits(3, "never", "GPU 0 is not managed here")


def test_an_instance_that_is_removed_gets_no_further_job_and_its_job_stays(machine):
    m = divided(machine)
    m.s.start()
    m.s.hold("a")
    m.s.append(m.s.line("a", more=";gpus=mig-3g.40gb"))
    pid = m.running("a")
    m.driver.gpu("GPU-b", mig=0)
    m.state(202, "GONE")
    m.s.says("GPU 202 (MIG-z, MIG instance 3g.40gb) is gone: the MIG mode or the instances of its card have changed")
    wait_for(lambda: "is gone" in " ".join(m.s.job(1)["notes"]), "a note")
    m.s.append(m.s.line("b", more=";gpus=mig-1g.10gb"))
    m.waits(2, "gone", "restart the scheduler")
    assert alive(pid) and m.s.states()[1] == "running"
    m.driver.gpu("GPU-b", mig=1)
    m.s.wait_state(2, "done")
    m.s.release("a")
    m.s.wait_state(1, "done")
