"""The verbs of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.client.wait import wait_for as wait_for_jobs
from scheduler.core.errors import NotFound
from tests.stories.harness import ROOT, wait_for


@pytest.mark.smoke
def test_add_writes_a_line_that_the_scheduler_runs(scheduler):
    """S3.6, S3.40, S3.41: `add` appends a line that the scheduler runs.

    It refuses values that a line cannot contain.
    """
    s = scheduler(gpus=2)
    s.start()
    done = s.cli("add", "job.py", "--args", f"{s.folder} added 0 0 --layers 1,2", "--gpus", "0,1", "--priority", "-3")
    assert done.stdout.strip() == f'-3,job.py,,"{s.folder} added 0 0 --layers 1,2",0,1'
    s.wait_ended(1)
    job = s.job(1)
    assert job["arguments"][-2:] == ["--layers", "1,2"] and job["allowed_gpus"] == [0, 1] and job["priority"] == -3
    printed = s.cli("add", "x.py", "--output-file", "-").stdout
    assert printed == "0,x.py,,,\n" and "x.py" not in s.jobs_file.read_text()
    assert s.cli("add", "x.py", "--gpus", "9", code=3).stderr.startswith("gpujob: GPU 9 is not managed here")
    s.cli("add", "x.py", "--gpus", "a-b", code=2)
    done = s.cli("add", "job.py", "--set", "gpus=0.5", "--set", "time=4h", "--output-file", "-", "--gpus", "0-1")
    assert done.stdout == "0,job.py,,,0-1;gpus=0.5;time=4h\n" and not done.stderr
    wrong = s.cli("add", "job.py", "--set", "tme=4h", code=2).stderr
    assert wrong == "gpujob: --set: unknown option tme=; did you mean time=?\n"
    assert "does not exist yet; the job waits until it exists" in s.cli("add", "later.py", "--output-file", "-").stderr
    for wish in ("time", "label=a;b", 'label="x', "gpus=many", "label=a\nb"):
        assert s.cli("add", "x.py", "--set", wish, code=2).stdout == ""
    s.cli("add", "x.py", "--priority", "high", code=2)
    s.cli("add", "x.py", "--args", "it's", code=2)
    s.cli("add", "x.py", "--output-file", "/nonexistent/jobs.txt", code=1)
    s.cli("add", code=2)
    s.cli("add", "x.py", "--args", "two\nlines", code=2)


@pytest.mark.smoke
def test_submit_keeps_folder_environment_and_arguments(scheduler):
    """`submit` runs a command unchanged and prints its id; `submit --wait` returns the exit code of the command.

    If the same command is submitted twice, it runs as two jobs.
    """
    s = scheduler(gpus=1)
    s.start()
    inner = s.folder / "a folder"
    inner.mkdir()
    words = [sys.executable, "-m", "scheduler", "submit", "--state-file", str(s.folder / "gpu_scheduler_state.json")]
    job = (
        "import os,sys;print(os.getcwd(), os.environ.get('MI'+'NE'), os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])"
    )
    done = subprocess.run(
        [*words, "--env", "MINE=yes=1", "--label", "here", "--", sys.executable, "-c", job, "a b", "$HOME", "--cuda"],
        cwd=inner, env=s.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    s.wait_ended(1)
    assert s.log(1) == f"{inner} yes=1 0 ['a b', '$HOME', '--cuda']\n"
    assert s.cli("submit", "--wait", "--", "sh", "-c", "exit 9", code=9).stdout == "2\n"
    assert s.cli("submit", "--wait", "--", "sh", "-c", "exit 9", code=9).stdout == "3\n"
    assert s.cli("submit", "--wait", "--", "/no/such/program", code=1).stdout == "4\n"
    done = s.cli("submit", "--wait", "--", "sh", "-c", "kill -TERM $$", code=143)
    assert done.stdout == "5\n" and "signal 15" in done.stderr
    assert "time limit" in s.cli("submit", "--wait", "--time", "0.2s", "--", "sleep", "60", code=1).stderr
    assert s.job(4)["outcome"] == "could_not_start"
    assert "cannot start" in s.log(4)
    s.cli("submit", "--gpus", "3", "--", "true", code=3)
    s.cli("submit", "--gpus", "-1", "--", "true", code=3)
    s.cli("submit", "--gpus", "much", "--", "true", code=2)
    s.cli("submit", "--after", "99", "--", "true", code=6)
    s.cli("submit", code=2)
    env = list(os.listdir(s.folder / ".gpujob" / "env"))
    assert env and all(os.stat(s.folder / ".gpujob" / "env" / f).st_mode & 0o777 == 0o600 for f in env)
    assert "MINE" not in s.cli("show", "1").stdout + s.cli("jobs", "--json").stdout + s.said()


def test_s2_2_the_choice_of_gpus_changes_only_the_environment_of_a_command(scheduler):
    """S2.2: The choice of GPUs (0, 1, both, none) does not change the arguments, the folder or the stdin of a command.

    The environment of the command differs from that of its submitter only in the documented variables.
    """
    s = scheduler(gpus=2)
    s.start()
    show = (
        "import json,os;print(json.dumps([open('/proc/self/cmdline').read().split('\\0')[:-1], dict(os.environ),"
        " os.getcwd(), os.read(0, 9).decode()]))"
    )
    words = [sys.executable, "-c", show, "--cuda", "7", "--cuda=7", "--gpu", "cuda:0", "a  b", "", "$CUDA_VISIBLE_DEVICES", "-g", "*"]  # fmt: skip
    wishes = {"0": ("--allowed", "0"), "1": ("--allowed", "1"), "0,1": ("--gpus", "2"), "": ("--cpu",)}
    environ = {**s.environ, "CUDA_VISIBLE_DEVICES": "5", "MINE": "kept"}
    submit = [sys.executable, "-m", "scheduler", "submit", "--wait"]
    documented = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUJOB_ID", "GPUJOB_ATTEMPT", "GPUJOB_GPUS",
                  "GPUJOB_SHARE", "GPUJOB_STATE_FILE"}  # fmt: skip
    assert all(f"`{name}" in (ROOT / "docs/gpus.md").read_text() for name in documented)
    for number, (gpus, wish) in enumerate(wishes.items(), start=1):
        subprocess.run([*submit, *wish, "--", *words], cwd=s.folder, env=environ, check=True, capture_output=True)
        argv, seen, folder, read = json.loads(s.log(number))
        assert (argv, folder, read) == (words, str(s.folder), "")
        assert s.job(number)["arguments"] == s.job(number)["command"] == words
        differs = {name for name in seen.keys() | environ if seen.get(name) != environ.get(name)}
        assert differs <= documented, differs - documented
        assert seen["CUDA_VISIBLE_DEVICES"] == (gpus or "") and seen["MINE"] == "kept"
        assert seen["GPUJOB_GPUS"] == gpus


def test_a_job_submitted_without_a_daemon_runs_when_one_starts(scheduler):
    """`submit` works without a scheduler and prints that none runs; the job runs when a scheduler starts."""
    s = scheduler(gpus=1)
    done = s.cli("submit", "--cpu", "--", "true")
    assert done.stdout == "1\n" and "no scheduler is running" in done.stderr
    s.cli("wait", "1", code=5)
    done = s.cli("submit", "--cpu", "--wait", "--", "true", code=5)  # the job stays queued, and the command ends
    assert done.stdout == "2\n" and "gpujob start" in done.stderr
    s.start()
    s.cli("wait", "1")
    s.cli("wait", "2")


def test_submit_wait_exits_with_5_when_the_scheduler_ends(scheduler):
    """`submit --wait` exits with 5 when the scheduler ends; the job continues, and a later `wait` returns its code."""
    s = scheduler(gpus=1)
    s.start()
    script = "while [ ! -e go ]; do sleep 0.05; done; exit 7"
    words = [sys.executable, "-m", "scheduler", "submit", "--wait", "--", "sh", "-c", script]
    waits = subprocess.Popen(
        words, cwd=s.folder, env=s.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    s.wait_state(1, "running")
    s.kill()
    out, err = waits.communicate(timeout=60)
    assert (waits.returncode, out) == (5, "1\n") and "no scheduler is running" in err and "Traceback" not in err
    s.start()
    (s.folder / "go").touch()
    s.cli("wait", "1", code=7)


@pytest.mark.smoke
def test_after_waits_for_the_end_and_after_ok_for_the_success_of_a_job(scheduler):
    """A job with `after` runs when the other job has ended, with or without success.

    A job with `after_ok` is skipped if the other job ends in any other state than done.
    """
    s = scheduler(gpus=2)
    s.hold("a")
    s.append(s.line("a", code=1))
    s.start()
    s.wait_state(1, "running")
    s.append(
        s.line("b") + ";after=1", s.line("c") + ";after_ok=1", s.line("d") + ";after_ok=3", s.line("e") + ";after=4"
    )
    wait_for(lambda: len(s.states()) == 5, "five jobs")
    assert s.job(2)["reason_code"] == "depends"
    s.release("a")
    assert s.wait_ended(5) == {1: "failed", 2: "done", 3: "skipped", 4: "skipped", 5: "done"}
    assert s.job(3)["outcome"] == "dependency"


@pytest.mark.smoke
def test_status_jobs_show_why_and_logs_show_jobs_in_all_states(scheduler):
    """S3.38 in part: The reading verbs show jobs in every state, why jobs wait, and which lines were refused."""
    s = scheduler(gpus=2)
    s.hold("run")
    s.append(
        s.line("run", gpus="0") + ";label=base", s.line("wait", gpus="0"), s.line("bad", code=2, gpus="1"), "broken"
    )
    s.start()
    s.wait_state(1, "running")
    s.wait_state(3, "failed")
    wait_for(lambda: s.job(2)["reason_code"] == "allowed-busy", "the reason")
    text = s.cli("status").stdout
    assert "BUSY (100%)" in text and "AVAILABLE" in text and "jobs.txt:4" in text and "exit 2" in text
    status = s.status()
    assert status["schema"] == 1 and status["daemon"]["alive"] and status["daemon"]["pid"] == s.pid
    assert set(status["gpus"][0]) == {
        "index", "uuid", "name", "node", "partition", "state", "paused", "allocated", "memory_used", "memory_total", "load", "jobs", "booked_outside",
            "memory_own", "temperature", "reason",
    }  # fmt: skip
    job = next(j for j in status["jobs"] if j["id"] == 1)
    assert {"id", "state", "outcome", "exit_code", "signal", "priority", "command", "script", "arguments", "conda_env",
            "allowed_gpus", "need", "gpus", "pid", "session", "attempt", "label", "reason", "reason_code", "failure",
            "submitted_at", "started_at", "finished_at", "log"} <= set(job)  # fmt: skip
    assert job["label"] == "base" and job["need"] == 1.0 and job["submitted_at"].endswith("Z")
    assert [j["id"] for j in json.loads(s.cli("jobs", "--state", "failed", "--json").stdout)["jobs"]] == [3]
    assert "base" in s.cli("show", "base").stdout
    assert "waits (allowed-busy)" in s.cli("why", "2").stdout
    s.cli("show", "99", code=6)
    s.cli("show", "nobody", code=6)
    s.cli("jobs", "--state", "nonsense", code=2)
    s.cli("logs", "2", code=1)
    follow = subprocess.Popen(
        [sys.executable, "-m", "scheduler", "logs", "-f", "1"], cwd=s.folder, env=s.environ, stdout=subprocess.PIPE
    )
    s.release("run")
    assert follow.wait(30) == 0
    follow.stdout.close()
    s.wait_ended(3)
    s.cli("wait", "2")
    s.cli("wait", "3", code=2)
    s.cli("wait", "1-3", code=1)
    assert s.cli("status", code=0).returncode == 0
    watch = subprocess.run(
        f"{sys.executable} -m scheduler status --watch 1 | head -1", shell=True, cwd=s.folder, env=s.environ,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert watch.stdout.startswith("scheduler  running") and "Traceback" not in watch.stderr


def test_logs_prints_the_last_lines(scheduler):
    """`logs` prints a whole log, `logs -n` its last lines."""
    s = scheduler(gpus=1)
    s.start()
    s.cli("submit", "--cpu", "--wait", "--", "sh", "-c", "for i in 1 2 3 4 5; do echo line $i; done")
    assert s.cli("logs", "1").stdout == "".join(f"line {i}\n" for i in range(1, 6))
    assert s.cli("logs", "@", "-n", "2").stdout == "line 4\nline 5\n"
    assert s.cli("logs", "1", "-n", "0").stdout == ""


@pytest.mark.smoke
def test_retry_keeps_the_id_and_both_logs(scheduler):
    """S2.8 in part: `retry` starts another attempt of the same job.

    The new attempt has a new log. The log of the earlier attempt stays.
    """
    s = scheduler(gpus=1)
    s.append(s.line("a", code=1))
    s.start()
    s.wait_state(1, "failed")
    assert "queued again" in s.cli("retry", "1").stdout
    wait_for(lambda: s.job(1)["attempt"] == 2 and s.states()[1] == "failed", "the second run")
    assert s.starts("a") == 2 and len(os.listdir(s.folder / "gpu_scheduler_logs")) == 2


@pytest.mark.smoke
def test_verbs_and_edits_pause_and_resume_gpus(scheduler):
    """S3.30 in part: Verbs, with and without a scheduler, and edits of the state file pause and resume GPUs.

    Running jobs continue.
    """
    s = scheduler(gpus=2)
    s.hold("a")
    s.append(s.line("a", gpus="0"))
    s.start()
    s.wait_state(1, "running")
    assert "paused now: 0,1" in s.cli("pause", "0", "1").stdout
    s.append(s.line("b"))
    wait_for(lambda: len(s.states()) == 2 and s.job(2)["reason_code"] in ("paused", "no-room"), "it waits")
    assert s.states() == {1: "running", 2: "pending"}
    s.stop()
    s.cli("resume", "0")
    s.cli("pause", "7", code=6)
    s.start()
    wait_for(lambda: [g["paused"] for g in s.status()["gpus"]] == [False, True], "pauses survive")
    path = s.folder / "gpu_scheduler_state.json"
    wait_for(lambda: json.loads(path.read_text())["paused_gpus"] == [1], "the state file shows it")
    document = json.loads(path.read_text())
    document["paused_gpus"] = []
    path.write_text(json.dumps(document))
    s.wait_state(2, "done")
    s.release("a")
    s.wait_ended(2)
    s.cli("queue", "pause")
    s.append(s.line("c"))
    wait_for(lambda: len(s.states()) == 3, "c is there")
    assert s.job(3)["reason_code"] == "paused"
    s.cli("queue", "resume")
    s.wait_ended(3)


@pytest.mark.smoke
def test_start_detach_returns_when_ready_or_fails_with_the_reason(scheduler):
    """`start --detach` returns when the scheduler is ready; a start that fails gives the reason and its exit code."""
    s = scheduler(gpus=1)
    out = s.cli("start", "--gpus", "1", "--detach").stdout
    pid = int(out.split()[-1])
    try:
        s.append(s.line("a"))
        s.wait_ended(1)
        assert s.status()["daemon"]["pid"] == pid
        assert str(pid) in s.cli("start", "--gpus", "1", "--detach", code=1).stderr
    finally:
        os.kill(pid, 15)
        wait_for(lambda: not s.status()["daemon"]["alive"], "its end")


def test_unknown_verbs_and_options_give_one_error_line(scheduler):
    """An unknown verb or option gives exit code 2 and an error line without a traceback."""
    s = scheduler(gpus=1)
    for words in (["nonsense"], ["status", "--nope"], ["start", "--gpus"], ["pause"], ["cancel"], ["queue", "stop"]):
        done = s.cli(*words, code=2)
        assert done.stderr.strip().splitlines()[-1].startswith("gpujob: ") and done.stderr.count("\n") <= 3
    assert s.cli("--version").stdout.startswith("gpujob ")
    assert s.cli("status").returncode == 0  # a folder without a scheduler is no error


def test_status_answers_while_10000_appended_lines_become_jobs(scheduler):
    """10,000 lines that are appended together become 10,000 jobs, and `status` answers in the meantime."""
    s = scheduler(gpus=1)
    s.hold("block")
    s.append(s.line("block"))
    s.start()
    s.wait_state(1, "running")
    s.append(*(s.line(f"n{n}") for n in range(10_000)))

    def read() -> bool:
        assert s.status()["daemon"]["alive"]
        return len(s.rows("SELECT 1 FROM jobs LIMIT 1 OFFSET 10000")) > 0

    wait_for(read, "all lines are jobs")
    assert s.rows("SELECT count(*) FROM jobs") == [(10_001,)]
    started = time.monotonic()
    asked = s.cli("cancel", "2-10001", code=None)
    assert asked.returncode in (0, 5), asked.stderr  # 5: no answer within 5 s; the request stays in the store
    wait_for(lambda: s.rows("SELECT count(*) FROM jobs WHERE state='cancelled'") == [(10_000,)], "all are cancelled")
    print(f"10,000 cancelled in {time.monotonic() - started:.1f} s")


def test_wait_prints_which_jobs_failed_and_why(scheduler):
    s = scheduler(gpus=1)
    s.start()
    s.append(s.line("good"), s.line("bad", code=3))
    s.wait_ended(2)
    assert s.cli("wait", "1").stderr == ""
    error = s.cli("wait", "1-2", code=1).stderr
    assert error == "gpujob: job 2 (job.py) failed: exit 3; gpujob logs 2\n"
    done = s.cli("submit", "--wait", "--cpu", "--", "./nosuch", code=1)
    assert (
        done.stdout == "3\n"
        and "job 3 (nosuch) failed: could not start" in done.stderr
        and "no such file" in done.stderr.lower()
    )


class Watched(SchedulerClient):
    """A client that lets a test act just before the client checks whether a scheduler runs.

    Before each such check, `alive` removes the last function from the list ``once`` and calls this function.
    """

    once: list[Callable[[], None]]

    def alive(self) -> bool:
        if self.once:
            self.once.pop()()
        return super().alive()


def test_p5_wait_counts_a_job_deleted_by_reset_as_last_seen(scheduler, capsys):
    """P5: `reset` may delete an ended job while `wait` runs.

    If `wait` has already read the final state of the job, this state still counts for the exit code of `wait`.
    Otherwise `wait` raises NotFound.
    """
    s = scheduler(gpus=2)
    for key in "bc":
        s.hold(key)
    s.append(s.line("a", 3), s.line("b"), s.line("c"))
    s.start()
    s.wait_state(1, "failed")
    client = Watched(str(s.folder / "gpu_scheduler_state.json"))

    def forget_the_failed() -> None:
        client.reset()
        s.release("b")

    client.once = [forget_the_failed]
    assert wait_for_jobs(client, (1, 2), 60, time.monotonic()) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "job 1 (job.py) failed" in said and s.states().keys() == {2, 3}
    s.hold("d")
    s.cli("submit", "--cpu", "--", "python3", str(s.script), str(s.folder), "d", "0", "0")
    log = s.rows("SELECT log FROM jobs WHERE id=3")[0][0]

    def end_and_forget() -> None:
        s.release("c")
        s.wait_state(3, "done")
        client.reset()
        s.release("d")

    client.once = [end_and_forget]
    with pytest.raises(NotFound) as told:
        wait_for_jobs(client, (3, 4), 60, time.monotonic())
    said = str(told.value)
    assert (
        "cannot wait for job 3: it was forgotten (gpujob reset) before this command noticed its end" in said
        and log in said
    )
    assert "there is no job 3" in s.cli("wait", "3", code=6).stderr


def test_a_request_during_the_start_of_a_scheduler_is_carried_out(scheduler):
    """A request made while a scheduler starts is carried out, by the verb itself or by the scheduler."""
    s = scheduler(gpus=2)
    s.start()

    def started() -> bool:
        if s.process.poll() is not None:  # the verb held the daemon's lock for longer than a start waits for it
            assert "is already running" in s.said().rstrip().splitlines()[-1], s.said()
            s.start(ready=False)
        return s.status()["daemon"]["alive"]

    for n in range(6):
        s.kill()
        s.start(ready=False)
        s.cli("pause" if n % 2 == 0 else "resume", "1")
        wait_for(
            lambda n=n: [row[0] for row in s.rows("SELECT gpu FROM pauses")] == ([1] if n % 2 == 0 else []), "done"
        )
        wait_for(started, "it has started")


def test_status_names_an_invalid_state_file_that_was_set_aside(scheduler):
    """D01: After a state file was invalid, `status` names the file to which its contents were copied.

    `status` does so until the copy is removed.
    """
    s = scheduler(gpus=2)
    s.start()
    path = s.folder / "gpu_scheduler_state.json"
    path.write_text('{"paused_gpus": [1')
    wait_for(lambda: list(s.folder.glob("*.bad-*")), "it is set aside")
    (aside,) = s.folder.glob("*.bad-*")
    assert f"your edit is kept as {aside.name}" in s.cli("status").stdout.replace("\n           ", " ")
    aside.unlink()
    assert "invalid edit" not in s.cli("status").stdout
