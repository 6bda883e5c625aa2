"""What holds the scheduler up while it lives: told in the log as it comes and goes, and shown by `status` until then."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

from scheduler.core.errors import StoreTrouble
from scheduler.runners.processes import SHORT_OF
from scheduler.store import jobs as rows

if TYPE_CHECKING:
    from scheduler.engine.loop import House


def look_at_runner(house: House) -> None:
    """Whether starts and endings go on: a stopped keeper is silent, and so would we be."""
    before, house.runner_trouble = house.runner_trouble, house.runner.trouble()
    if house.runner_trouble == before:
        return
    if house.runner_trouble:
        house.say(house.runner_trouble, 40, kind="runner")
    else:
        house.say("jobs are started again, and their endings seen", 20, kind="runner")
    note(house)


def note(house: House) -> None:
    """Keep the present troubles for `status`: a line in a file that is not read is neither a job nor refused."""
    found = [
        f"not read: {path}: {watched.trouble.removeprefix(f'{path}: ').removeprefix('not read: ')}"
        for path, watched in house.files.items()
        if watched.trouble
    ]
    if house.journal is not None and house.journal.trouble:
        found.append(f"not written: {house.journal.trouble}")
    text = json.dumps([house.runner_trouble, *found] if house.runner_trouble else found)
    if text != (rows.meta(house.db.connection, "trouble") or "[]"):
        with house.db.writing(sync=False) as connection:
            rows.set_meta(connection, "trouble", text)


def passing(error: Exception, house: str) -> StoreTrouble | None:
    """What to say of an error that passes by itself: no room, or nothing to look with; None of any other.

    What could not be looked at is not known to be gone: it is waited for.
    """
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreTrouble(f"cannot be written: {error.strerror}", where=error.filename or house, do="free some space")
    if error.errno in SHORT_OF:
        return StoreTrouble(f"the scheduler is short of what it needs: {error.strerror}")
    return None
