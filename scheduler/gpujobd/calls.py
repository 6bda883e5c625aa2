"""The calls that users make to the scheduler: checked by `core/rights.py`, and made with the rights of the service user."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import json
import os
import pwd
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler.client.client import ANSWER_S, OUTLOOK_S, SchedulerClient
from scheduler.client.edit_needs import needs_after
from scheduler.client.overview import Overview
from scheduler.client.remote_calls import (
    CALLS,
    MEMORIES,
    READING,
    arguments_of,
    error_as_json,
    result_as_json,
)
from scheduler.core.check_spec import LONGEST_PATH, check_spec, encodable
from scheduler.core.config import Config
from scheduler.core.errors import REPORT_IT, NotFound, Refused, SchedulerError, UsageError
from scheduler.core.file_offsets import Refusal
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.job_options import EDITABLE, LONGEST_LABEL
from scheduler.core.learned_needs import Advice, advice
from scheduler.core.log_names import user_logs
from scheduler.core.model_table import ModelTable, table_from
from scheduler.core.requests import KINDS, Edit, Requeue, to_row
from scheduler.core.rights import LEAST_UID, Caller, check, check_job, may
from scheduler.core.user_limits import UserLimits
from scheduler.core.users import Users
from scheduler.daemon.user_shares import GROUPS, users_of
from scheduler.gpujobd.user_files import WatchedFile, save_watched, watched_in
from scheduler.gpujobd.visible import visible
from scheduler.intake.machine_settings import MachineFile, MachineSettings
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.seen_runs import seen_runs
from scheduler.system.typed_json import from_json, plain, to_json, typed
from scheduler.web.user_keys import new_token, tokens_file

GROUPS_S = 10.0  # how long the groups of a user are remembered
MOST_FILES = 20  # jobs files of a user
MOST_NUMBERS = 20_000  # in a request: job ids and GPUs
OTHER_VERSION = "gpujob and gpujobd are perhaps of different versions: sudo systemctl restart gpujobd"
LONGEST_ENVIRONMENT = 256 << 10  # bytes of the variables of a job
LONGEST_JOB = 128 << 10  # bytes of a job in the store: thousands of jobs are in memory at the same time
LONGEST_REQUEST = 256 << 10  # bytes of a request in the store


class LimitedClient(SchedulerClient):
    """The client of the scheduler for a user, with the limits on waiting jobs. Labels and ``@`` name the user's own jobs."""

    def __init__(self, state_file: str, calls: Calls, user: str) -> None:
        super().__init__(state_file)
        self._calls, self.user = calls, user

    def _admit(self, connection: sqlite3.Connection, spec: JobSpec) -> None:
        """Remember the groups of the user. Raise Refused if a user or group has too many waiting jobs."""
        self._note_groups(connection, spec.user, spec.uid or 0)
        self._check_waiting(connection, spec.user)

    def _note_groups(self, connection: sqlite3.Connection, user: str, uid: int) -> None:
        """Remember the groups of a user, whose limits count for the user's jobs."""
        groups: dict[str, list[str]] = json.loads(rows.meta(connection, GROUPS) or "{}")
        mine = sorted(self._calls.groups_of(uid))
        if groups.get(user) != mine:
            groups[user] = mine
            rows.set_meta(connection, GROUPS, json.dumps(groups))

    def _limits_in(self, connection: sqlite3.Connection) -> UserLimits:
        groups = json.loads(rows.meta(connection, GROUPS) or "{}")
        return UserLimits(self._calls.settings().limits, groups)

    def _check_waiting(self, connection: sqlite3.Connection, user: str, more: int = 1) -> None:
        """Raise Refused if a user may not have so many more waiting jobs."""
        limits = self._limits_in(connection)
        if not limits.by_name:
            return
        waiting = rows.waiting_by_user(connection)
        over = limits.over_waiting(user, {**waiting, user: waiting.get(user, 0) + more - 1})
        if over:
            raise Refused(over, do="wait until some have started")

    def check_retry(self, jobs: Sequence[int]) -> None:
        """Raise Refused if the owners have too many waiting jobs to run these ended ones again."""
        owners = Counter(job.spec.user for job in self.known(jobs).values() if job.state.ended)
        with self._reading() as connection:
            for user, number in owners.items():
                self._check_waiting(connection, user, number)

    def check_edit(self, jobs: Sequence[Job], needs: Sequence[tuple[int, int, str]]) -> None:
        """Raise Refused if the limits of the owners never let the jobs start with these needs."""
        with self._reading() as connection:
            limits = self._limits_in(connection)
        for job, need in zip(jobs, needs, strict=False):
            limits.check_possible(job.spec.user, ResourceRequest(*need))

    def own_lines(self) -> tuple[list[Refusal], int]:
        """Return the refused lines of the user's jobs files, and how many of their lines repeat an earlier one."""
        with self._reading() as connection:
            of = f"{self.user}:"
            return kept.refused(connection, of=of), kept.duplicates(connection, of)

    def needs_for(self, caller: Caller, table: ModelTable, *, every: bool) -> list[Advice]:
        """Return the advice on needs from the runs that a caller may see. Raises Refused. ``every``: see `needs`."""
        if every:
            check(caller, "needs", "change the model table")
        with self._reading() as connection:
            seen, gpus = seen_runs(connection), rows.gpus(connection)
        if not may(caller, "needs"):
            seen = {group: runs for group, runs in seen.items() if group.user == caller.user}
        return advice(table, seen, gpus)

    def _users(self, connection: sqlite3.Connection) -> Users:
        """Return whose turn it is, and the limits."""
        return users_of(connection, self._calls.settings(), Config(), time.time())

    def _check_limits(self, connection: sqlite3.Connection, job: Job) -> None:
        """Raise Refused if the limits of the user never let the job start."""
        self._limits_in(connection).check_possible(job.spec.user, job.need)

    def watched_by(self, caller: Caller) -> list[str]:
        """Return the jobs files of a user."""
        with self._reading() as connection:
            return [file.path for file in watched_in(connection) if file.uid == caller.uid]

    def watch_as(self, file: WatchedFile, on: bool) -> None:
        """Begin to read a jobs file, or stop reading it. Raises NotFound, Refused."""
        database = Database(self.places)
        try:
            with database.writing() as connection:
                found = watched_in(connection)
                kept = [one for one in found if one.key != file.key]
                if not on and kept == found:
                    raise NotFound("this file is not read", where=file.path, do="see gpujob watch --list")
                if on and sum(one.uid == file.uid for one in kept) >= MOST_FILES:
                    raise Refused(f"{MOST_FILES} files of yours are read already", do="gpujob watch --stop FILE")
                save_watched(connection, [*kept, file] if on else kept)
                self._note_groups(connection, file.user, file.uid)
            database.wake_daemon()
        finally:
            database.close()


class Calls:
    """The calls of users. ``environ``: names the configuration of the machine."""

    def __init__(self, state_file: str, environ: Mapping[str, str]) -> None:
        self.state_file = state_file
        self.machine = MachineFile(environ)
        self._lock = threading.Lock()
        self._callers: dict[int, tuple[float, tuple[str, ...], str]] = {}  # user id → when looked up, groups, name

    # -- who asks -----------------------------------------------------------------------------------------

    def caller_of(self, uid: int) -> Caller:
        """Return the user with this id, with the rights that the configuration gives."""
        settings = self.settings()
        with self._lock:
            at, groups, name = self._callers.get(uid, (-GROUPS_S, (), ""))
        if time.monotonic() - at >= GROUPS_S:
            groups, name = _groups_of(uid)  # may ask a server, so nobody waits for it but this user
            with self._lock:
                self._callers[uid] = (time.monotonic(), groups, name)
        admin = uid == 0 or name in settings.admins or any(f"@{group}" in settings.admins for group in groups)
        return Caller(uid, name, admin)

    @staticmethod
    def has_name(caller: Caller) -> bool:
        """Return whether the user id of a caller belongs to a user of the machine."""
        return caller.user != str(caller.uid)

    def groups_of(self, uid: int) -> tuple[str, ...]:
        """Return the names of the groups of a user, as `caller_of` has found them."""
        with self._lock:
            return self._callers[uid][1] if uid in self._callers else ()

    def settings(self) -> MachineSettings:
        """Return the configuration as the file has it now. A file with a mistake counts as empty, and hides commands."""
        with self._lock:
            found = self.machine.settings()
        return replace(found, hide_commands=True) if found.problem else found

    # -- a call -------------------------------------------------------------------------------------------

    def answer(self, uid: int, data: bytes) -> bytes:
        """Return the answer to a call of a user."""
        try:
            return to_json({"value": result_as_json(self._result(self.caller_of(uid), data))})
        except SchedulerError as error:
            told = error_as_json(error)
            if told["where"].startswith(self.state_file):  # no place of the user's
                told["where"] = ""
            return to_json({"error": told})
        except (ValueError, OverflowError, TypeError) as error:
            return to_json({"error": error_as_json(UsageError(f"the call is not valid: {error}", do=OTHER_VERSION))})
        except MemoryError:
            text = "the scheduler of this machine has no memory for the answer"
            return to_json({"error": error_as_json(SchedulerError(text, do="name fewer jobs"))})
        except OSError as error:
            text = f"the scheduler of this machine cannot do it now: {error.strerror}"
            return to_json({"error": error_as_json(SchedulerError(text))})

    def _result(self, caller: Caller, data: bytes) -> Any:
        call = from_json(data)
        name = call.get("call") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in CALLS:
            raise UsageError("unknown call", do=OTHER_VERSION)
        return self.call(caller, name, arguments_of(name, call.get("with")))

    def call(self, caller: Caller, name: str, given: dict[str, Any]) -> Any:
        """Make a call for a user, and return what the user may see of the result. Raises SchedulerError.

        ``given``: parameter → value, with the types of the parameters.
        """
        if name not in READING and not self.has_name(caller):  # one user may have many such ids (/etc/subuid)
            raise Refused(f"there is no user {caller.uid}", do="use gpujob as a user of this machine")
        for value in given.values():
            if isinstance(value, (list, tuple)) and len(value) > MOST_NUMBERS:
                raise UsageError(f"a call may name {MOST_NUMBERS} jobs at most, not {len(value)}")
        for word in (given.get("label", ""), *given.get("words", ())):
            if len(word) > LONGEST_LABEL:
                raise NotFound(f"there is no job {word[:40]!r}", do="see gpujob jobs")
        client = LimitedClient(self.state_file, self, caller.user)
        if name == "ask_for":
            return self._ask(client, caller, given)
        if name == "submit":
            return self._submit(client, caller, given)
        if name == "preview":
            return client.preview(self._spec_of(client, caller, given["spec"]), {}, self._table(client))
        if name == "needs":
            return client.needs_for(caller, self._table(client), every=given.get("every", False))
        if name == "outlook":
            given["budget_s"] = min(OUTLOOK_S, max(0.0, given.get("budget_s", OUTLOOK_S)))
        if name == "explain":
            given["by"] = caller
        if name == "new_token":
            with self._lock:
                return new_token(tokens_file(client.places), caller.uid)
        if name in ("watch", "watched"):
            return self._watch(client, caller, given) if name == "watch" else client.watched_by(caller)
        if name == "reset":
            check(caller, "reset", "forget jobs")
        if name == "remembered" and given["key"] not in MEMORIES:
            raise NotFound(f"nothing is remembered under {given['key'][:40]!r}")
        result = getattr(client, name)(**given)
        if isinstance(result, Overview) and not caller.admin:
            refused, repeated = client.own_lines()
            result = replace(result, refused=refused, repeated=repeated)
        return visible(caller, name, result, self.settings().hide_commands)

    def _ask(self, client: LimitedClient, caller: Caller, given: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
        kind = KINDS.get(given["kind"])
        if kind is None:
            raise UsageError(f"unknown request {given['kind'][:40]!r}")
        request = typed(given["arguments"], kind)
        numbers = [*getattr(request, "jobs", ()), *getattr(request, "gpus", ()), *getattr(request, "after", ())]
        if not all(0 <= number < 1 << 53 for number in numbers):
            raise UsageError("a number in the request is out of range")
        if len(numbers) > MOST_NUMBERS:
            raise UsageError(f"a request may name {MOST_NUMBERS} jobs at most, not {len(numbers)}")
        jobs = getattr(request, "jobs", ())
        if len(set(jobs)) != len(jobs):
            raise UsageError("the request names a job twice")
        if len(to_json(given["arguments"])) > LONGEST_REQUEST:
            raise UsageError(f"the request is too long: at most {LONGEST_REQUEST} bytes are possible")
        if isinstance(request, Requeue):
            client.check_retry(request.jobs)
        if isinstance(request, Edit):
            request = self._checked_edit(client, caller, request)
        wait_s = min(max(0.0, given.get("wait_s", ANSWER_S)), 30.0)
        code, lines = client.ask_for(*to_row(request), wait_s=wait_s, by=caller)
        if not caller.admin:  # such a text may be about a job of another user
            lines = tuple(f"{REPORT_IT}: see gpujob system status" if REPORT_IT in line else line for line in lines)
        return code, lines

    def _checked_edit(self, client: LimitedClient, caller: Caller, request: Edit) -> Edit:
        """Return the edit with typed changes, and with needs that are computed here. Raises SchedulerError."""
        if not set(request.changes) <= set(EDITABLE):
            raise UsageError("such a change is not possible")
        _check_job(changed_spec(JobSpec(arguments=("x",)), request.changes))
        parents = [*changed_spec(JobSpec(), request.changes).after, *changed_spec(JobSpec(), request.changes).after_ok]
        if len(request.jobs) * len(parents) > MOST_NUMBERS:
            raise UsageError(
                f"the request has {len(request.jobs) * len(parents)} dependencies; {MOST_NUMBERS} are possible"
            )
        found = client.states(request.jobs)
        for job in found:
            check_job(caller, "edit", job)
            _check_job(changed_spec(job.spec, request.changes))
        changes = {name: getattr(changed_spec(JobSpec(), request.changes), name) for name in request.changes}
        needs = needs_after(found, changes, lambda: self._table(client), client.gpus)
        client.check_edit(found, needs)
        return Edit(request.jobs, changes, needs)

    def _table(self, client: SchedulerClient) -> ModelTable:
        noted = client.remembered("model_table")
        return client.learned_table(table_from(json.loads(noted), "the model table") if noted else ModelTable())

    def _watch(self, client: LimitedClient, caller: Caller, given: dict[str, Any]) -> None:
        _check_person(caller)
        file = WatchedFile(caller.uid, caller.user, given["path"], given["home"])
        for path in (file.path, file.home):
            if not path.startswith("/") or "\0" in path or len(path) > LONGEST_PATH:
                raise UsageError(f"{path[:40]!r} is not an absolute path")
            if not path.isprintable():
                raise UsageError(f"{path[:40]!r} has characters that cannot be shown", do="rename the file")
        client.watch_as(file, given["on"])

    def _submit(self, client: SchedulerClient, caller: Caller, given: dict[str, Any]) -> Job:
        spec = self._spec_of(client, caller, given["spec"])
        if not spec.log_dir and spec.output != "none":
            spec = replace(spec, log_dir=user_logs(_home_of(caller.uid)))
        return client.submit(
            spec, _checked_environment(given["environment"]), self._table(client),
            forgiving=given.get("forgiving", False), most=given.get("most"),
        )  # fmt: skip

    def _spec_of(self, client: SchedulerClient, caller: Caller, spec: JobSpec) -> JobSpec:
        """Return the job of a caller with what the kernel tells of the caller. Raises SchedulerError if it is not possible."""
        _check_person(caller)
        spec = replace(spec, uid=caller.uid, user=caller.user, env_file="")
        _check_job(spec)
        if not spec.cwd:
            raise UsageError("the job has no working folder")
        for parent in client.known([*spec.after, *spec.after_ok]).values():
            check_job(caller, "depend", parent)
        if spec.on and not may(caller, "by_name"):
            raise Refused(
                "only an administrator may submit a job that takes GPUs beside all other jobs (on=)",
                do="name the allowed GPUs with --allowed",
            )
        return spec


def changed_spec(spec: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """Return a spec with changes that another process sent. Raises ValueError if a value has a wrong type."""
    found: JobSpec = typed({**dataclasses.asdict(spec), **changes}, JobSpec)
    return found


def _groups_of(uid: int) -> tuple[tuple[str, ...], str]:
    """Return the names of the groups of a user, and the name of the user; the id as text if the user has no name."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return (), str(uid)
    names = []
    for gid in os.getgrouplist(user.pw_name, user.pw_gid):
        with contextlib.suppress(KeyError):
            names.append(grp.getgrgid(gid).gr_name)
    return tuple(names), user.pw_name


def _home_of(uid: int) -> str:
    """Return the home folder of a user. Raises Refused if there is no such user."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        raise Refused(f"there is no user {uid}", do="name a folder for the log: --log-dir") from None


def _checked_environment(environment: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the variables of a job; None: those of the user's agent. Raises UsageError if a variable is not possible."""
    size = sum(len(name) + len(value) for name, value in (environment or {}).items())
    if size > LONGEST_ENVIRONMENT:
        raise UsageError(f"the variables of the job have {size} bytes; {LONGEST_ENVIRONMENT} are possible")
    for name, value in (environment or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value or not encodable(name + value):
            raise UsageError(f"{name[:40]!r} cannot be a variable of the job")
    return environment


def _check_job(spec: JobSpec) -> None:
    """Raise UsageError if a spec has a value that is not possible, or is too large."""
    check_spec(spec)
    size = len(to_json(plain(spec)))
    if size > LONGEST_JOB:
        raise UsageError(f"the job has {size} bytes; {LONGEST_JOB} are possible")


def _check_person(caller: Caller) -> None:
    """Raise Refused for root and for users of programs: nobody runs jobs as them."""
    if caller.uid < LEAST_UID or caller.uid == os.getuid():
        raise Refused(
            f"user {caller.user} runs no jobs in the scheduler of all users", do="submit as the user whose job it is"
        )
