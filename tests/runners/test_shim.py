"""Tests of the shim. It claims the attempt, runs the job in a screen session, survives signals, and records the end."""

from __future__ import annotations

import ast
import contextlib
import errno
import marshal
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, Process
from scheduler.core.observations import Ended, NeverRan, Started
from scheduler.core.recovery import Record
from scheduler.runners import attempt_record, local_base, screen, supervisor
from scheduler.runners import shim as shim_file
from scheduler.system.proc import boot_id
from scheduler.system.processes import environment_of, lives, seen
from tests.bench import ScreenBench, screen_bench
from tests.screens import Terminal, tell
from tests.stories.harness import alive, wait_for

HUNG_UP = "its screen session was closed while the job ran"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ScreenBench]:
    with screen_bench(tmp_path) as made:
        yield made


def run(bench: ScreenBench, number: int, *argv: str, **more: Any) -> Any:
    """Start a job and return its `Started` observation."""
    bench.start(number, *argv, **more)
    return bench.until(Started, number)


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", program)


def said(bench: ScreenBench, number: int) -> Any:
    """Wait for the end of the job. Return the last line of its log, parsed as a Python literal."""
    return ast.literal_eval(bench.whole(number).strip().splitlines()[-1])


class Alone:
    """A shim that runs without GNU Screen, on a pseudo-terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminal: Terminal | None = None

    def run(self, *argv: str, before: Sequence[str] = (), **changes: Any) -> int:
        """Run the shim with this command until the shim ends; return the exit code of the shim."""
        job = Job(id=1, spec=JobSpec(arguments=argv), need=ResourceRequest(1, 1000), attempt=1)
        launch = {
            "record": str(self.folder / "1.1"), "data": attempt_record.blank(job, boot_id()), "boot": boot_id(), "argv": argv,
            "cwd": str(self.folder), "umask": None, "base": dict(os.environ), "env_file": "", "changes": {},
            "files": 1024, "crash": "", **changes,
        }  # fmt: skip
        handed = self.folder / "launch"
        handed.write_bytes(marshal.dumps(launch))
        environ = {"GPUJOB_LAUNCH": str(handed), "PATH": os.environ["PATH"]}
        self.terminal = Terminal([*before, sys.executable, "-I", "-S", shim_file.__file__], environ)
        code = self.terminal.ended()
        assert not handed.exists()
        return code

    def shown(self) -> str:
        assert self.terminal is not None
        self.terminal.read()
        return self.terminal.text.decode().replace("\r\n", "\n")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path)
    yield made
    if made.terminal is not None:
        made.terminal.close()


# -- claiming, and starts that fail -----------------------------------------------------------------------


def test_the_shim_starts_nothing_if_the_record_exists_already(alone: Alone, tmp_path: Path) -> None:
    """P1: If another process has created the attempt record, the shim starts nothing."""
    (tmp_path / "1.1").write_text("somebody's")
    assert alone.run("/bin/sh", "-c", "touch ran") == 0
    assert not (tmp_path / "ran").exists() and (tmp_path / "1.1").read_text() == "somebody's"


def test_a_shim_without_a_launch_file_does_nothing(tmp_path: Path) -> None:
    """The scheduler removes the launch file to withdraw a start. A shim without a launch file does nothing."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", shim_file.__file__],
        env={"GPUJOB_LAUNCH": str(tmp_path / "gone")},
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("argv", "changes", "stage", "number"),
    [
        (("/no/such",), {}, "program", errno.ENOENT),
        (("plain",), {}, "program", errno.ENOEXEC),
        (("closed",), {}, "program", errno.EACCES),
        (("/bin/true", "a\0b"), {}, "program", errno.EINVAL),
        (("/bin/true",), {"cwd": "gone"}, "folder", errno.ENOENT),
        (("/bin/true",), {"env_file": "/no/such"}, "environment", errno.ENOENT),
    ],
)
def test_a_failed_start_is_recorded_with_stage_and_errno(
    alone: Alone, tmp_path: Path, argv: tuple[str, ...], changes: dict[str, str], stage: str, number: int
) -> None:
    (tmp_path / "plain").write_text("no first line")
    (tmp_path / "plain").chmod(0o755)
    (tmp_path / "closed").write_text("#!/bin/sh\n")
    words = (str(tmp_path / argv[0]), *argv[1:])
    if "cwd" in changes:
        changes = {"cwd": str(tmp_path / changes["cwd"])}
    assert alone.run(*words, **changes) == 1
    found = attempt_record.read(str(tmp_path / "1.1"))
    assert (found.kind, found.how, found.process) == (Record.NEVER_RAN, "never", None)
    assert (supervisor.STAGES[found.code // 1000], found.code % 1000) == (stage, number)
    assert alone.shown() == f"gpujob: cannot start {words[0]}: {os.strerror(number)} ({stage})\n"


def test_shim_and_package_agree_on_the_record_layout() -> None:
    assert (shim_file.END_AT, shim_file.PID_AT) == (attempt_record.END_AT, attempt_record.PID_AT)
    assert (shim_file.END_SIZE, shim_file.PID_SIZE) == (attempt_record.END_SIZE, attempt_record.PID_SIZE)
    assert shim_file.BY_SIGNAL == attempt_record.BY_SIGNAL and supervisor.STAGES == attempt_record.STAGES


def test_the_launch_file_is_private_and_removed(bench: ScreenBench) -> None:
    """The launch file has mode 0600 and is removed, because it contains the whole environment of the job."""
    old = os.umask(0)
    try:
        job, launch = bench.job(1, "/bin/true")
        bench.runner.start(job, launch)
    finally:
        os.umask(old)
    for name in os.listdir(bench.folder / "sessions"):
        with contextlib.suppress(FileNotFoundError):  # the shim removes its launch file after reading it
            assert (bench.folder / "sessions" / name).stat().st_mode & 0o777 == 0o600
    bench.until(Ended)
    assert os.listdir(bench.folder / "sessions") == ["screenrc"]


# -- endings ----------------------------------------------------------------------------------------------


def test_exit_codes_and_signals_are_exact(bench: ScreenBench) -> None:
    codes = (0, 1, 2, 42, 126, 127, 128, 129, 137, 143, 255)
    signals = (1, 6, 9, 11, 15)
    for code in codes:
        bench.start(1 + code, "/bin/sh", "-c", f"exit {code}")
    for number in signals:
        bench.start(1000 + number, *python(f"import os; os.kill(os.getpid(), {number}); input()"))
    for code in codes:
        ended = bench.until(Ended, 1 + code)
        assert (ended.exit_code, ended.signal, ended.note) == (code, None, "")
    for number in signals:
        ended = bench.until(Ended, 1000 + number)
        assert (ended.exit_code, ended.signal, ended.note) == (None, number, "")
        found = attempt_record.read(bench.record(1000 + number))
        assert (found.how, found.code) == ("signal", number)


def test_ctrl_c_ends_only_its_own_job(bench: ScreenBench) -> None:
    """J09 in part: Ctrl-C in a session ends the job of this session by SIGINT. The shim and other jobs continue."""
    first = run(bench, 1, "/bin/sleep", "600")
    second = run(bench, 2, "/bin/sleep", "601")
    tell(bench.environ, first.session, "stuff", "\003")
    ended = bench.until(Ended)
    assert (ended.job, ended.exit_code, ended.signal) == (1, None, signal.SIGINT)
    assert attempt_record.read(bench.record(1)).how == "signal"
    assert lives(second.process)


def test_ctrl_backslash_ends_the_job_by_sigquit(bench: ScreenBench) -> None:
    first = run(bench, 1, "/bin/sleep", "600")
    tell(bench.environ, first.session, "stuff", "\034")
    assert bench.until(Ended).signal == signal.SIGQUIT


def test_a_job_that_catches_ctrl_c_ends_with_its_own_exit_code(bench: ScreenBench) -> None:
    """A job that catches Ctrl-C ends with its own exit code."""
    started = run(bench, 1, "/bin/sh", "-c", "trap 'echo tidy; exit 5' INT; echo set; while :; do sleep 0.05; done")
    bench.wait(lambda: "set" in bench.text(1), "the trap")
    tell(bench.environ, started.session, "stuff", "\003")
    assert bench.until(Ended).exit_code == 5 and "tidy" in bench.whole(1)


def test_ctrl_z_and_ctrl_s_do_not_stop_a_job(bench: ScreenBench) -> None:
    """Ctrl-Z and Ctrl-S are ordinary characters for a job, so a user cannot stop the job by mistake."""
    keys = bench.folder / "keys"
    started = run(
        bench, 1, "/bin/sh", "-c", f"stty -icanon min 1 -echo; echo set; head -c 2 > {keys}; echo still; exit 9"
    )  # fmt: skip
    bench.wait(lambda: "set" in bench.text(1), "ready")
    tell(bench.environ, started.session, "stuff", "\032\023")
    assert bench.until(Ended).exit_code == 9  # both reached the job as ordinary characters
    assert keys.read_bytes() == b"\032\023" and "still" in bench.whole(1)


def test_a_job_stopped_from_the_keyboard_is_continued(bench: ScreenBench) -> None:
    """If a job enables Ctrl-Z and a user stops it with Ctrl-Z, the shim continues it and adds a line to the log."""
    # The shell starts no program here: dash uses vfork, and a stop of the child before its exec would not be reported.
    started = run(bench, 1, "/bin/sh", "-c", "stty susp ^Z; echo set; read line; echo on; exit 3")
    bench.wait(lambda: "set" in bench.text(1), "ready")
    tell(bench.environ, started.session, "stuff", "\032")
    bench.wait(lambda: "the job was stopped from the keyboard and is continued" in bench.text(1), "it is continued")
    tell(bench.environ, started.session, "stuff", "\015")
    assert bench.until(Ended).exit_code == 3
    assert "on" in bench.whole(1)


def test_a_job_stopped_by_sigstop_stays_stopped(bench: ScreenBench) -> None:
    """A job stopped by SIGSTOP stays stopped until SIGCONT."""
    started = run(bench, 1, "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 4")
    os.kill(started.process.pid, signal.SIGSTOP)
    bench.wait(lambda: (now := seen(started.process.pid)) is not None and now.state == "T", "it is stopped")
    (bench.folder / "go").touch()
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        bench.look()
    assert not any(isinstance(observation, Ended) for observation in bench.observations)
    found = seen(started.process.pid)
    assert found is not None and found.state == "T"
    os.kill(started.process.pid, signal.SIGCONT)
    assert bench.until(Ended).exit_code == 4


CATCHES = "import signal,sys,time; signal.signal(1, lambda *_: sys.exit({})); print('set', flush=True); time.sleep(600)"
IGNORES = "import signal,os,sys,time; signal.signal(1, signal.SIG_IGN); print('set', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nsys.exit({})"


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("print('set', flush=True); import time; time.sleep(600)", (None, 1)),
        (CATCHES.format(0), (None, 1)),
        (CATCHES.format(7), (7, None)),
        (IGNORES.format(0), (None, 1)),
        (IGNORES.format(8), (8, None)),
    ],
    ids=["default", "caught-0", "caught-7", "ignored-0", "ignored-8"],
)
@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGKILL], ids=["quit", "TERM", "KILL"])
def test_a_job_whose_session_was_ended_from_outside_has_failed(
    bench: ScreenBench, program: str, how: tuple[int | None, int | None], number: int
) -> None:
    """J03, J04, S3.23: A job whose session was ended from outside has failed, even if it exits with 0."""
    started = run(bench, 1, *python(program))
    bench.wait(lambda: "set" in bench.text(1), "the signal is caught")
    server = int(started.session.partition(".")[0])
    if number:
        os.kill(server, number)
    else:
        tell(bench.environ, started.session, "quit")
    # The server acts on the request later; a job that ends earlier counts as ended normally.
    bench.wait(lambda: not alive(server), "the session has ended")
    (bench.folder / "go").touch()
    ended = bench.until(Ended)
    assert (ended.exit_code, ended.signal) == how
    assert ended.note.startswith(HUNG_UP)
    took_it_well = program in (CATCHES.format(0), IGNORES.format(0))
    assert ended.note == HUNG_UP + (
        "; the command then ended with exit code 0, which is not counted as success" if took_it_well else ""
    )
    assert attempt_record.read(bench.record(1)).how == "hangup"


def test_an_exiting_shim_is_not_a_leftover_process(bench: ScreenBench) -> None:
    """While the shim of a screen session exits, it does not count as a leftover process of a job.

    At this moment it looks like a leftover process: it is a child of the daemon, and its environment is empty.
    """
    shim = subprocess.Popen(["/bin/sleep", "600"], env={}, start_new_session=True)  # without a job's marks
    leader = subprocess.Popen(["/bin/sleep", "600"], env={})
    try:
        found = [seen(child.pid) for child in (shim, leader)]
        session, process = (Process(one.pid, one.ticks) for one in found if one is not None)
        leader.kill()
        leader.wait()
        for job, by in ((1, session), (2, None)):  # job 2 ends while the shim of job 1 exits
            attempt = local_base.WatchedAttempt(job, 1, bench.record(job), process, ours=True, session=by)
            bench.runner._ended(attempt, "exit", 0, time.time())
        assert [observation.leftovers for observation in bench.runner._take_facts()] == [(), ()]
    finally:
        shim.kill()
        shim.wait()


def test_a_leftover_process_is_reported_only_for_its_own_job(bench: ScreenBench) -> None:
    """S3.35: If two jobs end at the same moment, a leftover process is reported only for the job that started it."""
    children = [subprocess.Popen(["/bin/sleep", "600"], env={}) for _ in range(2)]
    orphan_env = {"GPUJOB_ID": "2", "GPUJOB_ATTEMPT": "1", "GPUJOB_STATE_FILE": bench.runner.state_file}
    try:
        (server, leader) = (Process(child.pid, seen(child.pid).ticks) for child in children)  # type: ignore[union-attr]
        children[1].kill()
        children[1].wait()
        children.append(subprocess.Popen(["/bin/sleep", "600"], env=orphan_env))
        wait_for(lambda: environment_of(children[2].pid), "its environment")
        orphan = Process(children[2].pid, seen(children[2].pid).ticks)  # type: ignore[union-attr]
        attempts = [local_base.WatchedAttempt(job, 1, bench.record(job), leader, ours=True) for job in (1, 2)]
        bench.runner._servers[server.pid] = "2.1"
        never = time.monotonic() + 600
        for attempt, its_server in zip(attempts, (leader, server), strict=True):  # the server of job 1 has ended
            bench.runner._endings.append(screen._Ending(attempt, "exit", 0, time.time(), its_server, never))
        bench.runner._look_at_endings()
        bench.runner.watch_leftovers("1.1", 1, 1, [orphan])  # it still belongs to job 2
        children[0].kill()
        children[0].wait()
        bench.runner._look_at_endings()
        told = bench.runner._take_facts()
        assert [(ended.job, ended.leftovers) for ended in told] == [(1, ()), (2, (orphan,))]
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize(("code", "how"), [(6, (6, None)), (0, (None, 1))])
def test_the_runner_reads_the_exit_code_of_a_job_whose_shim_was_killed(
    bench: ScreenBench, code: int, how: tuple[int | None, int | None]
) -> None:
    """If the shim of a job is killed, the runner becomes the parent of the job and reads the job's exit code.

    The session of the job ends with its shim. A job that then exits with 0 may have stopped early, so its end is
    recorded as caused by SIGHUP.
    """
    hold = bench.folder / "hold"
    hold.touch()
    started = run(
        bench, 1, "/bin/sh", "-c", f"trap '' HUP; echo set; while [ -e {hold} ]; do sleep 0.02; done; exit {code}"
    )
    bench.wait(lambda: "set" in bench.text(1), "the trap")
    one = seen(started.process.pid)
    assert one is not None
    os.kill(one.parent, signal.SIGKILL)
    bench.wait(lambda: (now := seen(started.process.pid)) is not None and now.parent == os.getpid(), "adopted")
    hold.unlink()
    ended = bench.until(Ended)
    assert (ended.exit_code, ended.signal) == how and ended.note.startswith(HUNG_UP)


def test_the_exit_code_is_read_even_if_shim_and_job_end_before_the_start_was_seen(bench: ScreenBench) -> None:
    """If the shim and the job end before the runner has observed the start of the job, the exit code is still read."""
    bench.start(1, "/bin/sh", "-c", "trap '' HUP; touch up; while [ ! -e go ]; do sleep 0.02; done; exit 9")

    def leader() -> Any:
        return attempt_record.read(bench.record(1)).process if (bench.folder / "up").exists() else None

    wait_for(leader, "its pid in the record")  # without a call of `look`
    process = leader()
    os.kill(seen(process.pid).parent, signal.SIGKILL)
    wait_for(lambda: seen(process.pid).parent == os.getpid(), "it is ours")
    (bench.folder / "go").touch()
    wait_for(lambda: seen(process.pid).state == "Z", "it has ended")
    started, ended = bench.until(Started), bench.until(Ended)
    assert (started.process, ended.exit_code, ended.signal) == (process, 9, None)
    assert ended.note.startswith(HUNG_UP)


def test_sighup_is_sent_once_to_the_whole_group(bench: ScreenBench) -> None:
    """The end of a session sends one SIGHUP to the job and one to each of its child processes."""
    program = "trap 'echo child >> told; exit' HUP; echo on; while :; do sleep 0.05; done"
    started = run(
        bench, 1, "/bin/sh", "-c",
        f"trap 'echo job >> told' HUP; sh -c \"{program}\" & while [ ! -e go ]; do sleep 0.05; done; exit 3",
    )  # fmt: skip
    bench.wait(lambda: "on" in bench.text(1), "both are set: the job's own before its child's")
    tell(bench.environ, started.session, "quit")
    told = bench.folder / "told"
    bench.wait(lambda: told.exists() and len(told.read_text().split()) >= 2, "both were told")
    (bench.folder / "go").touch()
    assert bench.until(Ended).exit_code == 3
    assert sorted(told.read_text().split()) == ["child", "job"]


def test_a_stopped_job_gets_sighup(bench: ScreenBench) -> None:
    started = run(bench, 1, "/bin/sleep", "600")
    os.kill(started.process.pid, signal.SIGSTOP)
    tell(bench.environ, started.session, "quit")
    ended = bench.until(Ended)
    assert (ended.signal, ended.note) == (signal.SIGHUP, HUNG_UP)


def test_the_log_has_the_unchanged_bytes_of_a_job_except_line_ends(bench: ScreenBench) -> None:
    """The log has the output of the job unchanged, but the terminal adds a carriage return to each line end."""
    data = bytes(range(1, 256)) + b"a\tb\x1b[31mred\x1b[0m\x1b]0;title\x07\n"
    (bench.folder / "data").write_bytes(data)
    run(bench, 1, "/bin/cat", "data")
    bench.whole(1)
    assert bench.raw(1) == data.replace(b"\n", b"\r\n")


def test_b01_signals_do_not_end_the_shim(bench: ScreenBench) -> None:
    hold = bench.folder / "hold"
    hold.touch()
    started = run(bench, 1, "/bin/sh", "-c", f"while [ -e {hold} ]; do sleep 0.02; done; exit 6")
    one = seen(started.process.pid)
    assert one is not None
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGTSTP):
        os.kill(one.parent, number)
    hold.unlink()
    ended = bench.until(Ended)
    assert (ended.exit_code, ended.note) == (6, "")


# -- the surroundings of a job ----------------------------------------------------------------------------


def test_the_shim_leads_the_foreground_group_of_a_terminal(bench: ScreenBench) -> None:
    program = (
        "import os, sys; print((os.getpid(), os.getpgrp(), os.tcgetpgrp(0), os.getsid(0), os.getppid(),"
        " [os.isatty(n) for n in range(3)], tuple(os.get_terminal_size())))"
    )
    started = run(bench, 1, *python(program))
    pid, group, foreground, session, parent, terminals, size = said(bench, 1)
    assert pid == group == foreground == started.process.pid
    assert session == parent  # the shim leads the session
    assert terminals == [True] * 3 and size[0] == 80 and size[1] >= 23


def test_a_job_has_the_signal_handling_that_a_shell_gives(bench: ScreenBench) -> None:
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        run(bench, 1, "/bin/sh", "-c", "grep -E '^Sig(Blk|Ign)' /proc/self/status")
    finally:
        signal.signal(signal.SIGUSR2, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    words = dict("".join(line.split()).split(":") for line in bench.whole(1).strip().splitlines())
    assert int(words["SigBlk"], 16) == 0
    assert int(words["SigIgn"], 16) & 0x7FFFFFFF == 0  # the C library uses signals 32 and 33


def test_a_job_inherits_no_descriptor_of_the_runner_or_screen(bench: ScreenBench) -> None:
    """A job inherits no descriptor of the program `screen`, of the runner or of the runner's parent."""
    leak = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        run(bench, 1, "/bin/sh", "-c", "ls /proc/$$/fd; ulimit -n; ulimit -Hn")  # a pipeline would open descriptors
    finally:
        os.close(leak)
    *descriptors, soft, hard = bench.whole(1).split()
    assert {"0", "1", "2"} <= set(descriptors) <= {"0", "1", "2", "10", "255"}, descriptors  # 10, 255: the shell's
    assert soft == "1024" and hard == subprocess.run(
        ["/bin/sh", "-c", "ulimit -Hn"], capture_output=True, text=True
    ).stdout.strip()  # fmt: skip


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_a_job_gets_the_umask_of_the_runner_or_its_own(bench: ScreenBench, umask: int) -> None:
    old = os.umask(umask)
    try:
        bench.start(1, "/bin/sh", "-c", "umask")
        bench.start(2, "/bin/sh", "-c", "umask", umask=0o027)
    finally:
        os.umask(old)
    bench.until(Ended, 1)
    bench.until(Ended, 2)
    assert (int(bench.whole(1), 8), int(bench.whole(2), 8)) == (umask, 0o027)
    assert (bench.folder / "logs" / "1.1.log").stat().st_mode & 0o777 == 0o600


def test_a_job_gets_the_base_environment_its_changes_and_the_terminal_variables(tmp_path: Path) -> None:
    """A job's environment has the variables of the base environment, of the job, and of its terminal session."""
    foreign = {"STY": "1.other", "WINDOW": "7", "TERMCAP": "junk", "LINES": "9", "COLUMNS": "9", "TERM": "vt52"}
    with screen_bench(tmp_path, **foreign, MINE="a=b\nc", GPUJOB_CRASH_AT="") as bench:
        started = run(bench, 1, *python("import os; print(ascii(dict(os.environ)))"), environment={"OWN": "1"})
        found = said(bench, 1)
        wanted = {k: v for k, v in bench.environ.items() if k not in {*foreign, "GPUJOB_CRASH_AT"}}
        wanted.update(GPUJOB_ID="1", GPUJOB_ATTEMPT="1", GPUJOB_STATE_FILE=str(tmp_path / "state.json"), OWN="1")
        wanted.update(STY=started.session, WINDOW="0", TERM=found["TERM"])
        assert found["TERM"] in ("screen", "screen-256color")
        found.pop("LC_CTYPE", None), wanted.pop("LC_CTYPE", None)  # Python sets it in the C locale
        assert found == wanted


def test_a_job_gets_sysscreenrc_from_the_base_environment(tmp_path: Path) -> None:
    """A job gets the value of SYSSCREENRC from the base environment. Its screen session has another value.

    A job never gets GPUJOB_SESSION, because this variable marks processes that belong to no job.
    """
    with screen_bench(tmp_path, SYSSCREENRC="/theirs", GPUJOB_SESSION="theirs") as bench:
        run(bench, 1, "/bin/sh", "-c", "echo $SYSSCREENRC-$GPUJOB_SESSION")
        assert bench.whole(1) == "/theirs-\n"


def test_a_job_with_a_stored_environment_gets_no_base_variables(bench: ScreenBench) -> None:
    stored = bench.folder / "environment"
    stored.write_bytes(b"PATH=/usr/bin:/bin\0TERM=dumb\0STY=no\0LINES=3\0MINE=1")
    run(bench, 1, *python("import os; print(ascii(dict(os.environ)))"), env_file=str(stored))
    found = said(bench, 1)
    assert found["MINE"] == "1" and found["TERM"].startswith("screen") and "." in found["STY"]
    assert not {"LINES", "HOME", "SCREENDIR", "GPUJOB_LAUNCH"} & set(found)


def test_secrets_of_the_job_are_not_in_the_environment_of_screen(bench: ScreenBench) -> None:
    """A job's variables are not in the environment of the program `screen`. The job gets them from a private file."""
    started = run(bench, 1, "/bin/sleep", "600", environment={"TOKEN": "hush"})
    server = int(started.session.partition(".")[0])
    assert environment_of(server) and b"TOKEN=hush" not in environment_of(server)
    assert b"TOKEN=hush" in environment_of(started.process.pid)


def test_f08_sessions_and_failed_starts_leave_no_descriptor_and_no_file(bench: ScreenBench) -> None:
    """F08 for the runner: 60 sessions and 20 failed starts leave no descriptor and no file."""
    bench.start(1, "/bin/true")
    bench.until(Ended, 1)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2, 62):
        bench.start(number, "/bin/true")
    for number in range(100, 120):
        bench.start(number, "/no/such")
    for number in range(2, 62):
        bench.until(Ended, number)
    for number in range(100, 120):
        bench.until(NeverRan, number)
    bench.wait(lambda: not os.listdir(bench.sockets), "the end of all sessions")
    bench.wait(lambda: not bench.runner._servers, "all servers are reaped")
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(bench.folder / "sessions") == ["screenrc"]


def test_f01_on_a_full_disk_the_shim_removes_the_record_and_starts_nothing(alone: Alone, tmp_path: Path) -> None:
    """F01: If the shim cannot write the record of an attempt, it removes the record and starts nothing.

    The attempt can then be retried.
    """
    assert alone.run("/bin/sh", "-c", "touch ran", before=["prlimit", "--fsize=100"]) == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "1.1").exists()


def test_a_missing_folder_of_a_record_is_created(alone: Alone, tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "1.1"
    assert alone.run("/bin/sh", "-c", "exit 5", record=str(path)) == 0
    assert attempt_record.read(str(path)).code == 5 and path.parent.stat().st_mode & 0o777 == 0o700
