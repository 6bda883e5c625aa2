"""Readings of GPUs and of the processes on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.gpu import Gpu


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
    errors: str = ""  # uncorrected memory errors, fatal XIDs
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
