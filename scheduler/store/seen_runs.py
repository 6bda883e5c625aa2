"""The memory, load and run time of the runs of each model, in the store (`core/learned_needs.py`).

They stay when jobs are forgotten.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import replace

from scheduler.core.job import JobSpec
from scheduler.core.learned_needs import Group, Run, Seen
from scheduler.core.model_table import ModelTable, lacks_model
from scheduler.core.run_target import script_name
from scheduler.core.suggested_need import Learned, highest
from scheduler.store.jobs import meta

MOST_GROUPS = 2000  # the groups whose last run is oldest are forgotten
_KEY = "user=? AND model=? AND script=? AND gpu=?"


def add_runs(connection: sqlite3.Connection, measured: Iterable[tuple[Group, Run]], now: float) -> None:
    """Add ended runs. ``now``: seconds since 1970."""
    for group, run in measured:
        key = (group.user, group.model, group.script, _gpus_text(group))
        row = connection.execute(f"SELECT count, peak_mib, runs FROM seen_runs WHERE {_KEY}", key).fetchone()
        seen = (Seen() if row is None else _seen(*row)).with_run(run)
        runs = json.dumps([[one.peak_mib, round(one.wall_s, 3), one.load, one.ended] for one in seen.runs])
        connection.execute(
            "INSERT OR REPLACE INTO seen_runs VALUES (?,?,?,?,?,?,?,?)", (*key, seen.count, seen.peak_mib, runs, now)
        )
        if row is None:
            connection.execute(
                "DELETE FROM seen_runs WHERE (user, model, script, gpu) IN"
                " (SELECT user, model, script, gpu FROM seen_runs ORDER BY at DESC LIMIT -1 OFFSET ?)",
                (MOST_GROUPS,),
            )


def seen_runs(connection: sqlite3.Connection) -> dict[Group, Seen]:
    """Return the runs of all groups."""
    rows = connection.execute("SELECT user, model, script, gpu, count, peak_mib, runs FROM seen_runs")
    return {Group(user, model, script, *_gpus_of(gpu)): _seen(*seen) for user, model, script, gpu, *seen in rows}


def _gpus_text(group: Group) -> str:
    """Return the number and type of GPUs as text, such as ``2 x NVIDIA A100``; the number 1 is left out."""
    return group.gpu if group.count == 1 else f"{group.count} x {group.gpu}"


def _gpus_of(text: str) -> tuple[str, int]:
    number, x, name = text.partition(" x ")
    return (name, int(number)) if x and number.isdigit() else (text, 1)


def learned_of(connection: sqlite3.Connection) -> dict[tuple[str, str], Learned]:
    """Return (model, name of a script) → the number of its runs and their highest peaks."""
    found: dict[tuple[str, str], Learned] = {}
    for model, script, gpus, count, peak in connection.execute(
        "SELECT model, script, gpu, count, peak_mib FROM seen_runs"
    ):
        key = (model, script_name(script))
        before = found.get(key, Learned(0, {}))
        found[key] = Learned(before.runs + count, highest([*before.peaks.items(), (_gpus_of(gpus)[1], peak)]))
    return found


def with_learned(connection: sqlite3.Connection, table: ModelTable, spec: JobSpec | None = None) -> ModelTable:
    """Return the model table with the runs of each model, if the setting `learn` of the scheduler is on.

    ``spec``: the table is for this job; then it stays as it is if the job does not depend on what was learned.
    """
    if spec is not None and not lacks_model(table, spec):
        return table
    learn, _ = json.loads(meta(connection, "settings") or "{}").get("learn", (False, ""))
    return replace(table, learned=learned_of(connection)) if learn else table


def _seen(count: int, peak_mib: int | None, runs: str) -> Seen:
    return Seen(tuple(Run(*run) for run in json.loads(runs)), count, peak_mib)
