"""Keeps the runs of each model up to date while the daemon runs, and has needs computed again if a suggestion changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Job
from scheduler.core.learned_needs import OTHERWISE, Group, Run
from scheduler.core.measured_use import MeasuredUse
from scheduler.core.observations import Now
from scheduler.core.run_target import script_name
from scheduler.core.suggested_need import Learned, suggestion
from scheduler.daemon.context import Context
from scheduler.daemon.parts import NEVER
from scheduler.store.history_db import peaks_of
from scheduler.store.seen_runs import MOST_GROUPS


class Learning:
    """A part of the daemon for the setting `learn`.

    ``gpus`` returns the managed GPUs; ``update`` computes the needs of the waiting jobs again.
    """

    def __init__(self, context: Context, gpus: Callable[[], Sequence[Gpu]], update: Callable[[Now, str], None]) -> None:
        self._context, self._gpus, self._update = context, gpus, update
        self._changed: dict[str, None] = {}  # models whose suggestion has changed

    def measured_before(self, jobs: Iterable[Job]) -> dict[str, MeasuredUse]:
        """Return attempt → the memory that it was seen to use before this daemon began, from the history.

        The history has the memory of all GPUs of an attempt together; each is taken to have had an equal part.
        """
        running = {(job.id, job.attempt): job for job in jobs if job.gpus}
        peaks = peaks_of(self._context.places.history, running)
        return {
            running[key].attempt_key: MeasuredUse(int(peak / len(running[key].gpus))) for key, peak in peaks.items()
        }

    def take(self, measured: Iterable[tuple[Group, Run]]) -> None:
        """Add ended runs, which are stored already."""
        learned = self._context.learned
        for group, run in measured:
            key = (group.model, script_name(group.script))
            before = learned.get(key, Learned(0, {}))
            counts = run.ended != OTHERWISE or bool(before.peaks)  # as in `Seen.with_run`
            after = before.with_run(group.count, run.peak_mib if counts else None)
            learned.pop(key, None)
            learned[key] = after  # at the end: the first ones ran longest ago
            while len(learned) > MOST_GROUPS:
                del learned[next(iter(learned))]
            if self._context.config.learn and group.model not in self._context.table.models:
                if self._suggested(group.model, before) != self._suggested(group.model, after):
                    self._changed[group.model] = None

    def _suggested(self, model: str, seen: Learned) -> list[ResourceRequest | None]:
        """Return the suggested need for each size of GPU: a job may be allowed to use some of them only."""
        if not seen.peaks:
            return []  # a guess, if anything
        each = {gpu.memory_mib: gpu for gpu in self._gpus()}
        found = (suggestion(model, seen.peaks, [gpu]) for gpu in each.values())
        return [one.need if one is not None else None for one in found]

    def step(self, now: Now) -> None:
        """Compute the needs of the waiting jobs again if a suggestion has changed. Raises StoreTrouble, sqlite3.Error."""
        if self._changed:
            models, self._changed = self._changed, {}
            self._update(now, f"learned from runs of {', '.join(models)}")

    def due(self) -> float:
        """Return infinity: only the end of an attempt matters."""
        return NEVER

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
