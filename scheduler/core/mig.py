"""MIG instances: which jobs get them, what the driver calls them, and changes of the MIG mode.

An instance is a part of a card, with its own memory and UUID. For the scheduler each instance is a GPU with a profile
(`core/gpu.py: Gpu.profile`), and a card that is divided into instances is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

from scheduler.core.gpu import ANY_DEVICE, Gpu, ResourceRequest, gpu_ids_text
from scheduler.core.gpu_snapshot import GpuSnapshot


def may_use(need: ResourceRequest, profile: str) -> bool:
    """Return whether a job with this need may use instances with this profile; an empty profile stands for cards.

    A job for an instance uses only instances with its profile. A job that asks only for memory uses cards and instances.
    Other jobs use instances only if they name them (`on`).
    """
    return need.by_name or need.profile in (ANY_DEVICE, profile)


class Devices:
    """The cards and the instances among the managed GPUs, as bit masks."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._masks: dict[str, int] = {}
        for gpu in gpus:
            self._masks[gpu.profile] = self._masks.get(gpu.profile, 0) | 1 << gpu.index

    def usable(self, need: ResourceRequest, allowed: int) -> int:
        """Return the mask of the GPUs in ``allowed`` that a job with this need may use (`may_use`)."""
        return allowed & reduce(or_, (mask for profile, mask in self._masks.items() if may_use(need, profile)), 0)


def why_no_device(need: ResourceRequest, allowed: Sequence[Gpu], all_allowed: bool) -> str:
    """Return why a job can use none of the allowed GPUs, if this has to do with MIG; else an empty text.

    ``all_allowed``: the job may run on any GPU.
    """
    profiles = sorted({gpu.profile for gpu in allowed} - {""})
    if need.by_name:
        if need.count < 2 or not profiles:
            return ""
        return "names several GPUs, but a process can use only one MIG instance, and no GPU beside it"
    if need.instance:
        there = f"those here are {', '.join(profiles)}" if profiles else "there is none here"
        return f"needs {need.in_words()}; {there}"
    if not profiles or need.profile:
        return ""
    which = "all GPUs here" if all_allowed else "the allowed GPUs"
    return (
        f"needs {need.in_words()}, but {which} are MIG instances, which are given only to jobs that ask for one "
        f"(gpus=mig-{profiles[0]}) or only for memory (vram= without gpus=)"
    )


def divided(ids: Iterable[int], gpus: Iterable[Gpu]) -> str:
    """Return a clause about those of the unknown ``ids`` that are cards with instances; empty if there are none."""
    instances = [gpu.index for gpu in gpus if gpu.profile]
    found = [(i, [one for one in instances if one // 100 == i + 1]) for i in ids]
    return "".join(f"; GPU {i} is divided into MIG instances: {gpu_ids_text(ones)}" for i, ones in found if ones)


def driver_name(gpu: Gpu, reading: GpuSnapshot | None) -> int | str:
    """Return the driver's current number of a GPU; of a MIG instance, which has no number, its UUID."""
    if gpu.profile:
        return gpu.uuid
    return gpu.index if reading is None else reading.ordinal


def mig_change(gpu: Gpu, reading: GpuSnapshot | None) -> str:
    """Return the sentence that a GPU takes no jobs because MIG was switched on or off; empty if this is not so.

    ``reading``: None if the driver does not list the GPU or the MIG instance.
    """
    restart = "restart the scheduler to use the new ones (running jobs continue)"
    if reading is not None and reading.mig:
        return f"GPU {gpu.index} ({gpu.uuid}) was switched to MIG mode, so only its instances can take jobs; {restart}"
    if reading is None and gpu.profile:
        what = f"GPU {gpu.index} ({gpu.uuid}, MIG instance {gpu.profile})"
        return f"{what} is gone: the MIG mode or the instances of its card have changed; {restart}"
    return ""
