"""The verb `needs`: advice on the needs of models, and writing suggested needs into the model table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.client.client import SchedulerClient
from scheduler.client.submission import model_table_for, settings_of, trusting
from scheduler.core.errors import Refused
from scheduler.core.learned_needs import Advice
from scheduler.core.model_table import ModelTable, table_from
from scheduler.core.needs_to_apply import NeedChange, changes_of
from scheduler.intake.settings import model_table
from scheduler.intake.table_file import write_needs


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of `apply_needs`. ``path``: the model table; ``backup``: copy of the old one; empty: there was none.

    ``kept``: for each named model that was not changed, a sentence that says why.
    """

    path: str
    backup: str
    changes: tuple[NeedChange, ...]
    kept: tuple[str, ...]


def table_path(client: SchedulerClient, config: str | None) -> str:
    """Return the path of the model table that the scheduler reads; empty if it reads none."""
    noted = client.settings()
    if "llm_config" in noted:
        return str(noted["llm_config"][0])
    return client.remembered("llm_config") or ("" if client.shared else settings_of(client, config).llm_config)


def needs(client: SchedulerClient, config: str | None, warn: Callable[[str], None]) -> list[Advice]:
    """Return the advice for each model, sorted by name. ``warn``: see `model_table_for`. Raises SchedulerError."""
    table = model_table_for(client, config, warn) if table_path(client, config) else ModelTable()
    return client.needs(table)


def apply_needs(client: SchedulerClient, config: str | None, models: Sequence[str] = ()) -> Applied:
    """Write suggested needs into the file of the model table (`changes_of`). The running scheduler reads it by itself.

    Raises NotFound for an unknown model, Refused if the caller may not do it or no table is read, and the errors of
    `write_needs`.
    """
    path = table_path(client, config)
    if not path:
        raise Refused(
            "the scheduler reads no model table: the setting llm_config is empty",
            do="set llm_config to the path of a file",
        )
    noted = client.remembered("model_table") if client.alive() else ""
    needed = bool(noted) and table_from(json.loads(noted), path) != ModelTable()

    def read(trust: bool) -> ModelTable:
        return model_table(path, trust, needed=needed)

    table = ModelTable() if client.shared else trusting(client, config, read)
    changes, kept = changes_of(client.needs(table, every=True), models)
    if not changes:
        return Applied(path, "", (), tuple(kept))
    mode = 0o644 if client.shared else 0o600  # the scheduler of all users reads a file of root

    def write(trust: bool) -> str:
        return write_needs(path, changes, trust, needed=needed, mode=mode)

    return Applied(path, trusting(client, config, write), tuple(changes), tuple(kept))
