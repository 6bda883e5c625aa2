"""The state of one GPU in admission control: its last reading, and what was concluded from its readings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler.core.gpu import Gpu
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.tenants import Growth


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The settings by which readings are judged. Shares are 0 to 1, durations are in seconds."""

    memory: float = 0.8
    load: float = 0.8
    tolerance: float = 0.02
    interval_s: float = 5.0
    settle_s: float = 120.0
    release_s: float = 30.0
    hold_on_errors: bool = True
    by_memory: bool = False  # jobs book MiB instead of shares: only the free memory counts, not who uses the rest
    default_mib: int = 0  # with ``by_memory``: MiB that a job books that requests no memory


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why the readings of a GPU keep jobs away from it. If ``code`` is empty, there is no such reason."""

    code: str = ""  # stale, gone, unhealthy, foreign, over-share, releasing, no-room
    sentence: str = ""


NOTHING_FORBIDDEN = Verdict()


@dataclass(slots=True)
class GpuAdmission:
    """The last reading of one GPU, and conclusions from its readings. Memory is in MiB, times are monotonic seconds."""

    gpu: Gpu
    reading: GpuSnapshot | None = None
    read_at: float = -math.inf
    measured_at: float = -math.inf  # time of the last reading that contains the memory in use
    verdict: Verdict = NOTHING_FORBIDDEN  # for every job
    whole: Verdict = NOTHING_FORBIDDEN  # for jobs that need a whole GPU
    whole_until: str = ""  # how long these jobs wait, as words of a sentence
    overcommit: int = 0  # memory in use beyond the booked shares, minus the tolerance, in thousandths of the GPU
    overcommit_mib: int = 0  # the same memory in MiB, without subtracting the tolerance
    why_overcommit: Verdict = NOTHING_FORBIDDEN
    own: dict[str, float] = field(default_factory=dict)  # attempt → memory in use; its share where no figure is known
    growth: dict[str, Growth] = field(default_factory=dict)  # by attempt
    settled: frozenset[str] = frozenset()  # attempts whose memory has not grown for ``settle_s``
    own_mib: int = 0
    foreign_mib: int = 0
    baseline_mib: int | None = None
    blocked: bool = False
    whole_blocked: bool = False
    above: int = 0  # consecutive counted samples at or above a threshold
    below: int = 0  # consecutive counted samples below both thresholds minus HYSTERESIS
    clean: int = 0  # consecutive readings without foreign computation that blocks jobs for a whole GPU
    counted_at: float = -math.inf  # time of the last counted sample
    freed_at: float | None = None  # when a job left the GPU; None after readings have shown its memory released
    before_mib: int = 0  # foreign memory at that time
    foreign_processes: list[GpuProcess] = field(default_factory=list)  # without those that a user accepted
    accepted: dict[tuple[int, float], int] = field(default_factory=dict)  # (pid, start time) → MiB that a user accepted
    accepted_mib: int = 0  # of these processes, in the last reading

    @property
    def by_engine(self) -> bool:
        """True if an engine such as Slurm reports this GPU. The report has no measurements, and never becomes stale."""
        return self.reading is not None and self.reading.by_engine

    @property
    def reserved_mib(self) -> int | None:
        """MiB in use by the driver, a display and processes that a user accepted; None if the use is not reported."""
        told = self.reading
        if told is None or told.memory_used_mib is None:
            return None
        return (told.reserved_mib or 0) + max(0, told.memory_used_mib - self.own_mib - self.foreign_mib)

    @property
    def capacity_mib(self) -> int:
        """MiB of the GPU without those that the driver and a display use; at least 1."""
        told = self.reading
        if told is None or not told.memory_total_mib:
            return 1
        return max(1, told.memory_total_mib - (told.reserved_mib or 0) - (self.baseline_mib or 0))

    @property
    def reason(self) -> str:
        """Why the readings keep all or some jobs away from this GPU, as a sentence; empty if they keep none away."""
        if self.verdict.code:
            return self.verdict.sentence
        return self.whole.sentence if self.whole_blocked else self.why_overcommit.sentence

    def is_known(self, trouble: str) -> bool:
        """Return False while this GPU still waits for its first reading.

        Return True once it has been read. Also return True if the last reading failed (``trouble``: why), because a
        failure is a result for every GPU.
        """
        return self.read_at > -math.inf or bool(trouble)

    @property
    def state(self) -> str:
        """The state of a blocked GPU for tables, one of `core/gpu.py: GPU_STATES`; empty if the GPU is not blocked."""
        words = {
            "stale": "STALE",
            "gone": "GONE",
            "unhealthy": "UNHEALTHY",
            "releasing": "DRAINING",
            "drained": "DRAINING",
            "foreign": "FOREIGN",
        }
        return words.get(self.verdict.code, "")
