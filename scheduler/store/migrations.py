"""The schema of the store as numbered steps. Each step leads from one version to the next version.

A step is never changed, not even in its SQL comments: `recovery/salvage.py` replaces a damaged first page of a store
with the first page of a new store. This works only if the same steps created both stores.

`store/job_columns.py` lists the columns of the table `jobs`. A test compares the first step with this list. The step of
a later version adds the columns that the list gives for this version.
"""

from __future__ import annotations

import sqlite3

from scheduler.store.job_columns import COLUMNS
from scheduler.system.crash_points import crash_point

_FIRST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,        -- never given out twice: the newest row is never deleted
    state TEXT NOT NULL,
    spec TEXT NOT NULL,
    identity TEXT NOT NULL,
    blocking TEXT UNIQUE,          -- the identity while an equal line is a duplicate, else NULL
    need_count INTEGER NOT NULL,
    need_parts INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    place INTEGER NOT NULL,        -- among equal priorities
    allowed TEXT,
    vram_mib INTEGER NOT NULL DEFAULT 0,
    waits_for INTEGER NOT NULL DEFAULT 0,
    submitted_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,              -- NULL while the job lives
    attempt INTEGER NOT NULL DEFAULT 0,
    start_failures INTEGER NOT NULL DEFAULT 0,
    runs_failed INTEGER NOT NULL DEFAULT 0,
    oom_retries INTEGER NOT NULL DEFAULT 0,
    not_before REAL,
    gpus TEXT NOT NULL DEFAULT '',
    pid INTEGER,
    ticks INTEGER,
    boot TEXT NOT NULL DEFAULT '',
    runner TEXT NOT NULL DEFAULT 'direct',
    session TEXT,
    argv TEXT NOT NULL DEFAULT '',  -- the words as they were run
    log TEXT NOT NULL DEFAULT '',
    outcome TEXT,
    exit_code INTEGER,
    signal INTEGER,
    reason_code TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '',
    stop_why TEXT NOT NULL DEFAULT '',
    stop_at REAL,
    held INTEGER NOT NULL DEFAULT 0,
    notes TEXT NOT NULL DEFAULT '',
    failure TEXT NOT NULL DEFAULT ''
);
CREATE INDEX jobs_finished ON jobs (finished_at);
CREATE TABLE events (
    job INTEGER, n INTEGER, at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (job, n)
) WITHOUT ROWID;
CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, arguments TEXT NOT NULL, made_at REAL NOT NULL,
    code INTEGER, lines TEXT
);
CREATE INDEX requests_open ON requests (code) WHERE code IS NULL;
CREATE TABLE pauses (gpu INTEGER PRIMARY KEY);
CREATE TABLE holdings (
    key TEXT PRIMARY KEY, job INTEGER NOT NULL, need_count INTEGER NOT NULL, need_parts INTEGER NOT NULL,
    gpus TEXT NOT NULL, vram_mib INTEGER NOT NULL, processes TEXT NOT NULL, boot TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE reasons (class TEXT PRIMARY KEY, code TEXT NOT NULL, sentence TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE gpus (
    id INTEGER PRIMARY KEY, uuid TEXT NOT NULL, name TEXT NOT NULL, server INTEGER NOT NULL, memory_mib INTEGER
);
CREATE TABLE files (
    path TEXT PRIMARY KEY, device INTEGER, inode INTEGER, place INTEGER, lines INTEGER, crc INTEGER,
    replaying INTEGER, open_line INTEGER, skipping INTEGER, trouble TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE line_counts (
    path TEXT, identity TEXT, n INTEGER NOT NULL, before INTEGER NOT NULL DEFAULT 0,
    repeated INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (path, identity)
) WITHOUT ROWID;
CREATE TABLE refused (
    path TEXT, number INTEGER, text TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (path, number)
) WITHOUT ROWID;
"""


# One step for each version, never changed after a release: step n brings a store from version n-1 to version n.
_READINGS = """
CREATE TABLE readings (
    gpu INTEGER PRIMARY KEY, at REAL NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    memory_total INTEGER, memory_used INTEGER, own INTEGER NOT NULL, load REAL, temperature INTEGER   -- MiB, 0 to 1, Celsius
);
"""
ENDING = "finished_at IS NOT NULL AND state='stopping'"  # the main process has ended, others have not
_OLD_LOGS = f"""
-- Logs of jobs that are forgotten, and when these ended.
CREATE TABLE old_logs (at REAL, path TEXT, PRIMARY KEY (at, path)) WITHOUT ROWID;
CREATE INDEX jobs_dependents ON jobs (id) WHERE waits_for=1;
CREATE INDEX jobs_ending ON jobs (id) WHERE {ENDING};
"""
# Counted by triggers, for every writer: to count a million rows for each write of the state file would take 0.5 s.
_COUNTS = """
CREATE TABLE counts (state TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counts SELECT state, count(*) FROM jobs GROUP BY state;
CREATE TRIGGER jobs_added AFTER INSERT ON jobs BEGIN
    INSERT INTO counts VALUES (new.state, 1) ON CONFLICT (state) DO UPDATE SET n=n+1; END;
CREATE TRIGGER jobs_moved AFTER UPDATE OF state ON jobs WHEN old.state<>new.state BEGIN
    UPDATE counts SET n=n-1 WHERE state=old.state; INSERT INTO counts VALUES (new.state, 1) ON CONFLICT (state) DO UPDATE SET n=n+1; END;
CREATE TRIGGER jobs_removed AFTER DELETE ON jobs BEGIN UPDATE counts SET n=n-1 WHERE state=old.state; END;
CREATE INDEX jobs_in_hand ON jobs (id) WHERE state IN ('starting', 'running', 'stopping');
CREATE INDEX line_counts_repeated ON line_counts (repeated) WHERE repeated>0;
"""
_CALLS = """
-- Jobs at whose end something is to be done; when it was begun.
CREATE TABLE calls (job INTEGER PRIMARY KEY, begun REAL);
"""
_EVENT_NAMES = "UPDATE events SET kind = 'retry_scheduled' WHERE kind = 'fell';"
_TALLIES = """
-- What is counted for ever, also of jobs that are forgotten (core/counters.py).
CREATE TABLE tallies (name TEXT, label TEXT, n REAL NOT NULL, PRIMARY KEY (name, label)) WITHOUT ROWID;
-- When it answered last: of a silent GPU long before ``at``.
ALTER TABLE readings ADD COLUMN read_at REAL;
ALTER TABLE readings ADD COLUMN foreign_mib INTEGER;
ALTER TABLE readings ADD COLUMN reserved INTEGER;
ALTER TABLE readings ADD COLUMN power REAL;
ALTER TABLE readings ADD COLUMN energy REAL;
"""

# Part of a step, so it is never changed. The order is that of `core/job.py: Job.turn`.
QUEUE_ORDER = "min(place, 0), priority, CASE place WHEN 0 THEN id ELSE place END"
# For the first waiting jobs of the queue: without the index, all waiting jobs would be read and sorted.
_QUEUE = f"CREATE INDEX jobs_queue ON jobs ({QUEUE_ORDER}) WHERE state='pending';"

_NODES = """
ALTER TABLE gpus ADD COLUMN node TEXT NOT NULL DEFAULT '';
ALTER TABLE gpus ADD COLUMN partition TEXT NOT NULL DEFAULT '';
"""

# Step 10 adds the column `user`, which this index needs: only jobs of a scheduler of several users have a value there.
_USERS = "CREATE INDEX jobs_users ON jobs (user, state) WHERE user<>'';"

# Step 12 also adds the column `gpu_retries`. A fault counts only in the boot in which the GPU reported it.
_FAULTS = """
CREATE TABLE gpu_faults (
    uuid TEXT PRIMARY KEY, what TEXT NOT NULL, at REAL NOT NULL, last_at REAL NOT NULL, memory_errors TEXT NOT NULL,
    active INTEGER NOT NULL, boot TEXT NOT NULL
) WITHOUT ROWID;
"""

# Links between GPUs, as JSON (core/topology.py), and profiles of MIG instances. Step 13 also adds columns of the jobs.
_LINKS = """
ALTER TABLE gpus ADD COLUMN links TEXT NOT NULL DEFAULT '';
ALTER TABLE gpus ADD COLUMN profile TEXT NOT NULL DEFAULT '';
"""

# What the runs of each model used (core/learned_needs.py). ``runs``: the newest, as JSON.
_SEEN_RUNS = """
CREATE TABLE seen_runs (
    user TEXT, model TEXT, script TEXT, gpu TEXT, count INTEGER NOT NULL, peak_mib INTEGER, runs TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (user, model, script, gpu)
) WITHOUT ROWID;
"""

# The last good run of each script (core/run_facts.py), and the sets that runs name: variable → hash, package → version.
# Step 15 also adds the column `facts` of the jobs.
_GOOD_RUNS = """
CREATE TABLE good_runs (
    script TEXT PRIMARY KEY, job INTEGER NOT NULL, at REAL NOT NULL, environment TEXT NOT NULL, packages TEXT NOT NULL, run TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX good_runs_job ON good_runs (job);
CREATE TABLE fact_sets (id TEXT PRIMARY KEY, items TEXT NOT NULL) WITHOUT ROWID;
"""

STEPS = (
    _FIRST, _READINGS, _OLD_LOGS, _COUNTS, _CALLS, _TALLIES, _EVENT_NAMES, _QUEUE, _NODES, "", _USERS, _FAULTS, _LINKS,
    _SEEN_RUNS, _GOOD_RUNS,
)  # fmt: skip
VERSION = len(STEPS)


def migrate(connection: sqlite3.Connection, version: int, until: int = VERSION) -> None:
    """Bring a store from ``version`` (0: empty) to the version ``until``, in the caller's transaction."""
    for number in range(version + 1, until + 1):
        for statement in STEPS[number - 1].split(";\n"):
            if statement.strip():
                connection.execute(statement)
        if number > 1:
            for column in COLUMNS:
                if column.since == number:
                    connection.execute(f"ALTER TABLE jobs ADD COLUMN {column.name} {column.sql}")
        crash_point("migrate.step")
    connection.execute(f"PRAGMA user_version={until}")
