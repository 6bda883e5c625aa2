"""Data that the pages show about jobs and GPUs: table rows, facts and buttons. Secrets are masked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.client.outlook import OfferedCommand
from scheduler.client.overview import GpuView, Overview
from scheduler.core.allowed import allowed_text
from scheduler.core.gpu import WHOLE, gpu_ids_text, named_gpus
from scheduler.core.job import Event, Job, JobState, Reason
from scheduler.core.job_text import ending, how_it_ended, job_name, sentence
from scheduler.core.offered_requests import CANCEL, EDIT, FIRST, QUEUE_RESUME, RELEASE, RESUME, OfferedRequest
from scheduler.core.run_differences import differences_of, since_good_run
from scheduler.core.secrets import without_secrets
from scheduler.core.units import mib_text
from scheduler.core.usage_report import AttemptUse
from scheduler.views.job_facts import Fact, job_facts, memory_text
from scheduler.views.nodes import NodeView, nodes_of
from scheduler.views.predictions import offered_json
from scheduler.web.timeline import Run

MOST_NAMED = 5  # jobs listed in a question
LONGEST_NAME = 120  # characters of a command in a table
MEMORY_PARTS = ("ours", "foreign", "reserved", "free")


@dataclass(frozen=True, slots=True)
class Act:
    """A button.

    ``path``: path of the POST request that the button sends; ``hint``: tooltip; ``kind``: CSS class. ``ask``: question
    that the user has to confirm first; empty: no question.
    """

    verb: str
    path: str
    hint: str
    ask: str = ""
    kind: str = ""


def acts(job: Job, skipped: Sequence[int] = ()) -> list[Act]:
    """Return the buttons that a job has in its present state.

    ``skipped``: jobs that will be skipped if this job is cancelled.
    """
    at, name = f"/api/jobs/{job.id}", job.spec.shown_words(60)
    if job.state is JobState.PENDING:
        held = job.held
        hold = Act("release", f"{at}/release", "allow it to start") if held else (
            Act("hold", f"{at}/hold", "keep it in the queue, but do not start it"))  # fmt: skip
        return [
            Act("first", f"{at}/first", "start it before all other jobs"),
            hold,
            Act(
                "cancel",
                f"{at}/cancel",
                "take it out of the queue",
                f"Cancel job {job.id} ({name})? It leaves the queue; retry puts it back.{_then(skipped)}",
                "bad",
            ),
        ]
    if job.state.ended:
        return [Act("retry", f"{at}/retry", "queue it again; its old output is kept")]
    if job.state is JobState.STOPPING and job.stop_why == "cancelled":
        return []
    ask = f"Cancel job {job.id} ({name})? It is running: all its processes get SIGTERM, then SIGKILL.{_then(skipped)}"
    return [Act("cancel", f"{at}/cancel", "end all its processes", ask, "bad")]


def _then(skipped: Sequence[int], whose: str = "its") -> str:
    """Return a sentence which says that the jobs in ``skipped`` will be skipped; empty if there are no such jobs."""
    if not skipped:
        return ""
    if len(skipped) == 1:
        return f" Job {skipped[0]} depends on {whose} success and will be skipped."
    more = f" and {len(skipped) - MOST_NAMED} more" if len(skipped) > MOST_NAMED else ""
    names = ", ".join(map(str, skipped[:MOST_NAMED]))
    return f" Jobs {names}{more} depend on {whose} success and will be skipped."


def in_need(view: Overview) -> dict[int, list[int]]:
    """Return job id → ids of waiting jobs that would be skipped, directly or indirectly, if the job failed."""
    needed: dict[int, set[int]] = {}
    for job in view.jobs:
        if job.state is JobState.PENDING:
            for parent in job.spec.after_ok:
                needed.setdefault(parent, set()).add(job.id)
    found = {}
    for parent in needed:
        seen: set[int] = set()
        ahead = [parent]
        while ahead:
            new = needed.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        found[parent] = sorted(seen)
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A job in a table. All fields except ``job``, ``reason`` and ``acts`` are texts to show.

    ``name``: the command. ``how``: how the job ended. ``need``: the resource request. ``allowed``: the allowed GPUs.
    """

    job: Job
    name: str
    how: str
    reason: Reason | None
    gpus: str
    need: str
    allowed: str
    acts: list[Act]


def row(job: Job, reason: Reason | None = None, skipped: Sequence[int] = ()) -> Row:
    """Return the table row of a job. ``skipped``: jobs that will be skipped if this job is cancelled."""
    allowed = "any" if job.allowed is None else allowed_text(job.allowed)
    return Row(job, command_words(job), how_it_ended(job), reason, gpu_ids_text(job.gpus), need_words(job), allowed,
               acts(job, skipped))  # fmt: skip


def command_words(job: Job) -> str:
    """Return the job's command on one line, without the label, which the page shows separately."""
    label = without_secrets(job.spec.label)
    text = job.spec.shown_words(LONGEST_NAME + len(label)).removeprefix(f"{label}: " if label else "")
    return text.replace("\n", "⏎")


def need_words(job: Job) -> str:
    """Return the job's resource request as short text: ``0.5 GPU``, ``1 GPU · 18 GiB``, ``CPU ×2``."""
    booked = f" · {mib_text(job.spec.vram_mib)}" if job.spec.vram_mib else ""
    if job.need.count == 0:
        return "CPU" if job.need.slots == 1 else f"CPU ×{job.need.slots}"
    if job.need.by_name or (job.spec.vram_mib and job.need.parts <= 1):
        return f"{job.need.count} GPU{'s' * (job.need.count > 1)}{booked}"
    return f"{job.need} GPU{'s' * (job.need.count > 1)}{booked}"


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The box on the page that shows one GPU.

    ``memory``: part of the memory (`MEMORY_PARTS`) → MiB; None if this is unknown. ``notes``: sentences about the GPU.
    """

    view: GpuView
    memory: Mapping[str, float] | None
    jobs: Sequence[tuple[int, Row | None]]  # None: a job that ended but has leftover processes
    notes: Sequence[str]

    @property
    def spots(self) -> list[tuple[str, float, float]]:
        """The parts of the GPU's memory as (name, start, width), the last two in per cent of the sum of all parts."""
        found, at = [], 0.0
        total = sum((self.memory or {}).values())
        for part, mib in (self.memory or {}).items():
            wide = 100 * mib / total if total else 0.0
            found.append((part, at, wide))
            at += wide
        return found


def gpu_cards(view: Overview) -> list[GpuRow]:
    """Return the data of the page's boxes, one box for each GPU."""
    known = {job.id: row(job) for job in view.jobs if job.state.holds_gpus}
    found = []
    for gpu in view.gpus:
        notes = [gpu.reason] if gpu.reason else []
        if gpu.gpu.index in view.held:
            notes.insert(0, f"held by {view.held[gpu.gpu.index]}")
        jobs = [(number, known.get(number)) for number in gpu.jobs]
        found.append(GpuRow(gpu, memory_parts(gpu), jobs, notes))
    return found


@dataclass(frozen=True, slots=True)
class NodeCard:
    """The box on the page that shows one node of a cluster."""

    view: NodeView
    jobs: Sequence[tuple[int, Row | None]]  # as in `GpuRow`

    @property
    def idle(self) -> bool:
        """True if nothing on the node needs attention: it has no jobs, and all its GPUs are available."""
        return not self.jobs and self.view.states == "AVAILABLE"


def node_cards(view: Overview) -> list[NodeCard]:
    """Return the data of the boxes of a cluster's nodes; empty if jobs run on this machine."""
    nodes = nodes_of(view.gpus)
    known = {job.id: row(job) for job in view.jobs if job.state.holds_gpus} if nodes else {}
    return [NodeCard(node, [(number, known.get(number)) for number in node.jobs]) for node in nodes]


def memory_parts(gpu: GpuView) -> dict[str, float] | None:
    """Return part of the GPU's memory (`MEMORY_PARTS`) → MiB. Return None if the used or the total memory is unknown.

    The part ``reserved`` is the memory of the driver and the display, and foreign memory that the user has accepted.
    """
    read = gpu.reading
    total = None if read is None else read.memory_total_mib or gpu.gpu.memory_mib
    if read is None or total is None or read.memory_used_mib is None:
        return None
    ours = min(read.own_mib, total)
    foreign = max(0, read.memory_used_mib - ours) if read.foreign_mib is None else read.foreign_mib
    reserved = read.reserved_mib or 0
    return {"ours": ours, "foreign": foreign, "reserved": reserved, "free": max(0, total - ours - foreign - reserved)}


# -- one job ----------------------------------------------------------------------------------------------


SHOWN_ABOVE = frozenset(
    {"class", "failure", "error", "hint", "memory", "good run", "differs", "note", "attempt"}
)  # facts that are shown elsewhere on the page of a job


@dataclass(frozen=True, slots=True)
class FailureCard:
    """The card about the failure of a job. Of its memory: text, parts in per cent of the larger of both sizes.

    ``good_job``: id of another job that was the last good run of the same script; None: none is known, or an earlier attempt of this job.
    """

    memory: str
    asked: float | None
    peak: float | None
    good_job: int | None
    since: str
    differs: Sequence[str]


def failure_card(job: Job) -> FailureCard | None:
    """Return the card about the failure of a job; None if it has no known failure."""
    found = job.failure
    if found is None:
        return None
    sizes = (found.asked_mib, found.peak_mib)
    most = max((size for size in sizes if size), default=0)
    asked, peak = (100 * size / most if size and all(sizes) else None for size in sizes)
    good = found.good_run if found.good_run != job.id else None
    return FailureCard(memory_text(found), asked, peak, good, since_good_run(job), differences_of(job))


def facts(job: Job) -> list[Fact]:
    """Return the facts that `gpujob show` prints. Leave out the facts that the page shows elsewhere."""
    return [fact for fact in job_facts(job) if fact.name not in SHOWN_ABOVE]


def story(job: Job, events: Iterable[Event]) -> list[tuple[float, str]]:
    """Return the job's event history as (time, sentence)."""
    name = job_name(job)  # with which `sentence` begins
    told = [(job.submitted_at, without_secrets(f"accepted from {job.spec.origin or job.spec.source}"))]
    for event in events:
        text, _ = sentence(event, job)
        short = text.removeprefix(name).lstrip(": ")
        if event.kind == "failed":  # the page shows the hint at the top
            short = f"failed: {ending(event.detail)}"
        told.append((event.at, without_secrets(short or event.kind)))
    return told


@dataclass(frozen=True, slots=True)
class OfferRow:
    """An offer for a waiting job: the command, its cost, and its button, as in `Act`. ``body``: JSON that the button sends."""

    command: str
    cost: str
    path: str
    body: str
    ask: str
    kind: str


def offer_rows(job: Job, found: Iterable[OfferedCommand], view: Overview) -> list[OfferRow]:
    """Return the offers for a waiting job. Each has a question that names what will happen and the cost."""
    need = in_need(view)
    names = {one.id: one.spec.shown_words(60) for one in view.jobs}
    rows = []
    for offer in found:
        effects = " ".join(_effect(job, one, names, need) for one in offer.requests)
        ask = f"Start job {job.id} now? {effects} Cost: {offer.cost}. This is the command: {offer.command}"
        body = json.dumps({"requests": [offered_json(one) for one in offer.requests]})
        kind = "bad" if any(one.verb == CANCEL for one in offer.requests) else ""
        rows.append(OfferRow(offer.command, offer.cost, f"/api/jobs/{job.id}/offer", body, ask, kind))
    return rows


def _effect(job: Job, one: OfferedRequest, names: Mapping[int, str], need: Mapping[int, Sequence[int]]) -> str:
    """Return a sentence about what a request of an offer does.

    ``names``: id → command of a job; ``need``: as `in_need` returns it.
    """
    if one.verb == CANCEL:
        named = [f"{number} ({names[number]})" if number in names else str(number) for number in one.jobs]
        skipped = sorted({other for number in one.jobs for other in need.get(number, ())} - {*one.jobs})
        jobs, whose = ("job", "its") if len(named) == 1 else ("jobs", "their")
        ends = f"all {whose} processes get SIGTERM, then SIGKILL"
        return f"It cancels {jobs} {', '.join(named)}: {ends}.{_then(skipped, whose)}"
    if one.verb == EDIT:
        changed = ", ".join(f"{name.replace('_', '-')} {text or 'none'}" for name, text in one.options.items())
        return f"It changes job {job.id}: {changed}."
    return {
        FIRST: f"It puts job {job.id} before all other jobs.",
        RELEASE: f"It releases job {job.id}.",
        RESUME: f"It resumes {named_gpus(one.gpus)}.",
        QUEUE_RESUME: "It resumes the queue.",
    }[one.verb]


def why_no_readings(job: Job, runs: int, declared: frozenset[int]) -> str:
    """Return why a job has no curves.

    ``runs``: number of the job's attempts. ``declared``: the GPUs that the user has declared; they have no readings.
    """
    if not job.need.count:
        return "No readings: it uses no GPU."
    if job.node:
        return "No readings: an engine gives GPUs, but does not measure them."
    blind = [gpu for gpu in job.gpus if gpu in declared]
    if runs and blind and len(blind) == len(job.gpus):
        return f"No readings: declared GPUs are not read ({named_gpus(blind)})."
    if job.state.ended:
        return "No readings were kept." if runs else f"No readings: {never_ran(job)}."
    return "No readings yet." if runs else "No readings yet: the job is waiting."


def never_ran(job: Job) -> str:
    """Return the text for a job without attempts."""
    return (
        "it could not start"
        if job.state is JobState.FAILED
        else "it never ran"
        if job.state.ended
        else "it has not run yet"
    )


def without_scripts(job: Job) -> list[str]:
    """Return the shell commands that are equivalent to the job's buttons, for browsers without scripts."""
    return [f"gpujob {act.verb} {job.id}" for act in acts(job)]


def related(job: Job, view: Overview) -> list[Job]:
    """Return the jobs in the overview that depend on this job."""
    return [other for other in view.jobs if job.id in other.spec.after or job.id in other.spec.after_ok]


def run_of(job: Job, attempt: AttemptUse, number: int, now: float, memory: Mapping[int, int | None]) -> Run:
    """Return an attempt in the form that the Timeline needs.

    ``number``: how many attempts the job has. ``memory``: GPU → its total memory in MiB; None if this is unknown.
    """
    last = attempt.number == job.attempt and job.started_at is not None
    start = attempt.started_ms / 1000
    end = start + attempt.run_ms / 1000
    if last and job.state.holds_gpus:
        end = max(end, now)
    parts = parts_of(job, attempt.parts, attempt.gpus, memory)
    state = job.state.value if last else "failed"
    return Run(job.id, attempt.number, start, end, attempt.gpus, parts, state, number, attempt.lost)


def parts_of(job: Job, parts: int, gpus: Sequence[int], memory: Mapping[int, int | None]) -> int:
    """Return the share of each GPU in thousandths; of a job that requests only memory, its part of the memory.

    ``memory``: GPU → its total memory in MiB; None if this is unknown.
    """
    total = next((memory[gpu] for gpu in gpus if memory.get(gpu)), None)
    if parts <= 1 and job.spec.vram_mib and total:
        return min(WHOLE, WHOLE * job.spec.vram_mib // total)
    return parts
