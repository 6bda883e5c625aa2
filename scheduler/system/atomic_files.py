"""Files written whole or not at all, private from their first byte. To read one: `scheduler/system/safe_open.py`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import signal
import stat
from collections.abc import Callable

from scheduler.system.crash_points import crash_point
from scheduler.system.private_files import new_private

_EXCHANGE, _NO_REPLACE, _AT_FDCWD = 2, 1, -100
_KEEP_SIZE = 1


def replace_file(path: str, data: bytes, *, sync: bool = True) -> None:
    """Write aside (0600, never through a link), sync, rename over ``path``. Raises OSError; the old file stays then."""
    aside = _write_aside(path, data, sync)
    try:
        crash_point("state.tmp_written")
        os.rename(aside, path)
        crash_point("state.renamed")
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    if sync:
        sync_folder(os.path.dirname(path))


def left_aside(path: str) -> list[str]:
    """Files that somebody who was killed while he wrote ``path`` has left beside it."""
    folder, name = os.path.split(path)
    start = f".{name}.new-"
    with contextlib.suppress(OSError):
        return [
            os.path.join(folder, one)
            for one in sorted(os.listdir(folder or "."))
            if one.startswith(start) and one[len(start) :].isdigit()
        ]
    return []


def _write_aside(path: str, data: bytes, sync: bool) -> str:
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.new-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    fd = new_private(aside)
    try:
        write_all(fd, data)
        if sync:
            os.fsync(fd)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), path) from error
        raise
    finally:
        os.close(fd)
    return aside


def swap_file(path: str, data: bytes, there: bool, *, sync: bool = False) -> int:
    """Put a new file at ``path`` and hand out the one that stood there, open for reading: nothing is overwritten unseen.

    ``there``: whether a file is thought to stand there. Returns its descriptor, -1 when there was none. Not synced.
    Raises FileNotFoundError or FileExistsError when ``there`` is wrong, and other OSErrors; the old file stays then.
    """
    aside = _write_aside(path, data, sync)
    out = -1
    try:
        crash_point("state.tmp_written")
        try:
            _renameat2()(aside, path, _EXCHANGE if there else _NO_REPLACE)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                raise
            out = _replace_plainly(aside, path, there)
        else:
            if there:
                try:
                    out = _open_file(aside, path)
                except OSError:
                    _renameat2()(aside, path, _EXCHANGE)  # what cannot be read, and what is no file, stays there
                    raise
        crash_point("state.renamed")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return out


def _open_file(path: str, shown: str) -> int:
    """A descriptor of what stands at ``path``. Raises OSError, also where it is no plain file, and names it ``shown``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", shown)
    return fd


def _replace_plainly(aside: str, path: str, there: bool) -> int:
    """Where two names cannot be exchanged (NFS and others): as near to it as a rename comes."""
    if not there:
        os.link(aside, path, follow_symlinks=False)
        return -1
    out = _open_file(path, path)
    try:
        os.rename(aside, path)
    except BaseException:
        os.close(out)
        raise
    return out


@functools.cache
def _renameat2() -> Callable[[str, str, int], None]:
    import ctypes  # here, because it costs those who need it not

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

    def rename(old: str, new: str, flags: int) -> None:
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new)
        if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), new)

    return rename


def has_writer(fd: int) -> bool:
    """Whether somebody has this file open for writing; True where the file system does not tell.

    The kernel grants a read lease only on a file that nobody writes (fcntl(2), F_SETLEASE).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGCHLD)  # should it be broken at once: SIGIO would end us
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


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


def append_line(path: str, line: str, check: Callable[[os.stat_result], None] = lambda status: None) -> None:
    """Append one whole line with one write, onto the disk; a last line without newline is closed first.

    On a full disk nothing is written, for half a line might be a job that nobody meant: room is reserved first, and should
    others take it meanwhile, the part that was written becomes a comment. ``check`` raises when the file that was really
    opened is not to be written. A link is followed before it is opened, so that one put there meanwhile is not. Raises OSError.
    """
    path = os.path.realpath(path)
    new = not os.path.lexists(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", path)
        check(status)
        size = status.st_size
        glue = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
        data = glue + os.fsencode(line) + b"\n"
        _reserve(fd, size, len(data))
        written = os.write(fd, data)
        if written != len(data):
            _comment_out(fd, data[:written])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.fdatasync(fd)
        crash_point("add.written")
    finally:
        os.close(fd)
    if new:
        sync_folder(os.path.dirname(path))


def _comment_out(fd: int, part: bytes) -> None:
    """Turn ``part``, the incomplete line that was just appended, into a comment of the same length.

    It is not cut off, since another process may have appended lines behind it. Raises OSError.
    """
    start = os.lseek(fd, 0, os.SEEK_CUR) - len(part)  # an appending write leaves the position behind what it wrote
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)  # else Linux appends every write
    if part.startswith(b"\n"):
        start, part = start + 1, part[1:]
    comment = b"#" + part[1:-1] + b"\n"
    os.pwrite(fd, comment[-len(part) :] if part else b"", start)  # a part of one byte becomes an empty line


def _reserve(fd: int, start: int, length: int) -> None:
    """Have the disk keep room behind the end of a file, where the file system can. Raises OSError when it is full."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, _KEEP_SIZE, start, length) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
