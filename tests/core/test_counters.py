"""Tests of the permanent counters: each ending, retry, wait and run is counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.counters import (
    INF,
    RUN_BUCKETS,
    TICK_BUCKETS,
    WAIT_BUCKETS,
    bucket,
    counted,
    cumulative,
    label_of,
)
from scheduler.core.job import Event
from tests.builders import T0, a_job


def tally(*events: Event, before: bool = False, **job: object) -> dict[tuple[str, str], float]:
    one = a_job(1, attempt=1, started_at=T0 + 5.0, **job)  # type: ignore[arg-type]
    return counted(events, {1: one}, lambda _: before)


def test_each_wait_and_run_is_counted_once() -> None:
    wait = {("waited", "10"): 1.0, ("waited", "sum"): 5.0}
    assert tally(Event(1, T0 + 5, "started")) == wait
    done = Event(1, T0 + 35, "done", {"outcome": "exit", "ran": 30.0})
    ran = {("ran", "60"): 1.0, ("ran", "sum"): 30.0, ("finished", "exit"): 1.0, ("ended", "done"): 1.0}
    assert tally(done, before=True) == ran
    assert tally(Event(1, T0 + 5, "started"), done) == wait | ran
    assert tally(done) == wait | ran  # its start was not recorded


@pytest.mark.parametrize(
    ("kind", "detail", "found"),
    [
        ("skipped", {"why": "x"}, {("finished", "dependency"): 1, ("ended", "skipped"): 1}),
        ("cancelled", {"outcome": "cancelled"}, {("finished", "cancelled"): 1, ("ended", "cancelled"): 1}),
        ("retry_scheduled", {"cause": "out_of_memory"}, {("retried", "out_of_memory"): 1}),
        ("unclaimed", {}, {("retried", "unclaimed"): 1}),
        ("requeued", {}, {("retried", "asked"): 1}),
        ("stopping", {}, {}),
    ],
)
def test_ends_and_retries_count_once(kind: str, detail: dict[str, object], found: dict[tuple[str, str], float]) -> None:
    assert tally(Event(1, T0, kind, detail), before=True) == found


@given(st.lists(st.floats(0, 1e9), max_size=30), st.sampled_from([WAIT_BUCKETS, RUN_BUCKETS, TICK_BUCKETS]))
def test_histogram_buckets_count_all_values_up_to_their_bound(seconds: list[float], bounds: tuple[float, ...]) -> None:
    counts: dict[str, float] = {}
    for one in seconds:
        counts[bucket(bounds, one)] = counts.get(bucket(bounds, one), 0) + 1
    found = cumulative(bounds, counts)
    assert [label for label, _ in found] == [*map(label_of, bounds), INF]
    assert [float(label) for label, _ in found][:-1] == list(bounds)
    assert [number for _, number in found] == [
        *(sum(one <= bound for one in seconds) for bound in bounds),
        len(seconds),
    ]
