"""The meaning of an attempt's end for its job: the job is done, has failed, is cancelled, or gets another attempt.

The daemon, `recover`, `track`, and `status` without a running scheduler all call these functions, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scheduler.core.counters import RETRY_COULD_NOT_START, RETRY_FAILED, RETRY_GPU_ERROR, RETRY_OUT_OF_MEMORY
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import BY_MEMORY, WHOLE, ResourceRequest
from scheduler.core.job import Job, JobState, Outcome
from scheduler.core.own_classes import OwnClass
from scheduler.core.states import Move
from scheduler.core.units import mib_text


def _unknown(job: Job) -> int:
    return 0


def _no_fault(job: Job) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that decide whether a job gets another attempt after a failed attempt.

    ``starts``: after this number of failed starts the job fails, even if the cause is temporary. ``retries``: whether
    the job's own option ``retries`` applies. ``oom_retries``: how many more attempts a job gets after a lack of GPU
    memory; each of these attempts books more memory. ``most_mib``: returns the most MiB that a job can get on one GPU.
    This function is called only for jobs that book MiB (`core/model_table.py: booking_memory`). ``gpu_fault``: returns
    the fault of a GPU of the job's attempt, such as "GPU 0 reported XID 79"; empty if there is none. A job that ends
    badly then gets one more attempt, which never starts on this GPU. ``own_classes``: the user's classes of failures.
    """

    starts: int = 0
    retries: bool = True
    oom_retries: int = 0
    most_mib: Callable[[Job], int] = _unknown
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
    why = f"{fault}, and the attempt ended with {ended_with}; it is tried once more, on other GPUs"
    return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_GPU_ERROR, why)


def _after_failure(job: Job, outcome: Outcome, rules: Rules) -> Meaning:
    if rules.retries and job.runs_failed < job.spec.retries:
        code = _code(job)
        how = f"reached its time limit ({code})" if outcome is Outcome.TIME_LIMIT else f"failed with {code}"
        why = f"{how} (run {job.runs_failed + 1} of {job.spec.retries + 1})"
        return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_FAILED, why)
    out_of_memory = job.failure is not None and job.failure.kind == OUT_OF_MEMORY
    shares = job.need.count > 0 and 0 < job.need.parts < WHOLE
    if out_of_memory and shares and job.oom_retries < rules.oom_retries:
        return _with_more_memory(job, outcome, rules)
    return Meaning(Move.FAILED, outcome)


def _with_more_memory(job: Job, outcome: Outcome, rules: Rules) -> Meaning:
    """Return a retry with twice the share or memory, but at most a whole GPU.

    If the job already had the most memory that a job can get, return a failure.
    """
    before = job.spec.vram_mib or 0
    # The job decides, not the present setting: the setting may have changed while the job ran.
    if before and job.need.parts == BY_MEMORY:
        after = min(rules.most_mib(job), 2 * before)
        if after <= before:
            return Meaning(Move.FAILED, outcome)
        why = f"ran out of GPU memory with {mib_text(before)} booked; the next attempt books {mib_text(after)}"
        return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_OUT_OF_MEMORY, why, vram_mib=after)
    need = replace(job.need, parts=min(WHOLE, job.need.parts * 2))
    why = f"ran out of GPU memory with a need of {job.need}; the next attempt has a need of {need}"
    return Meaning(Move.RETRY_SCHEDULED, outcome, RETRY_OUT_OF_MEMORY, why, need)
