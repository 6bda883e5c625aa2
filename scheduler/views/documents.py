"""Types of the JSON documents that verbs print and files hold, one TypedDict for each.

`make tables` generates the JSON Schemas in `views/schemas/` from these types, with the docstrings as descriptions.
`tests/stories/test_schemas.py` checks real output against the schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, TypedDict, Union

from scheduler.core.counters import RETRY_COULD_NOT_START, RETRY_FAILED, RETRY_OUT_OF_MEMORY
from scheduler.core.failure_patterns import FAILURE_KINDS
from scheduler.core.gpu import GPU_STATES
from scheduler.core.job import EVENT_KINDS, REASON_CODES, JobState, Outcome
from scheduler.core.journal import STATUSES
from scheduler.views.json_schema import Field

STATES = tuple(state.value for state in JobState)
OUTCOMES = tuple(outcome.value for outcome in Outcome)
MARKS = ("ok", "warn", "bad", "unknown")
CAUSES = (RETRY_FAILED, RETRY_OUT_OF_MEMORY, RETRY_COULD_NOT_START)
_MOMENT = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z$"
_SECOND = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$"

Version = Annotated[Literal[1], Field("Version of this form; a change that could break a reader raises it.")]
Id = Annotated[int, Field(minimum=0)]
Number = Annotated[int, Field(minimum=0)]
Share = Annotated[float, Field(minimum=0, maximum=1)]
Moment = Annotated[str, Field(pattern=_MOMENT)]
MaybeMoment = Annotated[Optional[str], Field(pattern=_MOMENT)]
Bytes = Annotated[Optional[int], Field(minimum=0)]
Seconds = Annotated[float, Field(minimum=0)]
MaybeSeconds = Annotated[Optional[float], Field(minimum=0)]

# -- a job ---------------------------------------------------------------------------------------------------

JobId = Annotated[Id, Field("Number of the job; never given twice. The first is 1, of a ts server 0.")]
State = Annotated[str, Field("Where the job is.", choices=STATES)]
HowEnded = Annotated[Optional[str], Field("How it ended; null while it has not.", choices=OUTCOMES)]
ExitCode = Annotated[
    Optional[int], Field("Exit code of its command; null unless the command exited.", minimum=0, maximum=255)
]
Signal = Annotated[Optional[int], Field("Number of the signal that ended its command; null if none did.", minimum=1)]
Label = Annotated[Optional[str], Field("Name that people gave it; null without one.")]
ReasonText = Annotated[Optional[str], Field("Why it waits, as a sentence; null unless it waits.")]
ReasonCode = Annotated[
    Optional[str], Field("Why it waits, for programs; null unless it waits.", choices=tuple(REASON_CODES))
]
Notes = Annotated[list[str], Field("What else there is to know about it, as sentences.")]
Submitted = Annotated[Moment, Field("When it was accepted (ISO 8601, UTC, milliseconds).")]
Finished = Annotated[MaybeMoment, Field("When it ended (ISO 8601, UTC, milliseconds); null while it has not.")]
Log = Annotated[Optional[str], Field("Absolute path of the log of its last try; null before the first.")]

FailureDocument = TypedDict(
    "FailureDocument",
    {
        "class": Annotated[str, Field("Kind of failure.", choices=FAILURE_KINDS)],
        "line": Annotated[str, Field("The line of the log that tells it (300 characters at most).")],
        "hint": Annotated[str, Field("What would help, as a sentence.")],
        "peak_memory": Annotated[Bytes, Field("Bytes of one GPU that it was seen to use at most; null where nobody saw it.")],
        "asked_memory": Annotated[
            Bytes, Field("Bytes of one GPU that it asked for, by vram or by its share; null where the size of the GPU is not known.")
        ],
    },
)  # fmt: skip
WhyFailed = Annotated[
    Optional[FailureDocument], Field("What the end of its log says of why it failed; null if it says nothing, or ended well.")
]  # fmt: skip


class JobDocument(TypedDict):
    """A job, as status, jobs and show print it."""

    id: JobId
    state: State
    outcome: HowEnded
    exit_code: ExitCode
    signal: Signal
    priority: Annotated[int, Field("Lower starts first.")]
    command: Annotated[list[str], Field("The words as they are run; a line of a commands file is sh, -c, TEXT.")]
    script: Annotated[Optional[str], Field("Absolute path of the script of a jobs line; null for a command.")]
    arguments: Annotated[list[str], Field("The words as they were written: after the script, or the whole command.")]
    conda_env: Annotated[Optional[str], Field("Environment, by name or folder; null for none.")]
    allowed_gpus: Annotated[Optional[list[Number]], Field("GPUs that it may have; null for any.")]
    need: Annotated[float, Field("GPUs that it needs, all together; 0.5 is half of one.", minimum=0)]
    gpus: Annotated[list[Number], Field("GPUs that it has or had, ascending.")]
    pid: Annotated[
        Optional[int], Field("Process that leads its last try, or led it; null before that runs.", minimum=1)
    ]
    session: Annotated[Optional[str], Field("Name of its screen session; null without one.")]
    interpreter: Annotated[
        Optional[str], Field("What ran its script, with the version as far as it is known; null if nothing did yet.")
    ]  # fmt: skip
    attempt: Annotated[int, Field("Number of its last try, 0 before the first.", minimum=0)]
    label: Label
    reason: ReasonText
    reason_code: ReasonCode
    failure: WhyFailed
    notes: Notes
    submitted_at: Submitted
    started_at: Annotated[
        MaybeMoment, Field("When its last try began (ISO 8601, UTC, milliseconds); null before the first.")
    ]  # fmt: skip
    finished_at: Finished
    log: Log


# The keys of these two types are the values of the enumerations.
Counts = TypedDict(  # type: ignore[misc]
    "Counts", {state: Annotated[Number, Field(f"Number of jobs that are {state}.")] for state in STATES}
)
Endings = TypedDict(  # type: ignore[misc]
    "Endings", {outcome: Annotated[Number, Field(f"Jobs with the outcome {outcome}.")] for outcome in OUTCOMES}
)

# -- status, jobs, show, why ---------------------------------------------------------------------------------


class Daemon(TypedDict):
    """State of the scheduler process."""

    alive: Annotated[bool, Field("Whether a scheduler runs.")]
    pid: Annotated[Optional[int], Field("Its process; null if none runs.", minimum=1)]
    started_at: Annotated[MaybeMoment, Field("When it started (ISO 8601, UTC, milliseconds); null if none runs.")]
    runner: Annotated[
        Optional[str],
        Field(
            "How it runs jobs: as plain processes, or each in a screen session of its own; null if none runs.", choices=("direct", "screen")
        ),
    ]  # fmt: skip


class GpuDocument(TypedDict):
    """A GPU, as status prints it."""

    index: Annotated[Number, Field("Number of the GPU here.")]
    uuid: Annotated[str, Field("Its identity, whatever number it has.")]
    name: Annotated[str, Field("Its model; empty where nobody tells it.")]
    state: Annotated[str, Field("State; see docs/gpus.md, States of a GPU.", choices=GPU_STATES)]
    paused: Annotated[bool, Field("Whether it is kept from new jobs by a person.")]
    allocated: Annotated[Share, Field("Share of it that is given out.")]
    memory_used: Annotated[Bytes, Field("Bytes in use; null where nobody reads it.")]
    memory_total: Annotated[Bytes, Field("Bytes that it has; null where nobody tells it.")]
    memory_own: Annotated[Bytes, Field("Bytes used by jobs of this scheduler; null where nobody reads it.")]
    load: Annotated[
        Optional[float], Field("Part of the time it is busy; null where nobody reads it.", minimum=0, maximum=1)
    ]
    temperature: Annotated[Optional[int], Field("Degrees Celsius; null where nobody reads it.")]
    reason: Annotated[Optional[str], Field("Why its readings keep jobs away, as a sentence; null if they do not.")]
    jobs: Annotated[list[Number], Field("Jobs on it, and ended ones whose processes still hold it.")]


class RefusedLine(TypedDict):
    """A refused line: a line of a watched file that is no job."""

    file: Annotated[str, Field("Absolute path of the file.")]
    line: Annotated[int, Field("Number of the line.", minimum=1)]
    text: Annotated[str, Field("What stands there.")]
    reason: Annotated[str, Field("What is wrong, and what would be right.")]


class StatusDocument(TypedDict):
    """Output of gpujob status --json: GPUs, all live jobs, the 100 jobs that ended last, and refused lines."""

    schema: Version
    daemon: Annotated[Daemon, Field("The scheduler.")]
    paused: Annotated[bool, Field("Whether the whole queue is paused.")]
    counts: Annotated[Counts, Field("Number of jobs in each state.")]
    gpus: Annotated[list[GpuDocument], Field("The GPUs managed here, by index.")]
    jobs: Annotated[list[JobDocument], Field("Live jobs by id, then the last ended, newest first.")]
    refused: Annotated[list[RefusedLine], Field("Lines that are no job.")]
    repeated_lines: Annotated[Number, Field("Lines that repeat a job and are not run again.")]
    trouble: Annotated[
        list[str],
        Field(
            "What holds the scheduler up just now (a file that it does not read, a stopped supervisor, a journal that it cannot write), "
            "each with what mends it."
        ),
    ]  # fmt: skip


class JobsDocument(TypedDict):
    """Output of gpujob jobs --json: all jobs, or the jobs in the given states, by id."""

    schema: Version
    jobs: Annotated[list[JobDocument], Field("The jobs.")]


class _EventAlways(TypedDict):
    at: Annotated[Moment, Field("When (ISO 8601, UTC, milliseconds).")]
    kind: Annotated[str, Field("What happened.", choices=EVENT_KINDS)]


class EventDocument(_EventAlways, total=False):
    """An event in the history of a job. Besides at and kind, an event has only keys that belong to its kind."""

    attempt: Annotated[Number, Field("Number of the try.")]
    pid: Annotated[int, Field("Process that leads the job.", minimum=1)]
    gpus: Annotated[list[Number], Field("GPUs that it has, or that stay taken.")]
    share: Annotated[Share, Field("Share of each of its GPUs that it holds; 0 for GPUs that it named itself.")]
    ran: Annotated[Seconds, Field("Seconds that the try ran which is over.")]
    gpu: Annotated[Number, Field("GPU that is gone, or that it uses and was not given.")]
    memory: Annotated[Bytes, Field("Memory that it uses of that GPU, in bytes; null where the driver would not say.")]
    outcome: Annotated[str, Field("How it ended.", choices=OUTCOMES)]
    exit_code: Annotated[Optional[int], Field("Exit code; null if there was none.", minimum=0, maximum=255)]
    signal: Annotated[Optional[int], Field("Number of the signal; null if there was none.", minimum=1)]
    why: Annotated[Optional[str], Field("Reason, as a sentence or word.")]
    wait: Annotated[Seconds, Field("Seconds until the next try.")]
    cause: Annotated[
        str, Field("Why it is tried again: its `retries`, its `oom_retries`, or a start that failed.", choices=CAUSES)
    ]  # fmt: skip
    log: Annotated[str, Field("Absolute path of the log of the try that is over.")]
    before: Annotated[str, Field("State before it was queued again.", choices=STATES)]
    by: Annotated[str, Field("Line that changed it, say jobs.txt:7.")]
    what: Annotated[list[str], Field("What was edited, as texts.")]
    with_job: Annotated[Id, Field("Job that it changed places with.")]
    pids: Annotated[list[int], Field("Processes that outlived the job.")]
    processes: Annotated[list[int], Field("Processes that go on after their leader ended.")]


class JobWithStory(JobDocument):
    """A job with its event history."""

    events: Annotated[list[EventDocument], Field("What happened to it, oldest first.")]


class ShownJob(JobWithStory):
    """Output of gpujob show JOB --json for one job."""

    schema: Version


class ShownJobs(TypedDict):
    """Output of gpujob show JOB… --json for several jobs."""

    schema: Version
    jobs: Annotated[list[JobWithStory], Field("The jobs in the order they were named.", minItems=2)]


ShowDocument = Annotated[
    Union[ShownJob, ShownJobs], Field("gpujob show JOB… --json: one job, or where several were named and found a list of them.")
]  # fmt: skip


class ExplainedJob(TypedDict):
    """A job, as why prints it."""

    id: JobId
    state: State
    reason_code: ReasonCode
    reason: ReasonText
    outcome: HowEnded
    exit_code: ExitCode
    signal: Signal
    failure: WhyFailed
    notes: Notes
    log: Log
    last_lines: Annotated[list[str], Field("Last lines of the log of a job that did not end well.")]


class WhyDocument(TypedDict):
    """Output of gpujob why JOB --json: why a job waits, or how it ended."""

    schema: Version
    jobs: Annotated[list[ExplainedJob], Field("The job; several where a label names them.", minItems=1)]


# -- report --------------------------------------------------------------------------------------------------

Lost = Annotated[
    Number, Field("Those of them whose end is not known: they count up to when they were found to be over.")
]
Tries = Annotated[Number, Field("Tries that ran in the time shown.")]
GpuSeconds = Annotated[Seconds, Field("The same times GPUs and share of each.")]
GpuHours = Annotated[Seconds, Field("The same in hours.")]


class ReportedJob(TypedDict):
    """A job in a report."""

    id: JobId
    label: Label
    command: Annotated[str, Field("The command as it was written, as one text.")]
    state: State
    outcome: HowEnded
    exit_code: ExitCode
    signal: Signal
    attempts: Tries
    lost: Lost
    gpus: Annotated[list[Number], Field("GPUs that its tries were on, ascending.")]
    submitted_at: Submitted
    started_at: Annotated[MaybeMoment, Field("When its first try began (ISO 8601, UTC); null if none has.")]
    finished_at: Finished
    wait: Annotated[MaybeSeconds, Field("Seconds from its submission to its first start; null if it never started.")]
    run: Annotated[Seconds, Field("Seconds that its tries ran together, up to now if one runs.")]
    gpu_seconds: GpuSeconds


class Sums(TypedDict):
    """Sums over jobs."""

    jobs: Annotated[Number, Field("How many jobs.")]
    states: Annotated[Counts, Field("How many jobs are in each state.")]
    outcomes: Annotated[Endings, Field("How many jobs ended how.")]
    attempts: Tries
    lost: Lost
    wait_mean: Annotated[
        MaybeSeconds, Field("Seconds from submission to first start, mean over the jobs that have started; null if none has.")
    ]  # fmt: skip
    run: Annotated[Seconds, Field("Seconds that all tries ran together.")]
    gpu_seconds: GpuSeconds
    gpu_hours: GpuHours


class SumsOfLabel(Sums):
    """Sums over the jobs with one label."""

    label: Label


class SumsOfGpu(TypedDict):
    """Sums over the tries that ran on one GPU."""

    index: Annotated[Number, Field("Number of the GPU.")]
    jobs: Annotated[Number, Field("Jobs that were on it.")]
    lost: Lost
    run: Annotated[Seconds, Field("Seconds of the tries on it; two that shared it count twice.")]
    gpu_seconds: Annotated[Seconds, Field("The same times their shares.")]
    gpu_hours: GpuHours
    busy: Annotated[
        Optional[float],
        Field("Part of the time shown in which it was given out, by shares; null where that is no time.", minimum=0, maximum=1),
    ]  # fmt: skip


ReportDocument = TypedDict(
    "ReportDocument",
    {
        "schema": Version,
        "from": Annotated[Moment, Field("When the time shown begins (ISO 8601, UTC).")],
        "to": Annotated[Moment, Field("When it ends: now.")],
        "known_since": Annotated[
            MaybeMoment, Field("Since when all jobs are known; those that ended earlier may be forgotten. Null if none is.")
        ],
        "jobs": Annotated[list[ReportedJob], Field("The jobs, by id.")],
        "labels": Annotated[list[SumsOfLabel], Field("Sums by label.")],
        "gpus": Annotated[list[SumsOfGpu], Field("Sums by GPU.")],
        "total": Annotated[Sums, Field("Sums over all.")],
    },
)  # fmt: skip
ReportDocument.__doc__ = "gpujob report --json: what jobs waited, ran and used of the GPUs, and the sums of it."


# -- screens, doctor, state file, journal --------------------------------------------------------------------


class SessionDocument(TypedDict):
    """The screen session of a job."""

    id: Annotated[Id, Field("The job.")]
    session: Annotated[str, Field("Name of the session.")]
    gpus: Annotated[list[Number], Field("GPUs of the job.")]
    attach: Annotated[str, Field("Shell command that attaches to it.")]


class ScreensDocument(TypedDict):
    """Output of gpujob screens --json: the screen sessions of running jobs."""

    schema: Version
    sessions: Annotated[list[SessionDocument], Field("The sessions that live, by job.")]


class FindingDocument(TypedDict):
    """One finding of a check."""

    check: Annotated[str, Field("What was looked at; several findings may have the same.")]
    mark: Annotated[str, Field("unknown: it cannot be told.", choices=MARKS)]
    seen: Annotated[str, Field("What was found.")]
    wrong: Annotated[Optional[str], Field("What is wrong, or why it cannot be told.")]
    mend: Annotated[Optional[str], Field("The shell command that mends it.")]


class DoctorDocument(TypedDict):
    """Output of gpujob doctor --json: findings on this machine and on one scheduler."""

    schema: Version
    state_file: Annotated[str, Field("The scheduler that was meant.")]
    worst: Annotated[
        str, Field("The mark that stands for all: bad before warn before unknown before ok.", choices=MARKS)
    ]
    findings: Annotated[list[FindingDocument], Field("In the order in which they are shown.", minItems=1)]


class GpuInStateFile(TypedDict):
    """A GPU in the state file."""

    index: Annotated[Number, Field("Number of the GPU here.")]
    uuid: Annotated[str, Field("Its identity, whatever number it has.")]
    state: Annotated[str, Field("State.", choices=GPU_STATES)]
    allocated: Annotated[Share, Field("Share of it that is given out.")]
    jobs: Annotated[list[Number], Field("Jobs on it.")]
    reason: Annotated[Optional[str], Field("Why it gets no job, as a sentence; null if nothing keeps it from one.")]


class RunningInStateFile(TypedDict):
    """A running job in the state file."""

    id: Annotated[Id, Field("The job.")]
    gpus: Annotated[list[Number], Field("Its GPUs.")]
    pid: Annotated[Optional[int], Field("Process that leads it; null until it is known.", minimum=1)]
    session: Annotated[Optional[str], Field("Name of its screen session; null without one.")]
    log: Annotated[str, Field("Absolute path of its log.")]


class StateFileDocument(TypedDict):
    """gpu_scheduler_state.json, as the scheduler writes it. People may edit paused_gpus and paused."""

    revision: Annotated[
        int, Field("Number of this picture; an edit is read against the one it was made from.", minimum=1)
    ]
    gpu_status: Annotated[list[Share], Field("Share given out of each GPU, in the order of gpus.")]
    paused_gpus: Annotated[list[Number], Field("GPUs that get no new job, by index; may be edited.")]
    paused: Annotated[bool, Field("Whether the whole queue is paused; may be edited.")]
    gpus: Annotated[list[GpuInStateFile], Field("The GPUs managed here, by index.")]
    jobs: Annotated[Counts, Field("Number of jobs in each state.")]
    running: Annotated[list[RunningInStateFile], Field("Jobs that run, by id.")]
    updated_at: Annotated[str, Field("When it was painted (ISO 8601, UTC, seconds).", pattern=_SECOND)]


JournalState = Annotated[str, Field("Where the job is.", choices=STATUSES)]


class JournalDocument(TypedDict):
    """One line of the journal (JSON Lines). If several lines have the same id, the last one is valid."""

    id: Annotated[Id, Field("Number of the job, as everywhere.")]
    command: Annotated[
        str, Field("The whole command as it was written, for a shell; of a commands file the line itself. Secrets are ***.")
    ]  # fmt: skip
    status: JournalState
    pid: Annotated[
        Optional[int], Field("Process that leads or led the last try; null while pending, or if none was ever begun.", minimum=1)
    ]  # fmt: skip
    gpu_id: Annotated[
        Union[Number, Annotated[list[Number], Field(minItems=2)], None],
        Field("The GPU that it has or had, a list where it is several, null for none or while pending."),
    ]
    start_time: Annotated[
        MaybeMoment, Field("When the last try began (ISO 8601, UTC, milliseconds); null while pending.")
    ]
    end_time: Annotated[MaybeMoment, Field("When it ended (ISO 8601, UTC, milliseconds); null while it has not.")]
    log_file: Annotated[Optional[str], Field("Absolute path of the log of the last try; null before the first.")]
    exit_code: Annotated[
        Optional[int],
        Field(
            "Exit code of the command; null while it has not ended, and if it has none: ended by a signal, never begun, or not known.",
            minimum=0, maximum=255,
        ),
    ]  # fmt: skip
    outcome: Annotated[
        Optional[str], Field("How it ended, as in status --json; lost: that cannot be known.", choices=OUTCOMES)
    ]
    history: Annotated[
        list[tuple[Moment, JournalState]],
        Field(
            "Each status it has had, with the moment from which on; the first is pending, the last is its status.",
            minItems=1,
        ),
    ]


# Name of the schema file → its type.
DOCUMENTS: dict[str, Any] = {
    "job": JobDocument, "status": StatusDocument, "jobs": JobsDocument, "show": ShowDocument, "why": WhyDocument, "report": ReportDocument,
    "screens": ScreensDocument, "doctor": DoctorDocument, "state-file": StateFileDocument, "journal": JournalDocument,
}  # fmt: skip
