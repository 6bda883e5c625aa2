"""Tests of the recorded samples of GPUs and jobs.

A mean contains only measured values. Samples are grouped into intervals, pauses are listed, and an answer to a query
has a maximum size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.admission import Admission
from scheduler.core.counters import TICK_BUCKETS
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.history import (
    KEEP_LONG_S,
    KEEP_SHORT_S,
    LONG_S,
    MOST_POINTS,
    QUEUE,
    SHORT_S,
    GpuMean,
    Mean,
    PauseSpan,
    Ticks,
    bucket_of,
    gpu_values,
    job_values,
    pause_spans,
    question,
)
from scheduler.core.observations import Now, Readings
from scheduler.core.tenants import Tenant
from tests.builders import a_gpu

NUMBERS = st.none() | st.floats(0, 1e6)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30))
def test_a_mean_uses_only_measured_values_and_is_at_most_their_maximum(
    samples: list[tuple[float | None, float | None]],
) -> None:
    mean = Mean(2)
    for sample in samples:
        mean.add(sample)
    for column in (0, 1):
        told = [sample[column] for sample in samples if sample[column] is not None]
        found, most = mean.mean(column, 6), mean.most(column)
        if not told:
            assert found is None and most is None  # None, not 0
        else:
            assert found == pytest.approx(sum(told) / len(told), abs=1e-5) and most == max(told)
            assert min(told) - 1e-5 <= found <= most + 1e-5


def test_the_history_of_a_declared_gpu_has_only_bookings_and_pauses() -> None:
    mean = GpuMean()
    mean.add(gpu_values(None, 0.5, False))
    mean.add(gpu_values(None, 1.0, True))
    assert mean.row(3, 40.0) == (3, 40.0, None, None, None, None, None, None, None, 0.75, 1.0, None, None)


# -- values of a reading ----------------------------------------------------------------------------------


def read(reading: GpuSnapshot, *tenants: Tenant, interval_s: float = 5.0) -> Admission:
    admission = Admission.of([a_gpu()], Thresholds(interval_s=interval_s), Now(1000.0, 100.0))
    admission.tenants = lambda gpu: tenants
    admission.take(Readings(100.0, (reading,)), Now(1000.0, 100.0))
    return admission


def a_reading(*processes: GpuProcess, used: int | None = 5000, **more: object) -> GpuSnapshot:
    told = GpuSnapshot("declared:0", 0, "", 80_000, used, 0.5, 61, processes, power_w=300.5, reserved_mib=600)
    return replace(told, **more)  # type: ignore[arg-type]


def test_a_reading_is_split_into_own_foreign_and_reserved_memory() -> None:
    ours = GpuProcess(10, 3000, owner="1.1", ours=True, load=0.25)
    other = GpuProcess(11, 1500)
    card = read(a_reading(ours, other), Tenant("1.1", 1, 500, started_at=1.0)).cards[0]
    assert gpu_values(card, 0.5, False) == (5000, 3000, card.foreign_mib, card.reserved_mib, 0.5, 61, 300.5, 0.5, 0.0)
    assert 3000 + card.foreign_mib + (card.reserved_mib or 0) == 5000 + 600
    assert job_values("1.1", [card]) == (3000, 0.25)


def test_a_gpu_that_is_not_read_has_no_measured_values() -> None:
    """While a GPU cannot be read, the history has no measured values for it.

    The values of the last reading are not repeated.
    """
    admission = read(a_reading())
    card = admission.cards[0]
    assert gpu_values(card, 0.0, False)[0] == 5000
    admission.judge(Now(1100.0, 200.0))
    assert card.verdict.code == "stale"
    assert gpu_values(card, 1.0, True) == (None,) * 7 + (1.0, 1.0) and job_values("1.1", [card]) == (None, None)


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ((GpuProcess(10, None, owner="1.1", ours=True),), (None, None)),
        ((GpuProcess(10, None, visible=False),), (None, None)),
        ((), (0.0, None)),
        ((GpuProcess(11, 100),), (0.0, None)),
    ],
    ids=["no figure", "hidden", "nothing on it yet", "only others"],
)
def test_booked_memory_is_not_measured_use(processes: tuple[GpuProcess, ...], said: tuple[float | None, None]) -> None:
    used = 500 if not processes else 5000
    card = read(a_reading(*processes, used=used), Tenant("1.1", 1, 500, started_at=1.0)).cards[0]
    assert job_values("1.1", [card]) == said


def test_unknown_memory_of_a_gpu_is_not_recorded_as_zero() -> None:
    card = read(a_reading(used=None)).cards[0]
    assert gpu_values(card, 0.0, False)[:4] == (None, None, None, None)


# -- queries ----------------------------------------------------------------------------------------------

NOW = 1_800_000_000.0


@given(st.floats(0, 2 * KEEP_LONG_S), st.floats(0, 2 * KEEP_LONG_S), st.floats(0, 1e7))
def test_a_history_answer_has_a_maximum_size(ago: float, span: float, step_s: float) -> None:
    asked = question(NOW - ago, NOW - ago + span, step_s, NOW)
    base = SHORT_S if asked.short else LONG_S
    assert asked.step_s >= min(step_s, asked.step_s) and asked.step_s % base == 0 and asked.since % base == 0
    assert (asked.until - asked.since) / asked.step_s <= MOST_POINTS + 2
    assert not asked.short or asked.since >= NOW - KEEP_SHORT_S - SHORT_S


@given(st.floats(0, 1e10), st.sampled_from([SHORT_S, LONG_S]))
def test_each_time_lies_in_its_interval(at: float, step_s: float) -> None:
    assert bucket_of(at, step_s) <= at < bucket_of(at, step_s) + step_s


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        ([], []),
        ([(5.0, 0, True), (15.0, 0, False)], [PauseSpan(0, 5.0, 15.0)]),
        ([(5.0, 0, True), (9.0, 0, False)], []),
        ([(25.0, 0, True)], []),
        ([(5.0, 0, True), (7.0, 0, True)], [PauseSpan(0, 5.0, None)]),
        ([(5.0, QUEUE, True), (12.0, 1, True), (13.0, 1, False)], [PauseSpan(None, 5.0, None), PauseSpan(1, 12.0, 13.0)]),
        ([(5.0, 0, False), (12.0, 0, True), (13.0, 0, False), (14.0, 0, True)], [PauseSpan(0, 12.0, 13.0), PauseSpan(0, 14.0, None)]),
    ],
    ids=["none", "reaches in", "was over", "later", "still", "queue", "twice"],
)  # fmt: skip
def test_pauses_are_listed_for_a_period(changes: list[tuple[float, int, bool]], spans: list[PauseSpan]) -> None:
    assert pause_spans(changes, 10.0, 20.0) == spans


@given(st.lists(st.floats(0, 100), max_size=50))
def test_each_pass_is_counted_in_one_bucket(turns: list[float]) -> None:
    ticks = Ticks()
    for turn in turns:
        ticks.add(turn)
    assert sum(ticks.counts) == len(turns) and ticks.total == pytest.approx(math.fsum(turns))
    for bound, number in zip(TICK_BUCKETS, ticks.counts, strict=False):
        assert number <= sum(turn <= bound for turn in turns)
