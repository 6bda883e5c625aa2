"""Issue 27, 1: the runs of each model in the store."""

from __future__ import annotations

import pytest

from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.learned_needs import MOST_RUNS, Group, Run
from scheduler.core.suggested_need import Learned
from scheduler.store import seen_runs as store
from scheduler.store.database import Database

SEVEN = Group("", "qwen2.5-7b-inst", "/data/train.py", "NVIDIA A100")


def test_runs_of_a_group_are_added_up(database: Database) -> None:
    run = Run(31_000, 60.0, 0.875)
    with database.writing() as connection:
        store.add_runs(connection, [(SEVEN, run), (SEVEN, Run(None, 1.5, None, OUT_OF_MEMORY))], 1000.0)
    with database.writing() as connection:
        store.add_runs(connection, [(SEVEN, Run(20_000, 2.0, 0.5))] * MOST_RUNS, 2000.0)
    (seen,) = store.seen_runs(database.connection).values()
    assert (seen.count, seen.peak_mib, len(seen.runs)) == (MOST_RUNS + 2, 31_000, MOST_RUNS)
    assert set(seen.runs) == {Run(20_000, 2.0, 0.5)}, "the highest peak is kept when its run is forgotten"


def test_the_groups_that_ran_last_are_kept(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_GROUPS", 3)
    groups = [Group("", f"m{number}", "/a.py", "A100") for number in range(5)]
    with database.writing() as connection:
        for number, group in enumerate(groups):
            store.add_runs(connection, [(group, Run(1, 1.0, None))], float(number))
        store.add_runs(connection, [(groups[2], Run(1, 1.0, None))], 9.0)
        store.add_runs(connection, [(groups[0], Run(1, 1.0, None))], 10.0)
    assert set(store.seen_runs(database.connection)) == {groups[0], groups[2], groups[4]}


def test_the_number_of_gpus_is_a_part_of_the_group(database: Database) -> None:
    two = Group("", "m", "/a.py", "NVIDIA A100", 2)
    one = Group("", "m", "/a.py", "NVIDIA A100")
    with database.writing() as connection:
        store.add_runs(
            connection, [(two, Run(40_000, 1.0, None)), (one, Run(30_000, 1.0, None)), (one, Run(None, 1.0, None))], 1.0
        )
    assert set(store.seen_runs(database.connection)) == {one, two}
    assert store.learned_of(database.connection) == {("m", "a.py"): Learned(3, {1: 30_000, 2: 40_000})}
