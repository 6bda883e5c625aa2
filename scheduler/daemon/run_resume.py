"""For `gpujob run`: lists the commands in its commands file, and makes the scheduler read that file again."""

from __future__ import annotations

from collections.abc import Collection

from scheduler.core.errors import SchedulerError
from scheduler.core.file_offsets import FileMark
from scheduler.intake import commands_file
from scheduler.recovery.ingest_recovery import look_through
from scheduler.store import file_offsets as kept
from scheduler.store.database import Database
from scheduler.store.paths import Places


def commands_in(path: str, trust_group: bool) -> list[str]:
    """Return the identities (`core/identity.py`) of the commands in a commands file. Raises SchedulerError.

    The identities are in file order. An identity that occurs several times is listed once.
    """
    looked = look_through(path, commands_file.parse, None, "", trust_group)
    if looked.trouble or looked.left_out:
        raise SchedulerError(looked.trouble or looked.left_out)
    return list(dict.fromkeys(identity for _, identity, _ in looked.lines if identity))


def read_as_new(places: Places, path: str, identities: Collection[str]) -> None:
    """Make the scheduler read the commands file again from its beginning. Raises SchedulerError.

    ``identities``: identities of the commands whose jobs were deleted. The lines of these commands then count as new
    lines.
    """
    database = Database(places)
    try:
        with database.writing() as connection:
            kept.uncount(connection, path, identities)
            kept.save_mark(connection, FileMark(path, inode=1))  # counts as a replaced file: all of it is read again
    finally:
        database.close()
