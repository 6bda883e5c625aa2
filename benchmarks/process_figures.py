"""Processor time, wake-ups and memory of a process, read from /proc."""

from __future__ import annotations

import os

TICK = os.sysconf("SC_CLK_TCK")


def used_by(pid: int) -> tuple[float, float, float]:
    """Return what a process has used so far: CPU seconds from `stat`, CPU seconds from `schedstat`, and its wake-ups.

    The CPU seconds from `schedstat` are more precise; they are 0 if the kernel does not keep them.
    """
    with open(f"/proc/{pid}/stat", "rb") as stream:
        data = stream.read()
    fields = data[data.rindex(b")") + 2 :].split()
    exact = woken = 0.0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as stream:
                exact += int(stream.read().split()[0]) / 1e9
        except OSError:
            exact += 0.0
        with open(f"/proc/{pid}/task/{task}/status", encoding="ascii", errors="replace") as stream:
            woken += sum(int(line.split()[1]) for line in stream if line.startswith("voluntary_ctxt"))
    return (int(fields[11]) + int(fields[12])) / TICK, exact, woken


def memory_of(pid: int) -> dict[str, float]:
    """Return the memory of a process in MiB (``rss``, ``pss``), and its number of threads (``threads``)."""
    found = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as stream:
        for line in stream:
            name = line.split(":")[0].lower()
            if name in ("rss", "pss"):
                found[name] = int(line.split()[1]) / 1024
    found["threads"] = float(len(os.listdir(f"/proc/{pid}/task")))
    return found
