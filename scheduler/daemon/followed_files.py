"""Follows the files that jobs come from: which lines are new, and which files cannot be read."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.errors import FileTrouble
from scheduler.core.file_offsets import Batch
from scheduler.core.observations import Now
from scheduler.daemon.context import Context
from scheduler.daemon.ingest import JUDGED_FOR, refused_again
from scheduler.daemon.parts import NEVER
from scheduler.intake.parsers import Parser
from scheduler.intake.tail import NO_SUCH_FILE, Follower
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows

RETRY_S = 1.0  # between two tries of a file whose disk gives errors
RETRIED_S = 30.0  # for so long; then the slow interval


@dataclass(slots=True)
class FollowedFile:
    """A file that jobs come from. ``due``: when to look at it though nothing was heard of it (``mono``); 0: never.

    ``failing_since``: when its disk began to give errors (``mono``).
    """

    follower: Follower
    parse: Parser
    trouble: str = ""
    due: float = 0.0
    failing_since: float | None = None


class FollowedFiles:
    """``machine`` gives the text that decides whether a line can ever run; ``noted`` is called when a trouble comes or goes."""

    def __init__(self, context: Context, machine: Callable[[], str], noted: Callable[[], None]) -> None:
        self._context, self._machine, self._noted = context, machine, noted
        self.files: dict[str, FollowedFile] = {}
        self.known_refusals: set[tuple[str, str]] = set()  # (hash of the text, reason) already told
        self.more = True  # a file holds more lines than one batch
        self._judged: set[str] = set()  # files whose refused lines were read for the GPUs of now
        self.batches: list[tuple[FollowedFile, Batch]] = []

    def follow(self, path: str, parse: Parser) -> None:
        """Take jobs from this file."""
        mark = kept.mark_of(self._context.db.connection, path)
        self.files[path] = FollowedFile(Follower(path, mark, self._context.config.trust_group), parse)
        self._context.changed.add(path)

    def step(self, now: Now) -> None:
        """Read ``batches`` of lines from the files that have changed, have more, or are due. Raises sqlite3.Error."""
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
        """Look at every file in the next step, and whether one was written anew without a trace in its times."""
        for path, file in self.files.items():
            file.follower.check_whole()
            self._context.changed.add(path)

    def read_refused_again(self) -> None:
        """Lines that were refused may be jobs for the GPUs of now."""
        self._judged.clear()

    def accept(self, batches: list[tuple[FollowedFile, Batch]]) -> None:
        """These are recorded: the next step goes on behind them."""
        for file, batch in batches:
            file.follower.accept(batch)
            self.more = self.more or batch.more

    def go_back(self, connection: sqlite3.Connection) -> None:
        """Go on from what the store says was read. Raises sqlite3.Error."""
        for file in self.files.values():
            file.follower.mark = kept.mark_of(connection, file.follower.path) or file.follower.mark

    def troubles(self) -> list[str]:
        """A sentence for each file that cannot be read."""
        return [
            f"not read: {path}: {file.trouble.removeprefix(f'{path}: ').removeprefix('not read: ')}"
            for path, file in self.files.items()
            if file.trouble
        ]

    def unread(self) -> list[str]:
        """A sentence for each file whose lines a drain leaves; one that is missing, or /dev/null, has none."""
        return [text for text in self.troubles() if not text.endswith(NO_SUCH_FILE) and f" {os.devnull}: " not in text]

    @property
    def unsettled(self) -> bool:
        """Whether a file is to be looked at soon: its last line may still be written."""
        return any(file.due for file in self.files.values())

    def due(self) -> float:
        """When to look at a file though nothing was heard of it (``mono``)."""
        return min((file.due for file in self.files.values() if file.due), default=NEVER)

    def close(self) -> None:
        """Let go of the open files."""
        for file in self.files.values():
            file.follower.close()

    def _read_refused_again(self, path: str, file: FollowedFile) -> None:
        """Once after the start, if the GPUs are others than they were: lines that were refused may be jobs now. Raises OSError."""
        if path in self._judged:
            return
        connection, machine = self._context.db.connection, self._machine()
        if rows.meta(connection, JUDGED_FOR + path) == machine:
            self._judged.add(path)
            return
        batch = refused_again(connection, file.follower, machine, self.known_refusals)
        if batch is not None:  # else as soon as the file is there
            self.batches.append((file, batch))

    def _read(self, path: str, file: FollowedFile, now: Now) -> None:
        """The next lines. Raises FileTrouble, OSError."""
        file.due = 0.0
        batch = file.follower.look(now.mono)
        if batch is not None:
            self.batches.append((file, batch))
        if file.trouble and (batch is not None or file.follower.look_again_at is None):
            file.trouble, file.failing_since = "", None
            self._context.say(f"{path}: can be read now", 20, kind="file")
            self._noted()
        if file.follower.look_again_at is not None:
            file.due = file.follower.look_again_at

    def _failed(self, path: str, file: FollowedFile, error: FileTrouble | OSError, now: Now) -> None:
        """Say it once; an error of the disk may pass, so the file is tried again soon."""
        text, file.due = str(error), 0.0
        if not isinstance(error, OSError):
            file.failing_since = None
        else:
            text = f"{path}: cannot be read: {error.strerror}"
            if file.failing_since is None:
                file.failing_since = now.mono
            if now.mono < file.failing_since + RETRIED_S:
                file.due = now.mono + RETRY_S
            if error.errno == errno.ESTALE:  # removed by another machine (NFS): this descriptor never works again
                file.follower.close()
        if text != file.trouble:
            file.trouble = text
            self._context.say(text, 30, kind="file")
            self._noted()
