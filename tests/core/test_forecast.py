"""Tests of predictions: the simulation, bands, and that a prediction changes nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.core.forecast import ALIKE, MIXED, SCENARIOS, Forecast, Prediction
from scheduler.core.job import Job, JobState
from scheduler.core.requests import Hold, PauseQueue
from scheduler.core.runtime_estimate import Estimates
from scheduler.core.simulation import Simulation, copy_of, seconds_until
from tests.builders import Play, a_job, a_world, check_ledger


def timed(number: int, need: str, seconds: float, **wish: object) -> Job:
    """Return a job with a time limit, which is its expected run time."""
    return a_job(number, need, time_limit_s=seconds, **wish)


def predicted(play: Play, most: int = 400) -> dict[int, Prediction]:
    """Return the predictions for the state of a Play. Fail if the state has changed meanwhile."""
    before = repr((play.scheduler.live, play.scheduler.queue.sizes(), play.scheduler.fleet.free, play.scheduler.parked))
    forecast = Forecast(play.scheduler, play.now, most)
    forecast.simulate()
    after = repr((play.scheduler.live, play.scheduler.queue.sizes(), play.scheduler.fleet.free, play.scheduler.parked))
    assert before == after
    check_ledger(play.scheduler)
    return forecast.predictions()


def exact(play: Play) -> Play:
    """Let the estimates of a Play have no errors: each earlier job ran exactly as long as its limit."""
    for number in range(300):
        play.scheduler.estimates.learn(timed(9000 + number, "1", 100.0).spec, a_job(1).need, 100.0)
    return play


def test_starts_and_ends_follow_from_the_run_times() -> None:
    play = exact(a_world(2))
    play.run(timed(1, "1", 100.0), timed(2, "1", 300.0))
    play.arrive(timed(3, "2", 50.0), timed(4, "1", 20.0))
    found = predicted(play)
    assert {number: (one.start and one.start.middle, one.end and one.end.middle) for number, one in found.items()} == {
        1: (None, 100.0), 2: (None, 300.0), 3: (300.0, 350.0), 4: (100.0, 120.0),
    }  # fmt: skip
    assert found[3].gpus == (0, 1) and found[4].gpus == (0,) and found[1].gpus == (0,)
    assert found[3].expected is not None and found[3].expected.source == "its time limit"


def test_a_band_reaches_from_the_first_to_the_last_scenario() -> None:
    play = a_world(1)
    play.run(a_job(1))
    for factor in (1.0, 2.0, 4.0) * 70:
        play.scheduler.estimates.learn(a_job(1).spec, a_job(1).need, 100.0 * factor)
    end = predicted(play)[1].end
    assert end is not None and end.first < end.middle < end.last and len(SCENARIOS) == MIXED + len(ALIKE)


def test_what_ran_already_counts() -> None:
    play = exact(a_world(1))
    play.run(timed(1, "1", 100.0))
    play.tell(after=60.0)
    end = predicted(play)[1].end
    assert end is not None and end.middle == pytest.approx(40.0)


def test_the_end_of_a_job_that_outlives_its_estimate_is_hardly_known() -> None:
    """It may end soon, or run for a long time; half of such jobs run as long again."""
    play = a_world(1)
    play.scheduler.estimates.learn(a_job(1).spec, a_job(1).need, 10.0)
    play.run(a_job(1))
    play.tell(after=500.0)
    end = predicted(play)[1].end
    assert end is not None and end.middle == pytest.approx(500.0)
    assert end.first < 50.0 and end.last > 5000.0


def test_without_any_run_time_nothing_is_predicted() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2))
    found = predicted(play)
    assert found[1].end is None and 2 not in found


def test_jobs_that_wait_for_others_follow_them_and_held_jobs_do_not_start() -> None:
    play = exact(a_world(1))
    play.run(timed(1, "1", 100.0))
    play.arrive(timed(2, "1", 10.0, after_ok=(1,)), timed(3, "1", 10.0, after=(2,)), timed(4, "1", 10.0))
    play.ask(Hold((4,)))
    found = predicted(play)
    assert [found[number].start and found[number].start.middle for number in (2, 3)] == [100.0, 110.0]
    assert 4 not in found


def test_a_paused_queue_starts_nothing() -> None:
    play = exact(a_world(1))
    play.ask(PauseQueue(True))
    play.arrive(timed(1, "1", 10.0))
    assert predicted(play) == {}


def test_only_the_first_starts_are_simulated() -> None:
    play = exact(a_world(1))
    play.arrive(*(timed(number, "1", 10.0) for number in range(1, 50)))
    found = predicted(play, most=5)
    assert sorted(found) == [1, 2, 3, 4, 5, 6], "one runs, five start"


def test_a_simulation_runs_to_the_end_and_its_copy_changes_nothing() -> None:
    play = exact(a_world(2))
    play.run(timed(1, "1", 100.0))
    play.arrive(timed(2, "2", 30.0), timed(3, "0.5", 10.0))
    state = copy_of(play.scheduler)
    simulation = Simulation(state, play.now, lambda job: job.spec.time_limit_s or 0.0)
    for job in list(state.live.values()):
        simulation.end(job, 100.0)
    seen = [(one.at, one.what, one.job.id) for one in simulation.run()]
    ends = [(at, job) for at, what, job in seen if what == "end"]
    assert (130.0, 2) in ends and not state.live and not len(state.queue)
    assert play.state(1) is JobState.RUNNING and len(play.scheduler.queue) == 1
    assert play.scheduler.estimates.of(a_job(1).spec, a_job(1).need) == 100.0


def test_a_copy_of_a_long_queue_has_the_first_jobs_of_each_class() -> None:
    play = a_world(1)
    play.scheduler.estimates = Estimates().frozen()
    play.run(a_job(1))
    play.arrive(*(a_job(number, "1" if number % 2 else "0.5", priority=-number) for number in range(2, 40)))
    copied = copy_of(play.scheduler, 3).queue
    assert len(copied) == 6
    kept = [job for job, _ in copied.in_order()]
    assert all(job in copied for job in (39, 38, 37, 36, 35, 34)) and kept[0] == 39


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e8))
@example(26_100.1, 61_742.65799680081)
def test_a_timer_of_a_simulation_is_due_at_the_time_that_is_computed_for_it(start: float, timer: float) -> None:
    """Otherwise the simulation does not end: `plan` and `why` did not return on machines that were started a short time ago."""
    found = start + seconds_until(timer, start)
    assert timer <= found <= timer + 3 * math.ulp(max(timer, start, abs(timer - start)))
