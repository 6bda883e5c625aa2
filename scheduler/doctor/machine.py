"""Looks at the machine around us: programs, the login manager, limits, the clock, disks; for `gpujob doctor`, which only looks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set

from scheduler.doctor.findings_machine import (
    INSTALLERS,
    FolderSeen,
    InotifySeen,
    LoginSeen,
    Place,
    ScreenSeen,
    place_of,
)
from scheduler.gpus import reader_process
from scheduler.system.filesystems import FileSystem

IN_DELETE_SELF = 0x400
STA_UNSYNC = 0x40
WHOLE_MACHINE = "pid:[4026531836]"  # the kernel's own number for the first namespace of pids
MOST_SAID = 4096


class Asked:
    """A program that was asked something and may take its time, but no more than that."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        program = shutil.which(words[0], path=environ.get("PATH", os.defpath))
        if program is not None:
            with contextlib.suppress(OSError):  # not executable after all: as good as none
                self._process = subprocess.Popen(
                    [program, *words[1:]], env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip

    def answer(self, until: float) -> tuple[int, str] | None:
        """Exit code and words; None when there is no such program, or it did not answer by then (monotonic)."""
        process = self._process
        if process is None:
            return None
        try:
            said, _ = process.communicate(timeout=max(0.01, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.close()
            return None
        self._process = None
        return process.returncode, said[:MOST_SAID].decode("utf-8", "replace")

    def close(self) -> None:
        """End it, if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.stdout is not None:
                process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # asleep in the kernel: init will bury it
                process.wait(0.2)


class Programs:
    """All that is asked of other programs, begun at once, so that together they take as long as the slowest."""

    def __init__(self, environ: Mapping[str, str], user: str, limit_s: float) -> None:
        self.environ, self.user = environ, user
        self.until = time.monotonic() + limit_s
        plain = {name: value for name, value in environ.items() if not name.startswith("GPUJOB_")}
        told = ("KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers")
        names = [word for name in told for word in ("-p", name)]
        self._plain = plain
        self._screen = Asked(["screen", "-v"], plain)
        self._manager = Asked(["loginctl", "show-session", *names], plain)
        self._linger = Asked(["loginctl", "show-user", user, "-p", "Linger"], plain)
        self.smi = shutil.which("nvidia-smi", path=plain.get("PATH", os.defpath)) is not None
        self._imports = Asked([sys.executable, reader_process.__file__, "imports"], plain) if self.smi else None

    def close(self) -> None:
        """End whatever has not answered."""
        for asked in (self._screen, self._manager, self._linger, self._imports):
            if asked is not None:
                asked.close()

    def screen(self, wanted: bool) -> ScreenSeen:
        """The screen that PATH leads to."""
        path = shutil.which("screen", path=self.environ.get("PATH", os.defpath)) or ""
        if not path:
            return ScreenSeen(wanted=wanted)
        real = os.path.realpath(path)
        answer = self._screen.answer(self.until)
        said = answer[1] if answer else ""
        return ScreenSeen(path, real, said, bool(os.stat(real).st_mode & stat.S_ISUID), wanted)

    def login(self, pid: int | None, start: str) -> LoginSeen:
        """What a logout does to this process, or (None) to what we would start."""
        place, unit = place_of(_text(f"/proc/{pid or os.getpid()}/cgroup"))
        answer = self._manager.answer(self.until)
        said = _assignments(answer[1]) if answer and answer[0] == 0 else {}
        booted = os.path.isdir("/run/systemd/system")
        if "KillUserProcesses" not in said:
            said = logind_files() if booted else {}
        kill_mode = ""
        if unit:
            user = ["--user"] if place is Place.MANAGER else []
            asked = Asked(["systemctl", *user, "show", "-p", "KillMode", unit], self._plain).answer(self.until)
            kill_mode = _assignments(asked[1]).get("KillMode", "") if asked else ""
        return LoginSeen(
            manager=booted or bool(said),
            kills=_yes(said.get("KillUserProcesses", "")),
            exclude=tuple(said.get("KillExcludeUsers", "root").split()),
            only=tuple(said.get("KillOnlyUsers", "").split()),
            lingers=self._lingers(),
            place=place,
            unit=unit,
            kill_mode=kill_mode,
            daemon=pid is not None,
            start=start,
        )

    def _lingers(self) -> bool | None:
        answer = self._linger.answer(self.until)
        told = _yes(_assignments(answer[1]).get("Linger", "")) if answer else None
        if told is None and os.path.isdir("/var/lib/systemd/linger"):  # who is not logged in is not shown
            told = os.path.exists(os.path.join("/var/lib/systemd/linger", self.user))
        return told

    def imports(self) -> tuple[str | None, str | None]:
        """What is wrong with pynvml and GPUtil; empty: nothing, None: that is not known.

        Only where there is an nvidia-smi: loading GPUtil takes a third of a second, and without it would be for nothing.
        """
        answer = self._imports.answer(self.until) if self._imports is not None else None
        try:
            told = json.loads(answer[1].splitlines()[-1]) if answer else {}
        except (ValueError, IndexError):
            told = {}
        return told.get("pynvml"), told.get("GPUtil")


def _text(path: str) -> str:
    """What a small file holds; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 16)
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _assignments(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith(("#", ";")))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _yes(word: str) -> bool | None:
    return {
        "yes": True,
        "true": True,
        "1": True,
        "on": True,
        "no": False,
        "false": False,
        "0": False,
        "off": False,
    }.get(word.lower())


def logind_files(roots: Sequence[str] = ("/usr/lib", "/usr/local/lib", "/run", "/etc")) -> dict[str, str]:
    """The login manager's settings by its files, the strongest last, as systemd reads them."""
    main = next((text for root in reversed(roots) if (text := _text(f"{root}/systemd/logind.conf"))), "")
    pieces: dict[str, str] = {}
    for root in roots:
        folder = f"{root}/systemd/logind.conf.d"
        with contextlib.suppress(OSError):
            pieces.update((name, f"{folder}/{name}") for name in os.listdir(folder) if name.endswith(".conf"))
    found = _assignments(main)
    for name in sorted(pieces):
        found.update(_assignments(_text(pieces[name])))
    return found


# -- inotify, the clock, processes ------------------------------------------------------------------------


def inotify(folder: str, setting: str) -> InotifySeen:
    """Tries to watch a folder, for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = ""
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        refused = "instance"
    else:
        if libc.inotify_add_watch(fd, os.fsencode(folder), IN_DELETE_SELF) < 0 and os.path.exists(folder):
            refused = "watch"
        os.close(fd)
    return InotifySeen(
        refused,
        _number("/proc/sys/fs/inotify/max_user_instances"),
        _number("/proc/sys/user/max_inotify_instances"),
        _number("/proc/sys/fs/inotify/max_user_watches"),
        _number("/proc/sys/user/max_inotify_watches"),
        _inotify_used(),
        setting,
    )


def _inotify_used() -> int | None:
    """Inotify instances of this user."""
    number = 0
    me = os.getuid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to look into
            if os.stat(f"/proc/{name}").st_uid == me:
                for fd in os.listdir(f"/proc/{name}/fd"):
                    with contextlib.suppress(OSError):
                        number += os.readlink(f"/proc/{name}/fd/{fd}") == "anon_inode:inotify"
    return number


def clock_synchronised() -> bool | None:
    """Whether the kernel was told that its clock is kept right (what timedatectl shows); None where it does not say."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, with modes 0: only read
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except AttributeError:
        return None
    return None if state < 0 else not struct.unpack_from("i", buffer, 40)[0] & STA_UNSYNC


def time_service() -> bool:
    """Whether timedatectl can turn synchronisation on."""
    return os.path.isdir("/run/systemd/system") and shutil.which("timedatectl") is not None


def installer() -> str:
    """This machine's package manager, or an empty text."""
    return next((name for name in INSTALLERS if shutil.which(name)), "")


def dead(pids: Set[int]) -> set[int] | None:
    """Those that are nobody's; None where numbers of the whole machine mean nothing (a container)."""
    try:
        if os.readlink("/proc/self/ns/pid") != WHOLE_MACHINE:
            return None
    except OSError:
        return None
    gone = set()
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            gone.add(pid)
        except PermissionError:
            continue  # another user's
    return gone


# -- disks ------------------------------------------------------------------------------------------------


def folder(check: str, path: str, system: FileSystem | None, owner: str, again: str) -> FolderSeen:
    """A folder and its disk. ``owner``: the name of whoever it belongs to, if not to us."""
    try:
        space = os.statvfs(path)
    except PermissionError:
        return FolderSeen(check, path, owner=owner, again=again, writable=False)
    except OSError:
        return FolderSeen(check, path, there=False, again=again)
    return FolderSeen(
        check,
        path,
        system=system,
        free_mib=space.f_bavail * space.f_frsize >> 20,
        free_inodes=space.f_favail if space.f_files else None,
        read_only=bool(space.f_flag & os.ST_RDONLY),
        mount=_mount(path),
        owner=owner,
        again=again,
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
    )


def _mount(path: str) -> str:
    """Where its file system is mounted."""
    place = os.path.realpath(path)
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    return place
