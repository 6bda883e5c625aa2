"""`gpujob run`, which runs a file of commands to its end in the foreground: a test for each documented statement."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.stories.harness import INTERPRETER, PATIENCE_S, Scheduler, alive, wait_for
from tests.stories.machine import IDLE, TOTAL, Machine, machine

__all__ = ["machine"]


class Run:
    """`gpujob run` in the folder of a scheduler.

    `start` adds `--gpus 2`, unless one of its words begins with `--gpu`.
    """

    def __init__(self, s: Scheduler) -> None:
        self.s = s
        self.file = s.folder / "commands.txt"
        self.process: fork_server.ForkedProcess | subprocess.Popen[bytes] | None = None

    def commands(self, *lines: str) -> Run:
        self.file.write_text("".join(f"{line}\n" for line in lines))
        return self

    @staticmethod
    def held(key: str, then: str = "true") -> str:
        """Return a command that writes ``key`` to the ledger, waits until `go(key)` is called, and runs ``then``."""
        return f"echo {key} >>ledger; while ! [ -e go-{key} ]; do sleep 0.05; done; {then}"

    def go(self, key: str) -> None:
        (self.s.folder / f"go-{key}").touch()

    def ledger(self) -> list[str]:
        path = self.s.folder / "ledger"
        return path.read_text().split() if path.exists() else []

    def begun(self, *keys: str) -> None:
        wait_for(lambda: set(keys) <= set(self.ledger()), f"{keys} to begin: {self.ledger()}")

    def start(self, *words: str, **environ: str) -> Run:
        words = words if any(word.startswith("--gpu") for word in words) else ("--gpus", "2", *words)
        return self.detected(*words, **environ)

    def detected(self, *words: str, **environ: str) -> Run:
        """Start `gpujob run` on the GPUs that the driver shows."""
        environ = {**self.s.environ, **environ}
        self.output = self.s.folder / f"run-{time.monotonic_ns()}.out"
        with self.output.open("wb") as out:
            if self.s.command == INTERPRETER:
                self.process = fork_server.start(("run", *words), self.s.folder, environ, out, out)
            else:
                self.process = subprocess.Popen(
                    [*self.s.command, "run", *words],
                    cwd=self.s.folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                )  # fmt: skip
        return self

    def ended(self, code: int) -> str:
        """Wait until `gpujob run` has ended, check its exit code, and return its output."""
        assert self.process is not None
        self.process.wait(PATIENCE_S)
        said = self.output.read_text(errors="replace")
        assert "Traceback" not in said, said
        assert self.process.returncode == code, f"{self.process.returncode}\n{said}"
        return said

    def to_its_end(self, code: int, *words: str, **environ: str) -> str:
        return self.start(*words, **environ).ended(code)

    def kill(self) -> None:
        """Kill the process of `gpujob run` with SIGKILL; its jobs continue."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def record(self, name: str = "jobs.jsonl") -> dict[str, dict[str, Any]]:
        """Return command → job, from the journal."""
        lines = (self.s.folder / name).read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return {job["command"]: job for job in found}

    def status(self) -> str:
        return self.s.cli("status").stdout


@pytest.fixture
def run(scheduler: Callable[..., Scheduler]) -> Run:
    return Run(scheduler())


# -- to the end -------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_s1_1_s1_13_run_executes_each_command_of_a_file_once(run: Run) -> None:
    """S1.1, S1.13: All commands run once; the exit code is 0, or 1 if a command failed.

    Comments and blank lines are skipped.
    """
    run.commands("# what follows is run", "", "  # and this not", "echo one >>out", "  echo two >>out", "")
    said = run.to_its_end(0, "--gpus", "1")
    assert (run.s.folder / "out").read_text() == "one\ntwo\n"
    assert "commands.txt: 2 commands: 2 done\n" in said and "each GPU runs one job at a time" in said
    with run.file.open("a") as stream:
        stream.write("exit 3\n")
    said = run.to_its_end(1)
    assert "job 3 (exit 3) failed: exit 3; log " in said and "gpujob retry 3" in said
    assert "commands.txt: 3 commands: 2 done, 1 failed (2 of them ended in earlier runs)\n" in said
    assert (run.s.folder / "out").read_text() == "one\ntwo\n", "nothing twice"
    said = run.to_its_end(1)
    assert "(3 of them ended in earlier runs)" in said, "it still did not go well"
    run.s.cli("retry", "3")
    assert run.to_its_end(1) and run.s.job(3)["attempt"] == 2


def test_s1_13_run_of_an_empty_commands_file_exits_with_0(run: Run) -> None:
    """S1.13: A file without commands ends with exit code 0."""
    run.commands("# nothing")
    assert "commands.txt: 0 commands: none" in run.to_its_end(0)


def test_a_missing_commands_file_is_refused(run: Run) -> None:
    done = run.s.cli("run", "--gpus", "1", code=2)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "commands.txt: no such commands file" in done.stderr and "--commands-file" in done.stderr
    done = run.s.cli("run", "python", "train.py", code=2)
    assert len(done.stderr.splitlines()) <= 3, "one command alone is not what it is for"


def test_run_is_refused_while_a_scheduler_runs(run: Run) -> None:
    """If a scheduler with the same state file runs, `run` exits with 1 and names the pid of the scheduler."""
    run.s.start()
    run.commands("true")
    said = run.to_its_end(1)
    assert f"is already running (pid {run.s.pid})" in said and "gpujob submit" in said
    assert len(said.splitlines()) == 1


def test_s1_3_options_and_config_keys_have_effect_and_options_override(run: Run) -> None:
    """S1.3: All documented options and config keys have their effect, and options override the config file."""
    folder = run.s.folder
    (folder / "config.yaml").write_text(
        "gpu_ids: [0, 1, 2]\nmin_free_mem_mb: 10000\npoll_interval: 30\ncommands_file: todo.txt\n"
        "log_dir: ./job_logs\njobs_file: ./queue.jsonl\n"
    )
    (folder / "todo.txt").write_text('echo "on $CUDA_VISIBLE_DEVICES"\n')
    run.start("--gpu-ids", "2", "--config", "config.yaml").ended(0)
    job = run.record("queue.jsonl")['echo "on $CUDA_VISIBLE_DEVICES"']
    assert job["gpu_id"] == 2 and Path(job["log_file"]).parent == folder / "job_logs"
    assert Path(job["log_file"]).read_text() == "on 2\n"
    assert not (folder / "jobs.txt").exists() and not (folder / "jobs.jsonl").exists()
    (folder / "other.txt").write_text("echo other\n")
    words = (
        "--commands-file other.txt --log-dir elsewhere --jobs-file other.jsonl --min-free-mem-mb 1 --poll-interval 1"
    )
    run.start("--gpu-ids", "1", *words.split()).ended(0)
    job = run.record("other.jsonl")["echo other"]
    assert job["gpu_id"] == 1 and Path(job["log_file"]).parent == folder / "elsewhere"
    done = run.s.cli("run", "--min-free-mem-mb", "much", code=2)
    assert "--min-free-mem-mb" in done.stderr


def test_s1_4_s1_6_a_job_sees_its_gpu_and_its_journal_record_is_complete(run: Run) -> None:
    """S1.4, S1.6: The job sees its GPU; the journal has pid, GPU, status, log, times, exit code and status history."""
    run.commands('echo "$CUDA_VISIBLE_DEVICES $$"; exit 4')
    run.to_its_end(1)
    (job,) = run.record().values()
    gpu, pid = Path(job["log_file"]).read_text().split()
    assert (job["gpu_id"], job["pid"], job["exit_code"], job["status"]) == (int(gpu), int(pid), 4, "failed")
    assert [status for _, status in job["history"]] == ["pending", "running", "failed"]
    assert job["start_time"] <= job["end_time"] and job["history"][-1][0] == job["end_time"]


def test_s1_5_each_of_twenty_jobs_has_a_log(run: Run) -> None:
    """S1.5: Each of twenty jobs has its own log with its complete stdout and stderr."""
    run.commands(*(f"echo out {n}; echo err {n} >&2" for n in range(20)))
    run.to_its_end(0, "--gpus", "20")
    jobs = run.record()
    assert len({job["log_file"] for job in jobs.values()}) == 20
    for n in range(20):
        log = jobs[f"echo out {n}; echo err {n} >&2"]["log_file"]
        assert Path(log).read_text() == f"out {n}\nerr {n}\n"


def test_s1_9_a_repeated_command_runs_once_and_is_reported(run: Run) -> None:
    """S1.9: A command that is in the file twice runs once, and the repetition is reported."""
    run.commands("echo x >>out", "echo y >>out", "echo x >>out")
    said = run.to_its_end(0)
    assert sorted((run.s.folder / "out").read_text().split()) == ["x", "y"]
    assert re.search(r"commands\.txt: line 3 repeats job 1 \(\w+\).*; not run again", said)


# -- crashes ----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_s1_7_s1_8_run_continues_after_a_crash_and_no_job_runs_twice(run: Run) -> None:
    """S1.7, S1.8: If `run` is killed with SIGKILL, the next `run` continues the commands file; no job runs twice.

    A job that still runs is adopted, a job that ended in the meantime has its true exit code, and a waiting job starts.
    """
    run.commands("echo done >>ledger", run.held("a"), run.held("b", "exit 7"), run.held("c"))
    run.start("--gpus", "2")
    run.begun("done", "a", "b")
    run.s.wait_state(3, "running")
    pid = run.s.rows("SELECT pid FROM jobs WHERE id=3")[0][0]
    run.kill()
    assert "[→]" in run.status(), "what runs, runs"
    run.go("b")
    wait_for(lambda: not alive(pid), "b to end with nobody there")
    wait_for(lambda: "Failed: exit 7" in run.status(), "its true code, though no dispatcher runs")
    run.start("--gpus", "2")
    run.begun("c")
    assert run.s.states()[2] == "running" and sorted(run.ledger()) == ["a", "b", "c", "done"], "nothing twice"
    run.go("a")
    run.go("c")
    said = run.ended(1)
    assert "job 2" in said and "still runs on" in said
    jobs = run.record()
    assert [job["status"] for job in jobs.values()] == ["completed", "completed", "failed", "completed"]
    assert jobs[run.held("b", "exit 7")]["exit_code"] == 7


def test_s1_7_a_job_killed_together_with_run_and_supervisor_is_lost(run: Run) -> None:
    """S1.7: If `run`, the supervisor and the job are killed together, the job is recorded as lost.

    The job has no exit code.
    """
    run.commands(run.held("a"))
    run.start()
    run.begun("a")
    assert run.process is not None
    run.s.process = run.process
    supervisor = run.s.supervisor_pid()
    pid = run.s.rows("SELECT pid FROM jobs WHERE id=1")[0][0] or wait_for(
        lambda: run.s.rows("SELECT pid FROM jobs WHERE id=1")[0][0], "its pid"
    )
    for number in (run.process.pid, supervisor, pid):
        os.kill(number, signal.SIGSTOP)
    for number in (run.process.pid, supervisor, pid):
        os.kill(number, signal.SIGKILL)
    run.process.wait()
    # The kernel keeps the exit code of the job until the job is reaped. The job may have become a child of this process.
    wait_for(lambda: not _left_of(pid) and not alive(supervisor), "both to be gone")
    said = run.to_its_end(1)
    assert (
        "lost" in said
        and run.record()[run.held("a")]["outcome"] == run.s.job(1)["outcome"] == "lost"
        and run.s.job(1)["exit_code"] is None
    )
    assert run.ledger() == ["a"]


def _left_of(pid: int) -> bool:
    """Reap the process if it is a zombie child of the test process; return whether it then still exists in /proc."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return Path(f"/proc/{pid}").exists()


def test_s1_12_a_truncated_last_line_of_the_journal_is_restored(run: Run) -> None:
    """S1.12: A truncated last line of the journal is restored by the next run, and no other job is lost."""
    run.commands("echo one", "echo two")
    run.to_its_end(0)
    path = run.s.folder / "jobs.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-30])
    run.to_its_end(0)
    assert path.read_text() == whole
    path.write_text(whole + '{"command": "echo thr')
    run.to_its_end(0)
    assert run.record().keys() == {"echo one", "echo two"}


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_s1_2_s1_10_a_job_gets_the_gpu_with_the_most_free_memory(machine: Callable[..., Machine]) -> None:
    """S1.2, S1.10: A job gets the GPU with the most free memory. It waits while no GPU has the minimum of free memory.

    If the GPU library stops working after the end of `run`, the output of `status` stays the same.
    """
    m = machine(None).cards("GPU-a", "GPU-b")
    others = m.foreign_process()
    begun = time.time()
    wait_for(
        lambda: time.time() > begun + 1.5, "else it may be taken for one of the job's, which is to start in a moment"
    )
    m.use("GPU-a", others, 50_000)
    m.use("GPU-b", others, 75_000)
    run = Run(m.s).commands(run_held("a"), run_held("b"), run_held("c"))
    run.detected("--min-free-mem-mb", "15000", "--poll-interval", "0.25")
    run.begun("a")
    run.s.wait_state(1, "running")
    line = wait_for(
        lambda: (found := re.findall(r"^\[ \] .*Pending \(.*\)  job \d$", run.status(), re.M)) and found, "a reason"
    )
    assert "neither in use nor booked" in line[0] or "shortly" in line[0], line
    text = m.s.cli("status").stdout
    assert re.search(r"^\[→\] echo a .* → GPU 0 → Running \(PID \d+\)  job 1$", text, re.M), text
    assert re.search(r"^\[ \] echo c .* → GPU N/A → Pending", text, re.M), text
    m.unuse("GPU-b", others)
    run.begun("b", "c")
    assert {m.s.job(2)["gpus"][0], m.s.job(3)["gpus"][0]} == {1}, "80 GB free there, 30 on the other"
    for key in "abc":
        run.go(key)
    run.ended(0)
    text = m.s.cli("status").stdout
    assert len(re.findall(r"^\[✓\] .* → GPU [01] → Completed  job \d$", text, re.M)) == 3, text
    m.s.environ["NVML_STUB_FILE"] = "/nonexistent"
    assert m.s.cli("status").stdout == text


def test_s1_2_run_waits_while_foreign_processes_fill_all_gpus(machine: Callable[..., Machine]) -> None:
    """S1.2: While foreign processes fill all GPUs, `run` waits, reads the GPUs again and again, and then continues."""
    m = machine(None).cards("GPU-a", "GPU-b")
    others = m.foreign_process()
    m.use("GPU-a", others, 78_000)
    m.use("GPU-b", others, 78_200)
    run = Run(m.s).commands("echo $CUDA_VISIBLE_DEVICES >>out").detected("--poll-interval", "0.25")
    m.waits(1, "foreign", "GPU 0 has 966 MiB that are neither in use nor booked")
    m.still_waits(1)
    m.unuse("GPU-b", others)
    run.ended(0)
    assert (m.s.folder / "out").read_text() == "1\n"


def test_a_lower_memory_minimum_applies_to_refused_and_waiting_commands(machine: Callable[..., Machine]) -> None:
    """A command that was refused, or had to wait, runs in the next `run` with a lower `--min-free-mem-mb`."""
    m = machine(None).cards("GPU-a")
    run = Run(m.s).commands("echo x >>out")
    said = run.detected("--min-free-mem-mb", "90000", "--poll-interval", "0.25").ended(1)
    assert "needs 90000M on a GPU" in said and "1 line refused" in said
    others = m.foreign_process()
    m.use("GPU-a", others, 50_000)
    run.detected("--min-free-mem-mb", "40000", "--poll-interval", "0.25")
    m.waits(1, "foreign")
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    run.ended(130)
    said = run.detected("--min-free-mem-mb", "20000", "--poll-interval", "0.25").ended(0)
    assert "1 command: 1 done" in said and (m.s.folder / "out").read_text() == "x\n"


def test_s1_11_memory_reserved_for_starting_jobs_counts_as_used(machine: Callable[..., Machine]) -> None:
    """S1.11: Memory that is reserved for jobs that have just started counts as used before the driver shows it.

    Two of four jobs fit at first. When the time `settle` has passed, only the memory that these two jobs really use
    counts, and the other two jobs start.
    """
    m = machine(None).cards("GPU-a")
    run = Run(m.s).commands(*(run_held(key) for key in "abcd"))
    environ = {"GPUJOB_SET_GPU_INTERVAL": "0.25", "GPUJOB_SET_SETTLE": "2"}
    m.s.environ |= environ
    minimum = (TOTAL - IDLE) // 2 - 100
    run.detected("--min-free-mem-mb", str(minimum))
    run.begun("a", "b")
    for job in (1, 2):
        pid = wait_for(lambda: m.s.rows("SELECT pid FROM jobs WHERE id=?", job)[0][0], "its pid")  # noqa: B023
        m.use("GPU-a", pid, 1_000)
    run.begun("c", "d")
    wait_for(lambda: None not in dict(m.s.rows("SELECT id, started_at FROM jobs")).values(), "all starts written down")
    starts = dict(m.s.rows("SELECT id, started_at FROM jobs"))
    assert min(starts[3], starts[4]) > min(starts[1], starts[2]) + 2, (
        "not while the first were still to show what they use"
    )
    for key in "abcd":
        run.go(key)
    run.ended(0)


def run_held(key: str) -> str:
    return Run.held(key)


def test_a_declared_gpu_runs_one_job_at_a_time(run: Run) -> None:
    """A declared GPU runs one job at a time: its memory is unknown, so it cannot be shared by memory."""
    run.commands(*(run.held(key) for key in "abc"))
    run.start("--gpus", "2")
    run.begun("a", "b")
    assert run.s.job(3)["reason_code"] == "no-room"
    for key in "abc":
        run.go(key)
    run.ended(0)


# -- Ctrl-C -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sigint_or_sigterm_without_a_terminal_ends_run_and_no_job(run: Run, number: int) -> None:
    """Without a terminal, `run` exits with 130 at SIGINT or SIGTERM.

    Its jobs continue, and the next `run` adopts them.
    """
    run.commands(run.held("a"), run.held("b"))
    run.start("--gpus", "1")
    run.begun("a")
    assert run.process is not None
    run.process.send_signal(number)
    said = run.ended(130)
    assert "1 running job continues" in said and "to continue, start the same gpujob run again" in said
    run.start("--gpus", "1")
    run.go("a")
    run.begun("b")
    run.go("b")
    run.ended(0)
    assert run.ledger() == ["a", "b"]


class Terminal:
    """A `gpujob run` in its own pseudo-terminal."""

    def __init__(self, run: Run, *words: str) -> None:
        self.run = run
        self.pid, self.fd = pty.fork()
        if not self.pid:
            try:
                os.chdir(run.s.folder)
                environ = {**run.s.environ, "TERM": "xterm", "COLUMNS": "100"}
                os.execve(run.s.command[0], [*run.s.command, "run", "--gpus", "2", *words], environ)
            finally:
                os._exit(127)
        self.said = ""

    def until(self, text: str) -> None:
        """Read the output of `gpujob run` until it contains ``text``."""

        def look() -> bool:
            while select.select([self.fd], [], [], 0)[0]:
                try:
                    self.said += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    break
            return text in self.said

        wait_for(look, f"{text!r} in {self.said[-2000:]!r}")

    def type(self, text: str) -> None:
        self.said = ""
        os.write(self.fd, text.encode())

    def code(self) -> int:
        """Wait until `gpujob run` has ended, and return its exit code."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # EIO: `gpujob run` has closed the terminal, and will end
                    self.said += os.read(self.fd, 65536).decode(errors="replace")
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.pid = 0
                with contextlib.suppress(OSError):  # EIO: the output is read to its end
                    while select.select([self.fd], [], [], 0)[0]:
                        self.said += os.read(self.fd, 65536).decode(errors="replace")
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"it does not end: {self.said[-2000:]}")

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(run: Run) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*words: str) -> Terminal:
        made.append(Terminal(run, *words))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_after_ctrl_c_the_answer_continue_runs_all_commands(run: Run, terminal: Callable[..., Terminal]) -> None:
    run.commands(run.held("a"), run.held("b"), run.held("c"))
    shown = terminal()
    run.begun("a", "b")
    shown.until("0/3")
    shown.type("\x03")
    shown.until("2 jobs are running.")
    shown.until("(l)eave them running, (e)nd them, (c)ontinue this run?")
    shown.type("what\n")
    shown.until("l, e or c: ")
    shown.said = ""
    run.go("a")
    run.begun("c")  # jobs start while `run` waits for the answer
    shown.until("job 3")
    wait_for(lambda: shown.until("l, e or c: ") or True, "asked again below what was said")
    shown.type("c\n")
    shown.until("1/3")
    run.go("b")
    run.go("c")
    assert shown.code() == 0
    assert "3 commands: 3 done" in shown.said


def test_after_ctrl_c_the_answer_end_cancels_jobs_until_next_run(run: Run, terminal: Callable[..., Terminal]) -> None:
    run.commands(run.held("a"), run.held("b"), run.held("c"))
    shown = terminal()
    run.begun("a", "b")
    shown.type("\x03")
    shown.until("2 jobs are running")
    shown.type("e\n")
    assert shown.code() == 130
    assert run.s.states() == {1: "cancelled", 2: "cancelled", 3: "pending"}, "the record is true"
    assert sorted(run.ledger()) == ["a", "b"]
    for key in "abc":
        run.go(key)
    assert "3 commands: 3 done" in run.to_its_end(0)
    assert sorted(run.ledger()) == ["a", "a", "b", "b", "c"]


def test_a_job_still_being_ended_is_run_again_by_the_next_run(run: Run, terminal: Callable[..., Terminal]) -> None:
    """If a second Ctrl-C ends `run` while a job is still being ended, the next `run` runs that job again."""
    deaf = "trap '' TERM; echo a >>ledger; [ -e once ] || { touch once; while :; do sleep 0.05; done; }"
    run.commands(deaf)
    shown = terminal("--kill-grace", "600")
    run.begun("a")
    shown.type("\x03")
    shown.until("1 job is running")
    shown.type("e\n")
    shown.until("is being ended")
    shown.type("\x03")
    assert shown.code() == 130 and run.s.states() == {1: "stopping"}
    assert "1 command: 1 done" in run.to_its_end(0, "--kill-grace", "1")
    assert run.ledger() == ["a", "a"] and run.s.job(1)["attempt"] == 2


def test_ctrl_c_in_the_background_asks_no_question(run: Run, terminal: Callable[..., Terminal]) -> None:
    """In the background (`gpujob run &`), Ctrl-C asks no question: reading from the terminal would stop the process."""
    run.commands(run.held("a"))
    pid, fd = pty.fork()
    if not pid:
        try:
            os.chdir(run.s.folder)
            program = [*run.s.command, "run", "--gpus", "1"]
            script = f"{shlex.join(program)} & child=$!; until grep -q a ledger; do sleep 0.05; done; kill -INT $child; wait $child; echo code $?"
            os.execve("/bin/bash", ["bash", "-mc", script], {**run.s.environ, "TERM": "xterm"})
        finally:
            os._exit(127)
    said = b""
    while b"code " not in said:
        assert select.select([fd], [], [], PATIENCE_S)[0], said
        said += os.read(fd, 65536)
    os.waitpid(pid, 0)
    os.close(fd)
    assert b"code 130" in said and b"(l)eave" not in said, said
    run.go("a")
    run.to_its_end(0)


@pytest.mark.parametrize("how", ["l\n", "\x03", "\x04"], ids=["leave", "once more", "end of input"])
def test_after_ctrl_c_the_answer_leave_keeps_the_jobs_running(
    run: Run, terminal: Callable[..., Terminal], how: str
) -> None:
    run.commands(run.held("a"), run.held("b"))
    shown = terminal()
    run.begun("a", "b")
    shown.type("\x03")
    shown.until("2 jobs are running")
    shown.type(how)
    assert shown.code() == 130
    assert set(run.s.states().values()) <= {"starting", "running"}  # `run` may end before it records that the jobs run
    run.go("a")
    run.go("b")
    run.to_its_end(0)
    assert run.ledger() == ["a", "b"] or run.ledger() == ["b", "a"]


TWICE = """
import os, signal
from scheduler import entrypoint
from scheduler.cli import run
ask = run._Question.ask
def asked(self, jobs):
    os.kill(os.getpid(), signal.SIGINT)
    ask(self, jobs)
run._Question.ask = asked
entrypoint.entry()
"""


def test_a_second_ctrl_c_ends_run(run: Run, terminal: Callable[..., Terminal]) -> None:
    """A second Ctrl-C ends `run`, even if it arrives before the question is printed."""
    run.commands(run.held("a"))
    usual = run.s.command
    run.s.command = [usual[0], "-c", TWICE]
    shown = terminal()
    run.begun("a")
    shown.type("\x03")
    assert shown.code() == 130
    run.s.command = usual
    assert run.s.states()[1] in ("starting", "running")
    run.go("a")
    run.to_its_end(0)


def test_a_command_removed_from_the_file_does_not_affect_the_exit_code(run: Run) -> None:
    """The exit code of `run` depends only on commands that are still in the file.

    A command that failed and was then removed from the file does not count.
    """
    run.commands("true", "exit 3")
    run.to_its_end(1)
    run.commands("true", "exit 0")
    said = run.to_its_end(0)
    assert "commands.txt: 2 commands: 2 done (1 of them ended in earlier runs)\n" in said
    assert run.s.states() == {1: "done", 2: "failed", 3: "done"}


def test_run_exits_with_1_for_commands_whose_jobs_were_deleted(run: Run) -> None:
    """If commands have ended and `reset` has deleted their jobs, `run` reports the commands as forgotten.

    `run` then exits with 1. It runs these commands again only with `--again`.
    """
    run.commands("echo x >>out", "echo y >>out")
    run.to_its_end(0)
    run.s.cli("reset")
    said = run.to_its_end(1)
    assert "commands.txt: 2 commands: 2 forgotten\n" in said and "gpujob run --again" in said
    with run.file.open("a") as stream:
        stream.write("echo z >>out\n")
    assert "1 done, 2 forgotten" in run.to_its_end(1)
    assert "commands.txt: 3 commands: 3 done" in run.to_its_end(0, "--again")
    assert sorted((run.s.folder / "out").read_text().split()) == ["x", "x", "y", "y", "z", "z"]
    assert "3 done (3 of them ended in earlier runs)" in run.to_its_end(0)


@pytest.mark.parametrize("how", ["utf-16", "gone", "others may write"])
def test_run_exits_with_1_if_the_commands_file_cannot_be_read(run: Run, how: str) -> None:
    """If `run` cannot read the commands file when it begins, or again when its jobs have ended, it exits with 1."""
    if how == "utf-16":
        run.file.write_text("true\n", "utf-16")
        assert "commands.txt" in run.to_its_end(1)
        return
    run.commands(run.held("a"))
    run.start()
    run.begun("a")
    if how == "gone":
        run.file.unlink()
    else:
        run.file.chmod(0o666)
    run.go("a")
    said = run.ended(1)
    assert "1 command: 1 done" in said


def test_commands_files_of_equal_name_in_two_folders_are_kept_apart(run: Run) -> None:
    for name, text in (("a", "exit 1"), ("b", "true")):
        (run.s.folder / name).mkdir()
        (run.s.folder / name / "commands.txt").write_text(f"{text}\n")
    assert "1 command: 1 failed" in run.to_its_end(1, "a/commands.txt")
    assert "1 command: 1 done\n" in run.to_its_end(0, "b/commands.txt")


def test_run_refuses_a_file_with_other_contents_as_its_journal(run: Run) -> None:
    """`run` refuses a file with other contents as its journal, and leaves this file unchanged.

    Users are likely to make this mistake: in the config, `jobs_file` names the watched file for `start`, but the
    journal for `run`.
    """
    lines = "# my queue\n0,train.py,torch,--epochs 3,0\n"
    run.s.jobs_file.write_text(lines)
    run.commands("true")
    said = run.to_its_end(2, "--jobs-file", "jobs.txt")
    assert "jobs.txt: this file is not a journal" in said and "jobs_file" in said
    assert run.s.jobs_file.read_text() == lines and not list(run.s.folder.glob("jobs.txt.*"))


def test_a_second_run_on_the_same_state_file_is_refused(run: Run) -> None:
    """A second `run` on the same state file exits with 1, names the pid of the first, and changes nothing."""
    run.commands(run.held("a"))
    run.start()
    run.begun("a")
    assert run.process is not None
    done = run.s.cli("run", "--gpus", "2", "--again", code=1)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert f"(pid {run.process.pid})" in done.stderr and "gpujob status" in done.stderr
    assert "--state-file" not in done.stderr
    run.go("a")
    assert "1 command: 1 done\n" in run.ended(0)


def test_the_progress_bar_is_shown_only_on_a_terminal(run: Run, terminal: Callable[..., Terminal]) -> None:
    run.commands("true", "true # two")
    assert "━" not in run.to_its_end(0)
    run.commands("true # three", "exit 1")
    shown = terminal()
    assert shown.code() == 1
    assert "━" in shown.said and "commands.txt: 2 commands: 1 done, 1 failed" in shown.said
