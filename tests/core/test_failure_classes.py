"""Tests of the causes of failures that are recognized at the end of a log, and of their hints."""

from __future__ import annotations

import pytest

from scheduler.core.failure_patterns import BAD_ORDINAL, ENVIRONMENT, OUT_OF_MEMORY, failure_in
from scheduler.core.gpu import ResourceRequest

SHARE = ResourceRequest.parse("0.5")


@pytest.mark.parametrize(
    ("tail", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", OUT_OF_MEMORY),
        ("RuntimeError: cuda out of memory", OUT_OF_MEMORY),
        ("jax: CUDA_ERROR_OUT_OF_MEMORY: out of memory", OUT_OF_MEMORY),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", OUT_OF_MEMORY),
        ("RuntimeError: CUDA error: invalid device ordinal", BAD_ORDINAL),
        ("ModuleNotFoundError: No module named 'torch'", "import"),
        ("gpujob: environment torch could not be activated: it did not end within 60 s", ENVIRONMENT),
        ("EnvironmentLocationNotFound: Not a conda environment: /opt/e", ENVIRONMENT),
        ("gpujob: cannot start tool: no such program in PATH", "start"),
    ],
)
def test_a_known_failure_cause_is_reported_with_its_log_line_and_a_hint(tail: str, kind: str) -> None:
    failure = failure_in(f"epoch 1\n{tail}  \nbye\n", SHARE)
    assert failure is not None
    assert (failure.kind, failure.line) == (kind, tail)
    assert failure.hint


@pytest.mark.parametrize(
    "tail", ["", "\n\n", "Traceback…\nKeyError: 'x'", "MemoryError", "the device ordinal is valid"]
)
def test_no_failure_cause_is_reported_for_an_unknown_error(tail: str) -> None:
    assert failure_in(tail, SHARE) is None


def test_the_last_failure_cause_in_a_log_is_reported() -> None:
    failure = failure_in("invalid device ordinal\nretrying\nCUDA out of memory\n", SHARE)
    assert failure is not None and failure.kind == OUT_OF_MEMORY
    failure = failure_in("CUDA out of memory\nretrying\ninvalid device ordinal\n", SHARE)
    assert failure is not None and failure.kind == BAD_ORDINAL


def test_a_long_line_of_a_failure_cause_is_cut() -> None:
    failure = failure_in("CUDA out of memory " + "x" * 10_000, SHARE)
    assert failure is not None and len(failure.line) == 300


def test_the_hint_for_a_bad_device_ordinal_names_the_cuda_ids_setting() -> None:
    failure = failure_in("invalid device ordinal", SHARE)
    assert failure is not None and "cuda_ids: local" in failure.hint


@pytest.mark.parametrize(
    ("need", "hint"),
    [
        ("0.5", "request a larger share (;gpus=1), or use a smaller batch size"),
        ("2x0.5", "request a larger share (;gpus=1), or use a smaller batch size"),
        ("1", "it had a whole GPU; use a smaller batch size"),
        ("2", "it had a whole GPU; use a smaller batch size"),
        ("0.001", "request more (;vram= or ;gpus=)"),
        ("0", "it had no GPU; request one"),
    ],
)
def test_the_hint_for_out_of_memory_fits_the_request_of_the_job(need: str, hint: str) -> None:
    """If a job ran out of GPU memory, the hint depends on its request: a share, whole GPUs, memory or no GPU."""
    failure = failure_in("CUDA out of memory", ResourceRequest.parse(need))
    assert failure is not None and hint in failure.hint
