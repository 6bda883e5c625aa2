"""Client of one scheduler: reads its store, adds jobs, and sends requests to its daemon.

While no daemon runs, `offline.py` carries out requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scheduler.client.curves import CurvesClient
from scheduler.core.errors import NoDaemon, NotAsked, NotFound, SchedulerError, UsageError, did_you_mean
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

if TYPE_CHECKING:
    from scheduler.client.dry_run import Preview
    from scheduler.client.outlook import Explanation, Outlook
    from scheduler.client.overview import Overview, Watch
    from scheduler.client.who import UserUse
    from scheduler.core.learned_needs import Advice
    from scheduler.core.model_table import ModelTable
    from scheduler.core.placement import Fleet
    from scheduler.core.requests import Answer, Request
    from scheduler.core.rights import Caller
    from scheduler.core.usage_report import Report
    from scheduler.core.users import Users

OUTLOOK_S = 1.0  # seconds for a prediction
ANSWER_S = 5.0  # seconds to wait for the daemon's answer
QUICK_LOOKS = 20  # looks for an answer that follow each other quickly
BEGUN_S = 2.0  # seconds to wait for a job that is STARTING
MOST_LABELS = 10_000  # jobs with a label, newest first, that are searched for labels
MOST_NAMED, MOST_LABEL_WORDS = 1_000_000, 100  # jobs that ranges name, and labels, in a command
STATES = tuple(state.value for state in JobState)
SCHEMA = 1
HIDDEN = "hidden"  # key in the table `meta`: ids of the jobs that `forget` could not delete


class QueueFull(SchedulerError):
    """Raised by `submit` if as many jobs as ``most`` allows are already waiting or running."""


class SchedulerClient(CurvesClient):
    """Gives user interfaces access to one scheduler. The path of its state file identifies the scheduler."""

    shared = False  # True: the scheduler of all users (`system_client.py`)
    to_start = "start it: gpujob start"  # what to do if no scheduler runs
    restart_s = 0.0  # how long a call waits for a scheduler that is just starting again
    user = ""  # whose jobs are meant by a label or @; empty: all jobs

    def __init__(self, state_file: str) -> None:
        """Raise SchedulerError if the scheduler belongs to another user; root may access every scheduler."""
        self.places = Places(state_file)
        self.places.check_ours()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a read-only connection in one transaction, so that all queries see the same snapshot of the store.

        If no store has been created yet, the connection leads to an empty store in memory. Raises StoreTrouble,
        Elsewhere.
        """
        if self.places.exist():
            try:
                connection = open_for_reading(self.places)
            except NothingYet:
                if not self.alive():
                    raise
                connection = nothing_yet()  # a daemon that has just started is still creating it
        else:
            check_begun(self.places)
            connection = nothing_yet()
        try:
            connection.execute("BEGIN")  # all queries see the same snapshot
            yield connection
        except sqlite3.Error as error:
            raise trouble(error, self.places.store) from error
        finally:
            connection.close()

    def caller_folder(self) -> str:
        """Return a private folder for the socket of a job in the foreground, after creating it if necessary."""
        self.places.make()
        return self.places.state_dir

    def alive(self) -> bool:
        """Return whether the daemon of this scheduler runs."""
        return daemon_alive(self.places)

    # -- requests and submission --------------------------------------------------------------------------

    def ask(self, request: Request, wait_s: float = ANSWER_S) -> Answer:
        """Send a request to the daemon and return its answer.

        Raises NotAsked if no daemon runs; the request is then not stored. Raises NoDaemon if the daemon ends before it
        answers, or if it does not answer within ``wait_s`` seconds. After NoDaemon, the request stays in the store and
        is carried out later.
        """
        from scheduler.core.requests import Answer, to_row

        return Answer(0, *self.ask_for(*to_row(request), wait_s))

    def ask_for(
        self, kind: str, arguments: Mapping[str, Any], wait_s: float = ANSWER_S, by: Caller | None = None
    ) -> tuple[int, tuple[str, ...]]:
        """Send a request, given by the name of its kind and its fields. Return exit code and lines of the answer.

        ``by``: the user who asks, if the scheduler has several users.

        A caller uses this method instead of `ask` if the import of the request classes (`core/requests.py`) takes too
        long. Raises the same errors as `ask`.
        """
        if not self.alive():
            raise NotAsked("no scheduler is running", where=self.places.state_file, do=self.to_start)
        database = Database(self.places)
        try:
            with database.writing() as connection:
                row = rows.ask_for(connection, kind, arguments, time.time(), by)
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
                        "the scheduler ended before it answered; the next scheduler carries out the request",
                        where=self.places.state_file,
                        do=self.to_start,
                    )
                time.sleep(0.0005 if looks < QUICK_LOOKS else 0.003)  # most answers come within two milliseconds
        finally:
            database.close()
        pid = holder(self.places).get("pid", "unknown")
        raise NoDaemon(
            f"no answer from the scheduler (pid {pid}) within {wait_s:g} s; it carries out the request later",
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
        """Add a job to the queue and return it.

        Equal submissions become separate jobs, unlike equal lines of a jobs file.
        ``environment``: all variables that the job gets; they are saved in a private file. If it is None, the job gets
        the scheduler's variables.
        ``forgiving``: an unknown dependency is no error. A dependency on an id that was never assigned is removed. A
        dependency on a deleted job is removed from ``after``, but stays in ``after_ok``, so that the new job is
        skipped. ``most``: the highest allowed number of jobs that wait or run, this job included.
        Raises Refused if the job can never run, NotFound for an unknown dependency, QueueFull, StoreTrouble.
        """
        from scheduler.client import admission_checks
        from scheduler.core.command_limits import check_nodes
        from scheduler.core.model_table import lacks_model, need_of

        if spec.arguments:
            check_nodes(spec.arguments)
        need_of(spec, table)  # raises for an invalid need before anything is written
        database = Database(self.places)
        try:
            with database.writing() as connection:
                self._admit(connection, spec)
                if most is not None and rows.unfinished(connection) >= most:
                    raise QueueFull(
                        f"cannot queue the job: {most} jobs are already waiting or running",
                        do="wait until one has ended",
                    )
                if forgiving:
                    spec = admission_checks.without_strangers(connection, spec)
                else:
                    admission_checks.check_parents(connection, spec)
                if environment is not None:
                    spec = replace(spec, env_file=self._keep_environment(environment))
                gpus = rows.gpus(connection)
                spec = admission_checks.with_memory(connection, gpus, spec)
                if lacks_model(table, spec):
                    from scheduler.store.seen_runs import with_learned

                    table = with_learned(connection, table, spec)
                need, notes = need_of(spec, table, gpus)
                job = rows.insert(connection, spec, need, "", notes, time.time())
                if job.need != ResourceRequest(0, 0):
                    admission_checks.check_possible(connection, gpus, job)
                self._check_limits(connection, job)
            database.wake_daemon()
        finally:
            database.close()
        return job

    def learned_table(self, table: ModelTable) -> ModelTable:
        """Return the model table with the runs of each model, if the setting `learn` is on."""
        from scheduler.store.seen_runs import with_learned

        with self._reading() as connection:
            return with_learned(connection, table)

    def _admit(self, connection: sqlite3.Connection, spec: JobSpec) -> None:
        """Raise Refused if the user may not submit another job; a scheduler of one user has no such limit."""

    def _check_limits(self, connection: sqlite3.Connection, job: Job) -> None:
        """Raise Refused if the limits of the user never let the job start; a scheduler of one user has none."""

    def _keep_environment(self, environment: Mapping[str, str]) -> str:
        """Save all variables of a job in a private file, and return its path. Jobs with equal variables share a file.

        The caller holds the store's lock. Every process that adds or removes such a file also holds this lock. Raises
        OSError.
        """
        data = b"\0".join(os.fsencode(f"{name}={value}") for name, value in sorted(environment.items()))
        path = os.path.join(self.places.environments, digest(data, 16))
        try:
            fd = new_private(path)
        except FileExistsError:
            if os.path.getsize(path) == len(data):
                return path
            os.unlink(path)  # the process that wrote it was killed before it committed its job
            return self._keep_environment(environment)
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(self.places.environments)
        return path

    def gpus(self) -> list[Gpu]:
        """Return the GPUs that this scheduler manages; empty before its first start."""
        with self._reading() as connection:
            return rows.gpus(connection)

    def managed(self) -> tuple[int, ...] | None:
        """Return the ids of the managed GPUs; None if no GPU is managed or the scheduler has never been started."""
        return tuple(gpu.index for gpu in self.gpus()) or None

    def fleet(self) -> Fleet | None:
        """Return a ledger without bookings of the GPUs that this scheduler manages; None before its first start."""
        from scheduler.store.cluster import fleet_of

        with self._reading() as connection:
            gpus = rows.gpus(connection)
            return fleet_of(connection, gpus, 1 << 30) if gpus else None

    def on_cluster(self) -> bool:
        """Return whether the last daemon used a cluster."""
        return bool(self.remembered("cluster"))

    def remembered(self, key: str) -> str:
        """Return the text that a daemon or `note` saved under ``key`` (e.g. ``jobs_file``); empty if there is none."""
        with self._reading() as connection:
            return rows.meta(connection, key)

    def settings(self) -> dict[str, tuple[Any, str]]:
        """Return value and origin of each setting of the running scheduler; empty if none runs."""
        noted = self.remembered("settings") if self.alive() else ""
        found: dict[str, list[Any]] = json.loads(noted) if noted else {}
        return {key: (value, origin) for key, (value, origin) in found.items()}

    # -- queries ------------------------------------------------------------------------------------------

    def _now(self, connection: sqlite3.Connection, jobs: Iterable[Job], alive: bool) -> list[Job]:
        """Return the jobs. Without a daemon, jobs stored as running get the states that their attempt records show."""
        found = list(jobs)
        if alive or not any(job.state in HOLDING for job in found):
            return found
        from scheduler.client.overview import as_recorded

        return as_recorded(connection, found, self.places.attempts)

    def overview(self, most_waiting: int | None = None) -> Overview:
        """Return the GPUs, the live jobs with their reasons, the jobs that ended last, and the refused lines.

        ``most_waiting``: the number of waiting jobs to include, from the front of the queue; None: all.
        """
        from scheduler.client.overview import overview_of

        alive = self.alive()
        with self._reading() as connection:
            return overview_of(connection, self.places, alive, most_waiting)

    def outlook(self, budget_s: float = OUTLOOK_S) -> Outlook:
        """Return when the running jobs and the first waiting jobs are expected to start and end.

        ``budget_s``: after this time, the prediction is not made more exact. Without a scheduler there are no predictions.
        """
        from scheduler.client.outlook import Outlook, Predictor

        if not self.alive():
            return Outlook(time.time())
        with self._reading() as connection:
            return Predictor(connection, self.places, self._users(connection)).outlook(budget_s)

    def explain(self, job_id: int, by: Caller | None = None) -> Explanation:
        """Return why a waiting job does not start: what holds its GPUs, its place, its expected start, and what would start it.

        ``by``: who asks. Raises NotFound. For a job that does not wait, and without a scheduler, nothing is explained.
        """
        from scheduler.client.outlook import Explanation, Predictor

        job = self.job(job_id)[0]
        if not self.alive() or job.state is not JobState.PENDING:
            return Explanation()
        with self._reading() as connection:
            return Predictor(connection, self.places, self._users(connection)).explanation(job, OUTLOOK_S, by)

    def preview(self, spec: JobSpec, environment: Mapping[str, str], table: ModelTable) -> Preview:
        """Return what the scheduler would do with a job now (`client/dry_run.py`). Writes nothing."""
        from scheduler.client.dry_run import preview
        from scheduler.core.config import Config

        here, alive = not self.user, self.alive()
        return preview(self.places, Config(), spec, environment, table, alive=alive, files=here, users=self._users)

    def _users(self, connection: sqlite3.Connection) -> Users | None:
        """Return the users of the queue, in a scheduler of several users; else None."""
        return None

    def changes(self) -> Watch:
        """Return a `Watch`, which reports changes since its last look. For one thread only; the caller closes it."""
        from scheduler.client.overview import Watch

        return Watch(self.places)

    def jobs(self, states: Sequence[str] = (), most: int | None = None) -> tuple[list[Job], dict[int, Reason]]:
        """Return jobs in the order of their ids, and the reason of each waiting job by its id.

        ``states``: the states of the jobs to return; empty: all states. ``most``: return at most this number of jobs,
        the newest; None: return all.
        """
        with self._reading() as connection:
            alive = self.alive()
            if alive or not states:
                found = self._now(connection, rows.select(connection, states, most), alive)
            else:  # by its attempt record, a job stored as running may now be in another state
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
        """Return the newest matching jobs, newest first, and the total number of matching jobs.

        ``states``: the states that match; empty: all states. ``label``: the label that matches; empty: any label.
        ``most``: maximum number of jobs to return. With a daemon, the total is exact. Without a daemon, the total is
        exact only if it is less than ``most``; otherwise it is an estimate.
        """
        with self._reading() as connection:
            alive = self.alive()
            wanted = set(states or STATES)
            asked = list(states or STATES)
            counts = rows.counts(connection)
            more = 0
            if not alive:  # by its attempt record, a job stored as running may now be in another state
                asked += [state.value for state in HOLDING if state.value not in wanted]
                more = sum(counts[state.value] for state in HOLDING)
            if label:
                found, number = rows.newest_labelled(connection, label, asked, most + more, self.user)
            else:
                found = list(rows.select(connection, asked if states else (), most + more))
                number = sum(counts[state] for state in wanted)
            shown = [job for job in self._now(connection, found, alive) if job.state.value in wanted]
            return shown[: -most - 1 : -1], number if len(found) >= most + more else len(shown)

    def job(self, job_id: int) -> tuple[Job, Reason | None, list[Event]]:
        """Return a job, the reason why it waits (None if it does not), and its event history. Raises NotFound."""
        with self._reading() as connection:
            job = rows.get(connection, job_id)
            if job is None:
                raise NotFound(f"there is no job {job_id}", where=self.places.state_file, do="see gpujob jobs")
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
        """Return the newest jobs whose id begins with ``prefix``, and the labels that begin with ``prefix``.

        The labels are returned as a dict: label → ids of the jobs with this label. Only jobs in ``states`` count.
        ``most``: the maximum number of jobs, and also the maximum number of labels. Used for completion in a shell.
        """
        names = [state.value for state in states]
        with self._reading() as connection:
            known = rows.labels(connection, names, MOST_LABELS, self.user)
            labels = [label for label in known if label.startswith(prefix)]
            jobs = rows.newest(connection, names, prefix, most, self.user)
            return jobs, {label: known[label] for label in labels[:most]}

    def lines_read(self, path: str) -> frozenset[str]:
        """Return the identities of all lines read so far from a watched file."""
        from scheduler.store.file_offsets import counted

        with self._reading() as connection:
            return counted(connection, path)

    def pauses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the managed GPUs, and the ids of all paused GPUs, managed or not."""
        with self._reading() as connection:
            return tuple(gpu.index for gpu in rows.gpus(connection)), rows.paused_gpus(connection)

    def states(self, jobs: Sequence[int]) -> list[Job]:
        """Return these jobs, in this order, with their current states. Raises NotFound."""
        found = self.known(jobs)
        for number in jobs:
            if number not in found:
                raise NotFound(f"there is no job {number}", where=self.places.state_file, do="see gpujob jobs")
        return [found[number] for number in jobs]

    def known(self, jobs: Iterable[int]) -> dict[int, Job]:
        """Return id → job with its current state. Ids in ``jobs`` that do not exist are left out."""
        with self._reading() as connection:
            found = [rows.get(connection, job) for job in dict.fromkeys(jobs)]
            now = self._now(connection, [job for job in found if job is not None], self.alive())
        return {job.id: job for job in now}

    def sessions(self) -> list[Job]:
        """Return the running jobs that have a terminal session."""
        with self._reading() as connection:
            live = list(rows.in_hand(connection))
        return [job for job in live if job.session and job.process is not None]

    def select(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of the jobs that ``words`` name, without duplicates. Raises NotFound, UsageError.

        A word is an id (``12``), a range (``3-9``), a label, ``@`` (the newest job) or ``@~N`` (N jobs before it).
        """
        chosen: list[int] = []
        plain: list[int] = []
        labels = 0
        with self._reading() as connection:
            if not self.places.exist():
                raise NotFound("there are no jobs yet", where=self.places.state_file, do="see gpujob status")
            for word in dict.fromkeys(words):
                if len(chosen) > MOST_NAMED or labels > MOST_LABEL_WORDS:
                    raise UsageError(f"the words name too many jobs (at {word[:40]!r})", do="name fewer")
                span = re.fullmatch(r"([0-9]{1,15})-([0-9]{1,15})", word)
                if span:
                    low, high = int(span[1]), int(span[2])
                    if high < low:
                        raise UsageError(f"the range {word} is backwards", do=f"write {high}-{low}")
                    inside = rows.ids_between(connection, low, high)
                    if not inside:
                        raise NotFound(f"there is no job in {word}", do="see gpujob jobs")
                    chosen += inside
                elif re.fullmatch(r"[0-9]{1,18}", word):  # fits into an SQLite integer
                    plain.append(int(word))
                    chosen.append(int(word))
                elif re.fullmatch(r"@(~[0-9]{1,9})?", word):
                    back = rows.id_back(connection, int(word[2:] or 0), self.user)
                    if back is None:
                        raise NotFound(f"there is no job {word}", do="see gpujob jobs")
                    chosen.append(back)
                else:
                    labels += 1
                    named = rows.labelled(connection, word, self.user)
                    if not named:
                        raise NotFound(
                            f"there is no job {word}{_similar_label(connection, word, self.user)}",
                            do="name an id, a range such as 3-9, a label, @ for the last job, @~1 for the job before it",
                        )
                    chosen += [job.id for job in named]
            for number in plain:
                if rows.get(connection, number) is None:
                    raise NotFound(f"there is no job {number}", where=self.places.state_file, do="see gpujob jobs")
        return tuple(dict.fromkeys(chosen))

    def report(self, now: float, since: float | None = None, label: str = "") -> Report:
        """Return a report on how long jobs waited and ran, and how much they used the GPUs.

        ``since`` and ``now``: start and end of the reported time, in seconds since 1970. If ``since`` is None, the
        reported time begins with the first job. ``label``: only jobs with this label. Raises NotFound if no job has it.
        """
        from scheduler.client.overview import story_as_recorded
        from scheduler.core.usage_report import report_of

        with self._reading() as connection:
            named = rows.labelled(connection, label, self.user) if label else []
            if label and not named:
                near = _similar_label(connection, label, self.user)
                raise NotFound(
                    f"there is no job with the label {label}{near}", where=self.places.state_file, do="see gpujob jobs"
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

    def needs(self, table: ModelTable, every: bool = False) -> list[Advice]:
        """Return the advice on the need of each model of ``table``, and of each model that has run, sorted by name.

        ``every``: count the runs of all users; of a scheduler of several users, only an administrator may ask for that.
        """
        from scheduler.core.learned_needs import advice
        from scheduler.store.seen_runs import seen_runs

        with self._reading() as connection:
            return advice(table, seen_runs(connection), rows.gpus(connection))

    def shares(self) -> tuple[list[UserUse], float]:
        """Return the use of each user in a scheduler of several users, and the half-life of the use in seconds."""
        from scheduler.client.queue_use import shares_in

        with self._reading() as connection:
            return shares_in(connection)

    def first_submitted(self) -> float | None:
        """Return when the oldest known job was submitted (seconds since 1970); None if there is no job."""
        with self._reading() as connection:
            return rows.first_submitted(connection)

    def submission_place(self) -> tuple[str, Mapping[str, str]] | None:
        """Return folder and variables for jobs that are submitted on the page; None: those of the page's process."""
        return None

    def new_token(self) -> str:
        """Return a new token of the caller for the page of the scheduler of all users."""
        raise NotFound("only the page of the scheduler of all users has a token for each user", where=self.places.web_token,
                       do="the token of your own page is in this file")  # fmt: skip

    def watched(self) -> list[str]:
        """Return the jobs files of the caller that the scheduler of all users reads."""
        raise NotFound("only the scheduler of all users reads files of several users", do="see gpujob system --help")

    def watch(self, path: str, home: str, on: bool) -> None:
        """Have the scheduler of all users read a jobs file of the caller, or (``on`` false) stop reading it.

        ``home``: home folder of the caller, for ``~`` in the lines. Raises NotFound if the file is not read.
        """
        self.watched()

    def reset(self) -> int:
        """Delete all ended jobs and the refused lines from the store; return the number of deleted jobs.

        An ended job stays if an unfinished job depends on it, or if its leftover processes hold GPUs.
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
        """Return all jobs, ordered by id, and the ids of the jobs that `forget` marked as hidden."""
        with self._reading() as connection:
            return self._now(connection, rows.select(connection), self.alive()), set(
                json.loads(rows.meta(connection, HIDDEN) or "[]")
            )

    def last_id(self) -> int:
        """Return the highest job id assigned so far. Without a store, return -1.

        Before the first job, return 0, or -1 if ids start at 0 (`number_from_zero`).
        """
        with self._reading() as connection:
            return rows.last_id(connection) if self.places.exist() else -1

    def forget(self, jobs: Sequence[int]) -> None:
        """Delete these jobs from the store. Mark the jobs that cannot be deleted as hidden (see `listed`).

        A job can be deleted if it has ended, holds no GPU, and no unfinished job depends on it.
        """
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
        """Make job ids begin at 0 instead of 1. This has an effect only before the first job."""
        database = Database(self.places)
        try:
            with database.writing() as connection:
                rows.number_from_zero(connection)
        finally:
            database.close()

    def note(self, key: str, text: str) -> None:
        """Save a text of the caller under ``key``; `remembered` returns it."""
        database = Database(self.places)
        try:
            with database.writing() as connection:
                rows.set_meta(connection, key, text)
        finally:
            database.close()

    def begun(self, number: int) -> Job | None:
        """Return the job with this id; None if there is no such job.

        If the job is STARTING, first wait until it is not, at most `BEGUN_S` seconds.
        """
        end = time.monotonic() + BEGUN_S
        while True:
            job = self.known([number]).get(number)
            if job is None or job.state is not JobState.STARTING or time.monotonic() >= end:
                return job
            time.sleep(0.005)

    def settle_at_home(self, home: str) -> None:
        """Record ``home`` (machine and folder) as the place of the store. Raises SchedulerError if a scheduler runs."""
        if self.alive():
            raise SchedulerError(
                "cannot adopt the store: a scheduler is using it",
                where=self.places.state_file,
                do="end the scheduler first",
            )
        database = Database(self.places)
        try:
            with database.writing() as connection:
                rows.set_meta(connection, "home", home)
        finally:
            database.close()


def _similar_label(connection: sqlite3.Connection, word: str, user: str) -> str:
    labels = rows.labels(connection, STATES, MOST_LABELS, user)
    return did_you_mean(word, (label for label in labels if label == without_secrets(label)))
