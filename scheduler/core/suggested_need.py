"""The need that the highest memory peak of a model suggests, or the size in its name.

Suggestions are based on memory alone: jobs that keep a GPU busy slow each other down, but a lack of memory ends them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.size_guess import RUN, guess_from_run, guessed_mib

MARGIN = 1.1  # readings are taken at intervals, so the real peak may be higher than the highest reading
STEP = 50  # suggested shares are multiples of this many thousandths


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The suggested need of a model. ``basis``: ``seen`` or ``guess``; ``mib``: memory of each GPU that it is for."""

    need: ResourceRequest
    basis: str
    mib: int


Peaks = Mapping[int, int]  # number of GPUs that a run had → the most MiB that such runs used on one GPU


@dataclass(frozen=True, slots=True)
class Learned:
    """The runs of a model so far, with one script."""

    runs: int
    peaks: Peaks

    @property
    def peak_mib(self) -> int | None:
        """The most MiB on one GPU; None: never measured."""
        return max(self.peaks.values(), default=None)

    def with_run(self, gpus: int, peak_mib: int | None) -> Learned:
        """Return these runs and one more. ``gpus``: the number of its GPUs."""
        return Learned(self.runs + 1, highest([*self.peaks.items(), (gpus, peak_mib)]))


def highest(peaks: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """Return number of GPUs → the highest of the peaks that were measured with this number."""
    found: dict[int, int] = {}
    for count, peak in peaks:
        if peak:  # 0: it ended before it used the GPU
            found[count] = max(peak, found.get(count, 0))
    return found


def need_for(mib: int, sizes: Collection[int], count: int = 1) -> ResourceRequest:
    """Return the need for ``mib`` MiB on each of ``count`` GPUs. ``sizes``: MiB of the managed GPUs, at least one.

    The share is of the smallest GPU that has this memory, as for ``vram=``. If no GPU has it, it is spread over more GPUs.
    """
    fitting = [size for size in sizes if size >= mib]
    if not fitting:
        return ResourceRequest(math.ceil(mib * count / max(sizes)), WHOLE)
    parts = math.ceil(mib * WHOLE / min(fitting))
    return ResourceRequest(count, min(WHOLE, max(1, math.ceil(parts / STEP)) * STEP))


def suggestion(
    model: str,
    peaks: Peaks,
    gpus: Iterable[Gpu],
    before: ResourceRequest | None = None,
    use: str = RUN,
    run_mib: int | None = None,
) -> Suggestion | None:
    """Return the suggested need of a model; None if nothing is known of it, or of the size of the GPUs.

    ``before``: its need in the model table; the number of GPUs stays. If there is none, it is the lowest number with which the
    model was seen to run. The need is never below the highest peak that was seen. ``use``: for a guess (`size_guess.USES`).
    ``run_mib``: the most MiB that running the model took with other scripts, for a guess if its name tells no size.
    For a model whose need is a MIG instance, nothing is suggested.
    """
    if before is not None and before.instance:
        return None
    sizes = [gpu.memory_mib for gpu in gpus if gpu.memory_mib and not gpu.profile]
    if not sizes:
        return None
    if peaks:
        count = max(1, before.count) if before is not None else min(peaks)
        mib = max(_wanted(mib, number, count, max(sizes)) for number, mib in peaks.items())
        return Suggestion(need_for(mib, sizes, count), "seen", mib)
    guess = guessed_mib(model, use)
    if guess is None and run_mib is not None:
        guess = guess_from_run(run_mib, use)
    if guess is None:
        return None
    if use != RUN:
        guess = min(guess, max(sizes))  # a script that trains on several GPUs asks for them
    return Suggestion(need_for(guess, sizes), "guess", guess)


def _wanted(mib: int, number: int, count: int, largest: int) -> int:
    """Return the MiB to ask for on each of ``count`` GPUs, for runs that used at most ``mib`` on each of ``number`` GPUs.

    ``largest``: MiB of the largest GPU.
    """
    if number > count:
        return math.ceil(mib * number / count * MARGIN)
    wanted = math.ceil(mib * MARGIN)
    return largest if mib <= largest < wanted else wanted  # it has run on one of these GPUs
