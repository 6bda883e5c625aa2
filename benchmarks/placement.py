"""Placement on slices of real traces: ``python -m benchmarks.placement FOLDER``.

FOLDER holds the traces (`mixed_dev.csv` and others). Replays each slice with each policy of `benchmarks/replay.py`, writes
the table to `benchmarks/placement.md`, and draws one day on 8 GPUs to `docs/pictures/day.svg`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.day_picture import drawing
from benchmarks.figures import progress
from benchmarks.replay import BASELINES, outcome_of, run
from benchmarks.trace import TraceJob, mean, slice_of

TITLES = {
    "seed": "polling: one blocking retry loop, 5 s * 2^k",
    "strict": "strict order: no job passes a more urgent one",
    "greedy": "`max_overtakes: 0`: each job that fits starts, nothing is reserved",
    "fifo": "**default settings** (`order: fifo`, backfill)",
    "short": "**`order: short`**, backfill",
    "hold": "`order: short`, `aging: 168`, backfill, run times known for all jobs",
}
SEEDS = (1, 2, 3, 4)  # of the errors of the expected run times


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive jobs of a trace on a number of GPUs."""

    trace: str
    gpus: int
    jobs: int
    load: float
    first: int


SLICES = (
    *(Slice("mixed", 8, 2400, 0.7, first) for first in (0, 2400, 4800)),
    *(Slice("openb2023", 8, 1300, 0.6, first) for first in (0, 1300)),
    *(Slice("philly2017", 8, 3000, 0.7, first) for first in (0, 5000, 10000)),
    *(Slice("mixed", 64, 3500, 0.85, first) for first in (0, 3500)),
    Slice("openb2023", 64, 2600, 0.9, 0),
    *(Slice("philly2017", 64, 5000, 0.85, first) for first in (0, 7500)),
)


def jobs_of(folder: Path, one: Slice) -> list[TraceJob]:
    """Return the jobs of a slice. Raises OSError or ValueError if the trace cannot be read."""
    return slice_of(str(folder / f"{one.trace}_dev.csv"), one.gpus, one.jobs, one.load, one.first)


def _run(asked: tuple[Path, Slice, str, int]) -> dict[str, float]:
    folder, one, policy, seed = asked
    return run(jobs_of(folder, one), one.gpus, policy, seed)


def geometric(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    found = list(values)
    return math.exp(mean(map(math.log, found)))


def row_of(policy: str, found: Sequence[dict[str, float]], greedy: Sequence[dict[str, float]]) -> str:
    """Return a row of the table. ``found``, ``greedy``: the figures of all slices, by the policy and without reservations."""
    cells = [
        TITLES[policy],
        f"{geometric(one['makespan'] / one['makespan_bound'] for one in found):.3f}",
        f"{geometric(one['mean_jct'] / one['mean_jct_bound'] for one in found):.2f}",
        f"{geometric(a['mean_jct'] / b['mean_jct'] for a, b in zip(found, greedy, strict=True)):.3f}",
        f"{geometric(one['slowdown'] for one in found):.0f}",
        f"{100 * mean(one['passed_over_fit'] for one in found):.1f} %",
        f"{mean(one['max_wait'] for one in found) / 3600:.0f} h",
        f"{mean(one['decision_ms_mean'] for one in found):.3f}",
        f"{mean(one['decision_ms_p99'] for one in found):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """# Placement on real traces

Written by `python -m benchmarks.placement FOLDER`. The real queue, passes and ledger run on a virtual clock
(`benchmarks/replay.py`). Expected run times are known for 60 % of the jobs, wrong by a factor of up to e^0.8; for the others the
scheduler learns them from jobs with the same request. Rows with estimates are means over {seeds} draws of these errors.

- makespan, mean JCT (submission to end): as multiples of bounds that no schedule can beat (`benchmarks/trace.py`)
- of greedy: mean JCT as a multiple of that without reservations
- slowdown: completion time over run time (of at least 10 s), mean
- fitted: starts past a more urgent job that would have fitted, also where GPUs are reserved for a third job or lent
- longest wait: mean over the slices of the longest wait of a job; decision: mean and p99 in ms

Means over the slices are geometric, those of waits and decisions arithmetic.
"""


def table_of(gpus: int, slices: int, rows: Iterable[str]) -> str:
    """Return the table for one machine size in Markdown."""
    names = "policy | makespan | mean JCT | of greedy | slowdown | fitted | longest wait | decision | p99"
    return f"\n## {gpus} GPUs, {slices} slices\n\n| {names} |\n|---{'|---:' * 8}|\n" + "\n".join(rows) + "\n"


def busiest_day(jobs: Sequence[TraceJob]) -> float:
    """Return the start of the 24 hours with the most arrivals, in seconds from the first arrival."""
    day = 86_400.0
    starts = [hours * 3600.0 for hours in range(max(1, int((jobs[-1].submitted - day) / 3600.0)))]
    return max(starts, key=lambda at: sum(at <= job.submitted < at + day for job in jobs))


def main() -> int:
    """Replay all slices, and write the table and the picture; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--table", type=Path, default=Path("benchmarks/placement.md"))
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/day.svg"))
    asked = parser.parse_args()
    text = HEAD.format(seeds=len(SEEDS))
    try:
        for gpus in sorted({one.gpus for one in SLICES}):
            slices = [one for one in SLICES if one.gpus == gpus]
            rows: dict[str, str] = {}
            greedy: list[dict[str, float]] = []
            for policy in ("greedy", *(name for name in TITLES if name != "greedy")):
                progress(f"placement: {gpus} GPUs, {policy}")
                seeds = SEEDS if policy not in (*BASELINES, "greedy") else SEEDS[:1]
                with ProcessPoolExecutor() as pool:
                    found = list(
                        pool.map(_run, [(asked.folder, one, policy, seed) for seed in seeds for one in slices])
                    )
                greedy = greedy or found
                rows[policy] = row_of(policy, found, greedy * len(seeds))
            text += table_of(gpus, len(slices), (rows[policy] for policy in TITLES))
        jobs = jobs_of(asked.folder, SLICES[0])
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot replay the traces of {asked.folder}: {error}", file=sys.stderr)
        return 2
    begin = busiest_day(jobs)
    panels = {
        "gpujob, default settings": outcome_of(jobs, 8, "fifo"),
        "polling with one blocking retry loop": outcome_of(jobs, 8, "seed"),
    }
    asked.table.write_text(text, encoding="utf-8")
    asked.picture.write_text(drawing(jobs, panels, 8, begin), encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
