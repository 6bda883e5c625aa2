BEGIN TRANSACTION;
CREATE TABLE events (
    job INTEGER, n INTEGER, at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (job, n)
) WITHOUT ROWID;
INSERT INTO "events" VALUES(1,1,1.79525041931087374685e+09,'started','{"pid": 15809, "gpus": [0], "attempt": 1}');
INSERT INTO "events" VALUES(1,2,1.79525041949690079695e+09,'done','{"outcome": "exit", "exit_code": 0, "signal": null, "attempt": 1}');
INSERT INTO "events" VALUES(2,1,1.79525041931087374685e+09,'started','{"pid": 15810, "gpus": [1], "attempt": 1}');
INSERT INTO "events" VALUES(2,2,1.79525041962091135979e+09,'failed','{"outcome": "exit", "exit_code": 3, "signal": null, "attempt": 1}');
INSERT INTO "events" VALUES(3,1,1.79525041925913476947e+09,'missing','{"why": "no such file /tmp/sc2/gone.py; looked again when it appears"}');
CREATE TABLE files (
    path TEXT PRIMARY KEY, device INTEGER, inode INTEGER, place INTEGER, lines INTEGER, crc INTEGER,
    replaying INTEGER, open_line INTEGER, skipping INTEGER, trouble TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
INSERT INTO "files" VALUES('/tmp/sc2/jobs.txt',65024,2343629,41,3,1300237074,0,0,0,'');
CREATE TABLE gpus (
    id INTEGER PRIMARY KEY, uuid TEXT NOT NULL, name TEXT NOT NULL, server INTEGER NOT NULL, memory_mib INTEGER
);
INSERT INTO "gpus" VALUES(0,'declared:0','declared',0,NULL);
INSERT INTO "gpus" VALUES(1,'declared:1','declared',0,NULL);
CREATE TABLE holdings (
    key TEXT PRIMARY KEY, job INTEGER NOT NULL, need_count INTEGER NOT NULL, need_parts INTEGER NOT NULL,
    gpus TEXT NOT NULL, vram_mib INTEGER NOT NULL, processes TEXT NOT NULL, boot TEXT NOT NULL
) WITHOUT ROWID;
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
INSERT INTO "jobs" VALUES(1,'done','{"script": "/tmp/sc2/t.py", "arguments": ["0", "0"], "origin": "jobs.txt:1"}','f2e84c525dffa76c394ae900dae8bfd7','f2e84c525dffa76c394ae900dae8bfd7',1,1000,0,1,NULL,0,0,1.79525041925913476947e+09,1.7952504192789075374e+09,1.79525041949671721464e+09,1,0,0,0,NULL,'0',15809,1356097,'2ff1370e-1d4b-418d-8a0f-bf22f066ebd2','direct',NULL,'["/root/.pyenv/shims/python", "-u", "/tmp/sc2/t.py", "0", "0", "--cuda", "0"]','/tmp/sc2/gpu_scheduler_logs/job_1_20261121_084019.log','exit',0,NULL,'','','',NULL,0,'','');
INSERT INTO "jobs" VALUES(2,'failed','{"script": "/tmp/sc2/t.py", "arguments": ["3", "0.1"], "origin": "jobs.txt:2"}','af57728349e337809b12bd3a225c1fcc',NULL,1,1000,0,2,NULL,0,0,1.79525041925913476947e+09,1.79525041927925014498e+09,1.79525041962067675592e+09,1,0,0,0,NULL,'1',15810,1356097,'2ff1370e-1d4b-418d-8a0f-bf22f066ebd2','direct',NULL,'["/root/.pyenv/shims/python", "-u", "/tmp/sc2/t.py", "3", "0.1", "--cuda", "1"]','/tmp/sc2/gpu_scheduler_logs/job_2_20261121_084019.log','exit',3,NULL,'','','',NULL,0,'','');
INSERT INTO "jobs" VALUES(3,'pending','{"script": "/tmp/sc2/gone.py", "arguments": ["x"], "priority": 5, "allowed": [1], "origin": "jobs.txt:3"}','a4adde9907638f687a4e722a7814202d','a4adde9907638f687a4e722a7814202d',1,1000,5,3,'1',0,0,1.79525041925913476947e+09,NULL,NULL,0,0,0,0,NULL,'',NULL,NULL,'','direct',NULL,'','',NULL,NULL,NULL,'missing','no such file /tmp/sc2/gone.py; looked again when it appears','',NULL,0,'','');
CREATE TABLE line_counts (
    path TEXT, identity TEXT, n INTEGER NOT NULL, before INTEGER NOT NULL DEFAULT 0,
    repeated INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (path, identity)
) WITHOUT ROWID;
INSERT INTO "line_counts" VALUES('/tmp/sc2/jobs.txt','a4adde9907638f687a4e722a7814202d',1,0,0);
INSERT INTO "line_counts" VALUES('/tmp/sc2/jobs.txt','af57728349e337809b12bd3a225c1fcc',1,0,0);
INSERT INTO "line_counts" VALUES('/tmp/sc2/jobs.txt','f2e84c525dffa76c394ae900dae8bfd7',1,0,0);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('jobs_file','/tmp/sc2/jobs.txt');
INSERT INTO "meta" VALUES('llm_config','/tmp/sc2/llm_config.json');
INSERT INTO "meta" VALUES('queue_paused','');
CREATE TABLE pauses (gpu INTEGER PRIMARY KEY);
INSERT INTO "pauses" VALUES(1);
CREATE TABLE reasons (class TEXT PRIMARY KEY, code TEXT NOT NULL, sentence TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE refused (
    path TEXT, number INTEGER, text TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (path, number)
) WITHOUT ROWID;
CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, arguments TEXT NOT NULL, made_at REAL NOT NULL,
    code INTEGER, lines TEXT
);
CREATE INDEX jobs_finished ON jobs (finished_at);
CREATE INDEX requests_open ON requests (code) WHERE code IS NULL;
DELETE FROM "sqlite_sequence";
COMMIT;
PRAGMA user_version=1;
