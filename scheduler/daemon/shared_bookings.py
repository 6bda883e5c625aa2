"""Shares bookings with other schedulers of this machine: reads theirs before each decision, and publishes the own ones.

Reading, deciding and publishing happen under the lock of the bookings folder (`sharing/bookings_folder.py`), so two
schedulers never book the same part of a GPU. The commit to the store follows later: if it fails, or the scheduler is
killed, no process has the booking any more, and it does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.core.errors import SchedulerError, StoreTrouble
from scheduler.core.fair_shares import decayed
from scheduler.core.gpu import WHOLE
from scheduler.core.job import Process
from scheduler.core.neighbours import Neighbour, Neighbours, Sharing
from scheduler.core.observations import Now
from scheduler.core.own_document import own_document
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.shared_bookings import Document
from scheduler.daemon.context import Context
from scheduler.daemon.parts import NEVER
from scheduler.intake.file_watcher import InotifyWatcher, PollingWatcher
from scheduler.intake.machine_settings import MachineFile, MachineSettings
from scheduler.sharing.bookings_file import own_space
from scheduler.sharing.bookings_folder import (
    KEPT_ENDED,
    BookingsFolder,
    Found,
    Published,
    shared_folder,
    time_of_day,
    user_name,
)
from scheduler.store import jobs as rows
from scheduler.store.paths import digest
from scheduler.system.proc import boot_id
from scheduler.system.processes import seen

AGAIN_S = 0.1  # after the lock was not free
STAYS_S = 5.0  # how often the own file is looked for while something is booked: a cleaner may have removed it
POLL_S = 1.0  # while jobs wait beside neighbours, or for GPUs that are kept free at some hours
HALF_LIVES = 5.0  # older use does not count
TOLD_AFTER_S = 2.0  # a lock that is not free is reported after this time


class SharedBookings:
    """The bookings of this scheduler and of its neighbours (a part of the daemon).

    ``supervisors``: returns the processes that start the jobs; ``wake``: makes the daemon decide again;
    ``note_problems``: records `troubles` for `status`.
    """

    def __init__(
        self,
        context: Context,
        watcher: InotifyWatcher | PollingWatcher,
        supervisors: Callable[[], Sequence[Process]],
        wake: Callable[[], None],
        note_problems: Callable[[], None],
    ) -> None:
        self._context, self._watcher, self._supervisors, self._wake = context, watcher, supervisors, wake
        self._note_problems = note_problems
        self.sharing = Sharing(user_name(os.getuid()), clock=time_of_day)
        self.machine = MachineSettings()
        self._machine_file = MachineFile(context.environ)
        self._folder: BookingsFolder | None = None
        self._key = self.sharing.key = digest(os.fsencode(context.places.state_file), 4)
        me = seen(os.getpid())
        self._me = None if me is None else Process(me.pid, me.ticks)
        self._locked = False
        self._published: Document | None = None
        self._closed_since: float | None = None
        self._again_at = NEVER
        self._poll_at = self._stays_at = NEVER
        self._watched = False
        self._problems: list[str] = []
        self._told: list[str] = []

    # -- one decision -------------------------------------------------------------------------------------

    def attach(self, state: SchedulerState) -> None:
        """Make a new state use the shared bookings, if they are used at all."""
        on = self._context.config.share_bookings and state.fleet.all_mask and not state.fleet.has_nodes
        state.sharing = self.sharing if on else None

    def begin(self, state: SchedulerState, now: Now) -> list[Neighbours]:
        """Take the lock and read what others have booked. Call `publish` and `end` after the decision."""
        self.attach(state)
        self._settings(state, now)
        if state.sharing is None:
            if state.fleet.outside or state.fleet.closed:
                state.fleet.set_outside({})
                state.fleet.closed = ""
            if self._folder is not None:  # the setting has just changed
                self._watch(False)
                self._folder.close(remove=True)
                self._folder = self._published = None
                self._poll_at = self._stays_at = NEVER
            self._note("", [], now)
            return []
        closed, found = self._open_and_lock(now), Found()
        if self._folder is not None:
            found = self._folder.read()
        closed = closed or found.closed
        self._note(closed, found.problems, now)
        return [
            Neighbours(now.since_boot or 0.0, tuple(map(self._neighbour, found.living)), tuple(map(self._neighbour, found.ended)), closed)
        ]  # fmt: skip

    def publish(self, state: SchedulerState, now: Now) -> None:
        """Publish the bookings after a decision, before any job starts. Raises StoreTrouble if that is not possible."""
        if state.sharing is None or self._folder is None or not self._folder.ready:
            return
        made = own_document(state, now, self._key, boot_id(), self._me, tuple(self._supervisors()), own_space())
        before = self._published
        if before is None or replace(made, used=before.used, used_at=before.used_at) != before:
            try:
                self._folder.publish(made)
            except OSError as error:
                raise StoreTrouble(
                    f"bookings cannot be published: {error.strerror}", where=self._folder.path
                ) from error
            self._published = made
        neighbours = bool(state.sharing.neighbours.living)
        self._watch(bool(len(state.queue)) and neighbours)
        # A scheduler or job that is killed writes nothing, so the folder is also read at intervals.
        self._poll_at = now.mono + POLL_S if len(state.queue) and (neighbours or self._timed) else NEVER
        self._stays_at = now.mono + STAYS_S if made.bookings else NEVER

    def end(self) -> None:
        """Give the lock back."""
        if self._locked and self._folder is not None:
            self._folder.unlock()
        self._locked = False

    def _open_and_lock(self, now: Now) -> str:
        """Open the folder and take its lock. Return why no GPU can be booked; empty if GPUs can be booked."""
        if self._folder is None:
            try:
                path = shared_folder(self._context.environ)
                self._folder = BookingsFolder(path, self._key, boot_id(), self._ignored)
            except SchedulerError as error:
                return str(error)
            except OSError as error:
                return f"bookings cannot be shared: {error.filename}: {error.strerror}; set share_bookings: false to run without"
            self._folder.tidy(keep=KEPT_ENDED)
            self._restore(now)
        try:
            if self._folder.prepare():
                self._published = None
        except OSError as error:
            return f"bookings cannot be published in {self._folder.path}: {error.strerror}; set share_bookings: false to ignore it"
        closed = self._folder.lock()
        self._locked = not closed
        return f"{closed}; to ignore it: ignore_users, or share_bookings: false" if closed else ""

    def _restore(self, now: Now) -> None:
        """Take over the use that the scheduler before this one has published; after a reboot, compute it from the store."""
        assert self._folder is not None
        last = self._folder.mine()
        if last is not None and last.boot == boot_id():
            at = time.clock_gettime(time.CLOCK_BOOTTIME)
            rate = sum(one.parts for one in last.bookings) / WHOLE
            self.sharing.used = decayed(last.used, at - last.used_at, self.sharing.half_life_s, rate)
            self.sharing.used_at = at
            return
        self.sharing.used, self.sharing.used_at = self._past_use(now), now.since_boot or 0.0

    def _past_use(self, now: Now) -> float:
        """Return the decayed use by the last attempts of the jobs in the store."""
        half_life, used = self.sharing.half_life_s, 0.0
        ended = rows.ended_runs(self._context.db.connection, now.wall - HALF_LIVES * half_life)
        for started, finished, parts in ended:
            one = decayed(0.0, finished - started, half_life, parts / WHOLE)
            used += decayed(one, now.wall - finished, half_life)
        return used

    def _neighbour(self, found: Published) -> Neighbour:
        return Neighbour(found.user, found.user == self.sharing.user, found.document)

    def _ignored(self) -> Sequence[str]:
        names = self._context.config.ignore_users
        return names.split(",") if names else ()

    # -- settings and problems ----------------------------------------------------------------------------

    def _settings(self, state: SchedulerState, now: Now) -> None:
        config = self._context.config
        self.machine = self._machine_file.settings()
        machine, sharing = self.machine, self.sharing
        sharing.weights = machine.weights
        sharing.half_life_s = machine.fair_half_life or config.fair_half_life
        hour = time.localtime(now.wall)
        minutes = hour.tm_hour * 60 + hour.tm_min
        state.fleet.keep_free = max(
            config.keep_free if in_hours(config.keep_free_hours, minutes) else 0,
            machine.keep_free if in_hours(machine.keep_free_hours, minutes) else 0,
        )
        self._timed = bool(
            (config.keep_free and config.keep_free_hours) or (machine.keep_free and machine.keep_free_hours)
        )

    _timed = False

    def _note(self, closed: str, problems: Sequence[str], now: Now) -> None:
        if closed:
            self._closed_since = now.mono if self._closed_since is None else self._closed_since
            self._again_at = now.mono + AGAIN_S
        else:
            self._closed_since, self._again_at = None, NEVER
        self._problems = list(problems)
        if self.machine.problem:
            self._problems.append(self.machine.problem)
        if closed and self._closed_since is not None and now.mono - self._closed_since >= TOLD_AFTER_S:
            self._problems.append(f"no job starts on a GPU: {closed}")

    def troubles(self) -> list[str]:
        """Return a sentence for each problem with shared bookings."""
        return self._problems

    # -- a part of the daemon -----------------------------------------------------------------------------

    def changed(self) -> bool:
        """Return whether a neighbour has changed something since the last pass."""
        return self._folder is not None and self._folder.path in self._context.changed

    def step(self, now: Now) -> None:
        """Make the daemon decide again if a retry is due. Report new problems."""
        if self._problems != self._told:
            for text in self._problems:
                if text not in self._told:
                    self._context.say(text, 30, kind="bookings")
            self._told = self._problems
            self._note_problems()
        if now.mono >= self._stays_at:
            self._stays_at = now.mono + STAYS_S
            if self._folder is not None and not self._folder.in_place:
                self._wake()
        if now.mono >= min(self._again_at, self._poll_at):
            self._again_at = self._poll_at = NEVER
            self._wake()

    def due(self) -> float:
        """Return when the next step is due."""
        return min(self._again_at, self._poll_at, self._stays_at)

    def close(self) -> None:
        """Close the folder. The document stays: it tells other schedulers what the user has used."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _watch(self, on: bool) -> None:
        """Begin or end to watch the folder. It is watched only while jobs wait and there are neighbours."""
        if on != self._watched and self._folder is not None:
            self._watched = on
            self._watcher.watch_folder(self._folder.path if on else "", self._folder.name)


def in_hours(hours: str, minutes: int) -> bool:
    """Return whether a time of day (minutes since midnight) is within hours such as ``8-20`` or ``22-6``; empty: always."""
    if not hours:
        return True
    first, last = (int(word) * 60 for word in hours.split("-"))
    return first <= minutes < last if first < last else minutes >= first or minutes < last
