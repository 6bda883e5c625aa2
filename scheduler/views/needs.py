"""Learned needs of models, as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from scheduler.client.needs import Applied
from scheduler.core.learned_needs import Advice
from scheduler.core.secrets import without_secrets
from scheduler.core.suggested_need import Suggestion
from scheduler.core.units import mib_text, span_text
from scheduler.views import render, terminal

if TYPE_CHECKING:
    from scheduler.views.documents import NeedsAppliedDocument, NeedsDocument, SuggestedNeed

WIDE = 120  # columns of a terminal on which names of models have more room
LONGEST_NAME, SHORT_NAME = 48, 24  # cells of a name on a wide and on a narrow terminal
HEAD = ("MODEL", "TABLE", "RUNS", "MAX", "P95", "LOAD", "TIME", "OOM", "SUGGESTED", "")
LESS_NEEDED = ("TIME", "LOAD", "P95", "RUNS")
MARK = "*"  # the suggestion differs from the table


def needs_lines(rows: Sequence[Advice], path: str) -> list[str]:
    """Return the table of needs, and how to apply suggestions. ``path``: the model table; empty: none is read."""
    head, cells = _fitting(HEAD, [_cells(row) for row in rows])
    table = render.table(head, cells)
    said = []
    if any(row.differs for row in rows):
        where = f"write it into {path}" if path else "write it into the model table"
        said.append(f"{MARK} the suggestion differs from the model table; {where}: gpujob needs --apply [MODEL…]")
    if any(row.suggestion is not None and row.suggestion.basis == "guess" for row in rows):
        said.append(
            "a guess (from the size in the name) is written only if you name its model: gpujob needs --apply MODEL"
        )
    if said:
        table += ["", *(piece for text in said for piece in terminal.folded(render.safe(text), 2))]
    return table


def _fitting(head: Sequence[str], rows: Sequence[Sequence[object]]) -> tuple[list[str], list[list[object]]]:
    """Return the table without the columns `LESS_NEEDED` that make it wider than the terminal; their order counts."""
    left, most = list(range(len(head))), terminal.width()
    widths = [max(terminal.cells(render.safe(row[place])) for row in (head, *rows)) for place in left]
    for name in LESS_NEEDED:
        if most is not None and sum(widths[place] + 2 for place in left) - 2 > most:
            left.remove(head.index(name))
    return [head[place] for place in left], [[row[place] for place in left] for row in rows]


def _cells(row: Advice) -> tuple[object, ...]:
    name, most = without_secrets(row.model) or '""', terminal.width()
    return (
        name if most is None else terminal.shortened(render.safe(name), LONGEST_NAME if most >= WIDE else SHORT_NAME),
        row.table or "-", row.runs, _size(row.peak_mib), _size(row.p95_mib),
        "-" if row.load is None else f"{row.load:.0%}", "-" if row.wall_s is None else span_text(row.wall_s),
        row.out_of_memory, suggested_text(row.suggestion), MARK if row.differs else "",
    )  # fmt: skip


def _size(mib: float | None) -> str:
    return "-" if mib is None else mib_text(mib)


def suggested_text(found: Suggestion | None) -> str:
    """Return a suggestion with what it is based on: ``0.45 for 34.1 GiB``, ``0.25 for 17.5 GiB (guess)``."""
    if found is None:
        return "-"
    return f"{found.need} for {mib_text(found.mib)}{' (guess)' if found.basis == 'guess' else ''}"


def needs_json(rows: Iterable[Advice], path: str) -> NeedsDocument:
    """Return the needs in the form that `needs --json` prints (`views/documents.py`)."""
    return {
        "schema": 1,
        "table_file": path or None,
        "models": [
            {
                "model": without_secrets(row.model),
                "table": row.table or None,
                "runs": row.runs,
                "peak_memory": _bytes(row.peak_mib),
                "p95_memory": _bytes(row.p95_mib),
                "load": row.load,
                "run": row.wall_s,
                "out_of_memory": row.out_of_memory,
                "suggested": _suggested_json(row.suggestion),
                "differs": row.differs,
            }
            for row in rows
        ],
    }


def _suggested_json(found: Suggestion | None) -> SuggestedNeed | None:
    return None if found is None else {"need": str(found.need), "basis": found.basis, "memory": found.mib << 20}


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else round(mib * (1 << 20))


def applied_lines(done: Applied) -> list[str]:
    """Return a line for each change, the name of the backup, and why other named models are unchanged."""
    lines = [
        f"{without_secrets(one.model)}: {one.before or 'not in the table'} → {one.after}" for one in done.changes
    ] + list(done.kept)
    if done.changes:
        kept = f"; the old file is {done.backup}" if done.backup else " (new file)"
        lines.append(f"written to {done.path}{kept}")
    elif not done.kept:
        lines.append("nothing to apply: no suggestion from runs differs from the model table")
    return [render.safe(line) for line in lines]


def applied_json(done: Applied) -> NeedsAppliedDocument:
    """Return the changes in the form that `needs --apply --json` prints (`views/documents.py`)."""
    return {
        "schema": 1,
        "table_file": done.path,
        "backup": done.backup or None,
        "changed": [
            {"model": without_secrets(one.model), "before": one.before or None, "after": one.after}
            for one in done.changes
        ],
        "unchanged": [without_secrets(text) for text in done.kept],
    }
