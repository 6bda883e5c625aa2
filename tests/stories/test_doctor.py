"""`gpujob doctor`: says what is wrong and what mends it; each command it proposes is run here where that can be, and helps."""

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
from scheduler.doctor import check_runner, logout, screen
from scheduler.doctor.finding import Finding, Who, good
from scheduler.doctor.programs import Programs
from tests.stories.harness import ROOT, Scheduler, wait_for
from tests.stories.machine import IDLE, TOTAL, Machine, machine
from tests.stories.people import ROOT_ONLY, User
from tests.stories.test_schemas import check

__all__ = ["machine"]
Findings = dict[str, list[dict[str, Any]]]
ALWAYS = {"config", "state folder", "files", "store", "scheduler", "leftovers", "logout", "screen", "inotify", "clock", "NVML", "GPUtil"}  # fmt: skip


def program(s: Scheduler, name: str, text: str) -> Path:
    """A pretended program, first in PATH."""
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
    """A scheduler whose proposals can be run: the command `gpujob` is in PATH."""
    s = scheduler(gpus=2)
    program(s, "gpujob", f'exec {sys.executable} -m scheduler "$@"')
    return s


def doctor(s: Scheduler, *words: str, code: int | None = None) -> Findings:
    """What it finds, by check; its exit code must go with it."""
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
    """Paste the command it proposes."""
    done = subprocess.run(
        ["bash", "-c", finding["mend"]], cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, (finding, done.stdout, done.stderr)


def trace(folder: Path) -> dict[str, tuple[int, int, int]]:
    """All that a write would change."""
    return {
        str(path): ((status := path.lstat()).st_mode, status.st_size, status.st_mtime_ns) for path in folder.rglob("*")
    }


# -- where there is nothing, and where all is well --------------------------------------------------------


@pytest.mark.smoke
def test_doctor_where_no_scheduler_ever_was_looks_and_leaves_nothing(ill: Scheduler) -> None:
    """No state folder, no driver, no jobs file: every check says something, and not a byte is written."""
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


def test_doctor_with_a_scheduler_that_runs_stopped_or_ended(ill: Scheduler) -> None:
    """G04: a stopped one is woken by the command; a killed one with a job is missed, and `start` is what helps."""
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
    wait_for(lambda: not (ill.folder / ".gpujob/daemon.json").exists(), "the end")
    before = trace(ill.folder)
    assert marks(doctor(ill), "store") == {"ok"}
    assert trace(ill.folder) == before, "a store in which nobody works is not even opened with a log"


# -- files ------------------------------------------------------------------------------------------------


def made(s: Scheduler) -> None:
    """A store with a job that has ended, and no daemon."""
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()


def test_doctor_names_files_that_are_not_private_and_what_was_left(ill: Scheduler) -> None:
    """Modes, a jobs file that others could write (C37), leftovers of killed commands: each mend makes its finding go."""
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


def test_doctor_finds_a_house_that_is_a_link_or_no_folder(ill: Scheduler) -> None:
    """What `start` refuses: the mend puts the folder in the link's place and takes it over, and nothing is forgotten."""
    made(ill)
    house, elsewhere = ill.folder / ".gpujob", ill.folder / "other disk"
    house.rename(elsewhere)
    house.symlink_to(elsewhere)
    found = doctor(ill, code=1)
    assert "the state folder is a link, which start refuses" in found["files"][0]["wrong"]
    mend(ill, found["files"][0])
    assert house.is_dir() and not house.is_symlink()
    assert marks(doctor(ill), "files") == {"ok"} and ill.states() == {1: "done"}
    house.rename(elsewhere)
    house.write_text("")
    found = doctor(ill, code=1)
    mend(ill, found["files"][0])
    assert marks(doctor(ill), "files") == {"ok"}


def test_doctor_names_processes_that_outlived_their_job(ill: Scheduler) -> None:
    """A job's child that goes on: held while a scheduler runs, a leftover when none does; killed by the command."""
    script = ill.folder / "forks.sh"
    script.write_text("#!/bin/sh\nsetsid sleep 1000 >/dev/null 2>&1 &\necho $! >left; exit 0\n")
    script.chmod(0o755)
    ill.append(f"0,{script},,")
    ill.start()
    wait_for(lambda: ill.rows("SELECT 1 FROM jobs WHERE finished_at IS NOT NULL"), "its end")
    pid = int((ill.folder / "left").read_text())
    assert "its GPUs stay allocated" in doctor(ill)["leftovers"][0]["wrong"] and marks(doctor(ill), "leftovers") == {
        "warn"
    }
    ill.kill()
    found = doctor(ill, code=1)["leftovers"][0]
    assert found["mend"] == f"kill {pid}" and "sleep 1000" in found["seen"] and "job 1" in found["wrong"]
    mend(ill, found)
    wait_for(lambda: marks(doctor(ill), "leftovers") == {"ok"}, "gone")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_doctor_as_another_user_and_with_files_of_root(ill: Scheduler) -> None:
    """H17: files of another owner are named; and whoever may not look is told so, never that all is well."""
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
    ill.freeze()  # or it might be what writes
    # Everything is imported before the user changes: the interpreter may stand where that one cannot look.
    script = (
        "import os, sys, json, ctypes, importlib\n"
        "for n in ('doctor.checks', 'cli.doctor'): importlib.import_module('scheduler.' + n)\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"  # dumpable, so that it may look at itself in /proc
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
def test_h17_what_root_does_to_another_users_scheduler_is_done_as_that_user(ill: Scheduler) -> None:
    """H17: start, recover and kill by root would end it and then be refused; his own files are his, and stay so."""
    lists = ill.folder.with_name(f"{ill.folder.name}-run")  # root's list of schedulers, which must not be that user's
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


def test_c37_doctor_judges_folders_and_what_is_no_plain_file_as_start_does(ill: Scheduler) -> None:
    """C37: a folder of everybody, without a file in it yet; a folder or FIFO in a file's place is moved away, no device ever."""
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


def test_doctor_of_a_damaged_or_copied_store_names_recover(ill: Scheduler) -> None:
    """E01: nothing is touched by looking; the command rebuilds it. A copied folder is taken over by the same one."""
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
    assert "only if the original is not used any more" in found["store"][0]["wrong"]
    assert not [one for ones in found.values() for one in ones if "gpujob start" in str(one["mend"])], "it is refused"
    assert "a copy?" in found["store"][0]["wrong"] and found["store"][0]["mend"] == f"gpujob recover {' '.join(words)}"
    mend(ill, found["store"][0])
    assert marks(doctor(ill, *words), "store") == {"ok"}


def test_doctor_with_a_broken_config_goes_on(ill: Scheduler) -> None:
    """Every mistake with its line; one that hides which scheduler is meant costs only that."""
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
    """S10: by version and mode bits of the file behind the link; the bit is taken away by the command."""
    (ill.folder / "config.yaml").write_text("screen: true\n")
    for version, setuid, mark in (("4.09.00", 0, "ok"), ("5.0.0", 1, "bad"), ("5.0.1", 1, "ok"), ("4.09.00", 1, "bad")):
        real = program(ill, "screen-real", f"echo 'Screen version {version} (GNU) 30-Jan-22'")
        link = real.with_name("screen")
        link.unlink(missing_ok=True)
        link.symlink_to(real)
        real.chmod(0o755 | setuid * stat.S_ISUID)
        programs = Programs(ill.environ, "root", 30)
        found = screen.judge(screen.look(programs, True), Who(0, "root"))
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


def test_h11_doctor_says_that_logging_out_ends_jobs(ill: Scheduler) -> None:
    """H11: as the login manager says it, and for whom; in whatever of systemd's places this test itself runs."""
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


def test_doctor_does_not_wait_for_what_hangs(machine: Callable[..., Machine]) -> None:
    """A screen, a login manager and a driver that never answer: three lines, and nothing of it is left."""
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
        wait_for(
            lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(),
            "ended",
        )


def test_doctor_finds_ghost_memory(machine: Callable[..., Machine]) -> None:
    """Memory that nobody owns, and that of a process which is dead; what lives is no ghost, and a lost card is named."""
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
    # nvidia-smi --gpu-reset takes it back
    program(m.s, "nvidia-smi", 'echo "$@" >>resets')
    for name in ("GPU 1", "GPU 2"):
        mend(m.s, {"mend": found[name][0]["mend"].removeprefix("sudo ")})
    assert (m.s.folder / "resets").read_text() == "--gpu-reset -i 1\n--gpu-reset -i 2\n"
    m.unuse("GPU-b", dead.pid)
    m.driver.gpu("GPU-c", used=IDLE)
    assert marks(doctor(m.s), "GPU") == {"ok"}
    m.driver.error("*", 15, "GPU-c")
    assert marks(doctor(m.s, code=1), "GPU 2") == {"bad"}


def test_doctor_without_nvml_or_with_an_old_library(machine: Callable[..., Machine]) -> None:
    """Through nvidia-smi nothing is told of processes; a library that does not fit its driver takes a new module."""
    m = machine(gpus=None).only_smi("GPU-a")
    found = doctor(m.s)
    assert marks(found, "NVML") == {"warn"} and "nvidia-smi is read instead" in found["NVML"][0]["wrong"]
    m.smi.gpu("GPU-a", used=40_000)
    assert marks(doctor(m.s), "GPU 0") == {"unknown"}
    m = machine(gpus=None).cards("GPU-a")
    m.driver.error("nvmlInitWithFlags", 18)
    found = doctor(m.s, code=1)["NVML"][0]
    assert "version mismatch" in found["wrong"] and "modprobe nvidia" in found["mend"]


@ROOT_ONLY
@pytest.mark.parametrize("most", [1, 3])
def test_p3_doctor_where_no_process_can_be_made(users: tuple[User, User], place: Path, most: int) -> None:
    """P3: `ulimit -u 1`: no thread, no program, no reader of the driver; every check answers, and the limit is named."""
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


def test_p3_what_hangs_in_a_check_without_a_thread_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: in turn, each for a limited time, whatever the check makes of it."""

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def hangs() -> list[Finding]:
        for _ in range(2):
            with contextlib.suppress(OSError):
                select.select([], [], [])
        return []

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(check_runner, "IN_TURN_S", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    hung, fine = (
        check_runner.Running("a", "whether", hangs),
        check_runner.Running("b", "whether", lambda: [good("b", "well")]),
    )
    now = time.monotonic()
    assert [one.seen for run in (hung, fine) for one in run.result(now)] == ["unknown: whether", "well"]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_doctor_where_no_inotify_instance_is_left(ill: Scheduler) -> None:
    """By a user namespace of its own, whose limit is the one that is raised."""
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
    """A library that tells another file system than there is."""
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


def test_e16_a_store_on_nfs_is_said_once_at_the_start_and_by_doctor(ill: Scheduler, statfs: Path) -> None:
    """E16: fake statfs. It works, from this machine; the log says what not to do, once."""
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
    """A folder on a tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="gj", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_doctor_moves_a_state_that_is_kept_in_memory(
    scheduler: Callable[..., Scheduler], in_memory: Path, tmp_path: Path
) -> None:
    """A tmpfs: the command takes store and state file to a disk, where they are whole and nothing runs again."""
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


def test_e16_no_lock_no_start(ill: Scheduler, tmp_path: Path) -> None:
    """E16: a file system without flock is refused in one line, and nothing is started."""
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


def test_doctor_on_a_terminal_marks_by_word_and_colour(ill: Scheduler) -> None:
    """Never by colour alone; the command to copy is not broken over lines, whatever the width."""
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
