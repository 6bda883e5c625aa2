"""The GPUs of this machine with their processes, read once: for `who` and `lease`, which need no scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.core.errors import NoGpuData
from scheduler.core.gpu import Gpu
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.observations import Readings
from scheduler.gpus.monitor import DECLARED, GpuMonitor
from scheduler.gpus.nvidia import NvidiaProbe
from scheduler.sharing.bookings_folder import Published


@dataclass(slots=True)
class MachineGpus:
    """``gpus``: all GPUs of the machine; ``readings``: None if there is no driver; then the GPUs are declared ones."""

    gpus: list[Gpu]
    readings: Readings | None = None
    snapshots: dict[str, GpuSnapshot] = field(default_factory=dict)  # UUID → reading


def machine_gpus(environ: Mapping[str, str], published: Iterable[Published]) -> MachineGpus:
    """Return the GPUs of this machine. Without a driver, these are the declared GPUs of the schedulers that run.

    Raises NoGpuData if there is neither a driver nor a declared GPU, or if a driver that exists does not answer.
    """
    probe = NvidiaProbe(environ)
    try:
        found = probe.first()
        found = GpuMonitor(probe, "", tuple).identified(found)
        gpus = [Gpu(one.ordinal, one.uuid, one.name, memory_mib=one.memory_total_mib) for one in found.gpus]
        return MachineGpus(gpus, found, {one.uuid: one for one in found.gpus})
    except NoGpuData:
        if not probe.absent:
            raise
    finally:
        probe.close()
    names = {uuid for one in published for uuid in one.document.gpus if uuid.startswith(DECLARED)}
    numbers = sorted(int(uuid[len(DECLARED) :]) for uuid in names if uuid[len(DECLARED) :].isdigit())
    if not numbers:
        raise NoGpuData(
            "there is no GPU driver, and no scheduler with declared GPUs runs", do="start one: gpujob start --gpus 2"
        )
    return MachineGpus([Gpu(number, f"{DECLARED}{number}") for number in numbers])
