"""Writes files completely or not at all, usually with mode 0600. To read files, see `system/safe_open.py`."""

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
_ACCESS_LIST = "system.posix_acl_access"


def replace_file(path: str, data: bytes, *, sync: bool = True) -> None:
    """Write ``data`` to a temporary file (0600), sync the file, and rename it to ``path``. Raises OSError.

    A link at ``path`` is replaced, not followed. After an error the old file stays, with one exception: if only the
    sync of the folder failed, the file was already replaced. ``sync``: whether the file and its folder are synced.
    """
    aside = _write_temporary(path, data, sync)
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


def leftover_temporaries(path: str) -> list[str]:
    """Return the paths of temporary files for ``path``. They remain if a process is killed while it writes ``path``."""
    folder, name = os.path.split(path)
    start = f".{name}.new-"
    with contextlib.suppress(OSError):
        return [
            os.path.join(folder, one)
            for one in sorted(os.listdir(folder or "."))
            if one.startswith(start) and one[len(start) :].isdigit()
        ]
    return []


def _write_temporary(path: str, data: bytes, sync: bool, mode: int = 0o600, like: int = -1) -> str:
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.new-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    fd = new_private(aside)
    try:
        write_all(fd, data)
        if like >= 0:
            _take_access(fd, like)
        elif mode != 0o600:
            os.fchmod(fd, mode)
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


def _take_access(fd: int, like: int) -> None:
    """Give a new file the owner, group, mode and access list of another one. Both are descriptors. Raises OSError."""
    old, new = os.fstat(like), os.fstat(fd)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))
    try:
        access_list = os.getxattr(like, _ACCESS_LIST)
    except OSError:
        return  # no access list, or a file system without them
    os.setxattr(fd, _ACCESS_LIST, access_list)


def swap_file(path: str, data: bytes, there: bool, *, sync: bool = False, mode: int = 0o600, like: int = -1) -> int:
    """Put a new file at ``path`` and return a descriptor of the old file, so that the caller can read the old contents.

    ``there``: whether the caller expects a file at ``path``; if not, the result is -1. ``sync``: whether the new file
    is synced; its folder is not synced. ``mode``: mode of the new file; ``like``: descriptor of a file whose owner,
    group, mode and access list the new file gets instead; -1: none. Raises FileNotFoundError if the caller expects a file and there is none, and
    FileExistsError if the caller expects no file and there is one. Raises OSError if the new file cannot be written.
    After an error the old file stays.
    """
    aside = _write_temporary(path, data, sync, mode, like)
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
                    _renameat2()(aside, path, _EXCHANGE)  # put the old file back: it is not plain or not readable
                    raise
        crash_point("state.renamed")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return out


def _open_file(path: str, shown: str) -> int:
    """Return a descriptor of the plain file at ``path``. Raises OSError if the file is not plain or cannot be opened.

    ``shown``: the path that the error names if the file is not plain.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", shown)
    return fd


def _replace_plainly(aside: str, path: str, there: bool) -> int:
    """Replace the file as `swap_file` does, on file systems that cannot exchange two names, such as NFS."""
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
    import ctypes  # imported here: the import is slow, and rarely needed

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

    def rename(old: str, new: str, flags: int) -> None:
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new)
        if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), new)

    return rename


def has_writer(fd: int) -> bool:
    """Return whether a process has this file open for writing. If this cannot be found out, return True.

    The kernel grants a read lease only on a file that no process has open for writing (fcntl(2), F_SETLEASE).
    """
    try:
        # The signal for a broken lease. The default, SIGIO, would kill this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGCHLD)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def write_all(fd: int, data: bytes) -> None:
    """Write ``data`` completely, with several writes if needed. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: str) -> None:
    """Sync a folder, so that files created or renamed in it survive a power failure. Raises OSError."""
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_line(path: str, line: str, check: Callable[[os.stat_result], None] = lambda status: None) -> None:
    """Append one line with a single write, and sync the file. Raises OSError.

    If the last line of the file has no newline, a newline is written first. An incomplete line might be read as another
    job. So disk space is reserved first, and nothing is written if the disk is full. If the write is incomplete all the
    same, the written part is turned into a comment.

    ``check``: called with the stat of the opened file; raises an exception if the file must not be written. Links are
    resolved before the file is opened, so a link that is created later is not followed.
    """
    path = os.path.realpath(path)
    new = not os.path.lexists(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
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
    """Turn ``part``, the incomplete line that was just appended, into a comment of the same length. Raises OSError.

    The file is not truncated, since another process may have appended lines after ``part``.
    """
    start = os.lseek(fd, 0, os.SEEK_CUR) - len(part)  # an append leaves the position after the bytes it wrote
    # With O_APPEND, pwrite would append too.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)
    if part.startswith(b"\n"):
        start, part = start + 1, part[1:]
    comment = b"#" + part[1:-1] + b"\n"
    os.pwrite(fd, comment[-len(part) :] if part else b"", start)  # a part of one byte becomes an empty line


def _reserve(fd: int, start: int, length: int) -> None:
    """Reserve ``length`` bytes of disk space at ``start``, if the file system can. Raises OSError on a full disk."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, _KEEP_SIZE, start, length) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
