"""Tests of retries: failed starts, failed runs, and jobs that ran out of GPU memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.decide import decide
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobState, Outcome
from scheduler.core.job_text import sentence
from scheduler.core.observations import Arrived, Now
from scheduler.core.requests import Cancel, Hold, Release, Requeue, from_row, to_row
from tests.builders import OOM, T0, a_job, a_world

S = JobState


# -- failed starts -----------------------------------------------------------------------------------------


def test_a_start_that_failed_for_a_temporary_reason_is_retried_after_growing_waits() -> None:
    """S3.17 S3.29: If a start failed for a temporary reason, it is retried after growing waits, up to a limit."""
    play = a_world(1, max_assign_attempts=5, assign_retry_wait_s=5.0)
    play.arrive(a_job(1))
    for attempt, wait in enumerate((5, 10, 20, 40), start=1):
        play.tell(play.never_ran(1, "fork refused"))
        job = play.job(1)
        assert (job.state, job.attempt, job.start_failures) == (S.PENDING, attempt, attempt)
        assert play.reason(1) == "backoff"
        assert (
            job.reason
            == f"start failed: fork refused; the next try is number {attempt + 1} of 5; next attempt in {wait} s"
        )
        assert play.scheduler.fleet.free[0] == 1000
        play.tell(after=wait - 0.01)
        assert play.state(1) is S.PENDING
        play.tell(after=0.02)
        assert (play.state(1), play.job(1).attempt) == (S.STARTING, attempt + 1)
        assert (play.job(1).reason_code, play.job(1).reason) == ("", "")
    play.tell(play.never_ran(1, "fork refused"))
    job = play.job(1)
    assert (job.state, job.outcome) == (S.FAILED, Outcome.COULD_NOT_START)
    assert job.notes == ("could not start: fork refused (5 tries)",)


def test_a_start_that_failed_for_a_permanent_reason_fails_the_job_at_once() -> None:
    play = a_world(1)
    play.arrive(a_job(1, retries=3))
    play.tell(play.never_ran(1, "Permission denied", lasting=True))
    job = play.job(1)
    assert (job.state, job.outcome, job.attempt) == (S.FAILED, Outcome.COULD_NOT_START, 1)
    assert job.notes == ("could not start: Permission denied",)


def test_the_message_of_a_failure_does_not_name_the_cause_of_an_earlier_attempt() -> None:
    play = a_world(1)
    play.arrive(a_job(1))
    plan = play.tell(play.never_ran(1, "Permission denied", lasting=True))
    assert sentence(plan.events[-1], play.job(1))[0].endswith("failed: could not be started (Permission denied)")
    play.ask(Requeue((1,)))
    plan = play.tell(play.ended(1, None, signal=9))
    assert sentence(plan.events[-1], play.job(1))[0].endswith("failed: signal 9, attempt 2")
    assert play.job(1).notes == ("could not start: Permission denied",)


def test_other_jobs_start_while_a_job_waits_for_its_next_attempt() -> None:
    """S3.17: Other jobs start while a job waits for its next attempt."""
    play = a_world(1)
    play.arrive(a_job(1, priority=0), a_job(2, priority=9))
    play.tell(play.never_ran(1))
    assert play.started == [1, 2]


def test_a_successful_start_resets_the_count_of_failed_starts() -> None:
    play = a_world(1, max_assign_attempts=2, assign_retry_wait_s=0.0)
    play.arrive(a_job(1, retries=1))
    play.tell(play.never_ran(1))
    play.tell(play.began(1))
    assert play.job(1).start_failures == 0
    play.tell(play.ended(1, 1))
    play.tell(play.never_ran(1))
    assert play.state(1) is S.STARTING


@pytest.mark.parametrize(("jitter", "wait"), [(0.0, 4.5), (0.5, 5.0), (0.999, 5.4998)])
def test_waits_before_retries_vary_randomly(jitter: float, wait: float) -> None:
    play = a_world(1)
    play.arrive(a_job(1))
    plan = decide(play.scheduler, [play.never_ran(1)], play.now, jitter)
    assert plan.changed[1].not_before == pytest.approx(T0 + wait)


def test_a_retry_wait_continues_after_a_restart_of_the_daemon() -> None:
    play = a_world(1)
    play.arrive(a_job(1, attempt=1, not_before=T0 + 30, reason_code="backoff", reason="again in 30 s"))
    assert play.reason(1) == "backoff"
    play.tell(after=29)
    assert not play.started
    play.tell(after=2)
    assert play.started == [1] and play.job(1).attempt == 2


def test_a_clock_set_back_by_a_day_delays_a_retry_by_at_most_the_longest_wait() -> None:
    play = a_world(1)
    plan = decide(play.scheduler, [Arrived(a_job(1, not_before=T0 + 5))], Now(T0 - 86400, 50.0))
    assert not plan.starts and play.scheduler.next_timer() == 650.0


def test_each_retry_wait_has_its_full_length_after_a_cancel_and_requeue() -> None:
    play = a_world(1, assign_retry_wait_s=10.0)
    play.arrive(a_job(1))
    play.tell(play.never_ran(1))  # due at 10 s
    play.ask(Cancel((1,)), after=1)
    play.ask(Requeue((1,)))
    play.tell(play.never_ran(1), after=4)  # at 5 s, due at 15 s
    assert play.job(1).not_before == T0 + 15
    play.tell(after=6)
    assert play.state(1) is S.PENDING
    play.tell(after=5)
    assert play.state(1) is S.STARTING


def test_a_released_job_continues_its_wait_for_the_next_attempt() -> None:
    play = a_world(1, assign_retry_wait_s=10.0)
    play.arrive(a_job(1))
    play.tell(play.never_ran(1))
    play.ask(Hold((1,)), after=1)
    assert play.reason(1) == "hold-user"
    play.ask(Release((1,)), after=2)
    assert (play.reason(1), play.job(1).reason) == ("backoff", "next attempt in 7 s")
    play.tell(after=7.1)
    assert play.state(1) is S.STARTING


# -- failed runs -------------------------------------------------------------------------------------------


def test_a_failed_job_without_retries_is_not_repeated() -> None:
    """S3.29: A failed job without retries is not run again."""
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1, 1))
    play.tell(after=1000)
    assert play.state(1) is S.FAILED and play.started == [1]


def test_a_failed_job_is_repeated_as_often_as_its_retries_allow() -> None:
    """S3.29: A job with retries is run again as often as it asked for, with growing waits."""
    play = a_world(1, assign_retry_wait_s=5.0)
    play.run(a_job(1, retries=2))
    for run, wait in ((1, 5), (2, 10)):
        plan = play.tell(play.ended(1, 7))
        job = play.job(1)
        assert (job.state, job.runs_failed, job.exit_code, job.gpus) == (S.PENDING, run, None, ())
        assert job.reason == f"failed with exit code 7 (run {run} of 3); next attempt in {wait} s"
        fell = next(event for event in plan.events if event.kind == "retry_scheduled")
        assert (fell.detail["exit_code"], fell.detail["attempt"]) == (7, run)
        play.tell(after=wait - 0.5)
        assert play.state(1) is S.PENDING
        play.tell(after=1)
        play.tell(play.began(1))
    play.tell(play.ended(1, None, signal=11))
    job = play.job(1)
    assert (job.state, job.attempt, job.outcome, job.signal) == (S.FAILED, 3, Outcome.SIGNAL, 11)


def test_a_successful_run_ends_the_retries() -> None:
    play = a_world(1, assign_retry_wait_s=0.0)
    play.run(a_job(1, retries=2))
    play.tell(play.ended(1, 1))
    play.tell(play.began(1))
    play.tell(play.ended(1, 0))
    assert (play.state(1), play.job(1).attempt, play.job(1).exit_code) == (S.DONE, 2, 0)
    assert play.job(1).not_before is None


def test_a_requeue_restores_all_retries_of_a_job() -> None:
    play = a_world(1, assign_retry_wait_s=0.0, oom_retries=1)
    play.run(a_job(1, "0.2", retries=1))
    for failure in (None, OOM, OOM):
        play.tell(play.ended(1, 1, failure=failure))
        if play.state(1) is S.STARTING:
            play.tell(play.began(1))
    job = play.job(1)
    assert (job.state, job.runs_failed, job.oom_retries, job.attempt) == (S.FAILED, 1, 1, 3)
    play.ask(Requeue((1,)))
    assert (play.job(1).runs_failed, play.job(1).oom_retries) == (0, 0)
    for _ in range(2):
        play.tell(play.began(1))
        play.tell(play.ended(1, 1, failure=OOM))
    assert (play.state(1), play.job(1).runs_failed, play.job(1).oom_retries) == (S.STARTING, 1, 1)


def test_several_requeues_of_the_same_attempt_start_one_attempt() -> None:
    """If several users ask to run a job again after attempt 1, the first request starts attempt 2.

    The other requests start nothing. Their users get a message that the job is starting or has run again.
    """
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1, 1))
    wish = Requeue((1,), after=(1,))
    said = [play.ask(wish).answers[0].lines for _ in range(2)]
    assert said == [("job 1 is queued again (it was failed)",), ("job 1 is already starting",)]
    play.tell(play.began(1), play.ended(1, 1))
    (answer,) = play.ask(wish).answers
    assert (answer.code, answer.lines) == (0, ("job 1 has already run again (attempt 2)",))
    assert (play.state(1), play.job(1).attempt) == (S.FAILED, 2)
    play.ask(Requeue((1,), after=(2,)))
    assert play.job(1).attempt == 3
    assert from_row(*to_row(wish)) == wish


# -- out of GPU memory -------------------------------------------------------------------------------------


def test_a_job_that_ran_out_of_gpu_memory_is_retried_at_once_with_twice_the_share() -> None:
    play = a_world(1, oom_retries=2)
    play.run(a_job(1, "0.3"))
    play.tell(play.ended(1, 1, failure=OOM))
    job = play.job(1)
    assert (job.state, job.need, job.oom_retries, job.attempt) == (S.STARTING, ResourceRequest(1, 600), 1, 2)
    assert (job.not_before, job.reason) == (None, "")
    assert job.notes == ("oom: asked 0.3; tried again with 0.6",)
    play.tell(play.began(1))
    play.tell(play.ended(1, 1, failure=OOM))
    assert (play.job(1).need, play.job(1).oom_retries) == (ResourceRequest(1, 1000), 2)
    play.tell(play.began(1))
    play.tell(play.ended(1, 1, failure=OOM))
    job = play.job(1)
    assert (job.state, job.outcome, job.failure) == (S.FAILED, Outcome.EXIT, replace(OOM, oom="own"))
    assert len(job.notes) == 2


@pytest.mark.parametrize(
    ("need", "raised"), [("0.5", "1"), ("0.7", "1"), ("0.001", "0.002"), ("2x0.4", "2x0.8"), ("2x0.9", "2")]
)
def test_a_doubled_share_is_at_most_a_whole_gpu_and_keeps_the_number_of_gpus(need: str, raised: str) -> None:
    play = a_world(2)
    play.run(a_job(1, need))
    play.tell(play.ended(1, 1, failure=OOM))
    assert str(play.job(1).need) == raised


def test_a_job_with_a_doubled_share_waits_for_room() -> None:
    play = a_world(1)
    play.run(a_job(1, "0.5"), a_job(2, "0.5"))
    play.tell(play.ended(1, 1, failure=OOM))
    assert (play.state(1), play.reason(1)) == (S.PENDING, "no-room")
    play.tell(play.ended(2))
    assert (play.state(1), play.job(1).gpus) == (S.STARTING, (0,))


@pytest.mark.parametrize(("need", "oom_retries"), [("1", 2), ("2", 2), ("0", 2), ("0.5", 0)])
def test_out_of_gpu_memory_fails_a_job_whose_share_cannot_be_raised(need: str, oom_retries: int) -> None:
    play = a_world(2, oom_retries=oom_retries)
    play.run(a_job(1, need))
    play.tell(play.ended(1, 1, failure=OOM))
    assert (play.state(1), play.job(1).need) == (S.FAILED, ResourceRequest.parse(need))


def test_other_failures_do_not_raise_the_share() -> None:
    play = a_world(1)
    play.run(a_job(1, "0.5"))
    play.tell(play.ended(1, 1))
    assert (play.state(1), play.job(1).need) == (S.FAILED, ResourceRequest(1, 500))


def test_a_failed_start_clears_the_failure_cause_of_an_earlier_run() -> None:
    play = a_world(1)
    play.run(a_job(1, "0.5"))
    play.tell(play.ended(1, 1, failure=OOM))
    play.tell(play.never_ran(1, "Permission denied", lasting=True))
    assert (play.state(1), play.job(1).outcome) == (S.FAILED, Outcome.COULD_NOT_START)
    assert play.job(1).failure is None
