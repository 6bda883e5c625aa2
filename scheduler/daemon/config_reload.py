"""Reloads the config and the model table of a running daemon when their files change."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from scheduler.core.config import OPTIONS, RELOADABLE, Config, written
from scheduler.core.errors import Refused, SchedulerError
from scheduler.core.gpu import Gpu
from scheduler.core.job_text import harmless
from scheduler.core.model_table import ModelTable
from scheduler.core.observations import Now
from scheduler.daemon.context import Context
from scheduler.intake.settings import DEFAULT, Settings, model_table
from scheduler.store import jobs as rows
from scheduler.system.safe_open import tail_of

SETTLE_S = 0.3  # a changed file is read once it has stayed unchanged for this long


def note_of(settings: Settings) -> str:
    """Return the value and origin of each setting as JSON. The store keeps this text for `config show`."""
    values = settings.config.policy_values()
    return json.dumps({key: [value, settings.origin[key]] for key, value in values.items()})


GPU_KEYS = frozenset({"gpus", "gpu_ids"})


class Reloadable(Protocol):
    """Interface through which `ConfigReload` applies new settings; implemented by `loop.Daemon`."""

    def choose_gpus(self, config: Config) -> list[Gpu]:
        """Find the GPUs that ``config`` names, store them and return them. Raises Refused, StoreTrouble."""

    def use_settings(self, config: Config, gpus: list[Gpu] | None) -> None:
        """Apply new settings and new managed GPUs (``gpus`` None: no change of the GPUs). Raises StoreTrouble."""

    def use_table(self, table: ModelTable, now: Now) -> None:
        """Apply a new model table: recompute the needs of waiting jobs. Raises StoreTrouble."""


@dataclass(slots=True)
class ConfigReload:
    """Reloads the config file and the model table. Logs each problem with one of these files once.

    ``load`` reads the settings from all sources again, so that flags and environment variables still take precedence
    over the config file.
    """

    context: Context
    target: Reloadable
    settings: Settings
    load: Callable[[], Settings]
    has_table: bool = False  # the table file existed, so a missing one is an error
    config_due: float = math.inf  # monotonic time of the next read
    table_due: float = math.inf  # monotonic time of the next read
    config_trouble: str = ""
    table_trouble: str = ""
    gpu_trouble: str = ""
    doubtful_since: float | None = None  # monotonic: since when the table is invalid, perhaps half written
    waiting: dict[str, Any] = field(default_factory=dict)  # settings that need a restart, as logged last
    noted: str = field(init=False)

    def __post_init__(self) -> None:
        self.noted = note_of(self.settings)

    def due(self) -> float:
        """Return the monotonic time of the next planned read of a file; infinite if no read is planned."""
        return min(self.config_due, self.table_due)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def look_at_all(self, now: Now) -> None:
        """Make the next step read the config file and the model table, even if no event has reported a change."""
        if self.settings.config_file and self.config_due == math.inf:
            self.config_due = now.mono
        if self.settings.config.llm_config and self.table_due == math.inf:
            self.table_due = now.mono

    def step(self, now: Now) -> None:
        """Read the config file and the model table if they have changed and are written completely.

        Raises StoreTrouble.
        """
        config_file, table_file = self.settings.config_file, self.settings.config.llm_config
        if config_file and config_file in self.context.changed:
            # Half of a config may be valid YAML, too: wait until the file stops changing, unless it has an end marker.
            self.config_due = now.mono + (0.0 if _has_end_marker(config_file) else SETTLE_S)
        if table_file in self.context.changed:
            self.table_due = now.mono  # half of a table is invalid JSON
        if now.mono >= self.config_due:
            wait_s = _still_written_s(config_file, now)  # a look without an event may come during a save
            self.config_due = now.mono + wait_s if wait_s else math.inf
            if not wait_s:
                self._read_config()
        if now.mono >= self.table_due:
            self.table_due = math.inf
            self._read_table(now)

    def _read_config(self) -> None:
        """Read the config again and apply the settings that may change at run time. Raises StoreTrouble."""
        path = self.settings.config_file
        try:
            fresh = self.load()
        except SchedulerError as error:
            text = harmless(str(error)) if os.path.lexists(path) else f"{harmless(path)}: the config file was deleted"
            if text != self.config_trouble:
                self.context.say(f"{text}; the previous settings stay in force", 30, kind="config")
            self.config_trouble = text
            return
        changes = self._take(fresh)
        if changes or self.config_trouble:
            self.context.say(f"config reloaded: {'; '.join(changes) or 'no setting has changed'}", 20, kind="config")
        self.config_trouble = ""
        note = note_of(self.settings)
        if note != self.noted:
            with self.context.db.writing(sync=False) as connection:
                rows.set_meta(connection, "settings", note)
            self.noted = note

    def _take(self, fresh: Settings) -> list[str]:
        """Apply the changed settings that may change at run time, and return texts to log.

        The texts name the applied changes and the settings that need a restart. If the GPUs in the new settings cannot
        be managed, one of the texts says why.
        """
        old, new = self.settings.config, fresh.config
        values = {key: (getattr(old, key), getattr(new, key)) for key in OPTIONS}
        changed = {key for key, (before, after) in values.items() if before != after}
        words, refused, gpus = [], "", None
        if changed & GPU_KEYS:
            try:
                gpus = self.target.choose_gpus(new)
            except Refused as error:
                refused = str(error)
                words += [f"{refused}; the managed GPUs are unchanged"] if refused != self.gpu_trouble else []
        self.gpu_trouble = refused
        left = GPU_KEYS if refused else frozenset()
        taken = {key: values[key][1] for key in changed - left if _may_change(key, *values[key])}
        waiting = {
            key: values[key][1]
            for key in OPTIONS
            # Default paths that change only because the state file has another folder are not listed one by one.
            if key in changed - set(taken) - left and (fresh.origin[key] != DEFAULT or old.state_file == new.state_file)
        }
        origin = {key: (self.settings if key in changed and key not in taken else fresh).origin[key] for key in OPTIONS}
        self.settings = Settings(replace(old, **taken), origin, self.settings.config_file)
        words += [
            f"{key} {written(before)} -> {written(after)}" for key, (before, after) in values.items() if key in taken
        ]
        unsaid = [key for key, value in waiting.items() if key not in self.waiting or self.waiting[key] != value]
        if unsaid:
            words.append(f"{', '.join(unsaid)} need{'s' if len(unsaid) == 1 else ''} a restart of the scheduler")
        self.waiting = waiting
        if taken:
            self.target.use_settings(self.settings.config, gpus)
        return words

    def _read_table(self, now: Now) -> None:
        """Read the model table again. If its file is invalid or missing, the last valid table stays in force."""
        config = self.context.config
        try:
            table = model_table(config.llm_config, config.trust_group, needed=self.has_table)
        except SchedulerError as error:
            self.doubtful_since = now.mono if self.doubtful_since is None else self.doubtful_since
            if now.mono < self.doubtful_since + SETTLE_S:
                self.table_due = self.doubtful_since + SETTLE_S
                return
            text = harmless(str(error))
            if text != self.table_trouble:
                self.context.say(f"{text}; the previous model table stays in force", 30, kind="table")
            self.table_trouble = text
            return
        self.has_table, self.doubtful_since = os.path.exists(config.llm_config), None
        if table != self.context.table:
            self.target.use_table(table, now)
        elif self.table_trouble:
            self.context.say(
                f"{harmless(config.llm_config)}: valid again, and equal to the model table in force", 20, kind="table"
            )
        self.table_trouble = ""


def _has_end_marker(path: str) -> bool:
    """Return whether a YAML file ends with the document end marker ``...``."""
    try:
        return tail_of(path, 5) == b"\n...\n"
    except OSError:
        return False


def _still_written_s(path: str, now: Now) -> float:
    """Return the seconds to wait before the file is read, since a program may still be writing the file.

    The result is 0 if the file has not changed within the last ``SETTLE_S`` seconds, if it has an end marker, or if it
    cannot be accessed.
    """
    try:
        age = now.wall - os.stat(path).st_mtime
    except OSError:
        return 0.0
    # The age is slightly negative if the file was changed after this pass began.
    return SETTLE_S - max(age, 0.0) if -SETTLE_S < age < SETTLE_S and not _has_end_marker(path) else 0.0


def _may_change(key: str, before: Any, after: Any) -> bool:
    if key == "gpu_interval" and not (before and after):
        return False  # readings can be turned on or off only at the start
    return key in RELOADABLE
