"""Objects shared by all parts of a daemon: paths, current settings, the store, the listener for messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scheduler.core.config import Config
from scheduler.core.job import Job
from scheduler.core.log_message import Listener, LogMessage
from scheduler.core.model_table import ModelTable
from scheduler.core.secrets import without_secrets
from scheduler.core.suggested_need import Learned
from scheduler.daemon.completion_hooks import Actions
from scheduler.store.database import Database
from scheduler.store.paths import Places


@dataclass(slots=True)
class Context:
    """The objects that all parts of a daemon share. A reload of the settings replaces ``config`` and ``table``.

    ``changed``: paths of files that changed since the last pass. ``folder``: start folder of the daemon.
    ``listener`` receives every message and must not block. ``shared``: the jobs belong to several users, and only
    their agents touch the files of the users (`gpujobd`) and run the actions at the end of a job (``actions``).
    """

    places: Places
    config: Config
    db: Database
    environ: dict[str, str]
    folder: str
    listener: Listener
    table: ModelTable = field(default_factory=ModelTable)
    changed: set[str] = field(default_factory=set)
    shared: bool = False
    actions: Actions | None = None
    learned: dict[tuple[str, str], Learned] = field(default_factory=dict)  # (model, name of a script) → its runs
    limits_jobs: bool = False  # the memory and CPUs of jobs are limited (`mem=`, `cpus=`)

    @property
    def needs(self) -> ModelTable:
        """The model table, with what was learned from runs if the setting `learn` is on."""
        return replace(self.table, learned=self.learned) if self.config.learn else self.table

    def say(self, text: str, level: int = 20, *, kind: str = "", job: Job | None = None) -> None:
        """Send a message to the listener, with secrets masked. ``level``: a level of the standard library's logging."""
        text = without_secrets(text)
        if job is None:
            self.listener(LogMessage(text, level, kind))
            return
        packed = job.spec.gzip and job.runner_kind.packs_logs  # a compressed log cannot be shown while it grows
        self.listener(LogMessage(text, level, kind, job.id, "" if packed else job.log))
