"""Reads the model table, and the settings from command line, environment and config file, each with its origin."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.core.config import OPTIONS, PATHS, Config, config_from, defaults, read_option
from scheduler.core.errors import STATE_FILE, SchedulerError, UsageError, nearest, raise_all, said
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.model_table import ModelTable, table_from
from scheduler.intake.config_file import read_entries
from scheduler.intake.tail import cannot_be_read, check_places, places_of, read_private

PREFIX = "GPUJOB_SET_"
FLAG = "command line"
DEFAULT = "default"
LARGEST_TABLE = 4 << 20
# Defaults that differ in `gpujob run`: they are those of the dispatcher script that this command replaces.
DISPATCHER = {
    "commands_file": "commands.txt",
    "journal": "jobs.jsonl",
    "log_dir": "logs",
    "poll_interval": 60.0,
    "min_free_mem_mb": 6000,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one scheduler. ``origin``: key → where its value comes from.

    An origin is `command line`, the name of an environment variable, `FILE:LINE`, `default`, or a short explanation.
    ``config_file``: path of the config file; empty if none was read.
    """

    config: Config
    origin: Mapping[str, str]
    config_file: str = ""
    dispatcher: bool = False  # True: with the defaults of `gpujob run`
    others: tuple[str, ...] = ()  # keys of the config file that are no settings of a scheduler


class _Gathering:
    """Collects settings from several sources, and all mistakes in them. A source of a higher rank has precedence.

    ``level``: key → rank of the source of its present value. The ranks are: 0 default, 1 config file, 2 variable
    GPUJOB_SET_…, 3 variable GPUJOB_STATE_FILE, 4 command line.
    """

    def __init__(self, here: str, others: tuple[str, ...] = ()) -> None:
        self.here, self.others = here, others
        self.values, self.origin = defaults(), dict.fromkeys(OPTIONS, DEFAULT)
        self.level = dict.fromkeys(OPTIONS, 0)
        self.errors: list[SchedulerError] = []

    def take(self, key: str, value: Any, level: int, origin: str, folder: str, *, where: str, named: bool) -> None:
        """Set one value. If the value is wrong, append the error to ``errors`` instead.

        ``folder``: folder where a relative path starts; ``where``: place of the value, named in the error.
        """
        try:
            typed = read_option(key, value, where, named=named)
        except UsageError as error:
            self.errors.append(error)
            return
        if typed and (key in PATHS or (key == "python" and "/" in typed)):
            typed = _absolute(typed, folder)
        self.values[key], self.origin[key], self.level[key] = typed, origin, level

    def config(self, path: str) -> None:
        """Apply the values of a config file. A key keeps its value if a source of a higher rank has set it.

        If the file names a key but gives no value (``key:`` or null), the key keeps its default.
        """
        told = self.values["trust_group"] if self.level["trust_group"] else False
        try:
            entries, errors = read_entries(path, bool(told), self.others)
        except SchedulerError as error:
            self.errors.append(error)
            return
        before, self.errors = self.errors, errors
        for key, entry in entries.items():
            origin = f"{path}:{entry.line}"
            if self.level[key]:
                self._only_check(key, entry.value, origin)  # overruled, but a mistake is reported
            elif entry.value is None:
                self.origin[key] = origin
            else:
                self.take(key, entry.value, 1, origin, os.path.dirname(path), where=origin, named=False)
        self.errors = before + sorted(self.errors, key=lambda error: int(error.where.rpartition(":")[2]))

    def _only_check(self, key: str, value: Any, where: str) -> None:
        try:
            if value is not None:
                read_option(key, value, where)
        except UsageError as error:
            self.errors.append(error)

    def variables(self, environ: Mapping[str, str]) -> None:
        """Apply the environment variables GPUJOB_SET_… and GPUJOB_STATE_FILE. An unknown GPUJOB_SET_… is a mistake."""
        known = {PREFIX + key.upper(): key for key in OPTIONS}
        for variable, text in sorted(environ.items()):
            if variable in known:
                where = f"environment variable {variable}"
                self.take(known[variable], text, 2, variable, self.here, where=where, named=True)
            elif variable.startswith(PREFIX):
                near = nearest(variable.upper(), known)
                do = f"did you mean {near}?" if near else f"known: {PREFIX}… with {', '.join(sorted(OPTIONS))}"
                self.errors.append(UsageError("unknown setting", where=variable, do=do))
        if environ.get("GPUJOB_STATE_FILE"):
            self.take("state_file", environ["GPUJOB_STATE_FILE"], 3, "GPUJOB_STATE_FILE", self.here,
                      where="GPUJOB_STATE_FILE", named=True)  # fmt: skip

    def flags(self, flags: Mapping[str, Any]) -> None:
        """Apply the options of the command line."""
        for key, value in flags.items():
            self.take(key, value, 4, FLAG, self.here, where=_flag(key), named=True)

    def dispatch(self) -> None:
        """Apply the rules of `gpujob run`: ``jobs_file`` is the journal's path, and some keys have other defaults."""
        said = self.level["jobs_file"] > 0
        if said or not self.level["journal"]:
            self.values["journal"], self.origin["journal"] = self.values["jobs_file"], self.origin["jobs_file"]
            self.level["journal"] = self.level["jobs_file"]
        self.values["jobs_file"], self.origin["jobs_file"] = "", "not used by gpujob run, which reads a commands file"
        for key, value in DISPATCHER.items():
            if not self.level[key]:
                self.values[key], self.origin[key] = value, f"{DEFAULT} of gpujob run"

    def settle_gpus(self) -> None:
        """If `gpus` and `gpu_ids` contradict each other, drop the value whose source has the lower rank.

        If the sources of both values have the same rank, the contradiction is a mistake.
        """
        ids, number = self.values["gpu_ids"], self.values["gpus"]
        if ids is None or number is None or len(ids) == number:
            return
        if self.level["gpus"] == self.level["gpu_ids"]:
            first, second = (self._said(key) for key in ("gpus", "gpu_ids"))
            text = f"{first} {number} and {second} {gpu_ids_text(ids)} contradict each other"
            where = self.origin["gpus"] if self.level["gpus"] == 1 else ""
            self.errors.append(UsageError(text, where=where, do="leave one of them out"))
            return
        weak, strong = sorted(("gpus", "gpu_ids"), key=self.level.__getitem__)
        self.values[weak], self.origin[weak] = None, f"overridden by {strong} ({self.origin[strong]})"

    def _said(self, key: str) -> str:
        return {1: f"{key}:", 2: PREFIX + key.upper(), 4: _flag(key)}[self.level[key]]


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config_file: str | None = None,
    folder: str | None = None,
    *,
    dispatcher: bool = False,
    others: tuple[str, ...] = (),
) -> Settings:
    """Return the settings. Sources in order of precedence: command line, variables, config file, defaults.

    ``flags``: options that were given on the command line. ``dispatcher``: whether the rules of `gpujob run` apply:
    some defaults differ, and ``jobs_file`` names the journal. ``others``: see `Settings`.

    A relative path from a flag or variable starts at ``folder`` (None: the current folder). A relative path from the
    config file starts at the folder of the config file, and a default path starts at the folder of the state file.
    Raises UsageError for one mistake, Mistakes for several mistakes, and FileTrouble if other users could write the
    config file.
    """
    here = folder or os.getcwd()
    found = _Gathering(here, others)
    found.variables(environ)
    found.flags(flags)
    path = ""
    try:
        path = find_config(environ, config_file, here)
    except UsageError as error:
        found.errors.append(error)
    if path:
        found.config(path)
    if dispatcher:
        found.dispatch()
    return _settled(found, path, dispatcher)


def _settled(found: _Gathering, path: str, dispatcher: bool = False) -> Settings:
    found.settle_gpus()
    raise_all(found.errors)
    values = found.values
    values["state_file"] = _absolute(values["state_file"], found.here)
    check_no_folder(values["state_file"], found.origin["state_file"])
    beside = os.path.dirname(values["state_file"])
    for key in PATHS:
        if values[key]:
            values[key] = _absolute(values[key], beside)
            _check_encoding(key, values[key])
    return Settings(config_from(values), found.origin, path, dispatcher, found.others)


def without_config(flags: Mapping[str, Any], folder: str | None = None) -> Settings:
    """Return the settings from flags and defaults only.

    Commands use this function if they must work even if the config file cannot be read.
    """
    found = _Gathering(folder or os.getcwd())
    found.flags(flags)
    return _settled(found, "")


def named_state_file(
    environ: Mapping[str, str], config_file: str | None, folder: str
) -> tuple[str, SchedulerError | None]:
    """Return the path of the state file that the environment or the config file names, and the error in the settings.

    The path is empty if neither the environment nor the config file names a state file. The error is None if all
    settings are valid. If only other settings are wrong, the path is returned together with the error. Raises
    UsageError if the path cannot be determined.
    """
    try:
        settings = load({}, environ, config_file, folder)
    except SchedulerError as error:
        trouble = error
    else:
        return ("" if settings.origin["state_file"] == DEFAULT else settings.config.state_file), None
    found = _Gathering(folder)
    found.variables({key: text for key, text in environ.items() if key in ("GPUJOB_STATE_FILE", f"{PREFIX}STATE_FILE")})
    if not found.level["state_file"]:
        raise_all(found.errors)
        path, trusting = "", _Gathering(folder)
        trusting.variables(environ)
        try:
            path = find_config(environ, config_file, folder)
            entries, errors = read_entries(path, bool(trusting.values["trust_group"])) if path else ({}, [])
        except SchedulerError as error:
            if config_file and not os.path.lexists(_absolute(config_file, folder)):
                raise
            if isinstance(error, UsageError) and _names_a_state_file(path):
                raise UsageError(
                    error.what, where=error.where, do="fix it, or name the scheduler with --state-file"
                ) from None
            return "", trouble
        found.errors += [error for error in errors if error.code == STATE_FILE]
        entry = entries.get("state_file")
        if entry is not None and entry.value is not None:
            where = f"{path}:{entry.line}"
            found.take("state_file", entry.value, 1, where, os.path.dirname(path), where=where, named=False)
        raise_all(found.errors)
    return (found.values["state_file"] if found.level["state_file"] else ""), trouble


def _names_a_state_file(path: str) -> bool:
    """Return whether an invalid config file seems to set `state_file`.

    If so, the path of the state file is unknown, because the file cannot be parsed.
    """
    try:
        return re.search(rb"(?m)^\W*state_file\W*:", read_private(path, LARGEST_TABLE)) is not None
    except (OSError, SchedulerError):
        return False


def find_config(environ: Mapping[str, str], named: str | None, folder: str) -> str:
    """Return the path of the config file; empty if there is none.

    If ``named`` or else $GPUJOB_CONFIG gives a path, the result is this path. Raises UsageError if this file does not
    exist. Without such a path, the result is ./config.yaml, or else the user's config file.
    """
    variable = environ.get("GPUJOB_CONFIG")
    if named or variable:
        path = _absolute(named or variable or "", folder)
        if not os.path.lexists(path):
            do = "name another file with --config" if named else "correct or unset GPUJOB_CONFIG"
            raise UsageError("no such config file", where=path, do=do)
        return path
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    for path in (os.path.join(folder, "config.yaml"), os.path.join(home, "gpujob", "config.yaml")):
        if os.path.lexists(path):
            return path
    return ""


def check_no_folder(state_file: str, where: str) -> None:
    """Raise UsageError if the path of the state file names a folder. ``where``: origin of the setting."""
    if os.path.isdir(state_file):
        named = os.path.join(state_file, "gpu_scheduler_state.json")
        raise UsageError(f"state_file: {state_file} is a folder", where=where, do=f"name the file in it: {named}")


def _check_encoding(key: str, path: str) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UsageError(f"{key}: the path {shown} is not UTF-8", do="use another folder or name") from None


def _absolute(path: str, folder: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))


def model_table(path: str, trust_group: bool = False, *, needed: bool = False) -> ModelTable:
    """Return the model table at ``path``. If there is no file, return an empty table: each model then needs one GPU.

    ``needed``: whether a missing file is an error. Raises UsageError if the file is no valid model table (Mistakes
    if there are several mistakes), and FileTrouble if other users could write the file. The errors name the lines.
    """
    data = table_bytes(path, trust_group, needed=needed) if path else None
    return ModelTable() if data is None else table_in(data, path)


def table_bytes(path: str, trust_group: bool = False, *, needed: bool = False) -> bytes | None:
    """Return the contents of the model table at ``path``; None if there is no file. Raises as `model_table` does."""
    try:
        data, places = read_private(path, LARGEST_TABLE + 1, trust_group), places_of(path)
        check_places(path, places, trust_group)
    except FileNotFoundError:
        if needed or os.path.islink(path):
            raise UsageError("no such model table", where=path) from None
        return None
    except OSError as error:
        raise cannot_be_read(error, path) from None
    return data


def table_in(data: bytes, path: str) -> ModelTable:
    """Return the model table in the contents of the file ``path``. Raises UsageError, Mistakes; they name the lines."""
    if len(data) > LARGEST_TABLE:
        raise UsageError(f"larger than {LARGEST_TABLE >> 20} MiB, so it is not read as a model table", where=path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError("not UTF-8", where=f"{path}:{line}", do="save it as UTF-8") from None

    def place(key: str) -> str:
        found = [match.start() for match in re.finditer(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)]
        return f"{path}:{text.count(chr(10), 0, found[-1]) + 1}" if found else path

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise UsageError(f"duplicate key {said(key)}", where=place(key), do="keep one of them")
            made[key] = value
        return made

    def no_number(word: str) -> Any:
        found = re.search(rf"[:\[,\s]{re.escape(word)}\b", text)
        line = text.count("\n", 0, found.start() + 1) + 1 if found else 1
        raise UsageError(f"{word} is not a JSON number", where=f"{path}:{line}", do="write a number such as 0.5")

    try:
        value = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from None
    except RecursionError:
        raise UsageError("nested too deeply", where=path) from None
    except ValueError:  # int() refuses such a number
        raise UsageError("a number has thousands of digits", where=path, do="write 0.5, 1 or 2") from None
    return table_from(value, path, place)
