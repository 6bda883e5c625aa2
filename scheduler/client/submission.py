"""Builds a JobSpec from command words, option texts, folder and environment, for `submit` and for the HTTP API."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import settings_if_readable
from scheduler.core.command_limits import LONGEST_WORD
from scheduler.core.config import Config
from scheduler.core.errors import FileTrouble, SchedulerError, UsageError, flag
from scheduler.core.job import JobSpec
from scheduler.core.job_options import (
    JOB_OPTIONS,
    PATH_FIELDS,
    Named,
    allowed_gpus,
    check_launch,
    check_utf8,
    read_options,
)
from scheduler.core.model_table import ModelTable, table_from
from scheduler.environments.discovery import program_in
from scheduler.intake.settings import model_table

Read = TypeVar("Read")

Shell = Callable[[str], str]  # shell text → the command that submits it
_SHELL = frozenset(" \t\n;|&<>()$`\"'*?")


def _print_nothing(text: str) -> None:
    """Ignore a warning, because the scheduler reports the same problem."""


def in_terminal(text: str) -> str:
    """Return the gpujob command that submits the shell text ``text``, as a user types it in a terminal."""
    return f"gpujob submit -- sh -c {shlex.quote(text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The input of a submission. Its relative paths are relative to ``folder``.

    ``options``: name of an option (`core/job_options.py: SUBMIT_OPTIONS`) → its text, empty if the option is not given.
    ``env``: NAME=VALUE texts, which override ``environ``. If ``umask`` is None, the job gets the scheduler's umask. If
    ``limits`` is empty, the job gets the scheduler's limits.
    """

    command: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    options: Mapping[str, str]
    env: Sequence[str] = ()
    umask: int | None = None
    limits: tuple[tuple[int, int, int], ...] = ()


def spec_of(given: Submission, named: Named = flag, shell: Shell = in_terminal) -> tuple[JobSpec, dict[str, str]]:
    """Return the JobSpec of a submission and the job's environment. Raises UsageError, Refused.

    ``named``: returns the name of an option for error messages. ``shell``: returns the command that submits a shell
    text; an error message proposes this command to the user.
    """
    command = list(given.command)
    if not command:
        raise UsageError("the command is missing", where=named("command"))
    if not command[0]:
        raise UsageError("the name of the program is empty", where=named("command"))
    values = read_options(given.options, named)
    environment = dict(given.environ)
    for item in given.env:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UsageError(f"{item!r} is not NAME=VALUE", where=named("env"))
        if len(os.fsencode(item)) > LONGEST_WORD:
            raise UsageError(f"the variable {name} is too long ({len(value)} characters)", where=named("env"),
                             do=f"the kernel accepts at most {LONGEST_WORD} bytes per variable")  # fmt: skip
        environment[name] = value
    for name in PATH_FIELDS.intersection(values):
        if name != "conda_env" or "/" in values[name]:  # without a slash it is the name of an environment
            values[name] = _path(given.folder, values[name])
    for option in ("log_dir", "conda"):  # stored as text; only `cwd` may contain arbitrary bytes
        check_utf8(values.get(JOB_OPTIONS[option].field, ""), named(option))
    folder = values.pop("cwd", given.folder)
    script = ""
    if values.get("launch"):
        check_utf8(command[0], named("launch"))
        script, command = os.path.normpath(os.path.join(folder, command[0])), command[1:]
    else:
        _check_program(command, folder, environment.get("PATH", os.defpath), shell)
    values["allowed"] = allowed_gpus(values)
    spec = JobSpec(
        source="submit", script=script, arguments=tuple(command), cwd=folder, umask=given.umask, limits=given.limits, **values
    )  # fmt: skip
    check_launch(spec)
    return spec, environment


def table_for(
    spec: JobSpec, client: SchedulerClient, config: str | None, warn: Callable[[str], None] = _print_nothing
) -> ModelTable:
    """Return the model table for a job.

    If the job names its GPU need, the table is not needed: return an empty table without reading the file. Otherwise
    return the result of `model_table_for`.
    """
    return ModelTable() if spec.gpus else model_table_for(client, config, warn)


def model_table_for(
    client: SchedulerClient, config: str | None, warn: Callable[[str], None] = _print_nothing
) -> ModelTable:
    """Return the model table. If its file cannot be read, return the last good table of the running scheduler.

    If the last good table is returned, ``warn`` is called with a message. If there is no last good table, the error of
    `model_table` is raised.
    """
    if client.shared:
        return ModelTable()  # the scheduler uses its own table
    path = client.remembered("llm_config") or settings_of(client, config).llm_config
    noted = client.remembered("model_table") if client.alive() else ""
    in_force = table_from(json.loads(noted), path) if noted else None
    needed = in_force not in (None, ModelTable())  # a missing file is an error if a table is in force
    try:
        return trusting(client, config, lambda trust: model_table(path, trust, needed=needed))
    except SchedulerError as error:
        if in_force is None:
            raise
        warn(f"{error}; the previous model table stays in force")
        return in_force


def trusting(client: SchedulerClient, config: str | None, look: Callable[[bool], Read]) -> Read:
    """Call ``look``, which reads a file, and return its result.

    The argument of ``look`` is True if a file that the user's group can write is accepted. The first call is
    ``look(False)``. If this call raises FileTrouble, ``look`` is called again with the value of the setting
    `trust_group`. An error of the second call is raised to the caller.
    """
    try:
        return look(False)
    except FileTrouble:
        noted = client.settings()
        return look(
            bool(noted["trust_group"][0] if "trust_group" in noted else settings_of(client, config).trust_group)
        )


def settings_of(client: SchedulerClient, config: str | None) -> Config:
    """Return the settings of this scheduler. If they cannot be read, print the error on stderr and return defaults."""
    return settings_if_readable({"state_file": client.places.state_file}, config).config


def _path(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))


def _check_program(command: list[str], folder: str, path: str, shell: Shell) -> None:
    """Raise UsageError if the program's name has characters of shell syntax and there is no program of this name."""
    name = command[0]
    if not _SHELL.intersection(name):
        return
    there = os.path.exists(os.path.join(folder, name)) if "/" in name else program_in(path, name)
    if not there:
        text = " ".join([name, *map(shlex.quote, command[1:])])
        raise UsageError(f"cannot find a program {name!r}", do=f"to run shell text, write: {shell(text)}")
