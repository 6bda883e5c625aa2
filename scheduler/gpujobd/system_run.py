"""`gpujob system run`: checks the installation, makes the folders, and becomes the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import stat
import sys
from dataclasses import dataclass

from scheduler.core.errors import Refused, SchedulerError
from scheduler.core.rights import LEAST_UID
from scheduler.gpujobd import agent, launcher, service
from scheduler.gpujobd.cgroups import delegate
from scheduler.system.typed_json import to_json

USER, NOBODY = "gpujob", "nobody"
PAM_SERVICE = "gpujob"


@dataclass(frozen=True, slots=True)
class SystemPaths:
    """The paths of the service. ``root`` goes before all of them, for tests and containers."""

    root: str = ""

    @property
    def run(self) -> str:
        return f"{self.root}/run/gpujob"

    @property
    def socket(self) -> str:
        return f"{self.run}/gpujob.sock"

    @property
    def problem(self) -> str:
        """File that tells why the scheduler cannot begin; missing while it runs."""
        return f"{self.run}/problem"

    @property
    def state(self) -> str:
        return f"{self.root}/var/lib/gpujob"

    @property
    def scheduler(self) -> str:
        """Private folder of the scheduler: store, state file, main log."""
        return f"{self.state}/scheduler"

    @property
    def state_file(self) -> str:
        return f"{self.scheduler}/gpu_scheduler_state.json"

    @property
    def users(self) -> str:
        """Folder of the agents: a private folder for each user."""
        return f"{self.state}/users"

    @property
    def config(self) -> str:
        return f"{self.root}/etc/gpujob/config.yaml"


def run(root: str = "", user: str = "") -> int:
    """Become the launcher. Does not return. Raises SchedulerError if the service cannot run safely."""
    if os.geteuid() != 0:
        raise Refused("only root can run the scheduler of all users", do="sudo gpujob system run")
    paths = SystemPaths(os.path.abspath(root) if root else "")
    name = service_user(user)
    check_installation()
    make_folders(paths, name)
    python = [sys.executable, "-I"]
    owner = pwd.getpwnam(name)
    cgroups, why_not = delegate(owner.pw_uid, owner.pw_gid)
    if why_not:
        print(f"gpujobd: jobs have no cgroups: {why_not}", file=sys.stderr)
    told = to_json(
        service.ServiceSettings(paths.socket, paths.state_file, paths.config, paths.problem, cgroups)
    ).decode()
    settings = {
        "user": name,
        "folder": paths.users,
        "least_uid": LEAST_UID,
        "scheduler": [*python, "-m", service.__name__, told],
        "agent": [*python, "-m", agent.__name__],
        "pam": PAM_SERVICE if os.path.exists(f"/etc/pam.d/{PAM_SERVICE}") else "",
    }
    environ = {"PATH": os.defpath, "LANG": os.environ.get("LANG", "C.UTF-8")}
    os.chdir("/")
    os.execve(sys.executable, [*python, "-S", launcher.__file__, json.dumps(settings)], environ)


def service_user(named: str = "") -> str:
    """Return the user of the scheduler: ``named``, else gpujob, else nobody. Raises SchedulerError if there is none."""
    for name in [named] if named else [USER, NOBODY]:
        with contextlib.suppress(KeyError):
            if pwd.getpwnam(name).pw_uid == 0:
                raise Refused("the scheduler must not run as root", do=f"name another user, such as {USER}")
            return name
    raise SchedulerError(f"there is no user {named or USER}", do="sudo gpujob system install creates gpujob")


# -- what only root may write -----------------------------------------------------------------------------


def check_installation() -> None:
    """Raise Refused if a user other than root can change the program, or if users cannot run it."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    roots = [sys.executable, os.path.realpath(sys.executable), package, *filter(os.path.isdir, sys.path)]
    for path in (os.path.dirname(os.path.abspath(sys.executable)), os.path.join(sys.prefix, "pyvenv.cfg")):
        if os.path.exists(path):
            check_place(path, reachable=True)
    to_walk = [*dict.fromkeys(map(os.path.abspath, roots))]
    for path in to_walk:
        check_place(path, reachable=True)
    for path in to_walk:  # grows: folders that links in it name are walked, too
        for folder, folders, names in os.walk(path):
            for found in (folder, *(os.path.join(folder, name) for name in (*folders, *names))):
                status = os.lstat(found)
                _check_one(found, status)
                if stat.S_ISLNK(status.st_mode) and os.path.isdir(found) and os.path.realpath(found) not in to_walk:
                    to_walk.append(os.path.realpath(found))


def check_place(path: str, *, reachable: bool = False) -> None:
    """Raise Refused if a user other than root could replace this path. ``reachable``: also if users cannot read it."""
    above = os.path.realpath(path)
    while True:
        status = os.stat(above)
        _check_one(above, status, sticky=above != os.path.realpath(path))
        if reachable and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o001:
            raise Refused(
                f"users cannot run gpujob: the folder {above} is closed to them",
                do="install gpujob elsewhere, such as in /opt",
            )
        if above == "/":
            return
        above = os.path.dirname(above)


def _check_one(path: str, status: os.stat_result, *, sticky: bool = False) -> None:
    if stat.S_ISLNK(status.st_mode):
        target = os.path.realpath(path)
        while not os.path.exists(target):  # who can write to this folder can make the target
            target = os.path.dirname(target)
        check_place(target)
        return
    writable = status.st_mode & 0o022 and not (sticky and status.st_mode & stat.S_ISVTX)
    if status.st_uid != 0 or writable:
        who = "users other than root can write to it" if writable else f"it belongs to user id {status.st_uid}"
        raise Refused(
            f"the scheduler of all users must not run from here: {who}", where=path,
            do="install gpujob as root, in a folder that only root can write to, such as /opt/gpujob",
        )  # fmt: skip


def make_folders(paths: SystemPaths, user: str) -> None:
    """Make the folders of the service. Raises Refused, SchedulerError if one of them cannot be trusted."""
    service = pwd.getpwnam(user)
    root = paths.root or "/"
    if not os.path.isdir(root):
        raise SchedulerError("there is no such folder", where=root)
    check_place(root)
    for folder, uid, gid, mode in (
        (os.path.dirname(paths.config), 0, 0, 0o755),
        (paths.run, service.pw_uid, service.pw_gid, 0o755),
        (paths.state, 0, 0, 0o755),
        (paths.scheduler, service.pw_uid, service.pw_gid, 0o700),
        (paths.users, 0, 0, 0o711),
    ):
        try:
            old = os.umask(0o022)
            try:
                os.makedirs(os.path.dirname(folder), exist_ok=True)
                check_place(os.path.dirname(folder))
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
                    os.chown(folder, uid, gid, follow_symlinks=False)
            finally:
                os.umask(old)
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
                raise Refused(
                    f"this must be a folder of user id {uid}", where=folder, do="move it away, and start again"
                )
            os.chmod(folder, mode)
        except OSError as error:
            raise SchedulerError(f"cannot make the folder: {error.strerror}", where=folder) from None
    if os.path.exists(paths.config):
        _check_one(paths.config, os.stat(paths.config))
