"""Tests of `machine_text`, a text about the GPUs. If it changes, the refused lines of the jobs file are read again."""

from __future__ import annotations

from scheduler.core.gpu import Gpu
from scheduler.daemon.ingest import machine_text


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}")


def test_different_machines_have_different_machine_texts() -> None:
    """Two different machines have different texts, even if the digits of their numbers are the same.

    For example, GPU 11 with 600 MiB and GPU 1 with 6001 MiB have different texts.
    """
    assert machine_text([gpu(11)], 600) != machine_text([gpu(1)], 6001)
    assert machine_text([]) == "none"
