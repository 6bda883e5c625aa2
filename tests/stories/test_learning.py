"""Issue 27: needs that are learned from runs, and jobs that run out of GPU memory. A real scheduler with a fake driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.stories.harness import wait_for
from tests.stories.machine import Machine, machine

__all__ = ["machine"]

MODEL = "--llm exaone-nova"  # no size in its name
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB. GPU 0 has a total capacity of 78.12 GiB of "
    "which {free} GiB is free. Including non-PyTorch memory, this process has {used} GiB memory in use."
)


def config(m: Machine, text: str) -> None:
    path = m.s.folder / "config.yaml"
    path.write_text(text)


def failing(m: Machine, key: str, **sizes: int) -> Path:
    """Return a program that runs until `release`, and then ends with torch's message at its first attempt only."""
    program = m.s.folder / f"{key}.sh"
    program.write_text(
        f"#!/bin/sh\ncd {m.s.folder}\n[ -e {key}.pid ] && exit 0\necho $$ >{key}.pid\n"
        f"while [ -e hold-{key} ]; do sleep 0.02; done\necho '{OOM.format(**sizes)}'\nexit 1\n"
    )
    program.chmod(0o755)
    m.s.hold(key)
    return program


def pid_of(m: Machine, key: str) -> int:
    file = m.s.folder / f"{key}.pid"
    return int(wait_for(lambda: file.exists() and file.read_text().strip(), f"the pid of {key}"))


def test_a_model_that_no_table_knows_gets_the_need_that_its_runs_suggest(machine):
    m = machine(learn=True).cards("GPU-a")
    m.s.start()
    m.s.hold("a"), m.s.hold("b"), m.s.hold("c")
    m.s.append(m.s.line("a", more=MODEL))
    pid = m.running("a")
    m.s.append(m.s.line("b", more=MODEL), m.s.line("c", more=MODEL))
    assert m.waits(2, "no-room")["need"] == 1, "nothing is known of it yet: the default"
    m.use("GPU-a", pid, 20_000, load=40)
    wait_for(lambda: m.gpu(0)["memory_own"] == 20_000 << 20, "its memory")
    m.s.release("a")
    m.s.wait_state(1, "done")
    m.unuse("GPU-a", pid)
    m.running("b"), m.running("c")
    job = m.s.job(2)
    assert job["need"] == 0.3, "both share the GPU now"
    (note,) = job["notes"]
    assert note.endswith("the job requests 0.3, learned from 1 run of job.py (at most 19.5 GiB of a GPU)"), note
    m.s.says("learned from runs of exaone-nova")
    m.s.says("the need of 2 waiting jobs has changed")

    # Commands and dry runs use it, too; so does the next scheduler.
    words = ("--", sys.executable, str(m.s.script), *MODEL.split())
    assert "the job requests 0.3, learned from" in m.s.cli("submit", "--dry-run", *words).stdout
    other = m.s.cli("submit", "--dry-run", "--", "true", *MODEL.split()).stdout
    assert "requests 0.25, a guess from its runs with other scripts" in other
    assert "requests 0.15, a guess" in m.s.cli("submit", "--dry-run", "--", "true", "--llm", "some-3b").stdout
    m.s.cli("submit", "--hold", *words)
    m.s.cli("submit", "--hold", "--", "true", "--llm", "some-3b")
    assert (m.s.job(4)["need"], m.s.job(5)["need"]) == (0.3, 0.15)
    assert "0.15, a guess from the size in its name" in m.s.job(5)["notes"][0]
    m.s.kill()
    m.s.start()
    m.s.append(m.s.line("d", more=MODEL))
    wait_for(lambda: m.s.states().get(6), "job 6 is taken in")
    assert m.s.job(6)["need"] == 0.3
    m.s.release("b"), m.s.release("c")


def test_without_the_setting_a_model_that_no_table_knows_gets_the_default(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    m.s.cli("submit", "--hold", "--", "true", "--llm", "some-3b")
    assert m.s.job(1)["need"] == 1


def test_an_own_lack_of_memory_raises_the_need_to_what_was_seen(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    program = failing(m, "own", tried=12, free=1, used=19)
    m.s.append(f"0,{program},,,;gpus=0.25")
    pid_of(m, "own")
    m.s.release("own")
    m.s.wait_state(1, "done")
    job = m.s.job(1)
    assert (job["attempt"], job["need"]) == (2, 0.5)
    assert job["notes"] == [
        "oom: asked 0.25 (19.5 GiB), peaked at 19 GiB, tried to get 12 GiB more; tried again with 0.5"
    ]


def test_a_job_whose_memory_a_neighbour_took_is_tried_again_alone(machine):
    """The message tells no sizes of others: the readings show that the neighbour has outgrown its half."""
    m = machine().cards("GPU-a")
    m.s.start()
    program = m.s.folder / "victim.sh"
    program.write_text(
        failing(m, "victim", tried=1, free=0, used=9).read_text().replace(OOM[:30], "CUDA out of memory #")
    )
    program.write_text(program.read_text().replace("which 0 GiB is free. ", "").replace("this process has 9 GiB", ""))
    m.s.append(f"0,{program},,,;gpus=0.25")
    pid = pid_of(m, "victim")
    m.add("neighbour", need="0.5")
    other = m.running("neighbour")
    m.use("GPU-a", pid, 9_000)
    m.use("GPU-a", other, 69_000)
    wait_for(lambda: m.gpu(0)["memory_own"] == 78_000 << 20, "their memory")
    m.s.release("victim")
    m.unuse("GPU-a", pid)
    job = wait_for(lambda: (it := m.s.job(1))["state"] == "pending" and it, "it waits")
    assert job["need"] == 1 and "other processes used the rest; tried again alone on its GPU" in job["notes"][-1]
    assert m.waits(1, "no-room")
    m.s.release("neighbour")
    m.s.wait_state(2, "done")
    m.unuse("GPU-a", other)
    m.s.wait_state(1, "done")
    assert m.s.job(1)["attempt"] == 2


@pytest.mark.parametrize("limit", [0, 1])
def test_such_retries_are_limited(machine, limit):
    m = machine(oom_retries=limit).cards("GPU-a")
    m.s.start()
    program = m.s.folder / "always.sh"
    program.write_text(f"#!/bin/sh\necho '{OOM.format(tried=12, free=1, used=77)}'\nexit 1\n")
    program.chmod(0o755)
    m.s.append(f"0,{program},,,;gpus=0.25")
    m.s.wait_state(1, "failed")
    job = m.s.job(1)
    assert (job["attempt"], job["failure"]["class"], job["failure"]["oom"]) == (limit + 1, "oom", "own")
    assert (job["failure"]["peak_memory"], job["failure"]["tried_memory"]) == (77 << 30, 12 << 30)
