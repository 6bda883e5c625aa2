"""Settles attempts found after a crash: an attempt runs, has ended, or is lost.

The decision follows from the attempt record and the processes of the attempt.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scheduler.core.job import Job, JobState, Process
from scheduler.core.observations import Ended, Lost, NeverRan, Observation, Started, Unclaimed
from scheduler.core.recovery import TABLE, Found, Record, Verdict
from scheduler.runners import attempt_record
from scheduler.system.crash_points import crash_point
from scheduler.system.proc import boot_id
from scheduler.system.process_search import members
from scheduler.system.processes import (
    JOB_NAMES,
    Mark,
    is_supervisor,
    lives,
    seen,
    seen_as,
    stands,
    starter_lives,
    zombie_status,
)

# Errors of a start that may be temporary; all other errors are permanent (not executable, bad interpreter…).
PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ETXTBSY,
        errno.EROFS,
        errno.ETIMEDOUT,  # the caller in the foreground may be stopped
    }
)

SETTLED = (Record.ENDED, Record.NEVER_RAN)  # such a record is complete

# Errors of a caller's socket when the caller is gone.
GONE = (errno.ECONNREFUSED, errno.ENOENT, errno.ESRCH, errno.ECONNRESET)


def start_trouble(job: int, attempt: int, number: int, at: float, stage: str = "") -> NeverRan:
    """Return the observation for a start that failed with errno ``number`` (0: there is no errno).

    ``stage``: step of the start that failed, one of `attempt_record.STAGES`, "packet" (a long command that is passed
    to the supervisor in a file), or "session" in screen mode; empty if unknown. ``at``: seconds since 1970 (UTC).
    """
    where = {
        "log": "its log cannot be opened",
        "packet": "its command and environment cannot be passed to the supervisor",
        "record": "its attempt record cannot be written",
        "folder": "its working folder cannot be entered",
        "environment": "its environment cannot be read",
        "caller": "the command that waits for the job did not pass its stdin, stdout and stderr to the job",
        "gzip": "its log cannot be compressed",
    }
    text = os.strerror(number) if number else "not started"
    if stage in where:
        text = f"{where[stage]}: {text}"
    if stage == "caller" and number in GONE:
        text = "the command that waited for the job in the foreground has ended"
    if stage == "log" and number == errno.EEXIST:
        text = "another scheduler has just created a log of the same name in this folder"
    lasting = stage in ("", "program", "caller", "gzip") and number not in PASSING
    return NeverRan(job, attempt, text, lasting, at)


def not_started(job: int, attempt: int, found: attempt_record.AttemptRecord, now: float) -> NeverRan | Unclaimed:
    """Return the observation for a record with the ending "never".

    The observation is Unclaimed if the attempt was given up before its start, NeverRan if its start failed.
    """
    if not found.code:
        return Unclaimed(job, attempt)
    stage = attempt_record.STAGES[min(found.code // attempt_record.A_STAGE, len(attempt_record.STAGES) - 1)]
    return start_trouble(job, attempt, found.code % attempt_record.A_STAGE, found.ended_at or now, stage)


def ending(
    job: int, attempt: int, how: str, code: int, at: float, left: Sequence[Process], oom_kills: int = 0
) -> Ended:
    """Return the observation that an attempt ended.

    ``how``, ``code``, ``oom_kills``: contents of the END field (see `attempt_record`); ``at``: seconds since 1970 (UTC);
    ``left``: leftover processes.
    """
    exit_code, number, note = attempt_record.meaning(how, code)
    return Ended(job, attempt, exit_code, number, at, tuple(left), note=note, oom_kills=oom_kills)


def read_ending(
    path: str, process: Process | None, state_file: str, *, terminal: bool, impatient: bool = False
) -> attempt_record.AttemptRecord:
    """Return the attempt record at ``path``. If it has no ending, try to read the ending from the dead leader.

    The leader (``process``) is a child of a supervisor or shim, which records the ending before it reaps the leader.
    If the supervisor or shim was killed, the kernel gives the leader a new parent. In many containers the new parent is
    process 1, which reaps nothing. The dead leader then stays a zombie, and its exit code can still be read.

    While the supervisor or shim lives, the zombie is not read, because the supervisor or shim will record the ending.
    Exception: if ``impatient`` is true, the zombie is read, because the supervisor or shim may be suspended by SIGSTOP.
    ``state_file``: path that identifies the supervisor or shim. ``terminal``: the job ran in a screen session; if the
    shim was killed, the session has ended too. Raises OSError if this process has no free descriptor or memory.
    """
    there = seen_as(process) if process is not None else None
    found = attempt_record.read(path)  # read after `seen_as`: a parent that was dead then has recorded all it could
    if process is None or there is None or there.alive or found.kind in SETTLED:
        return found
    supervised = is_supervisor(there.parent, state_file)
    status = zombie_status(process) if impatient or not supervised else None
    if status is None:
        return found
    number = os.waitstatus_to_exitcode(status)
    how, code = attempt_record.ending_words(number >= 0, abs(number), hangup=terminal and not supervised)
    return replace(found, kind=Record.ENDED, how=how, code=code)


@dataclass(frozen=True, slots=True)
class Look:
    """State of an attempt that was found after a crash: its record, its leader, and which of its processes live.

    ``process``: the leader; None if the leader is unknown. ``same_boot``: the machine was not restarted since the
    attempt started. ``others``: live processes of the attempt that were found in /proc.
    """

    record: attempt_record.AttemptRecord
    process: Process | None
    same_boot: bool
    living: Found
    others: tuple[Process, ...] = ()

    def verdict(self, state: JobState) -> Verdict:
        """Return what to do with the attempt, from `core.recovery.TABLE`; ``state``: state of the job in the store."""
        return TABLE[state, self.record.kind, self.same_boot, self.living]


def look(path: str, job: Job, state_file: str, names: tuple[str, str, str] = JOB_NAMES) -> Look:
    """Inspect the last attempt of ``job``. Raises OSError if the attempt record cannot be read.

    ``path``: path of the attempt record; ``names``: environment variables of the attempt's mark (see
    `system.processes.Mark`).
    """
    mark = Mark(job.id, job.attempt, state_file, names)
    while True:
        found = attempt_record.read(path)
        process = found.process or job.process
        if (found.boot or job.boot) not in ("", boot_id()):
            return Look(found, process, False, Found.NOTHING)
        found = read_ending(path, process, state_file, terminal=job.runner_kind.terminal)
        if process is None and found.process is not None:
            continue  # the attempt was started between the two reads of its record
        if process is not None and (stands(process) if found.kind is not Record.ENDED else lives(process)):
            # A zombie counts, too: its supervisor is about to record the ending.
            return Look(found, process, True, Found.LEADER)
        others = tuple(members(mark, process))
        leader = _leader_among(others, job) if process is None and found.kind is Record.CLAIMED else None
        if leader is not None:
            return Look(found, leader, True, Found.LEADER, others)
        may_go_on = found.kind is Record.CLAIMED or (found.kind is Record.BROKEN and not others)
        if may_go_on and starter_lives(job.attempt_key, state_file):
            return Look(found, process, True, Found.STARTER)
        if found.kind in SETTLED or attempt_record.read(path).kind is found.kind:
            return Look(found, process, True, Found.OTHERS if others else Found.NOTHING, others)
        # The starter changed the record while the processes were searched: inspect both again.


def _leader_among(others: Sequence[Process], job: Job) -> Process | None:
    """Return the leader of an attempt whose record has no pid.

    The pid is missing if the supervisor or shim was killed before it recorded the pid. The leader is the only process
    in ``others`` that leads its session (in screen mode: its process group) and whose parent is not in ``others``.
    Return None if there is no such process, or if there are several.
    """
    number_of = os.getpgid if job.runner_kind.terminal else os.getsid
    pids = {process.pid for process in others}
    leaders = [process for process in others if _leads(process, number_of) and _parent(process) not in pids]
    return leaders[0] if len(leaders) == 1 else None


def settle(
    path: str, job: Job, state_file: str, now: float, names: tuple[str, str, str] = JOB_NAMES
) -> tuple[Verdict, list[Observation], Process | None]:
    """Settle the attempt of ``job``, which the store shows as STARTING, RUNNING or STOPPING.

    Return the verdict of `core.recovery.TABLE`, the observations that follow from the verdict, and the leader (None:
    unknown). If the attempt still runs, the caller must watch the leader. An unclaimed attempt is claimed here, so that
    no supervisor or shim can start it any more. ``now``: seconds since 1970 (UTC). Raises OSError.
    """
    while True:
        seen_ = look(path, job, state_file, names)
        verdict = seen_.verdict(job.state)
        if verdict is not Verdict.REQUEUE:
            break
        if attempt_record.give_up(path, job, boot_id(), int(now * 1e9)):
            crash_point("fence.taken")
            break
        # Its starter has just claimed the attempt: inspect the attempt again.
    found, process = seen_.record, seen_.process
    started = found.started_at if found.started_at is not None else now
    observations: list[Observation] = []
    if process is not None and verdict not in (Verdict.REQUEUE, Verdict.NOT_STARTED, Verdict.WAIT):
        observations.append(Started(job.id, job.attempt, process, started))
    if verdict is Verdict.REQUEUE:
        observations.append(Unclaimed(job.id, job.attempt))
    elif verdict is Verdict.NOT_STARTED:
        observations.append(not_started(job.id, job.attempt, found, now))
    elif verdict in (Verdict.FINISH, Verdict.FINISH_HOLDING):
        mark = Mark(job.id, job.attempt, state_file, names)
        left = members(mark, process, seen_.others) if verdict is Verdict.FINISH_HOLDING else ()
        at = found.ended_at or now
        observations.append(ending(job.id, job.attempt, found.how, found.code, at, left, found.oom_kills))
    elif verdict in (Verdict.LOST, Verdict.WATCH_LOST):
        observations.append(Lost(job.id, job.attempt, why_lost(found.kind, seen_.same_boot), now, seen_.others))
    return verdict, observations, process


def _parent(process: Process) -> int:
    found = seen(process.pid)
    return found.parent if found is not None else 0


def _leads(process: Process, number_of: Callable[[int], int]) -> bool:
    try:
        return number_of(process.pid) == process.pid
    except ProcessLookupError:
        return False


def why_lost(kind: Record, same_boot: bool) -> str:
    """Return the reason, as shown to users, why the ending of an attempt is unknown."""
    if not same_boot:
        if kind is Record.NONE:
            return "the machine was rebooted before the start of the job was recorded"
        return "the machine was rebooted while the job ran"
    return {
        Record.NONE: "its attempt record was removed",
        Record.CLAIMED: "its supervisor was killed before it recorded the start",
        Record.RUNNING: "its supervisor was killed before it recorded the exit code",
        Record.BROKEN: "its attempt record cannot be read",
        Record.NEVER_RAN: "its attempt record says that it never ran, but processes of it were found",
        Record.ENDED: "the part of its attempt record that tells how it ended was overwritten",
    }[kind]
