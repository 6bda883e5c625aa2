"""Which scheduler a `ts` call means: one for each TS_SOCKET, started by the first call, followed by another after -K.

Everything of one TS_SOCKET lies in one private folder: beside the socket's path, if nobody else can write there, else
below `$XDG_STATE_HOME/gpujob/ts`. In it each life of the server (until -K) has a folder of its own, numbered; `current`
names the one in use. A life is an ordinary scheduler: its state file, its config, its store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import signal
import stat
import time
from collections.abc import Iterator, Mapping

from scheduler.client.client import SchedulerClient
from scheduler.core.errors import SchedulerError
from scheduler.store.daemon_lock import daemon_alive, holder
from scheduler.store.paths import Places, digest, make_private_folder
from scheduler.system.atomic_files import replace_file
from scheduler.system.own_process import own_command, start_own
from scheduler.system.proc import boot_id, ticks_of
from scheduler.system.safe_open import plain
from scheduler.system.waiting import wait_until

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STATE_FILE = "gpu_scheduler_state.json"
READY_S = 20.0
LIVES_KEPT = 10
FREE_PERCENT = 90
KILL_GRACE = 900_000_000  # -k is a SIGTERM and nothing more: a job may take its time to save its work
AFTER_CONN = 6  # of TS_MAXCONN are no jobs, as in the original


def socket_of(environ: Mapping[str, str]) -> str:
    """The path that names the server: TS_SOCKET, else one in the folder for temporary files."""
    return os.path.abspath(environ.get("TS_SOCKET") or os.path.join(temporary(environ), f"socket-ts.{os.getuid()}"))


def temporary(environ: Mapping[str, str]) -> str:
    """The folder for temporary files."""
    return os.path.abspath(environ.get("TMPDIR") or "/tmp")  # noqa: S108  only new names of random letters are made there


def folder_of(environ: Mapping[str, str]) -> str:
    """The private folder of the server that is meant; one that is there already stays the one."""
    path = socket_of(environ)
    beside = f"{path}.gpujob"
    if _is_ours(beside, 0o077):
        return beside
    apart = _apart(environ, path)
    return beside if not os.path.isdir(apart) and _is_ours(os.path.dirname(path), 0o022) else apart


def _is_ours(folder: str, not_allowed: int) -> bool:
    """Whether it is a folder of this user's on which others have none of these rights."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & not_allowed


def _apart(environ: Mapping[str, str], path: str) -> str:
    """A folder for this socket's name where nobody else can take it."""
    state = environ.get("XDG_STATE_HOME") or os.path.join(_home(environ), ".local", "state")
    short = digest(os.fsencode(path), 6)
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in os.path.basename(path))[:40]
    return os.path.join(os.path.abspath(state), "gpujob", "ts", f"{name}-{short}")


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir


class Server:
    """The server of one TS_SOCKET."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.folder = folder_of(environ)
        try:
            self.folder.encode()
        except UnicodeEncodeError:
            raise SchedulerError(
                "its folder's name is not UTF-8", where=ascii(self.folder), do="set another TS_SOCKET"
            ) from None
        self.life = self._current()

    def _current(self) -> int:
        with (
            contextlib.suppress(OSError, ValueError),
            open(os.path.join(self.folder, "current"), opener=plain) as stream,
        ):
            return int(stream.read(20))
        return 0

    @property
    def home(self) -> str:
        """The folder of this life."""
        return os.path.join(self.folder, str(self.life))

    @property
    def state_file(self) -> str:
        return os.path.join(self.home, STATE_FILE)

    @property
    def places(self) -> Places:
        return Places(self.state_file)

    def exists(self) -> bool:
        """Whether this life was begun."""
        return bool(self.life) and os.path.exists(self.places.state_dir)

    def alive(self) -> bool:
        """Whether its scheduler runs."""
        return self.exists() and daemon_alive(self.places)

    def in_office(self) -> int:
        """The process of its scheduler once that runs; 0 before, when what another one said may still lie there."""
        told = holder(self.places) if daemon_alive(self.places) else {}
        return int(told["pid"]) if _is_running(told) else 0

    # -- beginning ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have a life, and a scheduler for it that runs or is about to. Raises SchedulerError."""
        if self.alive() or (self.exists() and self._starting()):
            return
        make_private_folder(self.folder)
        with self._locked():
            self.life = self._current()
            if not self.life:
                lives = self._lives()
                self._new_life(1 + max(lives, default=0))
                self._forget_lives(lives)
            if not (self.alive() or self._starting()):
                self._start()

    def go_on(self) -> bool:
        """Have a scheduler of this life again if it was killed; False if -K has ended this life. Raises SchedulerError."""
        if self.alive() or self._starting():
            return True
        with self._locked():
            if self.was_ended():
                return False
            if not (self.alive() or self._starting()):
                self._start()
            return True

    def was_ended(self) -> bool:
        """Whether -K has ended this life."""
        return self._current() != self.life

    def _lives(self) -> list[int]:
        """All lives of which something is left."""
        return sorted(int(name) for name in os.listdir(self.folder) if name.isascii() and name.isdigit())

    def _forget_lives(self, lives: list[int]) -> None:
        """Of servers that -K ended only the newest stay to be looked at, and those of whose jobs some may still run."""
        import shutil

        for life in lives[:-LIVES_KEPT]:
            home = os.path.join(self.folder, str(life))
            with contextlib.suppress(SchedulerError, OSError):
                if not any(
                    SchedulerClient(os.path.join(home, STATE_FILE)).jobs(("starting", "running", "stopping"))[0]
                ):
                    shutil.rmtree(home)

    def _new_life(self, number: int) -> None:
        """A folder with the settings that this environment says, and only then its number."""
        self.life = number
        make_private_folder(self.home)
        slots = _number(self.environ, "TS_SLOTS", 1)
        settings: dict[str, Any] = {
            "jobs_file": "",
            "cpu_slots": slots,
            "keep_finished": _number(self.environ, "TS_MAXFINISHED", 1000),
            "without_gpus": True,
            "max_overtakes": 10,
            "kill_grace": KILL_GRACE,
            "load_threshold": 1,
            "mem_threshold": 1,
            "whole_gpu_tolerance": _tolerance(FREE_PERCENT),
        }
        saved = self.environ.get("TS_SAVELIST", "")
        if saved:
            settings["save_list"] = os.path.abspath(saved)
        self._write_settings(_as_text(settings))
        # Called from within a job of ours, it must not be taken for one of that job's processes.
        kept = {k: v for k, v in self.environ.items() if not k.startswith("GPUJOB_") or k.startswith("GPUJOB_SET_")}
        self._write_environment(kept)
        SchedulerClient(self.state_file).number_from_zero()
        replace_file(os.path.join(self.folder, "current"), b"%d\n" % number, sync=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time starts or ends the server."""
        fd = plain(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _start(self) -> None:
        """Start the scheduler, and do not wait for it."""
        environ = self.server_environment()
        visible = _gpu_list(environ.get("TS_VISIBLE_DEVICES", ""))
        options = {"state_file": self.state_file, "config": self._config, **({"gpu_ids": visible} if visible else {})}
        said = plain(os.path.join(self.home, "start.err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.set_blocking(said, True)
            # Its working folder is its own: it must not hold ours.
            pid = start_own(own_command("start", options), environ, files={1: nothing, 2: said}, folder=self.home)
        finally:
            os.close(said)
            os.close(nothing)
        replace_file(self._started, b"%d %d\n" % (pid, ticks_of(pid)), sync=False)

    @property
    def _started(self) -> str:
        return os.path.join(self.home, "started")

    def _starting(self) -> bool:
        """Whether somebody has started the scheduler, and it lives, if perhaps not running yet."""
        return bool(self._started_pid())

    def _may_come(self) -> bool:
        """Whether a scheduler runs, or is about to."""
        return self._starting() or daemon_alive(self.places)

    def _started_pid(self) -> int:
        """Of the scheduler that was started last, 0 if it lives no more."""
        with contextlib.suppress(OSError, ValueError), open(self._started, opener=plain) as stream:
            pid, ticks = map(int, stream.read(60).split())
            return pid if ticks > 0 and ticks_of(pid) == ticks else 0
        return 0

    def ready(self) -> None:
        """Wait until the scheduler works. Raises SchedulerError with what kept it from that."""
        wait_until(lambda: bool(self.in_office()) or not self._may_come(), READY_S)
        if self.in_office():
            return
        with open(os.path.join(self.home, "start.err"), encoding="utf-8", errors="replace", opener=plain) as stream:
            said = [line.strip() for line in stream.read(4096).splitlines() if line.strip()]
        raise SchedulerError(
            f"the server cannot be started: {said[-1] if said else 'it ended at once'}", where=self.home
        )

    # -- its settings -------------------------------------------------------------------------------------

    @property
    def _config(self) -> str:
        return os.path.join(self.home, "config.yaml")

    def settings(self) -> dict[str, str]:
        """The settings of this life, as they are written down (`core/config.py: written`)."""
        found = {}
        with open(self._config, encoding="utf-8", opener=plain) as stream:
            for line in stream:
                key, colon, value = line.partition(":")
                if colon and not line.startswith("#"):
                    found[key.strip()] = value.strip()
        return found

    def set(self, **changes: Any) -> None:
        """Change settings of this life: the scheduler reads them anew."""
        with self._locked():
            self._write_settings({**self.settings(), **_as_text(changes)})

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        head = "# Settings of this ts server: written by ts (-S, --set_gpu_free_perc, …), read by its scheduler.\n"
        text = head + "".join(f"{key}: {value}\n" for key, value in settings.items())
        replace_file(
            self._config, f"{text}...\n".encode(), sync=False
        )  # the dots: nothing more follows, read it at once

    def slots(self) -> int:
        """How many jobs without GPUs run at once."""
        return int(self.settings().get("cpu_slots", "1"))

    def most_jobs(self) -> int | None:
        """How many jobs may wait and run, as TS_MAXCONN of the server says it; None: any number."""
        connections = _number(self.server_environment(), "TS_MAXCONN", 0)
        return max(1, connections - AFTER_CONN) if connections else None

    def free_percent(self) -> int:
        """How much of a GPU's memory has to be free, in percent."""
        return round(100 * (1 - float(self.settings().get("whole_gpu_tolerance", "0.1"))))

    def set_free_percent(self, percent: int) -> None:
        self.set(whole_gpu_tolerance=_tolerance(percent))

    # -- its environment ----------------------------------------------------------------------------------

    def server_environment(self) -> dict[str, str]:
        """The environment that its scheduler is started with: the first caller's, with what --setenv has changed."""
        with open(os.path.join(self.home, "environment"), "rb", opener=plain) as stream:
            items = [os.fsdecode(item).partition("=") for item in stream.read().split(b"\0")]
        return {name: value for name, equals, value in items if equals}

    def _write_environment(self, environ: Mapping[str, str]) -> None:
        data = b"\0".join(os.fsencode(f"{name}={value}") for name, value in environ.items())
        replace_file(os.path.join(self.home, "environment"), data, sync=False)

    def change_environment(self, name: str, value: str | None) -> None:
        """Set or remove (None) a variable of the server; what it reads at its start makes it start anew, under its jobs."""
        with self._locked():
            environ = self.server_environment()
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
            self._write_environment(environ)
            if name == "TS_VISIBLE_DEVICES":
                self._stop(signal.SIGINT)
                SchedulerClient(self.state_file).note("settings", "")  # until the next one has looked which GPUs it has
                self._start()

    # -- ending -------------------------------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        """End the scheduler, whose jobs go on, and wait until it has ended; one not running yet has done nothing."""
        end = time.monotonic() + READY_S
        while self._may_come():
            pid = self.in_office()
            about_to_begin = 0 if pid or daemon_alive(self.places) else self._started_pid()
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)
                elif about_to_begin:
                    os.kill(about_to_begin, signal.SIGKILL)
            until = min(end, time.monotonic() + (5.0 if pid or about_to_begin else 0.005))
            wait_until(lambda: not self._may_come(), until - time.monotonic())
            if time.monotonic() >= end:
                raise SchedulerError(f"the server (pid {pid or about_to_begin}) does not end", where=self.home)

    def retire(self) -> None:
        """-K: end the scheduler, cancel what waits, and let the next call begin another life."""
        if not self.exists():
            return
        with self._locked():
            self.life = self._current()
            if not self.life:
                return
            self._stop(signal.SIGINT)
            replace_file(os.path.join(self.folder, "current"), b"0\n", sync=True)
            self._cancel_waiting()  # last: who has queued a job looks afterwards whether this life goes on

    def _cancel_waiting(self) -> None:
        from scheduler.client.send_request import do
        from scheduler.core.requests import Cancel

        client = SchedulerClient(self.state_file)
        waiting, _ = client.jobs(("pending",))
        if waiting:
            do(client, Cancel(tuple(job.id for job in waiting)), self._config)


def _is_running(told: Mapping[str, Any]) -> bool:
    """Whether the process that said this of itself is the one that has its number now."""
    try:
        ticks = ticks_of(int(told["pid"]))
        return ticks > 0 and ticks == told.get("ticks") and told.get("boot") == boot_id()
    except (OSError, ValueError, KeyError):
        return False


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of at least 1 in a variable; what is none counts as the default, as in the original."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 10**9 else default


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """As they are written in a config file."""
    from scheduler.core.config import written  # here: most calls change none

    return {key: written(value) for key, value in settings.items()}


def _gpu_list(text: str) -> str:
    """The GPUs that are named, as the setting is written; empty if there are none: what names no GPU limits nothing."""
    from scheduler.core.gpu import gpu_ids_text, parse_gpu_ids

    try:
        return gpu_ids_text(parse_gpu_ids(text) or ())
    except SchedulerError:
        return ""


def _tolerance(percent: int) -> float:
    return round(1 - percent / 100, 4)
