"""Reads the jobs files of a user in the user's agent, and sends new lines to the scheduler (`user_files.py`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from scheduler.core.errors import FileTrouble
from scheduler.core.file_offsets import FileMark
from scheduler.gpujobd.agent_channel import Channel
from scheduler.intake.file_watcher import InotifyWatcher, PollingWatcher, watcher
from scheduler.intake.tail import Follower
from scheduler.system.typed_json import plain, typed

LOOK_S = 30.0  # safety net: each file is looked at least this often
AGAIN_S = 1.0  # after an error of the disk
MOST_LINES = 64  # in a batch: so many lines are read at most after the limit on waiting jobs is reached


@dataclass(slots=True)
class _File:
    """A file. ``waits``: the scheduler has not recorded the lines that were sent; ``due``: monotonic seconds; ``trouble``:
    as it was sent last.
    """

    follower: Follower
    waits: bool = False
    due: float = 0.0
    trouble: str = ""


class ReadFiles:
    """The jobs files of a user."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.trust_group = False  # accept files that their group may write
        self.watcher: InotifyWatcher | PollingWatcher = watcher("auto", set())[0]
        self._files: dict[str, _File] = {}

    def carry_out(self, message: dict[str, Any]) -> None:
        """Carry out a message of the scheduler about a file. Raises ValueError if it is not valid."""
        kind, path = message["do"], str(message["path"])
        if kind == "follow":
            self._close(path)
            mark = typed(message["mark"], FileMark)
            # The scheduler has another name for the file: several users may have the same file read.
            own = FileMark(path, mark.device, mark.inode, mark.offset, mark.lines, mark.crc, mark.replaying,
                           mark.open_line, mark.skipping)  # fmt: skip
            self._files[path] = _File(Follower(path, own, self.trust_group, MOST_LINES))
            self.watcher.watch(self._files)
            return
        file = self._files.get(path)
        if file is None:
            return
        if kind == "unfollow":
            self._close(path)
            self.watcher.watch(self._files)
        elif kind == "accept":
            mark = typed(message["mark"], FileMark)
            file.follower.mark = FileMark(path, mark.device, mark.inode, mark.offset, mark.lines, mark.crc,
                                          mark.replaying, mark.open_line, mark.skipping)  # fmt: skip
            file.waits, file.due = False, 0.0
        elif kind == "check":
            file.follower.check_whole()
            file.due = 0.0
        else:
            found = file.follower.old_lines(typed(message["numbers"], list[int]))
            if found is not None:
                self._channel.send({"say": "file", "path": path, "old": plain(found)})

    def look(self, now: float) -> None:
        """Send new lines of each file that has changed. ``now``: monotonic seconds. Raises Closed."""
        changed = self.watcher.changed()
        for path, file in self._files.items():
            if not file.waits and (path in changed or now >= file.due):
                self._look_at(path, file, now)
            elif path in changed:
                file.due = 0.0

    def _look_at(self, path: str, file: _File, now: float) -> None:
        trouble, batch = "", None
        file.due = now + LOOK_S
        try:
            batch = file.follower.look(now)
        except FileTrouble as error:
            trouble = error.what
        except OSError as error:
            trouble, file.due = f"cannot be read: {error.strerror}", now + AGAIN_S
        if file.follower.look_again_at is not None:
            file.due = min(file.due, file.follower.look_again_at)
        if batch is not None:
            file.waits = True
        if batch is not None or trouble != file.trouble:
            file.trouble = trouble
            self._channel.send({"say": "file", "path": path, "trouble": trouble, "batch": plain(batch)})

    def due(self) -> float | None:
        """Return when to look at a file even if none has changed (monotonic seconds); None: never."""
        return min((file.due or time.monotonic() for file in self._files.values() if not file.waits), default=None)

    def _close(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file.follower.close()
