"""How GPU readings decide where jobs run: foreign processes, fluctuating readings, memory that is released late."""

from __future__ import annotations

import re

import pytest

from tests.stories.harness import wait_for
from tests.stories.machine import TOTAL, machine

__all__ = ["machine"]


# -- status -----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_s3_38_status_shows_state_fraction_allocation_memory_and_load(machine):
    m = machine().cards("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    m.driver.gpu("GPU-a", temp=61, name="A card")
    m.s.start()
    m.add("half", need="0.5", gpus="0")
    m.add("whole", gpus="1")
    m.use("GPU-a", m.running("half"), 20_480, load=40, total_load=40)
    m.running("whole")
    m.s.cli("pause", "2")
    m.use("GPU-d", m.foreign_process(), 70_000, load=5, total_load=5)
    m.state(3, "FOREIGN")
    wait_for(lambda: m.gpu(0)["load"] == 0.4 and m.gpu(0)["memory_own"], "its reading")
    m.add("queued", gpus="2")
    m.waits(3, "paused")
    text = m.s.cli("status").stdout
    head, *lines = [line for line in text.splitlines() if line.startswith("GPU ") or re.match(r"^[0-3] +[A-Z]", line)]
    assert head.split() == ["GPU", "STATE", "ALLOCATED", "MEMORY", "LOAD", "JOBS", "NAME"]
    cells = [re.split(r" {2,}", line) for line in lines]
    assert cells[0][:7] == ["0", "BUSY (50%)", "0.5", "20.5 GiB of 78.1 GiB", "40%", "1", "A card"]
    assert cells[1][:6] == ["1", "BUSY (100%)", "1", "500 MiB of 78.1 GiB", "0%", "2"]
    assert cells[2][:6] == ["2", "PAUSED", "0", "500 MiB of 78.1 GiB", "0%", "-"]
    assert (
        cells[3][:6] == ["3", "FOREIGN", "0", "68.8 GiB of 78.1 GiB", "5%", "-"]
        and "in use by foreign processes" in cells[3][-1]
    )
    assert "RUNNING" in text and "WAITING" in text and "paused:" in text
    shown = m.gpu(0)
    assert (shown["state"], shown["allocated"], shown["temperature"]) == ("BUSY", 0.5, 61)
    assert (shown["memory_used"], shown["memory_own"]) == (20_980 << 20, 20_480 << 20)
    assert shown["memory_total"] == TOTAL << 20 and m.gpu(3)["memory_own"] == 0


# -- foreign processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["memory", "load"])
def test_s3_16_a_gpu_used_only_by_foreign_processes_gets_no_job(machine, what):
    m = machine().cards("GPU-a")
    m.driver.gpu("GPU-a", **({"used": 64_500} if what == "memory" else {"load": 80}))
    m.s.start()
    m.add("a", need="0.1")
    m.state(0, "FOREIGN")
    m.waits(1, "foreign")
    m.still_waits(1)
    m.driver.gpu("GPU-a", used=500, load=0)
    m.running("a")


@pytest.mark.parametrize("what", ["memory", "load"])
def test_s3_16_the_thresholds_of_memory_and_load_can_be_set(machine, what):
    m = machine(mem_threshold=0.3, load_threshold=0.3).cards("GPU-a")
    m.use("GPU-a", m.foreign_process(), 26_000 if what == "memory" else 100, load=35, total_load=35)
    m.s.start()
    m.add("a", need="0.1")
    m.waits(1, "foreign")
    m.still_waits(1, 3)


@pytest.mark.smoke
def test_i10_a_foreign_process_blocks_its_gpu_and_is_named(machine):
    m = machine().cards("GPU-a", "GPU-b")
    foreign_process = m.foreign_process()
    m.s.start()
    m.use("GPU-a", foreign_process, 68_000)
    m.state(0, "FOREIGN")
    m.add("a", need="0.1", gpus="0")
    m.add("b")
    m.running("b")
    m.waits(1, "foreign")
    why = m.s.cli("why", "1").stdout
    assert re.search(rf"waits \(foreign\): GPU 0 has 66.4 GiB in use .* \(pid {foreign_process}, user \w+\)", why), why
    m.still_waits(1)
    m.unuse("GPU-a", foreign_process)
    m.running("a")
    m.s.says("in use by foreign processes", times=1)


def test_i10_a_small_foreign_use_blocks_only_whole_gpu_jobs(machine):
    m = machine().cards("GPU-a")
    foreign_process = m.foreign_process()
    m.use("GPU-a", foreign_process, 4_000)
    m.s.start()
    m.add("whole")
    m.add("half", need="0.5")
    m.running("half")
    m.s.release("half")
    m.s.wait_state(2, "done")
    m.waits(1, "foreign", f"(pid {foreign_process}")
    m.unuse("GPU-a", foreign_process)
    m.running("whole")


def test_a_gpu_is_blocked_by_foreign_load_and_not_by_the_load_of_its_jobs(machine):
    """S3.14, S3.16, placement: The thresholds apply to foreign use only.

    Two jobs with half a GPU each may together load the GPU to 100 %. A foreign process with a load above the threshold
    keeps jobs away from its GPU.
    """
    m = machine().cards("GPU-a", "GPU-b")
    foreign_process = m.foreign_process()
    m.use("GPU-b", foreign_process, 1_000, load=85, total_load=85)
    m.s.start()
    m.state(1, "FOREIGN")
    m.add("one", need="0.5")
    m.use("GPU-a", m.running("one"), 38_000, load=95, total_load=95)
    m.readings(4)
    m.add("two", need="0.5")
    m.use("GPU-a", m.running("two"), 38_000, load=90, total_load=100)
    m.readings(4)
    assert m.gpu(0)["state"] == "BUSY" and m.gpu(0)["jobs"] == [1, 2] and m.gpu(0)["memory_own"] == 76_000 << 20
    m.add("three", need="0.5")
    m.waits(3, "foreign")
    m.still_waits(3, 3)
    m.unuse("GPU-b", foreign_process)
    m.running("three")
    assert m.s.job(3)["gpus"] == [1]
    assert "GPU 0 has" not in m.s.said() and "GPU 0 is" not in m.s.said()


def test_memory_that_a_job_uses_beyond_its_share_blocks_other_jobs(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    m.add("greedy", need="0.25")
    m.use("GPU-a", m.running("greedy"), 50_000)
    wait_for(lambda: "over" in (m.gpu(0)["reason"] or "") or "share" in (m.gpu(0)["reason"] or ""), "the note")
    m.add("half", need="0.5")
    m.add("small", need="0.25")
    reason = m.waits(2, "over-share")["reason"]
    assert re.fullmatch(
        r"job 1 uses 48.8 GiB on GPU 0, more than its share of 19.3 GiB; "
        r"the rest of the GPU is smaller than the share that the waiting job needs",
        reason,
    ), reason
    told = m.s.cli("why", "2").stdout  # what the job really uses counts there, too
    assert "expected start: now" not in told and "gpujob edit 2 --gpus 0.45" not in told, told
    assert "    gpujob cancel 1   # " in told, told
    assert m.s.cli("submit", "--dry-run", "--gpus", "0.5", "--", "true").stdout.startswith("the job would wait (")
    m.running("small")
    m.still_waits(2, 3)
    m.unuse("GPU-a", m.running("greedy"))
    m.running("half")


def test_i12_a_new_job_books_its_share_before_it_uses_memory(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    m.add("one", need="0.6")
    m.running("one")
    m.add("two", need="0.6")
    m.add("three", need="0.4")
    m.running("three")
    m.still_waits(2, 6)
    assert m.waits(2, "no-room") and m.gpu(0)["allocated"] == 1.0
    m.use("GPU-a", m.running("one"), 45_000)
    m.readings(3)
    m.still_waits(2, 3)
    m.s.release("one")
    m.s.wait_state(1, "done")
    m.unuse("GPU-a", m.running("one"))
    m.running("two")


@pytest.mark.waits
@pytest.mark.parametrize("first", [81, 79])
def test_i13_readings_that_fluctuate_around_a_threshold_change_nothing(machine, first):
    """If readings fluctuate around a threshold, a blocked GPU stays blocked, and a free GPU stays free."""
    m = machine(gpu_interval=1.5).cards("GPU-a")  # each value is set before the next reading
    foreign_process = m.foreign_process()
    m.use("GPU-a", foreign_process, first * TOTAL // 100)
    m.s.start()
    m.add("a", need="0.1")
    m.running("a") if first == 79 else m.waits(1, "foreign")
    percents = [160 - first, first] * 6
    for percent in percents:
        m.use("GPU-a", foreign_process, percent * TOTAL // 100)
        m.readings(1)
    said = m.s.said().count("in use by foreign processes")
    if first == 79:
        m.add("b", need="0.1")
        m.running("b")
        assert said == 0
    else:
        assert m.s.starts("a") == 0 and said == 1
        m.use("GPU-a", foreign_process, 50_000)
        m.running("a")


# -- memory that is released late -------------------------------------------------------------------------


def test_i11_unreleased_memory_blocks_a_gpu_until_resume_with_force(machine):
    m = machine().cards("GPU-a")
    config = m.s.folder / "config.yaml"
    config.write_text("release: 600\n")  # the GPU stays DRAINING during the test
    m.s.start()
    m.add("one")
    pid = m.running("one")
    m.use("GPU-a", pid, 70_000)
    wait_for(lambda: m.gpu(0)["memory_own"] == 70_000 << 20, "its memory")
    m.add("two")
    m.waits(2, "no-room")
    m.s.release("one")
    m.s.wait_state(1, "done")
    m.waits(2, "releasing", f"(pid {pid})")
    shown = m.state(0, "DRAINING")
    assert f"68.4 GiB are still in use (pid {pid}) after the end of a job" in shown["reason"]
    config.write_text("release: 1\n")
    assert f"(pid {pid})" in m.state(0, "FOREIGN")["reason"]
    m.waits(2, "foreign")
    m.still_waits(2, 3)
    m.s.cli("resume", "0")
    m.still_waits(2, 3)
    assert "GPU 0 resumed" in m.s.cli("resume", "0", "--force").stdout
    m.running("two")
    m.readings(4)
    assert m.gpu(0)["state"] == "BUSY" and m.s.job(2)["gpus"] == [0]


def test_i11_memory_that_is_released_late_only_delays_the_next_job(machine):
    m = machine(release=60).cards("GPU-a")
    m.s.start()
    m.add("one", "two")
    pid = m.running("one")
    m.use("GPU-a", pid, 70_000)
    wait_for(lambda: m.gpu(0)["memory_own"], "its memory")
    m.s.release("one")
    m.s.wait_state(1, "done")
    m.state(0, "DRAINING")
    m.still_waits(2, 3)
    m.unuse("GPU-a", pid)
    m.running("two")
    assert "foreign" not in m.s.said(), "no trouble was made of it"


def test_resume_force_without_a_scheduler_is_refused(machine):
    m = machine(gpus=1).cards("GPU-a")
    m.s.start()
    m.s.stop()
    assert "--force" in m.s.cli("resume", "--force", "0", code=5).stderr
    m.s.cli("resume", "0")


# -- shares -----------------------------------------------------------------------------------------------


def test_i14_fractional_shares_fill_a_gpu_exactly(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    keys = [f"k{i}" for i in range(10)]
    m.add(*keys, need="0.1", gpus="0")
    m.add("eleventh", need="0.001", gpus="0")
    m.add("x", "y", need="0.3", gpus="1")
    m.add("z", need="0.4", gpus="1")
    m.add("more", need="0.001", gpus="1")
    for key in (*keys, "x", "y", "z"):
        m.running(key)
    assert m.waits(11, "no-room") and m.waits(15, "no-room")
    assert [gpu["allocated"] for gpu in m.s.status()["gpus"]] == [1.0, 1.0]
    for key in (*keys, "eleventh", "x", "y", "z", "more"):
        m.s.release(key)
    m.s.wait_ended(15)
    assert [gpu["allocated"] for gpu in m.s.status()["gpus"]] == [0.0, 0.0]


def test_i15_invalid_gpu_needs_are_refused(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    bad = ["-1", "NaN", "inf", "-inf", "much", "0x0.5x", "1e9", "2x1.5"]
    m.s.append(*(m.s.line(f"bad{i}") + f";gpus={need}" for i, need in enumerate(bad)))
    fine = {"0": ("-", 0.0), "0.0001": ("0", 0.001), "1.5": ("0,1", 2.0)}
    for need, (gpus, counted) in fine.items():
        m.s.append(m.s.line(f"ok{need}") + f";gpus={need}")
        job = len(m.s.wait_ended(list(fine).index(need) + 1))
        assert m.s.job(job)["need"] == counted
        (entry,) = (e for e in m.s.ledger() if e[:2] == ["start", f"ok{need}"])
        assert (entry[3] == "-") == (gpus == "-") and entry[3].count(",") == gpus.count(",")
    refused = {line["line"] for line in m.s.status()["refused"]}
    assert refused == set(range(1, len(bad) + 1))


def test_i16_a_paused_gpu_keeps_its_running_job_and_gets_no_new_one(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    m.add("one", "two", need="0.5")
    m.use("GPU-a", m.running("one"), 30_000, load=90, total_load=90)
    m.running("two")
    m.s.cli("pause", "0")
    assert m.gpu(0)["state"] == "PAUSED" and m.gpu(0)["jobs"] == [1, 2]
    m.s.release("two")
    m.s.wait_state(2, "done")
    m.add("three", need="0.5")
    m.waits(3, "paused")
    m.still_waits(3, 3)
    assert m.s.states()[1] == "running"
    m.s.cli("resume", "0")
    m.running("three")
