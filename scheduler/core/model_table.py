"""The GPU need of a job: from its own request, the model table, its GPU memory or the default, in this order."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.core.allowed import Allowed, allowed_mask
from scheduler.core.errors import SchedulerError, UsageError, nearest, raise_all, said
from scheduler.core.gpu import (
    ANY_DEVICE,
    BY_MEMORY,
    HIGHEST_GPU_ID,
    WHOLE,
    Gpu,
    ResourceRequest,
    decimal_text,
    rounding_note,
)
from scheduler.core.job import JobSpec

KEYS = ("default_requirement", "models")
LONGEST_NEED = 100  # characters of a need
MOST_SAID = 20  # mistakes in a table, after which it is not read further


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Model name → GPU need, as in `llm_config.json`. Needs are kept as written: notes to the user quote them."""

    default: str = "1"
    models: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """Return the table as JSON text in the format of `llm_config.json`."""
        return json.dumps({"default_requirement": self.default, "models": dict(self.models)})


def table_from(data: Any, where: str, place: Callable[[str], str] | None = None) -> ModelTable:
    """Return the ModelTable of parsed JSON. Raises UsageError if ``data`` has mistakes; the error names their places.

    ``where``: path of the file; ``place``: returns the file and line of a key, for the errors.
    """
    place = place or (lambda key: where)
    if not isinstance(data, dict):
        raise UsageError(
            "cannot read the model table: it is not a JSON object", where=where, do='write {"models": {"name": 0.5}}'
        )
    errors: list[SchedulerError] = []
    for key in sorted(set(data) - set(KEYS)):
        near = nearest(key, KEYS)
        do = f"did you mean {near}?" if near else f"known: {', '.join(KEYS)}"
        errors.append(UsageError(f"unknown key {key[:40]!r}", where=place(key), do=do))
    given = data.get("models", {})
    if not isinstance(given, dict):
        errors.append(
            UsageError(
                "cannot read models: it is not a JSON object",
                where=place("models"),
                do='write {"models": {"name": 0.5}}',
            )
        )
        given = {}
    wishes = [("default_requirement", "default_requirement", data.get("default_requirement", "1"))]
    wishes += [(name, f"models.{name}", value) for name, value in given.items()]
    needs: list[str] = []
    for key, shown, value in wishes:
        try:
            needs.append(_need_text(value, said(shown)))
            key.encode()
        except UnicodeEncodeError:
            errors.append(UsageError(f"{said(shown)}: the name is not UTF-8", where=place(key)))
        except SchedulerError as error:
            errors.append(UsageError(error.what, where=place(key), do=error.do))
        if len(errors) > MOST_SAID:
            break
    raise_all(errors)
    return ModelTable(needs[0], dict(zip(given, needs[1:], strict=True)))


def _need_text(value: Any, shown: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UsageError(f"{shown}: the need for GPUs must be a number", do="write 0.5, 1 or 2")
    if (isinstance(value, int) and abs(value) > HIGHEST_GPU_ID) or (
        isinstance(value, str) and len(value) > LONGEST_NEED
    ):
        raise UsageError(f"{shown}: the need for GPUs cannot be {said(value)}", do="write 0.5, 1 or 2")
    text = str(value)
    try:
        ResourceRequest.parse(text)
    except SchedulerError as error:
        raise UsageError(f"{shown}: {error.what}", do=error.do) from None
    return text


def model_in(arguments: Sequence[str]) -> str | None:
    """Return the value of the last ``--llm NAME`` or ``--llm=NAME`` before a bare ``--``, else None."""
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
    """Return the words in which options are searched: a job's arguments, or the words of its shell command."""
    if spec.is_script or spec.arguments[:2] != ("sh", "-c") or len(spec.arguments) < 3:
        return spec.arguments
    try:
        return shlex.split(spec.arguments[2])
    except ValueError:
        return spec.arguments[2].split()


def booking_memory(spec: JobSpec, mib: int, *, read: bool) -> JobSpec:
    """Return ``spec``, changed so that the job books GPU memory instead of a share of a GPU.

    The job books its own ``vram_mib``, or ``mib`` if it has no ``vram_mib``. ``mib``: the setting `min_free_mem_mb`.
    ``read``: True if a GPU reader reports the memory of the GPUs; if False, the job books one whole GPU instead.
    ``spec`` is returned unchanged if ``mib`` is 0, if the job states its GPU need, or if the job names its GPUs.
    """
    if not mib or spec.gpus or spec.on:
        return spec
    if not read:
        return replace(spec, gpus="1")
    return replace(spec, gpus=decimal_text(BY_MEMORY), vram_mib=spec.vram_mib or mib)


def need_of(spec: JobSpec, table: ModelTable, gpus: Collection[Gpu] = ()) -> tuple[ResourceRequest, tuple[str, ...]]:
    """Return the need of a job, and notes about it for the user (rounded up, unknown model).

    ``gpus``: the managed GPUs. If the job gives only its GPU memory (``vram``), it needs the share of a GPU that has
    this memory. Raises UsageError if the need cannot be read, and Refused if no server can have these GPUs.
    """
    notes: list[str] = []
    by_memory = False
    if spec.on:
        return ResourceRequest(len(spec.on), 0), ()
    if spec.gpus:
        text = spec.gpus
    else:
        model = model_in(words_of(spec))
        if model is not None and model in table.models:
            text = table.models[model]
        else:
            by_memory = bool(spec.vram_mib)
            text = _part_of_a_gpu(spec.vram_mib, spec.allowed, gpus) if spec.vram_mib else table.default
            if model is not None:
                near = nearest(model, table.models)
                also = f" (did you mean {near}?)" if near else ""
                missing = "is not in the model table" if table.models else "is unknown, because there is no model table"
                which = "the share computed from its vram" if spec.vram_mib else "the default"
                notes.append(f"model {model} {missing}{also}; the job requests {which}, {text}")
    rounded = rounding_note(text)
    if rounded:
        notes.append(rounded)
    need = ResourceRequest.parse(text)
    if by_memory and any(gpu.profile for gpu in gpus):
        need = replace(need, profile=ANY_DEVICE)
    if not need.count:
        need = ResourceRequest.of_slots(spec.slots)
    elif spec.slots > 1:
        notes.append(f"slots={spec.slots} has no effect: the job needs {need.in_words()}")
    return need, tuple(notes)


def _part_of_a_gpu(mib: int, allowed: Allowed, gpus: Collection[Gpu]) -> str:
    """Return ``mib`` as a share of the smallest allowed GPU or MIG instance that has at least ``mib`` MiB.

    Return "1" if no allowed GPU has ``mib`` MiB, or if the memory size of an allowed GPU is not known.
    """
    mask = allowed_mask(allowed, gpus)
    sizes = [gpu.memory_mib for gpu in gpus if mask >> gpu.index & 1]
    large = [size for size in sizes if size is not None and size >= mib]
    if not large or None in sizes:
        return "1"
    return decimal_text(-(-mib * WHOLE // min(large)))
