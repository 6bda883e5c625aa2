"""Needs that are learned: the memory and load of the runs of each model, and the need that they suggest.

Runs are kept for each group (user, model, script, type of GPU). Suggestions are computed for each model from all its groups, because
the memory of a model depends little on the type of GPU (`core/suggested_need.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scheduler.core.check_spec import is_utf8
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Job
from scheduler.core.model_table import ModelTable, model_in, words_of
from scheduler.core.run_target import target_of
from scheduler.core.suggested_need import Suggestion, highest, suggestion

MOST_RUNS = 100  # newest runs kept of each group
LONGEST_MODEL = 300  # characters of a name; runs of longer ones are not kept
DONE, OTHERWISE = "done", "otherwise"  # how an attempt ended, beside OUT_OF_MEMORY


@dataclass(frozen=True, slots=True)
class Run:
    """Memory, load and run time of one attempt. ``ended``: `DONE`, `OUT_OF_MEMORY`, or `OTHERWISE`.

    ``peak_mib``: the most memory on one GPU; ``wall_s``: its run time in seconds; ``load``: mean load that its processes put on
    a GPU, 0 to 1. None: not measured.
    """

    peak_mib: int | None
    wall_s: float
    load: float | None
    ended: str = DONE


@dataclass(frozen=True, slots=True)
class Group:
    """Runs are kept apart for each of these. ``script``: its path, or the program of a command and its first word that is no
    option (`core/run_target.py`); ``gpu``: name of the type.

    ``count``: the number of GPUs.
    """

    user: str
    model: str
    script: str
    gpu: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """The runs of a group. ``runs``: the newest, oldest first; ``count`` and ``peak_mib``: of all runs so far."""

    runs: tuple[Run, ...] = ()
    count: int = 0
    peak_mib: int | None = None

    def with_run(self, run: Run) -> Seen:
        """Return these runs and one more.

        A run that failed otherwise may have ended before it used what it needs: alone it tells no peak.
        """
        runs = (*self.runs, run)
        peaks = [peak for peak in (self.peak_mib, *(one.peak_mib for one in runs)) if peak is not None]
        known = self.peak_mib is not None or run.ended != OTHERWISE
        return Seen(runs[-MOST_RUNS:], self.count + 1, max(peaks, default=None) if known else None)


def together(groups: Iterable[Seen]) -> Seen:
    """Return the runs of several groups as those of one."""
    found = list(groups)
    peaks = [seen.peak_mib for seen in found if seen.peak_mib is not None]
    runs = tuple(run for seen in found for run in seen.runs)
    return Seen(runs, sum(seen.count for seen in found), max(peaks, default=None))


def p95(values: Collection[float]) -> float | None:
    """Return the value that 95 % of the values do not exceed (nearest rank); None if there are no values."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None


def group_of(job: Job, gpus: Mapping[int, Gpu]) -> Group | None:
    """Return the group of the current attempt of a job; None if it names no model, or uses no GPU. ``gpus``: by index.

    A model whose name is too long or not UTF-8 cannot be in a model table, so it has no group.
    """
    model = model_in(words_of(job.spec))
    names = [gpus[gpu].name for gpu in job.gpus if gpu in gpus]
    if model is None or not names or len(model) > LONGEST_MODEL or not is_utf8(model):
        return None
    shown = target_of(job.spec).name.encode("utf-8", "backslashreplace").decode()  # the store records only UTF-8
    return Group(job.spec.user, model, shown, names[0], len(names))


@dataclass(frozen=True, slots=True)
class Advice:
    """The need of a model: in the table, as seen, and as suggested.

    ``table``: its need in the model table as written; empty: the table does not know it. ``p95_mib``, ``load``, ``wall_s``: of the
    newest runs: the memory that 95 % of them did not exceed, their mean load (0 to 1), and the median run time of those that
    were done. ``out_of_memory``: how many of the newest runs ended because GPU memory ran out.
    """

    model: str
    table: str
    runs: int
    peak_mib: int | None
    p95_mib: float | None
    load: float | None
    wall_s: float | None
    out_of_memory: int
    suggestion: Suggestion | None

    @property
    def differs(self) -> bool:
        """Whether runs were seen, and they suggest another need than that of the table."""
        found = self.suggestion
        return found is not None and found.basis == "seen" and found.need != _need_in(self.table)


def advice(table: ModelTable, seen: Mapping[Group, Seen], gpus: Collection[Gpu]) -> list[Advice]:
    """Return the advice for each model of the table and each model that has run, sorted by name."""
    groups: dict[str, dict[Group, Seen]] = {model: {} for model in table.models}
    for group, runs in seen.items():
        groups.setdefault(group.model, {})[group] = runs
    return [_advice(model, table.models.get(model, ""), groups[model], gpus) for model in sorted(groups)]


def _advice(model: str, written: str, groups: Mapping[Group, Seen], gpus: Collection[Gpu]) -> Advice:
    seen = together(groups.values())
    peaks = highest((group.count, runs.peak_mib) for group, runs in groups.items())
    loads = [run.load for run in seen.runs if run.load is not None]
    walls = [run.wall_s for run in seen.runs if run.ended == DONE]
    return Advice(
        model, written, seen.count, seen.peak_mib,
        p95([run.peak_mib for run in seen.runs if run.peak_mib is not None]),
        statistics.fmean(loads) if loads else None, statistics.median(walls) if walls else None,
        sum(run.ended == OUT_OF_MEMORY for run in seen.runs),
        suggestion(model, peaks, gpus, _need_in(written)),
    )  # fmt: skip


def _need_in(written: str) -> ResourceRequest | None:
    return ResourceRequest.parse(written) if written else None
