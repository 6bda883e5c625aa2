"""Tests of jobs that are ended by a request or at their time limit.

Such a job gets SIGTERM. If it still runs after the grace time, it gets SIGKILL.
"""

from __future__ import annotations

import pytest

from scheduler.core.gpu import WHOLE
from scheduler.core.job import JobState, Outcome, Process
from scheduler.core.observations import Arrived, Asked, Gone, Unclaimed
from scheduler.core.requests import Cancel, Requeue
from tests.builders import T0, Play, a_job, a_world

S = JobState
LEFT = (Process(4712, 6),)


def stops(play: Play) -> list[tuple[int, bool]]:
    return [(stop.job.id, stop.hard) for stop in play.plan.stops]


# -- cancel ------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled_at_once() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2))
    plan = play.ask(Cancel((2,)))
    job = play.job(2)
    assert (job.state, job.outcome, job.finished_at, job.attempt) == (S.CANCELLED, Outcome.CANCELLED, T0, 0)
    assert plan.answers[0].lines == ("job 2 was cancelled before it ran",) and plan.answers[0].code == 0
    assert play.scheduler.waiting() == 0 and not plan.stops
    play.tell(play.ended(1))
    assert play.started == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"held": True},
        {"not_before": T0 + 60},
        {"after": (1,)},
        {"script": "/gone.py"},
    ],
)
def test_a_held_delayed_dependent_or_scriptless_job_is_cancelled_at_once(changes: dict[str, object]) -> None:
    play = a_world(2, missing=lambda job: "no such file" if job.spec.script == "/gone.py" else "")
    play.run(a_job(1))
    play.arrive(a_job(2, **changes))
    play.ask(Cancel((2,)))
    play.tell(play.ended(1), after=120)
    assert play.state(2) is S.CANCELLED and play.scheduler.waiting() == 0 and play.started == [1]


def test_a_job_cancelled_in_the_pass_of_its_arrival_never_starts() -> None:
    play = a_world(1)
    plan = play.tell(Arrived(a_job(1)), Asked(1, Cancel((1,))))
    assert play.state(1) is S.CANCELLED and not plan.starts


def test_a_cancelled_running_job_gets_sigterm_and_sigkill_after_the_grace_time() -> None:
    play = a_world(1, kill_grace_s=15.0)
    play.run(a_job(1))
    plan = play.ask(Cancel((1,)), after=10)
    assert stops(play) == [(1, False)]
    assert (play.state(1), play.job(1).stop_why, play.job(1).stop_at) == (S.STOPPING, "cancelled", T0 + 10)
    assert plan.answers[0].lines == ("job 1: SIGTERM to all its processes, SIGKILL after 15 s",)
    assert play.scheduler.fleet.free[0] == 0
    play.tell(after=14.9)
    assert stops(play) == []
    play.tell(after=0.2)
    assert stops(play) == [(1, True)]
    play.tell(after=1.1)
    assert stops(play) == [(1, True)]
    play.tell(play.ended(1, None, signal=9))
    assert (play.state(1), play.job(1).outcome, play.job(1).signal) == (S.CANCELLED, Outcome.CANCELLED, 9)
    assert play.scheduler.fleet.free[0] == WHOLE
    play.tell(after=60)
    assert stops(play) == []


@pytest.mark.parametrize("code", [0, 1])
def test_a_cancelled_job_ends_as_cancelled_with_any_exit_code(code: int) -> None:
    play = a_world(1)
    play.run(a_job(1, retries=3))
    play.ask(Cancel((1,)))
    play.tell(play.ended(1, code))
    assert (play.state(1), play.job(1).exit_code) == (S.CANCELLED, code)


def test_a_cancelled_starting_job_is_stopped_as_soon_as_it_has_a_process() -> None:
    play = a_world(1)
    play.arrive(a_job(1))
    play.ask(Cancel((1,)))
    assert (play.state(1), stops(play)) == (S.STOPPING, [])
    play.tell(play.began(1))
    assert stops(play) == [(1, False)]
    play.tell(play.ended(1, None, signal=15))
    assert play.state(1) is S.CANCELLED


def test_a_cancelled_starting_job_without_a_process_gets_no_sigkill() -> None:
    play = a_world(1, kill_grace_s=2.0)
    play.arrive(a_job(1))
    play.ask(Cancel((1,)))
    play.tell(after=2.5)
    assert stops(play) == []
    play.tell(play.began(1), after=0.1)
    assert stops(play) == [(1, False)]
    play.tell(after=1.0)
    assert stops(play) == [(1, True)]


def test_a_cancelled_job_that_never_ran_is_cancelled() -> None:
    for observation in ("never_ran", "unclaimed"):
        play = a_world(1)
        play.arrive(a_job(1))
        play.ask(Cancel((1,)))
        play.tell(play.never_ran(1) if observation == "never_ran" else Unclaimed(1, 1))
        assert (play.state(1), play.job(1).outcome) == (S.CANCELLED, Outcome.CANCELLED)
        assert play.scheduler.fleet.free[0] == WHOLE


def test_a_cancelled_job_whose_end_is_unknown_is_cancelled() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.ask(Cancel((1,)))
    play.tell(play.lost(1))
    assert (play.state(1), play.job(1).outcome) == (S.CANCELLED, Outcome.CANCELLED)


def test_a_cancelled_job_ends_only_when_its_leftover_processes_are_gone() -> None:
    play = a_world(1, kill_grace_s=15.0)
    play.run(a_job(1))
    play.ask(Cancel((1,)))
    plan = play.tell(play.ended(1, None, signal=15, leftovers=LEFT))
    assert play.state(1) is S.STOPPING and not plan.held
    assert play.scheduler.fleet.free[0] == 0
    play.tell(after=16)
    assert stops(play) == [(1, True)]
    play.tell(Gone("1.1"))
    assert (play.state(1), play.job(1).signal) == (S.CANCELLED, 15)
    assert play.scheduler.fleet.free[0] == WHOLE and not play.scheduler.leader_ended


def test_the_answer_to_a_repeated_or_late_cancel_says_why_nothing_happened() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.ask(Cancel((1,)))
    assert play.ask(Cancel((1,))).answers[0].lines == ("job 1 is already being stopped",)
    play.tell(play.ended(1))
    plan = play.ask(Cancel((1, 77)))
    assert plan.answers[0].lines == ("job 1 has already ended (cancelled)", "there is no job 77")
    assert plan.answers[0].code == 6


# -- the time limit ----------------------------------------------------------------------------------------


def test_a_job_at_its_time_limit_gets_sigterm_and_sigkill_after_the_grace_time() -> None:
    play = a_world(1, kill_grace_s=15.0)
    play.run(a_job(1, time_limit_s=60.0))
    play.tell(after=59)
    assert stops(play) == []
    play.tell(after=1.5)
    assert (stops(play), play.state(1), play.job(1).stop_why) == ([(1, False)], S.STOPPING, "time_limit")
    play.tell(after=15)
    assert stops(play) == [(1, True)]
    play.tell(play.ended(1, None, signal=9))
    assert (play.state(1), play.job(1).outcome, play.job(1).signal) == (S.FAILED, Outcome.TIME_LIMIT, 9)


def test_the_time_limit_counts_from_the_start_not_from_the_arrival() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2, time_limit_s=60.0))
    play.tell(play.ended(1), after=100)
    play.tell(play.began(2), after=0)
    play.tell(after=59)
    assert play.state(2) is S.RUNNING
    play.tell(after=2)
    assert play.state(2) is S.STOPPING


def test_the_time_limit_of_an_ended_job_stops_no_other_job() -> None:
    play = a_world(1)
    play.run(a_job(1, time_limit_s=60.0))
    play.tell(play.ended(1), after=10)
    play.run(a_job(2))
    play.tell(after=100)
    assert stops(play) == [] and (play.state(1), play.state(2)) == (S.DONE, S.RUNNING)


def test_a_cancelled_job_that_reaches_its_time_limit_stays_cancelled() -> None:
    play = a_world(1, kill_grace_s=15.0)
    play.run(a_job(1, time_limit_s=60.0))
    play.ask(Cancel((1,)), after=55)
    play.tell(after=6)
    assert (play.state(1), play.job(1).stop_why, stops(play)) == (S.STOPPING, "cancelled", [])
    play.tell(play.ended(1, None, signal=15))
    assert play.job(1).outcome is Outcome.CANCELLED


def test_each_attempt_has_its_own_full_time_limit() -> None:
    play = a_world(1, assign_retry_wait_s=0.0)
    play.run(a_job(1, time_limit_s=60.0, retries=1))
    play.tell(play.ended(1, 1), after=50)
    play.tell(play.began(1))
    play.tell(after=30)
    assert play.state(1) is S.RUNNING
    play.tell(after=31)
    assert play.state(1) is S.STOPPING


def test_a_job_that_reached_its_time_limit_is_retried_if_it_has_retries() -> None:
    play = a_world(1, assign_retry_wait_s=0.0)
    play.run(a_job(1, time_limit_s=60.0, retries=1))
    play.tell(after=61)
    play.tell(play.ended(1, None, signal=15))
    assert (play.state(1), play.job(1).attempt, play.job(1).stop_why) == (S.STARTING, 2, "")


def test_a_job_cancelled_while_its_time_limit_ends_it_is_not_repeated() -> None:
    play = a_world(1, assign_retry_wait_s=0.0)
    play.run(a_job(1, time_limit_s=60.0, retries=1))
    play.tell(after=61)
    assert play.state(1) is S.STOPPING
    assert play.ask(Cancel((1,))).answers[0].code == 0
    play.tell(play.ended(1, None, signal=15))
    assert play.state(1) is S.CANCELLED


@pytest.mark.parametrize(("ran", "left"), [(0.0, 60.0), (45.0, 15.0), (500.0, 0.0)])
def test_the_time_limit_continues_after_a_restart(ran: float, left: float) -> None:
    play = a_world(1)
    job = a_job(1, state=S.RUNNING, attempt=1, gpus=(0,), process=Process(5, 5), started_at=T0 - ran, time_limit_s=60.0)
    play.rows[1] = job
    play.scheduler.adopt(job, play.now)
    assert play.scheduler.next_timer() == play.mono + left
    play.tell(after=left)
    assert play.state(1) is S.STOPPING


@pytest.mark.parametrize(("asked_ago", "left"), [(0.0, 15.0), (10.0, 5.0), (500.0, 3.0), (-500.0, 15.0)])
def test_the_grace_time_continues_after_a_restart(asked_ago: float, left: float) -> None:
    play = a_world(1, kill_grace_s=15.0)
    job = a_job(
        1, state=S.STOPPING, attempt=1, gpus=(0,), process=Process(5, 5), started_at=T0 - 600,
        stop_why="cancelled", stop_at=T0 - asked_ago,
    )  # fmt: skip
    play.rows[1] = job
    play.scheduler.adopt(job, play.now)
    play.tell()  # SIGTERM again: the killed daemon may not have sent it
    assert (1, False) in stops(play)
    assert play.scheduler.next_timer() == play.mono + left
    play.tell(after=left)
    assert (1, True) in stops(play)


# -- running a job again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["done", "failed", "cancelled", "lost"])
def test_a_requeued_job_keeps_its_id_and_gets_a_new_attempt(end: str) -> None:
    play = a_world(1)
    play.run(a_job(1))
    if end == "cancelled":
        play.ask(Cancel((1,)))
    play.tell(play.lost(1) if end == "lost" else play.ended(1, int(end == "failed")))
    before = play.state(1)
    plan = play.ask(Requeue((1,)))
    assert plan.answers[0].lines == (f"job 1 is queued again (it was {before.value})",)
    job = play.job(1)
    assert (job.state, job.attempt, job.exit_code, job.outcome, job.failure) == (S.STARTING, 2, None, None, None)
    assert (job.runs_failed, job.start_failures, job.oom_retries, job.stop_why) == (0, 0, 0, "")


def test_a_job_that_has_not_ended_cannot_be_requeued() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2))
    plan = play.ask(Requeue((1, 2, 3)))
    assert plan.answers[0].lines == ("job 1 is already running", "job 2 is already pending", "there is no job 3")
    assert plan.answers[0].code == 6
    assert play.started == [1]


def test_a_cancel_after_a_requeue_in_one_pass_leaves_the_job_cancelled() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1, 1))
    plan = play.tell(Asked(1, Requeue((1,))), Asked(2, Cancel((1,))))
    assert [answer.lines[0] for answer in plan.answers] == [
        "job 1 is queued again (it was failed)",
        "job 1 was cancelled before it ran",
    ]
    assert play.state(1) is S.CANCELLED and play.started == [1]
