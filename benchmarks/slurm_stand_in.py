"""The commands of Slurm as shell scripts, and a large cluster behind them that starts no processes.

`squeue` and `sinfo` print files, `sbatch` appends its arguments to a file. `StandIn` takes the submits from this file,
writes the attempt records as the nodes would, and replaces the files. So a daemon on it uses its real code for Slurm.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from dataclasses import dataclass

from scheduler.runners import attempt_record
from scheduler.runners.engine import BOOT_OF_NODE

SHARDS = 4  # of a GPU
SCRIPTS = {
    "sbatch": 'echo "$$ $*" >> submits; echo $$',
    "squeue": "echo >> squeue.calls; cat squeue.out",
    "sinfo": "echo >> sinfo.calls; cat sinfo.out",
    "scancel": "echo >> scancel.calls",
}


@dataclass(slots=True)
class _Job:
    name: str
    number: int
    shards: int
    launch: str
    record: str = ""
    gpu: int = -1
    state: str = "PENDING"


class StandIn:
    """A cluster of ``nodes`` nodes with ``gpus`` GPUs each. ``folder``: where its scripts and files are."""

    def __init__(self, folder: str, nodes: int, gpus: int) -> None:
        self._folder, self._gpus, self._read = folder, gpus, 0
        self._free = [SHARDS] * (nodes * gpus)
        self._jobs: list[_Job] = []
        self._lock, self._done = threading.Lock(), threading.Event()
        for name, script in SCRIPTS.items():
            with open(os.path.join(folder, name), "w", encoding="ascii") as stream:
                stream.write(f"#!/bin/sh\ncd {folder}\n{script}\n")
            os.chmod(stream.name, 0o700)
        self._show()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop taking submits."""
        self._done.set()
        self._thread.join()

    def calls(self, name: str) -> tuple[int, int]:
        """Return how often a command was called, and when it was called last (nanoseconds since 1970)."""
        try:
            found = os.stat(os.path.join(self._folder, f"{name}.calls"))
        except FileNotFoundError:
            return 0, 0
        return found.st_size, found.st_mtime_ns

    def end(self, count: int) -> None:
        """End some running jobs with exit code 0."""
        with self._lock:
            for job in [job for job in self._jobs if job.state == "RUNNING"][:count]:
                with open(job.record, "r+b") as stream:
                    stream.seek(attempt_record.END_AT)
                    stream.write(attempt_record.end_line("exit", 0, time.time_ns()))
                job.state = "COMPLETED"
                self._free[job.gpu] += job.shards
            self._start_waiting()
            self._show()

    def _run(self) -> None:
        while not self._done.wait(0.02):
            with self._lock:
                lines = self._submits()
                self._jobs += map(_submitted, lines)
                if lines:
                    self._start_waiting()
                    self._show()

    def _submits(self) -> list[str]:
        """Return the complete lines that `sbatch` has added since the last call."""
        try:
            with open(os.path.join(self._folder, "submits"), encoding="utf-8") as stream:
                stream.seek(self._read)
                text = stream.read()
        except FileNotFoundError:
            return []
        text = text[: text.rfind("\n") + 1]
        self._read += len(text.encode())
        return text.splitlines()

    def _start_waiting(self) -> None:
        for job in self._jobs:
            if job.state == "PENDING":
                job.gpu = next((at for at, free in enumerate(self._free) if free >= job.shards), -1)
                if job.gpu < 0:
                    return
                self._start(job)

    def _start(self, job: _Job) -> None:
        """Write the attempt record, as the shim on a node does."""
        self._free[job.gpu] -= job.shards
        with open(job.launch, encoding="utf-8") as stream:
            launch = json.load(stream)
        os.unlink(job.launch)
        begun = f"pid {job.number} ticks 1 at {time.time_ns()} supervisor 0 boot {BOOT_OF_NODE}"
        place = {
            "node": f"n{job.gpu // self._gpus}", "gpus": str(job.gpu % self._gpus), "engine_job": str(job.number),
            "partition": "main",
        }  # fmt: skip
        data = bytearray(base64.b64decode(launch["data"]) + json.dumps(place).encode() + b"\n")
        data[attempt_record.PID_AT : attempt_record.PID_AT + len(begun)] = begun.encode()
        job.record, job.state = launch["record"], "RUNNING"
        with open(job.record, "xb") as stream:
            stream.write(data)

    def _show(self) -> None:
        queue = "".join(
            f"{job.number}|{job.state}|0|{f'n{job.gpu // self._gpus}' if job.record else ''}|main|None|{job.name}|\n"
            for job in self._jobs
        )
        nodes = []
        for first in range(0, len(self._free), self._gpus):
            used = ",".join(str(at) for at in range(self._gpus) if self._free[first + at] < SHARDS)
            nodes.append(
                f"n{first // self._gpus}|mixed|main*|gpu:a100:{self._gpus},shard:a100:{self._gpus * SHARDS}|"
                f"shard:a100:1(IDX:{used})|64|none|\n"
            )
        for name, text in (("squeue", queue), ("sinfo", "".join(nodes))):
            draft = os.path.join(self._folder, f"{name}.draft")
            with open(draft, "w", encoding="ascii") as stream:
                stream.write(text)
            os.replace(draft, os.path.join(self._folder, f"{name}.out"))


def _submitted(line: str) -> _Job:
    """Return the job of a line in `submits`: its number and the arguments of `sbatch`."""
    number, *words = line.split()
    named = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}
    kind, _, wanted = named["--gres"].rpartition(":")
    return _Job(named["--job-name"], int(number), int(wanted) if kind.startswith("shard") else SHARDS, words[-1])
