"""The meaning of an attempt's end for its job: the job is done, has failed, is cancelled, or gets another attempt.

The daemon, `recover`, `track`, and `status` without a running scheduler all call these functions, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.core.counters import RETRY_COULD_NOT_START, RETRY_FAILED, RETRY_GPU_ERROR, RETRY_OUT_OF_MEMORY
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Job, JobState, Outcome
from scheduler.core.model_table import sizes_for
from scheduler.core.out_of_memory import next_need, retry_note
from scheduler.core.own_classes import OwnClass
from scheduler.core.states import Move


def _unknown(job: Job) -> int:
    return 0


def _no_fault(job: Job) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that decide whether a job gets another attempt after a failed attempt.

    ``starts``: after this number of failed starts the job fails, even if the cause is temporary. ``retries``: whether
    the job's own option ``retries`` applies. ``oom_retries``: how many more attempts a job gets after a lack of GPU
    memory (`core/out_of_memory.py`); they come before ``retries``, as an equal attempt would end in the same way.
    ``most_mib``: returns the most MiB that a job can get on one GPU; ``gpus``: by index. ``gpu_fault``: returns
    the fault of a GPU of the job's attempt, such as "GPU 0 reported XID 79"; empty if there is none. A job that ends
    badly then gets one more attempt, which never starts on this GPU. ``own_classes``: the user's classes of failures.
    """

    starts: int = 0
    retries: bool = True
    oom_retries: int = 0
    most_mib: Callable[[Job], int] = _unknown
    gpus: Mapping[int, Gpu] = field(default_factory=dict)
    gpu_fault: Callable[[Job], str] = _no_fault
    own_classes: Sequence[OwnClass] = ()


NEVER_AGAIN = Rules(retries=False)
TIME_LIMIT, TRESPASS = "time_limit", "trespass"  # values of `Job.stop_why` of a job that was ended and has failed


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of an attempt's end. ``how``: the job's next change of state; ``outcome``: how the attempt ended.

    If ``how`` is Move.RETRY_SCHEDULED, another attempt follows. Then ``cause`` is one of `core/counters.py: RETRIES`,
    and ``why`` is the reason as a sentence. If the next attempt requests more GPU memory, ``need`` or ``vram_mib`` is
    its new request.
    """

    how: Move
    outcome: Outcome
    cause: str = ""
    why: str = ""
    need: ResourceRequest | None = None
    vram_mib: int = 0


_ON_OTHER_GPUS = "; it is tried once more, on other GPUs"


def is_retry_note(note: str) -> bool:
    """Return whether a note says that the job is tried again because it ran out of GPU memory or its GPU failed."""
    return note.startswith(f"{OUT_OF_MEMORY}: ") or note.endswith(_ON_OTHER_GPUS)


CANCELLED = Meaning(Move.STOPPED, Outcome.CANCELLED)


def after_run(job: Job, rules: Rules) -> Meaning:
    """Return the meaning of the end of an attempt whose command ran.

    ``job`` holds the command's exit code or signal, and the cause of failure found in the log.
    """
    if _is_cancelled(job):
        return CANCELLED
    if job.state is JobState.STOPPING and job.stop_why == TRESPASS:
        return Meaning(Move.FAILED, Outcome.TRESPASS)
    if job.state is JobState.STOPPING:
        return _after_failure(job, Outcome.TIME_LIMIT, rules)
    if job.exit_code == 0:
        return Meaning(Move.SUCCEEDED, Outcome.EXIT)
    outcome = Outcome.EXIT if job.exit_code is not None else Outcome.SIGNAL
    return _after_gpu_fault(job, outcome, _code(job), rules) or _after_failure(job, outcome, rules)


def after_loss(job: Job, rules: Rules = NEVER_AGAIN) -> Meaning:
    """Return the meaning of the end of an attempt whose outcome is unknown.

    The job is cancelled or has failed. It gets another attempt only if a GPU of the attempt had a fault: in all other
    cases its command may have run to its end.
    """
    if _is_cancelled(job):
        return CANCELLED
    again = (
        _after_gpu_fault(job, Outcome.LOST, "an unknown outcome", rules) if job.state is not JobState.STOPPING else None
    )
    return again or Meaning(Move.FAILED, Outcome.LOST)


def after_no_start(job: Job, why: str, lasting: bool, rules: Rules) -> Meaning:
    """Return the meaning of a failed start. ``why``: the cause as text; ``lasting``: another start would fail too."""
    if job.state is JobState.STOPPING:
        return CANCELLED
    if lasting or job.start_failures + 1 >= rules.starts:
        return Meaning(Move.FAILED, Outcome.COULD_NOT_START)
    why = f"start failed: {why}; the next try is number {job.start_failures + 2} of {rules.starts}"
    return Meaning(Move.RETRY_SCHEDULED, Outcome.COULD_NOT_START, RETRY_COULD_NOT_START, why)


def reached_time_limit(job: Job) -> bool:
    """Return whether the attempt is being ended because it reached its time limit."""
    return job.state is JobState.STOPPING and job.stop_why == TIME_LIMIT


def ran(job: Job) -> dict[str, float]:
    """Return ``{"ran": seconds}`` for the event of an ended attempt; empty if its start or end is not known."""
    if job.started_at is None or job.finished_at is None:
        return {}
    return {"ran": round(max(0.0, job.finished_at - job.started_at), 3)}


def ended_by_request(job: Job) -> bool:
    """Return whether the attempt is being ended because a user cancelled it, or because it used GPUs of others."""
    return job.state is JobState.STOPPING and job.stop_why != TIME_LIMIT


def _is_cancelled(job: Job) -> bool:
    return job.state is JobState.STOPPING and job.stop_why not in (TIME_LIMIT, TRESPASS)


def _code(job: Job) -> str:
    return f"exit code {job.exit_code}" if job.exit_code is not None else f"signal {job.signal}"


def _after_gpu_fault(job: Job, outcome: Outcome, ended_with: str, rules: Rules) -> Meaning | None:
    """Return a retry if a GPU of the attempt had a fault, and the job was not yet tried again for this reason."""
    fault = "" if job.gpu_retries else rules.gpu_fault(job)
    if not fault:
        return None
    why = f"{fault}, and the attempt ended with {ended_with}{_ON_OTHER_GPUS}"
    return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_GPU_ERROR, why)


def _after_failure(job: Job, outcome: Outcome, rules: Rules) -> Meaning:
    failure = job.failure
    if failure is not None and failure.kind == OUT_OF_MEMORY and job.oom_retries < rules.oom_retries:
        after = next_need(job, failure, sizes_for(job.need, job.allowed, rules.gpus.values()), rules.most_mib(job))
        if after is not None:
            why = retry_note(job, failure, after)
            return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_OUT_OF_MEMORY, why, after.need, after.vram_mib)
    if rules.retries and job.runs_failed < job.spec.retries:
        code = _code(job)
        how = f"reached its time limit ({code})" if outcome is Outcome.TIME_LIMIT else f"failed with {code}"
        why = f"{how} (run {job.runs_failed + 1} of {job.spec.retries + 1})"
        return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_FAILED, why)
    return Meaning(Move.FAILED, outcome)
