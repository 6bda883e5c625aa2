"""Commands with wrong words, without a scheduler, with closed pipes or on poor terminals.

The errors are short, and the exit codes are documented.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from scheduler.cli.app import app
from scheduler.core.config import OPTIONS, read_option
from scheduler.core.errors import SchedulerError
from scheduler.core.job_options import JOB_OPTIONS, PATH, VARIABLES, JobOption
from tests import fork_server
from tests.stories.harness import LONG, Scheduler, wait_for
from tests.stories.pouring import Pouring

COMMAND = typer.main.get_command(app)
ODD_WORDS = [
    "",
    "99",
    "0",
    "-1",
    "1" + "0" * 30,
    "3-1",
    "1-",
    "\u0663",
    "no\u00a0such",
    "nosuch\nline",
    "\x1b[2J",
    "1e3",
    "@@",
    "1,2",
    "{",
    "%s",
]
READING = [["status"], ["status", "--json"], ["jobs"], ["jobs", "--json"], ["show", "1"], ["show", "1", "--json"], ["why", "1"],
           ["logs", "1"], ["screens"], ["screens", "--json"], ["report"], ["report", "--json"], ["report", "--csv"]]  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A command line with its exit code and output."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str


def run_all(s: Scheduler, lines: Sequence[Sequence[str]], *, at_once: bool = False) -> list[Ran]:
    """Run each command line in the scheduler's folder, one after the other or, with ``at_once``, concurrently."""

    def run(words: Sequence[str]) -> Ran:
        done = fork_server.run(words, s.folder, s.environ, "", 90)
        return Ran(tuple(words), done.returncode, done.stdout, done.stderr)

    with ThreadPoolExecutor(len(lines) if at_once else 1) as pool:
        return list(pool.map(run, lines))


def verbs(command: Any = COMMAND, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the command object of each verb, including verbs of groups."""
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from verbs(inner, (*before, name))
        else:
            yield (*before, name), inner


VERBS = dict(verbs())


def kind_of(parameter: Any) -> str:
    """Return what an argument names: `job`, `gpu` or `other`."""
    shown = (parameter.metavar or parameter.name or "").upper()
    return "job" if "JOB" in shown else "gpu" if "GPU" in shown else "other"


def needed(command: Any) -> list[Any]:
    """Return the required arguments of a command."""
    return [p for p in command.params if p.param_type_name == "argument" and p.required]


def snapshot(s: Scheduler) -> dict[str, Any]:
    """Return everything that a refused command must not change.

    These are rows of the store, the contents of the jobs file, and the names of the files in the scheduler's folder.
    """
    tables = ("jobs", "pauses", "refused", "line_counts", "files", "gpus")
    found: dict[str, Any] = {table: s.rows(f"SELECT * FROM {table}") for table in tables}
    assert found["jobs"] and found["gpus"]
    found["queue"] = s.rows("SELECT value FROM meta WHERE key='queue_paused'")
    found["lines"] = s.jobs_file.read_bytes()
    found["names"] = sorted(name for name in os.listdir(s.folder) if not name.startswith("."))
    return found


def check_error(ran: Ran, codes: tuple[int, ...]) -> None:
    """Check that a command returned one of these exit codes and printed only an error of 1 to 3 lines on stderr."""
    assert ran.code in codes, ran
    assert "Traceback" not in ran.err and 1 <= ran.err.count("\n") <= 3 and ran.out == "", ran
    assert ran.err.splitlines()[-1].startswith("gpujob: ") and not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f]", ran.err
    ), ran


@pytest.fixture
def two_jobs(scheduler) -> Pouring:
    """Return a scheduler with one ended and one waiting job."""
    p = Pouring(scheduler(gpus=2))
    p.s.start()
    p.pour(p.good("one"))
    p.rest()
    p.s.cli("queue", "pause")
    p.pour(p.good("two"))
    wait_for(lambda: len(p.s.states()) == 2, "two jobs")
    return p


def test_every_verb_refuses_wrong_words(two_jobs):
    """K, S2.37: Every verb refuses missing, surplus and unknown words with exit code 2; nothing changes."""
    s = two_jobs.s
    lines: list[tuple[str, ...]] = []
    for words, command in VERBS.items():
        if words in (("ts",), ("track",)):
            continue  # own options and exit codes, tested in test_ts.py and test_track.py
        fill = tuple("1" for _ in needed(command))
        before_command: tuple[str, ...] = ()
        if not command.context_settings.get("allow_interspersed_args", True):
            fill, before_command = (), fill
        lines.append((*words, *fill, "--no-such-option", *before_command))
        lines.append((*words, *fill, "-Z", *before_command))
        if needed(command):
            lines.append((*words, *fill[1:]))
        if not any(p.nargs == -1 for p in command.params if p.param_type_name == "argument"):
            most = sum(1 for p in command.params if p.param_type_name == "argument")
            lines.append((*words, *("1" for _ in range(most + 1))))
        for option in command.params:
            if option.param_type_name == "option" and not option.is_flag and option.name != "help":
                lines.append((*words, *fill, option.opts[0]))
            elif option.param_type_name == "option" and option.opts[0].startswith("--"):
                lines.append((*words, *fill, f"{option.opts[0]}=odd", *before_command))
    lines += [
        ("nosuch",),
        ("nosuch\nverb",),
        ("",),
        ("--no-such-option",),
        ("-Z",),
        ("--state-file",),
        ("Status",),
        ("status ",),
    ]
    before = snapshot(s)
    for ran in run_all(s, lines):
        check_error(ran, (2,))
    assert snapshot(s) == before


def test_every_verb_refuses_words_that_name_no_job_or_gpu(two_jobs):
    """K: If words name no job or GPU, every verb refuses them with one line and exit code 2 or 6; nothing changes."""
    s = two_jobs.s
    lines: list[tuple[str, ...]] = []
    for words, command in VERBS.items():
        places = [p for p in command.params if p.param_type_name == "argument"]
        for number, place in enumerate(places):
            if kind_of(place) == "other":
                continue
            for odd in ODD_WORDS:
                if kind_of(place) == "gpu" and odd in ("0", "1,2"):
                    continue  # valid here: GPUs 0 and 1 exist
                fill = ["2"] * len(needed(command))
                fill[number : number + 1] = [odd]
                lines += [(*words, "--", *fill)] if odd.startswith("-") else [(*words, *fill)]
    assert len({line[0] for line in lines}) > 8
    before = snapshot(s)
    for ran in run_all(s, lines):
        check_error(ran, (2, 6))
    assert snapshot(s) == before


def takes_any_text(option: JobOption) -> bool:
    """Return whether the option accepts any text, as a label does."""
    try:
        return option.kind in (PATH, VARIABLES) or option.read("nonsense") == "nonsense"
    except SchedulerError:
        return False


def test_every_option_refuses_bad_values(two_jobs):
    """K: Every option that takes a number, size, time or choice refuses bad values with exit code 2, 3 or 6."""
    s = two_jobs.s
    odd = ["nonsense", "-5", "1" + "0" * 400, "nan", "\u0663", "x\ny"]
    # Not tested: options that accept any text, and --host, which would be looked up and would start the web page.
    free = {
        "host",
        "names",
        "tls_cert",
        "tls_key",
        "args",
        "state_file",
        "config",
        "output_file",
        "script",
        "info_command",
    }
    free |= {option.name for option in JOB_OPTIONS.values() if takes_any_text(option)}
    lines: list[tuple[str, ...]] = []
    for words, command in VERBS.items():
        for option in command.params:
            if option.param_type_name != "option" or option.is_flag or option.name in free:
                continue
            for value in odd[::2] if words == ("start",) else odd:
                if words == ("start",):
                    if refuses(option.name, value):
                        lines.append((*words, f"{option.opts[-1]}={value}"))
                    continue
                if option.name == "priority" and value == "-5":
                    continue
                fill = ["2"] * len(needed(command))
                lines.append(
                    (*words, f"{option.opts[0]}={value}", *fill)
                    if option.opts[0].startswith("--")
                    else (*words, option.opts[0], value, *fill)
                )
    before = snapshot(s)
    for ran in run_all(s, lines):
        check_error(ran, (1, 2, 3, 6) if ran.words[0] == "logs" else (2, 3, 6))  # 1: job 2 has no log yet
    assert snapshot(s) == before


def refuses(name: str, value: str) -> bool:
    """Return whether this setting refuses this value."""
    if name not in OPTIONS:
        return False
    try:
        read_option(name, value, "test")
    except SchedulerError:
        return True
    return False


def test_k01_each_verb_works_or_exits_with_5_or_6_without_a_scheduler(scheduler):
    """K01: While no scheduler runs, a verb works, or it prints a short error and exits with 5 or 6.

    It exits with 6 if the given job does not exist, and with 5 if only a scheduler can do what is requested. The test
    covers two cases: the scheduler was never started, and the scheduler was killed.
    """
    s = scheduler(gpus=1)
    for ran in run_all(s, [["status"], ["jobs"], ["screens"], ["wait"]]):
        assert ran.code == 0 and ran.err.count("\n") <= 1, ran
    for ran in run_all(
        s, [["show", "1"], ["why", "1"], ["logs", "1"], ["cancel", "1"], ["retry", "1"], ["wait", "1"], ["attach", "1"]]
    ):
        assert ran.code == 6 and ran.err.splitlines()[-1].endswith("there are no jobs yet; see gpujob status"), ran
    p = Pouring(s)
    s.hold("runs")
    s.append(s.line("runs"), p.good("ended"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "done")
    s.cli("submit", "--", "true")
    s.kill()
    for ran in run_all(s, READING):
        assert ran.code == 0 and ran.err in ("", "gpujob: no scheduler is running\n"), ran
    expected = {("cancel", "3"): 0, ("retry", "2"): 0, ("pause", "0"): 0, ("resume", "0"): 0, ("queue", "pause"): 0, ("queue", "resume"): 0,
                ("wait", "1"): 5, ("cancel", "1"): 5, ("resume", "--force", "0"): 5}  # fmt: skip
    for ran in run_all(s, list(expected)):
        assert (
            ran.code == expected[ran.words] and "no scheduler is running" in ran.err and "Traceback" not in ran.err
        ), ran
        assert ran.err.count("\n") <= 2, ran
    s.release("runs")


def test_k01_a_missing_folder_of_the_state_file_is_not_created(scheduler):
    """K01: If the folder of the given state file does not exist, verbs that change nothing show no jobs.

    The other verbs fail. No verb creates the folder.
    """
    s = scheduler(gpus=1)
    before = ["--state-file", "no/such/folder/state.json"]
    for ran in run_all(s, [[*before, *words] for words in (["status"], ["jobs"], ["screens"], ["wait"])]):
        assert ran.code == 0 and ran.err.count("\n") <= 1, ran
    changing = (
        ["pause", "0"],
        ["queue", "pause"],
        ["submit", "--cpu", "--", "true"],
        ["recover"],
        ["start", "--gpus", "1"],
    )
    for ran in run_all(s, [[*before, *words] for words in changing]):
        assert ran.code == 1 and "no such f" in ran.err.lower() and ran.out == "" and "Traceback" not in ran.err, ran
    assert not (s.folder / "no").exists()


def test_k01_an_empty_store_is_reported_and_created_again(scheduler):
    """K01: A store of 0 bytes is reported in one line; a start creates it again."""
    s = scheduler(gpus=1)
    (s.folder / ".gpujob").mkdir(mode=0o700)
    (s.folder / ".gpujob" / "store.db").touch(0o600)
    for ran in run_all(s, [["status"], ["jobs"], ["show", "1"], ["wait"], ["cancel", "1"]]):
        assert (
            ran.code == 1
            and "cannot read the store: it is still empty; start the scheduler: gpujob start" in ran.err
            and ran.err.count("\n") <= 2
        ), ran
    s.start()
    assert s.status()["jobs"] == []


def test_k07_every_verb_refuses_a_store_of_a_newer_version(scheduler):
    """K07: With a store of a newer version every verb names that version, changes nothing, and exits with 1."""
    p = Pouring(scheduler(gpus=1))
    s = p.s
    s.start()
    p.pour(p.good("a"))
    p.rest()
    s.stop()
    connection = sqlite3.connect(s.folder / ".gpujob" / "store.db")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.execute(f"PRAGMA user_version={version + 1}")
    connection.close()
    before = (s.folder / ".gpujob" / "store.db").read_bytes()
    words = [*READING, ["cancel", "1"], ["retry", "1"], ["pause", "0"], ["queue", "pause"], ["wait"], ["submit", "--cpu", "--", "true"],
             ["start", "--gpus", "1"], ["hold", "1"], ["edit", "1", "--priority", "3"]]  # fmt: skip
    for ran in run_all(s, words):
        assert ran.code == 1 and f"cannot use the store: a newer gpujob wrote it (version {version + 1}" in ran.err, ran
        assert ran.err.count("\n") <= 2 and ran.out == "", ran
    assert (s.folder / ".gpujob" / "store.db").read_bytes() == before


def test_k07_an_unknown_request_is_refused_and_others_are_carried_out(scheduler):
    """K07: An unknown or invalid request is refused; other requests are carried out."""
    p = Pouring(scheduler(gpus=1))
    s = p.s
    s.start()
    connection = sqlite3.connect(s.folder / ".gpujob" / "store.db", timeout=10)
    for kind, arguments in (
        ("defrost", '{"jobs": [1]}'),
        ("cancel", "not json"),
        ("cancel", '{"jobs": "x"}'),
        ("cancel", "[]"),
        ("pause", "{}"),
    ):
        with connection:
            connection.execute(
                "INSERT INTO requests (kind, arguments, made_at) VALUES (?,?,?)", (kind, arguments, time.time())
            )
    connection.close()
    assert "paused now: 0" in s.cli("pause", "0").stdout
    s.cli("resume", "0")
    p.pour(p.good("a"))
    p.rest()
    answers = s.rows("SELECT kind, code, lines FROM requests WHERE id<=5 ORDER BY id")
    assert all(code not in (None, 0) and json.loads(lines) for _, code, lines in answers), answers
    assert "internal error" not in s.said() and "Traceback" not in s.said()


@pytest.mark.parametrize("verb", ["cancel", "retry", "pause", "queue"])
def test_k08_fifty_concurrent_requests_have_one_effect(scheduler, verb):
    """K08: Fifty equal concurrent requests have one effect, and each is answered.

    For `cancel` and `retry`, 49 of the answers contain the word "already".
    """
    p = Pouring(scheduler(gpus=2))
    s = p.s
    p.script("fails", "#!/bin/sh\necho fails >> noted\nexit 2\n")
    s.hold("runs")
    s.append(s.line("runs"), "0,fails,,;gpus=0")
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "failed")
    words = {"cancel": ["cancel", "1"], "retry": ["retry", "2"], "pause": ["pause", "1"], "queue": ["queue", "pause"]}[
        verb
    ]
    if verb == "retry":
        s.cli("queue", "pause")
    (last,) = s.rows("SELECT coalesce(max(id), 0) FROM requests")[0]
    ran = run_all(s, [words] * 50, at_once=True)
    # Fifty commands compete for the processors: a few may give up waiting. Their requests are answered all the same.
    late = [
        one for one in ran if one.code == 5 and one.err.count("\n") == 1 and "no answer from the scheduler" in one.err
    ]
    assert all((one.code, one.err, one.out.count("\n")) == (0, "", 1) for one in ran if one not in late), ran
    stored = "SELECT lines FROM requests WHERE id>? AND code=0"
    wait_for(lambda: len(s.rows(stored, last)) == 50, "all are answered")
    answers = [" ".join(json.loads(lines)) for (lines,) in s.rows(stored, last)]
    first = {
        "cancel": "SIGTERM to all",
        "retry": "queued again",
        "pause": "GPU 1 paused (",
        "queue": "the queue is paused",
    }[verb]
    assert sum(first in answer for answer in answers) == (1 if verb in ("cancel", "retry") else 50)
    if verb in ("cancel", "retry"):
        assert sum("already" in answer for answer in answers) == 49
    if verb == "retry":
        s.cli("queue", "resume")
        s.wait_state(2, "failed")
        assert p.noted() == ["fails", "fails"]
    s.release("runs")

    def shown() -> tuple[list[int], bool]:
        state = json.loads((s.folder / "gpu_scheduler_state.json").read_text())
        return state["paused_gpus"], state["paused"]

    wanted = ([1] if verb == "pause" else [], verb == "queue")
    wait_for(lambda: shown() == wanted, "the state file shows it")  # it is written after the commit


@pytest.mark.parametrize(
    "words",
    [["wait", "1"], ["logs", "-f", "1"], ["status", "--watch"], ["submit", "--cpu", "--wait", "--", "sleep", "60"]],
)
def test_k09_ctrl_c_exits_with_130(scheduler, words):
    """K09: Ctrl-C ends a waiting command with exit code 130 and without an error message; its job continues.

    `submit --wait` prints one line, which says that the job continues. The other commands print nothing.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    with (s.folder / "out").open("wb") as out, (s.folder / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-m", "scheduler", *words], cwd=s.folder, env=s.environ, stdout=out, stderr=err,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    wait_for(lambda: words[0] != "submit" or (s.folder / "out").read_text() == "2\n", "the job's id is printed")
    waits = "hrtimer_nanosleep"
    wait_for(lambda: waits in Path(f"/proc/{process.pid}/wchan").read_text() or asleep(process.pid), "it sleeps")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    said = (s.folder / "err").read_text()
    left = "gpujob: job 2 continues; to wait again: gpujob wait 2; to end it: gpujob cancel 2\n"
    assert said == (left if words[0] == "submit" else "") and s.states()[1] == "running"
    assert words[0] != "submit" or s.states()[2] in ("pending", "starting", "running")
    s.release("a")


def asleep(pid: int) -> bool:
    """Return whether a process has loaded SQLite and sleeps (state S)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2] == "S" and "_sqlite3" in Path(f"/proc/{pid}/maps").read_text()


def test_k09_a_pipe_that_is_closed_early_causes_no_error(scheduler):
    """K09: A verb whose reader closes the pipe early exits with 0 and prints nothing on stderr.

    A shell with `pipefail` therefore sees no failure.
    """
    p = Pouring(scheduler(gpus=1))
    s = p.s
    p.script("loud", "#!/bin/sh\nyes 'a long line of output' | head -c 3000000\n")
    s.append("0,loud,,;gpus=0")
    many_jobs_after(s)
    for words in [
        *READING,
        ["logs", "1", "-n", "100000"],
        ["status", "--watch"],
        ["logs", "-f", "1"],
        ["--help"],
        ["status", "--help"],
    ]:
        assert into_a_reader_of_one_line(s, words) == (0, ""), words
    for words, reader in ((["jobs"], "true"), (["--help"], "head -1"), (["logs", "1", "-n", "100000"], "head -1")):
        # A new interpreter may print errors when it shuts down; a fork does not.
        command = f"set -o pipefail; {sys.executable} -m scheduler {' '.join(words)} | {reader}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), (words, reader, done)
        assert done.stdout.count("\n") == (1 if reader == "head -1" else 0), (words, done.stdout[:200])


def into_a_reader_of_one_line(s: Scheduler, words: list[str]) -> tuple[int, str]:
    """Run a command whose reader closes the pipe after one line; return its exit code and stderr."""
    read, write = os.pipe()
    errors = s.folder / "errors"
    with errors.open("wb") as stream:
        process = fork_server.start(words, s.folder, s.environ, write, stream)
    os.close(write)
    with os.fdopen(read, "rb", 0) as pipe:
        assert pipe.readline().endswith(b"\n"), words
    return process.wait(60), errors.read_text()


def many_jobs_after(s: Scheduler) -> None:
    """Start the scheduler, wait until its job has ended, and add 5,000 jobs that wait."""
    s.start()
    s.wait_state(1, "done")
    s.cli("queue", "pause")
    s.append(*(f"0,note,,{n} " + "x" * 60 for n in range(5000)))
    wait_for(lambda: s.rows("SELECT count(*) FROM jobs") == [(5001,)], "5,001 jobs")


def test_k05_killed_clients_do_not_disturb_the_scheduler(scheduler):
    """K05: Clients that are killed before they read their answer disturb nothing; the next client is answered."""
    s = scheduler(gpus=2)
    s.start()
    s.freeze()
    asking = [subprocess.Popen([sys.executable, "-m", "scheduler", "pause", "1"], cwd=s.folder, env=s.environ,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(3)]  # fmt: skip
    wait_for(lambda: s.rows("SELECT count(*) FROM requests") == [(3,)], "three requests")
    for one in asking:
        one.kill()
        one.wait()
    os.kill(s.pid, signal.SIGCONT)
    assert "paused now: 0,1" in s.cli("pause", "0").stdout
    wait_for(lambda: s.rows("SELECT count(*) FROM requests WHERE code IS NULL") == [(0,)], "all answered")


def test_k09_names_in_utf8_work_in_ascii_locales(scheduler):
    """K09: Names in UTF-8 work with LANG=C, LC_ALL=C and ASCII output: no traceback, no partial character."""
    p = Pouring(scheduler(gpus=1))
    s = p.s
    s.start()
    p.script("\u00fcbung", "#!/bin/sh\necho gr\u00f6\u00dfe\n")
    p.pour("0,\u00fcbung,,\u00e9t\u00e9 \u65e5\u672c;gpus=0;label=\u00dcbung", "0,\u00fcbung,,x,\u00e4")
    s.wait_state(1, "done")
    for environ in (
        {"LANG": "C"},
        {"LC_ALL": "C"},
        {"PYTHONIOENCODING": "ascii"},
    ):
        for words in [
            ["status"],
            ["jobs"],
            ["show", "\u00dcbung"],
            ["logs", "1"],
            ["add", "\u00fcbung", "--output-file", "-"],
            ["why", "\u00dcbung"],
            ["cancel", "no\u00fcch"],
        ]:
            done = fork_server.run(words, s.folder, {**s.environ, **environ}, "", 60)
            assert done.returncode == (6 if words[0] == "cancel" else 0), (environ, words, done)
            assert "Traceback" not in done.stderr
            (done.stdout + done.stderr).encode()  # fails for a partial character


@pytest.mark.parametrize("words", [*READING, ["show", "nosuch"], ["status", "--help"]], ids=" ".join)
def test_k09_commands_work_on_a_terminal_of_20_columns(two_jobs, words):
    """K09: On a terminal of 20 columns no command prints a traceback, and the table of `jobs` fits the width."""
    s = two_jobs.s
    code, text = on_terminal(s, words, 20)
    assert code == (6 if "nosuch" in words else 0) and "Traceback" not in text
    if words in (["jobs"], ["screens"]):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert max(len(line) for line in plain.splitlines()) <= (20 if words == ["jobs"] else 60)


def on_terminal(s: Scheduler, words: list[str], columns: int) -> tuple[int, str]:
    """Run a command in a new terminal; return its exit code and its output."""
    import struct
    import termios

    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(s.folder)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execve(
            sys.executable,
            [sys.executable, "-m", "scheduler", *words],
            {**s.environ, "COLUMNS": str(columns), "TERM": "xterm"},
        )
    out = b""
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        if not data:
            break
        out += data
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out.decode("utf-8", "replace").replace("\r", "")


def test_k09_a_full_stdout_gives_one_error_line_and_a_closed_one_none(two_jobs):
    """K09: If stdout is closed, a command works as if stdout was /dev/null.

    If stdout cannot be written because its disk is full, the command prints one error line and exits with 1. A closed
    or full stderr changes no exit code.
    """
    s = two_jobs.s
    quiet = [
        ["status"],
        ["jobs", "--json"],
        ["show", "1"],
        ["logs", "1"],
        ["pause", "1"],
        ["submit", "--cpu", "--", "true"],
        ["add", "note", "--output-file", "-"],
        ["--help"],
        ["--version"],
    ]
    for words in quiet:
        command = f"{sys.executable} -m scheduler {' '.join(words)}"
        for how, code in (
            ("<&- >&- 2>&-", 0),
            ("2>/dev/full", 0),
            (">/dev/full", 1),
        ):
            done = subprocess.run(
                f"{command} {how}", shell=True, cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=60
            )
            if words[0] == "logs":  # an empty log: nothing is written
                code = 0
            assert done.returncode == code, (words, how, done)
            assert done.stderr.count("\n") == code, (words, how, done)
    for how in (">&-", "2>&-", "2>/dev/full", ">/dev/full"):
        done = subprocess.run(
            f"{sys.executable} -m scheduler show 99 {how}",
            shell=True,
            cwd=s.folder,
            env=s.environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 6, (how, done)
    full = subprocess.run(
        f"{sys.executable} -m scheduler submit --cpu -- true > /dev/full",
        shell=True,
        cwd=s.folder,
        env=s.environ,
        capture_output=True,
        text=True,
    )
    last = s.rows("SELECT max(id) FROM jobs")[0][0]
    assert (
        full.returncode == 1
        and full.stderr == f"gpujob: cannot print the id of job {last}, which is queued: No space left on device\n"
    )
    connection = sqlite3.connect(s.folder / ".gpujob" / "store.db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_k09_start_runs_jobs_if_its_standard_streams_are_closed(scheduler):
    """K09: `start` runs jobs even if its stdin, stdout and stderr are closed.

    None of the output of `start` gets into the log of a job.
    """
    s = scheduler(gpus=1)
    s.append(s.line("a"))
    command = f"{sys.executable} -m scheduler start --gpus 1 --drain <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=s.folder, env=s.environ, timeout=60)
    assert done.returncode == 0 and s.starts("a") == 1
    assert shutil.which("true") and s.job(1)["state"] == "done" and s.log(1) == ""


# Forks all commands from one process with the modules loaded, so that they really run at the same time.
MANY = """
import os, sys, time
import scheduler.cli.add, scheduler.cli.show, scheduler.cli.control, filelock, sqlite3
from scheduler import command_line
began, pids = time.monotonic(), {}
for number in range(int(sys.argv[1])):
    words = (["submit", "--cpu", "--", "true"], ["status", "--json"], ["pause", "0"], ["why", "1"])[number % 4]
    pid = os.fork()
    if not pid:
        with open(f"many-{number}", "wb") as out:
            os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        code = 99
        try:
            code = command_line.main(words)
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code)
    pids[pid] = number
for _ in list(pids):
    pid, status = os.wait()
    print(pids[pid], os.waitstatus_to_exitcode(status), round(time.monotonic() - began, 2))
"""


@pytest.mark.long_form
def test_k06_concurrent_clients_are_all_answered(scheduler):
    """K06: Each of 80 concurrent commands is answered, or fails with one line; a job starts meanwhile.

    The long form of the test runs 500 commands.
    """
    many = 500 if LONG else 80
    s = scheduler(gpus=1, cpu_slots=4)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    asking = subprocess.Popen(
        [sys.executable, "-c", MANY, str(many)], cwd=s.folder, env=s.environ, stdout=subprocess.PIPE, text=True
    )
    s.append(s.line("b") + ";gpus=0")
    out, _ = asking.communicate(timeout=90)
    answered = time.time()
    codes = {int(line.split()[0]): int(line.split()[1]) for line in out.splitlines()}
    assert len(codes) == many
    for number, code in codes.items():
        said = (s.folder / f"many-{number}").read_text()
        assert code == 0 or (code in (1, 5) and said.count("\n") == 1 and said.startswith("gpujob: ")), (
            number,
            code,
            said,
        )
    sent = [number for number, code in codes.items() if number % 4 == 0 and code == 0]
    s.release("a")
    s.wait_ended(2 + len(sent))
    assert len(s.states()) == 2 + len(sent) and s.starts("b") == 1
    assert len(sent) > many // 8
    # The store has the time of the start. The job itself, a Python that competes with the commands, may write later.
    (began,) = s.rows("SELECT started_at FROM jobs WHERE json_extract(spec, '$.arguments[1]')='b'")[0]
    assert began < answered, f"b came with them, and began {began - answered:.1f} s after the last was answered"
