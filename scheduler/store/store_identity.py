"""Identifies the machine and folder of a store, to detect a copied or moved state folder."""

from __future__ import annotations

import os
import socket

from scheduler.core.errors import SchedulerError
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import daemon_alive, holder
from scheduler.store.database import Database
from scheduler.store.paths import DEFAULT_STEM, Places


def this_machine() -> str:
    """Return the id of this machine, or its host name if it has no id.

    The id does not come from the state folder. So it differs on another machine to which the folder is copied.
    """
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path, encoding="ascii") as stream:
                text = stream.read().strip()
        except OSError:
            continue
        if text:
            return text
    return socket.gethostname()


def home_of(places: Places) -> str:
    """Return ``MACHINE:DEVICE:INODE:PATH`` of the state folder. This text identifies the place of the store.

    A copy of the folder has another device or inode. A moved folder has another path. The path matters because the
    store records the paths of watched files.
    """
    status = os.stat(places.state_dir)
    return f"{this_machine()}:{status.st_dev}:{status.st_ino}:{os.path.realpath(places.state_dir)}"


def belongs(made: str, here: str) -> bool:
    """Return whether a store is at its recorded place. ``made``: the recorded place; ``here``: the present place.

    Both have the form of the result of `home_of`. If ``made`` is empty, the result is True. Old versions recorded the
    place without the path; the path is then not compared.
    """
    return not made or made == here or here.startswith(made + ":")


def moved_from(made: str, here: str) -> str:
    """Return the folder that held the state folder before the state folder was moved; empty if it was not moved."""
    old, new = made.split(":", 3), here.split(":", 3)
    return os.path.dirname(old[3]) if len(old) == 4 and old[:3] == new[:3] and old[3] != new[3] else ""


def check_original(made: str, here: str) -> None:
    """Raise SchedulerError if the state folder is a copy, and a scheduler still uses the original folder.

    ``made``: the place that the store has recorded; ``here``: the present place (`home_of`).
    """
    old = made.split(":", 3)
    if len(old) < 4 or old[0] != this_machine() or belongs(made, here) or moved_from(made, here):
        return
    try:
        status = os.stat(old[3])
    except OSError:
        return  # the original is gone
    folder, name = os.path.split(old[3])
    original = Places(os.path.join(folder, f"{name.removeprefix('.gpujob').removeprefix('-') or DEFAULT_STEM}.json"))
    if old[1:3] == [str(status.st_dev), str(status.st_ino)] and daemon_alive(original):
        pid = holder(original).get("pid", "unknown")
        raise SchedulerError(
            f"cannot adopt the jobs of a copy: a scheduler runs on the original (pid {pid})",
            where=old[3],
            do=f"end that scheduler first (its jobs continue): kill {pid}",
        )


def check_home(db: Database, places: Places) -> None:
    """Raise SchedulerError if the store was made on another machine or in another folder.

    A scheduler on that machine or in that folder may still manage the running jobs. If there is no error, store the
    current folder and host name.
    """
    here, made = home_of(places), rows.meta(db.connection, "home")
    host = rows.meta(db.connection, "host")
    before = moved_from(made, here)
    if before:
        raise SchedulerError(
            f"cannot use the store: its folder was moved from {before}, and the lines of its jobs file would run again",
            where=places.state_dir,
            do="move the folder back (you can put a link to it here), or accept that the lines run again: gpujob recover",
        )
    if not belongs(made, here):
        elsewhere = made.partition(":")[0] != here.partition(":")[0]
        which = f"on another machine{f' ({host})' if host else ''}" if elsewhere else "in another folder (a copy?)"
        raise SchedulerError(
            f"cannot use the store: it was created {which}",
            where=places.state_dir,
            do="if the original is no longer used, adopt its jobs: gpujob recover",
        )
    if made != here or host != socket.gethostname():
        with db.writing() as connection:
            rows.set_meta(connection, "home", here)
            rows.set_meta(connection, "host", socket.gethostname())
