"""The SQLite file: opened safely, migrated by numbered steps, written by one at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator

from scheduler.core.errors import NEWER, OUTDATED, Damaged, StoreTrouble
from scheduler.store import integrity
from scheduler.store.daemon_lock import check_here, daemon_alive
from scheduler.store.job_columns import NEWEST
from scheduler.store.migrations import VERSION, migrate
from scheduler.store.paths import Places
from scheduler.system.crash_points import crash_point
from scheduler.system.locks import lock_within, try_lock, unlock
from scheduler.system.safe_open import plain

NO_VERSION = 1000  # from here on it is no newer gpujob, but noise
LOG_PAGES = 1000  # size that the write-ahead log is given at the start; 4 MB
CHECKPOINT_PAGES = (
    4000  # pages in it before they are copied back: a paste of 10,000 lines touches most index pages again and again
)
PAGE = 4096


_SIGNS_OF_DAMAGE = (
    "malformed", "not a database", "no such table", "no such column", "already exists", "file format", "decode to UTF-8",
)  # fmt: skip


class NothingYet(StoreTrouble):
    """Nobody has begun this store."""


class Database:
    """One connection to the store. ``writing`` is the only way to change anything.

    ``checkpoints``: true for the daemon alone, so that nobody else's commit has to copy the log back.
    """

    def __init__(self, places: Places, *, checkpoints: bool = False, lock_wait_s: float = 10.0) -> None:
        self.places = places
        self.lock_wait_s = lock_wait_s
        self._in_office = checkpoints  # then no `recover` exchanges the store under us
        places.make()
        check_here(places)
        _finish_making(places)
        check_sound(places, pages="quick_check" if checkpoints else "", records=checkpoints)
        self._lock_fd = _open_private(places.store_lock)
        self._wakeup_fd = _open_private(places.wakeup)
        if not os.fstat(self._wakeup_fd).st_size:
            self.wake_daemon()  # while there is room: a byte that is there can be written again on a full disk
        self._high_fd = _open_private(places.high)
        if not os.path.exists(places.store):
            os.close(_open_private(places.store))
        try:
            self.connection = self._connect()
        except sqlite3.Error as error:
            self._let_go()
            raise trouble(error, places.store) from error
        self._high = integrity.high(places)
        try:
            with self._locked():
                self._prepare(checkpoints)
        except sqlite3.Error as error:
            self.close()
            raise trouble(error, places.store) from error
        except BaseException:
            self.close()
            raise
        self._synced = True
        self._inode = os.stat(places.store).st_ino
        self.suspect = False  # a write or a sync failed: nobody knows what of the log reached the disk

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.places.store, isolation_level=None, timeout=5.0, cached_statements=256)

    def renew(self) -> None:
        """After a write or a sync failed: open the store anew, checked, with the log copied into it and begun anew.

        The kernel reports a failed sync once and then takes the pages for written, so that the next one would succeed
        without what was lost. What the log held is written and synced a second time. Raises StoreTrouble, Damaged.
        """
        try:
            with self._locked():
                self.connection.close()
                check_sound(self.places, pages="quick_check", records=True)
                self.connection = self._connect()
                self._prepare(self._in_office)
                busy = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                if busy:
                    raise StoreTrouble("its log is in use", where=self.places.store, do="tried again soon")
                if self._in_office:
                    self._grow_log()
        except sqlite3.Error as error:
            raise trouble(error, self.places.store) from error
        except OSError as error:
            raise StoreTrouble(f"the store cannot be used: {error.strerror}", where=self.places.store) from error
        self._synced, self.suspect = True, False

    def _prepare(self, checkpoints: bool) -> None:
        run = self.connection.execute
        version = run("PRAGMA user_version").fetchone()[0]
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES if checkpoints else 0}")
        run("PRAGMA temp_store=MEMORY")
        run("PRAGMA cache_size=-16384")  # 16 MiB at most: indexes over 10,000 jobs do not fit the usual 2
        if version < VERSION:
            self._migrate(version)
        if checkpoints:
            self._grow_log()

    def _grow_log(self) -> None:
        """Give the write-ahead log its full size at once: a commit that makes a file grow costs the file system a
        journal entry more (0.17 against 0.10 ms a commit). What lies behind the last frame is never read.
        """
        path = f"{self.places.store}-wal"
        self.connection.execute("BEGIN IMMEDIATE")  # makes the log if there is none
        self.connection.execute("COMMIT")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size, full = os.fstat(fd).st_size, (LOG_PAGES + 64) * (PAGE + 24) + 32
            if size < full:
                os.pwrite(fd, bytes(full - size), size)
                os.fsync(fd)
        finally:
            os.close(fd)

    def _migrate(self, version: int) -> None:
        if version:
            self._keep_copy(f"{self.places.store}.v{version}")
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            migrate(self.connection, version)
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:  # a failed commit may have ended it
                self.connection.execute("ROLLBACK")
            raise

    def _keep_copy(self, path: str) -> None:
        """The store as it is, log included. Never by opening the file ourselves: to close it would give up the locks that
        SQLite holds on it (fcntl(2)), and whoever closes next would take away the log under us.
        """
        aside = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)  # of one who was killed here
        os.close(_open_private(aside))
        copy = sqlite3.connect(aside)
        try:
            self.connection.backup(copy)
        finally:
            copy.close()
        os.rename(aside, path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the kernel lock of `store.lock`. Raises StoreTrouble when others hold it for too long."""
        try:
            locked = lock_within(self._lock_fd, self.lock_wait_s)
        except OSError as error:
            raise StoreTrouble(f"cannot be locked: {error.strerror}", where=self.places.store_lock) from None
        if not locked:
            raise StoreTrouble(f"locked by another process for {self.lock_wait_s:g} s", where=self.places.store_lock)
        try:
            yield
        finally:
            unlock(self._lock_fd)

    @contextlib.contextmanager
    def writing(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction under the lock: all of it or nothing.

        ``sync`` False: safe against any crash of ours, but not yet against a power loss (the next synced commit
        covers it). Raises StoreTrouble on a busy lock, a full disk, an I/O error, a damaged file.
        """
        with self._locked():
            if not self._in_office:  # inside the lock: what is written into a store that was set aside would be lost
                self.check_in_place()
            try:
                if sync is not self._synced:
                    self.connection.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
                    self._synced = sync
                self.connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self.connection
                    newest = self.connection.execute("SELECT max(id) FROM jobs").fetchone()[0] or 0
                    crash_point("store.before_commit")
                    self.connection.execute("COMMIT")
                    crash_point("store.committed")
                except BaseException:
                    if self.connection.in_transaction:
                        with contextlib.suppress(sqlite3.Error):
                            self.connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                self.suspect = self.suspect or "I/O error" in str(error)
                raise trouble(error, self.places.store) from error
            if sync and newest > self._high:  # after the commit: never higher than what the disk holds
                self._high = newest
                integrity.note_high(self._high_fd, newest)

    def check_in_place(self) -> None:
        """Raise StoreTrouble when the file was removed or replaced while it was open."""
        try:
            there = os.stat(self.places.store).st_ino
        except OSError:
            there = 0
        if there != self._inode:
            raise StoreTrouble(
                "was removed or replaced while in use",
                where=self.places.store,
                do="put it back and start again, or: gpujob recover",
            )

    def wake_daemon(self) -> None:
        """Wake the daemon: write one byte into the wakeup file, after the commit.

        On a full disk a bell without a byte cannot be woken; what was committed stands all the same, and is found later.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._wakeup_fd, b"!", 0)

    def close(self) -> None:
        """Close the connection and the lock."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.close()
        self._let_go()

    def _let_go(self) -> None:
        os.close(self._lock_fd)
        os.close(self._wakeup_fd)
        os.close(self._high_fd)


def _making_was_cut_off(places: Places) -> bool:
    """Whether whoever made the store was killed meanwhile. A rollback journal is written only until it has a log."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(f"{places.store}-journal") > 0 and os.path.getsize(places.store) > 0
    return False


def _finish_making(places: Places) -> None:
    """Let SQLite roll back what a killed maker of the store has begun, which nobody can who only reads."""
    if not _making_was_cut_off(places):
        return
    try:
        connection = sqlite3.connect(places.store, isolation_level=None, timeout=5.0)
        try:
            connection.execute("PRAGMA schema_version").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise trouble(error, places.store) from error


def check_sound(places: Places, *, pages: str = "", records: bool = False, still: bool = False) -> None:
    """Raise Damaged when the store cannot be trusted. Nothing is written: even to close a store for writing would
    copy its log back, or remove a damaged one.

    ``pages``: the pragma that looks whether all pages hang together; ``records``: compare the attempt records;
    ``still``: see `read_only`.
    """
    integrity.check_begun(places)
    if not os.path.exists(places.store) or not os.path.getsize(places.store):
        return
    given = integrity.high(places)  # before the store is looked at: others may be adding to it
    try:
        connection = read_only(places.store, still)
        try:
            version = _version(connection, places)
            if version > VERSION:
                raise StoreTrouble(
                    f"was written by a newer gpujob (version {version}, this one knows {VERSION})",
                    where=places.store,
                    do="install that version again, or name another --state-file",
                    code=NEWER,
                )
            if version == 0 and (evidence := integrity.evidence(places)):
                raise Damaged(f"is empty, but {evidence}", where=places.store)
            if pages:
                problem = " ".join(str(connection.execute(f"PRAGMA {pages}(1)").fetchone()[0]).split())
                if problem != "ok":
                    problem = problem.replace("*** in database main *** ", "")
                    raise Damaged(f"the store is damaged ({problem})", where=places.store)
            if version:
                integrity.check_not_older(connection, places, given, records=records)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise trouble(error, places.store) from error


def _version(connection: sqlite3.Connection, places: Places) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= version < NO_VERSION:
        raise Damaged(f"the store is damaged (version {version})", where=places.store)
    return version


def read_only(path: str, still: bool = False) -> sqlite3.Connection:
    """A connection that cannot change the file. ``still``: it has no log, and nobody changes it now; then not even the
    empty log and its index are made, which SQLite else leaves beside it.
    """
    if os.path.exists(path) and os.statvfs(path).f_flag & os.ST_RDONLY and not os.path.exists(f"{path}-wal"):
        still = True  # on a disk that is read-only nobody changes it, and nothing can be made beside it
    return sqlite3.connect(
        f"file:{_quoted(path)}?mode=ro{'&immutable=1' * still}", uri=True, isolation_level=None, timeout=5.0
    )


@contextlib.contextmanager
def held_still(places: Places) -> Iterator[bool]:
    """Whether the store can be looked at without a trace: no daemon, no log, and meanwhile no writer (they wait)."""
    if os.path.exists(f"{places.store}-wal") or daemon_alive(places):
        yield False
        return
    try:
        fd = plain(places.store_lock, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield try_lock(fd, fcntl.LOCK_SH) and not os.path.exists(f"{places.store}-wal")  # else somebody is at it
    finally:
        os.close(fd)


def open_for_reading(places: Places, still: bool = False) -> sqlite3.Connection:
    """A read-only connection that holds nobody up. Raises StoreTrouble, NothingYet, Elsewhere."""
    check_here(places)
    integrity.check_begun(places)
    try:
        connection = read_only(places.store, still)
    except sqlite3.Error as error:
        raise trouble(error, places.store) from error
    try:
        version = _version(connection, places)
        if version > VERSION:
            raise StoreTrouble(
                f"was written by a newer gpujob (version {version})",
                where=places.store,
                do="use that version",
                code=NEWER,
            )
        if 0 < version < NEWEST:
            do = "start the scheduler, which brings it up to date: gpujob start"
            raise StoreTrouble(
                f"was written by an older gpujob (version {version})", where=places.store, do=do, code=OUTDATED
            )
        if version == 0:
            if evidence := integrity.evidence(places):
                raise Damaged(f"is empty, but {evidence}", where=places.store)
            raise NothingYet("holds nothing yet", where=places.store, do="start the scheduler: gpujob start")
    except sqlite3.Error as error:
        connection.close()
        if _making_was_cut_off(places):
            raise NothingYet(
                "was not made to its end", where=places.store, do="start the scheduler: gpujob start"
            ) from None
        raise trouble(error, places.store) from error
    except StoreTrouble:
        connection.close()
        raise
    return connection


def nothing_yet() -> sqlite3.Connection:
    """An empty store in memory: what is read where nobody has made a store yet."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection, 0)
    return connection


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _open_private(path: str) -> int:
    try:
        fd = plain(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        do = "move it away" if error.errno in (errno.EINVAL, errno.ELOOP) else ""
        raise StoreTrouble(f"cannot be opened: {error.strerror}", where=path, do=do) from None
    if os.fstat(fd).st_mode & 0o777 != 0o600:
        os.fchmod(fd, 0o600)
    return fd


def trouble(error: Exception, path: str) -> StoreTrouble:
    """What an error of SQLite's means to people: damage, or something that passes."""
    text = " ".join(str(error).split())
    if isinstance(error, sqlite3.Error) and any(sign in text for sign in _SIGNS_OF_DAMAGE):
        return Damaged(f"the store is damaged ({text})", where=path)
    do = "free some space" if "full" in text else "nothing new is started until it can be used again"
    return StoreTrouble(f"the store cannot be used: {text}", where=path, do=do)
