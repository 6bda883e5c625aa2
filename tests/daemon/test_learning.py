"""Tests of the part of the daemon that learns the needs of models, and of what it knows after a restart."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.core.gpu import Gpu
from scheduler.core.learned_needs import Group, Run
from scheduler.core.model_table import ModelTable
from scheduler.core.observations import Now
from scheduler.core.suggested_need import Learned
from scheduler.daemon import learning
from scheduler.daemon.learning import Learning
from scheduler.store.history_db import HistoryFile
from tests.builders import a_job
from tests.store.test_history_db import NOW, fill, job

GPUS = [Gpu(0, "GPU-a", memory_mib=80_000), Gpu(1, "GPU-b", memory_mib=24_000)]


class Learner:
    """The part, with a context of its own. ``updates``: the reasons for which needs were computed again."""

    def __init__(self, folder: Path, learn: bool = True) -> None:
        self.learned: dict[tuple[str, str], Learned] = {}
        self.updates: list[str] = []
        config = SimpleNamespace(learn=learn)
        places = SimpleNamespace(history=str(folder / "history.db"))
        table = ModelTable("1", {"known": "0.5"})
        context = SimpleNamespace(config=config, places=places, table=table, learned=self.learned)
        self.part = Learning(cast("Any", context), lambda: GPUS, lambda now, why: self.updates.append(why))

    def take(self, model: str, peak: int | None) -> list[str]:
        """Take one run; return why needs are computed again."""
        self.part.take([(Group("", model, "/a.py", "A100"), Run(peak, 1.0, None))])
        self.updates.clear()
        self.part.step(Now(0.0, 0.0))
        return self.updates


def test_needs_are_computed_again_only_if_a_suggestion_changes(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    assert learner.take("new", None) == []
    assert learner.take("new", 10_000) == ["learned from runs of new"]
    assert learner.take("new", 9_000) == [] and learner.take("new", 10_001) == []
    assert learner.take("new", 15_000) == ["learned from runs of new"]
    assert learner.take("known", 50_000) == [], "the table knows it"
    assert learner.learned == {("new", "a.py"): Learned(5, {1: 15_000}), ("known", "a.py"): Learned(1, {1: 50_000})}


def test_without_the_setting_runs_are_only_counted(tmp_path: Path) -> None:
    learner = Learner(tmp_path, learn=False)
    assert learner.take("new", 10_000) == [] and learner.learned == {("new", "a.py"): Learned(1, {1: 10_000})}


@pytest.mark.parametrize("gpus, peak", [((0,), 30_000), ((0, 1), 15_000)])
def test_the_peak_before_a_restart_comes_from_the_history(tmp_path: Path, gpus: tuple[int, ...], peak: int) -> None:
    rows = [job(NOW, 30_000.0), job(NOW + 10, 20_000.0), job(NOW, 70_000.0, attempt=2), job(NOW, 1.0, number=2)]
    with contextlib.closing(HistoryFile(str(tmp_path / "history.db"))) as file:
        fill(file, (), rows)
    running = a_job(1, attempt=1, gpus=gpus)
    found = Learner(tmp_path).part.measured_before([running, a_job(3, attempt=1, gpus=(0,)), a_job(4)])
    assert {key: used.peak_mib for key, used in found.items()} == {"1.1": peak}


def test_without_a_history_nothing_is_known(tmp_path: Path) -> None:
    assert Learner(tmp_path).part.measured_before([a_job(1, attempt=1, gpus=(0,))]) == {}


def test_the_models_that_ran_longest_ago_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_GROUPS", 2)
    learner = Learner(tmp_path)
    for model in ("a", "b", "a", "c"):
        learner.take(model, 10_000)
    assert [model for model, _ in learner.learned] == ["a", "c"]
