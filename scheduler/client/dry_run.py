"""Dry run of a submission: the scheduler's own decision (`core/decide.py`) on a state that is read from the store."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.client.admission_checks import check_parents
from scheduler.client.outlook import Expectation, Explanation, explanation_of
from scheduler.client.stored_state import as_running, missed, queue_waiting, stored_state
from scheduler.core.config import Config
from scheduler.core.decide import decide
from scheduler.core.decision_pass import DecisionPass, Plan
from scheduler.core.gpu import WHOLE, decimal_text
from scheduler.core.job import Job, JobSpec, JobState, Reason
from scheduler.core.launch import filled
from scheduler.core.model_table import ModelTable, booking_memory, need_of
from scheduler.core.observations import Now
from scheduler.core.offered_requests import CANCEL, QUEUE_RESUME, RESUME
from scheduler.core.placement_class import class_of, reason_with_place, remedy
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.users import Users
from scheduler.environments.discovery import program_in
from scheduler.environments.resolve import Environments, Missing
from scheduler.store import jobs as rows
from scheduler.store.database import NothingYet, open_for_reading, trouble
from scheduler.store.paths import Places
from scheduler.store.seen_runs import with_learned

BUDGET_S = 1.0  # for the prediction
ABOUT_OTHERS = frozenset({CANCEL, RESUME, QUEUE_RESUME})  # verbs that do not name the job that is to start


@dataclass(frozen=True, slots=True)
class Preview:
    """The result of a dry run. Secrets in it are masked.

    ``would``: ``start``, ``wait`` or ``never``. ``gpus``: the GPUs on which the job would start. ``reason_code`` and
    ``reason``: why the job would not start. ``need``: the job's need in GPUs, e.g. 0.5. ``command``: the words to run.
    ``notes``: remarks about the job. ``explanation``: what would keep it, and when it is expected to start and end; None without a
    scheduler.
    """

    would: str
    gpus: tuple[int, ...] = ()
    reason_code: str = ""
    reason: str = ""
    need: float | None = None
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""  # why the command would fail immediately
    remedy: str = ""  # of a job that could never run: what its owner can change
    explanation: Explanation | None = None

    @property
    def expected(self) -> Expectation | None:
        """When the job is expected to start and end; None if this is not known."""
        return None if self.explanation is None else self.explanation.expected


def no_users(connection: sqlite3.Connection) -> Users | None:
    """Return None: the scheduler has one user."""
    return None


def preview(
    places: Places,
    config: Config,
    spec: JobSpec,
    environment: Mapping[str, str],
    table: ModelTable,
    *,
    alive: bool,
    files: bool = True,
    users: Callable[[sqlite3.Connection], Users | None] = no_users,
) -> Preview:
    """Return what the scheduler would do with this job now. Writes nothing and starts nothing.

    The decision uses the last GPU readings. It may ignore a reservation that the running scheduler has made for another
    job, because the store does not hold how often each job was overtaken. ``alive``: whether a daemon runs. ``files``:
    whether to check that the files of the job exist. ``users``: returns the users of the queue. Raises Refused for an impossible need, NotFound for an unknown
    dependency, StoreTrouble.
    """
    try:
        connection = open_for_reading(places) if places.exist() else None
    except NothingYet:
        connection = None
    if connection is None:
        need, notes = need_of(spec, table)
        return Preview("wait", (), "no-scheduler", _not_yet(), need.total / WHOLE, _words(spec.arguments), notes)
    try:
        connection.execute("BEGIN")
        return _decided(
            connection, places, as_running(connection, config, alive), spec, environment, table, alive, files, users
        )
    except sqlite3.Error as error:
        raise trouble(error, places.store) from error
    finally:
        connection.close()


def _not_yet() -> str:
    return "no scheduler is running: the job waits until a scheduler starts (gpujob start)"


def _decided(
    connection: sqlite3.Connection,
    places: Places,
    config: Config,
    spec: JobSpec,
    environment: Mapping[str, str],
    table: ModelTable,
    alive: bool,
    files: bool,
    users: Callable[[sqlite3.Connection], Users | None],
) -> Preview:
    now = Now(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
    check_parents(connection, spec)
    gpus = rows.gpus(connection)
    spec = booking_memory(spec, config.min_free_mem_mb or 0, read=any(gpu.memory_mib for gpu in gpus))
    need, notes = need_of(spec, with_learned(connection, table, spec), gpus)
    number = rows.last_id(connection) + 1
    job = Job(
        number, spec, need, order=number, priority=spec.priority, allowed=spec.allowed, submitted_at=now.wall, held=spec.hold
    )  # fmt: skip
    job.notes = notes
    state = stored_state(connection, places, config, now, alive=alive)
    state.users = users(connection)
    fetch = state.fetch
    state.fetch = lambda wanted: job if wanted == number else fetch(wanted)
    environments = Environments(environment, config.python)
    environments.mode = config.conda_mode
    state.missing = lambda one: _missing(environments, one) if files and one.id == number else missed(one)
    never = state.fleet.can_ever_hold(class_of(job)) if gpus or rows.meta(connection, "settings") else ""
    if never:
        return _told("never", job, Reason("never", never))
    waiting = queue_waiting(connection, state, now)
    arrival = DecisionPass(state, now, 0.5)
    arrival.enqueue(job)
    if job.state is JobState.SKIPPED:
        return _told("never", job, Reason("depends", _why_skipped(arrival.plan, number)))
    explained = explanation_of(state, now, job, BUDGET_S) if alive else None
    decide(state, [], now)
    told = _decision(state, job, waiting, alive)
    if files:
        told = replace(told, doubt=_doubt(spec, environment))
    return replace(told, explanation=None if explained is None else _for_a_new_job(explained))


def _for_a_new_job(explained: Explanation) -> Explanation:
    """Return an explanation without the offers that name the job, which does not exist yet."""
    possible = tuple(one for one in explained.offers if {part.verb for part in one.requests} <= ABOUT_OTHERS)
    return replace(explained, offers=possible)


def _doubt(spec: JobSpec, environment: Mapping[str, str]) -> str:
    """Return why the command would fail immediately; empty if no reason is found.

    Checks that the program exists and is executable. Scripts, and commands in a conda environment, are not checked.
    """
    if spec.is_script or spec.conda_env or not spec.arguments:
        return ""
    name = spec.arguments[0]
    if "/" not in name:
        found = program_in(environment.get("PATH", os.defpath), name)
        return "" if found else f"program {name} not found in PATH"
    path = os.path.join(spec.cwd, name)
    if os.path.isdir(path):
        return f"{name} is a folder"
    if os.path.isfile(path) and os.access(path, os.X_OK):
        return ""
    return f"{name} {'is not executable' if os.path.exists(path) else 'does not exist'}"


def _decision(state: SchedulerState, job: Job, waiting: Sequence[Job], alive: bool) -> Preview:
    """Return what was decided about a job. ``waiting``: the other waiting jobs, as they were before."""
    if job.state is JobState.PENDING and not alive:
        return _told("wait", job, Reason("no-scheduler", _not_yet()))
    if job.state is not JobState.PENDING:
        return _told("start", job, None)
    if job.held:
        return _told("wait", job, Reason(job.reason_code, "it is held until gpujob release"))
    if job.reason_code:
        return _told("wait", job, Reason(job.reason_code, job.reason))
    reason = state.class_reasons()[class_of(job).key]
    mine = state.queue.key_of(job.id)
    ahead = (one.id for one in waiting if one.id in state.queue and class_of(one) == class_of(job))
    before = sum(state.queue.key_of(one) < mine for one in ahead)
    return _told("never" if reason.code == "never" else "wait", job, reason_with_place(reason, before))


def _missing(environments: Environments, job: Job) -> str:
    found = environments.find(job)
    return found.sentence if isinstance(found, Missing) else ""


def _why_skipped(plan: Plan, number: int) -> str:
    return next((str(event.detail.get("why", "")) for event in plan.events if event.job == number), "")


def _words(words: Sequence[str]) -> tuple[str, ...]:
    return words_without_secrets(words)


def _told(would: str, job: Job, reason: Reason | None) -> Preview:
    words: tuple[str, ...] = (job.spec.script, *job.spec.arguments) if job.spec.script else job.spec.arguments
    if would == "start" and not job.spec.script:
        words = filled(words, ",".join(map(str, job.gpus)), decimal_text(job.need.parts if job.need.count else 0))
    return Preview(
        would,
        job.gpus if would == "start" else (),
        reason.code if reason else "",
        without_secrets(reason.sentence) if reason else "",
        job.need.total / WHOLE,
        _words(words),
        tuple(without_secrets(note) for note in job.notes),
        remedy=remedy(class_of(job)) if would == "never" else "",
    )
