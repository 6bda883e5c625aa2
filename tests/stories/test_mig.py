"""MIG instances as GPUs: who gets them, what a job sees, and changes of the MIG mode while the scheduler runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.stories.harness import alive, wait_for
from tests.stories.machine import TOTAL, machine

__all__ = ["machine"]

LOST = 15  # NVML_ERROR_GPU_IS_LOST


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


def test_memory_beside_a_share_is_a_part_of_a_card(machine):
    """A job with `vram=` and `gpus=` gets a card: the small instances neither take it nor make its share larger."""
    m = divided(machine)
    m.s.start()
    for key in "uv":
        m.s.hold(key)
    m.s.append(m.s.line("u", more=";gpus=0.05;vram=8G"), m.s.line("v", more=";gpus=mig-1g.10gb;vram=8G"))
    m.running("u"), m.running("v")
    assert [m.s.job(job)["gpus"] for job in (1, 2)] == [[0], [200]]
    part = f"{-(-8192 * 1000 // TOTAL) / 1000:g}"
    assert f"vram=8G is {part} of the smallest allowed GPU that has it" in " ".join(m.s.job(1)["notes"])
    assert not m.s.job(2)["notes"]
    told = "needs 20G on a GPU; the largest MIG instance 1g.10gb has "
    assert told in m.s.cli("submit", "--gpus", "mig-1g.10gb", "--vram", "20G", "--", "true", code=3).stderr
    m.s.cli("queue", "pause")
    m.s.cli("submit", "--vram", "8G", "--", "true")
    assert "one MIG instance 3g.40gb" in m.s.cli("edit", "3", "--gpus", "mig-3g.40gb").stdout + (
        m.s.cli("show", "3").stdout
    )
    m.s.cli("queue", "resume")
    m.s.wait_state(3, "done")
    assert m.s.job(3)["gpus"] == [202]


def test_an_error_of_a_card_holds_its_instances_and_their_jobs_run_again_elsewhere(machine):
    m = divided(machine)
    m.s.start()
    for key in "uvw":
        m.s.hold(key)
    m.s.append(m.s.line("u", more=";vram=8G"))
    pid = m.running("u")
    m.s.append(m.s.line("v", more=";gpus=mig-1g.10gb"))
    other = m.running("v")
    assert [m.s.job(job)["gpus"] for job in (1, 2)] == [[200], [201]]
    m.driver.xid("MIG-x", 94)  # the card names the instance
    m.state(200, "UNHEALTHY")
    assert m.gpu(201)["state"] == "BUSY"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: m.s.starts("u") == 2, "the second start")
    m.running("u")
    assert m.s.job(1)["gpus"] == [202]
    m.driver.xid("GPU-b", 79)  # an error of the whole card
    m.state(201, "UNHEALTHY"), m.state(202, "UNHEALTHY")
    assert any("GPU 201 reported XID 79" in note for note in m.s.job(2)["notes"])
    os.kill(other, signal.SIGKILL)
    m.waits(2, "unhealthy", "GPU 200 reported XID 94 (contained memory error)")
    m.s.append(m.s.line("w", more=";gpus=0.5"))
    m.running("w")
    assert m.s.job(3)["gpus"] == [0], "the other card works"
    m.s.cli("resume", "201")
    wait_for(lambda: m.s.starts("v") == 2, "the second start")
    assert m.s.job(2)["gpus"] == [201] and m.gpu(202)["state"] == "UNHEALTHY"


def test_the_instances_of_a_card_that_is_lost_are_gone(machine):
    m = divided(machine)
    m.s.start()
    m.s.hold("u")
    m.s.append(m.s.line("u", more=";vram=8G"))
    pid = m.running("u")
    with m.driver.together():
        m.driver.xid("GPU-b", 79)
        for uuid in ("GPU-b", "MIG-x", "MIG-y", "MIG-z"):
            m.driver.error("*", LOST, uuid)
    m.state(200, "GONE"), m.state(202, "GONE")
    m.s.says("GPU 200 (MIG-x) is gone: GPU is lost; before, it reported XID 79 (GPU has fallen off the bus)")
    assert "MIG mode" not in m.gpu(200)["reason"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: m.s.starts("u") == 2, "the second start")
    m.running("u")
    assert m.s.job(1)["gpus"] == [0]


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


def test_a_job_that_books_memory_may_use_an_instance(machine):
    m = machine(min_free_mem_mb=2000).cards("GPU-a")
    with m.driver.together():
        m.driver.gpu("GPU-a", mig=1)
        m.driver.instance("GPU-a", "MIG-x", "1g.10gb", used=12)
        m.driver.instance("GPU-a", "MIG-y", "3g.40gb", total=40_000, used=12)
    m.s.start()
    m.s.cli("submit", "--", "true")
    m.s.wait_state(1, "done")
    assert m.s.job(1)["gpus"] == [101], "it has the most free memory"
    assert m.s.cli("submit", "--vram", "50G", "--", "true", code=3).stderr


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
