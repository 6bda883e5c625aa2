"""Measures how often failures get the right class, on logs whose classes are known (`labels.json`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scheduler.core.failure_classes import classify
from scheduler.core.failure_signs import FAILURE_KINDS
from scheduler.core.gpu import ResourceRequest
from scheduler.runners.log_end import TAIL_BYTES

NONE = "none"
NEED = ResourceRequest.parse("1")


def class_of(folder: Path, row: dict[str, Any]) -> str:
    """Return the class that `classify` finds for a labelled log."""
    tail = (folder / row["log"]).read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
    limit = row["outcome"] == "time_limit"
    failure = classify(tail, NEED, row["exit_code"], row["signal"], timed_out=limit)
    return failure.kind if failure is not None else NONE


def measured(folder: Path) -> Counter[tuple[str, str]]:
    """Return (class of the label, class that was found) → number of logs."""
    rows = json.loads((folder / "labels.json").read_text())
    return Counter((row["class"] or NONE, class_of(folder, row)) for row in rows)


def _ordered(names: Iterable[str]) -> list[str]:
    wanted = set(names)
    return [name for name in (*FAILURE_KINDS, NONE) if name in wanted]


def report(pairs: Counter[tuple[str, str]]) -> str:
    """Return the accuracy and the table of labels (rows) and found classes (columns) as Markdown."""
    total, right = pairs.total(), sum(number for (label, found), number in pairs.items() if label == found)
    rows, columns = _ordered(label for label, _ in pairs), _ordered(found for _, found in pairs)
    lines = [f"{right} of {total} logs have the right class ({right / max(1, total):.1%}).", ""]
    lines += [f"| label | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for label in rows:
        lines.append(f"| {label} | {' | '.join(str(pairs[label, found] or '') for found in columns)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the report for a folder, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failure_classes", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    try:
        pairs = measured(folder)
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot read the logs of {folder}: {error}", file=sys.stderr)
        return 2
    print(report(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
