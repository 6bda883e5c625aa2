"""The GPU need of a job: from its own request, the model table, its GPU memory or the default, in this order."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from scheduler.core.mig import may_use
from scheduler.core.run_target import script_name, target_of
from scheduler.core.size_guess import RUN, billions_in, use_of
from scheduler.core.suggested_need import Learned, suggestion
from scheduler.core.units import mib_text, size_text

KEYS = ("default_requirement", "models")
LONGEST_NEED = 100  # characters of a need
MOST_SAID = 20  # mistakes in a table, after which it is not read further


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Model name → GPU need, as in `llm_config.json`. Needs are kept as written: notes to the user quote them.

    ``learned``: (model, name of a script) → its runs, for models that the table does not know (setting `learn`); None: they
    get the default.
    """

    default: str = "1"
    models: Mapping[str, str] = field(default_factory=dict)
    learned: Mapping[tuple[str, str], Learned] | None = None

    def as_json(self) -> str:
        """Return the table as JSON text in the format of `llm_config.json`, without what was learned."""
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


def lacks_model(table: ModelTable, spec: JobSpec) -> bool:
    """Return whether a job names a model that the table does not know, and does not state its need itself."""
    model = None if spec.gpus else model_in(words_of(spec))
    return model is not None and model not in table.models


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
    """Return the need of a job, and notes about it for the user (rounded up, unknown model, larger memory).

    ``gpus``: the managed GPUs. The GPU memory of a job (``vram``) is a part of the smallest GPU that has this memory,
    of those that the job may use (`_devices`). A job that requests no share, or a smaller share, books this part. A job
    that requests nothing but memory may use MIG instances, too. Raises UsageError if the need cannot be read, and
    Refused if no server can have these GPUs.
    """
    notes: list[str] = []
    if spec.on:
        return ResourceRequest(len(spec.on), 0), vram_notes(spec, ResourceRequest(len(spec.on), 0), gpus)
    model = None if spec.gpus else model_in(words_of(spec))
    by_vram = not spec.gpus and bool(spec.vram_mib) and (model is None or model not in table.models)
    if spec.gpus:
        text = spec.gpus
    elif model is not None and model in table.models:
        text = table.models[model]
    else:
        text = _part_alone(spec.vram_mib or 0, _allowed(spec.allowed, gpus)) if by_vram else table.default
        if model is not None:
            learned = None if by_vram else _learned(model, spec, table, _allowed(spec.allowed, gpus))
            near = nearest(model, table.models)
            also = f" (did you mean {near}?)" if near else ""
            missing = "is not in the model table" if table.models else "is unknown, because there is no model table"
            requests = f"{'the share computed from its vram' if by_vram else 'the default'}, {text}"
            if learned is not None:
                text, requests = learned
            notes.append(f"{MODEL_NOTE}{model} {missing}{also}; the job requests {requests}")
    rounded = rounding_note(text)
    if rounded:
        notes.append(rounded)
    asked = need = ResourceRequest.parse(text)
    if (by_vram or (spec.vram_mib and _books_memory(spec))) and any(gpu.profile for gpu in gpus):
        need = replace(need, profile=ANY_DEVICE)
    if not need.count:
        need = ResourceRequest.of_slots(spec.slots)
    elif spec.slots > 1:
        notes.append(f"slots={spec.slots} has no effect: the job needs {need.in_words()}")
    if spec.vram_mib and need.count and not _books_memory(spec):
        part = _part_of_a_gpu(spec.vram_mib, _devices(need, spec.allowed, gpus))
        need = replace(need, parts=max(need.parts, part or 0))
    notes += vram_notes(spec, need, gpus, ResourceRequest(1, 0) if by_vram else asked)
    return need, tuple(notes)


def _learned(model: str, spec: JobSpec, table: ModelTable, gpus: Collection[Gpu]) -> tuple[str, str] | None:
    """Return the need of a model that is not in the table, and words about it; None: nothing is known, or not to be used."""
    if table.learned is None:
        return None
    script = script_name(target_of(spec).name)
    seen = table.learned.get((model, script), Learned(0, {}))
    run_mib = None
    if not seen.peaks and billions_in(model) is None:
        others = (one for (name, other), one in table.learned.items() if name == model and use_of(other, ()) == RUN)
        run_mib = max((one.peaks[1] for one in others if 1 in one.peaks), default=None)
    found = suggestion(model, seen.peaks, gpus, use=use_of(script, words_of(spec)), run_mib=run_mib)
    if found is None or found.need.count > max(Counter(gpu.server for gpu in gpus).values(), default=0):
        return None  # no server has so many GPUs: the default may run
    text = str(found.need)
    if seen.peak_mib is None:
        source = "the size in its name" if billions_in(model) is not None else "its runs with other scripts"
        return text, f"{text}, a guess from {source} (setting learn)"
    runs = f"{seen.runs} run{'s' * (seen.runs != 1)} of {script}"
    return text, f"{text}, learned from {runs} (at most {mib_text(seen.peak_mib)} of a GPU)"


LEAST_USUAL_MIB = 128  # a CUDA context alone takes more
VRAM_NOTE = "vram="  # the notes of `vram_notes` start with this text
MODEL_NOTE = "model "  # the notes about a model that is not in the table start with this text


def vram_notes(
    spec: JobSpec, need: ResourceRequest, gpus: Collection[Gpu], asked: ResourceRequest | None = None
) -> tuple[str, ...]:
    """Return the note about the GPU memory that a job requests; empty if it is booked as requested.

    ``need``: what the job books; ``asked``: the need without its memory (None: that of ``spec.gpus``).
    """
    if not spec.vram_mib or _books_memory(spec):
        return ()
    if asked is None:
        alone = ResourceRequest(1, 0) if model_in(words_of(spec)) is None else need
        asked = ResourceRequest.parse(spec.gpus) if spec.gpus else alone
    told = f"{VRAM_NOTE}{size_text(spec.vram_mib)}"
    if spec.vram_mib < LEAST_USUAL_MIB and need.count:
        return (f"{told} is {spec.vram_mib} MiB, less than any CUDA program uses; for GiB write {spec.vram_mib}G",)
    if spec.on:
        return (f"{told} books no memory: the job starts on the GPUs that it names (on=)",)
    if not need.count:
        return (f"{told} has no effect: the job needs no GPU",)
    if any(gpu.memory_mib is None for gpu in _devices(need, spec.allowed, gpus)):
        if asked.parts:
            return (f"{told} has no effect on GPUs of unknown size; the job books {need}",)
        return (f"{told} is taken as a whole GPU, because the size of an allowed GPU is not known",)
    if not asked.parts or need.parts <= asked.parts:
        return ()
    part = "all" if need.parts == WHOLE else decimal_text(need.parts)
    return (f"{told} is {part} of the smallest allowed GPU that has it; the job books {need}",)


def with_need_notes(
    before: Sequence[str], notes: Sequence[str], about: Sequence[str] = (VRAM_NOTE, MODEL_NOTE)
) -> tuple[str, ...]:
    """Return the notes of a job in which those about its need are replaced by those in ``notes``.

    ``about``: the texts with which these notes start.
    """
    new = [note for note in notes if note.startswith(tuple(about))]
    if new == [note for note in before if note.startswith(tuple(about))]:
        return tuple(before)
    return (*(note for note in before if not note.startswith(tuple(about))), *new)


def _books_memory(spec: JobSpec) -> bool:
    """Return whether the job books memory instead of a share (`booking_memory`)."""
    return spec.gpus == decimal_text(BY_MEMORY)


def _allowed(allowed: Allowed, gpus: Collection[Gpu]) -> list[Gpu]:
    mask = allowed_mask(allowed, gpus)
    return [gpu for gpu in gpus if mask >> gpu.index & 1]


def _devices(need: ResourceRequest, allowed: Allowed, gpus: Collection[Gpu]) -> list[Gpu]:
    """Return the allowed GPUs or MIG instances that a job with this need may use."""
    return [gpu for gpu in _allowed(allowed, gpus) if may_use(need, gpu.profile)]


def sizes_for(need: ResourceRequest, allowed: Allowed, gpus: Collection[Gpu]) -> list[int]:
    """Return the MiB of each GPU or MIG instance that a job may use, as far as they are known."""
    return [gpu.memory_mib for gpu in _devices(need, allowed, gpus) if gpu.memory_mib is not None]


def _part_of_a_gpu(mib: int, gpus: Iterable[Gpu]) -> int | None:
    """Return ``mib`` as thousandths of the smallest of ``gpus`` that has at least ``mib`` MiB, rounded up.

    On larger GPUs this part is more than ``mib``, so the memory of a GPU is never booked twice. Return None if the size
    of no such GPU is known.
    """
    sizes = [gpu.memory_mib for gpu in gpus if gpu.memory_mib is not None]
    return max((-(-mib * WHOLE // size) for size in sizes if size >= mib), default=None)


def _part_alone(mib: int, gpus: Collection[Gpu]) -> str:
    """Return the need of a job that requests only GPU memory; "1" if the size of one of ``gpus`` is not known."""
    if any(gpu.memory_mib is None for gpu in gpus):
        return "1"
    part = _part_of_a_gpu(mib, gpus)
    return "1" if part is None else decimal_text(part)
