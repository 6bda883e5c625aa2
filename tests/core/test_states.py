"""Tests of the state table: in each state, a move is either a row of the table, or is refused and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from scheduler.core.errors import InvalidMove
from scheduler.core.job import ENDED, HOLDING, Job, JobState, Outcome, Process
from scheduler.core.states import TABLE, Move, move
from tests.builders import T0, a_job

S, M = JobState, Move
# A second copy of the whole table, written by hand.
ROWS: dict[tuple[JobState, Move], JobState] = {
    (S.PENDING, M.PLACED): S.STARTING,
    (S.PENDING, M.STOP_ASKED): S.CANCELLED,
    (S.PENDING, M.SKIPPED): S.SKIPPED,
    (S.STARTING, M.STARTED): S.RUNNING,
    (S.STARTING, M.RETRY_SCHEDULED): S.PENDING,
    (S.STARTING, M.FAILED): S.FAILED,
    (S.STARTING, M.STOP_ASKED): S.STOPPING,
    (S.RUNNING, M.SUCCEEDED): S.DONE,
    (S.RUNNING, M.RETRY_SCHEDULED): S.PENDING,
    (S.RUNNING, M.FAILED): S.FAILED,
    (S.RUNNING, M.STOP_ASKED): S.STOPPING,
    (S.STOPPING, M.STOPPED): S.CANCELLED,
    (S.STOPPING, M.SUCCEEDED): S.DONE,
    (S.STOPPING, M.RETRY_SCHEDULED): S.PENDING,
    (S.STOPPING, M.FAILED): S.FAILED,
    (S.DONE, M.REQUEUED): S.PENDING,
    (S.CANCELLED, M.REQUEUED): S.PENDING,
    (S.CANCELLED, M.SKIPPED): S.SKIPPED,
    (S.SKIPPED, M.REQUEUED): S.PENDING,
    (S.FAILED, M.REQUEUED): S.PENDING,
    (S.FAILED, M.SKIPPED): S.SKIPPED,
}
PAIRS = list(product(JobState, Move))


def a_worn_job(state: JobState) -> Job:
    """Return a job with a value in every field."""
    return a_job(
        12,
        state=state,
        attempt=3,
        started_at=T0 + 1,
        finished_at=T0 + 2,
        gpus=(0,),
        process=Process(4711, 5),
        outcome=Outcome.EXIT,
        exit_code=1,
        signal=9,
        reason_code="backoff",
        reason="again soon",
        stop_why="cancelled",
        stop_at=T0 + 1.5,
    )


@pytest.mark.parametrize(("state", "what"), PAIRS, ids=[f"{s.value}-{m.value}" for s, m in PAIRS])
def test_each_move_follows_the_state_table_or_is_refused_without_a_change(state: JobState, what: Move) -> None:
    job = a_worn_job(state)
    before = replace(job)
    after = ROWS.get((state, what))
    if after is None:
        with pytest.raises(InvalidMove) as caught:
            move(job, what, T0 + 9)
        assert job == before
        assert caught.value.exit_code == 1
        for told in ("job 12", state.value, what.value, "attempt 3", "submitted", "started"):
            assert told in str(caught.value)
    else:
        assert move(job, what, T0 + 9) is state
        assert job.state is after


def test_the_state_table_has_exactly_the_expected_rows() -> None:
    assert {(state, what): after for state, row in TABLE.items() for what, after in row.items()} == ROWS
    assert set(TABLE) == set(JobState)


@pytest.mark.parametrize(("state", "what"), [pair for pair, after in ROWS.items() if after is S.PENDING])
def test_a_job_that_is_pending_again_keeps_no_values_of_its_last_run(state: JobState, what: Move) -> None:
    job = a_worn_job(state)
    move(job, what, T0 + 9)
    assert (job.gpus, job.process, job.started_at, job.finished_at, job.stop_at) == ((), None, None, None, None)
    assert (job.outcome, job.exit_code, job.signal, job.stop_why) == (None, None, None, "")
    assert (job.id, job.attempt, job.submitted_at) == (12, 3, T0)


@pytest.mark.parametrize(("state", "what"), [pair for pair, after in ROWS.items() if after in ENDED])
def test_an_ended_job_has_an_end_time_and_no_reason_to_wait(state: JobState, what: Move) -> None:
    job = a_worn_job(state)
    job.finished_at = None
    move(job, what, T0 + 9)
    assert job.finished_at == T0 + 9
    assert (job.reason_code, job.reason) == ("", "")


def test_a_known_end_time_is_kept() -> None:
    job = a_worn_job(S.RUNNING)
    move(job, M.SUCCEEDED, T0 + 9)
    assert job.finished_at == T0 + 2


def test_each_state_is_waiting_holding_gpus_or_ended() -> None:
    assert ENDED | HOLDING | {S.PENDING} == set(JobState)
    assert not ENDED & HOLDING
    for state in JobState:
        assert state.ended == (state in ENDED)
        assert state.holds_gpus == (state in HOLDING)


def test_each_state_can_be_reached_from_every_other() -> None:
    for start in JobState:
        reached, edge = {start}, [start]
        while edge:
            for after in TABLE[edge.pop()].values():
                if after not in reached:
                    reached.add(after)
                    edge.append(after)
        assert reached == set(JobState)
