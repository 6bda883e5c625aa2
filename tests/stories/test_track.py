"""`gpujob track`: its verbs, files, output and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.stories.harness import ROOT, stopped, wait_for
from tests.stories.tracking import Tracked, gated

KEYS = ["id", "name", "created_at", "cwd", "commands"]
COMMAND_KEYS = ["id", "cmd", "status", "exit_code", "started_at", "finished_at", "duration_seconds", "last_output"]
SESSION = r"\d{8}-\d{6}(-\d+)?"


@pytest.mark.smoke
def test_s0_1_each_verb_works_as_in_the_quick_start_of_docs_track(tracked: Tracked) -> None:
    """S0.1: Each verb works as in the quick start of docs/track.md."""
    said = tracked.run("init", "reranker benchmark", code=0).stdout
    assert re.fullmatch(rf"Session {SESSION} \(reranker benchmark\) in {tracked.folder}/.gpu-tracker\n", said)
    assert tracked.lines("add", "echo step1") == ["Added [1]: echo step1"]
    assert tracked.lines("add", "echo", "step2", "two words") == ["Added [2]: echo step2 'two words'"]
    assert tracked.lines("next") == ["Next [1]: echo step1"]
    assert tracked.lines("run-all") == [
        "Running [1]: echo step1",
        "step1",
        "✓ [1] done (exit=0)",
        "Running [2]: echo step2 'two words'",
        "step2 two words",
        "✓ [2] done (exit=0)",
        "Finished: 2 ran, 0 skipped, 0 failed",
    ]
    assert tracked.lines("run", "echo now; exit 3", code=1) == [
        "Running [3]: echo now; exit 3",
        "now",
        "✗ [3] interrupted (exit=3)",
    ]
    tracked.run("add", "echo later", code=0)
    assert tracked.lines("remaining") == ["✗ [3] interrupted (exit=3): echo now; exit 3", "○ [4] pending: echo later"]
    status = tracked.run("status", code=0).stdout
    for line in ("✓ [1] done (exit=0)", "✗ [3] interrupted (exit=3)", "last line: now", "log: ", "○ [4] pending"):
        assert line in status, status
    assert tracked.lines("retry", code=1)[0] == "Running [3]: echo now; exit 3"
    assert tracked.lines("skip") == ["⊘ [3] skipped (exit=3): echo now; exit 3", "Skipped 1 command."]
    assert tracked.lines("next", "--run") == ["Running [4]: echo later", "later", "✓ [4] done (exit=0)"]
    assert tracked.lines("remaining") == ["No commands remain."]
    first = tracked.files[0].stem
    second = tracked.begin(name="another").files[-1].stem
    listed = tracked.run("list", code=0).stdout.splitlines()
    assert listed[0].startswith(f"  {first}") and "reranker benchmark: 3 done, 1 skipped" in listed[0]
    assert listed[1].startswith(f"* {second}") and listed[1].endswith("another: no commands")
    assert tracked.lines("delete", first) == [f"Deleted session {first}."]
    assert [path.stem for path in tracked.files] == [second]
    assert not (tracked.folder / ".gpu-tracker" / first).exists()
    tracked.run("delete", first, code=6)
    tracked.run("status", "--session", "20200101-000000", code=6)


def test_s0_2_a_session_is_a_private_file_and_found_from_subfolders(tracked: Tracked) -> None:
    """S0.2: Sessions are private files in .gpu-tracker, and are found from subfolders.

    A command runs in the folder in which `add` was called.
    """
    done = tracked.run("status")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"gpujob: no session here .*; begin a session: gpujob track init NAME\n", done.stderr)
    below = tracked.folder / "a" / "b"
    below.mkdir(parents=True)
    tracked.begin("pwd")
    tracked.run("add", "pwd", folder=below, code=0)
    tracked.run("run-all", folder=tracked.folder / "a", code=0)
    assert [one["last_output"] for one in tracked.json()["commands"]] == [[str(tracked.folder)], [str(below)]]
    assert tracked.json()["cwd"] == str(tracked.folder)
    house = tracked.folder / ".gpu-tracker"
    for path in (house, *house.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    stored = tracked.stored()
    assert stored["schema"] == 1 and [one["cwd"] for one in stored["commands"]] == [".", "a/b"]
    assert sorted(path.name for path in tracked.folder.iterdir()) == [".gpu-tracker", "a"]


def test_s0_2_a_session_works_in_a_moved_folder(tracked: Tracked, tmp_path: Path) -> None:
    """S0.2: A session still works after its folder was moved, because the paths in its file are relative."""
    old = tmp_path / "old"
    old.mkdir()
    tracked.folder = old
    tracked.begin("pwd")
    tracked.run("run", "false", code=1)
    tracked.folder = tmp_path / "new"
    old.rename(tracked.folder)
    tracked.run("run-all", code=0)
    assert tracked.command(1)["last_output"] == [str(tracked.folder)]
    assert "log: .gpu-tracker/" in tracked.run("status", code=0).stdout


def test_s0_3_status_json_has_exactly_the_documented_keys(tracked: Tracked) -> None:
    """S0.3: `status --json` has exactly the documented keys, times in ISO 8601, and null for unknown values."""
    tracked.begin("echo out; echo err >&2; exit 4", "true")
    tracked.run("run-all", code=1)
    found = tracked.json()
    assert list(found) == KEYS and all(list(one) == COMMAND_KEYS for one in found["commands"])
    assert found["name"] == "a session" and found["id"] == tracked.files[0].stem
    failed, waits = found["commands"]
    assert (failed["status"], failed["exit_code"]) == ("interrupted", 4)
    assert sorted(failed["last_output"]) == ["err", "out"]
    for key in ("started_at", "finished_at"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", failed[key])
    assert failed["started_at"] <= failed["finished_at"] and 0 <= failed["duration_seconds"] < 60
    assert waits == {
        "id": 2, "cmd": "true", "status": "pending", "exit_code": None, "started_at": None, "finished_at": None,
        "duration_seconds": None, "last_output": [],
    }  # fmt: skip


def test_s0_4_json_and_text_show_the_five_statuses(tracked: Tracked) -> None:
    """S0.4: JSON and text show the five statuses. The text shows a symbol for each status.

    If the encoding of stdout is not UTF-8, the symbols are ASCII characters.
    """
    tracked.begin("true", "false", gated("c"), "true")
    tracked.run("next", "--run", code=0)
    tracked.run("next", "--run", code=1)
    tracked.run("skip", code=0)
    tracked.run("run", "exit 5", code=1)
    one = tracked.popen("next", "--run")
    tracked.wait_status(3, "running")
    assert tracked.statuses() == ["done", "skipped", "running", "pending", "interrupted"]
    lines = tracked.lines("status")
    symbols = [re.match(r"(.) \[(\d)\] (\w+)", line) for line in lines]
    assert [found.groups() for found in symbols if found] == [
        ("✓", "1", "done"), ("⊘", "2", "skipped"), ("►", "3", "running"), ("○", "4", "pending"), ("✗", "5", "interrupted"),
    ]  # fmt: skip
    plain = subprocess.run(
        [sys.executable, "-m", "scheduler", "track", "remaining"],
        cwd=tracked.folder, env={**tracked.environ, "LC_ALL": "C"}, capture_output=True, check=True,
    )  # fmt: skip
    assert [line[:5] for line in plain.stdout.decode("ascii").splitlines()] == ["> [3]", "o [4]", "x [5]"]
    tracked.go("c")
    assert one.wait(60) == 0


@pytest.mark.smoke
def test_s0_5_run_all_stops_at_the_first_failure(tracked: Tracked) -> None:
    """S0.5: `run-all` stops after the first command that fails.

    The next `run-all` continues with the command after the failed one.
    """
    tracked.begin("echo 1", "exit 9", "echo 3")
    lines = tracked.lines("run-all", code=1)
    assert lines[-2:] == ["✗ [2] interrupted (exit=9)", "Finished: 2 ran, 0 skipped, 1 failed"]
    assert tracked.statuses() == ["done", "interrupted", "pending"]
    done = tracked.run("run-all", code=0)
    assert done.stdout.splitlines()[-1] == "Finished: 1 ran, 0 skipped, 0 failed"
    assert done.stderr == (
        "gpujob: not run, because interrupted earlier: [2] (gpujob track retry runs the first of them again, "
        "gpujob track skip skips all of them)\n"
    )


def test_the_advice_after_a_second_failure_names_the_command_that_retry_runs(tracked: Tracked) -> None:
    """If two commands have failed, `run-all` prints that `retry` runs the first of them and `skip` skips both.

    After the first failure, it prints that `retry` runs the failed command, and `skip` skips this command.
    """
    tracked.begin("exit 8", "exit 9", "echo 3")
    advice = "gpujob: stopped with {} pending: gpujob track retry runs {} again, gpujob track skip skips {}, "
    first = tracked.run("run-all", code=1).stderr
    assert first.startswith(advice.format("2 commands", "the failed command", "it"))
    second = tracked.run("run-all", code=1).stderr
    assert second.startswith(advice.format("1 command", "[1]", "all interrupted commands"))
    assert tracked.lines("retry", code=1)[0].startswith("Running [1]")


def test_s0_5_skip_errors_skips_failed_commands(tracked: Tracked) -> None:
    """S0.5: With `--skip-errors`, a command that fails or is killed by a signal is skipped; later commands run."""
    tracked.begin("true", "echo no; exit 1", "true")
    assert tracked.lines("run-all", "--skip-errors") == [
        "Running [1]: true",
        "✓ [1] done (exit=0)",
        "Running [2]: echo no; exit 1",
        "no",
        "⊘ [2] skipped (exit=1)",
        "Running [3]: true",
        "✓ [3] done (exit=0)",
        "Finished: 3 ran, 1 skipped, 0 failed",
    ]
    tracked.run("add", "kill -SEGV $$", code=0)
    lines = tracked.lines("run-all", "--skip-errors")
    assert lines[-2:] == ["⊘ [4] skipped (signal=11)", "Finished: 1 ran, 1 skipped, 0 failed"]
    assert tracked.statuses() == ["done", "skipped", "done", "skipped"]


def test_s0_6_the_last_twenty_lines_of_output_are_kept(tracked: Tracked) -> None:
    """S0.6: The last 20 lines of stdout and stderr are kept as a terminal would show them, without escape sequences."""
    tracked.begin()
    tracked.run("run", "seq 1 40; echo last >&2", code=0)
    assert tracked.command(1)["last_output"] == [*map(str, range(22, 41)), "last"]
    tracked.run("run", r"printf 'a\r10%%\r20%%\rbar 99%%\n\033[31mred\033[0m\033]0;t\007\nno end'", code=0)
    assert tracked.command(2)["last_output"] == ["bar 99%", "red", "no end"]
    shown = tracked.run("run", r"printf '\033[31mred\n'; printf 'no end'", code=0).stdout
    assert "\x1b[31mred\n" in shown and shown.endswith("no end\n✓ [3] done (exit=0)\n"), (
        "on our stdout it is as it came"
    )


@pytest.mark.waits
def test_s0_6_output_is_shown_and_saved_while_the_command_runs(tracked: Tracked) -> None:
    """S0.6: Output is shown immediately, and saved in the session file every 5 s (the test allows 10 s)."""
    tracked.begin()
    text = "echo one; while [ ! -e go.1 ]; do sleep 0.05; done; seq 2 40; while [ ! -e go.2 ]; do sleep 0.05; done; echo over"
    one = tracked.popen("run", text)
    assert one.stdout is not None
    assert one.stdout.readline().startswith("Running [1]") and one.stdout.readline() == "one\n"

    def saved() -> list[str]:
        return tracked.stored()["commands"][0]["last_output"]

    wait_for(lambda: saved() == ["one"], "saved while it runs", 10)
    assert tracked.stored()["commands"][0]["status"] == "running"
    tracked.go("1")
    for number in range(2, 41):
        assert one.stdout.readline() == f"{number}\n"
    wait_for(lambda: saved() == [*map(str, range(21, 41))], "saved again while it runs", 10)
    assert tracked.command(1)["status"] == "running"
    tracked.go("2")
    assert one.wait(60) == 0
    assert tracked.command(1)["last_output"] == [*map(str, range(22, 41)), "over"]


def test_s0_6_python_output_is_not_buffered(tracked: Tracked) -> None:
    """S0.6: The output of a Python script is shown immediately: Python does not buffer it."""
    tracked.begin()
    script = "import time, os\nprint('at once')\nwhile not os.path.exists('go.p'): time.sleep(.05)"
    one = tracked.popen("run", sys.executable, "-c", script)
    assert one.stdout is not None
    assert one.stdout.readline().startswith("Running [1]") and one.stdout.readline() == "at once\n"
    tracked.go("p")
    assert one.wait(60) == 0


def test_a_command_reads_the_trackers_stdin(tracked: Tracked) -> None:
    """A command reads the tracker's stdin: a pipe to its end, or /dev/null, which is empty."""
    tracked.begin("cat")
    one = tracked.popen("run-all", stdin=subprocess.PIPE)
    out, _ = one.communicate("one\ntwo\n", timeout=60)
    assert "one\ntwo\n" in out and one.returncode == 0
    assert tracked.popen("run", "cat").wait(60) == 0
    assert not list((tracked.folder / ".gpu-tracker").rglob("caller-*"))


def test_a_command_tracked_inside_a_job_gets_the_variables_of_the_job(tracked: Tracked) -> None:
    """If the tracker runs in a job, a tracked command gets the GPUJOB_ variables of this job.

    It always gets the tracker's own variables (GPUJOB_TRACK_…). Outside of a job, it gets no other GPUJOB_ variables.
    """
    tracked.begin()
    text = "env | grep ^GPUJOB_ | grep -v -e ^GPUJOB_WARM= -e ^GPUJOB_BOOKINGS -e ^GPUJOB_MACHINE | sort"
    job = {"GPUJOB_ID": "12", "GPUJOB_ATTEMPT": "3", "GPUJOB_STATE_FILE": "/x/state.json"}
    tracked.run("run", text, code=0, **job)
    own = ["GPUJOB_TRACK_ATTEMPT=1", "GPUJOB_TRACK_ID=1", f"GPUJOB_TRACK_SESSION={tracked.files[0]}"]
    theirs = [f"{name}={job[name]}" for name in sorted(job)]
    assert tracked.command(1)["last_output"] == [*theirs, *own]
    tracked.run("run", text, code=0)
    assert tracked.command(2)["last_output"] == [own[0], "GPUJOB_TRACK_ID=2", own[2]]


def test_s0_9_fifty_concurrent_adds_get_distinct_ids(tracked: Tracked) -> None:
    """S0.9: Fifty concurrent `add` calls add fifty commands with distinct ids; a reader never sees a partial file."""
    tracked.begin()
    path, over, torn = tracked.files[0], threading.Event(), []

    def look() -> None:
        while not over.is_set():
            try:
                json.loads(path.read_bytes())
            except ValueError as error:
                torn.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    ended: list[subprocess.CompletedProcess[str]] = []
    adders = [threading.Thread(target=lambda n=n: ended.append(tracked.run("add", f"echo {n}"))) for n in range(50)]
    tracked.run("status", code=0)  # starts the fork server before the threads use it
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    over.set()
    reader.join()
    assert not torn and [done.returncode for done in ended] == [0] * 50, [done.stderr for done in ended]
    commands = tracked.json()["commands"]
    assert [one["id"] for one in commands] == list(range(1, 51))
    assert {one["cmd"] for one in commands} == {f"echo {n}" for n in range(50)}


def test_s0_10_two_concurrent_run_alls_run_each_command_once(tracked: Tracked) -> None:
    """S0.10: If two `run-all` calls run at the same time, each command runs once.

    The second call prints that it waits for the first call.
    """
    tracked.begin(gated("a"), *(f"echo {n} >> ledger" for n in range(2, 9)))
    first = tracked.popen("run-all")
    tracked.exists("begun.a")
    second = tracked.popen("run-all")
    assert second.stderr is not None
    assert second.stderr.readline() == f"gpujob: run-all with pid {first.pid} is running; waiting for its end\n"
    tracked.go("a")
    outs = [one.communicate(timeout=60)[0].splitlines() for one in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert outs[0][-1] == "Finished: 8 ran, 0 skipped, 0 failed"
    assert outs[1] == ["No pending commands.", "Finished: 0 ran, 0 skipped, 0 failed"]
    assert (tracked.folder / "ledger").read_text().split() == [str(n) for n in range(2, 9)]
    assert tracked.statuses() == ["done"] * 8


def test_s0_10_no_command_runs_twice_beside_a_run_all(tracked: Tracked) -> None:
    """S0.10: While a `run-all` runs, `run` and `next --run` run other commands. No command runs twice."""
    tracked.begin(gated("a"), *(f"echo {n} >> ledger" for n in range(2, 7)))
    first = tracked.popen("run-all")
    tracked.exists("begun.a")
    others = [tracked.popen("next", "--run") for _ in range(3)] + [tracked.popen("run", "echo 7 >> ledger")]
    assert [one.wait(60) for one in others] == [0] * 4
    tracked.go("a")
    assert first.wait(60) == 0
    assert sorted((tracked.folder / "ledger").read_text().split()) == [str(n) for n in range(2, 8)]
    assert tracked.statuses() == ["done"] * 7


def test_s0_11_exit_code_tells_whether_a_command_failed(tracked: Tracked) -> None:
    """S0.11: `run`, `next --run`, `retry` and `run-all` exit with 1 if a command failed, else with 0."""
    tracked.begin("exit 7", "exit 8", "true")
    tracked.run("next", "--run", code=1)
    tracked.run("retry", code=1)
    tracked.run("run-all", code=1)
    tracked.run("run-all", code=0)
    tracked.run("run", "exit 255", code=1)
    tracked.run("run", "kill -9 $$", code=1)
    tracked.run("run", "true", code=0)
    tracked.run("run", "/nowhere/program", code=1)
    codes = [one["exit_code"] for one in tracked.json()["commands"]]
    assert codes == [7, 8, 0, 255, None, 0, 127]


def test_s0_12_retry_takes_the_first_interrupted_command_and_next_the_first_pending(tracked: Tracked) -> None:
    """S0.12: `retry` runs the first interrupted command, `next` the first pending command.

    It is no error if there is no such command.
    """
    tracked.begin("test -e one", "test -e two")
    tracked.run("next", "--run", code=1)
    tracked.run("next", "--run", code=1)
    assert tracked.lines("next") == ["No pending commands."]
    assert tracked.lines("next", "--run") == ["No pending commands."]
    (tracked.folder / "one").touch()
    assert tracked.lines("retry") == ["Running [1]: test -e one", "✓ [1] done (exit=0)"]
    (tracked.folder / "two").touch()
    assert tracked.lines("retry") == ["Running [2]: test -e two", "✓ [2] done (exit=0)"]
    assert tracked.lines("retry") == ["No interrupted commands."]
    assert tracked.lines("skip") == ["No interrupted commands."]
    assert tracked.lines("run-all") == ["No pending commands.", "Finished: 0 ran, 0 skipped, 0 failed"]


def test_s0_13_every_verb_works_with_the_standard_library_alone(tracked: Tracked) -> None:
    """S0.13: Every verb and the help work with the standard library alone."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scheduler.command_line import main; sys.exit(main(sys.argv[1:]))"
    words = [
        "init a session", "add true", "run-all", "run 'exit 3'", "retry", "next", "next --run", "status", "status --json",
        "remaining", "skip", "list", "add 'a b' --session 20200101-000000", "--help", "nonsense",
    ]  # fmt: skip
    codes = []
    for line in words:
        command = [sys.executable, "-I", "-S", "-c", start, "track", *shlex.split(line)]
        done = subprocess.run(command, cwd=tracked.folder, env=tracked.environ, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        codes.append(done.returncode)
    assert codes == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 6, 0, 2]
    assert tracked.statuses() == ["done", "skipped"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"name": "a"}', '{"name": "a", "commands": [{"id": "x", "cmd": "y"}]}', "\xff\xfe"]
)
def test_s0_14_a_corrupt_session_does_not_affect_others(tracked: Tracked, text: str) -> None:
    """S0.14: If a session file is corrupt, a verb that needs it prints one error line.

    The line names the path of the file and says how to correct or delete the file. Other sessions, `list` and `init`
    work.
    """
    whole = tracked.begin("echo fine", name="whole").files[0]
    broken = tracked.begin("echo lost", name="broken").files[-1]
    broken.write_bytes(text.encode("latin-1"))
    for words in (
        ["status"], ["status", "--json"], ["add", "x"], ["run", "touch ran"], ["run-all"], ["next"], ["next", "--run"],
        ["remaining"], ["retry"], ["skip"],
    ):  # fmt: skip
        done = tracked.run(*words)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert done.stderr.startswith(f"gpujob: {broken}: cannot read the session: ")
        assert (
            done.stderr.endswith(f"; correct the file, or delete it: gpujob track delete {broken.stem}\n")
            and done.stderr.count("\n") == 1
        )
    assert not (tracked.folder / "ran").exists() and broken.read_bytes() == text.encode("latin-1")
    listed = tracked.run("list")
    assert listed.returncode == 1 and str(broken) in listed.stderr and "whole: 1 pending" in listed.stdout
    tracked.run("run-all", "--session", whole.stem, code=0)
    assert tracked.lines("status", "--session", whole.stem)[1].startswith("✓ [1] done (exit=0)")
    tracked.run("delete", broken.stem, code=0)
    assert tracked.statuses() == ["done"], "the newest is the whole one again"
    broken.write_text(text)
    tracked.begin(name="third")
    assert tracked.json()["name"] == "third"


def test_a_session_with_a_running_command_is_not_deleted(tracked: Tracked) -> None:
    """`delete` refuses to delete a session while one of its commands runs.

    If the session file is corrupt, `delete` finds the running command in the attempt records.
    """
    tracked.begin()
    name = tracked.files[0].stem
    one = tracked.popen("run", gated("a"))
    tracked.exists("begun.a")
    refused = tracked.run("delete", name, code=1)
    assert (
        refused.stderr
        == f"gpujob: session {name}: cannot delete the session: command 1 runs; end it first, or wait for it\n"
    )
    whole = tracked.files[0].read_bytes()
    tracked.files[0].write_text("{")
    tracked.run("delete", name, code=1)
    tracked.files[0].write_bytes(whole)
    tracked.go("a")
    assert one.wait(60) == 0
    tracked.run("delete", name, code=0)


def test_a_damaged_session_is_not_deleted_while_the_pid_of_its_command_is_not_recorded(tracked: Tracked) -> None:
    """`delete` refuses to delete a corrupt session even if the pid of its running command is not recorded yet.

    The test stops the supervisor between the start of the command and the write of the pid into the attempt record.
    """
    tracked.begin()
    name = tracked.files[0].stem
    one = tracked.popen("run", gated("a"), environ={"GPUJOB_CRASH_AT": "supervisor.spawned:1:stop"})
    tracked.exists("begun.a")
    (supervisor,) = tracked.supervisors()
    wait_for(lambda: stopped(supervisor), "the supervisor stops")  # an earlier SIGCONT has no effect
    whole = tracked.files[0].read_bytes()
    tracked.files[0].write_text("{")
    refused = tracked.run("delete", name, code=1)
    assert (
        refused.stderr
        == f"gpujob: session {name}: cannot delete the session: command 1 runs; end it first, or wait for it\n"
    )
    tracked.files[0].write_bytes(whole)
    os.kill(supervisor, signal.SIGCONT)
    tracked.go("a")
    assert one.wait(60) == 0
    tracked.run("delete", name, code=0)


def test_a_session_of_another_user_is_ignored(tracked: Tracked, tmp_path: Path) -> None:
    """`track` ignores a session in a folder above the current folder if the session belongs to another user.

    Otherwise the commands of the session would run with the rights of the user who calls `track`.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a file of somebody else")
    tracked.begin("touch ran")
    os.chown(tmp_path / ".gpu-tracker", 12345, 12345)
    below = tmp_path / "below"
    below.mkdir()
    assert "no session here" in tracked.run("run-all", folder=below, code=1).stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["nxt"], "track has no command 'nxt'; did you mean next? see gpujob track --help"),
        (["run-all", "--skip-error"], "track run-all has no option '--skip-error'; did you mean --skip-errors? see gpujob track --help"),
        (["run"], "track run: the command is missing; gpujob track run \"python train.py\""),
        (["add", "  "], "the command is empty; gpujob track add \"python train.py\""),
        (["run", "python x.py", "more"], "it is not clear whether 'more' belongs to the command; put the whole command into one pair of quotes, or write -- first: gpujob track run -- …"),
        (["init"], "the session needs a name; gpujob track init NAME"),
        (["delete"], "delete takes the id of one session; see gpujob track list"),
        (["status", "more"], "track status: unexpected word 'more'; see gpujob track --help"),
        (["status", "--session"], "--session needs a value; see gpujob track list"),
    ],
)  # fmt: skip
def test_track_usage_errors_are_one_line(tracked: Tracked, words: list[str], said: str) -> None:
    """A usage error gives exit code 2 and one line, and has no effect."""
    done = tracked.run(*words, code=2)
    assert (done.stdout, done.stderr.replace("\\u2026", "…")) == ("", f"gpujob: {said}\n")
    assert not list(tracked.folder.iterdir())


def test_options_may_follow_a_quoted_command(tracked: Tracked) -> None:
    """Options may follow a command given as one quoted text; words after `--` belong to the command."""
    tracked.begin()
    tracked.run("run", "echo one two", "--keep", code=0)
    tracked.run("run", "--", "echo", "--keep", code=0)
    tracked.run("run", "echo", "--keep", code=0)
    assert [one["cmd"] for one in tracked.json()["commands"]] == ["echo one two", "echo --keep", "echo --keep"]
    for words in (["-h"], ["--help"], [], ["run", "--help"], ["status", "-h"]):
        assert tracked.lines(*words)[0] == "Usage: gpujob track VERB"


def test_track_log_prints_the_whole_log_of_a_command(tracked: Tracked) -> None:
    tracked.begin("seq 30", "echo b; exit 3", "true")
    assert "command 1 has no log" in tracked.run("log", "1", code=6).stderr
    tracked.run("run-all", code=1)
    assert tracked.lines("log", "1") == [str(n) for n in range(1, 31)]
    assert tracked.lines("log") == tracked.lines("log", "2") == ["b"]
    for words, code in ((["log", "3"], 6), (["log", "9"], 6), (["log", "x"], 6), (["log", "1", "2"], 2)):
        assert len(tracked.run(*words, code=code).stderr.splitlines()) == 1
    tracked.run("skip", code=0)
    assert any("log: " in line for line in tracked.lines("status")), "also of a skipped one"


def test_next_and_retry_report_a_command_that_still_runs(tracked: Tracked) -> None:
    """`next --run` and `retry` do not wait for a running command, and print that it still runs."""
    tracked.begin(gated("a"), "true")
    one = tracked.popen("run-all")
    tracked.pid_of(1)
    done = tracked.run("next", "--run", code=0)
    assert re.fullmatch(r"gpujob: \[1\] still runs \(pid \d+\); only run-all waits for its end\n", done.stderr)
    assert "[1] still runs" in tracked.run("retry", code=0).stderr
    tracked.go("a")
    assert one.wait(60) == 0


def test_run_all_prints_what_to_do_after_a_failure(tracked: Tracked) -> None:
    tracked.begin("false", "true", "true")
    done = tracked.run("run-all", code=1)
    assert done.stdout.splitlines()[-1] == "Finished: 1 ran, 0 skipped, 1 failed"
    assert "stopped with 2 commands pending: gpujob track retry" in done.stderr


def test_a_program_named_gpu_tracker_works_as_gpujob_track(tracked: Tracked) -> None:
    """A program named `gpu-tracker` works as `gpujob track`.

    `gpujob track` reports that it does not read the sessions of the original gpu-tracker.
    """
    (tracked.folder / ".gpu-tracker").mkdir(mode=0o700)
    (tracked.folder / ".gpu-tracker" / "ses_20260101_101010_123.json").write_text("{}")
    assert (
        "the sessions that the program gpu-tracker left in .gpu-tracker are not read"
        in tracked.run("status", code=1).stderr
    )
    program = tracked.folder / "gpu-tracker"
    program.write_text(f"#!{sys.executable}\nfrom scheduler.entrypoint import entry\n\nentry()\n")
    program.chmod(0o755)
    for words, code in ((["init", "x"], 0), (["run", "exit 4"], 1)):
        assert (
            subprocess.run([program, *words], cwd=tracked.folder, env=tracked.environ, check=False).returncode == code
        )
    assert tracked.statuses() == ["interrupted"]
