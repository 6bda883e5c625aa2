"""What a job is: what was asked (JobSpec) and what became of it (Job)."""

from __future__ import annotations

import enum
import shlex

from scheduler.core.gpu import ResourceRequest
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.shell_quoting import quoted

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field
    from typing import Any
else:
    from scheduler.core.quick_dataclass import dataclass, field

FIRST = -(1 << 62)  # in place of the priority of a job that was put before all others
TICKS_A_SECOND = 100  # of processes' start times, as Linux shows them to programs everywhere
_SHELL = frozenset(" \t\n\"'\\|&;<>()$`*?")  # a word with one of these is shown quoted


class JobState(enum.Enum):
    """Where a job is."""

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
        """True for the four states that nothing leaves by itself."""
        return self in ENDED

    @property
    def holds_gpus(self) -> bool:
        """True while the ledger counts the job's GPUs."""
        return self in HOLDING


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED})
HOLDING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})


class Outcome(enum.Enum):
    """How a job ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIME_LIMIT = "time_limit"
    COULD_NOT_START = "could_not_start"
    LOST = "lost"
    DEPENDENCY = "dependency"
    CANCELLED = "cancelled"
    PASSED_OVER = "passed_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What was asked. Never holds environment values: those lie in a 0600 file named by ``env_file``."""

    source: str = "line"  # line, commands, submit
    script: str = ""  # absolute path; empty for a command
    arguments: tuple[str, ...] = ()  # words after the script, or the whole command
    conda_env: str = ""
    priority: int = 0
    allowed: tuple[int, ...] | None = None
    gpus: str = ""  # the need as written, empty: by the model table
    on: tuple[int, ...] = ()  # just these GPUs, whoever else is on them
    slots: int = 1  # of those for jobs without GPUs
    label: str = ""
    after: tuple[int, ...] = ()
    after_ok: tuple[int, ...] = ()
    vram_mib: int | None = None
    time_limit_s: float | None = None
    retries: int = 0
    cwd: str = ""
    cuda: str = ""  # cuda_ids mode of this job, empty: the config's
    launch: str = "python"  # how a Python script is run: by the interpreter alone, or torchrun
    env_file: str = ""
    umask: int | None = None
    limits: tuple[
        tuple[int, int, int], ...
    ] = ()  # of resources: which, soft, hard (-1: none), as its submitter had them
    variables: tuple[str, ...] = ()  # NAME=VALUE, over the environment; shown nowhere
    output: str = "log"  # log, or none: what it writes is kept nowhere
    log_dir: str = ""  # in place of the config's
    log_name: str = ""  # its log's name (`core/log_names.py`)
    stderr_apart: bool = False  # into a file called as the log, and ".e"
    gzip: bool = False
    caller: str = ""  # "PID TICKS SOCKET" of who waits for it in the foreground, and gives it descriptors there
    on_finish: str = ""  # program called at its end with id, error level, log and command
    mail_to: str = ""  # who gets its output at its end
    info: str = ""  # what its submitter wants to be remembered with it
    origin: str = ""  # jobs.txt:7
    edited: tuple[str, ...] = ()  # fields that its owner has changed since: its line has no say in them any more

    @property
    def is_script(self) -> bool:
        """True for a line of the jobs file, False for a plain command."""
        return bool(self.script)

    @property
    def shell_text(self) -> str | None:
        """The line of a commands file, as it stands there; None for everything else."""
        return self.arguments[2] if self.source == "commands" and self.arguments[:2] == ("sh", "-c") else None

    @property
    def written_text(self) -> str:
        """The whole command as it was written, without secrets: the line of a commands file, else words for a shell."""
        if self.shell_text is not None:
            return without_secrets(self.shell_text)
        return shlex.join(words_without_secrets((self.script, *self.arguments) if self.script else self.arguments))

    @property
    def shown_name(self) -> str:
        """A short name for tables: the label, the script's file name, or the command's first word."""
        if self.label:
            return without_secrets(self.label)
        if self.shell_text is not None:
            return self.shown_words(32)
        first = self.script or (self.arguments[0] if self.arguments else "")
        return words_without_secrets((first.rsplit("/", 1)[-1],))[0]

    def shown_words(self, most: int = 48) -> str:
        """Label and command, shortened in the middle: what tells the jobs of a sweep apart."""
        if self.shell_text is not None:
            text = " ".join(without_secrets(self.shell_text).split())
        else:
            command = words_without_secrets((self.script, *self.arguments) if self.script else self.arguments)
            words = [word.rsplit("/", 1)[-1] if n == 0 else word for n, word in enumerate(command)]
            text = " ".join(quoted(word) if not word or _SHELL.intersection(word) else word for word in words)
        text = f"{without_secrets(self.label)}: {text}" if self.label else text
        return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"

    def as_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain values for JSON."""
        out: dict[str, Any] = {}
        for name, default in _SPEC_DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> JobSpec:
        """The inverse of ``as_dict``; unknown keys of a newer version are left out."""
        known: dict[str, Any] = {
            name: _as_tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in _SPEC_DEFAULTS
        }
        return cls(**known)


def _as_tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_as_tuple(item) if isinstance(item, list) else item for item in value)


_SPEC_DEFAULTS: dict[str, Any] = JobSpec.__init__.__kwdefaults__ or {}  # each field has one


@dataclass(frozen=True, slots=True)
class Process:
    """Who a process is: pid and start time (clock ticks since boot), true within one boot."""

    pid: int
    ticks: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, as far as its log tells. ``asked_mib`` and ``peak_mib``: memory of one GPU, asked for and measured."""

    kind: str
    line: str = ""
    hint: str = ""
    peak_mib: int | None = None  # None: never measured
    asked_mib: int | None = None  # None: the size of the GPU is not known


@dataclass(slots=True)
class Job:
    """What became of a job. Times are seconds since 1970 (UTC) unless their name says ``mono``."""

    id: int
    spec: JobSpec
    need: ResourceRequest
    state: JobState = JobState.PENDING
    identity: str = ""
    order: int = 0  # place among equal priorities; below 0: before all others
    priority: int = 0
    allowed: tuple[int, ...] | None = None
    submitted_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 0  # number of the attempt record and of the log
    start_failures: int = 0  # tries to start that failed for a passing reason
    runs_failed: int = 0  # runs that ended badly and were tried again
    oom_retries: int = 0
    not_before: float | None = None
    gpus: tuple[int, ...] = ()
    process: Process | None = None
    boot: str = ""
    runner: str = "direct"
    session: str | None = None  # "PID.NAME" of its terminal session; NAME alone until it was seen to start
    interpreter: str = ""  # what ran a script, with its version as far as known
    argv: tuple[str, ...] = ()  # the words of the last attempt, as they were run
    log: str = ""
    outcome: Outcome | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason_code: str = ""  # of this job alone; a class reason comes from placement
    reason: str = ""
    stop_why: str = ""  # cancelled, time_limit
    stop_at: float | None = None
    held: bool = False
    notes: tuple[str, ...] = ()
    log_finding: Failure | None = None  # what the end of its log tells; of one that ended with 0 a warning at most

    @property
    def failure(self) -> Failure | None:
        """Why it failed, as far as its log tells; None for one that ended well."""
        return None if self.succeeded else self.log_finding

    @property
    def attempt_key(self) -> str:
        """Name of this attempt's record: ``12.1``."""
        return f"{self.id}.{self.attempt}"

    @property
    def turn(self) -> tuple[int, int]:
        """Sorts waiting jobs as they stand in the queue: those put first, then by priority and place."""
        return (self.priority if self.order >= 0 else FIRST, self.order)

    @property
    def session_name(self) -> str | None:
        """The session's name without the number before it."""
        if self.session is None:
            return None
        number, dot, name = self.session.partition(".")
        return name if dot and number.isdigit() else self.session

    @property
    def error_level(self) -> int:
        """Its exit code, also of one that was told to end and did so itself; -1 if it has none: killed, never started, lost."""
        return self.exit_code if self.exit_code is not None else -1

    @property
    def succeeded(self) -> bool:
        """True for a job that ended with exit code 0."""
        return self.state is JobState.DONE


EVENT_KINDS = (
    "started", "leader_ended", "retry_scheduled", "unclaimed", "missing", "leftovers", "gpu_gone", "stray", "stopping", "undying", "done",
    "failed", "cancelled", "skipped", "requeued", "changed", "held", "released", "first", "swapped", "edited", "afterwards",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job, for the journal, the log and `gpujob show`."""

    job: int
    at: float
    kind: str
    detail: dict[str, Any] = field(default_factory=dict)


REASON_CODES = (
    "new", "no-room", "no-wide-room", "behind", "allowed-busy", "paused", "missing", "backoff", "depends", "hold-user", "never",
    "stale", "gone", "unhealthy", "foreign", "over-share", "releasing", "reserved", "claimed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits: a code for programs (one of `REASON_CODES`), a sentence for people."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Holding:
    """GPUs still held by processes that outlived the end of their job."""

    key: str
    job: int
    need: ResourceRequest
    gpus: tuple[int, ...]
    vram_mib: int
    processes: tuple[Process, ...]
