"""Checks that only root can change the program that `gpujob system run` starts with the rights of root."""

from __future__ import annotations

import os
import stat
import sys

from scheduler.core.errors import Refused

MOST_PLACES = 500  # on the way to a file


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
                if stat.S_ISLNK(status.st_mode):
                    check_place(found)
                    if os.path.isdir(found) and os.path.realpath(found) not in to_walk:
                        to_walk.append(os.path.realpath(found))


def check_place(path: str, *, reachable: bool = False) -> None:
    """Raise Refused if a user other than root could replace this path. ``reachable``: also if users cannot read it.

    Each link on the way is followed, because the owner of a link in the middle can have it lead elsewhere.
    """
    way = _way_to(path)
    for place in way:
        status = os.lstat(place)
        check_one(place, status, sticky=place != way[-1])
        if reachable and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o001:
            raise Refused(
                f"users cannot run gpujob: the folder {place} is closed to them",
                do="install gpujob elsewhere, such as in /opt",
            )


def _way_to(path: str) -> list[str]:
    """Return the folders and links that lead to a path, and the file or folder at its end; what does not exist is left out."""
    here, rest, way = "/", os.path.abspath(path).split("/"), ["/"]
    while rest and len(way) < MOST_PLACES:
        name = rest.pop(0)
        if name in ("", "."):
            continue
        place = os.path.normpath(os.path.join(here, name))  # ``here`` has no links, so ``..`` is the folder above
        try:
            is_link = stat.S_ISLNK(os.lstat(place).st_mode)
        except FileNotFoundError:
            return way
        if is_link:
            target = os.readlink(place)
            here, rest = "/" if target.startswith("/") else here, [*target.split("/"), *rest]
        else:
            here = place
        way.append(place)
    if rest:
        raise Refused("too many links", where=path)
    return way


def check_one(path: str, status: os.stat_result, *, sticky: bool = False) -> None:
    """Raise Refused if a user other than root can change this file or folder. ``sticky``: a sticky folder is accepted."""
    writable = status.st_mode & 0o022 and not (sticky and status.st_mode & stat.S_ISVTX)
    writable = writable and not stat.S_ISLNK(status.st_mode)  # the mode of a link has no meaning
    if status.st_uid != 0 or writable:
        who = "users other than root can write to it" if writable else f"it belongs to user id {status.st_uid}"
        raise Refused(
            f"the scheduler of all users must not run from here: {who}", where=path,
            do="install gpujob as root, in a folder that only root can write to, such as /opt/gpujob",
        )  # fmt: skip
