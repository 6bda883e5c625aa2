"""Finds all processes of attempts, and sends signals to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.job import Process
from scheduler.system.processes import Mark, Seen, all_pids, environment_of, seen, send

MOST_SWEEPS = 8


class ProcessTable:
    """All processes at one moment, with indexes. One table serves the searches for the processes of many attempts.

    A table does not have processes that started after the table was read. So to find the processes that exist after
    an event, such as the end of a job's main process, use a table that was read after this event.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}
        self._children: dict[int, list[int]] = {}
        self._groups: dict[int, list[int]] = {}  # of sessions, too: pid of the session's or group's leader → pids
        self._marked: dict[tuple[str, ...], dict[bytes, list[tuple[int, frozenset[bytes]]]]] = {}
        for pid in all_pids():
            found = seen(pid)
            if found is not None:
                self.seen[pid] = found
                self._children.setdefault(found.parent, []).append(pid)
                for number in {found.session, found.group}:
                    self._groups.setdefault(number, []).append(pid)

    def has(self, process: Process) -> bool:
        """Return whether this process is in the table. Another process with the same pid does not count."""
        found = self.seen.get(process.pid)
        return found is not None and found.ticks == process.ticks

    def led_by(self, number: int) -> list[Seen]:
        """Return the processes whose session or process group has this number."""
        return [self.seen[pid] for pid in self._groups.get(number, ())]

    def with_descendants(self, pids: Iterable[int]) -> set[int]:
        """Return these pids, and those of all descendants."""
        found: set[int] = set()
        open_pids = list(pids)
        while open_pids:
            pid = open_pids.pop()
            if pid not in found:
                found.add(pid)
                open_pids += self._children.get(pid, ())
        return found

    def carrying(self, mark: Mark) -> list[int]:
        """Return the pids of the live processes that have the attempt's mark in their environment."""
        index = self._marked.get(mark.names)
        if index is None:  # the environments are read once for all attempts
            index = self._marked[mark.names] = {}
            heads = tuple(name.encode() + b"=" for name in mark.names)
            for pid, found in self.seen.items():
                entries = environment_of(pid) if found.alive and pid != os.getpid() else []
                marks = frozenset(entry for entry in entries if entry.startswith(heads))
                for entry in marks:
                    if entry.startswith(heads[0]):
                        index.setdefault(entry, []).append((pid, marks))
        first, *others = mark.lines()
        return [pid for pid, marks in index.get(first, ()) if all(line in marks for line in others)]


def members(
    mark: Mark,
    leader: Process | None,
    known: Iterable[Process] = (),
    *,
    sure: bool = False,
    table: ProcessTable | None = None,
) -> list[Process]:
    """Return all live processes of an attempt, without the calling process.

    ``leader``: main process of the attempt; ``known``: other processes of the attempt. The result has the leader, the
    known processes, the processes in the leader's session or process group, the descendants of all of these, and all
    processes with the mark. ``table``: the processes to search; None: all processes that exist now.

    The leader's pid is the number of its session and group. Once the leader is gone, the kernel may give this pid to
    another process, which may begin a session or group with this number. So if the leader is gone, the processes with
    this session or group number belong to the attempt only if no process has this pid. ``sure`` (for signals): if the
    leader is gone, each process with this session or group number must also have the mark.
    """
    table = table or ProcessTable()
    marked = set(table.carrying(mark))
    mine = {process.pid for process in (*known, *((leader,) if leader else ())) if table.has(process)}
    if leader is not None:
        led = leader.pid in mine
        for found in table.led_by(leader.pid):
            if found.ticks >= leader.ticks:
                if led or (leader.pid not in table.seen and (not sure or found.pid in marked)):
                    mine.add(found.pid)
    mine = table.with_descendants(mine) | marked
    me = os.getpid()
    return [Process(pid, table.seen[pid].ticks) for pid in sorted(mine) if table.seen[pid].alive and pid != me]


@dataclass(frozen=True, slots=True)
class Target:
    """An attempt whose processes get a signal. ``leader``, ``known``: as for `members`; ``hard``: SIGKILL is sent."""

    mark: Mark
    leader: Process | None
    known: tuple[Process, ...] = ()
    hard: bool = False


def signal_all(targets: Iterable[Target], soft: int = signal.SIGTERM) -> list[Process]:
    """Send a signal to every process of these attempts, and return these processes.

    If a target is ``hard``, the signal is SIGKILL, and the search is repeated until it finds no new process, so that a
    child forked in the meantime does not escape. Otherwise each process gets the signal ``soft`` once, and then
    SIGCONT, because a suspended process (SIGSTOP) cannot react to ``soft`` before it continues.
    """
    told: set[Process] = set()
    remaining: list[tuple[Target, set[Process]]] = [(target, set()) for target in targets]
    for _ in range(MOST_SWEEPS):
        if not remaining:
            break
        table = ProcessTable()
        again = []
        for target, before in remaining:
            found = set(members(target.mark, target.leader, target.known, sure=True, table=table)) - before
            for process in sorted(found, key=lambda process: process.pid):
                send(process, signal.SIGKILL if target.hard else soft)
                if not target.hard:
                    send(process, signal.SIGCONT)
            told |= found
            if target.hard and found:  # else programs may take a second SIGTERM for another request
                again.append((target, before | found))
        remaining = again
    return sorted(told, key=lambda process: process.pid)
