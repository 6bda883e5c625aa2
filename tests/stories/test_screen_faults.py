"""Faults of screen sessions: rows J01 to J12 of the list of faults (docs/acceptance.md)."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.system.atomic_files import _EXCHANGE, _renameat2
from tests.screens import foreign_session, listed
from tests.stories.harness import alive, wait_for
from tests.stories.screen_harness import kill

DETACH = b"\x01d"


def refused(s, **environ: str) -> str:
    """Check that `start --screen` exits with 1, prints one line on stderr, and starts no job; return that line."""
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "start", "--gpus", "1", "--screen"],
        cwd=s.folder, env={**s.environ, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done
    assert s.ledger() == [] and s.states() == {}
    return done.stderr


def test_j01_a_job_waits_while_screen_is_missing(screens):
    """J01: Without screen, `start --screen` is refused.

    If screen disappears later, a job waits until screen is back, and then runs once.
    """
    s = screens(gpus=1, assign_retry_wait="0.2", max_assign_attempts=1000)
    bin_ = s.folder / "bin"
    bin_.mkdir()
    path = f"{bin_}:{s.environ['PATH']}"
    assert "GNU Screen command not found" in refused(s, PATH=str(bin_))
    ours = bin_ / "screen"
    ours.write_text('#!/bin/sh\nexec /usr/bin/env PATH="${PATH#*:}" screen "$@"\n')
    ours.chmod(0o755)
    s.start(PATH=path)
    s.append(s.line("a"))
    s.wait_state(1, "done")
    ours.rename(bin_ / "away")
    s.append(s.line("b", code=6))
    wait_for(lambda: "No such file" in (s.job(2)["reason"] or "") if 2 in s.states() else False, "the reason")
    assert s.states()[2] in ("pending", "starting")
    (bin_ / "away").rename(ours)
    s.wait_ended(2)
    assert s.job(2)["exit_code"] == 6 and s.starts("b") == 1


def test_j02_start_fails_with_an_unusable_socket_folder(screens, tmp_path):
    """J02, P3: With an unusable socket folder, `start` exits with 1 and prints one line with screen's own reason."""
    s = screens(gpus=1)
    os.chmod(s.sockets, 0o755)
    assert "must have mode 700" in refused(s)
    os.chmod(s.sockets, 0o700)
    plain = tmp_path / "plain"
    plain.touch()
    assert "cannot use screen's socket folder" in refused(s, SCREENDIR=str(plain))
    s.start()


def test_j02_a_job_waits_while_the_socket_folder_is_unusable(screens):
    """J02: If the socket folder becomes unusable, a job waits, and its reason is the message of screen.

    The job runs once the folder is usable again.
    """
    s = screens(gpus=1, assign_retry_wait="0.2", max_assign_attempts=1000)
    s.start()
    os.chmod(s.sockets, 0o755)
    s.append(s.line("a", code=3))
    wait_for(lambda: "must have mode 700" in (s.job(1)["reason"] or "") if s.states() else False, "screen's reason")
    assert s.states()[1] in ("pending", "starting") and s.ledger() == []
    os.chmod(s.sockets, 0o700)
    s.wait_ended(1)
    job = s.job(1)
    assert (job["exit_code"], s.starts("a")) == (3, 1)


def test_j02_running_jobs_continue_without_the_socket_folder(screens):
    """J02: If a file replaces the socket folder, running jobs continue; new jobs wait until the folder is back."""
    s = screens(gpus=2, assign_retry_wait="0.2", max_assign_attempts=1000)
    s.hold("a")
    s.append(s.line("a", code=5))
    s.start()
    s.wait_state(1, "running")
    away = s.sockets.with_name(s.sockets.name + "x")
    away.touch()
    exchange = lambda: _renameat2()(str(away), str(s.sockets), _EXCHANGE)  # noqa: E731
    exchange()  # in one step: screen would create a folder that is missing, but it cannot replace a file
    try:
        s.append(s.line("b", code=6))
        wait_for(lambda: 2 in s.states() and "screen" in (s.job(2)["reason"] or ""), "screen's reason")
        s.release("a")
        s.wait_state(1, "failed")
        assert s.job(1)["exit_code"] == 5
    finally:
        exchange()
        away.unlink()
    s.wait_ended(2)
    assert s.job(2)["exit_code"] == 6 and s.starts("b") == 1


def test_j03_leftover_processes_of_a_quit_session_keep_the_gpu(screens):
    """J03: If screen's `quit` ends the session of a job, the job is failed. Its leftover processes keep its GPU.

    This also holds after a restart of the scheduler.
    """
    s = screens(gpus=1)
    s.script_of("work", "setsid sh -c 'echo $$ > left; exec sleep 600' & nohup sleep 601 & echo set; wait")
    s.append("0,work", s.line("next"))
    s.start()
    s.wait_state(1, "running")
    s.wait_log(1, "set")
    left = int(wait_for(lambda: (s.folder / "left").exists() and (s.folder / "left").read_text(), "its pid"))
    s.tell(1, "quit")
    s.wait_state(1, "failed")
    assert s.job(1)["signal"] == signal.SIGHUP and "its screen session was closed while the job ran" in " ".join(
        s.job(1)["notes"]
    )
    assert s.cli("submit", "--cpu", "--wait", "--", "true").returncode == 0
    assert s.states()[2] == "pending" and alive(left)
    s.kill()
    s.start()
    s.cli("submit", "--cpu", "--wait", "--", "true", "again")
    assert s.states()[2] == "pending"  # the GPU stays held after a restart
    kill(left)
    for name in os.listdir("/proc"):
        if name.isdigit() and _mark_of(int(name), s, 1):
            os.kill(int(name), signal.SIGKILL)
    s.wait_state(2, "done")


def _mark_of(pid: int, s, job: int) -> bool:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"GPUJOB_STATE_FILE={s.folder}/gpu_scheduler_state.json".encode() in entries and (
        b"GPUJOB_ID=%d" % job in entries
    )


def test_j04_a_job_whose_screen_process_is_killed_fails_by_sighup(screens):
    """J04: A job whose screen process is killed fails by SIGHUP.

    A job that ignores SIGHUP continues without its terminal, and keeps its GPU until it ends.
    """
    s = screens(gpus=2)
    s.hold("a")
    s.script_of("work", "trap '' HUP; echo set; while [ ! -e go ]; do sleep 0.05; done; exit 0")
    s.append(s.line("a", gpus="0"), "0,work,,,1")
    s.start()
    s.wait_state(1, "running")
    s.wait_log(2, "set")
    wait_for(s.ledger, "a runs")
    kill(s.server(1))
    kill(s.server(2))
    s.wait_state(1, "failed")
    assert s.job(1)["signal"] == signal.SIGHUP
    assert s.states()[2] == "running" and [g["allocated"] for g in s.status()["gpus"]] == [0.0, 1.0]
    (s.folder / "go").touch()
    s.wait_ended(2)
    job = s.job(2)
    assert job["state"] == "failed" and "its screen session was closed while the job ran" in " ".join(job["notes"])
    wait_for(lambda: [g["allocated"] for g in s.status()["gpus"]] == [0.0, 0.0], "both GPUs are free")


def test_j05_a_job_could_not_start_if_screen_exits_with_0_without_a_session(screens):
    """J05: If screen exits with 0 but creates no session, the job does not run, and its outcome is could_not_start."""
    s = screens(gpus=1, max_assign_attempts=2, assign_retry_wait="0.1")
    bin_ = s.folder / "bin"
    bin_.mkdir()
    fake = bin_ / "screen"
    fake.write_text('#!/bin/sh\nPATH="${PATH#*:}"; [ "$1" = -ls ] && exec screen -ls\necho odd terminal; exit 0\n')
    fake.chmod(0o755)
    s.append(s.line("a"))
    s.start(PATH=f"{bin_}:{s.environ['PATH']}")
    s.wait_state(1, "failed")
    job = s.job(1)
    assert job["outcome"] == "could_not_start" and job["exit_code"] is None
    assert "odd terminal" in s.said() + str(job)
    assert s.ledger() == [] and s.sessions() == {}


def test_j06_a_session_name_that_is_in_use_is_extended(screens):
    """J06: If the session name of a job is in use, four characters are added to it; the other session continues."""
    s = screens(gpus=1)
    other = foreign_session(s.environ, "gpujob_0_unknown_1", "sleep", "600")
    foreign_session(s.environ, "gpujob_0_unknown_1_", "sleep", "601")
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    name = s.session(1).partition(".")[2]
    assert name.startswith("gpujob_0_unknown_1_") and len(name) == len("gpujob_0_unknown_1_") + 4
    seat = s.gpujob("attach", "1")
    seat.shows(name)
    assert f"{other}.gpujob_0_unknown_1\t" in listed(s.environ)
    seat.type(DETACH)
    assert seat.ended() == 0
    s.cli("cancel", "1")
    s.wait_state(1, "cancelled")
    wait_for(lambda: name not in s.sessions(), "the end of ours")
    assert s.sessions()["gpujob_0_unknown_1"] == other and len(s.sessions()) == 2


def test_j06_ctrl_c_and_cancel_do_not_affect_sessions_with_a_longer_name(screens):
    """J06: Ctrl-C in the session of job 1 and `cancel` of job 2 have no effect on other jobs.

    The session names of jobs 10 to 12 begin with the session name of job 1.
    """
    s = screens(gpus=1, cpu_slots=20)
    s.script_of("work", "echo set; while [ ! -e go ]; do sleep 0.1; done")
    s.append(*(f"0,work,,{n};gpus=0" for n in range(12)))
    s.start()
    wait_for(lambda: list(s.states().values()).count("running") == 12, "all run")
    seat = s.gpujob("attach", "1")
    seat.shows("gpujob_cpu_unknown_1 ")
    seat.type(b"\x03")
    assert seat.ended() == 0
    s.wait_state(1, "failed")
    s.cli("cancel", "2")
    s.wait_state(2, "cancelled")
    assert all(s.states()[n] == "running" for n in range(3, 13))
    (s.folder / "go").touch()
    s.wait_ended(12)
    assert all(s.states()[n] == "done" for n in range(3, 13))


@pytest.mark.parametrize("mode", ["x" * 200, "a b", "$(touch x)", "-X quit", "../../x", "%n^C", "ä'\\\"", "a.b:c*"])
def test_j07_odd_characters_in_the_mode_give_a_safe_session_name(screens, mode):
    """J07: If the value of `--mode` has odd characters, the session name is still safe.

    The job gets the value unchanged.
    """
    s = screens(gpus=1)
    s.script_of("work", 'printf "%s\\n" "$@" > words; exit 0')
    s.start()
    s.cli("submit", "--gpus", "1", "--", "./work", "--mode", mode)
    s.wait_ended(1)
    assert s.job(1)["state"] == "done"
    name = s.session(1).partition(".")[2]
    assert len(name) <= 80 and name.startswith("gpujob_0_") and name.endswith("_1")
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert (s.folder / "words").read_text() == f"--mode\n{mode}\n"
    assert not (s.folder / "x").exists()


def test_j08_a_dead_session_is_not_listed(screens):
    """J08: `screens` does not list the sessions that `screen -ls` calls dead, and new jobs still start."""
    s = screens(gpus=2)
    s.hold("a")
    s.script_of("work", "trap '' HUP; echo set; while [ ! -e go ]; do sleep 0.05; done; exit 0")
    s.append(s.line("a", gpus="0"), "0,work,,,1")
    s.start()
    s.wait_state(1, "running")
    s.wait_log(2, "set")
    wait_for(s.ledger, "a runs")
    for number in (1, 2):
        kill(s.server(number))
    s.wait_state(1, "failed")
    assert listed(s.environ).count("Dead") == 2
    assert s.cli("screens").stdout == "no job runs in a screen session\n"
    assert s.status()["jobs"] and [j["state"] for j in s.status()["jobs"] if j["id"] == 1] == ["failed"]
    seat = s.gpujob("attach", "2")
    assert seat.ended() == 1
    seat.shows("session")
    (s.folder / "go").touch()
    s.wait_ended(2)
    s.append(s.line("c", gpus="0"))  # a job starts beside dead sessions
    s.wait_state(3, "done")


def test_j09_detaching_resizing_or_closing_a_terminal_stops_no_job(screens):
    """J09: Detaching, resizing or closing the terminal, Ctrl-Z and Ctrl-S do not stop a job.

    Ctrl-C ends only the job in whose session it is typed, and the signal is recorded.
    """
    s = screens(gpus=2)
    s.script_of(
        "work",
        "trap 'echo resized; stty size' WINCH; echo set; while [ -e hold-work ]; do sleep 0.05; done; exit 0",
    )
    s.hold("work")
    s.append("0,work,,1", "0,work,,2")
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    s.wait_log(1, "set")
    name = s.session(1)
    seat = s.sit("screen", "-r", name, rows=30, columns=100)
    seat.shows("leave it running")
    rows = itertools.cycle((40, 41))

    def resized() -> bool:
        seat.resize(next(rows), 132)  # repeated: screen shows the session before it handles resizes
        seat.read()
        return "132" in s.log(1)

    wait_for(resized, "the job is told the new size")
    seat.type(DETACH)
    assert seat.ended() == 0
    seat = s.sit("screen", "-r", name)
    seat.shows("leave it running")
    seat.close()  # as when a window is closed or a connection lost
    wait_for(lambda: "(Attached)" not in listed(s.environ), "nobody is attached")
    assert s.job(1)["state"] == s.job(2)["state"] == "running"
    seat = s.sit("screen", "-r", name)
    seat.shows("leave it running")
    seat.type(b"\x1a\x13")  # Ctrl-Z, Ctrl-S: must not stop the job
    seat.type(b"\x03")
    seat.shows("screen is terminating")
    s.wait_state(1, "failed")
    job = s.job(1)
    assert (job["outcome"], job["signal"], job["notes"]) == ("signal", signal.SIGINT, [])
    assert s.job(2)["state"] == "running"
    s.release("work")
    s.wait_state(2, "done")
    s.wait_no_session()


def test_j11_logs_passes_no_escape_code_of_a_session_log_except_colours(screens):
    """J11: The log is exactly what the job printed; `logs` passes no escape codes to the terminal except colours.

    The job's output contains no code that asks the terminal for an answer, because the log would then contain the
    answer.
    """
    s = screens(gpus=1)
    data = b"\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2J\xc2\x9b2J\xe2\x82\xac\ttab\x00\x0e\x0f\x1bc\x1b_apc\x1b\\end\n"
    (s.folder / "data").write_bytes(data * 200)
    s.script_of("work", "cat data; exit 0")
    s.append("0,work")
    s.start()
    s.wait_state(1, "done")
    s.wait_no_session()
    assert s.raw(1) == data.replace(b"\n", b"\r\n") * 200
    seat = s.gpujob("logs", "1", "-n", "5")
    assert seat.ended() == 0
    seat.shows("end")
    shown = re.sub(rb"\x1b\[[0-9;]*m", b"", seat.text)  # colours are allowed
    assert b"\x1b" not in shown and b"\xc2\x9b" not in shown and b"\x07" not in shown
    assert "€\ttab".encode() in shown and b"\x1b[31mred" in seat.text
    assert "\x1b" not in s.said() and "\x07" not in s.said()
    piped = subprocess.run(
        [sys.executable, "-m", "scheduler", "logs", "--raw", "1"], cwd=s.folder, env=s.environ, capture_output=True
    )
    assert piped.stdout == s.raw(1)


def test_j12_the_screenrc_of_the_user_has_no_effect_on_sessions(screens):
    """J12: Settings of the user's and the system's screenrc have no effect on the sessions of jobs.

    The session ends with its job, logs to the log of the job, and is private.
    """
    s = screens(gpus=1)
    home = s.folder / "home"
    home.mkdir()
    rc = (
        f"zombie kr\ndefzombie kr\nlogfile {home}/stolen\ndeflog on\nshell /bin/false\nmultiuser on\nacladd nobody\n"
        f"sessionname other\nstartup_message on\nescape ^Bb\nscreen -t more /bin/sh -c 'touch {home}/ran'\n"
    )
    (home / ".screenrc").write_text(rc)
    (home / "system").write_text(rc)
    s.script_of("work", "echo mine; while [ -e hold-work ]; do sleep 0.05; done; exit 3")
    s.hold("work")
    s.append("0,work")
    s.start(HOME=str(home), SYSSCREENRC=str(home / "system"), SCREENRC=str(home / "system"))
    s.wait_state(1, "running")
    s.wait_log(1, "mine")
    assert set(s.sessions()) == {"gpujob_0_unknown_1"}
    socket = s.sockets / s.session(1)
    assert socket.stat().st_mode & 0o077 == 0 and "(Multi" not in listed(s.environ)
    s.release("work")
    s.wait_state(1, "failed")
    s.wait_no_session()
    assert s.log(1) == "mine\n" and s.job(1)["exit_code"] == 3
    assert sorted(os.listdir(home)) == [".screenrc", "system"]


def test_session_files_of_a_killed_daemon_are_removed_in_both_modes(screens):
    """In direct and in screen mode, a start removes old files that a killed daemon left for its screen sessions.

    The files contain environments of jobs. A recent file stays, because the session may not have read the file yet.
    """
    s = screens(gpus=1)
    folder = s.folder / ".gpujob" / "sessions"
    for mode in ("--no-screen", "--screen"):
        s.mode = mode
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, age in (("7.1.launch", 1000), ("7.1.said", 1000), ("8.1.launch", 0)):
            path = folder / name
            path.touch(0o600)
            os.utime(path, (path.stat().st_mtime - age,) * 2)
        s.start()
        assert {path.name for path in folder.iterdir()} - {"screenrc"} == {"8.1.launch"}, mode
        s.stop()


@pytest.mark.parametrize("how", ["signal.signal(signal.SIGHUP, signal.SIG_IGN)", "os.setsid()"], ids=["deaf", "away"])
def test_b06_b08_leftover_processes_of_a_killed_job_hold_its_gpu(screens, how):
    """B06, B08, P7: Leftover processes of a killed job hold its GPU, and `status` names them.

    The processes survive the end of the terminal, because they ignore SIGHUP or lead a session of their own.
    """
    s = screens(gpus=1)
    loader = f"import os, signal, time\n{how}\nopen(f'up-{{os.getpid()}}', 'w').close()\ntime.sleep(600)\n"
    (s.folder / "loader.py").write_text(loader)
    (s.folder / "train.py").write_text(
        "import subprocess, sys, time\nfor _ in range(3): subprocess.Popen([sys.executable, 'loader.py'])\ntime.sleep(600)\n"
    )
    s.append("0,train.py,,", s.line("next"))
    s.start()
    loaders = wait_for(lambda: len(f := list(s.folder.glob("up-*"))) == 3 and f, "three loaders")
    pids = [int(path.name[3:]) for path in loaders]
    s.wait_state(1, "running")
    os.kill(s.job_pid(1), signal.SIGKILL)
    s.wait_state(1, "failed")
    assert s.job(1)["signal"] == signal.SIGKILL
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert s.states()[2] == "pending" and all(map(alive, pids))
    text = s.cli("status").stdout
    assert all(str(pid) in text for pid in pids) and "of job 1" in text
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    s.wait_ended(3)
    assert s.starts("next") == 1
