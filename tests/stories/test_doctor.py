"""`gpujob doctor` finds problems and proposes commands; the tests run these commands where possible.

A proposed command must solve the problem for which it is proposed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import scheduler.cli.doctor  # noqa: F401  loaded before the user is changed
from scheduler.client.client import SchedulerClient
from scheduler.doctor import check_runner, logout, screen
from scheduler.doctor.finding import DoctorUser, Finding, good
from scheduler.doctor.programs import Programs
from tests.stories.harness import ROOT, Scheduler, alive, wait_for
from tests.stories.machine import IDLE, TOTAL, Machine, machine
from tests.stories.people import ROOT_ONLY, User
from tests.stories.test_schemas import check

__all__ = ["machine"]
Findings = dict[str, list[dict[str, Any]]]
ALWAYS = {"config", "state folder", "files", "store", "scheduler", "leftovers", "logout", "screen", "inotify", "clock", "NVML", "GPUtil"}  # fmt: skip


def program(s: Scheduler, name: str, text: str) -> Path:
    """Write a shell script ``name`` into a folder that comes first in PATH; return its path. ``text``: its commands."""
    folder = s.folder / "bin"
    if not folder.exists():
        folder.mkdir()
        s.environ["PATH"] = f"{folder}:{s.environ['PATH']}"
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def ill(scheduler: Callable[..., Scheduler]) -> Scheduler:
    """Return a scheduler, not started yet, with the command `gpujob` in PATH, so that proposed commands can be run."""
    s = scheduler(gpus=2)
    program(s, "gpujob", f'exec {sys.executable} -m scheduler "$@"')
    return s


def doctor(s: Scheduler, *words: str, code: int | None = None) -> Findings:
    """Run `doctor --json`; return the findings of each check: check → findings.

    Assert that the exit code is 1 if a finding has the mark `bad`, and 0 otherwise. If ``code`` is not None, also
    assert that the exit code equals ``code``.
    """
    done = s.cli("doctor", "--json", *words, code=None)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    value = json.loads(done.stdout)
    marks = {one["mark"] for one in value["findings"]}
    assert done.returncode == ("bad" in marks) and code in (None, done.returncode), value
    by_check: Findings = {}
    for one in value["findings"]:
        by_check.setdefault(one["check"], []).append(one)
        assert (one["mark"] == "ok") <= (one["mend"] is None)
        assert one["mark"] != "unknown" or one["seen"].startswith("unknown: ")
    return by_check


def marks(found: Findings, name: str) -> set[str]:
    return {one["mark"] for one in found.get(name, ())}


def mend(s: Scheduler, finding: dict[str, Any]) -> None:
    """Run the command that a finding proposes, in bash; it must succeed."""
    done = subprocess.run(
        ["bash", "-c", finding["mend"]], cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, (finding, done.stdout, done.stderr)


def trace(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return path → (mode, size, modification time) of all files and folders below ``folder``, to detect any write."""
    return {
        str(path): ((status := path.lstat()).st_mode, status.st_size, status.st_mtime_ns) for path in folder.rglob("*")
    }


# -- without a scheduler, and with a healthy one ----------------------------------------------------------


@pytest.mark.smoke
def test_doctor_without_a_scheduler_writes_nothing(ill: Scheduler) -> None:
    """Without state folder, driver and jobs file, each check still has a finding, and `doctor` writes nothing."""
    before = trace(ill.folder)
    found = doctor(ill)
    assert trace(ill.folder) == before
    assert set(found) >= ALWAYS
    for name in ("config", "state folder", "files", "store", "leftovers"):
        assert marks(found, name) == {"ok"}, found[name]
    text = ill.cli("doctor", code=None).stdout
    assert re.search(r"^ok +store +none yet; the first start creates it$", text, re.M), text
    assert f"{ill.folder}/jobs.txt, does not exist yet" in text
    gone = doctor(ill, "--state-file", "/no such/place/state.json", code=1)
    assert [one["mend"] for one in gone["state folder"]] == ["mkdir -p '/no such/place'"]
    for words in (["--state-file", str(ill.folder)], ["--config", "nowhere.yaml"]):
        assert ill.cli("doctor", *words, code=2).stdout == ""
    assert "did you mean doctor?" in ill.cli("docter", code=2).stderr
    assert "changes nothing" in ill.cli("help", "doctor").stdout


def test_doctor_finds_a_stopped_and_a_missing_scheduler(ill: Scheduler) -> None:
    """G04: `doctor` proposes `kill -CONT` if the scheduler is stopped (SIGSTOP).

    If a job runs and no scheduler runs, `doctor` proposes `start`. Both commands work. While no scheduler runs,
    `doctor` writes nothing.
    """
    ill.hold("a")
    ill.append(ill.line("a"))
    ill.start()
    ill.wait_state(1, "running")
    found = doctor(ill)
    check("doctor", json.loads(ill.cli("doctor", "--json", code=None).stdout))
    for name in ("config", "state folder", "jobs file", "files", "store", "leftovers"):
        assert marks(found, name) == {"ok"}, found[name]
    assert found["store"][0]["seen"] == "intact, 1 job" and found["scheduler"][0]["seen"] == f"runs, pid {ill.pid}"
    assert "declared" in found["NVML"][0]["seen"] or found["NVML"][0]["mark"] != "ok"

    ill.freeze()
    found = doctor(ill, code=1)
    assert found["scheduler"][0]["mend"] == f"kill -CONT {ill.pid}"
    mend(ill, found["scheduler"][0])
    wait_for(lambda: doctor(ill)["scheduler"][0]["mark"] == "ok", "it goes on")

    ill.kill()
    found = doctor(ill)
    missed = found["scheduler"][0]
    assert missed["mark"] == "warn" and "1 job runs" in missed["wrong"] and marks(found, "leftovers") == {"ok"}
    assert missed["mend"] == "gpujob start --detach --gpus 2", "as declared: there may be no driver to find them"
    mend(ill, {"mend": f"{missed['mend']} >/dev/null 2>&1"})
    pid = json.loads((ill.folder / ".gpujob/daemon.json").read_text())["pid"]
    try:
        assert doctor(ill)["scheduler"][0]["seen"] == f"runs, pid {pid}"
        ill.release("a")
        ill.wait_ended(1)
    finally:
        os.kill(pid, signal.SIGTERM)
    client = SchedulerClient(str(ill.folder / "gpu_scheduler_state.json"))
    wait_for(lambda: not alive(pid) and not client.alive(), "the end of the scheduler, and its locks are free")
    before = trace(ill.folder)
    assert marks(doctor(ill), "store") == {"ok"}
    assert trace(ill.folder) == before, "a store in which nobody works is not even opened with a log"


# -- files ------------------------------------------------------------------------------------------------


def made(s: Scheduler) -> None:
    """Run one job to its end and stop the scheduler."""
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()


def test_doctor_finds_wrong_modes_and_leftover_files(ill: Scheduler) -> None:
    """Wrong modes, a jobs file that others can write (C37) and leftover files are found.

    Each proposed command fixes its finding.
    """
    made(ill)
    house = ill.folder / ".gpujob"
    (house / "store.db").chmod(0o644)
    next((ill.folder / "gpu_scheduler_logs").glob("job_1_*")).chmod(0o640)
    (house / "attempts" / "1.1").chmod(0o400)
    ill.jobs_file.chmod(0o666)
    killed = subprocess.Popen(["true"])
    killed.wait()
    left = {house / f".daemon.json.new-{killed.pid}", ill.folder / f".gpu_scheduler_state.json.new-{killed.pid}",
            house / f"packet-{killed.pid}-5", house / "attempts" / "1.1~ copy", house / "store.db.new"}  # fmt: skip
    for path in left:
        path.write_text("")
        path.chmod(0o600)
        os.utime(path, (0, 0))
    found = doctor(ill, code=1)
    assert [one["wrong"] for one in found["files"]] == [
        "other users may read or write it",
        "its owner may not read and write it",
    ]
    assert (
        found["files"][0]["seen"].endswith(" and 1 more")
        and found["jobs file"][0]["mend"] == f"chmod o-w {ill.jobs_file}"
    )
    assert found["leftovers"][0]["mark"] == "warn"
    for one in (*found["files"], *found["jobs file"], *found["leftovers"]):
        mend(ill, one)
    found = doctor(ill)
    for name in ("files", "jobs file", "leftovers"):
        assert marks(found, name) == {"ok"}, found[name]
    assert not any(path.exists() for path in left) and (house / "attempts" / "1.1").exists()
    for n in range(30):
        (house / "env" / f"{n:032x}").touch()
        (house / "env" / f"{n:032x}").chmod(0o644)
    (found,) = (one for one in doctor(ill, code=1)["files"])
    assert found["mend"].startswith("find ")
    mend(ill, found)
    assert marks(doctor(ill), "files") == {"ok"}


def test_doctor_finds_a_state_folder_that_is_a_link_or_a_file(ill: Scheduler) -> None:
    """A state folder that is a link or a file is found, and the proposed command fixes that.

    The jobs behind the link are kept.
    """
    made(ill)
    house, elsewhere = ill.folder / ".gpujob", ill.folder / "other disk"
    house.rename(elsewhere)
    house.symlink_to(elsewhere)
    found = doctor(ill, code=1)
    assert "the state folder is a link: no scheduler starts" in found["files"][0]["wrong"]
    mend(ill, found["files"][0])
    assert house.is_dir() and not house.is_symlink()
    assert marks(doctor(ill), "files") == {"ok"} and ill.states() == {1: "done"}
    house.rename(elsewhere)
    house.write_text("")
    found = doctor(ill, code=1)
    mend(ill, found["files"][0])
    assert marks(doctor(ill), "files") == {"ok"}


def test_doctor_finds_leftover_processes(ill: Scheduler) -> None:
    """`doctor` marks a leftover process as a warning while a scheduler runs, and as bad while none runs.

    The proposed command ends the process.
    """
    script = ill.folder / "forks.sh"
    script.write_text("#!/bin/sh\nsetsid sleep 1000 >/dev/null 2>&1 &\necho $! >left; exit 0\n")
    script.chmod(0o755)
    ill.append(f"0,{script},,")
    ill.start()
    wait_for(lambda: ill.rows("SELECT 1 FROM jobs WHERE finished_at IS NOT NULL"), "its end")
    pid = int((ill.folder / "left").read_text())
    assert "their GPUs stay allocated" in doctor(ill)["leftovers"][0]["wrong"] and marks(doctor(ill), "leftovers") == {
        "warn"
    }
    ill.kill()
    found = doctor(ill, code=1)["leftovers"][0]
    assert found["mend"] == f"kill {pid}" and "sleep 1000" in found["seen"] and "job 1" in found["wrong"]
    mend(ill, found)
    wait_for(lambda: marks(doctor(ill), "leftovers") == {"ok"}, "gone")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_doctor_finds_foreign_files_and_shows_unknown_to_another_user(ill: Scheduler) -> None:
    """H17: `doctor` finds files that do not belong to the user of the scheduler.

    If a user who may not look into the state folder runs `doctor`, the checks that need the contents of this folder get
    the mark `unknown`. `doctor` does not propose `start` to that user.
    """
    made(ill)
    ill.folder.chmod(0o755)
    (ill.folder / ".gpujob" / "high").chmod(0o600)
    os.chown(ill.folder / ".gpujob" / "high", 65534, -1)
    found = doctor(ill, code=1)["files"][0]
    assert found["mend"] == f"chown -h root {ill.folder}/.gpujob/high"
    mend(ill, found)
    assert marks(doctor(ill), "files") == {"ok"}
    os.chown(ill.folder / ".gpujob", 65534, -1)
    found = doctor(ill, code=1)["files"]
    assert [one["mend"] for one in found] == [f"chown -h root {ill.folder}/.gpujob"], "the odd one, not all others"
    mend(ill, found[0])
    ill.start()
    ill.freeze()  # else a changed file might be the daemon's work
    # All modules are imported before the user changes: the other user may not be able to read this Python's folder.
    script = (
        "import os, sys, json, ctypes, importlib\n"
        "for n in ('doctor.checks', 'cli.doctor'): importlib.import_module('scheduler.' + n)\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"  # PR_SET_DUMPABLE: the process may read its own files in /proc
        "from scheduler.cli.doctor import doctor\n"
        f"sys.exit(doctor(json=True, state_file={str(ill.folder / 'gpu_scheduler_state.json')!r}))"
    )
    before = trace(ill.folder)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env=ill.environ, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1, done.stderr
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["state folder"]["mark"] == "bad" and "belongs to user root" in found["state folder"]["wrong"]
    for name in ("store", "scheduler", "files", "leftovers"):
        assert found[name]["mark"] == "unknown", found[name]
    assert not [one for one in found.values() if "gpujob start" in str(one["mend"])], "he cannot start one here"
    assert trace(ill.folder) == before
    os.kill(ill.pid, signal.SIGCONT)
    ill.stop()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_h17_commands_proposed_to_root_run_as_the_owner_of_the_scheduler(ill: Scheduler) -> None:
    """H17: If root runs `doctor` for a scheduler of another user, the proposed commands run as that user.

    `doctor` does not report files that belong to that user.
    """
    lists = ill.folder.with_name(f"{ill.folder.name}-run")  # root's register of schedulers, which root must own
    lists.mkdir(0o700)
    ill.environ["XDG_RUNTIME_DIR"] = str(lists)
    ill.append(ill.line("a"))
    for path in (ill.folder, *ill.folder.iterdir()):
        os.chown(path, 65534, -1)
    for house in (False, True):
        found = doctor(ill, code=0)
        name = pwd.getpwuid(65534).pw_name
        assert found["jobs file"][0]["mend"] == f"sudo -u {name} gpujob doctor", found["jobs file"]
        commands = [str(one["mend"]) for ones in found.values() for one in ones if "gpujob" in str(one["mend"])]
        assert all(command.startswith(f"sudo -u {name} gpujob") for command in commands), commands
        assert "chown" not in "".join(commands) and marks(found, "files") == {"ok"}, found["files"]
        if not house:
            (ill.folder / ".gpujob").mkdir(0o700)
            os.chown(ill.folder / ".gpujob", 65534, -1)


def test_c37_doctor_finds_writable_folders_and_non_plain_files(ill: Scheduler) -> None:
    """C37: `doctor` finds a folder to which everybody may write, even if the folder has no file of the scheduler.

    `start` refuses such a folder, too. If a folder or a FIFO is in the place of a file, `doctor` proposes to move it
    away. If a device is there, `doctor` proposes no such command.
    """
    ill.folder.chmod(0o777)
    assert "all users may write to it" in ill.cli("start", "--gpus", "1", code=1).stderr
    found = doctor(ill, code=1)
    for name in ("state folder", "jobs file"):
        assert found[name][0]["mend"] == f"chmod o-w {ill.folder}", found[name]
    mend(ill, found["state folder"][0])
    ill.jobs_file.mkdir()
    os.mkfifo(ill.folder / "config.yaml", 0o600)
    found = doctor(ill, code=1)
    for name in ("config", "jobs file"):
        assert found[name][0]["mend"].startswith("mv "), found[name]
        mend(ill, found[name][0])
    found = doctor(ill, code=0)
    for name in ("config", "state folder", "jobs file"):
        assert marks(found, name) == {"ok"}, found[name]
    found = doctor(ill, "--state-file", "/dev/null", code=1)
    assert marks(found, "files") == {"bad"}
    commands = [str(one["mend"]) for ones in found.values() for one in ones]
    assert not [one for one in commands if re.search(r"(?<!2>)/dev/null", one)], commands


# -- the store and the config -----------------------------------------------------------------------------


def test_doctor_proposes_recover_for_a_damaged_or_copied_store(ill: Scheduler) -> None:
    """E01: For a damaged or copied store `doctor` proposes `recover`, which fixes it; `doctor` changes no file."""
    made(ill)
    store = ill.folder / ".gpujob" / "store.db"
    with store.open("r+b") as stream:
        stream.write(b"\xff" * 200)
    before = trace(ill.folder)
    found = doctor(ill, code=1)
    assert trace(ill.folder) == before
    assert found["store"][0]["mend"] == "gpujob recover" and marks(found, "leftovers") == {"unknown"}
    mend(ill, found["store"][0])
    assert marks(doctor(ill), "store") == {"ok"} and ill.states() == {1: "done"}
    shutil.copytree(ill.folder / ".gpujob", ill.folder / "copy" / ".gpujob")
    (ill.folder / "copy").chmod(0o700)
    words = ("--state-file", str(ill.folder / "copy" / "gpu_scheduler_state.json"))
    found = doctor(ill, *words, code=1)
    assert "only if the original is no longer used" in found["store"][0]["wrong"]
    assert not [one for ones in found.values() for one in ones if "gpujob start" in str(one["mend"])], "it is refused"
    assert "a copy?" in found["store"][0]["wrong"] and found["store"][0]["mend"] == f"gpujob recover {' '.join(words)}"
    mend(ill, found["store"][0])
    assert marks(doctor(ill, *words), "store") == {"ok"}


def test_doctor_names_config_mistakes_and_runs_all_checks(ill: Scheduler) -> None:
    """`doctor` reports each mistake in the config with its line number, and still runs all other checks."""
    config = ill.folder / "config.yaml"
    config.write_text("mem_threshold: 8\ngpuz: 2\n")
    config.chmod(0o600)
    found = doctor(ill, code=1)
    editor = '"${EDITOR:-vi}" +%d ' + str(config)
    assert [one["mend"] for one in found["config"]] == [editor % 1, editor % 2]
    assert set(found) >= ALWAYS
    program(ill, "vi", "cat >/dev/null; printf 'mem_threshold: 0.8\\n' >config.yaml")
    mend(ill, found["config"][0])
    assert marks(doctor(ill), "config") == {"ok"}
    config.write_text("state_file: x: y\n")
    found = doctor(ill, code=1)
    assert marks(found, "config") == {"bad"} and set(found) >= ALWAYS
    config.write_text("gpus: 2\n")
    config.chmod(0o666)
    found = doctor(ill, code=1)["config"][0]
    assert found["mend"] == f"chmod o-w {config}"
    mend(ill, found)
    assert marks(doctor(ill), "config") == {"ok"}


# -- the machine ------------------------------------------------------------------------------------------


def test_s10_doctor_warns_of_a_setuid_screen_before_5_0_1(ill: Scheduler) -> None:
    """S10: A setuid screen older than 5.0.1 is bad, also behind a link; the proposed command removes the setuid bit."""
    (ill.folder / "config.yaml").write_text("screen: true\n")
    for version, setuid, mark in (("4.09.00", 0, "ok"), ("5.0.0", 1, "bad"), ("5.0.1", 1, "ok"), ("4.09.00", 1, "bad")):
        real = program(ill, "screen-real", f"echo 'Screen version {version} (GNU) 30-Jan-22'")
        link = real.with_name("screen")
        link.unlink(missing_ok=True)
        link.symlink_to(real)
        real.chmod(0o755 | setuid * stat.S_ISUID)
        programs = Programs(ill.environ, "root", 30)
        found = screen.judge(screen.look(programs, True), DoctorUser(0, "root"))
        programs.close()
        assert found.mark.value == mark, found
    ill_one = doctor(ill, code=1)["screen"][0]
    assert "CVE-2025-23395" in ill_one["wrong"]
    mend(ill, {"mend": ill_one["mend"].removeprefix("sudo ")})
    assert not real.stat().st_mode & stat.S_ISUID and doctor(ill)["screen"][0]["mark"] == "ok"
    (ill.folder / "only").mkdir()
    ill.environ["PATH"] = str(ill.folder / "only")
    found_none = doctor(ill, code=1)["screen"][0]
    assert found_none["seen"] == "not in PATH" and "screen: true" in found_none["wrong"]


def test_h11_doctor_warns_if_logout_ends_the_processes_of_the_user(ill: Scheduler) -> None:
    """H11: `doctor` warns if the login manager ends processes at logout, unless this user is exempt."""
    place, _ = logout.place_of(Path("/proc/self/cgroup").read_text())
    of_a_login = place in (logout.Place.HIDDEN, logout.Place.SESSION)
    me = pwd.getpwuid(os.getuid()).pw_name
    program(ill, "systemctl", "echo KillMode=control-group")
    for kills, exempt in (("yes", "nobody"), ("yes", f"adam {me}"), ("no", "")):
        told = f"echo KillUserProcesses={kills}; echo KillExcludeUsers={exempt}; echo KillOnlyUsers="
        program(ill, "loginctl", f"case $1 in show-session) {told};; *) echo Linger=no;; esac")
        found = doctor(ill)["logout"][0]
        if kills == "yes" and me not in exempt:
            assert found["mark"] in ("warn", "bad"), found
            assert not of_a_login or "systemd-run --user --scope gpujob start --detach" in found["mend"]
        elif of_a_login:
            assert found["mark"] == "ok" and found["seen"].startswith(f"KillUserProcesses={kills}"), found


def test_doctor_kills_programs_that_hang(machine: Callable[..., Machine]) -> None:
    """If screen, the login manager or the driver never answers, `doctor` kills the program that it waits for.

    Only the finding about this program is affected.
    """
    m = machine(gpus=None).cards("GPU-a")
    for name in ("screen", "loginctl"):
        program(m.s, name, "echo $$ >>hangs; exec sleep 1000")
    m.driver.hang("nvmlInitWithFlags")
    m.smi.hang()
    found = doctor(m.s, code=1)
    assert marks(found, "screen") == {"unknown"} and marks(found, "NVML") == {"bad"}
    assert "no answer within" in found["NVML"][0]["seen"] and found["NVML"][0]["mend"].endswith("reboot")
    assert marks(found, "GPUtil") == {"ok"}
    for pid in map(int, (m.s.folder / "hangs").read_text().split()):
        wait_for(lambda pid=pid: not alive(pid), "ended")


def test_doctor_finds_gpu_memory_that_no_living_process_owns(machine: Callable[..., Machine]) -> None:
    """`doctor` gives the mark `bad` to GPU memory that no living process owns, and to a lost GPU.

    Memory of a living process is not reported as a problem.
    """
    m = machine(gpus=None).cards("GPU-a", "GPU-b", "GPU-c")
    m.s.environ["PATH"] = os.environ["PATH"]  # without an nvidia-smi
    dead = subprocess.Popen(["true"])
    dead.wait()
    m.use("GPU-a", m.foreign_process(), 30_000)
    found = doctor(m.s)
    assert (
        found["NVML"][0]["seen"] == "answers, 3 GPUs"
        and marks(found, "GPU") == {"ok"}
        and "0-2: " in found["GPU"][0]["seen"]
    )
    m.use("GPU-b", dead.pid, 20_000)
    m.driver.gpu("GPU-c", total=TOTAL, used=IDLE + 10_000)
    found = doctor(m.s, code=1)
    assert f"the driver still counts memory of ended processes: pid {dead.pid}" in found["GPU 1"][0]["wrong"]
    assert "no process owns" in found["GPU 2"][0]["wrong"]
    # The proposed `nvidia-smi --gpu-reset` would free the memory.
    program(m.s, "nvidia-smi", 'echo "$@" >>resets')
    for name in ("GPU 1", "GPU 2"):
        mend(m.s, {"mend": found[name][0]["mend"].removeprefix("sudo ")})
    assert (m.s.folder / "resets").read_text() == "--gpu-reset -i 1\n--gpu-reset -i 2\n"
    m.unuse("GPU-b", dead.pid)
    m.driver.gpu("GPU-c", used=IDLE)
    assert marks(doctor(m.s), "GPU") == {"ok"}
    m.driver.error("*", 15, "GPU-c")
    assert marks(doctor(m.s, code=1), "GPU 2") == {"bad"}


def test_doctor_warns_of_missing_nvml_and_of_a_library_unlike_the_driver(machine: Callable[..., Machine]) -> None:
    """If NVML is missing, `doctor` warns, and memory whose owner is not known gets the mark `unknown`.

    If the version of the library does not match the driver, `doctor` proposes `modprobe`.
    """
    m = machine(gpus=None).only_smi("GPU-a")
    found = doctor(m.s)
    assert marks(found, "NVML") == {"warn"} and "gpujob reads nvidia-smi instead" in found["NVML"][0]["wrong"]
    m.smi.gpu("GPU-a", used=40_000)
    assert marks(doctor(m.s), "GPU 0") == {"unknown"}
    m = machine(gpus=None).cards("GPU-a")
    m.driver.error("nvmlInitWithFlags", 18)
    found = doctor(m.s, code=1)["NVML"][0]
    assert "version mismatch" in found["wrong"] and "modprobe nvidia" in found["mend"]


@ROOT_ONLY
@pytest.mark.parametrize("most", [1, 3])
def test_p3_doctor_works_without_threads_or_processes(
    users: tuple[User, User], place: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: If `ulimit -u` allows no thread and no program, each check still has a finding, and one names the limit."""
    monkeypatch.setattr(check_runner, "IN_TURN_S", 60.0)  # no check may be interrupted: `doctor` is a fork of this test
    code, said = users[0].limited(place, [(resource.RLIMIT_NPROC, (most, 4))], "doctor", "--json")
    assert code == 1, said
    found: Findings = {}
    for one in json.loads(said)["findings"]:
        found.setdefault(one["check"], []).append(one)
    assert set(found) >= ALWAYS | {"processes"}
    (one,) = found["processes"]
    assert one["mark"] == "bad" and f"{most} processes and threads at most (ulimit -u)" in one["seen"], one
    assert one["mend"] == "ulimit -u 4" and marks(found, "NVML") == {"unknown"}
    assert marks(found, "store") == marks(found, "leftovers") == {"ok"}


def test_p3_a_hanging_check_without_a_thread_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: If no thread can be started, a hanging check is interrupted after a time limit, and the next check runs."""

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def hangs() -> list[Finding]:
        for _ in range(2):
            with contextlib.suppress(OSError):
                select.select([], [], [])
        return []

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(check_runner, "IN_TURN_S", 0.5)
    before = signal.getsignal(signal.SIGALRM)
    hung, fine = (
        check_runner.Running("a", "whether", hangs),
        check_runner.Running("b", "whether", lambda: [good("b", "well")]),
    )
    now = time.monotonic()
    assert [one.seen for run in (hung, fine) for one in run.result(now)] == ["unknown: whether", "well"]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_doctor_warns_if_no_inotify_instance_is_free(ill: Scheduler) -> None:
    """`doctor` warns if no inotify instance is free, and the proposed command raises the limit.

    The test changes the limit only in a new user namespace.
    """
    (ill.folder / "look").write_text(
        f"echo 0 >/proc/sys/user/max_inotify_instances || exit 99\ncd {ill.folder}\n"
        f"{sys.executable} -m scheduler doctor --json >one\n"
        f"$({sys.executable} -c \"import json; print(*[f['mend'] for f in json.load(open('one'))['findings'] if "
        "f['check'] == 'inotify'])\") >mended\n"
        f"{sys.executable} -m scheduler doctor --json >two\n"
    )
    inside = ["unshare", "-U", "--map-root-user", "sh", str(ill.folder / "look")]
    done = subprocess.run(inside, env=ill.environ, capture_output=True, text=True, timeout=90)
    if not (ill.folder / "one").exists():
        pytest.skip(f"no user namespace to be had: {done.stderr}")
    one, two = (
        next(f for f in json.loads((ill.folder / name).read_text())["findings"] if f["check"] == "inotify")
        for name in ("one", "two")
    )
    assert one["mark"] == "warn" and one["mend"] == "sysctl -w user.max_inotify_instances=1024"
    assert (ill.folder / "mended").read_text() == "user.max_inotify_instances = 1024\n", done.stderr
    assert two["mark"] in ("ok", "warn") and "no inotify instance is left" not in str(two["wrong"])


# -- disks ------------------------------------------------------------------------------------------------

STATFS = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>
int statfs(const char *path, struct statfs *buf) {
    int code = syscall(SYS_statfs, path, buf);
    const char *told = getenv("STATFS_TYPE");
    if (!code && told) buf->f_type = strtol(told, 0, 0);
    return code;
}
"""


@pytest.fixture(scope="module")
def statfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library for LD_PRELOAD whose statfs() reports the file system type given in STATFS_TYPE."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        text = "no C compiler; as root run: apt-get install -y gcc libc6-dev"
        pytest.fail(text) if os.environ.get("CI") == "true" else pytest.skip(text)
    folder = tmp_path_factory.mktemp("statfs")
    (folder / "statfs.c").write_text(STATFS)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "statfs.so", folder / "statfs.c"], check=True, timeout=120
    )
    return folder / "statfs.so"


def test_e16_a_store_on_nfs_is_warned_of_once(ill: Scheduler, statfs: Path) -> None:
    """E16: If the store is on NFS, the scheduler works, and `doctor` warns.

    The main log says once that the scheduler may be used from one machine only. The test simulates NFS with a fake
    statfs().
    """
    ill.environ |= {"LD_PRELOAD": str(statfs), "STATFS_TYPE": "0x6969"}
    ill.append(ill.line("a"))
    ill.start()
    ill.wait_ended(1)
    log = (ill.folder / "gpu_scheduler.log").read_text()
    assert (
        log.count(
            f"{ill.folder}/.gpujob is on NFS, which other machines may share: use this scheduler only from this machine"
        )
        == 1
    )
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "doctor", "--json"], cwd=ill.folder, env=ill.environ, capture_output=True, text=True,
        timeout=90,
    )  # fmt: skip
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}["state folder"]
    assert found["mark"] == "warn" and "NFS" in found["seen"] and found["mend"] == f"gpujob wait; kill {ill.pid}"
    mend(ill, found)
    assert ill.process is not None and ill.process.wait(20) == 0


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Return a folder on a tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="gj", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_doctor_proposes_to_move_a_state_folder_from_a_tmpfs(
    scheduler: Callable[..., Scheduler], in_memory: Path, tmp_path: Path
) -> None:
    """If the state folder is on a tmpfs, `doctor` warns and proposes a command that moves the folder to a disk.

    After the move, the scheduler works with the moved folder, and no job runs again.
    """
    s = scheduler(gpus=1, folder=in_memory)
    program(s, "gpujob", f'exec {sys.executable} -m scheduler "$@"')
    made(s)
    found = doctor(s)["state folder"][0]
    assert found["mark"] == "warn" and "tmpfs" in found["seen"]
    place = re.search(r"mkdir -m 700 (\S+) && ", found["mend"])
    assert place and place[1].startswith("/var/tmp/gpujob-")
    mend(s, {"mend": found["mend"].replace(place[1], str(tmp_path / "kept"))})
    words = ("--state-file", str(tmp_path / "kept" / "gpu_scheduler_state.json"))
    found = doctor(s, *words)
    assert marks(found, "store") == {"ok"} and "tmpfs" not in found["state folder"][0]["seen"]
    s.start(*words, "--jobs-file", str(s.jobs_file), ready=False)
    wait_for(lambda: "scheduler started" in s.said().rpartition("ended by")[2], "it starts there")
    s.append(s.line("b"))
    wait_for(lambda: s.starts("b") == 1, "the next line")
    assert s.starts("a") == 1
    s.stop()


def test_e16_start_refuses_a_file_system_without_locks(ill: Scheduler, tmp_path: Path) -> None:
    """E16: If the file system does not support locks, `start` refuses it and prints one line."""
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    made_up = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "inject=flock:error=ENOLCK",
        *ill.command,
        "start",
        "--gpus",
        "1",
    ]
    done = subprocess.run(made_up, cwd=ill.folder, env=ill.environ, capture_output=True, text=True, timeout=90)
    if "PTRACE" in done.stderr or "strace" in done.stderr:
        pytest.skip(f"no tracing here: {done.stderr[-200:]}")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert (
        "cannot lock the file: its file system has no locks (No locks available)" in done.stderr
        and "--state-file" in done.stderr
    )


def test_doctor_marks_findings_with_coloured_words_on_a_terminal(ill: Scheduler) -> None:
    """On a terminal, the mark of each finding (`ok`, `bad`, …) is a coloured word.

    A proposed command is never wrapped, so that it can be copied.
    """
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 40, 0, 0))
    ill.jobs_file.write_text("")
    ill.jobs_file.chmod(0o666)
    environ = {**ill.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    environ.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-m", "scheduler", "doctor"],
        cwd=ill.folder,
        env=environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    data = b""
    try:
        while piece := os.read(ours, 65536):
            data += piece
    except OSError:
        pass  # EIO: the other end is closed
    os.close(ours)
    assert child.wait(60) == 1
    text = data.decode().replace("\r\n", "\n")
    assert "\x1b[31mbad\x1b[0m" in text and "\x1b[32mok\x1b[0m" in text and f"{ROOT}/" not in text
    assert f"\n         fix: chmod o-w {ill.jobs_file}\n" in text
    for line in text.splitlines():
        assert "fix:" in line or len(re.sub(r"\x1b\[\d+m", "", line)) <= 40, line
