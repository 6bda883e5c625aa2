"""`ts`: order, dependencies, output and endings of jobs."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stories.harness import alive, wait_for
from tests.stories.spooler import Spooler

ASLEEP = (
    "230",
    "115",
    "270",
    "72",
    "23",
)  # clock_nanosleep, pselect6, select: how Python sleeps, on x86-64 and arm64


def asleep(process: subprocess.Popen[str]) -> None:
    """Wait until this client sleeps. A client sleeps between two checks of its job."""
    path = Path(f"/proc/{process.pid}/syscall")
    wait_for(lambda: path.read_text().split()[0] in ASLEEP, "a client that waits")


@pytest.mark.smoke
def test_s4_6_waiting_for_a_job_returns_its_exit_code(spooler: Callable[..., Spooler]) -> None:
    """S4.6: -w, -f, -c and -t return the exit code of the job.

    They return 255 if the job was killed by a signal, was skipped, or could not be started.
    """
    s = spooler()
    s.add("sh", "-c", "exit 5")
    assert [s.run(action, "0").returncode for action in ("-w", "-c", "-t")] == [5, 5, 5]
    done = s.run("-f", "sh", "-c", "exit 6")
    assert (done.returncode, done.stdout, done.stderr) == (6, "1\n", "")
    s.add("sh", "-c", "kill -9 $$")
    assert s.ended(2) == 255
    s.add("-W", "0", "true")
    assert s.ended(3) == 255
    for command in ("no-such-program", "/nowhere/x", "echo a; echo b"):  # no shell: the text is one file name
        number = s.add(command)
        assert s.ended(number) == 255
        assert [(job["State"], job["E-Level"]) for job in s.jobs() if job["ID"] == number] == [("finished", -1)]
        assert s.run("-f", command).returncode == 255
    s.add("sh", "-c", "trap 'exit 9' TERM; touch ready; while :; do sleep 0.05; done")
    number = int(s.ts("-q"))
    wait_for((s.folder / "ready").exists, "the job runs")
    s.ts("-k", str(number))
    assert s.ended(number) == 9
    assert [job["E-Level"] for job in s.jobs() if job["ID"] == number] == [9]


def test_s4_8_waiting_without_an_id_waits_for_the_last_job_in_the_queue(spooler: Callable[..., Spooler]) -> None:
    """S4.8: -w without an id waits for the job that is last in the queue, not the one with the highest id."""
    s = spooler()
    s.add(*s.held("a"))
    s.add(*s.held("b", "exit 7"))
    s.add("sh", "-c", "exit 5")
    s.wait_state(0, "running")
    s.ts("-u", "2")
    waiting = s.popen("-w")
    asleep(waiting)
    s.release("a")
    assert s.ended(2) == 5
    s.wait_state(1, "running")
    assert waiting.poll() is None
    s.release("b")
    assert waiting.communicate(timeout=60) == ("", "") and waiting.returncode == 7
    assert s.run("-w").returncode == 7  # all have ended: -w returns the code of the last one


@pytest.mark.smoke
def test_s4_9_s4_11_dependent_jobs_wait_for_the_end_or_success_of_others(spooler: Callable[..., Spooler]) -> None:
    """S4.9, S4.11: -D and -d jobs wait for the end of other jobs; -W jobs wait for the success of other jobs.

    If one of these other jobs does not succeed, the -W job is skipped. A -W job that depends on a skipped job is
    skipped, too.
    """
    s = spooler(TS_SLOTS="3")
    s.add(*s.held("a"))
    s.add("sh", "-c", "exit 1")
    s.add("-D", "0,1", "true")
    s.add("-W", "0,1", "true")
    s.add("-W", "3", "true")
    s.add("-D", "3", "true")
    s.add("-W", "0", "true")
    s.add("-d", "sh", "-c", "exit 4")
    s.add("-d", "true")
    lines = s.ts().splitlines()
    for number, shown in {2: "[0,1]&& ", 3: "[0,1]&& ", 4: "[3]&& ", 7: "[6]&& ", 8: "[7]&& "}.items():
        assert next(line for line in lines if line.startswith(f"{number} ")).count(shown) == 1
    assert s.ended(1) == 1
    s.wait_state(0, "running")
    assert s.states()[2] == "queued" and s.states()[6] == "queued"
    s.release("a")
    assert [s.ended(number) for number in range(9)] == [0, 1, 0, 255, 255, 0, 0, 4, 0]
    states = s.states()
    assert [number for number, state in states.items() if state == "skipped"] == [3, 4]


def test_s4_10_after_a_failed_dependency_jobs_that_need_success_are_skipped(spooler: Callable[..., Spooler]) -> None:
    """S4.10: If a dependency failed or was removed or forgotten, a -W job is skipped and a -D job runs.

    Ids that no job has had yet are ignored.
    """
    s = spooler(TS_SLOTS="2")
    s.add("sh", "-c", "exit 1")
    s.add(*s.held("a"))
    s.add("-D", "1", "true")
    s.add("-W", "2", "true")
    s.add("-D", "2", "true")
    s.wait_state(1, "running")
    s.ts("-r", "2")
    s.wait_state(3, "skipped")
    assert s.ended(4) == 0
    s.ts("-C")
    assert list(s.states()) == [1]
    assert s.ended(s.add("-W", "0", "true")) == 255  # job 5 depends on a forgotten job
    assert s.ended(s.add("-D", "0", "true")) == 0
    assert s.ended(s.add("-W", "5", "true")) == 255  # depends on a skipped job
    assert s.ended(s.add("-W", "99", "true")) == 0  # no job has had this id yet
    assert s.ended(s.add("-D", "99", "true")) == 0
    s.ts("-k", "1")
    assert s.ended(1) == 255
    assert s.ended(s.add("-W", "1", "true")) == 255
    assert s.ended(s.add("-D", "1", "true")) == 0


def test_s4_13_s4_14_s4_15_options_set_file_folder_and_packing_of_output(spooler: Callable[..., Spooler]) -> None:
    """S4.13, S4.14, S4.15: -E separates stderr, -z packs the output, -O and --set_logdir set the name and the folder.

    A missing folder is created.
    """
    s = spooler()
    both = ("sh", "-c", "echo out; echo err >&2")
    assert s.ended(s.add(*both)) == 0
    assert s.output(0) == "out\nerr\n" and Path(s.ts("-o", "0")).parent == s.tmp
    assert Path(s.ts("-o", "0")).name.startswith("ts-out.")
    assert s.ended(s.add("-E", *both)) == 0
    assert s.output(1) == "out\n" and Path(s.ts("-o", "1") + ".e").read_text() == "err\n"
    assert s.ended(s.add("-z", "sh", "-c", "seq 20000; echo err >&2; exit 3")) == 3
    packed = Path(s.ts("-o", "2"))
    text = "".join(f"{n}\n" for n in range(1, 20001)) + "err\n"
    assert gzip.decompress(packed.read_bytes()).decode() == text and packed.suffix == ".gz"
    subprocess.run(["gzip", "-t", str(packed)], check=True)
    shown = s.run("-c", "2")
    assert (shown.stdout, shown.returncode) == (text, 3)
    assert s.run("-t", "2").stdout == "".join(text.splitlines(keepends=True)[-10:])
    assert s.ended(s.add("-zE", *both)) == 0
    assert gzip.decompress(Path(s.ts("-o", "3")).read_bytes()) == b"out\n"

    logs = s.folder / "log s"
    logs.mkdir()
    assert s.ts("--get_logdir") == str(s.tmp)
    s.ts("--set_logdir", str(logs))
    assert s.ts("--get_logdir") == str(logs)
    assert s.ended(s.add("-O", "mine", "echo", "x")) == 0
    named = Path(s.ts("-o", "4"))
    assert named.parent == logs and named.name.startswith("mine.") and named.read_text() == "x\n"
    assert s.ts("-o", "0").startswith(str(s.tmp))
    named.unlink()
    logs.rmdir()
    assert s.ended(s.add("echo", "y")) == 0  # bug 12: in the original the job fails without a reason
    assert s.output(5) == "y\n"


def test_s4_16_with_the_option_n_no_output_is_stored(spooler: Callable[..., Spooler]) -> None:
    """S4.16: -n stores no output, and the list shows `stdout` in place of a file.

    -nf writes the output to the caller's stdout, and the job is forgotten when it ends.
    """
    s = spooler()
    s.ts("-n", "sh", "-c", "echo lost; echo lost >&2; exit 2")
    assert s.ended(0) == 2
    assert s.ts().splitlines()[1].split()[:4] == ["0", "finished", "stdout", "2"]
    assert list(s.tmp.glob("ts-out*")) == []
    done = s.run("-nf", "sh", "-c", "echo here; echo there >&2; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == ("here\n", "there\n", 3)
    assert list(s.states()) == [0]
    running = s.popen("-nf", *s.held("a"))
    s.wait_state(2, "running")
    assert "stdout" in s.ts().splitlines()[1]
    s.release("a")
    assert running.communicate(timeout=60) == ("", "") and running.returncode == 0
    assert list(s.states()) == [0]


def test_s4_17_a_foreground_job_reads_stdin_and_survives_its_killed_client(spooler: Callable[..., Spooler]) -> None:
    """S4.17: A -f job reads the caller's stdin, other jobs an empty stdin; a kill of the caller ends no job (bug 5)."""
    s = spooler()
    done = s.run("-f", "sh", "-c", "cat; exit 4", stdin="of the caller\n")
    assert (done.returncode, done.stdout) == (4, "0\n")
    assert s.output(0) == "of the caller\n"
    assert s.run("-nf", "cat", stdin="through and through").stdout == "through and through"
    assert int(s.run("sh", "-c", "cat; echo end", stdin="not for it").stdout) == 2
    assert s.ended(2) == 0
    assert s.output(2) == "end\n"

    caller = s.popen("-f", *s.held("a", "exit 8"))
    s.wait_state(3, "running")
    s.add("true")
    caller.kill()
    caller.communicate(timeout=60)
    assert s.states()[3] == "running" and s.states()[4] == "queued" and s.ts("-R") == "1"
    s.release("a")
    assert s.ended(3) == 8 and s.ended(4) == 0


def test_s4_19_jobs_never_use_more_than_the_slots(spooler: Callable[..., Spooler]) -> None:
    """S4.19: Running jobs never use more slots than the server has.

    Jobs that need few slots overtake a job that waits for many slots. A job that needs more slots than the server has
    is refused.
    """
    s = spooler()
    s.ts("-S", "3")
    assert s.ts("-S") == "3"
    widths = [1, 2, 1, 3, 1, 2, 2, 1, 3, 1]
    for number, width in enumerate(widths):
        s.add("-N", str(width), "sh", "-c", f"echo + {width} >>slots; sleep 0.05; echo - {width} >>slots; : {number}")
    assert [s.ended(number) for number in range(len(widths))] == [0] * len(widths)
    busy, most = 0, 0
    for sign, width in (line.split() for line in s.said_in("slots")):
        busy += int(f"{sign}{width}")
        most = max(most, busy)
    assert len(s.said_in("slots")) == 2 * len(widths) and most == 3

    s.ts("-S", "2")
    narrow, wide, later = s.add(*s.held("a")), s.add("-N", "2", *s.held("b")), s.add(*s.held("c"))
    s.wait_state(narrow, "running")
    s.wait_state(later, "running")
    assert s.states()[wide] == "queued" and s.ts().splitlines()[0].endswith("[run=2/2]")
    s.ts("-S", "1")  # running jobs continue
    assert s.states()[narrow] == s.states()[later] == "running" and s.ts().splitlines()[0].endswith("[run=2/1]")
    s.ts("-S", "2")
    s.release("a")
    assert s.ended(narrow) == 0
    s.release("c")
    s.wait_state(wide, "running")
    assert s.ts().splitlines()[0].endswith("[run=2/2]") and "Slots required: 2" in s.ts("-i", str(wide))
    refused = s.run("-N", "3", "true")
    assert refused.returncode == 255 and refused.stderr.startswith("Error in the request: The job can never run: ")
    assert len(refused.stderr.splitlines()) == 1 and refused.stdout == ""
    s.release("b")
    assert s.ended(wide) == 0
    assert s.ended(s.add("true")) == 0


def test_s4_20_killing_a_job_sends_sigterm_to_all_its_processes(spooler: Callable[..., Spooler]) -> None:
    """S4.20: -k sends SIGTERM to all processes of a job, and -T to all processes of all running jobs.

    Jobs that this signal killed have error level -1.
    """
    s = spooler(TS_SLOTS="3")
    for number in range(3):
        s.add("sh", "-c", f"sleep 1000 & echo $! >>children; wait; : {number}")
    children = wait_for(lambda: len(found := s.said_in("children")) == 3 and list(map(int, found)), "children")
    s.ts("-k", "1")
    assert s.ended(1) == 255
    assert s.states() == {0: "running", 2: "running", 1: "finished"}
    wait_for(lambda: sum(map(alive, children)) == 2, "the child of job 1 ends with it")
    assert "Exit status: killed by signal 15" in s.ts("-i", "1").splitlines()
    s.add("true")
    assert s.ended(3) == 0
    s.ts("-k")  # the first running job
    assert s.ended(0) == 255
    s.add("sleep", "1000")
    s.wait_state(4, "running")
    s.add(*s.held("a"))
    s.add("-N", "3", "true")
    s.wait_state(5, "running")
    s.ts("-T")
    assert [s.ended(number) for number in (2, 4, 5, 6)] == [255, 255, 255, 0]
    wait_for(lambda: not any(map(alive, children)), "no child is left")
    assert {job["E-Level"] for job in s.jobs() if job["ID"] in (0, 1, 2, 4, 5)} == {-1}


def test_s4_21_jobs_can_be_reordered_removed_and_cleared(spooler: Callable[..., Spooler]) -> None:
    """S4.21: -u moves a waiting job to the front, -U exchanges two jobs, -r removes a job, -C forgets finished jobs.

    -u of a running job is an error without effect (bug 1: it ended the original's server).
    """
    s = spooler()
    s.add(*s.held("a"))
    for number in range(1, 7):
        s.add("sh", "-c", f"echo {number} >>order")
    s.wait_state(0, "running")
    for words in (("-u", "0"), ("-r", "0"), ("-U", "0-2")):
        refused = s.run(*words)
        assert refused.returncode == 255 and refused.stderr.startswith("Error in the request: The job")
    assert list(s.states()) == [0, 1, 2, 3, 4, 5, 6] and s.states()[0] == "running"
    s.ts("-u", "4")
    assert list(s.states()) == [0, 4, 1, 2, 3, 5, 6]
    s.ts("-u")
    assert list(s.states()) == [0, 6, 4, 1, 2, 3, 5]
    s.ts("-U", "6-3")
    assert list(s.states()) == [0, 3, 4, 1, 2, 6, 5]
    s.ts("-r", "1")
    s.ts("-r")
    assert list(s.states()) == [0, 3, 4, 2, 6]
    assert s.run("-s", "1").returncode == 255
    s.release("a")
    assert s.ended(6) == 0
    assert s.said_in("order") == ["3", "4", "2", "6"]
    assert list(s.states()) == [0, 3, 4, 2, 6]  # in the order in which they ended
    s.ts("-r", "4")
    assert list(s.states()) == [0, 3, 2, 6]
    s.add(*s.held("b"))
    s.ts("-C")
    assert list(s.states()) == [7]
    s.release("b")
    assert s.ended(7) == 0
    s.ts("-C")
    assert len(s.ts().splitlines()) == 1


def test_s4_22_removing_a_job_ends_the_calls_that_wait_for_it(spooler: Callable[..., Spooler]) -> None:
    """S4.22: If -r removes a job, the -w and -f calls that wait for this job end with exit code 255.

    The -W jobs that depend on this job are skipped. (Bug 3: in the original, these calls and jobs waited forever.)
    """
    s = spooler()
    s.add(*s.held("a"))
    s.wait_state(0, "running")
    in_front = s.popen("-f", "true")
    assert in_front.stdout is not None and in_front.stdout.readline() == "1\n"
    asleep(in_front)
    waiting = s.popen("-w", "1")
    asleep(waiting)
    s.add("-W", "1", "true")
    s.ts("-r", "1")
    assert waiting.communicate(timeout=60) == ("", "") and waiting.returncode == 255
    assert in_front.communicate(timeout=60) == ("", "") and in_front.returncode == 255
    assert s.ended(2) == 255 and s.states() == {0: "running", 2: "skipped"}


def test_s4_26_ts_onfinish_is_called_once_per_job(spooler: Callable[..., Spooler]) -> None:
    """S4.26: TS_ONFINISH is called once per job, with id, error level, output file and command; not for skipped jobs.

    The command's words are joined without quotes, as in the original.
    """
    s = spooler()
    program = s.folder / "ended"
    program.write_text(f"#!/bin/sh\nprintf '%s|%s|%s|%s|%s\\n' $# \"$@\" >>{s.folder}/called\n")
    program.chmod(0o755)
    (s.folder / "ended-by-name").symlink_to(program)
    given = {"TS_ONFINISH": str(program)}
    s.add("sh", "-c", "exit 3", **given)
    s.ts("-n", "echo", "two  words", **given)
    s.add("-W", "0", "true", **given)
    s.add("sh", "-c", "kill -9 $$", **given)
    s.add("true")
    s.add("no-such-program", **given)
    s.add(*s.held("a"), **given)
    s.wait_state(6, "running")
    s.ts("-k", "6")
    s.add("true", TS_ONFINISH="ended-by-name", PATH=f"{s.folder}:{s.environ['PATH']}")
    assert s.ended(7) == 0
    called = wait_for(lambda: len(found := s.said_in("called")) >= 6 and found, "six calls")
    calls = {line.split("|")[1]: line.split("|") for line in called}
    assert sorted(calls) == ["0", "1", "3", "5", "6", "7"] and len(called) == 6
    assert all(call[0] == "4" for call in calls.values())
    assert calls["0"][2:] == ["3", s.ts("-o", "0"), "sh -c exit 3"]
    assert calls["1"][2:] == ["0", "", "echo two  words"]
    assert [calls[number][2] for number in ("3", "5", "6", "7")] == ["-1", "-1", "-1", "0"]


def test_s4_37_following_prints_the_output_and_returns_the_exit_code(spooler: Callable[..., Spooler]) -> None:
    """S4.37: -t prints the last ten lines of the output, and -c prints all lines.

    Both then follow the output and return the exit code of the job.
    """
    s = spooler()
    s.add("sh", "-c", f"seq 30; {s.held('a')[2]} echo after; exit 4")
    s.wait_state(0, "running")
    wait_for(lambda: s.output(0).endswith("30\n"), "thirty lines")
    files = {}
    for action in ("-t", "-c"):
        files[action] = (s.folder / f"shown{action}").open("w+")
    following = {action: s.popen(action, stdout=file) for action, file in files.items()}
    expected = {"-t": [str(n) for n in range(21, 31)], "-c": [str(n) for n in range(1, 31)]}
    for action, lines in expected.items():
        wait_for(lambda a=action, li=lines: s.said_in(f"shown{a}") == li, f"{action} shows what is there")  # type: ignore[misc]
    assert [process.poll() for process in following.values()] == [None, None]
    s.release("a")
    for action, process in following.items():
        assert process.communicate(timeout=60)[1] == "" and process.returncode == 4
        assert s.said_in(f"shown{action}") == [*expected[action], "after"]
        files[action].close()
    assert s.run("-t").stdout.splitlines() == [*map(str, range(22, 31)), "after"]
    assert s.run("-c").returncode == 4


def test_s4_37_a_started_job_has_a_pid_and_an_output_file(spooler: Callable[..., Spooler]) -> None:
    """S4.37: Once -o prints the path of a started job's output, the file exists.

    -p of a job that is being started waits until the job has a pid.
    """
    s = spooler()
    for number in range(12):
        s.add("echo", str(number))
        wait_for(lambda n=number: s.ts("-s", str(n)) != "queued", "its start")
        assert int(s.ts("-p", str(number)))
        named = wait_for(lambda n=number: (done := s.run("-o", str(n))).returncode == 0 and done, "its name")
        assert Path(named.stdout.strip()).exists()
        assert s.run("-c", str(number)).stdout == f"{number}\n"


def test_s4_17_ctrl_c_reaches_the_job_while_its_id_cannot_be_printed(spooler: Callable[..., Spooler]) -> None:
    """S4.17: Ctrl-C reaches a running -f job, even while the caller cannot print the job's id."""
    s = spooler()
    out, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    caller = s.popen("-f", "sh", "-c", "trap 'exit 33' INT; touch ready; while :; do sleep 0.05; done", stdout=full)
    os.close(full)
    wait_for((s.folder / "ready").exists, "the job runs")
    s.wait_state(0, "running")
    os.kill(caller.pid, signal.SIGINT)
    s.wait_state(0, "finished")
    with open(out, "rb") as stream:
        assert stream.read().endswith(b"\x000\n")
    assert caller.communicate(timeout=60)[1] == "" and caller.returncode == 33


def test_s4_17_a_foreground_call_passes_ctrl_c_to_its_job(spooler: Callable[..., Spooler]) -> None:
    """S4.17: `ts -f` passes Ctrl-C on to its job, and returns the exit code of the job."""
    s = spooler()
    caller = s.popen("-f", "sh", "-c", "trap 'exit 33' INT; touch ready; while :; do sleep 0.05; done")
    wait_for((s.folder / "ready").exists, "the job runs")
    wait_for(lambda: s.run("-p", "0").returncode == 0, "its pid is known")
    asleep(caller)
    os.kill(caller.pid, signal.SIGINT)
    assert caller.communicate(timeout=60)[1] == "" and caller.returncode == 33
    assert s.states() == {0: "finished"}
