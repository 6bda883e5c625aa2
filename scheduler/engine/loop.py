"""The loop: observe, decide, record, act, tell."""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.config import Config
from scheduler.core.decide import Plan, World, decide
from scheduler.core.errors import DECIDE_ANEW, DEFECT, FileTrouble, StoreTrouble
from scheduler.core.facts import Arrived, Asked, Ended, Fact, Lost, NeverRan, Now, Readings, Started, Unclaimed
from scheduler.core.gpu import Gpu, ids_of, mask_of
from scheduler.core.job import Event, Job, JobState
from scheduler.core.launch import Found, Launch
from scheduler.core.llm import ModelTable
from scheduler.core.marks import Batch
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.ports import Runner
from scheduler.core.requests import Answer, Request
from scheduler.core.secrets import without_secrets
from scheduler.core.telemetry import FRESH_S, PASSING, Telemetry
from scheduler.crashpoints import crash_point
from scheduler.engine.afterwards import Afterwards, wanted_of
from scheduler.engine.announcing import announce
from scheduler.engine.causes import with_causes
from scheduler.engine.gpus import Flag, GpuEyes
from scheduler.engine.keeping_history import KeptHistory
from scheduler.engine.keeping_journal import KeptJournal
from scheduler.engine.page import KeptPage
from scheduler.engine.painting import Painter, open_state_file
from scheduler.engine.preparing import prepare
from scheduler.engine.pruning import Pruner
from scheduler.engine.reading import JUDGED_FOR, Gathered, Parser, Reader, machine_text, refused_again
from scheduler.engine.reloading import Rereading, bind_unread, cpu_slots_of, limits_of, policy_of
from scheduler.engine.state_file import Edit
from scheduler.engine.telling import Said, sentence
from scheduler.engine.troubles import look_at_runner, note, passing
from scheduler.intake import commands, jobs_csv
from scheduler.intake.environments import Environments, Missing
from scheduler.intake.files import Follower
from scheduler.intake.watch import InotifyWatcher, PollingWatcher
from scheduler.runners import activate
from scheduler.runners.processes import boot_id
from scheduler.store import jobs as rows
from scheduler.store import marks as kept
from scheduler.store import tallies
from scheduler.store.database import Database, trouble
from scheduler.store.places import Places
from scheduler.store.readings import save_readings

LAZY_S = 0.03  # a pid may wait this long to be written down: its record has it already
MISSING_AGAIN_S = 2.0
LONGEST_BREAK_S = 8.0
REFUSED_AFTER = 3  # vain tries, after which open requests are refused
MISSING_A_ROUND = 200
MOST_KEPT = 2000
HOPE_S = 30.0  # a drain waits so long for a GPU that is gone or unhealthy
REPORT_IT = "a defect of gpujob, please report it"
LASTING = frozenset({"gone", "unhealthy"})


@dataclass(slots=True)
class Watched:
    """A file that jobs come from."""

    follower: Follower
    parse: Parser
    trouble: str = ""
    due: float = 0.0


@dataclass(slots=True)
class House:
    """All parts of one daemon. ``listener`` is told what happens and must not block."""

    places: Places
    config: Config
    db: Database
    runner: Runner
    watcher: InotifyWatcher | PollingWatcher
    gpus: list[Gpu]
    listener: Callable[[Said], None]
    environ: dict[str, str]
    folder: str
    rereading: Rereading
    table: ModelTable = field(default_factory=ModelTable)
    limits: dict[int, tuple[int, int]] = field(default_factory=dict)  # what jobs get of us: resource → soft, hard
    eyes: GpuEyes | None = None  # None: declared GPUs, given out by booking alone
    shown: list[Gpu] = field(default_factory=list)  # all that the driver showed at the start, managed or not
    flag: Flag | None = None
    first_readings: Readings | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    world: World = field(init=False)
    bell: str = field(init=False)
    environments: Environments = field(init=False)
    painter: Painter = field(init=False)
    pruner: Pruner = field(init=False)
    afterwards: Afterwards = field(init=False)
    journal: KeptJournal | None = None
    history: KeptHistory | None = None
    page: KeptPage | None = None
    files: dict[str, Watched] = field(default_factory=dict)
    known_refusals: set[tuple[str, str]] = field(default_factory=set)
    kept: dict[int, Job] = field(default_factory=dict)  # waiting jobs at hand, so that the head needs no look-up
    found: dict[tuple[str, ...], Found | Missing] = field(default_factory=dict)  # of this turn
    flush_log: Callable[[], None] = lambda: None
    heard: list[Fact] = field(default_factory=list)  # of the runner, and not yet recorded: it tells each thing once
    lazy: list[Fact] = field(default_factory=list)
    lazy_due: float = 0.0
    changed: set[str] = field(default_factory=set)
    rung: bool = True
    last_id: int = 0
    broken_until: float = 0.0
    broken: StoreTrouble | None = None  # what was wrong with the last turn
    broken_times: int = 0
    missing_from: int = 0
    missing_due: float = 0.0
    scan_due: float = 0.0
    again: bool = True
    ended_badly: int = 0
    closing: bool = False  # nothing is started any more
    hopeless_since: float | None = None
    judged: set[str] = field(default_factory=set)  # files whose refused lines were read for these GPUs
    runner_trouble: str = ""
    told_running: set[int] = field(default_factory=set)  # jobs of which it was said that they run
    began_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        launcher = (sys.executable, "-I", "-S", activate.__file__)
        self.environments = Environments(self.environ, self.config.python, launcher)
        self.set_modes()
        self.bell = self.places.bell
        self.afterwards = Afterwards(
            self.db, self.places, self.environ, self.folder, lambda text, level, job: self.say(text, level, job=job)
        )
        self.pruner = Pruner(self.db, self.places, lambda text, level: self.say(text, level, kind="pruned"))

    def set_modes(self) -> None:
        """Hand the settings for environments to those who look them up."""
        self.environments.mode, self.environments.limit_s = self.config.conda_mode, self.config.activation_limit

    # -- building the world -------------------------------------------------------------------------------

    def open(self) -> None:
        """Build the world from the store and settle what was in hand. Raises StoreTrouble."""
        now = self.now()
        connection = self.db.connection
        try:
            self._load(connection, now)
        except sqlite3.Error as error:
            raise trouble(error, self.places.store) from error

    def _load(self, connection: sqlite3.Connection, now: Now) -> None:
        in_hand = list(rows.in_hand(connection))
        held = rows.holdings(connection)
        busy = {gpu for job in in_hand for gpu in job.gpus} | {gpu for holding, _ in held for gpu in holding.gpus}
        retired = busy - {gpu.index for gpu in self.gpus}
        world = World(
            Fleet(self.gpus, cpu_slots_of(self.config), retired),
            self.fetch,
            policy_of(self.config),
            self._missing,
            self._blocker,
        )
        if self.eyes is not None:
            # What was seen stays seen when a world is built anew: readings are no decisions.
            if [card.gpu for card in self.telemetry.cards.values()] != self.gpus:
                peaks, self.telemetry = self.telemetry.peaks, Telemetry.of(self.gpus, limits_of(self.config), now)
                self.telemetry.peaks = peaks
            world.fleet.telemetry = self.telemetry
            self.telemetry.tenants = world.tenants
        world.fleet.paused_mask = mask_of(rows.paused_gpus(connection))
        world.queue_paused = bool(rows.meta(connection, "queue_paused"))
        world.may_start = not self.closing
        world.pauses = Pauses(0, rows.pause_changes(connection))
        world.front = rows.lowest_place(connection)
        self.heard[:0] = self.lazy
        self.world, self.lazy, self.kept = world, [], {}
        self._show_world()
        for job in rows.last_ended(connection, 300)[::-1]:
            if job.succeeded and job.started_at and job.finished_at:
                world.estimates.learn(job.spec, job.need, job.finished_at - job.started_at)
        facts: list[Fact] = []
        this_boot = boot_id()
        stale = []
        for holding, boot in held:
            if boot == this_boot:
                world.hold(holding)
            else:
                stale.append(holding.key)
        for job in in_hand:
            world.adopt(job, now)
        if self.eyes is not None and self.first_readings is not None:
            facts.append(self.eyes.identified(self.first_readings))
            self.first_readings = None
        for job in in_hand:
            facts += self._told_of(job) or with_causes(self.world, self.runner.adopt(job))
            crash_point("adopt.found")
        for holding, boot in held:
            if boot == this_boot:
                _, _, attempt = holding.key.partition(".")
                self.runner.watch_leftovers(holding.key, holding.job, int(attempt), holding.processes)
        self.last_id = rows.last_id(
            connection
        )  # before the list: a job submitted in between is then met twice, not never
        facts += [Arrived(job) for job in rows.pending(connection)]
        note(self)
        for watched in self.files.values():
            watched.follower.mark = kept.mark_of(connection, watched.follower.path) or watched.follower.mark
        if stale:
            with self.db.writing() as writing:
                rows.save_holdings(writing, [], stale, this_boot)
        self.rung = True
        self.turn(facts, [], now, sync=True, edit=self._edit(now))  # before anything is placed: it may pause a GPU
        self.heard.clear()
        if self.eyes is not None:
            with self.db.writing(sync=False) as writing:
                save_readings(writing, self.telemetry.cards.values(), now)
        for job in self.world.live.values():
            if job.process is not None and job.state is JobState.RUNNING and job.id not in self.told_running:
                detail = {"gpus": list(job.gpus), "pid": job.process.pid, "attempt": job.attempt}
                text, level = sentence(Event(job.id, now.wall, "adopted", detail), job)
                self.say(text, level, kind="adopted", job=job)
                self.told_running.add(job.id)
        crash_point("adopt.committed")

    def _told_of(self, job: Job) -> list[Fact]:
        """How the attempt in hand ended, if that was told while it could not be recorded; its orphans are known to no one else."""
        told: list[Fact] = [
            fact
            for fact in self.heard
            if isinstance(fact, (Started, Ended, NeverRan, Unclaimed, Lost))
            and (fact.job, fact.attempt) == (job.id, job.attempt)
        ]
        return told if any(not isinstance(fact, Started) for fact in told) else []

    def _show_world(self) -> None:
        """Let the painter show this world, and go on from the picture that stands there."""
        numbers = {gpu.uuid: gpu.index for gpu in self.gpus}
        if not hasattr(self, "painter"):
            file = open_state_file(self.config.state_file, self.db, self.world, numbers)
            self.painter = Painter(file, self.db, lambda text, level, kind: self.say(text, level, kind=kind))
        self.painter.file.numbers = numbers
        self.painter.dirty = True
        self.world.pauses.revision = self.painter.file.revision

    def fetch(self, job_id: int) -> Job | None:
        """A job as the store has it, or None."""
        return self.kept.get(job_id) or rows.get(self.db.connection, job_id)

    def _blocker(self, identity: str) -> Job | None:
        return rows.blocker_of(self.db.connection, identity)

    def found_for(self, job: Job) -> Found | Missing:
        """What a job would run with: looked up once a turn."""
        spec = job.spec
        key = (spec.script, spec.conda_env, spec.cwd, spec.env_file, "" if spec.is_script else spec.arguments[0])
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = self.environments.find(job)
        return found

    def _missing(self, job: Job) -> str:
        found = self.found_for(job)
        return found.sentence if isinstance(found, Missing) else ""

    @staticmethod
    def now() -> Now:
        return Now(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def follow(self, path: str, parse: Parser) -> None:
        """Take jobs from this file."""
        mark = kept.mark_of(self.db.connection, path)
        self.files[path] = Watched(Follower(path, mark, self.config.trust_group), parse)
        self.changed.add(path)

    # -- one tick -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take in whatever happened and act on it. Nothing outside can make this raise."""
        now = self.now()
        if now.mono < self.broken_until:
            return
        try:
            if self.broken_until:
                self._mend()
            self._tick(now)
            self._whole_again()
            self.afterwards.step()
            if self.journal is not None:
                self.journal.step()
            if self.page is not None:
                self.page.step()
            busy = self.again or self.rung or self.lazy or self.painter.dirty
            self.pruner.step(self.config, quiet=not busy)
        except StoreTrouble as error:
            self._broke(error)
        except sqlite3.Error as error:
            self._broke(trouble(error, self.places.store))
        except Exception as error:  # noqa: BLE001  a defect of ours must not end the daemon: the jobs need it
            where = traceback.format_exc().strip().replace("\n", " | ")
            self._broke(
                passing(error, self.places.house) or StoreTrouble(f"{REPORT_IT}: {error!r} ({where})", code=DEFECT)
            )
        with contextlib.suppress(OSError):  # a full disk: the records are lost, the jobs are not
            self.flush_log()
        if self.history is not None:
            self.history.look(self.world, now, time.monotonic() - now.mono)

    def _tick(self, now: Now) -> None:
        self._leave_helpers_alone()
        self.heard += with_causes(self.world, self.runner.look())
        batches = self._batches(now)
        if batches:
            crash_point("ingest.read")
        edit = self._edit(now)
        self.changed.clear()
        read = self._read_gpus(now)
        facts = [*self.heard, *self._missing_again(now), *read]
        timer = self.world.next_timer()
        due = timer is not None and timer <= now.mono
        urgent = [fact for fact in facts if not isinstance(fact, Started)]
        if not (urgent or batches or edit or due or self.rung or self.again):
            if facts:
                if not self.lazy:
                    self.lazy_due = now.mono + LAZY_S
                self.lazy += facts
                self.heard.clear()
            if self.lazy and now.mono >= self.lazy_due:
                lazy, self.lazy = self.lazy, []
                self.turn(lazy, [], now, sync=False)
            self._paint_if_due(now)
            return
        facts = self.lazy + facts
        self.heard[:0] = self.lazy
        self.lazy = []
        if self.eyes is not None and (batches or self.rung) and not self.telemetry.fresh(self.telemetry.cards, now):
            self.eyes.read(now.mono - FRESH_S)  # while the new jobs are written down: they will want to know
        only_read = bool(read) and len(urgent) == len(read) and not (batches or edit or due)
        self.turn(facts, batches, now, sync=not only_read or bool(self.world.waiting()), edit=edit)
        self.heard.clear()
        self._paint_if_due(self.now())

    def turn(
        self,
        facts: list[Fact],
        batches: list[tuple[Reader, Batch]],
        now: Now,
        *,
        sync: bool,
        edit: Edit | None = None,
    ) -> None:
        """Decide and record in one transaction, then act and tell."""
        gathered = Gathered()
        kinds = {type(fact) for fact in facts}
        if Ended in kinds:
            crash_point("finish.seen")
        rung, self.rung, self.again = self.rung, False, False
        db = self.db
        with db.writing(sync=sync) as connection:
            for reader, batch in batches:
                reader.take(connection, batch, now.wall, gathered)
                crash_point("ingest.batch")
            wishes: list[tuple[float, int, Request]] = [] if edit is None else [(edit.at, 0, edit.request)]
            # Whoever has written a job, and not rung yet, must not be passed over by our own jobs with higher ids.
            passed_over = gathered.jobs and gathered.jobs[0].id != self.last_id + 1
            if rung or edit or passed_over:
                known = {job.id for job in gathered.jobs}
                arrived = [job for job in rows.new_pending(connection, self.last_id) if job.id not in known]
                gathered.jobs += arrived
                wishes += rows.asked(connection)
            gathered.left_for_start = {row for at, row, _ in wishes if row and at < self.began_at}
            asked = [Asked(row, request) for _, row, request in sorted(wishes, key=lambda wish: wish[:2])]
            for job in (*gathered.jobs, *gathered.changed):
                if len(self.kept) < MOST_KEPT or job.id in self.kept:
                    self.kept[job.id] = job
            news = [Arrived(job) for job in (*gathered.jobs, *gathered.changed)]
            plan = decide(self.world, [*facts, *news, *asked], now, random.random())
            if plan.starts:
                db.check_in_place()  # nothing is started that is written down only in a file that has no name any more
            launches = prepare(self, plan, now)
            rows.save(connection, plan.changed.values())
            for job in plan.respecs.values():
                rows.respec(connection, job)
            wanted = wanted_of(plan.changed.values())
            if wanted:
                rows.note_calls(connection, wanted)
            tallies.count(connection, plan.events, plan.changed)
            rows.write_events(connection, [*gathered.events, *plan.events])
            rows.answer(connection, plan.answers)
            if plan.held or plan.freed:
                rows.save_holdings(connection, plan.held, plan.freed, boot_id())
            if any(isinstance(fact, Readings) for fact in facts):
                save_readings(connection, self.world.fleet.telemetry.cards.values(), now)
            if plan.pauses_changed:
                world = self.world
                rows.save_pauses(connection, ids_of(world.fleet.paused_mask), world.queue_paused, world.pauses.changes)
            if plan.starts:
                crash_point("start.chosen")
        if self.journal is not None:
            self.journal.take(plan, gathered)
        if gathered.jobs:
            self.last_id = max(self.last_id, *(job.id for job in gathered.jobs))
        self.afterwards.due = self.afterwards.due or bool(wanted)
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
            self.painter.took(edit)
        for _, batch in batches:
            self.files[batch.mark.path].follower.accept(batch)
            self.again = self.again or batch.more
        self._act(plan, launches, facts)
        if len(plan.starts) >= 256:
            self.again = True
        announce(self, plan, gathered)
        if Ended in kinds:
            crash_point("finish.told")
        if plan.read_since is not None and self.eyes is not None:
            self.eyes.read(plan.read_since)
        for job_id, moved in plan.changed.items():
            if moved.state is not JobState.PENDING:
                self.kept.pop(job_id, None)
        self.found.clear()
        if plan.empty and not plan.notices and not gathered.jobs and not self.world.waiting() and not rung:
            return  # nothing to be seen but another reading
        self.painter.dirty = True

    def _act(self, plan: Plan, launches: list[tuple[Job, Launch]], facts: list[Fact]) -> None:
        for job, launch in launches:
            self.runner.start(job, launch)
        if launches:
            self.runner.flush()
            crash_point("start.sent")
        for stop in plan.stops:
            self.runner.stop(stop.job, stop.hard)
            crash_point("cancel.kill_sent" if stop.hard else "cancel.term_sent")
        for fact in facts:
            if isinstance(fact, (Ended, Lost)) and fact.leftovers:
                self.runner.watch_leftovers(f"{fact.job}.{fact.attempt}", fact.job, fact.attempt, fact.leftovers)

    def say(self, text: str, level: int = 20, *, kind: str = "", job: Job | None = None) -> None:
        """Tell whoever listens."""
        text = without_secrets(text)
        if job is None:
            self.listener(Said(text, level, kind))
        else:
            log = (
                "" if job.spec.gzip and job.runner != "screen" else job.log
            )  # packed, it is nothing to be shown as it comes
            self.listener(Said(text, level, kind, job.id, job.spec.shown_name, log))

    # -- what happened ------------------------------------------------------------------------------------

    def _interval(self) -> float:
        """Between two readings; short while one sample wants another."""
        interval = limits_of(self.config).interval_s
        return min(FRESH_S, interval) if self.telemetry.uncertain else interval

    def _read_gpus(self, now: Now) -> list[Fact]:
        """What the GPUs say, when it is time."""
        if self.eyes is None:
            return []
        found = self.eyes.look(now.mono, self._interval())
        self._leave_helpers_alone()
        if found is None:
            return []
        if bind_unread(self, found):
            self.open()  # the GPUs have names now: the world is built anew with them
        return [found]

    def _leave_helpers_alone(self) -> None:
        """The processes of a reader of the GPUs, what is called at the end of a job, and the page are no job's."""
        readers = self.eyes.probe.sessions() if self.eyes is not None else set()
        page = self.page.sessions() if self.page is not None else set()
        self.runner.leave_alone(readers | self.afterwards.sessions() | page)

    def _batches(self, now: Now) -> list[tuple[Reader, Batch]]:
        self.changed |= self.watcher.changed()
        slow = now.mono >= self.scan_due
        if slow:
            self.scan_due = now.mono + min(self.config.monitor_interval, self.config.poll_interval or math.inf)
            self.watcher.rearm()
            self.db.check_in_place()
            look_at_runner(self)
            for path, watched in self.files.items():
                watched.follower.check_whole()
                self.changed.add(path)
            self.rung = True
        if self.bell in self.changed:
            self.rung = True
        self.rereading.look(self, now, slow)
        found: list[tuple[Reader, Batch]] = []
        for path, watched in self.files.items():
            if path in self.changed or self.again or (watched.due and now.mono >= watched.due):
                batch = self._look_at(path, watched, now)
                if batch is not None:
                    found.append((self._reader(watched), batch))
        return [*self._refused_again(), *found]

    def _refused_again(self) -> list[tuple[Reader, Batch]]:
        """Once after the start, if the GPUs are others than they were: lines that were refused may be jobs now."""
        found = []
        for path in self.files.keys() - self.judged:
            watched, machine = self.files[path], machine_text(self.gpus, self.config.min_free_mem_mb)
            if rows.meta(self.db.connection, JUDGED_FOR + path) == machine:
                self.judged.add(path)
                continue
            batch = refused_again(self.db.connection, watched.follower, machine, self.known_refusals)
            if batch is not None:  # else as soon as the file is there
                found.append((self._reader(watched), batch))
        return found

    def _look_at(self, path: str, watched: Watched, now: Now) -> Batch | None:
        watched.due = 0.0
        try:
            batch = watched.follower.look(now.mono)
        except (FileTrouble, OSError) as error:
            text = str(error) if isinstance(error, FileTrouble) else f"{path}: cannot be read: {error.strerror}"
            if text != watched.trouble:
                watched.trouble = text
                self.say(text, 30, kind="file")
                note(self)
            return None
        if watched.trouble and (batch is not None or watched.follower.look_again_at is None):
            watched.trouble = ""
            self.say(f"{path}: can be read now", 20, kind="file")
            note(self)
        if watched.follower.look_again_at is not None:
            watched.due = watched.follower.look_again_at
        return batch

    def _reader(self, watched: Watched) -> Reader:
        managed = ids_of(self.world.fleet.all_mask)
        door = jobs_csv.Door(os.path.dirname(watched.follower.path), self.environments.home, managed)
        memory = self.config.min_free_mem_mb
        return Reader(watched.parse, door, self.table, self.world.fleet, self.known_refusals, memory)

    def _edit(self, now: Now) -> Edit | None:
        heard = self.config.state_file in self.changed
        return self.painter.look(now, self.config.state_interval, heard=heard)

    def _missing_again(self, now: Now) -> list[Fact]:
        """Look again at scripts and environments that were missing."""
        self.found.clear()
        if now.mono < self.missing_due:
            return []
        self.missing_due = now.mono + MISSING_AGAIN_S
        missing = sorted(job_id for job_id, code in self.world.parked.items() if code == "missing")
        # A few a round, in turn: ten thousand lines of a wrong folder must not keep a core busy.
        round_ = [job_id for job_id in missing if job_id > self.missing_from][:MISSING_A_ROUND] or missing[
            :MISSING_A_ROUND
        ]
        self.missing_from = round_[-1] if round_ else 0
        jobs = [job for job in map(self.fetch, round_) if job is not None]
        return [Arrived(job) for job in jobs if not self._missing(job)]

    # -- the state file and the reasons -------------------------------------------------------------------

    def _paint_if_due(self, now: Now) -> None:
        due = self.painter.due(busy=self.again)
        if due is not None and now.mono >= due:
            self.paint(now)

    def paint(self, now: Now) -> None:
        """Repaint the state file and the reasons; an edit that came meanwhile is taken in first."""
        edit = self.painter.look(now, self.config.state_interval, heard=True)
        if edit is not None:
            self.turn([], [], now, sync=True, edit=edit)
        try:
            self.painter.paint(self.world, now)
        except sqlite3.Error as error:
            raise trouble(error, self.places.store) from error

    # -- when the store cannot be used --------------------------------------------------------------------

    def _broke(self, error: StoreTrouble) -> None:
        """Nothing was recorded: do nothing, try again soon, then build the world anew from what the store holds."""
        self.broken_times += 1
        anew = error.code == DECIDE_ANEW
        wait = 0.01 if anew else min(LONGEST_BREAK_S, 2.0 ** (self.broken_times - 1))
        self.broken_until = time.monotonic() + wait
        if not anew and str(error) != str(self.broken or ""):
            self.broken = error
            self.say(f"{error}; running jobs go on, nothing is started until then", 40, kind="store")

    def _mend(self) -> None:
        if self.db.suspect:
            self.db.renew()
        if self.broken_times >= REFUSED_AFTER:
            self._refuse_requests()
        self.open()
        if self.journal is not None:
            self.journal.distrust()
        self.changed |= {*self.files, self.config.state_file}  # what came meanwhile was heard of, and not taken
        self.broken_until = 0.0

    def _whole_again(self) -> None:
        """A turn went well: what was wrong is over."""
        self.broken_times = 0
        if self.broken is not None:
            over = "all goes on as before" if self.broken.code == DEFECT else "the store can be used again"
            self.say(over, 20, kind="store")
        self.broken = None

    def _refuse_requests(self) -> None:
        """Refuse all requests that wait: one that cannot be carried out would be tried again for ever."""
        why = f"could not be carried out: {self.broken or 'the store changes faster than it is read'}"
        with self.db.writing() as connection:
            rows.answer(connection, [Answer(row, 1, (why,)) for _, row, _ in rows.asked(connection)])

    # -- waiting ------------------------------------------------------------------------------------------

    def timeout(self) -> float:
        """Seconds until something falls due by itself."""
        now = time.monotonic()
        if self.broken_until:
            return max(0.0, self.broken_until - now)
        if self.again or self.rung:
            return 0.0
        due = [self.scan_due, self.painter.look_due, self.pruner.due(), self.rereading.due]
        sometimes = (self.world.next_timer(), self.runner.next_look(), self.painter.due(busy=False))
        due += [moment for moment in sometimes if moment is not None]
        if self.eyes is not None:
            due.append(self.eyes.next_look(self._interval()))
        due += [watched.due for watched in self.files.values() if watched.due]
        if self.lazy:
            due.append(self.lazy_due)
        beside = (one.due() for one in (self.journal, self.page) if one is not None)
        due += [moment for moment in beside if moment is not None]
        if "missing" in self.world.parked.values():
            due.append(self.missing_due)
        if self.history is not None:
            due.append(self.history.due)
        return max(0.0, min(due) - now)

    def idle(self) -> bool:
        """Nothing runs, nothing waits, nothing is still to be read."""
        return not (self.world.live or self.world.waiting() or self.again or self.rung or self.lazy) and not any(
            watched.due for watched in self.files.values()
        )

    def stuck(self) -> bool:
        """Nothing runs, and what waits cannot start by itself."""
        world = self.world
        if world.live or world.holdings or self.again or self.rung or self.lazy or not world.waiting():
            return False
        if "backoff" in world.parked.values():
            return False
        codes = {reason.code for reason in world.class_reasons().values()}
        if codes & PASSING or any(world.fleet.find(kind) is not None for kind in world.queue.classes()):
            self.hopeless_since = None
            return False
        if not codes & LASTING:
            return True
        now = time.monotonic()  # one bad reading must not end a drain
        self.hopeless_since = self.hopeless_since or now
        return now - self.hopeless_since >= HOPE_S

    def wait(self, epoll: select.epoll, wakeup: int) -> None:
        """Sleep until something happens."""
        limit = min(self.timeout() + 0.001, 3600.0)
        if self.broken_until:
            select.select([wakeup], [], [], limit)  # the others stay readable until the world is built anew
        elif limit > 0.001:
            # Rounded up to a whole millisecond, which is what epoll can wait for: else the end would be a busy loop.
            epoll.poll(limit)


PARSERS: dict[str, Parser] = {"jobs_file": jobs_csv.parse, "commands_file": commands.parse}
