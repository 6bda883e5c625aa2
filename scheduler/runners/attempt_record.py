"""Attempt records: one private file per attempt. Creating the file exclusively claims the attempt.

The fields are written in place. A new record has blanks in each field that is not known yet, so that the ending needs
no new disk space and a full disk cannot lose it. Layout (offset, field, contents, length in bytes)::

    0     HEAD    "gpujob record 1\\n"                                    16
    16    PID     "pid P ticks T at NS supervisor K boot B oom_kills M\\n", blank until known   160
    176   END     "exit C at NS sum S oom_kills M sum S\\n" or "signal N …", "hangup N …", "never N …"   96
    272   SPEC    one line of JSON: the job and its allocation, enough to rebuild the store
    …     PLACE   on a cluster: one line of JSON: node, gpus (ids there), engine_job, partition

Times NS are nanoseconds since 1970 (UTC). "hangup N": the terminal was closed before the job ended; N is the exit
code, or 1000 + the signal. "never N": the command did not start; N is 1000 * stage + errno (stage: an index of
STAGES), or 0 if the attempt was given up before its command started. "oom_kills M" in PID: the kernel's counter of
processes that it ended in this cgroup because memory ran out, before the start (may be missing); in END: by how much it
rose while the attempt ran (missing: it did not, or is unknown).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
from dataclasses import dataclass
from typing import Any

from scheduler.core.job import Job, Process
from scheduler.core.recovery import Record
from scheduler.system.private_files import new_private
from scheduler.system.safe_open import plain

HEAD = b"gpujob record 1\n"
PID_AT, PID_SIZE = 16, 160
END_AT, END_SIZE = 176, 96
SPEC_AT = 272
DRAFT = ".draft"  # added to the path of a record that is not complete yet
STAGES = ("program", "record", "log", "environment", "folder", "caller", "gzip")
A_STAGE = 1000
BY_SIGNAL = 1000
LONGEST_SPEC = 64 << 20

_PID = re.compile(rb"pid (\d+) ticks (\d+) at (\d+) (?:supervisor|keeper) (\d+) boot (\S+)(?: oom_kills (\d+))?")
_END = re.compile(rb"(exit|signal|hangup|never) (\d+) at (\d+) sum (\d+)")
_OOM_KILLS = re.compile(rb" oom_kills (\d+) sum (\d+)")


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Contents of an attempt record. ``how`` and ``code``: word and number of the END field (see the layout above).

    ``process``: the leader; ``boot``: boot id; ``started_at`` and ``ended_at``: seconds since 1970 (UTC).
    ``oom_kills_before`` and ``oom_kills``: the kernel's counter before the start (-1: unknown), and its rise since.
    """

    kind: Record
    process: Process | None = None
    boot: str = ""
    started_at: float | None = None
    how: str = ""  # exit, signal, hangup, never
    code: int = 0
    ended_at: float | None = None
    oom_kills_before: int = -1
    oom_kills: int = 0


def blank(job: Job, boot: str) -> bytes:
    """Return the bytes of a new record, with blank PID and END fields and the SPEC field of ``job``."""
    spec = {
        "id": job.id,
        "attempt": job.attempt,
        "boot": boot,
        **({} if job.runner_kind.owns_gpus else {"runner": job.runner}),
        "gpus": list(job.gpus),
        "need": [job.need.count, job.need.parts, job.need.profile],
        "priority": job.priority,
        "allowed": None if job.allowed is None else list(job.allowed),
        "identity": job.identity,
        "submitted_at": job.submitted_at,
        "log": job.log,
        "spec": job.spec.as_dict(),
    }
    text = json.dumps(spec, ensure_ascii=True).encode()
    return HEAD + b" " * (PID_SIZE - 1) + b"\n" + b" " * (END_SIZE - 1) + b"\n" + text + b"\n"


def checksum(text: bytes) -> int:
    """Return a checksum that shows whether the END field was written completely.

    `supervisor.py` has its own copy of this function, because it must not import anything of the package.
    """
    total = 7
    for byte in text:
        total = (total * 31 + byte) % 1000003
    return total


def end_line(how: str, code: int, at_ns: int, oom_kills: int = 0) -> bytes:
    """Return the bytes of the END field. ``at_ns``: nanoseconds since 1970 (UTC); ``oom_kills``: see the layout above."""
    body = f"{how} {code} at {at_ns}".encode()
    body += b" sum %d" % checksum(body)
    if oom_kills:
        body += b" oom_kills %d" % oom_kills
        body += b" sum %d" % checksum(body)
    return body.ljust(END_SIZE - 1) + b"\n"


def ending_words(exited: bool, number: int, hangup: bool = False) -> tuple[str, int]:
    """Return ``how`` and ``code`` of an END field.

    ``exited``: True if the job exited by itself, False if a signal ended it. ``number``: exit code or signal.
    ``hangup``: the terminal was closed before the job ended.
    """
    if hangup:
        return "hangup", number if exited else BY_SIGNAL + number
    return "exit" if exited else "signal", number


def meaning(how: str, code: int) -> tuple[int | None, int | None, str]:
    """Return (exit code or None, signal or None, note for the user) for ``how`` and ``code`` of an END field."""
    note = ""
    if how == "hangup":
        note = "its screen session was closed while the job ran"
        how, code = ("exit", code) if code < BY_SIGNAL else ("signal", code - BY_SIGNAL)
        if (how, code) == ("exit", 0):  # the job handled the SIGHUP and ended with 0, which is no success
            note += "; the command then ended with exit code 0, which is not counted as success"
            how, code = "signal", int(signal.SIGHUP)
    return (code, None, note) if how == "exit" else (None, code, note)


def read(path: str) -> AttemptRecord:
    """Read the record at ``path``.

    The result's ``kind`` is Record.NONE if there is no file, Record.BROKEN if the file is unreadable, and
    Record.CLAIMED if the record is incomplete. Raises OSError if the process has no free descriptor or memory.
    """
    try:
        with open(path, "rb", opener=plain) as stream:
            data = stream.read(SPEC_AT)
    except FileNotFoundError:
        return AttemptRecord(Record.NONE)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # the record itself may be intact
        return AttemptRecord(Record.BROKEN)
    if len(data) < SPEC_AT:
        return AttemptRecord(Record.CLAIMED)
    if not data.startswith(HEAD):
        return AttemptRecord(Record.BROKEN)
    pid = _PID.match(data, PID_AT)
    process, boot, started, before = None, "", None, -1
    if pid:
        process, boot = Process(int(pid[1]), int(pid[2])), pid[5].decode()
        started, before = int(pid[3]) / 1e9, int(pid[6] or -1)
    end = _END.match(data, END_AT)
    if end:
        body = data[END_AT : end.end()].rsplit(b" sum ", 1)[0]
        if checksum(body) == int(end[4]):
            how = end[1].decode()
            kind = Record.NEVER_RAN if how == "never" else Record.ENDED
            kills = _oom_kills(data, end.end())
            return AttemptRecord(kind, process, boot, started, how, int(end[2]), int(end[3]) / 1e9, before, kills)
    kind = Record.RUNNING if process else Record.CLAIMED
    return AttemptRecord(kind, process, boot, started, oom_kills_before=before)


def _oom_kills(data: bytes, at: int) -> int:
    """Return the number behind the first checksum of the END field, which ends at ``at``; 0 if there is none."""
    found = _OOM_KILLS.match(data, at)
    whole = found is not None and checksum(data[END_AT : found.end(1)]) == int(found[2])
    return int(found[1]) if found is not None and whole else 0


def spec_of(path: str) -> dict[str, Any]:
    """Return the SPEC field of the record at ``path`` (see `blank`). Raises OSError or ValueError."""
    with open(path, "rb", opener=plain) as stream:
        stream.seek(SPEC_AT)
        data: dict[str, Any] = json.loads(stream.readline(LONGEST_SPEC))
    return data


def place_of(path: str) -> dict[str, str]:
    """Return the PLACE field of the record of an attempt on a cluster; empty if there is none. Raises OSError."""
    with open(path, "rb", opener=plain) as stream:
        stream.seek(SPEC_AT)
        stream.readline(LONGEST_SPEC)
        try:
            found = json.loads(stream.readline(1 << 16) or b"{}")
        except ValueError:
            return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def give_up(path: str, job: Job, boot: str, at_ns: int) -> bool:
    """Claim an attempt and record that it never ran, so that no process can start it.

    Return False if the attempt was already claimed. Raises OSError if the record cannot be written; the attempt then
    stays unclaimed.
    """
    return claim_unstarted(path, blank(job, boot), at_ns)


def claim_unstarted(path: str, data: bytes, at_ns: int) -> bool:
    """Do the same as `give_up`. ``data``: the bytes of a new record (`blank`)."""
    data = data[:END_AT] + end_line("never", 0, at_ns) + data[SPEC_AT:]
    # The file gets its name when it is complete: if this process dies before, the attempt stays unclaimed. A claim
    # without contents would count as an attempt that may have run.
    draft = path + DRAFT
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # of a daemon that died here
        _write_new(draft, data)
        try:
            _name(draft, path, data)
        finally:
            os.unlink(draft)
    except FileExistsError:
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    return True


def _name(draft: str, path: str, data: bytes) -> None:
    """Give the file ``draft`` a second name, ``path``.

    On a file system without hard links, write ``data`` (the contents of ``draft``) to a new file ``path``. Raises
    FileExistsError if ``path`` exists, and another OSError if the disk fails.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        _write_new(path, data)  # a file system without hard links


def _write_new(path: str, data: bytes) -> None:
    """Create the private file ``path`` with the contents ``data``. Create the file's folder if it is missing.

    If the file cannot be written completely, it is removed, and OSError is raised.
    """
    fd = new_private(path, make_folder=True)  # the folder may have been removed
    with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as stream:
        try:
            if stream.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.unlink(path)
            raise


def write_end(path: str, how: str, code: int, at_ns: int, *, sync: bool, oom_kills: int = 0) -> None:
    """Write the END field in place. ``sync``: wait until the field is on the disk. Raises OSError."""
    fd = plain(path, os.O_WRONLY)
    try:
        os.pwrite(fd, end_line(how, code, at_ns, oom_kills), END_AT)
        if sync:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def write_pid(path: str, process: Process, boot: str, at_ns: int, supervisor: int) -> None:
    """Write the PID field in place. Raises OSError.

    ``supervisor``: pid of the job's parent; 0 if the parent is dead.
    """
    fd = plain(path, os.O_WRONLY)
    try:
        line = f"pid {process.pid} ticks {process.ticks} at {at_ns} supervisor {supervisor} boot {boot}".encode()
        os.pwrite(fd, line.ljust(PID_SIZE - 1) + b"\n", PID_AT)
    finally:
        os.close(fd)
