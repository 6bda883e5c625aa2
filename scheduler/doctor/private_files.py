"""Check of the scheduler's own files: whether they are private, and belong to the right user."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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

MOST_FILES = 100_000
_JOB_LOG = re.compile(r"job_\d+_.*\.log", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Owners and modes of the scheduler's own files: state folder, state file, logs."""

    folders: tuple[str, ...] = ()  # state folder and log folder, if they exist
    owner: str = ""  # name of the user who should own them
    number: int = 0  # number of files and folders that were examined
    foreign: tuple[str, ...] = ()  # paths that belong to another user
    open: tuple[str, ...] = ()  # paths that other users may read or write
    locked: tuple[str, ...] = ()  # paths that the owner may not read and write
    link: str = ""  # the state folder, if it is a link
    no_folder: str = ""  # the state folder, if it is no folder
    no_file: str = ""  # the state file, if it is a device or the like
    untold: str = ""  # a folder that could not be read
    whole: bool = True  # False: there are more files than `MOST_FILES`
    recover: str = ""  # command that adopts a moved state folder


def judge(seen: FilesSeen, who: DoctorUser) -> list[Finding]:
    """Return the findings on owners and modes of the scheduler's own files."""
    found = []
    if seen.link:
        link = word(seen.link)
        mend = f'd="$(readlink -f {link})" && rm {link} && mv "$d" {link} && {seen.recover}'
        found.append(Finding("files", Mark.BAD, seen.link, "the state folder is a link: no scheduler starts", mend))
    if seen.no_folder:
        place = word(seen.no_folder)
        found.append(
            Finding(
                "files", Mark.BAD, seen.no_folder, "it is not a folder: no scheduler starts", f"mv {place} {place}.old"
            )
        )
    if seen.no_file:  # perhaps a system device such as /dev/null: propose no command
        wrong = "it is not a regular file; name another --state-file"
        found.append(Finding("files", Mark.BAD, seen.no_file, wrong))
    for names, wrong, command, group in (
        (
            seen.foreign,
            f"does not belong to user {seen.owner}",
            f"chown -h {word(seen.owner)}",
            f"! -user {word(seen.owner)}",
        ),
        (seen.open, "other users may read or write it", "chmod go-rwx", "! -type l -perm /077"),
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
        found.append(not_determined("files", f"what is in {seen.untold}"))
    if not found and seen.whole:
        return [good("files", f"{seen.number} files examined, all private" if seen.number else "none yet")]
    if not found:
        found.append(not_determined("files", f"whether all files are private (the first {seen.number} are)"))
    return found


def check_files(exam: Examination) -> list[Finding]:
    """Check that the scheduler's own files are private and belong to the scheduler's owner."""
    state_dir = exam.places.state_dir
    empty = FilesSeen(recover=exam.recover)
    try:
        status = os.lstat(state_dir)
    except FileNotFoundError:
        status = None
    except OSError:
        return judge(replace(empty, untold=state_dir), exam.who)
    if status is not None and os.path.islink(state_dir):
        return judge(replace(empty, link=state_dir), exam.who)
    if status is not None and not os.path.isdir(state_dir):
        return judge(replace(empty, no_folder=state_dir), exam.who)
    owner = status.st_uid if status is not None and exam.who.uid else exam.owner
    if owner != exam.who.uid and exam.who.uid:
        if os.stat(os.path.dirname(state_dir)).st_uid != exam.who.uid:
            return judge(replace(empty, untold=state_dir), exam.who)
        return judge(replace(empty, owner=exam.who.name, foreign=(state_dir,)), exam.who)
    return judge(_walked(exam, owner, replace(empty, owner=name_of(owner))), exam.who)


def _walked(exam: Examination, owner: int, out: FilesSeen) -> FilesSeen:
    foreign: list[str] = []
    opened: list[str] = []
    locked: list[str] = []
    untold: list[str] = []
    number, whole = 0, True
    tops = [top for top in (exam.places.state_dir, exam.config.log_dir) if os.path.isdir(top)]
    state = status_of(exam.places.state_file)
    if state is not None and not (stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode)):
        out = replace(out, no_file=exam.places.state_file)
    for path in _ours(exam, tops, untold):
        if number >= MOST_FILES:
            whole = False
            break
        try:
            status = os.lstat(path)
        except OSError:
            continue  # removed in the meantime
        number += 1
        folder = os.path.isdir(path)
        if status.st_uid != owner:
            foreign.append(path)
        elif os.path.islink(path):
            continue
        elif status.st_mode & 0o077:
            opened.append(path)
        elif status.st_mode & (0o700 if folder else 0o600) != (0o700 if folder else 0o600):
            locked.append(path)
    return replace(
        out, folders=tuple(tops), number=number, foreign=tuple(foreign), open=tuple(opened), locked=tuple(locked),
        whole=whole, untold=untold[0] if untold and not locked else "",
    )  # fmt: skip


def _ours(exam: Examination, tops: Sequence[str], untold: list[str]) -> Iterator[str]:
    """Yield the paths of the scheduler's own files and folders.

    These are the state file, the scheduler's own logs, the folders ``tops`` (state folder and log folder), all contents
    of the state folder, and the job logs in the log folder. Folders that cannot be read are added to ``untold``.
    """
    for path in (
        exam.places.state_file,
        exam.config.log_file,
        *(f"{exam.config.log_file}.{n}" for n in range(1, 6)),
    ):
        if path and (status := status_of(path)) is not None and stat.S_ISREG(status.st_mode):
            yield path  # a device or a link is not the scheduler's own
    for top in tops:
        yield top
        left = [top]
        while left:
            try:
                entries = list(os.scandir(left.pop()))
            except OSError as error:
                untold.append(str(error.filename))
                continue
            for entry in entries:
                if top == exam.config.log_dir and not _JOB_LOG.fullmatch(entry.name):
                    continue
                yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
