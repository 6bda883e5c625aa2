"""Issue 27, 1: `gpujob needs` shows what was learned of the needs of models, and writes it into the model table."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.learned_needs import DONE, Group, Run
from scheduler.store.seen_runs import add_runs
from tests.stories.harness import Scheduler, wait_for
from tests.stories.machine import Machine, machine

__all__ = ["machine"]
GIB = 1024
TABLE = '{\r\n  "default_requirement": 1,\r\n  "models": {"seven":1.00, "two": "2x0.5", "known-7b": 0.5, "fits": 0.45}}'
SECRET = "https://me:hunter22hunter22@hub/m-7b"
ODD = "mödel \"7b\" 'x'\u202e\n\x1b[31m"


def ran(s: Scheduler, model: str, *runs: Run, script: str = "/a.py") -> None:
    """Record runs of a model in the store, as the daemon does."""
    with contextlib.closing(sqlite3.connect(s.folder / ".gpujob" / "store.db")) as store, store:
        add_runs(store, [(Group("", model, script, "NVIDIA A100"), run) for run in runs], 1000.0)


def peak(gib: float, ended: str = DONE) -> Run:
    return Run(round(gib * GIB), 90.0, 0.5, ended)


def of(s: Scheduler, *words: str) -> Any:
    return json.loads(s.cli("needs", "--json", *words).stdout)


def by_name(s: Scheduler, *words: str) -> dict[str, Any]:
    return {row["model"]: row for row in of(s, *words)["models"]}


@pytest.fixture
def seen(machine: Any) -> Machine:
    """A scheduler with two GPUs of 80,000 MiB, a model table, and runs of some models; it has ended."""
    m: Machine = machine().cards("GPU-a", "GPU-b")
    (m.s.folder / "llm_config.json").write_bytes(TABLE.encode())
    m.s.start()
    m.s.stop()
    ran(m.s, "seven", peak(20), peak(31), peak(30, OUT_OF_MEMORY))
    ran(m.s, "seven", peak(12), script="/b.py")
    ran(m.s, "two", peak(16))
    ran(m.s, "fits", peak(31))
    ran(m.s, "new", Run(None, 3.0, None))
    return m


def test_needs_shows_table_runs_and_suggestion(seen: Machine) -> None:
    s = seen.s
    lines = s.cli("needs").stdout.splitlines()
    assert [" ".join(line.split()) for line in lines[:6]] == [
        "MODEL TABLE RUNS MAX P95 LOAD TIME OOM SUGGESTED",
        "fits 0.45 1 31 GiB 31 GiB 50% 1 min 30 s 0 0.45 for 34.1 GiB",
        "known-7b 0.5 0 - - - - 0 0.3 for 19.6 GiB (guess)",
        "new - 1 - - - 3 s 0 -",
        "seven 1.0 4 31 GiB 31 GiB 50% 1 min 30 s 1 0.45 for 34.1 GiB *",
        "two 2x0.5 1 16 GiB 16 GiB 50% 1 min 30 s 0 2x0.25 for 17.6 GiB *",
    ]
    told = " ".join(lines[6:])
    assert "gpujob needs --apply [MODEL…]" in told and f"{s.folder}/llm_config.json" in told and "a guess" in told
    found = by_name(s)
    assert found["seven"] == {
        "model": "seven", "table": "1.0", "runs": 4, "peak_memory": 31 << 30, "p95_memory": 31 << 30, "load": 0.5,
        "run": 90.0, "out_of_memory": 1, "differs": True,
        "suggested": {"need": "0.45", "basis": "seen", "memory": 34919 << 20},
    }  # fmt: skip
    assert list(by_name(s, "two", "new")) == ["new", "two"]
    wrong = s.cli("needs", "sevn", code=6).stderr
    assert wrong == "gpujob: there is no model 'sevn'; did you mean seven? see gpujob needs\n"


def test_apply_writes_only_the_changed_needs_and_keeps_a_backup(seen: Machine) -> None:
    s, table = seen.s, seen.s.folder / "llm_config.json"
    table.chmod(0o640)
    done = s.cli("needs", "--apply").stdout.splitlines()
    (backup,) = s.folder.glob("llm_config.json.before-*")
    assert done == ["seven: 1.0 → 0.45", "two: 2x0.5 → 2x0.25", f"written to {table}; the old file is {backup}"]
    assert table.read_bytes().decode() == TABLE.replace("1.00", "0.45").replace("2x0.5", "2x0.25")
    assert table.stat().st_mode & 0o777 == 0o640 and backup.read_bytes().decode() == TABLE
    before = table.stat()
    assert s.cli("needs", "--apply").stdout.startswith("nothing to apply")
    assert s.cli("needs", "--apply", "seven", "new").stdout.splitlines() == [
        "new: nothing is suggested, because no memory use of it was measured, or no GPU size is known",
        "seven: the model table has 0.45 already",
    ]
    s.cli("needs", "--apply", "sevn", code=6)
    assert (table.stat().st_ino, table.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    found = of(s, "--apply", "known-7b")
    assert found["changed"] == [{"model": "known-7b", "before": "0.5", "after": "0.3"}] and not found["unchanged"]
    assert Path(found["backup"]).exists() and '"known-7b": 0.3,' in table.read_text()
    for row in by_name(s).values():
        share = 0 if row["table"] is None else float(row["table"].split("x")[-1])
        assert row["peak_memory"] is None or share * 80_000 * (1 << 20) >= row["peak_memory"], row


def test_a_running_scheduler_takes_applied_needs_over(machine: Any) -> None:
    """The memory of a run is learned; after --apply a waiting job of the model needs less."""
    m: Machine = machine().cards("GPU-a")
    (m.s.folder / "llm_config.json").write_text('{"models": {"tiny": 1}}')
    program = m.s.folder / "run.sh"
    program.write_text("#!/bin/sh\necho $$ >pid\nwhile [ -e hold-run ]; do sleep 0.02; done\n")
    program.chmod(0o755)
    m.s.hold("run")
    m.s.start()
    m.s.append(f"0,{program},,--llm tiny,")
    file = m.s.folder / "pid"
    pid = int(wait_for(lambda: file.exists() and file.read_text().strip(), "the pid of job 1"))
    m.use("GPU-a", pid, 15_000, load=40)
    wait_for(lambda: m.gpu(0)["memory_own"] == 15_000 << 20, "its memory")
    m.s.release("run")
    m.s.wait_state(1, "done")
    m.unuse("GPU-a", pid)
    m.s.cli("queue", "pause")
    m.s.append(f"0,{program},,--llm tiny --again,")
    wait_for(lambda: m.s.states().get(2) == "pending", "the second job")
    assert m.s.job(2)["need"] == 1
    assert "tiny: 1 → 0.25" in m.s.cli("needs", "--apply").stdout
    wait_for(lambda: m.s.job(2)["need"] == 0.25, f"its new need\n{m.s.said()[-2000:]}")
    row = by_name(m.s)["tiny"]
    assert (row["runs"], row["peak_memory"], row["differs"]) == (1, 15_000 << 20, False)


def test_a_file_is_made_if_the_scheduler_reads_one(machine: Any) -> None:
    m: Machine = machine().cards("GPU-a")
    assert m.s.cli("needs").stdout.startswith("no models")
    assert m.s.cli("needs", "--apply").stdout.startswith("nothing to apply")
    m.s.start()
    ran(m.s, "new", peak(10))
    assert m.s.cli("needs", "--apply").stdout.splitlines()[-1] == f"written to {m.s.folder}/llm_config.json (new file)"
    table = m.s.folder / "llm_config.json"
    assert json.loads(table.read_text()) == {"models": {"new": 0.15}} and table.stat().st_mode & 0o777 == 0o600
    m.s.cli("queue", "pause")
    m.s.append("0,job.py,,--llm new,")
    wait_for(lambda: m.s.rows("SELECT 1 FROM jobs WHERE id=1") and m.s.job(1)["need"] == 0.15, "the need of the table")


def test_without_a_table_to_read_apply_says_what_to_set(machine: Any) -> None:
    m: Machine = machine(llm_config="").cards("GPU-a")
    m.s.start()
    ran(m.s, "new", peak(10))
    assert of(m.s)["table_file"] is None
    assert "set llm_config to the path of a file" in m.s.cli("needs", "--apply", code=3).stderr
    assert not list(m.s.folder.glob("llm_config*"))


def test_a_table_with_a_mistake_is_not_changed(seen: Machine) -> None:
    s, table = seen.s, seen.s.folder / "llm_config.json"
    table.write_text('{"models": {"seven": 1,\n "two": "many"}}')
    for words in ([], ["--apply"]):
        assert s.cli("needs", *words, code=2).stderr.startswith(f"gpujob: {table}:2: models.two: ")
    assert table.read_text().endswith('"many"}}') and not list(s.folder.glob("*.before-*"))
    s.start(ready=False)
    wait_for(lambda: s.process is not None and s.process.poll() is not None, "start refuses the table")


@pytest.mark.parametrize("point", ["state.tmp_written", "state.renamed"])
def test_a_kill_during_apply_leaves_a_whole_table(seen: Machine, point: str) -> None:
    """The table is the old or the new one, `doctor` names what the killed command left, and --apply works again."""
    s, table = seen.s, seen.s.folder / "llm_config.json"
    s.environ["GPUJOB_CRASH_AT"] = point
    s.cli("needs", "--apply", "seven", code=-9)
    del s.environ["GPUJOB_CRASH_AT"]
    new = TABLE.replace("1.00", "0.45")
    assert table.read_bytes().decode() == (TABLE if point == "state.tmp_written" else new)
    (left,) = s.folder.glob(".llm_config.json.new-*")
    findings = json.loads(s.cli("doctor", "--json", code=None).stdout)["findings"]
    assert [one["mend"] for one in findings if one["check"] == "leftovers"] == [f"rm -r {left}"]
    s.cli("needs", "--apply", "seven")
    assert table.read_bytes().decode() == new


def test_strange_names(seen: Machine) -> None:
    """Names cannot control the terminal, and no secret in a name is printed or written."""
    s, table = seen.s, seen.s.folder / "llm_config.json"
    for name in (ODD, SECRET, "x" * 290):
        ran(s, name, peak(10))
    for words in (["needs"], ["needs", "--json"], ["needs", "--apply", SECRET], ["needs", "--apply"]):
        said = s.cli(*words).stdout
        assert "hunter22" not in said and "\x1b" not in said and "\u202e" not in said, words
    written = json.loads(table.read_text())["models"]
    assert written[ODD] == written["x" * 290] == 0.15 and SECRET not in written
    assert "hunter22" not in table.read_text()
    assert "hunter22" not in s.cli("needs", f"{SECRET}y", code=6).stderr


def test_gpus_of_unknown_size_have_no_suggestion(scheduler: Any) -> None:
    """A name that is not UTF-8 is not learned; it once kept the scheduler from recording anything."""
    s: Scheduler = scheduler(gpus=1)
    (s.folder / "llm_config.json").write_text('{"models": {"some-7b": 1}}')
    s.start()
    s.cli("submit", "--", "true", "--llm", "\udcff-7b")
    s.cli("submit", "--", "true", "--llm", "some-7b")
    s.wait_ended(2)
    row = by_name(s)["some-7b"]
    assert (row["runs"], row["suggested"], row["peak_memory"]) == (1, None, None)
    assert list(by_name(s)) == ["some-7b"]
    assert s.cli("needs", "--apply").stdout.startswith("nothing to apply")
