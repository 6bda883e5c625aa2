"""A job of `python -m benchmarks.on_gpu`: takes memory of a GPU, prints what it was given, and waits for a file.

The benchmark copies this file into its folder, so that no file beside it hides a module of the standard library. The
variable ON_GPU_BACKEND says how memory is taken: `torch`, `driver` (the CUDA driver API, through ctypes), or `stub`.
With the stub library there is no CUDA: the job writes what it would use into a file, from which the benchmark edits the
data of the stub library.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
import uuid
from typing import Any

REPORT = "on_gpu report: "  # begins the line of the log with what the job was given
LIMIT_S = 300.0  # a job that nobody ends
STEP_S = 0.02
CHUNKS = 27  # in which a job takes its memory, so that it uses nearly its limit when it passes it
CUDA_OUT_OF_MEMORY = 2


class OutOfMemoryError(RuntimeError):
    """Raised when a job without torch passes the limit that it set itself, in the way of torch."""


class CudaDriver:
    """A device of the CUDA driver API. ``ordinal``: among the devices that the process can see."""

    name = "CUDA driver API, without torch"

    def __init__(self, ordinal: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._context_made = False
        self._limit: int | None = None
        self._taken = 0

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code == CUDA_OUT_OF_MEMORY:
            raise OutOfMemoryError(f"CUDA error: out of memory ({function})")
        if code:
            word = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(word))
            raise RuntimeError(f"CUDA error: {(word.value or b'unknown').decode()} ({function}: {code})")

    def uuid(self) -> str:
        """Return the UUID of the device, as NVML writes it."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", ctypes.byref(raw), self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def limit(self, mib: int) -> None:
        """Let `take` fail where more than ``mib`` MiB would be taken."""
        self._limit = mib

    def take(self, mib: int) -> None:
        """Take memory, until the process ends."""
        if self._limit is not None and self._taken + mib > self._limit:
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {mib}.00 MiB. {self._taken}.00 MiB already allocated; "
                f"{self._limit}.00 MiB allowed"
            )
        if not self._context_made:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
            self._call("cuCtxSetCurrent", context)
            self._context_made = True
        self._call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mib << 20))
        self._taken += mib


class Torch:
    """A device of torch. ``ordinal``: among the devices that the process can see."""

    def __init__(self, ordinal: int) -> None:
        import torch  # type: ignore[import-not-found,unused-ignore]

        self._torch, self._device = torch, torch.device(f"cuda:{ordinal}")
        self._driver = CudaDriver(ordinal)
        self._taken: list[Any] = []
        self.name = f"torch {torch.__version__}"

    def uuid(self) -> str:
        """Return the UUID of the device, as NVML writes it, after a sum was computed on the device."""
        total = self._torch.ones(1000, device=self._device).sum().item()
        if total != 1000:
            raise RuntimeError(f"the device counts wrongly: {total}")
        return self._driver.uuid()

    def limit(self, mib: int) -> None:
        """Let torch raise OutOfMemoryError where more than ``mib`` MiB would be taken."""
        size = self._torch.cuda.get_device_properties(self._device).total_memory
        self._torch.cuda.set_per_process_memory_fraction(min(1.0, (mib << 20) / size), self._device)

    def take(self, mib: int) -> None:
        """Take memory, until the process ends."""
        self._taken.append(self._torch.empty(mib << 20, dtype=self._torch.uint8, device=self._device))


class Stub:
    """A device of the stub library. It is chosen as CUDA would choose it, by CUDA_VISIBLE_DEVICES and ``ordinal``."""

    name = "stub library"

    def __init__(self, ordinal: int) -> None:
        uuids = os.environ["ON_GPU_UUIDS"].split(",")
        words = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown: list[str] = []
        for word in range(len(uuids)) if words is None else words.split(","):
            if not str(word).isdigit() or int(word) >= len(uuids):
                break  # CUDA ignores what follows an invalid entry
            shown.append(uuids[int(word)])
        if ordinal >= len(shown):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._uuid, self._taken, self._limit, self._ordinal = shown[ordinal], 0, 1 << 60, ordinal
        self._size = int(os.environ["ON_GPU_TOTAL_MIB"])

    def uuid(self) -> str:
        """Return the UUID of the device."""
        return self._uuid

    def limit(self, mib: int) -> None:
        """Let `take` fail where more than ``mib`` MiB would be taken."""
        self._limit = mib

    def take(self, mib: int) -> None:
        """Take memory, until the process ends. The message of a failure is that of torch 2.11."""
        if self._taken + mib > self._limit:
            used, free = self._taken / 1024, (self._size - self._taken) / 1024
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {mib / 1024:.2f} GiB. GPU {self._ordinal} has a total capacity "
                f"of {self._size / 1024:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this "
                f"process has {used:.2f} GiB memory in use. {self._limit / 1024:.2f} GiB allowed; Of the allocated "
                f"memory {used:.2f} GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
            )
        self._taken += mib
        path = os.path.join(os.environ["ON_GPU_FOLDER"], "use", str(os.getpid()))
        with open(f"{path}.aside", "w", encoding="ascii") as stream:
            stream.write(f"{self._uuid} {self._taken}")
        os.rename(f"{path}.aside", path)


BACKENDS: dict[str, Any] = {"torch": Torch, "driver": CudaDriver, "stub": Stub}


def ordinal_of(style: str, cuda: str | None) -> int:
    """Return the number of the device to use, as a script of this style takes it from ``--cuda``.

    ``visible``: the script writes CUDA_VISIBLE_DEVICES from ``--cuda``, and uses the first device; ``device``: it uses
    ``cuda:ARGUMENT``; ``first``: it does not know ``--cuda``, and uses the first device.
    """
    if style == "visible" and cuda is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = cuda
    return int((cuda or "0").split(",")[0]) if style == "device" else 0


def main() -> None:
    """Take memory as the arguments say, and wait until a file with the name of the job exists in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--mib", type=int, default=256, help="memory to take")
    parser.add_argument("--style", choices=("visible", "device", "first"), default="visible")
    parser.add_argument("--within-share", action="store_true", help="fail where its share of the memory is passed")
    parser.add_argument("--seconds", type=float, default=0.0, help="wait so long before a failure shows")
    parser.add_argument("--cuda")
    parser.add_argument("--llm")
    given = parser.parse_args()
    folder = os.environ["ON_GPU_FOLDER"]
    report = {"words": sys.argv[1:], "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}
    device = BACKENDS[os.environ["ON_GPU_BACKEND"]](ordinal_of(given.style, given.cuda))
    if given.within_share:
        device.limit(int(float(os.environ["GPUJOB_SHARE"]) * int(os.environ["ON_GPU_TOTAL_MIB"])))
    report.update(uuid=device.uuid(), backend=device.name)
    try:
        for number in range(CHUNKS):
            device.take(given.mib * (number + 1) // CHUNKS - given.mib * number // CHUNKS)
    except RuntimeError:
        time.sleep(given.seconds)
        raise
    print(f"{REPORT}{json.dumps(report)}", flush=True)
    deadline = time.monotonic() + LIMIT_S
    while not any(os.path.exists(os.path.join(folder, name)) for name in (f"{given.name}.end", "all.end")):
        if time.monotonic() > deadline or not os.path.isdir(folder):
            raise SystemExit(f"nobody ended this job within {LIMIT_S:g} s")
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
