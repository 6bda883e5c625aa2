"""Check of logouts: whether the scheduler and its jobs outlive the login from which they were started."""

from __future__ import annotations

import contextlib
import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.core.errors import word
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, not_determined
from scheduler.doctor.programs import Asked, Programs, assignments, text_of, yes_or_no


class Place(enum.Enum):
    """The place of a process in systemd's tree of control groups."""

    SESSION = "session"  # the scope of one login
    MANAGER = "manager"  # the user's own systemd, which ends with the last login unless lingering is enabled
    SERVICE = "service"  # a service of the system
    HIDDEN = "hidden"  # not known


def place_of(cgroups: str) -> tuple[Place, str]:
    """Return the place and the service unit (empty: none) of a process. ``cgroups``: text of /proc/PID/cgroup."""
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
    """The facts that decide whether processes end when their user logs out."""

    manager: bool  # systemd-logind runs on this machine, or answered
    kills: bool | None = None  # KillUserProcesses
    exclude: tuple[str, ...] = ("root",)  # KillExcludeUsers
    only: tuple[str, ...] = ()  # KillOnlyUsers
    lingers: bool | None = None  # lingering is enabled for the user; None: not known
    place: Place = Place.HIDDEN
    unit: str = ""  # service unit of the process
    kill_mode: str = ""  # KillMode of that unit
    daemon: bool = False  # the place is that of the running scheduler; else of this process
    start: str = ""  # command that starts the scheduler


def judge(seen: LoginSeen, who: DoctorUser) -> Finding:
    """Return the finding on whether the scheduler and its jobs outlive the login from which they were started."""
    if seen.place is Place.HIDDEN and not seen.manager:
        return good("logout", "no systemd-logind here: a logout ends no processes")
    what = "the scheduler" if seen.daemon else "a scheduler started from here"
    if seen.unit and seen.place in (Place.SERVICE, Place.MANAGER):
        found = _of_service(seen, who, what)
        if found is not None:
            return found
    if seen.place is Place.MANAGER:
        if seen.lingers is None:
            return not_determined(
                "logout",
                f"whether lingering is enabled for {who.name}",
                f"without lingering, your last logout ends {what}",
            )
        if seen.lingers:
            return good("logout", f"{what} belongs to your own systemd, and lingering is enabled")
        wrong = f"{what} belongs to your own systemd: your last logout ends the scheduler and all its jobs"
        return Finding("logout", Mark.BAD, f"lingering is not enabled for {who.name}", wrong, "loginctl enable-linger")
    if seen.place is Place.SERVICE:
        return good("logout", f"{what} is part of {seen.unit}, not of a login")
    if seen.kills is None:
        return not_determined("logout", "whether logging out ends processes (KillUserProcesses of systemd-logind)")
    if not seen.kills:
        return good("logout", "KillUserProcesses=no: processes outlive their login")
    if who.name in seen.exclude or (seen.only and who.name not in seen.only):
        return good("logout", f"KillUserProcesses=yes, but not for {who.name}")
    wrong = f"a logout ends {what} and all its jobs"
    if seen.place is Place.HIDDEN:
        wrong = f"a logout may end {what} and all its jobs: it is not known whether the scheduler belongs to a login"
    if seen.daemon:  # a running process stays in its scope, so only a setting of logind can save it
        text = r"[Login]\nKillUserProcesses=no\n"
        mend = who.root(
            f'sh -c \'mkdir -p /etc/systemd/logind.conf.d && printf "{text}" >/etc/systemd/logind.conf.d/gpujob.conf && '
            "systemctl kill -s HUP systemd-logind'"
        )
    else:
        mend = seen.start and f"loginctl enable-linger && systemd-run --user --scope {seen.start}"
    mark = Mark.WARN if seen.place is Place.HIDDEN else Mark.BAD
    return Finding("logout", mark, "KillUserProcesses=yes", wrong, mend)


def _of_service(seen: LoginSeen, who: DoctorUser, what: str) -> Finding | None:
    """Return the finding on the systemd service that contains the scheduler.

    If no scheduler runs, this is the service that would contain a scheduler started from here. Return None if the jobs
    survive a stop of the service. ``what``: words for this scheduler in the finding.
    """
    unit = seen.unit
    if not seen.kill_mode:
        return not_determined(
            "logout", f"the KillMode of {unit}", f"unless KillMode=process is set, a stop of {unit} ends all jobs"
        )
    if seen.kill_mode in ("process", "none"):
        return None
    mine = seen.place is Place.MANAGER
    folder = f"{'~/.config/systemd/user' if mine else '/etc/systemd/system'}/{word(f'{unit}.d')}"
    command = (
        f'mkdir -p {folder} && printf "[Service]\\nKillMode=process\\n" >{folder}/gpujob.conf && '
        f"systemctl{' --user' if mine else ''} daemon-reload"
    )
    wrong = f"{what} is part of {unit}: a stop or restart of that service ends all running jobs"
    mend = command if mine else who.root(f"sh -c {word(command)}")
    return Finding("logout", Mark.BAD if seen.daemon else Mark.WARN, f"KillMode={seen.kill_mode}", wrong, mend)


def look(programs: Programs, pid: int | None, start: str) -> LoginSeen:
    """Collect the facts on the process ``pid`` of the scheduler.

    If ``pid`` is None, no scheduler runs. The facts are then collected on this process, because a scheduler that is
    started from the same login would have the same place. ``start``: command that starts the scheduler.
    """
    place, unit = place_of(text_of(f"/proc/{pid or os.getpid()}/cgroup"))
    answer = programs.manager.answer(programs.until)
    said = assignments(answer[1]) if answer and answer[0] == 0 else {}
    booted = os.path.isdir("/run/systemd/system")
    if "KillUserProcesses" not in said:
        said = logind_files() if booted else {}
    kill_mode = ""
    if unit:
        user = ["--user"] if place is Place.MANAGER else []
        asked = Asked(["systemctl", *user, "show", "-p", "KillMode", unit], programs.plain).answer(programs.until)
        kill_mode = assignments(asked[1]).get("KillMode", "") if asked else ""
    return LoginSeen(
        manager=booted or bool(said),
        kills=yes_or_no(said.get("KillUserProcesses", "")),
        exclude=tuple(said.get("KillExcludeUsers", "root").split()),
        only=tuple(said.get("KillOnlyUsers", "").split()),
        lingers=_lingers(programs),
        place=place,
        unit=unit,
        kill_mode=kill_mode,
        daemon=pid is not None,
        start=start,
    )


def _lingers(programs: Programs) -> bool | None:
    answer = programs.linger.answer(programs.until)
    told = yes_or_no(assignments(answer[1]).get("Linger", "")) if answer else None
    if told is None and os.path.isdir("/var/lib/systemd/linger"):  # loginctl shows only users who are logged in
        told = os.path.exists(os.path.join("/var/lib/systemd/linger", programs.user))
    return told


def logind_files(roots: Sequence[str] = ("/usr/lib", "/usr/local/lib", "/run", "/etc")) -> dict[str, str]:
    """Return the settings in systemd-logind's files, which are read in the order of logind.conf(5).

    Files in ``logind.conf.d`` override ``logind.conf``. If several folders in ``roots`` have a file with the same name,
    only the file in the last of these folders is read.
    """
    main = next((text for root in reversed(roots) if (text := text_of(f"{root}/systemd/logind.conf"))), "")
    pieces: dict[str, str] = {}
    for root in roots:
        folder = f"{root}/systemd/logind.conf.d"
        with contextlib.suppress(OSError):
            pieces.update((name, f"{folder}/{name}") for name in os.listdir(folder) if name.endswith(".conf"))
    found = assignments(main)
    for name in sorted(pieces):
        found.update(assignments(text_of(pieces[name])))
    return found


def check_logout(exam: Examination) -> list[Finding]:
    """Check that a logout does not end the scheduler.

    If no scheduler runs, check that a logout would not end a scheduler that is started from this login.
    """
    pid = exam.dir_seen.pid if exam.dir_seen.alive else None
    return [judge(look(exam.programs, pid, exam.start), exam.who)]
