"""The connection to the store: opens and migrates the store, and lets one process write at a time."""

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

NO_VERSION = 1000  # this version or a higher one is a sign of damage, not of a newer gpujob
LOG_PAGES = 1000  # pages that the write-ahead log is extended to at the start; 4 MB
# Pages in the log before a checkpoint. More than the default of 1000, because 10,000 lines added together write most
# index pages many times.
CHECKPOINT_PAGES = 4000
PAGE = 4096


_SIGNS_OF_DAMAGE = (
    "malformed", "not a database", "no such table", "no such column", "already exists", "file format", "decode to UTF-8",
)  # fmt: skip


class NothingYet(StoreTrouble):
    """Error: the store has no tables yet, because its creation has not begun or was interrupted."""


class Database:
    """A connection to the store. All changes are made through the method `writing`.

    ``checkpoints``: whether a commit may copy the write-ahead log into the store. True only for the daemon, so that no
    command has to wait for the copying. ``lock_wait_s``: seconds to wait for the store's lock.
    """

    def __init__(self, places: Places, *, checkpoints: bool = False, lock_wait_s: float = 10.0) -> None:
        self.places = places
        self.lock_wait_s = lock_wait_s
        self._in_office = checkpoints  # True for the daemon: while it lives, `recover` does not replace the store
        places.make()
        check_here(places)
        _finish_making(places)
        check_sound(places, pages="quick_check" if checkpoints else "", records=checkpoints)
        self._lock_fd = _open_private(places.store_lock)
        self._wakeup_fd = _open_private(places.wakeup)
        if not os.fstat(self._wakeup_fd).st_size:
            self.wake_daemon()  # now, because an existing byte can be overwritten even if the disk is full later
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
        self.suspect = False  # a write or sync failed, so part of the log may not be on the disk: call `renew`

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.places.store, isolation_level=None, timeout=5.0, cached_statements=256)

    def renew(self) -> None:
        """Reopen the store after a failed write or sync: check the store, copy the log into it, begin a new log.

        The kernel reports a failed sync only once, and then treats the data as written. So a second sync would succeed
        although the data are not on the disk. Copying the log into the store writes and syncs these data again.

        Raises Damaged if the store cannot be trusted, and StoreTrouble if the store still cannot be used.
        """
        try:
            with self._locked():
                self.connection.close()
                check_sound(self.places, pages="quick_check", records=True)
                self.connection = self._connect()
                self._prepare(self._in_office)
                busy = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                if busy:
                    raise StoreTrouble(
                        "cannot check the store: its write-ahead log is in use",
                        where=self.places.store,
                        do="gpujob tries again soon",
                    )
                if self._in_office:
                    self._grow_log()
        except sqlite3.Error as error:
            raise trouble(error, self.places.store) from error
        except OSError as error:
            raise StoreTrouble(f"cannot use the store: {error.strerror}", where=self.places.store) from error
        self._synced, self.suspect = True, False

    def _prepare(self, checkpoints: bool) -> None:
        run = self.connection.execute
        version = run("PRAGMA user_version").fetchone()[0]
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES if checkpoints else 0}")
        run("PRAGMA temp_store=MEMORY")
        run("PRAGMA cache_size=-16384")  # 16 MiB at most: the indexes of 10,000 jobs do not fit in the default 2 MiB
        if version < VERSION:
            self._migrate(version)
        if checkpoints:
            self._grow_log()

    def _grow_log(self) -> None:
        """Extend the write-ahead log to its full size in advance. SQLite ignores the bytes after the last frame.

        A commit then takes 0.10 instead of 0.17 ms, because the file system need not record a new file size.
        """
        path = f"{self.places.store}-wal"
        self.connection.execute("BEGIN IMMEDIATE")  # creates the log if there is none
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
            if self.connection.in_transaction:  # a failed commit may have ended the transaction
                self.connection.execute("ROLLBACK")
            raise

    def _keep_copy(self, path: str) -> None:
        """Copy the store with its write-ahead log to ``path``.

        SQLite makes the copy. If this process opened and closed the store file by other means, the kernel would release
        SQLite's locks on the file (fcntl(2)). Another process could then delete the log while the log is in use.
        """
        aside = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)  # left by a process that was killed here
        os.close(_open_private(aside))
        copy = sqlite3.connect(aside)
        try:
            self.connection.backup(copy)
        finally:
            copy.close()
        os.rename(aside, path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock on `store.lock`.

        Raises StoreTrouble if another process still holds the lock after ``lock_wait_s`` seconds, or if the file cannot
        be locked.
        """
        try:
            locked = lock_within(self._lock_fd, self.lock_wait_s)
        except OSError as error:
            raise StoreTrouble(f"cannot lock the store: {error.strerror}", where=self.places.store_lock) from None
        if not locked:
            raise StoreTrouble(
                f"cannot lock the store: another process has held the lock for {self.lock_wait_s:g} s",
                where=self.places.store_lock,
            )
        try:
            yield
        finally:
            unlock(self._lock_fd)

    @contextlib.contextmanager
    def writing(self, *, sync: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one transaction under the store's lock. The transaction is committed whole or not at all.

        ``sync`` False: the commit survives a crash of this process, but a power loss before the next sync may undo it.
        Raises Damaged if the store is damaged. Raises StoreTrouble if another process holds the lock too long, if the
        disk is full or fails, or if the store was replaced.
        """
        with self._locked():
            if not self._in_office:  # under the lock: a write to a store that `recover` has replaced would be lost
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
            if sync and newest > self._high:  # after the commit: the note is never higher than the ids on the disk
                self._high = newest
                integrity.note_high(self._high_fd, newest)

    def check_in_place(self) -> None:
        """Raise StoreTrouble if the store file was removed or replaced since it was opened."""
        try:
            there = os.stat(self.places.store).st_ino
        except OSError:
            there = 0
        if there != self._inode:
            raise StoreTrouble(
                "cannot use the store: it was removed or replaced while in use",
                where=self.places.store,
                do="put it back and start the scheduler again, or run: gpujob recover",
            )

    def wake_daemon(self) -> None:
        """Wake the daemon: write one byte into the wakeup file. The caller must have committed its changes.

        A failed write (full disk) is ignored: the daemon then finds the committed data later.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._wakeup_fd, b"!", 0)

    def close(self) -> None:
        """Close the connection, the lock file, the wakeup file and the file with the highest id."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.close()
        self._let_go()

    def _let_go(self) -> None:
        os.close(self._lock_fd)
        os.close(self._wakeup_fd)
        os.close(self._high_fd)


def _making_was_cut_off(places: Places) -> bool:
    """Return whether the creation of the store was interrupted. Only such a store has a rollback journal."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(f"{places.store}-journal") > 0 and os.path.getsize(places.store) > 0
    return False


def _finish_making(places: Places) -> None:
    """Let SQLite roll back an interrupted creation of the store. A read-only connection cannot do this."""
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
    """Raise Damaged if the store cannot be trusted, StoreTrouble if a newer gpujob wrote the store.

    Nothing is written: the connection is read-only. Closing a writable connection would copy the log into the store, or
    delete a damaged log.
    ``pages``: the pragma that checks the pages (`quick_check`, `integrity_check`), empty for no check of the pages;
    ``records``: also compare the store with the attempt records; ``still``: see `read_only`.
    """
    integrity.check_begun(places)
    if not os.path.exists(places.store) or not os.path.getsize(places.store):
        return
    given = integrity.high(places)  # before the store is read: another process may be adding jobs
    try:
        connection = read_only(places.store, still)
        try:
            version = _version(connection, places)
            if version > VERSION:
                raise StoreTrouble(
                    f"cannot use the store: a newer gpujob wrote it (version {version}; this gpujob supports {VERSION})",
                    where=places.store,
                    do="install the newer gpujob again, or name another --state-file",
                    code=NEWER,
                )
            if version == 0 and (evidence := integrity.evidence(places)):
                raise Damaged(f"cannot use the store: it is empty, but {evidence}", where=places.store)
            if pages:
                _load_into_cache(places.store)
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


def _load_into_cache(path: str) -> None:
    """Load a file into the page cache: from its begin to its end, which a disk reads much faster than pages in no order.

    A file that cannot be read is not an error here, because SQLite reports it.
    """
    piece = bytearray(1 << 20)
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as stream:
        while stream.readinto(piece):
            continue


def _version(connection: sqlite3.Connection, places: Places) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= version < NO_VERSION:
        raise Damaged(f"the store is damaged (version {version})", where=places.store)
    return version


def read_only(path: str, still: bool = False) -> sqlite3.Connection:
    """Return a connection that cannot change the store.

    ``still``: the caller knows that the store has no log and that no process changes it now. SQLite then reads the
    store without creating a log and an index beside it.
    """
    if os.path.exists(path) and os.statvfs(path).f_flag & os.ST_RDONLY and not os.path.exists(f"{path}-wal"):
        still = True  # a read-only disk: no process can change the store or create files beside it
    return sqlite3.connect(
        f"file:{_quoted(path)}?mode=ro{'&immutable=1' * still}", uri=True, isolation_level=None, timeout=5.0
    )


@contextlib.contextmanager
def held_still(places: Places) -> Iterator[bool]:
    """Yield True if no daemon runs, no process writes the store, and the store has no write-ahead log; else False.

    If True, the store can be read without creating files beside it, and writers wait until the context ends.
    """
    if os.path.exists(f"{places.store}-wal") or daemon_alive(places):
        yield False
        return
    try:
        fd = plain(places.store_lock, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield try_lock(fd, fcntl.LOCK_SH) and not os.path.exists(f"{places.store}-wal")  # False: a writer is active
    finally:
        os.close(fd)


def open_for_reading(places: Places, still: bool = False) -> sqlite3.Connection:
    """Return a read-only connection. It never makes a writer wait.

    Raises Elsewhere if the daemon runs on another machine, NothingYet if the store has no tables yet, Damaged if the
    store cannot be trusted, and StoreTrouble if the store cannot be read or was written by another version.
    """
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
                f"cannot use the store: a newer gpujob wrote it (version {version}; this gpujob supports {VERSION})",
                where=places.store,
                do="install the newer gpujob again, or name another --state-file",
                code=NEWER,
            )
        if 0 < version < NEWEST:
            do = "start the scheduler, which updates the store: gpujob start"
            raise StoreTrouble(
                f"cannot read the store: an older gpujob wrote it (version {version})",
                where=places.store,
                do=do,
                code=OUTDATED,
            )
        if version == 0:
            if evidence := integrity.evidence(places):
                raise Damaged(f"cannot use the store: it is empty, but {evidence}", where=places.store)
            raise NothingYet(
                "cannot read the store: it is still empty", where=places.store, do="start the scheduler: gpujob start"
            )
    except sqlite3.Error as error:
        connection.close()
        if _making_was_cut_off(places):
            raise NothingYet(
                "cannot read the store: its creation was interrupted",
                where=places.store,
                do="start the scheduler: gpujob start",
            ) from None
        raise trouble(error, places.store) from error
    except StoreTrouble:
        connection.close()
        raise
    return connection


def nothing_yet() -> sqlite3.Connection:
    """Return an empty store in memory. Readers use it if no store exists yet."""
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
        raise StoreTrouble(f"cannot open the file: {error.strerror}", where=path, do=do) from None
    if os.fstat(fd).st_mode & 0o777 != 0o600:
        os.fchmod(fd, 0o600)
    return fd


def trouble(error: Exception, path: str) -> StoreTrouble:
    """Return the StoreTrouble for an error of SQLite. If the error means that the file is damaged, return Damaged."""
    text = " ".join(str(error).split())
    if isinstance(error, sqlite3.Error) and any(sign in text for sign in _SIGNS_OF_DAMAGE):
        return Damaged(f"the store is damaged ({text})", where=path)
    do = "free some space" if "full" in text else "see gpujob doctor"
    return StoreTrouble(f"cannot use the store: {text}", where=path, do=do)
