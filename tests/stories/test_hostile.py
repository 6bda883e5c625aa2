"""Unusual and hostile conditions, each of which once ended the daemon, kept it busy, or lost something."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.core.job import Process
from scheduler.system.process_search import Target, members, signal_all
from scheduler.system.processes import Mark, seen, send
from tests.gpus.stub import compiled
from tests.stories.harness import alive, wait_for


def ticks_of(pid: int) -> int:
    """Return the CPU time that a process has used, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_h02_a_foreign_process_with_the_pid_of_an_ended_job_is_not_signalled():
    """H02: A foreign process with the pid of an ended job is not taken for a process of that job, and not signalled."""
    foreign_process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        found = seen(foreign_process.pid)
        assert found is not None
        gone = Process(foreign_process.pid, found.ticks - 100)
        mark = Mark(1, 1, "/nowhere/state.json")
        assert members(mark, gone) == [] and members(mark, gone, sure=True) == []
        assert Process(foreign_process.pid, found.ticks) in members(mark, Process(foreign_process.pid, found.ticks))
        assert not send(gone, signal.SIGKILL) and signal_all([Target(mark, gone, (gone,), hard=True)]) == []
        assert foreign_process.poll() is None
    finally:
        foreign_process.kill()
        foreign_process.wait()


def test_retry_is_refused_after_an_equal_job_succeeded(scheduler):
    """`retry` of a failed job is refused if a job with the same command and arguments has succeeded.

    This holds with and without a daemon.
    """
    s = scheduler(gpus=1)
    flip = s.folder / "flip"
    flip.write_text("#!/bin/sh\n[ -e ok ] && exit 0; exit 3\n")
    flip.chmod(0o755)
    s.append("0,flip")
    s.start()
    s.wait_state(1, "failed")
    (s.folder / "ok").touch()
    s.append("0,flip")
    s.wait_state(2, "done")
    for _ in range(2):  # with a daemon, and without
        assert "job 2 (done) has the same" in s.cli("retry", "1", code=3).stderr
        s.stop()
    s.start()
    s.append("0,flip,,next")
    s.wait_state(3, "done")


def test_non_plain_state_file_and_model_table_are_reported(scheduler):
    """Deep JSON, a FIFO or a folder in place of the state file or the model table is reported.

    Jobs run, and the scheduler ends on SIGTERM.
    """
    s = scheduler(gpus=1, state_interval=1)
    s.start()
    state = s.folder / "gpu_scheduler_state.json"
    wait_for(state.exists, "the state file")
    state.write_text("[" * 200_000)
    wait_for(lambda: "copy saved as" in s.said(), "the report")

    def stands_there(make: Callable[[Path], None], is_there: Callable[[], bool]) -> bool:
        """Put something in place of the state file; return True if this has succeeded.

        It fails if the daemon writes a new state file first.
        """
        state.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            make(state)
        return is_there()

    wait_for(lambda: stands_there(os.mkfifo, state.is_fifo), "a FIFO in place of the state file")
    os.mkfifo(s.folder / "llm_config.json")
    s.append(s.line("a"))
    s.wait_ended(1)
    assert s.stop() == 0
    state.unlink()
    (s.folder / "llm_config.json").unlink()
    s.start()
    wait_for(lambda: stands_there(os.mkdir, state.is_dir), "a folder in place of the state file")
    s.append(s.line("b"))
    s.wait_ended(2)
    assert s.stop() == 0 and ": not a regular file" in s.said()
    assert "is a folder; name the file in it" in s.cli("start", "--gpus", "1", code=2).stderr


@pytest.mark.parametrize("put", ["mkfifo $f", "ln -s /dev/zero $f"], ids=["pipe", "device"])
def test_p8_a_fifo_or_device_in_place_of_a_log_blocks_nothing(scheduler, put):
    """If a job replaces its log with a FIFO or a device, this blocks neither a daemon nor `why`.

    The daemon that runs at that time, the next daemon and `why` read the end of the log to find the cause of the
    failure.
    """
    s = scheduler(gpus=1).start()
    made = "for f in gpu_scheduler_logs/job_${GPUJOB_ID}_*; do rm $f; " + put + "; done"
    s.cli("submit", "--", "sh", "-c", f"{made}; exit 4")
    s.wait_state(1, "failed")
    s.cli("submit", "--", "true")
    s.wait_state(2, "done")
    why = " ".join(s.cli("why", "1").stdout.split())
    assert re.search(r"cannot read its log \S+: not a regular file", why), why
    s.cli("submit", "--", "sh", "-c", f"{made}; touch made; until [ -e go ]; do sleep 0.02; done; exit 4")
    wait_for((s.folder / "made").exists, "another pipe")
    s.kill()
    (s.folder / "go").touch()
    s.start()
    s.wait_state(3, "failed")
    s.cli("submit", "--", "true")
    s.wait_state(4, "done")


def test_p8_fifos_in_place_of_the_schedulers_files_block_nothing(scheduler):
    """FIFOs in place of the scheduler's own files block neither the daemon nor the verbs.

    Any job can create such FIFOs, because jobs run with the user's rights. If the environment file of a job is a FIFO,
    only this job waits.
    """
    s = scheduler(gpus=1).start()
    s.hold("a")
    s.append(s.line("a"))
    s.wait_state(1, "running")
    s.cli("submit", "--", "true")
    house = s.folder / ".gpujob"
    stored = Path(json.loads(s.rows("SELECT spec FROM jobs WHERE id=2")[0][0])["env_file"])
    for path in (stored, house / "daemon.json"):
        path.unlink()
        os.mkfifo(path)
    s.append(s.line("b"))
    s.release("a")
    s.wait_state(3, "done")
    wait_for(lambda: "its environment cannot be read" in s.cli("why", "2").stdout, "what holds up the other one")
    s.cli("cancel", "2")
    s.cli("submit", "--", "true")  # with the same environment: writes the stored file again
    s.wait_state(4, "done")
    s.kill()
    (house / "watched.json").unlink()
    os.mkfifo(house / "watched.json")
    s.start()
    s.append(s.line("c"))
    s.wait_state(5, "done")
    s.stop()
    (house / "high").unlink()
    os.mkfifo(house / "high")
    assert "high: cannot open the file: not a regular file; move it away" in s.cli("start", code=1).stderr
    s.cli("status")


def test_non_utf8_options_are_refused_and_arguments_passed(scheduler):
    """`submit` refuses an option whose value is not UTF-8.

    An argument of the job that is not UTF-8 reaches the job unchanged.
    """
    s = scheduler(gpus=1)
    s.start()
    words = [os.fsencode(w) for w in (sys.executable, "-m", "scheduler", "submit")]
    done = subprocess.run(
        [*words, b"--conda", b"b\xff", b"--", b"true"], cwd=s.folder, env=s.environ, capture_output=True
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    done = subprocess.run(
        [*words, b"--wait", b"--", b"echo", b"b\xff"], cwd=s.folder, env=s.environ, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    log = s.rows("SELECT log FROM jobs")[0][0]
    assert Path(log).read_bytes() == b"b\xff\n"


def test_jobs_run_in_a_non_utf8_folder(scheduler):
    """Jobs run in a folder whose name is not UTF-8.

    In such a folder, `submit` refuses `--log-dir logs` and `--conda ./env`: it would have to store the absolute
    paths of these folders, and the absolute paths are not UTF-8. `submit` accepts `--cwd .`.
    """
    s = scheduler(gpus=1)
    folder = os.fsencode(s.folder) + b"/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/a.py", "w", opener=lambda path, flags: os.open(path, flags, 0o700)) as script:
        script.write("#!/bin/sh\n")
    words = [os.fsencode(w) for w in (sys.executable, "-m", "scheduler", "submit")]
    words += [b"--state-file", os.fsencode(s.folder / "gpu_scheduler_state.json")]
    code = {}
    for word in (b"--log-dir=logs", b"--conda=./env", b"--cwd=.", b"--launch=torchrun"):
        done = subprocess.run([*words, word, b"--", b"./a.py"], cwd=folder, env=s.environ, capture_output=True)
        code[word.decode().partition("=")[0]] = done.returncode
        assert b"Traceback" not in done.stderr and done.stderr.count(b"\n") <= 1, done.stderr
    assert code == {"--log-dir": 2, "--conda": 2, "--cwd": 0, "--launch": 0}
    s.start()
    s.wait_ended(2)
    assert "internal error" not in s.said() and os.listdir(folder) == [b"a.py"]


def test_jobs_get_an_environment_of_300_kb(scheduler):
    """Jobs run with an environment of 300 KB, which is too large for one packet to the supervisor."""
    s = scheduler(gpus=1)
    s.append(s.line("a"))
    s.start(A="a" * 100_000, B="b" * 100_000, C="c" * 100_000)
    s.wait_ended(1)
    assert s.starts("a") == 1


def test_removed_record_and_log_folders_are_created_again(scheduler):
    """If the folders of attempt records and job logs are removed, they are created again, and the next job runs."""
    s = scheduler(gpus=1)
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    subprocess.run(
        ["rm", "-r", str(s.folder / ".gpujob" / "attempts"), str(s.folder / "gpu_scheduler_logs")], check=True
    )
    s.append(s.line("b", code=4))
    s.wait_ended(2)
    assert s.job(2)["exit_code"] == 4


def test_a_job_that_ended_under_a_stopped_supervisor_is_not_lost(scheduler):
    """If a job ended while its supervisor was stopped (SIGSTOP), the supervisor has not recorded the ending yet.

    The next daemon waits until the supervisor records the ending.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=7))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    pid = int(wait_for(s.ledger, "the start")[0][2])
    os.kill(supervisor, signal.SIGSTOP)
    s.kill()
    s.release("a")
    wait_for(lambda: not alive(pid), "the job's end")
    s.start()
    time.sleep(0.3)  # time for a premature decision, which the assertions below would detect
    os.kill(supervisor, signal.SIGCONT)
    s.wait_ended(1)
    job = s.job(1)
    assert (job["outcome"], job["exit_code"]) == ("exit", 7)


def test_an_unmarked_leftover_process_holds_the_gpu(scheduler):
    """A leftover process without a job's mark keeps the GPU of each job that may have started it.

    It keeps the GPU until it ends. The scheduler does not kill it to free the GPU.
    """
    s = scheduler(gpus=1)
    script = s.folder / "hide"
    script.write_text("#!/bin/sh\nenv -i setsid /bin/sh -c 'echo $$ > hidden; exec /bin/sleep 600' &\nsleep 0.3\n")
    script.chmod(0o755)
    s.append("0,hide", s.line("next"))
    s.start()
    s.wait_state(1, "done")
    hidden = int(wait_for(lambda: (s.folder / "hidden").exists() and (s.folder / "hidden").read_text(), "its pid"))
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert s.states()[2] == "pending" and alive(hidden)
    os.kill(hidden, signal.SIGKILL)
    s.wait_ended(3)


@pytest.mark.parametrize("tail", [" ", "x" * 1_500_000], ids=["blank", "long"])
def test_text_after_an_unterminated_line_causes_no_busy_loop(scheduler, tail):
    """If text is appended to a last line that already became a job, this causes no busy loop.

    Later lines are read.
    """
    s = scheduler(gpus=1)
    s.start()
    with s.jobs_file.open("a") as stream:
        stream.write(s.line("a"))
    s.wait_ended(1)
    with s.jobs_file.open("a") as stream:
        stream.write(tail)
    time.sleep(2.5)  # longer than the time after which a line without newline is read
    before = ticks_of(s.pid)
    time.sleep(1.0)
    assert ticks_of(s.pid) - before < 30
    s.append("", s.line("b"))
    s.wait_ended(2)
    assert s.starts("b") == 1


def test_e12_a_removed_store_causes_no_busy_loop(scheduler):
    """E12: If the store is removed while a scheduler runs, this is reported. No job starts, and there is no busy loop.

    When the store is back, the scheduler continues.
    """
    s = scheduler(gpus=1, monitor_interval=1)
    s.start()
    s.cli("submit", "--cpu", "--wait", "--", "true")
    os.rename(s.folder / ".gpujob" / "store.db", s.folder / "away")
    wait_for(lambda: "removed or replaced" in s.said(), "the report")
    s.append(s.line("a"))
    before = ticks_of(s.pid)
    time.sleep(1.0)
    assert ticks_of(s.pid) - before < 30 and s.ledger() == []
    os.rename(s.folder / "away", s.folder / ".gpujob" / "store.db")
    s.wait_ended(2)


def test_a_job_that_writes_fast_does_not_delay_messages(scheduler):
    """If a job writes 60 MB at full speed, `start` still reports that this job and another job are done.

    The log of the fast job is complete.
    """
    s = scheduler(gpus=2)
    script = s.folder / "loud"
    script.write_text("#!/bin/sh\nyes 'a line of some length to be written' | head -c 60000000\n")
    script.chmod(0o755)
    s.append("0,loud", s.line("quiet"))
    s.start()
    s.wait_ended(2)
    wait_for(lambda: "job 2 (job.py) done" in s.said() and "job 1 (loud) done" in s.said(), "both ends are shown")
    assert len(s.log(1)) == 60_000_000


def test_jobs_that_kill_supervisor_or_group_have_exact_endings(scheduler):
    """The ending of a job that kills the supervisor or its own process group is recorded exactly."""
    s = scheduler(gpus=1)
    for name, text in (("parent", "kill -9 $PPID; exit 6"), ("group", "kill -9 0")):
        path = s.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    s.append("0,parent", "0,group", s.line("after"))
    s.start()
    s.wait_ended(3)
    assert s.job(1)["exit_code"] == 6 and s.job(2)["signal"] == 9 and s.starts("after") == 1


def test_e12_a_deleted_store_is_reported_once_and_rebuilt_by_recover(scheduler):
    """E12: A deleted store is reported once, each verb names `gpujob recover`, and no job starts.

    After `recover` the exit code of the job that ran is known.
    """
    s = scheduler(gpus=2, monitor_interval=1)
    s.hold("a")
    s.append(s.line("a", code=4))
    s.start()
    s.wait_state(1, "running")
    for ending in ("", "-wal", "-shm"):
        os.unlink(f"{s.folder}/.gpujob/store.db{ending}")
    wait_for(
        lambda: "store.db: cannot use the store: it was removed or replaced while in use" in s.said(), "the report", 10
    )
    s.append(s.line("b"))
    for words in (("submit", "--cpu", "--", "true"), ("status",), ("pause", "0")):
        error = s.cli(*words, code=1).stderr
        assert "gpujob recover" in error and error.count("\n") == 1, error
    before = ticks_of(s.pid)
    time.sleep(3.0)
    assert ticks_of(s.pid) - before < 15 and s.starts("b") == 0 and s.said().count("was removed or replaced") == 1
    s.release("a")
    wait_for(lambda: [e for e in s.ledger() if e[0] == "end"], "its end")
    assert s.stop() == 0
    assert not (s.folder / ".gpujob" / "store.db").exists(), "no empty one is made in its place"
    assert "gpujob recover" in s.cli("start", "--gpus", "2", code=1).stderr
    assert "jobs.txt:2: it is not known whether this line ran" in s.cli("recover", code=1).stdout
    s.start()
    s.append(s.line("c"))
    wait_for(lambda: s.starts("c"), "it goes on")
    assert (s.job(1)["exit_code"], s.starts("a"), s.starts("b")) == (4, 1, 0)


def test_e12_a_removed_store_is_noticed_before_a_start(scheduler):
    """E12: With the default intervals, a removed store is noticed before the next job starts.

    That job does not start until the store is back.
    """
    s = scheduler(gpus=1)
    s.start()
    s.cli("submit", "--cpu", "--wait", "--", "true")
    os.rename(s.folder / ".gpujob" / "store.db", s.folder / "away")
    s.append(s.line("a"))
    wait_for(lambda: "removed or replaced" in s.said() or s.starts("a"), "the report")
    assert s.starts("a") == 0
    os.rename(s.folder / "away", s.folder / ".gpujob" / "store.db")
    s.wait_ended(2)
    assert s.starts("a") == 1


def test_e16_c38_on_nfs_start_warns_and_polls(scheduler):
    """E16, C38: If every file system is reported as NFS, `start` warns and polls the files.

    Jobs, edits of the state file and a restart after kill -9 work.
    """
    s = scheduler(gpus=2)
    flags = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    s.environ["LD_PRELOAD"] = str(compiled(Path(__file__).with_name("nfs.c"), "nfs.so", flags))
    s.start()
    assert (
        "its files are polled every second" in s.said()
        and ".gpujob is on NFS, which other machines may share" in s.said()
    )
    s.says("--state-file")
    s.append(s.line("a", 3))
    s.wait_state(1, "failed")
    state = s.folder / "gpu_scheduler_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "paused_gpus": [1]}))
    wait_for(lambda: s.rows("SELECT gpu FROM pauses") == [(1,)], "an edit is seen")
    s.kill()
    s.start()
    assert s.job(1)["exit_code"] == 3 and s.starts("a") == 1


def test_p5_a_second_scheduler_where_the_folder_was_removed_is_refused(scheduler):
    """P5, P7: A second scheduler is refused while the first one lives, even if the state folder was removed."""
    s = scheduler(gpus=1, history="false")  # no thread creates a file while the folder is removed
    s.hold("a")
    s.append(s.line("a", 7))
    s.start()
    s.wait_state(1, "running")
    first = s.process
    shutil.rmtree(s.folder / ".gpujob")
    error = s.cli("start", "--gpus", "1", code=1).stderr
    assert (
        f"is still running (pid {first.pid}); its state folder was moved or removed meanwhile" in error
        and error.count("\n") == 1
    )
    first.kill()
    first.wait()
    s.start()


def test_p5_an_old_supervisor_writes_no_ending_into_the_record_of_another_job(scheduler):
    """P5: If a state folder is removed, the supervisor that used it writes no ending into the records of later jobs.

    The next daemon creates a new state folder at the same path. There, the ids of jobs begin at 1 again.
    """
    s = scheduler(gpus=2)
    s.hold("a")
    s.append(s.line("a", 7))
    s.start()
    s.wait_state(1, "running")
    old = s.supervisor_pid()
    s.kill()
    shutil.rmtree(s.folder / ".gpujob")
    s.jobs_file.unlink()
    s.hold("b")
    s.append(s.line("b", 4))
    s.start()
    s.wait_state(1, "running")
    s.release("a")
    wait_for(lambda: not alive(old), "the old supervisor has seen the end of its job, and ends")
    s.kill()
    s.start()
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert s.states()[1] == "running"
    s.release("b")
    s.wait_ended(2)
    assert (s.job(1)["exit_code"], s.starts("b")) == (4, 1)


def test_p7_leftovers_of_a_job_that_ends_while_the_store_is_locked_hold_the_gpu(scheduler):
    """P7: If a job ends while the store is locked, its ending is recorded when the lock is released.

    A leftover process of that job still holds the job's GPU, even if the process does not have the job's mark.
    """
    s = scheduler(gpus=1)
    script = s.folder / "hide"
    script.write_text(
        "#!/bin/sh\nenv -i setsid /bin/sh -c 'echo $$ > hidden; exec /bin/sleep 600' &\n"
        "while test ! -e go; do sleep 0.02; done\nexit 5\n"
    )
    script.chmod(0o755)
    s.append("0,hide")
    s.start()
    hidden = int(wait_for(lambda: (s.folder / "hidden").exists() and (s.folder / "hidden").read_text(), "its pid"))
    s.wait_state(1, "running")
    with (s.folder / ".gpujob" / "store.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (s.folder / "go").touch()
        wait_for(lambda: "cannot lock the store" in s.said(), "the store cannot be used")
    s.append(s.line("next"))
    s.wait_state(1, "failed")
    wait_for(lambda: s.states().get(2), "the second is taken in")
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert (s.job(1)["exit_code"], s.states()[2], alive(hidden)) == (5, "pending", True)
    os.kill(hidden, signal.SIGKILL)
    s.wait_ended(3)
