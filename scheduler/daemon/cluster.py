"""Connects the daemon with an engine such as Slurm: the runner, and the GPUs of the nodes."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence

from scheduler.core.config import Config
from scheduler.core.engine_placement import EngineRules, numbered
from scheduler.core.errors import NoGpuData
from scheduler.core.gpu import Gpu
from scheduler.core.observations import Readings
from scheduler.gpus.monitor import Managed
from scheduler.runners.connect_engine import engine_of
from scheduler.runners.engine import EngineRunner
from scheduler.store import jobs as rows
from scheduler.store.cluster import Cluster, cluster_of, save_cluster
from scheduler.store.paths import Places, digest
from scheduler.store.store_identity import this_machine

FIRST_LIMIT_S = 60.0  # how long the start of the daemon waits for the first report
ASK_AGAIN_S = 2.0
SLOW_S = 2.0


class EngineProbe:
    """The nodes of a cluster as a GPU reader (`core/protocols.py: Probe`).

    ``problem``: why the engine has not told its nodes; empty while there is no answer at all.
    """

    absent = False
    problem = ""

    def __init__(self, runner: EngineRunner, title: str) -> None:
        self._runner, self._title = runner, title

    def first(self, slow: Callable[[], None] | None = None, meanwhile: Callable[[], None] | None = None) -> Readings:
        """Wait for the first report of the engine, and return it. Raises NoGpuData if the engine does not answer."""
        begun, ask_at = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now >= ask_at:
                self._runner.ask_report()
                ask_at = now + ASK_AGAIN_S
            found = self._runner.take_report()
            if found is not None and not found.problem:
                return found
            if found is not None:
                self.problem = found.problem
            if now - begun > FIRST_LIMIT_S:
                why = self.problem or f"{self._title} does not answer"
                raise NoGpuData(why, do=f"see whether {self._title} runs, then start gpujob again")
            if slow is not None and now - begun > SLOW_S:
                slow()
                slow = None
            if meanwhile is not None:
                meanwhile()
            time.sleep(0.02)

    def ask(self) -> None:
        """Request a report."""
        self._runner.ask_report()

    def look(self) -> Readings | None:
        """Return the requested report; None while it is under way."""
        return self._runner.take_report()

    def sessions(self) -> set[int]:
        """Return an empty set: no process of this machine reads the GPUs."""
        return set()

    def descriptors(self) -> list[int]:
        """Return an empty list: the pipe of the runner tells about reports, too."""
        return []

    def next_look(self) -> float | None:
        """Return None: no look without an event is necessary."""
        return None

    def close(self) -> None:
        """Do nothing: the runner owns the worker."""


class ClusterLink:
    """The runner and the GPU reader of the cluster that the settings name."""

    def __init__(self, config: Callable[[], Config], environ: Mapping[str, str], places: Places) -> None:
        self.config = config  # the daemon replaces it when it can reload settings
        self._engine = engine_of(lambda: self.config(), environ)
        prefix = f"gj-{digest(os.fsencode(f'{this_machine()}:{places.state_file}'), 4)}-"
        self.runner = EngineRunner(
            self._engine, places.attempts, places.state_dir, prefix, environ, lambda: self.config().engine_interval,
            environ.get("GPUJOB_CRASH_AT", ""),
        )  # fmt: skip
        self.probe = EngineProbe(self.runner, self._engine.title)

    def managed(
        self, connection: sqlite3.Connection, say: Callable[[str], None], meanwhile: Callable[[], None]
    ) -> Managed:
        """Return the GPUs of the cluster. If the engine does not answer, return those of the previous daemon.

        Raises NoGpuData if it is not known which GPUs there are.
        """
        title, stored = self._engine.title, [gpu for gpu in rows.gpus(connection) if gpu.node]
        before = cluster_of(connection)
        same = before is not None and before.engine == self._engine.name

        def slow() -> None:
            why = self.probe.problem
            say(f"{why}; waiting for an answer …" if why else f"waiting for {title} to answer …")

        try:
            first = self.probe.first(slow, meanwhile)
        except NoGpuData as error:
            if not (stored and same):
                raise
            return Managed(stored, self.probe, [f"{error.what}: no job is started until it answers"], shown=stored)
        gpus = numbered(first, stored if same else ())
        return Managed(gpus, self.probe, self._notes(gpus), first, gpus)

    def _notes(self, gpus: Sequence[Gpu]) -> list[str]:
        nodes = len({gpu.node for gpu in gpus})
        text = f"{self._engine.title} chooses the GPUs: {len(gpus)} GPUs on {nodes} nodes"
        shards = self.runner.shards
        if shards == 0:
            text += "; it has no shards, so a job that needs a part of a GPU gets a whole GPU"
        elif shards:
            text += f"; a GPU has {shards} shards, so shares are rounded up to 1/{shards} of a GPU"
        return [text, *self.runner.notes]

    def save(self, connection: sqlite3.Connection) -> None:
        """Record the cluster in the store. Drop the pauses of GPUs if the last daemon managed other GPUs than those of it."""
        name, title = self._engine.name, self._engine.title
        before = cluster_of(connection)
        if before is None or before.engine != name:
            rows.save_pauses(connection, (), bool(rows.meta(connection, "queue_paused")), [])
        shards, cpus = self.runner.shards, self.runner.cpus
        if before is not None and not self.runner.reported:  # `managed` has made sure that it was the same engine
            shards, cpus = before.rules.shards, before.cpus
        save_cluster(connection, Cluster(name, EngineRules(title, shards, self.config().engine_ignore_gpu_ids), cpus))
