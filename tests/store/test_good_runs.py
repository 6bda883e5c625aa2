"""The last good run of each script in the store."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.core.run_facts import Code, GoodRun, Run, RunFacts
from scheduler.store import good_runs
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.deletion import forget
from scheduler.store.job_columns import job_of_row
from scheduler.store.paths import Places


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with contextlib.closing(Database(Places(str(tmp_path / "state.json")))) as made:
        yield made


def a_run(environment: str = "e", packages: str = "") -> Run:
    code = Code("/w/t.py", 3, "ab", "c")
    facts = RunFacts(environment, (("A", "1"),), packages, code)
    return Run(("--lr", "1"), "base", "/e/bin/python (3.10)", "/w", "one whole GPU", ("A100", "A100"), "550", facts)


def test_the_last_good_run_of_a_script_replaces_the_one_before(database: Database) -> None:
    """A good run is read back as it was recorded. The row of a deleted job is deleted with the job."""
    with database.writing() as connection:
        for _ in range(2):
            rows.insert(connection, JobSpec(arguments=("x",)), ResourceRequest(1, 1000), "", (), 1.0)
        good_runs.save_good_runs(connection, {"a": GoodRun(1, 5.0, a_run()), "b": GoodRun(2, 6.0, Run())})
        good_runs.save_good_runs(connection, {"a": GoodRun(2, 7.5, a_run("f"))})
    assert good_runs.good_run(database.connection, "a") == GoodRun(2, 7.5, a_run("f"))
    assert good_runs.good_run(database.connection, "none") is None
    with database.writing() as connection:
        forget(connection, [2])
    assert good_runs.good_run(database.connection, "a") is None is good_runs.good_run(database.connection, "b")


def test_the_number_of_rows_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The good runs that ended first are deleted, and the sets that neither a good run nor a running job names."""
    monkeypatch.setattr(good_runs, "MOST_RUNS", 2)
    monkeypatch.setattr(good_runs, "SPARE_RUNS", 1)
    monkeypatch.setattr(good_runs, "MOST_SETS", 3)
    with database.writing() as connection:
        for number in range(4):
            good_runs.save_good_runs(connection, {f"s{number}": GoodRun(number, float(number), a_run(f"e{number}"))})
        assert not good_runs.add_sets(connection, {f"e{number}": {"A": str(number)} for number in range(3)}, ())
        assert good_runs.add_sets(connection, {"e3": {}, "running": {"A": "x"}, "gone": {}}, ["running", ""])
    connection = database.connection
    assert [good_runs.good_run(connection, f"s{number}") is not None for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    sets = good_runs.sets_of(connection, ["", "e0", "e2", "e3", "running", "gone"])
    assert sets == {"e2": {"A": "2"}, "e3": {}, "running": {"A": "x"}}


def test_causes_of_failures_of_older_versions_are_read() -> None:
    """The column `failure` of an older version has fewer values."""
    common = {"id": 1, "state": "failed", "spec": "{}", "need_count": 1, "need_parts": 1000, "priority": 0, "place": 0,
              "submitted_at": 1.0, "identity": ""}  # fmt: skip
    found = job_of_row({**common, "failure": '["oom", "line", "hint", 3, null]'}).log_finding
    assert found is not None and (found.peak_mib, found.differs, found.good_run) == (3, (), None)
    found = job_of_row({**common, "failure": '["oom", "line", "hint", 3, null, 5]'}).log_finding
    assert found is not None and (found.tried_mib, found.differs) == (5, ())
