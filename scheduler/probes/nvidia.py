"""NVIDIA GPUs by NVML, else by GPUtil (nvidia-smi), asked in a child that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys

from scheduler.core.errors import NoGpuData
from scheduler.core.gpu import Gpu

DEADLINE_S = 15.0

_BY_NVML = """
import json, sys
import pynvml as n
n.nvmlInit()
out = []
def text(value):
    return value.decode() if isinstance(value, bytes) else value
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    try:
        memory = n.nvmlDeviceGetMemoryInfo(h).total >> 20
    except n.NVMLError:
        memory = None
    out.append([i, text(n.nvmlDeviceGetUUID(h)), text(n.nvmlDeviceGetName(h)), memory])
json.dump(out, sys.stdout)
"""
_BY_GPUTIL = """
import json, sys
import GPUtil
json.dump([[g.id, g.uuid, g.name, int(g.memoryTotal) if g.memoryTotal == g.memoryTotal else None]
           for g in GPUtil.getGPUs()], sys.stdout)
"""


class NvidiaProbe:
    """The GPUs that the driver shows."""

    def gpus(self) -> list[Gpu]:
        """All GPUs, by index. Raises NoGpuData with what each way of asking said."""
        said = []
        for name, program in (("NVML", _BY_NVML), ("nvidia-smi", _BY_GPUTIL)):
            found, problem = self._ask(program)
            if found:
                return found
            said.append(f"{name}: {problem or 'no GPU'}")
        raise NoGpuData(f"no GPU is seen ({'; '.join(said)})", do="declare some with --gpus N, or mend the driver")

    def _ask(self, program: str) -> tuple[list[Gpu], str]:
        try:
            done = subprocess.run(  # its own process: a wedged driver must not hold us up
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [], f"no answer within {DEADLINE_S:g} s"
        except OSError as error:
            return [], str(error)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            return [], last[0][:200]
        try:
            return [Gpu(row[0], row[1], row[2], 0, row[3]) for row in json.loads(done.stdout)], ""
        except (ValueError, IndexError, TypeError):
            return [], "an answer that cannot be read"
