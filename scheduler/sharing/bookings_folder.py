"""The folder in which schedulers and leases publish their bookings: its lock, the own file, and the files of others.

The folder belongs to root and is sticky (such as /run/lock), so that nobody can remove or rename the files of another
user. The lock is a lock on the folder itself: a lock file would belong to a user, who could replace it. A file has two
slots, which are written in turn, so that a writer that is killed leaves the document before. Nothing in the folder is
trusted: each file counts only for its owner, and reading it takes bounded time and memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pwd
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.errors import SchedulerError
from scheduler.core.job import Process
from scheduler.core.shared_bookings import LONGEST, Document, text_of
from scheduler.sharing.bookings_file import (
    RESERVED,
    SLOT,
    STEP_S,
    Unfinished,
    is_own,
    locked,
    newest,
    own_space,
    space_of,
)
from scheduler.system.processes import SHORT_OF, seen_as

FOLDERS = ("/run/lock", "/dev/shm")  # noqa: S108  sticky folders of root
VARIABLE = "GPUJOB_BOOKINGS_FOLDER"  # another folder, for containers and tests
MOST_LIVING = 64  # documents of one user that live
MOST_FILES = 1024  # of one user
KEPT_ENDED = 32  # documents of ended schedulers of one user, which tell what the user has used
MOST_NAMES = 200_000  # entries of the folder
MOST_CHECKS = 2000  # processes of one user that are looked at in one reading; the others count as alive
MOST_PROBLEMS = 5  # of one user that are named
NEW_S = 2.0
UNKNOWN_S = 600.0  # how long a booking counts whose scheduler died before it knew the process of the job
SLOT_S = 0.05  # length of a turn while an ignored user holds the lock
MOST_SLOTS = 16
_NAME = re.compile(r"gpujob-(\d{1,10})-([0-9a-z-]{1,40})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Published:
    """A document of another scheduler or lease that lives, or whose jobs live. ``user``: name of its owner."""

    uid: int
    user: str
    path: str
    document: Document


@dataclass(slots=True)
class Found:
    """The documents in the folder. ``ended``: those of which nothing lives any more; ``problems``: files not read.

    ``closed``: why bookings may be missing, as a clause, so that nothing may be booked; empty if none is missing.
    """

    living: list[Published] = field(default_factory=list)
    ended: list[Published] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    closed: str = ""


def shared_folder(environ: Mapping[str, str]) -> str:
    """Return the folder that all schedulers of this machine use. Raises SchedulerError if none is safe."""
    named = environ.get(VARIABLE)
    problems = []
    for path in [named] if named else FOLDERS:
        problem = folder_problem(path, open_to_all=not named)
        if not problem:
            return path
        problems.append(problem)
    raise SchedulerError(
        f"bookings cannot be shared: {'; '.join(problems)}", do="set share_bookings: false to run without"
    )


def folder_problem(path: str, open_to_all: bool = False) -> str:
    """Return why a folder is not safe for shared bookings, as a clause; empty if it is safe.

    ``open_to_all``: every user must be able to create files in it, so that all users choose the same folder.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is no folder"
    if found.st_uid not in (0, os.getuid()):
        return f"{path} belongs to {user_name(found.st_uid)}, who could remove the files of others"
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        return f"{path} is not sticky, so users could remove the files of others"
    if open_to_all and found.st_mode & 0o1003 != 0o1003:
        return f"{path} is not open to all users"
    return ""


def time_of_day(at: float) -> str:
    """Return the time of day at ``at`` seconds since boot, such as 14:20; with the date if it is on another day.

    ``at``: at most `core/shared_bookings.py: LARGEST_NUMBER`.
    """
    wall = time.time() + at - time.clock_gettime(time.CLOCK_BOOTTIME)
    here, today = time.localtime(wall), time.localtime()
    return time.strftime("%H:%M" if here[:3] == today[:3] else "%Y-%m-%d %H:%M", here)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if the user has no name. Control characters are replaced."""
    try:
        return _known_name(uid)
    except KeyError:
        return str(uid)


@functools.lru_cache(256)  # asking a directory service for each file of a pass would take too long
def _known_name(uid: int) -> str:
    name = pwd.getpwuid(uid).pw_name
    return name if name.isprintable() else ascii(name)


def alive(process: Process) -> bool:
    """Return whether a process of any user lives; a zombie does not. If /proc hides it, a process with this pid counts."""
    found = seen_as(process)
    if found is not None:
        return found.alive
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return not os.access(f"/proc/{process.pid}/stat", os.R_OK)  # readable: it is another process, with the same pid
    except OSError:
        return False
    return False


class BookingsFolder:
    """The folder, as one scheduler or lease uses it.

    ``key``: tells the files of one user apart; ``boot``: boot id of the machine; ``ignored``: names of users whose files
    and locks do not count. Raises OSError if the folder cannot be opened.
    """

    def __init__(self, path: str, key: str, boot: str, ignored: Callable[[], Collection[str]] = tuple) -> None:
        self.path, self._key, self._boot, self._ignored = path, key, boot, ignored
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name, self._fd, self._sequence, self._slot = f"gpujob-{os.getuid()}-{key}", -1, 0, 0
        self._known: dict[str, tuple[bytes, Document]] = {}  # name → line with the checksum, document
        self._checks = Counter[int]()  # user → processes looked at in this reading
        self._checked: dict[Process, bool] = {}  # process → whether it lives, in this reading

    # -- the lock -----------------------------------------------------------------------------------------

    def lock(self, limit_s: float = 0.05) -> str:
        """Take the lock; return an empty text. If it is not free in time, return who has it, as a clause."""
        end = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return ""
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
            time.sleep(STEP_S)
        pid, user = self._holder()
        if user and user in self._ignored():
            self._wait_for_slot()
            return ""
        who = (
            f"process {pid} of user {user} has locked it"
            if pid
            else "a process has locked it, which does not show itself"
        )
        return f"the bookings in {self.path} cannot be changed: {who}"

    def _wait_for_slot(self) -> None:
        """Wait for the own turn. Schedulers that ignore a user who holds the lock exclude each other by the time of day."""
        names = sorted({self._name, *(os.path.basename(one.path) for one in self.read().living)})
        slots = min(len(names), MOST_SLOTS)
        begin = SLOT_S * (names.index(self._name) % slots)
        time.sleep((begin - time.clock_gettime(time.CLOCK_BOOTTIME)) % (SLOT_S * slots))

    def unlock(self) -> None:
        """Give the lock back."""
        fcntl.flock(self._folder, fcntl.LOCK_UN)

    def _holder(self) -> tuple[int, str]:
        """Return pid and user of the process that has the lock; (0, "") if it is not known."""
        found = os.fstat(self._folder)
        mine = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as stream:
            for line in stream:
                fields = line.split()
                if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == mine:
                    pid = int(fields[4])
                    return pid, user_name(os.stat(f"/proc/{pid}").st_uid)
        return 0, ""

    # -- the own file -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the own file."""
        return self._name

    @property
    def ready(self) -> bool:
        """Whether the own file is open."""
        return self._fd >= 0

    @property
    def in_place(self) -> bool:
        """Whether the own file is open and still has its name: a cleaner of temporary files may have removed it."""
        if self._fd < 0:
            return False
        try:
            found = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def prepare(self) -> bool:
        """Make sure that the own file exists and has room. Return whether it is new. Raises OSError if that fails."""
        if self.in_place:
            return False
        self._open()
        return True

    def publish(self, document: Document) -> None:
        """Write the own document, after `prepare`. Raises OSError if it cannot be written."""
        self._sequence = max(self._sequence + 1, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        data = text_of(document, self._sequence)
        if len(data) > LONGEST:
            raise OSError(errno.EFBIG, "too many bookings", self._name)
        if os.pwrite(self._fd, data, SLOT * self._slot) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.path.join(self.path, self._name))
        self._slot = 1 - self._slot

    def mine(self) -> Document | None:
        """Return the own document, as the scheduler before this one left it; None if there is none."""
        try:
            return self._read(self._name, os.getuid())[0]
        except (OSError, ValueError):
            return None

    def _open(self) -> None:
        """Open the own file, and create it if necessary."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for _ in range(MOST_FILES):
            fd = self._opened()
            if fd >= 0:
                break
            self._name = f"gpujob-{os.getuid()}-{self._key}-{os.urandom(4).hex()}"  # somebody else has taken the name
        else:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), os.path.join(self.path, self._name))
        try:
            os.fchmod(fd, 0o644)  # everyone may read it: it says nothing about commands
            for slot in (0, 1):
                os.posix_fallocate(fd, SLOT * slot, RESERVED)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._slot = fd, 0
        with contextlib.suppress(ValueError):
            self._slot = 1 - newest(fd, None)[1]

    def _opened(self) -> int:
        """Create or open the file with the own name, and lock it; return its descriptor, -1 if somebody else has it."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._folder)
        except FileExistsError:
            try:
                fd = os.open(self._name, flags, dir_fd=self._folder)
            except OSError:
                return -1
        # A lock by a process of this pid namespace does not matter: there, only one scheduler has this name at a time.
        if is_own(fd) and (locked(fd) or space_of(fd) == own_space()):
            return fd
        os.close(fd)
        return -1

    def close(self, remove: bool = False) -> None:
        """Close the files. ``remove``: remove the own file, too."""
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
        if self._fd >= 0:
            os.close(self._fd)
        os.close(self._folder)

    def tidy(self, prefix: str = "gpujob-", keep: int = 0) -> None:
        """Remove files of this user of which nothing lives any more, except the newest ones.

        ``prefix``: only files whose names begin with it; ``keep``: number of files that stay.
        """
        ended = [
            one for one in self.read().ended if one.uid == os.getuid() and os.path.basename(one.path).startswith(prefix)
        ]
        for one in sorted(ended, key=lambda one: -one.document.used_at)[keep:]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.basename(one.path), dir_fd=self._folder)

    # -- the files of others ------------------------------------------------------------------------------

    def read(self) -> Found:
        """Return the documents of all others. Never raises: what cannot be read is named in ``problems``."""
        found, of_user, living, named = Found(), Counter[int](), Counter[int](), Counter[str]()
        self._checks.clear()
        self._checked.clear()
        try:
            names = self._names()
        except OSError as error:
            found.closed = f"{self.path}: {error.strerror}"
            return found
        own, seen = self._own_file(), set[tuple[int, int]]()
        for name in names:
            uid, path = int(name.split("-")[1]), os.path.join(self.path, name)
            user = user_name(uid)
            try:
                status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                file = (status.st_dev, status.st_ino)
                if file == own or file in seen:
                    continue  # seen: it has several names
                if status.st_uid == uid:
                    seen.add(file)
                    of_user[uid] += 1
                    if of_user[uid] > MOST_FILES:
                        found.closed = f"user {user} has more than {MOST_FILES} files of bookings in {self.path}"
                        continue
                document, locked = self._read(name, uid)
                if uid == os.getuid() and document.key == self._key and document.space == own_space():
                    continue  # of this scheduler, before or after a restart
            except FileNotFoundError:
                continue  # it has just been removed
            except (OSError, ValueError) as error:
                why = _why(error)
                if isinstance(error, OSError) and error.errno in SHORT_OF:
                    found.closed = f"{path}: {why}"
                elif not (isinstance(error, (PermissionError, Unfinished)) and self._is_new(name)):
                    named[user] += 1
                    if named[user] <= MOST_PROBLEMS:
                        found.problems.append(f"{path} of user {user} is ignored: {why}")
                continue
            lives = self._living(document, locked, uid)
            if lives is None:  # the use of its last jobs is not known until the next start of this scheduler
                found.ended.append(Published(uid, user, path, _without_bookings(document)))
            else:
                found.living.append(Published(uid, user, path, lives))
                living[uid] += 1
                if living[uid] > MOST_LIVING:
                    found.closed = f"user {user} has more than {MOST_LIVING} schedulers and leases"
        self._known = {name: self._known[name] for name in names if name in self._known}
        return found

    def _names(self) -> list[str]:
        """Return the names of the files of users who are not ignored.

        Raises OSError if the folder cannot be read or has too many files.
        """
        names = []
        with os.scandir(self._folder) as entries:
            for number, entry in enumerate(entries):
                if number >= MOST_NAMES:
                    raise OSError(errno.EFBIG, f"it has more than {MOST_NAMES} files")
                match = _NAME.fullmatch(entry.name)
                if match is not None and user_name(int(match[1])) not in self._ignored():
                    names.append(entry.name)
        return sorted(names)

    def _own_file(self) -> tuple[int, int] | None:
        if self._fd < 0:
            return None
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def _is_new(self, name: str) -> bool:
        """Return whether a file was created or changed just now: it may get its mode and its first document next."""
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return True
        return stat.S_ISREG(found.st_mode) and abs(time.time() - found.st_ctime) < NEW_S

    def _read(self, name: str, uid: int) -> tuple[Document, bool]:
        """Return the document in a file, and whether its writer has the file locked. Raises OSError, ValueError."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no file")
            if status.st_uid != uid:
                raise ValueError(
                    f"it belongs to user {user_name(status.st_uid)}, and its name to user {user_name(uid)}"
                )
            if status.st_size > 2 * SLOT:
                raise ValueError("it is too large")
            known = self._known.get(name)
            line, _, read = newest(fd, None if known is None else known[0])
            if read is not None:
                known = self._known[name] = (line, read)
            assert known is not None
            locked = False
            if known[1].space != own_space():
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    locked = True
            return known[1], locked
        finally:
            os.close(fd)

    def _living(self, document: Document, locked: bool, uid: int) -> Document | None:
        """Return the document with the bookings that count; None if nothing of it lives. ``uid``: its owner."""
        if document.boot != self._boot:
            return None
        if document.space != own_space():  # its pids mean nothing here
            return document if locked else None
        if document.process is not None and self._alive(document.process, uid):
            return document
        supervised = any(self._alive(one, uid) for one in document.supervisors)
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - document.used_at
        unknown = not document.supervisors and document.process is not None and age_s < UNKNOWN_S
        bookings = tuple(
            booking
            for booking in document.bookings
            if (any(self._alive(one, uid) for one in booking.processes) if booking.processes else supervised or unknown)
        )
        return replace(_without_bookings(document), bookings=bookings) if bookings else None

    def _alive(self, process: Process, uid: int) -> bool:
        """Return whether a process lives. A user whose documents name very many processes has only live ones."""
        if process not in self._checked:
            self._checks[uid] += 1
            self._checked[process] = self._checks[uid] > MOST_CHECKS or alive(process)
        return self._checked[process]


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return "it is a link" if error.errno == errno.ELOOP else os.strerror(error.errno or errno.EIO)
    return str(error)


def _without_bookings(document: Document) -> Document:
    return replace(document, process=None, bookings=(), reserved=(), wants=(), waiting=0)
