"""What is right and wrong with the machine: what was seen of it → a finding, with the one command that mends it."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.errors import word
from scheduler.core.units import mib_text, span_text
from scheduler.system.filesystems import FileSystem

FULL_MIB, NEARLY_FULL_MIB, FEWEST_INODES = 16, 1024, 64
SAFE_SCREEN = (5, 0, 1)  # older ones that are setuid let their users take over what is not theirs
SPARE = 0.9  # of a limit: who has used more than this may meet it at the next start
INSTANCES, WATCHES = 1024, 524288  # limits to set
BACK_S = 60.0  # a file from further in the future than this shows a clock that went back
FIRST_YEAR = 2024
INSTALLERS = {
    "apt-get": "apt-get install -y", "dnf": "dnf install -y", "yum": "yum install -y", "zypper": "zypper install -y",
    "pacman": "pacman -S --noconfirm", "apk": "apk add",
}  # fmt: skip


class Mark(enum.Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"  # it works, but not as it could
    BAD = "bad"
    UNKNOWN = "unknown"  # cannot be told


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, what is wrong with it, and the command that mends it."""

    check: str
    mark: Mark
    seen: str
    wrong: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Who:
    """Who asks, and is to run what is proposed."""

    uid: int
    name: str
    installer: str = ""  # the package manager of this machine, one of INSTALLERS

    def root(self, command: str) -> str:
        """The command, as somebody runs it who needs root's rights for it."""
        return command if self.uid == 0 else f"sudo {command}"

    def install(self, package: str) -> str:
        """The command that installs a package of the system."""
        return self.root(f"{INSTALLERS[self.installer]} {package}") if self.installer else ""


def good(check: str, seen: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Mark.OK, seen)


def not_told(check: str, what: str, why: str = "") -> Finding:
    """It is not known, which is never the same as good."""
    return Finding(check, Mark.UNKNOWN, f"cannot be told: {what}", why)


def crowded(processes: tuple[int, int], memory: tuple[int, int]) -> Finding:
    """No thread could be had. Limits, soft and hard, on this user's processes and on a process's memory; -1: none."""
    limits = [f"{processes[0]} processes and threads at most (ulimit -u)"] if processes[0] >= 0 else []
    limits += [f"{memory[0] >> 10} KiB of memory at most (ulimit -v)"] if memory[0] >= 0 else []
    raised = [f"ulimit -{letter} {'unlimited' if hard < 0 else hard >> shift}"
              for letter, (soft, hard), shift in (("u", processes, 0), ("v", memory, 10)) if soft != hard]  # fmt: skip
    wrong = "no thread could be started, so the checks were made one after another; jobs need processes, too"
    return Finding("processes", Mark.BAD, " and ".join(limits) or "no room for another", wrong, "; ".join(raised))


# -- screen -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScreenSeen:
    """GNU screen, as PATH leads to it."""

    path: str = ""  # where PATH leads; empty: nowhere
    real: str = ""  # behind all links
    said: str = ""  # by `screen -v`
    setuid: bool = False
    wanted: bool = False  # `screen: true` is set


def screen_version(said: str) -> tuple[int, ...]:
    """(4, 9, 0) of ``Screen version 4.09.00 (GNU) 30-Jan-22``; empty where none is to be read."""
    found = re.search(r"version (\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", said, re.ASCII | re.IGNORECASE)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def screen(seen: ScreenSeen, who: Who) -> Finding:
    """Whether there is a screen, and one that may be used on a machine that people share."""
    if not seen.path:
        if not seen.wanted:
            return good("screen", "not installed; only start --screen needs it")
        return Finding(
            "screen", Mark.BAD, "not in PATH", "screen: true is set, so start refuses", who.install("screen")
        )
    where = seen.path if seen.real in ("", seen.path) else f"{seen.path}, which is {seen.real}"
    version = screen_version(seen.said)
    told = ".".join(map(str, version)) or "of unknown version"
    if not seen.setuid:
        return (
            good("screen", f"{told}, not setuid ({where})")
            if version
            else not_told("screen", f"the version of {where}")
        )
    mend = who.root(f"chmod u-s {word(seen.real or seen.path)}")
    if not version:
        wrong = "it is setuid; before 5.0.1 that lets its users take over what is not theirs"
        return Finding("screen", Mark.UNKNOWN, f"cannot be told: the version of {where}", wrong, mend)
    if version >= SAFE_SCREEN:
        return good("screen", f"{told}, setuid ({where})")
    wrong = (
        "setuid and before 5.0.1: its users can read what others' terminals show or become root (CVE-2025-23395, "
        "CVE-2025-46802 to 46805), unless your distribution has mended that in it"
    )
    return Finding("screen", Mark.BAD, f"{told}, setuid ({where})", wrong, mend)


# -- logging out ------------------------------------------------------------------------------------------


class Place(enum.Enum):
    """Where in systemd's tree a process lives."""

    SESSION = "session"  # of one login
    MANAGER = "manager"  # the user's own systemd, which ends with the last login unless it lingers
    SERVICE = "service"  # of the system
    HIDDEN = "hidden"


def place_of(cgroups: str) -> tuple[Place, str]:
    """The place by /proc/PID/cgroup, and the unit that it is a service of (or an empty text)."""
    paths = dict(line.split(":", 2)[1:] for line in cgroups.splitlines() if line.count(":") >= 2)
    path = max((paths.get("name=systemd", ""), paths.get("", "")), key=len)
    parts = [part for part in path.split("/") if part]
    services = [part for part in parts if part.endswith(".service") and not part.startswith("user@")]
    unit = services[-1] if services else ""
    if any(re.fullmatch(r"user@\d+\.service", part) for part in parts):
        return Place.MANAGER, unit
    if any(re.fullmatch(r"session-[^/]+\.scope", part) for part in parts):
        return Place.SESSION, ""
    return (Place.SERVICE, unit) if unit else (Place.HIDDEN, "")


@dataclass(frozen=True, slots=True)
class LoginSeen:
    """What happens to processes when their user logs out."""

    manager: bool  # a login manager runs here
    kills: bool | None = None  # KillUserProcesses
    exclude: tuple[str, ...] = ("root",)  # KillExcludeUsers
    only: tuple[str, ...] = ()  # KillOnlyUsers
    lingers: bool | None = None
    place: Place = Place.HIDDEN
    unit: str = ""
    kill_mode: str = ""  # of that unit
    daemon: bool = False  # the place is the scheduler's; else that of whoever asks, who would start it
    start: str = ""  # the command that starts the scheduler


def logout(seen: LoginSeen, who: Who) -> Finding:
    """Whether the scheduler and its jobs outlive the login they were started from."""
    if seen.place is Place.HIDDEN and not seen.manager:
        return good("logout", "no login manager of systemd here: nothing ends processes at a logout")
    what = "the scheduler" if seen.daemon else "what is started from here"
    if seen.unit and seen.place in (Place.SERVICE, Place.MANAGER):
        found = _of_service(seen, who, what)
        if found is not None:
            return found
    if seen.place is Place.MANAGER:
        if seen.lingers is None:
            return not_told("logout", f"whether {who.name} lingers", f"{what} ends with the last login if not")
        if seen.lingers:
            return good("logout", f"{what} runs below your own systemd, which lingers")
        wrong = f"{what} runs below your own systemd, which ends with your last login, and all jobs with it"
        return Finding("logout", Mark.BAD, f"{who.name} does not linger", wrong, "loginctl enable-linger")
    if seen.place is Place.SERVICE:
        return good("logout", f"{what} is part of {seen.unit}, not of a login")
    if seen.kills is None:
        return not_told("logout", "whether logging out ends processes (KillUserProcesses of systemd-logind)")
    if not seen.kills:
        return good("logout", "KillUserProcesses=no: processes outlive their login")
    if who.name in seen.exclude or (seen.only and who.name not in seen.only):
        return good("logout", f"KillUserProcesses=yes, but not for {who.name}")
    wrong = f"{what} ends when you log out, and all its jobs with it"
    if seen.place is Place.HIDDEN:
        wrong += ", if it belongs to a login (which cannot be told)"
    if seen.daemon:  # what runs already stays where it is, so only the login manager's own setting saves it
        text = r"[Login]\nKillUserProcesses=no\n"
        mend = who.root(
            f'sh -c \'mkdir -p /etc/systemd/logind.conf.d && printf "{text}" >/etc/systemd/logind.conf.d/gpujob.conf && '
            "systemctl kill -s HUP systemd-logind'"
        )
    else:
        mend = seen.start and f"loginctl enable-linger && systemd-run --user --scope {seen.start}"
    mark = Mark.WARN if seen.place is Place.HIDDEN else Mark.BAD
    return Finding("logout", mark, "KillUserProcesses=yes", wrong, mend)


def _of_service(seen: LoginSeen, who: Who, what: str) -> Finding | None:
    """What the service that it is part of does to it when it is stopped."""
    unit = seen.unit
    if not seen.kill_mode:
        return not_told("logout", f"the KillMode of {unit}", f"unless it is process, stopping {unit} ends all jobs")
    if seen.kill_mode in ("process", "none"):
        return None
    mine = seen.place is Place.MANAGER
    folder = f"{'~/.config/systemd/user' if mine else '/etc/systemd/system'}/{word(f'{unit}.d')}"
    command = (
        f'mkdir -p {folder} && printf "[Service]\\nKillMode=process\\n" >{folder}/gpujob.conf && '
        f"systemctl{' --user' if mine else ''} daemon-reload"
    )
    wrong = f"{what} is part of {unit}: when that is stopped or started anew, all running jobs are ended with it"
    mend = command if mine else who.root(f"sh -c {word(command)}")
    return Finding("logout", Mark.BAD if seen.daemon else Mark.WARN, f"KillMode={seen.kill_mode}", wrong, mend)


# -- inotify ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InotifySeen:
    """Whether files can be watched, by trying, and the limits on it."""

    refused: str = ""  # what was refused: instance, watch
    instances: int | None = None  # fs.inotify.max_user_instances
    space_instances: int | None = None  # user.max_inotify_instances, of this user namespace
    watches: int | None = None
    space_watches: int | None = None
    used: int | None = None  # instances of this user
    setting: str = "auto"  # of `watch`


def inotify(seen: InotifySeen, who: Who) -> Finding:
    """Whether changes of files are told at once."""
    if seen.setting == "poll":
        return good("inotify", "not used (watch: poll)")
    limits = ", ".join(
        f"{text} {number}"
        for text, number in (
            ("instances", _least(seen.instances, seen.space_instances)),
            ("watches", _least(seen.watches, seen.space_watches)),
        )
        if number is not None
    )
    used = "" if seen.used is None else f"; {seen.used} instances in use"
    told = f"limits: {limits or 'not told'}{used}"
    then = "start refuses (watch: inotify)" if seen.setting == "inotify" else "files are polled every second instead"
    mark = Mark.BAD if seen.setting == "inotify" else Mark.WARN
    if seen.refused == "instance":
        wrong = f"no inotify instance is left: {then}"
        return Finding("inotify", mark, told, wrong, _raise("instances", seen.instances, seen.space_instances, who))
    if seen.refused == "watch":
        wrong = "no inotify watch is left: changes of files are noticed late"
        return Finding("inotify", Mark.WARN, told, wrong, _raise("watches", seen.watches, seen.space_watches, who))
    most = _least(seen.instances, seen.space_instances)
    if most is None or seen.used is None:
        return not_told("inotify", "how many inotify instances are left", "one could be had just now")
    if seen.used >= SPARE * most:
        wrong = f"nearly all instances of this user are in use; when none is left, {then}"
        return Finding(
            "inotify", Mark.WARN, told, wrong, _raise("instances", seen.instances, seen.space_instances, who)
        )
    return good("inotify", told)


def _least(one: int | None, other: int | None) -> int | None:
    return min((number for number in (one, other) if number is not None), default=None)


def _raise(what: str, machine: int | None, space: int | None, who: Who) -> str:
    """The command that raises the limit that was met (both are the same outside of containers)."""
    name = f"fs.inotify.max_user_{what}"
    if space is not None and (machine is None or space < machine):
        name = f"user.max_inotify_{what}"
    low = _least(machine, space) or 0
    return who.root(f"sysctl -w {name}={max(INSTANCES if what == 'instances' else WATCHES, 2 * low)}")


# -- clock ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClockSeen:
    """The machine's clock."""

    year: int
    synchronised: bool | None
    newest: str = ""  # the file of ours that was written last
    ahead_s: float = 0.0  # how far in the future that was
    timedated: bool = True  # there is a timedatectl that works


def clock(seen: ClockSeen, who: Who) -> Finding:
    """Whether times mean something. What decides (limits, back-off) goes by another clock, which cannot be set."""
    mend = who.root("timedatectl set-ntp true") if seen.timedated else who.install("chrony")
    if seen.year < FIRST_YEAR:
        wrong = "times and log names are wrong, and logs look old to keep_logs once the clock is right"
        return Finding("clock", Mark.BAD, f"the clock says {seen.year}", wrong, mend)
    if seen.ahead_s > BACK_S:
        wrong = f"the clock went back: {seen.newest} was written {span_text(seen.ahead_s)} in the future"
        return Finding("clock", Mark.WARN, "set, but moved", wrong, mend)
    if seen.synchronised is None:
        return not_told("clock", "whether it is synchronised")
    if not seen.synchronised:
        wrong = "nothing keeps it right: times of jobs and logs may be off, and jump when somebody sets it"
        return Finding("clock", Mark.WARN, "not synchronised", wrong, mend)
    return good("clock", "synchronised")


# -- folders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FolderSeen:
    """A folder that the scheduler writes to, or the nearest one above it that is there."""

    check: str
    path: str
    there: bool = True
    system: FileSystem | None = None
    free_mib: int | None = None
    free_inodes: int | None = None  # None: this file system has no fixed number of them
    read_only: bool = False
    mount: str = "/"
    owner: str = ""  # who it belongs to, if not to who asks
    again: str = ""  # the command that asks the same
    writable: bool = True
    move: str = ""  # the command that takes the scheduler's files to a disk of this machine


def folder(seen: FolderSeen, who: Who) -> Finding:
    """Whether what stands there is kept, alone with us, and has room."""
    system = seen.system
    free = [] if seen.free_mib is None else [f"{mib_text(seen.free_mib)} free"]
    told = ", ".join([seen.path, *([system.name] if system else []), *free])

    def bad(wrong: str, mend: str, mark: Mark = Mark.BAD) -> Finding:
        return Finding(seen.check, mark, told, wrong, mend)

    if not seen.there:
        return bad("there is no such folder", f"mkdir -p {word(seen.path)}")
    if seen.read_only:
        return bad("its file system is mounted read-only", who.root(f"mount -o remount,rw {word(seen.mount)}"))
    if not seen.writable and seen.owner:
        return bad(
            f"it belongs to {seen.owner}, who alone can run this scheduler", f"sudo -u {word(seen.owner)} {seen.again}"
        )
    if not seen.writable:
        return bad("it cannot be written", f"chmod u+rwx {word(seen.path)}")
    look = f"{who.root('du')} -xh {word(seen.mount)} | sort -h | tail -n 20"
    if seen.free_mib is not None and seen.free_mib < FULL_MIB:
        return bad("the disk is full: nothing new is started; free some space where this shows most of it", look)
    if seen.free_inodes is not None and seen.free_inodes < FEWEST_INODES:
        look = f"{who.root('du')} -x --inodes {word(seen.mount)} | sort -n | tail -n 20"
        return bad(f"{seen.free_inodes} inodes are left; remove files where this shows most of them", look)
    if system is None or not system.known:
        return not_told(seen.check, f"what file system {seen.path} is on", "" if system is None else system.name)
    if not system.modes:
        return bad(
            f"{system.name} keeps no owners and modes: everybody may read and change what stands there", seen.move
        )
    if system.shared:
        wrong = f"{system.name} may be shared with other machines: from those, no command of this scheduler works, and events are polled for"
        return bad(wrong, seen.move, Mark.WARN)
    if system.memory:
        return bad(f"{system.name} is gone when the machine is started anew", seen.move, Mark.WARN)
    if seen.free_mib is not None and seen.free_mib < NEARLY_FULL_MIB:
        return bad("little space is left; free some where this shows most of it", look, Mark.WARN)
    return good(seen.check, told)


def worst(findings: Iterable[Finding]) -> Mark:
    """The mark that stands for all of them."""
    order = (Mark.BAD, Mark.WARN, Mark.UNKNOWN)
    marks = {finding.mark for finding in findings}
    return next((mark for mark in order if mark in marks), Mark.OK)
