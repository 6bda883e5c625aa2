"""Reads new complete lines of watched files, which users append to, edit, replace, rotate or delete."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from scheduler.core.errors import DENIED, LINK, NO_PLAIN_FILE, OWNER, WRITERS, Exposure, FileTrouble, UsageError, word
from scheduler.core.file_offsets import Batch, FileMark, LineRead
from scheduler.system.safe_open import plain_or_link

MOST_LINES = 512
LARGEST = (1 << 62) - 1  # device or inode in a FileMark
CHUNK = 64 * 1024
LONGEST_LINE = 1 << 20
CHECKED_WHOLE = 64 * 1024  # bytes; up to this size, the part already read is compared at each look
TAIL = 4096  # bytes at the end of a larger part that are compared
OPEN_LINE_S = 2.0  # a last line without newline is read when unchanged for this long
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks; line ends and digits in UTF-16 hold NUL bytes
BOM = b"\xef\xbb\xbf"
CLOCK_TICK_NS = 50_000_000  # two writes within one tick of the kernel's clock give a file the same times
TRUSTED = " (or set trust_group: true)"
MOST_LINKS = 40  # as many as the kernel follows in a path
SETTLE_S = 1.0  # a file that shrank or was replaced is read when unchanged for this long
APPENDED_S = 2.0  # such a file is also read when it only grew for this long: a program may append without a break
# Errors that a person has to fix; all other errors may be temporary.
LASTING = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
NO_SUCH_FILE = "no such file; it is read when it appears"


def read_plain(path: str, most: int) -> bytes:
    """Return at most ``most`` bytes of a plain file. Raises OSError if the file is not plain or cannot be read."""
    with open(path, "rb", opener=plain_or_link) as stream:
        return stream.read(most) or b""


def read_private(path: str, most: int, trust_group: bool = False) -> bytes:
    """Return at most ``most`` bytes of a plain file that no other user could write. The folders are not checked.

    Raises FileTrouble if other users could write the file, and OSError if it is not plain or cannot be read.
    """
    with open(path, "rb", opener=plain_or_link) as stream:
        exposed = other_writers(os.fstat(stream.fileno()), path, trust_group, stream.fileno())
        if exposed:
            raise not_read(exposed, path)
        return stream.read(most) or b""


def cannot_be_read(error: OSError, where: str) -> UsageError:
    """Return the error for a file that cannot be opened or read."""
    code = {errno.EACCES: DENIED, errno.EINVAL: NO_PLAIN_FILE}.get(
        error.errno or 0, ""
    )  # EINVAL: see `system/safe_open.py`
    return UsageError(f"cannot be read: {error.strerror}", where=where, code=code)


def not_read(exposed: Exposure, path: str) -> FileTrouble:
    """Return the error for a file that other users could write."""
    return FileTrouble(f"not read: {exposed}", where=path, exposure=exposed)


def other_writers(status: os.stat_result, path: str, trust_group: bool = False, fd: int = -1) -> Exposure | None:
    """Return why users other than this user and root could write a file or folder, and how to fix that.

    The result is None if no other user could write the file or folder. ``status``: stat of the file or folder; ``fd``:
    its descriptor; -1: the access list is read by ``path``. The access list matters only if the mode allows the group
    to write, because the group bits of the mode limit all entries of an access list.
    """
    me, owner = os.getuid(), status.st_uid
    if owner not in (me, 0):
        do = f"make yourself its owner (chown): {word(path)}"
        return Exposure(OWNER, f"it belongs to user {owner}", path, owner, do)
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & stat.S_IWOTH and not sticky:
        return Exposure(WRITERS, "all users may write to it", path, owner, f"chmod o-w {word(path)}")
    if status.st_mode & stat.S_IWGRP and not sticky and not trust_group:
        if _group_has_others(status.st_gid, me):
            return Exposure(WRITERS, "its group may write to it", path, owner, f"chmod g-w {word(path)}", TRUSTED)
        if _has_access_list(fd if fd >= 0 else path):
            said = "its access list may let other users write to it"
            return Exposure(WRITERS, said, path, owner, f"setfacl -b {word(path)}", TRUSTED)
    return None


def _has_access_list(at: int | str) -> bool:
    try:
        return bool(os.getxattr(at, "system.posix_acl_access"))
    except OSError:
        return False  # no access list, or a file system without them


def _group_has_others(gid: int, me: int) -> bool:
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        members = set()
    try:
        mine = pwd.getpwuid(me).pw_name
    except KeyError:
        mine = ""
    primary = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid}
    return bool((members | primary) - {mine, "root"})


def check_private(path: str, status: os.stat_result, trust_group: bool = False) -> None:
    """Raise FileTrouble if another user could write or replace the file at ``path``. ``status``: stat of the file.

    Raises OSError if a folder cannot be examined.
    """
    exposed = other_writers(status, path, trust_group)
    if exposed:
        raise not_read(exposed, path)
    check_places(path, places_of(path), trust_group)


def check_owner(path: str, status: os.stat_result) -> None:
    """Raise FileTrouble if neither this user nor root owns the open file. ``status``: stat of the file."""
    if status.st_uid not in (os.getuid(), 0):
        raise FileTrouble(f"not written: it belongs to user {status.st_uid}", where=path)


def places_of(path: str) -> tuple[str, ...]:
    """Return the absolute form of ``path``. If this path is a link, add the path to which the link leads, and so on."""
    places = [os.path.abspath(path)]
    while os.path.islink(places[-1]) and len(places) <= MOST_LINKS:
        folder = os.path.realpath(os.path.dirname(places[-1]))
        places.append(os.path.normpath(os.path.join(folder, os.readlink(places[-1]))))
    return tuple(places)


def check_places(path: str, places: Sequence[str], trust_group: bool) -> None:
    """Raise FileTrouble if another user could replace what lies at one of ``places``: a file, or a link to it.

    ``places``: the result of `places_of`.

    ``path``: the path that the error names. Raises OSError if a folder cannot be examined.
    """
    for place in places:
        folder = os.path.dirname(place)
        exposed = other_writers(os.stat(folder), folder, trust_group)
        if exposed:
            raise not_read(replace(exposed, said=f"its folder is not safe: {exposed.said}"), path)
    for link in places[:-1]:
        owner = os.lstat(link).st_uid
        if owner not in (os.getuid(), 0):  # in a sticky folder any user may create a link
            raise not_read(Exposure(LINK, f"the link {link} belongs to user {owner}", link, owner), path)


def _cannot_be_read(error: OSError, where: str) -> FileTrouble | OSError:
    return FileTrouble(f"cannot be read: {error.strerror}", where=where) if error.errno in LASTING else error


def file_id(status: os.stat_result) -> tuple[int, int]:
    """Return device and inode of a file, with 62 bits each: SQLite stores no larger numbers than 63 bits."""
    return status.st_dev & LARGEST, status.st_ino & LARGEST


class Follower:
    """Reader of one watched file. ``mark``: the position up to which the file was read and recorded.

    `look` returns the next Batch; the caller records the batch and then calls `accept`. Until `accept` is called,
    `look` returns the same lines again. ``trust_group``: accept a file that its group may write.
    ``most_lines``: in a Batch.
    """

    def __init__(
        self, path: str, mark: FileMark | None = None, trust_group: bool = False, most_lines: int = MOST_LINES
    ) -> None:
        self.path, self.most_lines = path, most_lines
        self.mark = mark if mark is not None else FileMark(path)
        self.trust_group = trust_group
        self._fd = -1
        self._exposed = False  # other users could write the open file at the last look
        self._places: tuple[str, ...] = ()
        self._seen: tuple[int, int] = (0, 0)  # size, mtime_ns at the last look
        self._changed_at = float("-inf")  # monotonic seconds
        self._unsettled = False
        self._grows: tuple[int, int, float] | None = None  # while unsettled: size, CRC and time of an earlier look
        self._checked_ctime = self._whole_ctime = -1
        self._tail = b""
        self._tail_for = -1
        self.look_again_at: float | None = None

    def close(self) -> None:
        """Close the open file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._exposed = -1, False

    def accept(self, batch: Batch) -> None:
        """Continue after ``batch``. The caller must have recorded the batch."""
        self.mark = batch.mark

    def look(self, now: float) -> Batch | None:
        """Return the next lines; None if no line is ready. ``now``: monotonic seconds.

        After the call, ``look_again_at`` is the time of the next call (monotonic seconds). None: call again when the
        file changes. Raises FileTrouble if the file is missing, unreadable, no plain file, or writable for other
        users. Raises OSError for an error that may be temporary (a disk error, or no free descriptor).
        """
        self.look_again_at = None
        try:
            fresh = os.stat(self.path)
        except FileNotFoundError:
            rest = self._rest_of_old(now)
            if rest is not None:
                return rest
            raise FileTrouble(NO_SUCH_FILE, where=self.path) from None
        except OSError as error:
            raise _cannot_be_read(error, self.path) from None
        if not stat.S_ISREG(fresh.st_mode):
            raise FileTrouble("not read: not a regular file", where=self.path)
        if self._fd < 0:
            self._open(fresh)
        held = os.fstat(self._fd)
        if file_id(fresh) != file_id(held):
            rest = self._rest_of_old(now)
            if rest is not None:
                return rest
            self.close()
            self._open(fresh)
            held = os.fstat(self._fd)
        exposed = other_writers(held, self.path, self.trust_group, self._fd)
        self._exposed = exposed is not None
        if exposed:
            raise not_read(exposed, self.path)
        check_places(self.path, self._places, self.trust_group)
        return self._look_at(held, now)

    def _open(self, fresh: os.stat_result) -> None:
        """Open the file at the path. ``fresh``: stat of this file.

        If the previous file was renamed within its folder and still has unread lines, open the previous file instead.
        """
        self._places = places_of(self.path)
        if self.mark.inode and file_id(fresh) != (self.mark.device, self.mark.inode):
            renamed = self._renamed()
            if renamed:
                self._fd = self._open_plain(renamed)
                return
        self._fd = self._open_plain(self.path)

    def _open_plain(self, path: str) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _cannot_be_read(error, path) from None

    def _renamed(self) -> str:
        folder = os.path.dirname(os.path.realpath(self.path))
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.inode() == self.mark.inode and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        if file_id(status)[0] == self.mark.device and status.st_size > self.mark.offset:
                            return entry.path
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES):
                raise _cannot_be_read(error, folder) from None
        return ""

    def _rest_of_old(self, now: float) -> Batch | None:
        """Return the unread lines of a file that was renamed or deleted while it was open; None if there are none.

        If other users could write the old file, the batch has no lines; after `accept` of this batch, the old file is
        never read again. Raises FileTrouble if another user could put another file at the watched path.
        """
        if self._fd < 0:
            return None
        held = os.fstat(self._fd)
        mark = self.mark
        if file_id(held) != (mark.device, mark.inode) or held.st_size <= mark.offset:
            return None
        left_out = self._left_out(held)
        if left_out:
            return Batch(replace(mark, device=0, inode=0), more=True, left_out=left_out)
        check_places(self.path, (self.path,), self.trust_group)
        if not self._prefix_unchanged(held, whole=True):
            return None
        try:
            batch = self._take(mark, held.st_size, last=True)
        except FileTrouble:
            return None  # a UTF-16 file, of which nothing is read
        return replace(batch, more=True) if batch.mark != mark else None  # the next look reads the new file

    def _left_out(self, held: os.stat_result) -> str:
        """Return why the unread lines of an old file are ignored; empty if they are used.

        The lines are ignored if other users can write the file now, or could write it at the last look. A file whose
        mode was corrected in the meantime is not safe: another user may have added lines before, and this may be the
        reason why the owner moved the file.
        """
        name = os.readlink(f"/proc/self/fd/{self._fd}") if held.st_nlink else ""
        exposed = other_writers(held, name or self.path, self.trust_group, self._fd)
        if not (exposed or self._exposed):
            return ""
        if not name:
            return f"{self.path}: the unread lines of the deleted file are ignored: other users could write to it"
        return (
            f"{name}: its unread lines are ignored: {exposed.said if exposed else 'other users could write to it'}; "
            f"{f'{exposed.mend}{exposed.also}, then ' if exposed else ''}copy the lines that you need into {self.path}"
        )

    def _look_at(self, held: os.stat_result, now: float) -> Batch | None:
        seen = (held.st_size, held.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        mark = self.mark
        same = file_id(held) == (mark.device, mark.inode)
        if mark.inode == 0 and not mark.offset:
            device, inode = file_id(held)
            mark = replace(mark, device=device, inode=inode)
        elif not (same and held.st_size >= mark.offset and self._prefix_unchanged(held)):
            self._unsettled = True
        settles = self._changed_at + SETTLE_S
        if self._unsettled:
            if now < settles and not self._only_grows(held, now, settles):
                return None
            self._unsettled, self._grows = False, None
            if not (same and held.st_size >= mark.offset and self._prefix_unchanged(held, whole=True)):
                self._tail_for = -1
                return self._replay(held)
        if held.st_size == mark.offset:
            if not mark.replaying:
                return Batch(mark) if mark != self.mark else None
            if now >= settles:
                return Batch(replace(mark, replaying=False), settled=True)
            # The file may be incomplete: lines that are still missing must not count as new later.
            self.look_again_at = settles
            return None
        stood = now - self._changed_at >= OPEN_LINE_S
        batch = self._take(mark, held.st_size, last=stood)
        if batch.mark.offset < held.st_size and not (batch.more or stood):
            self.look_again_at = self._changed_at + OPEN_LINE_S
        if batch.mark == mark:
            # The unread rest is blank: the replaced file has been read to its end.
            return Batch(replace(mark, replaying=False), settled=True) if mark.replaying and stood else None
        return batch

    def _only_grows(self, held: os.stat_result, now: float, settles: float) -> bool:
        """Return whether, for at least APPENDED_S seconds, bytes were only appended to the file.

        An earlier call of this method stored the size and checksum of the file. The result is True if that call was at
        least APPENDED_S seconds ago, and the bytes that the file had then are unchanged.

        If the result is False, set ``look_again_at``. ``settles``: the time (monotonic seconds) from which `look` reads
        the file without calling this method, if the file does not change before.
        """
        if self._grows is not None:
            size, crc, since = self._grows
            if now < since + APPENDED_S:
                self.look_again_at = min(settles, since + APPENDED_S)
                return False
            if held.st_size >= size and self._crc(size) == crc:
                return True
        self._grows = (held.st_size, self._crc(held.st_size), now)
        self.look_again_at = min(settles, now + APPENDED_S)
        return False

    def _crc(self, end: int) -> int:
        crc = 0
        for piece in self._pieces(0, end):
            crc = zlib.crc32(piece, crc)
        return crc

    def _replay(self, held: os.stat_result) -> Batch:
        mark = FileMark(self.path, *file_id(held), replaying=True)
        batch = self._take(mark, held.st_size, last=False)
        return replace(batch, restart=True, more=True)

    def _prefix_unchanged(self, held: os.stat_result, whole: bool = False) -> bool:
        """Return whether the part that was already read is unchanged.

        ``whole``: compare the whole part. Otherwise only the end of a long part is compared.
        """
        mark = self.mark
        if not mark.offset:
            return True
        if held.st_ctime_ns == self._checked_ctime and self._tail_for == mark.offset:
            return True
        if whole or mark.offset <= CHECKED_WHOLE or self._tail_for != mark.offset:
            if self._crc(mark.offset) != mark.crc:
                return False
            start = max(0, mark.offset - TAIL)
            self._tail, self._tail_for = os.pread(self._fd, mark.offset - start, start), mark.offset
            if time.time_ns() - held.st_ctime_ns > CLOCK_TICK_NS:
                self._checked_ctime = self._whole_ctime = held.st_ctime_ns
            return True
        return os.pread(self._fd, len(self._tail), mark.offset - len(self._tail)) == self._tail

    def check_whole(self) -> None:
        """Let the next call of `look` check by a checksum that everything read so far is unchanged in the file.

        The call of `look` does not check this if the file has not changed since the last such check.
        """
        try:
            unchanged = self._fd < 0 or os.fstat(self._fd).st_ctime_ns == self._whole_ctime
        except OSError:
            unchanged = False  # the next look raises the error
        if not unchanged:
            self._checked_ctime = self._tail_for = -1

    def old_lines(self, numbers: Collection[int]) -> list[LineRead] | None:
        """Read lines again that were read before, and return them. ``numbers``: the numbers of these lines.

        The result is None if no file is open, or if other users could write the file. The result is an empty list if
        the file was replaced or rewritten; the next call of `look` then reads the whole file again. Raises OSError.
        """
        if self._fd < 0:
            return None
        held, mark = os.fstat(self._fd), self.mark
        if other_writers(held, self.path, self.trust_group, self._fd):
            return None  # another user can write a text with the same CRC
        if file_id(held) != (mark.device, mark.inode) or held.st_size < mark.offset:
            return []
        if not self._prefix_unchanged(held, whole=True):
            return []
        found, last, rest = [], max(numbers, default=0), b""
        number = 0
        for piece in self._pieces(0, mark.offset):
            *lines, rest = (rest + piece).split(b"\n")
            for raw in lines:
                number += 1
                if number in numbers and len(raw) <= LONGEST_LINE:
                    found.append(_decoded(raw, number, first=number == 1))
            if number >= last:
                return found
            if len(rest) > LONGEST_LINE:
                rest = rest[: LONGEST_LINE + 1]  # too long to be a job: only the end of the line matters
        if rest and number + 1 in numbers and len(rest) <= LONGEST_LINE:
            found.append(_decoded(rest, number + 1, first=number == 0))
        return found

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            piece = os.pread(self._fd, min(1 << 20, end - start), start)
            if not piece:
                return
            yield piece
            start += len(piece)

    def _take(self, mark: FileMark, size: int, last: bool) -> Batch:
        """Return the lines after ``mark``. Raises FileTrouble if the file is UTF-16.

        ``size``: size of the file; ``last``: whether text after the last newline counts as a line.
        """
        data = os.pread(self._fd, CHUNK, mark.offset)
        if mark.offset == 0 and data[:2] in UTF_16 and (b"\0" in data or len(data) == 2):
            raise FileTrouble("not read: UTF-16 instead of UTF-8; save it as UTF-8", where=self.path)
        while b"\n" not in data and len(data) <= LONGEST_LINE and len(data) < size - mark.offset:
            more = os.pread(self._fd, CHUNK, mark.offset + len(data))
            if not more:
                break
            data += more
        lines: list[LineRead] = []
        position, number = 0, mark.lines
        open_line, skipping = mark.open_line, mark.skipping
        while len(lines) < self.most_lines:
            end = data.find(b"\n", position)
            if end < 0:
                break
            raw, position = data[position:end], end + 1
            number += 0 if open_line or skipping else 1
            if open_line and raw.strip():
                lines.append(
                    LineRead(
                        number, _shown(raw), "the line was changed after it was read; write a new line for a new job"
                    )
                )
            elif not open_line and not skipping:
                lines.append(_decoded(raw, number, first=mark.offset == 0 and number == 1))
            open_line = skipping = False
        rest = data[position:]
        whole_rest = mark.offset + len(data) >= size
        if len(lines) < self.most_lines and rest:
            if skipping:
                position = len(data)
            elif open_line and not rest.strip():
                position = len(data)  # blanks after a line that was read: the line is unchanged
            elif len(rest) > LONGEST_LINE:
                number += 0 if open_line else 1
                open_line = False
                lines.append(LineRead(number, _shown(rest[:80]), f"the line is longer than {LONGEST_LINE} bytes"))
                position, skipping = len(data), True
            elif last and whole_rest and not open_line and rest.removeprefix(BOM).strip():  # blanks may begin a line
                number += 1
                lines.append(_decoded(rest, number, first=mark.offset == 0 and number == 1))
                position, open_line = len(data), True
            elif last and whole_rest and open_line and rest.strip():
                lines.append(
                    LineRead(
                        number, _shown(rest), "the line was changed after it was read; write a new line for a new job"
                    )
                )
                position = len(data)
        if not position:
            return Batch(mark)
        after = replace(
            mark,
            offset=mark.offset + position,
            lines=number,
            crc=zlib.crc32(data[:position], mark.crc),
            open_line=open_line,
            skipping=skipping,
        )
        start = max(0, after.offset - TAIL)
        self._tail, self._tail_for = os.pread(self._fd, after.offset - start, start), after.offset
        return Batch(after, tuple(lines), more=len(lines) >= self.most_lines or mark.offset + len(data) < size)


def _decoded(raw: bytes, number: int, first: bool) -> LineRead:
    if first:
        raw = raw.removeprefix(BOM)
    try:
        return LineRead(number, raw.decode("utf-8").rstrip("\r"))
    except UnicodeDecodeError as error:
        return LineRead(number, _shown(raw), f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8")


def _shown(raw: bytes) -> str:
    return raw[:200].decode("utf-8", "replace")
