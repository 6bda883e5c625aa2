"""A test cycle that runs three small jobs from submission to end, and a judge that checks the program's promises."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.breaking.forge import Forge, Forked, until
from tests.environ import NO_CONFIG

STATE_FILE = "gpu_scheduler_state.json"
# Key of a job → its exit code. a and b are lines of the jobs file; `gpujob submit` adds c.
CODES = {"a": 0, "b": 3, "c": 0}
JOB = """#!/bin/sh
echo "start $2 $$ $GPUJOB_ATTEMPT" >> "$1/ledger"
test -z "$4" || sleep "$4"
echo "end $2 $3" >> "$1/ledger"
exit "$3"
"""
WAKEUP = "Exception ignored when trying to write to the signal wakeup fd:\nTraceback"
FLAGS = ("--gpus=2", "--gpu-interval=0", "--assign-retry-wait=0.05")


@dataclass(slots=True)
class Verdict:
    """The result of `Cycle.judge`: the broken promises, and for each outcome the number of jobs with this outcome."""

    broken: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Cycle:
    """The folder of a scheduler in which one cycle runs.

    ``made``: all forked daemons and commands; ``acknowledged``: ids that `gpujob submit` has printed.
    """

    forge: Forge
    folder: Path
    environ: dict[str, str] = field(init=False)
    made: list[Forked] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        run = self.folder / "run"
        run.mkdir(exist_ok=True, mode=0o700)
        self.environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        bookings = self.folder.with_name(f"{self.folder.name}-bookings")
        bookings.mkdir(exist_ok=True, mode=0o700)
        self.environ.update(XDG_RUNTIME_DIR=str(run), PYTHONUNBUFFERED="1")
        self.environ.update(GPUJOB_BOOKINGS_FOLDER=str(bookings), GPUJOB_MACHINE_CONFIG=NO_CONFIG)
        self.environ["GPUJOB_SET_HISTORY"] = "false"  # the history's thread would write at random times
        script = self.folder / "job"
        script.write_text(JOB)
        script.chmod(0o700)

    @property
    def house(self) -> Path:
        return self.folder / ".gpujob"

    def line(self, key: str, code: int, seconds: str = "") -> str:
        """Return a line of the jobs file; its job has this key and this exit code.

        ``seconds``: how long the job sleeps before it ends. If it is empty, the job does not sleep.
        """
        return f"0,{self.folder}/job,,{self.folder} {key} {code} {seconds},;gpus=1;cuda=none\n"

    def lines(self, *keys: str) -> None:
        """Append a line for each of these jobs to the jobs file, all with one write."""
        with (self.folder / "jobs.txt").open("a") as stream:
            stream.write("".join(self.line(key, CODES[key]) for key in keys))

    def start(self, *words: str, held: bool = False, boot: str = "") -> Forked:
        """Start a daemon. ``held`` and ``boot`` have the same meaning as in `Forge.start`."""
        output = self.folder / f"daemon-{len(self.made)}.out"
        self.made.append(
            self.forge.start(["start", *FLAGS, *words], self.folder, self.environ, output, held=held, boot=boot)
        )
        return self.made[-1]

    def submit(self, key: str, *, held: bool = False) -> Forked:
        """Start `gpujob submit` for a job; return the process without waiting for its end."""
        output = self.folder / f"submit-{len(self.made)}.out"
        words = [
            "submit",
            "--gpus=1",
            "--cuda=none",
            "--",
            f"{self.folder}/job",
            str(self.folder),
            key,
            str(CODES[key]),
        ]
        self.made.append(self.forge.start(words, self.folder, self.environ, output, held=held))
        return self.made[-1]

    def acknowledge(self, submitted: Forked) -> None:
        """Record the id that this `gpujob submit` has printed, if any."""
        self.acknowledged += [int(line) for line in submitted.said().splitlines() if line.isdigit()]

    def supervisor(self, daemon: Forked) -> int:
        """Wait until the daemon's supervisor has installed its SIGCHLD handler; return its pid."""

        def find() -> int:
            if daemon.ended():
                raise TimeoutError(f"no supervisor: {daemon.said()}")
            for child in Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split():
                caught = _bytes(f"/proc/{child}/status").partition(b"SigCgt:")[2].split()[:1]
                if (
                    b"supervisor.py" in _bytes(f"/proc/{child}/cmdline")
                    and int(caught[0], 16) >> signal.SIGCHLD - 1 & 1
                ):
                    return int(child)
            return 0

        return int(until(find, "a supervisor"))

    def said(self) -> str:
        """Return the output of all daemons and commands, the supervisors' errors, and the main log."""
        house = [self.house / "supervisor.err", self.folder / "gpu_scheduler.log"]
        return "".join(
            path.read_text(errors="replace") for path in [*self.folder.glob("*.out"), *house] if path.exists()
        )

    def rows(self, query: str) -> list[tuple]:  # type: ignore[type-arg]
        """Return the rows of a query of the store; empty if there is no store."""
        if not (self.house / "store.db").exists():
            return []
        connection = sqlite3.connect(f"file:{self.house}/store.db?mode=ro", uri=True, timeout=10)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def ledger(self) -> list[list[str]]:
        """Return the lines that the jobs have written: (start, key, pid, attempt) and (end, key, code)."""
        path = self.folder / "ledger"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self) -> list[int]:
        """Return the pids of processes whose environment contains the path of this folder."""
        mark, found = os.fsencode(str(self.folder)), []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and mark + b"/" in _bytes(f"/proc/{name}/environ"):
                found.append(int(name))
        return found

    def finish(self) -> None:
        """Run a daemon without faults until all jobs have ended.

        Then wait until all processes of the cycle have ended.
        """
        last = self.start("--drain")
        until(last.ended, f"the daemon without faults ends\n{last.said()}", 120.0)
        until(lambda: not self.processes(), "all processes end")

    def judge(self, *, may_be_lost: frozenset[str] = frozenset(), never_ran: str = "") -> Verdict:
        """Compare the ledger, the acknowledged ids, the files and the store; return the verdict.

        ``may_be_lost``: keys of the jobs for which the outcome "lost" breaks no promise. ``never_ran``: an outcome that
        breaks no promise for a job that has not written its first line to the ledger.
        """
        verdict = Verdict()
        broken = verdict.broken.append
        said = self.said()
        # Python prints WAKEUP when a write into its wakeup pipe fails, which happens only by injection.
        if "Traceback" in said.replace(WAKEUP, "") or "internal error of gpujob" in said:
            broken("a traceback or a defect")
        ledger = self.ledger()
        starts = Counter(entry[1] for entry in ledger if entry[0] == "start")
        ends = {entry[1]: int(entry[2]) for entry in ledger if entry[0] == "end"}
        jobs = self.rows("SELECT id, spec, state, outcome, exit_code, signal, attempt FROM jobs ORDER BY id")
        keys = Counter(_key(self.folder, spec) for _, spec, *_ in jobs)
        for key in CODES:
            least = 1 if key != "c" or self.acknowledged else 0
            if not least <= keys[key] <= 1:
                broken(f"{keys[key]} jobs for {key}")
            if starts[key] > 1:
                broken(f"{key} started {starts[key]} times")
        if missing := set(self.acknowledged) - {job for job, *_ in jobs}:
            broken(f"acknowledged and gone: {missing}")
        for job, spec, state, outcome, code, number, _ in jobs:
            key = _key(self.folder, spec)
            verdict.outcomes[outcome or state] += 1
            if outcome == "lost":
                if key not in may_be_lost:
                    broken(f"job {job} ({key}) is lost")
            elif outcome == "exit":
                if (code, starts[key], ends.get(key)) != (CODES[key], 1, CODES[key]):
                    broken(f"job {job} ({key}): exit {code}, started {starts[key]} times, failed with {ends.get(key)}")
            elif outcome != never_ran or starts[key]:
                broken(f"job {job} ({key}) is {state}, {outcome} {code} {number}")
        self._files(broken)
        return verdict

    def _files(self, broken) -> None:  # type: ignore[no-untyped-def]
        try:
            state = json.loads((self.folder / STATE_FILE).read_bytes())
            if state["gpu_status"] != [0.0, 0.0] or state["running"]:
                broken(f"GPUs are not free: {state['gpu_status']}, {state['running']}")
        except (OSError, ValueError) as error:
            broken(f"state file: {error}")
        if (check := self.rows("PRAGMA integrity_check")) != [("ok",)]:
            broken(f"store: {check}")
        places = [self.folder, self.house, self.house / "attempts", self.house / "env", self.folder / "run"]
        for place in places:
            for path in place.iterdir() if place.exists() else ():
                if (
                    ".new-" in path.name
                    or path.name.startswith("packet-")
                    or path.name.endswith((".db.new", "-journal"))
                ):
                    broken(f"left behind: {path.name}")
                mode = path.lstat().st_mode
                if place != self.folder and mode & 0o077 and not stat.S_ISSOCK(mode):
                    broken(f"mode {mode & 0o777:o}: {path.name}")

    def end(self) -> None:
        """Kill the remaining processes of the cycle."""
        for one in self.made:
            one.close()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _key(folder: Path, spec: str) -> str:
    arguments = json.loads(spec)["arguments"]
    return str(arguments[arguments.index(str(folder)) + 1])


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
