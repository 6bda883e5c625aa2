"""Turns each new line of a watched file into a job, a repetition of a job, or a refused line."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from scheduler.core.errors import DECIDE_ANEW, Refused, SchedulerError, StoreTrouble, UsageError
from scheduler.core.file_offsets import Batch, FileMark, LineRead, Refusal
from scheduler.core.gpu import Gpu
from scheduler.core.identity import identity_of
from scheduler.core.job import Event, Job, JobSpec, JobState
from scheduler.core.log_names import user_logs
from scheduler.core.model_table import ModelTable, booking_memory, need_of, with_need_notes
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import class_for, remedy
from scheduler.intake.jobs_file import LineContext
from scheduler.intake.parsers import Parser
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows

MOST_KNOWN = 10_000  # refusals that are remembered as logged
LONGEST_REASON = 3000
JUDGED_FOR = "refused_for:"  # key in `meta`, before the file's path: the GPUs for which refused lines were last read


@dataclass(slots=True)
class IngestResult:
    """The result of reading lines in one pass: jobs to queue, events to record, and facts to log."""

    jobs: list[Job] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    repeated: list[tuple[str, int, Job]] = field(default_factory=list)  # file, line number, the job it repeats
    changed: list[Job] = field(default_factory=list)  # waiting jobs whose line was edited
    left_out: list[str] = field(default_factory=list)  # why the rest of a replaced file is not read
    left_for_start: set[int] = field(default_factory=set)  # rows of requests that were made while no scheduler ran


@dataclass(slots=True)
class BatchState:
    """Data that is needed while the lines of one batch are recorded.

    ``next_id``: the id of the next new job. ``counted``, ``repeated``: identities (`core/identity.py`) of the jobs in these
    lines. The store counts how many lines each identity has, and updates these counts once for the whole batch.
    """

    next_id: int
    counted: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LineOwner:
    """The user of a watched file in a scheduler of several users. ``folder``: where relative paths of its lines start."""

    uid: int
    user: str
    folder: str
    home: str

    def owned(self, spec: JobSpec) -> JobSpec:
        """Return the spec of a line as a job of this user. Raises Refused if the user may not submit it."""
        if spec.on:
            raise Refused(
                "only an administrator may submit a job that takes GPUs beside all other jobs (on=)",
                do="name the allowed GPUs in the fifth field",
            )
        return replace(spec, uid=self.uid, user=self.user, log_dir=spec.log_dir or user_logs(self.home))


@dataclass(frozen=True, slots=True)
class Reader:
    """Records batches of lines of one file in the store.

    ``table``: the current model table; ``fleet``: the current ledger. ``memory_mib``: the setting `min_free_mem_mb`. If
    the line of a job does not say how much of a GPU the job needs, the job books this many MiB of GPU memory. If the
    setting is 0, the model table gives the need. ``owner``: the user of the file, in a scheduler of several users.
    """

    parse: Parser
    line_context: LineContext
    table: ModelTable
    fleet: Fleet
    known_refusals: set[tuple[str, str]]  # (hash of the line, reason) already logged
    memory_mib: int = 0
    owner: LineOwner | None = None

    def take(self, connection: sqlite3.Connection, batch: Batch, now: float, out: IngestResult) -> None:
        """Record the jobs, refused lines and new reading position of a batch. Raises StoreTrouble, sqlite3.Error."""
        path = batch.mark.path
        if batch.restart:
            kept.start_recount(connection, path)
        if batch.again:
            kept.forget_refused(connection, path, [line.number for line in batch.lines])
            rows.set_meta(connection, JUDGED_FOR + path, batch.again)
        replaying = batch.restart or batch.mark.replaying
        state = BatchState(rows.last_id(connection) + 1)
        for line in batch.lines:
            try:
                self._line(connection, path, line, replaying, now, out, state, again=bool(batch.again))
            except (StoreTrouble, sqlite3.Error):
                raise
            except Exception as error:  # noqa: BLE001  an error in one line must not stop the others
                self._refuse(connection, path, line, error, now, out)
        kept.count_lines(connection, path, state.counted)
        kept.count_repeated(connection, path, state.repeated)
        if batch.settled:
            kept.end_recount(connection, path)
        if batch.left_out:
            out.left_out.append(batch.left_out)
        kept.save_mark(connection, batch.mark)

    def _refuse(
        self, connection: sqlite3.Connection, path: str, line: LineRead, error: Exception, now: float, out: IngestResult
    ) -> None:
        reason = (
            str(error)
            if isinstance(error, SchedulerError)
            else f"internal error of gpujob, please report it: {error!r}"
        )
        refusal = Refusal(path, line.number, line.text, _shortened(reason), now)
        kept.refuse(connection, refusal)
        said = (_hash(line.text), refusal.reason)
        if said not in self.known_refusals:
            if len(self.known_refusals) >= MOST_KNOWN:
                self.known_refusals.clear()  # they are logged once more, and the memory has a bound
            self.known_refusals.add(said)
            out.refusals.append(refusal)

    def _line(
        self,
        connection: sqlite3.Connection,
        path: str,
        line: LineRead,
        replaying: bool,
        now: float,
        out: IngestResult,
        state: BatchState,
        again: bool = False,
    ) -> None:
        if line.problem:
            raise UsageError(line.problem)
        parsed = self.parse(line.text, self.line_context, f"{os.path.basename(path)}:{line.number}")
        if parsed is None:
            return
        spec = parsed.spec if self.owner is None else self.owner.owned(parsed.spec)
        spec = booking_memory(spec, self.memory_mib, read=bool(self.fleet.admission.cards))
        need, notes = need_of(spec, self.table, self.fleet.managed)
        kind = class_for(need, spec.allowed, spec)
        never = self.fleet.can_ever_hold(kind)
        if never:
            raise UsageError(never, do=remedy(kind))
        for parent in (*spec.after, *spec.after_ok):
            if rows.get(connection, parent) is None:
                raise UsageError(f"cannot wait for job {parent}: there is no such job", do="see gpujob jobs")
        identity = identity_of(spec)
        count, is_new = 1, True
        if replaying or again:
            count, before = kept.count_line(connection, path, identity)
            is_new = count > before if replaying else count == 1
            if again and not is_new:  # an equal line of the file has already become a job
                state.repeated.append(identity)
                return
        else:
            state.counted.append(identity)
        if is_new:
            try:
                job = rows.insert(connection, spec, need, identity, (*parsed.notes, *notes), now, state.next_id)
            except sqlite3.IntegrityError:
                state.repeated.append(identity)
                out.repeated.append((path, line.number, self._blocker(connection, identity)))
            else:
                state.next_id += 1
                out.jobs.append(job)
            return
        blocker = rows.blocker_of(connection, identity)
        if blocker is None or count != 1 or blocker.state is not JobState.PENDING:
            return
        spec = _with_edits(blocker.spec, spec)
        if not _differs(blocker.spec, spec):
            return
        if spec.priority != blocker.spec.priority:  # else the job keeps the priority that a swap gave it
            blocker.priority = spec.priority
        blocker.spec, (blocker.need, notes) = spec, need_of(spec, self.table, self.fleet.managed)
        blocker.notes = with_need_notes(blocker.notes, notes)
        blocker.allowed = spec.allowed
        rows.respec(connection, blocker)
        rows.save(connection, [blocker])
        out.changed.append(blocker)
        out.events.append(Event(blocker.id, now, "changed", {"by": spec.origin}))

    @staticmethod
    def _blocker(connection: sqlite3.Connection, identity: str) -> Job:
        """Return the job that prevents a new job with this identity. Raises StoreTrouble if there is no such job."""
        blocker = rows.blocker_of(connection, identity)
        if blocker is None:
            raise StoreTrouble(f"identity {identity} blocks itself", code=DECIDE_ANEW)
        return blocker


def _with_edits(old: JobSpec, new: JobSpec) -> JobSpec:
    """Return ``new`` (the spec of a changed line), but keep the fields of ``old`` that `gpujob edit` changed."""
    mine: dict[str, Any] = {name: getattr(old, name) for name in old.edited}
    return replace(new, **mine, edited=old.edited)


class OldLines(Protocol):
    """A follower of a watched file (`followed_files.LineFollower`), as far as `refused_lines` uses it."""

    path: str

    @property
    def mark(self) -> FileMark:
        """The read position."""

    def old_lines(self, numbers: Collection[int]) -> list[LineRead] | None:
        """Return lines that were read already; None if they cannot be read now."""


def refused_lines(
    connection: sqlite3.Connection, follower: OldLines, machine: str, known_refusals: set[tuple[str, str]]
) -> Batch | None:
    """Return a batch of the refused lines that are still in the watched file; None if the file cannot be read now.

    Leaves out lines that `recover` listed as undecided, because their jobs may have run.

    ``machine``: text that describes the current GPUs (`machine_text`); it becomes part of the batch.
    ``known_refusals``: a set of refusals that were logged before; the refusals of the returned lines are added to it.
    Raises OSError if a read from the open file fails, and sqlite3.Error if the store cannot be read.
    """
    found = kept.refused_in(connection, follower.path)
    refused = {number: line for number, line in found.items() if not line[1].startswith(kept.UNSURE)}
    lines = follower.old_lines(refused)
    if lines is None:
        return None
    standing = [line for line in lines if line.text[: kept.TEXT_KEPT] == refused[line.number][0]]
    known_refusals |= {(_hash(line.text), refused[line.number][1]) for line in standing}  # already logged
    return Batch(follower.mark, tuple(standing), again=machine)


def machine_text(gpus: Iterable[Gpu], memory_mib: int = 0) -> str:
    """Return a text that describes the GPUs and ``memory_mib``.

    ``memory_mib``: the MiB of GPU memory that a job without a stated need books; 0: none.
    When this text changes, refused lines are read again, because their jobs may be able to run on the current GPUs.
    """
    books = [f"books:{memory_mib}"] if memory_mib else []
    return " ".join([*books, *(f"{gpu.index}:{gpu.server}:{gpu.memory_mib or '-'}" for gpu in gpus)]) or "none"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _shortened(reason: str) -> str:
    """Return the reason. If the reason has more than ``LONGEST_REASON`` characters, leave out its middle."""
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 200]}…{reason[-199:]}"


def _differs(old: JobSpec, new: JobSpec) -> bool:
    return replace(old, origin="", source="") != replace(new, origin="", source="")
