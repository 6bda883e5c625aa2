"""`ts`: queueing, the list and its other formats, states and errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stories.spooler import Spooler

HEADER = "ID   State      Output               E-Level  Time   Command [run={}/{}]"


def test_s4_3_queueing_prints_only_the_id_and_ids_begin_at_zero(spooler: Callable[..., Spooler]) -> None:
    """S4.3: If a job is queued, `ts` prints only the id of the job; with -n, `ts` prints nothing.

    Ids begin at 0. After -K they begin at 0 again. The ids of jobs that -C has removed are not assigned again.
    """
    s = spooler()
    assert s.ts("true") == "0" and s.ts("true") == "1"
    assert s.ts("-n", "true") == ""
    s.ts("-w", "2")
    s.ts("-C")
    assert s.ts("true") == "3"
    s.ts("-K")
    assert s.ts("true") == "0"
    assert s.ts("-w", "0") == ""
    s.ts("-C")
    assert s.ts("true") == "1"


@pytest.mark.smoke
def test_s4_4_s4_5_ts_prints_list_and_states_in_the_original_format(spooler: Callable[..., Spooler]) -> None:
    """S4.4, S4.5: Without arguments, `ts` prints the list in the format and order of the original.

    -s prints the state of a job.
    """
    s = spooler()
    assert s.ts() == HEADER.format(0, 1)
    s.add("sh", "-c", "exit 3")
    assert s.ended(0) == 3
    running = s.add("-L", "a label that is longer than twenty", *s.held("a"))
    s.wait_state(running, "running")
    s.add("echo", "y" * 40)
    s.ts("-n", "-d", "echo", "two")
    skipped = s.add("-W", "0", "echo", "skipme")
    s.wait_state(skipped, "skipped")
    s.ts("-u", "3")
    lines = s.ts().splitlines()
    assert s.ts("-l").splitlines() == lines
    assert lines[0] == HEADER.format(1, 1)
    assert [line.split()[:2] for line in lines[1:]] == [
        ["1", "running"], ["3", "queued"], ["2", "queued"], ["0", "finished"], ["4", "skipped"],
    ]  # fmt: skip
    log = s.ts("-o", "1")
    assert len(log) > 20
    assert lines[1] == f"1    running    {log[:15]}...{'':19}[a label that is...]sh -c while ! [..."
    assert lines[2] == "3    queued     stdout                               [2]&& echo two"
    assert lines[3] == "2    queued     (file)                               echo yyyyyyyyyy..."
    finished = rf"0    finished   {re.escape(s.ts('-o', '0')[:15])}\.\.\.   3         \d\.\d\ds sh -c exit 3"
    assert re.fullmatch(finished, lines[4]), lines[4]
    assert lines[5] == "4    skipped    (no output)                          [0]&& echo skipme"
    assert [s.ts("-s", str(number)) for number in range(5)] == ["finished", "running", "queued", "queued", "skipped"]
    assert s.ts("-s") == "queued"
    for line in lines:
        known = {"queued", "allocating", "running", "finished", "skipped"}
        assert sum(word in known for word in line.split()) == (0 if line == lines[0] else 1)


LOG_NAME = (
    "cannot use this log name: it must have 1 to 200 bytes, and neither / nor control characters; "
    "write a plain file name"
)


def test_s4_7_an_impossible_request_exits_with_255_and_one_line(spooler: Callable[..., Spooler]) -> None:
    """S4.7: A request for an unknown job, or for a job in a wrong state, prints one error line and exits with 255."""
    s = spooler()
    s.add(*s.held("a"))
    s.wait_state(0, "running")
    s.add("true")
    s.ts("-n", "true")
    expected = {
        ("-w", "99"): "The job 99 cannot be waited.",
        ("-s", "99"): "The job 99 cannot be stated.",
        ("-r", "99"): "The job 99 cannot be removed.",
        ("-u", "99"): "The job 99 cannot be urged.",
        ("-U", "1-99"): "The jobs 1 and 99 cannot be swapped: job 99 is not waiting.",
        ("-U", "1-0"): "The jobs 1 and 0 cannot be swapped: job 0 is not waiting.",
        **{(f"-{one}", "99"): "Job 99 not finished or not running." for one in "opctk"},
        **{(f"-{one}", "1"): "Job 1 not finished or not running." for one in "opct"},
        ("-r", "0"): "The job 0 cannot be removed: it is running (-k ends it).",
        ("-u", "0"): "The job 0 cannot be urged: it is running.",
        ("-k", "1"): "The job 1 cannot be killed: it is not running.",
        ("-i", "x"): "'x' is not the number of a job.",
        ("-s", "x"): "'x' is not the number of a job.",
        ("-o", "2"): "The output is not stored.",
        ("-c", "2"): "The output is not stored.",
        ("-D", "0,x", "true"): "'x' is not the number of a job.",
        **{("-O", name, "true"): LOG_NAME for name in ("a/b", "..", "", "a\nb", "x" * 201)},
        ("--set_logdir", ""): "--set_logdir takes a folder.",
        ("--set_logdir", "/nowhere"): "/nowhere: no such folder, or it is not writable.",
    }
    for words, said in expected.items():
        done = s.run(*words)
        assert (done.returncode, done.stdout, done.stderr) == (255, "", f"Error in the request: {said}\n"), words
    for words, said in {
        ("-Z",): "Wrong option Z.",
        ("-D",): "Option D missing argument.",
        **{("-S", slots): "You should set at minimum 1 slot." for slots in ("0", "-1", "x", "9" * 30)},
        ("-U", "12"): "Wrong <id-id> for -U.",
        ("-M", "xml"): "Invalid argument for option M: xml.",
        ("-mn", "true"): "For e-mail, you should store the output.",
    }.items():
        done = s.run(*words)
        assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (255, "", said), words
    told = {
        "-i": "Job 99 not finished or not running.",
        **dict.fromkeys(("-a", "-F"), "The job 99 is not in the queue."),
    }
    for option, said in told.items():  # as in the original: on stdout, with exit code 0
        assert s.ts(option, "99") == said
    assert s.states() == {0: "running", 1: "queued", 2: "queued"}


def test_s4_7_every_action_without_jobs_prints_nothing_or_one_error_line(spooler: Callable[..., Spooler]) -> None:
    """S4.7: Without any job, each action prints an empty result, or one error line with exit code 255."""
    s = spooler()
    for words, said in {
        "-w": "The last job cannot be waited.",
        "-s": "The last job cannot be stated.",
        "-r": "The last job cannot be removed.",
        "-u": "The last job cannot be urged.",
        **{f"-{one}": "No jobs." for one in "opctk"},
    }.items():
        done = s.run(words)
        assert (done.returncode, done.stdout, done.stderr) == (255, "", f"Error in the request: {said}\n"), words
    printed = {
        "-l": HEADER.format(0, 1),
        "-M": HEADER.format(0, 1),
        "-R": "0",
        "-q": "-1",
        "-S": "1",
        "-g": "ID   GPU-IDs",
        "-C": "",
        "-T": "",
        **dict.fromkeys(("-i", "-a", "-F"), "No jobs."),
        "--get_logdir": str(s.tmp),
        "--get_gpu_free_perc": "90",
    }
    assert {words: s.ts(words) for words in printed} == printed
    assert s.ts("-M", "json") == "[]" and s.ts("-M", "tab") == ""
    assert s.ts("-h").startswith("usage: ts [action]") and s.ts("-V").startswith("Task Spooler")
    assert s.ts("-d", "true") == "0" and s.ended(0) == 0
    s.ts("-K")
    assert s.ts("-K") == ""


@pytest.mark.parametrize("value", ["0", "150", "-5", "x", ""])
def test_s4_33_an_invalid_percentage_is_refused(spooler: Callable[..., Spooler], value: str) -> None:
    """S4.33, and bug 11 of the original: A percentage outside 1 to 100 is refused and changes nothing."""
    s = spooler()
    assert s.run(f"--set_gpu_free_perc={value}").returncode == 255
    assert s.ts("--get_gpu_free_perc") == "90"


def test_s4_12_ts_prints_labels_commands_and_counts(spooler: Callable[..., Spooler]) -> None:
    """S4.12: The list shows labels; -a prints a label, -F a command, -q the last id, -R the number of running jobs."""
    s = spooler(TS_SLOTS="2")
    assert (s.ts("-q"), s.ts("-R")) == ("-1", "0")
    s.add("-L", "first", *s.held("a"))
    s.add("-Lsecond", *s.held("b"))
    s.add("-L", "third", "echo", "x" * 60, "two  words")
    s.add("true")
    s.wait_state(0, "running")
    s.wait_state(1, "running")
    assert (s.ts("-q"), s.ts("-R")) == ("3", "2")
    assert [s.ts("-a", str(number)) for number in range(4)] == ["first", "second", "third", ""]
    assert s.ts("-F", "2") == f"echo {'x' * 60} two  words"
    assert s.ts("--full_cmd", "2") == s.ts("-F", "2")
    assert s.ts("-a") == "" and s.ts("-F") == "true"
    assert "[third]echo xxxxxxxxxx..." in s.ts()
    s.ts("-r", "3")
    assert (s.ts("--last_queue_id"), s.ts("--count_running")) == ("3", "2")
    s.ts("-u", "2")
    assert s.ts("--get_label") == "third"


def test_s4_23_json_is_one_valid_line(spooler: Callable[..., Spooler]) -> None:
    """S4.23: The JSON is one line, with one object per job.

    Running, queued and skipped jobs have null as error level and time. Exit codes above 127 are shown unchanged. In the
    original, this output was wrong (bug 6).
    """
    s = spooler()
    s.add("sh", "-c", "sleep 0.7; exit 200")  # run time counts from the recorded start
    assert s.ended(0) == 200
    s.add("sleep", "1000")
    s.wait_state(1, "running")
    s.add("-W", "0", "true")
    s.ts("-n", "echo", 'quotes " and \\', "a\nb", "\t", "é")
    s.wait_state(2, "skipped")
    text = s.ts("-M", "json")
    assert "\n" not in text and s.ts("--serialize=json") == text
    jobs = {job["ID"]: job for job in json.loads(text)}
    assert [job["ID"] for job in json.loads(text)] == [1, 3, 0, 2]
    assert list(jobs[0]) == ["ID", "State", "Output", "E-Level", "Time_ms", "Command"]
    assert (jobs[0]["State"], jobs[0]["E-Level"], jobs[0]["Output"]) == ("finished", 200, s.ts("-o", "0"))
    assert jobs[0]["Time_ms"] >= 200
    assert [(jobs[n]["State"], jobs[n]["E-Level"], jobs[n]["Time_ms"]) for n in (1, 2, 3)] == [
        ("running", None, None), ("skipped", None, None), ("queued", None, None),
    ]  # fmt: skip
    assert (jobs[2]["Output"], jobs[3]["Output"]) == ("", "")
    assert jobs[3]["Command"] == 'echo quotes " and \\ a\nb \t é'
    assert " 200 " in s.ts()
    if jq := shutil.which("jq"):
        read = subprocess.run([jq, "-r", ".[].ID"], input=text, capture_output=True, text=True, check=True)
        assert read.stdout.split() == ["1", "3", "0", "2"]


def test_s4_23_json_is_valid_in_every_locale(spooler: Callable[..., Spooler]) -> None:
    """S4.23: Characters that the encoding of stdout cannot represent are written as JSON escapes."""
    s = spooler()
    s.ts("-n", "echo", "ünï", "🎉", "\n")
    for encoding in ("ascii", "latin-1", "utf-8"):
        asked = s.popen("-M", "json", environ={"PYTHONIOENCODING": encoding}, text=False)
        assert json.loads(asked.communicate(timeout=60)[0].decode(encoding))[0]["Command"].startswith("echo ünï 🎉 ")


def test_s4_24_all_rows_of_the_tab_format_have_the_same_fields(spooler: Callable[..., Spooler]) -> None:
    """S4.24: Each job is a line with the same number of fields; tabs, newlines and backslashes are escaped."""
    s = spooler()
    s.add("-L", "lab", "sh", "-c", "exit 2")
    assert s.ended(0) == 2
    s.add(*s.held("a"))
    s.add("-D", "1", "-L", "two\twords", "echo", "a\tb\nc\\d")
    s.add("-W", "0", "true")
    s.wait_state(1, "running")
    s.wait_state(3, "skipped")
    rows = [line.split("\t") for line in s.ts("-M", "tab").splitlines()]
    assert [len(row) for row in rows] == [9] * 4
    assert rows[0][:8] == ["1", "running", s.ts("-o", "1"), "", "", "", "", ""]
    assert rows[1][:6] == ["2", "queued", "(file)", "", "", ""]
    assert rows[1][6] == "[1]&&" and rows[1][8] == "echo a\\tb\\nc\\\\d"
    assert rows[2][:4] == ["0", "finished", s.ts("-o", "0"), "2"] and rows[2][5:] == ["s", "", "lab", "sh -c exit 2"]
    assert re.fullmatch(r"\d+\.\d\d", rows[2][4])
    assert rows[3] == ["3", "skipped", "(no output)", "", "", "", "[0]&&", "", "true"]


def test_s4_27_details_of_a_job_include_the_output_of_ts_env(spooler: Callable[..., Spooler]) -> None:
    """S4.27: -i prints what the command in TS_ENV printed when the job was queued.

    It also prints how the job ended, its dependencies (bug 13), its slots and its times.
    """
    s = spooler()
    s.add("sh", "-c", "exit 7", TS_ENV="echo host $((1 + 1)); echo also >&2")
    assert s.ended(0) == 7
    lines = s.ts("-i", "0").splitlines()
    assert lines[:6] == [
        "Environment:", "host 2", "also", "Exit status: died with exit code 7", "Command: sh -c exit 7", "Slots required: 1",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in lines[6:]] == ["Enqueue time", "Start time", "End time", "Time run"]
    assert re.fullmatch(r"Time run: \d+\.\d{6}s", lines[9])
    s.add("-D", "0", *s.held("a"))
    s.wait_state(1, "running")
    s.add("-D", "0,1", "true")
    lines = s.ts("-i", "1").splitlines()
    assert lines[0].startswith("Command: [0]&& sh -c while") and not any("Environment" in line for line in lines)
    assert [line.split(":")[0] for line in lines[1:]] == [
        "Slots required", "Enqueue time", "Start time", "Time running",
    ]  # fmt: skip
    assert s.ts("-i", "2").splitlines()[0] == "Command: [0,1]&& true"
    s.ts("-k", "1")
    assert s.ended(1) == 255
    assert s.ts("-i", "1").splitlines()[0] == "Exit status: killed by signal 15"


def test_s4_38_a_job_has_folder_environment_umask_and_limits_of_its_call(
    spooler: Callable[..., Spooler], tmp_path: Path
) -> None:
    """S4.38: A job has the folder, environment, umask and limits of the call that queued it, not the server's.

    CUDA_VISIBLE_DEVICES is -1 without GPUs.
    """
    s = spooler()
    s.add(*s.held("a"))  # starts the server, whose environment has no MINE
    s.wait_state(0, "running")
    there = tmp_path / "a folder"
    there.mkdir()
    asked = "pwd; echo $MINE; umask; ulimit -n; echo $CUDA_VISIBLE_DEVICES $PYTHONUNBUFFERED; ps -o sid= -p $$; echo $$"
    command = ["sh", "-c", 'umask 027; ulimit -n 321; exec "$0" sh -c "$1"', str(s.bin / "ts"), asked]
    subprocess.run(command, cwd=there, env={**s.environ, "MINE": "at submit time"}, check=True, capture_output=True)
    s.release("a")
    assert s.ended(1) == 0
    lines = s.output(1).splitlines()
    assert lines[:5] == [str(there), "at submit time", "0027", "321", "-1 1"]
    assert lines[5].strip() == lines[6]  # the job is a session leader
    assert Path(s.ts("-o", "1")).stat().st_mode & 0o777 == 0o600
