"""Detection, readings and states of GPUs, and the states in which a GPU gets no job.

The tests run a real scheduler with a fake driver.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.stories.harness import alive, wait_for
from tests.stories.machine import INTERVAL_S, TOTAL, machine, processes_with

__all__ = ["machine"]

MISMATCH = 18


# -- detection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["nvml", "nvidia-smi"])
def test_s3_2_the_number_of_gpus_is_detected(machine, way):
    m = machine()
    m.cards("GPU-a", "GPU-b", "GPU-c") if way == "nvml" else m.only_smi("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    m.s.says("GPUs 0-2, ")
    assert [(gpu["index"], gpu["uuid"]) for gpu in m.s.status()["gpus"]] == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")]
    m.add("a", "b", "c", "d")
    for key in "abc":
        m.running(key)
    assert m.s.starts("d") == 0 and m.waits(4, "no-room")
    assert sorted(entry[3] for entry in m.s.ledger()) == ["0", "1", "2"]


def test_s3_2_start_without_any_gpu_ends_with_4(machine):
    m = machine()
    environ = {**m.s.environ, "PATH": "/nonexistent", "NVML_STUB_FILE": "/nonexistent"}
    words = [sys.executable, "-m", "scheduler", "start"]
    done = subprocess.run(words, cwd=m.s.folder, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 4 and done.stdout == ""
    assert re.fullmatch(r"gpujob: no GPU can be seen \(NVML: .*nvidia-smi.*\).*--gpus N.*\n", done.stderr), done.stderr


def test_s3_2_start_refuses_more_gpus_than_the_driver_shows(machine):
    m = machine(gpus=3).cards("GPU-a", "GPU-b")
    done = m.s.cli("start", "--gpus", "3", code=3)
    assert "there is no GPU 2" in done.stderr and "the driver shows GPUs 0,1" in done.stderr


@pytest.mark.smoke
def test_s3_2_gpu_ids_selects_gpus(machine):
    m = machine(gpu_ids="0,2").cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    assert [(gpu["index"], gpu["uuid"]) for gpu in m.s.status()["gpus"]] == [(0, "GPU-a"), (2, "GPU-c")]


@pytest.mark.smoke
def test_i01_start_reports_that_gpus_are_only_declared_without_a_driver(machine):
    m = machine(gpus=2)
    m.s.environ["NVML_STUB_FILE"] = "/nonexistent"
    m.s.start(PATH="/usr/bin:/bin") if not _has_nvidia_smi() else pytest.skip("a machine with nvidia-smi")
    m.s.says("there is no NVIDIA driver: gpujob uses the declared GPUs (0,1) without readings")
    assert [gpu["uuid"] for gpu in m.s.status()["gpus"]] == ["declared:0", "declared:1"]
    m.s.append(m.s.line("a"), m.s.line("c") + ";gpus=0")
    assert set(m.s.wait_ended(2).values()) == {"done"}
    assert {entry[1]: entry[3] for entry in m.s.ledger()} == {"a": "0", "c": "-"}
    text = m.s.cli("status").stdout
    assert re.search(r"^0 +AVAILABLE +0 +- +- +", text, re.M), text


def _has_nvidia_smi() -> bool:
    return any(subprocess.run(["which", "nvidia-smi"], capture_output=True, env={"PATH": "/usr/bin:/bin"}).stdout)


def test_i01_jobs_without_a_gpu_need_no_driver(machine):
    m = machine(gpus=0)
    m.s.start(NVML_STUB_FILE="/nonexistent")
    m.s.append(m.s.line("c") + ";gpus=0")
    assert m.s.wait_ended(1) == {1: "done"}


# -- an nvidia-smi that hangs or talks nonsense -----------------------------------------------------------


@pytest.mark.parametrize(
    ("id_", "how"), [("i02", "hang"), ("i02", "deaf"), ("i03", "stop")], ids=["i02-hang", "i02-deaf", "i03-stop"]
)
@pytest.mark.waits
def test_i02_i03_a_hanging_nvidia_smi_blocks_only_starts_on_gpus(machine, id_, how):
    """I02, I03: While nvidia-smi hangs, no job starts on a GPU; running jobs, the loop and the verbs continue.

    At most one nvidia-smi hangs at any time.
    """
    m = machine().only_smi("GPU-a", "GPU-b")
    m.s.start()
    m.add("old", gpus="0")
    m.running("old")
    program = str(m.smi.program_folder)
    {"hang": m.smi.hang, "deaf": lambda: m.smi.hang(deaf=True), "stop": m.smi.stop}[how]()
    wait_for(lambda: len(processes_with("--query-gpu")) and m.gpu(1)["state"] == "STALE", "stale")
    m.add("new", gpus="1")
    m.waits(2, "stale", "no answer within")
    for _ in range(5):  # the daemon must answer requests in the meantime
        m.s.cli("pause", "0")
        m.s.cli("resume", "0")
        hanging = [pid for pid in processes_with(f"{program}/nvidia-smi") if alive(pid)]
        assert len(hanging) <= 1, "a pile of helpers"
    m.s.release("old")
    m.s.wait_state(1, "done")
    assert m.s.states()[2] == "pending"
    m.s.says("running jobs continue")
    m.smi.clear()
    m.running("new")
    wait_for(lambda: not [pid for pid in processes_with(program) if _state(pid) == "T"], "the end of the stopped one")


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.waits
def test_i02_start_waits_a_limited_time_for_a_hanging_driver(machine):
    """I02: `start` waits a limited time for a hanging driver; the GPUs get no job until the driver answers."""
    m = machine(gpus=1).cards("GPU-a")
    m.driver.hang("nvmlInitWithFlags")
    m.add("a")
    m.s.start()
    m.s.says("no answer within")
    m.s.says("no job is started until the driver answers")
    m.waits(1, "stale")
    m.driver.clear_errors()
    m.running("a")
    assert m.gpu(0)["uuid"] == "GPU-a"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA-SMI hat versagt, weil kein Treiber antwortet.",
        "0, GPU-a, 0 %, 80000 MiB, 500 MiB",
        "0, GPU-a, 0, 800",
    ],
    ids=["empty", "localised", "units", "cut"],
)
def test_i04_no_job_starts_on_a_gpu_after_an_unreadable_nvidia_smi_answer(machine, text):
    m = machine().only_smi("GPU-a")
    m.s.start()
    m.readings(2)
    m.smi.text(text)
    m.state(0, "STALE")
    m.add("a")
    m.waits(1, "stale", "nvidia-smi")
    m.still_waits(1, 3)
    m.smi.clear()
    m.running("a")


@pytest.mark.parametrize("what", ["memory", "all"])
def test_i04_unknown_memory_use_makes_a_gpu_unhealthy(machine, what):
    m = machine().only_smi("GPU-a")
    m.smi.gpu("GPU-a", used=None, **({"total": None, "load": None} if what == "all" else {}))
    m.s.start()
    m.add("a")
    m.state(0, "UNHEALTHY")
    m.waits(1, "unhealthy", "does not report its memory")
    m.still_waits(1)
    shown = m.gpu(0)
    assert shown["memory_used"] is None and "does not report" in shown["reason"]
    m.smi.gpu("GPU-a", used=500, total=TOTAL, load=0)
    m.running("a")


# -- a library that does not match ------------------------------------------------------------------------


def test_i05_a_driver_mismatch_at_run_time_blocks_starts_and_ends_no_job(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.add("old", gpus="0")
    m.running("old")
    m.s.wait_state(1, "running")
    m.driver.error("nvmlDeviceGetCount_v2", MISMATCH)
    m.driver.error("nvmlInitWithFlags", MISMATCH)
    m.state(1, "STALE")
    m.add("new", gpus="1")
    m.waits(2, "stale", "driver/library version mismatch")
    assert "driver/library version mismatch" in m.s.cli("why", "2").stdout
    m.still_waits(2, 3)
    assert m.s.states()[1] == "running"
    m.s.says("no new job starts there, running jobs continue")
    assert m.s.said().count("version mismatch") == 1
    m.s.release("old")
    m.s.wait_state(1, "done")
    m.driver.clear_errors()
    m.running("new")
    m.s.says("GPUs 0,1 can get jobs again")


def test_i05_a_driver_mismatch_at_the_first_start_makes_jobs_wait(machine):
    m = machine(gpus=2).cards("GPU-a", "GPU-b")
    m.driver.error("nvmlInitWithFlags", MISMATCH)
    m.add("a", "b")
    m.s.start()
    m.s.says("version mismatch")
    m.s.says("no job is started until the driver answers")
    shown = m.s.status()["gpus"]
    assert [gpu["index"] for gpu in shown] == [0, 1] and all("declared" not in gpu["uuid"] for gpu in shown)
    m.waits(1, "stale", "version mismatch")
    m.driver.clear_errors()
    m.running("a"), m.running("b")
    assert [gpu["uuid"] for gpu in m.s.status()["gpus"]] == ["GPU-a", "GPU-b"]
    m.s.stop()
    m.s.start()
    assert "taken over" in m.s.said() or m.s.states() == {1: "running", 2: "running"}


# -- GPUs that go and come --------------------------------------------------------------------------------


def test_i06_i08_a_missing_gpu_keeps_its_job_and_gets_new_ones_once_it_is_back(machine):
    m = machine().cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    m.add("on-b", gpus="1")
    m.add("on-c", gpus="2", need="0.5")
    pid = m.running("on-b")
    m.running("on-c")
    m.s.wait_state(1, "running")
    m.driver.remove("GPU-b")
    assert "GPU-b" in m.state(1, "GONE")["reason"]
    assert [(gpu["index"], gpu["uuid"]) for gpu in m.s.status()["gpus"]] == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")]
    wait_for(lambda: "during its run: GPU 1 (GPU-b) is gone" in " ".join(m.s.job(1)["notes"]), "a note")
    assert alive(pid) and m.s.states()[1] == "running", "not killed"
    assert not m.s.job(2)["notes"] and m.gpu(2)["jobs"] == [2]
    m.s.release("on-b")
    m.s.wait_state(1, "done")
    m.add("again", gpus="1")
    m.waits(3, "gone", "GPU 1 (GPU-b) is gone")
    m.still_waits(3)
    m.cards("GPU-b")
    m.driver.order(["GPU-a", "GPU-b", "GPU-c"])
    m.running("again")
    assert m.s.job(3)["gpus"] == [1]
    m.s.says("GPU 1 (GPU-b) is gone; no new job starts there", times=1)


def test_i06_a_gpu_that_is_listed_but_lost_gets_no_job(machine):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.driver.error("*", 15, "GPU-b")
    m.state(1, "GONE")
    m.add("a", "b")
    m.running("a")
    m.waits(2, "gone")
    m.driver.clear_errors()
    m.running("b")


def test_i07_pauses_and_gpu_lists_follow_renumbered_gpus(machine):
    m = machine().cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start()
    m.s.cli("pause", "0")
    m.add("on-a", gpus="0")
    m.add("on-c", gpus="2")
    m.running("on-c")
    m.waits(1, "paused")
    m.s.stop()
    m.driver.order(["GPU-c", "GPU-a", "GPU-b"])
    m.s.start()
    said = m.s.said()
    assert "the driver renumbered the GPUs: GPU 0 is now GPU 1, GPU 1 is now GPU 2, GPU 2 is now GPU 0" in said
    assert "paused now: 1" in said
    assert {gpu["uuid"]: (gpu["index"], gpu["paused"], gpu["jobs"]) for gpu in m.s.status()["gpus"]} == {
        "GPU-a": (1, True, []),
        "GPU-b": (2, False, []),
        "GPU-c": (0, False, [2]),
    }
    assert m.s.job(1)["allowed_gpus"] == [1] and m.s.job(2)["gpus"] == [0]
    m.waits(1, "paused")
    m.s.cli("resume", "1")
    m.running("on-a")
    assert m.s.job(1)["gpus"] == [1]
    m.s.stop()
    m.s.start()
    m.s.says("renumbered the GPUs", times=1)  # not again at the next start


# -- errors, MIG, CUDA_VISIBLE_DEVICES --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["xid", "ecc"])
def test_i09_hold_on_errors_blocks_a_gpu_with_errors(machine, what):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    m.driver.xid("GPU-a", 79) if what == "xid" else m.driver.gpu("GPU-a", ecc=3)
    m.state(0, "UNHEALTHY")
    m.add("a", gpus="0")
    m.add("b", gpus="1")
    m.running("b")
    cause = "XID 79 (GPU has fallen off the bus)" if what == "xid" else "3 uncorrected memory errors"
    m.waits(1, "unhealthy", f"GPU 0 reported {cause}")
    m.s.says(f"GPU 0 reported {cause} at ")
    m.s.says("; no new job starts there; after a repair: gpujob resume 0")
    m.still_waits(1, 3)
    assert m.gpu(1)["state"] == "BUSY"


def test_i09_without_hold_on_errors_a_gpu_with_errors_is_used(machine):
    m = machine(hold_on_errors="false").cards("GPU-a")
    m.driver.gpu("GPU-a", ecc=3)
    m.s.start()
    m.add("a")
    m.running("a")


def test_i17_cuda_visible_devices_of_the_daemon_limits_the_managed_gpus(machine):
    m = machine().cards("GPU-a", "GPU-b", "GPU-c")
    m.s.start(CUDA_VISIBLE_DEVICES="2,GPU-b")
    m.s.says("CUDA_VISIBLE_DEVICES=2,GPU-b in the scheduler's environment: gpujob manages only GPUs 1,2")
    assert [gpu["index"] for gpu in m.s.status()["gpus"]] == [1, 2]
    (m.s.folder / "show.py").write_text("import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])\n")
    m.s.append("0,show.py,,,1", "0,show.py,,again,2", "0,show.py,,none,0")
    m.s.wait_ended(2)
    assert "sees 1\n" in m.s.log(1) and "sees 2\n" in m.s.log(2), "a job gets its own only"
    wait_for(lambda: "GPU 0 is not managed here" in m.s.said(), "the refusal")


@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles"])
def test_i17_an_invalid_cuda_visible_devices_is_reported_and_ignored(machine, text):
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start(CUDA_VISIBLE_DEVICES=text)
    m.s.says(f"CUDA_VISIBLE_DEVICES={text!r} names no GPU of this machine")
    assert len(m.s.status()["gpus"]) == 2


def test_i17_gpus_option_overrides_cuda_visible_devices(machine):
    m = machine(gpus=2).cards("GPU-a", "GPU-b")
    m.s.start(CUDA_VISIBLE_DEVICES="1")
    m.add("a", gpus="0")
    m.running("a")
    assert [gpu["index"] for gpu in m.s.status()["gpus"]] == [0, 1]


def test_i18_a_gpu_in_mig_mode_gets_no_job(machine):
    """I18: A card in MIG mode without instances gets no job; `start` and `doctor` say so."""
    m = machine().cards("GPU-a", "GPU-b")
    m.driver.gpu("GPU-a", mig=1)
    m.s.start()
    m.s.says("GPU 0 is in MIG mode and without instances")
    m.add("b", "c")
    m.running("b")
    assert m.s.job(1)["gpus"] == [1] and [gpu["index"] for gpu in m.s.status()["gpus"]] == [1]
    m.waits(2, "no-room")
    assert "MIG mode is on, and there are no instances" in m.s.cli("doctor", code=None).stdout
    m.s.append(m.s.line("a", gpus="0"))
    wait_for(lambda: "GPU 0 is not managed here" in m.s.said(), "the refusal")


def test_i18_uuids_in_gpu_lists_are_refused(machine):
    m = machine().cards("GPU-a", "GPU-b")
    error = m.s.cli("start", "--gpu-ids", "MIG-1234", code=2).stderr
    assert error.count("\n") == 1 and "GPU list" in error
    m.s.start()
    m.s.append('0,job.py,,x,"GPU-a"')
    wait_for(lambda: "jobs.txt:1:" in m.s.said(), "the refusal")
    m.s.cli("pause", "GPU-a", code=2)


# -- two schedulers ---------------------------------------------------------------------------------------


def test_start_warns_of_another_scheduler_on_this_machine(machine, tmp_path):
    one, two = (
        machine(folder=tmp_path / name, gpu_ids=ids, share_bookings=False) for name, ids in (("one", "0"), ("two", "1"))
    )
    one.cards("GPU-a", "GPU-b").s.start()
    two.cards("GPU-a", "GPU-b").s.start()
    told = f"another scheduler runs on this machine: pid {one.s.pid} of user"
    two.s.says(told)
    two.s.says("GPUs 0; it does not share")
    assert f"pid {two.s.pid} of user" not in one.s.said()
    one.s.stop()
    two.s.stop()
    two.s.start()
    two.s.says(told, times=1)  # no second warning: the other scheduler has ended


def test_start_warns_of_another_users_scheduler(machine, tmp_path):
    one, two = machine(folder=tmp_path / "one", share_bookings=False), machine(folder=tmp_path / "two")
    one.cards("GPU-a").s.start()
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    works = subprocess.run([*as_nobody, "-c", "import scheduler"], env=one.s.environ, cwd="/", capture_output=True)
    if works.returncode:
        pytest.skip("no other user can be taken, or he may not read this Python")
    code = "from scheduler.gpus.monitor import other_schedulers; print(*other_schedulers(), sep='\\n')"
    seen = subprocess.run([*as_nobody, "-c", code], env=two.s.environ, cwd="/", capture_output=True, text=True)
    assert f"pid {one.s.pid} of user" in seen.stdout, seen


def test_readings_of_the_previous_daemon_are_not_shown(machine):
    """If the driver does not answer after a restart, `status` shows no reading of the previous daemon."""
    m = machine(gpus=1).cards("GPU-a")
    m.s.start()
    m.readings(1)
    assert m.gpu(0)["memory_used"] is not None
    m.s.stop()
    m.driver.error("nvmlInitWithFlags", MISMATCH)
    m.s.start()
    shown = m.gpu(0)
    assert shown["memory_used"] is None and shown["load"] is None
    assert INTERVAL_S and m.state(0, "STALE")


def test_s2_6_gpus_of_the_driver_can_be_added_and_removed_at_run_time(machine):
    """S2.6: A changed config adds and removes GPUs at run time; a GPU that the driver does not show is refused."""
    m = machine().cards("GPU-a", "GPU-b")
    config = m.s.folder / "config.yaml"
    config.write_text("gpu_ids: 0\n")
    m.s.start()
    m.add("a", "b")
    m.running("a")
    m.waits(2, "no-room")
    config.write_text("gpu_ids: 0,7\n")
    wait_for(
        lambda: "there is no GPU 7; the driver shows GPUs 0,1; the managed GPUs are unchanged" in m.s.said(), "refused"
    )
    config.write_text("gpu_ids: 0-1\n")
    m.running("b")
    assert m.s.job(2)["gpus"] == [1] and m.gpu(1)["uuid"] == "GPU-b" and m.gpu(1)["memory_total"] == TOTAL << 20
    config.write_text("gpu_ids: 1\n")
    wait_for(lambda: [gpu["index"] for gpu in m.s.status()["gpus"]] == [1], "one is left")
    m.s.release("a")
    m.s.wait_state(1, "done")
    m.add("c", gpus="")
    m.s.release("b")
    m.running("c")
    assert m.s.job(3)["gpus"] == [1]
    m.s.says("there is no GPU 7", times=1)
