"""Tests of `machine_text`: refused lines of the jobs file are read again if this text about the machine changes."""

from __future__ import annotations

from scheduler.core.gpu import Gpu
from scheduler.daemon.ingest import machine_text


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}")


def test_different_machines_have_different_machine_texts() -> None:
    """Different machines have different texts, even if their numbers have the same digits in a row.

    Example: GPU 11 with 600 MiB, and GPU 1 with 6001 MiB.
    """
    assert machine_text([gpu(11)], 600) != machine_text([gpu(1)], 6001)
    assert machine_text([]) == "none"
