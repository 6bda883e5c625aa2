"""Contract of GPU readers (core/protocols.py: Probe), tested with NvidiaProbe."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from scheduler.core.errors import NoGpuData
from scheduler.core.observations import Readings
from scheduler.core.protocols import Probe
from scheduler.gpus.nvidia import NvidiaProbe
from tests.gpus.stub import FakeDriver

METHODS = [name for name, each in vars(Probe).items() if inspect.isfunction(each) and not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_each_method_of_the_nvidia_probe_has_the_signature_of_the_protocol(name: str) -> None:
    asked, given = getattr(Probe, name), getattr(NvidiaProbe, name)
    assert inspect.signature(given) == inspect.signature(asked)
    assert inspect.getdoc(given), "it says what it does"


def test_a_failed_reading_is_reported_as_a_problem(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    driver.gpu("GPU-1")
    probe: Probe = NvidiaProbe({"PATH": "/nonexistent", **driver.environ()}, 60.0)
    try:
        assert [gpu.uuid for gpu in probe.first().gpus] == ["GPU-1"]
        assert probe.look() is None and probe.next_look() is None, "nothing was asked"
        assert len(probe.sessions()) == 1 and probe.descriptors()
        driver.error("nvmlDeviceGetCount_v2", 999)
        with pytest.raises(NoGpuData):
            probe.first()
        probe.ask()
        found: Readings | None = None
        while found is None:
            found = probe.look()
        assert found.problem and not found.gpus
    finally:
        probe.close()
