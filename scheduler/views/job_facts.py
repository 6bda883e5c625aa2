"""Facts about a job for `show` and the web page. Times are left out: `show` and the page write them differently."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.client.overview import words_run
from scheduler.core.allowed import allowed_text
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Failure, Job, JobSpec
from scheduler.core.log_names import stderr_log
from scheduler.core.run_differences import differences_of, since_good_run
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.shell_quoting import joined
from scheduler.core.topology import link_of
from scheduler.core.units import mib_text, span_text


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about a job: its name, and its text without secrets.

    ``literal``: the text is a path, a command or output, to be shown unchanged. Only the text of ``info`` may have
    several lines.
    """

    name: str
    text: str
    literal: bool = False


def job_facts(job: Job) -> list[Fact]:
    """Return the facts about a job, except times and empty values."""
    spec = job.spec
    words = words_run(job)
    command = joined(words_without_secrets(words)) if spec.shell_text is None else words[-1]
    told: list[tuple[str, object, bool]] = [
        ("command", command, True),
        ("as written", _as_written(job), True),
        ("user", spec.user, False),
        ("label", spec.label, False),
        ("environment", spec.conda_env, False),
        ("interpreter", job.interpreter, True),
        ("folder", spec.cwd, True),
        ("from", spec.origin or spec.source, False),
        ("priority", job.priority, False),
        ("need", job.need.in_words() + (f", {mib_text(spec.vram_mib)} of memory" if spec.vram_mib else ""), False),
        ("link", f"its GPUs must be joined by {link_of(spec.link).in_words} or better" if spec.link else "", False),
        ("limits", _limits(spec), False),
        ("slots", spec.slots if not job.need.count and spec.slots != 1 else "", False),
        ("allowed GPUs", "any" if job.allowed is None else allowed_text(job.allowed), False),
        ("named GPUs", f"{gpu_ids_text(spec.on)} (also if other jobs are on them)" if spec.on else "", False),
        ("GPUs", gpu_ids_text(job.gpus), False),
        ("node", job.node, False),
        ("partition", job.partition, False),
        ("engine job", f"{job.engine_job} ({job.runner})" if job.engine_job else "", False),
        ("pid", job.process.pid if job.process else "", False),
        ("session", f"{job.session_name} (gpujob attach {job.id})" if job.session and job.state.holds_gpus else "", False),
        ("attempt", job.attempt or "", False),
        ("time limit", span_text(spec.time_limit_s) if spec.time_limit_s else "", False),
        ("retries", f"{job.runs_failed} of {spec.retries} used" if spec.retries else "", False),
        ("log", job.log, True),
        ("errors", stderr_log(job), True),
        ("on finish", spec.on_finish, False),
        ("mail to", spec.mail_to, False),
        ("info", spec.info, False),
        ("class", job.failure.kind if job.failure else "", False),
        ("failure", job.failure.line if job.failure else "", True),
        ("error", job.failure.error if job.failure else "", True),
        ("memory", memory_text(job.failure) if job.failure else "", False),
        ("hint", job.failure.hint if job.failure else "", False),
        ("good run", since_good_run(job), False),
        *(("differs", text, False) for text in differences_of(job)),
        ("warning", f"from its log: {job.log_finding.line}" if job.succeeded and job.log_finding else "", False),
        *(("note", note, False) for note in job.notes),
    ]  # fmt: skip
    return [
        Fact(name, without_secrets(str(value)), literal) for name, value, literal in told if value not in ("", None)
    ]


def _as_written(job: Job) -> str:
    """Return the command as the user wrote it, for example with ``{gpus}``.

    Returns an empty text for a script. Also returns an empty text if the command is run exactly as it was written.
    """
    spec = job.spec
    if spec.is_script or list(spec.arguments[1:]) == words_run(job)[1:]:
        return ""
    return spec.shell_text or joined(words_without_secrets(spec.arguments))


def memory_text(failure: Failure) -> str:
    """Return a text about the GPU memory of a failed job; empty if nothing is known.

    The text says how much memory the job asked for, and the largest amount that it was seen to use.
    """
    asked = f"asked for {mib_text(failure.asked_mib)} of a GPU" if failure.asked_mib else ""
    used = f"used up to {mib_text(failure.peak_mib)}" if failure.peak_mib else ""
    return ", ".join(filter(None, (asked, used)))


def _limits(spec: JobSpec) -> str:
    """Return the limits of memory and CPUs of a job as text; empty if it has none."""
    memory = f"{mib_text(spec.mem_mib)} of memory" if spec.mem_mib else ""
    cpus = f"{spec.cpus:g} CPUs" if spec.cpus else ""
    return ", ".join(filter(None, (memory, cpus)))
