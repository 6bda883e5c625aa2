"""The planted bugs (planted.py) can still be planted, and the tests that caught them still exist."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import delays
from tests.planted import BUGS, RESULT, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name.replace(" ", "-") for bug in BUGS])
def test_each_planted_bug_can_be_applied_and_was_caught(bug: Bug) -> None:
    for name, old, _ in bug.changes:
        assert (ROOT / name).read_text().count(old) == 1, (
            f"{name}: the bug has no place any more; mend tests/planted.py"
        )
    for test in bug.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
    row = re.search(rf"^\| {re.escape(bug.name)} \| .* \| `(tests/[\w/]+\.py)::(\w+)", RESULT.read_text(), re.MULTILINE)
    assert row, f"{bug.name} was not caught: make planted"
    assert f"def {row[2]}(" in (ROOT / row[1]).read_text()


def test_each_text_that_make_delays_replaces_occurs_once() -> None:
    """Each text of the program that `make delays` replaces still occurs exactly once."""
    for name, old, _ in delays.CHANGES.changes:
        assert (ROOT / name).read_text().count(old) == 1, f"{name}: no such text any more: {old!r}"


@pytest.mark.parametrize("module", ["tests.soak", "tests.planted"])
def test_the_test_tools_print_help_without_pytest(module: str) -> None:
    """The test tools print their help even if pytest is not installed.

    An unknown word on the command line is an error; no test is then run.
    """
    without = "import runpy, sys; sys.modules['pytest'] = None; sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__')"

    def run(word: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", without, module, word]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)

    asked = run("--help")
    assert asked.returncode == 0 and asked.stdout.startswith("usage: python -m"), asked.stderr
    wrong = run("nonsense")
    assert wrong.returncode == 2 and "nonsense" in wrong.stderr and "Traceback" not in wrong.stderr
