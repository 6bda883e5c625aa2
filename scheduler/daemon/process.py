"""The daemon process from start to end: lock, settings, GPUs, signals, loop, shutdown."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import select
import signal
import socket
import sqlite3
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scheduler.core.config import Config
from scheduler.core.errors import Refused, SchedulerError, StoreTrouble, UsageError
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Job
from scheduler.core.log_message import Listener, LogMessage
from scheduler.core.model_table import ModelTable
from scheduler.core.placement_class import class_of
from scheduler.core.protocols import Runner
from scheduler.daemon.config_reload import ConfigReload, note_of
from scheduler.daemon.context import Context
from scheduler.daemon.helper_child import HelperChild, web_child
from scheduler.daemon.history_writer import HistoryWriter
from scheduler.daemon.interrupt import Interrupt, Question
from scheduler.daemon.journal_writer import JournalWriter, check_apart
from scheduler.daemon.loop import Daemon
from scheduler.daemon.main_log import MainLog
from scheduler.daemon.managed_gpus import ManagedGpus
from scheduler.daemon.parts import Part
from scheduler.daemon.problems import passing
from scheduler.daemon.program_lookup import ProgramLookup, UserProgramLookup
from scheduler.daemon.queue_export import script_of
from scheduler.daemon.rebooking import rebooked, update_needs
from scheduler.daemon.shared_bookings import SharedBookings
from scheduler.gpus.monitor import GpuMonitor, Managed, managed_gpus, moved_gpus, other_schedulers
from scheduler.intake.file_watcher import file_system_of, watcher
from scheduler.intake.parsers import PARSERS
from scheduler.intake.settings import Settings, load, model_table
from scheduler.intake.tail import check_places, check_private
from scheduler.recovery.ingest_recovery import note_watched
from scheduler.runners.direct import DirectRunner
from scheduler.runners.screen import ScreenRunner, tidy
from scheduler.store import jobs as rows
from scheduler.store import waiting_jobs
from scheduler.store.cluster import save_cluster
from scheduler.store.daemon_lock import DaemonLock, check_no_other, register
from scheduler.store.database import Database, trouble
from scheduler.store.gpu_renumbering import follow_moved
from scheduler.store.paths import Places, make_private_folder
from scheduler.store.readings import forget_readings
from scheduler.store.seen_runs import learned_of
from scheduler.store.store_identity import check_home
from scheduler.system.atomic_files import replace_file
from scheduler.system.proc import boot_id
from scheduler.system.processes import own_limits, seen

if TYPE_CHECKING:
    from scheduler.daemon.cluster import ClusterLink
    from scheduler.runners.engine import EngineRunner

MOST_LISTED = 1000  # ended jobs in the saved list


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of a daemon: exit code and, after a drain, a sentence for each unfinished job or unread file."""

    code: int
    left: tuple[str, ...] = ()


def _runner_name(config: Config) -> str:
    if config.engine != "local":
        return config.engine
    return "screen" if config.screen else "direct"


def check_engine(connection: sqlite3.Connection, config: Config) -> None:
    """Raise Refused if unfinished attempts belong to another engine than the one of the settings."""
    engine = config.engine
    for job in rows.in_hand(connection):
        its = "local" if job.runner_kind.owns_gpus else job.runner
        if its != engine:
            raise Refused(
                f"job {job.id} still runs with engine {its}, and only a scheduler with that engine can watch it",
                do=f"start with --engine {its} until its jobs have ended (pause the queue: gpujob queue pause), or cancel them",
            )


def shared_note(places: Places) -> str:
    """Return a warning if the store is on a file system that several machines share, else an empty text."""
    found = file_system_of(places.state_dir)
    if found is None or not found.shared:
        return ""
    return (
        f"{places.state_dir} is on {found.name}, which other machines may share: use this scheduler only from this machine, or "
        "keep its state on a local disk (--state-file)"
    )


@dataclass(frozen=True, slots=True)
class UsersParts:
    """Parts of a scheduler for the jobs of several users, in place of those for one user.

    ``runner``: makes the runner; ``files``: makes the part that has files of users read; ``front`` and ``page``: make the
    processes that talk to the users, from the daemon's epoll object and a function that logs a sentence.
    """

    runner: Callable[[Context], Runner]
    lookup: UserProgramLookup
    files: Callable[[Context, Daemon], Part]
    front: Callable[[select.epoll, Callable[[str, int], None]], HelperChild]
    page: Callable[[Config, select.epoll, Callable[[str, int], None]], HelperChild]


class _Stopped(Exception):
    """Raised if SIGTERM arrives before the loop begins."""


class DaemonProcess:
    """One run of the scheduler process. `run` does everything and returns when the scheduler ends."""

    def __init__(
        self, settings: Settings, flags: dict[str, object], listener: Listener, environ: dict[str, str]
    ) -> None:
        self.settings, self.flags, self.listener, self.environ = settings, flags, listener, environ
        self.config = settings.config
        self.places = Places(self.config.state_file)
        # Signals not handled yet. A signal handler can run at any point of the code, so it only appends to this queue.
        self.caught: deque[int] = deque()
        self.stop_signal = 0  # number of the signal that ends the scheduler; 0: none yet
        self.ready: Callable[[], None] = lambda: None  # called when the start is complete
        self.cluster: ClusterLink | None = None  # with an engine such as Slurm
        self.users: UsersParts | None = None  # with jobs of several users (`gpujobd`)
        self.question: Question | None = None  # asked on Ctrl-C while jobs run; None: Ctrl-C ends the scheduler

    def run(self, *, drain: bool = False) -> Ending:
        """Run the daemon until a signal ends it or, with ``drain``, until no job can run any more.

        Raises SchedulerError if the daemon cannot start, and KeyboardInterrupt if Ctrl-C is pressed during the start.
        """
        # A handler must not raise: Python ignores exceptions inside __del__ methods, so the signal could be lost.
        early = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, lambda number, _frame: self.caught.append(number)) for number in early}
        try:
            return self._run(drain)
        except _Stopped:
            self.stop_signal = signal.SIGTERM
            return Ending(0)
        except sqlite3.Error as error:  # from a read before the loop, which handles such errors itself
            raise trouble(error, self.places.store) from error
        except OSError as error:
            if error.filename or not error.errno:
                raise
            # The error of a write to an open file names no file.
            raise OSError(error.errno, error.strerror, self.places.state_dir) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _check_early(self) -> None:
        """Raise KeyboardInterrupt (SIGINT) or _Stopped (SIGTERM) if a signal arrived during the start."""
        if self.caught:
            raise KeyboardInterrupt if self.caught[0] == signal.SIGINT else _Stopped

    def _run(self, drain: bool) -> Ending:
        folder = os.getcwd()
        config = self.config
        for path in (config.jobs_file, config.commands_file):
            if path and os.path.isfile(path):
                check_private(path, os.stat(path), config.trust_group)
        check_apart(config, self.settings.config_file, self.places)
        table = model_table(config.llm_config, config.trust_group)
        self.places.make()
        check_places(config.state_file, (config.state_file,), config.trust_group)
        me = seen(os.getpid())
        daemon_lock = DaemonLock(self.places)
        info = {"pid": os.getpid(), "ticks": me.ticks if me else 0, "boot": boot_id(), "started_at": time.time(),
                "host": socket.gethostname(), "runner": _runner_name(config)}  # fmt: skip
        daemon_lock.take(info)
        registered = ""
        if config.engine != "local" and config.screen:
            raise UsageError("--screen needs --engine local: on a cluster no job has a screen session")
        try:
            check_no_other(self.environ, self.places)
            make_private_folder(config.log_dir)
            log = self._open_log()
            db = Database(self.places, checkpoints=True, lock_wait_s=2.0)
            try:
                check_home(db, self.places)
                check_engine(db.connection, config)
                stored = rows.gpus(db.connection)

                def say(text: str) -> None:
                    self.listener(LogMessage(text, 30))

                if config.engine != "local":
                    from scheduler.daemon.cluster import ClusterLink  # imports HTTP and more: 70 ms

                    self.cluster = ClusterLink(lambda: self.config, self.environ, self.places)
                    managed = self.cluster.managed(db.connection, say, self._check_early)
                else:
                    managed = managed_gpus(config, self.environ, stored, say, self._check_early)
                self._check_early()
                if config.min_free_mem_mb and managed.gpus and managed.probe is None:
                    managed.notes.append(
                        "min_free_mem_mb cannot be checked, because GPUs are not read: each GPU runs one job at a time"
                    )
                with db.writing() as connection:
                    managed.notes += follow_moved(connection, moved_gpus(stored, managed.shown))
                    if self.cluster is not None:
                        self.cluster.save(connection)
                    else:
                        save_cluster(connection, None)
                    rows.save_gpus(connection, managed.gpus)
                    needs = replace(table, learned=learned_of(connection)) if config.learn else table
                    for job in rebooked(config, managed.gpus, needs, waiting_jobs.from_commands_file(connection)):
                        rows.respec(connection, job)
                        rows.save(connection, [job])
                    update_needs(connection, managed.gpus, needs, at_start=True)
                    forget_readings(connection)
                    rows.set_meta(connection, "jobs_file", config.jobs_file)
                    rows.set_meta(connection, "llm_config", config.llm_config)
                    rows.set_meta(connection, "model_table", table.as_json())
                    rows.set_meta(connection, "settings", note_of(self.settings))
                    rows.set_meta(connection, "begun_by", "run" if self.settings.dispatcher else "")
                registered = register(self.environ, config.state_file)
                return self._serve(db, managed, table, folder, drain, log)
            finally:
                if self.cluster is not None:
                    self.cluster.runner.close()
                db.close()
        finally:
            if registered and os.path.exists(registered):
                os.unlink(registered)
            daemon_lock.leave()

    def _open_log(self) -> MainLog | None:
        if not self.config.log_file:
            return None
        try:
            return MainLog(self.config.log_file)
        except OSError as error:
            raise SchedulerError(f"cannot open the main log: {error.strerror}", where=self.config.log_file) from None

    def _serve(
        self, db: Database, managed: Managed, table: ModelTable, folder: str, drain: bool, log: MainLog | None
    ) -> Ending:
        config = self.config
        paths = [path for path in (config.jobs_file, config.commands_file) if path]
        kinds = {config.jobs_file: "jobs_file", config.commands_file: "commands_file"}
        note_watched(self.places, {path: kinds[path] for path in paths})

        def tell(said: LogMessage) -> None:
            if log is not None:
                log(said)
            self.listener(said)

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
        context = Context(self.places, config, db, self.environ, folder, tell, table, shared=self.users is not None)
        context.learned = learned_of(db.connection)
        runner: Runner = self.users.runner(context) if self.users is not None else self._runner(soft)
        if config.screen and self.users is None:
            sockets = self.environ.get("SCREENDIR", "")
            with db.writing() as connection:
                rows.set_meta(connection, "screen_folder", os.path.abspath(sockets) if sockets else "")
        watching, how = watcher(config.watch, {os.path.dirname(path) for path in paths})
        if self.cluster is not None:
            self.cluster.config = lambda: context.config

        def live_jobs() -> Iterable[Job]:
            return daemon.state.live.values()

        monitor = GpuMonitor(managed.probe, config.state_file, live_jobs) if managed.probe is not None else None
        gpus = ManagedGpus(context, managed.gpus, managed.shown, monitor, managed.first)
        limits = {**own_limits(), resource.RLIMIT_NOFILE: (soft, hard)}
        lookup = ProgramLookup(context) if self.users is None else self.users.lookup
        daemon = Daemon(context, runner, watching, gpus, limits, lookup)
        if self.cluster is None:
            shared = SharedBookings(context, watching, runner.supervisors, daemon.wake, daemon.problems.note)
            daemon.bookings = shared
            daemon.parts.append(shared)
            daemon.problems.sources.append(shared.troubles)
        again = self._settings_loader(folder)
        daemon.reload = ConfigReload(context, daemon, self.settings, again, os.path.exists(config.llm_config))
        if log is not None:
            daemon.flush_log = log.flush
        for text in (*managed.notes, how, shared_note(self.places)):
            if text:
                tell(LogMessage(text, 30))
        watching.watch(
            [*paths, self.places.wakeup, config.state_file]
            + [path for path in (config.llm_config, self.settings.config_file) if path]
        )
        epoll, wakeup = self._signals()
        try:
            gc.disable()  # the waiting jobs are many new objects, and none of them is garbage
            try:
                daemon.open()
            finally:
                gc.enable()
            if config.journal:
                journal = JournalWriter(
                    db,
                    config.journal,
                    lambda text, level: context.say(text, level, kind="journal"),
                    daemon.problems.note,
                )
                daemon.journal = journal
                daemon.parts.append(journal)
                daemon.problems.sources.append(journal.troubles)
                journal.begin()
            if config.history:
                history = HistoryWriter(
                    self.places.history,
                    lambda: daemon.state,
                    lambda text, level: context.say(text, level, kind="history"),
                )
                daemon.last.append(history)
                history.begin()
            for kind, parse in PARSERS.items():
                if getattr(config, kind):
                    daemon.files.follow(getattr(config, kind), parse)
            epoll.register(watching.fd, select.EPOLLIN)
            for fd in (*runner.descriptors(), *(managed.probe.descriptors() if managed.probe is not None else ())):
                epoll.register(fd, select.EPOLLIN)
            gpus_text = gpu_ids_text(gpu.index for gpu in managed.gpus) or "none"
            for other in other_schedulers() if self.cluster is None else ():
                tell(LogMessage(other, 30))
            tell(LogMessage(f"scheduler started, pid {os.getpid()}, GPUs {gpus_text}, state file {config.state_file}"))
            daemon.tick()
            gc.freeze()  # imported modules are never freed: the garbage collector need not scan them
            gc.set_threshold(20_000, 20, 50)
            if config.web and not self.settings.dispatcher:

                def tell_page(text: str, level: int) -> None:
                    context.say(text, level, kind="page")

                if self.users is not None:
                    page = self.users.page(config, epoll, tell_page)
                else:
                    page = web_child(
                        config.state_file, self.settings.config_file, config.web_port, self.environ, epoll, tell_page
                    )
                daemon.parts.append(page)
                daemon.helpers.append(page.sessions)
            if self.users is not None:
                daemon.parts.append(self.users.files(context, daemon))
                front = self.users.front(epoll, lambda text, level: context.say(text, level, kind="front"))
                daemon.parts.append(front)
                daemon.helpers.append(front.sessions)
            self.ready()
            ending = self._loop(daemon, context, epoll, wakeup, drain)
            if daemon.journal is not None:
                daemon.journal.end()
            return ending
        except (SchedulerError, _Stopped, sqlite3.Error):  # `run` converts sqlite3.Error
            raise
        except Exception as error:
            known = passing(error, self.places.state_dir)
            if known is not None:
                raise known from error
            where = traceback.format_exc().strip().replace("\n", " | ")
            text = f"the scheduler ended by an internal error of gpujob, please report it: {error!r} ({where})"
            if log is not None:
                log(LogMessage(text, 50))
            raise SchedulerError(text, do="running jobs continue; start the scheduler again: gpujob start") from error
        finally:
            daemon.close()
            epoll.close()
            watching.close()
            runner.close()
            if log is not None:
                log.close()

    def _runner(self, descriptors: int) -> DirectRunner | ScreenRunner | EngineRunner:
        """Return the runner that starts the jobs. Raises SchedulerError if this runner cannot work on this machine."""
        if self.cluster is not None:
            return self.cluster.runner
        places, state_file = self.places, self.config.state_file
        if self.config.screen:
            short_id = hashlib.blake2b(os.fsencode(state_file), digest_size=2).hexdigest()
            return ScreenRunner(places.attempts, state_file, self.environ, places.sessions, short_id, descriptors)
        tidy(places.sessions, places.attempts)  # files of an earlier daemon in screen mode
        errors = os.path.join(places.state_dir, "supervisor.err")
        return DirectRunner(places.attempts, state_file, self.environ, errors, descriptors)

    def _loop(self, daemon: Daemon, context: Context, epoll: select.epoll, wakeup: int, drain: bool) -> Ending:
        interrupt = Interrupt(context, self.question)
        while True:
            while self.caught:
                number = self.caught.popleft()
                if number == signal.SIGTERM or interrupt.on_ctrl_c(daemon, epoll):
                    self._end_by(number)
            if self.stop_signal:
                break
            daemon.wait(epoll, wakeup)
            _empty(wakeup)
            daemon.tick()
            if interrupt.look(daemon, epoll) or (daemon.closing and not daemon.state.live):
                self._end_by(signal.SIGINT)
            if drain and not daemon.outage.lasts and not self.stop_signal and not self.caught:
                if daemon.idle():
                    self._record_last(daemon)
                    if not daemon.idle():
                        continue
                    unread = tuple(daemon.files.unread())
                    if not unread:
                        context.say("no job is left to run")
                    return Ending(1 if unread or daemon.messages.ended_badly else 0, unread)
                if daemon.stuck():
                    self._record_last(daemon)
                    if daemon.stuck():  # the last pass may have started a job
                        return Ending(1, self._left(daemon, context))
        self._record_last(daemon)
        if self.stop_signal == signal.SIGTERM and self.config.save_list:
            self._save_list(context)
        left = len(daemon.state.live)
        goes_on = f"; {left} running job{'s continue' if left > 1 else ' continues'}" if left else ""
        how = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[signal.Signals(self.stop_signal)]
        context.say(f"scheduler ended by {how}{goes_on}")
        return Ending(130 if self.stop_signal == signal.SIGINT else 0)

    def _end_by(self, number: int) -> None:
        """Make the scheduler end after this pass because of signal ``number``. SIGTERM replaces an earlier SIGINT."""
        if self.stop_signal != signal.SIGTERM:
            self.stop_signal = number

    def _record_last(self, daemon: Daemon) -> None:
        """Record the postponed observations and write the state file for the last time. Log an error of the store."""
        try:
            daemon.settle()
        except StoreTrouble as error:
            self.listener(LogMessage(str(error), 40))

    def _save_list(self, context: Context) -> None:
        connection = context.db.connection
        jobs = [*rows.in_hand(connection), *sorted(rows.pending(connection), key=lambda job: job.turn)]
        text = script_of(jobs, rows.last_ended(connection, MOST_LISTED)[::-1], time.time())
        try:
            replace_file(self.config.save_list, text.encode(errors="surrogateescape"))
        except OSError as error:
            context.say(f"cannot save the list of unfinished jobs in {self.config.save_list}: {error.strerror}", 30)
        else:
            context.say(f"list of {len(jobs)} unfinished jobs saved in {self.config.save_list}")

    def _left(self, daemon: Daemon, context: Context) -> tuple[str, ...]:
        reasons = daemon.state.class_reasons()
        left = daemon.files.unread()
        for job in rows.pending(context.db.connection):
            why = job.reason or (reasons[class_of(job).key].sentence if class_of(job).key in reasons else "")
            left.append(f"job {job.id} ({job.spec.shown_name}) cannot start: {why}")
        return tuple(left)

    def _settings_loader(self, folder: str) -> Callable[[], Settings]:
        """Return a function that loads the settings again. Relative paths in flags are relative to ``folder``."""
        settings = self.settings
        return lambda: load(
            self.flags, self.environ, settings.config_file or None, folder,
            dispatcher=settings.dispatcher, others=settings.others,
        )  # fmt: skip

    def _signals(self) -> tuple[select.epoll, int]:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self.caught.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal does not end the scheduler
        epoll = select.epoll()
        epoll.register(read, select.EPOLLIN)
        return epoll, read


def _empty(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return
