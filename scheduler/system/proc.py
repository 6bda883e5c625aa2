"""Reads values of processes from /proc, without interpreting them.

`system/processes.py` interprets the values. `supervisor.py` has its own functions for this purpose, because it must
not import anything of the program.
"""

from __future__ import annotations

import os

PIECE = 1 << 16  # bytes read at a time; most files of /proc are shorter

_boot: list[str] = []  # holds the id after the first read


def boot_id() -> str:
    """Return the kernel's id of the current boot, which is unique among all boots of all machines. Raises OSError."""
    if not _boot:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            _boot.append(stream.read().strip())
    return _boot[0]


def whole(path: str) -> bytes:
    """Return the contents of a file of /proc. Raises OSError. It makes three system calls less than `open`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = piece = os.read(fd, PIECE)
        while piece:
            piece = os.read(fd, PIECE)
            data += piece
        return data
    finally:
        os.close(fd)


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third field on. The first two fields are pid and name.

    So the state of the process has index 0, and its start time has index 19. Raises OSError if the pid is free.
    """
    # The name before them is in parentheses, and may itself contain parentheses and blanks.
    return whole(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def command_words(pid: int, most: int = -1) -> list[bytes]:
    """Return the words of a process's command line. A zombie has one empty word. Raises OSError.

    ``most``: maximum number of bytes to read; -1: no maximum.
    """
    with open(f"/proc/{pid}/cmdline", "rb") as stream:
        return stream.read(most).removesuffix(b"\0").split(b"\0")


def environment_entries(pid: int) -> list[bytes]:
    """Return the environment with which a process was started, as NAME=VALUE entries. Raises OSError."""
    return [entry for entry in whole(f"/proc/{pid}/environ").split(b"\0") if entry]


def ticks_of(pid: int) -> int:
    """Return the start time of a live process in clock ticks since boot; 0 if the pid is free or belongs to a zombie.

    The kernel may reuse a pid; pid and start time together identify a process.
    """
    try:
        fields = stat_fields(pid)
    except OSError:
        return 0
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])
