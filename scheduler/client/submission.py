"""From what a submitter gives (words, options as texts, folder, environment) to a JobSpec: for `submit` and for the page."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence

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

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import TypeVar

    Read = TypeVar("Read")
else:
    from scheduler.core.quick_dataclass import dataclass

Shell = Callable[[str], str]  # a shell's text → how to submit it
_SHELL = frozenset(" \t\n;|&<>()$`\"'*?")


def _not_said(text: str) -> None:
    """The scheduler says it, too."""


def in_terminal(text: str) -> str:
    """How a shell's text is submitted there."""
    return f"gpujob submit -- sh -c {shlex.quote(text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What is to be submitted. Relative paths in it are meant from ``folder``.

    ``options``: texts by the names of `core/job_options.py: SUBMIT_OPTIONS`, an empty one was not given; ``env``: NAME=VALUE over
    ``environ``. ``umask`` None and no ``limits``: those of the scheduler.
    """

    command: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    options: Mapping[str, str]
    env: Sequence[str] = ()
    umask: int | None = None
    limits: tuple[tuple[int, int, int], ...] = ()


def spec_of(given: Submission, named: Named = flag, shell: Shell = in_terminal) -> tuple[JobSpec, dict[str, str]]:
    """The job that is meant, and its environment. Raises UsageError, Refused, which call options by ``named``."""
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
            raise UsageError(f"{name}= has {len(value)} characters", where=named("env"),
                             do=f"the kernel takes {LONGEST_WORD} bytes a variable")  # fmt: skip
        environment[name] = value
    for name in PATH_FIELDS.intersection(values):
        if name != "conda_env" or "/" in values[name]:  # else an environment's name
            values[name] = _path(given.folder, values[name])
    for option in ("log_dir", "conda"):  # a path is text in the store; only the folder of a job may be any bytes
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
    spec: JobSpec, client: SchedulerClient, config: str | None, warn: Callable[[str], None] = _not_said
) -> ModelTable:
    """The model table, as far as this job's need is asked of it: one that cannot be read matters only then."""
    return ModelTable() if spec.gpus else model_table_for(client, config, warn)


def model_table_for(client: SchedulerClient, config: str | None, warn: Callable[[str], None] = _not_said) -> ModelTable:
    """The model table. While a scheduler runs and the file cannot be read, it is the last good one, as for lines of the jobs file.

    ``warn`` is told so. Raises what `model_table` raises.
    """
    path = client.remembered("llm_config") or settings_of(client, config).llm_config
    noted = client.remembered("model_table") if client.alive() else ""
    in_force = table_from(json.loads(noted), path) if noted else None
    needed = in_force not in (None, ModelTable())  # one that was there is not taken for none when it is gone
    try:
        return trusting(client, config, lambda trust: model_table(path, trust, needed=needed))
    except SchedulerError as error:
        if in_force is None:
            raise
        warn(f"{error}; the last good model table stays in force")
        return in_force


def trusting(client: SchedulerClient, config: str | None, look: Callable[[bool], Read]) -> Read:
    """Read a file that nobody else could write; only if its group could, the settings are asked whether it may."""
    try:
        return look(False)
    except FileTrouble:
        noted = client.settings()
        return look(
            bool(noted["trust_group"][0] if "trust_group" in noted else settings_of(client, config).trust_group)
        )


def settings_of(client: SchedulerClient, config: str | None) -> Config:
    """The settings by file and defaults; what is wrong with the file is said."""
    return settings_if_readable({"state_file": client.places.state_file}, config).config


def _path(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))


def _check_program(command: list[str], folder: str, path: str, shell: Shell) -> None:
    """Refuse a shell text that was meant for a shell, unless a program is really called so. Raises UsageError."""
    name = command[0]
    if not _SHELL.intersection(name):
        return
    there = os.path.exists(os.path.join(folder, name)) if "/" in name else program_in(path, name)
    if not there:
        text = " ".join([name, *map(shlex.quote, command[1:])])
        raise UsageError(f"there is no program {name!r}", do=f"to run shell text write: {shell(text)}")
