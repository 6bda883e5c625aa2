"""Case slurm: jobs by gpujob on a real Slurm, compared with plain `sbatch` on the same Slurm."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import Report, median, progress
from benchmarks.house import House, Stuck, append, ledger, wait_until
from benchmarks.plan import Plan
from tests.slurm_cluster import missing_programs, slurm_cluster

PATIENCE_S = 600.0


def why_not() -> str:
    """Return why this case cannot be measured here; empty if it can."""
    missing = missing_programs()
    if missing:
        return f"no Slurm here (missing: {', '.join(missing)})"
    return "" if os.geteuid() == 0 else "the daemons of Slurm need root"


def slurm(plan: Plan) -> Report:
    """Measure one job on idle nodes, and many short jobs at once: plain `sbatch`, then gpujob, in turn.

    Three nodes with seven fake GPUs; each job needs half a GPU, so that 14 run at once. Raises Stuck if there is no Slurm.
    """
    if why_not():
        raise Stuck(why_not())
    single, many = plan.count(20), plan.count(200)
    report = Report(
        "slurm", f"one job {single} times, {many} jobs at once, on three nodes", ("", "sbatch", "gpujob", "ratio")
    )
    with slurm_cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir=plan.folder))) as cluster:
        words = ("--engine", "slurm")
        with House(plan.folder, gpus=0, words=words, environ={"SLURM_CONF": str(cluster.conf)}) as house:

            def plain(ledger_path: str, names: list[str]) -> int:
                at = time.monotonic_ns()
                for name in names:
                    script = house.path(f"{name}.sh")
                    with open(script, "w", encoding="ascii") as stream:
                        stream.write(f"#!/bin/sh\nexec {plan.programs.job} {ledger_path} {name}\n")
                    subprocess.run(
                        ["sbatch", "--parsable", "--gres=shard:2", "--output=/dev/null", script],
                        env=cluster.environ, check=True, capture_output=True,
                    )  # fmt: skip
                return at

            def by_gpujob(ledger_path: str, names: list[str]) -> int:
                text = plan.programs.lines([f"{ledger_path} {name};gpus=0.5" for name in names])
                return append(house.jobs_file, text)

            ways = [("sbatch", plain), ("gpujob", by_gpujob)]
            figures: dict[str, list[float]] = {"sbatch_ms": [], "gpujob_ms": []}
            for at in range(single):
                progress(f"slurm: {at} of {single}")
                for kind, submit in ways if at % 2 else reversed(ways):
                    took = _all_started(house, submit, f"{kind}-one", [f"{kind}{at}"], at + 1)
                    figures[f"{kind}_ms"].append(took * 1e3)
                    wait_until(lambda: not cluster.run("squeue", "-h").strip(), "no job in Slurm", PATIENCE_S, 0.1)
                house.wait_ended(at + 1, PATIENCE_S)
            rates = {}
            for kind, submit in ways:
                progress(f"slurm: {many} jobs by {kind}")
                names = [f"{kind}-m{at}" for at in range(many)]
                rates[kind] = many / _all_started(house, submit, f"{kind}-many", names, many)
                wait_until(lambda: not cluster.run("squeue", "-h").strip(), "no job in Slurm", PATIENCE_S, 0.1)
            house.wait_ended(single + many, PATIENCE_S)
    mine, theirs = median(figures["gpujob_ms"]), median(figures["sbatch_ms"])
    report.row("submit to the job's first instruction, median ms", theirs, mine, mine / theirs)
    report.row("the same, longest ms", max(figures["sbatch_ms"]), max(figures["gpujob_ms"]), "")
    report.row("jobs/s", rates["sbatch"], rates["gpujob"], rates["gpujob"] / rates["sbatch"])
    report.figures = {**figures, "sbatch_jobs_per_s": rates["sbatch"], "gpujob_jobs_per_s": rates["gpujob"]}
    return report


def _all_started(
    house: House, submit: Callable[[str, list[str]], int], name: str, names: list[str], lines: int
) -> float:
    """Submit jobs; return the seconds until the first instruction of the last one. ``lines``: of the ledger then."""
    path = house.path(f"{name}.ledger")
    at = submit(path, names)
    wait_until(lambda: len(ledger(path)) >= lines, f"{len(names)} jobs of {name}", PATIENCE_S)
    found = ledger(path)
    if len({word for word, _, _ in found}) != lines:
        raise Stuck(f"a job of {name} ran twice")
    return (max(start for word, start, _ in found if word in names) - at) / 1e9
