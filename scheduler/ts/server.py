"""The server of a `ts` call. Each TS_SOCKET has its own server.

The server of one TS_SOCKET has one generation after another (``life`` in the code). The first call begins a generation,
and -K ends this generation. The next call after -K begins another generation. Each generation has a scheduler of its
own, an ordinary gpujob scheduler, with its own state file, config and store.

All files of one TS_SOCKET are in one private folder. The private folder is beside the path TS_SOCKET if only this user
can create files there; otherwise the private folder is below `$XDG_STATE_HOME/gpujob/ts`. In the private folder there
is a numbered folder for each generation, and a file `current`. This file contains the number of the current generation,
or 0 if there is no current generation.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scheduler.client.client import SchedulerClient
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.store.daemon_lock import daemon_alive, holder
from scheduler.store.paths import Places, digest, make_private_folder
from scheduler.system.atomic_files import replace_file
from scheduler.system.own_process import own_command, start_own
from scheduler.system.proc import boot_id, ticks_of
from scheduler.system.safe_open import plain
from scheduler.system.waiting import wait_until

STATE_FILE = "gpu_scheduler_state.json"
READY_S = 20.0
LIVES_KEPT = 10
FREE_PERCENT = 90
KILL_GRACE = 900_000_000  # seconds (28 years): -k only sends SIGTERM, and a job may take long to save its work
AFTER_CONN = 6  # connections of TS_MAXCONN that are not for jobs, as in the original


def socket_of(environ: Mapping[str, str]) -> str:
    """Return the path that names the server: TS_SOCKET, else `socket-ts.<uid>` in the folder for temporary files."""
    return os.path.abspath(environ.get("TS_SOCKET") or os.path.join(temporary(environ), f"socket-ts.{os.getuid()}"))


def temporary(environ: Mapping[str, str]) -> str:
    """Return the folder for temporary files: TMPDIR, else /tmp."""
    return os.path.abspath(environ.get("TMPDIR") or "/tmp")  # noqa: S108  files in this folder get new, random names


def folder_of(environ: Mapping[str, str]) -> str:
    """Return the private folder of the server, beside the socket's path or below the user's state folder.

    If the folder already exists at one of these two places, return the existing folder.
    """
    path = socket_of(environ)
    beside = f"{path}.gpujob"
    if _is_ours(beside, 0o077):
        return beside
    apart = _apart(environ, path)
    return beside if not os.path.isdir(apart) and _is_ours(os.path.dirname(path), 0o022) else apart


def _is_ours(folder: str, not_allowed: int) -> bool:
    """Return whether ``folder`` is a folder of this user and has none of the permission bits ``not_allowed``."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & not_allowed


def _apart(environ: Mapping[str, str], path: str) -> str:
    """Return the path of the server's folder below the user's state folder.

    This folder is used if other users can write into the folder of the socket.
    """
    state = environ.get("XDG_STATE_HOME") or os.path.join(_home(environ), ".local", "state")
    short = digest(os.fsencode(path), 6)
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in os.path.basename(path))[:40]
    return os.path.join(os.path.abspath(state), "gpujob", "ts", f"{name}-{short}")


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir


class Server:
    """The server of one TS_SOCKET: its folder, daemon, settings and environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.folder = folder_of(environ)
        try:
            self.folder.encode()
        except UnicodeEncodeError:
            raise SchedulerError(
                "cannot use this folder: its name is not UTF-8", where=ascii(self.folder), do="set another TS_SOCKET"
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
        """Folder of the current generation."""
        return os.path.join(self.folder, str(self.life))

    @property
    def state_file(self) -> str:
        return os.path.join(self.home, STATE_FILE)

    @property
    def places(self) -> Places:
        return Places(self.state_file)

    def exists(self) -> bool:
        """Return whether there is a current generation."""
        return bool(self.life) and os.path.exists(self.places.state_dir)

    def alive(self) -> bool:
        """Return whether the daemon runs."""
        return self.exists() and daemon_alive(self.places)

    def in_office(self) -> int:
        """Return the pid of the running daemon; 0 if no daemon runs or the daemon's pid is not recorded yet.

        The recorded pid may be the pid of a previous daemon. So the recorded start time and boot id are compared with
        the process.
        """
        told = holder(self.places) if daemon_alive(self.places) else {}
        return int(told["pid"]) if _is_running(told) else 0

    # -- beginning ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a generation if there is none. Start its daemon if the daemon does not run. Raises SchedulerError."""
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
        """Start the daemon again if it does not run. Return False if -K ended this generation.

        Raises SchedulerError.
        """
        if self.alive() or self._starting():
            return True
        with self._locked():
            if self.was_ended():
                return False
            if not (self.alive() or self._starting()):
                self._start()
            return True

    def was_ended(self) -> bool:
        """Return whether -K has ended this generation."""
        return self._current() != self.life

    def _lives(self) -> list[int]:
        """Return the numbers of all generations that still have a folder, ascending."""
        return sorted(int(name) for name in os.listdir(self.folder) if name.isascii() and name.isdigit())

    def _forget_lives(self, lives: list[int]) -> None:
        """Delete old generations, except the `LIVES_KEPT` newest ones and those with jobs that may still run."""
        import shutil

        for life in lives[:-LIVES_KEPT]:
            home = os.path.join(self.folder, str(life))
            with contextlib.suppress(SchedulerError, OSError):
                if not any(
                    SchedulerClient(os.path.join(home, STATE_FILE)).jobs(("starting", "running", "stopping"))[0]
                ):
                    shutil.rmtree(home)

    def _new_life(self, number: int) -> None:
        """Create the folder of the generation with this number, and then write the number to the file `current`.

        The TS_ variables in the environment of this call determine the settings of the generation.
        """
        self.life = number
        make_private_folder(self.home)
        slots = _number(self.environ, "TS_SLOTS", 1)
        settings: dict[str, Any] = {
            "backfill": False,  # as documented: ten later jobs may overtake a job, whatever is known of run times
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
        # A call inside a gpujob job has that job's GPUJOB_ variables. With these variables, the daemon would count as
        # a process of the job.
        kept = {k: v for k, v in self.environ.items() if not k.startswith("GPUJOB_") or k.startswith("GPUJOB_SET_")}
        self._write_environment(kept)
        SchedulerClient(self.state_file).number_from_zero()
        replace_file(os.path.join(self.folder, "current"), b"%d\n" % number, sync=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the server's folder, so that calls start, change and end the server one at a time."""
        fd = plain(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _start(self) -> None:
        """Start the daemon without waiting until it is ready."""
        environ = self.server_environment()
        visible = _gpu_list(environ.get("TS_VISIBLE_DEVICES", ""))
        options = {"state_file": self.state_file, "config": self._config, **({"gpu_ids": visible} if visible else {})}
        said = plain(os.path.join(self.home, "start.err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.set_blocking(said, True)
            # The daemon's working directory is its own folder, so that the caller's folder is not kept in use.
            pid = start_own(own_command("start", options), environ, files={1: nothing, 2: said}, folder=self.home)
        finally:
            os.close(said)
            os.close(nothing)
        replace_file(self._started, b"%d %d\n" % (pid, ticks_of(pid)), sync=False)

    @property
    def _started(self) -> str:
        return os.path.join(self.home, "started")

    def _starting(self) -> bool:
        """Return whether the process of the daemon that was started last still exists. The daemon need not be ready."""
        return bool(self._started_pid())

    def _runs_or_starts(self) -> bool:
        """Return whether a daemon runs or is starting."""
        return self._starting() or daemon_alive(self.places)

    def _started_pid(self) -> int:
        """Return the pid of the daemon that was started last; 0 if that process has ended."""
        with contextlib.suppress(OSError, ValueError), open(self._started, opener=plain) as stream:
            pid, ticks = map(int, stream.read(60).split())
            return pid if ticks > 0 and ticks_of(pid) == ticks else 0
        return 0

    def ready(self) -> None:
        """Wait until the daemon runs. Raises SchedulerError, with the daemon's last message, if it does not start."""
        wait_until(lambda: bool(self.in_office()) or not self._runs_or_starts(), READY_S)
        if self.in_office():
            return
        with open(os.path.join(self.home, "start.err"), encoding="utf-8", errors="replace", opener=plain) as stream:
            said = [line.strip() for line in stream.read(4096).splitlines() if line.strip()]
        raise SchedulerError(
            f"cannot start the server: {said[-1] if said else 'it ended immediately'}", where=self.home
        )

    # -- its settings -------------------------------------------------------------------------------------

    @property
    def _config(self) -> str:
        return os.path.join(self.home, "config.yaml")

    def settings(self) -> dict[str, str]:
        """Return the settings in the config file of this generation: name → value, both as text."""
        found = {}
        with open(self._config, encoding="utf-8", opener=plain) as stream:
            for line in stream:
                key, colon, value = line.partition(":")
                if colon and not line.startswith("#"):
                    found[key.strip()] = value.strip()
        return found

    def set(self, **changes: Any) -> None:
        """Change settings of this generation. The daemon then reads its config file again."""
        with self._locked():
            self._write_settings({**self.settings(), **_as_text(changes)})

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        head = "# Settings of this ts server: written by ts (-S, --set_gpu_free_perc, …), read by its scheduler.\n"
        text = head + "".join(f"{key}: {value}\n" for key, value in settings.items())
        replace_file(
            self._config, f"{text}...\n".encode(), sync=False
        )  # the line `...` means that the file is complete: the daemon reads it immediately

    def _typed(self, name: str, simple: Callable[[str], Any]) -> Any:
        """Return the value of a setting in the config file; the setting's default if the file has no valid value.

        ``simple``: reads a value in the form in which `ts` writes it, and raises ValueError for any other form. A value
        in another form is read by `read_option`.
        """
        text = self.settings().get(name, "").strip("\"'")
        try:
            return simple(text)
        except ValueError:  # not the form that `ts` writes
            from scheduler.core.config import OPTIONS, read_option  # slow to import

            try:
                return read_option(name, text, self._config) if text else OPTIONS[name].default
            except UsageError:  # the scheduler reports the error and keeps the setting in force
                return OPTIONS[name].default

    def slots(self) -> int:
        """Return the number of slots for jobs without GPUs."""
        return int(self._typed("cpu_slots", int) or os.cpu_count() or 1)

    def most_ended(self) -> int | None:
        """Return how many ended jobs the list shows, from the setting ``keep_finished``; None: all."""
        value = self._typed("keep_finished", int)
        if not isinstance(value, str):
            return int(value)
        from scheduler.core.retention import keep_finished  # slow to import; ts itself writes a plain number

        return keep_finished(value).most

    def most_jobs(self) -> int | None:
        """Return how many unfinished jobs are allowed, from TS_MAXCONN of the server's environment; None: no limit."""
        connections = _number(self.server_environment(), "TS_MAXCONN", 0)
        return max(1, connections - AFTER_CONN) if connections else None

    def free_percent(self) -> int:
        """Return the percentage of a GPU's memory that must be free before the GPU gets a job with -G."""
        return round(100 * (1 - float(self._typed("whole_gpu_tolerance", float))))

    def set_free_percent(self, percent: int) -> None:
        self.set(whole_gpu_tolerance=_tolerance(percent))

    # -- its environment ----------------------------------------------------------------------------------

    def server_environment(self) -> dict[str, str]:
        """Return the daemon's environment: the environment of the first call, as changed by --setenv and --unsetenv."""
        with open(os.path.join(self.home, "environment"), "rb", opener=plain) as stream:
            items = [os.fsdecode(item).partition("=") for item in stream.read().split(b"\0")]
        return {name: value for name, equals, value in items if equals}

    def _write_environment(self, environ: Mapping[str, str]) -> None:
        data = b"\0".join(os.fsencode(f"{name}={value}") for name, value in environ.items())
        replace_file(os.path.join(self.home, "environment"), data, sync=False)

    def change_environment(self, name: str, value: str | None) -> None:
        """Set a variable of the server's environment, or remove it (``value`` None).

        The daemon reads TS_VISIBLE_DEVICES only when it starts, so a change of this variable restarts the daemon. Jobs
        continue.
        """
        with self._locked():
            environ = self.server_environment()
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
            self._write_environment(environ)
            if name == "TS_VISIBLE_DEVICES":
                self._stop(signal.SIGINT)
                SchedulerClient(self.state_file).note("settings", "")  # empty until the new daemon writes it
                self._start()

    # -- ending -------------------------------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        """End the daemon with signal ``number`` and wait until it has ended. Jobs continue. Raises SchedulerError.

        A daemon that is still starting gets SIGKILL, because it has not done anything yet.
        """
        end = time.monotonic() + READY_S
        while self._runs_or_starts():
            pid = self.in_office()
            about_to_begin = 0 if pid or daemon_alive(self.places) else self._started_pid()
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)
                elif about_to_begin:
                    os.kill(about_to_begin, signal.SIGKILL)
            until = min(end, time.monotonic() + (5.0 if pid or about_to_begin else 0.005))
            wait_until(lambda: not self._runs_or_starts(), until - time.monotonic())
            if time.monotonic() >= end:
                raise SchedulerError(f"cannot end the server: pid {pid or about_to_begin} still runs", where=self.home)

    def retire(self) -> None:
        """Carry out -K: end the daemon, cancel all waiting jobs, and end the generation."""
        if not self.exists():
            return
        with self._locked():
            self.life = self._current()
            if not self.life:
                return
            self._stop(signal.SIGINT)
            replace_file(os.path.join(self.folder, "current"), b"0\n", sync=True)
            self._cancel_waiting()  # last, because a call checks `was_ended` after it has queued its job

    def _cancel_waiting(self) -> None:
        from scheduler.client.send_request import do
        from scheduler.core.requests import Cancel

        client = SchedulerClient(self.state_file)
        waiting, _ = client.jobs(("pending",))
        if waiting:
            do(client, Cancel(tuple(job.id for job in waiting)), self._config)


def _is_running(told: Mapping[str, Any]) -> bool:
    """Return whether a process still runs. ``told``: its pid, start time and boot id, as the process recorded them."""
    try:
        ticks = ticks_of(int(told["pid"]))
        return ticks > 0 and ticks == told.get("ticks") and told.get("boot") == boot_id()
    except (OSError, ValueError, KeyError):
        return False


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in variable ``name``. If this is not a whole number of 1 or more, return ``default``."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 10**9 else default


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as a config file spells them."""
    from scheduler.core.config import written  # imported here: most calls change no setting

    return {key: written(value) for key, value in settings.items()}


def _gpu_list(text: str) -> str:
    """Return the GPU ids in ``text`` as a value of the setting `gpu_ids`.

    If ``text`` names no GPU or is invalid, return an empty text, which stands for all GPUs.
    """
    from scheduler.core.gpu import gpu_ids_text, parse_gpu_ids

    try:
        return gpu_ids_text(parse_gpu_ids(text) or ())
    except SchedulerError:
        return ""


def _tolerance(percent: int) -> float:
    return round(1 - percent / 100, 4)
