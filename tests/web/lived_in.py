"""A scheduler with the jobs of half a working day, for screenshots: many kinds of jobs on four fake GPUs.

It also has a foreign process and pauses. The jobs are real processes that run for seconds; `Lived.older` then stretches
their recorded times to hours.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import time
from pathlib import Path

from tests.gpus.stub import FakeDriver
from tests.stories.harness import Scheduler, wait_for

TOTAL_MIB, IDLE_MIB = 81_559, 620
UUIDS = [f"GPU-{n:08x}-2f1c-4a55-9d3e-0c5a7be1{n:04x}" for n in range(4)]
TRAIN = """\
import argparse, os, sys, time
p = argparse.ArgumentParser()
for name in ("model", "data", "lr", "seed", "cuda", "epochs"):
    p.add_argument("--" + name, default="")
p.add_argument("--for", dest="seconds", type=float, default=1.0)
p.add_argument("--fail", default="")
p.add_argument("--until", default="")
a = p.parse_args()
print(f"{a.model or 'model'} on GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}: {a.data or 'data'} loaded, 48,212 samples", flush=True)
end, step = time.monotonic() + a.seconds, 0
while time.monotonic() < end or (a.until and not os.path.exists(a.until)):
    step += 1
    if step % 5 == 1:
        print(f"step {step * 40:6}  loss {2.6 / (1 + step / 9):.4f}  lr {a.lr or '1e-4'}  {1380 + step % 7 * 11} tok/s", flush=True)
    time.sleep(0.05)
if a.fail == "oom":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB (GPU 0; 79.64 GiB total capacity)")
if a.fail == "import":
    import flash_attn_3
if a.fail:
    sys.exit(f"ValueError: {a.fail}")
print("saved checkpoints/last.pt", flush=True)
"""
FIRST = """\
0,train.py,,"--model qwen2.5-7b --data gsm8k --seed 1 --for 4";gpus=1;label=sft
0,train.py,,"--model qwen2.5-3b --data gsm8k --seed 1 --for 2.4";gpus=0.5;label=sft
0,train.py,,"--model qwen2.5-3b --data gsm8k --seed 2 --for 3.1";gpus=0.5;label=sft
0,train.py,,"--model qwen2.5-1.5b --data mmlu --for 1.2";gpus=0.25;label=eval
0,train.py,,"--model qwen2.5-1.5b --data arc --for 1.8";gpus=0.25;label=eval
0,train.py,,"--model qwen2.5-1.5b --data hellaswag --for 0.8";gpus=0.25;label=eval
0,train.py,,"--model llama-3-8b --data c4 --lr 3e-5 --for 2.2 --fail oom";gpus=1;label=pretrain
0,train.py,,"--model llama-3-8b --data c4 --lr 1e-5 --for 1.3 --fail import";gpus=1;label=pretrain
1,prepare.sh,,"shards 0-63";gpus=0
1,prepare.sh,,"shards 64-127";gpus=0
1,train.py,,"--model vit-l --data imagenet --lr 1e-3 --for 3.5";gpus=2;label=vision
1,train.py,,"--model vit-b --data imagenet --lr 1e-3 --for 2.0";gpus=0.5;label=vision
1,train.py,,"--model vit-b --data imagenet --lr 3e-4 --for 2.6";gpus=0.5;label=vision
1,train.py,,"--model whisper-s --data librispeech --for 1.6";gpus=0.5;label=asr
1,train.py,,"--model whisper-m --data librispeech --for 3.3";gpus=1;label=asr
1,train.py,,"--model whisper-m --data commonvoice --for 0.9 --fail 'no such split: tset'";gpus=1;label=asr
2,train.py,,"--model qwen2.5-3b --data dpo --seed 1 --for 1.1";gpus=0.5;label=dpo
2,train.py,,"--model qwen2.5-3b --data dpo --seed 2 --for 1.4";gpus=0.5;label=dpo
2,train.py,,"--model qwen2.5-3b --data dpo --seed 3 --for 1.9";gpus=0.5;label=dpo
"""
SECOND = """\
0,train.py,,"--model qwen2.5-7b --data ultrachat --lr 1e-5 --seed 1 --until done";gpus=1;label=sft,0
0,train.py,,"--model qwen2.5-3b --data ultrachat --lr 2e-5 --until done";gpus=0.5;label=sft
0,train.py,,"--model qwen2.5-3b --data ultrachat --lr 4e-5 --until done";gpus=0.5;label=sft
0,train.py,,"--model vit-b --data laion --until done";gpus=0.25;label=vision
0,prepare.sh,,"shards 128-191 --wait";gpus=0
"""
THIRD = """\
1,train.py,,"--model llama-3-8b --data c4 --lr 1e-5 --epochs 3";gpus=2;label=pretrain
1,train.py,,"--model qwen2.5-7b --data ultrachat --lr 1e-5 --seed 2";gpus=1;label=sft,0
2,train.py,,"--model qwen2.5-7b --data ultrachat --lr 1e-5 --seed 3";gpus=1;label=sft,0
2,train.py,,"--model whisper-l --data librispeech";gpus=4;label=asr
2,evaluate.py,,"--checkpoint checkpoints/last.pt";gpus=0.5;label=eval
0,train.py,,"--model mamba-2 --data pile";gpus=9
"""
PREPARE = '#!/bin/sh\necho "packing $*"\nsleep 2\ncase "$*" in *wait*) while [ ! -e done ]; do sleep 0.2; done;; esac\necho packed\n'


class Lived:
    """A scheduler and its fake GPU driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = FakeDriver(folder / ".driver")
        self.s = Scheduler(folder, None, gpu_interval=0.25)
        self.s.environ |= self.driver.environ()
        self.s.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.foreign_process: subprocess.Popen[bytes] | None = None
        with self.driver.together():
            for uuid in UUIDS:
                self.driver.gpu(
                    uuid, name="NVIDIA H100 80GB HBM3", total=TOTAL_MIB, used=IDLE_MIB, load=0, temp=34, power=71
                )
        (folder / "train.py").write_text(TRAIN)
        (folder / "prepare.sh").write_text(PREPARE)
        (folder / "prepare.sh").chmod(0o755)

    def live(self, remembering: bool = False) -> Lived:
        """Run the jobs of the past half day to their end, and start the jobs that shall run now.

        The past jobs run for seconds; then their recorded times are stretched to hours. ``remembering``: also write a
        history of GPU readings.
        """
        self.s.start()
        self.s.append(*FIRST.splitlines())
        self.s.wait_ended(19)
        wait_for(lambda: self.s.rows("SELECT max(finished_at) FROM jobs")[0][0] < time.time() - 1, "a second later")
        self.older(900.0)
        self.s.start()
        self.s.append(*SECOND.splitlines())
        wait_for(lambda: list(self.s.states().values()).count("running") == 5, "five that run")
        self.s.cli(
            "submit",
            "--label",
            "eval",
            "--after-ok",
            "20",
            "--gpus",
            "0.5",
            "--",
            "python",
            "evaluate.py",
            "--suite",
            "full",
        )
        self.s.cli(
            "submit",
            "--label",
            "vision",
            "--gpus",
            "0.5",
            "--",
            "python",
            "train.py",
            "--model",
            "vit-b",
            "--seed",
            "7",
        )
        self.older(200.0, 19)
        if remembering:
            self.remember()
        self.s.start()
        self.readings()
        self.s.append(*THIRD.splitlines())
        wait_for(lambda: len(self.s.states()) >= 31, f"all jobs: {self.s.states()}")
        return self

    def readings(self) -> None:
        """Pause GPU 3. Let the fake GPUs show the processes of the running jobs and a foreign process."""
        self.foreign_process = subprocess.Popen(["sleep", "3600"], env={}, start_new_session=True)
        running = self.s.rows("SELECT gpus, pid FROM jobs WHERE state='running' AND gpus != '' AND id < 24")
        used = dict.fromkeys(UUIDS, IDLE_MIB)
        with self.driver.together():
            for gpus, pid in running:
                uuid = UUIDS[int(str(gpus).strip(",").split(",")[0])]
                mib = 61_400 if used[uuid] == IDLE_MIB and "0" in str(gpus) else 28_650
                self.driver.process(uuid, pid, mib, util=58)
                used[uuid] += mib
            self.driver.process(UUIDS[2], self.foreign_process.pid, 31_300, util=40)
            used[UUIDS[2]] += 31_300
            for place, uuid in enumerate(UUIDS):
                busy = used[uuid] > IDLE_MIB
                self.driver.gpu(
                    uuid,
                    used=used[uuid],
                    load=(97, 88, 64, 0)[place] if busy else 0,
                    temp=67 - place * 2 if busy else 33,
                )
        self.s.cli("pause", "3")

    def remember(self) -> None:
        """Write one day of history. It is calculated from the recorded jobs.

        The values before the first job are invented.
        """
        from scheduler.core.history import Batch
        from scheduler.store.history_db import HistoryFile

        now = time.time()
        runs = self.s.rows(
            "SELECT id, gpus, need_parts, started_at, coalesce(finished_at, ?), attempt FROM jobs WHERE gpus != '' AND started_at IS NOT NULL",
            now,
        )
        history = HistoryFile(str(self.folder / ".gpujob" / "history.db"))
        first = min(row[3] for row in runs)
        for ago in (*range(86_400, 600, -60), *range(600, -1, -10)):
            at, minute = now - ago, ago / 60
            rows, jobs = [], []
            for gpu in range(len(UUIDS)):
                here = [row for row in runs if str(gpu) in str(row[1]).split(",") and row[3] <= at <= row[4]]
                share = min(1.0, sum(row[2] for row in here) / 1000)
                if at < first:
                    share = max(
                        0.0, round(math.sin(at / 9000 + gpu * 1.7) + math.sin(at / 2500 + gpu) / 2, 1)
                    ) and 1.0 / (1 + gpu % 2)
                wave = 0.9 + 0.08 * math.sin(at / 200 + gpu * 2) + 0.02 * math.sin(at / 61)
                load, memory = share * wave, IDLE_MIB + share * 61_000
                rows.append(
                    (
                        gpu,
                        at,
                        memory,
                        memory - IDLE_MIB,
                        0,
                        IDLE_MIB,
                        load,
                        33 + 34 * load,
                        71 + 520 * load,
                        share,
                        float(gpu == 3 and minute < 40),
                        memory,
                        load,
                    )
                )
                jobs += [
                    (
                        row[0],
                        row[5],
                        at,
                        min(61_400.0, (at - row[3]) * 300) * row[2] / 1000 + 800 * math.sin(at / 120),
                        wave * 0.97,
                        0,
                        0,
                    )
                    for row in here
                ]
            paused = ((at, frozenset({3} if minute < 40 else ())),)
            history.write(Batch(at, tuple(rows), tuple(jobs), paused))
        history.close()

    def older(self, times: float, after: int = 0) -> None:
        """Stop the scheduler, and move the recorded times of jobs with ids above ``after`` into the past.

        A time that was t seconds ago becomes ``times`` * t seconds ago.
        """
        self.s.stop()
        now = time.time()
        store = sqlite3.connect(self.folder / ".gpujob" / "store.db")

        def moved(at: float | None) -> float | None:
            return None if at is None else now - (now - at) * times

        with store:
            for number, *ats in store.execute(
                "SELECT id, submitted_at, started_at, finished_at FROM jobs WHERE id > ?", (after,)
            ).fetchall():
                store.execute(
                    "UPDATE jobs SET submitted_at=?, started_at=?, finished_at=? WHERE id=?", (*map(moved, ats), number)
                )
            for job, n, at, detail in store.execute(
                "SELECT job, n, at, detail FROM events WHERE job > ?", (after,)
            ).fetchall():
                told = json.loads(detail or "{}")
                if isinstance(told.get("ran"), (int, float)):
                    told["ran"] *= times
                store.execute(
                    "UPDATE events SET at=?, detail=? WHERE job=? AND n=?", (moved(at), json.dumps(told), job, n)
                )
        store.close()

    def end(self) -> None:
        """End the scheduler, its jobs and the foreign process."""
        (self.folder / "done").touch()
        self.s.end_all()
        if self.foreign_process is not None:
            self.foreign_process.kill()
            self.foreign_process.wait()


def lived_in(folder: Path, bookings: str = "") -> Lived:
    """Return a scheduler in this folder with the jobs of half a day and a history of readings.

    ``bookings``: another folder of shared bookings.
    """
    os.chmod(folder, 0o700)
    lived = Lived(folder)
    if bookings:
        lived.s.environ["GPUJOB_BOOKINGS_FOLDER"] = bookings
    return lived.live(remembering=True)
