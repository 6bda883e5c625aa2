"""The planted bugs (planted.py) can still be planted, and the tests that caught them are still there."""

from __future__ import annotations

import re

import pytest

from tests.planted import BUGS, RESULT, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name.replace(" ", "-") for bug in BUGS])
def test_a_planted_bug_has_its_place_and_was_caught(bug: Bug) -> None:
    for name, old, _ in bug.changes:
        assert (ROOT / name).read_text().count(old) == 1, (
            f"{name}: the bug has no place any more; mend tests/planted.py"
        )
    for test in bug.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
    row = re.search(rf"^\| {re.escape(bug.name)} \| .* \| `(tests/[\w/]+\.py)::(\w+)", RESULT.read_text(), re.MULTILINE)
    assert row, f"{bug.name} was not caught: make planted"
    assert f"def {row[2]}(" in (ROOT / row[1]).read_text()
