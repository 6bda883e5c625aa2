"""Tests of `own_process`: the command line that runs this program, and its start as a separate process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from scheduler.system.own_process import PROGRAM, own_command, start_own


def test_own_command_writes_options_as_flags_and_names_the_program_file() -> None:
    options = {"gpus": 2, "gpu_interval": 0, "web": True, "screen": False, "state_file": "/a b/s.json"}
    words = own_command("start", options)
    assert words[:3] == [sys.executable, PROGRAM, "start"] and Path(PROGRAM).name == "__main__.py"
    assert words[3:] == ["--gpus", "2", "--gpu-interval", "0", "--web", "--no-screen", "--state-file", "/a b/s.json"]


def test_start_own_runs_a_process_in_its_own_session_and_folder_without_input(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read() == '', file=sys.stderr)"
    here = os.getcwd()
    with (tmp_path / "said").open("wb") as said:
        pid = start_own([sys.executable, "-c", program], os.environ, files={2: said.fileno()}, folder=str(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and os.getcwd() == here
    assert (tmp_path / "said").read_text() == f"{tmp_path.resolve()} True True\n"
