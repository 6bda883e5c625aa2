"""Tests of the queue of waiting jobs.

The queue has one heap for each placement class. It offers the jobs in the order of a full sort of all waiting jobs.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.placement_class import PlacementClass
from scheduler.core.queue import LONGEST_ESTIMATE_S, Key, Order, Queue
from tests.builders import a_kind

HALF, WHOLE_GPU, WIDE = a_kind("0.5"), a_kind("1"), a_kind("2")
KINDS = (HALF, WHOLE_GPU, WIDE, a_kind("0.5", (0,)))


def all_in_order(queue: Queue) -> list[int]:
    """Take the jobs that the queue offers, one after the other, as if each job fitted.

    Return their ids in this order.
    """
    out = []
    turns = queue.in_order()
    offer = next(turns, None)
    while offer is not None:
        out.append(offer[0])
        queue.drop(offer[0])
        try:
            offer = turns.send(True)
        except StopIteration:
            offer = None
    return out


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 2, 10.0, None), (1, 1, 0.0, None)),  # the lower number is more urgent, regardless of the arrival
        ((-5, 9, 9.0, None), (0, 1, 0.0, None)),
        ((3, 1, 9.0, None), (3, 2, 0.0, None)),  # equal priorities: the order of the file
        ((3, 1, 9.0, 9e9), (3, 2, 0.0, 1.0)),  # estimates do not count
    ],
)
def test_order_fifo_is_priority_then_file_order(
    first: tuple[int, int, float, float | None], second: tuple[int, int, float, float | None]
) -> None:
    """S3.12: Jobs are ordered by priority, and jobs of equal priority by their place in the file."""
    assert Order().key(*first) < Order().key(*second)


def test_order_short_lets_a_short_job_overtake_only_jobs_within_a_bounded_time() -> None:
    short = Order("short")
    assert short.key(0, 2, 100.0, 60.0) < short.key(0, 1, 0.0, 3600.0)
    assert short.key(0, 2, 5 * 3600.0 + 1, 0.0) > short.key(0, 1, 0.0, 3600.0)
    assert short.key(0, 1, 0.0, 9e9) == short.key(0, 1, 0.0, LONGEST_ESTIMATE_S)
    assert short.key(0, 1, 7.0, None) == short.key(0, 1, 7.0, 0.0)
    assert short.key(0, 1, 0.0, 9e9) < short.key(1, 2, 0.0, 0.0)


def test_aging_moves_the_least_urgent_job_to_the_front_in_the_end() -> None:
    aging = Order(aging_h=168.0)
    week = 168 * 3600.0
    assert aging.key(0, 2, week - 1, None) < aging.key(1, 1, 0.0, None)
    assert aging.key(0, 2, week + 1, None) > aging.key(1, 1, 0.0, None)


def test_jobs_are_offered_by_key_across_all_placement_classes() -> None:
    queue = Queue()
    for job, kind, key in [
        (1, WIDE, (5, 0)),
        (2, HALF, (0, 2)),
        (3, WIDE, (0, 1)),
        (4, HALF, (0, 3)),
        (5, WHOLE_GPU, (-1, 9)),
    ]:
        queue.push(job, kind, key)
    assert len(queue) == 5 and 3 in queue and 6 not in queue
    assert set(queue.classes()) == {WIDE, HALF, WHOLE_GPU}
    assert all_in_order(queue) == [5, 3, 2, 4, 1]
    assert len(queue) == 0 and queue.classes() == []


def test_a_job_that_does_not_fit_excludes_its_placement_class_from_the_pass() -> None:
    queue = Queue()
    for job, kind in enumerate([WIDE, WIDE, HALF, HALF]):
        queue.push(job, kind, (0, job))
    turns = queue.in_order()
    assert next(turns) == (0, WIDE)
    assert turns.send(False) == (2, HALF)
    with pytest.raises(StopIteration):
        turns.send(False)
    assert len(queue) == 4


def test_a_job_that_is_pushed_again_has_only_its_new_place() -> None:
    queue = Queue()
    queue.push(1, WIDE, (0, 1))
    queue.push(2, WIDE, (0, 2))
    queue.push(1, HALF, (9, 1))
    assert len(queue) == 2
    assert all_in_order(queue) == [2, 1]


def test_a_job_that_changed_its_class_is_offered_once_in_its_new_class() -> None:
    queue = Queue()
    queue.push(1, WIDE, (0, 1))
    queue.push(2, WIDE, (0, 2))
    queue.push(1, HALF, (0, 1))
    turns = queue.in_order()
    assert next(turns) == (1, HALF)
    assert turns.send(False) == (2, WIDE)
    with pytest.raises(StopIteration):
        turns.send(False)


def test_a_pass_ends_even_if_a_taken_job_was_not_removed() -> None:
    queue = Queue()
    queue.push(1, WIDE, (0, 1))
    queue.push(2, WIDE, (0, 2))
    turns = queue.in_order()
    assert next(turns) == (1, WIDE)
    with pytest.raises(StopIteration):
        turns.send(True)


def test_dropping_an_absent_job_returns_false() -> None:
    queue = Queue()
    assert queue.drop(1) is False
    queue.push(1, WIDE, (0, 1))
    assert queue.drop(1) is True
    assert queue.drop(1) is False
    assert queue.classes() == []


def test_overtakes_are_counted_since_the_job_got_its_place() -> None:
    """S4.36: Overtakes are counted from the time at which the job got its place in the queue."""
    queue = Queue()
    queue.push(1, WIDE, (0, 1))
    queue.push(2, WIDE, (0, 2))
    assert queue.overtaken(1) == 0
    for _ in range(3):
        queue.overtake(1, (0, 9))
    queue.overtake(2, (0, 9))
    assert (queue.overtaken(1), queue.overtaken(2)) == (4, 4)
    queue.push(1, HALF, (0, 1))  # the job has a new class and place: its count restarts at 0
    assert (queue.overtaken(1), queue.overtaken(2)) == (0, 4)
    queue.drop(2)
    queue.push(2, WIDE, (0, 2))
    assert queue.overtaken(2) == 0


def test_an_overtake_counts_for_all_jobs_of_the_class_before_the_overtaking_job() -> None:
    """S4.36: If a job is overtaken, the overtake counts for all jobs of its class ahead of the overtaking job."""
    queue = Queue()
    for job in (1, 2, 5):
        queue.push(job, WIDE, (0, job))
    queue.overtake(1, (0, 4))
    queue.push(3, WIDE, (0, 3))  # added after the overtake, which does not count for it
    assert [queue.overtaken(job) for job in (1, 2, 3, 5)] == [1, 1, 0, 0]
    queue.drop(1)
    queue.overtake(2, (0, 9))
    assert [queue.overtaken(job) for job in (2, 3, 5)] == [2, 1, 1]
    queue.push(6, HALF, (0, 6))  # each class has its own counts
    assert queue.overtaken(6) == 0


STEP = st.tuples(st.integers(0, 12), st.sampled_from(KINDS), st.integers(-1, 1), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(STEP, max_size=60), st.lists(st.booleans(), max_size=30))
def test_a_pass_offers_jobs_in_the_same_order_as_a_full_sort(
    steps: list[tuple[int, PlacementClass, int, int, int]], answers: list[bool]
) -> None:
    queue = Queue()
    waiting: dict[int, tuple[Key, PlacementClass]] = {}
    for job, kind, priority, order, what in steps:
        if what == 0:
            assert queue.drop(job) == (waiting.pop(job, None) is not None)
        else:
            queue.push(job, kind, (priority, order))
            waiting[job] = (priority, order), kind
    assert len(queue) == len(waiting)
    assert set(queue.classes()) == {kind for _, kind in waiting.values()}
    for _ in range(2):  # a job that was not started is offered again in the next pass
        left_out: set[PlacementClass] = set()
        turns = queue.in_order()
        offer = next(turns, None)
        for job, (_, kind) in sorted(waiting.items(), key=lambda item: (item[1][0], item[0])):
            if kind in left_out:
                continue
            assert offer == (job, kind)
            taken = answers.pop() if answers else True
            if taken:
                queue.drop(job)
                del waiting[job]
            else:
                left_out.add(kind)
            try:
                offer = turns.send(taken)
            except StopIteration:
                offer = None
        assert offer is None


def test_a_long_queue_keeps_its_order_after_most_jobs_were_dropped() -> None:
    queue = Queue()
    for job in range(1000):
        queue.push(job, HALF, (0, -job))
    for job in range(1000):
        if job % 10:
            queue.drop(job)
    assert all_in_order(queue) == list(range(990, -1, -10))
