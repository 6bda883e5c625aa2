"""The verbs `config show` (all settings and their origins) and `config check` (mistakes in the settings)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from scheduler.client.client import SCHEMA
from scheduler.client.locate import client_of, own_state_file_for, settings_for
from scheduler.core.config import OPTIONS, RELOADABLE, written
from scheduler.core.errors import SchedulerError, UsageError, raise_all
from scheduler.intake.machine_settings import OTHERS, machine_file, machine_settings
from scheduler.intake.settings import Settings, find_config, load, model_table
from scheduler.views import render


def show(*, origin: bool = False, json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Print every setting as a line of YAML, or all settings as one JSON document, and return the exit code 0.

    ``origin``: at the end of each line, a comment says where the value comes from. If the running scheduler uses
    another value of a setting, a comment shows that value (with or without ``origin``). Raises SchedulerError.
    """
    settings = settings_for({"state_file": state_file} if state_file else {}, config)
    found = own_state_file_for(
        state_file, config, "the settings of the scheduler of all users: /etc/gpujob/config.yaml"
    )
    if found != settings.config.state_file:  # found as the only running scheduler; no flag, variable or config names it
        settings = settings_for({"state_file": found}, config)
        settings = replace(settings, origin={**settings.origin, "state_file": "the only scheduler running"})
    client = client_of(found)
    running = {key: pair for key, pair in client.settings().items() if key in OPTIONS}
    if json:
        render.print_json(_json(settings, running, client.alive()))
    else:
        print("\n".join(_lines(settings, running, origin)))
    return 0


def _json(settings: Settings, running: dict[str, tuple[Any, str]], alive: bool) -> dict[str, Any]:
    options = {
        key: {
            "value": value,
            "origin": settings.origin[key],
            "default": OPTIONS[key].default,
            "reload": key in RELOADABLE,
            "running": {"value": running[key][0], "origin": running[key][1]} if key in running else None,
        }
        for key, value in settings.config.policy_values().items()
    }
    return {"schema": SCHEMA, "config_file": settings.config_file or None, "daemon": alive, "settings": options}


def _lines(settings: Settings, running: dict[str, tuple[Any, str]], origin: bool) -> list[str]:
    """Return lines of YAML that can be saved as a config file.

    With ``origin``, comments show where each value comes from. If the running scheduler uses another value of a
    setting, a comment shows that value.
    """
    values = {key: f"{key}: {written(value)}" for key, value in settings.config.policy_values().items()}
    width = min(60, max(map(len, values.values())))
    lines = []
    for key, line in values.items():
        notes = [settings.origin[key]] if origin else []
        if key in running and written(running[key][0]) != written(getattr(settings.config, key)):
            value, whence = running[key]
            until = "" if key in RELOADABLE else ", until it is restarted"
            notes.append(f"the running scheduler uses {written(value)} ({whence}{until})")
        note = render.safe("; ".join(notes))
        lines.append(f"{line:<{width}}  # {note}" if note else line)
    return lines


def check(file: str = "", *, state_file: str | None = None, config: str | None = None) -> int:
    """Check settings, print the result, and return the exit code 0.

    With ``file``, only this config file is checked. Otherwise all settings that `start` would read are checked, and the
    model table. Raises SchedulerError if there is a mistake. Several mistakes are raised together, as Mistakes.
    """
    named = file or config
    path = find_config({} if file else os.environ, named, os.getcwd())
    errors: list[SchedulerError] = []
    settings: Settings | None = None
    try:
        settings = load(
            {"state_file": state_file} if state_file else {}, _trust_only() if file else os.environ, named,
            others=OTHERS if file and os.path.abspath(file) == machine_file(os.environ) else (),
        )  # fmt: skip
    except SchedulerError as error:
        errors.append(error)
    if settings is not None and not file:
        try:
            model_table(settings.config.llm_config, settings.config.trust_group)
        except SchedulerError as error:
            errors.append(error)
    machine = machine_file(os.environ)
    if not file or os.path.abspath(file) == machine:
        errors += _mistakes_of_machine(machine, checked=bool(file))
    raise_all(errors)
    said = sum(1 for origin in settings.origin.values() if path and origin.startswith(f"{path}:")) if settings else 0
    if not file:
        if os.path.exists(machine):
            print(f"the settings of the machine: {render.safe(machine)}: no mistakes")
    print(
        f"{render.safe(path)}: no mistakes, {said} setting{'' if said == 1 else 's'}"
        if path
        else "no mistakes; there is no config file"
    )
    return 0


def _mistakes_of_machine(path: str, *, checked: bool) -> list[SchedulerError]:
    """Return the mistakes in the settings of the machine. ``checked``: the caller has loaded this file as a config file."""
    found: list[SchedulerError] = []
    if problem := machine_settings(os.environ).problem:
        found.append(UsageError(problem))
    if not found and not checked and os.path.exists(path):
        try:
            load({}, {}, path, others=OTHERS)
        except SchedulerError as error:
            found.append(error)
    return found


def _trust_only() -> dict[str, str]:
    """Return only GPUJOB_SET_TRUST_GROUP from the environment, if it is set.

    `config check FILE` judges the file alone, and only this variable decides whether the file may be read at all.
    """
    name = "GPUJOB_SET_TRUST_GROUP"
    return {name: os.environ[name]} if name in os.environ else {}
