"""Tests of the facts about the machine that decide whether refused lines are read again."""

from __future__ import annotations

from scheduler.core.gpu import Gpu
from scheduler.daemon.ingest import machine_text


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}")


def test_two_machines_never_have_the_same_text() -> None:
    """GPU 11 with 600 MiB booked by a job and GPU 1 with 6001 MiB booked by a job give different texts."""
    assert machine_text([gpu(11)], 600) != machine_text([gpu(1)], 6001)
    assert machine_text([]) == "none"
