"""Property tests of the Timeline's layout and of its curves.

Bars do not overlap, each run is drawn, and a gap in the measured values stays a gap.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.outlook import Expectation, Moment, Outlook
from scheduler.core.job import JobState
from scheduler.web import svg_curves
from scheduler.web.expected_runs import Future, edge_of, expected_words, future_of, with_expected
from scheduler.web.timeline import MOST_BARS, TOUCH_S, Band, Run, axis, layout
from tests.builders import a_job

NOW = 1_760_000_000.0
SHARES = st.sampled_from([0, 1, 100, 250, 334, 500, 750, 1000])


@st.composite
def runs(draw: st.DrawFn, most: int = 40, span: float = 7200.0) -> list[Run]:
    """Draw runs of any kind, including impossible ones: for example, two runs that book the same GPU."""
    found = []
    for number in range(draw(st.integers(0, most))):
        start = NOW + draw(st.floats(-600, span))
        lasts = draw(st.floats(0, span))
        gpus = tuple(sorted(draw(st.sets(st.integers(0, 3), max_size=3))))
        found.append(Run(number, 1, start, start + lasts, gpus, draw(SHARES), "done"))
    return found


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] - 1e-9 and other[0] < one[1] - 1e-9


def check(bands: list[Band]) -> None:
    """Assert that bars of a band do not overlap, and that their heights add up to at most 1 at any time."""
    for band in bands:
        for bar in band.bars:
            assert all(0 <= low < high <= 1 + 1e-9 for low, high in bar.pieces), bar
            assert bar.pieces
        for one, other in itertools.combinations(band.bars, 2):
            if overlap((one.start, one.end), (other.start, other.end)):
                hits = [(a, b) for a in one.pieces for b in other.pieces if overlap(a, b)]
                assert not hits, (one, other)
        for moment in {bar.start for bar in band.bars}:
            there = [bar for bar in band.bars if bar.start <= moment < bar.end]
            assert sum(high - low for bar in there for low, high in bar.pieces) <= 1 + 1e-9


@given(runs())
def test_no_bars_overlap_and_every_run_has_its_bars(found: list[Run]) -> None:
    start, end = NOW, NOW + 5400
    bands = layout(found, start, end, range(2))
    check(bands)
    drawn = {(band.gpu, bar.run.job) for band in bands for bar in band.bars}
    inside = [run for run in found if run.start < end and run.end >= start]
    assert drawn == {(gpu, run.job) for run in inside for gpu in (run.gpus or (None,))}
    assert {0, 1} <= {band.gpu for band in bands}
    assert all(start <= bar.start <= bar.end <= end for band in bands for bar in band.bars)


@given(runs(60), st.integers(1, 20))
def test_too_many_bars_are_merged_and_counted(found: list[Run], most: int) -> None:
    start, end = NOW - 600, NOW + 15000
    bands = layout(found, start, end, (), most)
    check(bands)
    shown = sum(len(band.bars) for band in bands)
    merged = sum(part.number for band in bands for part in band.merged)
    assert shown <= most
    assert shown + merged == sum(max(1, len(run.gpus)) for run in found if run.start < end and run.end >= start)
    for band in bands:
        assert all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(band.merged))


def test_two_half_gpu_runs_are_drawn_one_above_the_other() -> None:
    pair = [Run(n, 1, NOW, NOW + 100, (0,), 500, "running") for n in (1, 2)]
    (band,) = layout(pair, NOW, NOW + 200, [0])
    assert sorted(bar.pieces for bar in band.bars) == [((0.0, 0.5),), ((0.5, 1.0),)]
    assert band.rows == 2


def test_consecutive_runs_fill_the_band_even_if_their_times_overlap_briefly() -> None:
    """If two runs use a whole GPU one after the other, each of them is drawn with the full height of the band.

    This also holds if the recorded end of the first run is slightly later than the start of the second run.
    """
    first = Run(1, 1, NOW, NOW + 100.4, (0,), 1000, "done")
    second = Run(2, 1, NOW + 100, NOW + 200, (0,), 1000, "running")
    (band,) = layout([first, second], NOW, NOW + 200, [0])
    assert [bar.pieces for bar in band.bars] == [((0.0, 1.0),), ((0.0, 1.0),)]
    assert band.bars[0].end == NOW + 100


def test_a_bar_is_drawn_in_two_pieces_if_no_single_gap_is_high_enough() -> None:
    """If no single gap of a band is high enough for a bar, the bar is drawn in two pieces.

    Here the first and the third quarter of the band are free.
    """
    quarters = [Run(n, 1, NOW, NOW + (100 if n % 2 else 300), (0,), 250, "done") for n in (1, 2, 3, 4)]
    half = Run(5, 1, NOW + 150, NOW + 250, (0,), 500, "running")
    (band,) = layout([*quarters, half], NOW, NOW + 300, [0])
    (bar,) = (bar for bar in band.bars if bar.run.job == 5)
    assert bar.pieces == ((0.0, 0.25), (0.5, 0.75))


def test_runs_without_a_gpu_have_their_own_band_at_the_end() -> None:
    cpu = [Run(n, 1, NOW, NOW + 50, (), 0, "done") for n in range(3)]
    bands = layout(cpu, NOW, NOW + 100, [1, 0])
    assert [band.gpu for band in bands] == [0, 1, None]
    assert bands[2].rows == 3


# -- predicted runs ---------------------------------------------------------------------------------------


@st.composite
def predicted(draw: st.DrawFn) -> list[Run]:
    """Draw runs of the past, runs that continue after NOW, and expected runs, which may contradict each other."""

    def expectation(number: int, start: float | None) -> Expectation:
        begins = None if start is None else Moment(start, start - draw(st.floats(0, 600)), None)
        at = (NOW if start is None else start) + draw(st.floats(0, 9000))
        ends = draw(st.none() | st.just(Moment(at, at, draw(st.none() | st.just(at + 60)))))
        return Expectation(number, begins, ends, (0,), 60.0, "its time limit")

    found = [replace(run, end=min(run.end, NOW)) for run in draw(runs()) if run.start <= NOW]
    found = [
        replace(run, state="running", expected=expectation(run.job, None))
        if run.end == NOW and draw(st.booleans())
        else run
        for run in found
    ]
    for number in range(1000, 1000 + draw(st.integers(0, 20))):
        start = NOW + draw(st.floats(0, 5000) | st.sampled_from([0.0, 600.0]))
        gpus = tuple(sorted(draw(st.sets(st.integers(0, 3), max_size=2))))
        found.append(Run(number, 1, start, start, gpus, draw(SHARES), "pending", expected=expectation(number, start)))
    return found


@given(predicted())
def test_predicted_runs_do_not_overlap_and_change_nothing_that_has_happened(found: list[Run]) -> None:
    """Predicted runs that contradict each other are shortened; runs of the past are drawn whole, where they are without them.

    Overlaps that are narrower than a bar are ignored, as among runs of the past: then a run may end earlier by this width, and
    it depends on what continues which run that is.
    """
    start, edge = NOW - 600, NOW + 5400
    touch = max(TOUCH_S, (edge - start) / MOST_BARS)
    bands = layout(found, start, edge, range(2))
    check(bands)
    plain = layout([replace(run, expected=None) for run in found if run.state != "pending"], start, edge, range(2))
    before = {band.gpu: {bar.run.job: bar for bar in band.bars if bar.run.start < NOW} for band in plain}
    for band in (one for one in bands if one.gpu is not None):
        past = [bar for bar in band.bars if bar.run.start < NOW]
        assert all(min(bar.end, bar.run.end) >= bar.run.end - touch - 1e-6 for bar in past)
        if all(bar.end >= bar.run.end for bar in (*past, *before.get(band.gpu, {}).values())):
            assert all(bar.pieces == before[band.gpu][bar.run.job].pieces for bar in past)
        for bar in band.bars:
            future = future_of(bar, edge)
            assert future is None or (max(NOW, bar.start) <= future.start <= future.end <= edge), bar
            assert future is None or all(low <= high <= edge for low, high in future.pale)
            assert expected_words(bar.run, NOW) or bar.run.expected is None


def test_a_waiting_job_is_drawn_behind_the_run_whose_gpu_it_gets() -> None:
    job = replace(a_job(2, "0.5"), state=JobState.PENDING)
    running = replace(a_job(1, "0.5"), state=JobState.RUNNING, attempt=1, started_at=NOW - 60, gpus=(0,))
    at = Moment(NOW + 100, NOW + 50, NOW + 200)
    outlook = Outlook(
        NOW, {1: Expectation(1, None, at, (0,)), 2: Expectation(2, at, Moment(NOW + 300, NOW + 250, None), (0,))}
    )
    first = Run(1, 1, NOW - 60, NOW, (0,), 500, "running")
    edge = edge_of(NOW - 600, NOW, outlook)
    assert edge == NOW + 300
    (band,) = layout(with_expected([first], outlook, {1: running, 2: job}, {}), NOW - 600, edge, [0])
    one, two = band.bars
    assert (one.start, one.end, two.start, two.end) == (NOW - 60, NOW + 100, NOW + 100, NOW + 300)
    assert one.pieces == two.pieces == ((0.0, 0.5),)
    assert future_of(one, edge) == Future(NOW, NOW + 100, ((NOW + 100, NOW + 200),))
    assert future_of(two, edge) == Future(NOW + 100, NOW + 300, ((NOW + 50, NOW + 100),))


@pytest.mark.parametrize("hours", [0.05, 1, 6, 24, 168, 720, 9000])
def test_the_axis_has_few_round_times(hours: float) -> None:
    ticks = axis(NOW, NOW + hours * 3600)
    assert 1 <= len(ticks) <= (10 if hours <= 2000 else 40)
    assert all(NOW <= at <= NOW + hours * 3600 for at, _ in ticks)
    assert all(time.localtime(at).tm_sec == 0 for at, _ in ticks)


# -- curves -----------------------------------------------------------------------------------------------


def test_a_curve_has_a_gap_where_readings_are_missing() -> None:
    points = [(NOW + at, 0.5) for at in (0, 10, 20, 200, 210)]
    line, area = svg_curves.paths(points, NOW, NOW + 300, 1.0, 30)
    assert line.count("M") == 2 and area.count("Z") == 2
    broken, _ = svg_curves.paths([(NOW, 0.1), (NOW + 10, None), (NOW + 20, 0.2)], NOW, NOW + 30, 1.0, 60)
    assert broken.count("M") == 2
    assert svg_curves.paths([], NOW, NOW + 1, 1.0, 1) == ("", "")
    assert svg_curves.paths([(NOW, None)], NOW, NOW + 1, 1.0, 1) == ("", "")


@given(st.lists(st.tuples(st.floats(0, 1000), st.none() | st.floats(0, 5)), max_size=40), st.floats(0.1, 10))
def test_curves_stay_inside_their_area(points: list[tuple[float, float | None]], top: float) -> None:
    line, _ = svg_curves.paths(sorted(points, key=lambda p: p[0]), 0, 1000, top, 100)
    numbers = [float(word) for word in line.replace("M", " ").replace("L", " ").split()]
    assert all(-1 <= x <= 1001 for x in numbers[::2]) and all(0 <= y <= 100 for y in numbers[1::2])


def test_hours_without_readings_are_none_and_not_zero() -> None:
    points = [(NOW + 10, 0.5), (NOW + 20, 1.0), (NOW + 7300, None)]
    assert svg_curves.by_hour(points, NOW, 3) == [0.75, None, None]


def test_the_booked_share_of_each_hour_is_averaged_over_elapsed_time() -> None:
    found = [(NOW - 1800, NOW + 1800, 1.0), (NOW + 3600, NOW + 5400, 0.5)]
    assert svg_curves.booked_by_hour(found, NOW, 2, NOW + 5400) == [0.5, 0.5]
