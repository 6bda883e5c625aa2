"""Tests of results that requests share: one computation for all who wait, an age limit, and a limit on the work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.core.errors import StoreTrouble
from scheduler.web import computed
from scheduler.web.computed import Computed
from tests.stories.harness import wait_for


class Slow:
    """A computation that ends when it is told to; its results are 1, 2, …"""

    def __init__(self) -> None:
        self.calls = 0
        self.go = threading.Event()

    def __call__(self) -> int:
        self.calls += 1
        number = self.calls
        assert self.go.wait(30)
        return number


def test_all_who_wait_share_one_computation_and_later_ones_its_result() -> None:
    slow, shared = Slow(), Computed[int]()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(shared.get, "a", slow, 30.0) for _ in range(8)]
        wait_for(lambda: slow.calls == 1, "the computation")
        slow.go.set()
        assert {one.result() for one in waiting} == {1}
    assert slow.calls == 1


def test_the_previous_result_is_used_while_a_new_one_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "FRESH_S", 0.0)
    monkeypatch.setattr(computed, "TIMES", 0)
    monkeypatch.setattr(computed, "HURRY_S", 0.01)
    slow, shared = Slow(), Computed[int]()
    assert shared.get("a", slow, 0.01) is None  # nothing is known yet
    slow.go.set()
    assert wait_for(lambda: shared.get("a", slow, 30.0), "a result") >= 1
    slow.go.clear()
    last = slow.calls
    wait_for(lambda: (shared.get("a", slow, 30.0), slow.calls > last)[1], "another computation")
    assert shared.get("a", slow, 30.0) == last
    slow.go.set()
    wait_for(lambda: shared.get("a", slow, 30.0) > last, "its result")


def test_a_change_outdates_results_but_not_more_often_than_they_can_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computed, "FRESH_S", 1000.0)
    slow, shared = Slow(), Computed[int]()
    slow.go.set()
    assert [shared.get("a", slow) for _ in range(3)] == [1, 1, 1]
    shared.changed()
    wait_for(lambda: shared.get("a", slow) == 2, "a new result")
    monkeypatch.setattr(computed, "TIMES", 1e9)
    shared.changed()
    wait_for(lambda: shared.get("a", slow) == 3, "a new result")
    shared.changed()
    assert shared.get("a", slow) == 3  # the server has something else to do, too


def test_an_error_is_raised_and_not_kept() -> None:
    shared = Computed[int]()

    def fail() -> int:
        raise StoreTrouble("cannot read the store")

    with pytest.raises(StoreTrouble, match="cannot read the store"):
        shared.get("a", fail)
    assert shared.get("a", lambda: 7) == 7


def test_old_results_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "FRESH_S", 0.0)
    monkeypatch.setattr(computed, "TIMES", 0)
    shared = Computed[int]()
    for number in range(500):
        assert shared.get(number, lambda number=number: number) == number
    assert len(shared._entries) <= computed.MOST_KEPT + 1
