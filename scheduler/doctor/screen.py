"""Check of GNU screen: whether it is installed, and safe on a machine with several users."""

from __future__ import annotations

import os
import re
import shutil
import stat
from dataclasses import dataclass

from scheduler.core.errors import word
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, not_determined
from scheduler.doctor.programs import Programs

SAFE_SCREEN = (5, 0, 1)  # older setuid versions let users take over sessions of others, or become root


@dataclass(frozen=True, slots=True)
class ScreenSeen:
    """The program `screen` in PATH, and whether the settings need it."""

    path: str = ""  # empty: not in PATH
    real: str = ""  # with all links resolved
    said: str = ""  # output of `screen -v`
    setuid: bool = False
    wanted: bool = False  # the setting `screen` is true


def screen_version(said: str) -> tuple[int, ...]:
    """Return (4, 9, 0) for ``Screen version 4.09.00 (GNU) 30-Jan-22``; empty if there is no version in the text."""
    found = re.search(r"version (\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", said, re.ASCII | re.IGNORECASE)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def judge(seen: ScreenSeen, who: DoctorUser) -> Finding:
    """Return the finding on GNU screen: whether it is installed, and safe on a machine with several users."""
    if not seen.path:
        if not seen.wanted:
            return good("screen", "not installed; needed only for start --screen")
        return Finding(
            "screen", Mark.BAD, "not in PATH", "the scheduler does not start (screen: true)", who.install("screen")
        )
    where = seen.path if seen.real in ("", seen.path) else f"{seen.path}, which is {seen.real}"
    version = screen_version(seen.said)
    told = ".".join(map(str, version)) or "of unknown version"
    if not seen.setuid:
        return (
            good("screen", f"{told}, not setuid ({where})")
            if version
            else not_determined("screen", f"the version of {where}")
        )
    mend = who.root(f"chmod u-s {word(seen.real or seen.path)}")
    if not version:
        wrong = "it is setuid; a setuid screen before 5.0.1 lets users take over sessions of others or become root"
        return Finding("screen", Mark.UNKNOWN, f"unknown: the version of {where}", wrong, mend)
    if version >= SAFE_SCREEN:
        return good("screen", f"{told}, setuid ({where})")
    wrong = (
        "setuid and older than 5.0.1: users can read the terminals of others or become root (CVE-2025-23395, "
        "CVE-2025-46802 to 46805), unless your distribution has fixed it"
    )
    return Finding("screen", Mark.BAD, f"{told}, setuid ({where})", wrong, mend)


def look(programs: Programs, wanted: bool) -> ScreenSeen:
    """Examine the program `screen` in PATH. ``wanted``: whether the setting `screen` is true."""
    path = shutil.which("screen", path=programs.environ.get("PATH", os.defpath)) or ""
    if not path:
        return ScreenSeen(wanted=wanted)
    real = os.path.realpath(path)
    answer = programs.screen.answer(programs.until)
    said = answer[1] if answer else ""
    return ScreenSeen(path, real, said, bool(os.stat(real).st_mode & stat.S_ISUID), wanted)


def check_screen(exam: Examination) -> list[Finding]:
    """Check that GNU screen is safe, and installed if the settings need it."""
    return [judge(look(exam.programs, exam.config.screen), exam.who)]
