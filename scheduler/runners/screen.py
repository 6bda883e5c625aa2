"""Runner of screen mode: each attempt runs in its own GNU screen session, under a shim that writes the attempt record.

The daemon starts ``screen -D -m``. The screen process stays a child of the daemon, so the daemon immediately knows the
pid of the screen process. The full name of the session begins with this pid. Only the attempt record shows whether the
job started. The exit code of screen does not show this.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scheduler.core.errors import SchedulerError
from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Observation, Started
from scheduler.core.recovery import Record, Verdict
from scheduler.core.screen_names import free_name, shortened
from scheduler.runners import attempt_record
from scheduler.runners import shim as shim_file
from scheduler.runners.adoption import not_started, settle, start_trouble
from scheduler.runners.local_base import LOOK_AGAIN_S, LocalRunner, WatchedAttempt
from scheduler.system.crash_points import crash_point
from scheduler.system.private_files import new_private
from scheduler.system.process_search import ProcessTable
from scheduler.system.processes import lives, seen
from scheduler.system.safe_open import plain

START_LIMIT_S = 30.0
LIST_LIMIT_S = 10.0
SLOWEST_LOOK_S = 0.05
LOG_PATIENCE_S = 1.0
MOST_SAID = 300
SOCKET_PATH = 107
SHORTEST_NAME = 24
OLD_S = 2 * START_LIMIT_S
_FOLDER = re.compile(r"(?:Sockets? in|No Sockets found in) (.+?)\.\s*$", re.MULTILINE)
_TERMINFO = ("/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo", "/usr/local/share/terminfo")

# Replaces the user's ~/.screenrc, which may set `zombie`, its own log or another shell.
SCREENRC = """\
startup_message off
vbell off
zombie
defzombie
autodetach on
deflogin off
defflow off
# A terminal that hangs (a lost ssh connection) must not hold up the job's output.
defnonblock on
defutf8 on
defscrollback 10000
term {term}
hardstatus alwayslastline "$GPUJOB_SESSION   leave it running: Ctrl-a d   end the job: Ctrl-c"
chdir $GPUJOB_LOG_DIR
logfile $GPUJOB_LOG
logfile flush 0
deflog on
screen -t job $GPUJOB_PYTHON -I -S $GPUJOB_SHIM
# Windows that a user opens beside the job's are not part of its log.
deflog off
"""


@dataclass(slots=True)
class _Session:
    """A started session. The daemon has not seen its job running yet.

    ``server``: pid of the session's screen process; ``until``: time at which the start is given up; ``due``: time of
    the next check (both monotonic seconds); ``wait``: seconds between two checks.
    """

    job: Job
    attempt: WatchedAttempt
    server: int
    name: str
    until: float
    wait: float = LOOK_AGAIN_S
    due: float = 0.0
    over: bool = False  # its screen process has ended


@dataclass(slots=True)
class _Ending:
    """A job that has ended while its session may still be writing the job's last output to the log.

    ``server``: the session's screen process; ``until``: monotonic seconds at which the ending is reported anyway.
    """

    attempt: WatchedAttempt
    how: str
    code: int
    at: float
    server: Process
    until: float
    oom_kills: int = 0


class ScreenRunner(LocalRunner):
    """Runner that starts each attempt in its own screen session; see `core.protocols.Runner` and docs/architecture.md.

    ``folder``: private folder for the screenrc and the launch files of the sessions; ``short_id``: added to the name of
    a session if that name is in use; ``descriptors``: the jobs' soft limit on open files. Raises SchedulerError if the
    program `screen` is missing or cannot use its socket folder.
    """

    name = "screen"
    terminal = True  # a job whose shim was killed ends as hangup, never as a success

    def __init__(
        self,
        attempts: str,
        state_file: str,
        environ: Mapping[str, str],
        folder: str,
        short_id: str,
        descriptors: int = 1024,
    ) -> None:
        self.folder, self.short_id, self._soft_limit = folder, short_id, descriptors
        self.screen = shutil.which("screen", path=environ.get("PATH", os.defpath)) or ""
        if not self.screen:
            raise SchedulerError(
                "GNU Screen command not found",
                do="install it (sudo apt-get install screen), or start with --no-screen",
            )
        super().__init__(attempts, state_file, environ)
        self._server_environ = _server_environ(self.environ)
        self.sockets = self._socket_folder()
        if self._longest_name() < SHORTEST_NAME:
            raise SchedulerError(
                "cannot name screen sessions: the path of screen's socket folder is too long", where=self.sockets,
                do="set SCREENDIR to a folder of yours with a shorter path (mode 700)",
            )  # fmt: skip
        self._screenrc = os.path.join(folder, "screenrc")
        self._write_screenrc()
        tidy(folder, attempts)
        self._sessions: dict[str, _Session] = {}
        self._servers: dict[int, str] = {}  # pid of a session's screen process → key of the attempt
        self._server_of: dict[str, Process] = {}  # key of an attempt seen running → its screen process
        self._endings: list[_Ending] = []
        name, count, how = (*environ.get("GPUJOB_CRASH_AT", "").split(":"), "", "")[:3]
        self._crash = (f"{name}:{how}" if how else name) if name.startswith("shim.") else ""
        self._crash_passes = int(count) if count else None  # crash only the n-th shim; None: every shim

    def _socket_folder(self) -> str:
        """Return the folder of this user's sockets, as `screen -ls` prints it.

        Raises SchedulerError if the command fails or prints no folder; the message contains the output of the command.
        """
        try:
            done = subprocess.run(
                [self.screen, "-ls"], capture_output=True, env=self._server_environ, timeout=LIST_LIMIT_S,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SchedulerError(f"cannot run screen: {error}", where=self.screen) from None
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        found = _FOLDER.search(text)
        if found is None:
            raise SchedulerError(
                f"cannot use screen's socket folder: {_one_line(text) or f'exit code {done.returncode}'}",
                where=self.screen,
                do="fix its socket folder, or set SCREENDIR to a folder of yours (mode 700)",
            )
        return found.group(1)

    def _longest_name(self) -> int:
        """Return how many bytes the name of a session may have, because the path of its socket has a limited length."""
        return SOCKET_PATH - len(os.fsencode(self.sockets)) - len("/4194304.") - len("_12ab_a99")

    def _write_screenrc(self) -> None:
        self._write_private(self._screenrc, SCREENRC.format(term=_term()).encode())

    def _write_private(self, path: str, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with os.fdopen(new_private(path, make_folder=True), "wb") as stream:  # the folder may have been removed
            stream.write(data)

    # -- starting -----------------------------------------------------------------------------------------

    def start(self, job: Job, launch: Launch) -> None:
        """Start a session for the attempt; `look` reports whether the job runs."""
        path = self.path_of(launch.key)
        stage = "log"
        if self._crash_passes is not None:
            self._crash_passes -= 1
        crash = "" if self._crash_passes else self._crash
        try:
            self._make_log(launch.log)
            stage = "record"
            handed = os.path.join(self.folder, f"{launch.key}.launch")
            self._write_private(
                handed,
                marshal.dumps(
                    {
                        "record": path,
                        "data": attempt_record.blank(job, self.boot),
                        "boot": self.boot,
                        "argv": launch.argv,
                        "cwd": launch.cwd,
                        "umask": launch.umask,
                        "base": self.environ,
                        "env_file": launch.env_file,
                        "changes": dict(launch.environment),
                        "files": self._soft_limit,
                        "crash": crash,
                    }
                ),
            )
            stage = "session"
            wanted = shortened(job.session or f"gpujob_{job.id}", self._longest_name())
            name = free_name(wanted, self.short_id, job.attempt, self._taken())
            server = self._spawn(name, handed, launch)
        except OSError as error:
            self._forget(launch.key)
            why = start_trouble(job.id, job.attempt, error.errno or 0, time.time(), stage)
            try:
                mine = attempt_record.give_up(path, job, self.boot, time.time_ns())
            except OSError:
                mine = True  # no session has this attempt, so nothing can start it
            if mine:
                self._facts.append(why)
            return
        crash_point("screen.created")
        now = time.monotonic()
        attempt = WatchedAttempt(job.id, job.attempt, path, ours=True)
        self._servers[server] = launch.key
        self._sessions[launch.key] = _Session(
            job, attempt, server, name, now + START_LIMIT_S, due=now + 2 * LOOK_AGAIN_S
        )

    def flush(self) -> None:
        """Do nothing: `start` starts each session immediately."""

    def _make_log(self, log: str) -> None:
        """Create the log as a new private file, before the program `screen` opens it.

        Without this, `screen` would create a log that other users can read, or would append to a file that already
        exists at this path. Raises FileExistsError if a file exists at this path, OSError if the log cannot be created.
        """
        os.close(new_private(log, os.O_WRONLY | os.O_APPEND, make_folder=True))

    def _taken(self) -> set[str]:
        """Return the names of all screen sessions of this user, including dead sessions."""
        try:
            return {entry.partition(".")[2] for entry in os.listdir(self.sockets)}
        except OSError:
            return set()  # no folder yet: screen creates it or prints an error

    def _spawn(self, name: str, handed: str, launch: Launch) -> int:
        environ = {
            **self._server_environ,
            "GPUJOB_SESSION": name,
            "GPUJOB_LOG_DIR": os.path.dirname(launch.log),
            "GPUJOB_LOG": os.path.basename(launch.log),
            "GPUJOB_PYTHON": sys.executable,
            "GPUJOB_SHIM": shim_file.__file__,
            "GPUJOB_LAUNCH": handed,
            "GPUJOB_SUPERVISOR": self.state_file,
        }
        if not os.path.exists(self._screenrc):
            self._write_screenrc()
        said = os.path.join(self.folder, f"{launch.key}.said")
        self._write_private(said, b"")
        server = os.posix_spawn(
            self.screen,
            [self.screen, "-c", self._screenrc, "-D", "-m", "-S", name],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, said, os.O_WRONLY | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=[n for n in range(1, 32) if n not in (signal.SIGKILL, signal.SIGSTOP)],
        )
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError):  # screen loops over all descriptors up to this limit
            resource.prlimit(server, resource.RLIMIT_NOFILE, (self._soft_limit, hard))
        return server

    def _forget(self, key: str) -> None:
        """Remove the launch file of a session, and the file with the output of the program `screen`."""
        for ending in ("launch", "said"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder, f"{key}.{ending}"))

    # -- looking ------------------------------------------------------------------------------------------

    def next_look(self) -> float | None:
        """Return the time (monotonic seconds) at which `look` must be called even if no descriptor is readable.

        Return None if `look` need not be called before a descriptor is readable.
        """
        due = [*self._due(), *(session.due for session in self._sessions.values())]
        if self._endings:
            due.append(time.monotonic() + LOOK_AGAIN_S)
        return min(due, default=None)

    def look(self) -> list[Observation]:
        """Return all observations since the last call."""
        self._look_at_descriptors()
        self._reap()
        self._look_at_sessions()
        self._look_at_claims()
        self._look_at_zombies()
        self._look_at_endings()
        return self._take_facts()

    def _servants(self) -> Iterable[int]:
        return self._servers

    def _unreported(self) -> Iterable[WatchedAttempt]:
        return (
            *(session.attempt for session in self._sessions.values()),
            *self._adopted.values(),
            *(ending.attempt for ending in self._endings),
        )

    def _reap(self) -> None:
        """Reap children of the daemon that ended: screen processes, orphans of jobs, jobs whose shim was killed."""
        for pid, exited, code in self._ended_children():
            key = self._servers.pop(pid, None)
            if key is None:
                self._meet(pid)
                self._orphan_ended(pid, exited, code)
            elif key in self._sessions:
                self._sessions[key].over = True
                self._sessions[key].due = 0.0

    def _meet(self, pid: int) -> None:
        """If the ended child ``pid`` is the leader of a job in a started session, report the start of this job.

        Such a leader becomes a child of the daemon if its shim is killed before the daemon has seen the job running.
        """
        for key, session in list(self._sessions.items()):
            with contextlib.suppress(OSError):  # an unreadable record shows no pid
                found = attempt_record.read(session.attempt.path)
                if found.process is not None and found.process.pid == pid:
                    self._started(session, found.process, found.started_at or time.time())
                    del self._sessions[key]
                    self._forget(key)

    def _look_at_sessions(self) -> None:
        now = time.monotonic()
        for key, session in list(self._sessions.items()):
            try:
                known = session.due <= now and self._look_at(session, now)
            except OSError:  # a full disk, for example: try again later
                session.due, known = now + LOG_PATIENCE_S, False
            if known:
                del self._sessions[key]
                self._forget(key)

    def _look_at(self, session: _Session, now: float) -> bool:
        """Check whether the session's job has started, and report the result. Return False if there is no result."""
        attempt = session.attempt
        found = attempt_record.read(attempt.path)
        if found.kind is Record.NEVER_RAN:
            self._facts.append(not_started(attempt.job, attempt.attempt, found, time.time()))
            return True
        if found.process is not None:
            self._started(session, found.process, found.started_at or time.time())
            return True
        if session.over:
            self._settle_over(session)
            return True
        if (
            now >= session.until
            and found.kind is Record.NONE
            and self._give_up(session, "the job did not start within 30 s")
        ):
            os.kill(session.server, signal.SIGTERM)  # our child and not reaped yet: its pid cannot be reused
            return True
        session.wait = min(SLOWEST_LOOK_S, session.wait * 1.5)
        session.due = now + session.wait
        return False

    def _started(self, session: _Session, process: Process, at: float) -> None:
        attempt = session.attempt
        attempt.process = process
        self._has_server(attempt.key, session.server)
        self._facts.append(Started(attempt.job, attempt.attempt, process, at, f"{session.server}.{session.name}"))
        self._watch(attempt)

    def _has_server(self, key: str, pid: int) -> None:
        server = seen(pid)
        if server is not None:
            self._server_of[key] = Process(pid, server.ticks)

    def _settle(self, job: Job) -> list[Observation]:
        observations = super()._settle(job)
        for observation in observations:
            if isinstance(observation, Started) and observation.session:
                self._has_server(job.attempt_key, int(observation.session.partition(".")[0]))
        return observations

    def _ended(
        self,
        attempt: WatchedAttempt,
        how: str,
        code: int,
        at: float,
        table: ProcessTable | None = None,
        oom_kills: int = 0,
    ) -> None:
        """Report the ending of an attempt once its log is complete, or after LOG_PATIENCE_S seconds.

        When the job ends, its session may still be writing the job's last output to the log.
        """
        server = self._server_of.pop(attempt.key, None)
        if server is None or not lives(server):
            super()._ended(attempt, how, code, at, table, oom_kills)
        else:
            until = time.monotonic() + LOG_PATIENCE_S  # limited: a window of a user may keep the session
            self._endings.append(_Ending(attempt, how, code, at, server, until, oom_kills))

    def _look_at_endings(self) -> None:
        for one in tuple(self._endings):
            if not lives(one.server) or time.monotonic() >= one.until:
                self._endings.remove(one)  # only this one: `_unreported` needs the rest to assign orphans to attempts
                super()._ended(one.attempt, one.how, one.code, one.at, oom_kills=one.oom_kills)

    def _give_up(self, session: _Session, why: str) -> bool:
        """Give up the attempt and report that it did not start. Return False if the shim has claimed the attempt."""
        attempt = session.attempt
        if not attempt_record.give_up(attempt.path, session.job, self.boot, time.time_ns()):
            return False
        said = self._said(attempt.key)
        observation = start_trouble(attempt.job, attempt.attempt, 0, time.time(), "session")
        self._facts.append(replace(observation, why=f"no screen session: {said or why}"))
        return True

    def _settle_over(self, session: _Session) -> None:
        """Settle a session that ended before the daemon saw its job run.

        Either the job was never started, or the shim was killed.
        """
        if self._give_up(session, "the session ended before the job started"):
            return
        job = replace(session.job, boot=self.boot, runner="screen")
        verdict, observations, process = settle(session.attempt.path, job, self.state_file, time.time())
        if verdict is Verdict.WAIT:
            self._wait_for_starter(job)
        elif process is not None and all(isinstance(observation, Started) for observation in observations):
            self._started(session, process, time.time())
        else:
            self._facts += observations

    def _said(self, key: str) -> str:
        try:
            with open(os.path.join(self.folder, f"{key}.said"), "rb", opener=plain) as stream:
                return _one_line(stream.read(4096).decode("utf-8", "replace"))
        except OSError:
            return ""  # no output: the caller gives another reason


def tidy(folder: str, attempts: str) -> None:
    """Remove two kinds of files that a killed daemon left in ``folder``.

    These are launch files (``.launch``), and files with the output of the program `screen` (``.said``). A file of
    either kind is removed if it is older than a minute. A newer ``.said`` file is removed if its attempt is claimed.
    """
    for entry in os.scandir(folder):
        key, _, ending = entry.name.rpartition(".")
        if ending in ("launch", "said"):
            old = time.time() - entry.stat().st_mtime > OLD_S
            if old or (ending == "said" and os.path.exists(os.path.join(attempts, key))):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)


def _server_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the program `screen`, not for the jobs that run in its sessions.

    The environment contains no mark of a job, makes `screen` ignore the system's screenrc, and always names a character
    set.
    """
    drop = ("STY", "WINDOW", "TERMCAP", "COLUMNS", "LINES")
    made = {name: value for name, value in environ.items() if not name.startswith("GPUJOB_") and name not in drop}
    made["SYSSCREENRC"] = os.devnull
    if made.get("SCREENDIR"):
        made["SCREENDIR"] = os.path.abspath(made["SCREENDIR"])
    made.setdefault("TERM", "screen")
    if not any(made.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        made["LC_ALL"] = "C.UTF-8"
    return made


def _term() -> str:
    """Return the terminal type (TERM) of the windows.

    This is ``screen-256color`` if this machine has a description of that type, else ``screen``.
    """
    known = any(os.path.exists(os.path.join(folder, "s", "screen-256color")) for folder in _TERMINFO)
    return "screen-256color" if known else "screen"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MOST_SAID].rstrip(".")
