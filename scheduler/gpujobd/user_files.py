"""The jobs files of users (`gpujob watch`): read by the agents of the users, recorded by the scheduler.

To `daemon/followed_files.py`, a `RemoteFollower` is what a `Follower` of `intake/tail.py` is: it returns the same batches,
which the agent has read with the rights of its user.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from scheduler.core.errors import FileTrouble
from scheduler.core.file_offsets import Batch, FileMark, LineRead
from scheduler.core.observations import Now
from scheduler.daemon.context import Context
from scheduler.daemon.followed_files import FollowedFiles
from scheduler.daemon.ingest import LineOwner
from scheduler.daemon.parts import NEVER
from scheduler.gpujobd.agent_files import MOST_LINES
from scheduler.intake import jobs_file
from scheduler.intake.tail import LARGEST
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows
from scheduler.system.typed_json import plain, typed

WATCHED = "user_files"  # key in `meta`: list of watched files (`WatchedFile`) as JSON
FULL_AGAIN_S = 1.0  # between two looks whether a user has room for more waiting jobs
RESTART_S = 2.0  # between two readings of a file from its beginning
MOST_REFUSED = 1000  # lines of a file that are no jobs; then no more of its lines are read


@dataclass(frozen=True, slots=True)
class WatchedFile:
    """A jobs file that a user has asked the scheduler to read. ``home``: home folder of the user."""

    uid: int
    user: str
    path: str
    home: str

    @property
    def key(self) -> str:
        """The name of the file in the store: several users may have the same file read."""
        return f"{self.user}:{self.path}"


def watched_in(connection: sqlite3.Connection) -> list[WatchedFile]:
    """Return the watched files. Raises sqlite3.Error."""
    return [WatchedFile(*each) for each in json.loads(rows.meta(connection, WATCHED) or "[]")]


def save_watched(connection: sqlite3.Connection, files: Collection[WatchedFile]) -> None:
    """Store the watched files."""
    rows.set_meta(connection, WATCHED, json.dumps([[one.uid, one.user, one.path, one.home] for one in files]))


class RemoteFollower:
    """A file that an agent reads. See `intake/tail.py: Follower`.

    ``send``: sends a message to the agent, which may be lost; ``full``: returns whether the user may have no more jobs;
    ``refused``: returns how many of its lines were refused.
    """

    def __init__(
        self,
        file: WatchedFile,
        mark: FileMark | None,
        send: Callable[[dict[str, Any]], None],
        full: Callable[[], bool],
        refused: Callable[[], int],
    ) -> None:
        self.file, self.path = file, file.key
        self.look_again_at: float | None = None
        self._mark = mark if mark is not None else FileMark(self.path)
        self._send, self._full, self._refused = send, full, refused
        self._batch: Batch | None = None
        self._trouble = ""
        self._old: list[LineRead] | None = None
        self.handed = 0  # lines that were returned and are not recorded yet
        self._asked = False  # for old lines
        self._blocked = False  # too many lines were refused
        self._restart_due = 0.0  # when it may be read from its beginning again (monotonic seconds)

    def begin(self) -> dict[str, Any]:
        """Return the message with which an agent begins to read the file, after the recorded lines."""
        self._batch, self._old, self._asked, self.handed = None, None, False, 0
        return {"do": "follow", "path": self.file.path, "mark": plain(self._mark)}

    @property
    def mark(self) -> FileMark:
        """The position up to which the file was read and recorded."""
        return self._mark

    @mark.setter
    def mark(self, mark: FileMark) -> None:
        if mark != self._mark:
            self._mark = mark
            self._send(self.begin())

    # -- messages of the agent ----------------------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        """Take in a message of the agent about this file. Raises ValueError if it is not valid."""
        if "old" in message:
            old = {line.number: line for line in typed(message["old"], list[LineRead])}
            self._old, self._asked = list(old.values())[: 2 * MOST_REFUSED], False
            return
        self._trouble = str(message.get("trouble") or "")[:500]
        if message.get("batch") is not None:
            batch = typed(message["batch"], Batch)
            if len(batch.lines) > MOST_LINES:
                raise ValueError("too many lines at once")
            mark = batch.mark
            numbers = (
                mark.device,
                mark.inode,
                mark.offset,
                mark.lines,
                mark.crc,
                *(line.number for line in batch.lines),
            )
            if not all(0 <= number <= LARGEST for number in numbers):
                raise ValueError("a number is out of range")
            self._batch = Batch(
                FileMark(self.path, mark.device, mark.inode, mark.offset, mark.lines, mark.crc, mark.replaying,
                         mark.open_line, mark.skipping),
                batch.lines, batch.restart, batch.settled, batch.more, "", batch.left_out[:500],
            )  # fmt: skip

    # -- what `FollowedFiles` uses ------------------------------------------------------------------------

    def look(self, now: float) -> Batch | None:
        """Return the lines that the agent has sent; None if there are none. Raises FileTrouble if it cannot read the file."""
        self.look_again_at = None
        if self._trouble:
            raise FileTrouble(self._trouble, where=self.path)
        restart = self._batch is not None and self._batch.restart
        if restart and now < self._restart_due:
            self.look_again_at = self._restart_due
            return None
        self._blocked = not restart and (self._blocked or self._batch is not None) and self._refused() >= MOST_REFUSED
        if self._blocked:
            raise FileTrouble(
                f"it has {MOST_REFUSED} lines that are no jobs; replace it by a file without them", where=self.path
            )
        if self._batch is not None and self._full():
            self.look_again_at = now + FULL_AGAIN_S
            return None
        self.handed = len(self._batch.lines) if self._batch is not None else 0
        return self._batch

    def accept(self, batch: Batch) -> None:
        """Have the agent send the lines after ``batch``, which was recorded."""
        if batch.again:
            return
        if batch.restart:
            self._restart_due = time.monotonic() + RESTART_S
        self._mark, self._batch, self.handed = batch.mark, None, 0
        self._send({"do": "accept", "path": self.file.path, "mark": plain(batch.mark)})

    def check_whole(self) -> None:
        """Have the agent check whether the lines that were read already are still the same."""
        self._asked = False
        self._send(self.begin() if self._blocked else {"do": "check", "path": self.file.path})

    def old_lines(self, numbers: Collection[int]) -> list[LineRead] | None:
        """Return lines that were read already; None until the agent has sent them."""
        if not numbers:
            return []
        if self._old is not None:
            found, self._old = self._old, None
            return [line for line in found if line.number in numbers]
        if not self._asked:
            self._asked = True
            self._send({"do": "old", "path": self.file.path, "numbers": sorted(numbers)})
        return None

    def close(self) -> None:
        """Have the agent stop reading the file."""
        self._send({"do": "unfollow", "path": self.file.path})


class FileAgents(Protocol):
    """The part of the runner that tells agents which files to read (`users_runner.py`)."""

    def follow_file(self, uid: int, path: str, follower: RemoteFollower) -> None:
        """Have the agent of a user read a file, also each later agent."""

    def forget_file(self, uid: int, path: str) -> None:
        """Have the agents of a user stop reading a file."""

    def send_about_file(self, uid: int, message: dict[str, Any]) -> None:
        """Send a message about a file to the agent of a user, if there is one."""


class UserFiles:
    """Follows the files that users have asked for (a part of the daemon).

    ``agents``: tells the agents; ``full``: user, number of jobs that are not recorded yet → whether the user may have no
    more waiting jobs.
    """

    def __init__(
        self, context: Context, files: FollowedFiles, agents: FileAgents, full: Callable[[str, int], bool]
    ) -> None:
        self._context, self._files, self._agents, self._full = context, files, agents, full
        self._noted = ""
        self._watched: dict[str, WatchedFile] = {}
        self._followers: dict[str, RemoteFollower] = {}

    def step(self, _now: Now) -> None:
        """Begin to follow new files, and stop following files that users have stopped. Raises sqlite3.Error."""
        connection = self._context.db.connection
        noted = rows.meta(connection, WATCHED)
        if noted == self._noted:
            return
        wanted = {one.key: one for one in watched_in(connection)}
        for key in self._watched.keys() - wanted.keys():
            file = self._watched.pop(key)
            self._followers.pop(key, None)
            self._files.unfollow(key)
            self._agents.forget_file(file.uid, file.path)
        for key in wanted.keys() - self._watched.keys():
            file = wanted[key]
            owner = LineOwner(file.uid, file.user, file.path.rpartition("/")[0] or "/", file.home)
            follower = self._files.follow_as(key, jobs_file.parse, owner, partial(self._follower, file))
            self._watched[key] = file
            self._agents.follow_file(file.uid, file.path, follower)
        self._noted = noted

    def _follower(self, file: WatchedFile, mark: FileMark | None) -> RemoteFollower:
        def send(message: dict[str, Any]) -> None:
            self._agents.send_about_file(file.uid, message)

        connection = self._context.db.connection

        def full() -> bool:
            """Return whether the lines of the user's files that are not recorded yet reach the limit."""
            others = [one for key, one in self._followers.items() if one.file.user == file.user and key != file.key]
            return self._full(file.user, sum(one.handed for one in others))

        made = RemoteFollower(file, mark, send, full, lambda: kept.number_refused(connection, file.key))
        self._followers[file.key] = made
        return made

    def due(self) -> float:
        """Return ``NEVER``: a command that changes the list wakes the daemon."""
        return NEVER

    def close(self) -> None:
        """Do nothing: the agents end with their connections."""
