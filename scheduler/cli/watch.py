"""The verb `watch`: has the scheduler of all users read a jobs file of one's own."""

from __future__ import annotations

import os
import sys

from scheduler.client.locate import client_of, system_socket
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.system.private_files import new_private
from scheduler.system.terminal_text import safe

DEFAULT = "~/gpujob/jobs.txt"


def watch(file: str = "", *, stop: bool = False, listed: bool = False) -> int:
    """Begin or end the reading of a jobs file; print what was done and return the exit code 0. Raises SchedulerError.

    ``file``: by default ~/gpujob/jobs.txt, which is created if it does not exist. ``listed``: only print the files that
    are read.
    """
    client = client_of(system_socket())
    if listed:
        if file or stop:
            raise UsageError("--list takes no file and no other option")
        found = client.watched()
        print("\n".join(map(safe, found)) if found else "no jobs file of yours is read; gpujob watch FILE")
        return 0
    path = os.path.abspath(os.path.expanduser(file or DEFAULT))
    if not stop:
        _make(path, named=bool(file))
    client.watch(path, os.path.expanduser("~"), not stop)
    print(
        safe(
            f"{path} is {'not read any more; its jobs continue' if stop else 'read now: each line appended to it is a job'}"
        )
    )
    return 0


def _make(path: str, *, named: bool) -> None:
    """Create the default file if it does not exist. Raises SchedulerError if a named file does not exist."""
    if not _is_missing(path):
        return
    if named:
        raise SchedulerError("there is no such file", where=path, do=f"create it: touch {path}")
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        os.close(new_private(path))
    except OSError as error:
        raise SchedulerError(f"cannot create the file: {error.strerror}", where=path) from None
    print(safe(f"gpujob: {path} was created"), file=sys.stderr)


def _is_missing(path: str) -> bool:
    """Return whether there is no such file. Raises SchedulerError if its folder cannot be entered."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise SchedulerError(f"cannot be read: {error.strerror}", where=path) from None
    return False
