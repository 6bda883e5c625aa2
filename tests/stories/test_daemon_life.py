"""The life of the scheduler process: second instances, stops, moves, upgrades, odd environments, internal errors."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import pty
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler.store.job_columns import COLUMNS
from scheduler.store.migrations import VERSION
from tests.environ import APART
from tests.stories.harness import ROOT, Scheduler, alive, wait_for
from tests.stories.test_hostile import ticks_of

# Forks all starts from one process with the modules loaded, so that they really run at the same time.
AT_ONCE = """
import os, sys
import scheduler.daemon.process, scheduler.cli.app, scheduler.cli.serve, scheduler.store.deletion, filelock
from scheduler import command_line
pids = []
for number in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        with open(f"out-{number}", "wb") as out:
            os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        code = 99
        try:
            code = command_line.main(["start", "--gpus", "1", "--gpu-interval", "0"])
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code)
    pids.append(pid)
left = set(pids)
while len(left) > 1:
    pid, status = os.wait()
    left.discard(pid)
    print(pids.index(pid), os.waitstatus_to_exitcode(status), flush=True)
print("left", *left, flush=True)
sys.stdin.read()
os.kill(*left, 15)
print("then", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_h04_of_fifty_concurrent_starts_one_succeeds(scheduler):
    """H04: Of fifty concurrent starts one succeeds.

    Every other start prints one line with the pid of the successful one, and exits with 1.
    """
    s = scheduler(gpus=1)
    process = subprocess.Popen(
        [sys.executable, "-c", AT_ONCE, "50"], cwd=s.folder, env=s.environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout
    codes = {}
    for line in process.stdout:
        if line.startswith("left"):
            winner = int(line.split()[1])
            break
        number, code = map(int, line.split())
        codes[number] = code
    assert list(codes.values()) == [1] * 49
    for number in codes:
        said = (s.folder / f"out-{number}").read_text()
        # The winner may hold the lock but not write its pid within the second for which the others wait.
        assert said.count("\n") == 1 and re.search(rf"is already running \(pid ({winner}|unknown)\)", said), said
    assert f"is already running (pid {winner})" in s.cli("start", "--gpus", "1", code=1).stderr
    assert s.status()["daemon"]["pid"] == winner
    s.append(s.line("a"))
    s.wait_ended(1)
    rest, _ = process.communicate("", timeout=60)
    assert rest == "then 0\n" and s.starts("a") == 1


def test_h05_removed_lock_files_allow_no_second_daemon(scheduler):
    """H05: If a daemon's lock files are removed, a second start is still refused and commands still find the daemon."""
    s = scheduler(gpus=1)
    s.start()
    for name in ("daemon.lock", "store.lock", "daemon.json"):
        (s.folder / ".gpujob" / name).unlink()
    error = s.cli("start", "--gpus", "1", code=1).stderr
    assert error.count("\n") == 1 and "a scheduler with this state file is already running" in error
    s.cli("pause", "0")
    assert s.status()["daemon"]["alive"] and s.status()["gpus"][0]["state"] == "PAUSED"
    s.cli("resume", "0")
    s.append(s.line("a"))
    s.wait_ended(1)
    assert s.stop() == 0
    s.start()
    assert s.starts("a") == 1


def test_h06_files_of_a_killed_daemon_do_not_block_a_start(scheduler):
    """H06: Files of a killed daemon do not block the next start.

    The files: locks, a daemon.json with a reused pid, the register of schedulers, and half a state file.
    """
    s = scheduler(gpus=1)
    s.start()
    s.kill()
    house = s.folder / ".gpujob"
    told = json.loads((house / "daemon.json").read_text())
    (house / "daemon.json").write_text(json.dumps({**told, "pid": os.getpid()}))
    (s.folder / f".gpu_scheduler_state.json.new-{told['pid']}").write_text('{"paused')
    assert s.status()["daemon"] == {"alive": False, "pid": None, "started_at": None, "runner": None}
    s.start()
    assert s.status()["daemon"]["pid"] == s.pid
    # Exact names: the scheduler itself makes such a file for each version of the state file.
    assert not (s.folder / f".gpu_scheduler_state.json.new-{told['pid']}").exists()


def test_h07_two_schedulers_of_one_machine_warn_of_each_other(scheduler, tmp_path):
    """H07: A scheduler warns of another one that does not share its bookings; the warning has its pid and GPUs."""
    one, two = (scheduler(gpus=2, folder=tmp_path / name, share_bookings=False) for name in ("one", "two"))
    one.start()
    two.start()
    told = f"another scheduler runs on this machine: pid {one.pid} of user"
    assert (
        told in two.said()
        and "GPUs 0,1; it does not share its bookings (share_bookings), so give each scheduler its own" in two.said()
    )
    wait_for(lambda: told in (two.folder / "gpu_scheduler.log").read_text(), "the log, written after the terminal")


def test_h09_a_folder_that_another_machine_made_is_refused(scheduler):
    """H09: `start` refuses a state folder from another machine, and the error names that machine.

    The machines are compared by /etc/machine-id. `start` changes nothing in the attempt records of that folder.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    s.stop()
    other = s.folder / "machine-id"
    other.write_text("0123456789abcdef0123456789abcdef\n")
    if not Path("/etc/machine-id").exists():
        pytest.skip("this machine has no /etc/machine-id: it is told by its host name")
    before = {
        path: path.read_bytes()
        for path in (s.folder / ".gpujob").rglob("*")
        if path.name.startswith(("store.db", "1."))
    }
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount --bind machine-id /etc/machine-id && exec "$@"', "sh", *s.command, "start", "--gpus", "1"],
        cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces: {done.stderr}")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    assert (
        f"it was created on another machine ({socket.gethostname()})" in done.stderr and "gpujob recover" in done.stderr
    )
    assert [s.states()[1], s.starts("a")] == ["running", 1]
    assert all(path.read_bytes() == data for path, data in before.items() if path.name == "1.1")
    s.start()
    s.release("a")
    s.wait_ended(1)
    assert s.job(1)["state"] == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_h10_h13_repeated_stop_signals_give_the_documented_code(scheduler, number):
    """H10, H13: One or many stop signals, at any moment of a start, end the scheduler with the documented exit code.

    Running jobs continue.
    """
    dice = random.Random(13)
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    began = time.monotonic()
    assert s.stop(number) == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
    assert time.monotonic() - began < 15  # 5 s are promised; this machine may be busy
    shown = json.loads((s.folder / "gpu_scheduler_state.json").read_text())
    assert [job["id"] for job in shown["running"]] == [1] and "1 running job continues" in s.said()
    for _ in range(4):
        s.start(ready=False)
        time.sleep(dice.uniform(0.1, 0.8))  # at a random moment of the start
        for _ in range(12):
            s.process.send_signal(number)
            time.sleep(dice.uniform(0, 0.01))
        assert s.process.wait(20) in {signal.SIGTERM: (0, -15), signal.SIGINT: (130, -2)}[number]
        assert not (s.folder / ".gpujob" / "daemon.json").exists() or not s.status()["daemon"]["alive"]
    s.start()
    assert s.job(1)["state"] == "running"
    s.release("a")
    s.wait_ended(1)
    assert (s.job(1)["state"], s.starts("a")) == ("done", 1)
    said = s.said()
    assert "internal error" not in said and (number == signal.SIGINT or "Traceback" not in said), said[-3000:]


# A scheduler that gets SIGTERM in `Interrupt.look`, which checks whether the user has answered a question after Ctrl-C.
STOPPED_MEANWHILE = """
import os, signal, sys
from scheduler.daemon.interrupt import Interrupt
from scheduler import command_line

def look(self, daemon, epoll):
    Interrupt.look = as_it_was
    os.kill(os.getpid(), signal.SIGTERM)
    return as_it_was(self, daemon, epoll)

as_it_was, Interrupt.look = Interrupt.look, look
sys.exit(command_line.main(sys.argv[1:]))
"""


def test_h10_sigterm_during_the_check_after_ctrl_c_ends_the_scheduler(scheduler):
    """H10: After Ctrl-C the scheduler asks a question and checks from time to time whether the user has answered.

    SIGTERM ends the scheduler also during such a check.
    """
    s = scheduler(gpus=1)
    s.command = [sys.executable, "-c", STOPPED_MEANWHILE]
    s.start(ready=False)
    assert s.process.wait(20) == 0, s.said()
    assert "scheduler ended by SIGTERM" in s.said()


STOPPED_WHILE_STARTING = """
import os, signal, sys
from scheduler.daemon import process
from scheduler import command_line

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), int(os.environ["STOP_WITH"]))

def check(db, places):
    Dropped()
    return as_it_was(db, places)

as_it_was, process.check_home = process.check_home, check
sys.exit(command_line.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_h10_a_stop_signal_during_a_del_method_ends_the_start(scheduler, number, code):
    """H10: A stop signal also ends the start if it arrives in a __del__ method, in which Python ignores exceptions."""
    s = scheduler(gpus=1)
    s.command = [sys.executable, "-c", STOPPED_WHILE_STARTING]
    s.start(ready=False, STOP_WITH=str(int(number)))
    assert s.process.wait(20) == code, s.said()
    assert "Traceback" not in s.said() and "scheduler started" not in s.said()


def test_h11_scheduler_and_jobs_continue_when_their_terminal_is_closed(scheduler):
    """H11, P6: A scheduler in the foreground and its jobs continue when its terminal is closed."""
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(s.folder)
        os.execve(sys.executable, [*s.command, "start", "--gpus", "1"], s.environ)
    try:
        s.wait_state(1, "running")
        wait_for(lambda: b"runs on" in os.read(terminal, 4096), "it is shown")
        os.close(terminal)
        s.append(s.line("b"))
        s.release("a")
        s.wait_ended(2)
        assert alive(pid) and s.status()["daemon"]["pid"] == pid
        assert [s.starts("a"), s.starts("b")] == [1, 1]
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    except BaseException:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        raise


def test_h12_the_systemd_unit_stops_only_the_main_process(scheduler):
    """H12: The unit of `gpujob service install` stops only the main process, and does not repeat a failed start."""
    s = scheduler(gpus=1)
    s.environ |= {"HOME": str(s.folder / "home"), "GPUJOB_SET_LOG_DIR": 'a 100 % "b" \\'}
    s.environ.pop("XDG_CONFIG_HOME", None)
    told = s.cli("service", "install", "--", "--gpus", "1").stdout
    path = s.folder / "home" / ".config" / "systemd" / "user" / "gpujob.service"
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    service = unit["Service"]
    assert service["KillMode"] == "process" and service["KillSignal"] == "SIGTERM" and "User" not in service
    assert service["Restart"] == "on-failure" and set(service["RestartPreventExitStatus"].split()) == {"1", "2", "4"}
    assert int(service["TimeoutStopSec"]) >= 5 and unit["Install"]["WantedBy"] == "default.target"
    assert service["ExecStart"].split()[-3:] == ["start", "--gpus", "1"] and service["WorkingDirectory"] == str(
        s.folder
    )
    lines = path.read_text().splitlines()
    assert 'Environment="GPUJOB_SET_LOG_DIR=a 100 %% \\"b\\" \\\\"' in lines and "GPUJOB_BOOKINGS_FOLDER" in told
    assert "Unknown" not in told and "verify" not in told, told
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    assert s.stop() == 0 and alive(supervisor)  # like KillMode=process: only the main process gets the signal


def test_h14_all_jobs_are_adopted_after_kills_at_random_moments(scheduler):
    """H14: After kills at random moments, as by the kernel's OOM killer, the next start adopts all jobs."""
    dice = random.Random(14)
    s = scheduler(gpus=2)
    s.append(*(s.line(f"k{n}", code=n % 3, seconds=round(dice.uniform(0, 0.4), 2)) for n in range(12)))
    for _ in range(4):
        s.start(ready=False)
        time.sleep(dice.uniform(0.1, 0.9))
        s.kill()
    s.start()
    s.wait_ended(12)
    assert [s.starts(f"k{n}") for n in range(12)] == [1] * 12
    assert s.rows("SELECT exit_code FROM jobs ORDER BY id") == [(n % 3,) for n in range(12)]


def test_h15_an_upgrade_keeps_waiting_jobs_and_adopts_running_jobs(scheduler):
    """H15: A start upgrades a store of version 1: it keeps pauses and waiting jobs, and adopts running jobs."""
    s = scheduler(gpus=2)
    s.hold("a")
    s.append(s.line("a", code=5), s.line("b", gpus="1"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "done")
    s.cli("pause", "1")
    s.append(s.line("c", gpus="1"))
    wait_for(lambda: s.states().get(3) == "pending", "c waits")
    s.stop()
    store = sqlite3.connect(s.folder / ".gpujob" / "store.db", isolation_level=None)
    store.executescript(
        "DROP TABLE tallies; DROP TABLE calls; DROP TRIGGER jobs_added; DROP TRIGGER jobs_moved; DROP TRIGGER jobs_removed; DROP TABLE counts;"
        "DROP INDEX jobs_in_hand; DROP INDEX line_counts_repeated; DROP INDEX jobs_queue; DROP INDEX jobs_users;"
        "DROP TABLE readings; DROP TABLE old_logs; DROP TABLE gpu_faults; DROP TABLE seen_runs; DROP TABLE good_runs; DROP TABLE fact_sets; DROP INDEX jobs_dependents; DROP INDEX jobs_ending;"
        + "".join(f"ALTER TABLE jobs DROP COLUMN {column.name};" for column in COLUMNS if column.since > 1)
        + "".join(f"ALTER TABLE gpus DROP COLUMN {name};" for name in ("node", "partition", "links", "profile"))
        + "PRAGMA user_version=1;"
    )
    store.close()
    refused = s.cli("status", code=1).stderr
    assert (
        "cannot read the store: an older gpujob wrote it (version 1); start the scheduler" in refused
        and "damaged" not in refused
    )
    s.start()
    assert s.rows("PRAGMA user_version") == [(VERSION,)] and (s.folder / ".gpujob" / "store.db.v1").exists()
    assert s.job(1)["state"] == "running" and s.job(1)["gpus"] == [0] and s.job(3)["reason_code"] == "paused"
    s.cli("resume", "1")
    s.release("a")
    s.wait_ended(3)
    assert (s.job(1)["exit_code"], [s.starts(k) for k in "abc"]) == (5, [1, 1, 1])


def test_h16_a_downgrade_is_refused_and_changes_nothing(scheduler):
    """H16: With a store of a newer version, start and other verbs exit with 1 and change no byte of it."""
    s = scheduler(gpus=1)
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()
    store = sqlite3.connect(s.folder / ".gpujob" / "store.db", isolation_level=None)
    store.execute(f"PRAGMA user_version={VERSION + 1}")
    store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    data = (s.folder / ".gpujob" / "store.db").read_bytes()
    for words in (
        ["start", "--gpus", "1"],
        ["status"],
        ["submit", "--", "true"],
        ["cancel", "1"],
        ["pause", "0"],
        ["recover"],
    ):
        error = s.cli(*words, code=1).stderr
        assert "cannot use the store: a newer gpujob wrote it" in error and error.splitlines()[-1].startswith(
            "gpujob: "
        ), error
    assert (s.folder / ".gpujob" / "store.db").read_bytes() == data


EMPTY = {
    "PATH": None,
    "HOME": None,
    "XDG_RUNTIME_DIR": None,
    "LANG": None,
    "USER": None,
    "LOGNAME": None,
    "SHELL": None,
    "TERM": None,
}
SURROUNDINGS: dict[str, dict[str, str | None]] = {
    "nothing at all": dict.fromkeys(os.environ.keys() - APART) | EMPTY,
    "empty ones": dict.fromkeys(EMPTY, ""),
    "nonsense": {"PATH": "/nowhere::relative:\x7f", "HOME": "relative/home", "XDG_RUNTIME_DIR": "/dev/null", "TMPDIR": "/nowhere",
                 "LANG": "xx_YY.nope", "LC_ALL": "nope", "PYTHONIOENCODING": "utf-8"},
    "a missing library": {"LD_PRELOAD": "/no/such/library.so", "LD_LIBRARY_PATH": "/nowhere"},
}  # fmt: skip


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_h18_the_scheduler_works_with_odd_or_missing_variables(scheduler, name):
    """H18: The scheduler works if environment variables are missing or have odd values.

    A job whose interpreter is not found waits with the reason code `missing`.
    """
    s = scheduler(gpus=1)
    run = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scheduler.entrypoint import entry; entry()"
    s.command = [sys.executable, "-c", run]
    for variable, value in SURROUNDINGS[name].items():
        s.environ.pop(variable, None)
        if value is not None:
            s.environ[variable] = value
    s.environ.pop("PYTHONPATH", None)
    tool = s.folder / "tool.sh"
    tool.write_text("#!/bin/sh\necho ran; exit 7\n")
    tool.chmod(0o755)
    s.append("0,tool.sh", s.line("a"))
    s.start()
    s.wait_state(1, "failed")
    job = wait_for(
        lambda: (found := _show(s, 2))["state"] in ("done", "pending") and found["reason_code"] != "new" and found,
        "job 2",
    )
    if job["state"] == "pending":
        assert job["reason_code"] == "missing" and "python" in job["reason"], job
    assert _show(s, 1)["exit_code"] == 7 and s.log(1).endswith("ran\n")
    done = subprocess.run(
        [*s.command, "status"], cwd=s.folder, env=s.environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr + s.said()
    assert s.stop() == 0


def _show(s: Scheduler, job: int) -> dict[str, object]:
    done = subprocess.run(
        [*s.command, "show", str(job), "--json"], cwd=s.folder, env=s.environ, capture_output=True, text=True
    )
    assert done.returncode in (0, 6), done.stderr
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"state": "", "reason_code": ""}


def test_s23_the_daemon_imports_no_module_from_its_working_folder(scheduler):
    """S23, H18: The daemon imports no module from its working folder; the supervisor also ignores PYTHONPATH.

    The daemon itself respects PYTHONPATH, which users set on purpose.
    """
    s = scheduler(gpus=1)
    for name in (
        "scheduler",
        "queue",
        "random",
        "typing",
        "yaml",
        "socket",
        "marshal",
        "resource",
        "select",
        "filelock",
    ):
        (s.folder / f"{name}.py").write_text(
            f"open({str(s.folder / 'taken')!r}, 'a').write('{name}\\n')\nraise SystemExit(88)\n"
        )
    theirs = s.folder / "theirs"
    theirs.mkdir()
    note = f"import sys\nopen({str(s.folder / 'taken')!r}, 'a').write(str(sys.orig_argv) + chr(10))\n"
    (theirs / "sitecustomize.py").write_text(note)
    s.append(s.line("a"))
    run = f"import sys; sys.path[:1] = [{str(ROOT)!r}]; from scheduler.entrypoint import entry; entry()"
    environ = {**s.environ, "PYTHONPATH": ""}

    def gpujob(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", run, *words], cwd=s.folder, env=environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done
        return done.stdout

    pid = int(gpujob("start", "--gpus", "1", "--detach", "--gpu-interval", "0").split()[-1])
    try:
        gpujob("submit", "--", "env")
        s.wait_ended(2)
        assert not (s.folder / "taken").exists()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert words[1].endswith(b"scheduler/__main__.py")
        assert not any(
            line.startswith(b"PYTHONPATH=/") for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not alive(pid), "its end")
    s.environ["PYTHONPATH"] = str(theirs)
    s.command = [sys.executable, str(ROOT / "scheduler" / "__main__.py")]
    s.append(s.line("b"))
    s.start()
    s.wait_ended(3)
    supervisor = s.supervisor_pid()
    assert b"-I\0-S\0" in Path(f"/proc/{supervisor}/cmdline").read_bytes()
    taken = (s.folder / "taken").read_text()
    assert "'start'" in taken and "supervisor.py" not in taken, taken


# Starts the scheduler with one of its functions replaced by one that fails.
BROKEN = """
import sys
import scheduler.daemon.loop as loop, scheduler.daemon.process as main, scheduler.views.foreground_output as output
from scheduler.runners.direct import DirectRunner
from scheduler.entrypoint import entry
left, passing = {times}, {after}
real = {target}
def broken(*words, **named):
    global left, passing
    passing -= 1
    if left and passing < 0:
        left -= 1
        raise RuntimeError("planted")
    return real(*words, **named)
{target} = broken
entry()
"""


def broken(s: Scheduler, target: str, times: int, after: int = 0) -> Scheduler:
    """Make the function ``target`` fail in the scheduler ``s``; return ``s``.

    The function succeeds ``after`` times, then raises RuntimeError ``times`` times, and then succeeds again.
    """
    s.command = [sys.executable, "-c", BROKEN.format(target=target, times=times, after=after)]
    return s


@pytest.mark.parametrize(
    "target",
    [
        "loop.decide",
        "DirectRunner.look",
        "loop.Daemon._look_at_files",
        "loop.StateWriter.paint",
        "output.ForegroundOutput._take",
    ],
)
@pytest.mark.waits
def test_h19_an_internal_error_in_one_part_is_logged_and_the_scheduler_continues(scheduler, target):
    """H19: An unexpected error in a part of the scheduler is logged, and the scheduler and its jobs continue.

    The parts: decisions, runner, reading of files, state file, output.
    """
    s = broken(scheduler(gpus=1), target, 3, after=2 if target == "loop.decide" else 0)
    s.append(s.line("a"), s.line("b", code=4))
    s.start(ready=False)
    s.wait_ended(2)
    s.command = [sys.executable, "-m", "scheduler"]
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert [s.starts(k) for k in "ab"] == [1, 1] and s.job(2)["exit_code"] == 4
    said = s.said()
    assert 1 <= said.count("internal error of gpujob, please report it: RuntimeError('planted')") <= 3, said
    assert "Traceback (most" not in said.replace("(Traceback (most recent call last): |", "")
    assert s.stop() == 0


def test_h19_a_lasting_error_is_logged_once_and_uses_little_cpu(scheduler):
    """H19: An internal error that lasts is logged once and causes no busy loop.

    Requests are answered, SIGTERM works, and running jobs continue.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=3))
    s.start()
    s.wait_state(1, "running")
    s.kill()
    broken(s, "loop.Daemon._look_at_files", 1 << 30).start(ready=False)
    wait_for(lambda: "internal error of gpujob" in s.said(), "it is said")
    s.command = [sys.executable, "-m", "scheduler"]
    s.release("a")
    assert s.cli("hold", "1", code=1).stderr.count("\n") == 1  # commands are answered
    before = ticks_of(s.pid)
    time.sleep(1.0)
    assert ticks_of(s.pid) - before < 60 and s.said().count("internal error of gpujob") == 1, s.said()
    assert s.stop() == 0
    s.start()
    s.wait_ended(1)
    assert (s.job(1)["exit_code"], s.starts("a")) == (3, 1)


def test_h19_an_error_outside_the_passes_ends_the_daemon(scheduler):
    """H19: An internal error while the daemon waits for its next pass ends the daemon with code 1 and is logged.

    The next start adopts the running job.
    """
    s = broken(scheduler(gpus=1), "loop.Daemon.wait", 1)
    s.hold("a")
    s.append(s.line("a", code=3))
    s.start(ready=False)
    assert s.process.wait(30) == 1
    assert (
        s.said().count("the scheduler ended by an internal error of gpujob, please report it: RuntimeError('planted')")
        == 1
    )
    assert s.said().splitlines()[-1].endswith("running jobs continue; start the scheduler again: gpujob start")
    log = (s.folder / "gpu_scheduler.log").read_text()
    assert " CRITICAL the scheduler ended by an internal error of gpujob" in log
    s.command = [sys.executable, "-m", "scheduler"]
    s.start()
    s.release("a")
    s.wait_ended(1)
    assert (s.job(1)["exit_code"], s.starts("a")) == (3, 1)


def test_h08_a_folder_that_was_moved_runs_no_line_again(scheduler, tmp_path):
    """H08, P1: `start` refuses a state folder that was moved, and the error names the old path.

    When the folder is moved back, the scheduler continues and runs no line again.
    """
    s = scheduler(gpus=1, folder=tmp_path / "one")
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()
    (tmp_path / "one").rename(tmp_path / "two")
    moved = scheduler(gpus=1, folder=tmp_path / "two")
    error = moved.cli("start", "--gpus", "1", code=1).stderr
    assert (
        str(tmp_path / "one") in error and "gpujob recover" in error and error.splitlines()[-1].startswith("gpujob: ")
    )
    assert moved.starts("a") == 1
    (tmp_path / "two").rename(tmp_path / "one")
    s.start()
    s.append(s.line("b"))
    s.wait_ended(2)
    assert (s.starts("a"), s.starts("b")) == (1, 1)
