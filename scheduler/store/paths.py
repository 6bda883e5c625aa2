"""Paths of a scheduler's files, and the creation of its private folders."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import stat
from dataclasses import dataclass

from scheduler.core.errors import SchedulerError
from scheduler.system.atomic_files import sync_folder

DEFAULT_STEM = "gpu_scheduler_state"
SYSTEM_SOCKET = "/run/gpujob/gpujob.sock"  # of the scheduler of all users


def digest(data: bytes, size: int) -> str:
    """Return the BLAKE2b hash of ``data`` in hexadecimal. ``size``: length of the hash in bytes."""
    try:
        from _blake2 import blake2b  # hashlib has the same function, but loads OpenSSL: slow for commands in loops
    except ImportError:
        from hashlib import blake2b
    return str(blake2b(data, digest_size=size).hexdigest())


@dataclass(frozen=True)
class Places:
    """Paths of one scheduler's files, all derived from the path of its state file.

    The paths that the daemon uses in each pass are computed only once.
    """

    state_file: str

    @functools.cached_property
    def state_dir(self) -> str:
        """The state folder: it holds the store, the locks and the attempt records.

        Its name is `.gpujob`, or `.gpujob-<stem>` if the state file has another name than usual.
        """
        folder, name = os.path.split(self.state_file)
        stem = name[:-5] if name.endswith(".json") else name
        return os.path.join(folder, ".gpujob" if stem == DEFAULT_STEM else f".gpujob-{stem}")

    @functools.cached_property
    def store(self) -> str:
        return os.path.join(self.state_dir, "store.db")

    @property
    def store_lock(self) -> str:
        return os.path.join(self.state_dir, "store.lock")

    @property
    def high(self) -> str:
        """File with the highest assigned job id. A store with a lower last id is an old copy."""
        return os.path.join(self.state_dir, "high")

    @property
    def watched(self) -> str:
        """File that lists the watched files of the last daemon, for `gpujob recover`."""
        return os.path.join(self.state_dir, "watched.json")

    @property
    def new_store(self) -> str:
        """The rebuilt store, before it replaces the damaged store."""
        return os.path.join(self.state_dir, "store.db.new")

    @property
    def recovering(self) -> str:
        """File that exists while `gpujob recover` replaces the damaged store with the rebuilt store."""
        return os.path.join(self.state_dir, "recovering.json")

    @property
    def history(self) -> str:
        """SQLite file with the curves of GPUs and jobs. No decision of the scheduler depends on it."""
        return os.path.join(self.state_dir, "history.db")

    @property
    def daemon_lock(self) -> str:
        return os.path.join(self.state_dir, "daemon.lock")

    @property
    def daemon_info(self) -> str:
        return os.path.join(self.state_dir, "daemon.json")

    @functools.cached_property
    def wakeup(self) -> str:
        return os.path.join(self.state_dir, "wakeup")

    @property
    def attempts(self) -> str:
        return os.path.join(self.state_dir, "attempts")

    @property
    def sessions(self) -> str:
        return os.path.join(self.state_dir, "sessions")

    @property
    def web_token(self) -> str:
        """File with the token for signing in to the web page (`web/auth.py`)."""
        return os.path.join(self.state_dir, "web-token")

    @property
    def environments(self) -> str:
        return os.path.join(self.state_dir, "env")

    def exist(self) -> bool:
        """Return whether the store file exists."""
        return os.path.exists(self.store)

    def check_ours(self) -> None:
        """Raise SchedulerError if the state folder belongs to another user. Root may use any state folder."""
        try:
            owner = os.lstat(self.state_dir).st_uid
        except OSError:
            return  # there is no folder yet; `make` checks it when it is created
        if owner != os.getuid() and os.getuid() != 0:
            raise SchedulerError(f"cannot use this scheduler: it belongs to user {name_of(owner)}", where=self.state_dir,
                                 do="name a state file of yours with --state-file")  # fmt: skip

    def make(self) -> None:
        """Create the state folder and its subfolders, which only the owner may read.

        Raises SchedulerError if the parent folder does not exist, if one of the folders belongs to another user or is a
        link or a file, or if this process runs as root and the parent folder belongs to another user.
        """
        above = os.path.dirname(self.state_dir)
        if not os.path.isdir(above):  # not created: the path is more likely mistyped
            raise SchedulerError(
                f"cannot create the state folder: no such folder {above}",
                where=self.state_file,
                do="create it, or name another --state-file",
            )
        check_not_for_another(above)
        for folder in (self.state_dir, self.attempts, self.environments, self.sessions):
            make_private_folder(folder)


def name_of(uid: int) -> str:
    """Return the name of a user, or the user id as text if the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def check_not_for_another(folder: str) -> None:
    """Raise SchedulerError if this process runs as root and the folder belongs to another user.

    The other user could not use files that root creates there. There is no error for sticky folders in which all users
    may create files, such as /tmp.
    """
    if os.getuid() != 0:
        return
    status = os.stat(folder)
    if status.st_uid != 0 and status.st_mode & 0o1002 != 0o1002:
        name = name_of(status.st_uid)
        raise SchedulerError(f"cannot create files of root here: the folder belongs to user {name}, who could not use them", where=folder,
                             do=f"run the command as that user (sudo -u {name} gpujob …), or name a --state-file in another folder")  # fmt: skip


def make_private_folder(path: str) -> None:
    """Create the folder ``path`` with mode 0700, whatever the umask is. Raises SchedulerError.

    An existing folder must belong to the current user; its mode is set to 0700 if other users have access.
    """
    try:
        if not os.path.lexists(path):
            _make(path)
    except FileExistsError:
        pass  # another process has just created it
    except OSError as error:
        raise SchedulerError(f"cannot create the folder: {error.strerror}", where=path) from None
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
            raise SchedulerError("cannot use this as a folder: it is a link or a file", where=path, do="move it away")
        if status.st_uid != os.getuid():
            raise SchedulerError(
                f"cannot use the folder: it belongs to user {name_of(status.st_uid)}",
                where=path,
                do="configure another folder",
            )
        if status.st_mode & 0o077:
            os.chmod(path, 0o700)
    except OSError as error:
        raise SchedulerError(f"cannot create the folder: {error.strerror}", where=path) from None


def _make(path: str) -> None:
    old = os.umask(0o077)  # the umask is process-wide, so it is changed only to create a folder
    try:
        above = os.path.dirname(path) or "/"
        os.makedirs(above, exist_ok=True)
        check_not_for_another(above)
        os.mkdir(path, 0o700)
        with contextlib.suppress(PermissionError):  # the folder above is writable but not readable
            sync_folder(os.path.dirname(path))  # else a power loss could remove the folder with everything synced in it
    finally:
        os.umask(old)
