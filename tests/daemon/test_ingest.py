"""The facts that decide whether refused lines are read again."""

from __future__ import annotations

from scheduler.core.gpu import Gpu
from scheduler.daemon.ingest import machine_text


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}")


def test_two_machines_never_have_the_same_text() -> None:
    """600 MiB booked on GPU 11 differ from 6001 MiB booked on GPU 1."""
    assert machine_text([gpu(11)], 600) != machine_text([gpu(1)], 6001)
    assert machine_text([]) == "none"
