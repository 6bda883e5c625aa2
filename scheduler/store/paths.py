"""Where the files of one scheduler stand, private from the moment they are made."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat

from scheduler.core.errors import SchedulerError
from scheduler.system.atomic_files import sync_folder

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from scheduler.core.quick_dataclass import dataclass

DEFAULT_STEM = "gpu_scheduler_state"


def digest(data: bytes, size: int) -> str:
    """A name for these bytes: ``size`` bytes of BLAKE2b in hexadecimal."""
    try:
        from _blake2 import blake2b  # what hashlib has, without OpenSSL, whose loading is felt in calls in loops
    except ImportError:
        from hashlib import blake2b
    return str(blake2b(data, digest_size=size).hexdigest())


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of a scheduler, all derived from its state file."""

    state_file: str

    @property
    def state_dir(self) -> str:
        """The folder of store, locks and records: `.gpujob`, or `.gpujob-<stem>` beside another state file name."""
        folder, name = os.path.split(self.state_file)
        stem = name[:-5] if name.endswith(".json") else name
        return os.path.join(folder, ".gpujob" if stem == DEFAULT_STEM else f".gpujob-{stem}")

    @property
    def store(self) -> str:
        return os.path.join(self.state_dir, "store.db")

    @property
    def store_lock(self) -> str:
        return os.path.join(self.state_dir, "store.lock")

    @property
    def high(self) -> str:
        """The highest id ever given out, beside the store: tells a store that is older than what happened."""
        return os.path.join(self.state_dir, "high")

    @property
    def watched(self) -> str:
        """Which files the last daemon took jobs from."""
        return os.path.join(self.state_dir, "watched.json")

    @property
    def new_store(self) -> str:
        """A rebuilt store on its way to its place."""
        return os.path.join(self.state_dir, "store.db.new")

    @property
    def recovering(self) -> str:
        """There while a rebuilt store is being put in the place of the damaged one."""
        return os.path.join(self.state_dir, "recovering.json")

    @property
    def history(self) -> str:
        """Readings kept for curves; whatever befalls it, no job and no decision depends on it."""
        return os.path.join(self.state_dir, "history.db")

    @property
    def daemon_lock(self) -> str:
        return os.path.join(self.state_dir, "daemon.lock")

    @property
    def daemon_info(self) -> str:
        return os.path.join(self.state_dir, "daemon.json")

    @property
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
        """What lets one in to the page; see `web/auth.py`."""
        return os.path.join(self.state_dir, "web-token")

    @property
    def environments(self) -> str:
        return os.path.join(self.state_dir, "env")

    def exist(self) -> bool:
        """Whether a scheduler was ever here."""
        return os.path.exists(self.store)

    def check_ours(self) -> None:
        """Raise SchedulerError when this is somebody else's scheduler; root may look at it."""
        try:
            owner = os.lstat(self.state_dir).st_uid
        except OSError:
            return  # none yet: whoever makes it finds out
        if owner != os.getuid() and os.getuid() != 0:
            raise SchedulerError(f"this scheduler belongs to user {name_of(owner)}", where=self.state_dir,
                                 do="name one of yours with --state-file")  # fmt: skip

    def make(self) -> None:
        """Make the private folders. Raises SchedulerError when one is a link or somebody else's, or has no place."""
        above = os.path.dirname(self.state_dir)
        if not os.path.isdir(above):  # more likely a slip of the pen than a wish
            raise SchedulerError(
                f"no such folder: {above}", where=self.state_file, do="make it, or name another --state-file"
            )
        check_not_for_another(above)
        for folder in (self.state_dir, self.attempts, self.environments, self.sessions):
            make_private_folder(folder)


def name_of(uid: int) -> str:
    """A user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def check_not_for_another(folder: str) -> None:
    """Raise SchedulerError when root is about to leave its files in a folder of a user, who could not use them.

    A sticky folder that everybody may write, as /tmp, is nobody's own.
    """
    if os.getuid() != 0:
        return
    status = os.stat(folder)
    if status.st_uid != 0 and status.st_mode & 0o1002 != 0o1002:
        name = name_of(status.st_uid)
        raise SchedulerError(f"belongs to user {name}, who could not use what root leaves there", where=folder,
                             do=f"run it as that user (sudo -u {name} gpujob …), or name a --state-file elsewhere")  # fmt: skip


def make_private_folder(path: str) -> None:
    """Make ``path`` (0700 at any umask), or check that it is ours. Raises SchedulerError."""
    try:
        if not os.path.lexists(path):
            _make(path)
    except FileExistsError:
        pass  # somebody else made it this moment
    except OSError as error:
        raise SchedulerError(f"cannot be made: {error.strerror}", where=path) from None
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
            raise SchedulerError("is a link or a file, not a folder of ours", where=path, do="move it away")
        if status.st_uid != os.getuid():
            raise SchedulerError(f"belongs to user {name_of(status.st_uid)}", where=path, do="configure another folder")
        if status.st_mode & 0o077:
            os.chmod(path, 0o700)
    except OSError as error:
        raise SchedulerError(f"cannot be made: {error.strerror}", where=path) from None


def _make(path: str) -> None:
    old = os.umask(0o077)  # of the whole process: only while there is something to be made
    try:
        above = os.path.dirname(path) or "/"
        os.makedirs(above, exist_ok=True)
        check_not_for_another(above)
        os.mkdir(path, 0o700)
        with contextlib.suppress(PermissionError):  # a folder that may be written and not read
            sync_folder(os.path.dirname(path))  # else a power cut may take it away with all that was synced in it
    finally:
        os.umask(old)
