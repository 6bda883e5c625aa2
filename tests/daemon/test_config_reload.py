"""Tests that a running daemon reads a changed config at the right moments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.config import Config
from scheduler.core.gpu import Gpu
from scheduler.core.log_message import LogMessage
from scheduler.core.model_table import ModelTable
from scheduler.core.observations import Now
from scheduler.daemon.config_reload import SETTLE_S, ConfigReload
from scheduler.daemon.context import Context
from scheduler.intake.settings import Settings, load
from scheduler.store.database import Database
from scheduler.store.paths import Places

CHANGED_AT = 1_000_000.0
Begun = tuple[ConfigReload, "Target", list[str], Path]


class Target:
    """A receiver of reloaded settings, in place of the daemon. ``config``: the settings that it received last."""

    def __init__(self) -> None:
        self.config = Config()

    def choose_gpus(self, config: Config) -> list[Gpu]:
        return []

    def use_settings(self, config: Config, gpus: list[Gpu] | None) -> None:
        self.config = config

    def use_table(self, table: ModelTable, now: Now) -> None:
        raise AssertionError("no table here")


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    """Create a config file with `kill_grace: 5`, and a ConfigReload that reads it.

    Yield the ConfigReload, the receiver of its settings, the logged messages, and the path of the config file.
    """
    path, said = tmp_path / "config.yaml", []
    flags: dict[str, Any] = {"state_file": str(tmp_path / "gpu_scheduler_state.json")}

    def read() -> Settings:
        return load(flags, {}, str(path))

    def listen(message: LogMessage) -> None:
        said.append(message.text)

    path.write_text("kill_grace: 5\n")
    settings, target = read(), Target()
    places = Places(settings.config.state_file)
    with contextlib.closing(Database(places)) as database:
        context = Context(places, settings.config, database, {}, str(tmp_path), listen)
        yield ConfigReload(context, target, settings, read), target, said, path


def test_a_changed_config_is_read_only_after_it_stops_changing(begun: Begun) -> None:
    """P3: A periodic check reads a changed config only if it has been unchanged for ``SETTLE_S`` seconds.

    So the daemon does not read a file of which an editor has saved only a part.
    """
    reload, target, said, path = begun
    path.write_text("")  # a user saves it in place
    os.utime(path, (CHANGED_AT, CHANGED_AT))
    for after in (-0.02, 0.0, 0.1, SETTLE_S - 0.05):  # -0.02: the save began after the pass had begun
        now = Now(CHANGED_AT + after, 50.0 + after)
        reload.look_at_all(now)
        reload.step(now)
        assert said == [] and now.mono < reload.due() <= 50.0 + max(after, 0.0) + SETTLE_S + 1e-6
    path.write_text("kill_grace: 7\n")
    os.utime(path, (CHANGED_AT + 0.27, CHANGED_AT + 0.27))
    reload.step(Now(CHANGED_AT + 0.31, 50.31))
    assert said == []
    reload.step(Now(CHANGED_AT + 0.6, 50.6))
    assert said == ["config reloaded: kill_grace 5 -> 7"] and target.config.kill_grace == 7


def test_a_complete_or_old_or_future_config_is_read_at_once(begun: Begun) -> None:
    reload, target, said, path = begun
    for grace, end, age in ((6, "...\n", 0.0), (7, "", -3600.0), (8, "", SETTLE_S)):
        path.write_text(f"kill_grace: {grace}\n{end}")
        os.utime(path, (CHANGED_AT, CHANGED_AT))
        now = Now(CHANGED_AT + age, 50.0)
        reload.look_at_all(now)
        reload.step(now)
        assert said.pop() == f"config reloaded: kill_grace {grace - 1} -> {grace}" and not said
        assert target.config.kill_grace == grace
