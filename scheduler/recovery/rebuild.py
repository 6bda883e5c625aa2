"""`gpujob recover`: sets a damaged store aside unchanged, and builds a new one from the data that can be read.

`recover` builds the new store beside the old store, writes a note that it is exchanging the two stores, and exchanges
them. If `recover` is killed before the note, the next `recover` starts from the beginning. If `recover` is killed after
the note, no command uses the store until the next `recover` has finished the exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.config import Config
from scheduler.core.errors import OLDER, Damaged, SchedulerError, StoreTrouble
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Holding, JobState
from scheduler.core.requests import Answer, Cancel, Hold
from scheduler.intake.parsers import PARSERS
from scheduler.recovery.ingest_recovery import look_through, settle_file, watched_before
from scheduler.recovery.job_reconstruction import Rebuilt, put_together
from scheduler.recovery.salvage import COMPANIONS, Row, Salvaged, copy_store, new_schema, read_what_is_left
from scheduler.store import integrity
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import DaemonLock, daemon_alive, holder
from scheduler.store.database import NothingYet, check_sound, open_for_reading
from scheduler.store.paths import Places
from scheduler.store.store_identity import check_original
from scheduler.system.atomic_files import replace_file, sync_folder
from scheduler.system.crash_points import crash_point
from scheduler.system.locks import lock_within
from scheduler.system.private_files import new_private
from scheduler.system.proc import boot_id
from scheduler.system.safe_open import plain

# Damage of these tables is no loss: the daemon writes them again, `recover` restores them, or they are statistics.
PASSING = frozenset(
    {
        "sqlite_master",
        "counts",
        "reasons",
        "readings",
        "gpus",
        "meta",
        "files",
        "line_counts",
        "refused",
        "tallies",
        "seen_runs",
        "good_runs",
        "fact_sets",
    }
)
LOCK_WAIT_S = 10.0
HEAD = {"sqlite_master": "the file header"}
REFUSED = "the store was rebuilt before this request was carried out; repeat the request"


@dataclass(slots=True)
class Report:
    """The output lines and the exit code of `recover`. ``healthy``: whether there was nothing to rebuild."""

    lines: list[str] = field(default_factory=list)
    code: int = 0
    healthy: bool = False
    unsure: list[str] = field(default_factory=list)  # about lines of watched files that the user has to decide about
    older: bool = False  # the store is older than other files show; the first line reports it


def recover(places: Places, config: Config, home: str, environ_home: str, *, dry: bool = False) -> Report:
    """Rebuild the store if it is damaged, or if other files show that it is out of date. Raises SchedulerError.

    ``home``: the machine and folder of the rebuilt store (`store_identity.home_of`). ``environ_home``: the folder that
    `~` in a jobs file stands for. ``dry``: change nothing, only report.
    """
    if daemon_alive(places):
        pid = holder(places).get("pid", "unknown")
        raise SchedulerError(
            f"cannot rebuild the store: a scheduler is using it (pid {pid})",
            where=places.state_file,
            do=f"end it first (running jobs continue): kill {pid}",
        )
    with (
        contextlib.suppress(StoreTrouble, NothingYet, sqlite3.Error),
        contextlib.closing(open_for_reading(places)) as made,
    ):
        check_original(rows.meta(made, "home"), home)
    places.make()
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": os.getpid(), "what": "gpujob recover"})
    try:
        with _nobody_writes(places):
            if os.path.exists(places.recovering):
                return _finish_exchange(places, dry)
            problem = damage_of(places)
            if problem is None:
                return Report(["the store is intact and up to date: nothing to rebuild"], healthy=True)
            return _rebuild(places, config, home, environ_home, problem, dry)
    except sqlite3.Error as error:
        raise StoreTrouble(f"cannot write the new store: {error}", where=places.new_store) from error
    finally:
        daemon_lock.leave()


@contextlib.contextmanager
def _nobody_writes(places: Places) -> Iterator[None]:
    fd = os.open(places.store_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not lock_within(fd, LOCK_WAIT_S):
            raise StoreTrouble(
                f"cannot lock the store: another process has held the lock for {LOCK_WAIT_S:g} s",
                where=places.store_lock,
            )
        yield
    finally:
        os.close(fd)


def damage_of(places: Places) -> Damaged | None:
    """Return the error if the store is damaged or out of date, else None.

    Raises StoreTrouble if a newer version of gpujob wrote the store.
    """
    try:
        check_sound(places, pages="integrity_check", records=True)
        if not os.path.exists(places.store):
            return None
        connection = open_for_reading(places)
        try:
            for _ in rows.select(connection):
                continue  # raises for a row that cannot be read
        finally:
            connection.close()
    except NothingYet:
        return None
    except Damaged as error:
        return error
    except sqlite3.Error as error:
        return Damaged(f"the store is damaged ({error})")
    return None


def _rebuild(places: Places, config: Config, home: str, environ_home: str, problem: Damaged, dry: bool) -> Report:
    stamp = time.strftime("%Y%m%d_%H%M%S")
    bad = f"{places.store}.bad-{stamp}"
    left = _salvage(places)
    report = Report([f"{os.path.basename(places.store)}: {problem.what}"], older=problem.code == OLDER)
    path = ":memory:" if dry else places.new_store
    if not dry:
        _remove(places.new_store, f"{places.new_store}-journal")
        os.close(new_private(path))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN")
        new_schema(connection)
        _fill(connection, left, places, config, home, environ_home, report)
        connection.execute("COMMIT")
        if not dry:
            connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
    listing = os.path.join(places.state_dir, f"recovered-{stamp}.txt")
    if report.unsure:
        report.lines += [f"{len(report.unsure)} lines need your decision (also in {listing} and in gpujob status):"]
        report.lines += report.unsure
    if dry:
        report.lines.append("nothing was changed (--dry-run)")
        return report
    crash_point("recover.built")
    if any(os.path.exists(places.store + ending) for ending in COMPANIONS):
        report.lines.append(f"the damaged store is kept unchanged: {bad}")
    if report.unsure:
        replace_file(listing, "".join(f"{line}\n" for line in report.unsure).encode())
    replace_file(places.recovering, json.dumps({"bad": bad, "lines": report.lines, "code": report.code}).encode())
    crash_point("recover.noted")
    return _exchange(places, bad, report)


def _salvage(places: Places) -> Salvaged:
    """Return the readable rows of the damaged store, read from a copy in a temporary folder."""
    scratch = os.path.join(places.state_dir, "recover.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    os.mkdir(scratch, 0o700)
    try:
        copy = os.path.join(scratch, "store.db")
        copy_store(places.store, copy)
        top = max((integrity.high(places), *integrity.newest_attempts(places)), default=0)
        return read_what_is_left(copy, top)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _exchange(places: Places, bad: str, report: Report) -> Report:
    """Rename the old store to ``bad`` and put the new store in its place. Skip steps that are already done."""
    if os.path.exists(places.new_store):
        for ending in COMPANIONS:
            if os.path.exists(places.store + ending):
                os.rename(places.store + ending, bad + ending)
                crash_point("recover.aside")
        sync_folder(places.state_dir)
        os.rename(places.new_store, places.store)
    sync_folder(places.state_dir)
    crash_point("recover.placed")
    _remove(places.recovering)
    sync_folder(places.state_dir)
    return report


def _finish_exchange(places: Places, dry: bool) -> Report:
    """Finish an interrupted exchange and return its report. ``dry``: change nothing, only report."""
    with open(places.recovering, encoding="utf-8", opener=plain) as stream:
        note = json.load(stream)
    report = Report(list(note["lines"]), int(note["code"]))
    if dry:
        report.lines.append(
            "an earlier gpujob recover was interrupted: gpujob recover finishes it; nothing was changed (--dry-run)"
        )
        return report
    return _exchange(places, note["bad"], report)


def _remove(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# -- filling the new store --------------------------------------------------------------------------------


def _fill(
    connection: sqlite3.Connection, left: Salvaged, places: Places, config: Config, home: str, environ_home: str,
    report: Report,
) -> None:  # fmt: skip
    now = time.time()
    for name in left.rows.keys() - {"jobs", "counts", "reasons", "readings"}:
        _insert(connection, name, left)
    held = _holdings(connection, left)
    last = rows.last_id(connection)
    out = put_together(left.rows.get("jobs", []), "jobs" not in left.trouble, held, places, config.log_dir, now, last)
    rows.restore(connection, [out.jobs[number] for number in sorted(out.jobs)])
    rows.save_holdings(connection, out.holdings, [], boot_id())
    rows.set_meta(connection, "home", home)
    if out.stale or {"pauses", "meta"} & set(left.trouble):
        _restore_pauses(connection, config.state_file, report)
    refused = _refuse_requests(connection)
    trusted = not out.stale and not {"files", "line_counts"} & set(left.trouble)
    _say_jobs(out, left, report)
    if refused:
        report.lines.append(f"{refused} open requests were refused; repeat them")
    known = {job.identity for job in out.jobs.values() if job.identity}
    managed = tuple(gpu.index for gpu in rows.gpus(connection)) or None
    for path, kind in _watched(places, config, left).items():
        looked = look_through(path, PARSERS[kind], managed, environ_home, config.trust_group)
        say = report.unsure.append if looked.mark is not None else report.lines.append
        settle_file(connection, path, looked, known, trusted, now, say, all_known=out.whole)
    if not trusted:
        report.lines.append("it is not known how far the jobs file was read: all its lines count as read, none is run")
    serious = set(left.trouble) - PASSING
    report.code = 1 if out.lost or out.gone or out.unreadable or report.unsure or refused or serious else 0


def _insert(connection: sqlite3.Connection, name: str, left: Salvaged) -> None:
    """Insert the salvaged rows of a table.

    A row that the new table does not accept was damaged. It is left out and noted in ``left.trouble``.
    """
    known = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
    for row in left.rows.get(name, []):
        columns = [column for column in row if column in known]
        taken = connection.execute(
            f"INSERT OR IGNORE INTO {name} ({', '.join(columns)}) VALUES ({','.join('?' * len(columns))})",
            [row[column] for column in columns],
        )
        if not taken.rowcount:
            left.trouble.setdefault(name, "a row contains invalid values")


def _holdings(connection: sqlite3.Connection, left: Salvaged) -> list[Holding]:
    try:
        return [holding for holding, _ in rows.holdings(connection)]
    except (ValueError, TypeError) as error:
        connection.execute("DELETE FROM holdings")  # living leftover processes are found again by `put_together`
        left.trouble.setdefault("holdings", str(error))
        return []


def _restore_pauses(connection: sqlite3.Connection, state_file: str, report: Report) -> None:
    """Restore the pauses from the state file, because the next start must not place jobs on paused GPUs."""
    try:
        with open(state_file, encoding="utf-8", opener=plain) as stream:
            shown = json.load(stream)
        gpus, queue = [int(gpu) for gpu in shown["paused_gpus"]], bool(shown.get("paused"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        report.lines.append(
            f"cannot restore pauses: {os.path.basename(state_file)} is missing or invalid; "
            "check the pauses with gpujob status"
        )
        return
    rows.save_pauses(connection, gpus, queue, [])
    report.lines.append(f"pauses restored from {os.path.basename(state_file)}: {gpu_ids_text(gpus) or 'no GPU'}"
                        f"{', and the whole queue' if queue else ''}")  # fmt: skip


def _refuse_requests(connection: sqlite3.Connection) -> int:
    """Refuse the open requests, because they may have been carried out already. Return the number of refused requests.

    Requests that only keep jobs from running (Cancel, Hold) stay open.
    """
    waiting = [one for _, one in rows.asked(connection)]
    refused = [Answer(one.row, 1, (REFUSED,)) for one in waiting if not isinstance(one.request, (Cancel, Hold))]
    rows.answer(connection, refused)
    return len(refused)


def _watched(places: Places, config: Config, left: Salvaged) -> dict[str, str]:
    """Return path → kind (name of the setting) of all watched files.

    These are the files that an earlier daemon watched, and the files that the current settings name.
    """
    found = watched_before(places)
    found.update({path: kind for kind in PARSERS if (path := str(getattr(config, kind)))})
    meta: dict[Any, Any] = {row["key"]: row["value"] for row in left.rows.get("meta", [])}
    if meta.get("jobs_file"):
        found.setdefault(str(meta["jobs_file"]), "jobs_file")
    marked: list[Row] = left.rows.get("files", [])
    for row in marked:
        found.setdefault(str(row["path"]), "jobs_file")
    return {path: kind for path, kind in found.items() if kind in PARSERS}


def _say_jobs(out: Rebuilt, left: Salvaged, report: Report) -> None:
    say = report.lines.append
    if out.stale and "jobs" not in left.trouble and not report.older:
        say(f"the store is out of date: {out.stale}")
    counts = Counter(job.state for job in out.jobs.values())
    states = ", ".join(f"{counts[state]} {state.value}" for state in JobState if counts[state])
    say(f"jobs kept: {states or 'none'}")
    if out.from_records:
        say(f"restored from attempt records: job {gpu_ids_text(sorted(out.from_records))}")
    if out.lost:
        say(f"lost (counted as failed, because their end is not known): job {gpu_ids_text(sorted(out.lost))}")
    if out.gone:
        say(f"no trace found of: job {gpu_ids_text(out.gone)}")
    if out.unreadable:
        say(f"rows that could not be read: job {gpu_ids_text(sorted(out.unreadable))}")
    if out.holdings:
        say(
            f"GPUs held by leftover processes of ended jobs: {gpu_ids_text(sorted({g for h in out.holdings for g in h.gpus}))}"
        )
    for problem in sorted(set(left.trouble.values())):
        names = [HEAD.get(name, name) for name, what in sorted(left.trouble.items()) if what == problem]
        say(f"parts of the store that are not completely readable: {', '.join(names)} ({problem})")
