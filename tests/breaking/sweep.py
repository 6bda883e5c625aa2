"""Faults at each system call of a cycle from submit to finish: the call fails, or its process is killed there.

`python -m tests.breaking.sweep` (make sweep). The sweep covers the calls that write, sync, rename, remove, open or
start something. Each of these calls gets a fault at its first, second, … last execution, in a cycle of its own.

For ``when=N`` strace counts the calls of each traced process separately, also with -f. So daemon, supervisor and submit
are swept separately, without -f. Only the exec of the jobs needs -f: it happens in new children of the supervisor.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.breaking.cycle import CODES, Cycle, Verdict
from tests.breaking.forge import Forge, Forked, until
from tests.breaking.tracing import Tracer, attach

KILL = "SIGKILL"
SHORT = "nothing written"  # the call writes nothing and returns 0
DISK = (KILL, "ENOSPC", "EIO")
SYNC = (KILL, "EIO", "ENOSPC")
FULL = ("EMFILE",)
# Name of a system call → the faults that are injected at it.
FAULTS: dict[str, tuple[str, ...]] = {
    "pwrite64": (*DISK, SHORT),
    "write": (*DISK, SHORT),
    "fsync": SYNC,
    "fdatasync": SYNC,
    "rename": DISK,
    "renameat2": DISK,
    "link": DISK,
    "unlink": (KILL, "EIO"),
    "mkdir": DISK,
    "ftruncate": DISK,
    "sendto": (KILL, "ENOBUFS"),
    "clone": (KILL, "EAGAIN"),
    "clone3": (KILL, "EAGAIN"),
    "vfork": (KILL, "EAGAIN"),
    "openat": ("EMFILE", "EIO"),
    "pread64": ("EIO",),
    "socket": FULL,
    "socketpair": FULL,
    "pipe2": FULL,
    "epoll_create1": FULL,
    "inotify_init1": FULL,
    "inotify_add_watch": ("ENOSPC",),
    "pidfd_open": FULL,
}
TARGETS = ("daemon", "supervisor", "exec", "submit")
# (target, whether the fault kills) → the outcome of all jobs; the fault hits the exec of each job, so no job runs.
NEVER_RAN = {("exec", True): "signal", ("exec", False): "could_not_start"}
LIMIT_S = 60.0
MARGIN = 2  # a cycle may have a few calls more than the counted one


@dataclass(frozen=True, slots=True)
class Point:
    """A fault at a system call.

    ``when``: the executions of the call at which the fault occurs, counted from 1, in strace's notation (``2``,
    ``1..3``). ``path``: if it is not empty, only calls on this file of the cycle's folder are counted.
    """

    target: str
    call: str
    fault: str
    when: str
    path: str = ""

    def words(self, folder: Path) -> list[str]:
        """Return the options with which strace injects the fault into a cycle in this folder."""
        how = {KILL: f"signal={KILL}", SHORT: "retval=0"}.get(self.fault, f"error={self.fault}")
        of = ["-P", str(folder / self.path)] if self.path else []
        return [*of, "-e", f"trace={self.call}", "-e", f"inject={self.call}:{how}:when={self.when}"]

    def __str__(self) -> str:
        return f"{self.target}:{self.call}:{self.fault}:{self.when}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a point.

    ``hit``: whether the fault was injected. ``how``: how the daemon ended: ``killed``, or ``code`` and the exit code.
    For the target submit, ``how`` says how `gpujob submit` ended.
    """

    point: Point
    hit: bool
    how: str
    verdict: Verdict
    folder: Path
    seconds: float


def one_cycle(cycle: Cycle, target: str, words: Sequence[str]) -> tuple[Path, str]:
    """Run a cycle with strace on ``target``; return the path of strace's log, and `Result.how`.

    ``words``: options of strace.
    """
    log = cycle.folder / "strace"
    tracer = None
    supervisors = target in ("supervisor", "exec")
    if supervisors:  # strace is attached before the first job
        daemon = cycle.start()
        tracer = attach(cycle.supervisor(daemon), log, [*words, *(["-f"] if target == "exec" else [])])
    submitted = cycle.submit("c", held=target == "submit")
    if target == "submit":
        tracer = hold(submitted, log, words)
    until(lambda: submitted.ended(1.0), "submit ends", LIMIT_S)
    cycle.acknowledge(submitted)
    cycle.lines("a", "b")
    if supervisors:
        until(lambda: daemon.ended() or _all_ended(cycle), f"the jobs' ends\n{daemon.said()}", LIMIT_S)
        daemon.signal(signal.SIGTERM)
    else:
        daemon = cycle.start("--drain", held=target == "daemon")
        if target == "daemon":
            tracer = hold(daemon, log, words)
    until(daemon.ended, f"the daemon's end\n{daemon.said()}", LIMIT_S)
    if tracer is not None:
        tracer.done()
    code = (submitted if target == "submit" else daemon).code()
    return log, "killed" if code is None else f"code {code}"


def hold(process: Forked, log: Path, words: Sequence[str]) -> Tracer:
    """Attach strace to a process that was started ``held``, and let the process continue."""
    until(lambda: "State:\tT" in Path(f"/proc/{process.pid}/status").read_text(), "it stops itself")
    tracer = attach(process.pid, log, words)
    process.signal(signal.SIGCONT)
    return tracer


def _all_ended(cycle: Cycle) -> bool:
    rows = cycle.rows("SELECT finished_at IS NOT NULL FROM jobs")
    return len(rows) == len(CODES) and all(row[0] for row in rows)


def count(forge: Forge, folder: Path, target: str) -> Counter[str]:
    """Run a cycle without faults; return how often the target makes each system call (name → number)."""
    cycle = Cycle(forge, folder)
    calls = ["execve"] if target == "exec" else list(FAULTS)
    try:
        log, _ = one_cycle(cycle, target, ["-e", f"trace={','.join(calls)}"])
        found = Counter(re.findall(r"^(?:\d+ +)?(\w+)\(", log.read_text(errors="replace"), re.MULTILINE))
        cycle.finish()
        if broken := cycle.judge().broken:
            raise AssertionError(f"without faults: {broken}")
    finally:
        cycle.end()
    return found


def points(forge: Forge, folder: Path, targets: Sequence[str] = TARGETS) -> Iterator[Point]:
    """Yield all points of these targets."""
    for target in targets:
        found = count(forge, folder / f"count-{target}", target)
        if target == "exec":  # strace counts in each child separately, where the first exec is the job's
            yield from (Point(target, "execve", fault, "1") for fault in (KILL, "EAGAIN", "ENOMEM", "EMFILE", "EIO"))
            continue
        for call, faults in FAULTS.items():
            for n in range(1, found[call] + MARGIN + 1 if found[call] else 1):
                yield from (Point(target, call, fault, str(n)) for fault in faults)


def strike(forge: Forge, folder: Path, point: Point) -> Result:
    """Run a cycle with one fault, and finish it with a daemon without faults. Judge the cycle and return the result."""
    begun = time.monotonic()
    cycle = Cycle(forge, folder)
    hit, how = False, ""
    verdict = Verdict()
    try:
        log, how = one_cycle(cycle, point.target, point.words(folder))
        text = log.read_text(errors="replace") if log.exists() else ""
        hit = "(INJECTED)" in text or "killed by SIGKILL" in text
        cycle.finish()
        verdict = cycle.judge(never_ran=NEVER_RAN.get((point.target, point.fault == KILL), ""))
    except Exception as error:  # the error is a broken promise, and the sweep continues
        verdict.broken.append(repr(error))
    finally:
        cycle.end()
    return Result(point, hit, how, verdict, folder, time.monotonic() - begun)


@dataclass(slots=True)
class Sweep:
    """Runs many points on several workers. Keeps the folder of each point that broke a promise."""

    place: Path
    workers: int
    results: list[Result] = field(default_factory=list)
    _local: threading.local = field(default_factory=threading.local)
    _forges: list[Forge] = field(default_factory=list)

    def _one(self, point: Point) -> Result:
        if not hasattr(self._local, "forge"):
            self._local.forge = Forge()
            self._forges.append(self._local.forge)
        folder = self.place / str(point).replace(":", "-").replace(" ", "-")
        result = strike(self._local.forge, folder, point)
        if not result.verdict.broken:
            shutil.rmtree(folder)
        return result

    def run(self, chosen: Sequence[Point]) -> None:
        """Run these points; print those that broke a promise."""
        begun, bar = time.monotonic(), sys.stderr.isatty()
        try:
            with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
                for number, result in enumerate(pool.map(self._one, chosen), 1):
                    self.results.append(result)
                    if result.verdict.broken:
                        print(f"{result.point}: {'; '.join(result.verdict.broken)} [{result.folder}]", flush=True)
                    if bar:
                        left = (time.monotonic() - begun) / number * (len(chosen) - number)
                        print(f"\r{number}/{len(chosen)}, {left:.0f} s left \033[K", end="", file=sys.stderr)
        finally:
            for forge in self._forges:
                forge.close()
        if bar:
            print(file=sys.stderr)

    def table(self) -> str:
        """Return the results as a Markdown table with a line for each target, call and fault."""
        lines = [
            "| process | call | fault | points | struck | how it ended | violations |",
            "|---|---|---|---|---|---|---|",
        ]
        groups: dict[tuple[str, str, str], list[Result]] = {}
        for result in self.results:
            point = result.point
            groups.setdefault((point.target, point.call, point.fault), []).append(result)
        for (target, call, fault), found in groups.items():
            struck = [result for result in found if result.hit]
            hows = Counter(result.how for result in struck)
            how = ", ".join(f"{how} {n}" for how, n in hows.most_common())
            broken = sum(bool(result.verdict.broken) for result in found)
            lines.append(f"| {target} | {call} | {fault} | {len(found)} | {len(struck)} | {how} | {broken} |")
        return "\n".join(lines)


def main() -> int:
    """Run the sweep; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaking.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS, help="daemon, supervisor, exec, submit (default: all)")
    parser.add_argument("--call", action="append", help="only this call")
    parser.add_argument("--fault", action="append", help="only this fault")
    parser.add_argument("--sample", type=int, help="only so many points, drawn by --seed")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    begun = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="gpujob-sweep-"))
    forge = Forge()
    try:
        chosen = list(points(forge, place, asked.targets))
    finally:
        forge.close()
    chosen = [
        p for p in chosen if (not asked.call or p.call in asked.call) and (not asked.fault or p.fault in asked.fault)
    ]
    if asked.sample:
        chosen = random.Random(asked.seed).sample(chosen, min(asked.sample, len(chosen)))
        print(f"seed {asked.seed}")
    sweep = Sweep(place, asked.workers)
    sweep.run(chosen)
    broken = [result for result in sweep.results if result.verdict.broken]
    outcomes: Counter[str] = sum((result.verdict.outcomes for result in sweep.results), Counter())
    print(sweep.table())
    print(
        f"{len(chosen)} points, {sum(result.hit for result in sweep.results)} struck, {len(broken)} broken promises, jobs: "
        f"{dict(outcomes)}, {time.monotonic() - begun:.0f} s"
    )
    if not broken:
        shutil.rmtree(place)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
