"""New lines of the watched files become jobs, duplicates or refusals, in the loop's transaction."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.identity import identity_of
from scheduler.core.job import Event, Job, JobSpec, JobState
from scheduler.core.lines import Batch, LineRead, Refusal
from scheduler.core.llm import ModelTable, need_of
from scheduler.core.placement import Fleet, JobClass
from scheduler.intake.jobs_csv import Door, Parsed
from scheduler.store import jobs as rows
from scheduler.store import lines as kept

Parser = Callable[[str, Door], Parsed | None]


@dataclass(slots=True)
class Gathered:
    """What came of some batches: jobs to queue, and what is to be said."""

    jobs: list[Job] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    repeated: list[tuple[str, int, Job]] = field(default_factory=list)
    changed: list[Job] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads batches of one file into the store. ``table`` and ``fleet`` are those in force now."""

    parse: Parser
    door: Door
    table: ModelTable
    fleet: Fleet
    known_refusals: set[tuple[str, str]]  # (text, reason) already said

    def take(self, connection: sqlite3.Connection, batch: Batch, now: float, out: Gathered) -> None:
        """Record a batch: its mark, its jobs, its refusals."""
        path = batch.mark.path
        if batch.restart:
            kept.start_recount(connection, path)
        replaying = batch.restart or batch.mark.replaying
        for line in batch.lines:
            try:
                self._line(connection, path, line, replaying, now, out)
            except SchedulerError as error:
                refusal = Refusal(path, line.number, line.text, str(error), now)
                kept.refuse(connection, refusal)
                if (line.text, refusal.reason) not in self.known_refusals:
                    self.known_refusals.add((line.text, refusal.reason))
                    out.refusals.append(refusal)
        if batch.settled:
            kept.end_recount(connection, path)
        kept.save_mark(connection, batch.mark)

    def _line(
        self, connection: sqlite3.Connection, path: str, line: LineRead, replaying: bool, now: float, out: Gathered
    ) -> None:
        if line.problem:
            raise UsageError(line.problem)
        parsed = self.parse(line.text, self.door)
        if parsed is None:
            return
        spec = replace(parsed.spec, origin=f"{os.path.basename(path)}:{line.number}")
        need, notes = need_of(spec, self.table)
        kind = JobClass(need, spec.allowed if need.count else None, spec.vram_mib or 0)
        never = self.fleet.can_ever_hold(kind)
        if never:
            raise UsageError(never, do="ask for less")
        for parent in (*spec.after, *spec.after_ok):
            if rows.get(connection, parent) is None:
                raise UsageError(f"there is no job {parent} to wait for", do="see gpujob jobs")
        identity = identity_of(spec)
        count, before = kept.count_line(connection, path, identity)
        is_new = count > before if replaying else True
        blocker = rows.blocker_of(connection, identity)
        if blocker is None:
            if is_new:
                job = rows.insert(connection, spec, need, identity, (*parsed.notes, *notes), now)
                out.jobs.append(job)
                out.events.append(Event(job.id, now, "accepted", {"from": spec.origin}))
        elif is_new:
            out.repeated.append((path, line.number, blocker))
        elif count == 1 and blocker.state is JobState.PENDING and _differs(blocker.spec, spec):
            blocker.spec, blocker.need = spec, need
            blocker.priority, blocker.allowed = spec.priority, spec.allowed
            rows.respec(connection, blocker)
            rows.save(connection, [blocker])
            out.changed.append(blocker)
            out.events.append(Event(blocker.id, now, "changed", {"by": spec.origin}))


def _differs(old: JobSpec, new: JobSpec) -> bool:
    return replace(old, origin="", source="") != replace(new, origin="", source="")
