"""What a check finds, and who is to mend it."""

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
MOST_NAMED = 20


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


def worst(findings: Iterable[Finding]) -> Mark:
    """The mark that stands for all of them."""
    order = (Mark.BAD, Mark.WARN, Mark.UNKNOWN)
    marks = {finding.mark for finding in findings}
    return next((mark for mark in order if mark in marks), Mark.OK)


def many(names: Sequence[str], number: int) -> str:
    """The first of them, and how many there are."""
    return names[0] if number == 1 else f"{names[0]} and {number - 1} more"


def status_of(path: str) -> os.stat_result | None:
    """Of the place itself, without following a link; None where there is nothing to be seen."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def owner_of(path: str) -> str:
    """Who a place belongs to: by the nearest folder above it that may be looked at."""
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
