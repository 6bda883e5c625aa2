"""What a probe saw of the GPUs and of the processes on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that the driver shows on a GPU, and what /proc tells of it; None where nobody would say."""

    pid: int
    memory_mib: int | None = None
    compute: bool = True  # False: it only draws (a display server)
    load: float | None = None  # 0 to 1
    visible: bool = True  # False: its number means nothing here (another container, another user's hidden process)
    user: str = ""
    ours: bool = False  # of the user that the scheduler runs as
    owner: str = ""  # attempt of this scheduler that it belongs to, say "12.1"
    started_at: float = 0.0  # seconds since 1970


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """What a probe saw of one GPU; None where the driver would not say (never read as 0)."""

    uuid: str
    ordinal: int  # the driver's number for it now
    name: str = ""
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    load: float | None = None  # 0 to 1; None when this GPU has no such counter
    temperature_c: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: bool = False  # the driver lists it, but cannot talk to it
    problem: str = ""  # why it must not be given jobs
    errors: str = ""  # uncorrected memory errors, fatal XIDs
    reserved_mib: int | None = None  # kept by the driver for itself, and no part of what is used
    power_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
