"""Known causes of failure, recognized in the end of a job's log."""

from __future__ import annotations

import re

from scheduler.core.gpu import BY_MEMORY, WHOLE, ResourceRequest
from scheduler.core.job import Failure

OUT_OF_MEMORY = "oom"
BAD_ORDINAL = "device_ordinal"
ENVIRONMENT = "environment"

_SIGNS = (
    (
        OUT_OF_MEMORY,
        re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED", re.I),
        "it ran out of GPU memory: ",  # `_more_memory` adds what helps
    ),
    (
        BAD_ORDINAL,
        re.compile(r"invalid device ordinal", re.I),
        "the script counts its GPUs from 0: set cuda_ids: local (or ;cuda=local on the line), "
        "so that --cuda is 0 instead of the GPU's number on the server",
    ),
    (
        "cuda_option",
        re.compile(r"(unrecognized arguments|no such option|unknown option|unrecognized option).*--cuda", re.I),
        "the script does not know --cuda, which is added to .py lines: set cuda_ids: none (or ;cuda=none on the line)",
    ),
    (
        ENVIRONMENT,
        re.compile(r"^gpujob: environment .* could not be activated: |EnvironmentLocationNotFound: "),
        "the command did not run: see the output of the activation above in the log; set conda_mode: direct to run no "
        "activation scripts, or raise activation_limit to give them more time",
    ),
    ("start", re.compile(r"^gpujob: cannot start "), "the command did not run: its program could not be executed"),
    (
        "import",
        re.compile(r"ModuleNotFoundError: No module named"),
        "a module is missing: does the job need another conda_env? (gpujob show names the interpreter that ran it)",
    ),
)
HOST_MEMORY = "host_memory"  # found in the cgroup of the job, not in its log
FAILURE_KINDS = (*(kind for kind, _, _ in _SIGNS), HOST_MEMORY)


def warning_in(tail: str, need: ResourceRequest) -> Failure | None:
    """Return the lack of GPU memory that ``tail`` reports. If `failure_in` finds another cause or none, return None.

    This function is for jobs that ended with exit code 0. The script may have handled the error, so the user only gets
    a warning.
    """
    found = failure_in(tail, need) if _SIGNS[0][1].search(tail) else None
    return found if found is not None and found.kind == OUT_OF_MEMORY else None


def failure_in(tail: str, need: ResourceRequest) -> Failure | None:
    """Return the cause of failure, with a hint, from the last line of ``tail`` that shows a known cause.

    Return None if no line shows a known cause. ``need``: the job's request, on which the hint depends.
    """
    for line in reversed(tail.splitlines()):
        for kind, sign, hint in _SIGNS:
            if sign.search(line):
                more = _more_memory(need) if kind == OUT_OF_MEMORY else ""
                return Failure(kind, line.strip()[:300], hint + more)
    return None


def _more_memory(need: ResourceRequest) -> str:
    if not need.count:
        return "it had no GPU; request one (;gpus=)"
    if need.parts == WHOLE:
        return "it had a whole GPU; use a smaller batch size, or a GPU with more memory"
    if need.by_name:
        return "use a smaller batch size, or a GPU on which nothing else runs"
    if need.parts == BY_MEMORY:
        return "request more (;vram= or ;gpus=), or use a smaller batch size"
    return "request a larger share (;gpus=1), or use a smaller batch size"
