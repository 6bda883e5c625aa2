"""Lists the commands in the commands file of a `gpujob run`, and makes lines of that file count as new."""

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
    """Return the identities of a commands file's commands, in file order, without repeats. Raises SchedulerError."""
    looked = look_through(path, commands_file.parse, None, "", trust_group)
    if looked.trouble or looked.left_out:
        raise SchedulerError(looked.trouble or looked.left_out)
    return list(dict.fromkeys(identity for _, identity, _ in looked.lines if identity))


def read_as_new(places: Places, path: str, identities: Collection[str]) -> None:
    """Make the lines of these commands count as new, because their jobs were deleted. Raises SchedulerError."""
    database = Database(places)
    try:
        with database.writing() as connection:
            kept.uncount(connection, path, identities)
            kept.save_mark(connection, FileMark(path, inode=1))  # counts as a replaced file: all of it is read again
    finally:
        database.close()
