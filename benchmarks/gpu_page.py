"""The part of docs/gpu.md that `python -m benchmarks.on_gpu` writes, between two comments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

BEGIN = "<!-- on_gpu: written by python -m benchmarks.on_gpu -->"
END = "<!-- end of on_gpu -->"
STUB = "Run against the stub library, not a real GPU."
NOT_RUN = "Not run on a real GPU yet."
NEW_PAGE = f"# On a GPU\n\n{BEGIN}\n{NOT_RUN}\n{END}\n"


class NotWritten(Exception):
    """Raised when the part cannot be written into a page."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a check. ``seen``: what was seen, with figures."""

    check: str
    seen: str
    ok: bool


def part(stub: bool, about: str, rows: Sequence[Row]) -> str:
    """Return the text of the part. ``about``: when and on which GPU the checks ran."""
    held = sum(row.ok for row in rows)
    lines = [
        f"**{STUB}** {about}" if stub else about,
        "",
        f"{held} of {len(rows)} checks hold.",
        "",
        "| check | what was seen | ok |",
        "|---|---|---|",
        *(f"| {_cell(row.check)} | {_cell(row.seen)} | {'yes' if row.ok else '**no**'} |" for row in rows),
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def with_part(page: str, text: str) -> str:
    """Return the page with ``text`` as its part.

    Raises NotWritten if the page has no such part, or if ``text`` is of the stub library and the part of a real GPU.
    """
    before, begin, rest = page.partition(f"{BEGIN}\n")
    old, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise NotWritten(f"it has no line {BEGIN} followed by a line {END}")
    if STUB in text and not (STUB in old or NOT_RUN in old or not old.strip()):
        raise NotWritten("its figures are of a real GPU, and a run against the stub library never replaces them")
    return f"{before}{begin}{text}\n{end}{after}"


def written(path: str, text: str) -> str:
    """Return what the page at ``path`` would be with ``text`` as its part. A missing page is a new one.

    Raises NotWritten as `with_part` does, and if the page cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            page = stream.read()
    except FileNotFoundError:
        page = NEW_PAGE
    except OSError as error:
        raise NotWritten(f"it cannot be read: {error.strerror}") from None
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise NotWritten("its folder does not exist")
    return with_part(page, text)
