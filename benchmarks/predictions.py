"""How good predictions are: ``python -m benchmarks.predictions FOLDER``.

Replays slices of traces (`benchmarks/placement.py`). At several times of a replay, the scheduler's state is predicted
(`core/forecast.py`), and the predicted ends are compared with the real ones. Jobs that arrive later are not known then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import progress
from benchmarks.placement import SLICES, Slice, jobs_of
from benchmarks.replay import M0, T0, record_of, state_for
from benchmarks.trace import TraceJob
from scheduler.core.forecast import Forecast
from scheduler.core.job import Job
from scheduler.core.observations import Now
from scheduler.core.simulation import Simulation

TIMES = 24  # predictions in a replay


@dataclass(frozen=True, slots=True)
class Compared:
    """A predicted end beside the real one. Times in seconds after the prediction. ``waited``: the job was waiting then."""

    waited: bool
    first: float
    middle: float
    last: float
    real: float

    @property
    def inside(self) -> bool:
        """Return whether the real end is in the predicted band."""
        return self.first - 1.0 <= self.real <= self.last + 1.0


def compared(jobs: list[TraceJob], gpus: int, times: int = TIMES, policy: str = "fifo") -> list[Compared]:
    """Replay jobs, predict ``times`` times, and return the predictions beside what happened."""
    made, records = {job.number: job for job in jobs}, dict[int, Job]()
    state = state_for(jobs, gpus, policy, 1, records.get)
    simulation = Simulation(state, Now(T0, M0), lambda job: made[job.id].duration)
    for job in jobs:
        records[job.number] = record_of(job)
        simulation.arrive(records[job.number], job.submitted)
    span = jobs[-1].submitted
    due = [span * (number + 0.5) / times for number in range(times)]
    pending: list[tuple[float, int, bool, float, float, float]] = []
    ended: dict[int, float] = {}
    for one in simulation.run():
        if one.what == "end":
            ended[one.job.id] = one.at
        elif one.what == "arrival" and due and one.at >= due[0]:
            due.pop(0)
            forecast = Forecast(state, Now(T0 + one.at, M0 + one.at))
            forecast.simulate()
            for job_id, found in forecast.predictions().items():
                if found.end is not None:
                    waits = found.start is not None
                    pending.append((one.at, job_id, waits, found.end.first, found.end.middle, found.end.last))
    return [
        Compared(waits, first, middle, last, ended[job_id] - at) for at, job_id, waits, first, middle, last in pending
    ]


def _run(asked: tuple[Path, Slice]) -> list[Compared]:
    return compared(jobs_of(asked[0], asked[1]), asked[1].gpus)


def main() -> int:
    """Predict in replays, and print how many ends are in their bands; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    progress("predictions: all slices")
    try:
        with ProcessPoolExecutor() as pool:
            slices = list(pool.map(_run, [(folder, one) for one in SLICES]))
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot replay the traces of {folder}: {error}", file=sys.stderr)
        return 2
    for name, waits in (("running", False), ("waiting", True)):
        mine = [one for found in slices for one in found if one.waited is waits]
        inside = sum(one.inside for one in mine)
        off = statistics.median(abs(one.middle - one.real) / max(60.0, one.real) for one in mine)
        print(
            f"{name} jobs: {inside} of {len(mine)} ends in their bands ({inside / len(mine):.1%}); median error {off:.0%}"
        )
    every = [one for found in slices for one in found]
    print(f"all: {sum(one.inside for one in every) / len(every):.1%} of {len(every)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
