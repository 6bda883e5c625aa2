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
from scheduler.gpujobd.installation import check_installation, check_one, check_place
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
        check_one(paths.config, os.stat(paths.config))
