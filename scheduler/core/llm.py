"""How much GPU a job needs: its own wish, else the model named by ``--llm``, else the default."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.gpu import Need, rounding_note
from scheduler.core.job import JobSpec


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Model name → need, as `llm_config.json` gives it; needs are kept as written, for the notes."""

    default: str = "1"
    models: Mapping[str, str] = field(default_factory=dict)


def table_from(data: Any, where: str) -> ModelTable:
    """A ModelTable from the parsed JSON. Raises UsageError naming the key that is wrong."""
    if not isinstance(data, dict):
        raise UsageError("the model table must be an object", where=where, do='write {"models": {"name": 0.5}}')
    unknown = sorted(set(data) - {"default_requirement", "models"})
    if unknown:
        raise UsageError(f"unknown key {unknown[0]!r}", where=where, do="known: default_requirement, models")
    models = data.get("models", {})
    if not isinstance(models, dict):
        raise UsageError("models must be an object", where=where, do='write {"models": {"name": 0.5}}')
    default = _need_text(data.get("default_requirement", "1"), "default_requirement", where)
    return ModelTable(default, {name: _need_text(value, name, where) for name, value in models.items()})


def _need_text(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UsageError(f"{key}: the need must be a number", where=where, do="write 0.5, 1 or 2")
    text = str(value)
    try:
        Need.parse(text)
    except SchedulerError as error:
        raise UsageError(f"{key}: {error.what}", where=where, do=error.do) from None
    return text


def model_in(arguments: Sequence[str]) -> str | None:
    """The value of the last ``--llm NAME`` or ``--llm=NAME`` before a bare ``--``, as argparse reads it."""
    found = None
    words = iter(arguments)
    for word in words:
        if word == "--":
            break
        if word == "--llm":
            found = next(words, found)
        elif word.startswith("--llm="):
            found = word[6:]
    return found


def words_of(spec: JobSpec) -> Sequence[str]:
    """The words to look for options in: of a shell command, those of its text as far as they can be told apart."""
    if spec.is_script or spec.arguments[:2] != ("sh", "-c") or len(spec.arguments) < 3:
        return spec.arguments
    try:
        return shlex.split(spec.arguments[2])
    except ValueError:
        return spec.arguments[2].split()


def need_of(spec: JobSpec, table: ModelTable) -> tuple[Need, tuple[str, ...]]:
    """The need of a job and what is to be said about it once (rounded up, unknown model)."""
    notes: list[str] = []
    if spec.gpus:
        text = spec.gpus
    else:
        model = model_in(words_of(spec))
        if model is not None and model in table.models:
            text = table.models[model]
        else:
            text = table.default
            if model is not None and table.models:
                near = difflib.get_close_matches(model, table.models, 1)
                also = f" (did you mean {near[0]}?)" if near else ""
                notes.append(f"model {model} is not in the model table{also}: needs the default, {text}")
    rounded = rounding_note(text)
    if rounded:
        notes.append(rounded)
    return Need.parse(text), tuple(notes)
