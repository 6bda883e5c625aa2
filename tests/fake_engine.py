"""An engine that runs jobs as processes of this machine: a stand-in for Slurm and Ray with faults on request."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.core.engine import (
    EngineBusy,
    EngineDown,
    EngineJob,
    EngineNode,
    EngineRefused,
    JobPhase,
    Report,
    Submission,
)
from scheduler.core.engine_placement import EngineRules

MARK = "SLURM_FAKE_JOB"  # jobs inherit variables that begin with SLURM from the shim


@dataclass
class _Job:
    work: Submission
    number: int
    parts: dict[tuple[str, int], int] = field(default_factory=dict)  # (node, GPU) → thousandths
    process: subprocess.Popen[bytes] | None = None
    node: str = ""
    word: str = "PENDING"
    code: int | None = None


class FakeEngine:
    """An engine, see `core/engine.py: Engine`.

    ``nodes``: name → number of GPUs. Faults: ``down`` (no call is answered), ``lost_answers`` (number of submits that
    are carried out without an answer), ``busy`` and ``refused`` (answers to all submits), ``forgotten`` (names that are
    not listed), ``keeps_waiting_jobs`` (a cancel has no effect on jobs that wait, as in Ray), ``said`` (name → a word such
    as NODE_FAIL in place of the state). ``calls``: the calls so far.
    """

    name = "slurm"
    title = "Slurm"
    tied = False
    gone_after_s = math.inf

    def __init__(self, nodes: Mapping[str, int], shards: int = 4, environ: Mapping[str, str] | None = None) -> None:
        self.nodes, self.rules = dict(nodes), EngineRules(self.title, shards)
        self.environ = dict(os.environ if environ is None else environ)
        self.down, self.busy, self.refused = False, "", ""
        self.lost_answers = 0
        self.keeps_waiting_jobs = False
        self.forgotten: set[str] = set()
        self.said: dict[str, str] = {}
        self.drained: dict[str, str] = {}
        self.calls: list[str] = []
        self.mine: dict[str, _Job] = {}
        self._free = {(node, gpu): 1000 for node, gpus in nodes.items() for gpu in range(gpus)}
        self._number = 0
        self._lock = threading.Lock()

    def submit(self, work: Submission) -> str:
        """Start the job, or queue it if no GPU is free."""
        self._called("submit")
        if self.refused:
            raise EngineRefused(self.refused)
        if self.busy:
            self.mine.setdefault(work.name, _Job(work, 0, word="FAILED", code=1))  # as Slurm lists some refused submits
            raise EngineBusy(self.busy)
        if work.name in self.mine and self.mine[work.name].process is None:
            del self.mine[work.name]
        with self._lock:
            self._number += 1
            if work.name not in self.mine:
                self.mine[work.name] = _Job(work, self._number)
            self._advance()
        if self.lost_answers:
            self.lost_answers -= 1
            raise EngineDown("Slurm does not answer: no answer to a submit")
        return str(self.mine[work.name].number)

    def jobs(self, prefix: str) -> dict[str, EngineJob]:
        """List all jobs."""
        self._called("jobs")
        with self._lock:
            self._advance()
            return {
                name: self._listed(job)
                for name, job in self.mine.items()
                if name.startswith(prefix) and name not in self.forgotten
            }

    def history(self, names: Sequence[str]) -> dict[str, EngineJob]:
        """Return nothing, as Slurm without accounting."""
        self._called("history")
        return {}

    def cancel(self, name: str, hard: bool) -> None:
        """Signal all processes of a job."""
        self._called("cancel")
        with self._lock:
            job = self.mine.get(name)
            if job is None or job.word in ("COMPLETED", "FAILED", "CANCELLED"):
                return
            if job.process is None:
                job.word = job.word if self.keeps_waiting_jobs else "CANCELLED"
                return
            for pid in self._pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if hard else signal.SIGTERM)

    def report(self) -> Report:
        """Return the nodes."""
        self._called("report")
        with self._lock:
            self._advance()
            return Report(
                tuple(
                    EngineNode(
                        node, "main", ("fake",) * gpus,
                        frozenset(gpu for gpu in range(gpus) if self._free[node, gpu] < 1000),
                        gpus * (self.rules.shards or 0), 16,
                        f"node {node} is drained: {self.drained[node]}" if node in self.drained else "",
                    )
                    for node, gpus in self.nodes.items()
                ),
                self.rules.shards,
            )  # fmt: skip

    def logs(self, name: str) -> str:
        """Return an empty text: the output is in the file that the submission names."""
        return ""

    def close(self) -> None:
        """Kill the processes of all jobs."""
        for name, job in self.mine.items():
            for pid in self._pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if job.process is not None:
                job.process.wait()

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if self.down:
            raise EngineDown("Slurm does not answer: it is down")

    def _advance(self) -> None:
        for name, job in self.mine.items():
            if job.process is not None and job.code is None and job.process.poll() is not None:
                if any(pid != job.process.pid for pid in self._pids(name)):
                    for pid in self._pids(name):  # an engine ends what a job leaves behind
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                job.code = job.process.returncode
                job.word = "COMPLETED" if job.code == 0 else "FAILED"
                for place, parts in job.parts.items():
                    self._free[place] += parts
        for job in self.mine.values():
            if job.word == "PENDING":
                self._try(job)

    def _try(self, job: _Job) -> None:
        need = self.rules.booked(job.work.need)
        for node, gpus in self.nodes.items():
            if (job.work.nodes and node not in job.work.nodes) or node in self.drained:
                continue
            fitting = [gpu for gpu in reversed(range(gpus)) if self._free[node, gpu] >= need.parts]
            if len(fitting) < need.count:
                continue
            job.parts = {(node, gpu): need.parts for gpu in fitting[: need.count]}
            for place, parts in job.parts.items():
                self._free[place] -= parts
            job.node, job.word = node, "RUNNING"
            ids = ",".join(str(gpu) for _, gpu in sorted(job.parts))
            environ = {
                **self.environ, MARK: self._mark(job.work.name), "CUDA_VISIBLE_DEVICES": ids, "SLURM_JOB_ID": str(job.number),
                "SLURMD_NODENAME": node, "SLURM_JOB_PARTITION": "main",
            }  # fmt: skip
            with open(job.work.output, "ab") as out:
                job.process = subprocess.Popen(
                    list(job.work.command),
                    env=environ,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            return

    def _listed(self, job: _Job) -> EngineJob:
        name = job.work.name
        word = self.said.get(name, job.word)
        phase = {"PENDING": JobPhase.QUEUED, "RUNNING": JobPhase.RUNNING}.get(word, JobPhase.ENDED)
        lost = word == "NODE_FAIL"
        return EngineJob(
            name, str(job.number), phase, word, job.node, "main", None if lost else job.code, None,
            word not in ("COMPLETED", "FAILED") and phase is JobPhase.ENDED, lost,
        )  # fmt: skip

    def _mark(self, name: str) -> str:
        return f"{name}:{os.getpid()}:{id(self)}"  # other tests use the same names

    def _pids(self, name: str) -> list[int]:
        """Return the processes of a job. The first one always counts: `environ` of a process is empty during its `exec`."""
        entry = f"{MARK}={self._mark(name)}".encode()
        first = self.mine[name].process
        found = [first.pid] if first is not None and first.poll() is None else []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(path.name) not in found and entry in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found
