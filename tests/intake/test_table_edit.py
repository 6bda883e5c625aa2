"""Issue 27, 1: needs are written into a model table that people wrote; everything else stays byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.model_table import table_from
from scheduler.intake.table_edit import with_needs

WRITTEN = """{
  "default_requirement": 1.0,

  "models" : {
    "qwen2.5-7b-inst": 1.0,
    "qwen2.5-3b-inst":0.50,
    "two" :   "2x0.5"
  }
}
"""


def test_a_need_is_replaced_in_place() -> None:
    changed = with_needs(WRITTEN, {"qwen2.5-3b-inst": "0.25", "two": "2"})
    assert changed == WRITTEN.replace(":0.50", ":0.25").replace('"2x0.5"', "2")


def test_a_new_model_is_laid_out_as_the_others() -> None:
    changed = with_needs(WRITTEN, {"neu-ä": "2x0.45"})
    assert changed == WRITTEN.replace('   "2x0.5"', '   "2x0.5",\n    "neu-ä": "2x0.45"')


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '{\n  "models": {\n    "m": 0.5\n  }\n}\n'), (" \n", '{\n  "models": {\n    "m": 0.5\n  }\n}\n'), ("{}", '{"models": {"m": 0.5}}'),
        ('{"models":{}}', '{"models":{"m": 0.5}}'), ('{"models": {"a": 1}}', '{"models": {"a": 1, "m": 0.5}}'),
        ('{"models": {"a": 1, "b": 1}}', '{"models": {"a": 1, "b": 1, "m": 0.5}}'),
        ('{"default_requirement": 1}', '{"default_requirement": 1, "models": {"m": 0.5}}'),
        ('{"models": {"m": 1}, "default_requirement": "m"}', '{"models": {"m": 0.5}, "default_requirement": "m"}'),
    ],
)  # fmt: skip
def test_small_tables(before: str, after: str) -> None:
    assert with_needs(before, {"m": "0.5"}) == after


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
needs = st.sampled_from(["0.05", "0.5", "1", "2", "2x0.45"])


@given(
    st.dictionaries(names, needs | st.sampled_from([0.5, 1, 2]), max_size=6), st.dictionaries(names, needs, min_size=1, max_size=4),
    st.sampled_from([None, 0, 2, "\t"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_changed_table_has_the_new_needs_and_all_others(
    before: dict[str, Any], changes: dict[str, str], indent: int | str | None, default_last: bool, ascii_only: bool
) -> None:
    data = (
        {"models": before, "default_requirement": 1} if default_last else {"default_requirement": 1, "models": before}
    )
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only)
    changed = with_needs(text, changes)
    found = table_from(json.loads(changed), "table")
    assert found.models == {**{name: str(need) for name, need in before.items()}, **changes} and found.default == "1"
    assert with_needs(changed, changes) == changed, "a second time changes nothing"
