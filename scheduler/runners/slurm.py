"""Slurm as an engine, by its commands: sbatch, squeue, scancel, sinfo, and sacct where it answers."""

from __future__ import annotations

import math
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence

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
from scheduler.core.errors import SchedulerError

LIMIT_S = 30.0  # of one command; the commands of Slurm themselves give up after about 10 s without an answer
NEEDED = ("sbatch", "squeue", "scancel", "sinfo")
PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "SLURM_CONF",
    "TMPDIR",
    "KRB5CCNAME",
    "LD_LIBRARY_PATH",
)
UNTYPED = (
    "the GPUs of {} have shards but no Type in gres.conf: some versions of Slurm (22.05) then give a GPU as a whole "
    "although shards of it are in use"
)
SPARE_LIMIT_S = 300  # added to the time limit for Slurm, so that gpujob ends the job first
_SEPARATOR = "|"
_LISTED = "JobID:|,State:|,exit_code:|,NodeList:|,Partition:|,Reason:|,Name:|"
_NODES = "NodeList:|,StateLong:|,Partition:|,Gres:|,GresUsed:|,CPUs:|,Reason:|"

RUNNING = frozenset("RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING".split())
QUEUED = frozenset(
    "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT POWER_UP_NODE".split()
)
LOST = frozenset("NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL REVOKED".split())  # nobody knows the exit code
BADLY = frozenset("CANCELLED TIMEOUT DEADLINE OUT_OF_MEMORY PREEMPTED".split()) | LOST
# States of nodes on which no job can start.
OUT = frozenset(
    "down drained draining drain fail failing error unknown inval maint perfctrs reboot reboot_issued blocked".split()
)
# Messages of sbatch about the job itself: another try would be refused, too.
FINAL = (
    "requested node configuration is not available",
    "invalid generic resource",
    "invalid feature specification",
    "requested time limit is invalid",
    "node count specification invalid",
    "invalid node name specified",
    "memory specification can not be satisfied",
    "more processors requested than permitted",
    "requested partition configuration not available",
)
# Messages after which it is not known whether Slurm has the job.
UNCLEAR = (
    "unable to contact",
    "timed out",
    "timeout",
    "connection",
    "communication",
    "zero bytes",
    "unexpected message",
)


class Slurm:
    """An engine, see `core/engine.py: Engine`.

    ``arguments``, ``nice_step``: return the settings `sbatch_args` and `nice_step`. ``environ``: environment of the
    scheduler.
    """

    name = "slurm"
    title = "Slurm"
    tied = False
    gone_after_s = math.inf

    def __init__(
        self,
        environ: Mapping[str, str],
        arguments: Callable[[], Sequence[str]] = tuple,
        nice_step: Callable[[], int] = lambda: 100,
        limit_s: float = LIMIT_S,
    ) -> None:
        # A minimal environment: sbatch passes on its own, and with --export=NONE nodes would run the login scripts.
        self._environ = {name: environ[name] for name in PASSED_ON if name in environ}
        self._arguments, self._nice_step, self._limit_s = arguments, nice_step, limit_s
        self._user = _user()
        self._rules = EngineRules(self.title, 0)  # shards: as in the last report

    def check(self) -> None:
        """Raise SchedulerError if a command of Slurm is missing."""
        missing = [name for name in NEEDED if shutil.which(name, path=self._environ.get("PATH")) is None]
        if missing:
            raise SchedulerError(
                f"--engine slurm needs the commands of Slurm; not found: {', '.join(missing)}",
                do="start gpujob where sbatch works, for example on the login node",
            )

    def submit(self, work: Submission) -> str:
        """Submit a job by sbatch, and return its number. Raises EngineBusy, EngineRefused or EngineDown."""
        done = self._run("sbatch", self._sbatch(work), may_fail=True)
        number = next(
            (line for line in reversed(done.stdout.splitlines()) if re.fullmatch(r"\d+(;\S*)?", line.strip())), ""
        )
        if done.returncode == 0 and number:
            return number.strip().partition(";")[0]
        said = _message(done.stderr or done.stdout) or f"sbatch ended with code {done.returncode} and no job number"
        low = said.lower()
        if done.returncode == 0 or any(text in low for text in UNCLEAR):
            raise EngineDown(f"Slurm does not answer: sbatch says: {said}")
        if any(text in low for text in FINAL):
            raise EngineRefused(f"Slurm refuses the job: {said}")
        raise EngineBusy(
            f"Slurm takes no jobs: sbatch says: {said}; correct it, or the setting sbatch_args (jobs wait)"
        )

    def _sbatch(self, work: Submission) -> list[str]:
        out = [
            "--parsable", "--no-requeue", "--export=ALL", "--open-mode=append", f"--job-name={work.name}",
            f"--comment={work.comment}", f"--output={work.output}", "--nodes=1", "--ntasks=1",
        ]  # fmt: skip
        kind = f":{work.type}" if work.type else ""
        shards = self._rules.shards_of(work.need)
        if shards:
            out.append(f"--gres=shard{kind}:{shards}")
        elif work.need.count:
            out.append(f"--gres=gpu{kind}:{self._rules.booked(work.need).count}")
        if self._nice_step():
            out.append(f"--nice={max(0, work.priority) * self._nice_step()}")
        if work.time_limit_s is not None:
            out.append(f"--time={-(-int(work.time_limit_s + SPARE_LIMIT_S) // 60)}")
        others = [node for node in self._known if node not in work.nodes]
        if len(work.nodes) == 1:
            out.append(f"--nodelist={work.nodes[0]}")
        elif work.nodes and others:  # a list of several nodes would mean all of them
            out.append(f"--exclude={','.join(others)}")
        return [*out, *self._arguments(), *work.command]

    def jobs(self, prefix: str) -> dict[str, EngineJob]:
        """Return our jobs in Slurm, by name. Raises EngineDown, also for any line that is not understood."""
        done = self._run("squeue", ["-h", "-t", "all", "-u", self._user, "-O", _LISTED])
        found: dict[str, EngineJob] = {}
        for line in done.stdout.splitlines():
            fields = [field.strip() for field in line.rstrip(_SEPARATOR + " ").split(_SEPARATOR, 6)]
            if len(fields) != 7 or not fields[0].split("_")[0].isdigit():
                raise EngineDown(f"Slurm does not answer: squeue says: {line.strip()[:200]}")
            number, state, code, node, partition, why, name = fields
            if not name.startswith(prefix):
                continue
            job = _job(name, number, state, code, node, partition, why)
            before = found.get(name)
            if before is None or before.phase is JobPhase.ENDED:  # of two jobs of one name, the one that lives
                found[name] = job
        return found

    def history(self, names: Sequence[str]) -> dict[str, EngineJob]:
        """Return what sacct tells about these jobs; nothing where Slurm keeps no accounts."""
        if not names or shutil.which("sacct", path=self._environ.get("PATH")) is None:
            return {}
        words = ["-n", "-X", "-P", "-u", self._user, "--name", ",".join(names), "-S", "now-30days",
                 "-o", "JobID,State,ExitCode,NodeList,Partition,JobName"]  # fmt: skip
        done = self._run("sacct", words, may_fail=True)
        found = {}
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            fields = line.split(_SEPARATOR)
            if len(fields) == 6:
                number, state, code, node, partition, name = fields
                exit_code, _, signal = code.partition(":")
                raw = int(exit_code or 0) << 8 | int(signal or 0)
                found[name] = _job(name, number, state, str(raw), node, partition, "")
        return found

    def cancel(self, name: str, hard: bool) -> None:
        """End a job. It is named by its name: after a crash of slurmctld its number may be that of another job."""
        how = ["--signal=KILL", "--full"] if hard else []
        done = self._run("scancel", [f"--name={name}", f"--user={self._user}", *how], may_fail=True)
        said = _message(done.stderr)
        if done.returncode and any(text in said.lower() for text in UNCLEAR):
            raise EngineDown(f"Slurm does not answer: scancel says: {said}")
        if hard:  # a waiting job gets no signal
            self._run("scancel", [f"--name={name}", f"--user={self._user}", "--state=PENDING"], may_fail=True)

    def report(self) -> Report:
        """Return the nodes that sinfo shows, of the partition of `sbatch_args` if it names one."""
        partition = _partition(self._arguments())
        done = self._run("sinfo", ["-h", "-N", *(["-p", partition] if partition else []), "-O", _NODES])
        nodes: dict[str, EngineNode] = {}
        for line in done.stdout.splitlines():
            fields = [field.strip() for field in line.rstrip().split(_SEPARATOR)]
            if len(fields) != 8:
                raise EngineDown(f"Slurm does not answer: sinfo says: {line.strip()[:200]}")
            name, state, part, gres, used, cpus, reason, _ = fields
            if name in nodes:  # it is in several partitions
                continue
            nodes[name] = EngineNode(
                name, part.rstrip("*"), gpu_types(gres), used_gpus(used), _count(gres, "shard"),
                int(cpus) if cpus.isdigit() else 0, node_problem(name, state, reason),
            )  # fmt: skip
        self._known = list(nodes)
        shards = max((node.shards // len(node.types) for node in nodes.values() if node.types), default=0)
        self._rules = EngineRules(self.title, shards)
        untyped = [node.name for node in nodes.values() if node.shards and "gpu" in node.types]
        notes = (UNTYPED.format(", ".join(untyped[:4])),) if untyped else ()
        return Report(tuple(nodes.values()), shards, notes)

    _known: Sequence[str] = ()

    def logs(self, name: str) -> str:
        """Return an empty text: Slurm writes its output into the file that `Submission.output` names."""
        return ""

    def _run(self, program: str, words: Iterable[str], *, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                [program, *words], capture_output=True, text=True, errors="replace", timeout=self._limit_s,
                env=self._environ, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise EngineDown(f"Slurm does not answer: {program} took more than {self._limit_s:g} s") from None
        except OSError as error:
            raise EngineDown(f"cannot run {program}: {error.strerror}") from None
        if done.returncode and not may_fail:
            said = _message(done.stderr or done.stdout)
            raise EngineDown(f"Slurm does not answer: {program} says: {said or f'code {done.returncode}'}")
        return done


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _message(text: str) -> str:
    """Return the error of a command of Slurm: its last line that is not empty, without the name of the command."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return re.sub(r"^(sbatch|squeue|scancel|sinfo|slurm_\w+): (error|fatal): ", "", errors[-1])[:300] if errors else ""


def _job(name: str, number: str, state: str, code: str, node: str, partition: str, why: str) -> EngineJob:
    word = (state.split() or ["UNKNOWN"])[0].rstrip("+")  # sacct writes "CANCELLED by 1000"
    if word in QUEUED:
        return EngineJob(name, number, JobPhase.QUEUED, word, partition=partition, why=why)
    if word in RUNNING or not (word in BADLY or word in ("COMPLETED", "FAILED")):
        return EngineJob(name, number, JobPhase.RUNNING, word, node, partition)
    raw = int(code) if code.isdigit() else None
    exit_code = signal = None
    if word not in LOST and raw is not None:
        if raw & 127:
            signal = raw & 127
        elif word in ("COMPLETED", "FAILED"):
            exit_code = raw >> 8
        else:
            signal = 15  # Slurm ended it
    return EngineJob(
        name, number, JobPhase.ENDED, word, node, partition, exit_code, signal, word in BADLY, word in LOST
    )


def _partition(arguments: Sequence[str]) -> str:
    """Return the partition that arguments of sbatch name; empty if they name none."""
    words = list(arguments)
    for at, word in enumerate(words):
        if word in ("-p", "--partition") and at + 1 < len(words):
            return words[at + 1]
        if word.startswith("--partition="):
            return word.partition("=")[2]
        if word.startswith("-p") and not word.startswith("--") and len(word) > 2:
            return word[2:]
    return ""


def _resources(text: str) -> list[str]:
    """Split a list of resources at the commas that are not in parentheses."""
    return [piece for piece in re.split(r",(?![^(]*\))", text) if piece and piece != "(null)"]


def _count(text: str, name: str) -> int:
    """Return how many of the resource ``name`` a list such as ``gpu:a100:4(S:0-1),shard:16`` has."""
    total = 0
    for piece in _resources(text):
        words = piece.partition("(")[0].split(":")
        if words[0] == name and words[-1].isdigit():
            total += int(words[-1])
    return total


def gpu_types(text: str) -> tuple[str, ...]:
    """Return the type of each GPU in a list of resources: ``gpu:a100:2,shard:8`` → ("a100", "a100")."""
    found: list[str] = []
    for piece in _resources(text):
        words = piece.partition("(")[0].split(":")
        if words[0] == "gpu" and words[-1].isdigit():
            found += [words[1] if len(words) > 2 else "gpu"] * int(words[-1])
    return tuple(found)


def used_gpus(text: str) -> frozenset[int]:
    """Return the numbers of the GPUs in use: ``gpu:a100:2(IDX:0-1),shard:a100:1(IDX:3)`` → {0, 1, 3}.

    Newer versions write shards as ``shard:3(0/4,3/4)``: used and existing shards of each GPU.
    """
    used: set[int] = set()
    for piece in _resources(text):
        words, _, inside = piece.rstrip(")").partition("(")
        if words.split(":")[0] not in ("gpu", "shard"):
            continue
        if inside.startswith("IDX:"):
            for span in inside[4:].split(","):
                low, _, high = span.partition("-")
                if low.isdigit():
                    used.update(range(int(low), int(high or low) + 1))
        else:
            for at, pair in enumerate(inside.split(",")):
                if re.fullmatch(r"[1-9]\d*/\d+", pair):
                    used.add(at)
    return frozenset(used)


def node_problem(name: str, state: str, reason: str) -> str:
    """Return why a node gets no jobs, as a clause; empty if it may get jobs. ``state``: as sinfo writes it."""
    words = state.rstrip("*~#!%$@^-+").lower()
    silent = state.endswith("*")
    if not silent and words.split("+")[0] not in OUT and not OUT.intersection(words.split("+")):
        return ""
    what = f"{words} and does not respond" if silent else words
    return f"node {name} is {what}" + (f": {reason}" if reason and reason != "none" else "")
