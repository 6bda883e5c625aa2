"""Writes the state file, and the reasons why jobs wait, when the state has changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.gpu import WHOLE, gpu_state, ids_of
from scheduler.core.job import JobState, Reason
from scheduler.core.observations import Now
from scheduler.core.scheduler_state import SchedulerState
from scheduler.daemon.state_file import Edit, StateFile
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.placement_facts import placement_facts, save_placement_facts

COUNT_S = 1.0  # between two counts of waiting jobs by reason; each changed count costs a transaction
COUNTING_SHARE = 0.01  # share of the time that counting may take
PAINT_S = 0.1  # at most ten versions a second
BUSY_PAINT_S = 0.5  # the same while many new lines are read, since counting all jobs takes long
AGAIN_S = 2.0  # until the next try after a failed write


def picture(state: SchedulerState, counts: dict[str, int], now: float) -> dict[str, Any]:
    """Return the contents of the state file (docs/state-file.md), without ``revision``."""
    fleet = state.fleet
    on_gpu: dict[int, list[int]] = {}
    for job in state.live.values():
        for gpu in job.gpus:
            on_gpu.setdefault(gpu, []).append(job.id)
    gpus = []
    for index in sorted(fleet.gpus):
        allocated = fleet.booked(index) / WHOLE
        paused = bool(fleet.paused_mask >> index & 1)
        card = fleet.admission.cards.get(index)
        told = card.state if card is not None else ""
        outside = fleet.outside.get(index, (0, 0, ""))
        reason = (card.reason if card is not None else "") or outside[2]
        gpus.append(
            {
                "index": index,
                "uuid": fleet.gpus[index].uuid,
                "state": gpu_state(paused=paused, admission=told, booked=bool(allocated), outside=outside[0] >= WHOLE),
                "allocated": allocated,
                "jobs": sorted(on_gpu.get(index, [])),
                "reason": (reason or None) if fleet.manages(index) else "no longer managed; its jobs continue",
            }
        )
    return {
        "gpu_status": [gpu["allocated"] for gpu in gpus],
        "paused_gpus": list(ids_of(fleet.paused_mask)),
        "paused": state.queue_paused,
        "gpus": gpus,
        "jobs": counts,
        "running": [
            {
                "id": job.id,
                "gpus": list(job.gpus),
                "pid": job.process.pid if job.process else None,
                "session": job.session_name,
                "log": job.log,
            }
            for job in sorted(state.live.values(), key=lambda job: job.id)
            if job.state is not JobState.STARTING
        ],
        "updated_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    }


@dataclass(slots=True)
class StateWriter:
    """Keeps the state file up to date. A change is written immediately, but at most ten times a second."""

    file: StateFile
    db: Database
    say: Callable[[str, int, str], None]  # text, level, kind
    dirty: bool = True  # the file is out of date
    painted_at: float = float("-inf")  # monotonic time of the last write
    not_before: float = 0.0  # monotonic: after a failed write
    look_due: float = 0.0
    told_reasons: dict[str, object] = field(default_factory=dict)
    told_blocked: dict[str, int] = field(default_factory=dict)
    told_facts: str = ""
    count_due: float = 0.0
    count_owed: bool = False  # a count was postponed
    trouble: str = ""
    noted: bool = False  # the reasons were saved at least once

    def look(self, now: Now, interval: float, *, heard: bool) -> Edit | None:
        """Return the next edit to apply, or None if there is none.

        The state file is read if ``heard`` is true, that is, if an event has reported a change. It is also read every
        ``interval`` seconds, and more often while an edit may be in progress.
        """
        if not (heard or now.mono >= self.look_due):
            return None
        edit = self.file.look(now.mono)
        for text in self.file.said:
            self.say(text, 30, "state")
        self.dirty = self.dirty or bool(self.file.said) or self.file.overdue(now.mono)
        self.file.said.clear()
        soon = self.file.next_look(now.mono)
        self.look_due = now.mono + interval if soon is None else soon
        return edit

    def took(self, edit: Edit) -> None:
        """Note that the store has recorded an edit of the state file.

        Mark the state file as out of date, so that the daemon writes a new version. Make the next call of `look` read
        the file.
        """
        self.file.accept(edit)
        self.dirty, self.look_due = True, 0.0

    def due(self, *, busy: bool) -> float | None:
        """Return the monotonic time of the next write; None if the state file is up to date.

        ``busy``: whether the daemon is reading many new lines; the file is then written less often.
        """
        if not self.dirty:
            return self.count_due if self.count_owed else None
        return max(self.not_before, self.painted_at + (BUSY_PAINT_S if busy else PAINT_S))

    def paint(self, state: SchedulerState, now: Now) -> None:
        """Write the state file, and store the reasons why jobs wait. Raises sqlite3.Error, StoreTrouble."""
        self.dirty, self.painted_at = False, now.mono
        reasons = state.class_reasons()
        blocked, facts = self._blocked(state, reasons, now), placement_facts(state, now)
        told = self.told_reasons, self.told_blocked, self.told_facts
        if (reasons, blocked, facts) != told or not self.noted:
            with self.db.writing(sync=False) as connection:
                rows.save_class_reasons(connection, reasons)
                save_placement_facts(connection, facts)
                rows.set_meta(connection, rows.BLOCKED, json.dumps(blocked))
                rows.set_meta(connection, "painted", "1")  # a missing file then counts as deleted
            self.told_reasons, self.told_blocked, self.told_facts, self.noted = dict(reasons), blocked, facts, True
        try:
            done = self.file.paint(picture(state, rows.counts(self.db.connection), now.wall), now.mono)
        except OSError as error:
            self._trouble(error, now)
            return
        state.pauses.revision = self.file.revision
        self.look_due = 0.0  # the replaced file may hold an edit
        self.dirty = not done
        if done and self.trouble:
            self.trouble = ""
            self.say(f"the scheduler can write {self.file.path} again", 20, "state")

    def _blocked(self, state: SchedulerState, reasons: Mapping[str, Reason], now: Now) -> dict[str, int]:
        """Return reason code → number of waiting jobs.

        Counting is slow, so the jobs are not counted in each call: the numbers may be out of date.
        """
        self.count_owed = now.mono < self.count_due
        if self.count_owed:
            return self.told_blocked
        began = time.monotonic()
        found = state.blocked(reasons)
        self.count_due = now.mono + max(COUNT_S, (time.monotonic() - began) / COUNTING_SHARE)
        return found

    def _trouble(self, error: OSError, now: Now) -> None:
        self.dirty, self.not_before = True, now.mono + AGAIN_S
        text = f"cannot write {self.file.path}: {error.strerror}; jobs are not affected"
        if text != self.trouble:
            self.trouble = text
            self.say(text, 30, "state")


def open_state_file(path: str, db: Database, state: SchedulerState, numbers: dict[str, int]) -> StateFile:
    """Open the state file when the daemon starts. ``numbers``: UUID → current index of each GPU.

    If somebody edited or deleted the file while no scheduler ran, the first look returns this edit.
    """
    file = StateFile(path, numbers=numbers)
    file.revision = max([state.pauses.revision, *(revision for revision, _, _ in state.pauses.changes)])
    file.begin(was_there=bool(rows.meta(db.connection, "painted")))
    state.pauses.revision = file.revision
    return file
