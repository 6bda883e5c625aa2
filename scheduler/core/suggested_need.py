"""The need that the highest memory peak of a model suggests, or the size in its name.

Suggestions are based on memory alone: jobs that keep a GPU busy slow each other down, but a lack of memory ends them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.size_guess import guessed_mib

MARGIN = 1.1  # readings are taken at intervals, so the real peak may be higher than the highest reading
STEP = 50  # suggested shares are multiples of this many thousandths


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The suggested need of a model. ``basis``: ``seen`` or ``guess``; ``mib``: memory of each GPU that it is for."""

    need: ResourceRequest
    basis: str
    mib: int


def need_for(mib: int, sizes: Collection[int], count: int = 1) -> ResourceRequest:
    """Return the need for ``mib`` MiB on each of ``count`` GPUs. ``sizes``: MiB of the managed GPUs, at least one.

    The share is of the smallest GPU that has this memory, as for ``vram=``. If no GPU has it, it is spread over more GPUs.
    """
    fitting = [size for size in sizes if size >= mib]
    if not fitting:
        return ResourceRequest(math.ceil(mib * count / max(sizes)), WHOLE)
    parts = math.ceil(mib * WHOLE / min(fitting))
    return ResourceRequest(count, min(WHOLE, math.ceil(parts / STEP) * STEP))


def suggestion(
    model: str, peak_mib: int | None, gpus: Iterable[Gpu], before: ResourceRequest | None = None
) -> Suggestion | None:
    """Return the suggested need of a model; None if nothing is known of it, or of the size of the GPUs.

    ``peak_mib``: the most MiB on one GPU that a job of the model was seen to use; None: never seen. ``before``: its need
    in the model table; the number of GPUs stays. The need is never below the highest peak that was seen.
    For a model whose need is a MIG instance, nothing is suggested.
    """
    if before is not None and before.instance:
        return None
    sizes = [gpu.memory_mib for gpu in gpus if gpu.memory_mib and not gpu.profile]
    if not sizes:
        return None
    count = max(1, before.count) if before is not None else 1
    if peak_mib is not None:
        mib = math.ceil(peak_mib * MARGIN)
        if peak_mib <= max(sizes) < mib:
            mib = max(sizes)  # it has run on one of these GPUs
        return Suggestion(need_for(mib, sizes, count), "seen", mib)
    guess = guessed_mib(model)
    return None if guess is None else Suggestion(need_for(guess, sizes), "guess", guess)
