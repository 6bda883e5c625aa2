"""Checks a JobSpec that another process has sent: each value is one that `job_options.py` could have read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from scheduler.core.command_limits import LONGEST_COMMAND, LONGEST_WORD, check_nodes
from scheduler.core.errors import UsageError
from scheduler.core.gpu import HIGHEST_GPU_ID
from scheduler.core.job import JobSpec
from scheduler.core.job_options import LONGEST_LABEL, MOST_CPUS, PRIORITIES
from scheduler.core.launch import CUDA_MODES, LAUNCHERS
from scheduler.core.log_names import check_log_name
from scheduler.core.topology import LINK_WORDS

HIGHEST_ID = 1 << 53
HIGHEST_COUNT = 10**6
LONGEST_TIME_S = 10**10
LONGEST_PATH = 4096
MOST_ITEMS = 10_000  # limits or variables
MOST_PARENTS = 1000  # jobs that a job waits for
SOURCES = frozenset({"line", "submit", "ts"})
_CALLER = re.compile(r"[0-9]{1,7} [0-9]{1,18} /[^\0]{1,200}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ANY_BYTES = frozenset({"script", "cwd"})  # file names that the store records in JSON
_PATHS = ("script", "cwd", "log_dir")


def check_spec(spec: JobSpec) -> None:
    """Raise UsageError if a field of the spec has a value that no option could have given it.

    The types of the fields are right already (`system/typed_json.py`).
    """
    for name, held in _values(spec).items():
        problem = _problem(name, held)
        if not problem and not _is_text(held):
            problem = "it has a character that no program can receive"
        if not problem and isinstance(held, str) and name not in _ANY_BYTES and not is_utf8(held):
            problem = "it is not UTF-8"
        if problem:
            raise UsageError(f"the job cannot have this {name}: {problem}")
    if not spec.is_script and not (spec.arguments and spec.arguments[0]):
        raise UsageError("the command is missing")
    check_nodes(spec.arguments)
    if spec.log_name:
        check_log_name(spec.log_name)


def _is_text(held: Any) -> bool:
    """Return whether each text in the value can become bytes, as arguments and file names do."""
    if isinstance(held, (tuple, list)):
        return all(map(_is_text, held))
    return not isinstance(held, str) or encodable(held)


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates, which the store could not record."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> bool:
    """Return whether a text can become bytes; bytes that are not UTF-8 are lone surrogates in it (PEP 383)."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _values(spec: JobSpec) -> Mapping[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


def _problem(name: str, held: Any) -> str:
    if isinstance(held, str):
        return _text_problem(name, held)
    if isinstance(held, tuple) and name != "arguments":
        if len(held) > MOST_ITEMS:
            return "it is too long"
        if name in ("after", "after_ok") and not all(0 <= number <= HIGHEST_ID for number in held):
            return "it names no job"
        if name in ("after", "after_ok") and len(held) > MOST_PARENTS:
            return f"it names more than {MOST_PARENTS} jobs"
        if name == "on" and not all(0 <= gpu <= HIGHEST_GPU_ID for gpu in held):
            return "it names no GPU"
        if name == "allowed" and not all(isinstance(gpu, int) and 0 <= gpu <= HIGHEST_GPU_ID for gpu in held):
            return "it names no GPU of this machine"
        if name == "variables" and not all(
            "=" in item and 0 < len(item) <= LONGEST_WORD and "\0" not in item for item in held
        ):
            return "it is not NAME=VALUE"
        if name == "limits" and not all(
            0 <= which < 64 and -1 <= soft < 1 << 63 and -1 <= hard < 1 << 63 for which, soft, hard in held
        ):
            return "it is no resource limit"
        if name == "edited" and not all(len(item) <= LONGEST_LABEL for item in held):
            return "it is too long"
        return ""
    ranges = {"priority": (PRIORITIES[0], PRIORITIES[-1]), "slots": (1, HIGHEST_COUNT), "vram_mib": (0, 10**9), "mem_mib": (0, 10**9), "cpus": (0.01, MOST_CPUS),
              "time_limit_s": (0, LONGEST_TIME_S), "retries": (0, HIGHEST_COUNT), "umask": (0, 0o777)}  # fmt: skip
    if name in ranges and held is not None:
        low, high = ranges[name]
        return "" if math.isfinite(held) and low <= held <= high else "it is out of range"
    return ""


def _text_problem(name: str, held: str) -> str:
    if "\0" in held or len(held) > LONGEST_COMMAND:
        return "it has a NUL character or is too long"
    if name in _PATHS and held and (not held.startswith("/") or len(held) > LONGEST_PATH):
        return "it is not an absolute path"
    choices = {
        "source": SOURCES,
        "cuda": {"", *CUDA_MODES},
        "launch": LAUNCHERS,
        "link": {"", *LINK_WORDS},
        "output": {"log", "none"},
    }
    if name in choices and held not in choices[name]:
        return f"known: {', '.join(sorted(choices[name]))}"
    if name == "label" and len(held) > LONGEST_LABEL:
        return f"it is longer than {LONGEST_LABEL} characters"
    if name in ("label", "mail_to", "origin", "conda_env", "gpus") and (
        len(held) > LONGEST_PATH or _CONTROL.search(held)
    ):
        return "it has control characters or is too long"
    if name == "caller" and held and not _CALLER.fullmatch(held):
        return "it names no process"
    return ""
