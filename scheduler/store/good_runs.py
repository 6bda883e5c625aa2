"""The last good run of each script, and the sets of variables and packages that runs name (`core/run_facts.py`)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping

from scheduler.core.run_facts import GoodRun, Run, RunFacts
from scheduler.store.run_facts import facts_of, facts_text

MOST_RUNS = 2000  # the good runs that ended first are forgotten
SPARE_RUNS = 100  # so many more before they are
MOST_SETS = 5000  # sets that nothing names are deleted when there are more


def good_run(connection: sqlite3.Connection, group: str) -> GoodRun | None:
    """Return the last good run of a group (`core/run_target.py: group_of`); None if none is known."""
    row = connection.execute("SELECT job, at, run FROM good_runs WHERE script=?", (group,)).fetchone()
    if row is None:
        return None
    words, conda_env, interpreter, folder, need, gpus, driver, facts = json.loads(row[2])
    run = Run(tuple(words), conda_env, interpreter, folder, need, tuple(gpus), driver, facts_of(facts) or RunFacts())
    return GoodRun(row[0], row[1], run)


def save_good_runs(connection: sqlite3.Connection, runs: Mapping[str, GoodRun]) -> None:
    """Record the last good run of each group; the oldest are deleted when there are more than ``MOST_RUNS``."""
    new = 0
    for group, good in runs.items():
        run = good.run
        text = json.dumps(
            [
                run.words,
                run.conda_env,
                run.interpreter,
                run.folder,
                run.need,
                run.gpus,
                run.driver,
                facts_text(run.facts),
            ]
        )
        values = (good.job, good.at, run.facts.environment, run.facts.packages, text, group)
        known = connection.execute(
            "UPDATE good_runs SET job=?, at=?, environment=?, packages=?, run=? WHERE script=?", values
        )
        if not known.rowcount:
            new += 1
            connection.execute(
                "INSERT INTO good_runs (job, at, environment, packages, run, script) VALUES (?,?,?,?,?,?)", values
            )
    if new and connection.execute("SELECT count(*) FROM good_runs").fetchone()[0] > MOST_RUNS + SPARE_RUNS:
        connection.execute(
            "DELETE FROM good_runs WHERE script IN (SELECT script FROM good_runs ORDER BY at DESC LIMIT -1 OFFSET ?)",
            (MOST_RUNS,),
        )


def forget_job(connection: sqlite3.Connection, job: int) -> None:
    """Delete the good run of a job that is deleted: its arguments must not stay."""
    connection.execute("DELETE FROM good_runs WHERE job=?", (job,))


def sets_of(connection: sqlite3.Connection, ids: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return id → set, for those of these ids that the store has."""
    found: dict[str, dict[str, str]] = {}
    for one in {*ids} - {""}:
        row = connection.execute("SELECT items FROM fact_sets WHERE id=?", (one,)).fetchone()
        if row is not None:
            found[one] = json.loads(row[0])
    return found


def add_sets(connection: sqlite3.Connection, sets: Mapping[str, Mapping[str, str]], used: Collection[str]) -> bool:
    """Add sets. Return whether sets were deleted because there were too many. ``used``: ids that running jobs name."""
    connection.executemany(
        "INSERT OR IGNORE INTO fact_sets VALUES (?,?)", [(one, json.dumps(items)) for one, items in sets.items()]
    )
    if connection.execute("SELECT count(*) FROM fact_sets").fetchone()[0] <= MOST_SETS:
        return False
    named = {one for row in connection.execute("SELECT environment, packages FROM good_runs") for one in row} | {*used}
    stored = [one for (one,) in connection.execute("SELECT id FROM fact_sets")]
    connection.executemany("DELETE FROM fact_sets WHERE id=?", [(one,) for one in stored if one not in named])
    return True
