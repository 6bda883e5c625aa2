"""Tests of the back-off: a wait is twice as long as the last wait, and at most ten minutes.

Each wait varies at random by up to a tenth.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.backoff import LONGEST_WAIT_S, Backoff, backoff_s


@pytest.mark.parametrize(
    ("attempt", "wait"), [(1, 5), (2, 10), (3, 20), (4, 40), (5, 80), (7, 320), (8, 600), (60, 600), (10**9, 600)]
)
def test_a_wait_doubles_with_each_attempt_up_to_ten_minutes(attempt: int, wait: float) -> None:
    assert backoff_s(attempt, 5.0, 0.5) == wait


@given(st.integers(1, 5000), st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_a_wait_varies_by_at_most_a_tenth_and_stays_below_the_limit(attempt: int, base: float, jitter: float) -> None:
    wait, middle = backoff_s(attempt, base, jitter), base * 2.0 ** min(attempt - 1, 40)
    assert 0 <= wait <= LONGEST_WAIT_S
    if middle * 1.1 < LONGEST_WAIT_S:
        assert middle * 0.899 <= wait <= middle * 1.101
    assert wait <= backoff_s(attempt + 1, base, jitter)


def test_a_base_wait_of_zero_means_no_wait() -> None:
    assert backoff_s(9, 0.0, 0.9) == 0


def test_each_wait_of_a_backoff_is_twice_the_previous_one_up_to_its_limit() -> None:
    wait = Backoff(2, 60)
    assert [wait.next() for _ in range(7)] == [2, 4, 8, 16, 32, 60, 60] and wait.tries == 7
    wait.reset()
    assert (wait.tries, wait.next(), wait.next()) == (0, 2, 4)


def test_a_new_limit_applies_to_all_later_waits() -> None:
    wait = Backoff(1, 600)
    assert [wait.next() for _ in range(8)][-1] == 128
    assert [wait.next(30), wait.next(30), wait.next()] == [30, 30, 30]
