"""The history file `.gpujob/history.db`. One thread of the daemon writes it; the curves and metrics are read from it.

No job and no decision of the scheduler depends on this file. So writes are not synced, and a missing, damaged or
unusable file is replaced by a new file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Sequence

from scheduler.core.errors import Damaged
from scheduler.core.history import (
    GPU_COLUMNS,
    JOB_COLUMNS,
    KEEP_LONG_S,
    KEEP_SHORT_S,
    LONG_S,
    MOST_POINTS,
    MOST_ROWS,
    SHORT_S,
    TICK_LABELS,
    Batch,
    GpuSample,
    JobSample,
    PauseSpan,
    bucket_of,
    pause_spans,
    question,
)
from scheduler.store.database import read_only, trouble
from scheduler.system.private_files import new_private
from scheduler.system.safe_open import plain

VERSION = 1
MOST_PAUSES = 20_000
BUSY_S = 1.0
ROLLED, TICK_SUM = "rolled", "tick sum"  # names of rows in the table `figures`
_COMPANIONS = ("-wal", "-shm", "-journal")
_UNKNOWN = (sqlite3.Error, OSError)  # a missing or unreadable history yields empty results


def _means(columns: Sequence[str]) -> str:
    """Return SQL that merges rows into one: the maximum of `paused` and `…_most` columns, the mean of all others."""
    most = {"paused", *(column for column in columns if column.endswith("_most"))}
    return ", ".join(f"max({c})" if c in most else f"round(avg({c}), {_DIGITS.get(c, 1)})" for c in columns)


_DIGITS = {"load": 4, "booked": 4}
_OF_GPU, _OF_JOB = ", ".join(GPU_COLUMNS), ", ".join(JOB_COLUMNS)
_SCHEMA = f"""
CREATE TABLE gpu_short (at REAL, gpu INTEGER, {_OF_GPU}, PRIMARY KEY (at, gpu)) WITHOUT ROWID;
CREATE TABLE gpu_long (at REAL, gpu INTEGER, {_OF_GPU}, PRIMARY KEY (at, gpu)) WITHOUT ROWID;
CREATE TABLE job_short (at REAL, job INTEGER, attempt INTEGER, {_OF_JOB}, PRIMARY KEY (at, job, attempt)) WITHOUT ROWID;
CREATE TABLE job_long (at REAL, job INTEGER, attempt INTEGER, {_OF_JOB}, PRIMARY KEY (at, job, attempt)) WITHOUT ROWID;
CREATE INDEX job_short_of ON job_short (job);
CREATE INDEX job_long_of ON job_long (job);
CREATE TABLE pauses (at REAL, gpu INTEGER, paused INTEGER, PRIMARY KEY (at, gpu)) WITHOUT ROWID;
CREATE TABLE figures (name TEXT PRIMARY KEY, n REAL) WITHOUT ROWID;
PRAGMA user_version={VERSION};
"""


class HistoryFile:
    """The history file, opened for writing. Only one process may do this, and only one thread may call the methods."""

    def __init__(self, path: str, most_rows: int = MOST_ROWS) -> None:
        self.path, self.most_rows = path, most_rows
        self.told: list[str] = []  # messages for the log
        self._connection: sqlite3.Connection | None = None
        self._inode = (0, 0)
        self._ticks: dict[str, float] = {}  # counts of the earlier daemons, read when the file is opened
        self._paused: frozenset[int] = frozenset()
        self._rolled: float | None = None

    def write(self, batch: Batch) -> None:
        """Add a batch, whole or not at all. Raises OSError or sqlite3.Error if the batch was not written.

        A damaged file is renamed, and the batch is written to a new file.
        """
        try:
            self._write(batch)
        except sqlite3.Error as error:
            self.close()
            if not isinstance(trouble(error, self.path), Damaged):
                raise
            self._rename_unusable("damaged", " ".join(str(error).split()))
            self._write(batch)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None

    # -- opening ------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            if self._in_place():
                return self._connection
            self.close()
        crashed = os.path.exists(f"{self.path}-wal")
        made = self._make()
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_S)
        try:
            run = connection.execute
            if crashed and not made:  # writes are not synced: a power loss may have damaged the file
                problem = str(run("PRAGMA quick_check(1)").fetchone()[0])
                if problem != "ok":
                    raise sqlite3.DatabaseError(f"malformed: {problem}")
            version = run("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                connection.close()
                self._rename_unusable(f"v{version}", f"unknown version {version}")
                return self._open()
            run("PRAGMA journal_mode=WAL")
            run("PRAGMA synchronous=OFF")
            run("PRAGMA journal_size_limit=4194304")
            if version == 0:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            self._ticks = dict(run("SELECT name, n FROM figures").fetchall())
            self._rolled = self._ticks.pop(ROLLED, None)
            last = "SELECT gpu, paused, max(at) FROM pauses GROUP BY gpu"
            self._paused = frozenset(gpu for gpu, paused, _ in run(last) if paused)
            status = os.stat(self.path)
        except BaseException:
            connection.close()
            raise
        self._inode = (status.st_dev, status.st_ino)
        self._connection = connection
        return connection

    def _make(self) -> bool:
        """Create an empty history file (mode 0600) if there is none. Return whether it was created. Raises OSError."""
        try:
            os.close(new_private(self.path))
        except FileExistsError:
            fd = plain(self.path, os.O_RDONLY)
            try:
                if os.fstat(fd).st_mode & 0o777 != 0o600:
                    os.fchmod(fd, 0o600)
            finally:
                os.close(fd)
            return False
        for companion in _COMPANIONS:  # left by a deleted file: SQLite would use them for the new file
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + companion)
        return True

    def _in_place(self) -> bool:
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def _rename_unusable(self, ending: str, why: str) -> None:
        """Rename an unusable file to `history.db.ENDING`, replacing an earlier file of that name. Raises OSError."""
        os.replace(self.path, f"{self.path}.{ending}")
        for companion in _COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + companion)
        self.told.append(
            f"{self.path} cannot be used ({why}): it was renamed to history.db.{ending}; "
            "the curves of the web page start again from now"
        )

    # -- writing ------------------------------------------------------------------------------------------

    def _write(self, batch: Batch) -> None:
        connection = self._open()
        paused, rolled = self._paused, self._rolled
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._add(connection, batch)
            self._roll(connection, batch.at)
            connection.execute("COMMIT")
        except BaseException:
            self._paused, self._rolled = paused, rolled
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            raise

    def _add(self, connection: sqlite3.Connection, batch: Batch) -> None:
        many = connection.executemany
        many(
            f"INSERT OR REPLACE INTO gpu_short (gpu, at, {_OF_GPU}) VALUES ({_places(2 + len(GPU_COLUMNS))})",
            batch.gpus,
        )
        many(
            f"INSERT OR REPLACE INTO job_short (job, attempt, at, {_OF_JOB}) VALUES ({_places(3 + len(JOB_COLUMNS))})",
            batch.jobs,
        )
        changes = []
        for at, now in batch.pauses:
            changes += [(at, gpu, int(gpu in now)) for gpu in now ^ self._paused]
            self._paused = now
        many("INSERT OR REPLACE INTO pauses VALUES (?,?,?)", changes)
        if batch.ticks:
            figures = [
                (label, self._ticks.get(label, 0.0) + n) for label, n in zip(TICK_LABELS, batch.ticks, strict=True)
            ]
            figures.append((TICK_SUM, self._ticks.get(TICK_SUM, 0.0) + batch.tick_sum))
            many("INSERT OR REPLACE INTO figures VALUES (?,?)", figures)

    def _roll(self, connection: sqlite3.Connection, now: float) -> None:
        """Average the short-term rows of each completed span of five minutes into one row of the long-term tables.

        Also delete rows that are too old, and the oldest rows of a table that is too long. If no span has been
        completed since the last call, do nothing.
        """
        end = bucket_of(now, LONG_S)
        if self._rolled == end:
            return
        if self._rolled is None:
            first = connection.execute("SELECT min(at) FROM gpu_short").fetchone()[0]
            self._rolled = end if first is None else bucket_of(first, LONG_S)
        since = min(self._rolled, end - LONG_S)  # for a clock that was set back
        for table, who, columns in (("gpu", "gpu", GPU_COLUMNS), ("job", "job, attempt", JOB_COLUMNS)):
            connection.execute(
                f"INSERT OR REPLACE INTO {table}_long (at, {who}, {', '.join(columns)})"
                f" SELECT CAST(at / ? AS INTEGER) * ? AS slot, {who}, {_means(columns)} FROM {table}_short"
                f" WHERE at >= ? AND at < ? GROUP BY slot, {who}",
                (LONG_S, LONG_S, since, end),
            )
            self._trim(connection, f"{table}_short", now, KEEP_SHORT_S)
            self._trim(connection, f"{table}_long", now, KEEP_LONG_S)
        connection.execute(  # the last row of each GPU stays: it holds the current state
            "DELETE FROM pauses WHERE at < max(?, coalesce((SELECT at FROM pauses ORDER BY at DESC LIMIT 1 OFFSET ?), 0))"
            " AND EXISTS (SELECT 1 FROM pauses AS later WHERE later.gpu = pauses.gpu AND later.at > pauses.at)",
            (now - KEEP_LONG_S, MOST_PAUSES),
        )
        self._rolled = end
        connection.execute("INSERT OR REPLACE INTO figures VALUES (?,?)", (ROLLED, end))

    def _trim(self, connection: sqlite3.Connection, table: str, now: float, keep_s: float) -> None:
        connection.execute(f"DELETE FROM {table} WHERE at < ?", (now - keep_s,))
        connection.execute(f"DELETE FROM {table} WHERE at > ?", (now + KEEP_SHORT_S,))  # written with a wrong clock
        number = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        if number > self.most_rows:
            beyond = f"SELECT at FROM {table} ORDER BY at LIMIT 1 OFFSET ?"
            (last,) = connection.execute(beyond, (number - self.most_rows - 1,)).fetchone()
            connection.execute(f"DELETE FROM {table} WHERE at <= ?", (last,))


def _places(number: int) -> str:
    return ",".join("?" * number)


# -- reading ----------------------------------------------------------------------------------------------


def _reading(path: str) -> contextlib.closing[sqlite3.Connection]:
    """Return a read-only connection. Raises sqlite3.Error or OSError if no history file of this version can be read."""
    os.stat(path)
    connection = read_only(path)
    try:
        connection.execute("PRAGMA query_only=ON")
        if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            raise sqlite3.DatabaseError("another version")
    except BaseException:
        connection.close()
        raise
    return contextlib.closing(connection)


def _rows_of(table: str, columns: str, short: bool) -> str:
    """Return SQL that selects all rows about GPUs or about jobs (``table``: `gpu` or `job`).

    ``short``: select only the short-term rows. Otherwise select the long-term averages, and those short-term rows that
    are too new to have an average.
    """
    if short:
        return f"SELECT {columns} FROM {table}_short"
    rolled = f"coalesce((SELECT n FROM figures WHERE name = '{ROLLED}'), 0)"
    return f"SELECT {columns} FROM {table}_long UNION ALL SELECT {columns} FROM {table}_short WHERE at >= {rolled}"


def gpu_history(path: str, since: float, until: float, step_s: float, now: float) -> dict[int, list[GpuSample]]:
    """Return GPU index → samples from ``since`` to ``until``, oldest first.

    The time between two samples is at least ``step_s`` seconds. Each GPU has at most about ``MOST_POINTS`` samples.
    ``since``, ``until`` and ``now`` are seconds since 1970. The result is empty if there is no readable history.
    """
    asked = question(since, until, step_s, now)
    found: dict[int, list[GpuSample]] = {}
    with contextlib.suppress(*_UNKNOWN), _reading(path) as connection:
        for gpu, at, used, own, others, reserved, load, temperature, power, booked, paused, *most in connection.execute(
            f"SELECT gpu, CAST(at / ? AS INTEGER) * ? AS slot, {_means(GPU_COLUMNS)}"
            f" FROM ({_rows_of('gpu', f'at, gpu, {_OF_GPU}', asked.short)}) WHERE at >= ? AND at < ?"
            " GROUP BY gpu, slot ORDER BY gpu, slot",
            (asked.step_s, asked.step_s, asked.since, asked.until),
        ):
            found.setdefault(gpu, []).append(
                GpuSample(at, used, own, others, reserved, load, temperature, power, booked, bool(paused), *most)
            )
    return found


def job_history(path: str, job: int) -> dict[int, list[JobSample]]:
    """Return attempt → samples of the memory and load of this attempt of the job, oldest first.

    Each attempt has at most about ``MOST_POINTS`` samples. The result is empty if there is no readable history.
    """
    found: dict[int, list[JobSample]] = {}
    with contextlib.suppress(*_UNKNOWN), _reading(path) as connection:
        connection.execute("BEGIN")
        of_attempts = "SELECT attempt, min(at), max(at) FROM job_{} WHERE job=? GROUP BY attempt"
        short = {row[0]: row[1:] for row in connection.execute(of_attempts.format("short"), (job,))}
        long = {row[0]: row[1:] for row in connection.execute(of_attempts.format("long"), (job,))}
        for attempt in sorted({*short, *long}):
            known = [spans[attempt] for spans in (short, long) if attempt in spans]
            first, last = min(span[0] for span in known), max(span[1] for span in known)
            whole = attempt in short and short[attempt][0] < first + LONG_S
            base = SHORT_S if whole else LONG_S
            step = base * max(1, -(-(last - first + base) // (base * MOST_POINTS)))
            found[attempt] = [
                JobSample(*row)
                for row in connection.execute(
                    f"SELECT CAST(at / ? AS INTEGER) * ? AS slot, {_means(JOB_COLUMNS)}"
                    f" FROM ({_rows_of('job', f'at, job, attempt, {_OF_JOB}', whole)})"
                    " WHERE job=? AND attempt=? GROUP BY slot ORDER BY slot",
                    (step, step, job, attempt),
                )
            ]
    return found


def peaks_of(path: str, attempts: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return for each of these attempts (job, attempt) the most memory of all its GPUs together, in MiB, if it was measured."""
    found: dict[tuple[int, int], float] = {}
    with contextlib.suppress(*_UNKNOWN), _reading(path) as connection:
        for attempt in attempts:
            each = (f"SELECT max(memory_most) FROM job_{kind} WHERE job=? AND attempt=?" for kind in ("short", "long"))
            peaks = [peak for one in each for (peak,) in connection.execute(one, attempt) if peak is not None]
            if peaks:
                found[attempt] = max(peaks)
    return found


def pauses(path: str, since: float, until: float) -> list[PauseSpan]:
    """Return the pauses of GPUs and of the queue that overlap the time ``since`` to ``until`` (seconds since 1970)."""
    with contextlib.suppress(*_UNKNOWN), _reading(path) as connection:
        rows = connection.execute("SELECT at, gpu, paused FROM pauses WHERE at < ? ORDER BY at", (until,)).fetchall()
        return pause_spans(((at, gpu, bool(paused)) for at, gpu, paused in rows), since, until)
    return []


def ticks(path: str) -> tuple[dict[str, float], float] | None:
    """Return a histogram of the durations of passes, and the sum of these durations in seconds.

    The histogram maps the label of each bucket to the number of passes in this bucket alone (not cumulative). Returns
    None if there is no readable history.
    """
    with contextlib.suppress(*_UNKNOWN), _reading(path) as connection:
        found = dict(connection.execute("SELECT name, n FROM figures").fetchall())
        if TICK_SUM in found:
            return {label: found.get(label, 0.0) for label in TICK_LABELS}, found[TICK_SUM]
    return None
