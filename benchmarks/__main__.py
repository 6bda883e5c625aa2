"""`python -m benchmarks [case…]`: measure, print small tables, keep the figures as JSON lines."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks.cluster import cluster
from benchmarks.deciding import decide_case
from benchmarks.disk import disk
from benchmarks.figures import Report, progress
from benchmarks.house import Stuck
from benchmarks.idle_and_edit import edit, idle
from benchmarks.neighbours import neighbours
from benchmarks.peers import peers
from benchmarks.plan import Plan
from benchmarks.programs import NoCompiler
from benchmarks.queued import queued, running
from benchmarks.sessions import readings, screen
from benchmarks.slow_disk import slow_disk
from benchmarks.slurm import slurm, why_not
from benchmarks.spooling import spool
from benchmarks.starting import burst, gap, start
from benchmarks.verbs import verbs
from benchmarks.web import web

CASES: dict[str, Callable[[Plan], Report]] = {
    "disk": disk,
    "start": start,
    "gap": gap,
    "burst": burst,
    "neighbours": neighbours,
    "idle": idle,
    "edit": edit,
    "verbs": verbs,
    "queued": queued,
    "running": running,
    "cluster": cluster,
    "slurm": slurm,
    "slow-disk": slow_disk,
    "decide": decide_case,
    "screen": screen,
    "readings": readings,
    "ts": spool,
    "web": web,
    "peers": peers,
}


def main() -> int:
    """Measure the requested cases (all by default); return the exit code, 1 if a case could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("case", nargs="*", help=f"of: {' '.join(CASES)} (all without any)")
    parser.add_argument("--json", metavar="PATH", help="append one JSON object a case to this file")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="this part of the full counts [1]")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of gap and burst [3]")
    parser.add_argument(
        "--no-million", action="store_true", help="leave out decide and queued with 1,000,000 jobs (0.7 GB)"
    )
    parser.add_argument("--folder", metavar="PATH", help="on which disk to work [the temporary folder]")
    given = parser.parse_args()
    unknown = [name for name in given.case if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are {' '.join(CASES)}")
    if given.scale <= 0 or given.repeats < 1:
        parser.error("--scale must be above 0 and --repeats 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit runs the cleanup of the open cases
    json_path = os.path.abspath(given.json) if given.json else ""
    folder = tempfile.mkdtemp(prefix="gpujob-bench-", dir=given.folder)
    plan = Plan(folder, given.scale, given.repeats, not given.no_million)
    failed = 0
    try:
        for name in given.case or [name for name in CASES if name != "slurm" or not why_not()]:
            try:
                report = CASES[name](plan)
            except (Stuck, NoCompiler, OSError, subprocess.SubprocessError) as error:
                progress("")
                print(f"{name}: not measured: {error}", flush=True)
                failed = 1
                continue
            progress("")
            print(report.text(), end="\n\n", flush=True)
            if json_path:
                report.append_to(json_path)
    except KeyboardInterrupt:
        return 130
    finally:
        progress("")
        shutil.rmtree(folder, ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
