"""Records facts about each attempt, and tells what differs between a failed one and the last good run of the same script."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from scheduler.core.decision_pass import Plan
from scheduler.core.endings import ended_by_request, reached_time_limit
from scheduler.core.gpu import Gpu
from scheduler.core.job import Job, JobState
from scheduler.core.launch import Found
from scheduler.core.observations import Ended, Observation
from scheduler.core.run_differences import compared, is_compared, run_of
from scheduler.core.run_facts import GoodRun, Run, RunFacts
from scheduler.core.run_target import group_of, target_of
from scheduler.daemon.context import Context
from scheduler.daemon.program_lookup import ProgramLookup, UserProgramLookup
from scheduler.environments.resolve import stored_environment
from scheduler.environments.run_code import RunCode
from scheduler.intake.tail import read_plain
from scheduler.store import good_runs
from scheduler.store import jobs as rows

SALT = "facts_salt"  # key in `meta`
DRIVER = "/sys/module/nvidia/version"
DRIVER_AGAIN_S = 60.0
MOST_ENVIRONMENTS = 500
HASH_BYTES = 6


class RunRecords:
    """The facts about attempts. In a scheduler of several users, no file of a user is read."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._code = RunCode()
        self._salt = b""
        self._environments: dict[str, str] = {}  # file of a submitter's variables → id of the set
        self._new: dict[str, dict[str, str]] = {}  # sets that are not recorded yet
        self._recorded: set[str] = set()
        self._packages: dict[str, tuple[dict[str, str], str]] = {}  # program → its packages, id of the set
        self._driver, self._driver_due = "", 0.0

    # -- starts -------------------------------------------------------------------------------------------

    def note_starts(
        self, connection: sqlite3.Connection, starts: Iterable[Job], lookup: ProgramLookup | UserProgramLookup
    ) -> None:
        """Set ``Job.facts`` of the jobs that are about to start."""
        for job in starts:
            if not self._salt:
                self._salt = _salt_of(connection)
            found = lookup.found_for(job)
            job.facts = self._facts(job, found if isinstance(found, Found) else None)

    def _facts(self, job: Job, found: Found | None) -> RunFacts:
        spec = job.spec
        own = (item.partition("=") for item in spec.variables)
        variables = tuple((name, self._hash(value)) for name, _, value in own if is_compared(name))
        environment = self._environments.get(spec.env_file)
        if environment is None:
            environment = self._environment(spec.env_file)
        packages, code = "", None
        if not self._context.shared:
            path = target_of(spec).path
            code = (
                self._code.code_of(path if path.startswith("/") else os.path.join(self._context.folder, path))
                if path
                else None
            )
            packages = self._packages_of(found)
        return RunFacts(environment, variables, packages, code)

    def _environment(self, env_file: str) -> str:
        """Return the id of the set of a job's variables before its own ones; empty if they cannot be read."""
        # The agent of a user has other variables than this process.
        own: Mapping[str, str] = {} if self._context.shared else self._context.environ
        variables = stored_environment(env_file) if env_file else own
        if variables is None:
            return ""
        hashes = {name: self._hash(value) for name, value in variables.items() if is_compared(name)}
        if len(self._environments) >= MOST_ENVIRONMENTS:
            self._environments.clear()
        found = self._environments[env_file] = self._set(hashes)
        return found

    def _packages_of(self, found: Found | None) -> str:
        if found is None:
            return ""
        packages = self._code.packages_of(found.program, bool(found.interpreter))
        kept = self._packages.get(found.program)
        if kept is None or kept[0] != packages:
            if len(self._packages) >= MOST_ENVIRONMENTS:
                self._packages.clear()
            kept = self._packages[found.program] = (packages, self._set(packages) if packages else "")
        return kept[1]

    def _hash(self, value: str) -> str:
        data = value.encode("utf-8", "surrogateescape")
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._salt).hexdigest()

    def _set(self, items: dict[str, str]) -> str:
        text = json.dumps(items, sort_keys=True)
        number = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._new[number] = items
        return number

    # -- ends ---------------------------------------------------------------------------------------------

    def with_differences(
        self,
        connection: sqlite3.Connection,
        live: Mapping[int, Job],
        gpus: Mapping[int, Gpu],
        observations: list[Observation],
    ) -> list[Observation]:
        """Return the observations; those of failed attempts tell what differs from the last good run."""
        return [
            self._compared(connection, live[one.job], gpus, one)
            if isinstance(one, Ended) and one.job in live and live[one.job].attempt == one.attempt
            else one
            for one in observations
        ]

    def _compared(self, connection: sqlite3.Connection, job: Job, gpus: Mapping[int, Gpu], end: Ended) -> Ended:
        if ended_by_request(job) or (end.exit_code == 0 and not reached_time_limit(job)):
            return end
        run, good = self._run_of(job, gpus), good_runs.good_run(connection, group_of(job.spec))
        wanted = {run.facts.environment, run.facts.packages}
        if good is not None:
            wanted |= {good.run.facts.environment, good.run.facts.packages}
        sets = {**good_runs.sets_of(connection, wanted - {*self._new}), **self._new} if good is not None else {}
        return replace(end, failure=compared(end.failure, run, good, sets))

    def _run_of(self, job: Job, gpus: Mapping[int, Gpu]) -> Run:
        return run_of(job, tuple(gpus[gpu].name for gpu in job.gpus if gpu in gpus), self._driver_version())

    def record(
        self, connection: sqlite3.Connection, plan: Plan, live: Mapping[int, Job], gpus: Mapping[int, Gpu]
    ) -> None:
        """Record the good runs of a pass and new sets, and remove the facts of ended attempts."""
        good: dict[str, GoodRun] = {}
        for job in plan.changed.values():
            if job.facts is not None and (job.state.ended or job.state is JobState.PENDING):
                if job.succeeded and job.exit_code == 0 and job.finished_at is not None:
                    good[group_of(job.spec)] = GoodRun(job.id, job.finished_at, self._run_of(job, gpus))
                job.facts = None
        if good:
            good_runs.save_good_runs(connection, good)
        new = {number: items for number, items in self._new.items() if number not in self._recorded}
        if new:
            rows.set_meta(connection, SALT, self._salt.hex())
            facts = [job.facts for job in live.values() if job.facts is not None]
            used = {number for one in facts for number in (one.environment, one.packages)}
            if good_runs.add_sets(connection, new, used):
                self._forget()

    def recorded(self) -> None:
        """Note that the last `record` is in the store."""
        self._recorded |= {*self._new}
        self._new.clear()

    def _forget(self) -> None:
        """Forget which sets are recorded, because some were deleted: the next start of a job finds them again."""
        self._recorded.clear()
        self._environments.clear()
        self._packages.clear()

    def _driver_version(self) -> str:
        if time.monotonic() >= self._driver_due:
            self._driver_due = time.monotonic() + DRIVER_AGAIN_S
            try:
                self._driver = read_plain(DRIVER, 100).decode("ascii", "replace").strip()
            except OSError:
                self._driver = ""  # no such driver
        return self._driver


def _salt_of(connection: sqlite3.Connection) -> bytes:
    """Return the salt of this store; the first `RunRecords.record` stores a new one."""
    known = rows.meta(connection, SALT)
    return bytes.fromhex(known) if known else os.urandom(16)
