"""`gpujob logs` through a pipe, on a terminal and with -f; logs that are cut, replaced or removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests import fork_server
from tests.stories.harness import LONG, Scheduler, wait_for

# Reads lines from a FIFO and writes each, with \r, \n and \x1b decoded as in a Python string; "exit CODE" ends it.
ECHO = """\
import os, sys
out = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND) if len(sys.argv) > 2 else 1
with open(sys.argv[1], "rb") as stream:
    for line in stream:
        word = line.rstrip(b"\\n").decode("unicode_escape").encode("latin-1")
        if word.startswith(b"exit "):
            os._exit(int(word[5:]))
        os.write(out, word)
"""


class Talker:
    """A job that writes the texts that the test passes to `say`, and ends with the code passed to `exit`."""

    def __init__(self, s: Scheduler, *words: str) -> None:
        self.s, self.path = s, s.folder / f"tell-{time.monotonic_ns()}"
        os.mkfifo(self.path)
        (s.folder / "echo.py").write_text(ECHO)
        done = s.cli("submit", *words, "--cpu", "--", sys.executable, str(s.folder / "echo.py"), str(self.path))
        self.id = int(done.stdout)
        self._fd = -1

    def say(self, text: str) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY)  # blocks until the job opens it
        os.write(self._fd, text.encode("unicode_escape").replace(b"\\\\x", b"\\x") + b"\n")

    def exit(self, code: int) -> None:
        self.say(f"exit {code}")
        os.close(self._fd)
        self._fd = -1

    @property
    def log(self) -> Path:
        return Path(self.s.rows("SELECT log FROM jobs WHERE id=?", self.id)[0][0])


class Viewer:
    """A running `gpujob logs`. ``shown`` returns its stdout so far; ``said`` returns its stderr so far.

    With ``terminal``, stdout is a new terminal of 24 lines and 40 columns.
    """

    def __init__(self, s: Scheduler, *words: str, terminal: bool = False, **environ: str) -> None:
        self.out = s.folder / f"out-{time.monotonic_ns()}"
        self.err = self.out.with_suffix(".err")
        self.master = -1
        self._shown = b""
        with self.out.open("wb") as out, self.err.open("wb") as err:
            stdout: fork_server.File = out
            if terminal:
                self.master, stdout = pty.openpty()
                fcntl.ioctl(stdout, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
            environ = {**s.environ, "TERM": "xterm", "PYTHONFAULTHANDLER": "1", **environ}
            self.process = fork_server.start(("logs", *words), s.folder, environ, stdout, err)
            if terminal:
                os.close(cast(int, stdout))

    def shown(self) -> str:
        if self.master < 0:
            return self.out.read_text()
        while select.select([self.master], [], [], 0)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the terminal is closed on the other side
                break
            if not data:
                break
            self._shown += data
        return self._shown.decode().replace("\r\n", "\n")

    def said(self) -> str:
        return self.err.read_text()

    def wait_shown(self, text: str) -> str:
        wait_for(lambda: text in self.shown(), f"{text!r} in {self.shown()!r}; {self.said()}")
        return self.shown()

    def wait_said(self, text: str) -> str:
        wait_for(lambda: text in self.said(), f"{text!r} in {self.said()!r}")
        return self.said()

    def end(self, code: int = 0) -> str:
        """Wait until the command has ended, assert that its exit code is ``code``, and return all of its stdout."""
        if self.master >= 0:
            try:
                wait_for(lambda: (self.shown(), self.process.poll())[1] is not None, "the end of logs")
            except AssertionError as error:
                self.process.send_signal(signal.SIGABRT)  # faulthandler prints its stacks
                self.process.wait(60)
                raise AssertionError(f"{error}\n{self.said()}") from None
        assert self.process.wait(60) == code, self.said()
        shown = self.shown()
        if self.master >= 0:
            os.close(self.master)
            self.master = -1
        assert "Traceback" not in self.said(), self.said()
        return shown


@contextlib.contextmanager
def viewing(s: Scheduler, *words: str, terminal: bool = False, **environ: str) -> Iterator[Viewer]:
    viewer = Viewer(s, *words, terminal=terminal, **environ)
    try:
        yield viewer
    finally:
        if viewer.process.poll() is None:
            viewer.process.kill()
            viewer.process.wait()
        if viewer.master >= 0:
            os.close(viewer.master)


def run_shell(s: Scheduler, text: str, *words: str) -> int:
    done = s.cli("submit", *words, "--cpu", "--wait", "--", "sh", "-c", text, code=None)
    return int(done.stdout)


def test_s3_20_a_progress_bar_of_a_hundred_thousand_updates_is_one_line(scheduler):
    """S3.20: A progress bar of 100,000 updates is one line, also with -n and --grep; --raw prints every byte."""
    s = scheduler(gpus=1)
    s.start()
    script = s.folder / "bar.py"
    script.write_text(
        "import sys\nprint('begin')\n"
        "for n in range(100_001): sys.stdout.write(f'\\r{n / 1000:5.1f}%|{chr(0x2588) * (n // 10_000):10}| {n}/100000')\n"
        "print('\\ncrlf\\r'); print('\\x1b[32mend\\x1b[0m\\x1b[2J \\x07')\n"
    )
    s.cli("submit", "--cpu", "--wait", "--", sys.executable, str(script))
    bar = f"100.0%|{'█' * 10}| 100000/100000"
    assert s.cli("logs", "1").stdout == f"begin\n{bar}\ncrlf\nend \n"
    assert s.cli("logs", "@", "-n", "3").stdout == f"{bar}\ncrlf\nend \n"
    assert s.cli("logs", "1", "--grep", r"^\s*\d+\.\d%").stdout == f"{bar}\n"
    raw = subprocess.run(
        [sys.executable, "-m", "scheduler", "logs", "1", "--raw"], cwd=s.folder, env=s.environ, capture_output=True
    ).stdout
    log = Path(s.job(1)["log"]).read_bytes()
    assert raw == log and raw.count(b"\r") > 100_000
    raw = subprocess.run(
        [sys.executable, "-m", "scheduler", "logs", "1", "--raw", "-n", "2"],
        cwd=s.folder, env=s.environ, capture_output=True,
    ).stdout  # fmt: skip
    assert raw == b"crlf\r\n\x1b[32mend\x1b[0m\x1b[2J \x07\n"


def test_s3_20_the_schedulers_own_output_shows_a_progress_bar_as_one_line(scheduler):
    """S3.20, S17, F05: The scheduler's own output shows new lines of a job live, with the job's id.

    A progress bar is one line, and the output continues after the log was truncated.
    """
    s = scheduler(gpus=1)
    s.start()
    talker = Talker(s)
    talker.say("begin \x1b[2Jred\n")
    wait_for(lambda: "[1] begin red\n" in s.said(), "live")
    for n in range(1000):
        talker.say(f"\r{n}%")
    talker.say("\r100% \n")
    wait_for(lambda: "[1] 100% \n" in s.said(), "its last state")
    assert "[1] 0%" not in s.said() and "999%" not in s.said()
    os.truncate(talker.log, 0)
    talker.say("after\nno end")
    wait_for(lambda: "[1] after\n" in s.said(), "after the cut")
    talker.exit(0)
    wait_for(lambda: "[1] no end\n" in s.said(), "the last line")


def test_f16_p1_s2_15_existing_files_are_not_used_as_logs(scheduler):
    """F16, P1, S2.15: The scheduler chooses another name for a log if a file with the usual name already exists.

    The same holds if the usual name of the job's stderr log is taken. The existing file may be a regular file or a
    link. It stays unchanged, and the scheduler does not read it: "out of memory" in it does not make the scheduler run
    the job again.
    """
    s = scheduler(gpus=1)
    folder = s.folder / "gpu_scheduler_logs"
    folder.mkdir(0o700)
    theirs = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    now = time.time()
    taken = [
        folder / f"job_1_{time.strftime('%Y%m%d_%H%M%S', time.localtime(now + n))}{again}.log"
        for n in range(120)
        for again in ("", "_a2")
    ]
    for path in taken:
        path.write_text(theirs)
    stamps = [path.name.split("_", 2)[2] for path in taken[::2]]
    apart, links = ([folder / f"job_{job}_{stamp}{end}" for stamp in stamps] for job, end in ((3, ".e"), (4, "")))
    for path in apart:
        path.write_text("theirs\n")
    for path in links:
        path.symlink_to("nowhere")
    s.append(s.line("a", 1))
    s.start()
    s.wait_ended(1)
    first = Path(s.rows("SELECT log FROM jobs WHERE id=1")[0][0])
    assert re.fullmatch(r"job_1_\d{8}_\d{6}_2\.log", first.name) and first.read_text() == ""
    s.cli("retry", "1")
    wait_for(lambda: s.starts("a") == 2, "the second attempt")
    s.wait_state(1, "failed")
    assert re.fullmatch(r"job_1_\d{8}_\d{6}_a2_2\.log", Path(s.rows("SELECT log FROM jobs WHERE id=1")[0][0]).name)
    s.append(s.line("b"))
    s.wait_state(2, "done")
    assert s.starts("a") == 2 and {path.read_text() for path in taken} == {theirs}
    assert "out of memory" not in s.cli("logs", "1").stdout + s.cli("show", "1").stdout
    assert re.fullmatch(r"job_2_\d{8}_\d{6}\.log", Path(s.rows("SELECT log FROM jobs WHERE id=2")[0][0]).name)
    (s.folder / "talk").write_text("#!/bin/sh\necho out; echo err >&2\n")
    (s.folder / "talk").chmod(0o755)
    s.append("0,talk,,three;stderr=apart", "0,talk,,four")
    assert s.wait_ended(4) == {1: "failed", 2: "done", 3: "done", 4: "done"}
    three, four = (Path(s.rows("SELECT log FROM jobs WHERE id=?", number)[0][0]) for number in (3, 4))
    assert re.fullmatch(r"job_3_\d{8}_\d{6}_2\.log", three.name) and re.fullmatch(
        r"job_4_\d{8}_\d{6}_2\.log", four.name
    )
    assert (three.read_text(), Path(f"{three}.e").read_text(), four.read_text()) == ("out\n", "err\n", "out\nerr\n")
    assert {path.read_text() for path in apart} == {"theirs\n"} and {os.readlink(path) for path in links} == {"nowhere"}
    assert not (folder / "nowhere").exists()


def test_logs_grep_exits_with_0_for_a_match_1_for_none_and_2_for_an_error(scheduler):
    """--grep exits with 0 if a line matches, with 1 if no line matches, and with 2 if the pattern is wrong.

    The error about a wrong pattern names the position in the pattern. --grep works with -n, with --attempt and with
    several jobs. A mistake in the options gives one line on stderr.
    """
    s = scheduler(gpus=1)
    s.start()
    run_shell(s, "for i in 1 2 3 4 5; do echo loss $i; echo other; done; printf 'no end'", "--label", "a")
    run_shell(s, "echo nothing here", "--label", "b")
    s.cli("submit", "--after", "1", "--gpus", "1", "--label", "never", "--", "sh", "-c", "sleep 0")
    s.wait_state(3, "done")
    assert s.cli("logs", "a", "--grep", "loss [24]").stdout == "loss 2\nloss 4\n"
    assert s.cli("logs", "1", "--grep", "loss", "-n", "2").stdout == "loss 4\nloss 5\n"
    assert s.cli("logs", "1", "--grep", "end$").stdout == "no end\n"
    assert s.cli("logs", "1", "--grep", "absent", code=1).stdout == ""
    both = s.cli("logs", "1-2").stdout
    assert both.startswith("==> job 1 (a), done <==\nloss 1\n")
    assert both.endswith("no end\n\n==> job 2 (b), done <==\nnothing here\n")
    assert s.cli("logs", "1-3", "--grep", "nothing").stdout == "==> job 2 (b), done <==\nnothing here\n"
    assert s.cli("logs", "1", "-n", "0").stdout == "" and s.cli("logs", "3").stdout == ""
    error = s.cli("logs", "1", "--grep", "a(b", code=2).stderr
    assert error.startswith("gpujob: --grep: 'a(b' is not a regular expression: ") and "at position 1" in error
    for words in (["-n", "x"], ["-n", "-1"], ["-n", "1.5"], ["-n", "²"], ["--attempt", "x"], ["--raw", "--grep", "x"]):
        error = s.cli("logs", "1", *words, code=2).stderr
        assert error.startswith("gpujob: ") and error.count("\n") == 1
    s.cli("logs", "1-3", "-f", code=2)
    assert "it has logs of attempts 1" in s.cli("logs", "1", "--attempt", "2", code=6).stderr
    s.cli("logs", "9", code=6)
    done = subprocess.run(
        f"{sys.executable} -m scheduler logs 1-2 | head -1", shell=True, cwd=s.folder, env=s.environ,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "==> job 1 (a), done <==\n" and done.stderr == ""


def test_s2_8_each_attempt_keeps_its_log(scheduler):
    """S2.8, S3.29: Each attempt of a job has its own log, which later attempts do not change.

    This holds for automatic retries and for the verb `retry`. `logs` names the logs of earlier attempts.
    """
    s = scheduler(gpus=1, assign_retry_wait="0.05")
    s.start()
    run_shell(s, "echo attempt $GPUJOB_ATTEMPT; exit 3", "--retries", "1")
    assert s.job(1)["attempt"] == 2
    s.cli("retry", "1")
    wait_for(lambda: s.job(1)["attempt"] == 4 and s.states()[1] == "failed", "two more attempts")
    done = s.cli("logs", "1")
    assert done.stdout == "attempt 4\n"
    assert "this is attempt 4 of job 1; earlier attempts (1, 2, 3): gpujob logs 1 --attempt N" in done.stderr
    for number in (1, 2, 3, 4):
        done = s.cli("logs", "1", "--attempt", str(number))
        assert (done.stdout, done.stderr) == (f"attempt {number}\n", "")
    Path(s.job(1)["log"]).unlink()
    error = s.cli("logs", "1", code=1).stderr.splitlines()[-1]
    assert "cannot read the log: it was removed" in error


def test_s17_logs_passes_only_colours_to_a_terminal_and_refuses_raw(scheduler):
    """S16, S17: On a terminal, `logs` prints no control codes of a log except those for colours.

    --raw is refused on a terminal. --grep highlights matches unless NO_COLOR is set.
    """
    s = scheduler(gpus=1)
    s.start()
    evil = r"\033[31mred\033[0m \033[2J\033]0;title\007\033[6n\302\2332J \342\200\256turned \377 \a"
    run_shell(s, f"printf '{evil}\\n'")
    with viewing(s, "1", terminal=True) as viewer:
        assert viewer.end() == "\x1b[31mred\x1b[0m  \\u202eturned \ufffd \x1b[0m\n"
    assert s.cli("logs", "1").stdout == "red  \u202eturned \ufffd \n"
    with viewing(s, "1", "--grep", "r.d|turn", terminal=True) as viewer:
        assert viewer.end() == "\x1b[1;31mred\x1b[0m  \\u202e\x1b[1;31mturn\x1b[0med \ufffd \n"
    with viewing(s, "1", "--grep", "r.d", terminal=True, NO_COLOR="1") as viewer:
        assert "\x1b[1;31m" not in viewer.end()
    with viewing(s, "1", "--raw", terminal=True) as viewer:
        assert viewer.end(2) == ""
        assert viewer.said() == (
            "gpujob: cannot print --raw to a terminal: control characters would take effect; write it to a file: gpujob logs 1 --raw > FILE\n"
        )


def test_s3_20_following_a_log_on_a_terminal_redraws_the_last_line_in_place(scheduler):
    """S3.20: On a terminal, `logs -f` draws a growing last line again in the same place.

    The line is cut to the width of the terminal. Ctrl-C ends `logs -f` with exit code 130.
    """
    s = scheduler(gpus=1)
    s.start()
    talker = Talker(s)
    with viewing(s, "-f", "@", terminal=True) as viewer:
        talker.say("first\n 10% \x1b[32m##")
        shown = viewer.wait_shown("10%")
        assert shown.startswith("first\n") and shown.endswith("\r 10% \x1b[32m##\x1b[0m\x1b[K")
        talker.say("\r 20% ####")
        viewer.wait_shown("20%")
        talker.say("\r" + "x" * 60)
        shown = viewer.wait_shown("xxx")
        assert shown.endswith("\r\x1b[32m" + "x" * 39 + "\x1b[0m\x1b[K")
        talker.say("\r" + "y" * 60 + "\x1b[0m\nlast")
        shown = viewer.wait_shown("last")
        assert "\r\x1b[K\x1b[32m" + "y" * 60 + "\x1b[0m" in shown and shown.count("\n") == 2
        viewer.process.send_signal(signal.SIGINT)
        assert viewer.end(130).endswith("\rlast\x1b[K\n")
    with viewing(s, "-f", "-n", "1", "1", terminal=True) as viewer:
        viewer.wait_shown("last")
        talker.exit(0)
        shown = viewer.end()
        assert shown.endswith("\rlast\x1b[K\r\x1b[Klast\n")


@pytest.mark.smoke
def test_s3_20_following_a_log_through_a_pipe_prints_only_complete_lines(scheduler):
    """S3.20: Through a pipe, `logs -f` prints only complete lines.

    At the end of the job it also prints an incomplete last line. It works with -n and --grep. For a waiting job it
    prints the reason once.
    """
    s = scheduler(gpus=1, cpu_slots=1)
    s.start()
    first = Talker(s)
    first.say("0%")
    second = Talker(s)
    with viewing(s, "-f", "2") as waiting, viewing(s, "-f", "1") as whole, viewing(s, "-f", "1", "--grep", "b") as some:
        waiting.wait_said("gpujob: job 2 waits (")
        for text in ("\r50%", "\r100%\n", "a\n", "b\n", "ab"):
            first.say(text)
        assert whole.wait_shown("b\n") == "100%\na\nb\n"
        assert some.wait_shown("b\n") == "b\n"
        with viewing(s, "-f", "1", "-n", "2") as last, viewing(s, "-f", "1", "-n", "0") as none:
            assert last.wait_shown("b\n") == "b\n"
            wait_for(lambda: (first.say("tick\n"), none.shown())[1], "-n 0 shows what is new")
            assert set(none.shown().split()) == {"tick"}
            first.say("no end")
            first.exit(4)
            shown = whole.end()
            assert shown.startswith("100%\na\nb\nabtick\n") and shown.endswith("tick\nno end\n")
            assert some.end() == "b\nabtick\n" and shown.endswith(last.end())
            assert none.end().endswith("tick\nno end\n")
        second.say("now\n")
        assert waiting.wait_shown("now\n") == "now\n"
        second.exit(0)
        waiting.end()
        assert waiting.said().count("waits (") == 1
    with viewing(s, "-f", "1", "--grep", "nothing") as viewer:
        assert viewer.end(1) == ""


def test_s3_20_following_a_log_continues_with_the_next_attempt(scheduler):
    """S3.20, S3.29: `logs -f` continues with the next attempt of a job, and ends when the job is cancelled."""
    s = scheduler(gpus=1, assign_retry_wait="0.05")
    s.start()
    talker = Talker(s, "--retries", "1")
    talker.say("one\nno end")
    with viewing(s, "-f", "1") as viewer:
        viewer.wait_shown("one\n")
        with viewing(s, "-f", "1", "--attempt", "1") as only:
            only.wait_shown("one\n")
            talker.exit(3)
            assert only.end() == "one\nno end\n" and only.said() == ""
        wait_for(lambda: s.job(1)["attempt"] == 2 and s.states()[1] == "running", "the second attempt")
        talker.say("two\n")
        assert viewer.wait_shown("two\n") == "one\nno end\ntwo\n"
        assert "job 1 runs again: attempt 2" in viewer.said()
        s.cli("cancel", "1")
        assert viewer.end() == "one\nno end\ntwo\n"


@pytest.mark.parametrize("how", ["cut", "replaced", "removed", "moved", "folder"])
def test_f04_f05_following_reports_that_a_log_was_cut_replaced_or_removed(scheduler, how):
    """F03 (following), F04, F05, A19: `logs -f` reports once that the log was cut, replaced or removed.

    It continues at the start of a truncated or new file, and the job is not disturbed.
    """
    s = scheduler(gpus=1)
    s.start()
    talker = Talker(s)
    talker.say("before\n")
    wait_for(lambda: talker.log.exists() and talker.log.stat().st_size, "the first words")
    with viewing(s, "-f", "1") as viewer:
        viewer.wait_shown("before\n")
        log = talker.log
        if how == "cut":
            os.truncate(log, 0)
            viewer.wait_said("was truncated; following it from its start")
            talker.say("after\n")
            viewer.wait_shown("after\n")
            assert log.read_bytes() == b"after\n", "no hole"
        elif how == "replaced":
            other = log.with_name("other")
            other.write_bytes(b"another\n")
            os.rename(other, log)
            viewer.wait_said("was replaced; following the new file")
            viewer.wait_shown("before\nanother\n")
        else:
            if how == "removed":
                log.unlink()
            elif how == "moved":
                log.rename(log.with_name("elsewhere"))
            else:
                log.unlink()
                log.parent.rmdir()
            viewer.wait_said("was removed or moved")
            talker.say("after\n")
            viewer.wait_shown("before\nafter\n")
        talker.exit(0)
        viewer.end()
        assert viewer.said().count("was ") == 1
    assert s.wait_state(1, "done")
    if how == "folder":
        run_shell(s, "echo the folder is made again")
        assert s.cli("logs", "2").stdout == "the folder is made again\n"


def test_following_a_log_without_a_scheduler_ends_with_the_running_job(scheduler):
    """Without a scheduler `logs -f` follows a running job to its end; for a waiting job it exits with 5."""
    s = scheduler(gpus=1, cpu_slots=1)
    s.start()
    talker = Talker(s)
    talker.say("before\n")
    Talker(s)
    s.wait_state(1, "running")
    wait_for(lambda: s.rows("SELECT pid FROM jobs WHERE id=1")[0][0], "its pid")
    s.stop()
    with viewing(s, "-f", "1") as viewer:
        viewer.wait_said("no scheduler is running; job 1 continues without it")
        talker.say("after\nno end")
        viewer.wait_shown("before\nafter\n")
        talker.exit(0)
        assert viewer.end() == "before\nafter\nno end\n"
    wait_for(lambda: s.job(1)["state"] == "done", "its record tells how it ended")
    assert "job 2 waits, and no scheduler is running" in s.cli("logs", "-f", "2", code=5).stderr


def test_following_a_log_ends_without_an_error_when_its_reader_ends(scheduler):
    """K09 (part): `logs -f | head -1` ends without an error, also while the job writes nothing."""
    s = scheduler(gpus=1)
    s.start()
    talker = Talker(s)
    talker.say("one\n")
    done = subprocess.run(
        f"{sys.executable} -m scheduler logs -f 1 | head -1", shell=True, cwd=s.folder, env=s.environ,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("one\n", "")
    talker.exit(0)
    s.wait_ended(1)


@pytest.mark.long_form
def test_k15_logs_of_many_gigabytes_are_printed_with_limited_memory(scheduler):
    """K15, S3.20: `logs` prints logs of any size with 300 MB of address space.

    The logs are a sparse file of 10 GB, a progress bar of 40 MB, a line of 32 MB, and random bytes. In the long form of
    the test, the progress bar has 400 MB and the line has 256 MB.
    """
    s = scheduler(gpus=1)
    s.start()
    run_shell(s, "echo here")
    log = Path(s.job(1)["log"])

    def limited(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "scheduler", "logs", "1", *words], cwd=s.folder, env=s.environ,
            capture_output=True, text=True, timeout=300,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20)),
        )  # fmt: skip
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    with log.open("r+b") as stream:
        stream.truncate(10 << 30)
        stream.seek(10 << 30)
        stream.write(b"\nthe end\n")
    assert limited("-n", "1") == "the end\n"
    assert limited("-n", "2") == "… \nthe end\n"
    update = "".join(f"\r{n:3d}%|{'█' * (n // 5):20}| {n}/100" for n in range(100)).encode()
    with log.open("wb") as stream:
        for _ in range(((400 if LONG else 40) << 20) // (len(update) * 64)):
            stream.write(update * 64)
        stream.write(b"\r100%\x1b[K")
    assert limited() == "100%\n"
    assert limited("-n", "1") == "100%\n"
    with log.open("wb") as stream:
        for _ in range(256 if LONG else 32):
            stream.write(b"x" * (1 << 20))
        stream.write(b"\nshort\n")
    shown = limited("-n", "2")
    assert len(shown) < 2 << 20 and shown.endswith(" more characters)\nshort\n")
    assert limited("--grep", "^short") == "short\n"
    log.write_bytes(os.urandom(3 << 20))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", limited())
