"""Tests of how wide a text is in terminal columns, how it is cut and folded, and which characters a locale can show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from scheduler.views import terminal
from tests.stories.harness import ROOT

TEXT = st.text(st.sampled_from("abc  -…é训练据e\u0301\u0308ｆ\uff21한"), max_size=60)


@pytest.fixture(autouse=True, scope="module")
def in_utf8() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "C.UTF-8")
        yield


@given(TEXT)
def test_k09_wide_characters_count_two_columns_and_combining_ones_none(text: str) -> None:
    """K09: A CJK character takes two columns, and a combining accent takes none."""
    assert terminal.cells(text) == cell_len(text)


@given(TEXT, st.integers(1, 40))
@example("训练", 1)
@example("训练", 3)
def test_k09_a_cut_text_fits_the_width(text: str, most: int) -> None:
    """K09: A text that fits the width stays unchanged.

    A longer text is cut to the width, with "…" for the missing part.
    """
    for made in (terminal.cut(text, most), terminal.shortened(text, most)):
        assert cell_len(made) <= most
        assert made == text or cell_len(text) > most
        assert made == text or "…" in made or most <= 1


@given(TEXT, st.integers(2, 40), st.integers(0, 14))
@example("a" * 50, 20, 14)
@example("   " + "a" * 50, 20, 4)
def test_k09_a_folded_text_fits_the_width_and_loses_no_character(text: str, most: int, indent: int) -> None:
    """K09: Each line of a folded text fits the width. No character is lost, except blanks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "width", lambda: most)
        lines = terminal.folded(text, indent)
    assert all(cell_len(line) <= most for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_k09_a_long_word_is_folded_quickly() -> None:
    """K09: A word of a million characters is folded quickly. A single argument of a job may have 131,071 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "width", lambda: 20)
        assert len(terminal.folded("x " + "y" * 1_000_000, 2)) == 1 + -(-1_000_000 // 18)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"LC_ALL": "C"}, "ascii"),
        ({"LANG": "C"}, "ascii"),
        ({"LANG": "POSIX"}, "ascii"),
        ({"LC_CTYPE": "C"}, "ascii"),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8"),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, "utf-8"),  # set by the user, not by Python
        ({"LANG": "C.UTF-8"}, "utf-8"),
        ({}, "utf-8"),  # no variable is set, as in a container or in a cron job
        ({"LANG": "C.UTF-8", "PYTHONIOENCODING": "latin-1"}, "iso8859-1"),
    ],
)
def test_k09_the_locale_decides_which_characters_are_shown(environ: dict[str, str], found: str) -> None:
    """K09: The locale decides which characters are shown. If Python itself has set LC_CTYPE, LC_CTYPE is ignored."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    code = (
        "import sys; from scheduler.system import terminal_text as t; t.prepare(sys.stdout)\n"
        "print(t.charset()); print(t.shown('… é 训 →')); print('… é 训 →')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, "PYTHONPATH": str(ROOT), **environ}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told, *lines = done.stdout.decode(found).splitlines()
    expected = {"ascii": "... \\xe9 \\u8bad ->", "utf-8": "… é 训 →", "iso8859-1": "... é \\u8bad ->"}[found]
    assert told == found and lines == [expected, expected]
