"""`python -m benchmarks.on_gpu`: checks on a GPU what the tests check with simulated ones, and writes docs/gpu.md.

A scheduler in a temporary folder runs small jobs that take memory of one GPU. Without ``--stub``, a real and free GPU is
needed. With ``--stub`` the GPU is one of the stub library of the tests. Exit code 0: all checks hold; 1: some do not;
2: nothing was checked, and one line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import scheduler
from benchmarks import gpu_job
from benchmarks.figures import median, progress
from benchmarks.gpu_house import Document, GpuHouse
from benchmarks.gpu_machine import Machine, NoGpu, real_machine, stub_machine
from benchmarks.gpu_page import NotWritten, Row, part, written
from benchmarks.house import ROOT, Stuck
from benchmarks.house import end as end_process
from benchmarks.process_figures import used_by

PAGE = os.path.join(ROOT, "docs", "gpu.md")
HALF, PEAK, SMALL = "on-gpu-half", "on-gpu-peak", "on-gpu-small"
MODELS = {HALF: 0.5, PEAK: 0.5, SMALL: 0.25}
CONTEXT_MIB = 2048  # most memory that CUDA and torch need beside what a job takes
LITTLE_MIB = 256
BUSY_CPU = 0.05  # part of a core that a scheduler without jobs never uses
GIB = 1 << 30

Seen = tuple[str, bool]


def readings(house: GpuHouse) -> Seen:
    """The driver answers, and half of the readings take less than a second."""
    gpu, took, first = house.machine, house.machine.reading_ms, house.machine.first_ms
    text = (
        f"driver {gpu.driver}; GPU {gpu.index}: {gpu.gpu_name}, {gpu.total_mib} MiB; {len(took)} readings by NVML: median "
        f"{median(took):.2f} ms, longest {max(took):.2f} ms; the first, with the start of the reader process, {first:.0f} ms"
    )
    return text, median(took) < 1000.0


def side_by_side(house: GpuHouse) -> Seen:
    """Two jobs with half a GPU each run at the same time on it; a third one waits until one of them has ended."""
    mib = house.machine.total_mib * 3 // 10
    first, second, third = (house.add(name, mib, model=HALF) for name in ("half-1", "half-2", "half-3"))
    seen = [house.report(job) for job in (first, second)]
    gpu = house.wait_gpu(
        lambda gpu: (gpu["memory_own"] or 0) >= 2 * (mib << 20) and gpu["state"] == "BUSY", "memory of both jobs"
    )
    foreign = gpu["memory_used"] - gpu["memory_own"]
    waiting = house.waiting(third)
    house.end("half-1")
    house.wait_done(first)
    house.report(third)
    house.end("half-2", "half-3")
    house.wait_done(second, third)
    one, other, last = (house.show(job) for job in (first, second, third))
    together = min(map(_finished, (one, other))) - max(map(_started, (one, other)))
    later = _started(last) - _finished(one)
    text = (
        f"both ran at the same time for {together:.1f} s, CUDA_VISIBLE_DEVICES {seen[0]['visible']} and "
        f"{seen[1]['visible']}; each took {mib} MiB; `status`: {gpu['state']}, {gpu['memory_used'] / GIB:.1f} GiB in use, of "
        f"which {gpu['memory_own'] / GIB:.1f} GiB are of own jobs; the third job waited ({waiting['reason_code']}) and "
        f"started {later:.1f} s after the first had ended"
    )
    same = seen[0]["visible"] == seen[1]["visible"] == str(house.machine.index)
    return text, same and together > 0 and later >= 0 and foreign < mib << 20


def cuda_styles(house: GpuHouse) -> Seen:
    """Scripts of each style reach the GPU that they were given, with the value of `cuda` that is meant for them."""
    index = str(house.machine.index)
    wanted = {
        "physical": ("visible", index, index),
        "local": ("device", "0", index),
        "unset": ("device", index, None),
        "none": ("first", None, index),
    }
    jobs = {
        cuda: house.add(cuda, LITTLE_MIB, "--style", style, options=f";gpus=0.25;cuda={cuda}")
        for cuda, (style, _, _) in wanted.items()
    }
    texts, right = [], True
    for cuda, (style, argument, visible) in wanted.items():
        seen = house.report(jobs[cuda])
        words = seen["words"]
        given = words[words.index("--cuda") + 1] if "--cuda" in words else None
        hit = seen["uuid"] == house.machine.uuid
        right = right and hit and (given, seen["visible"]) == (argument, visible)
        added = "nothing" if given is None else f"`--cuda {given}`"
        shown = "not set" if seen["visible"] is None else seen["visible"]
        how = {"visible": "sets the variable from it", "device": "uses cuda:ARGUMENT", "first": "ignores it"}[style]
        what = "used the GPU it was given" if hit else f"used {seen['uuid']}"
        texts.append(f"`{cuda}`: {added}, CUDA_VISIBLE_DEVICES {shown}; a script that {how} {what}")
    own = house.wait_gpu(lambda gpu: (gpu["memory_own"] or 0) >= 4 * (LITTLE_MIB << 20), "memory of all four jobs")
    house.end(*jobs)
    house.wait_done(*jobs.values())
    texts.append(f"together {own['memory_own'] / GIB:.1f} GiB, all of it of own jobs")
    return "; ".join(texts), right


def learned_peak(house: GpuHouse) -> Seen:
    """The scheduler has learned the peak memory of a job after its end."""
    mib = house.machine.total_mib // 5
    job = house.add("peak", mib, model=PEAK)
    house.report(job)
    house.wait_gpu(lambda gpu: (gpu["memory_own"] or 0) >= mib << 20, "memory of the job")
    house.end("peak")
    house.wait_done(job)
    peak = house.wait(lambda: house.learned_peak_mib(PEAK), "the learned peak")
    text = f"the job took {mib} MiB; learned for its model: {peak} MiB ({peak - mib} MiB more: CUDA, libraries)"
    return text, mib <= peak <= mib + CONTEXT_MIB


def own_oom(house: GpuHouse) -> Seen:
    """A job that runs out of its own share of the memory runs again with a larger need, and ends well."""
    mib = house.machine.total_mib * 27 // 100
    seconds = 3 * house.machine.interval_s
    job = house.add("small", mib, "--within-share", "--seconds", str(seconds), model=SMALL)
    house.wait(lambda: house.show(job)["attempt"] >= 2, "a second attempt")
    house.report(job)
    house.end("small")
    house.wait_done(job)
    shown = house.show(job)
    shares = [event["share"] for event in shown["events"] if event["kind"] == "started"]
    why = next((event["why"] for event in shown["events"] if event["kind"] == "retry_scheduled"), "no reason is told")
    text = (
        f"it needs {mib} MiB, and fails where its share of the {house.machine.total_mib} MiB is passed; needs of its "
        f"attempts: {', '.join(f'{share:g}' for share in shares)}; after the first one: {why}; the last one ended well"
    )
    return text, len(shares) >= 2 and shares == sorted(set(shares))


def foreign_process(house: GpuHouse) -> Seen:
    """A job for a whole GPU waits while a process that is no job uses the GPU, and starts after its end."""
    mib = house.machine.total_mib * 8 // 10
    house.wait_settled()  # otherwise the scheduler takes the process for the memory of a job that has just ended
    house.wait_gpu(lambda gpu: gpu["state"] == "AVAILABLE", "the GPU free of earlier jobs")
    with _foreign(house, mib) as process:
        house.wait_gpu(lambda gpu: gpu["state"] == "FOREIGN", "the GPU in the state FOREIGN")
        job = house.add("whole", LITTLE_MIB, options=";gpus=1")
        waiting = house.waiting(job, "foreign")
        right = re.search(rf"\b{process.pid}\b", waiting["reason"]) is not None and house.show(job)["attempt"] == 0
        ended = time.time()
    house.report(job)
    house.end("whole")
    house.wait_done(job)
    later = _started(house.show(job)) - ended
    reason = re.sub(rf"\b{process.pid}\b", "PID", waiting["reason"])
    text = (
        f"a process took {mib} MiB; the job waited ({waiting['reason_code']}: {reason}) and started {later:.1f} s after that "
        "process was ended"
    )
    return text, right


@contextlib.contextmanager
def _foreign(house: GpuHouse, mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that is no job, and takes ``mib`` MiB of the GPU, while the ``with`` block runs."""
    path = house.path("foreign.out")
    environ = {**house.environ, "CUDA_VISIBLE_DEVICES": str(house.machine.index), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    words = [house.python, house.script, "foreign", "--mib", str(mib), "--style", "first"]
    with open(path, "wb") as out:
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        house.wait(lambda: _has_memory(process, path), "memory of the foreign process")
        yield process
    finally:
        end_process(process)


def _has_memory(process: subprocess.Popen[bytes], path: str) -> bool:
    with open(path, encoding="utf-8", errors="replace") as stream:
        said = stream.read()
    if process.poll() is not None:
        raise Stuck(f"the foreign process ended: {said.strip()[-200:]}")
    return gpu_job.REPORT in said


def idle_cost(house: GpuHouse) -> Seen:
    """A scheduler without jobs that reads the GPU at the usual interval uses little CPU time."""
    span = 6.0 if house.machine.stub else 60.0
    with GpuHouse(house.base, house.machine, house.python, {}, None) as idle:
        idle.wait_quiet()
        pids = _with_children(idle.pid)
        before = {pid: used_by(pid) for pid in pids}
        time.sleep(span)
        after = {pid: used_by(pid) for pid in pids}
    used = sum((after[pid][1] or after[pid][0]) - (before[pid][1] or before[pid][0]) for pid in pids)
    text = (
        f"{60 * used / span:.3f} CPU seconds a minute, {100 * used / span:.2f} % of a core: scheduler, supervisor and reader "
        f"process together, without jobs, gpu_interval at its default of 5 s; a sample of {span:g} s"
    )
    return text, used / span < BUSY_CPU


def _with_children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
        return [pid, *map(int, stream.read().split())]


CHECKS: dict[str, Callable[[GpuHouse], Seen]] = {
    "the driver is read": readings,
    "two jobs with half a GPU each, side by side": side_by_side,
    "styles of `--cuda`": cuda_styles,
    "peak memory is learned": learned_peak,
    "out of its own memory: tried again with a larger need": own_oom,
    "a foreign process is respected": foreign_process,
    "CPU time without jobs": idle_cost,
}


def _started(shown: Document) -> float:
    return datetime.fromisoformat(shown["started_at"].replace("Z", "+00:00")).timestamp()


def _finished(shown: Document) -> float:
    return datetime.fromisoformat(shown["finished_at"].replace("Z", "+00:00")).timestamp()


def check_all(folder: str, machine: Machine, python: str) -> tuple[list[Row], str]:
    """Run all checks one after another. Return their rows, and how the jobs took memory."""
    rows, backend = [], ""
    with GpuHouse(folder, machine, python, MODELS, machine.interval_s) as house:
        for number, (name, check) in enumerate(CHECKS.items(), 1):
            progress(f"on_gpu: {number} of {len(CHECKS)}: {name}")
            try:
                seen, ok = check(house)
            except (Stuck, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
                seen, ok = f"not seen: {error}", False
                with contextlib.suppress(Stuck):
                    house.end_jobs()
            progress("")
            rows.append(Row(name, seen.replace(folder, "FOLDER"), ok))
            print(f"{'ok ' if ok else 'NOT'} {name}: {rows[-1].seen}", flush=True)
        with contextlib.suppress(Stuck):
            backend = _backend(house)
    return rows, backend


def _backend(house: GpuHouse) -> str:
    return str(house.report(1)["backend"])


def about(machine: Machine, backend: str) -> str:
    """Return when and on which GPU the checks ran, as sentences."""
    when = time.strftime("%d %B %Y", time.gmtime()).lstrip("0")
    gpu = "simulated GPU" if machine.stub else f"{machine.gpu_name}, {machine.total_mib} MiB, driver {machine.driver}"
    return (
        f"{gpu[:1].upper()}{gpu[1:]}; {when}; gpujob {scheduler.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}. Memory is taken by: {backend or 'unknown'}."
    )


@contextlib.contextmanager
def _machine(folder: str, given: Any) -> Iterator[Machine]:
    if given.stub:
        with stub_machine(folder) as machine:
            yield machine
    else:
        yield real_machine(folder, given.gpu, given.python)


def main(words: list[str] | None = None) -> int:
    """Run all checks, print the results, and write them into the page. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stub", action="store_true", help="use the stub library of the tests, not a real GPU")
    parser.add_argument("--out", metavar="FILE", help="page with a part for the results [docs/gpu.md; --stub: none]")
    parser.add_argument("--gpu", type=int, metavar="N", help="index of the GPU [the last one]")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the jobs [this one]")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit ends all that was started
    page = given.out or ("" if given.stub else PAGE)
    folder = tempfile.mkdtemp(prefix="gpujob-on-gpu-")
    try:
        if page:
            written(page, part(given.stub, "", []))  # a page that cannot be written is told before the checks
        with _machine(folder, given) as machine:
            rows, backend = check_all(folder, machine, given.python)
            text = part(given.stub, about(machine, backend), rows)
        if page:
            changed = written(page, text)
            with open(page, "w", encoding="utf-8") as stream:
                stream.write(changed)
            print(f"written to {page}")
    except NoGpu as error:
        print(
            f"nothing was checked: no GPU to use: {error}; --stub runs the checks against the stub library",
            file=sys.stderr,
        )
        return 2
    except NotWritten as error:
        print(f"nothing was checked: cannot write {page}: {error}", file=sys.stderr)
        return 2
    except Stuck as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        progress("")
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
