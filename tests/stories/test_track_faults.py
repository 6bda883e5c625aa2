"""`gpujob track` after faults: killed trackers, lost connections, reboots, signals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stories.harness import alive, wait_for
from tests.stories.tracking import Tracked, gated

# Ignores INT, TERM, HUP and QUIT, and starts three processes: one in its own session (near), one in another session
# (far), and one in another session without the marks of the command (bare).
STUBBORN = (
    "trap '' INT TERM HUP QUIT; (setsid sleep 301 & echo $! > far); (env -i setsid sleep 302 & echo $! > bare); "
    "sleep 303 & echo $! > near; touch begun.s; while :; do sleep 304; done"
)


def pids(folder: Path) -> list[int]:
    """Return the pids of the processes that STUBBORN started in the background."""
    return [int((folder / name).read_text()) for name in ("far", "bare", "near")]


def end(found: list[int]) -> None:
    """Send SIGKILL to these pids; ignore pids of processes that have ended."""
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def killed(one: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a tracker, wait for its end and reap it."""
    one.kill()
    one.wait()


@pytest.mark.smoke
def test_s0_7_a_command_continues_after_its_tracker_is_killed(tracked: Tracked) -> None:
    """S0.7: If the tracker is killed, its command is shown as running until the command ends.

    Then the exit code and the output of the command are shown.
    """
    tracked.begin()
    one = tracked.popen("run", gated("a", 7))
    tracked.exists("begun.a")
    tracked.wait_status(1, "running")
    killed(one)
    running = tracked.command(1)
    assert (running["status"], running["exit_code"], running["last_output"]) == ("running", None, ["begun a"])
    pid = tracked.stored()["commands"][0]["process"]["pid"]
    assert f"pid {pid}; its tracker was killed, but the command continues" in tracked.run("status", code=0).stdout
    assert alive(pid)
    assert tracked.lines("retry") == ["No interrupted commands."], "nobody starts it a second time"
    assert tracked.lines("remaining")[0].startswith("► [1] running: ")
    tracked.go("a")
    ended = tracked.wait_status(1, "interrupted")
    assert (ended["exit_code"], ended["last_output"]) == (7, ["begun a", "over"])
    # The start time comes from the attempt record. Until the supervisor has written the record, `status` shows the time
    # of its first check.
    assert ended["started_at"] <= running["started_at"] and ended["finished_at"] >= ended["started_at"]


def test_s0_7_run_all_adopts_the_command_of_a_killed_run_all(tracked: Tracked) -> None:
    """S0.7: `run-all` adopts the running command of a killed `run-all`.

    It prints the new output of the command and counts the result of the command.
    """
    tracked.begin("true", gated("a"), "echo three")
    one = tracked.popen("run-all")
    tracked.exists("begun.a")
    tracked.wait_status(2, "running")
    killed(one)
    again = tracked.popen("run-all")
    assert again.stdout is not None
    assert again.stdout.readline().startswith("Running [2]: ")
    wait_for(lambda: tracked.stored()["commands"][1]["tracker"]["pid"] == again.pid, "it is in its hand")
    tracked.go("a")
    out, _ = again.communicate(timeout=60)
    assert out.splitlines() == [
        "over", "✓ [2] done (exit=0)", "Running [3]: echo three", "three", "✓ [3] done (exit=0)",
        "Finished: 2 ran, 0 skipped, 0 failed",
    ]  # fmt: skip
    assert again.returncode == 0 and tracked.statuses() == ["done"] * 3
    wait_for(lambda: not tracked.supervisors(), "the end of the supervisors")


def test_s0_7_an_adopted_command_that_fails_stops_run_all_and_ctrl_c_ends_it(tracked: Tracked) -> None:
    """S0.7, S0.8: An adopted command is treated like any other: its failure stops `run-all`, and Ctrl-C ends it."""
    tracked.begin(gated("a", 3), gated("b"), "true")
    for key, number in (("a", 1), ("b", 2)):
        one = tracked.popen("run-all")
        tracked.exists(f"begun.{key}")
        tracked.wait_status(number, "running")
        killed(one)
        again = tracked.popen("run-all")
        wait_for(
            lambda n=number, a=again: (tracked.stored()["commands"][n - 1]["tracker"] or {}).get("pid") == a.pid,
            "in hand",
        )
        if key == "a":
            tracked.go("a")
            assert again.wait(60) == 1 and tracked.statuses() == ["interrupted", "pending", "pending"]
        else:
            again.send_signal(signal.SIGINT)
            assert again.wait(60) == 130 and tracked.statuses() == ["interrupted", "interrupted", "pending"]
    assert not tracked.marked()


def test_s0_7_a_command_killed_with_tracker_and_supervisor_is_interrupted(tracked: Tracked) -> None:
    """S0.7: A command that is killed together with its tracker and supervisor is shown as interrupted.

    `status`, `remaining`, `next`, `retry` and `run-all` treat it like any other interrupted command.
    """
    tracked.begin(gated("a"), "echo two", "echo three")
    one = tracked.popen("run-all")
    tracked.exists("begun.a")
    tracked.wait_status(1, "running")
    killed(one)
    end(tracked.supervisors())
    wait_for(lambda: not tracked.supervisors(), "no supervisor")
    assert tracked.command(1)["status"] == "running"
    end(tracked.marked())
    wait_for(lambda: not tracked.marked(), "nothing lives")
    lost = tracked.command(1)
    assert (lost["status"], lost["exit_code"], lost["last_output"]) == ("interrupted", None, ["begun a"])
    status = tracked.run("status", code=0).stdout
    unknown = "its supervisor was killed before it recorded the exit code"
    assert "interrupted (signal=9)" in status or unknown in status, "whether pid 1 has reaped it is chance"
    assert tracked.lines("remaining")[0].startswith("✗ [1] interrupted")
    assert tracked.lines("next", "--run")[-1] == "✓ [2] done (exit=0)"
    tracked.go("a")
    assert tracked.lines("retry")[-1] == "✓ [1] done (exit=0)"
    assert tracked.stored()["commands"][0]["attempt"] == 2
    tracked.run("run-all", code=0)
    assert tracked.statuses() == ["done"] * 3


def test_s0_7_a_command_counts_as_running_while_one_of_its_processes_lives(tracked: Tracked) -> None:
    """S0.7: A command counts as running while a process that it started lives, even if its shell was killed."""
    tracked.begin()
    one = tracked.popen("run", "(sleep 305; true) & echo $! > child; touch begun.a; wait")
    tracked.exists("begun.a")
    leader = tracked.pid_of(1)
    killed(one)
    end(tracked.supervisors())
    wait_for(lambda: not tracked.supervisors(), "no supervisor")
    child = int((tracked.folder / "child").read_text())
    os.kill(leader, signal.SIGKILL)
    wait_for(lambda: not alive(leader), "the shell is dead")
    assert alive(child) and tracked.command(1)["status"] == "running"
    again = tracked.popen("run-all")
    wait_for(lambda: (tracked.stored()["commands"][0]["tracker"] or {}).get("pid") == again.pid, "waited for")
    end(tracked.marked())
    assert again.wait(60) == 1
    assert tracked.command(1)["status"] == "interrupted"


def test_s0_7_a_command_started_before_a_reboot_counts_as_ended(tracked: Tracked) -> None:
    """S0.7: A command started before a reboot counts as ended, even if its pid exists; a recorded exit code is kept."""
    tracked.begin("echo two")
    one = tracked.popen("run", gated("a"))
    tracked.exists("begun.a")
    tracked.pid_of(2)
    tracked.freeze(one)  # the tracker must not replace the changed files
    path, boot = tracked.files[0], Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    other = "0" * 8 + boot[8:]
    record = path.with_suffix("") / "2.1"
    before = path.read_text(), record.read_bytes()
    path.write_text(before[0].replace(boot, other))
    record.write_bytes(before[1].replace(boot.encode(), other.encode()))
    found = tracked.command(2)
    assert (found["status"], found["exit_code"], found["last_output"]) == ("interrupted", None, ["begun a"])
    assert "the machine or pod in which it ran was restarted or is gone" in tracked.run("status", code=0).stdout
    assert tracked.run("skip", code=0).stdout.startswith("⊘ [2] skipped: ")
    assert tracked.lines("run-all")[-1] == "Finished: 1 ran, 0 skipped, 0 failed"
    path.write_text(before[0])
    record.write_bytes(before[1])
    killed(one)
    tracked.go("a")
    assert tracked.wait_status(2, "done")["exit_code"] == 0
    path.write_text(before[0].replace(boot, other))
    record.write_bytes(record.read_bytes().replace(boot.encode(), other.encode()))
    assert tracked.command(2)["exit_code"] == 0, "its record tells how it ended, in whatever boot"


def test_s0_7_a_claimed_command_that_never_started_is_pending_again(tracked: Tracked) -> None:
    """S0.7: If the tracker is killed between claim and start, the command is pending again, and runs once."""
    tracked.begin("echo ran >> ledger")
    one = tracked.popen("run-all", environ={"GPUJOB_CRASH_AT": "state.renamed"})
    assert one.wait(60) == -signal.SIGKILL
    assert tracked.stored()["commands"][0]["state"] == "starting"
    wait_for(lambda: tracked.statuses() == ["pending"], "it waits again")
    assert tracked.lines("run-all")[-1] == "Finished: 1 ran, 0 skipped, 0 failed"
    assert (tracked.folder / "ledger").read_text() == "ran\n"


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_s0_7_a_tracker_killed_at_a_session_write_runs_no_command_twice(tracked: Tracked, passes: int) -> None:
    """S0.7: If the tracker is killed while it writes the session file, the command runs at most once.

    If the command ran, its exit code is shown. ``passes``: number of the write at which the tracker is killed. Write 1
    records the claim of the command, write 2 its start, and write 3 its end.
    """
    tracked.begin("echo ran >> ledger; exit 6")
    one = tracked.popen("run-all", environ={"GPUJOB_CRASH_AT": f"state.tmp_written:{passes}"})
    assert one.wait(60) == -signal.SIGKILL
    if passes == 1:
        assert tracked.statuses() == ["pending"] and not (tracked.folder / "ledger").exists()
        return
    assert tracked.wait_status(1, "interrupted")["exit_code"] == 6
    assert (tracked.folder / "ledger").read_text() == "ran\n"
    tracked.run("retry", code=1)
    house = tracked.folder / ".gpu-tracker"
    assert not [path for path in house.iterdir() if path.name.startswith(".")], "what was half-written is gone"


@pytest.mark.parametrize(
    "point, code", [("supervisor.spawned", 6), ("supervisor.before_record", 6), ("supervisor.before_claim", None)]
)
def test_s0_7_the_tracker_replaces_a_killed_supervisor(tracked: Tracked, point: str, code: int | None) -> None:
    """S0.7: If the supervisor of a command is killed, the tracker itself reads the exit code of the command.

    If the command had not been started, the tracker reports this.
    """
    tracked.begin()
    done = tracked.popen("run", "echo ran >> ledger; exit 6", environ={"GPUJOB_CRASH_AT": point})
    assert done.wait(60) == 1
    found = tracked.command(1)
    assert (found["status"], found["exit_code"]) == ("interrupted", code)
    if code is None:
        assert "could not be started: its supervisor ended" in tracked.run("status", code=0).stdout
        assert not (tracked.folder / "ledger").exists()
    else:
        assert (tracked.folder / "ledger").read_text() == "ran\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_s0_8_a_signal_ends_all_processes_of_a_command(tracked: Tracked, number: signal.Signals) -> None:
    """S0.8: The command gets the tracker's signal immediately. Processes that ignore the signal are killed within 5 s.

    The test allows 10 s. The command is recorded as interrupted, and the later commands do not run.
    """
    tracked.begin("true", STUBBORN, "touch never")
    one = tracked.popen("run-all")
    tracked.exists("begun.s")
    tracked.wait_status(2, "running")
    one.send_signal(number)
    wait_for(lambda: not [pid for pid in pids(tracked.folder) if alive(pid)], "the end of the whole tree", 10)
    wait_for(lambda: tracked.stored()["commands"][1]["status"] == "interrupted", "the record of it", 10)
    out, err = one.communicate(timeout=10)
    assert one.returncode == 128 + number
    assert not tracked.marked()
    assert out.splitlines()[-2:] == ["✗ [2] interrupted (signal=9)", "Finished: 2 ran, 0 skipped, 1 failed"]
    assert f"interrupted by {number.name}" in err
    assert tracked.statuses() == ["done", "interrupted", "pending"]
    found = tracked.command(2)
    assert found["duration_seconds"] is not None and found["exit_code"] is None
    wait_for(lambda: not tracked.supervisors(), "the end of the supervisors")
    assert not (tracked.folder / "never").exists()


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM"), (signal.SIGHUP, "HUP")])
def test_s0_8_the_command_gets_the_trackers_signal(tracked: Tracked, number: signal.Signals, name: str) -> None:
    """S0.8: The command gets the tracker's signal and may clean up; it counts as interrupted whatever its exit code."""
    tracked.begin()
    text = f"trap 'echo tidied; exit 0' {name}; touch begun.t; while :; do sleep 0.05; done"
    one = tracked.popen("run", text)
    tracked.exists("begun.t")
    tracked.wait_status(1, "running")
    one.send_signal(number)
    assert one.wait(60) == 128 + number
    found = tracked.command(1)
    assert (found["status"], found["exit_code"]) == ("interrupted", 0) and found["last_output"][-1] == "tidied"


def test_s0_8_a_second_ctrl_c_kills_the_command_immediately(tracked: Tracked) -> None:
    """S0.8: A second Ctrl-C kills the command immediately."""
    tracked.begin()
    text = "trap 'touch told' INT; touch begun.t; while :; do sleep 0.05; done"
    one = tracked.popen("run", text)
    tracked.exists("begun.t")
    tracked.wait_status(1, "running")
    one.send_signal(signal.SIGINT)
    tracked.exists("told")
    one.send_signal(signal.SIGINT)
    assert one.wait(60) == 130
    assert not tracked.marked() and tracked.command(1)["status"] == "interrupted"


class Terminal:
    """A pseudo-terminal whose session leader is a tracker, as in an `ssh` session."""

    def __init__(self, tracked: Tracked, *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(tracked.folder)
            os.execve(sys.executable, [sys.executable, "-m", "scheduler", "track", *words], tracked.environ)

    def close(self) -> None:
        """Close the terminal, as when the connection is lost."""
        os.close(self.fd)
        self.fd = -1

    def ended(self) -> int:
        """Wait for the tracker's end; return its exit code, or the negative number of the signal that killed it."""
        return os.waitstatus_to_exitcode(wait_for(lambda: self._waited(), "the tracker's end"))

    def _waited(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return status + (1 << 20) if pid else None


def test_s0_8_a_closed_terminal_ends_all_processes_of_a_command(tracked: Tracked) -> None:
    """S0.8: Without `--keep`, a closed terminal ends the command with all its processes."""
    tracked.begin(STUBBORN, "touch never")
    terminal = Terminal(tracked, "run-all")
    tracked.exists("begun.s")
    tracked.wait_status(1, "running")
    terminal.close()
    found = tracked.wait_status(1, "interrupted")
    wait_for(lambda: not alive(terminal.pid), "the tracker has ended")
    os.waitpid(terminal.pid, 0)
    assert not [pid for pid in pids(tracked.folder) if alive(pid)] and not tracked.marked()
    assert found["duration_seconds"] is not None and tracked.statuses() == ["interrupted", "pending"]
    assert not (tracked.folder / "never").exists()


def test_s0_8_with_keep_commands_continue_after_the_terminal_is_closed(tracked: Tracked) -> None:
    """S0.8: With `--keep`, the running command continues after the terminal was closed.

    The later commands of `run-all` run, too.
    """
    tracked.begin(gated("a"), "seq 1 3000", "echo three >> ledger")
    terminal = Terminal(tracked, "run-all", "--keep")
    tracked.exists("begun.a")
    tracked.wait_status(1, "running")
    terminal.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(terminal.pid, signal.SIGHUP)
    assert tracked.command(1)["status"] == "running"
    tracked.go("a")
    tracked.wait_status(3, "done")
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and tracked.statuses() == ["done"] * 3
    assert (tracked.folder / "ledger").read_text() == "three\n"


def test_s0_8_a_closed_stdout_counts_as_a_lost_connection(tracked: Tracked) -> None:
    """S0.8: A stdout without a reader counts as a lost connection; with `--keep` the command continues."""
    text = "touch begun.{0}; while [ ! -e go.{0} ]; do echo line; sleep 0.05; done; exit 3"
    tracked.begin()
    one = tracked.popen("run", text.format("a"))
    two = tracked.popen("run", "--keep", text.format("b"))
    for key, each in (("a", one), ("b", two)):
        tracked.exists(f"begun.{key}")
        assert each.stdout is not None
        each.stdout.close()
    assert one.wait(60) == 128 + signal.SIGHUP
    tracked.go("b")
    assert two.wait(60) == 1
    codes = {c["cmd"][12]: (c["status"], c["exit_code"]) for c in tracked.json()["commands"]}
    assert codes["b"] == ("interrupted", 3) and codes["a"][0] == "interrupted" and codes["a"][1] is None


def test_s0_8_nohup_is_respected(tracked: Tracked) -> None:
    """S0.8: If SIGHUP is ignored when the tracker starts, as under nohup, the tracker ignores SIGHUP, too."""
    tracked.begin()
    one = tracked.popen("run", gated("a"), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    tracked.exists("begun.a")
    tracked.wait_status(1, "running")
    one.send_signal(signal.SIGHUP)
    tracked.go("a")
    assert one.wait(60) == 0


def test_s0_10_an_ending_replaces_a_wrong_state_lost(tracked: Tracked) -> None:
    """S0.10: The tracker records the end of a command even if the session file already calls the command lost."""
    tracked.begin()
    one = tracked.popen("run", gated("a", 5))
    tracked.exists("begun.a")
    tracked.wait_status(1, "running")
    path = tracked.files[0]
    values = json.loads(path.read_text())
    values["commands"][0].update(state="failed", status="interrupted", tracker=None, reason="lost")
    path.write_text(json.dumps(values))
    tracked.go("a")
    assert one.wait(60) == 1
    assert (tracked.command(1)["status"], tracked.command(1)["exit_code"]) == ("interrupted", 5)


def test_s0_7_status_works_with_an_unwritable_session_file(tracked: Tracked) -> None:
    """S0.7: `status` shows the true state even if the session file cannot be written, and saves it later."""
    tracked.begin()
    one = tracked.popen("run", gated("a", 4))
    tracked.exists("begun.a")
    wait_for(lambda: tracked.stored()["commands"][0]["state"] == "running", "it is written down as running")
    killed(one)
    tracked.go("a")
    wait_for(lambda: not tracked.supervisors(), "it has ended")
    aside = tracked.files[0].parent / f".{tracked.files[0].name}.new-1"
    aside.mkdir()  # has the name of the temporary file: the tracker cannot write
    assert tracked.command(1)["exit_code"] == 4 and tracked.stored()["commands"][0]["state"] == "running"
    aside.rmdir()
    assert tracked.command(1)["exit_code"] == 4 and tracked.stored()["commands"][0]["state"] == "failed"


def test_s0_7_an_unreaped_zombie_is_not_running(tracked: Tracked) -> None:
    """S0.7: A command that has ended and is a zombie, because process 1 does not reap it, counts as ended.

    Its exit code is read from the kernel.
    """
    tracked.begin()
    # A subreaper that never reaps its children, like process 1 of some containers.
    parent = (
        "import ctypes, os, subprocess, sys, time\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "subprocess.Popen([sys.executable, '-m', 'scheduler', 'track', 'run', sys.argv[1]])\n"
        "while not os.path.exists('done'): time.sleep(0.05)\n"
    )
    host = subprocess.Popen(
        [sys.executable, "-c", parent, gated("a", 9)], cwd=tracked.folder, env=tracked.environ, stdout=subprocess.DEVNULL
    )  # fmt: skip
    try:
        tracked.exists("begun.a")
        tracked.wait_status(1, "running")
        wait_for(lambda: tracked.stored()["commands"][0]["process"], "the tracker has recorded the process")
        stored = tracked.stored()["commands"][0]
        os.kill(stored["tracker"]["pid"], signal.SIGKILL)
        end(tracked.supervisors())
        assert tracked.command(1)["status"] == "running"
        tracked.go("a")
        wait_for(lambda: not alive(stored["process"]["pid"]), "it has ended")
        assert Path(f"/proc/{stored['process']['pid']}").exists(), "nobody has reaped it"
        assert (tracked.command(1)["status"], tracked.command(1)["exit_code"]) == ("interrupted", 9)
    finally:
        (tracked.folder / "done").touch()
        host.wait()


def test_s0_8_a_blocked_stdout_delays_neither_state_nor_signals(tracked: Tracked) -> None:
    """S0.6, S0.8: If nobody reads the tracker's stdout, the tracker still records the state and handles signals."""
    tracked.begin()
    much = "head -c 400000 /dev/zero | tr '\\0' '\\n'; "
    one = tracked.popen("run", much + "echo end")
    assert tracked.wait_status(1, "done")["last_output"][-1] == "end" and one.poll() is None
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 128 + signal.SIGTERM
    two = tracked.popen("run", much + "touch begun.b; while :; do sleep 0.05; done")
    tracked.exists("begun.b")
    tracked.wait_status(2, "running")
    two.send_signal(signal.SIGTERM)
    assert two.wait(60) == 128 + signal.SIGTERM
    assert tracked.statuses() == ["done", "interrupted"] and not tracked.marked()


def test_s0_7_an_ending_that_cannot_be_saved_is_read_from_the_record(tracked: Tracked) -> None:
    """S0.7: If the end of a command cannot be saved, the tracker prints one line and exits with 1.

    The next call reads the exit code from the attempt record.
    """
    tracked.begin()
    one = tracked.popen("run", gated("a", 6))
    tracked.exists("begun.a")
    tracked.wait_status(1, "running")
    aside = tracked.files[0].parent / f".{tracked.files[0].name}.new-1"
    aside.mkdir()
    tracked.go("a")
    _, err = one.communicate(timeout=60)
    assert one.returncode == 1 and err.count("\n") == 1
    assert err.startswith("gpujob: cannot record the end of command 1: Is a directory")
    aside.rmdir()
    assert tracked.command(1)["exit_code"] == 6


def test_s0_8_a_held_session_lock_does_not_delay_signals(tracked: Tracked) -> None:
    """S0.8: Another process that holds the lock of the sessions does not delay signals.

    The command still gets the tracker's signal and, later, SIGKILL.
    """
    tracked.begin()
    one = tracked.popen("run", STUBBORN)
    tracked.exists("begun.s")
    tracked.wait_status(1, "running")
    with (tracked.folder / ".gpu-tracker" / "lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        one.send_signal(signal.SIGTERM)
        wait_for(lambda: not tracked.marked(), "the tree is gone though nothing can be written down")
        assert one.poll() is None
    assert one.wait(60) == 128 + signal.SIGTERM
    assert tracked.command(1)["status"] == "interrupted"


def test_s0_8_an_unkillable_command_is_shown_as_running(tracked: Tracked) -> None:
    """S0.8: If SIGKILL does not end a command, the tracker reports this and ends; the command is shown as running.

    The test simulates this: the command ignores SIGINT, and the tracker stops waiting after 0 s.
    """
    tracked.begin()
    impatient = (
        "import sys; from scheduler.track import run as foreground; foreground.UNKILLABLE_S = 0.0; "
        "from scheduler.command_line import main; sys.exit(main(sys.argv[1:]))"
    )
    text = "trap '' INT; touch begun.i; while [ ! -e go.i ]; do sleep 0.05; done; exit 2"
    one = subprocess.Popen(
        [sys.executable, "-c", impatient, "track", "run", text],
        cwd=tracked.folder, env=tracked.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    tracked.trackers.append(one)
    tracked.exists("begun.i")
    tracked.pid_of(1)
    one.send_signal(signal.SIGINT)
    _, err = one.communicate(timeout=60)
    pid = tracked.stored()["commands"][0]["process"]["pid"]
    assert one.returncode == 1 and f"cannot end command 1 (pid {pid}): it survives SIGKILL" in err
    assert tracked.command(1)["status"] == "running" and alive(pid)
    tracked.go("i")
    ended = tracked.wait_status(1, "interrupted")
    assert ended["exit_code"] == 2 and "interrupted by SIGINT" in tracked.run("status", code=0).stdout


def test_s0_8_the_end_of_a_reader_does_not_count_as_a_second_ctrl_c(tracked: Tracked) -> None:
    """S0.8: In `track run … | tee log` the end of `tee` does not count as a second Ctrl-C; the command may clean up."""
    tracked.begin()
    text = "trap 'echo saving; sleep 0.5; touch saved; exit 5' INT; touch begun.r; while :; do sleep 0.05; done"
    one = tracked.popen("run", text)
    tracked.exists("begun.r")
    tracked.pid_of(1)
    assert one.stdout is not None
    one.stdout.close()
    one.stdout = None
    one.send_signal(signal.SIGINT)
    assert one.wait(60) == 130
    found = tracked.command(1)
    assert (tracked.folder / "saved").exists() and (found["status"], found["exit_code"]) == ("interrupted", 5)
