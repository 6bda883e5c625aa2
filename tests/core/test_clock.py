"""Tests of clock changes: waits use the monotonic clock, so a change of the wall clock does not affect them."""

from __future__ import annotations

import pytest

from scheduler.core.backoff import LONGEST_WAIT_S
from scheduler.core.decide import decide
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec, JobState, Process
from scheduler.core.observations import Arrived, Now
from scheduler.core.placement import Fleet
from scheduler.core.requests import Cancel
from scheduler.core.runtime_estimate import Estimates
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.units import span_text, utc
from scheduler.views.render import run_time
from tests.builders import M0, T0, a_job, a_policy, a_world, some_gpus

S = JobState
YEARS = 10 * 365 * 86400.0
JUMPS = pytest.mark.parametrize("jump", [-3600.0, YEARS, -YEARS], ids=["hour back", "years ahead", "years back"])


@JUMPS
def test_g01_retries_follow_the_monotonic_clock(jump: float) -> None:
    """G01: A retry starts neither early nor late when the wall clock jumps."""
    play = a_world(1, assign_retry_wait_s=5.0)
    play.arrive(a_job(1))
    play.tell(play.never_ran(1))
    play.wall += jump
    play.tell(after=4.9)
    assert play.state(1) is S.PENDING
    play.tell(after=0.2)
    assert (play.state(1), play.job(1).attempt) == (S.STARTING, 2)


@JUMPS
def test_g01_a_clock_jump_does_not_change_time_limit_and_grace(jump: float) -> None:
    """G01: A jump of the wall clock changes neither the time limit of a job nor its grace time."""
    play = a_world(1, kill_grace_s=15.0)
    play.run(a_job(1, time_limit_s=60.0))
    play.wall += jump
    assert not play.tell(after=59.0).stops
    (soft,) = play.tell(after=1.5).stops
    play.wall -= jump
    assert not soft.hard and not play.tell(after=14.0).stops
    (hard,) = play.tell(after=1.5).stops
    assert hard.hard


@JUMPS
def test_g01_a_restart_after_a_clock_jump_ends_no_job_early(jump: float) -> None:
    """G01, P6: After a restart, a job's run time is counted from the start of its process.

    The wall clock is not used for this.
    """
    job = a_job(1, time_limit_s=60.0, state=S.RUNNING, gpus=(0,), attempt=1, started_at=T0, process=Process(9, 500_00))
    state = SchedulerState(Fleet(some_gpus(1)), {1: job}.get, a_policy())
    state.adopt(job, Now(T0 + jump, M0, since_boot=540.0))  # the job began 500 s after boot
    assert not decide(state, [], Now(T0 + jump, M0 + 19.0)).stops
    assert decide(state, [], Now(T0 + jump, M0 + 20.5)).stops


@JUMPS
def test_g01_after_restart_and_clock_jump_a_retry_waits_at_most_the_longest_wait(jump: float) -> None:
    """G01: After a restart of the scheduler, a retry waits at most LONGEST_WAIT_S, the longest wait of the back-off.

    If a cancelled job still runs at the restart, it gets SIGKILL at most one grace time after the restart. Both hold
    for each jump of the wall clock.
    """
    job = a_job(1, attempt=1, not_before=T0 + 5.0)
    play = a_world(1)
    play.wall += jump
    play.tell(Arrived(job))
    play.tell(after=LONGEST_WAIT_S + 1)
    assert play.state(1) is S.STARTING
    cancelled = a_job(
        2, state=S.STOPPING, stop_why="cancelled", stop_at=T0, gpus=(0,), attempt=1, process=Process(9, 9)
    )
    state = SchedulerState(Fleet(some_gpus(1)), {2: cancelled}.get, a_policy(kill_grace_s=15.0))
    state.adopt(cancelled, Now(T0 + jump, M0))
    stops = decide(state, [], Now(T0 + jump, M0 + 15.1)).stops
    assert [stop.hard for stop in stops] == [False, True]


@JUMPS
def test_g01_jobs_of_equal_priority_start_in_order_of_arrival(jump: float) -> None:
    """G01: Jobs of equal priority start in the order in which they arrived, whatever their submission times are."""
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2, submitted_at=T0))
    play.wall += jump
    play.arrive(a_job(3, submitted_at=play.wall), a_job(4, submitted_at=play.wall))
    for number in (1, 2, 3):
        play.tell(play.ended(number))
        play.tell(play.began(number + 1))
    assert play.started == [1, 2, 3, 4]


def test_g01_durations_are_never_negative() -> None:
    job = a_job(1, state=S.DONE, started_at=T0, finished_at=T0 - 3600)
    assert run_time(job, T0) == "0 s" and run_time(a_job(1, state=S.RUNNING, started_at=T0), T0 - 9) == "0 s"
    assert span_text(-YEARS) == "0 s"
    learned = Estimates()
    learned.learn(JobSpec(script="/a.py"), ResourceRequest.parse("1"), -3600.0)
    assert learned.of(JobSpec(script="/a.py"), ResourceRequest.parse("1")) == 0.0


def test_g02_times_are_utc_and_correct_after_2038() -> None:
    """G02: Times are UTC and correct around 2^31 seconds, a leap second, and a change to summer time."""
    for seconds, text in (
        (2**31 - 1, "2038-01-19T03:14:07.000Z"), (2**31, "2038-01-19T03:14:08.000Z"), (2**32, "2106-02-07T06:28:16.000Z"),
        (1483228799, "2016-12-31T23:59:59.000Z"), (1483228800, "2017-01-01T00:00:00.000Z"),
        (1774745999, "2026-03-29T00:59:59.000Z"), (1774746000, "2026-03-29T01:00:00.000Z"),
    ):  # fmt: skip
        assert utc(float(seconds)) == text


def test_g03_suspend_of_the_machine_causes_no_timeout() -> None:
    """G03: If the machine sleeps for eight hours, only the wall clock advances, and no job exceeds its time limit."""
    play = a_world(4, kill_grace_s=15.0, assign_retry_wait_s=30.0)
    play.run(*(a_job(n, time_limit_s=60.0) for n in (1, 2, 3)))
    play.arrive(a_job(4))
    play.tell(play.never_ran(4))
    play.ask(Cancel((3,)))
    before = len(play.journal)
    play.wall += 8 * 3600
    plan = play.tell(after=0.1)
    assert plan.empty and not plan.stops and len(play.journal) == before
    assert [play.state(n) for n in (1, 2, 3, 4)] == [S.RUNNING, S.RUNNING, S.STOPPING, S.PENDING]
    (hard,) = play.tell(after=15.0).stops
    assert hard.hard and hard.job.id == 3
    assert not play.tell(play.ended(3, None, signal=9), after=1.0).stops
    assert play.tell(after=15.0).starts[0].id == 4
