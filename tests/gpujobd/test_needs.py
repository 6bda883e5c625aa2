"""Issue 27, 1: learned needs in the scheduler of all users: users see their own runs, root writes the model table."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.core.model_table import ModelTable
from tests.gpujobd.machine import STATE, Machine
from tests.stories.harness import wait_for
from tests.stories.people import ROOT_ONLY

pytestmark = ROOT_ONLY
TABLE = "/etc/gpujob/llm_config.json"


RUNS = """
import sqlite3, sys
from scheduler.core.learned_needs import Group, Run
from scheduler.store.seen_runs import add_runs
connection = sqlite3.connect(sys.argv[1], timeout=20)
with connection:
    connection.execute("DELETE FROM seen_runs")
    connection.execute("UPDATE gpus SET memory_mib=80000")
    for user, model, mib in (("ada", "shared", 16_000), ("bob", "shared", 32_000), ("bob", "of-bob", 1_000)):
        add_runs(connection, [(Group(user, model, f"/home/{user}/a.py", "A100"), Run(mib, 9.0, 0.5))], 1000.0)
connection.close()
"""


FORGET = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=20)
with connection:
    connection.execute("DELETE FROM seen_runs")
    connection.execute("UPDATE gpus SET memory_mib=NULL")
connection.close()
"""


def record_runs(machine: Machine) -> None:
    """Record runs of ada and bob, and give the GPUs a known size."""
    (store,) = machine.root("find", STATE, "-name", "store.db").out.split()
    machine.root(sys.executable, "-I", "-c", RUNS, store)


@pytest.fixture
def seen(machine: Machine) -> Iterator[Machine]:
    """A machine with runs of ada and bob, which other tests do not see."""
    record_runs(machine)
    yield machine
    (store,) = machine.root("find", STATE, "-name", "store.db").out.split()
    machine.root(sys.executable, "-I", "-c", FORGET, store)


def rows(machine: Machine, who: str) -> dict[str, Any]:
    done = machine.gpujob(who, "needs", "--json")
    assert not done.code, done
    return {row["model"]: row for row in done.json()["models"]}


def test_a_user_sees_own_runs_only(seen: Machine) -> None:
    """Neither the models nor the peaks of other users; an administrator sees all."""
    assert list(rows(seen, "ada")) == ["shared"]
    assert (rows(seen, "ada")["shared"]["runs"], rows(seen, "ada")["shared"]["peak_memory"]) == (1, 16_000 << 20)
    assert rows(seen, "bob")["shared"]["peak_memory"] == 32_000 << 20
    everything = rows(seen, "eve")
    assert list(everything) == ["of-bob", "shared"] and everything["shared"]["runs"] == 2
    assert seen.gpujob("ada", "needs", "of-bob").code == 6
    with contextlib.closing(seen.client("ada")) as client:
        assert [row.model for row in client.needs(ModelTable("1", {"of-bob": "1"}))] == ["shared"]


def test_only_root_changes_the_table_of_the_machine(seen: Machine) -> None:
    """Others are told why; the table is made readable for the scheduler, which takes it over."""
    for who in ("ada", "bob"):
        done = seen.gpujob(who, "needs", "--apply")
        assert done.code == 3 and "only an administrator may change the model table" in done.err, done
    assert seen.gpujob("eve", "needs", "--apply").code == 1
    assert seen.root("ls", "/etc/gpujob").out.split() == ["config.yaml"]
    as_root = ("env", "GPUJOB_WARM=0", "sh", "-c")
    words = f'cd / && "{sys.executable}" -I -m scheduler needs --system --apply --json'
    done = seen.root(*as_root, words).json()
    assert done["table_file"] == TABLE and {one["model"]: one["after"] for one in done["changed"]} == {
        "of-bob": "0.05",
        "shared": "0.45",
    }
    try:
        assert json.loads(seen.root("cat", TABLE).out)["models"] == {"of-bob": 0.05, "shared": 0.45}
        assert seen.root("stat", "-c", "%a %U", TABLE).out.split() == ["644", "root"]
        wait_for(lambda: rows(seen, "eve")["shared"]["table"] == "0.45", "the scheduler reads the table")
        seen.root("sed", "-i", "s/0.45/1/", TABLE)
        wait_for(lambda: rows(seen, "eve")["shared"]["table"] == "1", "the scheduler reads the table again")
        told = seen.gpujob("eve", "needs", "--apply")
        assert told.code == 3 and "it belongs to user 0; run this command as root" in told.err, told
    finally:  # other tests of this machine use no table
        seen.root("sh", "-c", f"echo '{{}}' >{TABLE}")
        wait_for(
            lambda: not any(row["table"] for row in rows(seen, "eve").values()), "the scheduler reads the empty table"
        )
        seen.root("sh", "-c", f"rm -f {TABLE}*")
