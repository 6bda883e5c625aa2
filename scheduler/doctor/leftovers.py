"""Check for leftover processes of jobs, and for leftover files of killed commands."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.core.errors import word
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import (
    MOST_NAMED,
    DoctorUser,
    Finding,
    Mark,
    good,
    many,
    name_of,
    not_determined,
    status_of,
)
from scheduler.intake.tail import places_of
from scheduler.recovery.job_reconstruction import alive as living
from scheduler.system.atomic_files import leftover_temporaries
from scheduler.system.proc import boot_id, command_words
from scheduler.system.processes import lives, seen

OLD_S = 120.0  # age in seconds from which no process needs a file any more
ATTEMPT = re.compile(r"\d{1,18}\.\d{1,18}")
_ASIDE = re.compile(r"\.(.+)\.new-(\d{1,10})", re.DOTALL)
_PACKET = re.compile(r"(packet)-(\d{1,10})-\d+")  # file from the daemon with this pid to a supervisor


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of an attempt that has ended or is not known."""

    pid: int
    job: int
    attempt: int
    command: str


@dataclass(frozen=True, slots=True)
class LeftSeen:
    """Leftover processes and files."""

    processes: tuple[Leftover, ...] = ()
    held: bool = False  # a scheduler runs; it gives the GPUs of these processes to no job
    files: tuple[str, ...] = ()
    untold: str = ""  # what could not be determined
    sudo: str = ""  # prefix for commands that only the owner may run


def judge(seen: LeftSeen, who: DoctorUser) -> list[Finding]:
    """Return the findings on leftover processes and files."""
    found = []
    if seen.processes:
        jobs = sorted({one.job for one in seen.processes})
        which = f"job{'s' * (len(jobs) > 1)} {', '.join(map(str, jobs))}"
        have = "which have ended or are" if len(jobs) > 1 else "which has ended or is"
        named = "; ".join(f"pid {one.pid} {one.command}" for one in seen.processes[:3])
        more = f" and {len(seen.processes) - 3} more" if len(seen.processes) > 3 else ""
        then = (
            "their GPUs stay allocated until the processes end"
            if seen.held
            else "no scheduler is running; the next scheduler may allocate their GPUs to other jobs"
        )
        mend = f"{seen.sudo}kill " + " ".join(str(one.pid) for one in seen.processes)
        found.append(
            Finding(
                "leftovers",
                Mark.WARN if seen.held else Mark.BAD,
                f"{named}{more}",
                f"processes of {which}, {have} unknown: {then}",
                mend,
            )
        )
    if seen.files:
        first = seen.files[:MOST_NAMED]
        mend = f"{seen.sudo}rm -r {' '.join(map(word, first))}"
        found.append(
            Finding(
                "leftovers", Mark.WARN, many(seen.files, len(seen.files)), "leftover file of a killed command", mend
            )
        )
    if seen.untold:
        found.append(not_determined("leftovers", seen.untold))
    return found or [good("leftovers", "none")]


def check_leftovers(exam: Examination) -> list[Finding]:
    """Check for processes that outlived their job, and for files that nobody needs any more."""
    dir_seen, places = exam.dir_seen, exam.places
    untold = ""
    processes: list[Leftover] = []
    with contextlib.suppress(OSError):
        owner = os.stat(places.state_dir).st_uid
        if owner != exam.who.uid and exam.who.uid:
            untold = f"which processes outlived their jobs; the jobs belong to user {name_of(owner)}"
    if dir_seen.in_hand is None and not untold:
        untold = "which processes outlived their jobs: the store cannot be read"
    if not untold:
        processes = _processes(exam)
    files = tuple(sorted(set(_files_left(exam))))
    return judge(LeftSeen(tuple(processes), dir_seen.alive, files, untold, exam.sudo), exam.who)


def _processes(exam: Examination) -> list[Leftover]:
    """Return the leftover processes that still live 0.2 s after they were found.

    Because of this wait, processes that are just ending are left out.
    """
    known = {(job.id, job.attempt) for job in exam.dir_seen.in_hand or ()}
    left = {
        process: key
        for key, marked in living(exam.places.state_file).marked.items()
        if key not in known
        for process in marked
    }
    for holding, boot in exam.dir_seen.holdings:
        if boot == boot_id():
            left |= {
                process: (holding.job, 0) for process in holding.processes if lives(process) and process not in left
            }
    if left:
        time.sleep(0.2)
    return [
        Leftover(process.pid, job, attempt, _command(process.pid))
        for process, (job, attempt) in sorted(left.items(), key=lambda item: item[0].pid)
        if lives(process)
    ]


def _files_left(exam: Examination) -> Iterator[str]:
    places = exam.places
    yield from filter(_without_writer, leftover_temporaries(places.state_file))
    if exam.config.llm_config:
        yield from filter(_without_writer, leftover_temporaries(places_of(exam.config.llm_config)[-1]))
    with contextlib.suppress(OSError):
        paths = (os.path.join(places.state_dir, entry) for entry in os.listdir(places.state_dir))
        yield from filter(_without_writer, paths)
    with contextlib.suppress(OSError):
        for entry in os.listdir(places.attempts):
            if not ATTEMPT.fullmatch(entry):
                yield os.path.join(places.attempts, entry)
    if not exam.dir_seen.alive and not os.path.exists(places.recovering):
        with contextlib.suppress(OSError):
            start = os.path.basename(places.new_store)
            yield from (os.path.join(places.state_dir, n) for n in os.listdir(places.state_dir) if n.startswith(start))
    known = {job.attempt_key for job in exam.dir_seen.in_hand or ()}
    with contextlib.suppress(OSError):
        for one in os.scandir(places.sessions):
            key, _, ending = one.name.rpartition(".")
            if (
                ending in ("launch", "said")
                and key not in known
                and exam.dir_seen.in_hand is not None
                and _old(one.path)
            ):
                yield one.path


def _without_writer(path: str) -> bool:
    """Return whether this is a temporary file or a packet whose process has ended."""
    name = os.path.basename(path)
    found = _ASIDE.fullmatch(name) or _PACKET.fullmatch(name)
    if found is None or seen(int(found[2])) is not None:
        return False
    status = status_of(path)
    plain = status is not None and stat.S_ISREG(status.st_mode)
    return plain and (found.re is _ASIDE or _old(path))  # a new packet may still be read


def _old(path: str) -> bool:
    return time.time() - os.lstat(path).st_mtime > OLD_S


def _command(pid: int) -> str:
    """Return the command of a process, cut to 40 characters; empty if it cannot be read."""
    try:
        words = command_words(pid, 400)
    except OSError:
        return ""
    text = b" ".join(words).decode("utf-8", "replace").strip()
    return text if len(text) <= 40 else f"{text[:39]}…"
