"""Checks of the order of system calls: data must be synced before a job is started or an id is printed."""

from __future__ import annotations

import marshal
import re
from collections.abc import Sequence
from pathlib import Path

from tests.breaking.tracing import Call, bytes_of, calls

CALLS = "pwrite64,write,fsync,fdatasync,sendto,execve,openat"
STORE = ("store.db", "store.db-wal")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def unsynced_starts(log: Path, job: str) -> tuple[list[str], int]:
    """Return an error for each start that came too early, and the number of starts that were sent to a supervisor.

    A start comes too early if the daemon sends it after a write to the store and before the sync of this write. It is
    also an error if a job's command is executed before its start was sent. ``job``: the program that all jobs run.
    """
    wrong, sent = [], 0
    dirty: dict[str, int] = {}  # file of the store → pid that has written and not synced it
    allowed = 0
    for call in calls(log):
        if call.failed:
            continue
        name = Path(call.fd_path).name
        if call.name == "pwrite64" and name in STORE:
            dirty[name] = call.pid
        elif call.name in ("fsync", "fdatasync") and name in STORE:
            dirty.pop(name, None)
        elif call.name == "sendto" and (starts := _starts(_data(call))):
            sent += starts
            allowed += starts
            if held := [name for name, pid in dirty.items() if pid == call.pid]:
                wrong.append(f"a start was sent with {', '.join(held)} unsynced")
        elif call.name == "execve" and job.encode() in _data(call, first=True):
            allowed -= 1
            if allowed < 0:
                wrong.append("a job was executed before its start was sent")
    return wrong, sent


def unsynced_words(log: Path, files: Sequence[str]) -> tuple[list[str], int]:
    """Return an error for each job id that was printed too early, and the number of ids that were printed.

    An id is printed too early if the command that prints it has written to one of ``files`` and not synced this file
    yet. The standard output of the commands must be a file.
    """
    wrong, told = [], 0
    dirty: dict[tuple[int, str], bool] = {}
    for call in calls(log):
        if call.failed:
            continue
        name = Path(call.fd_path).name
        if call.name in ("pwrite64", "write") and name in files:
            dirty[call.pid, name] = True
        elif call.name in ("fsync", "fdatasync"):
            dirty.pop((call.pid, name), None)
        elif call.name == "write" and call.args.startswith("1<\\x2f") and _data(call).strip().isdigit():
            told += 1
            wrong += [f"{name} was not synced before the answer" for pid, name in dirty if pid == call.pid]
    return wrong, told


def syncs_after_failure(log: Path) -> list[str]:
    """Return an error for each start that was sent although it was not certain that the store is on the disk.

    This is not certain after a failed sync of the store's log, until the file of the store itself has been synced
    successfully.
    """
    wrong, suspect = [], False
    for call in calls(log):
        name = Path(call.fd_path).name
        if call.name in ("fsync", "fdatasync") and name == "store.db-wal" and call.failed:
            suspect = True
        elif call.name in ("fsync", "fdatasync") and name == "store.db" and not call.failed:
            suspect = False
        elif call.name == "sendto" and suspect and _starts(_data(call)):
            wrong.append("a start was sent on a log whose sync had failed")
    return wrong


def _starts(packet: bytes) -> int:
    """Return the number of starts in a packet to the supervisor; 0 for other data.

    The starts are counted in the unpacked packet. In the packed bytes, the word "start" may stand only once for
    several starts, because marshal writes a reference in place of a repeated word.
    """
    try:
        messages = marshal.loads(packet)
    except (EOFError, ValueError, TypeError):
        return 0  # data for another receiver
    return sum(message[:1] in (("start",), ["start"]) for message in messages) if isinstance(messages, list) else 0


def _data(call: Call, *, first: bool = False) -> bytes:
    found = [bytes_of(match[1]) for match in _STRING.finditer(call.args)]
    return found[0] if first and found else b"".join(found)
