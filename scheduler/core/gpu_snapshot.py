"""Readings of GPUs and of the processes on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
