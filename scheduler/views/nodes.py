"""The nodes of a cluster, as `status` and the web page show them: the GPUs of each node together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.client.overview import GpuView


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of a cluster with its GPUs. Texts are for people."""

    name: str
    partition: str
    gpus: Sequence[GpuView]

    @property
    def types(self) -> str:
        """The number of GPUs of each type: ``4 a100``."""
        return ", ".join(f"{number} {kind}" for kind, number in Counter(gpu.gpu.name for gpu in self.gpus).items())

    @property
    def states(self) -> str:
        """The state of the GPUs if it is the same for all (``AVAILABLE``), else the number of GPUs in each state."""
        count = Counter(gpu.state for gpu in self.gpus)
        return next(iter(count)) if len(count) == 1 else ", ".join(f"{n} {state}" for state, n in count.items())

    @property
    def allocated(self) -> float:
        """Number of GPUs that are allocated to jobs of this scheduler."""
        return sum(gpu.allocated for gpu in self.gpus)

    @property
    def jobs(self) -> list[int]:
        """The jobs that have GPUs of the node, each once."""
        return sorted({job for gpu in self.gpus for job in gpu.jobs})

    @property
    def reason(self) -> str:
        """Why the GPUs of the node get no jobs, if it is the same for all; else empty."""
        reasons = {gpu.reading.reason if gpu.reading else "" for gpu in self.gpus}
        return reasons.pop() if len(reasons) == 1 else ""


def nodes_of(gpus: Iterable[GpuView]) -> list[NodeView]:
    """Return the nodes of a cluster, in the order of their first GPUs; empty if jobs run on this machine."""
    found: dict[str, list[GpuView]] = {}
    for gpu in gpus:
        if gpu.gpu.node:
            found.setdefault(gpu.gpu.node, []).append(gpu)
    return [NodeView(name, its[0].gpu.partition, its) for name, its in found.items()]
