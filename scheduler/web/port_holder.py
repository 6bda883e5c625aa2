"""Finds the process or the user that listens on a TCP port, from /proc."""

from __future__ import annotations

import contextlib
import os

from scheduler.store.paths import name_of
from scheduler.system.proc import command_words

_LISTENS = "0A"


def holder_of(port: int) -> str:
    """Return who listens on a port: ``pid 4711 (COMMAND)``, or ``user ann`` if the pid is hidden.

    Return an empty text if nobody listens on the port.
    """
    found = [entry for table in ("tcp", "tcp6") for entry in _listening(table, port)]
    for _, inode in found:
        pid = _process_with(f"socket:[{inode}]")
        if pid:
            return f"pid {pid} ({_command(pid)})"
    return f"user {name_of(found[0][0])}" if found else ""


def _listening(table: str, port: int) -> list[tuple[int, str]]:
    """Return (uid, inode) of the sockets that listen on the port. ``table``: ``tcp`` or ``tcp6``."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/net/{table}", encoding="ascii") as stream:
        for line in list(stream)[1:]:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                found.append((int(words[7]), words[9]))
    return found


def _process_with(link: str) -> int:
    """Return the pid of a process that has a socket open, or 0 if none is found.

    ``link``: the socket as it appears in `/proc/PID/fd`. Only processes of this user can be inspected.
    """
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                for fd in os.listdir(f"/proc/{name}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/{name}/fd/{fd}") == link:
                            return int(name)
    return 0


def _command(pid: int) -> str:
    """Return the first words of a process's command, with secrets masked; ``?`` if it cannot be read."""
    from scheduler.core.secrets import words_without_secrets

    with contextlib.suppress(OSError):
        words = [word.decode("utf-8", "replace") for word in command_words(pid, 4096)]
        return " ".join(words_without_secrets(words)).strip()[:80]
    return "?"
