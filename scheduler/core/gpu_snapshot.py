"""Readings of GPUs and of the processes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.core.units import mib_text


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that the driver lists on a GPU, with details from /proc. None stands for a figure that is not known."""

    pid: int
    memory_mib: int | None = None
    compute: bool = True  # False: it only draws (a display server)
    load: float | None = None  # 0 to 1
    visible: bool = True  # False: /proc does not show this pid (it runs in another container, or is hidden)
    user: str = ""
    ours: bool = False  # it runs as the scheduler's own user
    owner: str = ""  # attempt of this scheduler that it belongs to, such as "12.1"; empty: none
    started_at: float = 0.0  # seconds since 1970


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """The reading of one GPU. None stands for a figure that the driver does not give, and is never treated as 0."""

    uuid: str
    ordinal: int  # the driver's current number for the GPU
    name: str = ""
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    load: float | None = None  # 0 to 1; None: this GPU has no such counter
    temperature_c: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: bool = False  # the driver lists the GPU but cannot reach it
    problem: str = ""  # why the GPU must not get jobs; empty: nothing is wrong
    errors: str = ""  # uncorrected memory errors since the driver was loaded
    reserved_mib: int | None = None  # kept by the driver for itself; not part of ``memory_used_mib``
    power_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    by_engine: bool = False  # an engine such as Slurm reports the GPU; it measures nothing
    in_use: bool = False  # a job of any user has an allocation on the GPU; only reported by an engine
    node: str = ""  # its server; only reported by an engine
    partition: str = ""
    links: Mapping[str, int] | None = None  # UUID of another GPU → link (`core/topology.py: Link`); None: not asked
    mig: bool = False  # a card in MIG mode: its instances take jobs, and it does not
    profile: str = ""  # of a MIG instance, such as 1g.10gb
    parent: str = ""  # of a MIG instance: UUID of its card


def in_use_text(index: int, mib: float, processes: Sequence[GpuProcess]) -> str:
    return f"GPU {index} has {mib_text(int(mib))} in use by foreign processes{largest_process_text(processes)}"


def largest_process_text(processes: Sequence[GpuProcess]) -> str:
    """Return pid and owner of the process with the most memory, in parentheses; empty if there are no processes.

    The owner is a user, or a job of this scheduler.
    """
    if not processes:
        return ""
    largest = max(processes, key=lambda process: (process.memory_mib or 0, -process.pid))
    if largest.owner:
        return f" (pid {largest.pid} of job {largest.owner.partition('.')[0]}, which has no allocation on this GPU)"
    user = f", user {largest.user}" if largest.user else ""
    more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
    return f" (pid {largest.pid}{user}{more})"
