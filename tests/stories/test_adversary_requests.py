"""What an adversary found in what is asked for while no scheduler runs."""

from __future__ import annotations

import pytest

from tests.stories.harness import wait_for


@pytest.mark.parametrize("how", ["well", "badly", "runs on"])
def test_a_job_asked_to_run_again_while_nobody_knows_how_it_ends(scheduler, how):
    """It was running when the scheduler ended: not run twice if it ended well meanwhile; run again if it did not."""
    s = scheduler(gpus=1)
    s.start()
    s.hold("a")
    s.append(s.line("a", code=3 if how == "badly" else 0))
    s.wait_state(1, "running")
    wait_for(lambda: s.starts("a"), "its first line")
    s.kill()
    said = s.cli("retry", "1", code=5).stderr
    assert "job 1 was running at last; it is run again, if it has not ended well, when the scheduler starts" in said
    if how != "runs on":
        s.release("a")
        wait_for(lambda: s.ledger()[-1][0] == "end", "its end")
    s.start()
    if how == "well":
        s.wait_state(1, "done")
        wait_for(lambda: s.rows("SELECT code FROM requests") == [(0,)], "the answer")
        s.append(s.line("b"))
        s.wait_state(2, "done")
        assert s.starts("a") == 1 and s.job(1)["attempt"] == 1, s.said()
        assert "job 1 has ended well meanwhile; it is not run again" in s.rows("SELECT lines FROM requests")[0][0]
    elif how == "badly":
        wait_for(lambda: s.starts("a") == 2, f"the second run: {s.said()}")
        s.wait_state(1, "failed")
        assert s.job(1)["attempt"] == 2
    else:
        wait_for(lambda: s.rows("SELECT code FROM requests WHERE code IS NOT NULL"), "the answer")
        s.release("a")
        s.wait_state(1, "done")
        assert s.starts("a") == 1
    s.stop()
    s.start()
    s.append(s.line("c"))
    wait_for(lambda: s.starts("c"), f"the next job: {s.said()}")
    assert s.starts("a") == (2 if how == "badly" else 1), "asked for once"


def test_a_cancel_of_such_a_job_is_carried_out_at_the_start(scheduler):
    s = scheduler(gpus=1)
    s.start()
    s.hold("a")
    s.append(s.line("a"))
    s.wait_state(1, "running")
    s.kill()
    said = s.cli("cancel", "1", code=5).stderr
    assert "job 1 was running at last; it is cancelled when the scheduler starts again" in said
    s.start()
    s.wait_state(1, "cancelled")


def test_a_job_that_ended_well_is_run_again_when_somebody_who_sees_that_asks(scheduler):
    """Only what was asked blindly is not run twice."""
    s = scheduler(gpus=1)
    s.start()
    s.append(s.line("a"))
    s.wait_state(1, "done")
    s.stop()
    s.cli("retry", "1")
    s.start()
    wait_for(lambda: s.starts("a") == 2, f"the second run: {s.said()}")


def test_what_is_asked_of_a_job_that_is_to_run_again_is_done_at_the_start(scheduler):
    """It ended while no scheduler ran, and status shows that it waits: so it may be held, changed, put first, cancelled."""
    s = scheduler(gpus=5, assign_retry_wait="0.05")
    keys = "abcde"
    for key in keys:
        s.hold(key)
    s.append(*(s.line(key, 3 if key != "e" else 0) + ";retries=1" for key in keys))
    s.start()
    wait_for(lambda: all(s.starts(key) for key in keys) and set(s.states().values()) == {"running"}, "they run")
    s.kill()
    for key in keys:
        s.release(key)
    wait_for(lambda: [s.job(n)["state"] for n in range(1, 6)] == ["pending"] * 4 + ["done"], "they are to run again")
    again = "is to run again; it is {} when the scheduler starts again"
    for words, done in (
        (["hold", "1"], "held"), (["edit", "2", "--label", "x"], "changed"), (["first", "3"], "put first"),
        (["cancel", "4"], "cancelled"),
    ):  # fmt: skip
        assert f"job {words[1]} {again.format(done)}" in s.cli(*words, code=5).stderr
    assert (
        "job 1 is to run again, and gets its place when the scheduler starts" in s.cli("swap", "1", "2", code=1).stderr
    )
    assert "job 5 is done: only a waiting job can be held" in s.cli("hold", "5", code=1).stderr
    assert "job 5 has ended already (done)" in s.cli("cancel", "5").stdout
    s.start()
    wait_for(lambda: list(s.states().values()) == ["pending", "failed", "failed", "cancelled", "done"], f"{s.states()}")
    assert s.job(1)["reason_code"] == "hold-user" and s.job(2)["label"] == "x"
    assert [s.starts(key) for key in keys] == [1, 2, 2, 1, 1]
    assert s.job(3)["attempt"] == 2
    assert s.rows("SELECT count(*) FROM jobs WHERE place < 0") == [(1,)]
