"""Config files, environment variables and the model table → typed settings, each with where it came from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.core.config import OPTIONS, PATHS, Config, config_from, defaults, read_option
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.llm import ModelTable, table_from
from scheduler.intake.files import check_private, read_plain

PREFIX = "GPUJOB_SET_"
LARGEST = 4 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The config of one scheduler and, for each key, where its value came from."""

    config: Config
    origin: Mapping[str, str]
    config_file: str = ""


def load(
    flags: Mapping[str, Any], environ: Mapping[str, str], config_file: str | None = None, folder: str | None = None
) -> Settings:
    """Settings by flag > environment > config file > default.

    ``flags`` holds only what was given on the command line. Relative paths: of flags and the environment, the
    current folder; of the config file, its folder; defaults, the state file's folder. Raises UsageError.
    """
    here = folder or os.getcwd()
    values, origin = defaults(), dict.fromkeys(OPTIONS, "default")
    path = find_config(environ, config_file, here)
    if path:
        for key, value in read_config(path, trust_group=False).items():
            typed = read_option(key, value, path)
            if key in PATHS and typed:
                typed = _absolute(typed, os.path.dirname(path))
            values[key], origin[key] = typed, path
    for variable, text in environ.items():
        if variable.startswith(PREFIX):
            key = variable[len(PREFIX) :].lower()
            typed = read_option(key, text, f"environment variable {variable}")
            values[key], origin[key] = _absolute(typed, here) if key in PATHS and typed else typed, variable
    if environ.get("GPUJOB_STATE_FILE") and "state_file" not in flags:
        values["state_file"], origin["state_file"] = _absolute(environ["GPUJOB_STATE_FILE"], here), "GPUJOB_STATE_FILE"
    for key, value in flags.items():
        typed = read_option(key, value, f"--{key.replace('_', '-')}")
        values[key], origin[key] = _absolute(typed, here) if key in PATHS and typed else typed, "command line"
    values["state_file"] = _absolute(values["state_file"], here)
    beside = os.path.dirname(values["state_file"])
    for key in PATHS:
        if values[key]:
            values[key] = _absolute(values[key], beside)
            _check_encoding(key, values[key])
    return Settings(config_from(values), origin, path)


def find_config(environ: Mapping[str, str], named: str | None, folder: str) -> str:
    """The config file to read: named, GPUJOB_CONFIG, ./config.yaml, the user's; empty if there is none."""
    named = named or environ.get("GPUJOB_CONFIG")
    if named:
        path = _absolute(named, folder)
        if not os.path.exists(path):
            raise UsageError("no such config file", where=path, do="name another with --config")
        return path
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    for path in (os.path.join(folder, "config.yaml"), os.path.join(home, "gpujob", "config.yaml")):
        if os.path.isfile(path):
            return path
    return ""


def read_config(path: str, trust_group: bool) -> dict[str, Any]:
    """The mapping in a YAML file that only we can write. Raises UsageError with file and line."""
    import yaml

    try:
        status = os.stat(path)
        text = read_plain(path, LARGEST).decode("utf-8")
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=path) from None
    except RecursionError:
        raise UsageError("nested too deeply", where=path) from None
    except (ValueError, OverflowError) as error:  # a date such as 2024-13-45
        raise UsageError(f"holds a value that cannot be read: {error}", where=path, do="quote it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"not YAML: {getattr(error, 'problem', error)}", where=where) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UsageError("must hold `key: value` lines", where=path)
    try:
        check_private(path, status, trust_group or data.get("trust_group") is True)
    except SchedulerError as error:
        # Others could make us run anything: an error of ours (exit 1), not a spelling mistake.
        raise SchedulerError(error.what, where=path) from None
    lines = _lines_of(text)
    for key in data:
        if key not in OPTIONS:
            read_option(str(key), data[key], f"{path}:{lines.get(str(key), 1)}")
    return {str(key): value for key, value in data.items()}


def _lines_of(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key = line.split(":", 1)[0].strip().strip("'\"")
        if key and not line[:1].isspace():
            lines.setdefault(key, number)
    return lines


def _check_encoding(key: str, path: str) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UsageError(f"{key}: the path {shown} is not UTF-8", do="use another folder or name") from None


def _absolute(path: str, folder: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))


def model_table(path: str) -> ModelTable:
    """The model table; one that needs a whole GPU for everything when there is no such file.

    Raises UsageError with file, line and column when it is not JSON of the right shape.
    """
    if not path:
        return ModelTable()
    try:
        text = read_plain(path, LARGEST).decode("utf-8-sig")
    except FileNotFoundError:
        return ModelTable()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=path) from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from None
    except RecursionError:
        raise UsageError("nested too deeply", where=path) from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"holds a value that cannot be read: {error}", where=path) from None
    return table_from(data, path)
