"""Jobs from the line in the jobs file to the recorded ending."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.prefixes import venv_prefix
from tests.stories.harness import none_more_open, open_files, wait_for


@pytest.mark.smoke
def test_lines_run_with_gpu_arguments_and_log(scheduler):
    """S3.10, S3.18, S3.19, S3.20: A line starts a process that gets its GPUs in --cuda and CUDA_VISIBLE_DEVICES.

    The output of the process is shown live and is complete in the log.
    """
    s = scheduler(gpus=2)
    s.start()
    show = s.folder / "show.py"
    show.write_text(
        "import os, sys\nprint('args', sys.argv[1:])\nprint('cvd', os.environ['CUDA_VISIBLE_DEVICES'],"
        " os.environ['CUDA_DEVICE_ORDER'], os.environ['GPUJOB_GPUS'], os.environ['GPUJOB_SHARE'])\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    s.append(
        "0,show.py,,--name 'a b' --cuda 7 --x \"q r\",1",
        "0,show.py,,--cuda=7 second,0-1;gpus=2",
        "0,show.py,,third;cuda=local,1",
        "0,show.py,,fourth;cuda=unset;gpus=0.25,0",
    )
    s.wait_ended(4)
    logs = {i: s.log(i) for i in (1, 2, 3)}
    assert "args ['--name', 'a b', '--cuda', '1', '--x', 'q r']" in logs[1]
    assert "cvd 1 PCI_BUS_ID 1 1" in logs[1]
    assert "to stderr" in logs[1]
    assert "args ['--cuda=0,1', 'second']" in logs[2]
    assert "cvd 0,1 PCI_BUS_ID 0,1 1" in logs[2]
    assert "args ['third', '--cuda', '0']" in logs[3] and "cvd 1 PCI_BUS_ID 1 1" in logs[3]
    assert s.job(4)["state"] == "failed"  # CUDA_VISIBLE_DEVICES is not set there, so reading it raises KeyError
    assert "KeyError: 'CUDA_VISIBLE_DEVICES'" in s.log(4)
    wait_for(lambda: "[2] args ['--cuda=0,1', 'second']" in s.said(), "the output in the scheduler's own")
    s.says("[1] to stderr")
    log = s.job(1)["log"]
    assert os.path.basename(log).startswith("job_1_") and os.stat(log).st_mode & 0o777 == 0o600


def test_documented_lines_are_read_as_documented(scheduler):
    """S3.3, S3.4, S3.5: The three example lines of the documentation are read as described there.

    Comments and empty lines are skipped; a line may have two to five fields.
    """
    s = scheduler(gpus=8)
    (s.folder / "jobs.txt").write_text(
        "# a comment\n\n   # another\n"
        "0,/path/to/train.py,pytorch_env,--llm qwen2.5-7b-inst --epochs 100,0-3\n"
        "1,/path/to/eval.py,pytorch_env,--llm qwen2.5-3b-inst --dataset test,\n"
        "2,/path/to/inference.py,,--llm qwen2.5-32b-inst --batch_size 1,4,5,6,7\n"
        "3 , job.py\n4,job.py, ,\n"
    )
    s.start()
    wait_for(lambda: len(s.states()) == 5 or len(s.states()) == 4, "jobs")
    jobs = json.loads(s.cli("jobs", "--json").stdout)["jobs"]
    assert [j["allowed_gpus"] for j in jobs[:3]] == [[0, 1, 2, 3], None, [4, 5, 6, 7]]
    assert [j["conda_env"] for j in jobs[:3]] == ["pytorch_env", "pytorch_env", None]
    assert jobs[0]["arguments"] == ["--llm", "qwen2.5-7b-inst", "--epochs", "100"]
    assert jobs[2]["arguments"] == ["--llm", "qwen2.5-32b-inst", "--batch_size", "1"]
    assert [j["reason_code"] for j in jobs[:3]] == ["missing"] * 3
    s.says("is read as the list of allowed GPUs, and the arguments end with 1")


SHOW_ARGUMENTS = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['GPUJOB_GPUS'], sys.executable]))\n"


def test_s3_5_s3_8_lines_of_two_to_five_fields_run_with_the_right_arguments(scheduler):
    """S3.5, S3.8: Lines of 2, 3, 4 and 5 fields run with the right arguments, without the spaces around fields.

    A list of GPUs is obeyed, and a bad one is refused with file, line and reason.
    """
    s = scheduler(gpus=6)
    for name in ("two", "three", "four", "five", "list"):
        (s.folder / f"{name}.py").write_text(SHOW_ARGUMENTS)
    environment = venv_prefix(s.folder / "an environment")
    s.start()
    s.append(
        "0,two.py",
        f" 0 ,\tthree.py , {environment} ",
        "  1 , four.py ,, --name 'a b'  --say \"it's\"  c\\ d ",
        ' 2, five.py , , "--layers 1,2" , 5 ',
        "3,list.py,,one,2",
        "3,list.py,,two,0,2;gpus=2",
        "3,list.py,,range,0-3;gpus=4",
        "3,list.py,,mixed, 0-1,5 ;gpus=3",
        '3,list.py,,quoted,"0-1, 5";gpus=3',
    )
    s.wait_ended(9)
    shown = {number: json.loads(s.log(number)) for number in s.states()}
    assert set(s.states().values()) == {"done"}
    assert [shown[number][0][:-2] for number in range(1, 5)] == [
        [], [], ["--name", "a b", "--say", "it's", "c d"], ["--layers", "1,2"],
    ]  # fmt: skip
    assert all(words[-2:] == ["--cuda", gpus] for words, gpus, _ in shown.values())
    assert [Path(shown[number][2]).parents[1] == environment for number in range(1, 5)] == [False, True, False, False]
    jobs = json.loads(s.cli("jobs", "--json").stdout)["jobs"]
    assert [job["priority"] for job in jobs[:4]] == [0, 0, 1, 2]
    # Each job with a list needs as many GPUs as its list names, so it must get exactly these.
    lists = {shown[number][0][0]: shown[number][1] for number in range(5, 10)}
    assert shown[4][1] == "5"
    assert lists == {"one": "2", "two": "0,2", "range": "0,1,2,3", "mixed": "0,1,5", "quoted": "0,1,5"}
    allowed = {job["arguments"][0]: job["allowed_gpus"] for job in jobs[4:]}
    assert allowed == {"one": [2], "two": [0, 2], "range": [0, 1, 2, 3], "mixed": [0, 1, 5], "quoted": [0, 1, 5]}

    bad = {"6": "GPU 6 is not managed here", "6,7": "GPUs 6,7 are not managed here", "5-6": "GPU 6 is not managed here",
           "3-1": "is backwards", "x": "not a GPU list", "1-x": "not a GPU list", "0-": "not a GPU list"}  # fmt: skip
    s.append(*(f"0,list.py,,never,{each}" for each in bad), "0,list.py,,last,4")
    s.wait_ended(10)
    refused = s.status()["refused"]
    assert [one["line"] for one in refused] == list(range(10, 17))
    for number, (each, reason) in enumerate(bad.items(), start=10):
        assert reason in refused[number - 10]["reason"], (each, refused[number - 10])
        wait_for(lambda n=number: f"jobs.txt:{n}: " in s.said(), f"the report of line {number}")
    assert json.loads(s.log(10))[:2] == [["last", "--cuda", "4"], "4"]


@pytest.mark.smoke
def test_bad_lines_are_refused_once_and_others_run(scheduler):
    """S3.6, S3.7, S3.8, S3.9, S3.11, S3.41: Each bad line is refused and reported once; the other lines run."""
    s = scheduler(gpus=2, monitor_interval=1)
    s.start()
    s.append(
        "x,job.py",
        "0,job.py,,--layers 1,2,a",
        "0,job.py,,,7",
        "0,job.py,,,1-0",
        '0,job.py,,"--p 1',
        s.line("good"),
    )
    s.wait_state(1, "done")
    with s.jobs_file.open("a") as stream:
        stream.write(s.line("torn")[:-3])
        stream.flush()
        stream.write(s.line("torn")[-3:] + "\n")
    s.append(f'0,job.py,,"{s.folder} csv 0 0 --layers 1,2","0,1"')
    s.wait_ended(3)
    assert s.starts("torn") == 1 and s.starts("good") == 1 and s.starts("csv") == 1
    assert s.job(3)["arguments"][-2:] == ["--layers", "1,2"] and s.job(3)["allowed_gpus"] == [0, 1]
    refused = s.status()["refused"]
    assert [r["line"] for r in refused] == [1, 2, 3, 4, 5]
    assert '"--layers 1,2,a"' in refused[1]["reason"]
    wait_for(lambda: s.said().count("jobs.txt:2:") >= 1, "the report")
    s.append("# look again")
    s.cli("submit", "--cpu", "--wait", "--", "true")
    s.says("jobs.txt:2:", times=1)
    log = (s.folder / "gpu_scheduler.log").read_text()
    assert log.count("jobs.txt:2:") == 1


@pytest.mark.smoke
def test_jobs_start_by_priority_and_then_by_file_order(scheduler):
    """S3.12: Jobs start by priority, the lowest number first, and by file order among equal priorities."""
    s = scheduler(gpus=1)
    s.hold("first")
    s.append(s.line("first", priority=-5))
    s.start()
    s.wait_state(1, "running")
    s.append(*(s.line(f"p{p}-{n}", priority=p) for n in range(3) for p in (3, 1, -1)))
    wait_for(lambda: len(s.states()) == 10, "ten jobs")
    s.release("first")
    s.wait_ended(10)
    order = [entry[1] for entry in s.ledger() if entry[0] == "start"]
    assert order == ["first"] + [f"p{p}-{n}" for p in (-1, 1, 3) for n in range(3)]


@pytest.mark.smoke
def test_half_gpu_jobs_share_a_gpu_and_a_job_for_two_gpus_waits_for_both(scheduler):
    """S3.13, S3.14, S3.15, S3.17: The model of a job sets its share of a GPU. Two half-GPU jobs fit on a GPU.

    A third half-GPU job waits. A job that needs two GPUs waits for two whole GPUs, and later jobs may start before it.
    """
    s = scheduler(gpus=2)
    (s.folder / "llm_config.json").write_text('{"default_requirement": 1.0, "models": {"half": 0.5, "wide": 1.5}}')
    for key in ("a", "b", "c", "d"):
        s.hold(key)
    s.append(*(s.line(key, more="--llm half", gpus="0") for key in ("a", "b", "c")))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    wait_for(lambda: s.status()["gpus"][0]["allocated"] == 1.0, "0.5 + 0.5 shown as 1")
    third = s.job(3)
    assert third["state"] == "pending"
    wait_for(lambda: s.job(3)["reason_code"] in ("allowed-busy", "no-room"), "a reason")
    s.append(s.line("wide", more="--llm=wide"), s.line("d", more="--llm half"))
    s.wait_state(5, "running")  # not held up by the wide job before it
    assert s.states()[4] == "pending"
    wait_for(lambda: s.job(4)["reason_code"] == "no-wide-room", "the wide job's reason")
    assert "2 whole GPUs" in s.cli("why", "4").stdout
    for key in ("a", "b", "c", "d"):
        s.release(key)
    s.wait_ended(5)
    wide = next(e for e in s.ledger() if e[0] == "start" and e[1] == "wide")
    assert wide[3] == "0,1"
    wait_for(lambda: [g["allocated"] for g in s.status()["gpus"]] == [0.0, 0.0], "all free again")

    def state() -> dict:
        return json.loads((s.folder / "gpu_scheduler_state.json").read_text())

    wait_for(lambda: state()["gpu_status"] == [0.0, 0.0], "the picture shows it, too")
    assert state()["paused_gpus"] == []


def test_s3_17_a_failing_start_is_tried_again_later_and_delays_no_other_job(scheduler):
    """S3.17: If the log folder of a job cannot be made, the start of the job is tried again with growing waits.

    The first wait is --assign-retry-wait. Meanwhile another job waits for a GPU that is in use. Jobs that are queued
    later start before these two jobs. In the end, each of the two jobs runs once.
    """
    base = 0.1
    s = scheduler(gpus=2, assign_retry_wait=str(base), max_assign_attempts=1000)
    in_the_way = s.folder / "logs-of-one"
    in_the_way.touch()
    s.hold("busy")
    s.append(s.line("busy", gpus="0"))
    s.start()
    s.wait_state(1, "running")
    s.append(s.line("tied", gpus="0"), s.line("blocked", gpus="1") + f";log_dir={in_the_way.name}")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=3 AND start_failures > 0"), "a try that failed")
    s.append(s.line("worse", priority=9))
    s.wait_state(4, "done")
    s.append(s.line("better", priority=-9))
    s.wait_state(5, "done")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=3 AND start_failures >= 5"), "five tries that failed")
    assert s.states()[2] == "pending" and s.states()[3] in ("pending", "starting")
    assert s.job(2)["reason_code"] in ("allowed-busy", "no-room") and s.job(3)["attempt"] >= 5
    assert [key for what, key, *_ in s.ledger() if what == "start"] == ["busy", "worse", "better"]
    in_the_way.unlink()
    s.wait_state(3, "done")
    s.release("busy")
    assert s.wait_ended(5) == dict.fromkeys(range(1, 6), "done")
    assert s.starts("tied") == s.starts("blocked") == 1
    failed = [at for (at,) in s.rows("SELECT at FROM events WHERE job=3 AND kind='retry_scheduled' ORDER BY n")]
    distances = [after - before for before, after in itertools.pairwise(failed)]
    assert len(distances) >= 4
    for tries, distance in enumerate(distances):
        assert distance >= 0.9 * base * 2**tries, distances  # it doubles, ±10 %


def test_s3_17_other_jobs_start_long_before_the_next_try_of_a_failed_start(scheduler):
    """S3.17: While a job waits ten minutes for the next try of its start, other jobs start.

    The other jobs may have a better or a worse priority than the waiting job.
    """
    s = scheduler(gpus=1, assign_retry_wait="600", max_assign_attempts=1000)
    (s.folder / "in-the-way").touch()
    s.start()
    s.append(s.line("blocked") + ";log_dir=in-the-way")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE start_failures = 1"), "a try that failed")
    s.append(s.line("worse", priority=9))
    s.wait_state(2, "done")
    s.append(s.line("better", priority=-9))
    s.wait_state(3, "done")
    assert s.rows("SELECT start_failures FROM jobs WHERE id=1") == [(1,)] and s.states()[1] == "pending"


@pytest.mark.smoke
def test_a_repeated_line_runs_only_if_the_earlier_job_failed(scheduler):
    """S3.27, S3.28, S3.29: If a line has the same words in the same order as an earlier line, it does not run.

    There is one exception: if the job of the earlier line has failed, the next equal line that is appended runs.
    """
    s = scheduler(gpus=2)
    s.append(s.line("one"), s.line("one"), s.line("one", priority=7, gpus="1"))
    s.append(s.line("x", more="--x 1 --y 2"), s.line("x", more="--y 2 --x 1"))
    s.start()
    s.wait_ended(3)
    assert s.starts("one") == 1 and s.starts("x") == 2
    assert s.status()["repeated_lines"] == 2
    s.append(s.line("bad", code=3))
    s.wait_state(4, "failed")
    text = s.jobs_file.read_text()
    s.stop()
    s.jobs_file.write_text("".join(reversed(text.splitlines(keepends=True))))  # reordered while no scheduler runs
    s.start()
    s.append(s.line("one"))
    wait_for(lambda: s.status()["repeated_lines"] == 3, "the duplicate is counted")
    assert s.starts("bad") == 1
    s.append(s.line("bad", code=3))  # one more such line after a failure
    s.wait_ended(5)
    assert s.starts("bad") == 2 and s.starts("one") == 1
    assert s.job(4)["exit_code"] == 3 and s.job(5)["exit_code"] == 3


def test_s3_29_retries_are_limited_and_wait_longer_each_time(scheduler):
    """S3.29: A failing job with retries=2 runs three times, each time after a longer wait and into its own log."""
    base = 0.5
    s = scheduler(gpus=1, assign_retry_wait=str(base))
    s.append(s.line("again", code=9) + ";retries=2")
    s.start()
    s.wait_ended(1)
    assert s.starts("again") == 3
    logs = os.listdir(s.folder / "gpu_scheduler_logs")  # named by local time, which may go back an hour in autumn
    assert sorted(name.removesuffix(".log").split("_")[4:] for name in logs) == [[], ["a2"], ["a3"]]
    job = s.job(1)
    assert job["state"] == "failed" and job["exit_code"] == 9 and job["attempt"] == 3
    times = [(what, float(at)) for what, _, _, _, _, _, at, _ in s.ledger()]
    assert [what for what, _ in times] == ["start", "end"] * 3
    pauses = [after - end for (_, end), (_, after) in zip(times[1::2], times[2::2], strict=False)]
    assert pauses[0] >= 0.9 * base and pauses[1] >= 0.9 * base * 2, pauses  # the wait doubles, ±10 %


def test_free_gpus_are_reserved_for_a_two_gpu_job_that_was_overtaken_ten_times(scheduler):
    """Without backfill, a job for two GPUs is overtaken ten times; then free GPUs are reserved for it."""
    s = scheduler(gpus=2)
    s.hold("long")
    s.append(s.line("long"))
    s.start("--backfill", "false")
    s.wait_state(1, "running")
    s.append(s.line("wide", more=";gpus=2"))
    wait_for(lambda: s.states().get(2) == "pending", "it waits")
    s.append(*(s.line(f"n{number}") for number in range(12)))
    wait_for(lambda: list(s.states().values()).count("done") == 10, "ten pass it")
    wait_for(lambda: s.job(13)["reason_code"] == "reserved", f"the eleventh waits: {s.job(13)}")
    assert [s.states()[number] for number in (2, 13, 14)] == ["pending"] * 3 and s.starts("n10") == 0
    s.release("long")
    s.wait_ended(14)
    ends = [key for what, key, *_ in s.ledger() if what == "start"]
    assert ends.index("wide") < ends.index("n10")


def test_a_scheduler_of_one_user_says_that_it_limits_no_memory_and_no_cpus(scheduler):
    s = scheduler(gpus=1)
    s.append(s.line("a", more=";mem=64G;cpus=8"))
    s.start()
    s.wait_ended(1)
    assert s.job(1)["notes"] == [
        "mem= and cpus= do not limit this job: only the scheduler of all users can set such limits (gpujob system)"
    ]


def test_running_out_of_gpu_memory_raises_the_share(scheduler):
    """A job that ran out of GPU memory is tried again with a larger share, `oom_retries` times at most."""
    s = scheduler(gpus=1)
    script = s.folder / "oom.py"
    script.write_text(
        "import os,sys\nprint('torch.OutOfMemoryError: CUDA out of memory. Tried', os.environ['GPUJOB_SHARE'])\nsys.exit(1)\n"
    )
    s.append("0,oom.py,,;gpus=0.25")
    s.start()
    s.wait_ended(1)
    job = s.job(1)
    assert job["attempt"] == 3 and job["need"] == 1.0 and job["failure"]["class"] == "oom"


@pytest.mark.parametrize("part", range(2))
def test_b03_b04_all_exit_codes_and_signals_are_exact(scheduler, part):
    """All 256 exit codes and the signals 1, 6, 9, 11 and 15 are recorded exactly.

    A job that exits with code 137 (128 + 9) is not taken for a job that was killed by signal 9.
    """
    s = scheduler(gpus=4)
    program = s.folder / "end"
    program.write_text("#!/bin/sh\ncase $1 in s*) kill -${1#s} $$; sleep 30;; *) exit $1;; esac\n")
    program.chmod(0o755)
    codes = [str(n) for n in range(256)] if part == 0 else ["s1", "s6", "s9", "s11", "s15", "129", "137", "143"]
    s.append(*(f"0,end,,{code}" for code in codes))
    s.start()
    s.wait_ended(len(codes), 120)
    rows = s.rows("SELECT id, state, outcome, exit_code, signal FROM jobs ORDER BY id")
    for code, (_, state, outcome, exit_code, number) in zip(codes, rows, strict=True):
        if code.startswith("s"):
            assert (state, outcome, exit_code, number) == ("failed", "signal", None, int(code[1:]))
        else:
            expected = "done" if code == "0" else "failed"
            assert (state, outcome, exit_code, number) == (expected, "exit", int(code), None)


def test_missing_script_waits_and_starts_when_it_appears(scheduler):
    """B12: A job whose script is missing waits, and its reason says so. The job starts when the script is there."""
    s = scheduler(gpus=1)
    s.append("0,late.py", s.line("other"))
    s.start()
    s.wait_state(2, "done")
    wait_for(lambda: s.job(1)["reason_code"] == "missing", "its reason")
    assert "no such file" in s.cli("why", "1").stdout
    (s.folder / "late.py").write_text("print('here')\n")
    s.wait_state(1, "done")


def test_b19_b20_jobs_get_no_open_descriptor_and_no_terminal(scheduler):
    """B19, B20: A job has an empty stdin and no open descriptor above 2, and it leads its own session."""
    s = scheduler(gpus=1)
    (s.folder / "fds.py").write_text(
        "import os,sys\nprint('stdin', repr(sys.stdin.read()))\nprint('fds', sorted(int(f) for f in os.listdir('/proc/self/fd'))[:-1])\n"
        "import signal\nprint('pipe', signal.getsignal(signal.SIGINT), os.getsid(0) == os.getpid())\n"
    )
    s.append("0,fds.py")
    s.start()
    s.wait_ended(1)
    text = s.log(1)
    assert "stdin ''" in text and "fds [0, 1, 2]" in text and "True" in text


@pytest.mark.smoke
def test_lines_of_a_commands_file_run_and_a_changed_model_table_applies(scheduler):
    """The lines of a commands file run, and a changed model table changes the needs of waiting jobs.

    A broken model table is reported and not used.
    """
    s = scheduler(gpus=1, commands_file="commands.txt")
    (s.folder / "commands.txt").write_text("# one a line\necho from the shell: $CUDA_VISIBLE_DEVICES | tr a-z A-Z\n")
    s.start()
    s.wait_ended(1)
    assert "FROM THE SHELL: 0" in s.log(1)
    s.hold("a")
    s.append(s.line("a"), s.line("b", more="--llm small"))
    s.wait_state(2, "running")
    assert s.job(3)["need"] == 1.0
    (s.folder / "llm_config.json").write_text('{"default_requirement": 0.5')
    wait_for(lambda: "the previous model table stays" in s.said(), "the report")
    (s.folder / "llm_config.json").write_text('{"models": {"small": 0.25}}')
    wait_for(lambda: s.job(3)["need"] == 0.25, "the new need")
    s.release("a")
    s.wait_ended(3)


@pytest.mark.smoke
def test_drain_exits_with_0_only_if_all_jobs_succeeded(scheduler):
    """`start --drain` exits with 0 if all jobs succeeded, and otherwise with 1.

    Its output names the jobs that cannot start.
    """
    s = scheduler(gpus=1)
    s.append(s.line("ok"))
    s.start("--drain", ready=False)
    assert s.process.wait(60) == 0
    s.append(s.line("bad", code=2))
    s.start("--drain", ready=False)
    assert s.process.wait(60) == 1
    s.append("0,never.py")
    s.start("--drain", ready=False)
    assert s.process.wait(60) == 1
    s.says("job 3 (never.py) cannot start: no such file")


def test_start_exits_with_4_without_gpus_and_with_2_for_bad_settings(scheduler):
    """S3.2 in part: `start` ends with 4 if no GPU is found or declared, and with 2 for wrong settings."""
    s = scheduler()
    words = [sys.executable, "-m", "scheduler", "start"]
    done = subprocess.run(
        words, cwd=s.folder, env={**s.environ, "PATH": "/nonexistent"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 4 and "--gpus N" in done.stderr
    assert s.cli("start", "--gpus", "two", code=2).stderr.count("\n") == 1
    (s.folder / "config.yaml").write_text("mem: 3\nkill_grce: 4\n")
    error = s.cli("start", "--gpus", "1", code=2).stderr
    assert "config.yaml:1" in error
    os.remove(s.folder / "config.yaml")
    s.jobs_file.touch(0o666)
    os.chmod(s.jobs_file, 0o666)
    assert "chmod o-w" in s.cli("start", "--gpus", "1", code=1).stderr


def _made(folder: Path) -> bool:
    """Make a folder. Return whether its place was free."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def test_s2_3_s3_36_5000_waiting_jobs_need_no_open_file_and_survive_sigint_and_sigterm(scheduler):
    """S2.3, S3.36: 5,000 waiting jobs need no open file and survive SIGINT and SIGTERM unchanged.

    SIGINT ends the scheduler with exit code 130, and SIGTERM with 0, within 10 s. After the next start, the paused GPU
    is still paused, and the running job continues.
    """
    s = scheduler(gpus=2)
    s.start()
    s.cli("pause", "0")
    s.append(s.line("n0", gpus="0"))
    wait_for(lambda: s.states() and s.job(1)["reason_code"] == "paused", "the first is seen")
    before = {pid: open_files(pid) for pid in (s.pid, s.supervisor_pid())}
    s.append(*(s.line(f"n{n}", gpus="0") for n in range(1, 5000)))
    wait_for(lambda: s.rows("SELECT count(*) FROM jobs") == [(5000,)], "5,000 waiting jobs")
    none_more_open(before)
    s.hold("goes-on")
    s.append(s.line("goes-on", code=5, gpus="1"))
    s.wait_state(5001, "running")

    def queue() -> list:
        return s.rows("SELECT id, state, priority, place, allowed, spec FROM jobs WHERE id <= 5000 ORDER BY id")

    waiting = queue()
    assert len(waiting) == 5000 and {row[1] for row in waiting} == {"pending"}
    path = s.folder / "gpu_scheduler_state.json"
    for late, number, code in ((1, signal.SIGINT, 130), (2, signal.SIGTERM, 0)):
        # A folder in the place of its temporary file makes the state file out of date until the scheduler ends.
        obstacle = s.folder / f".{path.name}.new-{s.pid}"
        wait_for(lambda obstacle=obstacle: _made(obstacle), "no temporary file is there now")
        known = s.said().count("cannot write")
        s.append(s.line(f"late{late}", gpus="0"))
        wait_for(lambda known=known: s.said().count("cannot write") > known, "a state file that is out of date")
        assert json.loads(path.read_text())["jobs"]["pending"] == 5000 + late - 1
        s.freeze()
        obstacle.rmdir()
        s.process.send_signal(number)
        s.process.send_signal(signal.SIGCONT)
        wait_for(lambda: s.process.poll() is not None, "its end", 10)
        assert s.process.poll() == code
        state = json.loads(path.read_text())
        assert state["paused_gpus"] == [0] and state["jobs"]["pending"] == 5000 + late and state["jobs"]["running"] == 1
        assert queue() == waiting
        s.start()
        wait_for(lambda: s.status()["daemon"]["alive"], "the next one")
        assert queue() == waiting and s.states()[5001] == "running"
        assert [gpu["paused"] for gpu in s.status()["gpus"]] == [True, False]
    s.release("goes-on")
    s.wait_state(5001, "failed")
    assert s.job(5001)["exit_code"] == 5 and s.starts("goes-on") == 1
    s.cli("cancel", "1-4990")
    s.cli("resume", "0")  # jobs of the restored queue run that no request has named
    wait_for(lambda: set(s.states().values()) == {"cancelled", "failed", "done"}, "the rest of the queue", 120)
    rest = [*(f"n{n}" for n in range(4990, 5000)), "late1", "late2"]
    assert [key for what, key, *_ in s.ledger() if what == "start"] == ["goes-on", *rest]


@pytest.mark.smoke
def test_s3_36_the_exit_code_of_a_job_that_ended_without_a_scheduler_is_shown(scheduler):
    """S3.36: The next scheduler shows the exit code of a job that ended while no scheduler ran."""
    s = scheduler(gpus=1)
    s.hold("goes-on")
    s.append(s.line("goes-on", code=5))
    s.start()
    s.wait_state(1, "running")
    assert s.stop(signal.SIGTERM) == 0
    s.release("goes-on")
    wait_for(lambda: any(e[0] == "end" for e in s.ledger()), "the job's own end")
    s.start()
    s.wait_ended(1)
    assert s.job(1)["exit_code"] == 5 and s.starts("goes-on") == 1


def test_s2_14_no_gpu_is_idle_while_a_job_waits(scheduler):
    """S2.14: No GPU stands idle between two jobs, or while a job waits.

    A long job and shorter ones run on three GPUs and record when they start and end. The periodic checks are so rare
    that none of them can start a job in this test.
    """
    most_s = 10.0  # limit for a start on a busy machine; the intervals are 600 s
    s = scheduler(gpus=3, monitor_interval=600, state_interval=600, gpu_interval=600)
    s.hold("long")
    s.append(s.line("long", priority=-1))
    s.append(*(s.line(f"s{n}", seconds=(0.0, 0.4, 0.05, 0.2)[n % 4]) for n in range(16)))
    s.start()
    wait_for(lambda: sum(what == "end" for what, *_ in s.ledger()) == 16, "all but the long one")
    assert s.states()[1] == "running"
    s.release("long")
    s.wait_ended(17)
    notes = defaultdict(list)
    for what, key, _, gpu, _, _, at, _ in s.ledger():
        notes[gpu].append((float(at), what, key))
    assert sorted(notes) == ["0", "1", "2"]
    starts = [at for each in notes.values() for at, what, _ in each if what == "start"]
    first_start, last_start = min(starts), max(starts)
    for gpu, each in notes.items():
        assert [what for _, what, _ in each] == ["start", "end"] * (len(each) // 2), f"one after another on GPU {gpu}"
        idle = [after[0] - end[0] for end, after in zip(each[1::2], each[2::2], strict=False)]
        idle += [each[0][0] - first_start, last_start - each[-1][0]]  # all the time jobs waited
        assert max(idle) < most_s, (gpu, each)
