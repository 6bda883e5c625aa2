"""Tests of the recovery table: it gives a verdict about an attempt that is found after a crash, in all 144 cases."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler.core.job import JobState
from scheduler.core.recovery import HOLDING_STATES, TABLE, Found, Record, Verdict

# Each line: state, record, four verdicts for the same boot, four for another boot.
# The four verdicts are for: no process found, a starter, a leader, other processes.
EXPECTED = """
starting none      requeue requeue adopt watch_lost                          lost lost lost lost
starting claimed   lost wait adopt watch_lost                                lost lost lost lost
starting running   lost lost adopt watch_lost                                lost lost lost lost
starting ended     finish finish finish_holding finish_holding               finish finish finish finish
starting never_ran not_started not_started adopt watch_lost                  not_started not_started not_started not_started
starting broken    lost wait adopt watch_lost                                lost lost lost lost
running  none      lost lost adopt watch_lost                                lost lost lost lost
running  claimed   lost wait adopt watch_lost                                lost lost lost lost
running  running   lost lost adopt watch_lost                                lost lost lost lost
running  ended     finish finish finish_holding finish_holding               finish finish finish finish
running  never_ran not_started not_started adopt watch_lost                  not_started not_started not_started not_started
running  broken    lost wait adopt watch_lost                                lost lost lost lost
stopping none      requeue requeue adopt watch_lost                          lost lost lost lost
stopping claimed   lost wait adopt watch_lost                                lost lost lost lost
stopping running   lost lost adopt watch_lost                                lost lost lost lost
stopping ended     finish finish finish_holding finish_holding               finish finish finish finish
stopping never_ran not_started not_started adopt watch_lost                  not_started not_started not_started not_started
stopping broken    lost wait adopt watch_lost                                lost lost lost lost
"""


def expected() -> dict[tuple[JobState, Record, bool, Found], Verdict]:
    rows = {}
    for line in EXPECTED.split("\n"):
        if line:
            state, record, *verdicts = line.split()
            columns = product((True, False), (Found.NOTHING, Found.STARTER, Found.LEADER, Found.OTHERS))
            for (same_boot, found), verdict in zip(columns, verdicts, strict=True):
                rows[JobState(state), Record(record), same_boot, found] = Verdict(verdict)
    return rows


ROWS = expected()
EVERYTHING = list(product(HOLDING_STATES, Record, (True, False), Found))


def test_each_combination_of_the_recovery_table_has_a_verdict() -> None:
    """S3.35: There is a verdict for each combination of job state, record, same or other boot, and processes found."""
    assert HOLDING_STATES == (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
    assert len(EVERYTHING) == 3 * 6 * 2 * 4
    assert set(TABLE) == set(EVERYTHING) == set(ROWS)


@pytest.mark.parametrize(
    "row", EVERYTHING, ids=[f"{s.value}-{r.value}-{'same' if b else 'other'}-{f.value}" for s, r, b, f in EVERYTHING]
)
def test_the_recovery_table_has_the_expected_verdict(row: tuple[JobState, Record, bool, Found]) -> None:
    assert TABLE[row] is ROWS[row]


def test_only_an_attempt_that_certainly_never_ran_is_repeated() -> None:
    for (state, record, same_boot, found), verdict in TABLE.items():
        if verdict is Verdict.REQUEUE:
            assert record is Record.NONE and same_boot and found in (Found.NOTHING, Found.STARTER)
            assert state is not JobState.RUNNING
        if verdict is Verdict.NOT_STARTED:
            assert record is Record.NEVER_RAN


def test_exactly_the_attempts_with_a_recorded_end_are_finished() -> None:
    for (_, record, _, _), verdict in TABLE.items():
        assert (verdict in (Verdict.FINISH, Verdict.FINISH_HOLDING)) == (record is Record.ENDED)


def test_no_process_of_another_boot_counts_as_alive() -> None:
    for (_, _, same_boot, found), verdict in TABLE.items():
        if verdict in (Verdict.ADOPT, Verdict.WATCH_LOST, Verdict.FINISH_HOLDING, Verdict.WAIT):
            assert same_boot and found is not Found.NOTHING


def test_an_attempt_with_live_processes_keeps_its_gpu() -> None:
    for (_, _, same_boot, found), verdict in TABLE.items():
        if same_boot and found in (Found.LEADER, Found.OTHERS):
            assert verdict in (Verdict.ADOPT, Verdict.WATCH_LOST, Verdict.FINISH_HOLDING)


def test_an_attempt_that_may_be_starting_now_is_neither_lost_nor_repeated() -> None:
    for (_, record, same_boot, found), verdict in TABLE.items():
        claimed = record in (Record.CLAIMED, Record.BROKEN)  # whether the command was started is unknown
        assert (verdict is Verdict.WAIT) == (claimed and same_boot and found is Found.STARTER)
