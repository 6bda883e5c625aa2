"""The state file as a wish: whose numbers its pauses are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.requests import Pause, Resume
from scheduler.engine.painting import StateFile

CARDS = [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]


def opened(folder: Path, document: Any, numbers: dict[str, int], shown: tuple[int, ...]) -> StateFile:
    """A state file that an earlier daemon painted, found by one that counts these pauses."""
    path = folder / "state.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return StateFile(str(path), shown_gpus=shown, numbers=numbers)


def test_pauses_painted_under_other_numbers_are_those_of_the_cards(tmp_path: Path) -> None:
    """I07"""
    numbers = {"GPU-a": 1, "GPU-b": 0}
    assert opened(tmp_path, {"paused_gpus": [0], "gpus": CARDS}, numbers, (1,)).edits((0, 1), 0.0) == []
    edited = opened(tmp_path, {"paused_gpus": [1], "gpus": CARDS}, numbers, (1,)).edits((0, 1), 0.0)
    assert edited == [Pause((0,)), Resume((1,))], "an edit made meanwhile is one of that card"


@pytest.mark.parametrize("cards", [None, [], "x", 3, [3], [{}], [{"index": "0"}], [{"index": [], "uuid": []}], [None]])
def test_a_file_that_names_no_cards_has_todays_numbers(tmp_path: Path, cards: Any) -> None:
    document = {"paused_gpus": [0], "gpus": cards}
    assert opened(tmp_path, document, {"GPU-a": 1, "GPU-b": 0}, ()).edits((0, 1), 0.0) == [Pause((0,))]
