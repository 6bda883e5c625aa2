"""Files written whole or not at all, private from their first byte."""

from __future__ import annotations

import contextlib
import os

from scheduler.crashpoints import crash_point


def replace_file(path: str, data: bytes, *, sync: bool = True) -> None:
    """Write aside (0600, never through a link), sync, rename over ``path``. Raises OSError; the old file stays then."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.new-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # a umask of 0777 would leave it unreadable to ourselves
        write_all(fd, data)
        if sync:
            os.fsync(fd)
        crash_point("state.tmp_written")
        os.rename(aside, path)
        crash_point("state.renamed")
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    finally:
        os.close(fd)
    if sync:
        sync_folder(folder)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte or raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: str) -> None:
    """Bring a rename in ``folder`` to the disk."""
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_line(path: str, line: str) -> None:
    """Append one whole line with one write; a last line without newline is closed first. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        glue = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
        write_all(fd, glue + os.fsencode(line) + b"\n")
    finally:
        os.close(fd)
