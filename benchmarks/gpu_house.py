"""A scheduler for the checks of `python -m benchmarks.on_gpu`, and functions that ask it by its commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from benchmarks import gpu_job
from benchmarks.gpu_machine import Machine
from benchmarks.house import House, Stuck, append, wait_until
from scheduler.core.admission import LOAD_WINDOW_S

COMMAND_S = 60.0
ENDED = ("done", "failed", "cancelled")
Document = dict[str, Any]


class GpuHouse(House):
    """A scheduler that manages the GPU of a `Machine` (a context manager). At exit its jobs are cancelled.

    ``python``: interpreter of the jobs. ``models``: the model table. ``interval_s``: time between two readings; None: the
    default of the scheduler.
    """

    def __init__(
        self, base: str, machine: Machine, python: str, models: dict[str, float], interval_s: float | None
    ) -> None:
        every = [] if interval_s is None else ["--gpu-interval", str(interval_s)]
        words = ("--gpu-ids", str(machine.index), "--python", python, *every)
        super().__init__(base, gpus=0, words=words, environ=machine.environ)
        self.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.machine, self.base, self.python = machine, base, python
        self.script = shutil.copy(gpu_job.__file__, self.folder)
        self._jobs = 0
        with open(self.path("llm_config.json"), "w", opener=_private, encoding="utf-8") as stream:
            json.dump({"models": models}, stream)

    def prepare(self) -> None:
        """Do nothing: the checks measure no times that depend on the disk."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if os.path.exists(self.store):
            with contextlib.suppress(Stuck):  # the jobs also end by themselves, when the folder is removed
                self.end_jobs()
        super().__exit__(kind, error, where)

    # -- jobs ---------------------------------------------------------------------------------------------

    def add(self, name: str, mib: int, *words: str, model: str = "", options: str = "") -> int:
        """Append a line with a job that takes ``mib`` MiB and runs until `end` names it; return the id of the job.

        ``words``: further arguments of `benchmarks/gpu_job.py`; ``options``: of the line, such as ``;gpus=1``.
        """
        arguments = " ".join([name, "--mib", str(mib), *words, *(["--llm", model] if model else [])])
        append(self.jobs_file, f"0,{self.script},,{arguments};label={name}{options}\n")
        self._jobs += 1
        self.wait_accepted(self._jobs, COMMAND_S)
        return self._jobs

    def end(self, *names: str) -> None:
        """Let the jobs with these names end well."""
        for name in names:
            with open(os.path.join(self.base, f"{name}.end"), "wb"):
                continue

    def end_jobs(self) -> None:
        """Cancel all jobs that have not ended, and wait for their ends. Raises Stuck."""
        with self.reading() as store:
            live = [str(row[0]) for row in store.execute("SELECT id FROM jobs WHERE finished_at IS NULL")]
        if live:
            self.command("cancel", *live)
            self.wait_state(*map(int, live), states=ENDED)

    # -- questions ----------------------------------------------------------------------------------------

    def ask(self, *words: str) -> Document:
        """Return the JSON that a command prints. Raises Stuck if it fails."""
        command = [sys.executable, "-m", "scheduler", *words, "--json"]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=COMMAND_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Stuck(f"not within {COMMAND_S:g} s: {' '.join(words)}") from None
        if done.returncode:
            raise Stuck(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
        found: Document = json.loads(done.stdout)
        return found

    def show(self, job: int) -> Document:
        """Return a job with its events."""
        return self.ask("show", str(job))

    def waiting(self, job: int, code: str = "") -> Document:
        """Wait until the scheduler lets a job wait (with this reason code, if one is given), and return it. Raises Stuck."""

        def look() -> Document | None:
            shown = self.show(job)
            return shown if shown["reason_code"] not in (None, "new") and code in ("", shown["reason_code"]) else None

        found: Document = self.wait(look, f"job {job} waiting {code}".strip())
        return found

    def wait(self, found: Callable[[], Any], wanted: str) -> Any:
        """Wait until ``found`` returns a true value, and return it. Raises Stuck."""
        last: list[Any] = [None]

        def look() -> bool:
            last[0] = found()
            return bool(last[0])

        wait_until(look, wanted, self.machine.patience_s, 0.05)
        return last[0]

    def wait_state(self, *jobs: int, states: Iterable[str]) -> None:
        """Wait until each of these jobs is in one of the states. Raises Stuck; the message tells the ends of the logs."""
        wanted, numbers = tuple(states), ",".join(map(str, jobs))
        with self.reading() as store:
            question = f"SELECT id, state FROM jobs WHERE id IN ({numbers})"
            try:
                self.wait(
                    lambda: all(row[1] in wanted for row in store.execute(question)), f"jobs {numbers} {wanted[0]}"
                )
            except Stuck as error:
                seen = "; ".join(
                    f"job {row[0]} is {row[1]}: {self._last_line(row[0])}" for row in store.execute(question)
                )
                raise Stuck(f"{error} ({seen})") from None

    def wait_done(self, *jobs: int) -> None:
        """Wait until these jobs have ended. Raises Stuck if one did not end well."""
        self.wait_state(*jobs, states=ENDED)
        bad = [job for job in jobs if self.show(job)["state"] != "done"]
        if bad:
            raise Stuck(f"job {bad[0]} did not end well: {self._last_line(bad[0])}")

    def report(self, job: int) -> Document:
        """Wait until the log of a job has its report (what it was given), and return the report. Raises Stuck."""
        found: Document = self.wait(lambda: self._report(job), f"report of job {job}")
        return found

    def _log_text(self, job: int) -> str:
        path = self.show(job)["log"]
        if not path or not os.path.exists(path):
            return ""
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()

    def _report(self, job: int) -> Document | None:
        shown = self._log_text(job)
        for line in shown.splitlines():
            if line.startswith(gpu_job.REPORT):
                report: Document = json.loads(line[len(gpu_job.REPORT) :])
                return report
        if self.show(job)["state"] in ENDED:
            raise Stuck(f"job {job} ended without a report: {self._last_line(job)}")
        return None

    def _last_line(self, job: int) -> str:
        return (self._log_text(job).strip().splitlines() or ["nothing in its log"])[-1]

    def gpu(self) -> Document:
        """Return the GPU, as `status` shows it."""
        found: Document = self.ask("status")["gpus"][0]
        return found

    def wait_gpu(self, fits: Callable[[Document], bool], wanted: str) -> Document:
        """Wait until `status` shows the GPU as wanted, and return it. Raises Stuck."""

        def look() -> Document | None:
            gpu = self.gpu()
            return gpu if fits(gpu) else None

        found: Document = self.wait(look, wanted)
        return found

    def wait_settled(self) -> None:
        """Wait until a reading came so long after the end of the last job that its memory is no longer awaited."""
        question = "SELECT min(read_at) > ? + (SELECT max(finished_at) FROM jobs) FROM readings"

        def look() -> bool:
            with self.reading() as store:
                return bool(store.execute(question, (LOAD_WINDOW_S + self.machine.interval_s,)).fetchone()[0])

        self.wait(look, "a reading some seconds after the end of the last job")

    def learned_peak_mib(self, model: str) -> int | None:
        """Return the highest memory in MiB that the scheduler has seen of the runs of a model; None: nothing seen."""
        found = [
            one["peak_memory"] for one in self.ask("needs")["models"] if one["model"] == model and one["peak_memory"]
        ]
        return found[0] >> 20 if found else None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
