"""The files of tracked sessions: one JSON file per session in `.gpu-tracker/`, replaced as a whole under a lock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator

from scheduler.core.errors import NotFound, SchedulerError, UsageError
from scheduler.system.atomic_files import leftover_temporaries, replace_file
from scheduler.system.locks import try_lock
from scheduler.system.safe_open import plain
from scheduler.track.plan import Session, age, is_session_id, next_id, session_of, stored

FOLDER = ".gpu-tracker"
LOCK = "lock"
RUN_ALL = "run-all.lock"
ENDING = ".json"
LARGEST = 64 << 20
LOCK_WAIT_S = 60.0
LOOK_AGAIN_S = 0.005


class NoSession(SchedulerError):
    """Raised if there is no session in a folder or in any folder above it."""

    def __init__(self, folder: str) -> None:
        do = "begin a session: gpujob track init NAME"
        if any(name.startswith("ses_") for name in _names_in(os.path.join(folder, FOLDER))):
            do = f"the sessions that the program gpu-tracker left in {FOLDER} are not read; {do}"
        super().__init__(f"no session here ({folder}) or in a folder above", do=do)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # the error to raise reports that there is no session


class SessionDamaged(SchedulerError):
    """Raised if the file of a session cannot be read. The file is left unchanged."""

    def __init__(self, path: str, why: str) -> None:
        name = os.path.basename(path).removesuffix(ENDING)
        super().__init__(
            f"cannot read the session: {why}",
            where=path,
            do=f"correct the file, or delete it: gpujob track delete {name}",
        )


def find_root(folder: str) -> str:
    """Return the nearest folder with sessions, from ``folder`` upwards. Raises NoSession.

    Sessions of other users are ignored, because this user would run their commands. Exception: root may use sessions of
    any user in ``folder`` itself.
    """
    at = folder
    while not _trusted(os.path.join(at, FOLDER), here=at == folder):
        above = os.path.dirname(at)
        if above == at:
            raise NoSession(folder)
        at = above
    return at


def _trusted(folder: str, *, here: bool) -> bool:
    try:
        found, link = os.stat(folder), os.lstat(folder)  # another user may have made a link to a folder of ours
    except OSError:
        return False
    mine = {found.st_uid, link.st_uid} == {os.geteuid()} or (here and not os.geteuid())
    return stat.S_ISDIR(found.st_mode) and mine


class SessionFiles:
    """The session files of one folder. Every method raises OSError if the disk fails."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.sessions_dir = os.path.join(root, FOLDER)

    def path(self, name: str) -> str:
        """Return the path of a session's file."""
        return os.path.join(self.sessions_dir, name + ENDING)

    def folder(self, name: str) -> str:
        """Return the path of the folder with the session's attempt records and logs."""
        return os.path.join(self.sessions_dir, name)

    def names(self) -> list[str]:
        """Return the ids of all sessions, the newest last."""
        found = [name.removesuffix(ENDING) for name in os.listdir(self.sessions_dir) if name.endswith(ENDING)]
        return sorted(filter(is_session_id, found), key=age)

    def newest(self) -> str:
        """Return the id of the newest session. Raises NoSession."""
        names = self.names()
        if not names:
            raise NoSession(self.root)
        return names[-1]

    def read(self, name: str) -> Session:
        """Return a session with the states stored in its file. Raises NotFound, SessionDamaged."""
        path = self.path(name)
        try:
            if not is_session_id(name):
                raise FileNotFoundError
            with open(path, "rb", opener=plain) as stream:
                data = stream.read(LARGEST + 1)
        except FileNotFoundError:
            raise NotFound(f"there is no session {name[:40]}", do="see gpujob track list") from None
        except OSError as error:
            raise SessionDamaged(path, error.strerror or str(error)) from None
        try:
            return session_of(json.loads(data), name)
        except UsageError as error:
            raise SessionDamaged(path, str(error)) from None
        except UnicodeDecodeError:
            raise SessionDamaged(path, "it is not UTF-8 text") from None
        except json.JSONDecodeError as error:
            why = "it is empty" if not data.strip() else f"line {error.lineno} is not JSON ({error.msg})"
            raise SessionDamaged(path, why) from None
        except (ValueError, RecursionError):
            raise SessionDamaged(path, "it is not valid JSON") from None

    def create(self, name: str, now: float) -> Session:
        """Create a session, which becomes the newest. ``now``: seconds since 1970 (UTC). Raises SchedulerError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.sessions_dir, 0o700)
            os.chmod(self.sessions_dir, 0o700)  # the umask may have removed permission bits
        with self._locked():
            taken = {entry.removesuffix(ENDING) for entry in os.listdir(self.sessions_dir)}
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
            session = Session(next_id(stamp, filter(is_session_id, taken)), name, now)
            self._folder(session.id)
            self._write(session, now)
        return session

    @contextlib.contextmanager
    def changing(self, name: str, wait_s: float | None = None) -> Iterator[Session]:
        """Lock the session and yield it. After the block, write the session's file if the session has changed.

        If the block raises an error, nothing is written. ``wait_s``: seconds to wait for the lock; None: `LOCK_WAIT_S`.
        Raises NotFound, SessionDamaged, SchedulerError.
        """
        with self._locked(LOCK_WAIT_S if wait_s is None else wait_s):
            session, now = self.read(name), time.time()
            before = self._text(session, now)
            yield session
            if self._text(session, now) != before:
                self._write(session, now)

    def _write(self, session: Session, now: float) -> None:
        path = self.path(session.id)
        for one in leftover_temporaries(path):  # left by killed writers; we have the lock
            os.unlink(one)
        replace_file(path, self._text(session, now))

    def _text(self, session: Session, now: float) -> bytes:
        return json.dumps(stored(session, self.root, now), indent=1).encode() + b"\n"

    def _folder(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder(name), 0o700)
            os.chmod(self.folder(name), 0o700)

    def make_folder(self, name: str) -> str:
        """Create the folder with the session's attempt records and logs, and return its path.

        Sockets of killed trackers in an existing folder are removed.
        """
        self._folder(name)
        folder = self.folder(name)
        for entry in os.listdir(folder):
            _, pid, *_ = (*entry.split("-"), "")
            if entry.startswith("caller-") and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, entry))
        return folder

    def delete(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        """Delete a session with its logs and attempt records. Raises NotFound.

        ``check``: called under the lock, before the deletion. If it raises an error, the session is kept.
        """
        if not is_session_id(name) or name not in self.names():
            raise NotFound(f"there is no session {name[:40]}", do="see gpujob track list")
        with self._locked():
            check()
            for path in (*leftover_temporaries(self.path(name)), self.path(name)):
                os.unlink(path)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder(name))

    @contextlib.contextmanager
    def _locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Hold the lock on all session files.

        Raises NoSession if the folder of the sessions does not exist. Raises SchedulerError if the lock is not free
        within ``wait_s`` seconds. If the lock file is removed or replaced during the wait, the new lock file is used;
        if it is missing, it is created.
        """
        path = os.path.join(self.sessions_dir, LOCK)
        until = time.monotonic() + wait_s
        while True:
            try:
                fd = _private(path)
            except FileNotFoundError:
                raise NoSession(self.root) from None
            try:
                if try_lock(fd) and _exists(fd, path):
                    yield
                    return
            finally:
                os.close(fd)
            if time.monotonic() > until:
                do = f"find the process that has it open: fuser {path}"
                raise SchedulerError(
                    f"cannot lock the sessions: another gpujob track has held the lock for {wait_s:.0f} s",
                    where=path,
                    do=do,
                )
            time.sleep(LOOK_AGAIN_S)

    @contextlib.contextmanager
    def running_all(self, name: str) -> Iterator[Turn]:
        """Yield a `Turn`, the lock that lets only one `run-all` of a session work at a time."""
        turn = Turn(os.path.join(self.make_folder(name), RUN_ALL))
        try:
            yield turn
        finally:
            os.close(turn.fd)


class Turn:
    """The lock of a `run-all`. Only one process at a time runs all commands of a session. ``path``: the lock file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = _private(path)

    def come(self) -> bool:
        """Take the lock if it is free, and write this process's pid to the lock file. Return whether this succeeded."""
        if not try_lock(self.fd):
            return False
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, b"%d\n" % os.getpid(), 0)
        return True

    def whose(self) -> str:
        """Return the pid of the process that has the lock, as text; empty if it is not known."""
        return os.pread(self.fd, 20, 0).decode("ascii", "replace").strip()


def _private(path: str) -> int:
    fd = plain(path, os.O_RDWR | os.O_CREAT)
    if not stat.S_IMODE(os.fstat(fd).st_mode):
        os.fchmod(fd, 0o600)  # the umask may have removed permission bits
    return fd


def _exists(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
