"""Replays the states that a disk may have after a power cut. `python -m tests.breaking.disks` (make disks).

One cycle is recorded. Its jobs succeed, fail, are retried, are cancelled while running or are cancelled while waiting.
Then the files of each state are written into the same folder, and a daemon with another boot id continues from them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.breaking import disk
from tests.breaking.cycle import STATE_FILE, Cycle
from tests.breaking.disk import Recording, State
from tests.breaking.forge import Forge, Forked, until
from tests.breaking.tracing import recorded

# A job runs as long as the file `hold-KEY` exists.
JOB = """#!/bin/sh
echo "start $2 $GPUJOB_ATTEMPT" >> "$1/ledger"
while test -e "$1/hold-$2"; do sleep 0.02; done
echo "end $2 $GPUJOB_ATTEMPT $3" >> "$1/ledger"
exit "$3"
"""
CODES = {"a": 0, "b": 3, "c": 0, "d": 0, "e": 0, "g": 7}
LINES = ("a", "b")
MOST_ATTEMPTS = {"g": 2}
CANCELLED = ("d", "e")
KEPT = ("jobs.txt", "job", "run")  # the user's files, which are no part of the recorded disk
SEED, MOST, SHORT = 20261121, 5000, 100


@dataclass(slots=True)
class Story:
    """The output of the jobs and commands up to a moment, by the keys of the jobs.

    The output consists of starts, ends, acknowledged ids and confirmed cancels.
    """

    starts: set[tuple[str, int]] = field(default_factory=set)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    cut: int = 0  # which lines the jobs file misses: 3: the last one; 4: all; else none

    def hear(self, told: str, words: tuple[str, ...]) -> None:
        """Add a line of output, given as its words. ``told``: the label of the output file (`disk.Moment.told`)."""
        if told == "ledger" and words[0] == "start":
            self.starts.add((words[1], int(words[2])))
        elif told == "ledger":
            self.ends[words[1], int(words[2])] = int(words[3])
        elif told.startswith("submit-") and words and words[0].isdigit():
            self.acknowledged[told[-1]] = int(words[0])
        elif told.startswith("cancel-"):
            self.cancelled.add(told[-1])


class Disks:
    """A recorded cycle, and its folder, in which disk states are replayed.

    ``aside``: path to which the state folder is moved if a replayed state contains no state folder; ``ours``: the
    forked daemons and commands; ``lines``: contents of the jobs file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder.parent / f"{folder.name}-strace"
        self.forge = Forge(recorded(self.log, disk.CALLS))
        self.cycle = Cycle(self.forge, folder)
        (folder / "job").write_text(JOB)
        self.aside = folder.parent / f"{folder.name}-house"
        self.recording = Recording(folder)
        self.ours: list[Forked] = []
        self.lines = b""
        self.found: dict[str, bytes] = {}  # path → contents after the recording

    # -- recording ----------------------------------------------------------------------------------------

    def record(self) -> None:
        """Run the cycle under strace, and read its operations on the disk."""
        try:
            self._cycle()
        finally:
            self.close()
            self.forge = self.cycle.forge = Forge()
        seen = {"ledger": "ledger"}
        for word in (*(f"submit-{key}" for key in "cdeg"), *(f"cancel-{key}" for key in CANCELLED)):
            seen[f"{word}.out"] = word
        ignored = {
            *KEPT,
            *(path.name for path in self.folder.iterdir() if path.name.startswith(("daemon.out", "hold-"))),
        }
        ignored |= {f"{name}.code" for name in seen}
        self.lines = (self.folder / "jobs.txt").read_bytes()
        self.found = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.endswith("-shm") and path.name not in seen
            and path.relative_to(self.folder).parts[0] not in ignored
        }  # fmt: skip
        self.recording.read(self.log, ignored, seen)
        self.log.unlink()

    def _cycle(self) -> None:
        self._told("submit-c", *self._submit("c"))
        with (self.folder / "jobs.txt").open("w") as stream:
            for key in LINES:
                stream.write(f"0,{self.folder}/job,,{self.folder} {key} {CODES[key]},;gpus=1;cuda=none\n")
        for key in "d", "e":
            (self.folder / f"hold-{key}").touch()
        daemon = self._fork("daemon", "start", "--gpus=1", "--gpu-interval=0", "--assign-retry-wait=0.05")
        self._ended(3)
        self._told("submit-d", *self._submit("d"))
        until(lambda: "start d" in self._ledger(), "d runs")
        self._told("submit-e", *self._submit("e"))
        self._told("cancel-e", "cancel", "5")
        self._told("cancel-d", "cancel", "4")
        self._ended(5)
        self._told("submit-g", *self._submit("g", "--retries=1"))
        self._ended(6)
        daemon.signal(signal.SIGTERM)
        until(daemon.ended, "the daemon's end")

    def _submit(self, key: str, *more: str) -> list[str]:
        return ["submit", "--gpus=1", "--cuda=none", *more, "--", str(self.folder / "job"), str(self.folder), key, str(CODES[key])]  # fmt: skip

    def _fork(self, name: str, *words: str, boot: str = "") -> Forked:
        made = self.forge.start(list(words), self.folder, self.cycle.environ, self.folder / f"{name}.out", boot=boot)
        self.ours.append(made)
        return made

    def _told(self, name: str, *words: str) -> None:
        made = self._fork(name, *words)
        until(made.ended, f"{words} ends\n{made.said()}")
        assert made.code() == 0, (words, made.said())

    def _ended(self, number: int) -> None:
        def all_ended() -> bool:
            rows = self.cycle.rows("SELECT finished_at IS NOT NULL FROM jobs")
            return len(rows) == number and all(row[0] for row in rows)

        until(all_ended, f"{number} jobs end: {self._ledger()}")

    def _ledger(self) -> str:
        path = self.folder / "ledger"
        return path.read_text() if path.exists() else ""

    # -- replaying ----------------------------------------------------------------------------------------

    def replay(self, state: State) -> tuple[list[str], Counter[str]]:
        """Let a daemon continue from a state; return the broken promises, and the number of jobs by outcome."""
        before = Story()
        for moment in self.recording.moments:
            if (moment.done, moment.syncs) <= (state.moment.done, state.moment.syncs) and moment.told:
                before.hear(moment.told, moment.words)
        tree = self.recording.tree(state.ops(self.recording))
        self._lay_out(tree)
        self._spoil_lines(before, state)
        boot = self.folder.parent / f"{self.folder.name}-boot"
        boot.write_text(f"{uuid.uuid4()}\n")
        how: Counter[str] = Counter()
        broken: list[str] = []
        words = ("start", "--drain", "--gpus=1", "--gpu-interval=0", "--assign-retry-wait=0.05")
        try:
            daemon = self._run("daemon", *words, boot=str(boot))
            if "recover" in daemon.said() and "scheduler started" not in daemon.said():
                how["recover asked for"] += 1
                lines = daemon.said().splitlines()
                if len(lines) != 1 or "gpujob recover" not in lines[0]:
                    broken.append(f"no clear line: {lines}")
                self._run("recover", "recover", boot=str(boot))
                daemon = self._run("daemon", *words, boot=str(boot))
            if "scheduler started" not in daemon.said():
                broken.append(f"does not start: {daemon.said()}")
            if "Traceback" in self.cycle.said() or "internal error of gpujob" in self.cycle.said():
                broken.append("a traceback")
            broken += self._judge(before, how, _whole(tree.get(STATE_FILE)))
        except (TimeoutError, OSError, ValueError, sqlite3.Error) as error:
            broken.append(repr(error))
        return broken, how

    def _run(self, name: str, *words: str, boot: str) -> Forked:
        made = self._fork(name, *words, boot=boot)
        until(made.ended, f"{words[0]} ends\n{made.said()}")
        return made

    def _lay_out(self, tree: dict[str, bytes | None]) -> None:
        """Replace the folder's files by this tree.

        The state folder keeps its inode, because the program refuses a copied state folder.
        """
        self.close(forge=False)
        house = self.cycle.house
        if self.aside.exists():
            shutil.rmtree(house, ignore_errors=True)
            self.aside.rename(house)
        for path in self.folder.iterdir():
            if path.name not in KEPT and path != house:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in house.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if ".gpujob" not in tree:
            house.rename(self.aside)
        for name, data in tree.items():
            path = self.folder / name
            if data is None:
                path.mkdir(mode=0o700, exist_ok=True)
            else:
                path.write_bytes(data)
                path.chmod(0o600)

    def _spoil_lines(self, before: Story, state: State) -> None:
        """Remove the last line of the jobs file in a fifth of the states, and all its lines in another fifth.

        The user writes this file without a sync, so a power cut may lose lines.
        """
        path = self.folder / "jobs.txt"
        lines = self.lines
        before.cut = (len(state.dropped) + state.moment.done) % 5
        with path.open("r+b") as stream:  # keeps the inode, as a power cut does
            stream.truncate()
            stream.write({3: lines.partition(b"\n")[0] + b"\n", 4: b""}.get(before.cut, lines))

    def _judge(self, before: Story, how: Counter[str], whole_before: bool) -> list[str]:
        broken = []
        after = Story()
        for line in self._ledger().splitlines():
            after.hear("ledger", tuple(line.split()))
        jobs = {}
        for job, spec, state, outcome, code, attempt in self.cycle.rows(
            "SELECT id, spec, state, outcome, exit_code, attempt FROM jobs ORDER BY id"
        ):
            arguments = json.loads(spec)["arguments"]
            key = arguments[arguments.index(str(self.folder)) + 1]
            if key in jobs:
                broken.append(f"two jobs for {key}")
            jobs[key] = job
            how[outcome or state] += 1
            if outcome == "exit":
                end = before.ends.get((key, attempt), after.ends.get((key, attempt)))
                if code != CODES[key] or end != code:
                    broken.append(f"{key} failed with {code}, by the ledger {end}")
            elif outcome == "cancelled":
                if key not in CANCELLED:
                    broken.append(f"{key} is cancelled")
            elif outcome != "lost":
                broken.append(f"{key} is {state}, {outcome}")
            elif not any(started == key for started, _ in before.starts):
                how["lost, never started"] += 1
        for key in LINES[: {3: 1, 4: 0}.get(before.cut, len(LINES))]:
            if key not in jobs:
                broken.append(f"there is no job for the line of {key}")
        for key, job in before.acknowledged.items():
            if jobs.get(key) != job:
                broken.append(f"{key} was acknowledged as {job}, is {jobs.get(key)}")
        for key in before.cancelled:
            if any(started == key for started, _ in after.starts):
                broken.append(f"{key} was cancelled and started")
        for key, attempt in after.starts:
            earlier = [number for started, number in before.starts if started == key]
            if attempt in earlier or (earlier and MOST_ATTEMPTS.get(key, 1) <= len(earlier)):
                broken.append(f"{key} was started again, attempt {attempt} after {earlier}")
            if attempt > MOST_ATTEMPTS.get(key, 1):
                broken.append(f"{key} was started as attempt {attempt}")
        try:
            shown = json.loads((self.folder / STATE_FILE).read_bytes())
            if shown["gpu_status"] != [0.0] or shown["running"]:
                broken.append(f"GPUs are not free: {shown['gpu_status']}")
        except ValueError:
            if whole_before:  # the daemon sets an invalid file aside after a second, and may have ended before that
                broken.append("the state file is no JSON")
            how["spoiled state file"] += 1
        if self.cycle.rows("PRAGMA integrity_check") != [("ok",)]:
            broken.append("the store is damaged")
        return broken

    def close(self, *, forge: bool = True) -> None:
        """End all processes.

        If ``forge`` is False, end only the forked daemons and commands, and not the forking server.
        """
        for one in self.ours:
            one.close()
        self.ours.clear()
        if forge:
            for pid in self.cycle.processes():
                with contextlib.suppress(ProcessLookupError):  # the process may have ended just now
                    os.kill(pid, signal.SIGKILL)
            self.forge.close()


def _whole(data: bytes | None) -> bool:
    try:
        return data is None or bool(json.loads(data))
    except ValueError:
        return False


def place_for_states() -> Path:
    """Create a folder and return its path.

    The folder is in memory if possible, because thousands of states of some megabytes each are written into it.
    """
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="gpujob-disks-", dir=memory if os.access(memory, os.W_OK) else None))


@dataclass(slots=True)
class Figures:
    """Numbers that the replays count. ``states``: replayed states; ``bad``: states after which a promise was broken."""

    states: int = 0
    bad: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


def work(place: Path, seed: int, most: int, share: tuple[int, int], figures: Figures) -> None:
    """Record a cycle, replay some of its disk states, and add the results to ``figures``.

    ``most``: how many states are computed. ``share``: (k, n): every n-th of these states is replayed, beginning with
    the state at index k.
    """
    first, step = share
    disks = Disks(place / f"house-{first}")
    try:
        disks.record()
        recording = disks.recording
        chosen = disk.states(recording, most, seed)[first::step]
        print(
            f"{len(recording.ops)} operations, {recording.syncs} syncs, written through mappings: "
            f"{', '.join(sorted(recording.shared)) or 'nothing'}; {len(chosen)} states",
            flush=True,
        )
        for state in chosen:
            broken, how = disks.replay(state)
            figures.states += 1
            figures.kinds[state.kind] += 1
            figures.outcomes += how
            if broken:
                figures.bad += 1
                print(f"{recording.describe(state)}: {'; '.join(broken)}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{figures.states}/{most} \033[K", end="", file=sys.stderr)
    finally:
        disks.close()


def main() -> int:
    """Record, replay and print the figures; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaking.disks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, default=MOST)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--workers", type=int, default=2, help="each records a cycle of its own")
    asked = parser.parse_args()
    begun = time.monotonic()
    place, figures = place_for_states(), Figures()
    print(f"seed {asked.seed}")
    try:
        with concurrent.futures.ThreadPoolExecutor(asked.workers) as pool:
            for done in [
                pool.submit(work, place, asked.seed, asked.states, (n, asked.workers), figures)
                for n in range(asked.workers)
            ]:
                done.result()
    finally:
        shutil.rmtree(place)
    kinds = ", ".join(f"{kind} {count}" for kind, count in figures.kinds.items())
    outcomes = ", ".join(f"{name} {count}" for name, count in figures.outcomes.items())
    print(
        f"{figures.states} states ({kinds}); jobs: {outcomes}; {figures.bad} broken, {time.monotonic() - begun:.0f} s"
    )
    return int(bool(figures.bad))


if __name__ == "__main__":
    sys.exit(main())
