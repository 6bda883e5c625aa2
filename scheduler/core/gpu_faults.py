"""Errors that GPUs reported: what the numbers of the driver mean, and which GPUs get no new job because of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.gpu import Gpu
from scheduler.core.job import Job
from scheduler.core.units import local_time

# XIDs that a faulty program causes on a GPU that works: they are told, and change nothing else.
OF_APPLICATIONS = frozenset({13, 31, 43, 45})
# XID (number of an error of NVIDIA's driver) → meaning. Numbers that are not here count as errors of the GPU, too.
MEANINGS = {
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "GPU memory page fault",
    32: "invalid or corrupted push buffer stream",
    38: "driver firmware error",
    43: "GPU stopped processing",
    45: "preemptive cleanup, after an earlier error",
    46: "GPU stopped processing",
    48: "double-bit memory error",
    61: "internal microcontroller breakpoint or warning",
    62: "internal microcontroller halt",
    63: "memory page retirement or row remapping",
    64: "failed memory page retirement or row remapping",
    68: "video decoder exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit memory errors",
    93: "configuration memory cannot be written",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP timeout",
    120: "GSP error",
    121: "corrected C2C NVLink error",
    122: "PMU read error",
    123: "PMU write error",
    136: "link training failed",
    137: "NVLink privilege error",
    140: "unrecovered memory error",
    143: "GPU initialization failure",
    149: "NVLink error",
    150: "NVLink error",
    151: "key rotation error",
    154: "the driver demands a recovery action",
    155: "NVLink error",
    156: "memory retirement",
    157: "memory retirement failure",
    158: "fatal timeout of the GPU",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported: UUID of the GPU, its number, and when it was read (seconds since 1970)."""

    uuid: str
    number: int
    at: float

    @property
    def of_application(self) -> bool:
        """True if a faulty program causes such an error, False if the GPU or the driver fails."""
        return self.number in OF_APPLICATIONS

    @property
    def text(self) -> str:
        """Number and meaning: ``XID 79 (GPU has fallen off the bus)``."""
        meaning = MEANINGS.get(self.number)
        return f"XID {self.number} ({meaning})" if meaning else f"XID {self.number}"


@dataclass(frozen=True, slots=True)
class GpuFault:
    """The errors of a GPU that keep jobs away from it until a user resumes it or the machine is booted.

    ``what``: the first of these errors as text; ``at``, ``last_at``: when the first and the last of them were read
    (seconds since 1970). ``memory_errors``: the memory errors that the driver counted then, as text; they are reported
    again with each reading. ``active``: False if a user resumed the GPU; then the fault only says which memory errors
    the user has accepted.
    """

    uuid: str
    what: str
    at: float
    last_at: float
    memory_errors: str = ""
    active: bool = True

    def sentence(self, index: int, now: float) -> str:
        """Return why the GPU with this index gets no new job. ``now``: seconds since 1970."""
        return (
            f"GPU {index} reported {self.what} at {local_time(self.at, now)}; no new job starts there; "
            f"after a repair: gpujob resume {index}"
        )


def fault_of(job: Job, gpus: Mapping[int, Gpu], faults: Mapping[str, GpuFault]) -> str:
    """Return the fault that a GPU of the job's attempt had since the start of the attempt, as text; empty if none had.

    ``gpus``: index → GPU; ``faults``: UUID → fault.
    """
    for index in job.gpus:
        fault = faults.get(gpus[index].uuid) if index in gpus else None
        if fault is not None and fault.active and fault.last_at >= (job.started_at or 0.0):
            return f"GPU {index} reported {fault.what}"
    return ""
