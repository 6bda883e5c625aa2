"""The daemon's main loop. Each pass observes, decides, records, acts and then logs what happened."""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import sqlite3
import time
import traceback
from collections.abc import Callable

from scheduler.core.config import Config
from scheduler.core.decide import decide
from scheduler.core.decision_pass import Plan
from scheduler.core.errors import DEFECT, REPORT_IT, StoreTrouble
from scheduler.core.file_offsets import Batch
from scheduler.core.gpu import Gpu, ids_of
from scheduler.core.job import Job, JobState
from scheduler.core.launch import Launch
from scheduler.core.model_table import ModelTable
from scheduler.core.observations import (
    Arrived,
    Asked,
    Ended,
    GpuErrors,
    Lost,
    NeverRan,
    Now,
    Observation,
    Readings,
    Restored,
    Started,
    Unclaimed,
)
from scheduler.core.policy import policy_of
from scheduler.core.protocols import Runner
from scheduler.core.requests import Answer
from scheduler.core.scheduler_state import SchedulerState
from scheduler.daemon.completion_hooks import CompletionHooks, JobActions, no_warning, wanted_of
from scheduler.daemon.config_reload import ConfigReload
from scheduler.daemon.context import Context
from scheduler.daemon.drain import Drain
from scheduler.daemon.failure_diagnosis import with_causes, with_time_limits
from scheduler.daemon.followed_files import FollowedFile, FollowedFiles
from scheduler.daemon.ingest import IngestResult, Reader, machine_text
from scheduler.daemon.journal_writer import JournalWriter
from scheduler.daemon.kernel_kills import open_kernel_kills
from scheduler.daemon.learning import Learning
from scheduler.daemon.managed_gpus import ManagedGpus
from scheduler.daemon.parts import Part
from scheduler.daemon.pass_messages import PassMessages
from scheduler.daemon.prepare_launch import LaunchPreparer
from scheduler.daemon.problems import Problems, passing
from scheduler.daemon.program_lookup import ProgramLookup, UserProgramLookup
from scheduler.daemon.rebooking import update_needs
from scheduler.daemon.retention import Retention
from scheduler.daemon.run_records import RunRecords
from scheduler.daemon.shared_bookings import SharedBookings
from scheduler.daemon.state_file import Edit
from scheduler.daemon.state_writer import StateWriter, open_state_file
from scheduler.daemon.store_outage import StoreOutage
from scheduler.daemon.user_shares import UserShares
from scheduler.gpus.monitor import managed_after_change
from scheduler.intake import jobs_file
from scheduler.intake.file_watcher import InotifyWatcher, PollingWatcher
from scheduler.store import counters, waiting_jobs
from scheduler.store import jobs as rows
from scheduler.store.database import trouble
from scheduler.store.gpu_faults import save_faults
from scheduler.store.readings import save_readings
from scheduler.store.scheduler_state import book_active, cpu_slots_of, read_state
from scheduler.store.seen_runs import add_runs
from scheduler.system.crash_points import crash_point
from scheduler.system.proc import boot_id

LAZY_S = 0.03  # how long a new pid may wait to be stored: the attempt record already has the pid
MOST_KEPT = 2000  # waiting jobs kept in memory


class Daemon:
    """The running scheduler: its state, its passes, and the parts that run after each pass.

    ``limits``: the resource limits that jobs inherit from this process, as resource → (soft, hard).
    """

    def __init__(
        self,
        context: Context,
        runner: Runner,
        watcher: InotifyWatcher | PollingWatcher,
        gpus: ManagedGpus,
        limits: dict[int, tuple[int, int]],
        lookup: ProgramLookup | UserProgramLookup,
    ) -> None:
        self._context, self.runner, self._watcher, self.gpus = context, runner, watcher, gpus
        self.state: SchedulerState
        self.state_writer: StateWriter
        self._lookup = lookup
        self._kernel_kills = None if context.shared else open_kernel_kills()
        self._preparer = LaunchPreparer(context, self._lookup, runner.name, limits)
        self._records = RunRecords(context)
        self.messages = PassMessages(context)
        self.problems = Problems(context, runner)
        self.files = FollowedFiles(context, self._machine, self.problems.note)
        self.problems.sources.append(self.files.troubles)
        self.outage = StoreOutage(context, self._reopen)
        own_actions = JobActions(
            context.environ, context.folder, os.path.join(context.places.state_dir, "on_finish.log"), no_warning
        )
        self._hooks = CompletionHooks(
            context.db, context.actions or own_actions, lambda text, level, job: context.say(text, level, job=job)
        )
        self._retention = Retention(
            context.db, context.places, lambda text, level: context.say(text, level, kind="pruned"),
            lambda: context.config, self._is_quiet,
        )  # fmt: skip
        self.journal: JournalWriter | None = None
        self.bookings: SharedBookings | None = None
        self._shares = UserShares(context) if context.shared else None
        self.reload: ConfigReload | None = None
        # Stepped in this order after each pass that did not fail. ``last``: stepped after every pass, at its end.
        self._learning = Learning(context, lambda: self.gpus.gpus, self._update_needs)
        self.parts: list[Part] = [self._hooks, self._retention, self._learning]
        self.helpers = [gpus.sessions, self._hooks.sessions]  # each returns the POSIX sessions of its child processes
        self.last: list[Part] = []
        self.flush_log: Callable[[], None] = lambda: None
        self.closing = False  # start no more jobs
        self.woken = True  # a command may have written a job or a request
        self.again = True  # another pass must follow immediately
        self._at_hand: dict[int, Job] = {}  # waiting jobs by id: placing them needs no query
        self._heard: list[Observation] = []  # not recorded yet; the runner reports each one only once
        self._lazy: list[Observation] = []  # starts that wait up to ``LAZY_S`` to be recorded
        self._open_ends: list[Observation] = []  # of attempts that wait for a reading (`SchedulerState.open_ends`)
        self._lazy_due = 0.0
        self._last_id = 0
        self._scan_due = 0.0
        self._drain = Drain()
        self._began_at = time.time()  # older requests were made while no scheduler ran

    # -- building the state -------------------------------------------------------------------------------

    def open(self) -> None:
        """Build the state from the store, and find out what has happened to each unfinished attempt.

        An attempt that still runs is adopted. If an attempt does not run any more, or never ran, this is recorded.
        Raises StoreTrouble.
        """
        now = self.now()
        connection = self._context.db.connection
        try:
            self._load(connection, now)
        except sqlite3.Error as error:
            raise trouble(error, self._context.places.store) from error

    def _load(self, connection: sqlite3.Connection, now: Now) -> None:
        state = read_state(
            connection, self._context.config, self.gpus.gpus,
            fetch=self.fetch, missing=self._lookup.missing, may_start=not self.closing,
        )  # fmt: skip
        measured = self.state.fleet.admission.measured if hasattr(self, "state") else {}
        admission = self.gpus.admission_now(now)
        if admission is not None:
            state.fleet.admission = admission
            state.watch_admission()
        self._heard[:0] = [*self._open_ends, *self._lazy]
        self._open_ends = []
        self.state, self._lazy, self._at_hand = state, [], {}
        self._show_state()
        observations: list[Observation] = []
        this_boot = boot_id()
        in_hand, held, stale = book_active(connection, state, this_boot, now)
        if admission is not None:
            admission.measured |= measured or self._learning.measured_before(in_hand)
        first = self.gpus.first_readings()
        if first is not None and first.xids:
            self._heard.append(GpuErrors(first.xids))
        observations += [told for told in self._heard if isinstance(told, GpuErrors)]
        if first is not None:
            observations.append(first)
        for job in in_hand:
            observations += self._unrecorded_end(job) or self._with_causes(self.runner.adopt(job))
            crash_point("adopt.found")
        for holding in held:
            _, _, attempt = holding.key.partition(".")
            self.runner.watch_leftovers(holding.key, holding.job, int(attempt), holding.processes)
        self._last_id = rows.last_id(connection)  # first: a job submitted in between is found twice, not missed
        if state.policy.order.rule == "short":  # the order depends on the command of each job
            observations += [Arrived(job) for job in rows.pending(connection)]
        else:
            ready = list(waiting_jobs.ready(connection))
            observations += [Restored(ready), *map(Arrived, waiting_jobs.not_ready(connection, len(ready)))]
        self.problems.note()
        self.files.go_back(connection)
        if stale:
            with self._context.db.writing() as writing:
                rows.save_holdings(writing, [], stale, this_boot)
        self.woken = True
        self.turn(
            observations, [], now, sync=True, edit=self._edit(now)
        )  # the edit is applied before any job is placed: it may pause a GPU
        self._heard.clear()
        if admission is not None:
            with self._context.db.writing(sync=False) as writing:
                save_readings(writing, admission.cards.values(), now)
        self.messages.adopted(self.state.live.values(), now.wall)
        crash_point("adopt.committed")

    def _with_causes(self, observations: list[Observation]) -> list[Observation]:
        """Add the causes of failures from logs; agents have done that already, with the rights of their users."""
        own = self._context.config.failure_classes or ()
        if self._context.shared:
            return with_time_limits(self.state.live, observations, own)
        return with_causes(self.state.live, observations, own, self._kernel_kills)

    def _unrecorded_end(self, job: Job) -> list[Observation]:
        """Return the observations of the job's attempt that are not recorded yet, if one of them ends the attempt.

        Otherwise return an empty list. The caller must not lose the returned observations, because the runner reports
        an ending and the leftover processes only once.
        """
        told: list[Observation] = [
            observation
            for observation in self._heard
            if isinstance(observation, (Started, Ended, NeverRan, Unclaimed, Lost))
            and (observation.job, observation.attempt) == (job.id, job.attempt)
        ]
        return told if any(not isinstance(observation, Started) for observation in told) else []

    def _show_state(self) -> None:
        """Mark the state file as out of date, and tell its `StateFile` object the current index of each GPU.

        The first call opens the state file.
        """
        numbers = {gpu.uuid: gpu.index for gpu in self.gpus.gpus}
        if not hasattr(self, "state_writer"):
            context = self._context
            file = open_state_file(context.config.state_file, context.db, self.state, numbers)
            self.state_writer = StateWriter(
                file, context.db, lambda text, level, kind: context.say(text, level, kind=kind)
            )
        self.state_writer.file.numbers = numbers
        self.state_writer.dirty = True
        self.state.pauses.revision = self.state_writer.file.revision

    def fetch(self, job_id: int) -> Job | None:
        """Return the recorded job with this id, or None if there is no such job."""
        return self._at_hand.get(job_id) or rows.get(self._context.db.connection, job_id)

    @staticmethod
    def now() -> Now:
        """Return the current time on three clocks: wall clock, monotonic clock, and time since boot."""
        return Now(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))

    # -- one pass -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run one pass and step the parts. Raises nothing: a pass that fails begins a store outage."""
        now = self.now()
        if self.outage.lasts and now.mono < self.outage.due():
            return
        try:
            self.outage.step(now)
            self._observe(now)
            self.outage.decided()
            for part in self.parts:
                part.step(now)
            self.outage.over()
        except StoreTrouble as error:
            self.outage.begin(error)
        except sqlite3.Error as error:
            self.outage.begin(trouble(error, self._context.places.store))
        except Exception as error:  # noqa: BLE001  a defect of ours must not end the daemon: the jobs need it
            where = traceback.format_exc().strip().replace("\n", " | ")
            known = passing(error, self._context.places.state_dir)
            self.outage.begin(known or StoreTrouble(f"{REPORT_IT}: {error!r} ({where})", code=DEFECT))
        with contextlib.suppress(OSError):  # on a full disk only log records are lost
            self.flush_log()
        for part in self.last:
            part.step(now)

    def _observe(self, now: Now) -> None:
        self._exclude_helpers()
        self._heard += self._with_causes(self.runner.look())
        if self.state.fleet.has_nodes or self._context.shared:
            self.problems.look_at_runner()  # an engine or agent that does not answer is told at once
        self._look_at_files(now)
        batches = self.files.batches
        if batches:
            crash_point("ingest.read")
        edit = self._edit(now)
        self._context.changed.clear()
        read = self._read_gpus(now)
        observations = [*self._heard, *self._lookup.look_again(self.state.parked, self.fetch, now), *read]
        timer = self.state.next_timer()
        due = timer is not None and timer <= now.mono
        urgent = [observation for observation in observations if not isinstance(observation, Started)]
        if not (urgent or batches or edit or due or self.woken or self._has_more):
            if observations:
                if not self._lazy:
                    self._lazy_due = now.mono + LAZY_S
                self._lazy += observations
                self._heard.clear()
            if self._lazy and now.mono >= self._lazy_due:
                lazy, self._lazy = self._lazy, []
                self.turn(lazy, [], now, sync=False)
            self._paint_if_due(now)
            return
        observations = self._lazy + observations
        self._heard[:0] = self._lazy
        self._lazy = []
        if batches or self.woken:
            self.gpus.read_if_old(now)  # in parallel with recording the new jobs: placing them needs a fresh reading
        only_read = bool(read) and len(urgent) == len(read) and not (batches or edit or due)
        self.turn(observations, batches, now, sync=not only_read or bool(self.state.waiting()), edit=edit)
        self._heard.clear()
        self._paint_if_due(self.now())

    def turn(
        self,
        observations: list[Observation],
        batches: list[tuple[FollowedFile, Batch]],
        now: Now,
        *,
        sync: bool,
        edit: Edit | None = None,
    ) -> None:
        """Decide and record in one transaction, then start and end processes and log what happened.

        ``batches``: new lines of watched files. ``sync``: whether the commit must survive a power loss. ``edit``: an
        edit of the state file, which is applied like a request. Raises StoreTrouble, sqlite3.Error.
        """
        gathered = IngestResult()
        kinds = {type(observation) for observation in observations}
        if Ended in kinds:
            crash_point("finish.seen")
        woken, self.woken, self.again, self.files.more = self.woken, False, False, False
        db = self._context.db
        with db.writing(sync=sync) as connection:
            for file, batch in batches:
                self._reader(file).take(connection, batch, now.wall, gathered)
                crash_point("ingest.batch")
            wishes = [] if edit is None else [(edit.at, Asked(0, edit.request))]
            # A gap in the ids: a command has added a job, but not written the wakeup byte yet. Queue that job now, so
            # that the jobs with higher ids do not overtake it.
            passed_over = gathered.jobs and gathered.jobs[0].id != self._last_id + 1
            if woken or edit or passed_over:
                known = {job.id for job in gathered.jobs}
                arrived = [job for job in rows.new_pending(connection, self._last_id) if job.id not in known]
                gathered.jobs += arrived
                wishes += rows.asked(connection)
            gathered.left_for_start = {one.row for at, one in wishes if one.row and at < self._began_at}
            asked = [one for _, one in sorted(wishes, key=lambda wish: (wish[0], wish[1].row))]
            for job in (*gathered.jobs, *gathered.changed):
                if len(self._at_hand) < MOST_KEPT or job.id in self._at_hand:
                    self._at_hand[job.id] = job
            news = [Arrived(job) for job in (*gathered.jobs, *gathered.changed)]
            if self._shares is not None:
                self._shares.attach(self.state, connection, now)
            if Ended in kinds:
                observations = self._records.with_differences(
                    connection, self.state.live, self.state.fleet.gpus, observations
                )
            plan = self._decide([*observations, *news, *asked], now)
            if plan.starts:
                db.check_in_place()  # start nothing that only a deleted store file records
            launches = self._preparer.prepare(plan, self.gpus.admission.ordinals(), now, self.state.bound_to)
            self._records.note_starts(connection, plan.starts, self._lookup)
            self._records.record(connection, plan, self.state.live, self.state.fleet.gpus)
            rows.save(connection, plan.changed.values())
            for job in plan.respecs.values():
                rows.respec(connection, job)
            wanted = wanted_of(plan.changed.values())
            if wanted:
                rows.note_calls(connection, wanted)
            counters.count(connection, plan.events, plan.changed)
            rows.write_events(connection, [*gathered.events, *plan.events])
            if plan.answers:
                rows.answer(connection, plan.answers)
            if plan.held or plan.freed:
                rows.save_holdings(connection, plan.held, plan.freed, boot_id())
            if any(isinstance(observation, Readings) for observation in observations):
                save_readings(connection, self.state.fleet.admission.cards.values(), now)
            if plan.pauses_changed:
                state = self.state
                rows.save_pauses(connection, ids_of(state.fleet.paused_mask), state.queue_paused, state.pauses.changes)
                if self._shares is not None:
                    self._shares.save_paused(connection)
            if plan.measured:
                add_runs(connection, plan.measured, now.wall)
            if plan.faults_changed:
                save_faults(connection, self.state.faults.values(), boot_id())
            if plan.starts:
                crash_point("start.chosen")
        self._records.recorded()
        self._open_ends = [one.end for one in self.state.open_ends.values()]
        self._learning.take(plan.measured)
        if self.journal is not None:
            self.journal.take(plan, gathered)
        if gathered.jobs:
            self._last_id = max(self._last_id, *(job.id for job in gathered.jobs))
        if wanted:
            self._hooks.wanted = True
        if batches:
            crash_point("ingest.committed")
        if plan.starts:
            crash_point("start.committed")
        if Started in kinds:
            crash_point("start.running")
        if Ended in kinds:
            crash_point("finish.committed")
        if Unclaimed in kinds:
            crash_point("fence.requeued")
        if plan.stops:
            crash_point("cancel.marked")
        if any(job.reason_code == "backoff" for job in plan.changed.values()):
            crash_point("retry.scheduled")
        if plan.must_sync and not sync:
            with db.writing(sync=True) as connection:
                rows.set_meta(connection, "synced", str(now.wall))
        if edit is not None:
            self.state_writer.took(edit)
        self.files.accept(batches)
        self._act(plan, launches, observations)
        if len(plan.starts) >= 256:
            self.again = True
        self.messages.announce(plan, gathered, lambda job: self.state.live.get(job) or self.fetch(job))
        if Ended in kinds:
            crash_point("finish.told")
        if plan.read_since is not None:
            self.gpus.read(plan.read_since)
        for job_id, moved in plan.changed.items():
            if moved.state is not JobState.PENDING:
                self._at_hand.pop(job_id, None)
        self._lookup.forget()
        if plan.empty and not plan.notices and not gathered.jobs and not self.state.waiting() and not woken:
            return  # nothing visible has changed: there was only a new reading
        self.state_writer.dirty = True

    def _decide(self, observations: list[Observation], now: Now) -> Plan:
        """Decide; with shared bookings, under the lock of the machine."""
        shared = self.bookings
        if shared is None:
            return decide(self.state, observations, now, random.random())
        try:
            plan = decide(self.state, [*shared.begin(self.state, now), *observations], now, random.random())
            shared.publish(self.state, now)
        finally:
            shared.end()
        return plan

    def _act(self, plan: Plan, launches: list[tuple[Job, Launch]], observations: list[Observation]) -> None:
        for job, launch in launches:
            self.runner.start(job, launch)
        if launches:
            self.runner.flush()
            crash_point("start.sent")
        if plan.stops:
            self.runner.stop([(stop.job, stop.hard) for stop in plan.stops])
        for stop in plan.stops:
            crash_point("cancel.kill_sent" if stop.hard else "cancel.term_sent")
        for observation in observations:
            if isinstance(observation, (Ended, Lost)) and observation.leftovers:
                self.runner.watch_leftovers(
                    f"{observation.job}.{observation.attempt}",
                    observation.job,
                    observation.attempt,
                    observation.leftovers,
                )

    # -- observing ----------------------------------------------------------------------------------------

    def _look_at_files(self, now: Now) -> None:
        """Reload changed settings and read new lines of changed files. At each safety interval, check all files."""
        context = self._context
        context.changed |= self._watcher.changed()
        if now.mono >= self._scan_due:
            self._scan_due = now.mono + min(context.config.monitor_interval, context.config.poll_interval or math.inf)
            self._watcher.rearm()
            context.db.check_in_place()
            self.problems.look_at_runner()
            self.files.look_at_all()
            if self.reload is not None:
                self.reload.look_at_all(now)
            self.woken = True
        if context.places.wakeup in context.changed or (self.bookings is not None and self.bookings.changed()):
            self.woken = True
        if self.reload is not None:
            self.reload.step(now)
        self.files.step(now)

    def _read_gpus(self, now: Now) -> list[Observation]:
        """Return new GPU readings as one observation, or an empty list. Raises StoreTrouble, sqlite3.Error."""
        self.gpus.step(now)
        self._exclude_helpers()
        readings = self.gpus.readings
        if readings is None:
            return []
        if readings.xids:
            self._heard.append(GpuErrors(readings.xids))  # the driver tells each of them only once
        if self.gpus.learn_gpus(readings):
            self.open()  # the GPUs have UUIDs now: rebuild the state with them
        return [readings]

    def _exclude_helpers(self) -> None:
        """Make the runner ignore our helper processes (GPU reader, hooks, web page), which belong to no job."""
        self.runner.leave_alone({session for sessions_of in self.helpers for session in sessions_of()})

    def _machine(self) -> str:
        return machine_text(self.gpus.gpus, self._context.config.min_free_mem_mb)

    def _reader(self, file: FollowedFile) -> Reader:
        cluster = self.state.fleet.has_nodes
        managed = None if cluster else ids_of(self.state.fleet.all_mask)
        owner = file.owner
        folder, home = (owner.folder, owner.home) if owner else (os.path.dirname(file.follower.path), self._lookup.home)
        line_context = jobs_file.LineContext(folder, home, managed, cluster)
        memory, known = self._context.config.min_free_mem_mb, self.files.known_refusals
        return Reader(file.parse, line_context, self._context.needs, self.state.fleet, known, memory, owner)

    def _edit(self, now: Now) -> Edit | None:
        config = self._context.config
        heard = config.state_file in self._context.changed
        return self.state_writer.look(now, config.state_interval, heard=heard)

    # -- reloaded settings (`config_reload.Reloadable`) ---------------------------------------------------

    def choose_gpus(self, config: Config) -> list[Gpu]:
        """Find the GPUs that ``config`` names, store them and return them. Raises Refused, StoreTrouble."""
        if self.state.fleet.has_nodes:
            return self.gpus.gpus  # the engine tells which GPUs there are
        gpus = managed_after_change(config, self.gpus.gpus, self.gpus.shown, self._context.environ)
        self.gpus.save(gpus)
        return gpus

    def use_settings(self, config: Config, gpus: list[Gpu] | None) -> None:
        """Apply new settings and, if ``gpus`` is not None, new managed GPUs. Raises StoreTrouble.

        Jobs on a GPU that is no longer managed continue; no further job is placed on it.
        """
        learn = self._context.config.learn
        self._context.config = config
        self.state.policy = policy_of(config)
        self.state.fleet.resize(cpu_slots_of(config, self._context.db.connection))
        self._lookup.use_settings()
        self.woken = True  # have the next pass place waiting jobs by the new settings
        if gpus is not None and gpus != self.gpus.gpus:
            self.gpus.manage(gpus)
            self.files.read_refused_again()
            self.open()
        if config.learn != learn:
            self._update_needs(self.now(), "the setting learn has changed")

    def use_table(self, table: ModelTable, now: Now) -> None:
        """Apply a new model table: recompute the needs of waiting jobs. Raises StoreTrouble."""
        with self._context.db.writing() as connection:
            rows.set_meta(connection, "model_table", table.as_json())
        self._context.table = table
        self._update_needs(
            now, f"model table reloaded: {len(table.models)} models, default need {table.default}", always=True
        )

    def _update_needs(self, now: Now, why: str, always: bool = False) -> None:
        """Compute the needs of the waiting jobs again. ``why``: the reason to log; ``always``: even if no need changes."""
        context = self._context
        with context.db.writing() as connection:
            changed = update_needs(connection, self.gpus.gpus, context.needs)
        if changed or always:
            context.say(why, 20, kind="table")
        self._at_hand.update({job.id: job for job in changed if job.id in self._at_hand})
        if changed:
            self.turn([Arrived(job) for job in changed], [], now, sync=True)
            context.say(f"the need of {len(changed)} waiting jobs has changed", 20, kind="table")

    def is_full(self, user: str, more: int) -> bool:
        """Return whether a user may have no more waiting jobs (setting `limits`). ``more``: jobs that are not recorded yet."""
        return self._shares is not None and self._shares.is_full(user, more)

    # -- the state file and the reasons -------------------------------------------------------------------

    def _paint_if_due(self, now: Now) -> None:
        due = self.state_writer.due(busy=self._has_more)
        if due is not None and now.mono >= due:
            self.paint(now)

    def paint(self, now: Now) -> None:
        """Apply a new edit of the state file, if there is one. Then write the state file.

        Also stores the reasons why jobs wait. Raises StoreTrouble, sqlite3.Error.
        """
        edit = self.state_writer.look(now, self._context.config.state_interval, heard=True)
        if edit is not None:
            self.turn([], [], now, sync=True, edit=edit)
        try:
            self.state_writer.paint(self.state, now)
        except sqlite3.Error as error:
            raise trouble(error, self._context.places.store) from error

    # -- after a store outage -----------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Rebuild the state from the store after a failed pass. Raises StoreTrouble."""
        db = self._context.db
        if db.suspect:
            db.renew()
        if self.outage.refuses:  # a request that makes each pass fail would be retried forever
            why = f"cannot carry out the request: {self.outage.error or 'the store changes faster than it is read'}"
            with db.writing() as connection:
                rows.answer(connection, [Answer(one.row, 1, (why,)) for _, one in rows.asked(connection)])
        self.open()
        if self.journal is not None:
            self.journal.distrust()
        # Failed passes noticed changes of these files and did not apply them.
        self._context.changed |= {*self.files.files, self._context.config.state_file}

    # -- waiting ------------------------------------------------------------------------------------------

    @property
    def _has_more(self) -> bool:
        return self.again or self.files.more

    def _is_quiet(self) -> bool:
        return not (self._has_more or self.woken or self._lazy or self.state_writer.dirty)

    def timeout(self) -> float:
        """Return in how many seconds the next pass is due even without an event; 0 if a pass is due now."""
        now = time.monotonic()
        if self.outage.lasts:
            return max(0.0, self.outage.due() - now)
        if self._has_more or self.woken:
            return 0.0
        due = [self._scan_due, self.state_writer.look_due, self.files.due(), self.gpus.due()]
        due += [part.due() for part in (*self.parts, *self.last)]
        if self.reload is not None:
            due.append(self.reload.due())
        due.append(self._lookup.due(self.state.parked))
        sometimes = (self.state.next_timer(), self.runner.next_look(), self.state_writer.due(busy=False))
        due += [moment for moment in sometimes if moment is not None]
        if self._lazy:
            due.append(self._lazy_due)
        return max(0.0, min(due) - now)

    def idle(self) -> bool:
        """Return whether no job runs, no job waits, and no lines are left to read."""
        busy = self.state.live or self.state.waiting() or self._has_more or self.woken or self._lazy
        return not busy and not self.files.unsettled

    def stuck(self) -> bool:
        """Return whether jobs wait, but no job runs and no waiting job can start without a change from outside."""
        busy = self._has_more or self.woken or self._lazy or self.files.unsettled
        return not busy and self._drain.is_stuck(self.state)

    def settle(self) -> None:
        """Record the postponed observations, and write the state file for the last time. Raises StoreTrouble."""
        self._lazy_due = 0.0
        self.tick()
        self.paint(self.now())

    def wake(self) -> None:
        """Have the next pass place waiting jobs."""
        self.woken = True

    def stop_starting(self) -> None:
        """Start no more jobs."""
        self.closing = True
        self.state.may_start = False
        self.woken = True

    def wait(self, epoll: select.epoll, wakeup: int) -> None:
        """Sleep until an event or the next due time. ``wakeup``: file descriptor that becomes readable at a signal."""
        if not self.outage.lasts and epoll.poll(0):
            return  # under load there often is an event already; `timeout` asks every part for its next due time
        limit = min(self.timeout() + 0.001, 3600.0)
        if self.outage.lasts:
            select.select([wakeup], [], [], limit)  # the other descriptors stay readable until the state is rebuilt
        elif limit > 0.001:
            # epoll waits for whole milliseconds: without rounding up, the last millisecond would be a busy loop.
            epoll.poll(limit)

    def close(self) -> None:
        """Close all parts, the watched files and the GPU reader."""
        for part in (*self.last, *self.parts, self.files, self.gpus):
            part.close()
