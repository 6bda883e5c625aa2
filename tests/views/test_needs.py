"""Issue 27, 1: the table of needs fits the terminal; the suggestion is never cut off."""

from __future__ import annotations

import pytest

from scheduler.core.gpu import Gpu
from scheduler.core.learned_needs import Group, Run, Seen, advice
from scheduler.core.model_table import ModelTable
from scheduler.views import terminal
from scheduler.views.needs import needs_lines

GPUS = [Gpu(0, "GPU-a", memory_mib=80_000)]
NAMES = ("qwen2.5-7b-inst", "unseen-7b", "名前" * 40)


@pytest.mark.parametrize(("columns", "head"), [
    (None, "MODEL TABLE RUNS MAX P95 LOAD TIME OOM SUGGESTED"), (200, "MODEL TABLE RUNS MAX P95 LOAD TIME OOM SUGGESTED"),
    (80, "MODEL TABLE RUNS MAX OOM SUGGESTED"), (76, "MODEL TABLE MAX OOM SUGGESTED"),
])  # fmt: skip
def test_a_narrow_terminal_loses_the_less_needed_columns(
    monkeypatch: pytest.MonkeyPatch, columns: int | None, head: str
) -> None:
    runs = Seen().with_run(Run(31_000, 5000.0, 0.5))
    groups = {Group("", model, "/a", "A100"): runs for model in NAMES[::2]}
    rows = advice(ModelTable("1", dict.fromkeys(NAMES[:2], "0.25")), groups, GPUS)
    monkeypatch.setattr(terminal, "width", lambda: columns)
    lines = needs_lines(rows, "/home/ada/llm_config.json")
    assert " ".join(lines[0].split()) == head
    (seven,) = (line for line in lines if line.startswith("qwen2.5-7b-inst"))
    assert " ".join(seven.split()).endswith("0.45 for 33.3 GiB *")
    assert any(line.rstrip().endswith("(guess)") for line in lines)
    assert columns is None or max(map(terminal.cells, lines)) <= columns
