"""Contract of GPU readers (core/protocols.py: Probe), tested with NvidiaProbe and with EngineProbe."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from scheduler.core.errors import NoGpuData
from scheduler.core.observations import Readings
from scheduler.core.protocols import Probe
from scheduler.daemon import cluster
from scheduler.daemon.cluster import EngineProbe
from scheduler.gpus.nvidia import NvidiaProbe
from tests.bench import engine_bench
from tests.gpus.stub import FakeDriver

METHODS = [name for name, each in vars(Probe).items() if inspect.isfunction(each) and not name.startswith("_")]


@pytest.mark.parametrize("kind", [NvidiaProbe, EngineProbe])
@pytest.mark.parametrize("name", METHODS)
def test_each_method_of_a_probe_has_the_signature_of_the_protocol(name: str, kind: type) -> None:
    asked, given = getattr(Probe, name), getattr(kind, name)
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


def test_an_engine_that_does_not_answer_is_reported_as_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "FIRST_LIMIT_S", 0.3)
    with engine_bench(tmp_path) as bench:
        probe: Probe = EngineProbe(bench.runner, "Slurm")
        assert [gpu.uuid for gpu in probe.first().gpus][:2] == ["g1/0", "g1/1"] and len(probe.first().gpus) == 6
        assert probe.next_look() is None and probe.sessions() == set()
        bench.engine.down = True
        with pytest.raises(NoGpuData, match="it is down"):
            probe.first()
        probe.ask()
        found: Readings | None = None
        while found is None:
            found = probe.look()
        assert found.problem and not found.gpus
        probe.close()
