"""A scheduler with very many ended jobs."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from tests.stories.harness import LONG, Scheduler, wait_for


def multiply(s: Scheduler, number: int) -> None:
    """Copy job 1, which has ended, until there are ``number`` jobs.

    Each copy gets what a real run leaves: the rows of the job and of its events, an attempt record, and a row of
    `line_counts` for the job's line in the jobs file. All copies end before job 1, those with low ids first.
    """
    house = s.folder / ".gpujob"
    db = sqlite3.connect(house / "store.db", isolation_level=None)
    db.execute("PRAGMA synchronous=OFF")
    db.execute("BEGIN")
    numbers = f"WITH RECURSIVE c(k) AS (SELECT 2 UNION ALL SELECT k+1 FROM c WHERE k<{number})"
    own = {"id": "k", "identity": "printf('%032x', k * 2654435761)", "blocking": "printf('%032x', k * 2654435761)"}
    earlier = f"(k-{number + 1})*0.001"
    own |= {name: f"{name}+{earlier}" for name in ("submitted_at", "started_at", "finished_at")}
    own |= {name: f"replace({name}, 'template', 'k' || k)" for name in ("spec", "argv")}
    own["log"] = "replace(log, 'job_1_', 'job_' || k || '_')"
    names = [row[1] for row in db.execute("PRAGMA table_info(jobs)")]
    db.execute(
        f"{numbers} INSERT INTO jobs ({', '.join(names)}) SELECT {', '.join(own.get(n, n) for n in names)}"
        " FROM c, jobs WHERE id=1"
    )
    db.execute(
        f"{numbers} INSERT INTO events SELECT k, e.n, e.at+{earlier}, e.kind, e.detail FROM c, events e WHERE e.job=1"
    )
    db.execute(
        f"{numbers} INSERT INTO line_counts (path, identity, n) SELECT path, {own['identity']}, 1 FROM c, line_counts"
    )
    db.execute("COMMIT")
    db.close()
    record = (house / "attempts" / "1.1").read_bytes()
    for job in range(2, number + 1):
        (house / "attempts" / f"{job}.1").write_bytes(record)
    (house / "high").write_text(f"{number:020d}\n")
    os.sync()  # else the first sync of the scheduler writes the files of a million jobs, 4 GB


@pytest.mark.long
def test_e17_the_scheduler_works_with_many_ended_jobs_and_deletes_the_oldest(scheduler):
    """E17: With 5,000 ended jobs in the store, the scheduler starts, lists jobs and runs new ones.

    Then the setting `keep_finished` makes it delete the oldest jobs. The long form of the test uses a million jobs. The
    test prints the times.
    """
    number = 1_000_000 if LONG else 5_000
    s = scheduler(gpus=1)
    (s.folder / "config.yaml").write_text("{}\n")
    s.append(s.line("template"))
    s.start()
    s.wait_ended(1)
    s.stop()
    multiply(s, number)
    took = {}

    def timed(what: str, *words: str) -> str:
        began = time.monotonic()
        out = s.cli(*words).stdout
        took[what] = time.monotonic() - began
        return out

    began = time.monotonic()
    s.start()
    took["start"] = time.monotonic() - began
    assert f"{number} done" in timed("status", "status")
    newest = timed("jobs -n 20", "jobs", "-n", "20").splitlines()[1:]
    assert [int(line.split()[0]) for line in newest] == list(range(number - 19, number + 1))
    assert timed("jobs -n 5 --state done", "jobs", "-n", "5", "--state", "done").count("\n") == 6
    assert timed("jobs --state pending", "jobs", "--state", "pending").count("\n") == 1
    assert f'"id": {number}' in timed("show @", "show", "@", "--json")
    began = time.monotonic()
    s.append(*(f"0,/bin/true,,{n}" for n in range(50)))
    wait_for(lambda: s.rows("SELECT n FROM counts WHERE state='done'") == [(number + 50,)], "they run")
    took["50 jobs"] = time.monotonic() - began
    memory = Path(f"/proc/{s.pid}/status").read_text().split("VmRSS:")[1].split()[0]
    assert s.starts("template") == 1
    keep = number * 9 // 10
    began = time.monotonic()
    (s.folder / "config.yaml").write_text(f"keep_finished: {keep}\n")
    wait_for(lambda: f"removed {number + 50 - keep} ended jobs" in s.said(), "the rest is forgotten", 1500)
    took[f"forgetting {number + 50 - keep}"] = time.monotonic() - began
    assert s.rows("SELECT count(*), max(id) FROM jobs") == [(keep, number + 50)]
    assert s.rows("SELECT sum(n) FROM counts") == [(keep,)]
    print(number, {what: round(seconds, 2) for what, seconds in took.items()}, f"{int(memory) // 1024} MiB")
