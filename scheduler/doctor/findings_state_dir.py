"""What is right and wrong with a scheduler's own files and processes: what was seen → findings, as `doctor/findings_machine.py` has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.core.errors import (
    DENIED,
    LINK,
    NO_PLAIN_FILE,
    OWNER,
    UNSEEN,
    WRITERS,
    FileTrouble,
    SchedulerError,
    word,
)
from scheduler.doctor.findings_machine import Finding, Mark, Who, good, not_told

MOST_NAMED = 20
_LINE = re.compile(r"(/.*?):(\d+)(?::\d+)?$", re.DOTALL)


def many(names: Sequence[str], number: int) -> str:
    """The first of them, and how many there are."""
    return names[0] if number == 1 else f"{names[0]} and {number - 1} more"


# -- the store and who works on it ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """The store, looked at without a write."""

    there: bool = False
    jobs: int = 0
    trouble: str = ""  # what is wrong with it
    kind: str = ""  # of trouble: damaged, moved, newer, elsewhere, denied, late
    recover: str = ""  # the command that rebuilds it, or takes it over
    host: str = ""  # where its scheduler runs, if elsewhere
    again: str = ""  # the command that asks the same
    python: str = "python3"


def store(seen: StoreSeen) -> Finding:
    """Whether it can be trusted."""
    if not seen.trouble:
        plural = "" if seen.jobs == 1 else "s"
        return good("store", f"whole, {seen.jobs} job{plural}" if seen.there else "none yet; the first start makes it")
    if seen.kind in ("denied", "late"):
        return not_told("store", "whether it is whole", seen.trouble)
    mend = {
        "damaged": seen.recover,
        "moved": seen.recover,
        "newer": f"{word(seen.python)} -m pip install --upgrade gpujob",
        "elsewhere": f"ssh {word(seen.host)} {seen.again}",
    }.get(seen.kind, "")
    wrong = seen.trouble
    if seen.kind == "moved":
        wrong += "; only if the original is out of use take it over, else both run its jobs"
    told = {"moved": "of another place", "newer": "of a newer gpujob", "elsewhere": "in use on another machine"}
    return Finding("store", Mark.BAD, told.get(seen.kind, "cannot be used"), wrong, mend)


@dataclass(frozen=True, slots=True)
class SchedulerSeen:
    """Who runs."""

    alive: bool
    pid: int | None = None
    stopped: bool = False
    running: int | None = 0  # jobs in hand; None: not known
    others: tuple[str, ...] = ()  # who else gives out GPUs of ours: pid 12 of eve GPU 0-3
    free: str = ""  # those of ours that nobody else gives out: 1,3
    start: str = ""  # the command that starts it as it was; empty: it would be refused
    apart: str = ""  # the same without a word on GPUs
    sudo: str = ""  # before whatever root does to another user's
    hidden: str = ""  # whose folder it is, if we may not look into that


def scheduler(seen: SchedulerSeen) -> list[Finding]:
    """Whether somebody looks after the jobs, and whether others give out the same GPUs."""
    found = []
    kill = f"{seen.sudo}kill"
    jobs = f"{seen.running} job{'s run' if seen.running != 1 else ' runs'}"
    if seen.hidden:
        found.append(not_told("scheduler", f"whether one runs here: the folder belongs to {seen.hidden}"))
    elif seen.alive and seen.stopped:
        wrong = "it is stopped (SIGSTOP, Ctrl-Z): nothing is started and nothing answers"
        found.append(Finding("scheduler", Mark.BAD, f"pid {seen.pid}", wrong, f"{kill} -CONT {seen.pid}"))
    elif seen.alive:
        found.append(good("scheduler", f"runs, pid {seen.pid}" if seen.pid else "runs"))
    elif seen.running:
        wrong = (
            f"{jobs}, as the store has it, and nobody looks after it: time limits, what waits and GPUs wait for a start"
        )
        found.append(Finding("scheduler", Mark.WARN, "none runs", wrong, seen.start))
    else:
        found.append(good("scheduler", "none runs here"))
    if seen.others and not seen.hidden:  # else it may be the one of this folder
        told = f"not alone: {'; '.join(seen.others[:3])}{'; …' * (len(seen.others) > 3)}"
        wrong = "schedulers do not know of each other's bookings: give each GPUs of its own (--gpu-ids)"
        if not seen.free:
            wrong += "; here no GPU is known that no other gives out, so end one of them or take GPUs from one"
        first = f"{kill} {seen.pid} && sleep 6 && " if seen.alive else ""
        mend = f"{first}{seen.apart} --gpu-ids {seen.free}" if seen.free and seen.apart else ""
        found.append(Finding("scheduler", Mark.WARN, told, wrong, mend))
    return found


# -- files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Owners and modes of all that is the scheduler's own: the state_dir, the state file, logs."""

    folders: tuple[str, ...] = ()  # those of them that are there
    owner: str = ""  # whose they should be
    number: int = 0  # looked at
    foreign: tuple[str, ...] = ()  # of another owner
    open: tuple[str, ...] = ()  # others may read or write
    locked: tuple[str, ...] = ()  # the owner himself may not
    link: str = ""  # the state_dir is a link
    no_folder: str = ""  # something of ours that should be a folder and is none
    no_file: str = ""  # the state file, where it is a device or the like
    untold: str = ""  # could not be looked into
    whole: bool = True  # False: there are more than were looked at
    recover: str = ""


def files(seen: FilesSeen, who: Who) -> list[Finding]:
    """Whether they are private, and ours."""
    found = []
    if seen.link:
        link = word(seen.link)
        mend = f'd="$(readlink -f {link})" && rm {link} && mv "$d" {link} && {seen.recover}'
        found.append(Finding("files", Mark.BAD, seen.link, "it is a link: start refuses it", mend))
    if seen.no_folder:
        place = word(seen.no_folder)
        found.append(
            Finding("files", Mark.BAD, seen.no_folder, "it is no folder: start refuses it", f"mv {place} {place}.old")
        )
    if seen.no_file:  # perhaps of the system, as /dev/null: no command may touch it
        wrong = "it is no plain file: name another --state-file"
        found.append(Finding("files", Mark.BAD, seen.no_file, wrong))
    for names, wrong, command, group in (
        (seen.foreign, f"not of {seen.owner}", f"chown -h {word(seen.owner)}", f"! -user {word(seen.owner)}"),
        (seen.open, "others may read or write it", "chmod go-rwx", "! -type l -perm /077"),
        (seen.locked, "its owner may not read and write it", "chmod u+rwX", "! -type l ! -perm -600"),
    ):
        if not names:
            continue
        mend = f"{command} {' '.join(map(word, names))}"
        if len(names) > MOST_NAMED:
            mend = f"find {' '.join(map(word, seen.folders))} -xdev {group} -exec {command} {{}} +"
        if command.startswith("chown") or (seen.owner not in ("", who.name)):
            mend = who.root(mend)
        found.append(Finding("files", Mark.BAD, many(names, len(names)), wrong, mend))
    if seen.untold:
        found.append(not_told("files", f"what is in {seen.untold}"))
    if not found and seen.whole:
        return [good("files", f"{seen.number} looked at, private" if seen.number else "none yet")]
    if not found:
        found.append(not_told("files", f"whether all are private: the first {seen.number} are"))
    return found


def input_file(
    check: str,
    path: str,
    error: SchedulerError | None,
    who: Who,
    there: bool,
    *,
    device: bool = False,
    owner: int | None = None,
    again: str = "",
) -> Finding:
    """Config, jobs file, commands file, model table: whether it can be read, and nobody else could have written it.

    ``device``: it is one, which no command may touch. ``owner``: whose scheduler it is, if not that of who asks; ``again``:
    the command by which that one asks the same.
    """
    if error is None:
        return good(check, path if there else f"{path}, not there yet")
    exposed = error.exposure if isinstance(error, FileTrouble) else None
    if exposed is not None and owner is not None and exposed.code in (OWNER, LINK):
        if exposed.code == OWNER and exposed.owner == owner:
            return Finding(check, Mark.UNKNOWN, f"cannot be told: whether only its owner can write {path}", "", again)
        return Finding(check, Mark.BAD, error.where or path, exposed.said)
    line = _LINE.match(error.where)
    wrong, mend = error.what, ""
    if exposed is not None:
        wrong, mend = exposed.said, exposed.mend
        if exposed.code != WRITERS:
            chown = "chown -h" if exposed.code == LINK else "chown"
            mend = who.root(f"{chown} {word(who.name)} {word(exposed.place)}")
    elif line:
        wrong, mend = f"line {line[2]}: {wrong}", f'"${{EDITOR:-vi}}" +{line[2]} {word(line[1])}'
    elif error.code == DENIED:
        mend = f"chmod u+r {word(path)}"
    elif error.code == NO_PLAIN_FILE:
        mend = "" if device else f"mv {word(path)} {word(f'{path}.old')}"
    elif error.code == UNSEEN:
        mend = ""
    elif error.where == path:
        mend = f'"${{EDITOR:-vi}}" {word(path)}'
    if error.do:
        wrong = f"{wrong}; {error.do}"
    return Finding(check, Mark.BAD, error.where or path, wrong, mend)


# -- what was left ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of an attempt that nobody runs any more."""

    pid: int
    job: int
    attempt: int
    command: str


@dataclass(frozen=True, slots=True)
class LeftSeen:
    """What earlier attempts and killed commands left behind."""

    processes: tuple[Leftover, ...] = ()
    held: bool = False  # a scheduler runs, and keeps their GPUs taken
    files: tuple[str, ...] = ()
    untold: str = ""
    sudo: str = ""  # before whatever root does to another user's


def leftovers(seen: LeftSeen, who: Who) -> list[Finding]:
    """Processes that outlived their job, and files that nobody needs."""
    found = []
    if seen.processes:
        jobs = ", ".join(map(str, sorted({one.job for one in seen.processes})))
        named = "; ".join(f"pid {one.pid} {one.command}" for one in seen.processes[:3])
        more = f" and {len(seen.processes) - 3} more" if len(seen.processes) > 3 else ""
        then = "its GPUs stay taken until they end" if seen.held else "nobody keeps their GPUs from being given out"
        mend = f"{seen.sudo}kill " + " ".join(str(one.pid) for one in seen.processes)
        found.append(
            Finding(
                "leftovers",
                Mark.WARN if seen.held else Mark.BAD,
                f"{named}{more}",
                f"of job {jobs}, which has ended or is not known: {then}",
                mend,
            )
        )
    if seen.files:
        first = seen.files[:MOST_NAMED]
        mend = f"{seen.sudo}rm -r {' '.join(map(word, first))}"
        found.append(
            Finding("leftovers", Mark.WARN, many(seen.files, len(seen.files)), "nobody needs it any more", mend)
        )
    if seen.untold:
        found.append(not_told("leftovers", seen.untold))
    return found or [good("leftovers", "none")]
