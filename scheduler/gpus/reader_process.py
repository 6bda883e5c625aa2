"""The reader process: reads the GPUs by NVML, or by nvidia-smi through GPUtil. It may be killed at any time.

Run as ``python reader_process.py nvml`` or ``python reader_process.py smi``. (With ``imports`` the process only checks
whether the Python modules can be imported.) For each line on stdin the process writes an answer to stdout, one line of
JSON; before it, lines with errors of the GPUs (XIDs) that the driver has reported since the answer before::

    {"xids": [[uuid, number, seconds since 1970], …]}
    {"gpus": [{"ordinal", "uuid", "name", "total", "used", "reserved", "load", "temperature", "power", "energy",
               "processes", "lost", "problem", "errors", "mig", "profile", "parent"}], "driver": "550.54",
     "links": {uuid: {uuid: link}}}
    {"trouble": "why the driver cannot be asked", "absent": true if there is no driver, "package": "missing package"}

Memory is in MiB, load in percent, power in watts, energy in joules since the driver was loaded; null means that the
driver does not give the value. ``processes`` is null or a list of [pid, MiB, computes, percent]. ``errors`` names
uncorrected memory errors. ``mig``: the GPU is in MIG mode. Its instances follow it: ``profile`` is such as 1g.10gb,
``parent`` the UUID of the GPU. An XID of such a GPU is also told for the instances that it concerns. ``links`` is only
in the first answer, and when there are other GPUs than before: for each pair of GPUs whose link is known, 0 (NVLink), 1
(one PCIe switch), 2 (one CPU) or 3 (between CPUs), as in `core/topology.py: Link`. After a line with ``trouble`` the
process ends, because only a new process can load a library that was replaced. This file imports no other module of
gpujob.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
MIB = 1 << 20
SWITCH = "switch"
NO_SMI = "no nvidia-smi, or it shows no GPU"
MOST_EVENTS = 256  # XIDs that are read at once; the next reading tells the others


class Trouble(Exception):
    """Error: the driver cannot be asked. ``absent``: no driver is installed; ``package``: missing Python package."""

    def __init__(self, text, absent=False, package=""):
        super().__init__(text)
        self.absent, self.package = absent, package


class Nvml:
    """Reads the GPUs by NVML, NVIDIA's management library. If one GPU cannot be read, all other GPUs are still read.

    ``tell`` is called with the XIDs that the driver has reported. It is called before anything else is asked: a driver
    that then does not answer any more must not hide why.
    """

    def __init__(self, tell):
        self.tell = tell
        if not _library():  # checked before nvidia-ml-py is imported, which takes longer than starting Python
            raise Trouble("NVML Shared Library Not Found", absent=True)
        try:
            import pynvml
        except ImportError as error:
            raise Trouble(f"nvidia-ml-py cannot be imported: {error}", package="nvidia-ml-py") from None
        self.n = pynvml
        # NVMLLibraryMismatchError, for a function that an old driver lacks, is not a subclass of NVMLError.
        self.failures = (pynvml.NVMLError, getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError))
        try:
            pynvml.nvmlInit()
        except self.failures as error:
            absent = getattr(error, "value", None) in (
                pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
                pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            )
            raise Trouble(_words(error), absent) from None
        self.last_seen = {}
        self.events = None
        self.registered = {}  # address of a GPU's handle → its UUID
        self.uuids = {}  # by ordinal, because a lost GPU no longer gives its UUID
        self.mig = {}  # UUID → whether MIG mode is on
        self.instances = {}  # UUID → MIG instances in the last reading, each with the number of its GPU instance
        self.linked = None  # the GPUs whose links have been asked

    def read(self):
        n = self.n
        self._receive_events()
        try:
            count = n.nvmlDeviceGetCount()
        except self.failures as error:
            raise Trouble(_words(error)) from None
        if not count:
            raise Trouble("the driver shows no GPU", absent=True)
        gpus = []
        for ordinal in range(count):
            gpus.append(self._gpu(ordinal))
            gpus += self._instances(gpus[-1])
        self._receive_events()
        answer = {"gpus": gpus, "driver": self._or_none(lambda: _text(n.nvmlSystemGetDriverVersion()))}
        present = {
            gpu["uuid"]: gpu["ordinal"]
            for gpu in gpus
            if gpu["uuid"] and not gpu["lost"] and not gpu["mig"] and not gpu["parent"]
        }
        if self.linked != set(present):
            self.linked = set(present)
            answer["links"] = self._links(present)
        return answer

    def _links(self, present):
        """Return UUID → UUID → link. What NVML does not tell is left out. ``present``: UUID → ordinal."""
        n = self.n
        handles = {uuid: self._or_none(lambda ordinal=ordinal: n.nvmlDeviceGetHandleByIndex(ordinal))
                   for uuid, ordinal in present.items()}  # fmt: skip
        handles = {uuid: handle for uuid, handle in handles.items() if handle is not None} if len(present) > 1 else {}
        links = {uuid: {} for uuid in present}
        for uuid, handle in handles.items():
            for other, there in handles.items():
                if other > uuid:
                    level = self._or_none(lambda a=handle, b=there: n.nvmlDeviceGetTopologyCommonAncestor(a, b))
                    if level is not None:
                        links[uuid][other] = links[other][uuid] = 1 if level <= 20 else 2 if level <= 40 else 3
        places = {
            self._or_none(lambda h=handle: _place(n.nvmlDeviceGetPciInfo(h))): uuid for uuid, handle in handles.items()
        }
        places.pop(None, None)
        switched = []
        for uuid, handle in handles.items():
            ends = self._nvlink_ends(handle)
            for place in ends & set(places):
                if places[place] != uuid:
                    links[uuid][places[place]] = links[places[place]][uuid] = 0
            if SWITCH in ends:
                switched.append(uuid)
        for uuid in switched:  # the switches of a machine form one network
            links[uuid].update(dict.fromkeys((other for other in switched if other != uuid), 0))
        return links

    def _nvlink_ends(self, handle):
        """Return where the active NVLinks of a GPU end: PCI addresses of devices, and SWITCH if some end at an NVSwitch."""
        n, ends = self.n, set()
        for link in range(n.NVML_NVLINK_MAX_LINKS):
            try:
                active = n.nvmlDeviceGetNvLinkState(handle, link)
            except self.failures:
                continue  # no such link
            if not active:
                continue
            pci = self._or_none(lambda link=link: n.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
            kind = self._or_none(lambda link=link: n.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
            if pci is not None:
                ends.add(_place(pci))
            if kind == n.NVML_NVLINK_DEVICE_TYPE_SWITCH or (
                kind is None and pci is not None and self._is_other_device(handle, pci)
            ):
                ends.add(SWITCH)
        return ends

    def _is_other_device(self, handle, pci):
        """Return whether a remote device is not a GPU of the same model, so that it is a switch."""
        own = self._or_none(lambda: self.n.nvmlDeviceGetPciInfo(handle))
        return own is not None and own.pciDeviceId != pci.pciDeviceId

    def _or_none(self, ask):
        try:
            return ask()
        except self.failures:
            return None

    def _gpu(self, ordinal):
        n = self.n
        gpu = _blank(ordinal)
        try:
            handle = n.nvmlDeviceGetHandleByIndex(ordinal)
            gpu["uuid"] = self.uuids[ordinal] = _text(n.nvmlDeviceGetUUID(handle))
        except self.failures as error:
            uuid = self.uuids.get(ordinal, "")
            gpu.update(lost=True, problem=_words(error), uuid=uuid, mig=self.mig.get(uuid, False))
            return gpu
        gpu["name"] = _text(self._or_none(lambda: n.nvmlDeviceGetName(handle)) or "")
        mode = self._or_none(lambda: n.nvmlDeviceGetMigMode(handle)[0])
        if mode is not None:  # after an error, the mode is the one before
            self.mig[gpu["uuid"]] = bool(mode)
        gpu["mig"] = self.mig.get(gpu["uuid"], False)
        try:
            gpu["total"], gpu["used"], gpu["reserved"] = self._memory(handle)
            gpu["load"] = self._load(handle)
        except self.failures as error:
            if getattr(error, "value", None) == n.NVML_ERROR_GPU_IS_LOST:
                gpu.update(lost=True, problem=_words(error))
                return gpu
            gpu["problem"] = _words(error)
        gpu["temperature"] = self._or_none(lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU))
        gpu["power"] = _thousandth(self._or_none(lambda: n.nvmlDeviceGetPowerUsage(handle)))
        gpu["energy"] = _thousandth(self._or_none(lambda: n.nvmlDeviceGetTotalEnergyConsumption(handle)))
        gpu["processes"] = self._processes(handle, gpu["uuid"])
        ecc = self._or_none(
            lambda: n.nvmlDeviceGetTotalEccErrors(handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC)
        )
        if ecc:
            gpu["errors"] = f"{ecc} uncorrected memory errors"
        self._register(handle, gpu["uuid"])
        return gpu

    def _instances(self, parent):
        """Return the MIG instances of a GPU in MIG mode, numbered from (ordinal + 1) * 100 on. They have no load.

        If the GPU cannot be asked for them, they are those of the reading before, with its problem.
        """
        n, found = self.n, []
        if not parent["mig"]:
            self.instances.pop(parent["uuid"], None)
            return []
        try:
            if parent["lost"]:
                return self._instances_before(parent, parent["problem"])
            handle = n.nvmlDeviceGetHandleByIndex(parent["ordinal"])
            for number in range(n.nvmlDeviceGetMaxMigDeviceCount(handle)):
                instance = self._instance(parent, handle, number)
                if instance is not None:
                    found.append(instance)
        except self.failures as error:
            if getattr(error, "value", None) == n.NVML_ERROR_GPU_IS_LOST:
                parent.update(lost=True, problem=_words(error))
            return self._instances_before(parent, _words(error))
        self.instances[parent["uuid"]] = found
        return [gpu for gpu, _ in found]

    def _instance(self, parent, handle, number):
        """Return a MIG instance and the number of its GPU instance, which events name; None if there is no such instance."""
        n = self.n
        try:
            device = n.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuid = _text(n.nvmlDeviceGetUUID(device))
        except self.failures as error:
            if getattr(error, "value", None) in (n.NVML_ERROR_NOT_FOUND, n.NVML_ERROR_INVALID_ARGUMENT):
                return None
            raise
        gpu = _blank((parent["ordinal"] + 1) * 100 + number)
        name = _text(self._or_none(lambda: n.nvmlDeviceGetName(device)) or "")
        gpu.update(uuid=uuid, name=name, parent=parent["uuid"], errors=parent["errors"])
        gpu["profile"] = name.rpartition("MIG ")[2].strip() or "unknown"
        try:
            gpu["total"], gpu["used"], gpu["reserved"] = self._memory(device, shared=False)
        except self.failures as error:
            if getattr(error, "value", None) == n.NVML_ERROR_GPU_IS_LOST:
                raise
            gpu["problem"] = _words(error)
        gpu["processes"] = self._processes(device, uuid)
        return gpu, self._or_none(lambda: n.nvmlDeviceGetGpuInstanceId(device))

    def _instances_before(self, parent, problem):
        keys = ("uuid", "name", "profile", "parent")
        return [
            _blank(gpu["ordinal"]) | {key: gpu[key] for key in keys} | {"lost": parent["lost"], "problem": problem}
            for gpu, _ in self.instances.get(parent["uuid"], ())
        ]

    def _memory(self, handle, shared=True):
        """Return total, used and reserved memory in MiB.

        Reserved memory is memory that the driver keeps for itself; it is None if the driver includes it in used memory.
        ``shared``: a GPU without memory of its own uses that of the machine.
        """
        n = self.n
        try:
            found = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
        except self.failures as error:
            if getattr(error, "value", None) == n.NVML_ERROR_GPU_IS_LOST:
                raise
            try:
                found = n.nvmlDeviceGetMemoryInfo(handle)
            except self.failures as again:
                if not shared or getattr(again, "value", None) != n.NVML_ERROR_NOT_SUPPORTED:
                    raise
                return (*_system_memory(), None)  # the GPU has no memory of its own (GB10, Jetson)
        reserved = getattr(found, "reserved", None)
        return found.total // MIB, found.used // MIB, None if reserved is None else reserved // MIB

    def _load(self, handle):
        try:
            return self.n.nvmlDeviceGetUtilizationRates(handle).gpu
        except self.failures as error:
            if getattr(error, "value", None) == self.n.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise

    def _processes(self, handle, uuid):
        computing = self._listed(
            handle, ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
        )
        if computing is None:
            return None
        drawing = self._listed(
            handle, ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")
        )
        loads = self._loads(handle, uuid)
        found = {}
        for processes, computes in ((drawing or [], False), (computing, True)):
            for process in processes:
                memory = process.usedGpuMemory
                found[process.pid] = [
                    process.pid,
                    None if memory is None else memory // MIB,
                    computes,
                    loads.get(process.pid),
                ]
        return list(found.values())

    def _listed(self, handle, names):
        """Call the NVML functions with these names until one works, and return its list of processes; else None."""
        for name in names:
            ask = getattr(self.n, name, None)
            if ask is None:
                continue
            try:
                return ask(handle)
            except self.failures:
                continue
        return None

    def _loads(self, handle, uuid):
        """Return pid → the highest load in percent that the driver has sampled since the last call.

        A process without such a sample is left out.
        """
        try:
            samples = self.n.nvmlDeviceGetProcessUtilization(handle, self.last_seen.get(uuid, 0))
        except self.failures:
            return {}  # no sample since then, or a driver without this counter
        loads = {}
        for sample in samples:
            self.last_seen[uuid] = max(self.last_seen.get(uuid, 0), sample.timeStamp)
            if sample.pid and sample.smUtil <= 100:
                loads[sample.pid] = max(loads.get(sample.pid, 0), sample.smUtil)
        return loads

    def _register(self, handle, uuid):
        if uuid in self.registered.values():
            return
        self.registered[ctypes.cast(handle, ctypes.c_void_p).value] = uuid
        n = self.n
        with contextlib.suppress(*self.failures):  # no such events here: only error counters are read
            if self.events is None:
                self.events = n.nvmlEventSetCreate()
            n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, self.events)

    def _receive_events(self):
        found = []
        while self.events is not None and len(found) < MOST_EVENTS:
            try:
                event = self.n.nvmlEventSetWait_v2(self.events, 0)
            except (*self.failures, AttributeError):
                break  # no event, which NVML reports as an error
            # The GPU may be lost, so its UUID is not asked for.
            uuid = self.registered.get(ctypes.cast(event.device, ctypes.c_void_p).value, "")
            found += [[one, event.eventData, time.time()] for one in (uuid, *self._reached(uuid, event))]
        if found:
            self.tell(found)

    def _reached(self, uuid, event):
        """Return the MIG instances of a GPU that an event concerns: those that it names, else all."""
        instances = self.instances.get(uuid, ())
        named = [one["uuid"] for one, place in instances if place is not None and place == event.gpuInstanceId]
        return named or [one["uuid"] for one, _ in instances]


class Smi:
    """Reads the GPUs by nvidia-smi through GPUtil. If one GPU cannot be read, no GPU can be read.

    The processes on the GPUs are not read.
    """

    def __init__(self):
        try:
            import GPUtil
        except ImportError as error:
            raise Trouble(f"GPUtil cannot be imported: {error}") from None
        self.ask = GPUtil.getGPUs

    def read(self):
        try:
            found = self.ask()
        except Exception as error:  # noqa: BLE001  GPUtil reads any text of nvidia-smi as numbers
            import re

            said = re.search(r"with base 10: ['\"](.*)['\"]", str(error), re.DOTALL)
            text = " ".join((said[1] if said else str(error)).replace("\\n", " ").split())[:200]
            raise Trouble(f"no readable answer ({text})") from None
        if not found:
            raise Trouble(NO_SMI, absent=True)
        return {"gpus": [_smi_gpu(gpu) for gpu in found], "driver": found[0].driver}


def _blank(ordinal):
    """Return a GPU of which nothing is known."""
    return {"ordinal": ordinal, "uuid": "", "name": "", "total": None, "used": None, "reserved": None, "load": None,
            "temperature": None, "power": None, "energy": None, "processes": None, "lost": False, "problem": "", "errors": "",
            "mig": False, "profile": "", "parent": ""}  # fmt: skip


def _smi_gpu(gpu):
    total, used, load = _number(gpu.memoryTotal), _number(gpu.memoryUsed), _number(gpu.load)
    problem = "" if used is not None and total else "nvidia-smi does not report its memory"
    if not problem and (used > total or (load or 0) > 1):
        problem = "nvidia-smi reports impossible values"
    return _blank(gpu.id) | {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "total": total,
        "used": used,
        "load": None if load is None else round(100 * load),
        "temperature": _number(gpu.temperature),
        "problem": problem,
    }


def _place(pci):
    """Return the PCI address of a device."""
    return (pci.domain, pci.bus, pci.device)


def _library():
    """Return whether the NVML library can be loaded."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        return True
    except OSError:
        return False


def _number(value):
    """Return ``value``; None if it is NaN, which GPUtil returns for [N/A]."""
    return None if value is None or value != value else value


def _thousandth(value):
    return None if value is None else value / 1000


def _system_memory():
    found = {}
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) // 1024
    return found["MemTotal"], found["MemTotal"] - found["MemAvailable"]


def _words(error):
    if getattr(error, "value", None) == 18:  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
        return (
            "driver/library version mismatch: the driver was updated; load its new kernel module, or reboot the machine"
        )
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def _text(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def imports():
    """Print the import errors of the Python modules as JSON: {"pynvml": "", "GPUtil": "GPUtil cannot …"}."""
    found = {}
    for name in ("pynvml", "GPUtil"):
        try:
            importlib.import_module(name)
            found[name] = ""
        except Exception as error:  # noqa: BLE001  a broken module may raise any exception
            found[name] = f"{name} cannot be imported: {' '.join(str(error).split())[:200]}"
    print(json.dumps(found))
    return 0


def main():
    if sys.argv[1] == "imports":
        return imports()
    parent = os.getppid()
    number = signal.SIGKILL
    if sys.argv[1] == "smi":  # a hanging nvidia-smi must be killed too; NVML runs in this process
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
        number = signal.SIGTERM
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        return 0
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer

    def write(answer):
        out.write(json.dumps(answer) + "\n")
        out.flush()

    way = None
    for _ in sys.stdin:
        try:
            way = way or (Nvml(lambda xids: write({"xids": xids})) if sys.argv[1] == "nvml" else Smi())
            answer = way.read()
        except Trouble as trouble:
            answer = {"trouble": str(trouble), "absent": trouble.absent, "package": trouble.package}
        write(answer)
        if "trouble" in answer:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
