"""`gpujob doctor`: looks at the machine and at a scheduler's folder, and changes nothing.

Each check runs beside the others under one limit, so that a disk or a program that hangs costs only its own line.
What is seen is judged in `core/health*.py`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from scheduler.core.config import OPTIONS, Config
from scheduler.core.errors import (
    DENIED,
    NO_PLAIN_FILE,
    UNSEEN,
    Damaged,
    SchedulerError,
    StoreTrouble,
    word,
)
from scheduler.core.gpu import HIGHEST_GPU_ID, Gpu, gpu_ids_text, parse_gpu_ids
from scheduler.core.job import Holding, Job
from scheduler.core.observations import Readings
from scheduler.doctor import findings_gpus, findings_machine, findings_state_dir, machine
from scheduler.doctor.check_runner import Driver, Running
from scheduler.doctor.findings_machine import Finding, Who
from scheduler.gpus.monitor import DECLARED, schedulers_here
from scheduler.intake.file_watcher import file_system_of
from scheduler.intake.settings import model_table
from scheduler.intake.tail import cannot_be_read, check_places, check_private, places_of
from scheduler.recovery.job_reconstruction import alive as living
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import Elsewhere, daemon_alive, holder
from scheduler.store.database import NothingYet, check_sound, held_still, open_for_reading
from scheduler.store.paths import Places, check_not_for_another
from scheduler.store.store_identity import belongs, home_of
from scheduler.system.processes import boot_id, lives, seen

LIMIT_S = 10.0  # for everything
ANSWER_S = 5.0  # for programs
DRIVER_S = 6.0
GHOST_AGAIN_S = 0.5  # memory without an owner is looked at twice: what has just ended gives its own back in a moment
MOST_FILES = 100_000
OLD_S = 120.0
ATTEMPT = re.compile(r"\d{1,18}\.\d{1,18}")
_ASIDE = re.compile(r"\.(.+)\.new-(\d{1,10})", re.DOTALL)
_PACKET = re.compile(r"(packet)-(\d{1,10})-\d+")  # what a daemon handed to its supervisor, by its pid
_JOB_LOG = re.compile(r"job_\d+_.*\.log", re.DOTALL)


@dataclass(slots=True)
class _StateDirSeen:
    """What the store and the daemon lock tell, looked at once for all checks."""

    alive: bool = False
    hidden: bool = False  # we may not look into it
    pid: int | None = None
    running: dict[str, tuple[Any, str]] = field(default_factory=dict)  # settings that the scheduler runs on
    jobs: int = 0
    in_hand: list[Job] | None = None  # None: not known
    holdings: list[tuple[Holding, str]] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    store: findings_state_dir.StoreSeen = field(default_factory=findings_state_dir.StoreSeen)


class Examination:
    """One look at everything. ``errors``: what is wrong with the settings, so that ``config`` holds only defaults.

    ``suffix``: what a command must say so that it means this scheduler.
    """

    def __init__(
        self,
        state_file: str,
        config: Config,
        config_file: str,
        errors: Sequence[SchedulerError],
        environ: Mapping[str, str],
        suffix: str,
    ) -> None:
        self.places, self.config, self.config_file, self.errors = Places(state_file), config, config_file, errors
        self.environ, self.suffix = environ, suffix
        self.who = Who(os.getuid(), _name(os.getuid()), machine.installer())
        self.owner = self.who.uid  # until it was looked at
        self.again = f"gpujob doctor{suffix}"
        self.said_gpus = config.gpus is not None or config.gpu_ids is not None
        self.dir_seen = _StateDirSeen()

    def _whose(self) -> int:
        """Whose scheduler it is or would be: by most of what stands there, for a single file may have gone astray."""
        above = os.path.dirname(self.places.state_dir)
        tops = (self.places.state_dir, self.places.state_file, self.places.store, self.places.attempts)
        owners = Counter(status.st_uid for status in map(_status, tops) if status is not None)
        if not owners:
            try:
                check_not_for_another(above)
            except SchedulerError:
                return os.stat(above).st_uid
            except OSError:
                return self.who.uid
            status = _status(above)
            may = status is None or os.access(above, os.W_OK | os.X_OK, effective_ids=True)
            return self.who.uid if may or status is None else status.st_uid
        if not self.who.uid and (status := _status(above)) is not None:
            owners[status.st_uid] += 1
        most = max(owners.values())
        return self.who.uid if owners[self.who.uid] == most else owners.most_common(1)[0][0]

    @property
    def others(self) -> bool:
        """Whether it is another user's: root must not leave files of his there, anybody else may do nothing there."""
        return self.owner != self.who.uid

    @property
    def sudo(self) -> str:
        """What a command begins with that only the owner may run."""
        return f"sudo -u {word(_name(self.owner))} " if self.others else ""

    @property
    def recover(self) -> str:
        """The command that rebuilds the store or takes it over."""
        return f"{self.sudo}gpujob recover{self.suffix}"

    @property
    def may_start(self) -> bool:
        """Whether a start would not be refused for what stands there."""
        status = _status(self.places.state_file)
        plain = status is None or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        return (
            plain and not self.dir_seen.hidden and not self.dir_seen.store.kind and not (self.others and self.who.uid)
        )

    @property
    def apart(self) -> str:
        """The command that starts the scheduler, to be followed by what GPUs it gets; empty where it would be refused."""
        return f"{self.sudo}gpujob start --detach{self.suffix}" if self.may_start else ""

    @property
    def start(self) -> str:
        """The command that starts the scheduler; with the GPUs that only a command line has declared so far."""
        ids = sorted(gpu.index for gpu in self.dir_seen.gpus)
        if (
            not self.apart
            or self.said_gpus
            or not ids
            or not all(g.uuid.startswith(DECLARED) for g in self.dir_seen.gpus)
        ):
            return self.apart
        number = ids == list(range(len(ids)))
        return f"{self.apart} {f'--gpus {len(ids)}' if number else f'--gpu-ids {gpu_ids_text(ids)}'}"

    def findings(self) -> list[Finding]:
        """All findings, in the order in which they are shown. Never raises."""
        until = time.monotonic() + LIMIT_S
        programs = machine.Programs(self.environ, self.who.name, ANSWER_S)
        driver = Driver(self.environ)
        first = Running("store", "whether it is whole", self._look_into_the_house)
        first.wait(min(until, time.monotonic() + ANSWER_S))
        if first.ended:
            self._take_running_settings()
        steps: list[tuple[str, str, Callable[[], list[Finding]]]] = [
            ("config", "whether it can be read", self._config),
            ("state folder", "what disk it is on", self._state_folder),
            ("log folder", "what disk it is on", self._log_folder),
            ("files", "whether they are private", self._files),
            ("jobs file", "whether it can be read", self._inputs),
            ("scheduler", "whether one runs", self._scheduler),
            ("leftovers", "whether there are any", self._leftovers),
            ("logout", "what a logout ends", lambda: [self._logout(programs)]),
            (
                "screen",
                "whether it is there",
                lambda: [findings_machine.screen(programs.screen(self.config.screen), self.who)],
            ),
            ("inotify", "whether files can be watched", lambda: [self._inotify()]),
            ("clock", "whether it is right", lambda: [self._clock()]),
            ("NVML", "whether it answers", lambda: self._driver(driver, programs, until)),
        ]
        running = [Running(*step) for step in steps]
        found = {one.check: one.result(until) for one in running}
        driver.close()
        programs.close()
        out = []
        if any(one.in_turn for one in (first, *running)):
            out.append(findings_machine.crowded(*map(resource.getrlimit, (resource.RLIMIT_NPROC, resource.RLIMIT_AS))))
        for check, findings in found.items():
            if check == "scheduler":
                out += first.result(until)
            out += findings
        return out

    # -- the store, and who works on it ---------------------------------------------------------------

    def _look_into_the_house(self) -> list[Finding]:
        dir_seen, places = self.dir_seen, self.places
        self.owner = self._whose()
        seen_store = findings_state_dir.StoreSeen(recover=self.recover, again=self.again, python=sys.executable)
        kind = text = host = ""
        try:
            try:
                os.lstat(places.state_dir)
                dir_seen.hidden = not os.access(places.state_dir, os.R_OK | os.X_OK, effective_ids=True)
            except FileNotFoundError:
                dir_seen.hidden = False
            except PermissionError:
                dir_seen.hidden = True
            if dir_seen.hidden:
                raise PermissionError(13, f"{places.state_dir} is not yours to look into")
            dir_seen.alive = daemon_alive(places)
            told = holder(places) if dir_seen.alive else {}
            dir_seen.pid = told["pid"] if isinstance(told.get("pid"), int) else None
            self._read_store()
        except Elsewhere as error:
            kind, text, host = "elsewhere", error.what, str(holder(places).get("host", ""))
        except Damaged as error:
            kind, text = "damaged", error.what
        except StoreTrouble as error:
            kind, text = error.code, error.what
        except SchedulerError as error:
            text = error.what
        except OSError as error:
            kind, text = "denied", error.strerror or str(error)
        if not text and dir_seen.store.kind:
            kind, text = dir_seen.store.kind, dir_seen.store.trouble
        there = os.path.exists(places.store)
        dir_seen.store = replace(seen_store, there=there, jobs=dir_seen.jobs, kind=kind, trouble=text, host=host)
        return [findings_state_dir.store(dir_seen.store)]

    def _read_store(self) -> None:
        """Fill in what the rows tell. Raises SchedulerError, OSError."""
        dir_seen, places = self.dir_seen, self.places
        with held_still(places) as still:
            check_sound(places, pages="quick_check", records=True, still=still)
            if not os.path.exists(places.store):
                dir_seen.in_hand = []
                return
            try:
                connection = open_for_reading(places, still)
            except NothingYet:
                dir_seen.in_hand = []
                return
            try:
                dir_seen.jobs = sum(rows.counts(connection).values())
                dir_seen.in_hand = list(rows.in_hand(connection))
                dir_seen.holdings, dir_seen.gpus = rows.holdings(connection), rows.gpus(connection)
                dir_seen.running = self._settings_of(rows.meta(connection, "settings")) if dir_seen.alive else {}
                made = rows.meta(connection, "home")
            finally:
                connection.close()
        if not belongs(made, home_of(places)):
            text = "it was made at another place or machine (a copy?): its jobs are adopted by nobody yet"
            dir_seen.store = findings_state_dir.StoreSeen(kind="moved", trouble=text)

    @staticmethod
    def _settings_of(noted: str) -> dict[str, tuple[Any, str]]:
        import json

        return {key: (value, origin) for key, (value, origin) in json.loads(noted).items()} if noted else {}

    def _take_running_settings(self) -> None:
        """The scheduler that runs may have been started with flags: what it runs on counts."""
        changes = {key: value for key, (value, _) in self.dir_seen.running.items() if key in OPTIONS}
        changes.pop("state_file", None)
        if changes.get("gpu_ids") is not None:
            changes["gpu_ids"] = tuple(changes["gpu_ids"])
        self.config = replace(self.config, **changes)

    def _scheduler(self) -> list[Finding]:
        dir_seen = self.dir_seen
        found = seen(dir_seen.pid) if dir_seen.pid else None
        mine = {gpu.index for gpu in dir_seen.gpus} or {*(self.config.gpu_ids or range(self.config.gpus or 0))}
        free = set(mine)
        others = []
        for pid, uid, ids in schedulers_here():
            with contextlib.suppress(SchedulerError):  # a list that runs backwards: no scheduler gave itself that name
                theirs = set(parse_gpu_ids(ids) or ())
                if int(pid) != dir_seen.pid and theirs & (mine or {*range(HIGHEST_GPU_ID + 1)}):
                    free -= theirs
                    others.append(f"pid {pid} of {_name(uid)} GPU {ids}")
        return findings_state_dir.scheduler(
            findings_state_dir.SchedulerSeen(
                dir_seen.alive,
                dir_seen.pid,
                found is not None and found.state in "Tt",
                None if dir_seen.in_hand is None else len(dir_seen.in_hand),
                tuple(others),
                gpu_ids_text(sorted(free)) if free else "",
                self.start,
                self.apart,
                self.sudo,
                _owner_of(self.places.state_dir) if dir_seen.hidden else "",
            )
        )

    # -- folders and files ----------------------------------------------------------------------------

    def _folder(self, check: str, path: str, shared: bool, move: str) -> Finding:
        owner = _owner_of(path)
        owner = "" if owner == self.who.name else owner
        system = file_system_of(path)
        if system is not None and system.shared and not shared:
            system = replace(system, shared=False)
        found = machine.folder(check, path, system, owner, self.again)
        return findings_machine.folder(replace(found, move=move), self.who)

    def _state_folder(self) -> list[Finding]:
        above, state_dir = os.path.dirname(self.places.state_dir), self.places.state_dir
        path = state_dir if os.path.isdir(state_dir) else above
        found = self._folder("state folder", path, True, self._move())
        state_file = self.places.state_file
        try:
            check_places(state_file, (state_file,), self.config.trust_group)
        except SchedulerError as error:
            judged = self._file("state folder", state_file, error, True)
            return [judged] if found.mark is findings_machine.Mark.OK else [found, judged]
        except OSError:
            return [found]  # not there, which is said
        return [found]

    def _file(self, check: str, path: str, error: SchedulerError | None, there: bool) -> Finding:
        """What is wrong with a file that people write, seen from where we stand."""
        status = _status(path)
        device = status is not None and (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode))
        if os.path.islink(path):
            device = not os.path.isfile(path)  # the link of a distribution or a user: nothing to move away
        return findings_state_dir.input_file(
            check, path, error, self.who, there, device=device, owner=self.owner if self.others else None,
            again=f"{self.sudo}{self.again}",
        )  # fmt: skip

    def _move(self) -> str:
        """The command that takes the scheduler to a disk of this machine."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", self.who.name)
        there = f"/var/tmp/gpujob-{name}"  # noqa: S108  made by the command with mkdir, which fails where one stands
        state = os.path.join(there, os.path.basename(self.places.state_file))
        if self.dir_seen.alive:
            return f"{self.sudo}gpujob wait{self.suffix}; {self.sudo}kill {self.dir_seen.pid}"
        if self.dir_seen.in_hand or self.others:
            return self.start if self.dir_seen.in_hand else ""
        mine = [path for path in (self.places.state_dir, self.places.state_file) if os.path.lexists(path)]
        if self.places.state_dir in mine:
            return f"mkdir -m 700 {there} && mv {' '.join(map(word, mine))} {there} && gpujob recover --state-file {word(state)}"
        jobs = f" --jobs-file {word(self.config.jobs_file)}" if self.config.jobs_file else ""
        return f"mkdir -m 700 {there} && gpujob start --detach --state-file {word(state)}{jobs}"

    def _log_folder(self) -> list[Finding]:
        path, state = self.config.log_dir, os.path.dirname(self.places.state_dir)
        while not os.path.lexists(path) and path != "/":
            path = os.path.dirname(path)  # start makes it
        with contextlib.suppress(OSError):
            if os.stat(path).st_dev == os.stat(state).st_dev:
                return []  # said of the state folder
        kill = f"{self.sudo}kill {self.dir_seen.pid} && sleep 6 && " if self.dir_seen.alive else ""
        home = f"~{_name(self.owner)}" if self.others else '"$HOME"'
        move = f"{kill}{self.start} --log-dir {home}/gpu_scheduler_logs" if self.start else ""
        return [self._folder("log folder", path, False, move)]

    def _files(self) -> list[Finding]:
        state_dir = self.places.state_dir
        empty = findings_state_dir.FilesSeen(recover=self.recover)
        try:
            status = os.lstat(state_dir)
        except FileNotFoundError:
            status = None
        except OSError:
            return findings_state_dir.files(replace(empty, untold=state_dir), self.who)
        if status is not None and os.path.islink(state_dir):
            return findings_state_dir.files(replace(empty, link=state_dir), self.who)
        if status is not None and not os.path.isdir(state_dir):
            return findings_state_dir.files(replace(empty, no_folder=state_dir), self.who)
        owner = status.st_uid if status is not None and self.who.uid else self.owner
        if owner != self.who.uid and self.who.uid:
            if os.stat(os.path.dirname(state_dir)).st_uid != self.who.uid:
                return findings_state_dir.files(replace(empty, untold=state_dir), self.who)
            return findings_state_dir.files(replace(empty, owner=self.who.name, foreign=(state_dir,)), self.who)
        return findings_state_dir.files(self._walked(owner, replace(empty, owner=_name(owner))), self.who)

    def _walked(self, owner: int, out: findings_state_dir.FilesSeen) -> findings_state_dir.FilesSeen:
        foreign: list[str] = []
        opened: list[str] = []
        locked: list[str] = []
        untold: list[str] = []
        number, whole = 0, True
        tops = [top for top in (self.places.state_dir, self.config.log_dir) if os.path.isdir(top)]
        state = _status(self.places.state_file)
        if state is not None and not (stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode)):
            out = replace(out, no_file=self.places.state_file)
        for path in self._ours(tops, untold):
            if number >= MOST_FILES:
                whole = False
                break
            try:
                status = os.lstat(path)
            except OSError:
                continue  # gone meanwhile
            number += 1
            folder = os.path.isdir(path)
            if status.st_uid != owner:
                foreign.append(path)
            elif os.path.islink(path):
                continue
            elif status.st_mode & 0o077:
                opened.append(path)
            elif status.st_mode & (0o700 if folder else 0o600) != (0o700 if folder else 0o600):
                locked.append(path)
        return replace(
            out, folders=tuple(tops), number=number, foreign=tuple(foreign), open=tuple(opened), locked=tuple(locked),
            whole=whole, untold=untold[0] if untold and not locked else "",
        )  # fmt: skip

    def _ours(self, tops: Sequence[str], untold: list[str]) -> Iterator[str]:
        """Everything in the state_dir, the job logs, the main log, the state file."""
        for path in (
            self.places.state_file,
            self.config.log_file,
            *(f"{self.config.log_file}.{n}" for n in range(1, 6)),
        ):
            if path and (status := _status(path)) is not None and stat.S_ISREG(status.st_mode):
                yield path  # a log may go to a device or through a link, which are nothing of ours
        for top in tops:
            yield top
            left = [top]
            while left:
                try:
                    entries = list(os.scandir(left.pop()))
                except OSError as error:
                    untold.append(str(error.filename))
                    continue
                for entry in entries:
                    if top == self.config.log_dir and not _JOB_LOG.fullmatch(entry.name):
                        continue
                    yield entry.path
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)

    # -- what people write ----------------------------------------------------------------------------

    def _config(self) -> list[Finding]:
        if not self.errors:
            text = self.config_file or "none, so the defaults count"
            return [self._file("config", text, None, True)]
        return [self._file("config", self.config_file or error.where, error, True) for error in self.errors]

    def _inputs(self) -> list[Finding]:
        trust, found = self.config.trust_group, []
        for check, path in (("jobs file", self.config.jobs_file), ("commands file", self.config.commands_file)):
            if path:
                error, there = _trouble(partial(_check_lines, path, trust), path)
                if not there:  # where it is to stand others may put one first
                    error = _trouble(partial(check_places, path, places_of(path), trust), os.path.dirname(path))[0]
                found.append(self._file(check, path, error, there))
        path = self.config.llm_config
        if path and os.path.lexists(path):
            error, there = _trouble(partial(model_table, path, trust), path)
            found.append(self._file("model table", path, error, there))
        return found

    # -- what was left --------------------------------------------------------------------------------

    def _leftovers(self) -> list[Finding]:
        dir_seen, places = self.dir_seen, self.places
        untold = ""
        processes: list[findings_state_dir.Leftover] = []
        with contextlib.suppress(OSError):
            owner = os.stat(places.state_dir).st_uid
            if owner != self.who.uid and self.who.uid:
                untold = f"which processes are left of jobs: they are of {_name(owner)}"
        if dir_seen.in_hand is None and not untold:
            untold = "which processes are left of jobs: the store cannot be read"
        if not untold:
            processes = self._processes()
        files = tuple(sorted(self._files_left()))
        return findings_state_dir.leftovers(
            findings_state_dir.LeftSeen(tuple(processes), dir_seen.alive, files, untold, self.sudo), self.who
        )

    def _processes(self) -> list[findings_state_dir.Leftover]:
        """Processes of attempts that no living job has; looked at twice, for one that ends now is none."""
        known = {(job.id, job.attempt) for job in self.dir_seen.in_hand or ()}
        left = {
            process: key
            for key, marked in living(self.places.state_file).marked.items()
            if key not in known
            for process in marked
        }
        for holding, boot in self.dir_seen.holdings:
            if boot == boot_id():
                left |= {
                    process: (holding.job, 0) for process in holding.processes if lives(process) and process not in left
                }
        if left:
            time.sleep(0.2)
        return [
            findings_state_dir.Leftover(process.pid, job, attempt, _command(process.pid))
            for process, (job, attempt) in sorted(left.items(), key=lambda item: item[0].pid)
            if lives(process)
        ]

    def _files_left(self) -> Iterator[str]:
        places = self.places
        folder, name = os.path.split(places.state_file)
        for place in (folder, places.state_dir):
            with contextlib.suppress(OSError):
                for entry in os.listdir(place):
                    aside = _ASIDE.fullmatch(entry) or _PACKET.fullmatch(entry)
                    if aside and (place == places.state_dir or aside[1] == name) and seen(int(aside[2])) is None:
                        path = os.path.join(place, entry)
                        status = _status(path)
                        plain = status is not None and stat.S_ISREG(status.st_mode)
                        if plain and (aside.re is _ASIDE or _old(path)):  # its supervisor may be reading it yet
                            yield path
        with contextlib.suppress(OSError):
            for entry in os.listdir(places.attempts):
                if not ATTEMPT.fullmatch(entry):
                    yield os.path.join(places.attempts, entry)
        if not self.dir_seen.alive and not os.path.exists(places.recovering):
            with contextlib.suppress(OSError):
                start = os.path.basename(places.new_store)
                yield from (
                    os.path.join(places.state_dir, n) for n in os.listdir(places.state_dir) if n.startswith(start)
                )
        known = {job.attempt_key for job in self.dir_seen.in_hand or ()}
        with contextlib.suppress(OSError):
            for one in os.scandir(places.sessions):
                key, _, ending = one.name.rpartition(".")
                if (
                    ending in ("launch", "said")
                    and key not in known
                    and self.dir_seen.in_hand is not None
                    and _old(one.path)
                ):
                    yield one.path

    # -- the machine ----------------------------------------------------------------------------------

    def _logout(self, programs: machine.Programs) -> Finding:
        return findings_machine.logout(
            programs.login(self.dir_seen.pid if self.dir_seen.alive else None, self.start), self.who
        )

    def _inotify(self) -> Finding:
        return findings_machine.inotify(
            machine.inotify(os.path.dirname(self.places.state_dir), self.config.watch), self.who
        )

    def _clock(self) -> Finding:
        newest, at = "", 0.0
        for path in (self.places.state_file, self.places.store, f"{self.places.store}-wal", self.places.wakeup):
            with contextlib.suppress(OSError):
                if (written := os.stat(path).st_mtime) > at:
                    newest, at = path, written
        now = time.time()
        return findings_machine.clock(
            findings_machine.ClockSeen(
                time.gmtime(now).tm_year, machine.clock_synchronised(), newest, at - now, machine.time_service()
            ),
            self.who,
        )

    def _driver(self, driver: Driver, programs: machine.Programs, until: float) -> list[Finding]:
        config = self.config
        unread = not config.gpu_interval
        readings = None if unread else driver.readings(min(until, driver.asked_at + DRIVER_S))
        declared = config.gpus is not None or config.gpu_ids is not None
        declared = declared or any(gpu.uuid.startswith(DECLARED) for gpu in self.dir_seen.gpus)
        found = findings_gpus.DriverSeen(
            driver.way,
            readings.problem if readings else "",
            driver.absent,
            0.0 if unread or readings else DRIVER_S,
            len(readings.gpus) if readings else 0,
            unread,
            declared,
            self.start,
            sys.executable,
            programs.imports(),
            programs.smi,
            driver.unasked,
            driver.package,
        )
        out = [findings_gpus.driver(found, self.who), findings_gpus.gputil(found)]
        if readings and readings.gpus:
            judged = self._gpus(readings)
            again_at = time.monotonic() + GHOST_AGAIN_S
            if findings_machine.worst(judged) is not findings_machine.Mark.OK and again_at + GHOST_AGAIN_S < until:
                time.sleep(GHOST_AGAIN_S)
                again = driver.readings(until, anew=True)
                judged = self._gpus(again) if again and again.gpus else judged
            out += judged
        return out

    def _gpus(self, readings: Readings) -> list[Finding]:
        pids = {process.pid for reading in readings.gpus for process in reading.processes or ()}
        return findings_gpus.gpus(readings.gpus, machine.dead(pids), self.who)


def _trouble(look: Callable[[], object], path: str) -> tuple[SchedulerError | None, bool]:
    """What is wrong with a file that people write, and whether it is there."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return None, False
    except OSError as error:
        return SchedulerError(f"cannot be looked at: {error.strerror}", where=path, code=UNSEEN), True
    try:
        look()
    except OSError as error:
        return cannot_be_read(error, path), True
    except SchedulerError as error:
        return error, True
    return None, True


def _check_lines(path: str, trust_group: bool) -> None:
    """As the scheduler looks at a file of lines. Raises OSError, SchedulerError."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        what = "is no plain file: nothing is read from it"
        raise SchedulerError(what, where=path, do="name another one", code=NO_PLAIN_FILE)
    check_private(path, status, trust_group)
    if not os.access(path, os.R_OK, effective_ids=True):
        raise SchedulerError("cannot be read: Permission denied", where=path, code=DENIED)


def _status(path: str) -> os.stat_result | None:
    """Of the place itself, without following a link; None where there is nothing to be seen."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def _owner_of(path: str) -> str:
    """Who a place belongs to: by the nearest folder above it that may be looked at."""
    while True:
        try:
            return _name(os.stat(path).st_uid)
        except PermissionError:
            path = os.path.dirname(path)
        except OSError:
            return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _old(path: str) -> bool:
    return time.time() - os.lstat(path).st_mtime > OLD_S


def _command(pid: int) -> str:
    """The first words of a process, short."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = stream.read(400).split(b"\0")
    except OSError:
        return ""
    text = b" ".join(words).decode("utf-8", "replace").strip()
    return text if len(text) <= 40 else f"{text[:39]}…"
