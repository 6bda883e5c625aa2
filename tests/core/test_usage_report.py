"""Tests of the usage report: the attempts that it lists, their times within the reported period, and its sums."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.endings import ran
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Event, Job, JobState, Outcome
from scheduler.core.usage_report import AttemptUse, Report, attempts_of, report_of
from tests.builders import T0, a_job, a_world

NOW = T0 + 1000


def started(at: float, attempt: int = 1, gpus: tuple[int, ...] = (0,), **more: Any) -> Event:
    return Event(1, T0 + at, "started", {"pid": 7, "gpus": list(gpus), "attempt": attempt, **more})


def over(at: float, kind: str, attempt: int = 1, **more: Any) -> Event:
    return Event(1, T0 + at, kind, {"attempt": attempt, **more})


def job(state: JobState = JobState.DONE, start: float | None = 10, end: float | None = 70, **changes: Any) -> Job:
    changes = {"attempt": 1, "gpus": (0,), "need": "1", **changes}
    need, gpus = changes.pop("need"), changes.pop("gpus")
    outcome = changes.pop("outcome", Outcome.EXIT if state.ended else None)
    made = a_job(1, need, state=state, outcome=outcome, **changes)
    made.gpus = gpus
    made.started_at = None if start is None else T0 + start
    made.finished_at = None if end is None else T0 + end
    return made


def runs(made: Job, *events: Event) -> list[tuple[int, int, int, bool]]:
    """Return a tuple for each attempt of this job in the report.

    The tuple is: attempt number, start in seconds after T0, run time in seconds, and whether the attempt is lost.
    """
    found = attempts_of(made, events, NOW)
    return [(one.number, one.started_ms // 1000 - int(T0), one.run_ms // 1000, one.lost) for one in found]


WAITS = {"state": JobState.PENDING, "start": None, "end": None, "gpus": ()}


@pytest.mark.parametrize(
    ("made", "events", "expected"),
    [
        (job(**WAITS), [], []),
        (job(), [], [(1, 10, 60, False)]),
        (job(), [started(11), over(72, "done")], [(1, 10, 60, False)]),  # the job's row decides, not the events
        (job(JobState.RUNNING, end=None), [started(10)], [(1, 10, 990, False)]),
        (job(JobState.STOPPING, end=50), [started(10)], [(1, 10, 40, False)]),  # its main process has ended
        (job(JobState.RUNNING, end=30), [started(10)], [(1, 10, 20, False)]),  # ended while no scheduler ran
        (job(JobState.FAILED, outcome=Outcome.LOST), [], [(1, 10, 60, True)]),
        (job(JobState.FAILED, start=None, outcome=Outcome.COULD_NOT_START), [], []),
        (job(JobState.CANCELLED, start=None, attempt=0, gpus=()), [Event(1, T0, "cancelled", {})], []),
        (job(start=70, end=10), [], [(1, 70, 0, False)]),  # the clock was set back
        (job(JobState.RUNNING, start=2000, end=None), [], [(1, 2000, 0, False)]),
        # waits for another attempt
        (job(**WAITS), [started(10), over(40, "retry_scheduled")], [(1, 10, 30, False)]),
        (job(**WAITS), [started(10), over(40, "retry_scheduled", ran=25.0)], [(1, 10, 25, False)]),
        (job(**WAITS), [started(10), over(5, "retry_scheduled")], [(1, 10, 0, False)]),
        (
            job(start=100, end=170, attempt=3),
            [started(10), over(40, "retry_scheduled", ran=30.0), started(99, 3), over(171, "done", 3)],
            [(1, 10, 30, False), (3, 100, 70, False)],
        ),
        # retried after an end that was noticed only later
        (
            job(start=500, end=510, attempt=2),
            [started(10), over(400, "failed", outcome="exit", ran=20.0), over(450, "requeued"), started(500, 2)],
            [(1, 10, 20, False), (2, 500, 10, False)],
        ),
        (
            job(start=500, end=510, attempt=2),
            [started(10), over(400, "failed", outcome="lost"), over(450, "requeued"), started(500, 2)],
            [(1, 10, 390, True), (2, 500, 10, False)],
        ),
        (job(start=500, end=510, attempt=2), [started(10)], [(1, 10, 0, True), (2, 500, 10, False)]),
        (job(**WAITS), [over(40, "retry_scheduled"), over(41, "unclaimed"), Event(1, T0, "held", {})], []),
    ],
)
def test_earlier_attempts_come_from_events_and_the_last_from_the_job(
    made: Job, events: list[Event], expected: list[tuple[int, int, int, bool]]
) -> None:
    assert runs(made, *events) == expected


def test_the_report_has_the_gpus_and_the_share_of_each_attempt() -> None:
    """A job that ran out of GPU memory has twice the share in its next attempt."""
    made = job(start=100, end=170, attempt=2, need="2x1", gpus=(0, 1))
    first, last = attempts_of(made, [started(10, gpus=(2, 3), share=0.5), over(40, "retry_scheduled", ran=30.0)], NOW)
    assert first == AttemptUse(1, int(T0 + 10) * 1000, 30_000, (2, 3), 500)
    assert (last.gpus, last.parts) == ((0, 1), 1000)
    (old,) = attempts_of(job(**WAITS, need="0.25"), [started(10), over(40, "retry_scheduled")], NOW)
    assert old.parts == 250  # event of an earlier version, without a share
    named = job(gpus=(3,), need="0")
    named.need = ResourceRequest(1, 0)
    assert attempts_of(named, [], NOW)[0].parts == 0


def test_the_run_time_of_an_attempt_is_computed_from_the_times_of_the_run() -> None:
    """The run time of an attempt ends when the job ended, not when the daemon recorded the end."""
    play = a_world(1)
    play.run(a_job(1, "0.5", retries=1))
    event = next(event for event in play.plan.events if event.kind == "started")
    assert event.detail["share"] == 0.5
    plan = play.tell(play.ended(1, 1, at=play.wall + 20.25), after=5000)
    assert [event.detail.get("ran") for event in plan.events if event.kind == "retry_scheduled"] == [20.25]
    assert ran(job(start=70, end=10)) == {"ran": 0.0}
    assert ran(job(start=None)) == {}


def summed(*made: Job, since: float | None = None, **more: Any) -> Report:
    return report_of(((one, []) for one in made), now=NOW, since=None if since is None else T0 + since, **more)


def test_the_report_sums_waits_runs_and_gpu_time_by_job_label_and_gpu() -> None:
    one = job(label="a", need="0.5")
    two = job(JobState.FAILED, label="a", start=20, end=120, need="2", gpus=(0, 1))
    three = job(start=None, end=200, state=JobState.CANCELLED, outcome=Outcome.CANCELLED, gpus=())
    found = summed(one, two, three, gpus=(0, 1, 2))
    assert [(line.wait_ms, line.run_ms, line.gpu_ms) for line in found.lines] == [
        (10_000, 60_000, 30_000_000),
        (20_000, 100_000, 200_000_000),
        (None, 0, 0),
    ]
    assert list(found.labels) == ["", "a"] and found.labels["a"].jobs == 2
    assert found.labels["a"].mean_wait_ms == 15_000 and found.labels[""].mean_wait_ms is None
    assert [(use.gpu, use.jobs, use.run_ms, use.gpu_ms) for use in found.gpus] == [
        (0, 2, 160_000, 130_000_000),
        (1, 1, 100_000, 100_000_000),
        (2, 0, 0, 0),
    ]
    assert (found.start, found.end) == (T0, NOW)
    assert [use.busy for use in found.gpus] == [0.13, 0.1, 0.0]
    assert found.total.states["done"] == found.total.states["failed"] == found.total.states["cancelled"] == 1
    assert found.total.outcomes["exit"] == 2 and found.total.outcomes["cancelled"] == 1


def test_the_report_omits_runs_before_since_and_cuts_runs_that_span_it() -> None:
    early, across, later = job(), job(start=10, end=150), job(start=160, end=200)
    waiting = job(**WAITS)
    found = summed(early, across, later, waiting, since=100)
    assert [line.job for line in found.lines] == [across, later, waiting]
    assert [line.run_ms for line in found.lines] == [50_000, 40_000, 0]
    assert found.lines[0].wait_ms == 10_000  # the wait stays whole
    assert found.gpus[0].busy == 0.1 and found.start == T0 + 100
    assert summed(job(start=10, end=100), since=100).total.run_ms == 0  # ended exactly at ``since``: listed
    nothing = summed(since=1000, gpus=(0,))
    assert nothing.gpus[0].busy is None and nothing.total.mean_wait_ms is None


TIMES = st.floats(-100, 1100)
ONE = st.tuples(
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["0", "0.25", "1", "2", "2x0.5"]),
    st.lists(st.tuples(TIMES, TIMES, st.booleans()), max_size=3),
    st.sampled_from([JobState.PENDING, JobState.RUNNING, JobState.DONE, JobState.FAILED]),
    TIMES,
    TIMES,
)


def made_of(label: str, need: str, before: list[Any], state: JobState, start: float, end: float) -> tuple[Job, Any]:
    count = ResourceRequest.parse(need).count
    gpus = tuple(range(count))
    events = []
    for number, (begun, ended, told) in enumerate(before, 1):
        events.append(started(begun, number, gpus, share=0.5))
        events.append(over(ended, "retry_scheduled", number, **({"ran": abs(ended - begun)} if told else {})))
    ends = end if state.ended else None
    begins = None if state is JobState.PENDING else start
    return job(state, begins, ends, label=label, need=need, gpus=gpus, attempt=len(before) + 1), events


@given(st.lists(ONE, max_size=6), st.none() | TIMES)
def test_parts_of_the_report_add_up_to_its_totals_and_are_not_negative(shapes: list[Any], since: float | None) -> None:
    """The values of the labels, of the jobs and of the GPUs each add up to the totals of the report.

    No value is negative. This also holds if the clock was changed.
    """
    stories = [made_of(*shape) for shape in shapes]
    found = report_of(stories, now=NOW, since=None if since is None else T0 + since)
    total = found.total
    for name in ("jobs", "attempts", "lost", "started", "wait_ms", "run_ms", "gpu_ms"):
        assert sum(getattr(part, name) for part in found.labels.values()) == getattr(total, name)
    assert total.jobs == len(found.lines) == sum(total.states.values())
    assert sum(line.run_ms for line in found.lines) == total.run_ms
    assert sum(line.gpu_ms for line in found.lines) == total.gpu_ms == sum(use.gpu_ms for use in found.gpus)
    for line in found.lines:
        assert line.run_ms >= 0 and line.gpu_ms >= 0 and (line.wait_ms is None or line.wait_ms >= 0)
        assert all(attempt.run_ms >= 0 for attempt in line.attempts)
    assert all(use.busy is None or 0 <= use.busy <= 1 for use in found.gpus)
    if since is not None:
        whole = report_of(stories, now=NOW)
        assert total.run_ms <= whole.total.run_ms and total.gpu_ms <= whole.total.gpu_ms
