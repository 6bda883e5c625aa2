"""Reads new lines of the watched files, and reports files that cannot be read."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar

from scheduler.core.errors import FileTrouble
from scheduler.core.file_offsets import Batch, FileMark, LineRead
from scheduler.core.observations import Now
from scheduler.daemon.context import Context
from scheduler.daemon.ingest import JUDGED_FOR, LineOwner, refused_lines
from scheduler.daemon.parts import NEVER
from scheduler.intake.parsers import Parser
from scheduler.intake.tail import NO_SUCH_FILE, Follower
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows

NOT_READ = "not read: "  # a problem that begins so is about a watched file
RETRY_S = 1.0  # between two tries to read a file with disk errors
Followed = TypeVar("Followed", bound="LineFollower")
RETRIED_S = 30.0  # how long these tries are repeated; later tries are made at the safety interval


class LineFollower(Protocol):
    """Reader of a watched file: `intake/tail.py: Follower`, or in `gpujobd` an agent that reads the file."""

    path: str
    look_again_at: float | None

    @property
    def mark(self) -> FileMark:
        """The position up to which the file was read and recorded."""

    @mark.setter
    def mark(self, mark: FileMark) -> None: ...

    def look(self, now: float) -> Batch | None:
        """Return the next lines; None if no line is ready."""

    def accept(self, batch: Batch) -> None:
        """Continue after ``batch``, which was recorded."""

    def check_whole(self) -> None:
        """Make the next `look` check whether the lines that were read are still the same."""

    def old_lines(self, numbers: Collection[int]) -> list[LineRead] | None:
        """Return lines that were read already; None if they cannot be read now."""

    def close(self) -> None:
        """Release all resources."""


@dataclass(slots=True)
class FollowedFile:
    """A watched file. ``owner``: its user, in a scheduler of several users.

    ``due``: monotonic time at which the file is read even if no event reports a change; 0: no such read is planned.
    ``failing_since``: monotonic time of the first disk error after the last successful read; None: there was no error.
    """

    follower: LineFollower
    parse: Parser
    owner: LineOwner | None = None
    trouble: str = ""
    due: float = 0.0
    failing_since: float | None = None


class FollowedFiles:
    """All watched files.

    ``machine`` returns a text that describes the GPUs (`ingest.machine_text`). When this text changes, refused lines
    are read again, because their jobs may be able to run on the current GPUs. ``noted`` is called when a problem with a
    file begins or ends.
    """

    def __init__(self, context: Context, machine: Callable[[], str], noted: Callable[[], None]) -> None:
        self._context, self._machine, self._noted = context, machine, noted
        self.files: dict[str, FollowedFile] = {}
        self.known_refusals: set[tuple[str, str]] = set()  # (hash of the line, reason) already logged
        self.more = True  # a file may have more lines than one batch
        self._judged: set[str] = set()  # files whose refused lines were read for the current GPUs
        self.batches: list[tuple[FollowedFile, Batch]] = []  # read by the last step

    def follow(self, path: str, parse: Parser) -> None:
        """Watch this file and read its lines with ``parse``. Raises sqlite3.Error."""
        mark = kept.mark_of(self._context.db.connection, path)
        self.files[path] = FollowedFile(Follower(path, mark, self._context.config.trust_group), parse)
        self._context.changed.add(path)

    def follow_as(
        self, key: str, parse: Parser, owner: LineOwner, make: Callable[[FileMark | None], Followed]
    ) -> Followed:
        """Watch a file of a user; ``make`` returns its follower for a read position. ``key``: its name in the store."""
        follower = make(kept.mark_of(self._context.db.connection, key))
        self.files[key] = FollowedFile(follower, parse, owner)
        self._context.changed.add(key)
        return follower

    def unfollow(self, key: str) -> None:
        """Stop watching a file."""
        file = self.files.pop(key, None)
        if file is not None:
            file.follower.close()
            self._noted()

    def step(self, now: Now) -> None:
        """Fill ``batches`` with lines of the watched files. Raises sqlite3.Error.

        A file is read if it has changed, if its ``due`` has passed, or if the last read has left lines.
        """
        self.batches = []
        for path, file in self.files.items():
            due = path in self._context.changed or (file.due != 0 and now.mono >= file.due)
            if file.failing_since is not None and not due:
                continue
            try:
                self._read_refused_again(path, file)
                if due or self.more:
                    self._read(path, file, now)
            except (FileTrouble, OSError) as error:
                self._failed(path, file, error, now)

    def look_at_all(self) -> None:
        """Make the next step look at every file.

        If a file has changed, the step also checks whether the lines that were already read are still the same.
        """
        for path, file in self.files.items():
            file.follower.check_whole()
            self._context.changed.add(path)

    def read_refused_again(self) -> None:
        """Make the next step read refused lines again, because they may be valid for the current GPUs."""
        self._judged.clear()

    def accept(self, batches: list[tuple[FollowedFile, Batch]]) -> None:
        """Note that these batches were recorded, so that the next step continues with the lines after them."""
        for file, batch in batches:
            file.follower.accept(batch)
            self.more = self.more or batch.more

    def go_back(self, connection: sqlite3.Connection) -> None:
        """Set the reading positions to the stored positions. Raises sqlite3.Error."""
        for file in self.files.values():
            file.follower.mark = kept.mark_of(connection, file.follower.path) or file.follower.mark

    def troubles(self) -> list[str]:
        """Return a sentence for each file that cannot be read."""
        found = []
        for path, file in self.files.items():
            if file.trouble:
                why = file.trouble.removeprefix(f"{path}: ").removeprefix(NOT_READ).removeprefix("cannot be read: ")
                found.append(f"{NOT_READ}{path}: {why}")
        return found

    def unread(self) -> list[str]:
        """Return a sentence for each file that cannot be read. Leave out missing files and /dev/null.

        A drain reports these sentences at its end.
        """
        return [text for text in self.troubles() if not text.endswith(NO_SUCH_FILE) and f" {os.devnull}: " not in text]

    @property
    def unsettled(self) -> bool:
        """Whether a file must be read again soon, for example because its last line may be incomplete."""
        return any(file.due for file in self.files.values())

    def due(self) -> float:
        """Return the monotonic time of the next planned read of a file; ``NEVER`` if no read is planned."""
        return min((file.due for file in self.files.values() if file.due), default=NEVER)

    def close(self) -> None:
        """Close the open files."""
        for file in self.files.values():
            file.follower.close()

    def _read_refused_again(self, path: str, file: FollowedFile) -> None:
        """Read the refused lines of a file again if the text of ``machine`` has changed since the last such read.

        Raises OSError, sqlite3.Error.
        """
        if path in self._judged:
            return
        connection, machine = self._context.db.connection, self._machine()
        if rows.meta(connection, JUDGED_FOR + path) == machine:
            self._judged.add(path)
            return
        batch = refused_lines(connection, file.follower, machine, self.known_refusals)
        if batch is not None:  # else the next step tries again
            self.batches.append((file, batch))

    def _read(self, path: str, file: FollowedFile, now: Now) -> None:
        """Add the next lines of a file to ``batches``. Raises FileTrouble, OSError."""
        file.due = 0.0
        batch = file.follower.look(now.mono)
        if batch is not None:
            self.batches.append((file, batch))
        if file.trouble and (batch is not None or file.follower.look_again_at is None):
            file.trouble, file.failing_since = "", None
            self._context.say(f"the scheduler can read {path} now", 20, kind="file")
            self._noted()
        if file.follower.look_again_at is not None:
            file.due = file.follower.look_again_at

    def _failed(self, path: str, file: FollowedFile, error: FileTrouble | OSError, now: Now) -> None:
        """Log the error once. If it is a disk error, schedule another try soon, because the error may be temporary."""
        text, file.due = str(error), 0.0
        if not isinstance(error, OSError):
            file.failing_since = None
        else:
            text = f"{path}: cannot be read: {error.strerror}"
            if file.failing_since is None:
                file.failing_since = now.mono
            if now.mono < file.failing_since + RETRIED_S:
                file.due = now.mono + RETRY_S
            if error.errno == errno.ESTALE:  # deleted by another machine (NFS): this descriptor stays invalid
                file.follower.close()
        if text != file.trouble:
            file.trouble = text
            self._context.say(text, 30, kind="file")
            self._noted()
