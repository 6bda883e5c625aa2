"""How much GPU a job needs: what it asks for, else what the table says of its ``--llm`` model, else the part of a GPU that its memory is, else the default."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence

from scheduler.core.errors import SchedulerError, UsageError, nearest, raise_all, said
from scheduler.core.gpu import BY_MEMORY, HIGHEST_GPU_ID, WHOLE, Gpu, ResourceRequest, decimal_text, rounding_note
from scheduler.core.job import JobSpec

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
    from typing import Any
else:
    from scheduler.core.quick_dataclass import dataclass, field, replace

KEYS = ("default_requirement", "models")
LONGEST_NEED = 100  # characters
MOST_SAID = 20  # mistakes of one table


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Model name → need, as `llm_config.json` gives it; needs are kept as written, for the notes."""

    default: str = "1"
    models: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """As a file would have it; `table_from` reads it back."""
        return json.dumps({"default_requirement": self.default, "models": dict(self.models)})


def table_from(data: Any, where: str, place: Callable[[str], str] | None = None) -> ModelTable:
    """A ModelTable from the parsed JSON; ``place`` tells where a key stands. Raises UsageError naming what is wrong."""
    place = place or (lambda key: where)
    if not isinstance(data, dict):
        raise UsageError("the model table must be an object", where=where, do='write {"models": {"name": 0.5}}')
    errors: list[SchedulerError] = []
    for key in sorted(set(data) - set(KEYS)):
        near = nearest(key, KEYS)
        do = f"did you mean {near}?" if near else f"known: {', '.join(KEYS)}"
        errors.append(UsageError(f"unknown key {key[:40]!r}", where=place(key), do=do))
    given = data.get("models", {})
    if not isinstance(given, dict):
        errors.append(
            UsageError("models must be an object", where=place("models"), do='write {"models": {"name": 0.5}}')
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
        raise UsageError(f"{shown}: the need must be a number", do="write 0.5, 1 or 2")
    if (isinstance(value, int) and abs(value) > HIGHEST_GPU_ID) or (
        isinstance(value, str) and len(value) > LONGEST_NEED
    ):
        raise UsageError(f"{shown}: a GPU need cannot be {said(value)}", do="write 0.5, 1 or 2")
    text = str(value)
    try:
        ResourceRequest.parse(text)
    except SchedulerError as error:
        raise UsageError(f"{shown}: {error.what}", do=error.do) from None
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


def booking_memory(spec: JobSpec, mib: int, *, read: bool) -> JobSpec:
    """The spec, with ``mib`` of GPU memory as its need if it names none; for schedulers whose jobs book memory in place of a share.

    Of GPUs that nobody reads (not ``read``) memory cannot be booked: there a job has one to itself.
    """
    if not mib or spec.gpus or spec.on:
        return spec
    if not read:
        return replace(spec, gpus="1")
    return replace(spec, gpus=decimal_text(BY_MEMORY), vram_mib=spec.vram_mib or mib)


def need_of(spec: JobSpec, table: ModelTable, gpus: Collection[Gpu] = ()) -> tuple[ResourceRequest, tuple[str, ...]]:
    """The need of a job and what is to be said about it once (rounded up, unknown model).

    ``gpus``: the managed ones. A job that says only how much memory it needs (``vram``) gets that part of a GPU.
    """
    notes: list[str] = []
    if spec.on:
        return ResourceRequest(len(spec.on), 0), ()
    if spec.gpus:
        text = spec.gpus
    else:
        model = model_in(words_of(spec))
        if model is not None and model in table.models:
            text = table.models[model]
        else:
            text = _part_of_a_gpu(spec.vram_mib, spec.allowed, gpus) if spec.vram_mib else table.default
            if model is not None:
                near = nearest(model, table.models)
                also = f" (did you mean {near}?)" if near else ""
                missing = "is not in the model table" if table.models else "stands in no model table, for there is none"
                which = "what vram says" if spec.vram_mib else "the default"
                notes.append(f"model {model} {missing}{also}: needs {which}, {text}")
    rounded = rounding_note(text)
    if rounded:
        notes.append(rounded)
    need = ResourceRequest.parse(text)
    if not need.count:
        need = ResourceRequest.of_slots(spec.slots)
    elif spec.slots > 1:
        notes.append(f"slots={spec.slots} has no effect: it needs {need.in_words()}")
    return need, tuple(notes)


def _part_of_a_gpu(mib: int, allowed: Collection[int] | None, gpus: Collection[Gpu]) -> str:
    """``mib`` as a share of the smallest allowed GPU that is large enough, rounded up. "1" where a size is not known."""
    sizes = [gpu.memory_mib for gpu in gpus if allowed is None or gpu.index in allowed]
    large = [size for size in sizes if size is not None and size >= mib]
    if not large or None in sizes:
        return "1"
    return decimal_text(-(-mib * WHOLE // min(large)))
