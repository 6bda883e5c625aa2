"""Jobs for several GPUs on machines whose GPUs are joined differently (NVLink, PCIe switch, CPU), with a fake driver."""

from __future__ import annotations

import json

import pytest

from tests.stories.harness import wait_for
from tests.stories.machine import machine

__all__ = ["machine"]

LETTERS = "abcdefgh"


def a_machine(machine, count=4, **settings):
    """Return a machine with ``count`` GPUs; each two of them are joined by NVLink."""
    m = machine(**settings).cards(*(f"GPU-{letter}" for letter in LETTERS[:count]))
    m.driver.islands(2)
    return m


def add(m, key, need="2", link=""):
    m.s.hold(key)
    m.s.append(m.s.line(key, more=f";gpus={need}" + (f";link={link}" if link else "")))


@pytest.mark.smoke
def test_a_job_for_two_gpus_takes_an_nvlink_pair_although_lower_ids_are_free(machine):
    m = a_machine(machine)
    m.s.start()
    m.add("one", gpus="0")
    m.running("one")
    add(m, "pair")
    m.running("pair")
    assert m.s.job(2)["gpus"] == [2, 3], "not 1,2"
    m.add("other", gpus="1")
    m.running("other")


def test_a_job_with_link_waits_with_its_reason_and_starts_when_a_pair_is_free(machine):
    m = a_machine(machine)
    m.s.start()
    m.add("a", gpus="0")
    m.add("c", gpus="2")
    m.running("a"), m.running("c")
    add(m, "linked", link="nvlink")
    told = "needs 2 GPUs joined by NVLink (link); the largest free group has 1 (GPU 1)"
    m.waits(3, "no-link", told)
    assert told in m.s.cli("why", "3").stdout
    m.still_waits(3, 3)
    add(m, "any")
    m.running("any")
    assert m.s.job(4)["gpus"] == [1, 3], "without link it is only a preference"
    m.s.release("any")
    m.s.release("c")
    m.running("linked")
    assert m.s.job(3)["gpus"] == [2, 3]
    assert "joined by NVLink" in m.s.cli("show", "3").stdout


def test_impossible_links_are_refused_wherever_a_job_is_submitted(machine):
    m = a_machine(machine)
    told = "needs 3 GPUs joined by NVLink (link); the largest group has 2 (GPUs 0,1)"
    m.s.start()
    add(m, "line", need="3", link="nvlink")
    wait_for(lambda: f"jobs.txt:1: {told}" in m.s.said(), f"the refusal of the line: {m.s.said()}")
    words = ("--gpus", "3", "--link", "nvlink", "--", "true")
    assert told in m.s.cli("submit", *words, code=3).stderr
    assert "known: nvlink, pcie, numa" in m.s.cli("submit", "--link", "usb", "--", "true", code=2).stderr
    m.s.stop()
    assert told in m.s.cli("submit", *words, code=3).stderr, "the links are in the store"


def test_link_can_be_edited_and_is_kept_over_a_restart(machine):
    m = a_machine(machine)
    m.s.start()
    m.add("a", gpus="0")
    m.add("c", gpus="2")
    m.running("a"), m.running("c")
    m.s.cli("submit", "--gpus", "2", "--link", "pcie", "--", "true")
    m.waits(3, "no-link")
    m.s.stop()
    m.s.start()
    m.waits(3, "no-link")
    assert "never" not in m.s.cli("edit", "3", "--link", "nvlink").stdout
    m.waits(3, "no-link", "joined by NVLink (link)")
    assert "link nvlink -> any" in m.s.cli("edit", "3", "--link", "").stdout
    m.s.wait_state(3, "done")


def test_a_dgx_and_a_machine_without_nvlink_give_the_lowest_free_gpus(machine):
    m = machine().cards(*(f"GPU-{letter}" for letter in LETTERS))
    m.driver.dgx()
    m.s.start()
    add(m, "pair", link="nvlink")
    m.running("pair")
    assert m.s.job(1)["gpus"] == [0, 1]
    add(m, "eight", need="8", link="nvlink")
    m.waits(2, "no-wide-room")
    m.s.release("pair")
    m.running("eight")


def test_doctor_tells_which_gpus_are_joined(machine):
    m = a_machine(machine, 8)
    findings = json.loads(m.s.cli("doctor", "--json", code=None).stdout)
    assert "NVLink: 0,1 and 2,3 and 4,5 and 6,7" in json.dumps(findings)
