"""Bookings of other schedulers and leases of this machine, read from the folder of shared bookings."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from scheduler.core.errors import SchedulerError
from scheduler.core.gpu import Gpu
from scheduler.core.neighbours import Neighbour, Neighbours, Outside, Sharing
from scheduler.sharing.bookings_folder import BookingsFolder, Published, shared_folder, time_of_day, user_name
from scheduler.store.paths import Places, digest
from scheduler.system.proc import boot_id


def key_of(places: Places) -> str:
    """Return the key under which the scheduler of a state file publishes its bookings."""
    return digest(os.fsencode(places.state_file), 4)


def published(
    environ: Mapping[str, str], but: str = "", ended: bool = False, ignored: Collection[str] = ()
) -> tuple[list[Published], list[str]]:
    """Return what all schedulers and leases of this machine have published, and the problems with their files.

    ``but``: key of the scheduler of this user that is left out; ``ended``: also those that have ended; ``ignored``: users
    who are left out.
    """
    try:
        folder = BookingsFolder(shared_folder(environ), but, boot_id(), lambda: ignored)
    except (SchedulerError, OSError) as error:
        return [], [str(error)]
    try:
        found = folder.read()
    finally:
        folder.close()
    problems = [*found.problems, found.closed] if found.closed else found.problems
    return [*found.living, *(found.ended if ended else ())], problems


def booked_outside(
    gpus: Sequence[Gpu], places: Places, environ: Mapping[str, str], ignored: Collection[str] = ()
) -> dict[int, tuple[Outside, ...]]:
    """Return GPU → what others have booked on it. ``ignored``: users who are left out (setting `ignore_users`)."""
    living, _ = published(environ, key_of(places), ignored=ignored)
    me = user_name(os.getuid())
    sharing = Sharing(me)
    neighbours = tuple(Neighbour(one.user, one.user == me, one.document) for one in living)
    sharing.take(Neighbours(0.0, neighbours), gpus)
    return sharing.outside


def outside_text(gpu: int, outside: Sequence[Outside]) -> str:
    """Return for example "0.5 of GPU 2 is booked by user lab3 until about 14:20"; empty if nothing is booked."""
    return "; ".join(one.sentence(gpu, "" if one.until is None else time_of_day(one.until)) for one in outside)
