"""Screen mode: processes whose session is gone, and processes that belong to no job.

These cases were found by adversarial testing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.screens import end_marked, need_screen, tell
from tests.stories.harness import alive, wait_for
from tests.stories.screen_harness import ScreenScheduler, kill

DEAF_TO_HANGUP = """\
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
open(sys.argv[1], "w").close()
while os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
BESIDE = """\
echo $$ > "$1.pid.aside"
mv "$1.pid.aside" "$1.pid"
while [ -e "$1" ]; do sleep 0.05; done
"""


@pytest.mark.parametrize("how", ["cancelled", "ended"])
def test_a_job_without_its_screen_process_is_not_stopped_when_another_job_ends(screens, how):
    """A job whose screen process was killed continues.

    When another job ends, the scheduler neither stops the first job nor waits for it.
    """
    s = screens(gpus=2, kill_grace="2")
    place = s.folder / "x.py"
    place.write_text(DEAF_TO_HANGUP)
    hold = s.folder / "hold-x"
    s.start()
    s.hold("y")
    s.append(s.line("y", gpus="0"))
    s.wait_state(1, "running")
    s.append(f"0,{place},,{hold},1")
    s.wait_state(2, "running")
    wait_for(hold.exists, "the second job's first line")
    pid, server = s.job_pid(2), s.server(2)
    kill(server)
    s.cli("cancel", "1") if how == "cancelled" else s.release("y")
    s.wait_state(1, "cancelled" if how == "cancelled" else "done")
    assert alive(pid) and s.states()[2] == "running", s.said()
    # Exiting processes of job 1 (its shell, its shim) may hold GPU 0 briefly; job 2 runs until its file is removed.
    wait_for(lambda: not s.rows("SELECT * FROM holdings"), "GPU 0 held by nobody")
    s.append(s.line("next", gpus="0"))
    s.wait_state(3, "done")
    assert alive(pid) and s.states()[2] == "running", s.said()
    hold.unlink()
    s.wait_state(2, "failed")  # its screen process was killed
    wait_for(lambda: not s.rows("SELECT * FROM holdings"), "GPU 1 given back")


def beside(s: ScreenScheduler, job_id: int, mark: Path) -> int:
    """Start a program in a second window of a job's session. Return the pid of the program.

    Before the function returns, the window has closed and the program has become an orphan.
    """
    mark.touch()
    program = s.folder / "beside.sh"
    program.write_text(BESIDE)
    line = f"setsid nohup sh {program} {mark} >/dev/null 2>&1 & until [ -e {mark}.pid ]; do sleep 0.05; done"
    tell(s.environ, s.session(job_id), "screen", "sh", "-c", line)
    told = Path(f"{mark}.pid")
    wait_for(told.exists, "the user's program")
    pid = int(told.read_text())
    wait_for(lambda: _parent(pid) == s.pid, f"the user's program {pid} as an orphan, is {_parent(pid)}'s")
    return pid


def _parent(pid: int) -> int:
    return int(re.sub(r"^.*\)", "", Path(f"/proc/{pid}/stat").read_text()).split()[1])


@pytest.mark.parametrize("whose", ["its own session's job", "another job"])
def test_a_users_program_from_a_second_window_belongs_to_no_job(screens, whose):
    """A program that a user starts in a second window of a session holds no GPU, delays no job and is not killed."""
    s = screens(gpus=2, kill_grace="1")
    s.start()
    for gpu, key in enumerate("yx"):
        s.hold(key)
        s.append(s.line(key, gpus=str(gpu)))
        s.wait_state(gpu + 1, "running")
    mark = s.folder / "mark"
    pid = beside(s, 2, mark)
    ended = 2 if whose.startswith("its") else 1
    s.cli("cancel", str(ended))
    s.wait_state(ended, "cancelled")
    # The exiting shell and shim of the ended job may hold its GPU briefly; the user's program lives on.
    wait_for(lambda: not s.rows("SELECT * FROM holdings"), "no GPU is held")
    assert alive(pid)
    s.append(s.line("next", gpus=str(ended - 1)))
    s.wait_state(3, "done")
    for key in "yx":
        s.release(key)
    s.wait_ended(3)
    wait_for(lambda: not s.rows("SELECT * FROM holdings"), "no GPU is held")
    assert alive(pid), "it is the user's"
    os.unlink(mark)
    wait_for(lambda: not alive(pid), "the end of the user's program")


# -- paths and options ------------------------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Callable[[int], ScreenScheduler]]:
    """Return a function that creates a scheduler. Its argument is the length in bytes of the socket folder's path."""
    need_screen()
    top = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    made: list[ScreenScheduler] = []

    def make(length: int) -> ScreenScheduler:
        sockets = top / ("s" * (length - len(str(top)) - 1))
        sockets.mkdir(mode=0o700)
        assert len(str(sockets)) == length
        made.append(ScreenScheduler(tmp_path, 1, sockets))
        return made[-1]

    yield make
    for one in made:
        one.end_all()
    end_marked(f"SCREENDIR={top}/")
    shutil.rmtree(top)


def test_start_refuses_a_socket_folder_with_a_too_long_path(deep):
    s = deep(80)
    done = s.cli("start", "--gpus", "1", "--screen", code=1)
    assert done.stderr.count("\n") == 1 and str(s.sockets) in done.stderr
    assert (
        "the path of screen's socket folder is too long" in done.stderr
        and "set SCREENDIR to a folder of yours with a shorter path" in done.stderr
    )


def test_session_names_are_shortened_to_fit_the_socket_path(deep):
    s = deep(64)
    s.start()
    s.hold("a")
    s.append(s.line("a", more="--mode=abcdefghijklmnopqrstuvwxyz", gpus="0"))
    s.wait_state(1, "running")
    (name,) = s.sessions()
    assert name.startswith("gpujob_0_abc") and name.endswith("_1") and s.session(1).endswith(f".{name}")
    assert len(name) < len("gpujob_0_abcdefghijklmnopqrst_1"), "cut"
    s.release("a")
    s.wait_ended(1)
    assert s.states() == {1: "done"}


def test_no_screen_overrides_the_settings_file(screens):
    s = screens(gpus=1)
    s.folder.joinpath("own.yaml").write_text("screen: true\n")
    s.hold("a")
    s.append(s.line("a"))
    s.mode = "--no-screen"
    s.start("--config", "own.yaml")
    s.wait_state(1, "running")
    assert s.sessions() == {} and s.rows("SELECT session, runner FROM jobs") == [(None, "direct")]
    s.release("a")
    s.wait_state(1, "done")


def test_start_detach_obeys_the_option_no_screen(screens):
    s = screens(gpus=1)
    s.folder.joinpath("own.yaml").write_text("screen: true\n")
    pid = int(s.cli("start", "--gpus", "1", "--detach", "--no-screen", "--config", "own.yaml").stdout.split()[-1])
    try:
        s.append(s.line("a"))
        s.wait_state(1, "done")
        assert s.rows("SELECT runner FROM jobs") == [("direct",)]
    finally:
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not s.status()["daemon"]["alive"], "its end")
