"""Screen mode: each job runs in its own screen session. Users can attach to it, and it outlives the scheduler."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.screens import foreign_session, listed
from tests.stories.harness import alive, wait_for
from tests.stories.screen_harness import kill

DETACH = b"\x01d"


@pytest.mark.smoke
def test_s3_21_a_user_can_attach_to_the_session_of_a_job_by_its_name(plain_screens):
    """S3.21: A session is named gpujob_<gpus>_<mode>_<id>, `screen -ls` lists it, `screen -r NAME` attaches to it.

    The job has a terminal with colours, and continues after the user detaches.
    """
    s = plain_screens
    s.script_of(
        "work",
        "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo terminal; echo colours $(tput colors)\n"
        "n=0; while [ -e hold-work ]; do n=$((n+1)); echo turn $n; sleep 0.05; done; exit 0",
    )
    s.hold("work")
    s.append("0,work,,--mode train,0-1;gpus=2")
    s.start()
    s.wait_state(1, "running")
    name = "gpujob_0-1_train_1"
    assert s.session(1).partition(".")[2] == name and s.job(1)["session"] == name
    assert re.search(rf"^\t\d+\.{name}\s.*\(Detached\)", listed(s.environ), re.MULTILINE)
    s.wait_log(1, "turn 2")
    assert s.log(1).startswith("terminal\ncolours ")
    assert int(s.log(1).split("colours ")[1].split()[0]) >= 8
    seat = s.sit("screen", "-r", name)
    seat.shows("turn")
    seat.shows(name)  # screen's status line: session name, and how to detach
    seat.shows("Ctrl-a d")
    assert "(Attached)" in listed(s.environ)
    seat.type(DETACH)
    assert seat.ended() == 0
    now = s.log(1).count("turn")
    wait_for(lambda: s.log(1).count("turn") > now, "it runs on")
    assert s.job(1)["state"] == "running" and "(Detached)" in listed(s.environ)
    s.says(f"gpujob attach 1, or screen -r {name}")
    s.release("work")
    s.wait_state(1, "done")
    wait_for(lambda: name not in s.sessions(), "the end of the session")


def test_j09_earlier_output_of_a_job_is_visible_on_a_terminal_of_24_lines(plain_screens):
    """J09: A line that a job printed before a user attaches is visible on a terminal of 24 lines.

    Screen's status line does not scroll it away. The log contains only what the job printed.
    """
    s = plain_screens
    s.script_of("work", "echo the only line; while [ -e hold-work ]; do sleep 0.05; done; exit 0")
    s.hold("work")
    s.append("0,work")
    s.start()
    s.wait_state(1, "running")
    s.wait_log(1, "the only line")
    seat = s.sit("screen", "-r", s.session(1))
    seat.shows("leave it running")
    seat.shows("the only line")
    assert s.log(1) == "the only line\n"
    seat.type(DETACH)
    assert seat.ended() == 0


@pytest.mark.parametrize(
    ("words", "mode"),
    [("--mode eval", "eval"), ("--mode=a/b:c", "a_b_c"), ("--epochs 3", "unknown"), (f"--mode {'x' * 200}", "x" * 20)],
)
def test_s3_22_the_mode_in_a_session_name_is_safe(screens, words, mode):
    """S3.22: The mode in a session name is at most 20 safe characters long; without `--mode` it is `unknown`."""
    s = screens(gpus=1)
    s.script_of("work", "echo $STY; exit 0")
    s.append(f"0,work,,{words}")
    s.start()
    s.wait_state(1, "done")
    assert s.session(1).partition(".")[2] == f"gpujob_0_{mode}_1"
    s.wait_log(1, f"gpujob_0_{mode}_1")


def test_s3_23_exit_codes_of_jobs_in_sessions_are_exact(screens):
    """S3.23: Exit code and signal are those of the job, not of screen, which exits with 0."""
    s = screens(gpus=4)
    codes = [0, 1, 3, 77, 137, 255, "s9", "s15", "s11", "s1"]
    s.append(*(s.line(f"k{n}", code=code) for n, code in enumerate(codes)))
    s.start()
    s.wait_ended(len(codes))
    for n, code in enumerate(codes, 1):
        job = s.job(n)
        number = int(code[1:]) if isinstance(code, str) else None
        assert (job["exit_code"], job["signal"]) == (None if number else code, number)
        assert job["state"] == ("done" if code == 0 else "failed")
    assert all(s.starts(f"k{n}") == 1 for n in range(len(codes)))
    s.wait_no_session()


@pytest.mark.parametrize("how", ["quit", "kill", "server", "shim"])
@pytest.mark.parametrize("trap", ["exit 0", ""], ids=["caught", "ignored"])
def test_s3_23_a_job_whose_session_is_ended_from_outside_is_failed(screens, how, trap):
    """S3.23, P5: If a user ends the session of a job, the job is failed, even if it then exits with 0.

    The session ends by screen's `quit` or `kill`, or because its screen process or shim is killed. A job that ignores
    SIGHUP continues and keeps its GPU; it is failed when it ends.
    """
    s = screens(gpus=1)
    s.script_of("work", f"trap '{trap}' HUP; echo set; while [ ! -e go ]; do sleep 0.05; done; exit 0")
    s.append("0,work", s.line("next"))
    s.start()
    s.wait_state(1, "running")
    s.wait_log(1, "set")
    server = s.server(1)
    if how in ("quit", "kill"):
        s.tell(1, how)
    else:
        kill(server if how == "server" else s.shim(1))
    if not trap:
        wait_for(lambda: not alive(server), "the session has ended")
        assert s.cli("submit", "--cpu", "--wait", "--", "true").returncode == 0
        assert s.states()[1] == "running" and s.states()[2] == "pending"  # it ignores SIGHUP and keeps its GPU
        (s.folder / "go").touch()
    s.wait_ended(2)
    job = s.job(1)
    assert (job["state"], job["outcome"], job["signal"]) == ("failed", "signal", signal.SIGHUP)
    assert "its screen session was closed while the job ran" in " ".join(job["notes"])
    assert s.job(2)["state"] == "done"
    s.wait_no_session()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.smoke
def test_s3_24_jobs_outlive_the_scheduler_and_are_adopted(screens, number):
    """S3.24: Jobs outlive the scheduler; the next scheduler adopts them, with their GPUs and exit codes.

    No job is started twice.
    """
    s = screens(gpus=2)
    s.hold("a")
    s.hold("b")
    s.append(s.line("a", code=7, gpus="0"), s.line("b", code=0, gpus="1"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    names = s.sessions()
    pids = s.job_pid(1), s.job_pid(2)
    if number == signal.SIGKILL:
        s.kill()
    else:
        assert s.stop(number) == (130 if number == signal.SIGINT else 0)
    assert all(alive(pid) for pid in pids) and s.sessions() == names and len(names) == 2
    s.release("b")  # it ends while no scheduler runs
    wait_for(lambda: not alive(pids[1]), "the end of b")
    s.append(s.line("c", gpus="0"))
    s.start()
    s.wait_state(2, "done")
    assert [g["allocated"] for g in s.status()["gpus"]] == [1.0, 0.0]
    assert s.job(1)["state"] == "running" and s.job(1)["session"] == "gpujob_0_unknown_1"
    assert "gpujob_0_unknown_1" in s.cli("screens").stdout
    s.wait_state(3, "pending")
    s.release("a")
    s.wait_ended(3)
    assert (s.job(1)["exit_code"], s.job(2)["exit_code"]) == (7, 0)
    assert [s.starts(key) for key in "abc"] == [1, 1, 1]
    s.wait_no_session()


def test_s3_23_an_adopted_job_whose_session_is_ended_from_outside_is_failed(screens):
    """S3.23 after a restart: If a user ends the session or the shim of an adopted job, the job is failed.

    The new scheduler is the parent neither of the session nor of the shim nor of the job.
    """
    s = screens(gpus=2)
    s.hold("a")
    s.hold("b")
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    wait_for(lambda: len(s.ledger()) == 2, "both run")
    s.kill()
    s.start()
    s.tell(1, "quit")
    kill(s.shim(2))
    s.wait_ended(2)
    one, two = s.job(1), s.job(2)
    assert (one["state"], one["outcome"], one["signal"]) == ("failed", "signal", signal.SIGHUP)
    assert two["state"] == "failed" and two["outcome"] in ("lost", "signal")


def test_s3_25_start_fails_if_screen_is_not_installed(screens):
    """S3.25, J01: Without screen, `start --screen` exits with 1, names the package to install, and starts no job."""
    s = screens(gpus=1)
    empty = s.folder / "empty"
    empty.mkdir()
    s.append(s.line("a"))
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "start", "--gpus", "1", "--screen"],
        cwd=s.folder, env={**s.environ, "PATH": str(empty)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "GNU Screen command not found" in done.stderr and "apt-get install screen" in done.stderr
    assert s.ledger() == [] and s.sessions() == {}
    s.start()
    s.wait_state(1, "done")
    assert s.starts("a") == 1


def test_s3_39_screens_lists_only_sessions_of_its_own_scheduler(screens, tmp_path):
    """S3.39: `screens` lists only sessions of its own scheduler, each with the command that attaches to the session.

    If there is no session, `screens` exits with 0.
    """
    s = screens(gpus=2, folder=tmp_path / "one")
    said = s.cli("screens")
    assert "no job runs in a screen session" in said.stdout and "no scheduler is running" in said.stdout
    s.start()
    assert s.cli("screens").stdout == "no job runs in a screen session\n"
    other = screens(gpus=2, folder=tmp_path / "two")
    for one in (s, other):
        one.hold("a")
        one.append(one.line("a", more="--mode m"))
    s.wait_state(1, "running")
    other.start()
    other.wait_state(1, "running")
    foreign_session(s.environ, "foreign", "sleep", "600")
    mine, theirs = s.session(1), other.session(1)
    assert mine.endswith(".gpujob_0_m_1") and theirs.partition(".")[2].startswith("gpujob_0_m_1_")
    assert len(s.sessions()) == 3
    for one, its in ((s, mine), (other, theirs)):
        lines = one.cli("screens").stdout.splitlines()
        assert len(lines) == 2 and lines[0].split()[0] == "JOB" and lines[1].endswith(f"screen -r {its}")
        value = json.loads(one.cli("screens", "--json").stdout)
        assert value == {
            "schema": 1,
            "sessions": [
                {"id": 1, "session": its.partition(".")[2], "gpus": [0], "attach": f"screen -r {its}"},
            ],
        }
    # Without SCREENDIR, `screen -r` would look in another folder: the command must name the right one.
    environ = {k: v for k, v in s.environ.items() if k != "SCREENDIR"}
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "screens"], cwd=s.folder, env=environ, capture_output=True, text=True
    )
    assert f"env SCREENDIR={s.sockets} screen -r {mine}" in done.stdout
    s.release("a")
    s.wait_state(1, "done")
    assert s.cli("screens").stdout == "no job runs in a screen session\n"
    assert other.job(1)["state"] == "running"


def test_attach_attaches_to_the_session_of_exactly_this_job(screens):
    """`attach JOB` attaches to the session of exactly this job, even while another terminal is attached to it."""
    s = screens(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    first, second = s.gpujob("attach", "1"), s.gpujob("attach", "@")
    for seat in (first, second):
        seat.shows("gpujob_0_unknown_1")
    for seat in (first, second):
        seat.type(DETACH)
        assert seat.ended() == 0
    assert s.job(1)["state"] == "running"


def test_attach_reports_why_it_cannot_attach(screens):
    """`attach` reports why it cannot attach.

    The reasons: no terminal, no session yet, an ended job, an unknown job, several jobs.
    """
    s = screens(gpus=1)
    s.hold("a")
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_state(1, "running")
    error = s.cli("attach", "1", code=1).stderr
    assert "not a terminal" in error and f"screen -r {s.session(1)}" in error and error.count("\n") == 1
    seat = s.gpujob("attach", "2")
    assert seat.ended() == 1
    seat.shows("cannot attach to job 2: it is pending")
    assert s.cli("attach", "7", code=6).stderr.count("\n") == 1
    assert f"screen -r {s.session(1)}" in s.cli("attach", "1-2", code=1).stderr  # one of them has a session
    s.release("a")
    s.wait_ended(2)
    error = s.cli("attach", "1-2", code=2).stderr
    assert "it names 2 jobs, of which none run in a screen session" in error and error.count("\n") == 1
    assert "cannot attach to job 1: it is done" in s.cli("attach", "1", code=1).stderr


def test_attach_in_direct_mode_exits_with_1_and_names_logs(scheduler):
    """In direct mode, `attach` exits with 1 and names `logs -f`, and `screens` lists nothing."""
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    error = s.cli("attach", "1", code=1).stderr
    assert "without a screen session" in error and "logs -f 1" in error
    assert s.cli("screens").stdout == "no job runs in a screen session\n"


def test_output_of_a_second_window_is_not_in_the_log_of_the_job(screens):
    """If a user opens a second window in the session of a job, the output of this window is not in the log of the job.

    The window keeps the session open after the end of the job. The end of the job is still recorded.
    """
    s = screens(gpus=1)
    s.script_of("work", "echo mine; while [ -e hold-work ]; do sleep 0.05; done; echo after; exit 5")
    s.hold("work")
    s.append("0,work")
    s.start()
    s.wait_state(1, "running")
    s.wait_log(1, "mine")
    s.tell(1, "screen", "-t", "beside", "/bin/sh", "-c", "echo beside; touch seen; exec sleep 600")
    wait_for(lambda: list(s.folder.rglob("seen")), "the second window")
    s.release("work")
    s.wait_state(1, "failed")
    assert s.job(1)["exit_code"] == 5
    s.wait_log(1, "after")
    assert s.log(1) == "mine\nafter\n"
    assert len(s.sessions()) == 1  # the user's window keeps it open


def test_start_detach_runs_jobs_in_screen_sessions(screens):
    """`start --detach --screen` runs jobs in sessions, and the next scheduler adopts them."""
    s = screens(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=4))
    said = s.cli("start", "--gpus", "1", "--detach", "--screen").stdout
    pid = int(re.findall(r"kill (\d+)", said)[0])
    try:
        s.wait_state(1, "running")
        assert s.session(1).endswith(".gpujob_0_unknown_1") and len(s.sessions()) == 1
    finally:
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not alive(pid), "its end")
    s.start()
    s.release("a")
    s.wait_ended(1)
    assert s.job(1)["exit_code"] == 4 and s.starts("a") == 1


def test_each_attempt_of_a_job_has_its_own_session(screens):
    """Each attempt of a job has its own session and log. All session names of a job contain the id of the job."""
    s = screens(gpus=1)
    s.script_of("work", "echo attempt $GPUJOB_ATTEMPT in $STY; [ $GPUJOB_ATTEMPT = 2 ] || exit 3")
    s.append("0,work,,;retries=1", "0,work,,again")
    s.start()
    s.wait_ended(2)
    assert s.job(1)["state"] == "done" and s.job(1)["attempt"] == 2
    s.wait_log(1, "attempt 2 in")
    assert re.fullmatch(r"attempt 2 in \d+\.gpujob_0_unknown_1(_[0-9a-f]{4})?\n", s.log(1))
    s.cli("retry", "2")
    s.wait_state(2, "done")
    assert s.job(2)["attempt"] == 2
    s.wait_no_session()


def test_the_log_of_a_session_is_complete(screens):
    """S3.20: The log contains all of the 5 MB that a job prints just before its end."""
    s = screens(gpus=1)
    s.script_of("loud", "i=0; yes 0123456789abcdefghijklmnopqrstuvwxyz | head -n 140000; echo LAST; exit 3")
    s.append("0,loud")
    s.start()
    s.wait_state(1, "failed")
    s.wait_no_session()
    assert s.raw(1) == b"0123456789abcdefghijklmnopqrstuvwxyz\r\n" * 140000 + b"LAST\r\n"
    assert s.job(1)["exit_code"] == 3
    assert os.stat(s.job(1)["log"]).st_mode & 0o777 == 0o600


def test_a_hundred_concurrent_sessions_have_exact_exit_codes(screens):
    """With a hundred sessions at the same time, all exit codes are right, and no session or file is left over."""
    s = screens(gpus=1, cpu_slots=100)
    gate = s.folder / "gate"
    gate.touch()
    s.script_of("work", "while [ -e gate ]; do sleep 0.2; done; exit $1")
    s.append(*(f"0,work,,{n} --mode m{n};gpus=0" for n in range(100)))
    s.start()
    wait_for(lambda: list(s.states().values()).count("running") == 100, "a hundred run", 120)
    names = s.sessions()
    assert len(names) == 100 and set(names) == {f"gpujob_cpu_m{n}_{n + 1}" for n in range(100)}
    assert len(s.cli("screens").stdout.splitlines()) == 101
    gate.unlink()
    s.wait_ended(100, 120)
    assert s.rows("SELECT exit_code FROM jobs ORDER BY id") == [(n,) for n in range(100)]
    s.wait_no_session()
    assert os.listdir(s.folder / ".gpujob" / "sessions") == ["screenrc"]
    wait_for(lambda: not Path(f"/proc/{s.pid}/task/{s.pid}/children").read_text().split(), "all servers are reaped")


def test_cancel_ends_the_whole_session(screens):
    """`cancel` ends all processes of a job in a session, and the session ends."""
    s = screens(gpus=1)
    s.script_of("work", "setsid sleep 600 & sleep 600 & echo set; wait")
    s.append("0,work", s.line("next"))
    s.start()
    s.wait_state(1, "running")
    s.wait_log(1, "set")
    s.cli("cancel", "1")
    s.wait_ended(2)
    assert s.job(1)["state"] == "cancelled" and s.job(2)["state"] == "done"
    s.wait_no_session()


def test_a_scheduler_inside_a_session_gives_each_job_its_own_session(screens):
    """A scheduler that itself runs in a screen session still gives each job its own session."""
    s = screens(gpus=1)
    s.script_of("work", "echo $STY $WINDOW $TERM; exit 0")
    s.append("0,work")
    s.start(STY="1.other", WINDOW="9", TERM="vt100")
    s.wait_state(1, "done")
    s.wait_log(1, "gpujob_0_unknown_1 0 screen")
