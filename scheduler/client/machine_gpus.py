"""The GPUs of this machine with their processes, read once: for `who` and `lease`, which need no scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.core.errors import NoGpuData
from scheduler.core.gpu import Gpu
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.observations import Readings
from scheduler.core.topology import with_links
from scheduler.gpus.monitor import DECLARED, GpuMonitor
from scheduler.gpus.nvidia import NvidiaProbe
from scheduler.sharing.bookings_folder import Published

MOST_DECLARED = 256


@dataclass(slots=True)
class MachineGpus:
    """``gpus``: all GPUs of the machine; ``readings``: None if there is no driver; then the GPUs are declared ones."""

    gpus: list[Gpu]
    readings: Readings | None = None
    problem: str = ""  # why a driver that exists was not read
    snapshots: dict[str, GpuSnapshot] = field(default_factory=dict)  # UUID → reading


def machine_gpus(environ: Mapping[str, str], published: Iterable[Published] | None, strict: bool = True) -> MachineGpus:
    """Return the GPUs of this machine. Without a driver, these are the declared GPUs of the schedulers that run.

    ``published``: documents of the schedulers; None: only GPUs of a driver count. ``strict``: a driver that exists must answer; else the GPUs of the schedulers are returned without readings. Raises
    NoGpuData.
    """
    probe, problem = NvidiaProbe(environ), ""
    try:
        found = probe.first()
        found = GpuMonitor(probe, "", tuple).identified(found)
        cards = [one for one in found.gpus if not one.mig]  # of a card in MIG mode, only the instances can be used
        gpus = [
            Gpu(one.ordinal, one.uuid, one.name, memory_mib=one.memory_total_mib, profile=one.profile) for one in cards
        ]
        gpus = with_links(gpus, found.gpus, {gpu.uuid: gpu.index for gpu in gpus})
        return MachineGpus(gpus, found, snapshots={one.uuid: one for one in found.gpus})
    except NoGpuData as error:
        if not probe.absent:
            problem = error.what
            if strict:
                raise
    finally:
        probe.close()
    if published is None:
        raise NoGpuData(problem or "there is no NVIDIA driver")
    names = {uuid for one in published for uuid in one.document.gpus if problem or uuid.startswith(DECLARED)}
    if not names:
        raise NoGpuData(
            problem or "there is no GPU driver, and no scheduler with declared GPUs runs",
            do="start a scheduler: gpujob start --gpus 2",
        )
    numbers = {uuid: int(uuid[len(DECLARED) :]) for uuid in names if _is_declared(uuid)}
    others = sorted(names - set(numbers))
    gpus = [Gpu(number, uuid) for uuid, number in sorted(numbers.items(), key=lambda pair: pair[1])]
    return MachineGpus([*gpus, *(Gpu(number, uuid, "") for number, uuid in enumerate(others))], problem=problem)


def _is_declared(uuid: str) -> bool:
    number = uuid[len(DECLARED) :]
    return uuid.startswith(DECLARED) and number.isdecimal() and len(number) < 6 and int(number) < MOST_DECLARED
