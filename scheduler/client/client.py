"""A client of one scheduler: one method for each question and request. Requests need a daemon (else: `client/offline.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scheduler.core.errors import NoDaemon, NotAsked, NotFound, Refused, SchedulerError, UsageError, did_you_mean
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import HOLDING, Event, Job, JobSpec, JobState, Reason
from scheduler.core.secrets import without_secrets
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import daemon_alive, holder
from scheduler.store.database import Database, NothingYet, nothing_yet, open_for_reading, trouble
from scheduler.store.integrity import check_begun
from scheduler.store.paths import Places, digest
from scheduler.system.atomic_files import sync_folder
from scheduler.system.private_files import new_private

# What only some verbs need is imported where it is needed, and `typing` by nobody on this path: calls in loops are to be quick.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import replace
    from typing import Any

    from scheduler.client.overview import Overview, Watch
    from scheduler.core.history import GpuSample, JobSample, PauseSpan
    from scheduler.core.model_table import ModelTable
    from scheduler.core.requests import Answer, Request
    from scheduler.core.usage_report import Report
else:
    from scheduler.core.quick_dataclass import replace

ANSWER_S = 5.0
BEGUN_S = 2.0
MOST_LABELS = 10_000
STATES = tuple(state.value for state in JobState)
SCHEMA = 1
HIDDEN = "hidden"  # in `meta`


class QueueFull(SchedulerError):
    """As many jobs wait or run as may."""


class SchedulerClient:
    """One scheduler, named by its state file."""

    def __init__(self, state_file: str) -> None:
        """Raises SchedulerError when it is another user's."""
        self.places = Places(state_file)
        self.places.check_ours()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A snapshot of the store; of an empty one as long as no store was made."""
        if self.places.exist():
            try:
                connection = open_for_reading(self.places)
            except NothingYet:
                if not self.alive():
                    raise
                connection = nothing_yet()  # a daemon that has just been started is making it
        else:
            check_begun(self.places)
            connection = nothing_yet()
        try:
            connection.execute("BEGIN")  # one moment for all questions
            yield connection
        except sqlite3.Error as error:
            raise trouble(error, self.places.store) from error
        finally:
            connection.close()

    def alive(self) -> bool:
        """Whether a daemon runs."""
        return daemon_alive(self.places)

    # -- asking -------------------------------------------------------------------------------------------

    def ask(self, request: Request, wait_s: float = ANSWER_S) -> Answer:
        """Have the daemon do something and wait for its answer.

        Raises NotAsked when none runs, NoDaemon when it does not answer in time: then the request stands.
        """
        from scheduler.core.requests import Answer, to_row

        return Answer(0, *self.ask_for(*to_row(request), wait_s))

    def ask_for(self, kind: str, arguments: Mapping[str, Any], wait_s: float = ANSWER_S) -> tuple[int, tuple[str, ...]]:
        """The same by a request's name and fields (`core/requests.py`), for those who have no time for its classes: code
        and lines of the answer. Raises NoDaemon likewise.
        """
        if not self.alive():
            raise NotAsked("no scheduler is running", where=self.places.state_file, do="start it: gpujob start")
        database = Database(self.places)
        try:
            with database.writing() as connection:
                row = rows.ask_for(connection, kind, arguments, time.time())
            database.wake_daemon()
            deadline = time.monotonic() + wait_s
            looks = 0
            while time.monotonic() < deadline:
                answer = rows.answered(database.connection, row)
                if answer is not None:
                    return answer
                looks += 1
                if looks % 20 == 0 and not self.alive() and rows.answered(database.connection, row) is None:
                    raise NoDaemon(
                        "the scheduler ended before it answered; the request stands and is carried out when it starts",
                        where=self.places.state_file,
                        do="start it: gpujob start",
                    )
                time.sleep(0.003)
        finally:
            database.close()
        pid = holder(self.places).get("pid", "unknown")
        raise NoDaemon(
            f"the scheduler (pid {pid}) has not answered within {wait_s:g} s; the request stands and is carried out when it does",
            where=self.places.state_file,
        )

    def submit(
        self,
        spec: JobSpec,
        environment: Mapping[str, str] | None,
        table: ModelTable,
        *,
        forgiving: bool = False,
        most: int | None = None,
    ) -> Job:
        """Queue a job, never deduplicated. ``environment``: the whole one it runs in, kept in a private file.

        ``forgiving``: jobs that are not there yet are not waited for, and of those that are there no more only those that
        had to end well. ``most``: so many may wait or run.
        Raises Refused when it can never run, NotFound for an unknown job in ``after``, QueueFull, StoreTrouble.
        """
        from scheduler.core.command_limits import check_words
        from scheduler.core.model_table import need_of

        if spec.arguments:
            check_words(spec.arguments)
        need_of(spec, table)  # what is wrong with it is said before anything is written
        database = Database(self.places)
        try:
            if environment is not None:
                spec = replace(spec, env_file=self._keep_environment(environment))
            with database.writing() as connection:
                if environment is not None and not os.path.exists(spec.env_file):
                    self._keep_environment(environment)  # its last job was forgotten meanwhile
                if most is not None and rows.unfinished(connection) >= most:
                    raise QueueFull(f"{most} jobs wait or run already, and no more may", do="wait until one has ended")
                if forgiving:
                    spec = _without_strangers(connection, spec)
                else:
                    _check_parents(connection, spec)
                gpus = rows.gpus(connection)
                spec = _booking_memory(connection, gpus, spec)
                need, notes = need_of(spec, table, gpus)
                job = rows.insert(connection, spec, need, "", notes, time.time())
                if job.need != ResourceRequest(0, 0):
                    _check_possible(connection, gpus, job)
            database.wake_daemon()
        finally:
            database.close()
        return job

    def _keep_environment(self, environment: Mapping[str, str]) -> str:
        data = b"\0".join(os.fsencode(f"{name}={value}") for name, value in sorted(environment.items()))
        path = os.path.join(self.places.environments, digest(data, 16))
        try:
            fd = new_private(path)
        except FileExistsError:
            if os.path.getsize(path) == len(data):
                return path  # many jobs of one shell share one file
            os.unlink(path)  # cut short by a crash
            return self._keep_environment(environment)
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(self.places.environments)
        return path

    def gpus(self) -> list[Gpu]:
        """The GPUs managed here; none before the first start."""
        with self._reading() as connection:
            return rows.gpus(connection)

    def managed(self) -> tuple[int, ...] | None:
        """Their ids, or None before the first start."""
        return tuple(gpu.index for gpu in self.gpus()) or None

    def remembered(self, key: str) -> str:
        """What the last daemon noted down: ``jobs_file``, ``llm_config``; empty before the first start."""
        with self._reading() as connection:
            return rows.meta(connection, key)

    def settings(self) -> dict[str, tuple[Any, str]]:
        """What the running scheduler runs on: value and origin of each setting; empty when none runs."""
        noted = self.remembered("settings") if self.alive() else ""
        found: dict[str, list[Any]] = json.loads(noted) if noted else {}
        return {key: (value, origin) for key, (value, origin) in found.items()}

    # -- reading ------------------------------------------------------------------------------------------

    def _now(self, connection: sqlite3.Connection, jobs: Iterable[Job], alive: bool) -> list[Job]:
        """The same jobs. Without a scheduler, a job that was running when the last one ended has the state that its records give."""
        found = list(jobs)
        if alive or not any(job.state in HOLDING for job in found):
            return found
        from scheduler.client.overview import as_recorded

        return as_recorded(connection, found, self.places.attempts)

    def overview(self, most_waiting: int | None = None) -> Overview:
        """What there is now: GPUs, live jobs with their reasons, the last ended, refused lines.

        ``most_waiting``: only that many of the waiting jobs, those that come first.
        """
        from scheduler.client.overview import overview_of

        alive = self.alive()
        with self._reading() as connection:
            return overview_of(connection, self.places, alive, most_waiting)

    def changes(self) -> Watch:
        """Who looks again and again what has changed: for one thread, to be closed."""
        from scheduler.client.overview import Watch

        return Watch(self.places)

    def jobs(self, states: Sequence[str] = (), most: int | None = None) -> tuple[list[Job], dict[int, Reason]]:
        """All jobs (or those in these states, or the newest of them), by id, and why each waiting one waits."""
        with self._reading() as connection:
            alive = self.alive()
            if alive or not states:
                found = self._now(connection, rows.select(connection, states, most), alive)
            else:  # what ran at last may be in another of these states by now, or in none
                asked = [*states, *(state.value for state in HOLDING if state.value not in states)]
                found = [
                    job
                    for job in self._now(connection, rows.select(connection, asked), alive)
                    if job.state.value in states
                ]
                found = found if most is None else found[max(0, len(found) - most) :]
            if not any(job.state is JobState.PENDING for job in found):
                return found, {}
            from scheduler.client.overview import reasons_of

            return found, reasons_of(connection, self._now(connection, rows.live(connection), alive))

    def newest_in(self, states: Sequence[str], label: str, most: int) -> tuple[list[Job], int]:
        """The newest jobs in these states (all without any) with this label (any if empty), the newest first; and how many
        there are.
        """
        with self._reading() as connection:
            alive = self.alive()
            wanted = set(states or STATES)
            asked = list(states or STATES)
            if not alive:  # what ran at last may be in another of these states by now, or in none
                asked += [state.value for state in HOLDING if state.value not in wanted]
            if label:
                found, number = rows.newest_labelled(connection, label, asked, most)
            else:
                found = list(rows.select(connection, asked if states else (), most))
                counts = rows.counts(connection)
                number = sum(counts[state] for state in wanted)
            shown = [job for job in self._now(connection, found, alive) if job.state.value in wanted]
            return shown[::-1], number if len(found) >= most else len(shown)

    def job(self, job_id: int) -> tuple[Job, Reason | None, list[Event]]:
        """One job, why it waits, and its story. Raises NotFound."""
        with self._reading() as connection:
            job = rows.get(connection, job_id)
            if job is None:
                raise NotFound(f"no job {job_id}", where=self.places.state_file, do="see gpujob jobs")
            fell: Sequence[Event] = ()
            if job.state in HOLDING and not self.alive():
                from scheduler.client.overview import story_as_recorded

                job, fell = story_as_recorded(connection, job, (), self.places.attempts)
            reason = None
            if job.state is JobState.PENDING:
                from scheduler.client.overview import reason_of

                reason = reason_of(connection, job)
            events: list[Event] = [*rows.events_of(connection, job_id), *fell]
            return job, reason, events

    def newest(self, states: Iterable[JobState], prefix: str, most: int) -> tuple[list[Job], dict[str, list[int]]]:
        """The newest jobs in these states whose id begins with ``prefix``; and the labels that do, with their jobs."""
        names = [state.value for state in states]
        with self._reading() as connection:
            known = rows.labels(connection, names, MOST_LABELS)
            labels = [label for label in known if label.startswith(prefix)]
            return rows.newest(connection, names, prefix, most), {label: known[label] for label in labels[:most]}

    def lines_read(self, path: str) -> frozenset[str]:
        """The identities of all lines of a watched file that were read so far."""
        from scheduler.store.file_offsets import counted

        with self._reading() as connection:
            return counted(connection, path)

    def pauses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The GPUs managed here, and those of them that are paused."""
        with self._reading() as connection:
            return tuple(gpu.index for gpu in rows.gpus(connection)), rows.paused_gpus(connection)

    def states(self, jobs: Sequence[int]) -> list[Job]:
        """These jobs as they are now. Raises NotFound."""
        found = self.known(jobs)
        for number in jobs:
            if number not in found:
                raise NotFound(f"no job {number}", where=self.places.state_file, do="see gpujob jobs")
        return [found[number] for number in jobs]

    def known(self, jobs: Iterable[int]) -> dict[int, Job]:
        """Those of these jobs that are not forgotten, as they are now."""
        with self._reading() as connection:
            found = [rows.get(connection, job) for job in jobs]
            now = self._now(connection, [job for job in found if job is not None], self.alive())
        return {job.id: job for job in now}

    def sessions(self) -> list[Job]:
        """Running jobs that have a terminal session."""
        with self._reading() as connection:
            live = list(rows.in_hand(connection))
        return [job for job in live if job.session and job.process is not None]

    def select(self, words: Sequence[str]) -> tuple[int, ...]:
        """Job ids from ``12``, ``3-9``, a label, ``@`` (the last) or ``@~1`` (the one before). Raises NotFound, UsageError."""
        chosen: list[int] = []
        with self._reading() as connection:
            if not self.places.exist():
                raise NotFound("no job yet", where=self.places.state_file, do="see gpujob status")
            last = rows.last_id(connection)
            for word in words:
                span = re.fullmatch(r"([0-9]{1,15})-([0-9]{1,15})", word)
                if span:
                    low, high = int(span[1]), int(span[2])
                    if high < low:
                        raise UsageError(f"the range {word} runs backwards", do=f"write {high}-{low}")
                    inside = [n for n in range(low, min(high, last) + 1) if rows.get(connection, n) is not None]
                    if not inside:
                        raise NotFound(f"no job in {word}", do="see gpujob jobs")
                    chosen += inside
                elif re.fullmatch(r"[0-9]{1,18}", word):  # as long as SQLite's numbers
                    chosen.append(int(word))
                elif re.fullmatch(r"@(~[0-9]{1,9})?", word):
                    back = rows.id_back(connection, int(word[2:] or 0))
                    if back is None:
                        raise NotFound(f"no job {word}", do="see gpujob jobs")
                    chosen.append(back)
                else:
                    named = rows.labelled(connection, word)
                    if not named:
                        raise NotFound(
                            f"no job {word}{_near_label(connection, word)}",
                            do="name an id, a range such as 3-9, a label, @ for the last, @~1 for the one before",
                        )
                    chosen += [job.id for job in named]
            for number in chosen:
                if rows.get(connection, number) is None:
                    raise NotFound(f"no job {number}", where=self.places.state_file, do="see gpujob jobs")
        return tuple(dict.fromkeys(chosen))

    def report(self, now: float, since: float | None = None, label: str = "") -> Report:
        """What jobs waited, ran and used of the GPUs: all that are known, or those with this label, or that had not ended before
        ``since``. Raises NotFound for a label that no job has.
        """
        from scheduler.client.overview import story_as_recorded
        from scheduler.core.usage_report import report_of

        with self._reading() as connection:
            named = rows.labelled(connection, label) if label else []
            if label and not named:
                near = _near_label(connection, label)
                raise NotFound(
                    f"no job with the label {label}{near}", where=self.places.state_file, do="see gpujob jobs"
                )
            alive = self.alive()
            found = named or rows.ended_since(connection, float("-inf") if since is None else since)
            stories = (
                (job, events)
                if alive or job.state not in HOLDING
                else story_as_recorded(connection, job, list(events), self.places.attempts)
                for job, events in rows.with_events(connection, found)
            )
            return report_of(
                stories,
                gpus=(gpu.index for gpu in rows.gpus(connection)),
                now=now,
                since=since,
                known_since=rows.known_since(connection),
            )

    def first_submitted(self) -> float | None:
        """When the oldest job that is known was submitted; None where none is."""
        with self._reading() as connection:
            return rows.first_submitted(connection)

    # -- curves -------------------------------------------------------------------------------------------

    def gpu_history(self, since: float, until: float, step_s: float) -> dict[int, list[GpuSample]]:
        """What each GPU was like in this time (seconds since 1970), averaged over ``step_s`` or more; see `core/history.py`."""
        from scheduler.store.history_db import gpu_history

        return gpu_history(self.places.history, since, until, step_s, time.time())

    def job_history(self, job: int) -> dict[int, list[JobSample]]:
        """Attempt → the GPU memory and load that were measured of it."""
        from scheduler.store.history_db import job_history

        return job_history(self.places.history, job)

    def pause_spans(self, since: float, until: float) -> list[PauseSpan]:
        """When GPUs or the whole queue were paused, as far as that reaches into this time."""
        from scheduler.store.history_db import pauses

        return pauses(self.places.history, since, until)

    def ticks(self) -> tuple[dict[str, float], float] | None:
        """How long the turns of the scheduler took: numbers by bucket, and their sum; None where no history is kept."""
        from scheduler.store.history_db import ticks

        return ticks(self.places.history)

    def tallies(self) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
        """The counters (`core/counters.py`), and the number of waiting jobs for each reason code."""
        from scheduler.store.counters import tallies

        with self._reading() as connection:
            blocked = json.loads(rows.meta(connection, rows.BLOCKED) or "{}")
            return tallies(connection), {str(code): int(number) for code, number in blocked.items()}

    def reset(self) -> int:
        """Forget all ended jobs, and the refused lines: how many jobs it were.

        What still matters stays: jobs that a living one waits for or whose processes hold GPUs.
        """
        from scheduler.store.deletion import forget_finished

        database = Database(self.places)
        try:
            with database.writing() as connection:
                number = forget_finished(connection)
            database.wake_daemon()
        finally:
            database.close()
        return number

    def listed(self) -> tuple[list[Job], set[int]]:
        """All jobs, and those of them that were to be forgotten while others wait for them."""
        with self._reading() as connection:
            return self._now(connection, rows.select(connection), self.alive()), set(
                json.loads(rows.meta(connection, HIDDEN) or "[]")
            )

    def last_id(self) -> int:
        """The highest id given out; before the first the number below it."""
        with self._reading() as connection:
            return rows.last_id(connection) if self.places.exist() else -1

    def forget(self, jobs: Sequence[int]) -> None:
        """Forget these jobs, as far as they have ended; one that others wait for is only kept from lists (`listed`)."""
        from scheduler.store.deletion import forget, may_be_forgotten

        database = Database(self.places)
        try:
            with database.writing() as connection:
                free = [number for number in jobs if may_be_forgotten(connection, number)]
                forget(connection, free)
                hidden = {*json.loads(rows.meta(connection, HIDDEN) or "[]"), *jobs} - set(free)
                rows.set_meta(connection, HIDDEN, json.dumps(sorted(hidden)))
            database.wake_daemon()
        finally:
            database.close()

    def number_from_zero(self) -> None:
        """Let the first job be number 0: said before the first scheduler runs on it."""
        database = Database(self.places)
        try:
            with database.writing() as connection:
                rows.number_from_zero(connection)
        finally:
            database.close()

    def note(self, key: str, text: str) -> None:
        """Remember a text of the caller's own; `remembered` gives it back."""
        database = Database(self.places)
        try:
            with database.writing() as connection:
                rows.set_meta(connection, key, text)
        finally:
            database.close()

    def begun(self, number: int) -> Job | None:
        """A job as it is now; one that is being started this moment once it has its process and its log."""
        end = time.monotonic() + BEGUN_S
        while True:
            job = self.known([number]).get(number)
            if job is None or job.state is not JobState.STARTING or time.monotonic() >= end:
                return job
            time.sleep(0.005)

    def settle_here(self, home: str) -> None:
        """Say that this store belongs to this machine and place from now on."""
        if self.alive():
            raise SchedulerError("a scheduler runs on it", where=self.places.state_file, do="end it first")
        database = Database(self.places)
        try:
            with database.writing() as connection:
                rows.set_meta(connection, "home", home)
        finally:
            database.close()


def _near_label(connection: sqlite3.Connection, word: str) -> str:
    labels = rows.labels(connection, STATES, MOST_LABELS)
    return did_you_mean(word, (label for label in labels if label == without_secrets(label)))


def _without_strangers(connection: sqlite3.Connection, spec: JobSpec) -> JobSpec:
    last = rows.last_id(connection)
    after = tuple(parent for parent in spec.after if parent <= last and rows.get(connection, parent) is not None)
    return replace(spec, after=after, after_ok=tuple(parent for parent in spec.after_ok if parent <= last))


def _check_parents(connection: sqlite3.Connection, spec: JobSpec) -> None:
    for parent in (*spec.after, *spec.after_ok):
        if rows.get(connection, parent) is None:
            raise NotFound(f"there is no job {parent} to wait for", do="see gpujob jobs")


def _check_possible(connection: sqlite3.Connection, gpus: list[Gpu], job: Job) -> None:
    """Raises Refused when the GPUs and slots that the last daemon knew could never hold the job."""
    from scheduler.core.placement import Fleet
    from scheduler.core.placement_class import class_of

    if gpus or rows.meta(connection, "settings"):
        never = Fleet(gpus, _cpu_slots(connection)).can_ever_hold(class_of(job))
        if never:
            raise Refused(never, do="ask for less, or allow other GPUs" if job.need.count else "ask for less")


def _noted(connection: sqlite3.Connection, setting: str) -> Any:
    """A setting of the last daemon, or None."""
    noted = rows.meta(connection, "settings")
    return json.loads(noted).get(setting, [None])[0] if noted else None


def _booking_memory(connection: sqlite3.Connection, gpus: list[Gpu], spec: JobSpec) -> JobSpec:
    """The spec with the GPU memory that the job books where it asks for no share; `daemon/ingest.py` does the same for lines."""
    from scheduler.core.model_table import booking_memory

    mib = _noted(connection, "min_free_mem_mb")
    return booking_memory(spec, int(mib), read=any(gpu.memory_mib for gpu in gpus)) if mib else spec


def _cpu_slots(connection: sqlite3.Connection) -> int:
    """How many there are, as the last daemon noted it; without a limit where none was there yet."""
    noted = bool(rows.meta(connection, "settings"))
    slots = _noted(connection, "cpu_slots")
    return int(slots) if slots is not None else (os.cpu_count() or 1 if noted else 1 << 30)
