"""Cases found by adversarial testing: GPUs that vanish, drains that could end too early, drivers that fail."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3

import pytest

from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.store.seen_runs import seen_runs
from tests.stories.harness import alive, wait_for
from tests.stories.machine import kill_all, machine

__all__ = ["machine"]


# -- a GPU vanishes while no scheduler runs ---------------------------------------------------------------


@pytest.mark.parametrize("given", [None, 3])
def test_a_start_without_one_gpu_keeps_gpu_numbers_and_allocations(machine, given):
    """If one GPU is missing when the scheduler starts, the scheduler adopts all jobs.

    The numbers of the GPUs, the allocations, the pauses and the allowed GPUs of the jobs stay the same.
    """
    m = machine(gpus=given).cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    for i in range(3):
        m.add(f"on{i}", gpus=str(i))
    pids = [m.running(f"on{i}") for i in range(3)]
    m.s.cli("pause", "2")
    m.add("for-c", gpus="2")
    m.add("for-b", gpus="1")
    m.waits(4, "paused")
    m.s.kill()
    m.driver.remove("GPU-b")
    m.s.start()
    assert [(gpu["index"], gpu["uuid"], gpu["jobs"], gpu["paused"]) for gpu in m.s.status()["gpus"]] == [
        (0, "GPU-a", [1], False),
        (1, "GPU-b", [2], False),
        (2, "GPU-c", [3], True),
    ]
    said = m.s.said()
    assert "the driver no longer shows GPU 1 (GPU-b), which it showed at the last start" in said
    assert "renumbered" not in said
    m.state(1, "GONE")
    assert all(map(alive, pids)) and [m.s.states()[i] for i in (1, 2, 3)] == ["running"] * 3
    assert m.s.job(4)["allowed_gpus"] == [2] and m.s.job(5)["allowed_gpus"] == [1]
    for i in range(3):
        m.s.release(f"on{i}")
    for i in (1, 2, 3):
        m.s.wait_state(i, "done")
    m.waits(5, "gone")
    m.s.cli("resume", "2")
    m.running("for-c")
    assert m.s.job(4)["gpus"] == [2]
    m.cards("GPU-b")
    m.driver.order(["GPU-a", "GPU-b", "GPU-c"])
    m.running("for-b")
    assert m.s.job(5)["gpus"] == [1]


def test_a_pause_of_a_missing_gpu_stays_with_its_uuid(machine):
    m = machine().cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    m.s.cli("pause", "1")
    m.s.stop()
    m.driver.remove("GPU-b")
    m.s.start()
    assert {gpu["uuid"]: (gpu["index"], gpu["paused"]) for gpu in m.s.status()["gpus"]} == {
        "GPU-a": (0, False),
        "GPU-b": (1, True),
        "GPU-c": (2, False),
    }


# -- drains -----------------------------------------------------------------------------------------------


def drained(m) -> int:
    """Wait until a draining scheduler has ended; return its exit code."""
    wait_for(lambda: m.s.process.poll() is not None, f"the drain's end: {m.s.said()[-2000:]}")
    return m.s.process.returncode


def test_a_drain_waits_for_a_retry_and_runs_it(machine):
    m = machine(assign_retry_wait="1.5", gpu_interval=20).cards("GPU-a")  # at the retry the last reading is too old
    (m.s.folder / "fails.py").write_text("raise SystemExit(3)")
    m.s.append(f"0,{m.s.folder}/fails.py,,,;retries=1")
    m.s.start("--drain", ready=False)  # ready=True fails if the drain ends very early
    assert drained(m) == 1
    assert m.s.rows("SELECT state, attempt, exit_code FROM jobs") == [("failed", 2, 3)], m.s.said()
    assert "no job is left to run" in m.s.said() and "cannot start" not in m.s.said()


def test_one_unhealthy_reading_does_not_end_a_drain(machine):
    m = machine().cards("GPU-a")
    m.driver.error("nvmlDeviceGetUtilizationRates", 999, "GPU-a")
    m.s.append(m.s.line("a"))
    m.s.start("--drain")
    m.waits(1, "unhealthy")
    m.readings(3)
    assert m.s.process.poll() is None, m.s.said()
    m.driver.clear_errors()
    assert drained(m) == 0
    assert m.s.states() == {1: "done"}


# -- requested and measured memory ------------------------------------------------------------------------


def test_a_job_waits_while_other_jobs_leave_too_little_memory_for_it(machine):
    m = machine().cards("GPU-a")
    m.s.start()
    m.add("half", need="0.5")
    m.use("GPU-a", m.running("half"), 38_000, load=90, total_load=90)
    wait_for(lambda: m.gpu(0)["memory_own"], "its memory")
    m.s.hold("large")
    m.s.append(m.s.line("large") + ";gpus=0.5;vram=60G")
    assert "needs 0.768 of one GPU" in m.waits(2, "no-room")["reason"]
    told = "vram=60G is 0.768 of the smallest allowed GPU that has it; the job books 0.768"
    assert m.s.job(2)["notes"] == [told] and told in m.s.cli("why", "2").stdout
    m.still_waits(2, 3)
    m.add("small", need="0.5")
    m.running("small")
    for key in ("half", "small"):
        m.s.release(key)
        m.s.wait_state(1 if key == "half" else 3, "done")
    m.unuse("GPU-a", m.running("half"))
    m.running("large")


def test_a_job_that_uses_an_unallocated_gpu_is_reported(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("astray", gpus="0")
    pid = m.running("astray")
    m.use("GPU-b", pid, 60_000, load=95, total_load=95)
    m.state(1, "FOREIGN")
    m.add("b", need="0.5", gpus="1")
    # A reading may come before the store has the pid: the reason then does not name the job yet.
    m.waits(2, "foreign", f"(pid {pid} of job 1, which has no allocation on this GPU)")
    status = m.s.cli("status").stdout
    assert f"pid {pid} of job 1" in status
    note = "uses GPU 1 without an allocation on it"
    wait_for(lambda: m.s.job(1)["notes"] == [note], "the note")
    status = m.s.cli("status").stdout
    assert note in m.s.cli("why", "1").stdout and note in m.s.cli("show", "1").stdout
    assert re.search(rf"^1 +running .*{note}$", status, re.MULTILINE), status
    m.s.says(f"its process {pid} uses GPU 1 (58.6 GiB), which is not allocated to the job")
    story = json.loads(m.s.cli("show", "1", "--json").stdout)["events"]
    (event,) = (event for event in story if event["kind"] == "stray")
    assert (event["gpu"], event["pid"], event["memory"]) == (1, pid, 60_000 << 20)
    m.readings(2)
    assert m.s.job(1)["notes"] == [note], "said once"


def test_jobs_with_only_vram_share_a_gpu_by_memory(machine):
    """Jobs that request only memory share a GPU by memory.

    If a job fails because GPU memory ran out, `show` prints how much memory the job requested and used.
    """
    m = machine(oom_retries=0).cards("GPU-a")
    program = m.s.folder / "oom.sh"
    program.write_text(
        "#!/bin/sh\necho $$ >pid\nwhile [ -e hold-oom ]; do sleep 0.02; done\necho CUDA out of memory\nexit 1\n"
    )
    program.chmod(0o755)
    m.s.hold("oom")
    m.s.start()
    m.s.append(f"0,{program},,--llm tiny,;vram=19000M")
    for key in "bcd":
        m.s.hold(key)
        m.s.append(m.s.line(key) + ";vram=19000M")
        m.running(key)
    assert m.s.job(1)["need"] == 0.238 and m.gpu(0)["allocated"] == 0.952
    m.s.append(m.s.line("e") + ";vram=38000M")
    wait_for(lambda: m.s.states().get(5) == "pending" and m.s.job(5)["need"] == 0.475, "it waits")
    m.s.cli("edit", "5", "--vram", "")
    assert m.s.job(5)["need"] == 1, "it says nothing of memory any more"
    m.s.cli("edit", "5", "--vram", "19000M")
    assert "needs 0.238 of one GPU" in m.waits(5, "no-room")["reason"]
    file = m.s.folder / "pid"
    pid = int(wait_for(lambda: file.exists() and file.read_text().strip(), "the pid of job 1"))
    m.use("GPU-a", pid, 15_000, load=40)
    wait_for(lambda: m.gpu(0)["memory_own"] == 15_000 << 20, "its memory")
    m.s.release("oom")
    m.s.wait_state(1, "failed")
    failure = m.s.job(1)["failure"]
    assert (failure["asked_memory"], failure["peak_memory"]) == (19_000 << 20, 15_000 << 20)
    assert "asked for 18.6 GiB of a GPU, used up to 14.6 GiB" in m.s.cli("show", "1").stdout
    with contextlib.closing(sqlite3.connect(m.s.folder / ".gpujob" / "store.db")) as store:
        (((group, seen)),) = seen_runs(store).items()
    assert (group.model, group.script) == ("tiny", str(program)) and (seen.count, seen.peak_mib) == (1, 15_000)
    assert (seen.runs[0].ended, seen.runs[0].load) == (OUT_OF_MEMORY, pytest.approx(0.4))
    m.unuse("GPU-a", pid)
    m.running("e")


def test_a_gpu_is_free_again_below_a_low_load_threshold(machine):
    m = machine(load_threshold=0.05).cards("GPU-a")
    foreign_process = m.foreign_process()
    m.use("GPU-a", foreign_process, 3_000, load=50, total_load=50)
    m.s.start()
    m.add("a")
    m.waits(1, "foreign")
    m.unuse("GPU-a", foreign_process)
    m.running("a")


# -- a driver that is missing, or seems to be -------------------------------------------------------------


def without_packages(m) -> None:
    """Make imports of pynvml and GPUtil fail."""
    shadow = m.s.folder / "shadow"
    shadow.mkdir()
    for name in ("pynvml", "GPUtil"):
        (shadow / f"{name}.py").write_text("raise ImportError('broken, for this test')\n")
    m.s.environ["PYTHONPATH"] = f"{shadow}:{m.s.environ['PYTHONPATH']}"


def test_broken_nvml_packages_do_not_count_as_no_driver(machine):
    """If there is a driver but no Python package that can read it, no job starts on the GPUs.

    With --gpu-interval 0, jobs start.
    """
    m = machine(gpus=1).cards("GPU-a")
    without_packages(m)
    m.add("a")
    m.s.start()
    said = m.s.said()
    assert "nvidia-ml-py cannot be imported: broken" in said and "no job is started until" in said
    assert "declared" not in said and "--gpus N --gpu-interval 0" in said
    assert m.gpu(0)["uuid"].startswith("unread:")
    m.waits(1, "stale")
    m.s.stop()
    m.s.start("--gpu-interval=0")
    m.running("a")


def test_no_job_starts_until_a_driver_seen_at_the_last_start_answers(machine):
    """If the driver answered at the last start, no job starts until the driver answers again, even with --gpus N.

    With both --gpus N and --gpu-interval 0, jobs start without the driver.
    """
    m = machine(gpus=1).cards("GPU-a")
    m.use("GPU-a", m.foreign_process(), 79_000, load=99, total_load=99)
    m.add("a")
    m.s.start()
    m.waits(1, "foreign")
    m.s.stop()
    here = m.s.environ["NVML_STUB_FILE"]
    m.s.environ["NVML_STUB_FILE"] = "/nonexistent"
    m.smi.program_folder.joinpath("nvidia-smi").unlink()
    m.s.environ["PATH"] = "/usr/bin:/bin"
    m.s.start()
    assert (
        "no job is started until the driver answers; to allocate GPUs without readings: --gpus N --gpu-interval 0"
        in m.s.said()
    )
    assert m.gpu(0)["uuid"] == "GPU-a"
    m.waits(1, "stale")
    m.s.stop()
    m.s.start(NVML_STUB_FILE=here)
    m.waits(1, "foreign")
    m.s.stop()
    m.s.start("--gpu-interval=0")
    m.s.says("GPUs are not read (gpu_interval: 0): gpujob uses the declared GPUs (0) without readings")
    m.running("a")
    assert m.gpu(0)["uuid"] == "declared:0" and m.gpu(0)["memory_used"] is None


@pytest.mark.parametrize("how", ["option", "file"])
def test_start_refuses_gpu_interval_0_without_the_option_gpus(machine, how):
    m = machine(**({"gpu_interval": 0} if how == "option" else {})).cards("GPU-a")
    words = ["--gpu-interval=0"] if how == "option" else []
    if how == "file":
        m.s.folder.joinpath("own.yaml").write_text("gpu_interval: 0\n")
        words = ["--config", "own.yaml"]
    done = m.s.cli("start", *words, code=4)
    assert done.stderr.count("\n") == 1 and "gpu_interval: 0" in done.stderr and "--gpus N" in done.stderr


def test_a_driver_error_at_the_first_start_is_one_readable_line(machine):
    m = machine()
    m.driver.error("nvmlInitWithFlags", 18)
    done = m.s.cli("start", code=4)
    assert done.stderr.count("\n") == 1 and "--gpus N --gpu-interval 0" in done.stderr, done.stderr
    assert "NVIDIA-SMI has failed because" in done.stderr and "version mismatch" in done.stderr
    for word in ("invalid literal", "base 10", "ValueError", "\\n"):
        assert word not in done.stderr, done.stderr


def test_the_demo_runs_to_its_end_if_nvidia_smi_fails(machine):
    m = machine()
    m.s.environ["NVML_STUB_FILE"] = "/nonexistent"
    done = m.s.cli("demo")
    assert "gpujob: no GPU found; the demo simulates two" in done.stderr
    assert "pending" not in done.stdout.rpartition("ENDED")[2], done.stdout


# -- options ----------------------------------------------------------------------------------------------


def test_thresholds_accept_percent(machine):
    m = machine(mem_threshold="80%", load_threshold="35 %").cards("GPU-a")
    m.use("GPU-a", m.foreign_process(), 1_000, load=40, total_load=40)
    m.s.start()
    m.add("a", need="0.1")
    assert "limit 35 %" in m.waits(1, "foreign")["reason"]


def test_a_hanging_nvidia_smi_keeps_no_gpu_booked(machine):
    """If nvidia-smi hangs and the scheduler cannot kill it, the GPU of an ended job still becomes free.

    The scheduler cannot kill it because nvidia-smi has left the process group of the process that started it. While
    nvidia-smi hangs, no second nvidia-smi is started, and no job starts on a GPU.
    """
    m = machine().only_smi("GPU-a", "GPU-b")
    hold = m.s.folder / "stray"
    program = m.smi.program_folder / "nvidia-smi"
    real = program.resolve()
    program.unlink()
    program.write_text(
        f'#!/bin/sh\n[ ! -e {hold} ] || exec setsid sh -c "echo \\$\\$ >> {hold}; exec sleep 10000"\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    m.s.start()
    m.add("old", gpus="0")
    m.running("old")
    hold.touch()
    wait_for(lambda: "hangs in the driver and cannot be killed" in (m.gpu(0)["reason"] or ""), "the stuck reader")
    (pid,) = map(int, wait_for(lambda: hold.read_text().split(), "its number"))
    try:
        assert alive(pid)
        m.s.release("old")
        m.s.wait_state(1, "done")
        assert m.s.rows("SELECT * FROM holdings") == [], m.s.said()
        m.add("new", gpus="0")
        m.waits(2, "stale")
        assert hold.read_text().split() == [str(pid)] and alive(pid), "one of them"
        hold.unlink()
    finally:
        hold.unlink(missing_ok=True)
        kill_all([pid])
    m.running("new")
