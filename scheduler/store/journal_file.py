"""The journal file: lines are appended, and sometimes the whole file is rewritten with one line per job."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

from scheduler.core.journal import Who, identity_of_record, read_line
from scheduler.system.atomic_files import leftover_temporaries, sync_folder, write_all
from scheduler.system.locks import try_lock
from scheduler.system.private_files import new_beside, new_private
from scheduler.system.safe_open import plain

SLACK = 64 << 10
SHORTEST = len('{"id": 1')
LONGEST = 16 << 20  # bytes; a longer line is not from a journal
A_STEP = 100  # lines read in one step
PIECE = 1 << 20
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})  # the file system has no locks
PLAIN_WORDS = {
    errno.ELOOP: "it is a symbolic link, which is not followed",
    errno.EINVAL: "not a regular file",
    errno.ENXIO: "not a regular file",
}

Span = tuple[int, int]  # part of the file: offset and length in bytes


def holds_records(path: str) -> bool:
    """Return whether the file at ``path`` may be a journal.

    The result is True if the file is missing, unreadable or empty, or if one of its first lines begins with ``{``.
    """
    try:
        with open(path, "rb", opener=plain) as stream:
            beginning = stream.read(SLACK)
    except OSError:
        return True  # reported when the journal is written
    lines = beginning.split(b"\n")
    return not beginning.strip(b" \r\n\t\0") or any(line.startswith(b"{") for line in lines)


@dataclass(slots=True)
class _Found:
    """The positions of two kinds of lines in the old file: lines to copy to the new file, and damaged lines."""

    kept: dict[object, Span] = field(default_factory=dict)  # for a job that is not in the store, only its last line
    damaged: list[Span] = field(default_factory=list)
    repaired: int = 0
    end: int = 0


class JournalFile:
    """The journal file of one scheduler.

    When the file is rewritten, the lines of jobs are made from the store, and lines of other programs are kept. Lines
    that are not JSON are moved to another file.

    ``is_ours``: returns whether the store has the job of a line. ``is_torn``: returns whether bytes that are not JSON
    are an incomplete line of this scheduler.
    """

    def __init__(self, path: str, is_ours: Callable[[Who], bool], is_torn: Callable[[bytes], bool]) -> None:
        self.path, self.is_ours, self.is_torn = path, is_ours, is_torn
        self.told: list[tuple[str, int]] = []  # messages for the log, each with its level
        self.appended = False  # whether lines were appended since the last rewrite
        self._fd, self._size, self._inode, self._compact = -1, 0, (0, 0), 0

    @property
    def grown(self) -> bool:
        """Whether most of the file consists of outdated lines: a later line gives the present state of the same job."""
        return self._fd >= 0 and self._size > 2 * self._compact + SLACK

    def append(self, data: bytes, first: int = 0) -> bool:
        """Append whole lines with one write.

        If the file is not open, or was removed, replaced or truncated, nothing is written and the result is False. The
        caller then has to call `write_new_file`. ``first``: the total length, in bytes, of those lines in ``data`` whose
        jobs have no line in the file yet. Raises OSError if the write fails or is incomplete. Incomplete lines are removed
        again, unless another program has appended lines after them.
        """
        if self._fd < 0:
            return False
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        size = there.st_size
        if (there.st_dev, there.st_ino) != self._inode or size < self._size:
            return False
        if size > self._size and os.pread(self._fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # another program appended a line without a newline
        written = os.write(self._fd, data)
        if written < len(data):
            if os.fstat(self._fd).st_size == size + written:
                os.ftruncate(self._fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._size, self.appended = size + written, True
        self._compact += first
        return True

    def write_new_file(self, pages: Iterable[bytes], last: Callable[[], bytes] = bytes) -> Generator[None, None, None]:
        """Write a new file in steps: first the lines to keep from the old file, then ``pages``.

        The last step replaces the old file. Before this step, lines can be appended to the old file. ``last`` returns
        the lines of the jobs that changed after their page was made. Raises OSError; the old file then stays unchanged,
        unless the error comes after the replacement.
        """
        old = self._open_old()
        folder, name = os.path.split(self.path)
        aside = os.path.join(folder, f".{name}.new-{os.getpid()}")
        new = -1
        try:
            for left in leftover_temporaries(self.path):
                os.unlink(left)
            new = new_private(aside, os.O_RDWR | os.O_APPEND)
            self._lock(new)  # before the rename makes it visible
            found = _Found()
            yield from self._look_through(old, found)
            yield from _copy(old, found.kept.values(), new)
            not_synced = 0
            for page in pages:
                write_all(new, page)
                not_synced += len(page)
                if not_synced >= PIECE:
                    os.fdatasync(new)  # in pieces: a single sync at the end could take long
                    not_synced = 0
                yield
            write_all(new, last())
            self._end(old, new, found)
            os.rename(aside, self.path)
        except BaseException as error:
            if new >= 0:
                os.close(new)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
            if isinstance(error, OSError) and error.errno and error.filename != self.path:
                raise OSError(error.errno, error.strerror, self.path) from error
            raise
        finally:
            if old >= 0:
                os.close(old)
        self._use(new)
        sync_folder(folder)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    # -- the old file -------------------------------------------------------------------------------------

    def _open_old(self) -> int:
        """Return a descriptor of the old file; -1 if there is none. Raises OSError if the file must not be replaced."""
        try:
            fd = plain(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise OSError(error.errno, PLAIN_WORDS.get(error.errno or 0, error.strerror), self.path) from None
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it belongs to another user", self.path)
            if (status.st_dev, status.st_ino) != self._inode:
                self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _lock(self, fd: int) -> None:
        try:
            taken = not try_lock(fd)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return
        if taken:
            raise OSError(errno.EBUSY, "another scheduler writes its journal to this file", self.path)

    def _look_through(self, old: int, found: _Found) -> Iterator[None]:
        """Read the lines from ``found.end`` to the end of the file, and add their positions to ``found``.

        Each step reads ``A_STEP`` lines.
        """
        if old < 0:
            return
        with open(os.dup(old), "rb") as stream:
            stream.seek(found.end)
            number = 0
            while line := stream.readline(LONGEST):
                start = found.end
                found.end += len(line)
                if len(line) == LONGEST:
                    while not line.endswith(b"\n") and (line := stream.readline(LONGEST)):
                        found.end += len(line)
                    found.damaged.append((start, found.end - start))
                else:
                    self._judge(line, (start, len(line)), found)
                number += 1
                if number % A_STEP == 0:
                    yield

    def _judge(self, line: bytes, span: Span, found: _Found) -> None:
        if not line.strip():
            return
        try:
            value = read_line(line)
        except ValueError:
            # A line this short that ends in a newline could be the beginning of anything: it counts as damaged.
            alone = line.endswith(b"\n") and len(line) <= SHORTEST
            if not alone and self.is_torn(line.rstrip(b"\n")):
                found.repaired += 1
            else:
                found.damaged.append(span)
            return
        job = identity_of_record(value)
        if job is None:
            found.kept[span] = span
        elif not self.is_ours(job):
            found.kept.pop(job, None)
            found.kept[job] = span

    # -- the new file -------------------------------------------------------------------------------------

    def _end(self, old: int, new: int, found: _Found) -> None:
        """Finish the new file.

        Copy the lines that were added to the old file in the meantime, sync the new file, and copy damaged lines to a
        file beside it. Raises OSError, also if another program replaced the old file.
        """
        before = dict(found.kept)
        for _ in self._look_through(old, found):
            continue
        added = [span for key, span in found.kept.items() if before.get(key) != span]
        for _ in _copy(old, added, new):
            continue
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        seen = os.fstat(old) if old >= 0 else None
        if there is not None and (seen is None or (there.st_dev, there.st_ino) != (seen.st_dev, seen.st_ino)):
            raise OSError(errno.EBUSY, "another file was put in its place while it was rewritten", self.path)
        os.fsync(new)
        if found.damaged:
            aside = self._copy_damaged(old, found.damaged)
            number = len(found.damaged)
            lines = f"{number} lines are not JSON and were" if number > 1 else "1 line is not JSON and was"
            self.told.append((f"{self.path}: {lines} moved to {aside}", 30))
        if found.repaired:
            self.told.append((f"{self.path}: an incomplete line was completed", 20))

    def _copy_damaged(self, old: int, spans: list[Span]) -> str:
        """Copy damaged lines into a new file beside the journal and return its path."""
        name, fd = new_beside(self.path, "torn")
        try:
            for _ in _copy(old, spans, fd):
                continue
            os.fsync(fd)
        except BaseException:
            os.unlink(name)  # the next rewrite tries again
            raise
        finally:
            os.close(fd)
        return name

    def _use(self, fd: int) -> None:
        status = os.fstat(fd)
        self.close()
        self._fd, self._size, self._inode = fd, status.st_size, (status.st_dev, status.st_ino)
        self._compact, self.appended = status.st_size, False


def _copy(old: int, spans: Iterable[Span], new: int) -> Iterator[None]:
    """Copy these parts of the old file to the new file, in steps of about ``PIECE`` bytes.

    If a part does not end in a newline, a newline is added.
    """
    pieces: list[bytes] = []
    size = 0
    for start, length in spans:
        end = start + length
        last = b""
        while start < end and (last := os.pread(old, min(PIECE, end - start), start)):
            pieces.append(last)
            start += len(last)
            size += len(last)
            if size >= PIECE:
                write_all(new, b"".join(pieces))
                pieces, size = [], 0
                yield
        if not last.endswith(b"\n"):
            pieces.append(b"\n")
    write_all(new, b"".join(pieces))
