"""Requests made while no scheduler runs: cases found by adversarial testing."""

from __future__ import annotations

import pytest

from tests.stories.harness import wait_for


@pytest.mark.parametrize("how", ["well", "badly", "runs on"])
def test_a_retry_without_daemon_runs_again_only_a_failed_job(scheduler, how):
    """If the scheduler was killed while a job ran, a `retry` of that job waits for the next start.

    That start runs the job again if the job has failed, but not if it has succeeded or still runs.
    """
    s = scheduler(gpus=1)
    s.start()
    s.hold("a")
    s.append(s.line("a", code=3 if how == "badly" else 0))
    s.wait_state(1, "running")
    wait_for(lambda: s.starts("a"), "its first line")
    s.kill()
    said = s.cli("retry", "1", code=5).stderr
    assert (
        "job 1 was running when the last scheduler ended; it is run again, unless it ends successfully, at the next start of the scheduler"
        in said
    )
    if how != "runs on":
        s.release("a")
        # The ledger would not do: the job writes its last line before it exits, and a retry of a live job does nothing.
        wait_for(lambda: s.job(1)["state"] in ("done", "failed"), "its end in its record")
    s.start()
    if how == "well":
        s.wait_state(1, "done")
        wait_for(lambda: s.rows("SELECT code FROM requests") == [(0,)], "the answer")
        s.append(s.line("b"))
        s.wait_state(2, "done")
        assert s.starts("a") == 1 and s.job(1)["attempt"] == 1, s.said()
        assert "job 1 has succeeded in the meantime; it is not run again" in s.rows("SELECT lines FROM requests")[0][0]
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


def test_a_cancel_without_daemon_is_carried_out_at_the_start(scheduler):
    s = scheduler(gpus=1)
    s.start()
    s.hold("a")
    s.append(s.line("a"))
    s.wait_state(1, "running")
    s.kill()
    said = s.cli("cancel", "1", code=5).stderr
    assert "job 1 was running when the last scheduler ended; it is cancelled at the next start of the scheduler" in said
    s.start()
    s.wait_state(1, "cancelled")


def test_a_retry_of_a_recorded_done_job_runs_it_again(scheduler):
    """If `retry` is called for a job that is recorded as done, the next start of the scheduler runs the job again."""
    s = scheduler(gpus=1)
    s.start()
    s.append(s.line("a"))
    s.wait_state(1, "done")
    s.stop()
    s.cli("retry", "1")
    s.start()
    wait_for(lambda: s.starts("a") == 2, f"the second run: {s.said()}")


@pytest.fixture
def ended_meanwhile(scheduler):
    """Return a killed scheduler with seven jobs.

    Jobs 1 to 6 ended after the kill: jobs 1 to 4 with exit code 3, job 5 with 0, and job 6 with 3. Jobs 1 to 4 still
    have one retry. Job 7 waits.
    """
    s = scheduler(gpus=6, assign_retry_wait="0.05")
    keys = "abcdef"
    for key in keys:
        s.hold(key)
    s.append(*(s.line(key, 0 if key == "e" else 3) + ";retries=1" * (key in "abcd") for key in keys))
    s.start()
    wait_for(lambda: all(s.starts(key) for key in keys) and set(s.states().values()) == {"running"}, "they run")
    s.cli("pause", "0-5")
    s.append(s.line("waits", gpus="0"))
    # Reasons are stored after the commit; `Scheduler.job` would wait for one that a killed scheduler has not stored.
    wait_for(lambda: s.states().get(7) == "pending" and s.job(7)["reason_code"] == "paused", "it waits, with a reason")
    s.kill()
    for key in keys:
        s.release(key)
    wanted = ["pending"] * 4 + ["done", "failed", "pending"]
    wait_for(lambda: [s.job(n)["state"] for n in range(1, 8)] == wanted, "told by their records")
    return s


def test_requests_for_a_job_waiting_for_retry_are_carried_out_at_the_next_start(ended_meanwhile):
    """While no scheduler runs, a job that waits for its retry can be held, edited, put first or cancelled.

    The next start of the scheduler carries out the request.
    """
    s = ended_meanwhile
    assert "job 1 is already pending" in s.cli("retry", "1").stdout
    for words, done in (
        (["hold", "1"], "held"), (["edit", "2", "--label", "x"], "changed"), (["first", "3"], "put first"),
        (["cancel", "4"], "cancelled"), (["hold", "2"], "held"), (["release", "2"], "released"),
    ):  # fmt: skip
        said = s.cli(*words, code=5).stderr
        assert f"job {words[1]} waits for another attempt; it is {done} at the next start of the scheduler" in said
    s.start()
    wait_for(lambda: s.states()[4] == "cancelled", "carried out")
    assert [s.job(n)["reason_code"] == "hold-user" for n in (1, 2)] == [True, False] and s.job(2)["label"] == "x"
    assert [s.job(n)["attempt"] for n in (1, 2, 3)] == [1, 1, 1]
    s.cli("release", "1")
    s.cli("resume", "5")
    wait_for(lambda: [s.states()[n] for n in (1, 2, 3)] == ["failed"] * 3, "they ran again")
    begun = [key for what, key, *_ in s.ledger() if what == "start"]
    assert begun[6:9] == ["c", "a", "b"], "the one that was put first"


def test_requests_without_daemon_are_refused_or_stored_in_their_order(ended_meanwhile):
    s = ended_meanwhile
    assert "job 5 cannot be held: it is done, and only a waiting job can be held" in s.cli("hold", "5", code=1).stderr
    assert "job 5 has already ended (done)" in s.cli("cancel", "5").stdout
    assert "64" in s.cli("edit", "2", "--gpus", "64", code=3).stderr
    assert s.job(2)["need"] == 1
    assert "job 6 has already ended (failed)" in s.cli("cancel", "6").stdout
    said = s.cli("hold", "1", "5", code=1).stderr
    assert (
        "job 5 cannot be held: it is done" in said
        and "job 1 waits for another attempt; it is held at the next start" in said
    )
    said = s.cli("retry", "6", "7", code=5).stderr
    assert "job 7 is already pending" in said and "job 6 has ended (failed); it is run again at the next start" in said
    assert "job 6 has ended (failed); it is cancelled at the next start" in s.cli("cancel", "6", code=5).stderr, (
        "in their order"
    )
    said = s.cli("first", "7", "2", code=5).stderr
    assert (
        "job 7 is put first at the next start of the scheduler" in said
        and "job 2 waits for another attempt; it is put first" in said
    )
    assert "jobs 3, 4 change places at the next start of the scheduler" in s.cli("swap", "3", "4", code=5).stderr
    assert "job 7 is held at the next start of the scheduler" in s.cli("hold", "7", code=5).stderr, (
        "also of others in a left one"
    )
    s.start()
    wait_for(lambda: s.rows("SELECT count(*) FROM requests WHERE code IS NULL") == [(0,)], "all are answered")
    places = dict(s.rows("SELECT id, place FROM jobs"))
    assert sorted(places, key=places.__getitem__)[:2] == [7, 2] and places[4] < places[3]
    assert [s.job(n)["reason_code"] for n in (1, 7)] == ["hold-user"] * 2 and s.states()[6] == "cancelled"


def test_a_retry_of_jobs_ended_without_daemon_is_carried_out_at_the_next_start(ended_meanwhile):
    """A `retry` of jobs that ended or were cancelled without a scheduler is carried out at the next start."""
    s = ended_meanwhile
    s.cli("cancel", "7")
    said = s.cli("retry", "5", "6", "7", code=5).stderr
    assert (
        "job 5 has ended (done); it is run again at the next start" in said
        and "job 6 has ended (failed); it is run again at the next start" in said
    )
    assert "job 7 is run again at the next start of the scheduler" in said
    s.start()
    wait_for(lambda: [s.states()[n] for n in (5, 6, 7)] == ["pending"] * 3, "they wait again")
    assert [s.job(n)["attempt"] for n in (5, 6)] == [1, 1]


def test_a_stored_request_that_fails_at_the_start_is_logged(ended_meanwhile):
    s = ended_meanwhile
    s.cli("cancel", "1", code=5)
    s.cli("first", "1", code=5)
    s.start()
    wait_for(lambda: s.states()[1] == "cancelled", "the cancel")
    text = "requested before the start: job 1 cannot be put first: it is cancelled, and only a waiting job can be put first"
    wait_for(lambda: text in s.said(), f"{text!r} in\n{s.said()}")
