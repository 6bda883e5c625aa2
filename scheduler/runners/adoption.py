"""An attempt found after a crash: what its record and its processes say, and what follows from that."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence

from scheduler.core.facts import Ended, Fact, Lost, NeverRan, Started, Unclaimed
from scheduler.core.job import Job, Process
from scheduler.core.recovery import TABLE, Found, Record, Verdict
from scheduler.runners import record
from scheduler.runners.processes import Mark, boot_id, lives, members, seen, stands

# Reasons that pass by themselves; any other errno of a start lasts (not executable, bad interpreter…).
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
    }
)


def start_trouble(job: int, attempt: int, number: int, at: float, stage: str = "") -> NeverRan:
    """The fact for a start that failed with this errno at this stage (one of `record.STAGES`)."""
    where = {
        "log": "its log cannot be opened",
        "record": "its record cannot be written",
        "folder": "its working folder",
        "environment": "its environment cannot be read",
    }
    text = os.strerror(number) if number else "not started"
    if stage in where:
        text = f"{where[stage]}: {text}"
    lasting = stage in ("", "program") and number not in PASSING
    return NeverRan(job, attempt, text, lasting, at)


def not_started(job: int, attempt: int, found: record.Attempt, now: float) -> NeverRan | Unclaimed:
    """The fact for a record that says "never"."""
    if not found.code:
        return Unclaimed(job, attempt)
    stage = record.STAGES[min(found.code // record.A_STAGE, len(record.STAGES) - 1)]
    return start_trouble(job, attempt, found.code % record.A_STAGE, found.ended_at or now, stage)


def ending(job: int, attempt: int, how: str, code: int, at: float, left: Sequence[Process]) -> Ended:
    """The fact for what stands in a record's END field (see `record.py` for ``how`` and ``code``)."""
    note = ""
    if how == "hangup":
        note = "its screen session was ended from outside"
        how, code = ("exit", code) if code < record.BY_SIGNAL else ("signal", code - record.BY_SIGNAL)
        if (how, code) == ("exit", 0):  # it took the end of its terminal well: that is no success all the same
            note += "; the command then ended with exit code 0"
            how, code = "signal", signal.SIGHUP
    exit_code, number = (code, None) if how == "exit" else (None, code)
    return Ended(job, attempt, exit_code, number, at, tuple(left), note=note)


def settle(path: str, job: Job, state_file: str, now: float) -> tuple[Verdict, list[Fact], Process | None]:
    """What to make of ``job``, which the store holds as STARTING, RUNNING or STOPPING.

    Returns the verdict of the table, the facts that follow, and the process to watch when it is adopted. An
    unclaimed attempt is claimed here, so that nobody can start it any more.
    """
    mark = Mark(job.id, job.attempt, state_file)
    while True:
        found = record.read(path)
        process = found.process or job.process
        boot = found.boot or job.boot
        same_boot = boot in ("", boot_id())
        others: list[Process] = []
        living = Found.NOTHING
        if same_boot:
            if process is not None and (stands(process) if found.kind is not Record.ENDED else lives(process)):
                living = Found.LEADER  # a zombie too: its keeper is about to write its ending down
            else:
                others = members(mark, process)
                living = Found.OTHERS if others else Found.NOTHING
            if living is Found.OTHERS and process is None and found.kind is Record.CLAIMED:
                # Claimed, started, killed before the pid was written: who leads its session (in a terminal: its
                # process group) is the command itself.
                number_of = os.getpgid if job.runner == "screen" else os.getsid
                pids = {p.pid for p in others}
                leaders = [p for p in others if _leads(p, number_of) and _parent(p) not in pids]
                if len(leaders) == 1:
                    process, living = leaders[0], Found.LEADER
        verdict = TABLE[job.state, found.kind, same_boot, living]
        if verdict is Verdict.REQUEUE and not record.give_up(path, job, boot_id(), int(now * 1e9)):
            continue  # somebody claimed it a moment ago: look again
        break
    started = found.started_at if found.started_at is not None else now
    facts: list[Fact] = []
    if process is not None and verdict not in (Verdict.REQUEUE, Verdict.NOT_STARTED):
        facts.append(Started(job.id, job.attempt, process, started))
    if verdict is Verdict.REQUEUE:
        facts.append(Unclaimed(job.id, job.attempt))
    elif verdict is Verdict.NOT_STARTED:
        facts.append(not_started(job.id, job.attempt, found, now))
    elif verdict in (Verdict.FINISH, Verdict.FINISH_HOLDING):
        left = members(mark, process, others) if verdict is Verdict.FINISH_HOLDING else ()
        facts.append(ending(job.id, job.attempt, found.how, found.code, found.ended_at or now, left))
    elif verdict in (Verdict.LOST, Verdict.WATCH_LOST):
        facts.append(Lost(job.id, job.attempt, why_lost(found.kind, same_boot), now, tuple(others)))
    return verdict, facts, process


def _parent(process: Process) -> int:
    found = seen(process.pid)
    return found.parent if found is not None else 0


def _leads(process: Process, number_of: Callable[[int], int]) -> bool:
    try:
        return number_of(process.pid) == process.pid
    except ProcessLookupError:
        return False


def why_lost(kind: Record, same_boot: bool) -> str:
    """Why the ending of an attempt cannot be known."""
    if not same_boot:
        if kind is Record.NONE:
            return "the machine was started anew before it was proven that the job had started"
        return "the machine was started anew while it ran"
    return {
        Record.NONE: "its record was removed",
        Record.CLAIMED: "its start was not proven before the scheduler was killed",
        Record.RUNNING: "whoever supervised it was killed while it ran, so nobody learned its exit code",
        Record.BROKEN: "its record cannot be read",
        Record.NEVER_RAN: "its starter says that it never ran, but processes of it were found",
        Record.ENDED: "its ending was overwritten",
    }[kind]
