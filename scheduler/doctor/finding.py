"""Findings of a check, and the user to whom the commands are proposed."""

from __future__ import annotations

import enum
import os
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INSTALLERS = {
    "apt-get": "apt-get install -y", "dnf": "dnf install -y", "yum": "yum install -y", "zypper": "zypper install -y",
    "pacman": "pacman -S --noconfirm", "apk": "apk add",
}  # fmt: skip
MOST_NAMED = 20  # paths in one command


class Mark(enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"  # works, but not as well as it could
    BAD = "bad"
    UNKNOWN = "unknown"  # could not be determined


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: what the check saw, what is wrong, and the command that fixes the problem (``mend``)."""

    check: str
    mark: Mark
    seen: str
    wrong: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class DoctorUser:
    """The user who runs `gpujob doctor`, and to whom it proposes commands."""

    uid: int
    name: str
    installer: str = ""  # the package manager of this machine, a key of INSTALLERS; empty: unknown

    def root(self, command: str) -> str:
        """Return the command in the form that runs as root: unchanged if this user is root, else with sudo."""
        return command if self.uid == 0 else f"sudo {command}"

    def install(self, package: str) -> str:
        """Return the command that installs a system package; empty if the package manager is unknown."""
        return self.root(f"{INSTALLERS[self.installer]} {package}") if self.installer else ""


def good(check: str, seen: str) -> Finding:
    """Return a finding which says that nothing is wrong."""
    return Finding(check, Mark.OK, seen)


def not_determined(check: str, what: str, why: str = "") -> Finding:
    """Return a finding marked UNKNOWN. It says that ``what`` could not be determined, and why."""
    return Finding(check, Mark.UNKNOWN, f"unknown: {what}", why)


def worst(findings: Iterable[Finding]) -> Mark:
    """Return the worst mark of the findings; OK if there are none."""
    order = (Mark.BAD, Mark.WARN, Mark.UNKNOWN)
    marks = {finding.mark for finding in findings}
    return next((mark for mark in order if mark in marks), Mark.OK)


def many(names: Sequence[str], number: int) -> str:
    """Return the first of ``names`` and the number of the other names, such as ``NAME and 3 more``.

    ``number``: how many names there are in total; ``names`` may contain only some of them.
    """
    return names[0] if number == 1 else f"{names[0]} and {number - 1} more"


def status_of(path: str) -> os.stat_result | None:
    """Return the status of ``path``; None if ``path`` cannot be examined. A link is not followed."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def owner_of(path: str) -> str:
    """Return the name of the owner of ``path``; empty if ``path`` does not exist.

    If this user may not examine ``path``, return the owner of the nearest folder above ``path`` that can be examined.
    """
    while True:
        try:
            return name_of(os.stat(path).st_uid)
        except PermissionError:
            path = os.path.dirname(path)
        except OSError:
            return ""


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
