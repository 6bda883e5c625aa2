"""Tests of backfill: reservations in time, lending, promises, and that no job waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.backfill import LENIENT, LONGEST_SLACK_S, ExpectedEnds
from scheduler.core.engine_placement import EngineFleet, EngineRules
from scheduler.core.gpu import Gpu, ids_of
from scheduler.core.job import Job, JobState
from scheduler.core.observations import EnginePlace, Started
from scheduler.core.placement import Fleet
from scheduler.core.requests import Hold, Release
from scheduler.core.runtime_estimate import ASSUMED, Errors, Estimates
from scheduler.core.topology import Link
from tests.builders import (
    T0,
    Play,
    a_gpu,
    a_job,
    a_kind,
    a_policy,
    a_spec,
    a_world,
    an_instance,
    examples,
    some_gpus,
)

HOUR, DAY = 3600.0, 86400.0


def timed(number: int, need: str, seconds: float, **wish: object) -> Job:
    """Return a job that is known to run for at most ``seconds``."""
    return a_job(number, need, time_limit_s=seconds, submitted_at=T0, **wish)


def waiting_for(*ends: float, need: str = "2", longest: float = HOUR) -> Play:
    """Return a Play in which a job runs on each GPU until one of ``ends``, and job 50 (``need``) has waited a day."""
    play = a_world(len(ends), max_overtakes=10)
    play.run(*(timed(number, "1", end + DAY) for number, end in enumerate(ends, 1)))
    play.arrive(timed(50, need, longest))
    play.tell(after=DAY)
    return play


def test_jobs_that_end_in_time_use_the_reserved_gpus_and_others_wait() -> None:
    play = waiting_for(1000.0, 3000.0)
    plan = play.tell(play.ended(1))
    assert not plan.starts and [one.job for one in play.scheduler.fleet.reserved] == [50]
    play.arrive(timed(60, "1", 30_000.0))
    assert play.state(60) is JobState.PENDING and play.reason(60) == "reserved"
    sentence = play.scheduler.class_reasons()["1x1000/*/0"].sentence
    assert sentence.startswith("GPU 0 is reserved for job 50, whose start is promised within ")
    play.arrive(timed(61, "1", 60.0))
    assert play.started[-1] == 61, "a short job passes the long one of its class, too"


def test_a_job_that_starts_much_later_than_it_has_waited_gets_no_reservation() -> None:
    play = waiting_for(1000.0, 100 * DAY)
    play.tell(play.ended(1))
    assert not play.scheduler.fleet.reserved
    play.arrive(timed(60, "1", DAY))
    assert play.started[-1] == 60


def test_a_start_can_be_expected_as_soon_as_a_run_time_is_known() -> None:
    """The first run time counts at once, so the limit of overtakes does not apply any more."""
    play = a_world(2, max_overtakes=1)
    play.run(a_job(1, "1"), a_job(2, "1"))
    play.arrive(a_job(3, "2"))
    for number in (4, 5):
        play.arrive(a_job(number, "1"))
    play.tell(play.ended(2), after=1.0)
    assert play.started[-1] == 4
    play.tell(play.began(4))
    play.tell(play.ended(4), after=1.0)
    assert play.started[-1] == 5 and not play.scheduler.fleet.reserved


def test_a_job_that_has_waited_less_than_it_runs_gets_no_reservation() -> None:
    play = waiting_for(1000.0, 3000.0, longest=2 * DAY)
    play.tell(play.ended(1))
    assert not play.scheduler.fleet.reserved


def test_a_reservation_ends_when_the_job_starts() -> None:
    play = waiting_for(1000.0, 3000.0)
    play.tell(play.ended(1))
    play.tell(play.ended(2))
    assert play.started[-1] == 50 and not play.scheduler.fleet.reserved and not play.scheduler.queue.promises


def test_missed_promises_become_longer_and_in_the_end_nothing_is_lent() -> None:
    play = waiting_for(1000.0, 3000.0)
    play.tell(play.ended(1))
    lengths, promises = [], play.scheduler.queue.promises
    for missed in range(11):
        assert promises[50].missed == missed
        lengths.append(promises[50].length_s)
        assert (play.scheduler.fleet.reserved[0].lends_for_s is None) == (missed == 10)
        play.tell(after=promises[50].length_s + 1.0)
    assert all(later >= min(2 * earlier, LONGEST_SLACK_S) for earlier, later in pairwise(lengths))
    play.arrive(timed(60, "1", 1.0))
    assert play.state(60) is JobState.PENDING, "after ten missed promises even the shortest job waits"


def test_after_some_missed_promises_jobs_must_end_before_the_expected_start() -> None:
    play = waiting_for(1000.0, 3000.0)
    play.tell(play.ended(1))
    for _ in range(LENIENT):
        play.tell(after=play.scheduler.queue.promises[50].length_s + 1.0)
    lent = play.scheduler.fleet.reserved[0].lends_for_s
    play.scheduler.fleet.open_to_all()
    expected = ExpectedEnds(play.scheduler, play.now).opening(a_kind("2"))
    assert expected is not None and lent == expected.in_s < play.scheduler.queue.promises[50].until - play.mono


def test_where_nothing_is_known_the_number_of_overtakes_counts() -> None:
    play = a_world(2, max_overtakes=2)
    play.scheduler.estimates = Estimates().frozen()
    play.run(a_job(1), a_job(2))
    play.arrive(a_job(50, "2"), *(a_job(number) for number in range(60, 70)))
    for number in (1, 60, 61):
        play.tell(play.ended(number), after=DAY)
    assert play.started[2:] == [60, 61] and play.scheduler.fleet.reserved[0].lends_for_s is None


def test_with_max_overtakes_0_nothing_is_reserved() -> None:
    play = a_world(2)
    play.run(timed(1, "1", DAY + 1000.0), timed(2, "1", DAY + 2000.0))
    play.arrive(timed(50, "2", HOUR))
    play.tell(play.ended(1), after=DAY)
    assert not play.scheduler.fleet.reserved


def test_an_opening_is_on_the_server_where_the_jobs_end_first() -> None:
    play = a_world(2, 2, max_overtakes=10)
    play.run(*(timed(number, "1", seconds) for number, seconds in enumerate((900.0, 50.0, 300.0, 400.0), 1)))
    ends = ExpectedEnds(play.scheduler, play.now)
    opening = ends.opening(a_kind("2"))
    assert opening is not None and opening.mask == 0b1100 and opening.in_s == pytest.approx(400.0)
    assert {use.job for use in opening.waits_for} == {3, 4}
    single = ends.opening(a_kind("1", allowed=(0,)))
    assert single is not None and single.in_s == pytest.approx(900.0)
    assert ends.opening(a_kind("3")) is None, "no server has three GPUs"


PAIRS = (Link.NVLINK, Link.SYSTEM, Link.SYSTEM, Link.SYSTEM, Link.SYSTEM, Link.NVLINK)  # 0 with 1, 2 with 3


def a_linked_world(*ends: float) -> Play:
    """Return a Play with four GPUs in two pairs that are joined by NVLink. A job on each of them ends after ``ends``."""
    play = Play(Fleet(some_gpus(4, links=PAIRS)), policy=a_policy(max_overtakes=10))
    play.run(*(timed(number, "1", seconds) for number, seconds in enumerate(ends, 1)))
    return play


def test_an_opening_for_linked_gpus_is_within_one_group() -> None:
    ends = ExpectedEnds((play := a_linked_world(100.0, 900.0, 200.0, 300.0)).scheduler, play.now)
    plain, linked = ends.opening(a_kind("2")), ends.opening(a_kind("2", link="nvlink"))
    assert plain is not None and (plain.mask, round(plain.in_s)) == (0b0101, 200)
    assert linked is not None and (linked.mask, round(linked.in_s)) == (0b1100, 300)
    assert {use.job for use in linked.waits_for} == {3, 4}
    assert ends.opening(a_kind("3")) is not None and ends.opening(a_kind("3", link="nvlink")) is None
    assert ends.opening(a_kind("3", link="nvlink")) is None


def test_the_reservation_of_a_job_for_linked_gpus_leaves_the_other_group_to_others() -> None:
    """GPU 0 is free first, but the job waits for GPUs 2 and 3, which are joined: other jobs use GPU 0."""
    play = a_linked_world(DAY + 1000.0, 9 * DAY, DAY + 1500.0, DAY + 2000.0)
    play.arrive(timed(50, "2", HOUR, link="nvlink"))
    play.tell(after=DAY)
    assert [ids_of(one.mask) for one in play.scheduler.fleet.reserved] == [(2, 3)]
    play.tell(play.ended(1))
    play.arrive(timed(60, "1", 30_000.0))
    assert play.job(60).gpus == (0,)
    play.tell(play.ended(3))
    play.arrive(timed(61, "1", 30_000.0))
    assert play.reason(61) == "reserved"
    play.arrive(timed(62, "1", 60.0))
    assert play.job(62).gpus == (2,), "only the short job passes"
    play.tell(play.ended(62))
    play.tell(play.ended(4))
    assert play.job(50).gpus == (2, 3)


def test_an_opening_for_an_instance_is_on_one_with_its_profile() -> None:
    gpus = [a_gpu(0, memory_mib=80_000), an_instance(200), an_instance(201), an_instance(202, "3g.40gb")]
    play = Play(Fleet(gpus), policy=a_policy(max_overtakes=10))
    play.run(timed(1, "1", 50.0))
    play.run(timed(2, "mig-1g.10gb", 900.0), timed(3, "mig-1g.10gb", 600.0), timed(4, "mig-3g.40gb", 100.0))
    ends = ExpectedEnds(play.scheduler, play.now)
    found = [ends.opening(a_kind(need)) for need in ("1", "mig-1g.10gb", "mig-3g.40gb")]
    assert [one and (ids_of(one.mask), round(one.in_s)) for one in found] == [((0,), 50), ((201,), 600), ((202,), 100)]
    assert ends.opening(a_kind("mig-7g.80gb")) is None


def test_shares_are_counted_together() -> None:
    play = a_world(1, max_overtakes=10)
    play.run(timed(1, "0.5", 100.0), timed(2, "0.25", 200.0), timed(3, "0.25", 300.0))
    ends = ExpectedEnds(play.scheduler, play.now)
    found = [ends.opening(a_kind(need)) for need in ("0.5", "0.6", "0.8")]
    assert [None if one is None else round(one.in_s) for one in found] == [100, 200, 300]


def test_gpus_of_jobs_without_a_known_run_time_are_not_counted_on() -> None:
    play = a_world(2, max_overtakes=10)
    play.run(timed(1, "1", 100.0), a_job(2))
    ends = ExpectedEnds(play.scheduler, play.now)
    assert ends.opening(a_kind("1")) is not None and ends.opening(a_kind("2")) is None


@examples(40)
@given(
    st.lists(st.sampled_from([("1", 600), ("1", 5000), ("0.5", 900), ("2", 3000)]), min_size=1, max_size=4),
    st.floats(0.2, 6.0),
    st.integers(1, 4),
)
def test_each_wide_job_starts_however_wrong_the_estimates_are(
    stream: list[tuple[str, int]], factor: float, most: int
) -> None:
    """Jobs keep arriving, each runs ``factor`` times as long as expected. The wide job starts all the same."""
    play = a_world(4, max_overtakes=most)
    number, ends = 100, {}
    for need in ("1", "1", "1", "1"):
        number += 1
        play.arrive(timed(number, need, 5000.0))
    play.arrive(timed(50, "4", 1000.0))
    for step in range(4000):
        if play.state(50) is not JobState.PENDING:
            break
        need, seconds = stream[step % len(stream)]
        number += 1
        play.arrive(timed(number, need, float(seconds)), after=300.0)
        for job in play.scheduler.live.values():
            ends.setdefault(job.id, play.wall + (job.spec.time_limit_s or 0.0) * factor)
        play.tell(*(play.ended(job) for job in list(play.scheduler.live) if ends[job] <= play.wall))
    assert play.state(50) is not JobState.PENDING, "it starved"


def test_quantiles_of_errors_come_from_what_is_known_and_first_from_what_is_assumed() -> None:
    errors = Errors()
    assert errors.quantile(0.0) == ASSUMED[0] and errors.quantile(1.0) == ASSUMED[-1]
    for _ in range(300):
        errors.add(3.0)
    assert errors.quantile(0.0) == errors.quantile(0.99) == 3.0
    assert errors.quantile(0.5, above=3.0) is None
    for factor in (1.0, 2.0) * 100:
        errors.add(factor)
    assert (errors.quantile(0.25), errors.quantile(0.75)) == (1.0, 2.0)


def test_the_expected_run_time_grows_while_a_job_outlives_it() -> None:
    estimates = Estimates()
    estimates.learn(a_spec(), a_job(1).need, 100.0)
    expected = estimates.expected(a_spec(), a_job(1).need)
    assert expected is not None and expected.source == "one run of the same script and model"
    assert estimates.run_s(expected, 0.5) == 100.0
    assert estimates.run_s(expected, 0.5, ran_s=150.0) > 150.0
    assert estimates.run_s(expected, 0.5, ran_s=1000.0) == 2000.0
    limit = estimates.expected(a_spec(time_limit_s=50.0), a_job(1).need)
    assert limit is not None and limit.source == "its time limit"
    assert estimates.run_s(limit, 0.99) == 50.0 == estimates.run_s(limit, 0.5, ran_s=50.0)


def wait_of(play: Play, wide: Job, stream: Callable[[int], Job], code: int) -> float:
    """Return how long a wide job waits (days, at most 60) while a job arrives and one ends, with this code, every half hour."""
    begun, number = play.wall, 100
    play.arrive(wide)
    while play.wall < begun + 60 * DAY:
        number += 1
        play.arrive(stream(number))
        play.tell(play.ended(min(play.scheduler.live), code), after=HOUR / 2)
        for job in play.plan.starts:
            play.tell(began(play, job.id))
        if play.state(wide.id) is not JobState.PENDING:
            break
    return (play.wall - begun) / DAY


def began(play: Play, number: int) -> Started:
    """Return the observation that a job has started; on a cluster, on the GPUs that were booked for it."""
    fleet, told = play.scheduler.fleet, play.began(number)
    if not isinstance(fleet, EngineFleet):
        return told
    gpus = [fleet.gpus[gpu] for gpu in play.scheduler.released[number] or ()]
    return replace(told, place=EnginePlace(gpus[0].node, tuple(gpu.uuid for gpu in gpus)))


@pytest.mark.parametrize(
    ("case", "most_days"),
    [
        ("no run time", 0.5),
        ("long limit", 8.0),
        ("submitted in the future", 2.0),
        ("failing jobs", 12.0),
        ("cluster", 2.0),
    ],
)
def test_no_wide_job_waits_for_ever(case: str, most_days: float) -> None:
    """Jobs keep arriving. The wide job starts, whatever is known of it and of them."""
    fleet = Fleet(some_gpus(2))
    if case == "cluster":
        fleet = EngineFleet([Gpu(i, f"g1/{i}", node="g1") for i in range(2)], EngineRules("Slurm", 0), 8)
    play, small = Play(fleet, policy=a_policy(max_overtakes=10)), "0.5" if case == "cluster" else "1"
    wide, stream = timed(50, "2", HOUR), lambda number: timed(number, small, HOUR)
    if case == "no run time":
        wide = a_job(50, "2", submitted_at=T0)
    elif case == "long limit":
        wide = timed(50, "2", 60 * DAY)
    elif case == "submitted in the future":
        wide.submitted_at = T0 + 3650 * DAY
    elif case == "failing jobs":  # they run an hour instead of a minute, and nothing is learned of them
        play.scheduler.estimates.learn(a_job(1).spec, a_job(1).need, 60.0)
        wide, stream = a_job(50, "2"), lambda number: a_job(number, small)
    play.arrive(stream(1), stream(2))
    play.tell(*(began(play, job) for job in (1, 2)))
    assert wait_of(play, wide, stream, 1 if case in ("failing jobs", "no run time") else 0) <= most_days


def test_time_in_which_a_job_is_held_is_no_waiting() -> None:
    play = a_world(2, max_overtakes=10)
    play.run(timed(1, "1", 30 * DAY), timed(2, "1", 31 * DAY))
    play.arrive(timed(50, "2", HOUR))
    play.ask(Hold((50,)))
    play.tell(after=8 * DAY)
    play.ask(Release((50,)))
    play.tell(play.ended(1))
    assert not play.scheduler.fleet.reserved


def test_one_job_has_one_reservation() -> None:
    play = waiting_for(1000.0, 3000.0)
    play.tell(play.ended(1))
    mine = play.scheduler.fleet.reserved[0]
    play.scheduler.fleet.reserve_until_start(50, mine.kind, 0b10, 5.0)
    assert play.scheduler.fleet.reserved == [mine]
