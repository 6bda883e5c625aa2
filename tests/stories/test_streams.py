"""Streams of a job (stdin, stdout, stderr, logs) and actions at its end, as `submit` options and jobs line keys."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import resource
import shlex
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.runners import exec_limited
from tests.stories.harness import Scheduler, alive, wait_for
from tests.stories.people import ROOT_ONLY, User
from tests.stories.test_logs import Talker, viewing

TALK = "#!/bin/sh\necho out; echo err >&2; exit ${1:-0}\n"
# Writes its line in a single write, since several calls may run at the same time.
NOTIFY = '#!/bin/sh\nprintf "%s\\n" "$(printf "%s|" "$#" "$@" "$MINE")" >> "$CALLS"; echo notified\n'


def program(s: Scheduler, name: str, text: str) -> Path:
    path = s.folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def shell(s: Scheduler, *options: str, text: str) -> int:
    """Submit a shell text that needs no GPU, and return the job's id."""
    return int(s.cli("submit", "--cpu", *options, "--", "sh", "-c", text).stdout)


def log_of(s: Scheduler, number: int) -> Path:
    return Path(s.rows("SELECT log FROM jobs WHERE id=?", number)[0][0])


class Foreground:
    """A running `gpujob submit -f`."""

    def __init__(self, s: Scheduler, *words: str, **how: Any) -> None:
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        self.s = s
        self.process = subprocess.Popen(
            [*s.command, "submit", "-f", *words], cwd=s.folder, env=s.environ, start_new_session=True, **how
        )

    def ended(self) -> tuple[int, str, str]:
        """Wait until the command has ended, and return its exit code, stdout and stderr."""
        out, error = self.process.communicate(timeout=60)
        assert b"Traceback" not in (error or b""), error
        return self.process.returncode, (out or b"").decode(), (error or b"").decode()


@pytest.fixture
def foreground() -> Iterator[Callable[..., Foreground]]:
    """Return a function that starts foreground submissions.

    At the end of the test, kill the submissions that still run.
    """
    made: list[Foreground] = []

    def make(s: Scheduler, *words: str, **how: Any) -> Foreground:
        made.append(Foreground(s, *words, **how))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()


# -- logs ------------------------------------------------------------------------------


def test_s4_13_s4_14_s4_15_s4_16_log_options_act_alike_in_submit_and_jobs_lines(scheduler):
    """S4.13, S4.14, S4.15, S4.16: The options of `submit` and the keys of a jobs line for logs have the same effect.

    With them, a job can have no log, a stderr log, a packed (gzip) log, or its own log folder and log name.
    """
    s = scheduler(gpus=1)
    talk = program(s, "talk.sh", TALK)
    s.start()
    other = s.folder / "logs2"
    cpu = ("submit", "--cpu")
    s.cli(*cpu, "--no-output", "--", str(talk), "3")
    s.cli(*cpu, "--stderr-apart", "--", str(talk))
    s.cli(*cpu, "--gzip", "--", str(talk))
    s.cli(*cpu, "--gzip", "--stderr-apart", "--log-dir", "logs2", "--log-name", "run", "--", str(talk))
    s.wait_ended(4)
    s.append(
        f"0,{talk},,3,;gpus=0;output=none",
        f"0,{talk},,0 a,;gpus=0;stderr=apart",
        f"0,{talk},,0 b,;gpus=0;gzip=yes",
        f"0,{talk},,0 c,;gpus=0;gzip=yes;stderr=apart;log_dir=logs2;log_name=run",
    )
    s.wait_ended(8)
    assert [row[0] for row in s.rows("SELECT exit_code FROM jobs ORDER BY id")] == [3, 0, 0, 0] * 2, s.said()
    for first in (1, 5):
        assert s.job(first)["log"] is None
        assert "has no log" in s.cli("logs", str(first), code=1).stderr
        apart, packed, named = (log_of(s, first + n) for n in (1, 2, 3))
        assert apart.read_text() == "out\n" and Path(f"{apart}.e").read_text() == "err\n"
        assert packed.name.endswith(".log.gz") and gzip.decompress(packed.read_bytes()) == b"out\nerr\n"
        assert named.parent == other and named.name == ("run.gz" if first == 1 else "run_2.gz")
        assert gzip.decompress(named.read_bytes()) == b"out\n" and Path(f"{named}.e").read_text() == "err\n"
        assert {path.stat().st_mode & 0o777 for path in (apart, packed, named, Path(f"{named}.e"))} == {0o600}
        assert f"errors        {apart}.e" in s.cli("show", str(first + 1)).stdout
        assert s.cli("logs", str(first + 2)).stdout == "out\nerr\n" and s.cli("logs", str(first + 3)).stdout == "out\n"
    assert len(list(other.iterdir())) == 4
    s.append(f"0,{talk},,9,;gpus=0;output=some", f"0,{talk},,9,;gpus=0;log_name=a/b")
    wait_for(lambda: len(s.status()["refused"]) == 2, "both are refused")
    assert "known: log, none" in s.status()["refused"][0]["reason"]
    assert "--log-name" in s.cli(*cpu, "--log-name", "a/b", "--", "true", code=2).stderr


def test_s2_1_s2_15_jobs_started_in_one_pass_with_the_same_log_name_get_separate_logs(scheduler):
    """S2.1, S2.15: Jobs with the same log name get separate logs, even if one pass starts all of them.

    A file that had this name before stays as it is.
    """
    s = scheduler(gpus=4)
    s.start()
    s.cli("queue", "pause")
    theirs = s.folder / "gpu_scheduler_logs" / "train.log"
    theirs.parent.mkdir(mode=0o700, exist_ok=True)
    theirs.write_text("theirs\n")
    for number in range(4):
        s.cli("submit", "--log-name", "train.log", "--", "sh", "-c", f"echo {number}")
    s.cli("queue", "resume")
    s.wait_ended(4)
    assert s.rows("SELECT DISTINCT state, attempt FROM jobs") == [("done", 1)], s.said()
    logs = [Path(s.job(number)["log"]) for number in range(1, 5)]
    assert [log.name for log in logs] == ["train_2.log", "train_3.log", "train_4.log", "train_5.log"]
    assert [log.read_text() for log in logs] == ["0\n", "1\n", "2\n", "3\n"] and theirs.read_text() == "theirs\n"


LINES = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; printf '10%%\\r99%%\\n'; exit ${1:-0}"


def test_s4_14_logs_shows_a_packed_log(scheduler):
    """S4.14, S3.20: `logs` shows a packed log whole, its last lines, or its matching lines; `--raw` prints its bytes.

    If a packed log is truncated or damaged, `logs` shows the part that can be unpacked, and prints a note.
    """
    s = scheduler(gpus=1)
    s.start()
    one = shell(s, "--gzip", text=LINES)
    s.wait_state(one, "done")
    path = log_of(s, one)
    assert s.cli("logs", str(one)).stdout.splitlines() == [*(f"line {n}" for n in range(3000)), "99%"]
    assert s.cli("logs", str(one), "-n", "2").stdout == "line 2999\n99%\n"
    assert s.cli("logs", str(one), "-n", "0").stdout == ""
    assert s.cli("logs", str(one), "--grep", "^line 29.7$", "-n", "2").stdout == "line 2987\nline 2997\n"
    assert s.cli("logs", str(one), "--grep", "nothing such", code=1).stdout == ""
    assert s.cli("logs", str(one), "-f", "-n", "1").stdout == "99%\n"
    raw = subprocess.run(
        [*s.command, "logs", str(one), "--raw"], cwd=s.folder, env=s.environ, capture_output=True, check=True
    )
    assert raw.stdout == path.read_bytes() and not raw.stderr
    assert (
        "for a compressed log: its lines are not counted" in s.cli("logs", str(one), "--raw", "-n", "1", code=2).stderr
    )
    two = shell(s, text="echo plain")
    s.wait_state(two, "done")
    assert s.cli("logs", f"{one}-{two}", "-n", "1").stdout == (
        f"==> job {one} (sh), done <==\n99%\n\n==> job {two} (sh), done <==\nplain\n"
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    cut = s.cli("logs", str(one))
    assert cut.stdout.startswith("line 0\nline 1\n") and "the compressed log is incomplete" in cut.stderr
    path.write_bytes(whole[:3000] + b"\xff" * 300 + whole[3300:])
    hurt = s.cli("logs", str(one))
    assert hurt.stdout.startswith("line 0\nline 1\n") and "damaged" in hurt.stderr
    path.write_bytes(b"gpujob: cannot start x\n")
    assert s.cli("logs", str(one)).stdout == "gpujob: cannot start x\n"
    path.write_bytes(b"")
    assert s.cli("logs", str(one)).stdout == ""


def test_s4_14_logs_follows_a_packed_log_to_the_end_of_the_job(scheduler):
    """S4.14, S4.37: `logs -f` prints a packed log while the log grows.

    When the job has ended, `logs -f` has printed the whole log, without a warning.
    """
    s = scheduler(gpus=1)
    s.start()
    talker = Talker(s, "--gzip")
    talker.say("first\n")
    s.wait_state(talker.id, "running")
    wait_for(lambda: talker.log.exists(), "its log")
    with viewing(s, str(talker.id), "-f") as viewer:
        talker.say("second\n")
        talker.exit(0)
        assert viewer.end() == "first\nsecond\n" and not viewer.said()


def test_s4_13_s4_14_the_cause_of_a_failure_is_found_in_packed_and_stderr_logs(scheduler):
    """S4.13, S4.14, S17: The cause of a failure is found in a packed log and in the stderr log (`.e`).

    A packed log with huge contents does not delay the daemon.
    """
    s = scheduler(gpus=1)
    s.start()
    out_of_memory = "echo 'torch.OutOfMemoryError: CUDA out of memory.'"
    packed = shell(s, "--gzip", text=f"echo begun; {out_of_memory}; exit 1")
    apart = shell(s, "--stderr-apart", text=f"echo out; {out_of_memory} >&2; exit 1")
    both = shell(s, "--stderr-apart", "--gzip", text=f"echo out; {out_of_memory} >&2; exit 1")
    quiet = shell(s, "--stderr-apart", text="echo only out; exit 1")
    huge = shell(s, "--gzip", text="head -c 40000000 /dev/zero; exit 1")
    s.wait_ended(5)
    assert [s.job(n)["failure"] and s.job(n)["failure"]["class"] for n in (packed, apart, both, quiet)][:3] == [
        "oom"
    ] * 3
    assert "CUDA out of memory" in s.cli("why", str(packed)).stdout and "begun" in s.cli("why", str(packed)).stdout
    for number in (apart, both):
        told = s.cli("why", str(number)).stdout
        assert "CUDA out of memory" in told and ".e" in told
    assert "only out" in s.cli("why", str(quiet)).stdout
    assert s.job(huge)["exit_code"] == 1 and s.cli("why", str(huge)).stdout


def test_s4_12_s4_27_show_prints_the_options_of_a_job(scheduler):
    """S4.12, S4.15, S4.27: `show` prints info, on_finish, mail, slots and named GPUs, but no values of `env`."""
    s = scheduler(gpus=2, cpu_slots=4)
    s.hold("busy")
    s.append(s.line("busy", gpus="1"))
    s.start()
    s.wait_state(1, "running")
    s.cli(
        "submit",
        "--on",
        "0,1",
        "--info",
        "commit 1a2b",
        "--on-finish",
        "true",
        "--mail",
        "me@x",
        "--",
        "sh",
        "-c",
        "echo $GPUJOB_GPUS",
    )
    shown = s.cli("show", "2").stdout
    for line in (
        "named GPUs    0,1 (also if other jobs are on them)",
        "info          commit 1a2b",
        "on finish     true",
        "mail to       me@x",
    ):
        assert line in shown, shown
    s.wait_state(2, "done")
    assert s.log(2) == "0,1\n", "it did not wait for room"
    three = shell(s, "--slots", "3", "--info-command", "echo one; echo two >&2", text="true")
    shown = s.cli("show", str(three)).stdout
    assert "slots         3" in shown and "info          one\ninfo          two\n" in shown
    talk = program(s, "env.sh", '#!/bin/sh\necho "$A $B"\n')
    s.append(f"""0,{talk},,,;gpus=0;slots=2;info="by hand";env="A=1 B='x y'" """.strip(), f"0,{talk},,on,;on=0")
    s.wait_state(4, "done")
    assert s.log(4) == "1 x y\n"
    shown = s.cli("show", "4").stdout
    assert "info          by hand" in shown and "slots         2" in shown and "x y" not in shown
    s.wait_state(5, "done")
    assert s.job(5)["gpus"] == [0]
    assert s.cli("submit", "--cpu", "--slots", "5", "--", "true", code=3).stderr.count("\n") == 1
    assert s.cli("submit", "--on", "7", "--", "true", code=None).returncode == 3
    s.release("busy")


def test_s4_38_a_job_has_the_resource_limits_of_its_submitter(scheduler):
    """S4.38: A job has the `ulimit -n` and `-c` of the submitting shell.

    The recorded pid and signal are those of the job's command.
    """
    s = scheduler(gpus=1)
    s.start()
    words = " ".join(map(shlex.quote, [*s.command, "submit", "--cpu", "--"]))
    text = "ulimit -n; ulimit -Hn; ulimit -c; echo $$; kill -9 $$"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -c 0; ulimit -n 321; exec {words} sh -c {shlex.quote(text)}"],
        cwd=s.folder, env=s.environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    number = int(done.stdout)
    s.wait_state(number, "failed")
    pid = json.loads(s.rows("SELECT detail FROM events WHERE job=? AND kind='started'", number)[0][0])["pid"]
    assert s.log(number).split() == ["321", "321", "0", str(pid)]
    assert (s.job(number)["signal"], s.job(number)["command"][0].rsplit("/", 1)[-1]) == (9, "sh")


@ROOT_ONLY
def test_s4_38_a_limit_is_capped_at_the_schedulers_hard_limit(users: tuple[User, User], tmp_path: Path) -> None:
    """S4.38: A scheduler without root's rights cannot raise a limit above its own hard limit.

    If the submitter's limit is higher, the job gets the hard limit of the scheduler.
    """
    me, _ = users
    out = tmp_path / "out"
    out.touch(mode=0o666)
    out.chmod(0o666)
    target = os.open(out, os.O_WRONLY)

    def run() -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 256))
        os.dup2(target, 1)
        wish = f"{resource.RLIMIT_NOFILE}:1024:4096,{resource.RLIMIT_CORE}:0:0"
        exec_limited.main("/", wish, "/bin/sh", "sh", "-c", "ulimit -n; ulimit -Hn; ulimit -c; pwd")
        return 98

    try:
        assert me.do(run) == 0
    finally:
        os.close(target)
    assert out.read_text().split() == ["256", "256", "0", "/"]


# -- in the foreground ---------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_s4_17_a_foreground_job_reads_the_callers_stdin(scheduler, foreground, tmp_path):
    """S4.17: A foreground job reads the caller's stdin: a pipe, a file, a socket or a terminal.

    If stdin is a file, job and caller share the position in the file. The stdin of a background job is empty.
    """
    s = scheduler(gpus=1)
    s.start()
    one = foreground(s, "--cpu", "--", "sh", "-c", "read a; echo got $a; exit 7", stdin=subprocess.PIPE)
    one.process.stdin.write(b"piped\nmore\n")
    one.process.stdin.flush()
    assert one.ended()[:2] == (7, "1\n") and s.log(1) == "got piped\n"
    (tmp_path / "lines").write_text("first\nsecond\nthird\n")
    with (tmp_path / "lines").open("rb", buffering=0) as lines:
        lines.readline()
        assert foreground(s, "--cpu", "--", "head", "-c", "7", stdin=lines).ended()[0] == 0
        assert s.log(2) == "second\n" and lines.read() == b"third\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = foreground(s, "--cpu", "--no-output", "--", "cat", stdin=theirs, stdout=theirs)
        theirs.close()
        ours.sendall(b"through a socket\n")
        ours.shutdown(socket.SHUT_WR)
        got = b""
        while piece := ours.recv(4096):
            got += piece
        # The id is printed after the job was handed over, perhaps after the output of a quick job.
        assert one.ended()[0] == 0 and got in (b"3\nthrough a socket\n", b"through a socket\n3\n")
    master, slave = pty.openpty()
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, master)
        one = foreground(
            s,
            "--cpu",
            "--no-output",
            "--",
            "sh",
            "-c",
            "tty; read a; echo got $a",
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        name = os.ttyname(slave)
        os.close(slave)
        os.write(master, b"typed\n")
        shown = b""

        def seen() -> bool:
            nonlocal shown
            with contextlib.suppress(OSError):  # no process has the slave open any more
                shown += os.read(master, 4096)
            return b"got typed" in shown

        wait_for(seen, "what it answered")
        assert one.process.wait(60) == 0 and name.encode() in shown
    assert shell(s, text="cat; echo end") == 5
    s.wait_state(5, "done")
    assert s.log(5) == "end\n"
    house = s.folder / ".gpujob"
    assert not [path for path in house.iterdir() if path.name.startswith("caller-")]


def test_s4_17_ctrl_c_reaches_a_running_foreground_job_and_cancels_a_waiting_one(scheduler, foreground):
    """S4.17: Ctrl-C ends a running foreground job, and the caller returns the exit code of the job.

    Ctrl-C cancels a waiting foreground job, with or without a scheduler, and the caller exits with 130.
    """
    s = scheduler(gpus=1)
    s.start()
    text = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    one = foreground(s, "--cpu", "--", "sh", "-c", text)
    s.wait_state(1, "running")
    wait_for(lambda: "ready" in s.log(1), "it runs")
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.ended()[0] == 9 and s.log(1) == "ready\ncaught\n"
    s.cli("queue", "pause")
    one = foreground(s, "--cpu", "--", "touch", "ran")
    wait_for(lambda: s.states().get(2) == "pending", "it waits")
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.ended()[0] == 130 and s.states()[2] == "cancelled"
    s.stop()
    one = foreground(s, "--cpu", "--", "touch", "ran")
    wait_for(lambda: s.states().get(3) == "pending", "it waits without a scheduler")
    os.killpg(one.process.pid, signal.SIGINT)
    code, _, error = one.ended()
    assert code == 130 and s.states()[3] == "cancelled", error
    s.start()
    s.cli("queue", "resume")
    assert not (s.folder / "ran").exists() and not list((s.folder / ".gpujob").glob("caller-*"))


def test_s4_17_a_killed_caller_fails_a_waiting_job_and_leaves_a_running_one(scheduler, foreground):
    """S4.17: If the caller is killed, a waiting foreground job fails, and `why` gives the reason.

    A running foreground job continues to its own end.
    """
    s = scheduler(gpus=1)
    s.start()
    s.cli("queue", "pause")
    one = foreground(s, "--cpu", "--", "touch", "ran")
    wait_for(lambda: s.states().get(1) == "pending", "it waits")
    one.process.kill()
    one.process.wait()
    s.cli("queue", "resume")
    s.wait_state(1, "failed")
    told = s.cli("why", "1").stdout
    assert "could not start" in told and "the command that waited for the job in the foreground has ended" in told, told
    assert not (s.folder / "ran").exists()
    one = foreground(s, "--cpu", "--", "sh", "-c", "read a; echo rest; cat; exit 5", stdin=subprocess.PIPE)
    s.wait_state(2, "running")
    one.process.kill()
    one.process.wait()
    one.process.stdin.write(b"still\nread\n")
    one.process.stdin.close()
    one.process.stdin = None
    s.wait_state(2, "failed")
    assert s.job(2)["exit_code"] == 5 and s.log(2) == "rest\nread\n"
    s.cli("retry", "2")
    wait_for(lambda: s.job(2)["attempt"] == 2 and s.job(2)["state"] == "failed", "run again")
    assert s.job(2)["exit_code"] == 5 and s.log(2) == "rest\n", "its caller has gone on: there is nothing to be read"


def test_s4_17_s4_28_a_foreground_job_survives_a_kill_of_the_scheduler(scheduler, foreground):
    """S4.17, S4.28, P6: If the scheduler is killed, the caller of a foreground job continues to wait.

    If the job was waiting, the next scheduler runs it. If the job was running, it continues, and the caller gets its
    exit code without a scheduler.
    """
    s = scheduler(gpus=1)
    s.start()
    s.cli("queue", "pause")
    said = s.folder / "stderr"
    with said.open("wb") as stream:
        words = ("--cpu", "--", "sh", "-c", "read a; echo got $a; exit 6")
        one = foreground(s, *words, stdin=subprocess.PIPE, stderr=stream)
    wait_for(lambda: s.states().get(1) == "pending", "it waits")
    s.kill()
    s.start()
    s.cli("queue", "resume")
    s.wait_state(1, "running")
    s.kill()
    wait_for(
        lambda: "no scheduler is running; job 1 waits until a scheduler starts" in said.read_text(),
        "the caller notices it",
    )
    one.process.stdin.write(b"late\n")
    one.process.stdin.close()
    one.process.stdin = None
    code, out, _ = one.ended()
    assert (code, out) == (6, "1\n") and s.log(1) == "got late\n", said.read_text()
    assert said.read_text().count("no scheduler is running; job 1 waits until a scheduler starts") == 1, (
        said.read_text()
    )
    assert s.job(1)["state"] == "failed" and s.states()[1] == "running", "nobody has taken note of it yet"
    s.start()
    s.wait_state(1, "failed")
    assert s.job(1)["exit_code"] == 6


def test_s4_17_the_first_command_in_a_folder_may_be_a_foreground_job(scheduler, foreground):
    """S4.17: A foreground job may be submitted in a folder in which no scheduler has run yet.

    A refused submission leaves no socket.
    """
    s = scheduler(gpus=1)
    one = foreground(s, "--cpu", "--", "sh", "-c", "exit 4")
    wait_for(lambda: s.states().get(1) == "pending", "queued")
    s.start()
    assert one.ended()[0] == 4
    refused = foreground(s, "--gpus", "9", "--", "true").ended()
    assert refused[0] == 3 and refused[2].count("\n") == 1
    assert not list((s.folder / ".gpujob").glob("caller-*"))


def test_s4_16_s4_17_screen_mode_notes_log_options_without_effect(screens):
    """S4.16, S4.17: In screen mode stdout and stderr share one plain log; a note names each option without effect."""
    s = screens(gpus=1)
    s.start()
    number = shell(s, "--no-output", "--stderr-apart", "--gzip", text="echo out; echo err >&2")
    s.wait_state(number, "done")
    path = log_of(s, number)
    assert path.name.endswith(".log") and path.read_bytes().split() == [b"out", b"err"]
    notes = " ".join(s.job(number)["notes"])
    assert all(wish in notes for wish in ("output=none", "stderr=apart", "gzip=yes")) and "has no effect" in notes
    assert s.cli("logs", str(number)).stdout == "out\nerr\n" and "errors " not in s.cli("show", str(number)).stdout


# -- at the end ----------------------------------------------------------------------------------------------


def calls(s: Scheduler) -> list[list[str]]:
    """Return the calls of NOTIFY so far.

    Each call is a list: number of arguments, id, error level, log, command, value of $MINE.
    """
    path = s.folder / "calls"
    return [line.split("|")[:-1] for line in path.read_text().splitlines()] if path.exists() else []


def notifying(scheduler: Callable[..., Scheduler], **settings: Any) -> Scheduler:
    s = scheduler(gpus=1, **settings)
    program(s, "notify.sh", NOTIFY)
    s.environ["CALLS"] = str(s.folder / "calls")
    return s


@pytest.mark.smoke
def test_s4_26_a_program_is_called_once_at_the_end_of_each_job(scheduler):
    """S4.26: The on_finish program is called once per job, with id, error level, log and command.

    The program may be named by its path or found in PATH, and a jobs line can name it, too. It is not called for a job
    that never started.
    """
    s = notifying(scheduler, assign_retry_wait="0.05")
    talk = program(s, "talk.sh", TALK)
    s.start()
    notify = str(s.folder / "notify.sh")
    one = shell(s, "--on-finish", notify, "--env", "MINE=x y", text="exit 0")
    two = shell(
        s,
        "--on-finish",
        "notify.sh",
        "--no-output",
        "--env",
        f"PATH={s.folder}:{os.environ['PATH']}",
        text="kill -9 $$",
    )
    three = shell(s, "--on-finish", "./notify.sh", "--retries", "2", text="exit 3")
    s.wait_ended(3)
    wait_for(lambda: len(calls(s)) == 3, "three calls")
    s.append(f"0,{talk},,4,;gpus=0;on_finish={notify}")
    s.wait_state(4, "failed")
    wait_for(lambda: len(calls(s)) == 4, "four calls")
    told = {int(call[1]): call for call in calls(s)}
    assert told[one] == ["4", "1", "0", str(log_of(s, one)), told[one][4], "x y"] and told[one][4].endswith(
        "sh -c 'exit 0'"
    )
    assert told[two][:4] == ["4", "2", "-1", ""]
    assert told[three][:4] == ["4", "3", "3", str(log_of(s, three))] and "_a3" in told[three][3], (
        "after the last attempt"
    )
    assert told[4][:4] == ["4", "4", "4", str(log_of(s, 4))] and told[4][4] == f"{talk} 4"
    s.cli("queue", "pause")
    five = shell(s, "--on-finish", notify, text="true")
    s.cli("cancel", str(five))
    s.cli("queue", "resume")
    six = shell(s, "--on-finish", notify, "--after-ok", "4", text="true")
    s.wait_state(six, "skipped")
    seven = shell(s, "--on-finish", notify, text="exit 7")
    wait_for(lambda: str(seven) in [call[1] for call in calls(s)], "the next")
    assert sorted(int(call[1]) for call in calls(s)) == [1, 2, 3, 4, seven]
    said = s.folder / ".gpujob" / "on_finish.log"
    wait_for(lambda: said.read_text().count("notified") == 5, "what each printed")
    wait_for(lambda: s.rows("SELECT count(*) FROM calls") == [(0,)], "the last is struck off, after it was called")
    s.cli("retry", str(seven))
    wait_for(lambda: [call[1] for call in calls(s)].count(str(seven)) == 2, "another end, another call")


def test_s4_26_an_on_finish_program_that_fails_or_hangs_delays_nothing(scheduler):
    """S4.26, P8: An on_finish program that is missing, fails or hangs delays neither jobs nor the scheduler's end.

    The problem is logged. A program that hangs does not count as a process of the job.
    """
    s = notifying(scheduler)
    hang = program(s, "hang.sh", "#!/bin/sh\necho $$ > hangs; (trap '' TERM; exec sleep 600) & wait\n")
    fails = program(s, "fails.sh", "#!/bin/sh\necho went wrong >&2; exit 3\n")
    broken = program(s, "broken.sh", "#!/no/such/interpreter\n")
    s.start()
    s.hold("beside")
    s.append(s.line("beside") + ";gpus=0.5")
    s.wait_state(1, "running")
    for name in ("no-such-program", str(s.folder / "not-there"), str(fails), str(broken), str(hang)):
        s.cli("submit", "--gpus", "0.5", "--on-finish", name, "--", "true")
    for number in range(2, 7):
        s.wait_state(number, "done")
    wait_for(lambda: (s.folder / "hangs").exists(), "the one that hangs")
    hanging = int(wait_for(lambda: (s.folder / "hangs").read_text(), "its number"))
    said = wait_for(
        lambda: "program 'no-such-program' not found in PATH" in s.said() and s.said(), "the missing one is named"
    )
    wait_for(
        lambda: "program 'no-such-program' not found in PATH" in s.cli("show", "2").stdout, "its story tells it, too"
    )
    log = s.folder / ".gpujob" / "on_finish.log"
    for text in ("not-there: No such file", "went wrong", "broken.sh: No such file"):
        wait_for(lambda text=text: text in log.read_text(), f"{text} in {log.read_text()} {said}")
    s.release("beside")
    s.wait_state(1, "done")
    assert s.job(1)["notes"] == []
    wait_for(lambda: s.status()["gpus"][0]["allocated"] == 0, "the GPU is free")
    s.cli("submit", "--gpus", "1", "--wait", "--", "true")
    assert alive(hanging) and s.stop() == 0
    for pid in (hanging, *(int(name) for name in os.listdir("/proc") if name.isdigit())):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[3] == str(hanging):
                os.kill(pid, signal.SIGKILL)


def test_s4_26_on_finish_is_called_once_across_a_kill_of_the_scheduler(scheduler):
    """S4.26, P1: The on_finish program is called once, also if the job ended while no scheduler ran.

    It is also called once if the scheduler is killed after it recorded or logged the ending and before it called the
    program.
    """
    s = notifying(scheduler)
    notify = str(s.folder / "notify.sh")
    s.start()
    s.hold("a")
    s.cli("submit", "--cpu", "--on-finish", notify, "--", "python3", str(s.script), str(s.folder), "a", "5", "0")
    wait_for(lambda: s.starts("a"), "it runs")
    s.kill()
    s.release("a")
    wait_for(lambda: s.job(1)["state"] == "failed", "it ended while nobody looked")
    assert calls(s) == []
    s.start()
    wait_for(lambda: len(calls(s)) == 1, "called at the next start")
    assert calls(s)[0][1:3] == ["1", "5"]
    s.stop()
    for number, point in enumerate(("finish.committed", "finish.told"), 2):
        s.start(GPUJOB_CRASH_AT=point)
        shell(s, "--on-finish", notify, text=f"exit {number}")
        assert s.process.wait(60) == -signal.SIGKILL
        assert len(calls(s)) == number - 1
        s.start()
        wait_for(lambda number=number: len(calls(s)) == number, "called in the next life")
        assert calls(s)[-1][1:3] == [str(number), str(number)]
        s.stop()
    s.start()
    number = shell(s, "--on-finish", notify, text="true")
    wait_for(lambda: len(calls(s)) == 4, "the next")
    assert [call[1] for call in calls(s)] == ["1", "2", "3", str(number)]


@pytest.mark.parametrize("point", ["afterwards.begun", "afterwards.done"])
def test_s4_26_an_interrupted_on_finish_call_is_not_repeated(scheduler, point):
    """S4.26, P1: If the scheduler is killed during an on_finish call, the call is not repeated.

    A warning is logged. It says that it is not known whether the program ran. The programs of later jobs are called.
    """
    s = notifying(scheduler)
    notify = str(s.folder / "notify.sh")
    for life in range(1, 3):
        s.start(GPUJOB_CRASH_AT=point)
        shell(s, "--on-finish", notify, text="true")
        assert s.process.wait(60) == -signal.SIGKILL
        if point == "afterwards.done":
            wait_for(lambda life=life: len(calls(s)) == life, "the program has run")
        s.start()
        wait_for(lambda life=life: s.said().count("it is unknown whether on_finish or mail ran") == life, "it is said")
        s.stop()
    s.start()
    number = shell(s, "--on-finish", notify, text="true")
    wait_for(lambda: str(number) in [call[1] for call in calls(s)], "the next")
    made = [call[1] for call in calls(s)]
    assert made == ([str(number)] if point == "afterwards.begun" else ["1", "2", str(number)])


SENDMAIL = '#!/bin/sh\n{ echo "words: $*"; cat; } > "$MAILS/$$.part"; mv "$MAILS/$$.part" "$MAILS/$$.mail"\n'


def test_the_output_of_a_job_is_mailed_at_its_end(scheduler):
    """S4 (-m): The output of a job is mailed with the `sendmail` in PATH.

    The mail contains the unpacked output of a packed log, and its subject is encoded.
    """
    s = scheduler(gpus=1)
    (s.folder / "bin").mkdir()
    (s.folder / "mails").mkdir()
    program(s, "bin/sendmail", SENDMAIL)
    s.environ.update(MAILS=str(s.folder / "mails"), PATH=f"{s.folder}/bin:{s.environ.get('PATH', os.defpath)}")
    talk = program(s, "talk.sh", TALK)
    s.start()
    shell(s, "--mail", "me@example.org", "--label", "café", text="echo the output; exit 3")
    shell(s, "--mail", "-Xme", "--gzip", text="echo packed output")
    shell(s, "--mail", "me", "--no-output", text="echo nowhere")
    s.append(f"0,{talk},,,;gpus=0;mail=you@example.org")

    def mails() -> dict[str, str]:
        found = [path.read_text() for path in (s.folder / "mails").glob("*.mail")]
        return {text.split("\n", 1)[0]: text for text in found}

    wait_for(lambda: len(mails()) == 4, "four mails")
    first = mails()["words: -oi -- me@example.org"]
    head, _, body = first.partition("\n\n")
    assert "To: me@example.org\n" in head and "Subject: =?utf-8?B?" in head and body == "the output\n"
    packed = mails()["words: -oi -- -Xme"]
    assert packed.endswith("\n\npacked output\n") and "ended with 0" in packed
    assert mails()["words: -oi -- me"].endswith("\n\n")
    assert mails()["words: -oi -- you@example.org"].endswith("\n\nout\nerr\n")


def test_s4_13_s4_14_keep_logs_removes_packed_and_stderr_logs(scheduler):
    """S4.13, S4.14, S8: `keep_logs` removes packed logs and stderr logs, also those of deleted jobs.

    Logs with their own `log_name`, or outside of the log folder, stay.
    """
    s = scheduler(gpus=1)
    (s.folder / "config.yaml").write_text("{}\n")
    s.start()
    options = (
        ("--gzip", "--stderr-apart"),
        ("--stderr-apart",),
        ("--log-name", "mine", "--gzip"),
        ("--log-dir", "else", "--stderr-apart"),
    )
    for chosen in options:
        shell(s, *chosen, text="echo out; echo err >&2")
    s.wait_ended(4)
    logs = [log_of(s, number) for number in range(1, 5)]
    files = [*logs, *(Path(f"{log}.e") for log in (logs[0], logs[1], logs[3]))]
    assert all(path.exists() for path in files)
    assert s.cli("reset").stdout == "forgot 4 ended jobs\n"
    five = shell(s, "--gzip", "--stderr-apart", text="echo out")
    s.wait_state(five, "done")
    late = log_of(s, five)
    for path in (*files, late, Path(f"{late}.e")):
        path.write_bytes(b"x" * 4096)
    (s.folder / "config.yaml").write_text("keep_logs: 30d 2K\n")
    gone = [logs[0], Path(f"{logs[0]}.e"), logs[1], Path(f"{logs[1]}.e"), late, Path(f"{late}.e")]
    wait_for(lambda: not any(path.exists() for path in gone), f"gone: {[str(p) for p in gone if p.exists()]}")
    assert logs[2].exists() and logs[3].exists() and Path(f"{logs[3]}.e").exists()


# -- without a scheduler -------------------------------------------------------------------------------------


def test_s4_28_p6_endings_without_a_scheduler_are_shown_as_recorded(scheduler):
    """S4.28, P6: If a job ends while no scheduler runs, all verbs show how it ended.

    The next scheduler records the same ending. A job that will be run again is shown as waiting, and holds no GPU.
    """
    s = scheduler(gpus=5, assign_retry_wait="0.05")
    keys = {"good": 0, "bad": 7, "shot": "s15", "runs": 0, "again": 3}
    for key in keys:
        s.hold(key)
    s.append(*(s.line(key, code) + ";retries=1" * (key == "again") for key, code in keys.items()))
    s.start()
    wait_for(lambda: all(s.starts(key) for key in keys), "they run")
    s.append(s.line("waits", gpus="0"))
    wait_for(lambda: s.states().get(6) == "pending" and set(s.states().values()) == {"pending", "running"}, "recorded")
    before = s.states()
    s.kill()
    for key in ("good", "bad", "shot", "again"):
        s.release(key)
    ended = {1: ("done", 0, None), 2: ("failed", 7, None), 3: ("failed", None, 15)}

    def told(number: int) -> tuple[str, int | None, int | None]:
        job = s.job(number)
        return job["state"], job["exit_code"], job["signal"]

    for number, how in ended.items():
        wait_for(lambda number=number, how=how: told(number) == how, f"job {number}: {how}, not {told(number)}")
    wait_for(lambda: told(5)[0] == "pending", "job 5 waits for its other try")
    assert s.states() == before, "nobody has taken note of it"
    shown = s.cli("show", "2").stdout
    assert "exit 7" in shown and "the job ended while no scheduler was running" in shown
    states = {1: "done", 2: "failed", 3: "failed", 4: "running", 5: "pending", 6: "pending"}
    status = s.status()
    assert {job["id"]: job["state"] for job in status["jobs"]} == states
    listed = json.loads(s.cli("jobs", "--json").stdout)["jobs"]
    assert {job["id"]: job["state"] for job in listed} == states
    assert {state: number for state, number in status["counts"].items() if number} == dict(Counter(states.values()))
    assert "2 pending, 1 running, 1 done, 2 failed" in s.cli("status").stdout
    assert {job for gpu in status["gpus"] for job in gpu["jobs"]} == {4}
    assert sum(gpu["allocated"] for gpu in status["gpus"]) == 1
    again = s.job(5)
    assert (again["reason_code"], again["reason"]) == (
        "backoff", "failed with exit code 3 (run 1 of 2); the job starts again when a scheduler runs (gpujob start)",
    )  # fmt: skip

    def chosen(*words: str) -> list[int]:
        return [job["id"] for job in json.loads(s.cli("jobs", "--json", *words).stdout)["jobs"]]

    assert (
        chosen("--state", "running") == [4]
        and chosen("--state", "pending") == [5, 6]
        and chosen("--state", "done,failed") == [1, 2, 3]
    )
    assert chosen("--state", "failed", "-n", "1") == [3] and chosen("--state", "done,running", "-n", "2") == [1, 4]
    assert [s.cli("wait", str(number), code=None).returncode for number in ended] == [0, 7, 143]
    assert "have not ended" in s.cli("wait", "4", code=5).stderr
    assert s.cli("logs", "2", "-f").returncode == 0
    s.start()
    wait_for(lambda: s.states()[6] == "done" and s.states()[5] == "failed", "all goes on")
    assert {number: told(number) for number in ended} == ended
    s.release("runs")
    s.wait_state(4, "done")
    assert [s.starts(key) for key in keys] == [1, 1, 1, 1, 2] and s.job(5)["exit_code"] == 3


def test_s4_28_p6_endings_of_stopping_and_retried_jobs_without_a_scheduler(scheduler):
    """S4.28, P6: Without a scheduler, a job that ends while it is being stopped is shown as cancelled or time_limit.

    A job that succeeded is shown as done, even if it has retries left. If a job was stopped at its time limit and has a
    retry left, it is shown as waiting, and the next scheduler runs it again.
    """
    s = scheduler(gpus=4, kill_grace="600", assign_retry_wait="0.05")
    deaf = program(
        s, "deaf.sh", "#!/bin/sh\ntrap '' TERM\ntouch ready-$1\nwhile [ -e hold ]; do sleep 0.02; done\nexit $2\n"
    )
    (s.folder / "hold").touch()
    s.append(
        f"0,{deaf},,a 0,", f"0,{deaf},,b 0,;time=1s", f"0,{deaf},,c 0,;retries=2", f"0,{deaf},,d 4,;time=1s;retries=1"
    )
    s.start()
    for key in "abcd":
        wait_for((s.folder / f"ready-{key}").exists, f"{key} runs")
    s.cli("cancel", "1", code=None)
    wait_for(lambda: list(s.states().values()) == ["stopping", "stopping", "running", "stopping"], "being stopped")
    s.kill()
    (s.folder / "hold").unlink()
    wanted = [("cancelled", "cancelled", 0), ("failed", "time_limit", 0), ("done", "exit", 0)]

    def told() -> list[tuple[str, str, int]]:
        return [(job["state"], job["outcome"], job["exit_code"]) for job in (s.job(number) for number in (1, 2, 3))]

    wait_for(lambda: told() == wanted, f"{wanted}, not {told()}")
    wait_for(
        lambda: not [p for p in os.listdir("/proc") if p.isdigit() and str(deaf).encode() in words_of(p)], "all ended"
    )
    # The supervisor of job 4 may still have to record the end of the job.
    wait_for(
        lambda: (job := s.job(4)) and (job["state"], job["reason_code"]) == ("pending", "backoff"),
        "it will be run again",
    )
    s.start()
    wait_for(lambda: s.states()[4] == "failed", "and was")
    assert told() == wanted and s.job(4)["attempt"] == 2


def words_of(pid: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_s4_28_p6_a_job_out_of_gpu_memory_waits_for_a_larger_share(scheduler):
    """P6: If a job ran out of GPU memory while no scheduler ran, it is shown as waiting for a larger share."""
    s = scheduler(gpus=1)
    oom = program(
        s, "oom.sh", "#!/bin/sh\ntouch ready\nwhile [ -e hold ]; do sleep 0.02; done\necho CUDA out of memory\nexit 1\n"
    )
    (s.folder / "hold").touch()
    s.append(f"0,{oom},,,;gpus=0.5")
    s.start()
    wait_for((s.folder / "ready").exists, "it runs")
    s.wait_state(1, "running")
    s.kill()
    (s.folder / "hold").unlink()
    wait_for(lambda: s.job(1)["reason_code"] == "backoff", f"it ended: {s.job(1)}")
    job = s.job(1)
    assert job["state"] == "pending" and job["reason"].startswith("oom: asked 0.5; tried again with 1")
    assert s.status()["counts"]["pending"] == 1 and s.status()["gpus"][0]["jobs"] == []
    s.start()
    s.wait_state(1, "failed")
    assert (s.job(1)["attempt"], s.job(1)["need"]) == (2, 1)
