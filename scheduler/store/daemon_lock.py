"""The lock that a daemon holds as long as it lives, and what it says of itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time

from scheduler.core.errors import SchedulerError
from scheduler.store.paths import Places
from scheduler.system.atomic_files import replace_file
from scheduler.system.private_files import new_private
from scheduler.system.proc import boot_id
from scheduler.system.safe_open import plain

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OLD_S = 60.0
_ASIDE = r"\..+\.new-(\d+)"  # as `safely.replace_file` names it
_PACKET = r"packet-(\d+)-\d+"  # as `runners/direct.py` does
_CALLER = r"caller-(\d+)-[0-9a-f]+"  # as `client/foreground.py` does
TAKING_S = 1.0  # at most this long after it got the lock, a daemon has said who it is
_HELD = (errno.EAGAIN, errno.EACCES)  # how the kernel says that another has the lock


class Taken(SchedulerError):
    """Another one runs."""


class Elsewhere(SchedulerError):
    """The daemon of this state file runs on another machine that shares the folder."""


def no_locks(path: str, why: str) -> SchedulerError:
    """Without locks two schedulers would start the same jobs, and two writers would break the store."""
    return SchedulerError(
        f"this file system keeps no locks ({why})", where=path, do="name a --state-file on a local disk"
    )


class DaemonLock:
    """Held by the one daemon of a state file until its process ends, however it ends."""

    def __init__(self, places: Places) -> None:
        from filelock import FileLock  # here, because it costs commands that only look 30 ms

        self.places = places
        self._lock = FileLock(places.daemon_lock, mode=0o600)
        self._house = -1  # the folder itself is locked as well: somebody may remove the lock's file
        self._mine = False

    def take(self, info: dict[str, Any], wait_s: float = 1.0) -> None:
        """Become the daemon. Raises Taken naming the pid of the one that is."""
        from filelock import Timeout

        self._check_that_locks_are_kept()
        until = time.monotonic() + wait_s
        try:
            self._lock.acquire(timeout=wait_s, poll_interval=0.02)
        except Timeout:
            raise self._taken() from None
        self._house = os.open(self.places.state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        while _held(self._house, fcntl.LOCK_EX):  # perhaps only by one who asks
            if time.monotonic() > until:
                self.leave()
                raise self._taken()
            time.sleep(0.01)
        try:
            self._check_it_holds()
        except SchedulerError:
            self.leave()
            raise
        self._mine = True
        self._tidy()
        replace_file(self.places.daemon_info, json.dumps(info).encode(), sync=False)

    def _check_that_locks_are_kept(self) -> None:
        """Before `filelock` asks, which would make do with the mere presence of a file. Raises SchedulerError."""
        path = self.places.daemon_lock
        with contextlib.suppress(FileExistsError):
            os.close(new_private(path))
        daemon_alive(self.places)

    def _check_it_holds(self) -> None:
        """A lock that does not keep others out is none. Raises SchedulerError."""
        if not daemon_alive(self.places):
            raise no_locks(self.places.daemon_lock, "two could hold the same one")

    def _tidy(self) -> None:
        """Remove what those left half-written who were killed before us; a packet, once its supervisor has had time to read it."""
        for entry in os.scandir(self.places.state_dir):
            found = next(filter(None, (re.fullmatch(kind, entry.name) for kind in (_ASIDE, _PACKET, _CALLER))), None)
            if found is None or os.path.exists(f"/proc/{found[1]}"):
                continue
            with contextlib.suppress(FileNotFoundError):
                if found.re.pattern != _PACKET or time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD_S:
                    os.unlink(entry.path)

    def _taken(self) -> Taken:
        other = holder(self.places).get("pid", "unknown")
        return Taken(f"a scheduler with this state file runs already (pid {other})", where=self.places.state_file,
                     do="use it, or name another --state-file")  # fmt: skip

    def leave(self) -> None:
        """Release the lock."""
        if self._mine:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.places.daemon_info)
        if self._house >= 0:
            os.close(self._house)
        self._house, self._mine = -1, False
        self._lock.release()


def holder(places: Places) -> dict[str, Any]:
    """What the daemon said of itself when it started; empty if nothing can be read."""
    try:
        with open(places.daemon_info, encoding="utf-8", opener=plain) as stream:
            data = json.load(stream)
    except (OSError, ValueError):
        return {}  # the lock tells whether there is one; this only tells who
    return data if isinstance(data, dict) else {}


def _held(fd: int, how: int) -> bool:
    """Whether another holds this lock; else it is ours from now on."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD  # NFS knows no locks on folders: that of the file has to do
    return False


def daemon_alive(places: Places) -> bool:
    """Whether a daemon holds the lock now (by the kernel's locks, so never stale). Raises SchedulerError where there are none."""
    for path, flags in ((places.daemon_lock, os.O_RDWR), (places.state_dir, os.O_RDONLY | os.O_DIRECTORY)):
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who only ask do not see each other
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno in _HELD:
                return True
            if path == places.daemon_lock:  # NFS knows no locks on folders: that of the file has to do
                raise no_locks(path, error.strerror or str(error)) from None
        finally:
            os.close(fd)
    return False


def check_here(places: Places) -> None:
    """Raise Elsewhere when the daemon runs on another machine: on a shared folder only its own kernel sees the
    store as it is (SQLite's index of the log is shared memory), and a second one could break it.
    """
    told = holder(places)
    if told.get("boot") in (None, boot_id()):
        return
    until = time.monotonic() + TAKING_S
    while daemon_alive(places):  # by whom? After a restart of this machine, by somebody who is about to say so
        told = holder(places)
        if told.get("boot") in (None, boot_id()):
            return
        if time.monotonic() >= until:
            raise Elsewhere(
                f"its scheduler runs on {told.get('host', 'another machine')} (pid {told.get('pid', 'unknown')}), which "
                "shares this folder: nothing is read or written from here",
                where=places.state_dir,
                do="give the command there",
            )
        time.sleep(0.02)


# -- where schedulers of this user can be found -----------------------------------------------------------


def register_folder(environ: dict[str, str]) -> str:
    """The private folder in which each live scheduler of this user leaves a file; empty if there is no place of ours.

    With sudo the variables may name places of the user before it: nothing of root's is left there.
    """
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if not _is_ours(runtime):
        home = environ.get("HOME") or os.path.expanduser("~")
        runtime = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
        runtime = there = os.path.abspath(runtime)
        while not os.path.exists(there):
            there = os.path.dirname(there)
        if not _is_ours(there):
            return ""
    return os.path.join(runtime, "gpujob")


def _is_ours(folder: str) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def register(environ: dict[str, str], state_file: str) -> str:
    """Leave a file that leads to this scheduler; returns its path, empty if it could not be left."""
    folder = register_folder(environ)
    if not folder:
        return ""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)  # whatever the umask has left of it
        for name in os.listdir(folder):  # daemons that were killed left theirs
            number = re.fullmatch(r"(?:\.\d+\.json\.new-)?(\d+)(?:\.json)?", name)
            if number and not os.path.exists(f"/proc/{number[1]}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
        path = os.path.join(folder, f"{os.getpid()}.json")
        replace_file(path, json.dumps({"state_file": state_file, "pid": os.getpid()}).encode(), sync=False)
    except OSError:
        return ""  # only the search without --state-file misses it
    return path


def check_no_other(environ: dict[str, str], places: Places) -> None:
    """Raise Taken when a daemon of this state file lives whose folder was removed or moved: its locks went with it."""
    folder = register_folder(environ)
    try:
        names = os.listdir(folder) if _is_ours(folder) else []
    except OSError:
        return  # nobody is found by it
    for name in names:
        number = re.fullmatch(r"(\d+)\.json", name)
        if number is None or int(number[1]) == os.getpid():
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as stream:
                if json.load(stream)["state_file"] != places.state_file:
                    continue
            handles = f"/proc/{number[1]}/fd"
            held = [os.path.basename(os.readlink(os.path.join(handles, fd))) for fd in os.listdir(handles)]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it has ended, or was no daemon's
        lock = os.path.basename(places.daemon_lock)
        if any(name.partition(" ")[0] == lock for name in held):  # "daemon.lock (deleted)"
            raise Taken(
                f"a scheduler with this state file runs already (pid {number[1]}), though its folder was taken from it",
                where=places.state_file,
                do=f"end it first, its jobs go on: kill {number[1]}",
            )


def registered(environ: dict[str, str]) -> list[str]:
    """State files of this user's live schedulers."""
    folder = register_folder(environ)
    found: list[str] = []
    if not _is_ours(folder):  # whoever else made it could lead us to a scheduler of his
        return found
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        try:
            with open(os.path.join(folder, name), encoding="utf-8", opener=plain) as stream:
                state_file = str(json.load(stream)["state_file"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        with contextlib.suppress(SchedulerError):
            if daemon_alive(Places(state_file)) and state_file not in found:
                found.append(state_file)
    return found
