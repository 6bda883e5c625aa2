"""The verb `who`: the users of the GPUs of this machine."""

from __future__ import annotations

import os
import sys
import time

from scheduler.client.client import SCHEMA
from scheduler.client.locate import SYSTEM_VARIABLE, client_of, is_socket
from scheduler.core.errors import SchedulerError
from scheduler.core.units import maybe_utc, mib_text
from scheduler.store.paths import SYSTEM_SOCKET, name_of
from scheduler.views import render


def who(*, json: bool = False) -> int:
    """Print for each GPU and user what is booked and what is used; return the exit code 0. Raises NoGpuData."""
    from scheduler.client.who import who as holders_of

    gpus, holders, problems = holders_of(os.environ)
    path = os.environ.get(SYSTEM_VARIABLE) or SYSTEM_SOCKET
    if is_socket(path):
        from scheduler.client.queue_use import with_queue

        service = name_of(os.stat(path).st_uid)
        try:
            holders = with_queue(holders, client_of(path).overview(0), service, name_of(os.getuid()))
        except SchedulerError as error:
            problems = [*problems, f"{error}; its jobs are shown as those of user {service}"]
    if json:
        render.print_json(
            {
                "schema": SCHEMA,
                "gpus": [{"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name} for gpu in gpus],
                "holders": [
                    {
                        "gpu": one.gpu.index,
                        "uuid": one.gpu.uuid,
                        "user": one.user,
                        "own": one.own,
                        "kind": one.kind,
                        "share": one.share,
                        "memory_used": None if one.memory_mib is None else one.memory_mib << 20,
                        "load": one.load,
                        "processes": one.processes,
                        "idle": one.idle,
                        "since": maybe_utc(one.since),
                        "until": maybe_utc(one.until),
                    }
                    for one in holders
                ],
                "problems": problems,
            }
        )
        return 0
    for text in problems:
        print(f"gpujob: {render.safe(text)}", file=sys.stderr)
    rows = [
        (
            one.gpu.index, render.safe(one.user) + (" (you)" if one.own else ""), f"{one.share:g}" if one.share else "-",
            "-" if one.memory_mib is None else mib_text(one.memory_mib), "-" if one.load is None else f"{one.load:.0%}",
            _clock(one.since), _clock(one.until), _kind(one.kind, one.idle),
        )
        for one in holders
    ]  # fmt: skip
    taken = {one.gpu.index for one in holders}
    rows += [(gpu.index, "-", "-", "-", "-", "-", "-", "free") for gpu in gpus if gpu.index not in taken]
    head = ("GPU", "USER", "BOOKED", "MEMORY", "LOAD", "SINCE", "UNTIL", "WHAT")
    print("\n".join(render.table(head, sorted(rows, key=lambda row: int(str(row[0]))))))
    return 0


def _kind(kind: str, idle: bool) -> str:
    words = {"jobs": "jobs", "lease": "lease", "reserved": "reserved", "foreign": "not booked"}[kind]
    return f"{words}, idle (no process on the GPU)" if idle else words


def _clock(wall: float | None) -> str:
    """Return the local time of day, with the date if it is not today."""
    if wall is None:
        return "-"
    here, today = time.localtime(wall), time.localtime()
    return time.strftime("%H:%M" if here[:3] == today[:3] else "%Y-%m-%d %H:%M", here)
