"""Writes needs into the file of a model table: only these values change, and the old file is kept as a backup."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from scheduler.core.errors import Refused, SchedulerError
from scheduler.core.model_table import ModelTable
from scheduler.core.needs_to_apply import NeedChange
from scheduler.intake.settings import LARGEST_TABLE, table_bytes, table_in
from scheduler.intake.table_edit import with_needs
from scheduler.intake.tail import places_of
from scheduler.system.atomic_files import swap_file, sync_folder, write_all
from scheduler.system.private_files import new_beside
from scheduler.system.safe_open import plain

BACKUP = "before"  # a backup is named llm_config.json.before-20261129-034500


def write_needs(
    path: str, changes: Sequence[NeedChange], trust_group: bool = False, *, needed: bool = False, mode: int = 0o600
) -> str:
    """Write needs into the model table at ``path``, and return the path of the backup; empty if the file is new.

    The file keeps its owner, group and mode; if it is a link, the file to which it leads is replaced. ``needed``: whether
    a missing file is an error; ``mode``: of a new file. Raises UsageError if the file has mistakes, FileTrouble if other
    users could write it, Refused if this user may not write it, and SchedulerError if it has changed meanwhile or cannot
    be written. After an error the file is unchanged.
    """
    data = table_bytes(path, trust_group, needed=needed)
    before = ModelTable() if data is None else table_in(data, path)
    for change in changes:
        if before.models.get(change.model, "") != change.before:
            raise _changed(path)
    new = _edited(data or b"", before, changes, path)
    target = places_of(path)[-1]
    try:
        if data is None:
            swap_file(target, new, there=False, sync=True, mode=mode)
            sync_folder(os.path.dirname(target))
            return ""
        return _replace(target, data, new)
    except (FileExistsError, FileNotFoundError):
        if os.path.isdir(os.path.dirname(target)):
            raise _changed(path) from None
        raise SchedulerError("cannot be written: its folder does not exist", where=path) from None
    except OSError as error:
        raise SchedulerError(f"cannot be written: {error.strerror}", where=path) from None


def _changed(path: str) -> SchedulerError:
    return SchedulerError("the model table has changed meanwhile; nothing was written", where=path, do="try again")


def _edited(data: bytes, before: ModelTable, changes: Sequence[NeedChange], path: str) -> bytes:
    """Return the new contents of the file. Raises SchedulerError if they would not be a model table."""
    needs = {change.model: change.after for change in changes}
    new = with_needs(data.decode("utf-8"), needs).encode("utf-8")
    if len(new) > LARGEST_TABLE:
        raise SchedulerError(f"the model table would be larger than {LARGEST_TABLE >> 20} MiB", where=path)
    after = table_in(new, path)
    if after != ModelTable(before.default, {**before.models, **needs}):
        raise SchedulerError("cannot change this model table", where=path, do="write the needs with an editor")
    return new


def _replace(path: str, data: bytes, new: bytes) -> str:
    """Replace the file whose contents are ``data``; return the path of the backup. Raises OSError, SchedulerError."""
    fd = plain(path, os.O_RDONLY)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            do = "run this command as root" if status.st_uid == 0 else "run this command as its owner"
            raise Refused(f"not written: it belongs to user {status.st_uid}", where=path, do=do)
        if not status.st_mode & stat.S_IWUSR:
            raise Refused("not written: it is read-only", where=path, do="chmod u+w it")
        backup = _backup_of(path, data)
        try:
            old = swap_file(path, new, there=True, sync=True, like=fd)
        except BaseException:
            os.unlink(backup)
            raise
    finally:
        os.close(fd)
    with open(old, "rb") as stream:
        found = stream.read()
        if found != data:  # somebody saved the file in the meantime: put this version back
            swap_file(path, found, there=True, sync=True, like=stream.fileno())
            os.unlink(backup)
            raise _changed(path)
    sync_folder(os.path.dirname(path))
    return backup


def _backup_of(path: str, data: bytes) -> str:
    """Write a private copy of the old contents beside the file, and return its path. Raises OSError."""
    name, fd = new_beside(path, BACKUP)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(fd)
    return name
