"""Checks of the store, and of the schedulers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from scheduler.core.config import OPTIONS
from scheduler.core.errors import Damaged, SchedulerError, StoreTrouble, word
from scheduler.core.gpu import HIGHEST_GPU_ID, gpu_ids_text, parse_gpu_ids
from scheduler.doctor.examination import Examination, StoreSeen
from scheduler.doctor.finding import Finding, Mark, good, name_of, not_determined, owner_of
from scheduler.gpus.monitor import schedulers_here
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import Elsewhere, daemon_alive, holder
from scheduler.store.database import NothingYet, check_sound, held_still, open_for_reading
from scheduler.store.gpu_faults import faults
from scheduler.store.store_identity import belongs, home_of
from scheduler.system.proc import boot_id
from scheduler.system.processes import seen


def judge_store(seen: StoreSeen) -> Finding:
    """Return the finding on the store: whether it can be used."""
    if not seen.trouble:
        plural = "" if seen.jobs == 1 else "s"
        return good(
            "store", f"intact, {seen.jobs} job{plural}" if seen.there else "none yet; the first start creates it"
        )
    if seen.kind in ("denied", "late"):
        return not_determined("store", "whether it is intact", seen.trouble)
    mend = {
        "damaged": seen.recover,
        "moved": seen.recover,
        "outdated": seen.start,
        "newer": f"{word(seen.python)} -m pip install --upgrade gpujob",
        "elsewhere": f"ssh {word(seen.host)} {seen.again}",
    }.get(seen.kind, "")
    wrong = seen.trouble
    if seen.kind == "moved":
        wrong += "; adopt its jobs only if the original is no longer used, else the original and the copy both run them"
    told = {
        "moved": "moved or copied",
        "newer": "written by a newer gpujob",
        "elsewhere": "in use on another machine",
    }
    return Finding("store", Mark.BAD, told.get(seen.kind, "cannot be used"), wrong, mend)


@dataclass(frozen=True, slots=True)
class SchedulerSeen:
    """The scheduler of this state file, and other schedulers that manage the same GPUs."""

    alive: bool
    pid: int | None = None
    stopped: bool = False  # by SIGSTOP or a debugger
    running: int | None = 0  # number of jobs that are starting, running or stopping; None: not known
    others: tuple[str, ...] = ()  # other schedulers that manage some of these GPUs: pid 12 of eve GPU 0-3
    free: str = ""  # GPUs that no other scheduler manages: 1,3
    start: str = ""  # command that starts it with its GPUs; empty: the start would be refused
    apart: str = ""  # that command without options for GPUs
    sudo: str = ""  # prefix for commands that only the owner may run
    hidden: str = ""  # owner of the state folder, if this user may not read it


def judge_scheduler(seen: SchedulerSeen) -> list[Finding]:
    """Return the findings on whether a scheduler runs, and whether other schedulers manage the same GPUs."""
    found = []
    kill = f"{seen.sudo}kill"
    jobs = f"{seen.running} job{'s run' if seen.running != 1 else ' runs'}"
    if seen.hidden:
        found.append(not_determined("scheduler", f"whether one runs here: the folder belongs to {seen.hidden}"))
    elif seen.alive and seen.stopped:
        wrong = "it is stopped (SIGSTOP, Ctrl-Z): it starts no jobs and answers no requests"
        found.append(Finding("scheduler", Mark.BAD, f"pid {seen.pid}", wrong, f"{kill} -CONT {seen.pid}"))
    elif seen.alive:
        found.append(good("scheduler", f"runs, pid {seen.pid}" if seen.pid else "runs"))
    elif seen.running:
        wrong = (
            f"{jobs} according to the store, but no scheduler runs: until the next start, time limits have no effect, "
            "waiting jobs do not start, and freed GPUs stay unused"
        )
        found.append(Finding("scheduler", Mark.WARN, "none runs", wrong, seen.start))
    else:
        found.append(good("scheduler", "none runs here"))
    if seen.others and not seen.hidden:  # if hidden, one of them may be this folder's scheduler
        told = f"other schedulers with the same GPUs: {'; '.join(seen.others[:3])}{'; …' * (len(seen.others) > 3)}"
        wrong = "schedulers do not see the bookings of other schedulers: give each its own GPUs (--gpu-ids)"
        if not seen.free:
            wrong += "; the others manage all GPUs that gpujob knows here: end one of the others, or start it again with fewer GPUs"
        first = f"{kill} {seen.pid} && sleep 6 && " if seen.alive else ""
        mend = f"{first}{seen.apart} --gpu-ids {seen.free}" if seen.free and seen.apart else ""
        found.append(Finding("scheduler", Mark.WARN, told, wrong, mend))
    return found


def check_store(exam: Examination) -> list[Finding]:
    """Check the store. For the other checks, set the data read from the store and the owner of the scheduler in ``exam``."""
    dir_seen, places = exam.dir_seen, exam.places
    exam.owner = exam.whose()
    seen_store = StoreSeen(recover=exam.recover, start=exam.upgrade, again=exam.again, python=sys.executable)
    kind = text = host = ""
    try:
        try:
            os.lstat(places.state_dir)
            dir_seen.hidden = not os.access(places.state_dir, os.R_OK | os.X_OK, effective_ids=True)
        except FileNotFoundError:
            dir_seen.hidden = False
        except PermissionError:
            dir_seen.hidden = True
        if dir_seen.hidden:
            raise PermissionError(13, f"you may not read {places.state_dir}")
        dir_seen.alive = daemon_alive(places)
        told = holder(places) if dir_seen.alive else {}
        dir_seen.pid = told["pid"] if isinstance(told.get("pid"), int) else None
        _read_store(exam)
    except Elsewhere as error:
        kind, text, host = "elsewhere", error.what, str(holder(places).get("host", ""))
    except Damaged as error:
        kind, text = "damaged", error.what
    except StoreTrouble as error:
        kind, text = error.code, error.what
    except SchedulerError as error:
        text = error.what
    except OSError as error:
        kind, text = "denied", error.strerror or str(error)
    if not text and dir_seen.store.kind:
        kind, text = dir_seen.store.kind, dir_seen.store.trouble
    there = os.path.exists(places.store)
    dir_seen.store = replace(seen_store, there=there, jobs=dir_seen.jobs, kind=kind, trouble=text, host=host)
    return [judge_store(dir_seen.store)]


def _read_store(exam: Examination) -> None:
    """Read the store into ``exam.dir_seen``. Raises SchedulerError, OSError."""
    dir_seen, places = exam.dir_seen, exam.places
    with held_still(places) as still:
        check_sound(places, pages="quick_check", records=True, still=still)
        if not os.path.exists(places.store):
            dir_seen.in_hand = []
            return
        try:
            connection = open_for_reading(places, still)
        except NothingYet:
            dir_seen.in_hand = []
            return
        try:
            dir_seen.jobs = sum(rows.counts(connection).values())
            dir_seen.in_hand = list(rows.in_hand(connection))
            dir_seen.holdings, dir_seen.gpus = rows.holdings(connection), rows.gpus(connection)
            dir_seen.faults = faults(connection, boot_id())
            dir_seen.running = _settings_of(rows.meta(connection, "settings")) if dir_seen.alive else {}
            made = rows.meta(connection, "home")
        finally:
            connection.close()
    if not belongs(made, home_of(places)):
        text = "it was created in another place or on another machine (a copy?), and no scheduler has adopted its jobs"
        dir_seen.store = StoreSeen(kind="moved", trouble=text)


def _settings_of(noted: str) -> dict[str, tuple[Any, str]]:
    return {key: (value, origin) for key, (value, origin) in json.loads(noted).items()} if noted else {}


def take_running_settings(exam: Examination) -> None:
    """Replace the settings by those of the running scheduler, which may have been started with other flags."""
    changes = {key: value for key, (value, _) in exam.dir_seen.running.items() if key in OPTIONS}
    changes.pop("state_file", None)
    if changes.get("gpu_ids") is not None:
        changes["gpu_ids"] = tuple(changes["gpu_ids"])
    exam.config = replace(exam.config, **changes)


def check_scheduler(exam: Examination) -> list[Finding]:
    """Check that a running scheduler is not suspended (SIGSTOP), and that no other scheduler manages its GPUs."""
    dir_seen = exam.dir_seen
    found = seen(dir_seen.pid) if dir_seen.pid else None
    mine = {gpu.index for gpu in dir_seen.gpus} or {*(exam.config.gpu_ids or range(exam.config.gpus or 0))}
    free = set(mine)
    others = []
    for pid, uid, ids in schedulers_here() if exam.config.engine == "local" else ():
        with contextlib.suppress(SchedulerError):  # an invalid list of GPUs: no scheduler wrote it
            theirs = set(parse_gpu_ids(ids) or ())
            if int(pid) != dir_seen.pid and theirs & (mine or {*range(HIGHEST_GPU_ID + 1)}):
                free -= theirs
                others.append(f"pid {pid} of {name_of(uid)} GPU {ids}")
    return judge_scheduler(
        SchedulerSeen(
            dir_seen.alive,
            dir_seen.pid,
            found is not None and found.state in "Tt",
            None if dir_seen.in_hand is None else len(dir_seen.in_hand),
            tuple(others),
            gpu_ids_text(sorted(free)) if free else "",
            exam.start,
            exam.apart,
            exam.sudo,
            owner_of(exam.places.state_dir) if dir_seen.hidden else "",
        )
    )
