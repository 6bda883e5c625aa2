"""Case neighbours: what shared bookings cost the scheduler, alone and beside schedulers of other people."""

from __future__ import annotations

import os

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append
from benchmarks.plan import Plan
from benchmarks.starting import gaps
from scheduler.core.job import Process
from scheduler.core.shared_bookings import Booking, Document
from scheduler.sharing.bookings_file import own_space
from scheduler.sharing.bookings_folder import BookingsFolder
from scheduler.system.proc import boot_id
from scheduler.system.processes import seen

NEIGHBOURS = 8
BOOKINGS = 16  # of each neighbour
WAYS = (("not shared", False, 0), ("alone", True, 0), (f"{NEIGHBOURS} neighbours", True, NEIGHBOURS))


def neighbours(plan: Plan) -> Report:
    """Measure the time from the end of a job to the start of the next one in three ways, in turn.

    The bookings are not shared; they are shared, and nobody else is there; they are shared with `NEIGHBOURS` schedulers
    with `BOOKINGS` bookings each on other GPUs.
    """
    count = plan.count(100)
    found: dict[str, list[float]] = {name: [] for name, _, _ in WAYS}
    for turn in range(plan.repeats):
        for name, shared, number in WAYS:
            progress(f"neighbours: {name}, {turn + 1} of {plan.repeats}")
            with House(plan.folder, gpus=1, environ={"GPUJOB_SHARE_BOOKINGS": str(shared).lower()}) as house:
                opened = [_publish(house.folder, key) for key in range(number)]
                path = house.path("gap.ledger")
                append(house.jobs_file, plan.programs.lines([f"{path} {n}" for n in range(count)]))
                house.wait_ended(count)
                found[name] += gaps(path)
                for one in opened:
                    one.close(remove=True)
    base = median(found[WAYS[0][0]])
    report = Report(
        "neighbours", f"end of a job to the start of the next, 1 GPU, {plan.repeats} × {count} jobs", ("ms", "p50", "p99", "more")
    )  # fmt: skip
    for name, times in found.items():
        report.row(name, median(times), p99(times), median(times) - base)
    report.figures = {name: spread(times) for name, times in found.items()}
    return report


def _publish(folder: str, key: int) -> BookingsFolder:
    """Publish the bookings of a neighbour: this process."""
    me = seen(os.getpid())
    assert me is not None
    process = Process(me.pid, me.ticks)
    made = BookingsFolder(folder, f"bench{key}", boot_id())
    made.prepare()
    bookings = tuple(Booking(f"GPU-{key}-{n}", 500, processes=(process,)) for n in range(BOOKINGS))
    made.publish(Document(f"bench{key}", boot_id(), process=process, space=own_space(), bookings=bookings))
    return made
