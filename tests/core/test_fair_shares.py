"""The use of a user, decayed over time: what counts, and how an end that is noticed late is corrected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decide import decide
from scheduler.core.fair_shares import decayed, shares_used
from scheduler.core.gpu import Gpu
from scheduler.core.job import Process
from scheduler.core.neighbours import Neighbour, Neighbours, Sharing
from scheduler.core.observations import Arrived, Ended, Now, Started
from scheduler.core.own_document import own_document
from scheduler.core.placement import Fleet
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.shared_bookings import Booking, Document
from tests.builders import M0, T0, a_job

DAY, HOUR = 86_400.0, 3600.0
SPANS = st.floats(0, 1e6)


def test_use_is_halved_in_a_half_life_and_a_rate_adds_to_it() -> None:
    assert decayed(100.0, DAY, DAY) == pytest.approx(50.0)
    assert decayed(0.0, 10.0, DAY, rate=0.5) == pytest.approx(5.0, rel=1e-3)
    assert decayed(7.0, -5.0, DAY, rate=3.0) == 7.0, "a clock that goes back adds nothing"


@given(SPANS, SPANS, st.floats(0, 1e6), st.floats(0, 8))
def test_use_does_not_depend_on_how_often_it_is_counted(one: float, two: float, used: float, rate: float) -> None:
    twice = decayed(decayed(used, one, DAY, rate), two, DAY, rate)
    assert decayed(used, one + two, DAY, rate) == pytest.approx(twice, rel=1e-6, abs=1e-6)


@given(SPANS, SPANS, st.floats(0.1, 8))
def test_an_end_that_is_noticed_late_leaves_the_use_until_the_end(ran: float, late: float, gpus: float) -> None:
    sharing = Sharing(used=decayed(0.0, ran + late, DAY, gpus), used_at=1.0)
    sharing.take_back(1.0, late, gpus)
    assert sharing.used == pytest.approx(decayed(decayed(0.0, ran, DAY, gpus), late, DAY), rel=1e-6, abs=1e-3)


def test_a_scheduler_that_was_down_counts_a_job_until_its_end() -> None:
    """The job ran for an hour; the scheduler started again two hours after the end."""
    state = SchedulerState(Fleet([Gpu(0, "GPU-a")]), {1: a_job(1)}.get)
    sharing = state.sharing = Sharing("me")
    begin, end = Now(T0, M0, 1000.0), Now(T0 + 3 * HOUR, M0 + 3 * HOUR, 1000.0 + 3 * HOUR)

    def count(now: Now) -> None:
        own_document(state, now, "k", "boot", None, (), 0)

    plan = decide(state, [Neighbours(begin.since_boot or 0.0), Arrived(a_job(1))], begin)
    (job,) = plan.starts
    decide(state, [Started(job.id, job.attempt, Process(1, 100_000), begin.wall)], begin)
    count(begin)
    decide(state, [Ended(job.id, job.attempt, 0, None, T0 + HOUR)], end)
    count(end)
    assert sharing.used == pytest.approx(decayed(decayed(0.0, HOUR, DAY, 1.0), 2 * HOUR, DAY), rel=1e-6)


def test_the_use_of_a_user_is_the_sum_over_schedulers_and_leases() -> None:
    living = Document("a", "boot", used=100.0, used_at=50.0, bookings=(Booking("GPU-a", 500),))
    ended = Document("b", "boot", used=200.0, used_at=0.0)
    sharing = Sharing("me", weights={"lab3": 2.0}, used=50.0, used_at=100.0)
    sharing.take(Neighbours(100.0, (Neighbour("lab3", False, living),), (Neighbour("lab3", False, ended),)), ())
    standings = sharing.standings()
    assert standings["lab3"].used == pytest.approx(decayed(100.0, 50.0, DAY, 0.5) + decayed(200.0, 100.0, DAY))
    assert (standings["lab3"].rate, standings["lab3"].weight, standings["me"].used) == (0.5, 2.0, 50.0)
    used, fair = shares_used(standings, "me")
    assert fair == 1.0 and used == pytest.approx(50.0 / (50.0 + standings["lab3"].used) * 3)
