"""Tests of the store: file modes, refused folders and files, versions, transactions, and the write lock."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.errors import SchedulerError, StoreTrouble
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.store import jobs as rows
from scheduler.store.database import Database, open_for_reading
from scheduler.store.migrations import VERSION
from scheduler.store.paths import Places, make_private_folder, name_of

ROOT = str(Path(__file__).parents[2])
OTHER = 65534  # the user nobody
as_root = pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")


def python(code: str, *words: str) -> subprocess.Popen[str]:
    """Start a Python process that runs ``code``. The process can import the program."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(process: subprocess.Popen[str], limit: float = 60) -> str:
    out, err = process.communicate(timeout=limit)
    assert process.returncode == 0, err
    return out


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(str(tmp_path / "gpu_scheduler_state.json"))


@pytest.fixture
def database(places: Places) -> Iterator[Database]:
    made = Database(places)
    yield made
    made.close()


def insert(database: Database, word: str = "x", identity: str = "") -> int:
    with database.writing() as connection:
        return rows.insert(connection, JobSpec(arguments=(word,)), ResourceRequest(1, 1000), identity, (), 1.0).id


# -- private ----------------------------------------------------------------------------------------------

_MAKE = """
import os, sys
os.umask(int(sys.argv[2], 8))
from scheduler.store.database import Database
from scheduler.store.paths import Places
from scheduler.store.daemon_lock import DaemonLock
from scheduler.store import jobs as rows
from scheduler.system.atomic_files import replace_file
from scheduler.core.job import JobSpec
from scheduler.core.gpu import ResourceRequest
places = Places(sys.argv[1])
daemon_lock = DaemonLock(places)
database = Database(places, checkpoints=True)
daemon_lock.take({"pid": os.getpid()})
with database.writing() as connection:
    rows.insert(connection, JobSpec(arguments=("x",)), ResourceRequest(1, 1000), "", (), 1.0)
replace_file(places.state_file, b"{}")
for name in os.listdir(places.state_dir):
    print(oct(os.lstat(os.path.join(places.state_dir, name)).st_mode & 0o777), name)
print(oct(os.stat(places.state_dir).st_mode & 0o777), ".")
print(oct(os.stat(places.state_file).st_mode & 0o777), "state")
"""


@pytest.mark.parametrize("mask", ["0", "077", "022", "0777"])
def test_files_of_the_scheduler_are_private_at_any_umask(places: Places, mask: str) -> None:
    """P9: At any umask the folders of the scheduler have mode 0700.

    Its files have mode 0600, also the write-ahead log.
    """
    modes = dict(reversed(line.split(maxsplit=1)) for line in done(python(_MAKE, places.state_file, mask)).splitlines())
    assert {"store.db", "store.db-wal", "store.db-shm", "store.lock", "daemon.lock", "daemon.json", "wakeup"} <= set(
        modes
    )
    for name, mode in modes.items():
        assert mode == ("0o700" if name in (".", "attempts", "env", "sessions") else "0o600"), name


@as_root
def test_a_state_folder_of_another_user_is_refused(places: Places) -> None:
    """P9: A state folder that belongs to another user is refused."""
    os.mkdir(places.state_dir, 0o700)
    os.chown(places.state_dir, OTHER, OTHER)
    with pytest.raises(SchedulerError) as caught:
        Database(places)
    assert f"user {name_of(OTHER)}" in str(caught.value) and places.state_dir in str(caught.value)


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_state_folder_that_is_a_link_or_a_file_is_refused(places: Places, tmp_path: Path, what: str) -> None:
    """P9: If the state folder is a link or a file, it is refused. The link is not followed."""
    if what == "link":
        (tmp_path / "elsewhere").mkdir()
        os.symlink(tmp_path / "elsewhere", places.state_dir)
    else:
        Path(places.state_dir).touch()
    with pytest.raises(SchedulerError) as caught:
        Database(places)
    assert places.state_dir in str(caught.value)
    assert not (tmp_path / "elsewhere").is_dir() or not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["store.db", "store.lock", "wakeup"])
def test_no_file_of_the_state_folder_is_opened_through_a_link(places: Places, tmp_path: Path, name: str) -> None:
    """P9: If a file of the state folder is a link, it is refused. The link is not followed."""
    os.mkdir(places.state_dir, 0o700)
    os.symlink(tmp_path / "victim", os.path.join(places.state_dir, name))
    with pytest.raises(SchedulerError):
        Database(places)
    assert not (tmp_path / "victim").exists()


def test_a_state_folder_that_other_users_can_enter_is_made_private(places: Places) -> None:
    """P9: A state folder that other users can enter gets mode 0700."""
    os.mkdir(places.state_dir)
    os.chmod(places.state_dir, 0o777)
    Database(places).close()
    assert stat.S_IMODE(os.stat(places.state_dir).st_mode) == 0o700


def test_creating_a_private_folder_does_not_change_the_umask(tmp_path: Path) -> None:
    """P9: Creating a private folder does not change the umask."""
    old = os.umask(0o027)
    try:
        make_private_folder(str(tmp_path / "a"))
        make_private_folder(str(tmp_path / "a"))
        (tmp_path / "file").touch()
        with pytest.raises(SchedulerError):
            make_private_folder(str(tmp_path / "file"))
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old)


# -- places -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state_file", "house"),
    [
        ("/x/gpu_scheduler_state.json", "/x/.gpujob"), ("/x/mine.json", "/x/.gpujob-mine"), ("/x/mine", "/x/.gpujob-mine"),
        ("/x/gpu_scheduler_state", "/x/.gpujob"), ("/x/a.b.json", "/x/.gpujob-a.b"),
    ],
)  # fmt: skip
def test_the_state_folder_is_named_after_the_state_file(state_file: str, house: str) -> None:
    """Contract 2: The name of the state folder depends on the name of the state file.

    So two schedulers whose state files are in the same folder have different state folders.
    """
    assert Places(state_file).state_dir == house


# -- versions, damage -------------------------------------------------------------------------------------


def _files(folder: str) -> dict[str, tuple[int, str]]:
    return {
        name: (os.stat(os.path.join(folder, name)).st_mtime_ns, _digest(os.path.join(folder, name)))
        for name in os.listdir(folder)
        if os.path.isfile(os.path.join(folder, name)) and name.startswith("store.db")
    }


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_e13_a_store_of_a_newer_version_is_refused_and_not_changed(places: Places) -> None:
    """E13: If a newer version of gpujob wrote the store, the store is refused and not changed."""
    Database(places).close()
    with sqlite3.connect(places.store) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute(f"PRAGMA user_version={VERSION + 1}")
    connection.close()
    before = _files(places.state_dir)
    with pytest.raises(StoreTrouble) as caught:
        Database(places, checkpoints=True)
    assert "newer" in str(caught.value) and str(VERSION + 1) in str(caught.value) and caught.value.do
    with pytest.raises(StoreTrouble):
        open_for_reading(places)
    assert _files(places.state_dir) == before


@pytest.mark.parametrize("data", [b"this is no database\n" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_store_is_refused_and_not_changed(places: Places, data: bytes) -> None:
    """E, P3: A file that is not a store is refused and not changed. The error refers to `gpujob recover`."""
    places.make()
    Path(places.store).write_bytes(data)
    with pytest.raises(StoreTrouble) as caught:
        Database(places, checkpoints=True)
    assert places.store in str(caught.value) and "gpujob recover" in caught.value.do
    with pytest.raises(StoreTrouble):
        open_for_reading(places)
    assert Path(places.store).read_bytes() == data


def test_an_empty_store_beside_attempt_records_is_refused(places: Places) -> None:
    """E: If there are attempt records, an empty store is refused, because jobs that have run would start again."""
    places.make()
    Path(places.attempts, "1.1").touch()
    with pytest.raises(StoreTrouble) as caught:
        Database(places)
    assert "gpujob recover" in caught.value.do


def test_the_error_for_an_empty_store_names_gpujob_start(places: Places) -> None:
    """P3: The error for an empty store names `gpujob start`."""
    places.make()
    with pytest.raises(StoreTrouble):
        open_for_reading(places)
    Path(places.store).touch()
    with pytest.raises(StoreTrouble) as caught:
        open_for_reading(places)
    assert "gpujob start" in caught.value.do


def test_a_refused_store_leaves_no_descriptors_open(places: Places) -> None:
    """P8: If an invalid store is opened repeatedly, no descriptor stays open."""
    places.make()
    Path(places.store).write_bytes(b"this is no database\n" * 100)

    def tries() -> int:
        for _ in range(5):
            with pytest.raises(StoreTrouble):
                Database(places)
        return len(os.listdir("/proc/self/fd"))

    first = tries()
    assert tries() <= first


@pytest.mark.parametrize("name", ["a b", "a%41b", "a?mode=rwc", "a#b", "é", "a'b"])
def test_a_store_works_in_a_folder_with_any_name(tmp_path: Path, name: str) -> None:
    """A store works in a folder with any name. Characters of the name that are special in a URI do no harm."""
    folder = tmp_path / name
    folder.mkdir()
    places = Places(str(folder / "gpu_scheduler_state.json"))
    database = Database(places)
    insert(database)
    connection = open_for_reading(places)
    assert rows.last_id(connection) == 1
    connection.close()
    database.close()


# -- transactions -----------------------------------------------------------------------------------------


def test_an_exception_undoes_the_transaction(database: Database) -> None:
    """P4: An exception during a transaction undoes the whole transaction."""
    with pytest.raises(RuntimeError):
        with database.writing() as connection:
            rows.insert(connection, JobSpec(arguments=("x",)), ResourceRequest(1, 1000), "", (), 1.0)
            rows.set_meta(connection, "k", "v")
            raise RuntimeError
    assert rows.counts(database.connection)["pending"] == 0
    assert rows.meta(database.connection, "k") == ""
    assert not database.connection.in_transaction
    assert insert(database) == 1


def test_a_failed_statement_raises_store_trouble_and_undoes_the_transaction(database: Database) -> None:
    """P4, P8: A failed statement raises StoreTrouble and undoes the transaction."""
    with pytest.raises(StoreTrouble):
        with database.writing() as connection:
            rows.set_meta(connection, "k", "v")
            connection.execute("INSERT INTO nosuch VALUES (1)")
    assert rows.meta(database.connection, "k") == ""
    assert insert(database) == 1


def test_a_commit_is_visible_to_other_connections_at_once(places: Places, database: Database) -> None:
    """P4: Another connection sees a commit immediately. A connection that was opened for reading cannot write."""
    reader = open_for_reading(places)
    assert rows.last_id(reader) == 0
    insert(database)
    assert rows.last_id(reader) == 1
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("DELETE FROM jobs")
    reader.close()


@pytest.mark.parametrize("sync", [True, False])
def test_a_commit_survives_the_death_of_its_process(places: Places, sync: bool) -> None:
    """P4: If a process is killed immediately after a commit, the commit survives.

    If a process is killed during a transaction, the transaction is undone.
    """
    code = """
import os, signal, sys
from scheduler.store.database import Database
from scheduler.store.paths import Places
from scheduler.store import jobs as rows
database = Database(Places(sys.argv[1]))
with database.writing(sync=sys.argv[2] == "True") as connection:
    rows.set_meta(connection, "k", "kept")
database.connection.execute("BEGIN IMMEDIATE")
rows.set_meta(database.connection, "k", "not committed")
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = python(code, places.state_file, str(sync))
    process.communicate(timeout=30)
    assert process.returncode == -9
    database = Database(places, checkpoints=True)
    assert rows.meta(database.connection, "k") == "kept"
    database.close()


# The long wait for the lock is for slow disks, where the other process holds it nearly all the time.
_INSERT = """
import sys
from scheduler.store.database import Database
from scheduler.store.paths import Places
from scheduler.store import jobs as rows
from scheduler.core.job import JobSpec
from scheduler.core.gpu import ResourceRequest
database = Database(Places(sys.argv[1]), lock_wait_s=100)
print("ready", flush=True)
sys.stdin.readline()
for n in range(200):
    with database.writing() as connection:
        rows.insert(connection, JobSpec(arguments=(sys.argv[2], str(n))), ResourceRequest(1, 1000), "", (), float(n))
database.close()
"""


def test_e07_two_processes_that_write_at_the_same_time_lose_no_job(places: Places) -> None:
    """P2, P4: If two processes write at the same time, both of them succeed, and no job is lost."""
    writers = [python(_INSERT, places.state_file, who) for who in ("a", "b")]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        done(writer, 150)
    database = Database(places)
    jobs = list(rows.select(database.connection))
    assert [job.id for job in jobs] == list(range(1, 401))
    for who in ("a", "b"):
        assert [job.spec.arguments[1] for job in jobs if job.spec.arguments[0] == who] == [str(n) for n in range(200)]
    assert len({job.spec.arguments[0] for job in jobs[:399]}) == 2
    database.close()


def test_e07_checkpoints_and_readers_beside_two_writers_lose_no_job(places: Places) -> None:
    """E07: While two processes write, a third connection makes checkpoints and other processes read. No job is lost."""
    Database(places, checkpoints=True).close()
    other = sqlite3.connect(places.store, isolation_level=None, timeout=5)
    other.execute("SELECT count(*) FROM jobs").fetchone()  # opens the write-ahead log, so that no writer removes it
    writers = [python(_INSERT, places.state_file, who) for who in ("a", "b")]
    for writer in writers:
        assert writer.stdin is not None and writer.stdout is not None and writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
    seen, copied, running = 0, 0, True
    while running:  # the last pass runs after the writers have ended
        running = any(writer.poll() is None for writer in writers)
        copied += other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[2] > 0
        reader = open_for_reading(places)
        found = [job.id for job in rows.select(reader)]
        assert found == list(range(1, len(found) + 1)) and len(found) >= seen
        seen = len(found)
        with pytest.raises(sqlite3.OperationalError, match=r"readonly|read-only|attempt to write"):
            reader.execute("DELETE FROM jobs")
        reader.close()
    other.close()
    for writer in writers:
        done(writer, 150)
    database = Database(places)
    assert copied and len(list(rows.select(database.connection))) == 400
    assert database.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    database.close()


def test_a_busy_lock_raises_store_trouble_after_the_wait(places: Places) -> None:
    """P3: If the lock is still busy at the end of the wait, a write raises StoreTrouble with the path of the lock.

    When the lock is free again, the next write succeeds.
    """
    holding = threading.Event()
    let_go = threading.Event()

    def hold() -> None:
        other = Database(places)
        with other.writing():
            holding.set()
            let_go.wait(30)
        other.close()

    first = Database(places, lock_wait_s=0.3)
    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(30)
    begun = time.monotonic()
    with pytest.raises(StoreTrouble) as caught:
        insert(first)
    assert time.monotonic() - begun >= 0.3
    assert "another process has held the lock" in str(caught.value) and places.store_lock in str(caught.value)
    let_go.set()
    thread.join(30)
    assert insert(first) == 1
    first.close()


def test_a_lock_held_by_a_killed_process_is_free(places: Places) -> None:
    """H: If the process that holds the lock is killed, the lock is free: the kernel releases its locks."""
    code = """
import os, sys
from scheduler.store.database import Database
from scheduler.store.paths import Places
database = Database(Places(sys.argv[1]))
with database.writing() as connection:
    connection.execute("INSERT INTO meta VALUES ('k', 'v')")
    print("held", flush=True)
    sys.stdin.readline()
"""
    holder = python(code, places.state_file)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    database = Database.__new__(Database)  # opening the store takes the lock, too
    with pytest.raises(StoreTrouble):
        database.__init__(places, lock_wait_s=0.2)  # type: ignore[misc]
    holder.kill()
    holder.communicate(timeout=30)
    database = Database(places, lock_wait_s=5)
    assert rows.meta(database.connection, "k") == ""
    assert insert(database) == 1
    database.close()


def test_the_wakeup_file_does_not_grow(places: Places, database: Database) -> None:
    """Each wakeup of the daemon overwrites the same byte of the wakeup file, so the file does not grow."""
    for _ in range(100):
        database.wake_daemon()
    assert os.stat(places.wakeup).st_size == 1


def _as_it_was(
    connection: sqlite3.Connection, table: str, model: list[dict[str, object]] | None = None
) -> list[dict[str, object]]:
    """Return all rows of a table as dictionaries.

    ``model``: rows of an older version of the table. If given, only the columns of these rows are returned.
    """
    cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2" if table != "pauses" else "SELECT * FROM pauses")
    names = [column[0] for column in cursor.description]
    keep = set(model[0]) if model else set(names)
    return [{name: v for name, v in zip(names, row, strict=True) if name in keep} for row in cursor]


def test_e14_a_store_of_the_first_version_is_migrated(places: Places) -> None:
    """E14: A store of the first version is migrated with its jobs, refused lines and pauses.

    A copy of the old store is kept.
    """
    places.make()
    text = (Path(__file__).resolve().parents[1] / "data" / "store-v1.sql").read_text()
    old = sqlite3.connect(places.store)
    old.executescript(text)
    assert rows.counts(old)["done"] == 1  # as a verb does before a scheduler has migrated the store
    tables = ("jobs", "events", "files", "line_counts", "refused", "pauses")
    before = {table: _as_it_was(old, table) for table in tables}
    assert before["jobs"] and before["line_counts"] and before["pauses"]
    old.close()
    database = Database(places)
    try:
        assert database.connection.execute("PRAGMA user_version").fetchone()[0] == VERSION
        for table in tables:
            assert _as_it_was(database.connection, table, before[table]) == before[table], table
        states = {job.id: job.state.value for job in rows.select(database.connection, [])}
        assert states == {1: "done", 2: "failed", 3: "pending"}
        failed = rows.get(database.connection, 2)
        assert failed is not None and failed.exit_code == 3 and failed.interpreter == ""
        for change in ("", "DELETE FROM jobs WHERE id=2", "UPDATE jobs SET state='failed' WHERE id=3"):
            with database.writing() as connection:
                connection.execute(change or "SELECT 1")
            counted = dict(database.connection.execute("SELECT state, count(*) FROM jobs GROUP BY state"))
            assert {state: n for state, n in rows.counts(database.connection).items() if n} == counted
    finally:
        database.close()
    assert os.path.exists(f"{places.store}.v1")
