"""Checks of the state folder and the log folder, and of the disks that they are on."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace

from scheduler.core.errors import SchedulerError, word
from scheduler.core.units import mib_text
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, name_of, not_determined, owner_of
from scheduler.doctor.inputs import judged_file
from scheduler.intake.file_watcher import file_system_of
from scheduler.intake.tail import check_places
from scheduler.system.filesystems import FileSystem

FULL_MIB, NEARLY_FULL_MIB, FEWEST_INODES = 16, 1024, 64


@dataclass(frozen=True, slots=True)
class FolderSeen:
    """The state of a folder to which the scheduler writes, or of the nearest existing folder above it."""

    check: str
    path: str
    there: bool = True
    system: FileSystem | None = None
    free_mib: int | None = None
    free_inodes: int | None = None  # None: this file system has no fixed number of them
    read_only: bool = False
    mount: str = "/"  # where the file system is mounted
    owner: str = ""  # name of the folder's owner, if that is another user
    again: str = ""  # command that repeats this examination
    writable: bool = True
    move: str = ""  # next command to move the scheduler's files to a local disk


def judge(seen: FolderSeen, who: DoctorUser) -> Finding:
    """Return the finding on a folder.

    The folder must be writable and have space. Its file system must store owners and modes, and should be local and
    keep its files over a restart of the machine.
    """
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
            f"it belongs to user {seen.owner}: only that user can run this scheduler",
            f"sudo -u {word(seen.owner)} {seen.again}",
        )
    if not seen.writable:
        return bad("it cannot be written", f"chmod u+rwx {word(seen.path)}")
    look = f"{who.root('du')} -xh {word(seen.mount)} | sort -h | tail -n 20"
    if seen.free_mib is not None and seen.free_mib < FULL_MIB:
        return bad("the disk is full, so no job starts; this command shows the largest folders: free space there", look)
    if seen.free_inodes is not None and seen.free_inodes < FEWEST_INODES:
        look = f"{who.root('du')} -x --inodes {word(seen.mount)} | sort -n | tail -n 20"
        wrong = f"only {seen.free_inodes} inodes are left; this command shows the folders with the most files: remove files there"
        return bad(wrong, look)
    if system is None or not system.known:
        return not_determined(seen.check, f"what file system {seen.path} is on", "" if system is None else system.name)
    if not system.modes:
        return bad(f"{system.name} stores no owners and modes: everybody can read and change the files", seen.move)
    if system.shared:
        wrong = (
            f"{system.name} may be shared with other machines: commands for this scheduler work only on this "
            "machine, and gpujob notices changed files only by polling"
        )
        return bad(wrong, seen.move, Mark.WARN)
    if system.memory:
        return bad(f"a restart of the machine deletes the files on {system.name}", seen.move, Mark.WARN)
    if seen.free_mib is not None and seen.free_mib < NEARLY_FULL_MIB:
        return bad("little space is left; this command shows the largest folders: free space there", look, Mark.WARN)
    return good(seen.check, told)


def look(check: str, path: str, system: FileSystem | None, owner: str, again: str) -> FolderSeen:
    """Examine the folder ``path`` and its disk.

    ``check``: name of the check; ``system``: file system of the folder, None if unknown; ``owner``: name of the
    folder's owner, empty if this user owns it; ``again``: command that repeats this examination.
    """
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
    """Return the mount point of the file system of a path."""
    place = os.path.realpath(path)
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    return place


def _folder(exam: Examination, check: str, path: str, shared: bool, move: str) -> Finding:
    owner = owner_of(path)
    owner = "" if owner == exam.who.name else owner
    system = file_system_of(path)
    if system is not None and system.shared and not shared:
        system = replace(system, shared=False)
    found = look(check, path, system, owner, exam.again)
    return judge(replace(found, move=move), exam.who)


def check_state_folder(exam: Examination) -> list[Finding]:
    """Check the disk of the state folder, and that other users cannot put a state file there."""
    above, state_dir = os.path.dirname(exam.places.state_dir), exam.places.state_dir
    path = state_dir if os.path.isdir(state_dir) else above
    found = _folder(exam, "state folder", path, True, _move(exam))
    state_file = exam.places.state_file
    try:
        check_places(state_file, (state_file,), exam.config.trust_group)
    except SchedulerError as error:
        judged = judged_file(exam, "state folder", state_file, error, True)
        return [judged] if found.mark is Mark.OK else [found, judged]
    except OSError:
        return [found]  # there is no such folder: already in ``found``
    return [found]


def check_log_folder(exam: Examination) -> list[Finding]:
    """Check the disk of the log folder, unless it is the disk of the state folder."""
    path, state = exam.config.log_dir, os.path.dirname(exam.places.state_dir)
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)  # `start` creates it
    with contextlib.suppress(OSError):
        if os.stat(path).st_dev == os.stat(state).st_dev:
            return []  # `check_state_folder` checks this disk
    kill = f"{exam.sudo}kill {exam.dir_seen.pid} && sleep 6 && " if exam.dir_seen.alive else ""
    home = f"~{name_of(exam.owner)}" if exam.others else '"$HOME"'
    move = f"{kill}{exam.start} --log-dir {home}/gpu_scheduler_logs" if exam.start else ""
    return [_folder(exam, "log folder", path, False, move)]


def _move(exam: Examination) -> str:
    """Return the next command for moving the scheduler to a local disk; empty if there is no such command.

    Each run of `gpujob doctor` proposes one step. If the scheduler runs, the command ends it. If no scheduler runs and
    the store still shows running jobs, the command starts the scheduler, so that the scheduler settles these jobs.
    Otherwise the command moves the files. If there are no files yet, the command starts the scheduler on the local
    disk.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", exam.who.name)
    there = f"/var/tmp/gpujob-{name}"  # noqa: S108  the proposed mkdir fails if this folder exists
    state = os.path.join(there, os.path.basename(exam.places.state_file))
    if exam.dir_seen.alive:
        return f"{exam.sudo}gpujob wait{exam.suffix}; {exam.sudo}kill {exam.dir_seen.pid}"
    if exam.dir_seen.in_hand or exam.others:
        return exam.start if exam.dir_seen.in_hand else ""
    mine = [path for path in (exam.places.state_dir, exam.places.state_file) if os.path.lexists(path)]
    if exam.places.state_dir in mine:
        return f"mkdir -m 700 {there} && mv {' '.join(map(word, mine))} {there} && gpujob recover --state-file {word(state)}"
    jobs = f" --jobs-file {word(exam.config.jobs_file)}" if exam.config.jobs_file else ""
    return f"mkdir -m 700 {there} && gpujob start --detach --state-file {word(state)}{jobs}"
