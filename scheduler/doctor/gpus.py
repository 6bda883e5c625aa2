"""Checks of the GPUs, and of the driver and the packages by which they are read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from scheduler.core.admission import LEAST_BASELINE_MIB, MOST_BASELINE
from scheduler.core.errors import word
from scheduler.core.gpu import Gpu, gpu_ids_text
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.observations import Readings
from scheduler.core.topology import groups_text, with_links
from scheduler.core.units import local_time, mib_text
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, not_determined, worst
from scheduler.gpus.monitor import DECLARED

DRIVER_S = 6.0  # seconds for the first readings
GHOST_AGAIN_S = 0.5  # seconds until new readings: the memory of a process that has just ended is still in use
WHOLE_MACHINE = "pid:[4026531836]"  # the initial pid namespace: the kernel fixes this number
RELOAD = "sh -c 'modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia'"


@dataclass(frozen=True, slots=True)
class DriverSeen:
    """The answer of the GPU driver, and the facts that decide which command is proposed."""

    way: str = ""  # how the driver answered: nvml, smi; empty: it did not
    problem: str = ""  # the errors of nvml and smi, if both failed
    absent: bool = False  # no driver is installed
    late_s: float = 0.0  # seconds that passed without an answer; 0: it answered
    gpus: int = 0  # number of GPUs in the readings
    unread: bool = False  # `gpu_interval: 0`: the driver is never read
    declared: bool = False  # the settings declare the GPUs, so none has to be found
    start: str = ""  # command that starts the scheduler
    python: str = "python3"
    imports: tuple[str | None, str | None] = (None, None)  # import errors of pynvml, GPUtil; None: not known
    smi: bool = True  # nvidia-smi is installed
    unasked: bool = False  # the process that reads NVML could not be started
    package: str = ""  # the package for NVML, if it cannot be imported


def judge_driver(seen: DriverSeen, who: DoctorUser) -> Finding:
    """Return the finding on NVML: whether the GPUs can be read."""
    if seen.unread:
        return good("NVML", "not read (gpu_interval: 0): the scheduler allocates GPUs without readings")
    if seen.late_s:
        wrong = "the driver hangs (only a reboot helps) or is slow to start (nvidia-persistenced keeps it loaded)"
        return Finding("NVML", Mark.BAD, f"no answer within {seen.late_s:g} s", wrong, who.root("reboot"))
    if seen.way == "nvml":
        if seen.gpus:
            return good("NVML", f"answers, {seen.gpus} GPU{'s' if seen.gpus > 1 else ''}")
        return Finding("NVML", Mark.WARN, "answers", "it shows no GPU", who.root("reboot"))
    if seen.way == "smi":
        wrong = "gpujob reads nvidia-smi instead; it shows no processes, so foreign processes are not known"
        mend = _pip(seen, "nvidia-ml-py") if seen.imports[0] else who.install("libnvidia-ml1")
        return Finding("NVML", Mark.WARN, seen.imports[0] or "does not answer", wrong, mend)
    if seen.unasked:  # because of a limit on processes: the driver may be fine
        return not_determined("NVML", "whether it answers", seen.problem)
    if seen.absent:
        if seen.declared:
            return good("NVML", "no NVIDIA driver; the GPUs are declared, and allocated without readings")
        wrong = "gpujob start finds no GPU and ends with exit code 4, unless --gpus declares GPUs"
        return Finding("NVML", Mark.WARN, "no NVIDIA driver here", wrong, seen.start and f"{seen.start} --gpus 1")
    return Finding("NVML", Mark.BAD, "the driver does not answer", seen.problem, _repair(seen, who))


def _repair(seen: DriverSeen, who: DoctorUser) -> str:
    said = seen.problem.lower()
    if "version mismatch" in said:
        return who.root(RELOAD)
    if "not loaded" in said:
        return who.root("modprobe nvidia")
    if "permission" in said:
        return who.root(f"usermod -aG video {word(who.name)}")
    if seen.package:
        return _pip(seen, seen.package)
    return who.root("reboot")


def _pip(seen: DriverSeen, packages: str) -> str:
    return f"{word(seen.python)} -m pip install {packages}"


def judge_gputil(seen: DriverSeen) -> Finding:
    """Return the finding on GPUtil: whether GPUtil could read nvidia-smi if NVML failed."""
    trouble = seen.imports[1]
    if not seen.smi:
        return good("GPUtil", "not needed: there is no nvidia-smi for it to read")
    if trouble is None:
        return not_determined("GPUtil", "whether it can be imported")
    if not trouble:
        return good("GPUtil", "can be imported; reads nvidia-smi if NVML does not answer")
    wrong = "if NVML does not answer, gpujob cannot read nvidia-smi instead"
    return Finding("GPUtil", Mark.WARN, trouble, wrong, _pip(seen, "gputil setuptools"))  # GPUtil needs distutils


def judge_gpus(readings: Sequence[GpuSnapshot], dead: Set[int] | None, who: DoctorUser) -> list[Finding]:
    """Return the findings on the GPUs; all GPUs without a problem share one finding.

    ``dead``: pids that the driver reports although no such process exists. In a container, which hides processes,
    ``dead`` is None.
    """
    used = {reading.parent for reading in readings}
    found = [(reading, _gpu(reading, dead, who)) for reading in readings if not (reading.mig and reading.uuid in used)]
    fine = [reading for reading, finding in found if finding is None]
    out = [finding for _, finding in found if finding is not None]
    if fine:
        names = ", ".join(sorted({reading.name for reading in fine} - {""}))
        ids = gpu_ids_text(reading.ordinal for reading in fine)
        out.insert(
            0,
            good("GPU", f"{ids}: {f'{names}, ' if names else ''}ended processes hold no memory"),
        )
    return out


def judge_links(readings: Sequence[GpuSnapshot]) -> list[Finding]:
    """Return a finding that tells which GPUs are joined well; none if there is only one GPU."""
    gpus = [Gpu(reading.ordinal, reading.uuid) for reading in readings if not reading.mig and not reading.profile]
    if len(gpus) < 2 or all(reading.links is None for reading in readings):
        return []
    text = groups_text(with_links(gpus, readings, {gpu.uuid: gpu.index for gpu in gpus}))
    return [good("GPU links", text or "no NVLink, and no PCIe switch or CPU that GPUs share, is known")]


def _gpu(reading: GpuSnapshot, dead: Set[int] | None, who: DoctorUser) -> Finding | None:
    """Return the finding on one GPU; None if nothing is wrong with it."""
    number = reading.ordinal
    check, reset = f"GPU {number}", who.root(f"nvidia-smi --gpu-reset -i {number}")
    if reading.lost:
        return Finding(
            check, Mark.BAD, "lost", reading.problem or "the driver gets no answer from this GPU", who.root("reboot")
        )
    if reading.mig:
        mend = who.root(f"nvidia-smi -i {number} -mig 0")
        return Finding(check, Mark.WARN, reading.name, "MIG mode is on, and there are no instances to take jobs", mend)
    if reading.errors or reading.problem:
        return Finding(check, Mark.BAD, reading.name, reading.problem or reading.errors, reset)
    return ghost(reading, dead, check, reset)


def ghost(reading: GpuSnapshot, dead: Set[int] | None, check: str, reset: str) -> Finding | None:
    """Return a finding if GPU memory is in use that belongs to no living process, else None.

    The driver and a display may use some memory themselves; such an amount is allowed. If the owners of the memory
    cannot be determined, the finding is marked UNKNOWN. ``dead``: see `judge_gpus`; ``reset``: command that resets the
    GPU.
    """
    used, total = reading.memory_used_mib, reading.memory_total_mib
    if used is None or not total:
        return not_determined(check, "how much of its memory is in use")
    spare = min(total // 4, max(LEAST_BASELINE_MIB, int(MOST_BASELINE * total)))
    told = f"{mib_text(used)} of {mib_text(total)} in use"
    if used <= spare:
        return None
    if reading.processes is None:
        return not_determined(check, f"which processes use its memory ({told})", "the driver shows no processes for it")
    gone = [process.pid for process in reading.processes if dead is not None and process.pid in dead]
    if gone:
        names = ", ".join(map(str, gone))
        wrong = f"the driver still counts memory of ended processes: pid {names}"
        return Finding(check, Mark.BAD, told, wrong, reset)
    if any(process.memory_mib is None for process in reading.processes):
        return not_determined(
            check,
            f"which processes use its memory ({told})",
            "the driver does not show how much memory each process uses",
        )
    rest = used - sum(process.memory_mib or 0 for process in reading.processes)
    if rest <= spare:
        return None
    if dead is None:
        why = "processes outside of this container are not shown"
        return not_determined(check, f"which processes use {mib_text(rest)} of its memory ({told})", why)
    return Finding(check, Mark.BAD, told, f"no process owns {mib_text(rest)} of this memory", reset)


def judge_faults(gpus: Iterable[Gpu], faults: Mapping[str, GpuFault], resume: str, now: float) -> list[Finding]:
    """Return a finding on each GPU that gets no new job because of its errors.

    ``faults``: by UUID; ``resume``: command that resumes a GPU, with ``{}`` for its index; ``now``: seconds since 1970.
    """
    held = [(gpu.index, faults[gpu.uuid]) for gpu in gpus if gpu.uuid in faults and faults[gpu.uuid].active]
    wrong = "no new job starts there; repair it (reset the GPU, or reboot), then resume it"
    return [
        Finding(
            f"GPU {index}",
            Mark.BAD,
            f"reported {fault.what} at {local_time(fault.at, now)}",
            wrong,
            resume.format(index),
        )
        for index, fault in held
    ]


def dead(pids: Set[int]) -> set[int] | None:
    """Return the process ids in ``pids`` that belong to no existing process. The driver has reported ``pids``.

    Return None in a container. There a process has another pid than the one that the driver reports.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != WHOLE_MACHINE:
            return None
    except OSError:
        return None
    gone = set()
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            gone.add(pid)
        except PermissionError:
            continue  # the process exists and belongs to another user
    return gone


def check_gpus(exam: Examination) -> list[Finding]:
    """Check whether the GPUs can be read, and check each GPU. On a cluster, the GPUs of this machine are not used."""
    if exam.config.engine != "local":
        return []
    config, driver, programs, until = exam.config, exam.driver, exam.programs, exam.until
    unread = not config.gpu_interval
    readings = None if unread else driver.readings(min(until, driver.asked_at + DRIVER_S))
    declared = config.gpus is not None or config.gpu_ids is not None
    declared = declared or any(gpu.uuid.startswith(DECLARED) for gpu in exam.dir_seen.gpus)
    found = DriverSeen(
        driver.way,
        readings.problem if readings else "",
        driver.absent,
        0.0 if unread or readings else DRIVER_S,
        len(readings.gpus) if readings else 0,
        unread,
        declared,
        exam.start,
        sys.executable,
        programs.imports(),
        programs.smi,
        driver.unasked,
        driver.package,
    )
    out = [judge_driver(found, exam.who), judge_gputil(found)]
    if readings and readings.gpus:
        judged = _judged(exam, readings)
        again_at = time.monotonic() + GHOST_AGAIN_S
        if worst(judged) is not Mark.OK and again_at + GHOST_AGAIN_S < until:
            time.sleep(GHOST_AGAIN_S)
            again = driver.readings(until, anew=True)
            judged = _judged(exam, again) if again and again.gpus else judged
        out += judged + judge_links(readings.gpus)
    if config.hold_on_errors:
        resume = f"{exam.sudo}gpujob resume {{}}{exam.suffix}"
        out += judge_faults(exam.dir_seen.gpus, exam.dir_seen.faults, resume, time.time())
    return out


def _judged(exam: Examination, readings: Readings) -> list[Finding]:
    pids = {process.pid for reading in readings.gpus for process in reading.processes or ()}
    return judge_gpus(readings.gpus, dead(pids), exam.who)
