"""Checks that only root can change the program that `gpujob system run` starts with the rights of root."""

from __future__ import annotations

import os
import stat
import sys

from scheduler.core.errors import Refused


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
                check_one(found, status)
                if stat.S_ISLNK(status.st_mode) and os.path.isdir(found) and os.path.realpath(found) not in to_walk:
                    to_walk.append(os.path.realpath(found))


def check_place(path: str, *, reachable: bool = False) -> None:
    """Raise Refused if a user other than root could replace this path. ``reachable``: also if users cannot read it."""
    above = os.path.realpath(path)
    while True:
        status = os.stat(above)
        check_one(above, status, sticky=above != os.path.realpath(path))
        if reachable and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o001:
            raise Refused(
                f"users cannot run gpujob: the folder {above} is closed to them",
                do="install gpujob elsewhere, such as in /opt",
            )
        if above == "/":
            return
        above = os.path.dirname(above)


def check_one(path: str, status: os.stat_result, *, sticky: bool = False) -> None:
    """Raise Refused if a user other than root can change this file or folder. ``sticky``: a sticky folder is accepted."""
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
