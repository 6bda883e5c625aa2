"""The state file on disk: the daemon replaces the whole file, and reads it again when somebody has edited it.

The daemon writes a new file and exchanges the names of the new and the old file. Then the daemon reads the old file
once more, because somebody may have saved an edit in the old file since the last look. While a program has the old file
open for writing, the daemon keeps reading it: otherwise an edit that this program saves would be lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.errors import nearest
from scheduler.core.requests import StateEdited
from scheduler.system.atomic_files import has_writer, leftover_temporaries, swap_file, write_all
from scheduler.system.private_files import new_beside

LARGEST = 1 << 20
HALF_SAVED_S = 1.0  # how long invalid contents count as a save in progress
OPEN_S = 10.0  # how long to wait for a program that keeps the file open
GONE_S = 0.5  # how long the file may be missing while an editor replaces it
OUT_S = 0.25  # how long a replaced file is watched for a late edit
LOOK_S = 0.05  # between two looks while a save may be in progress
WISHES = ("paused_gpus", "paused")  # the keys that people may edit
KNOWN = frozenset({*WISHES, "revision", "gpu_status", "gpus", "jobs", "running", "updated_at"})


@dataclass(slots=True)
class _Out:
    """An old state file that a new version has replaced. A program may still be writing to this file."""

    fd: int
    known: bytes  # contents that were written by a daemon or already applied
    since: float  # monotonic time
    name: str = ""  # its path, if a daemon that was killed while writing left it


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that somebody saved in the state file: the request that it makes, and the contents of the file."""

    request: StateEdited
    at: float  # when it was saved, in seconds since 1970
    data: bytes | None  # None: the file was deleted
    out: _Out | None = None  # the replaced file that holds the edit; None: the file at the path


class NoStateFile(ValueError):
    """Raised if contents are not a valid state file; the text of the exception is the reason."""


@dataclass(slots=True)
class StateFile:
    """Writes the state file and notices edits: contents that the daemon did not write were saved by somebody else."""

    path: str
    revision: int = 0  # of the version written last
    known: bytes | None = None  # contents written or applied last; None: none yet
    broken_since: float | None = None  # monotonic: since when the contents are invalid
    missing_since: float | None = None  # monotonic: since when the file is missing
    said: list[str] = field(default_factory=list)  # messages to log
    numbers: dict[str, int] = field(default_factory=dict)  # UUID → current index of each GPU
    _outs: list[_Out] = field(default_factory=list)  # replaced files that are still watched
    _trouble: str = ""
    _named: set[str] = field(default_factory=set)  # unknown keys that were reported

    def begin(self, *, was_there: bool) -> None:
        """Take over the state file of the previous daemon, if it exists.

        ``was_there``: whether a daemon has ever written the state file. If so and if the file is missing now, somebody
        has deleted it, and `look` returns this deletion as an edit.
        """
        with contextlib.suppress(OSError, NoStateFile):
            data, _ = self._read()
            self.revision = max(self.revision, self._requested(data).read or 0)
        if was_there and not os.path.lexists(self.path):
            self.known, self.missing_since = b"", -GONE_S
        for name in leftover_temporaries(self.path):
            self._adopt_leftover(name)

    def _adopt_leftover(self, name: str) -> None:
        """Watch a temporary file that a killed daemon left: a version of the state file that a user may have edited.

        If the temporary file is not a valid state file, delete the temporary file.
        """
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0):
                    raise NoStateFile
                # A version that the killed daemon wrote and did not put in place: later requests are newer than it.
                read = self._requested(os.pread(fd, LARGEST + 1, 0)).read or 0
                self.revision = max(self.revision, read)
            except NoStateFile:  # written only in part
                os.close(fd)
                os.unlink(name)  # fails, without harm, for another user's file in a sticky folder
            else:
                self._outs.append(_Out(fd, b"", -OPEN_S, name))

    # -- noticing edits -----------------------------------------------------------------------------------

    def look(self, now: float) -> Edit | None:
        """Return the oldest edit that was not passed to `accept` yet, or None. ``now``: monotonic time."""
        edit = self._look_at_outs(now)
        if edit is not None:
            return edit
        try:
            data, status = self._read()
        except FileNotFoundError:
            return self._missing(now)
        except OSError as error:
            self._say_trouble(f"cannot read {self.path}: {error.strerror}")
            return None
        self.missing_since = None
        if status.st_uid not in (os.getuid(), 0):
            self._say_trouble(f"{self.path} belongs to user {status.st_uid}: ignored and overwritten")
            self.known = self.broken_since = None  # so that a deletion of this file is no edit either
            return None
        self._trouble = ""
        if data == self.known:
            self.broken_since = None
            return None
        try:
            edit = Edit(self._requested(data), max(status.st_mtime, status.st_ctime), data)
        except NoStateFile:
            if self.broken_since is None:
                self.broken_since = now
            return None
        self.broken_since = None
        return edit

    def accept(self, edit: Edit) -> None:
        """Note that the store has recorded the edit: `look` no longer returns it."""
        if edit.out is not None:
            edit.out.known = edit.data or b""
        else:
            self.known, self.missing_since = edit.data, None

    def overdue(self, now: float) -> bool:
        """Return whether the state file has had invalid contents for longer than a program takes to save it.

        `paint` then replaces the file, and a copy of the invalid contents is saved beside it.
        """
        if self.broken_since is None:
            return False
        waited = now - self.broken_since
        return waited >= HALF_SAVED_S and (waited >= OPEN_S or not self._written())

    def next_look(self, now: float) -> float | None:
        """Return when the next look is due even without an event (monotonic seconds); None if only events matter."""
        if self._outs or self.broken_since is not None or self.missing_since is not None:
            return now + LOOK_S
        return None

    def _missing(self, now: float) -> Edit | None:
        """Return an edit that resets the pauses if the missing state file counts as deleted; else None.

        The file counts as deleted if it existed before and has been missing for ``GONE_S`` seconds. A file that is
        missing for a shorter time may just be replaced by an editor.
        """
        if self.known is None:
            return None
        if self.missing_since is None:
            self.missing_since = now
        if now - self.missing_since < GONE_S:
            return None
        self.said.append("the state file was deleted: all pauses are removed")
        return Edit(StateEdited((), False), time.time(), None)

    def _look_at_outs(self, now: float) -> Edit | None:
        """Return an edit that was saved in a replaced file, or None if there is none.

        A replaced file is closed when no program has it open for writing any more, or after ``OPEN_S`` seconds.
        """
        for out in list(self._outs):
            try:
                data = os.pread(out.fd, LARGEST + 1, 0)
            except OSError as error:  # it may be temporary
                if now - out.since >= OPEN_S:
                    self.said.append(f"cannot read the latest edit of {self.path}: {error.strerror}; save it again")
                    self._drop(out)
                continue
            if data != out.known:
                try:
                    wish = self._requested(data)
                except NoStateFile as error:
                    age = now - out.since
                    if age >= OPEN_S or (age >= HALF_SAVED_S and not has_writer(out.fd)):
                        self._copy_invalid(data, str(error))
                        self._drop(out)
                    continue
                return Edit(wish, os.fstat(out.fd).st_mtime, data, out)
            age = now - out.since
            if age >= OPEN_S or (age >= OUT_S and not has_writer(out.fd)):
                self._drop(out)
        return None

    def _drop(self, out: _Out) -> None:
        self._outs.remove(out)
        os.close(out.fd)
        if out.name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(out.name)

    def _read(self) -> tuple[bytes, os.stat_result]:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(
                    errno.ELOOP, "it is a symbolic link, which is not followed; put a regular file there"
                ) from None
            raise
        with os.fdopen(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return stream.read(LARGEST + 1), status

    def _written(self) -> bool:
        """Return whether a program has the state file open for writing."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return has_writer(fd)
        finally:
            os.close(fd)

    # -- parsing ------------------------------------------------------------------------------------------

    def _requested(self, data: bytes) -> StateEdited:
        """Return the request that the contents of a saved state file make. Raises NoStateFile."""
        if len(data) > LARGEST:
            raise NoStateFile(f"it is larger than {LARGEST >> 20} MiB")
        try:
            document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_constant)
        except json.JSONDecodeError as error:
            raise NoStateFile(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise NoStateFile(str(error)) from None
        if not isinstance(document, dict):
            raise NoStateFile("it must be a JSON object")
        gpus, paused, read = document.get("paused_gpus"), document.get("paused"), document.get("revision")
        if "paused_gpus" in document and not (
            isinstance(gpus, list) and all(isinstance(gpu, int) and not isinstance(gpu, bool) for gpu in gpus)
        ):
            raise NoStateFile("paused_gpus must be a list of whole numbers")
        if "paused" in document and not isinstance(paused, bool):
            raise NoStateFile("paused must be true or false")
        if isinstance(read, bool) or not isinstance(read, int):
            read = None
        self._name_unknown(document)
        return StateEdited(None if gpus is None else tuple(self._today(document, gpus)), paused, read)

    def _today(self, document: dict[str, Any], gpus: Iterable[int]) -> list[int]:
        """Translate GPU indexes from a saved state file into current indexes.

        ``document``: the saved file, which gives the UUID of each index. The result has the current index of each UUID.
        """
        cards = document.get("gpus")
        then: dict[int, object] = {}
        for card in cards if isinstance(cards, list) else ():
            if isinstance(card, dict) and isinstance(card.get("index"), int):
                then[card["index"]] = card.get("uuid")
        now = {index: self.numbers.get(str(uuid), index) for index, uuid in then.items()}
        taken = {number for index, number in now.items() if number != index}
        # Drop an index without UUID in the file if a renumbered GPU has it now: the edit does not mean that GPU.
        return [now.get(gpu, gpu) for gpu in gpus if gpu in now or gpu not in taken]

    def _name_unknown(self, document: dict[str, Any]) -> None:
        for key in document:
            if key not in KNOWN and key not in self._named:
                self._named.add(key)
                near = nearest(key, WISHES)
                also = f"did you mean {near}?" if near else f"keys that can be edited: {', '.join(WISHES)}"
                self.said.append(f"the state file has an unknown key {key!r}, which is ignored and removed; {also}")

    def _say_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self.said.append(text)

    # -- writing ------------------------------------------------------------------------------------------

    def paint(self, document: dict[str, Any], now: float) -> bool:
        """Write a new version of the state file. Later, `look` checks the replaced file for edits. Raises OSError.

        If a program may be saving the file, or if the file was just deleted, writes nothing and returns False. The
        caller must then call `look` before the next try.
        """
        if self.missing_since is not None or (self.broken_since is not None and not self.overdue(now)):
            return False
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(self.path).st_mode
            if stat.S_ISLNK(mode):
                raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", self.path)
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file", self.path)
        document["revision"] = self.revision + 1
        data = _laid_out(document).encode()
        try:
            came_out = swap_file(self.path, data, there=self.known is not None or os.path.exists(self.path))
        except (FileNotFoundError, FileExistsError):
            if not os.path.isdir(os.path.dirname(self.path)):
                raise
            return False  # the file was deleted or created after the last look
        if came_out >= 0 and (owner := os.fstat(came_out).st_uid) not in (os.getuid(), 0):
            self._say_trouble(f"{self.path} belongs to user {owner}: ignored and overwritten")
            os.close(came_out)
        elif came_out >= 0:
            since = self.broken_since if self.broken_since is not None else now
            self._outs.append(_Out(came_out, self.known or b"", since))
        self.known, self.broken_since = data, None
        self.revision += 1
        return True

    def _copy_invalid(self, data: bytes, why: str) -> None:
        """Create a file beside the state file that keeps ``data``, the invalid contents that somebody saved."""
        try:
            name, fd = new_beside(self.path, "bad")
        except OSError as error:
            self.said.append(
                f"{self.path}: not a valid state file ({why}), and no copy of it can be saved: {error.strerror}"
            )
            return
        try:
            write_all(fd, data)
        except OSError as error:
            self.said.append(f"cannot write all of {name}: {error.strerror}")
        finally:
            os.close(fd)
        self.said.append(f"{self.path}: not a valid state file ({why}); copy saved as {name}, pauses unchanged")

    def close(self) -> None:
        """Close the replaced files that are still read."""
        for out in list(self._outs):
            self._drop(out)


def _laid_out(document: dict[str, Any]) -> str:
    """Format as JSON with one line for each key, GPU and job, so that people can edit lines by hand or with sed."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(one) for one in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key!r}")
        found[key] = value
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
