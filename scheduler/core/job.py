"""The types that describe a job: what the user asked for (JobSpec), its state and attempts (Job), its events."""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.allowed import Allowed
from scheduler.core.gpu import ResourceRequest
from scheduler.core.run_facts import RunFacts
from scheduler.core.runner_kinds import RunnerKind, kind_of
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.shell_quoting import quoted

FIRST = -(1 << 62)  # sorts before every priority: for jobs that were put first
TICKS_A_SECOND = 100  # unit of start times in /proc (USER_HZ), the same on every Linux
_SHELL = frozenset(" \t\n\"'\\|&;<>()$`*?")  # a word with one of these is shown quoted


class JobState(enum.Enum):
    """The state of a job (`core/states.py: TABLE` holds the possible moves)."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"

    @property
    def ended(self) -> bool:
        """True for the four final states. A job leaves a final state only if a user requests it (`gpujob retry`)."""
        return self in ENDED

    @property
    def holds_gpus(self) -> bool:
        """True for the states in which the job's GPUs are booked."""
        return self in HOLDING


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED})
HOLDING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})


class Outcome(enum.Enum):
    """How an attempt or a job ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIME_LIMIT = "time_limit"
    TRESPASS = "trespass"
    COULD_NOT_START = "could_not_start"
    LOST = "lost"
    DEPENDENCY = "dependency"
    CANCELLED = "cancelled"
    PASSED_OVER = "passed_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as the user requested it. The file ``env_file`` (mode 0600) holds the submitter's environment."""

    source: str = "line"  # line (of the jobs file), commands (file), submit, ts, track, recover
    script: str = ""  # absolute path; empty for a command
    arguments: tuple[str, ...] = ()  # words after the script, or the whole command
    conda_env: str = ""
    priority: int = 0
    allowed: Allowed = None  # GPUs that it may use, or nodes and types of a cluster; None: any
    gpus: str = ""  # the need as written; empty: from the model table
    on: tuple[int, ...] = ()  # run on exactly these GPUs, beside all other jobs and processes
    slots: int = 1  # slots that it takes if it needs no GPU
    label: str = ""
    after: tuple[int, ...] = ()
    after_ok: tuple[int, ...] = ()
    vram_mib: int | None = None
    mem_mib: int | None = None  # most memory of the machine; None: any
    cpus: float | None = None  # most CPUs; None: any
    time_limit_s: float | None = None
    retries: int = 0
    cwd: str = ""
    cuda: str = ""  # cuda_ids mode of this job; empty: the config's
    link: str = ""  # how well its GPUs must be joined: nvlink, pcie, numa; empty: any
    launch: str = "python"  # how a Python script is run: python or torchrun
    env_file: str = ""
    umask: int | None = None
    limits: tuple[
        tuple[int, int, int], ...
    ] = ()  # resource limits of its submitter: resource, soft, hard (-1: unlimited)
    variables: tuple[str, ...] = ()  # NAME=VALUE, added to the environment; never shown
    output: str = "log"  # log, or none: its output is discarded
    log_dir: str = ""  # folder of its log; empty: the config's
    log_name: str = ""  # file name of its log (`core/log_names.py`)
    stderr_apart: bool = False  # write stderr to a file of its own: the name of the log and ".e"
    gzip: bool = False  # compress the log
    caller: str = ""  # "PID TICKS SOCKET" of the command that waits in the foreground and lends the job its descriptors
    on_finish: str = ""  # program called at its end with id, error level, log and command
    mail_to: str = ""  # address that its output is mailed to at its end
    info: str = ""  # a note of its submitter
    hold: bool = False  # its owner holds it from the start
    origin: str = ""  # file and line that it comes from: jobs.txt:7
    edited: tuple[str, ...] = ()  # fields changed by `edit`: a changed line of the jobs file no longer changes them
    user: str = ""  # submitter, in a scheduler of several users; empty: the user of the scheduler
    uid: int | None = None  # user id of the submitter, as the kernel told it; it decides who may change the job

    @property
    def is_script(self) -> bool:
        """True for a job that runs a script file, False for a plain command."""
        return bool(self.script)

    @property
    def shell_text(self) -> str | None:
        """The line of a commands file as written; None for a job that comes from another source."""
        return self.arguments[2] if self.source == "commands" and self.arguments[:2] == ("sh", "-c") else None

    @property
    def written_text(self) -> str:
        """The whole command, with secrets hidden.

        For a job of a commands file this is the line as written. Otherwise it is the words, quoted for a shell.
        """
        if self.shell_text is not None:
            return without_secrets(self.shell_text)
        return shlex.join(words_without_secrets((self.script, *self.arguments) if self.script else self.arguments))

    @property
    def shown_name(self) -> str:
        """A short name for tables, with secrets hidden.

        It is the first of these that the job has: the label, the shortened line of a commands file, the file name of
        the script, the first word of the command.
        """
        if self.label:
            return without_secrets(self.label)
        if self.shell_text is not None:
            return self.shown_words(32)
        first = self.script or (self.arguments[0] if self.arguments else "")
        return words_without_secrets((first.rsplit("/", 1)[-1],))[0]

    def shown_words(self, most: int = 48) -> str:
        """Return label and command in at most ``most`` characters, shortened in the middle; secrets are hidden."""
        if self.shell_text is not None:
            text = " ".join(without_secrets(self.shell_text).split())
        else:
            command = words_without_secrets((self.script, *self.arguments) if self.script else self.arguments)
            words = [word.rsplit("/", 1)[-1] if n == 0 else word for n, word in enumerate(command)]
            text = " ".join(quoted(word) if not word or _SHELL.intersection(word) else word for word in words)
        text = f"{without_secrets(self.label)}: {text}" if self.label else text
        return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"

    def as_dict(self) -> dict[str, Any]:
        """Return field → value for JSON. Fields with their default value are left out."""
        out: dict[str, Any] = {}
        for name, default in _SPEC_DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> JobSpec:
        """Return the JobSpec for values from `as_dict`. Unknown keys are ignored: a newer version may write them."""
        known: dict[str, Any] = {
            name: _as_tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in _SPEC_DEFAULTS
        }
        return cls(**known)


def _as_tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_as_tuple(item) if isinstance(item, list) else item for item in value)


_SPEC_DEFAULTS: dict[str, Any] = JobSpec.__init__.__kwdefaults__ or {}  # every field has a default


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process within one boot: pid and start time (clock ticks since boot)."""

    pid: int
    ticks: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A cause of failure (`core/failure_classes.py`). ``kind``: one of our classes, or one of the user's.

    ``line``: the line of the log that shows it, or the kernel's sentence; empty if the exit code or signal does. Sizes
    are MiB of one GPU.
    """

    kind: str
    line: str = ""
    hint: str = ""
    peak_mib: int | None = None  # the most that the job used; None: never measured
    asked_mib: int | None = None  # its share or the memory that it asked for; None: the size of the GPU is not known
    # If GPU memory ran out (None: not known): the allocation that failed, the memory left then, and that of others.
    tried_mib: int | None = None
    free_mib: int | None = None
    others_mib: int | None = None
    oom: str = ""  # whose fault a lack of GPU memory was: own, victim (`core/out_of_memory.py`); empty: another failure
    error: str = ""  # the last line of the traceback, if it is not ``line``
    good_run: int | None = None  # the job of the last good run of the same script; None: not known
    good_at: float | None = None  # when that run ended, seconds since 1970
    differs: tuple[str, ...] = ()  # what differs from it (`core/run_differences.py`), without secrets


@dataclass(slots=True)
class Job:
    """A job: its spec, its state, and its current or last attempt. Times are seconds since 1970 (UTC)."""

    id: int
    spec: JobSpec
    need: ResourceRequest
    state: JobState = JobState.PENDING
    identity: str = ""
    order: int = 0  # place among equal priorities; below 0: before all other jobs
    priority: int = 0
    allowed: Allowed = None
    submitted_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 0  # number of the current or last attempt, from 1; 0: never started
    start_failures: int = 0  # failed tries to start since the last start that succeeded
    runs_failed: int = 0  # failed attempts that were repeated because of ``spec.retries``
    oom_retries: int = 0  # attempts that ran out of GPU memory and were repeated with more
    gpu_retries: int = 0  # attempts that died of an error of their GPU and were repeated elsewhere
    not_before: float | None = None  # end of a back-off
    gpus: tuple[int, ...] = ()
    process: Process | None = None
    boot: str = ""
    runner: str = "direct"
    session: str | None = None  # "PID.NAME" of its terminal session; NAME alone until it was seen to start
    interpreter: str = ""  # interpreter that ran the script, with its version if known
    argv: tuple[str, ...] = ()  # the command of the last attempt, as it was run
    log: str = ""
    outcome: Outcome | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason_code: str = ""  # why it is parked; empty for a queued job, which waits for the reason of its placement class
    reason: str = ""
    stop_why: str = ""  # cancelled, time_limit, trespass
    stop_at: float | None = None
    held: bool = False
    notes: tuple[str, ...] = ()
    log_finding: Failure | None = None  # cause found in the end of its log; only a warning after exit code 0
    node: str = ""  # machine of a cluster that ran the current or last attempt; empty: this machine
    partition: str = ""  # partition of the cluster
    engine_job: str = ""  # the cluster's own id of this attempt
    facts: RunFacts | None = None  # about the unfinished attempt, for a comparison with a good run
    # What the store has of this job (`store/job_columns.py: values_of`); None: unknown, as in a copy (`replace`).
    stored: tuple[Any, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def failure(self) -> Failure | None:
        """The cause of failure found in the job's log; None if the log shows no cause, or if the job succeeded."""
        return None if self.succeeded else self.log_finding

    @property
    def attempt_key(self) -> str:
        """Key of the current or last attempt, such as ``12.1``. It is also the name of the attempt record."""
        return f"{self.id}.{self.attempt}"

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key of waiting jobs: first the jobs that a user put first, then the others by priority and ``order``."""
        return (self.priority if self.order >= 0 else FIRST, self.order)

    @property
    def runner_kind(self) -> RunnerKind:
        """The capabilities of the runner of the current or last attempt."""
        return kind_of(self.runner)

    @property
    def began(self) -> bool:
        """True once the command of the current or last attempt was seen to run, here or on a node of a cluster."""
        return self.process is not None or bool(self.node)

    @property
    def waits_in_engine(self) -> bool:
        """True while an engine such as Slurm has the job and has not started it."""
        return self.state is JobState.STARTING and not self.runner_kind.owns_gpus and not self.began

    @property
    def session_name(self) -> str | None:
        """Name of the job's terminal session, without the leading pid; None if the job has no session."""
        if self.session is None:
            return None
        number, dot, name = self.session.partition(".")
        return name if dot and number.isdigit() else self.session

    @property
    def error_level(self) -> int:
        """The exit code of the command; -1 if there is no exit code.

        There is none if a signal ended the command, if the command was not started, or if the outcome is unknown. A
        command that receives SIGTERM and then exits by itself has an exit code.
        """
        return self.exit_code if self.exit_code is not None else -1

    @property
    def succeeded(self) -> bool:
        """True for a job that is done: it ended with exit code 0."""
        return self.state is JobState.DONE


EVENT_KINDS = (
    "started", "leader_ended", "retry_scheduled", "unclaimed", "missing", "leftovers", "gpu_gone", "gpu_error", "stray", "stopping", "undying", "done",
    "failed", "cancelled", "skipped", "requeued", "changed", "held", "released", "first", "swapped", "edited", "afterwards",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """An entry in the event history of a job. ``kind``: one of `EVENT_KINDS`; ``detail``: data of this kind."""

    job: int
    at: float
    kind: str
    detail: dict[str, Any] = field(default_factory=dict)


# Codes of the reasons to wait, each with its meaning (the table in docs/gpus.md).
REASON_CODES = {
    "new": "the scheduler has not considered it yet",
    "no-room": "no allowed GPU has enough free capacity",
    "no-wide-room": "too few whole GPUs are free at the same time",
    "no-link": "the free GPUs are not joined as well as it asks for (`link`)",
    "behind": "jobs with the same request are before it in the queue, and wait too",
    "allowed-busy": "only GPUs that it is not allowed to use have room",
    "paused": "a GPU that it needs, or the whole queue, is paused",
    "missing": "its script, environment or working folder does not exist yet",
    "backoff": "its last attempt failed; the next attempt starts after a pause",
    "depends": "a job that it depends on (`after`, `after_ok`) has not ended",
    "hold-user": "a user holds it; to release it: `gpujob release`",
    "never": "this machine, as it is now, can never run it; the machine has changed since the job was accepted",
    "claimed": "a running job named this GPU (`on=`), so no other job starts on the GPU",
    "reserved": "the free GPUs are reserved for a job that was overtaken `max_overtakes` times, or that is expected to start soon",
    "booked-outside": "another scheduler of this machine has booked the GPUs that have room",
    "fair-share": "the free GPUs are left to a user who has used less of the machine and waits, too",
    "limit": "its user, or a group of its user, has as many GPUs as the setting `limits` allows",
    "keep-free": "the free GPUs are kept for people without a scheduler (`keep_free`)",
    "no-bookings": "GPUs cannot be booked, because the folder of shared bookings is locked or cannot be used",
    "stale": "there is no recent reading of the GPU",
    "gone": "the driver no longer lists the GPU or MIG instance, or the GPU was switched to MIG mode",
    "unhealthy": "the GPU reported an error (XID, memory errors), or its memory use cannot be read",
    "drained": "an administrator has drained the node of the GPU, or the node is down (with an engine such as Slurm)",
    "foreign": "processes that belong to no job on this GPU use too much of the GPU",
    "over-share": "a job on the GPU uses more memory than its share",
    "releasing": "memory of a job that just ended is still in use",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a job waits: one of `REASON_CODES` for programs, and a sentence for people."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Holding:
    """The allocation that leftover processes of an ended job still hold. ``key``: the attempt, such as ``12.1``.

    ``user``: the job's user, in a scheduler of several users.
    """

    key: str
    job: int
    need: ResourceRequest
    gpus: tuple[int, ...]
    vram_mib: int
    processes: tuple[Process, ...]
    user: str = ""
