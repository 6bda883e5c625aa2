"""A scheduler with a job that ran out of GPU memory after a good run of the same script, for the picture of its card."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
from dataclasses import fields
from pathlib import Path

from scheduler.core.job import Failure
from tests.gpus.stub import FakeDriver
from tests.stories.harness import Scheduler, wait_for

UUID = "GPU-00000000-2f1c-4a55-9d3e-0c5a7be10000"
TRAIN = """\
import os, sys, time
batch = int(sys.argv[sys.argv.index("--batch-size") + 1])
print("qwen2.5-7b: 48,212 samples, batch size", batch, flush=True)
open("pid", "w").write(str(os.getpid()))
if batch <= 16:
    sys.exit()
while not os.path.exists("measured"):
    time.sleep(0.05)
class OutOfMemoryError(RuntimeError): pass
OutOfMemoryError.__module__ = "torch"
raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.65 GiB")
"""


def commit(folder: Path) -> None:
    """Commit everything in the git repository of a folder."""
    who = ("-c", "user.name=lab3", "-c", "user.email=lab3@example.org")
    for words in (("add", "finetune.py"), ("commit", "-q", "-m", "batches")):
        subprocess.run(["git", *who, *words], cwd=folder, check=True)


def failed_run(folder: Path) -> Scheduler:
    """Run a job well, change its script, arguments and environment, and let it fail. Job 2 is the failed one."""
    driver = FakeDriver(folder / ".driver")
    s = Scheduler(folder, None, gpu_interval=0.25, oom_retries=0)
    s.environ |= driver.environ()
    s.environ.pop("CUDA_VISIBLE_DEVICES", None)
    driver.gpu(UUID, name="NVIDIA A100-SXM4-80GB", total=81_920, used=620, load=0, temp=34, power=71)
    script = folder / "finetune.py"
    script.write_text(TRAIN)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    commit(folder)
    s.start()
    command = ("--", "python", "finetune.py", "--llm", "qwen2.5-7b", "--batch-size")
    s.cli("submit", "--gpus", "0.5", "--env", "HF_HOME=/data/hf", "--label", "sft", *command, "16")
    s.wait_state(1, "done")
    script.write_text(f"# larger batches\n{TRAIN}")
    commit(folder)
    (folder / "pid").unlink()
    variables = ("--env", "HF_HOME=/scratch/hf", "--env", "TOKENIZERS_PARALLELISM=false")
    s.cli("submit", "--gpus", "0.25", *variables, "--label", "sft", *command, "64", "--bf16")
    pid = int(wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), "the pid"))
    with driver.together():
        driver.process(UUID, pid, 31_744, util=90)
        driver.gpu(UUID, used=32_364, load=90)
    wait_for(lambda: s.status()["gpus"][0]["memory_own"] == 31_744 << 20, "its memory")
    (folder / "measured").write_text("")
    s.wait_state(2, "failed")
    driver.gpu(UUID, used=620, load=0)
    older(s)
    return s


def older(s: Scheduler) -> None:
    """Let the good run end two days before the failed one."""
    s.stop()
    with contextlib.closing(sqlite3.connect(s.folder / ".gpujob" / "store.db")) as store:
        (text,) = store.execute("SELECT failure FROM jobs WHERE id=2").fetchone()
        found = json.loads(text)
        found[[one.name for one in fields(Failure)].index("good_at")] -= 2 * 86_400 + 3 * 3600
        store.execute("UPDATE jobs SET failure=? WHERE id=2", (json.dumps(found),))
        store.commit()
    s.start()
