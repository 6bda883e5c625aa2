"""Issue 27, 1: which suggested needs are written into the model table."""

from __future__ import annotations

import pytest

from scheduler.core.errors import NotFound
from scheduler.core.gpu import Gpu
from scheduler.core.learned_needs import Advice, Group, Run, Seen, advice
from scheduler.core.model_table import ModelTable
from scheduler.core.needs_to_apply import NeedChange, changes_of, chosen

GIB = 1024
GPUS = [Gpu(0, "GPU-a", memory_mib=80 * GIB)]
SECRET = "https://me:hunter22hunter22@hub/m-7b"
TABLE = ModelTable("1", {"low": "0.1", "fits": "0.450", "guess-7b": "1", "unknown": "1"})


def rows() -> list[Advice]:
    ran = Seen().with_run(Run(31 * GIB, 60.0, 0.5))
    return advice(TABLE, {Group("", model, "/a", "A100"): ran for model in ("low", "fits", "new", SECRET)}, GPUS)


def test_without_names_the_suggestions_from_runs_are_written() -> None:
    """No guess, nothing that is equal, and no name with a secret."""
    assert changes_of(rows(), ()) == ([NeedChange("low", "0.1", "0.45"), NeedChange("new", "", "0.45")], [])


def test_a_named_model_changes_or_the_reason_is_told() -> None:
    assert changes_of(rows(), ["guess-7b", "low"])[0] == [
        NeedChange("guess-7b", "1", "0.25"),
        NeedChange("low", "0.1", "0.45"),
    ]
    changes, kept = changes_of(rows(), ["fits", "unknown", SECRET])
    assert changes == [] and len(kept) == 3
    assert "fits: the model table has 0.450 already" in kept and "hunter22" not in " ".join(kept)


def test_an_unknown_model_is_an_error_that_names_a_near_one() -> None:
    with pytest.raises(NotFound, match="there is no model 'gues-7b'; did you mean guess-7b"):
        chosen(rows(), ["low", "gues-7b"])
    with pytest.raises(NotFound) as found:
        chosen(rows(), [f"{SECRET}x"])
    assert "hunter22" not in str(found.value)
