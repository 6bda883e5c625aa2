"""Checks of the language: messages, docstrings and documents use clear words, and all errors have one form.

The patterns find the forms that most often make a reader stop. They do not replace a human reader.
"""

from __future__ import annotations

import ast
import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import make_messages  # noqa: E402

# The original `ts` fixed these texts; programs that read its output depend on them.
ORIGINAL_WORDS = "scheduler/ts/"

PRIVATE_WORDS = re.compile(
    r"\b(keeper|doorbell|desk|mend(s|ed|ing)?|taken up|takes? up(?! to)|has no say|of ours|whoever|whosoever)\b", re.I
)
UNCLEAR_WORDS = re.compile(r"\b(anew|in so long|in one go|is not there|goes on|go on)\b", re.I)
RIDDLE = re.compile(r"(What|Whoever|Whose|Where|Nothing|Everything that|The same as|Of what|That which|As it)\b")
PROPER = re.compile(
    r"([A-Z][A-Z0-9_]+|CUDA|GPUs?|GPUtil|Slurm|Ray|Python|Debian|GNU|SQLite|Content-[A-Z]\w+|Host|Unix)\b"
)


def functions_and_classes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the docstring of a module, and of each of its classes and functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}", text


def unclear(text: str) -> str:
    """Return the first private or unclear word of a text, or an empty text."""
    text = re.sub(r"\{[^{}]*\}|`+[^`]*`+", "", text)  # identifiers and JSON keys
    found = PRIVATE_WORDS.search(text) or UNCLEAR_WORDS.search(text)
    return found.group() if found else ""


def riddle(docstring: str) -> str:
    """Return the first line of a docstring if this line does not name its subject; otherwise an empty text."""
    first = docstring.split("\n", 1)[0]
    return first if RIDDLE.match(first) else ""


def bad_form(error: str) -> str:
    """Return what is wrong with the form of an error; empty if nothing is wrong.

    The form is ``cannot X: reason; do Y``, in lower case and without a full stop.
    """
    first = error.lstrip("'\"(`")
    if first[:1].isupper() and not PROPER.match(first):
        return "begins with a capital"
    if error.endswith(".") and not error.endswith("..."):
        return "ends with a full stop"
    return "says cannot twice" if len(re.findall(r"\bcannot\b", error.split(";")[0])) > 1 else ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What is left when the others are gone.", "What is left when the others are gone."),
        ("The same as rows.", "The same as rows."),
        ("Whoever waits is woken.", "Whoever waits is woken."),
        ("Return the rows of all waiting jobs.", ""),
    ],
)
def test_a_docstring_without_a_subject_is_detected(text: str, found: str) -> None:
    """`riddle` finds a first line that begins with a pronoun, or with "The same as", in place of a subject."""
    assert riddle(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The store cannot be used", "begins with a capital"),
        ("cannot open the log: no space left.", "ends with a full stop"),
        ("cannot start: the log cannot be opened", "says cannot twice"),
        ("GPU 3 is paused; resume it: gpujob resume 3", ""),
        ("cannot open the log: no space left on the disk; free some", ""),
    ],
)
def test_an_error_message_in_a_wrong_form_is_detected(text: str, found: str) -> None:
    """`bad_form` finds each kind of error that does not have the required form."""
    assert bad_form(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("its line has no say in them", "has no say"), ("the job goes on", "goes on"), ("it continues", "")],
)
def test_an_unclear_word_is_detected(text: str, found: str) -> None:
    """`unclear` finds private and unclear words."""
    assert unclear(text) == found


def test_messages_use_clear_words() -> None:
    """No message that users read has a private or unclear word."""
    bad = {f"{m.file}:{m.line}": (unclear(m.text), m.text) for m in make_messages.messages() if unclear(m.text)}
    assert not bad


def test_error_messages_have_one_form() -> None:
    """An error begins in lower case and has no full stop. It has at most one "cannot" before the semicolon."""
    errors = [m for m in make_messages.messages() if m.kind == "error" and not m.file.startswith(ORIGINAL_WORDS)]
    assert len(errors) > 500
    assert not {f"{m.file}:{m.line}": (bad_form(m.text), m.text) for m in errors if bad_form(m.text)}


@pytest.mark.parametrize("folder", ["scheduler", "tests", "docs", "benchmarks"])
def test_docstrings_name_their_subject_in_clear_words(folder: str) -> None:
    """The first line of each docstring names its subject, and no docstring has a private or unclear word."""
    found = [entry for path in sorted((ROOT / folder).rglob("*.py")) for entry in functions_and_classes(path)]
    assert found
    assert not {place: riddle(text) or unclear(text) for place, text in found if riddle(text) or unclear(text)}


@pytest.mark.parametrize(
    "path", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda path: path.name
)
def test_documents_use_clear_words(path: Path) -> None:
    """No document has a private or unclear word."""
    lines = enumerate(path.read_text().splitlines(), 1)
    assert not {f"{path.name}:{number}": unclear(line) for number, line in lines if unclear(line)}


def test_messages_quoted_by_the_troubleshooting_page_exist() -> None:
    """Each message in a table of the troubleshooting page is part of a message of the program or of a system error."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and " | " in line]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    texts = [m.text for m in make_messages.messages()] + [os.strerror(number) for number in errno.errorcode]
    assert len(quoted) > 30
    assert not [text for text in quoted if not any(text in known for known in texts)]
