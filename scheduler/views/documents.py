"""Types of the JSON documents that verbs print and files hold, one TypedDict for each.

`make tables` generates the JSON Schemas in `views/schemas/` from these types, with the docstrings as descriptions.
`tests/stories/test_schemas.py` checks real output against the schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, TypedDict, Union

from scheduler.core.counters import RETRY_COULD_NOT_START, RETRY_FAILED, RETRY_GPU_ERROR, RETRY_OUT_OF_MEMORY
from scheduler.core.gpu import GPU_STATES
from scheduler.core.job import EVENT_KINDS, REASON_CODES, JobState, Outcome
from scheduler.core.journal import STATUSES
from scheduler.core.offered_requests import OPTIONS, VERBS
from scheduler.core.runner_kinds import RUNNERS
from scheduler.views.json_schema import Field

STATES = tuple(state.value for state in JobState)
OUTCOMES = tuple(outcome.value for outcome in Outcome)
MARKS = ("ok", "warn", "bad", "unknown")
CAUSES = (RETRY_FAILED, RETRY_OUT_OF_MEMORY, RETRY_COULD_NOT_START, RETRY_GPU_ERROR)
_MOMENT = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z$"
_SECOND = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$"

Version = Annotated[
    Literal[1], Field("Version of this format; raised by changes that could break a program that reads it.")
]
Id = Annotated[int, Field(minimum=0)]
Number = Annotated[int, Field(minimum=0)]
Share = Annotated[float, Field(minimum=0, maximum=1)]
Moment = Annotated[str, Field(pattern=_MOMENT)]
MaybeMoment = Annotated[Optional[str], Field(pattern=_MOMENT)]
Bytes = Annotated[Optional[int], Field(minimum=0)]
Seconds = Annotated[float, Field(minimum=0)]
MaybeSeconds = Annotated[Optional[float], Field(minimum=0)]

# -- a job ---------------------------------------------------------------------------------------------------

JobId = Annotated[Id, Field("Id of the job; never assigned twice. The first id is 1, or 0 on a ts server.")]
State = Annotated[str, Field("State of the job.", choices=STATES)]
HowEnded = Annotated[Optional[str], Field("How the job ended; null before its end.", choices=OUTCOMES)]
ExitCode = Annotated[
    Optional[int], Field("Exit code of the command; null unless the command exited.", minimum=0, maximum=255)
]
Signal = Annotated[Optional[int], Field("Number of the signal that ended the command; null if none did.", minimum=1)]
Label = Annotated[Optional[str], Field("Label of the job; null without one.")]
ReasonText = Annotated[Optional[str], Field("Why the job waits, as a sentence; null unless it waits.")]
ReasonCode = Annotated[
    Optional[str],
    Field("Why the job waits, as a code for programs; null unless it waits.", choices=tuple(REASON_CODES)),
]
Notes = Annotated[list[str], Field("Notes on the job, as sentences.")]
Submitted = Annotated[Moment, Field("When the job was accepted (ISO 8601, UTC, milliseconds).")]
Finished = Annotated[MaybeMoment, Field("When the job ended (ISO 8601, UTC, milliseconds); null before its end.")]
Log = Annotated[Optional[str], Field("Absolute path of the log of the last attempt; null before the first attempt.")]

FailureDocument = TypedDict(
    "FailureDocument",
    {
        "class": Annotated[str, Field("Class of the failure: one of docs/failures.md, or one of the setting failure_classes; `unknown` if only what differs from the last good run is known.")],
        "line": Annotated[str, Field("The line of the log that shows the failure, or the sentence of the kernel that ended the job (at most 300 characters); empty if the exit code or signal does.")],
        "hint": Annotated[str, Field("Advice on how to fix the failure, as a sentence.")],
        "peak_memory": Annotated[Bytes, Field("Highest measured memory use on one GPU, in bytes; null if not measured.")],
        "asked_memory": Annotated[
            Bytes, Field("Requested memory on one GPU, in bytes, by vram or by share; null if the size of the GPU is unknown.")
        ],
        "tried_memory": Annotated[Bytes, Field("The allocation of GPU memory that failed, in bytes; null if the log does not tell.")],
        "others_memory": Annotated[
            Bytes, Field("If GPU memory ran out: memory of all other processes on the GPU, in bytes; null if not known.")
        ],
        "oom": Annotated[
            Optional[Literal["own", "victim"]],
            Field("If GPU memory ran out: own (it needed more than it asked for) or victim (others used its memory); else null."),
        ],
        "error": Annotated[Optional[str], Field("Last line of the traceback (at most 300 characters), if it is not `line`; else null.")],
        "good_run": Annotated[Optional[int], Field("Id of the job that was the last good run of the same script (exit code 0); null if none is known.")],
        "differs": Annotated[list[str], Field("What differs from the last good run, as sentences; empty if nothing does, or if nothing was compared.")],
    },
)  # fmt: skip
WhyFailed = Annotated[
    Optional[FailureDocument], Field("Cause of the failure, found in the end of the log, the exit code or the signal; null if none was found or the job succeeded.")
]  # fmt: skip


class JobDocument(TypedDict):
    """A job, as status, jobs and show print it."""

    id: JobId
    state: State
    outcome: HowEnded
    exit_code: ExitCode
    signal: Signal
    user: Annotated[Optional[str], Field("Submitter, in a scheduler of several users; else null.")]
    priority: Annotated[int, Field("Priority; jobs with lower values start first.")]
    command: Annotated[list[str], Field("Words of the command that is run; for a commands file: sh, -c, LINE.")]
    script: Annotated[Optional[str], Field("Absolute path of the script that the line names; null for a command.")]
    arguments: Annotated[list[str], Field("Words as written: the arguments after the script, or the whole command.")]
    conda_env: Annotated[Optional[str], Field("Environment, by name or folder; null for none.")]
    allowed_gpus: Annotated[
        Optional[list[Number]], Field("GPUs on which the job may run; null for any, or if it names nodes or types.")
    ]
    allowed_nodes: Annotated[
        Optional[list[str]],
        Field("Nodes and types of GPUs of a cluster on which the job may run; null if it names none."),
    ]
    need: Annotated[float, Field("Needed GPUs in total; 0.5 is half of one GPU.", minimum=0)]
    gpus: Annotated[list[Number], Field("GPUs that the job has or had, ascending.")]
    node: Annotated[Optional[str], Field("Node of a cluster that runs or ran the last attempt; null on this machine.")]
    partition: Annotated[Optional[str], Field("Partition of the cluster that the last attempt used; null without one.")]
    engine_job: Annotated[Optional[str], Field("The cluster's id of the last attempt; null on this machine.")]
    pid: Annotated[
        Optional[int],
        Field("Pid of the main process of the last attempt; null before it runs, and on a cluster.", minimum=1),
    ]
    session: Annotated[Optional[str], Field("Name of its screen session; null without one.")]
    interpreter: Annotated[
        Optional[str], Field("Interpreter that ran the script, with its version if known; null before the first start.")
    ]  # fmt: skip
    attempt: Annotated[int, Field("Number of the last attempt; 0 before the first attempt.", minimum=0)]
    label: Label
    reason: ReasonText
    reason_code: ReasonCode
    failure: WhyFailed
    notes: Notes
    submitted_at: Submitted
    started_at: Annotated[
        MaybeMoment, Field("When the last attempt began (ISO 8601, UTC, milliseconds); null before the first attempt.")
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
    pid: Annotated[Optional[int], Field("Pid of the scheduler; null if none runs.", minimum=1)]
    started_at: Annotated[
        MaybeMoment, Field("When the scheduler started (ISO 8601, UTC, milliseconds); null if none runs.")
    ]
    runner: Annotated[
        Optional[str],
        Field(
            "How the scheduler runs jobs: as plain processes (direct), or each in its own screen session; null if none runs.", choices=tuple(RUNNERS)
        ),
    ]  # fmt: skip


class OutsideDocument(TypedDict):
    """A booking of another scheduler or lease of this machine."""

    user: Annotated[str, Field("User who has booked it.")]
    share: Annotated[Share, Field("Booked share of the GPU.")]
    lease: Annotated[bool, Field("True for a lease, false for jobs.")]


class GpuDocument(TypedDict):
    """A GPU, as status prints it."""

    index: Annotated[Number, Field("Index of the GPU in this scheduler.")]
    uuid: Annotated[str, Field("UUID of the GPU, independent of its index.")]
    name: Annotated[str, Field("Model of the GPU; empty if unknown.")]
    node: Annotated[Optional[str], Field("Node of a cluster that has the GPU; null on this machine.")]
    partition: Annotated[Optional[str], Field("Partition of the node; null on this machine.")]
    state: Annotated[str, Field("State; see docs/gpus.md, States of a GPU.", choices=GPU_STATES)]
    paused: Annotated[bool, Field("Whether a user has paused the GPU.")]
    allocated: Annotated[Share, Field("Allocated share of the GPU.")]
    memory_used: Annotated[Bytes, Field("Memory in use, in bytes; null if not read.")]
    memory_total: Annotated[Bytes, Field("Memory size, in bytes; null if unknown.")]
    memory_own: Annotated[Bytes, Field("Memory used by jobs of this scheduler, in bytes; null if not read.")]
    load: Annotated[
        Optional[float], Field("Load: part of the time that the GPU is busy; null if not read.", minimum=0, maximum=1)
    ]
    temperature: Annotated[Optional[int], Field("Temperature in degrees Celsius; null if not read.")]
    reason: Annotated[
        Optional[str],
        Field("Why new jobs are kept off all or a part of the GPU, as a sentence; null if it is free for jobs."),
    ]
    booked_outside: Annotated[
        list[OutsideDocument], Field("What other schedulers and leases of this machine have booked on the GPU.")
    ]
    jobs: Annotated[list[Number], Field("Jobs on the GPU, and ended jobs whose leftover processes hold it.")]


class RefusedLine(TypedDict):
    """A line of a watched file that was refused, because it does not describe a valid job."""

    file: Annotated[str, Field("Absolute path of the file.")]
    line: Annotated[int, Field("Number of the line.", minimum=1)]
    text: Annotated[str, Field("Text of the line.")]
    reason: Annotated[str, Field("What is wrong with the line, and how to correct it.")]


class ExpectedDocument(TypedDict):
    """When a job is expected to start and to end."""

    id: JobId
    start: Annotated[MaybeMoment, Field("Most likely start; null if the job runs, or if it is not known.")]
    start_earliest: Annotated[MaybeMoment, Field("Earliest likely start; null as start.")]
    start_latest: Annotated[MaybeMoment, Field("Latest likely start; null as start, or if no limit is known.")]
    end: Annotated[MaybeMoment, Field("Most likely end; null if it is not known.")]
    end_earliest: Annotated[MaybeMoment, Field("Earliest likely end; null as end.")]
    end_latest: Annotated[MaybeMoment, Field("Latest likely end; null as end, or if no limit is known.")]
    gpus: Annotated[list[Number], Field("GPUs on which the job runs, or will most likely run.")]
    run_s: Annotated[MaybeSeconds, Field("Expected run time in seconds; null if it is not known.")]
    source: Annotated[Optional[str], Field("What the expected run time is based on; null if it is not known.")]


class StatusDocument(TypedDict):
    """Output of gpujob status --json: GPUs, all live jobs, the 100 jobs that ended last, and refused lines."""

    schema: Version
    daemon: Annotated[Daemon, Field("The scheduler.")]
    paused: Annotated[bool, Field("Whether the whole queue is paused.")]
    counts: Annotated[Counts, Field("Number of jobs in each state.")]
    gpus: Annotated[list[GpuDocument], Field("The GPUs managed here, by index.")]
    jobs: Annotated[list[JobDocument], Field("Live jobs by id, then the jobs that ended last, newest first.")]
    expected: Annotated[
        list[ExpectedDocument],
        Field("When running jobs and the first waiting jobs are expected to start and end, as far as it is known."),
    ]
    refused: Annotated[list[RefusedLine], Field("Refused lines.")]
    repeated_lines: Annotated[Number, Field("Number of lines that repeat an earlier line and do not run again.")]
    trouble: Annotated[
        list[str],
        Field(
            "Current problems of the scheduler (a file that it does not read, a stopped supervisor, a journal that it cannot write), "
            "each with its fix."
        ),
    ]  # fmt: skip


class JobsDocument(TypedDict):
    """Output of gpujob jobs --json: all jobs, or the jobs in the given states, by id."""

    schema: Version
    jobs: Annotated[list[JobDocument], Field("The jobs.")]


class _EventAlways(TypedDict):
    at: Annotated[Moment, Field("When it happened (ISO 8601, UTC, milliseconds).")]
    kind: Annotated[str, Field("What happened.", choices=EVENT_KINDS)]


class EventDocument(_EventAlways, total=False):
    """An event in the history of a job. Besides at and kind, an event has only keys that belong to its kind."""

    attempt: Annotated[Number, Field("Number of the attempt.")]
    pid: Annotated[int, Field("Pid of the main process of the job.", minimum=1)]
    node: Annotated[str, Field("Node of a cluster on which the attempt runs.")]
    engine_job: Annotated[str, Field("The cluster's id of the attempt.")]
    gpus: Annotated[list[Number], Field("GPUs of the job, or GPUs that leftover processes hold.")]
    share: Annotated[Share, Field("Share that the job has of each of its GPUs; 0 if the job names its GPUs.")]
    ran: Annotated[Seconds, Field("Run time of the ended attempt, in seconds.")]
    gpu: Annotated[
        Number, Field("GPU that disappeared or reported an error, or that the job uses without an allocation.")
    ]
    memory: Annotated[
        Bytes, Field("Memory that the job uses on that GPU, in bytes; null if the driver does not show it.")
    ]
    outcome: Annotated[str, Field("How the job or the attempt ended.", choices=OUTCOMES)]
    exit_code: Annotated[Optional[int], Field("Exit code; null if there was none.", minimum=0, maximum=255)]
    signal: Annotated[Optional[int], Field("Number of the signal; null if there was none.", minimum=1)]
    why: Annotated[Optional[str], Field("Reason of the event, as a sentence or a word.")]
    wait: Annotated[Seconds, Field("Seconds until the next attempt.")]
    cause: Annotated[
        str, Field("Why there is another attempt: `retries`, `oom_retries`, a failed start, or an error of a GPU.", choices=CAUSES)
    ]  # fmt: skip
    log: Annotated[str, Field("Absolute path of the log of the ended attempt.")]
    before: Annotated[str, Field("State before the job was queued again.", choices=STATES)]
    by: Annotated[str, Field("Line that changed the job, e.g. jobs.txt:7.")]
    what: Annotated[list[str], Field("Edited options, as texts.")]
    with_job: Annotated[Id, Field("Job with which the job changed places.")]
    pids: Annotated[list[int], Field("Leftover processes of the job.")]
    processes: Annotated[list[int], Field("Processes that run after the end of the main process.")]


class JobWithStory(JobDocument):
    """A job with its event history."""

    events: Annotated[list[EventDocument], Field("Event history, oldest first.")]


class ShownJob(JobWithStory):
    """Output of gpujob show JOB --json for one job."""

    schema: Version


class ShownJobs(TypedDict):
    """Output of gpujob show JOB… --json for several jobs."""

    schema: Version
    jobs: Annotated[list[JobWithStory], Field("The jobs in the order they were named.", minItems=2)]


ShowDocument = Annotated[
    Union[ShownJob, ShownJobs], Field("Output of gpujob show JOB… --json: one job, or a list if several jobs were found.")
]  # fmt: skip


class HolderDocument(TypedDict):
    """The part of a GPU that running jobs hold, or the slots of a job without a GPU."""

    gpu: Annotated[Optional[Number], Field("Index of the GPU; null for a job without a GPU.")]
    jobs: Annotated[list[Number], Field("The jobs.")]
    share: Annotated[
        float,
        Field("Share of the GPU that they hold together; of a job without a GPU, its number of slots.", minimum=0),
    ]
    until: Annotated[MaybeMoment, Field("When all of them are expected to have ended; null if it is not known.")]
    others: Annotated[list[str], Field("What else holds a part of the GPU, as sentences.")]


OfferedOptions = TypedDict(  # type: ignore[misc]
    "OfferedOptions",
    {name: Annotated[str, Field(f"New value of the option {name}, as text; empty: its default.")] for name in OPTIONS},
    total=False,
)


class OfferedRequestDocument(TypedDict):
    """A request of an offer, as POST /api/jobs/{id}/offer takes it."""

    verb: Annotated[str, Field("What it does.", choices=VERBS)]
    jobs: Annotated[list[Number], Field("Jobs that it cancels, puts first, releases or edits.")]
    gpus: Annotated[list[Number], Field("GPUs that it resumes.")]
    options: Annotated[OfferedOptions, Field("Options of the job that it changes.")]


class OfferDocument(TypedDict):
    """A command that would start a waiting job now."""

    command: Annotated[str, Field("Command line to paste.")]
    cost: Annotated[str, Field("What it costs, and whom, as a clause.")]
    requests: Annotated[list[OfferedRequestDocument], Field("Its requests, in their order.")]


class ExplanationDocument(TypedDict):
    """Why a waiting job does not start, and what would start it."""

    place: Annotated[
        Optional[int],
        Field(
            "Place in the queue (of its user, if there are several); null if the job waits for something else than room, or behind the first 5,000.",
            minimum=1,
        ),
    ]
    queue: Annotated[Number, Field("Number of jobs in the queue.")]
    holders: Annotated[
        list[HolderDocument], Field("What holds the GPUs, or slots, that the job may use (at most 8 of them).")
    ]
    expected: Annotated[Optional[ExpectedDocument], Field("When it is expected to start and end; null if not known.")]
    unknown: Annotated[Optional[str], Field("Why its start is not known, as a clause; null if it is known.")]
    offers: Annotated[
        list[OfferDocument], Field("Commands that would start it now, those that cost others least first.")
    ]


class PlanDocument(TypedDict):
    """Output of gpujob plan --json: when the running and the first waiting jobs are expected to start and end."""

    schema: Version
    at: Annotated[Moment, Field("When the prediction was made.")]
    jobs: Annotated[list[ExpectedDocument], Field("The jobs, by id.")]


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
    last_lines: Annotated[list[str], Field("Last lines of the log of a job that did not succeed.")]
    explanation: Annotated[Optional[ExplanationDocument], Field("Details about a waiting job; null for other jobs.")]


class WhyDocument(TypedDict):
    """Output of gpujob why JOB --json: why a job waits, or how it ended."""

    schema: Version
    jobs: Annotated[list[ExplainedJob], Field("The job; several jobs if a label names them.", minItems=1)]


# -- report --------------------------------------------------------------------------------------------------

Lost = Annotated[
    Number,
    Field("Number of attempts with the outcome lost; their run time is counted until the scheduler noticed the end."),
]
Tries = Annotated[Number, Field("Number of attempts that ran in the reported time.")]
GpuSeconds = Annotated[Seconds, Field("Run time multiplied by the number of GPUs and the share of each, in seconds.")]
GpuHours = Annotated[Seconds, Field("GPU time in hours.")]


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
    gpus: Annotated[list[Number], Field("GPUs on which the attempts ran, ascending.")]
    submitted_at: Submitted
    started_at: Annotated[MaybeMoment, Field("When the first attempt began (ISO 8601, UTC); null before it.")]
    finished_at: Finished
    wait: Annotated[
        MaybeSeconds, Field("Seconds from the submission to the first start; null if the job never started.")
    ]
    run: Annotated[Seconds, Field("Total run time of the attempts in seconds, up to now if one runs.")]
    gpu_seconds: GpuSeconds


class Sums(TypedDict):
    """Sums over jobs."""

    jobs: Annotated[Number, Field("How many jobs.")]
    states: Annotated[Counts, Field("How many jobs are in each state.")]
    outcomes: Annotated[Endings, Field("Number of jobs with each outcome.")]
    attempts: Tries
    lost: Lost
    wait_mean: Annotated[
        MaybeSeconds,
        Field("Mean time from submission to first start, in seconds, of the jobs that have started; null without any."),
    ]  # fmt: skip
    run: Annotated[Seconds, Field("Total run time of all attempts, in seconds.")]
    gpu_seconds: GpuSeconds
    gpu_hours: GpuHours


class SumsOfLabel(Sums):
    """Sums over the jobs with one label."""

    label: Label


class SumsOfGpu(TypedDict):
    """Sums over the attempts that ran on one GPU."""

    index: Annotated[Number, Field("Number of the GPU.")]
    jobs: Annotated[Number, Field("Number of jobs that ran on the GPU.")]
    lost: Lost
    run: Annotated[
        Seconds, Field("Total run time of attempts on the GPU in seconds; attempts that shared it count separately.")
    ]
    gpu_seconds: Annotated[Seconds, Field("Run times multiplied by the shares, in seconds.")]
    gpu_hours: GpuHours
    busy: Annotated[
        Optional[float],
        Field("Mean allocated share of the GPU in the reported time; null if that time is empty.", minimum=0, maximum=1),
    ]  # fmt: skip


ReportDocument = TypedDict(
    "ReportDocument",
    {
        "schema": Version,
        "from": Annotated[Moment, Field("Start of the reported time (ISO 8601, UTC).")],
        "to": Annotated[Moment, Field("End of the reported time: now.")],
        "known_since": Annotated[
            MaybeMoment,
            Field("Time since which all jobs are known; jobs that ended earlier may have been forgotten. Null without jobs."),
        ],
        "jobs": Annotated[list[ReportedJob], Field("The jobs, by id.")],
        "labels": Annotated[list[SumsOfLabel], Field("Sums by label.")],
        "gpus": Annotated[list[SumsOfGpu], Field("Sums by GPU.")],
        "total": Annotated[Sums, Field("Sums over all jobs.")],
    },
)  # fmt: skip
ReportDocument.__doc__ = "Output of gpujob report --json: waiting time, run time and GPU use of jobs, and their sums."


# -- screens, doctor, state file, journal --------------------------------------------------------------------


class SessionDocument(TypedDict):
    """The screen session of a job."""

    id: Annotated[Id, Field("The job.")]
    session: Annotated[str, Field("Name of the session.")]
    gpus: Annotated[list[Number], Field("GPUs of the job.")]
    attach: Annotated[str, Field("Shell command that attaches to the session.")]


class ScreensDocument(TypedDict):
    """Output of gpujob screens --json: the screen sessions of running jobs."""

    schema: Version
    sessions: Annotated[list[SessionDocument], Field("Sessions of running jobs, by job id.")]


class FindingDocument(TypedDict):
    """One finding of a check."""

    check: Annotated[str, Field("Name of the check; several findings may have the same name.")]
    mark: Annotated[str, Field("Result of the check; unknown: it could not be determined.", choices=MARKS)]
    seen: Annotated[str, Field("What was found.")]
    wrong: Annotated[Optional[str], Field("What is wrong, or why the result is unknown.")]
    mend: Annotated[Optional[str], Field("Shell command that fixes the problem.")]


class DoctorDocument(TypedDict):
    """Output of gpujob doctor --json: findings on this machine and on one scheduler."""

    schema: Version
    state_file: Annotated[str, Field("State file of the examined scheduler.")]
    worst: Annotated[str, Field("Worst result of all findings, in the order bad, warn, unknown, ok.", choices=MARKS)]
    findings: Annotated[list[FindingDocument], Field("The findings, in the order in which they are shown.", minItems=1)]


class GpuInStateFile(TypedDict):
    """A GPU in the state file."""

    index: Annotated[Number, Field("Number of the GPU in this scheduler.")]
    uuid: Annotated[str, Field("UUID of the GPU, independent of its number.")]
    state: Annotated[str, Field("State of the GPU.", choices=GPU_STATES)]
    allocated: Annotated[Share, Field("Share of the GPU that is allocated to jobs.")]
    jobs: Annotated[list[Number], Field("Jobs on the GPU.")]
    reason: Annotated[Optional[str], Field("Why the GPU gets no jobs, as a sentence; null if it may get jobs.")]


class RunningInStateFile(TypedDict):
    """A running job in the state file."""

    id: Annotated[Id, Field("The job.")]
    gpus: Annotated[list[Number], Field("Its GPUs.")]
    pid: Annotated[Optional[int], Field("Pid of the main process; null until it is known.", minimum=1)]
    session: Annotated[Optional[str], Field("Name of its screen session; null without one.")]
    log: Annotated[str, Field("Absolute path of its log.")]


class StateFileDocument(TypedDict):
    """gpu_scheduler_state.json, as the scheduler writes it. People may edit paused_gpus and paused."""

    revision: Annotated[
        int,
        Field("Number of this version of the file; in an edit, the version that its writer had read.", minimum=1),
    ]
    gpu_status: Annotated[list[Share], Field("Allocated share of each GPU, in the order of gpus.")]
    paused_gpus: Annotated[list[Number], Field("GPUs that get no new job, by index; may be edited.")]
    paused: Annotated[bool, Field("Whether the whole queue is paused; may be edited.")]
    gpus: Annotated[list[GpuInStateFile], Field("The GPUs managed here, by index.")]
    jobs: Annotated[Counts, Field("Number of jobs in each state.")]
    running: Annotated[list[RunningInStateFile], Field("Jobs that run, by id.")]
    updated_at: Annotated[str, Field("When the file was written (ISO 8601, UTC, seconds).", pattern=_SECOND)]


JournalState = Annotated[str, Field("Status of the job.", choices=STATUSES)]


class JournalDocument(TypedDict):
    """One line of the journal (JSON Lines). If several lines have the same id, the last one is valid."""

    id: Annotated[Id, Field("Id of the job.")]
    command: Annotated[
        str, Field("The command as written, quoted for a shell; for a commands file the line. Secrets are replaced by ***.")
    ]  # fmt: skip
    status: JournalState
    pid: Annotated[
        Optional[int], Field("Pid of the main process of the last attempt; null while pending, or if there was no attempt.", minimum=1)
    ]  # fmt: skip
    gpu_id: Annotated[
        Union[Number, Annotated[list[Number], Field(minItems=2)], None],
        Field("GPU that the job has or had; a list for several GPUs; null for none or while pending."),
    ]
    start_time: Annotated[
        MaybeMoment, Field("When the last attempt began (ISO 8601, UTC, milliseconds); null while pending.")
    ]
    end_time: Finished
    log_file: Log
    exit_code: Annotated[
        Optional[int],
        Field(
            "Exit code of the command; null before the end of the job, and if the job was ended by a signal, never "
            "started, or ended in an unknown way.",
            minimum=0, maximum=255,
        ),
    ]  # fmt: skip
    outcome: Annotated[
        Optional[str],
        Field("How the job ended, as in status --json; lost: it is not known how.", choices=OUTCOMES),
    ]
    history: Annotated[
        list[tuple[Moment, JournalState]],
        Field(
            "Each status of the job and when it began; the first is pending, the last is the current status.",
            minItems=1,
        ),
    ]


# -- needs ---------------------------------------------------------------------------------------------------


class SuggestedNeed(TypedDict):
    """The suggested need of a model."""

    need: Annotated[str, Field("The need as the model table would have it: 0.45, 2 or 2x0.5.")]
    basis: Annotated[str, Field("Based on seen runs, or guessed from the size in the name.", choices=("seen", "guess"))]
    memory: Annotated[int, Field("Memory of each GPU that it is for, in bytes: the highest peak with a margin, or the guess.", minimum=0)]  # fmt: skip


class ModelNeed(TypedDict):
    """The need of a model: in the model table, as seen, and as suggested."""

    model: Annotated[str, Field("Name of the model (--llm). Secrets are replaced by ***.")]
    table: Annotated[Optional[str], Field("Its need in the model table as written; null if the table lacks it.")]
    runs: Annotated[Number, Field("Number of its runs.")]
    peak_memory: Annotated[Bytes, Field("Most memory on one GPU of all runs, in bytes; null if not measured.")]
    p95_memory: Annotated[Bytes, Field("Memory that 95 % of the newest runs did not exceed, in bytes; null if not measured.")]  # fmt: skip
    load: Annotated[Optional[float], Field("Mean load on a GPU in the newest runs, 0 to 1; null if not measured.", minimum=0, maximum=1)]  # fmt: skip
    run: Annotated[MaybeSeconds, Field("Median run time of the newest runs that succeeded, in seconds; null without one.")]  # fmt: skip
    out_of_memory: Annotated[Number, Field("How many of the newest runs ended because GPU memory ran out.")]
    suggested: Annotated[Optional[SuggestedNeed], Field("The suggested need; null if nothing is known.")]
    differs: Annotated[bool, Field("Whether runs suggest another need than that of the table.")]


class NeedsDocument(TypedDict):
    """The needs of models, as needs prints them."""

    schema: Version
    table_file: Annotated[Optional[str], Field("Path of the model table; null if the scheduler reads none.")]
    models: Annotated[list[ModelNeed], Field("The models of the table and those that have run, sorted by name.")]


class ChangedNeed(TypedDict):
    """A need that was written into the model table."""

    model: Annotated[str, Field("Name of the model. Secrets are replaced by ***.")]
    before: Annotated[Optional[str], Field("The old need as written; null if the table lacked the model.")]
    after: Annotated[str, Field("The new need.")]


class NeedsAppliedDocument(TypedDict):
    """The changes of the model table that needs --apply has made."""

    schema: Version
    table_file: Annotated[str, Field("Path of the model table.")]
    backup: Annotated[Optional[str], Field("Path of the copy of the old file; null if the file is new or unchanged.")]
    changed: Annotated[list[ChangedNeed], Field("The changed needs; empty if nothing was written.")]
    unchanged: Annotated[list[str], Field("For each named model that was not changed, a sentence that says why.")]


# Name of the schema file → its type.
DOCUMENTS: dict[str, Any] = {
    "job": JobDocument, "status": StatusDocument, "jobs": JobsDocument, "show": ShowDocument, "why": WhyDocument, "plan": PlanDocument, "report": ReportDocument,
    "screens": ScreensDocument, "doctor": DoctorDocument, "state-file": StateFileDocument, "journal": JournalDocument,
    "needs": NeedsDocument, "needs-applied": NeedsAppliedDocument,
}  # fmt: skip
