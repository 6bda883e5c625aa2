"""The files of tracked sessions: one JSON a session under `.gpu-tracker/`, changed under a lock and replaced whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator

from scheduler.core.errors import NotFound, SchedulerError, UsageError
from scheduler.system.atomic_files import left_aside, replace_file
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
    """There is no session in this folder or above."""

    def __init__(self, folder: str) -> None:
        do = "begin one: gpujob track init NAME"
        if any(name.startswith("ses_") for name in _names_in(os.path.join(folder, FOLDER))):
            do = f"the sessions of gpu-tracker in {FOLDER} are not read; {do}"
        super().__init__(f"no session here ({folder}) or in a folder above", do=do)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # that it is not there is what is being said


class SessionDamaged(SchedulerError):
    """A session's file cannot be read; it was left as it is."""

    def __init__(self, path: str, why: str) -> None:
        name = os.path.basename(path).removesuffix(ENDING)
        super().__init__(f"the session cannot be read: {why}", where=path, do=f"mend it, or gpujob track delete {name}")


def find_root(folder: str) -> str:
    """The nearest folder, from this one upwards, in which there are sessions. Raises NoSession.

    Above, only one of our own user counts: what stands in it is run.
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
        found, link = os.stat(folder), os.lstat(folder)  # a link to a folder of ours may be somebody else's
    except OSError:
        return False
    mine = {found.st_uid, link.st_uid} == {os.geteuid()} or (here and not os.geteuid())
    return stat.S_ISDIR(found.st_mode) and mine


class SessionFiles:
    """The sessions of one folder. Every method raises OSError where the disk does not let it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.sessions_dir = os.path.join(root, FOLDER)

    def path(self, name: str) -> str:
        """A session's file."""
        return os.path.join(self.sessions_dir, name + ENDING)

    def folder(self, name: str) -> str:
        """Where the records and logs of its commands lie."""
        return os.path.join(self.sessions_dir, name)

    def names(self) -> list[str]:
        """The ids of all sessions, the newest last."""
        found = [name.removesuffix(ENDING) for name in os.listdir(self.sessions_dir) if name.endswith(ENDING)]
        return sorted(filter(is_session_id, found), key=age)

    def newest(self) -> str:
        """The current session. Raises NoSession."""
        names = self.names()
        if not names:
            raise NoSession(self.root)
        return names[-1]

    def read(self, name: str) -> Session:
        """A session as it is now. Raises NotFound, SessionDamaged."""
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
            raise SessionDamaged(path, "it is no text in UTF-8") from None
        except json.JSONDecodeError as error:
            why = "it is empty" if not data.strip() else f"no JSON in line {error.lineno} ({error.msg})"
            raise SessionDamaged(path, why) from None
        except (ValueError, RecursionError):
            raise SessionDamaged(path, "no JSON that can be read") from None

    def create(self, name: str, now: float) -> Session:
        """A new session, which is the current one from now on."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.sessions_dir, 0o700)
            os.chmod(self.sessions_dir, 0o700)  # whatever the umask has left of it
        with self._locked():
            taken = {entry.removesuffix(ENDING) for entry in os.listdir(self.sessions_dir)}
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
            session = Session(next_id(stamp, filter(is_session_id, taken)), name, now)
            self._folder(session.id)
            self._write(session, now)
        return session

    @contextlib.contextmanager
    def changing(self, name: str, wait_s: float | None = None) -> Iterator[Session]:
        """The session to be changed, alone; written when the block ends well. Raises NotFound, SessionDamaged."""
        with self._locked(LOCK_WAIT_S if wait_s is None else wait_s):
            session, now = self.read(name), time.time()
            before = self._text(session, now)
            yield session
            if self._text(session, now) != before:
                self._write(session, now)

    def _write(self, session: Session, now: float) -> None:
        path = self.path(session.id)
        for one in left_aside(path):  # of one that was killed; who writes has the lock
            os.unlink(one)
        replace_file(path, self._text(session, now))

    def _text(self, session: Session, now: float) -> bytes:
        return json.dumps(stored(session, self.root, now), indent=1).encode() + b"\n"

    def _folder(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder(name), 0o700)
            os.chmod(self.folder(name), 0o700)

    def make_folder(self, name: str) -> str:
        """The folder of its records and logs, made anew if somebody removed it; sockets that killed trackers left there go."""
        self._folder(name)
        folder = self.folder(name)
        for entry in os.listdir(folder):
            _, pid, *_ = (*entry.split("-"), "")
            if entry.startswith("caller-") and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, entry))
        return folder

    def delete(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        """Forget a session, its logs and records too. ``check`` may raise to keep it: nobody changes it meanwhile. Raises NotFound."""
        if not is_session_id(name) or name not in self.names():
            raise NotFound(f"there is no session {name[:40]}", do="see gpujob track list")
        with self._locked():
            check()
            for path in (*left_aside(self.path(name)), self.path(name)):
                os.unlink(path)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder(name))

    @contextlib.contextmanager
    def _locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Alone with the files. A lock that was removed or exchanged meanwhile is none. Raises NoSession, SchedulerError."""
        path = os.path.join(self.sessions_dir, LOCK)
        until = time.monotonic() + wait_s
        while True:
            try:
                fd = _private(path)
            except FileNotFoundError:
                raise NoSession(self.root) from None
            try:
                if try_lock(fd) and _stands(fd, path):
                    yield
                    return
            finally:
                os.close(fd)
            if time.monotonic() > until:
                do = f"see who has it open: fuser {path}"
                raise SchedulerError(f"another gpujob track holds the sessions for {wait_s:.0f} s", where=path, do=do)
            time.sleep(LOOK_AGAIN_S)

    @contextlib.contextmanager
    def running_all(self, name: str) -> Iterator[Turn]:
        """The one place from which all commands of a session are run, for who comes first."""
        turn = Turn(os.path.join(self.make_folder(name), RUN_ALL))
        try:
            yield turn
        finally:
            os.close(turn.fd)


class Turn:
    """A place in the queue of those that want to run all commands of a session; ``path``: of the file that is locked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = _private(path)

    def come(self) -> bool:
        """Whether it is ours (now)."""
        if not try_lock(self.fd):
            return False
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, b"%d\n" % os.getpid(), 0)
        return True

    def whose(self) -> str:
        """The pid of who has it, as far as known."""
        return os.pread(self.fd, 20, 0).decode("ascii", "replace").strip()


def _private(path: str) -> int:
    fd = plain(path, os.O_RDWR | os.O_CREAT)
    if not stat.S_IMODE(os.fstat(fd).st_mode):
        os.fchmod(fd, 0o600)  # whatever the umask has left of it
    return fd


def _stands(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
