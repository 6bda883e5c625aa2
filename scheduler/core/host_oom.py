"""Tells an attempt that the kernel ended because main memory ran out from one that got a plain SIGKILL.

Two signs: the counter of such kills in the attempt's memory cgroup (`runners/supervisor.py: OomCounter`), and
the kernel's own message about the process (`daemon/kernel_kills.py`). Several jobs may share a cgroup, so the
counter alone makes the cause only probable; the message names the process, so it makes the cause certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.failure_signs import HOST_MEMORY, KILLED, NCCL, TRACEBACK
from scheduler.core.job import Failure
from scheduler.core.own_classes import OwnClass
from scheduler.core.traceback_text import LONGEST_SHOWN
from scheduler.core.units import mib_text

SIGKILL = 9
KILL_WORDS = (
    b"Killed process ",
    b"Kill process ",
    b"oom-kill:",
)  # each record that `victims_in` understands has one of them

_KILLED = re.compile(
    r"^(?P<why>[\w() ]*out of memory[\w() ]*: )?Killed process (?P<pid>\d+) \((?P<name>.{0,80}?)\),? (?:UID \d+, )?"
    r"(?P<sizes>total-vm:\d+kB(?:, [a-z]+-rss:\d+kB)+)",
    re.IGNORECASE,
)
_RSS = re.compile(r"-rss:(\d+)kB")
_REASON = re.compile(
    r"^oom-kill:constraint=(?P<by>\w+),|^(?P<why>[\w ]*out of memory)[\w() ]*: Kill process \d+ ", re.IGNORECASE
)
_OF_CHILD = re.compile(r"terminated abruptly|exited unexpectedly|died unexpectedly")
_OF_KILL = re.compile(r"kill|exited unexpectedly|-9\b", re.IGNORECASE)
_PID = re.compile(r"\b\d{2,7}\b")
_ADVICE = (
    "use fewer workers, load less at once, or run fewer such jobs at the same time; where mem= limits it, raise it"
)


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that the kernel ended because memory ran out.

    ``at``: seconds since boot, by the clock of the kernel's log; ``resident_mib``: what it had in memory; ``limited``:
    the limit of a cgroup ran out, not the memory of the machine; ``sentence``: the kernel's words.
    """

    pid: int
    at: float
    resident_mib: int
    limited: bool
    sentence: str


def victims_in(records: Iterable[tuple[float, str]]) -> list[Victim]:
    """Return the processes that the kernel ended because memory ran out.

    ``records``: (seconds since boot, text) of its log. Before Linux 5.3 only the record before tells whether a limit ran
    out; Linux 4.19 and later write a record "oom-kill:", older ones "Kill process … or sacrifice child".
    """
    found: list[Victim] = []
    limited = False
    for at, text in records:
        reason = _REASON.match(text)
        if reason:
            limited = reason["by"] == "CONSTRAINT_MEMCG" or "cgroup" in (reason["why"] or "").lower()
            continue
        line = _KILLED.match(text)
        if line:
            why = line["why"] or ""
            resident = sum(int(size) for size in _RSS.findall(line["sizes"])) >> 10
            sentence = f"{why}Killed process {line['pid']} ({line['name']}) {line['sizes']}"
            found.append(Victim(int(line["pid"]), at, resident, limited or "cgroup" in why.lower(), sentence))
            limited = False
    return found


def was_killed(exit_code: int | None, signal: int | None) -> bool:
    """Return whether SIGKILL ended a command, or a program that a shell ran as its command (exit code 137)."""
    return signal == SIGKILL or exit_code == 128 + SIGKILL


def may_be_host_oom(found: Failure | None, exit_code: int | None) -> bool:
    """Return whether the kernel's word can tell more about the cause of an end than its log does (``found``)."""
    if exit_code == 0:
        return False
    if found is None or found.kind == KILLED:
        return True
    if found.kind == HOST_MEMORY:
        return bool(_OF_KILL.search(found.line))
    return found.kind in (TRACEBACK, NCCL) and bool(_OF_CHILD.search(found.line))


def pids_in(found: Failure | None) -> frozenset[int]:
    """Return the pids of children that the line of a failure names, such as "DataLoader worker (pid 1234) is killed".

    Other numbers of the line are among them: a pid counts only together with the kernel's own message about it.
    """
    if found is None or not _OF_KILL.search(found.line):
        return frozenset()
    return frozenset(int(text) for text in _PID.findall(found.line))


def with_host_oom(
    found: Failure | None,
    exit_code: int | None,
    oom_kills: int,
    victim: Victim | None = None,
    own: Sequence[OwnClass] = (),
) -> Failure | None:
    """Return the cause of an end: a lack of main memory if the kernel tells it and the log no other cause; else ``found``.

    ``oom_kills``: how many processes the kernel ended for it in the attempt's cgroup while the attempt ran; ``victim``:
    one of them that is known to be a process of the attempt; ``own``: the user's classes, which may have another hint.
    """
    if not may_be_host_oom(found, exit_code):
        return found
    if victim is not None:
        ran_out = "the limit of its cgroup" if victim.limited else "the memory of the machine"
        had = mib_text(victim.resident_mib)
        hint = f"the kernel ended it because {ran_out} ran out (its process {victim.pid} had {had}): {_ADVICE}"
        return Failure(HOST_MEMORY, f"kernel: {victim.sentence}"[:LONGEST_SHOWN], _own_hint(own) or hint)
    if oom_kills <= 0 or (found is not None and found.kind == HOST_MEMORY):
        return found
    many = "one process" if oom_kills == 1 else f"{oom_kills} processes"
    hint = (
        "probably the kernel ended it because the memory of the machine or the limit of its cgroup ran out (so it ended "
        f"{many} of this cgroup while the job ran): {_ADVICE}"
    )
    return Failure(HOST_MEMORY, "" if found is None else found.line, _own_hint(own) or hint)


def _own_hint(own: Sequence[OwnClass]) -> str:
    return next((one.hint for one in own if one.name == HOST_MEMORY and one.hint), "")
