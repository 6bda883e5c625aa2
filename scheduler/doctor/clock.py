"""Check of the clock."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import time
from dataclasses import dataclass

from scheduler.core.units import span_text
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, not_determined

BACK_S = 60.0  # a file dated further in the future shows that the clock went back
FIRST_YEAR = 2024  # an earlier year shows that the clock was never set
STA_UNSYNC = 0x40  # flag of adjtimex(2): not synchronised


@dataclass(frozen=True, slots=True)
class ClockSeen:
    """State of the machine's clock. ``synchronised``: None if it is not known whether the clock is synchronised."""

    year: int
    synchronised: bool | None
    newest: str = ""  # the file of the scheduler that was written last
    ahead_s: float = 0.0  # how far its time of change lies in the future, in seconds
    timedated: bool = True  # timedatectl can turn synchronisation on


def judge(seen: ClockSeen, who: DoctorUser) -> Finding:
    """Return the finding on the clock.

    A wrong clock does not change time limits and back-off, because they use the monotonic clock.
    """
    mend = who.root("timedatectl set-ntp true") if seen.timedated else who.install("chrony")
    if seen.year < FIRST_YEAR:
        wrong = "jobs and logs get wrong times; once the clock is right, keep_logs may delete these logs as old"
        return Finding("clock", Mark.BAD, f"the clock shows the year {seen.year}", wrong, mend)
    if seen.ahead_s > BACK_S:
        wrong = f"the clock was set back: the time of the file {seen.newest} is {span_text(seen.ahead_s)} in the future"
        return Finding("clock", Mark.WARN, "set back", wrong, mend)
    if seen.synchronised is None:
        return not_determined("clock", "whether it is synchronised")
    if not seen.synchronised:
        wrong = "nothing synchronises the clock: times of jobs and logs may be wrong, and jump when somebody sets it"
        return Finding("clock", Mark.WARN, "not synchronised", wrong, mend)
    return good("clock", "synchronised")


def clock_synchronised() -> bool | None:
    """Return whether the kernel considers its clock synchronised, as timedatectl shows; None if this is not known."""
    buffer = ctypes.create_string_buffer(512)  # struct timex; field `modes` is 0, so nothing is changed
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except AttributeError:
        return None
    return None if state < 0 else not struct.unpack_from("i", buffer, 40)[0] & STA_UNSYNC


def time_service() -> bool:
    """Return whether timedatectl can turn synchronisation on."""
    return os.path.isdir("/run/systemd/system") and shutil.which("timedatectl") is not None


def check_clock(exam: Examination) -> list[Finding]:
    """Check that the clock is set, did not go back, and is synchronised."""
    newest, at = "", 0.0
    for path in (exam.places.state_file, exam.places.store, f"{exam.places.store}-wal", exam.places.wakeup):
        with contextlib.suppress(OSError):
            if (written := os.stat(path).st_mtime) > at:
                newest, at = path, written
    now = time.time()
    seen = ClockSeen(time.gmtime(now).tm_year, clock_synchronised(), newest, at - now, time_service())
    return [judge(seen, exam.who)]
