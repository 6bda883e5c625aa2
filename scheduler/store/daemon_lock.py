"""The lock that a running daemon holds, the file that describes the daemon, and the register of live schedulers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from typing import Any

from scheduler.core.errors import SchedulerError
from scheduler.store.paths import Places
from scheduler.system.atomic_files import replace_file
from scheduler.system.private_files import new_private
from scheduler.system.proc import boot_id
from scheduler.system.safe_open import plain

OLD_S = 60.0
_ASIDE = r"\..+\.new-(\d+)"  # temporary file of `system/atomic_files.py: replace_file`; the number is the pid
_PACKET = r"packet-(\d+)-\d+"  # start message from `runners/direct.py` to its supervisor
_CALLER = r"caller-(\d+)-[0-9a-f]+"  # socket of `client/foreground_caller.py`
TAKING_S = 1.0  # a daemon writes `daemon.json` within this time after it has taken the lock
_HELD = (errno.EAGAIN, errno.EACCES)  # errors of flock if another process has the lock


class Taken(SchedulerError):
    """Error: a scheduler with this state file already runs."""


class Elsewhere(SchedulerError):
    """Error: the daemon of this state file runs on another machine that shares the folder."""


def no_locks(path: str, why: str) -> SchedulerError:
    """Return the error for a file system without locks.

    Without locks, two daemons could run at the same time, and two writers could damage the store.
    """
    return SchedulerError(
        f"cannot lock the file: its file system has no locks ({why})",
        where=path,
        do="name a --state-file on a local disk",
    )


class DaemonLock:
    """The lock on a state folder. The daemon holds it. While no daemon runs, a command may hold it.

    The kernel releases the lock when the process ends, even if the process is killed.
    """

    def __init__(self, places: Places) -> None:
        from filelock import FileLock  # imported here: it takes 30 ms, which commands that only read need not spend

        self.places = places
        self._lock = FileLock(places.daemon_lock, mode=0o600)
        self._house = -1  # descriptor of the state folder, which is locked too: the lock file may be removed
        self._mine = False

    def take(self, info: dict[str, Any], wait_s: float = 1.0) -> None:
        """Take the lock and write ``info`` to `daemon.json`.

        Raises Taken if another process still holds the lock after ``wait_s`` seconds; the error gives the pid that
        `daemon.json` contains. Raises SchedulerError if the file system has no locks, or if its locks have no effect.
        """
        from filelock import Timeout

        self._check_that_locks_are_kept()
        until = time.monotonic() + wait_s
        try:
            self._lock.acquire(timeout=wait_s, poll_interval=0.02)
        except Timeout:
            raise self._taken() from None
        self._house = os.open(self.places.state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        while _held(self._house, fcntl.LOCK_EX):  # perhaps only briefly locked by `daemon_alive` in another process
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
        """Raise SchedulerError if the file system has no locks.

        Without this check, `filelock` would fall back to a lock that consists only of the existence of a file.
        """
        path = self.places.daemon_lock
        with contextlib.suppress(FileExistsError):
            os.close(new_private(path))
        daemon_alive(self.places)

    def _check_it_holds(self) -> None:
        """Raise SchedulerError if the lock appears free although this process has just taken it.

        This happens on a file system whose locks have no effect: a second daemon could take the lock, too.
        """
        if not daemon_alive(self.places):
            raise no_locks(self.places.daemon_lock, "two processes could hold the same lock")

    def _tidy(self) -> None:
        """Remove temporary files and sockets of processes that were killed.

        Start messages younger than ``OLD_S`` seconds stay, because a supervisor may still have to read them.
        """
        for entry in os.scandir(self.places.state_dir):
            found = next(filter(None, (re.fullmatch(kind, entry.name) for kind in (_ASIDE, _PACKET, _CALLER))), None)
            if found is None or os.path.exists(f"/proc/{found[1]}"):
                continue
            with contextlib.suppress(FileNotFoundError):
                if found.re.pattern != _PACKET or time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD_S:
                    os.unlink(entry.path)

    def _taken(self) -> Taken:
        other = holder(self.places).get("pid", "unknown")
        return Taken(f"cannot start: a scheduler with this state file is already running (pid {other})", where=self.places.state_file,
                     do=f"use that scheduler, end it first (kill {other}; running jobs continue), or name another --state-file")  # fmt: skip

    def leave(self) -> None:
        """Release the lock and remove `daemon.json`."""
        if self._mine:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.places.daemon_info)
        if self._house >= 0:
            os.close(self._house)
        self._house, self._mine = -1, False
        self._lock.release()


def holder(places: Places) -> dict[str, Any]:
    """Return the contents of `daemon.json`, which a daemon writes at its start; empty if the file cannot be read."""
    try:
        with open(places.daemon_info, encoding="utf-8", opener=plain) as stream:
            data = json.load(stream)
    except (OSError, ValueError):
        return {}  # whether a daemon runs is decided by the lock, not by this file
    return data if isinstance(data, dict) else {}


def _held(fd: int, how: int) -> bool:
    """Try to lock ``fd`` without waiting (``how``: kind of lock). Return whether another process holds the lock.

    If the result is False, this process has the lock, or the file system cannot lock a folder (NFS).
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD  # NFS has no locks on folders: the lock on the file must suffice
    return False


def daemon_alive(places: Places) -> bool:
    """Return whether a process holds the lock now: a daemon, or a command that does the work of the daemon.

    The lock of a killed daemon does not count, because the kernel releases a lock when the process that holds it ends.
    Raises SchedulerError if the file system has no locks.
    """
    for path, flags in ((places.daemon_lock, os.O_RDWR), (places.state_dir, os.O_RDONLY | os.O_DIRECTORY)):
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: processes that only check do not see each other
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno in _HELD:
                return True
            if path == places.daemon_lock:  # NFS has no locks on folders: the lock on the file must suffice
                raise no_locks(path, error.strerror or str(error)) from None
        finally:
            os.close(fd)
    return False


def check_here(places: Places) -> None:
    """Raise Elsewhere if the daemon runs on another machine that shares the folder.

    SQLite's index of the write-ahead log is shared only among processes of one machine. So a process on this machine
    could read wrong data. If it wrote to the store, it could damage the store.
    """
    told = holder(places)
    if told.get("boot") in (None, boot_id()):
        return
    until = time.monotonic() + TAKING_S
    while daemon_alive(places):  # after a reboot, perhaps a local daemon that has not replaced `daemon.json` yet
        told = holder(places)
        if told.get("boot") in (None, boot_id()):
            return
        if time.monotonic() >= until:
            raise Elsewhere(
                f"cannot use the store from this machine: its scheduler runs on {told.get('host', 'another machine')} "
                f"(pid {told.get('pid', 'unknown')}), which shares this folder",
                where=places.state_dir,
                do="run the command there",
            )
        time.sleep(0.02)


# -- the register of this user's live schedulers ----------------------------------------------------------


def register_folder(environ: dict[str, str]) -> str:
    """Return the path of the register: a folder with one file for each live scheduler of this user.

    The folder need not exist. The result is empty if the folders that ``environ`` names do not belong to this user.
    Example: under sudo the folders may belong to the user who called sudo, and root must not create files there.
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
    """Create the file of this scheduler in the register, which is a folder (`register_folder`).

    Return the path of the file, or an empty text if the file could not be written.
    """
    folder = register_folder(environ)
    if not folder:
        return ""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)  # the umask may have removed permissions
        for name in os.listdir(folder):  # remove the files of killed daemons
            number = re.fullmatch(r"(?:\.\d+\.json\.new-)?(\d+)(?:\.json)?", name)
            if number and not os.path.exists(f"/proc/{number[1]}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
        path = os.path.join(folder, f"{os.getpid()}.json")
        replace_file(path, json.dumps({"state_file": state_file, "pid": os.getpid()}).encode(), sync=False)
    except OSError:
        return ""  # the only effect: commands without --state-file do not find this scheduler
    return path


def check_no_other(environ: dict[str, str], places: Places) -> None:
    """Raise Taken if another daemon of this state file still runs, even if the state folder was moved or removed."""
    folder = register_folder(environ)
    try:
        names = os.listdir(folder) if _is_ours(folder) else []
    except OSError:
        return  # there is no register
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
            continue  # the process has ended, or the file is not a daemon's
        lock = os.path.basename(places.daemon_lock)
        if any(name.partition(" ")[0] == lock for name in held):  # may be "daemon.lock (deleted)"
            raise Taken(
                f"cannot start: a scheduler with this state file is still running (pid {number[1]}); its state folder was moved or removed meanwhile",
                where=places.state_file,
                do=f"end it first (its jobs continue): kill {number[1]}",
            )


def registered(environ: dict[str, str]) -> list[str]:
    """Return the paths of the state files of this user's live schedulers, as listed in the register."""
    folder = register_folder(environ)
    found: list[str] = []
    if not _is_ours(folder):  # another user's register could name a scheduler of that user
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
