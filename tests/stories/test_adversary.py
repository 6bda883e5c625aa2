"""What an adversary found around GPUs that are read: cards that vanish, drains that end too soon, drivers that lie."""

from __future__ import annotations

import pytest

from tests.stories.harness import alive, wait_for
from tests.stories.machine import machine

__all__ = ["machine"]


# -- a GPU vanishes while no scheduler looks --------------------------------------------------------------


@pytest.mark.parametrize("given", [None, 3])
def test_a_gpu_that_vanished_over_a_restart_moves_nothing(machine, given):
    """All jobs are taken over; numbers, bookings, pauses and allowed lists stay with their cards."""
    m = machine(gpus=given).cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    for i in range(3):
        m.add(f"on{i}", gpus=str(i))
    pids = [m.running(f"on{i}") for i in range(3)]
    m.s.cli("pause", "2")
    m.add("for-c", gpus="2")
    m.add("for-b", gpus="1")
    m.waits(4, "paused")
    m.s.kill()
    m.driver.remove("GPU-b")
    m.s.start()
    assert [(gpu["index"], gpu["uuid"], gpu["jobs"], gpu["paused"]) for gpu in m.s.status()["gpus"]] == [
        (0, "GPU-a", [1], False),
        (1, "GPU-b", [2], False),
        (2, "GPU-c", [3], True),
    ]
    said = m.s.said()
    assert "GPU 1 of the last start (GPU-b) is not shown by the driver any more" in said and "anew" not in said
    m.state(1, "GONE")
    assert all(map(alive, pids)) and [m.s.states()[i] for i in (1, 2, 3)] == ["running"] * 3
    assert m.s.job(4)["allowed_gpus"] == [2] and m.s.job(5)["allowed_gpus"] == [1]
    for i in range(3):
        m.s.release(f"on{i}")
    for i in (1, 2, 3):
        m.s.wait_state(i, "done")
    m.waits(5, "gone")
    m.s.cli("resume", "2")
    m.running("for-c")
    assert m.s.job(4)["gpus"] == [2]
    m.cards("GPU-b")
    m.driver.order(["GPU-a", "GPU-b", "GPU-c"])
    m.running("for-b")
    assert m.s.job(5)["gpus"] == [1]


def test_a_pause_of_a_gpu_that_vanished_passes_to_no_other(machine):
    m = machine().cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    m.s.cli("pause", "1")
    m.s.stop()
    m.driver.remove("GPU-b")
    m.s.start()
    assert {gpu["uuid"]: (gpu["index"], gpu["paused"]) for gpu in m.s.status()["gpus"]} == {
        "GPU-a": (0, False),
        "GPU-b": (1, True),
        "GPU-c": (2, False),
    }


# -- drains -----------------------------------------------------------------------------------------------


def drained(m) -> int:
    """Wait for the end of a scheduler that drains; its exit code."""
    wait_for(lambda: m.s.process.poll() is not None, f"the drain's end: {m.s.said()[-2000:]}")
    return m.s.process.returncode


def test_a_drain_waits_out_a_back_off_and_runs_the_retry(machine):
    m = machine(assign_retry_wait="1.5", gpu_interval=20).cards("GPU-a")  # the last reading is old by then
    (m.s.folder / "fails.py").write_text("raise SystemExit(3)")
    m.s.append(f"0,{m.s.folder}/fails.py,,,;retries=1")
    m.s.start("--drain")
    assert drained(m) == 1
    assert m.s.rows("SELECT state, attempt, exit_code FROM jobs") == [("failed", 2, 3)], m.s.said()
    assert "nothing is left to do" in m.s.said() and "cannot start" not in m.s.said()


def test_one_unhealthy_reading_does_not_end_a_drain(machine):
    m = machine().cards("GPU-a")
    m.driver.gpu("GPU-a", mig=1)
    m.s.append(m.s.line("a"))
    m.s.start("--drain")
    m.waits(1, "unhealthy")
    m.readings(3)
    assert m.s.process.poll() is None, m.s.said()
    m.driver.gpu("GPU-a", mig=0)
    assert drained(m) == 0
    assert m.s.states() == {1: "done"}
