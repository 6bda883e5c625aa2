"""Contract of engines (core/engine.py: Engine): the stand-in, Slurm and Ray pass the same tests.

A test module imports these tests by ``from tests.contracts.of_engines import *`` and has a fixture ``engine``, which
yields an engine without jobs that has a node with two GPUs or more.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.core.engine import Engine, EngineJob, JobPhase, Submission
from scheduler.core.gpu import ResourceRequest

METHODS = [name for name, each in vars(Engine).items() if inspect.isfunction(each) and not name.startswith("_")]
LIMIT_S = 60.0


def work(folder: Path, name: str, *command: str, need: str = "0", **more: Any) -> Submission:
    """Return a submission. The command is written into a script, because Slurm runs only scripts."""
    script = folder / f"{name}.sh"
    script.write_text("#!/bin/sh\n" + " ".join(command) + "\n")
    script.chmod(0o700)
    return Submission(
        name, "a comment", (str(script),), str(folder / f"{name}.out"), ResourceRequest.parse(need), **more
    )


def until(engine: Engine, name: str, condition: Callable[[EngineJob], bool]) -> EngineJob:
    """Return the job once it is listed and the condition is true."""
    end = time.monotonic() + LIMIT_S
    while True:
        found = engine.jobs("gj-").get(name)
        if found is not None and condition(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.1)


def test_each_method_has_the_signature_of_the_protocol(engine: Engine) -> None:
    for name in METHODS:
        given = getattr(type(engine), name)
        assert list(inspect.signature(given).parameters) == list(inspect.signature(getattr(Engine, name)).parameters), (
            name
        )
        assert inspect.getdoc(given), "it says what it does"
    assert engine.name and engine.title and engine.gone_after_s > 0


def test_a_job_is_listed_by_its_name_until_it_ends_with_its_exit_code(engine: Engine, tmp_path: Path) -> None:
    engine_job = engine.submit(work(tmp_path, "gj-c-1", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 7"))
    found = until(engine, "gj-c-1", lambda job: job.phase is JobPhase.RUNNING)
    assert found.engine_job == engine_job and found.exit_code is None
    (tmp_path / "go").touch()
    ended = until(engine, "gj-c-1", lambda job: job.phase is JobPhase.ENDED)
    assert (ended.exit_code, ended.lost) == (7, False)
    assert "gj-c-1" not in engine.jobs("another-prefix")


def test_a_job_gets_a_gpu_of_a_node_that_is_reported(engine: Engine, tmp_path: Path) -> None:
    nodes = {node.name: node for node in engine.report().nodes}
    engine.submit(work(tmp_path, "gj-c-2", f"echo $CUDA_VISIBLE_DEVICES > {tmp_path}/ids", need="1"))
    ended = until(engine, "gj-c-2", lambda job: job.phase is JobPhase.ENDED)
    assert ended.exit_code == 0 and ended.node in nodes
    assert int((tmp_path / "ids").read_text()) < len(nodes[ended.node].types)


def test_a_job_runs_on_the_node_that_it_names(engine: Engine, tmp_path: Path) -> None:
    for at, node in enumerate(engine.report().nodes):
        engine.submit(work(tmp_path, f"gj-c-3{at}", "true", need="1", nodes=(node.name,)))
        ended = until(engine, f"gj-c-3{at}", lambda job: job.phase is JobPhase.ENDED)
        assert (ended.exit_code, ended.node) == (0, node.name)


def test_a_running_job_is_cancelled(engine: Engine, tmp_path: Path) -> None:
    engine.submit(work(tmp_path, "gj-c-4", "exec sleep 600"))
    until(engine, "gj-c-4", lambda job: job.phase is JobPhase.RUNNING)
    engine.cancel("gj-c-4", False)
    assert until(engine, "gj-c-4", lambda job: job.phase is JobPhase.ENDED).exit_code != 0
    engine.cancel("gj-c-4", True)
    engine.cancel("gj-c-unknown", False)


def test_a_waiting_job_is_cancelled(engine: Engine, tmp_path: Path) -> None:
    node = max(engine.report().nodes, key=lambda node: len(node.types))
    every = str(len(node.types))
    engine.submit(work(tmp_path, "gj-c-5", "exec sleep 600", need=every, nodes=(node.name,)))
    until(engine, "gj-c-5", lambda job: job.phase is JobPhase.RUNNING)
    engine.submit(work(tmp_path, "gj-c-6", f"touch {tmp_path}/ran", need=every, nodes=(node.name,)))
    assert until(engine, "gj-c-6", lambda job: True).phase is JobPhase.QUEUED
    engine.cancel("gj-c-6", False)
    if engine.name == "ray":
        # Ray starts a waiting job all the same when its turn comes. Its attempt record then prevents the command
        # (tests/runners/test_engine.py).
        engine.cancel("gj-c-5", True)
    until(engine, "gj-c-6", lambda job: job.phase is JobPhase.ENDED)
    engine.cancel("gj-c-5", True)
    until(engine, "gj-c-5", lambda job: job.phase is JobPhase.ENDED)
    assert engine.name == "ray" or not (tmp_path / "ran").exists()
