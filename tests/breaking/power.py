"""Power cuts: all processes of a machine (daemon, supervisor, jobs) are killed simultaneously, many times.

The machine is a PID namespace with its own boot id. `python -m tests.breaking.power` (make power). Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.breaking.forge import ROOT, until
from tests.environ import clean

JOB = """#!/bin/sh
echo "start $2 $GPUJOB_ATTEMPT $GPUJOB_GPUS" >> "$1/ledger"
sleep "$4"
echo "end $2 $GPUJOB_ATTEMPT $3" >> "$1/ledger"
exit "$3"
"""
# PID 1 of the machine: mounts the boot id, runs the daemon, and waits for the file `off`.
MACHINE = """
mount --bind "$1" /proc/sys/kernel/random/boot_id
test -z "$2" || echo "$2" > /proc/sys/kernel/ns_last_pid
shift 2
"$@" < /dev/null
echo $? > ended
while test ! -e off; do sleep 0.02; done
"""
SEED, CUTS = 20261121, 100
GPUS = 2


@dataclass(slots=True)
class Machine:
    """A PID namespace with its own boot id (the machine), and a folder (its disk).

    ``codes``: key of a job → its exit code; ``retries``: keys of the jobs with retries.
    """

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    codes: dict[str, int] = field(default_factory=dict)
    retries: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        script = self.folder / "job"
        script.write_text(JOB)
        script.chmod(0o700)

    def on(self, *words: str, last_pid: int = 0) -> None:
        """Boot with a new boot id, and start a daemon.

        If ``last_pid`` is not 0, new pids begin after this number.
        """
        boot = self.folder / "boot"
        boot.write_text(f"{uuid.uuid4()}\n")
        for name in "ended", "off":
            (self.folder / name).unlink(missing_ok=True)
        environ = clean()
        environ.update(PYTHONPATH=str(ROOT), XDG_RUNTIME_DIR=str(self.folder), GPUJOB_SET_HISTORY="false")
        start = [
            sys.executable,
            "-m",
            "scheduler",
            "start",
            f"--gpus={GPUS}",
            "--gpu-interval=0",
            "--assign-retry-wait=0.05",
        ]
        pid = str(last_pid or "")
        with (self.folder / "out").open("ab") as out:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child", "sh", "-c", MACHINE, "sh",
                 str(boot), pid, *start, *words],
                cwd=self.folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def cut(self) -> None:
        """Cut the power: kill PID 1; the kernel then kills all other processes of the namespace."""
        assert self.process is not None
        own = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        first = until(lambda: Path(own).read_text().split() or self.process.poll() is not None, "PID 1")  # type: ignore[union-attr]
        if first is not True:
            os.kill(int(first[0]), signal.SIGKILL)
        self.process.wait(30)  # unshare waits for PID 1, which ends after all other processes

    def off(self, limit: float = 60.0) -> int:
        """Wait until the daemon has ended, and switch the machine off; return the daemon's exit code."""
        until(lambda: (self.folder / "ended").exists(), f"the daemon ends\n{self.said()}", limit)
        (self.folder / "off").touch()
        assert self.process is not None
        self.process.wait(30)
        return int((self.folder / "ended").read_text())

    def line(self, key: str, code: int, seconds: float, retries: int = 0) -> None:
        """Append a job to the jobs file."""
        self.codes[key] = code
        more = f";retries={retries}" if retries else ""
        if retries:
            self.retries.add(key)
        with (self.folder / "jobs.txt").open("a") as stream:
            stream.write(f"0,{self.folder}/job,,{self.folder} {key} {code} {seconds},;gpus=1{more}\n")

    def said(self) -> str:
        """Return the output of all daemons."""
        return (self.folder / "out").read_text(errors="replace")

    def ledger(self) -> list[list[str]]:
        """Return the lines that the jobs have written: (start, key, attempt, GPU) and (end, key, attempt, code)."""
        path = self.folder / "ledger"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def rows(self, query: str) -> list[tuple]:  # type: ignore[type-arg]
        """Return the rows of a query of the store."""
        connection = sqlite3.connect(f"file:{self.folder}/.gpujob/store.db?mode=ro", uri=True, timeout=10)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def judge(self) -> tuple[list[str], Counter[str]]:
        """Return the broken promises, and the number of jobs by outcome."""
        broken, how = [], Counter[str]()
        ledger = self.ledger()
        starts = Counter((key, int(attempt)) for what, key, attempt, _ in ledger if what == "start")
        ends = {(key, int(attempt)): int(code) for what, key, attempt, code in ledger if what == "end"}
        broken += [f"{key}, attempt {n}, started {times} times" for (key, n), times in starts.items() if times > 1]
        for key, n in starts:
            # Only a known failure is retried; a lost attempt is not.
            if n > 1 and (key not in self.retries or not ends.get((key, n - 1))):
                broken.append(f"{key} was started again, attempt {n}")
        keys: Counter[str] = Counter()
        for job, spec, state, outcome, code, attempt in self.rows(
            "SELECT id, spec, state, outcome, exit_code, attempt FROM jobs"
        ):
            arguments = json.loads(spec)["arguments"]
            key = arguments[1]
            keys[key] += 1
            how[outcome or state] += 1
            end = ends.get((key, attempt))
            if outcome == "exit" and (code != self.codes[key] or end != code):
                broken.append(f"job {job} ({key}): exit {code}, by the ledger {end}")
            elif outcome == "lost":
                how["lost, never started"] += not starts[key, attempt]
                how["lost, with an end in the ledger"] += end is not None
            elif outcome != "exit":
                broken.append(f"job {job} ({key}) is {state}, {outcome}")
            if end is None and starts[key, attempt]:
                how["cut off"] += 1
                if outcome != "lost":
                    broken.append(f"job {job} ({key}) was cut off and is {outcome}")
        broken += [f"{keys[key]} jobs for the line of {key}" for key in self.codes if keys[key] != 1]
        shown = json.loads((self.folder / "gpu_scheduler_state.json").read_bytes())
        if shown["gpu_status"] != [0.0] * GPUS or shown["running"]:
            broken.append(f"GPUs are not free: {shown['gpu_status']}")
        if self.rows("PRAGMA integrity_check") != [("ok",)]:
            broken.append("the store is damaged")
        if "Traceback" in self.said() or "internal error of gpujob" in self.said():
            broken.append("a traceback")
        how["tried again on request"] = sum(n > 1 for _, n in starts)
        return broken, how


def storm(machine: Machine, cuts: int, dice: random.Random) -> tuple[list[str], Counter[str]]:
    """Add jobs, and cut the power ``cuts`` times at random moments. Then let all jobs end.

    Return the broken promises, and for each outcome the number of jobs with this outcome.
    """
    bar = sys.stderr.isatty()
    for number in range(cuts):
        for n in range(dice.randint(1, 3)):
            retries = 2 if dice.random() < 0.2 else 0
            code = 9 if retries else dice.choice([0, 0, 3])
            machine.line(f"j{number}.{n}", code, round(dice.uniform(0, 0.8), 2), retries)
        noted = len(machine.ledger())
        machine.on()
        if dice.random() < 0.7:  # a cut at a purely random time would rarely hit a running job
            until(
                lambda n=noted: len(machine.ledger()) > n or (machine.folder / "ended").exists(), "a job starts or ends"
            )
            time.sleep(dice.uniform(0, 0.3))
        else:
            time.sleep(dice.uniform(0, 1.5))
        machine.cut()
        if bar:
            print(f"\r{number + 1}/{cuts} \033[K", end="", file=sys.stderr)
    if bar:
        print(file=sys.stderr)
    machine.on("--drain")
    machine.off(60.0 + cuts)
    return machine.judge()


def main() -> int:
    """Run the long form of the power cuts; return 1 if a promise was broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaking.power", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuts", type=int, default=CUTS)
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    begun = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="gpujob-power-"))
    machine = Machine(place / "disk")
    print(f"seed {asked.seed}")
    broken, how = storm(machine, asked.cuts, random.Random(asked.seed))
    for text in broken:
        print(text)
    found = ", ".join(f"{name} {count}" for name, count in how.items() if count)
    print(
        f"{asked.cuts} cuts, {len(machine.codes)} jobs ({len(machine.retries)} with retries): {found}; "
        f"{len(broken)} broken, {time.monotonic() - begun:.0f} s"
    )
    if not broken:
        shutil.rmtree(place)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
