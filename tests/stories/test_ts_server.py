"""The `ts` server: a script with many calls, settings, the end of a server, and the saved list."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.store.daemon_lock import holder
from tests.stories.harness import LONG, alive, freeze, wait_for
from tests.stories.spooler import Spooler

# Calls are the lines that begin with `./ts` or `code ./ts` or contain `$(./ts`; calls in `states` are not counted.
SCRIPT = r"""
states() { ./ts -l | awk 'NR > 1 { printf "%s %s;", $1, $2 } END { print "" }'; }
code() { "$@" && echo "0" || echo "$?"; }
./ts -K
./ts
./ts -S
./ts -q
./ts true
./ts -w
./ts -s 0
./ts sh -c 'exit 3'
code ./ts -w 1
./ts sh -c 'while ! [ -e go ]; do sleep 0.05; done; echo two'
until [ "$(./ts -s 2)" = running ]; do :; done
./ts -L a echo three
./ts -L b echo four
./ts -L c echo five
./ts -l >listed
states
./ts -u 5
states
./ts -U 3-4
states
./ts -s
./ts -s 3
./ts -a 3
./ts -a
./ts -F 4
./ts -q
./ts -R
[ "$(./ts -p)" -gt 1 ]
./ts -i 3 | grep Command
./ts -r 4
code ./ts -r 4 2>refused
cat refused
code ./ts -u 2 2>refused
cat refused
./ts -d echo six
./ts -D 2,3 echo seven
./ts -W 1 echo eight
./ts -n true
./ts -O name echo ten
./ts -E sh -c 'echo out; echo err >&2'
./ts -z echo twelve
./ts -S 2
./ts -S
./ts sh -c 'exit 0'
./ts --get_logdir >folder
[ "$(cat folder)" = "$TMPDIR" ]
./ts --setenv A=b=c
./ts --getenv A
./ts --unsetenv A
./ts --getenv A
touch go
./ts -w
code ./ts -w 2
code ./ts -w 3
code ./ts -w 5
code ./ts -w 6
code ./ts -w 7
code ./ts -w 8
code ./ts -w 9
code ./ts -w 10
code ./ts -w 11
code ./ts -w 12
code ./ts -w 13
./ts -c 3
./ts -t 2
cat "$(./ts -o 5)"
cat "$(./ts -o 11).e"
gzip -dc <"$(./ts -o 12)"
basename "$(./ts -o 10)" | cut -c 1-5
./ts -M json | tr , '\n' | grep -c '"ID"'
./ts -M tab | wc -l
states | tr ';' '\n' | sort -n
./ts -R
./ts -S 1
./ts -C
./ts -l
./ts -f echo in front
./ts -nf echo here
code ./ts -nf sh -c 'exit 9'
./ts -C
./ts true
./ts -w 17
./ts -r 17
./ts
./ts -T
./ts -K
./ts echo again
./ts -w 0
./ts -c
./ts -K
./ts -K
"""
HEADER = "ID   State      Output               E-Level  Time   Command [run={}/{}]"
SAID = f"""\
{HEADER.format(0, 1)}
1
-1
0
finished
1
3
2
3
4
5
2 running;3 queued;4 queued;5 queued;0 finished;1 finished;
2 running;5 queued;3 queued;4 queued;0 finished;1 finished;
2 running;5 queued;4 queued;3 queued;0 finished;1 finished;
queued
queued
a
a
echo four
5
1
Command: echo three
255
Error in the request: The job 4 cannot be removed.
255
Error in the request: The job 2 cannot be urged: it is running.
6
7
8
10
11
12
2
13
b=c

0
0
0
0
0
255
0
0
0
0
0
three
two
five
err
twelve
name.
13
13

0 finished
1 finished
2 finished
3 finished
5 finished
6 finished
7 finished
8 skipped
9 finished
10 finished
11 finished
12 finished
13 finished
0
{HEADER.format(0, 1)}
14
here
9
17
{HEADER.format(0, 1)}
0
again
"""

# The calls of the test script that the original comes with, in its order: kinds of jobs, exit codes of -f and -w,
# -u, -r, -n, -C and -U. A job that has to last runs until the file `go` exists; the original sleeps for a second.
ORIGINAL = r"""
code() { "$@" >/dev/null && echo 0 || echo failed; }
listed() { ./ts -l | awk 'NR > 1 { printf "%s %s;", $1, $2 } END { print "" }'; }
lasting() { rm -f go; ./ts sh -c 'until [ -e go ]; do sleep 0.05; done'; }
echo == kinds
./ts -K
./ts ls
./ts -n ls
./ts -f ls
./ts -nf ls >front
./ts ls
./ts cat
./ts -w
./ts -l | grep -c finished
wc -l <front
echo == codes
./ts -K
code ./ts -f ls
code ./ts -f patata
code ./ts patata
./ts ls
code ./ts -w
./ts patata
code ./ts -w
echo == urgent
./ts -K
lasting
./ts ls
./ts patata
touch go
code ./ts -w
./ts -K
lasting
./ts ls
./ts patata
./ts -u
touch go
code ./ts -w
./ts -K
lasting
./ts ls
./ts patata
./ts -u 2
touch go
code ./ts -w
echo == remove
./ts -K
lasting
./ts ls
./ts ls
./ts -r 1
code ./ts -r 1 2>/dev/null
./ts -n ls
./ts -r
listed
touch go
code ./ts -w
echo == clear
./ts -K
./ts -nf ls >/dev/null
./ts -l | wc -l
./ts ls
./ts -w
./ts -C
./ts -l | wc -l
echo == swap
./ts -K
lasting
./ts echo one
./ts echo two
./ts -U 1-2
listed
touch go
code ./ts -w 1
code ./ts -w 2
./ts -K
"""
SAID_TO_THE_ORIGINAL = """\
== kinds
0
2
4
5
5
{front}
== codes
0
failed
0
3
0
4
failed
== urgent
0
1
2
failed
0
1
2
0
0
1
2
0
== remove
0
1
2
failed
0 running;2 queued;
0
== clear
1
1
1
== swap
0
1
2
0 running;2 queued;1 queued;
0
0
"""


@pytest.fixture
def two_busy_loops() -> Iterator[None]:
    """In the long form, run two processes that keep the processors busy."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 if LONG else 0)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.long_form
def test_s4_1_a_script_of_many_calls_prints_what_the_manual_promises(
    spooler: Callable[..., Spooler], tmp_path: Path, two_busy_loops: None
) -> None:
    """S4.1: A shell script with more than 65 calls of `./ts` prints what the manual promises, and nothing on stderr.

    The long form runs it ten times, beside two busy loops.
    """
    calls = [line for line in SCRIPT.splitlines() if line.startswith(("./ts", "code ./ts")) or "$(./ts" in line]
    assert len(calls) > 65
    for turn in range(10 if LONG else 1):
        assert said_by(spooler(tmp_path / str(turn)), SCRIPT) == SAID.splitlines(), f"turn {turn}"


@pytest.mark.long
def test_s4_1_calls_of_the_original_test_script_print_the_expected_output(
    spooler: Callable[..., Spooler], tmp_path: Path, two_busy_loops: None
) -> None:
    """S4.1: The calls of the original's own test script, in its order, print what is expected.

    The test runs them ten times, beside two busy loops.
    """
    for turn in range(10 if LONG else 1):
        s = spooler(tmp_path / str(turn))
        said = said_by(s, ORIGINAL)
        front = len((s.folder / "front").read_text().splitlines())
        assert front and said == SAID_TO_THE_ORIGINAL.format(front=front).splitlines(), f"turn {turn}"


def said_by(s: Spooler, script: str) -> list[str]:
    """Run a shell script and return the lines that it prints; check that it exits with 0 and prints nothing on stderr.

    The script can call `ts` only as `./ts`: the program is not in PATH.
    """
    (s.folder / "ts").symlink_to(s.program)
    for name in ("ts", "tsp"):
        (s.bin / name).unlink()
    done = subprocess.run(
        ["sh", "-euc", script], cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=600, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    return done.stdout.splitlines()


def test_s4_2_calls_return_while_jobs_run_and_the_server_is_busy(spooler: Callable[..., Spooler]) -> None:
    """S4.2: Calls that queue jobs or change the queue do not wait for a running job.

    Calls that queue a job or print something do not wait for the server either. To show this, the test stops the server
    with SIGSTOP.
    """
    s = spooler()
    s.add(*s.held("a"))
    s.wait_state(0, "running")
    for words in (("true",), ("-n", "true"), ("true",), ("-u", "3"), ("-U", "1-3"), ("-r", "2"), ("-S", "1"), ("-C",)):
        s.ts(*words)
        assert s.states()[0] == "running"
    server = s.pid()
    freeze(server, Path(s.server.places.store_lock))
    try:
        assert s.add("-L", "while it is stopped", "true") == 4
        assert list(s.states().items()) == [(0, "running"), (1, "queued"), (3, "queued"), (4, "queued")]
        assert (s.ts("-s", "4"), s.ts("-a"), s.ts("-q"), s.ts("-R")) == ("queued", "while it is stopped", "4", "1")
        assert "Command: true" in s.ts("-i", "4") and s.ts("-o", "0").startswith(str(s.tmp))
        assert len(s.ts("-M", "tab").splitlines()) == 4 and s.ts("-S") == "1"
    finally:
        os.kill(server, signal.SIGCONT)
    s.release("a")
    assert s.ended(4) == 0


def test_s4_18_s4_25_calls_wait_while_the_queue_is_full_or_exit_with_2(spooler: Callable[..., Spooler]) -> None:
    """S4.18, S4.25: If the queue is full, -B exits with 2, and other calls wait until there is room.

    With TS_MAXCONN=7, one job fills the queue. A waiting client that is killed queues no job (bug 4).
    """
    s = spooler(TS_MAXCONN="7")
    s.add(*s.held("a"))
    s.wait_state(0, "running")
    for _ in range(2):
        full = s.run("-B", "true")
        assert (full.returncode, full.stdout) == (2, "")
        assert full.stderr.startswith("Error, queue full") and len(full.stderr.splitlines()) == 1
    killed = s.popen("true")
    wait_for(lambda: _sleeps(killed.pid), "a client that waits for room")
    killed.kill()
    assert killed.communicate(timeout=60)[0] == ""
    assert s.states() == {0: "running"} and s.ts("-q") == "0"
    waiting = s.popen("true")
    wait_for(lambda: _sleeps(waiting.pid), "a client that waits for room")
    assert waiting.poll() is None and s.states() == {0: "running"}
    s.release("a")
    assert waiting.communicate(timeout=60) == ("1\n", "") and waiting.returncode == 0
    assert s.ended(1) == 0
    assert s.add("-B", "true") == 2


def test_s4_18_the_end_of_the_server_ends_calls_that_wait_for_room(spooler: Callable[..., Spooler]) -> None:
    """S4.18, S4.1: -K ends the calls that wait for room in the queue. They print an error and start no new server."""
    s = spooler(TS_MAXCONN="7")
    s.add(*s.held("a"))
    s.wait_state(0, "running")
    waiting = [s.popen("true"), s.popen("-f", "true")]
    for one in waiting:
        wait_for(lambda pid=one.pid: _sleeps(pid), "a client that waits for room")  # type: ignore[misc]
    s.ts("-K")
    for one in waiting:
        said = "Error in the request: The server was ended (-K) before the job was in its queue.\n"
        assert one.communicate(timeout=60) == ("", said) and one.returncode == 255
    assert not s.server.exists()


def test_s4_6_s4_1_clients_get_the_code_of_a_running_job_after_the_end_of_the_server(
    spooler: Callable[..., Spooler],
) -> None:
    """S4.6, S4.1: After -K, running jobs continue, and each of their clients returns the exit code of its own job.

    If a later job has the same id, the client does not return the exit code of that job. Clients of queued jobs exit
    with 255. No client starts a new server.
    """
    s = spooler()
    stays = s.popen("-f", *s.held("a", "echo out; exit 3"))
    s.wait_state(0, "running")
    waits, follows, queued = s.popen("-w", "0"), s.popen("-c", "0"), s.popen("-f", "true")
    wait_for(lambda: len(s.states()) == 2, "the second is queued")
    for one in (waits, follows, queued):
        wait_for(lambda pid=one.pid: _sleeps(pid), "it waits")  # type: ignore[misc]
    server = s.pid()
    s.ts("-K")
    assert queued.communicate(timeout=60) == ("1\n", "") and queued.returncode == 255
    assert not alive(server) and not s.server.exists()
    assert s.add("sh", "-c", "exit 44") == 0 and s.ended(0) == 44
    assert [one.poll() for one in (stays, waits, follows)] == [None] * 3
    s.release("a")
    assert [(*one.communicate(timeout=60), one.returncode) for one in (stays, waits, follows)] == [
        ("0\n", "", 3), ("", "", 3), ("out\n", "", 3),
    ]  # fmt: skip
    assert s.run("-f", "sh", "-c", "ts -K; exit 11").returncode == 11


def test_s4_6_waiting_for_a_job_without_a_recorded_end_returns_255(spooler: Callable[..., Spooler]) -> None:
    """S4.6: -w returns 255 if the job has ended and its exit code is not recorded.

    The test uses -K and then kills the supervisor before the job ends.
    """
    s = spooler()
    s.add(*s.held("a", "exit 3"))
    s.wait_state(0, "running")
    waits, pid = s.popen("-w", "0"), int(s.ts("-p", "0"))
    wait_for(lambda: _sleeps(waits.pid), "it waits")
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    s.ts("-K")
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not alive(supervisor), "the supervisor is gone")
    s.release("a")
    assert waits.communicate(timeout=60) == ("", "") and waits.returncode == 255


def test_s4_7_a_bad_socket_name_folder_or_stdout_is_one_error_line(spooler: Callable[..., Spooler]) -> None:
    """S4.7: A call that fails prints one error line and exits with 255.

    Causes are a socket name that is not UTF-8, a deleted working folder, and a full stdout. With a full stdout, `ts -f`
    prints the error line, but returns the exit code of its job.
    """
    s = spooler()
    asked = s.popen("true", environ={"TS_SOCKET": os.fsdecode(os.fsencode(s.folder) + b"/no \xff")})
    out, err = asked.communicate(timeout=60)
    assert (out, asked.returncode, err.count("\n")) == ("", 255, 1)
    assert err.startswith("Error in the request: ") and "UTF-8" in err
    script = "mkdir gone; cd gone; rmdir ../gone; ts -l; echo $?; ts true; echo $?; ts -f true; echo $?"
    done = subprocess.run(
        ["sh", "-c", script], cwd=s.folder, env=s.environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[1:] == ["0", "255", "255"]
    assert (
        done.stderr.splitlines()
        == ["Error in the request: The current folder cannot be used: No such file or directory."] * 2
    )
    for number, (words, code, said) in enumerate(
        (
            (("true",), 255, "Job 0 is queued, but its number cannot be printed: No space left on device\n"),
            (
                ("-f", "sh", "-c", "exit 3"),
                3,
                "Job 1 is queued, but its number cannot be printed: No space left on device\n",
            ),
            (("-l",), 255, "Error in the request: No space left on device\n"),
        )
    ):
        with open("/dev/full", "w") as full:
            asked = s.popen(*words, stdout=full)
            assert (asked.communicate(timeout=60)[1], asked.returncode) == (said, code)
        assert s.ended(min(number, 1)) == (0, 3, 3)[number]


def _sleeps(pid: int) -> bool:
    """Return whether a process is in a system call that only waits (clock_nanosleep, pselect6, select)."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("230", "115", "270", "72", "23")


def test_ts_reads_settings_in_every_form_that_the_scheduler_accepts(spooler: Callable[..., Spooler]) -> None:
    """`ts` reads a setting in the server's config in every form that the scheduler accepts (docs/ts.md)."""
    s = spooler()
    assert s.ended(s.add("true")) == 0
    config = Path(s.server.state_file).parent / "config.yaml"
    kept = "".join(
        line
        for line in config.read_text().splitlines(True)
        if not line.startswith(("keep_finished", "cpu_slots", "whole_gpu_tolerance", "..."))
    )
    for changed, slots, share in (
        ("keep_finished: 90d\ncpu_slots: '2'\nwhole_gpu_tolerance: 20%\n", "2", "80"),
        ("keep_finished:\ncpu_slots:\nwhole_gpu_tolerance: 0.3\n", str(os.cpu_count()), "70"),
        ('keep_finished: "3 90d"\ncpu_slots: 1\n', "1", "98"),
    ):
        config.write_text(f"{kept}{changed}...\n")
        assert s.states() == {0: "finished"}
        assert (s.ts("-S"), s.ts("--get_gpu_free_perc").split()[-1].rstrip("%.")) == (slots, share), changed


def test_s4_25_variables_select_and_configure_the_server(spooler: Callable[..., Spooler], tmp_path: Path) -> None:
    """S4.25: TS_SOCKET selects the server. TS_SLOTS and TS_MAXFINISHED take effect when the server starts.

    TMPDIR is the folder for output files. With an invalid TS_SLOTS there is one slot.
    """
    one = spooler(tmp_path / "one", TS_SLOTS="3", TS_MAXFINISHED="2")
    other = spooler(tmp_path / "two")
    assert (one.ts("-S"), other.ts("-S")) == ("3", "1")
    assert one.ts("-S", TS_SLOTS="5") == "3"
    for number in range(4):
        assert one.ended(one.add("true")) == 0
        assert list(one.states()) == list(range(max(0, number - 1), number + 1))
    assert other.states() == {} and other.add("true") == 0
    assert one.run("-s", "0").returncode == 255
    third = tmp_path / "third"
    third.mkdir(mode=0o700)
    assert one.ended(one.add("true", TMPDIR=str(third))) == 0
    assert Path(one.ts("-o", "4")).parent == third
    told = json.loads(one.gpujob("jobs", "--json").stdout)["jobs"]
    assert [(job["id"], job["state"]) for job in told][-1] == (4, "done")
    for word in ("0", "x"):
        nothing = spooler(tmp_path / f"slots{word}", TS_SLOTS=word, TS_MAXFINISHED=word)
        assert nothing.ts("-S") == "1"


def test_s4_25_no_other_user_can_write_in_the_server_folder(spooler: Callable[..., Spooler], tmp_path: Path) -> None:
    """S4.25: The server's files are private. They are beside the socket.

    If others can write in the folder of the socket, the server's files are in the home folder.
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    s = spooler(TS_SOCKET="", TMPDIR=str(shared))
    assert s.ended(s.add("true")) == 0
    home = Path(s.server.folder)
    assert home.parent == tmp_path / "home" / "state" / "gpujob" / "ts"
    assert home.name.startswith(f"socket-ts.{os.getuid()}-")
    assert [path.name[:7] for path in shared.iterdir()] == ["ts-out."]
    own = spooler(tmp_path / "own", TS_SOCKET="")
    assert own.ts("-q") == "-1"
    assert own.server.folder == f"{own.tmp}/socket-ts.{os.getuid()}.gpujob"
    for folder in (home, Path(own.server.folder)):
        for path in (folder, *folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a temporary file of the server
                mode = path.lstat().st_mode
                assert stat.S_IMODE(mode) & 0o077 == 0 or stat.S_ISLNK(mode), path


@pytest.mark.smoke
def test_s4_28_a_killed_server_loses_no_job(spooler: Callable[..., Spooler]) -> None:
    """S4.28: If the server is killed, the running job continues, and the queued jobs run in their order afterwards.

    The exit codes are right, and clients continue to wait. (Bug 2: if the original's server was killed, all jobs were
    lost.)
    """
    s = spooler()
    s.add(*s.held("a", "echo whole; exit 7"))
    for number in range(1, 21):
        s.add("-L", f"label {number}", "sh", "-c", f"echo {number} >>order")
    s.wait_state(0, "running")
    waiting = s.popen("-w", "20")
    wait_for(lambda: _sleeps(waiting.pid), "a client that waits")
    s.ts("-u", "20")
    command = int(s.ts("-p", "0"))
    os.kill(waiting.pid, signal.SIGSTOP)  # else it would start the server again
    s.kill()
    s.release("a")
    wait_for(lambda: not alive(command), "the running job ends without a server")
    os.kill(waiting.pid, signal.SIGCONT)
    assert s.ended(0) == 7
    assert s.output(0) == "whole\n"
    assert waiting.communicate(timeout=60) == ("", "") and waiting.returncode == 0
    assert s.ended(19) == 0
    assert s.said_in("order") == ["20", *map(str, range(1, 20))]
    assert set(s.states().values()) == {"finished"} and len(s.states()) == 21
    assert s.ts("-a", "5") == "label 5" and s.add("true") == 21

    s.add(*s.held("b", "exit 9"))
    s.wait_state(22, "running")
    before = s.pid()
    s.kill()
    assert s.states()[22] == "running" and s.pid() != before  # `states` has started another server
    s.release("b")
    assert s.ended(22) == 9


def test_s4_28_the_saved_list_queues_all_jobs_again(spooler: Callable[..., Spooler], tmp_path: Path) -> None:
    """S4.28: At SIGTERM, a server with TS_SAVELIST writes a script that queues its jobs at another server.

    The script keeps labels, dependencies, options and arguments. The first server keeps its queue, too.
    """
    saved = tmp_path / "saved.sh"
    s = spooler(tmp_path / "one", TS_SAVELIST=str(saved))
    other = spooler(tmp_path / "two")
    note = tmp_path / "note.py"
    note.write_text(
        "import json, os, sys\n"
        "with open(sys.argv[1], 'a') as f: f.write(json.dumps([os.getcwd(), *sys.argv[2:]]) + '\\n')\n"
    )
    words = [
        "two words", "a'quote", 'a"quote', "$HOME `id` $(id)", "new\nline", "back\\slash\\", "", "*", "é", "-x", "#", "a\tb", "!",
    ]  # fmt: skip
    job = (sys.executable, str(note), "ran")
    s.add("echo", "has ended")
    assert s.ended(0) == 0
    s.add(*s.held("a"))
    s.add("-L", "it's a $label", *job, *words)
    s.add("-W", "2", "-L", "second", *job, "second")
    s.ts("-n", "-D", "2,3", *job, "third")
    s.add("-d", "-E", "-O", "own name", *job, "fourth")
    s.add("-z", "-D", "0", *job, "fifth")
    s.wait_state(1, "running")
    s.ts("-u", "6")
    s.kill(signal.SIGTERM)
    assert saved.stat().st_mode & 0o077 == 0
    assert "# 0 done echo 'has ended'" in saved.read_text().splitlines()

    other.add(*other.held("a"))  # uses the slot, and id 0
    other.wait_state(0, "running")
    done = subprocess.run(
        ["sh", "-eu", str(saved)], env=other.environ, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.split() == ["1", "2", "3", "4", "6"]  # job 5 has -n and prints no id
    assert [(one["ID"], one["State"]) for one in other.jobs()] == [
        (0, "running"), *((number, "queued") for number in range(1, 7)),
    ]  # fmt: skip
    assert [other.ts("-a", str(number)) for number in range(1, 7)] == ["", "", "it's a $label", "second", "", ""]
    parents = {line.split()[0]: line.split()[3] for line in other.ts().splitlines()[1:] if "&& " in line}
    assert parents == {"4": "[3]&&", "5": "[3,4]&&", "6": "[5]&&"}
    assert "\n" not in other.ts("-F", "3")
    other.release("a")
    s.release("a")  # ends job 1 of the first server, and its copy, which runs in the same folder
    assert [other.ended(number) for number in range(1, 7)] == [0] * 6
    ran = [json.loads(line) for line in s.said_in("ran")]
    assert [str(s.folder), *words] in ran
    assert Path(other.ts("-o", "6")).name.startswith("own name.") and Path(other.ts("-o", "6") + ".e").exists()
    assert other.ts("-o", "2").endswith(".gz") and other.run("-o", "5").returncode == 255

    assert [s.ended(number) for number in range(7)] == [0] * 7  # the first server has kept its queue as well
    every = sorted(json.loads(line)[1] for line in s.said_in("ran"))
    assert every == sorted(["two words", "second", "third", "fourth", "fifth"] * 2)


def test_s4_28_the_saved_list_queues_commands_that_begin_with_a_dash(
    spooler: Callable[..., Spooler], tmp_path: Path
) -> None:
    """S4.28: In the saved list, `--` stands before a command that begins with a dash."""
    saved = tmp_path / "saved.sh"
    s = spooler(TS_SAVELIST=str(saved))
    s.add(*s.held("a"))
    s.wait_state(0, "running")
    s.add("-E", "--", "-odd", "-x")
    s.kill(signal.SIGTERM)
    assert '$("$TS" -E -- -odd -x)' in saved.read_text()


def test_s4_28_s4_1_a_running_job_continues_after_the_end_of_its_server(spooler: Callable[..., Spooler]) -> None:
    """S4.28, S4.1: -K waits until the server has ended; then ids begin at 0 again.

    A running job continues, and its end is recorded.
    """
    s = spooler()
    s.add(*s.held("a", "echo over; exit 6"))
    s.wait_state(0, "running")
    s.add("sh", "-c", "echo never >>order")
    command, server = int(s.ts("-p", "0")), s.pid()
    output, before = s.ts("-o", "0"), s.server.state_file
    s.ts("-K")
    assert not alive(server) and alive(command)
    assert s.ts() == HEADER.format(0, 1)
    assert s.add("true") == 0 and s.ended(0) == 0
    s.release("a")
    wait_for(lambda: not alive(command), "the job of before ends")

    def show(number: int) -> dict[str, object]:
        found: dict[str, object] = json.loads(s.gpujob("--state-file", before, "show", str(number), "--json").stdout)
        return found

    wait_for(lambda: show(0)["state"] != "running", "the record of its end")
    shown = show(0)
    assert (shown["state"], shown["outcome"], shown["exit_code"], shown["log"]) == ("failed", "exit", 6, output)
    assert show(1)["state"] == "cancelled" and s.said_in("order") == []
    assert Path(output).read_text() == "over\n"
    assert s.states() == {0: "finished"}


def test_s4_29_variables_are_set_and_read_back(spooler: Callable[..., Spooler]) -> None:
    """S4.29: --setenv and --unsetenv change the server's environment, not that of jobs; a restart keeps the changes."""
    s = spooler(FROM_THE_START="there")
    assert s.ts("--getenv", "FROM_THE_START") == "there"
    for value in ("plain", "b=c", "=", "", "two words", "x" * 5000, 'quotes " and $HOME'):
        assert s.ts("--setenv", f"MINE={value}") == ""
        assert s.ts("--getenv", "MINE") == value
    s.ts("--setenv", "MINE=1")
    assert s.ended(s.add("sh", "-c", '[ -z "$MINE" ]')) == 0
    s.ts("--unsetenv", "MINE")
    assert s.ts("--getenv", "MINE") == "" and s.ts("--getenv=NEVER_SET") == ""
    s.ts("--unsetenv", "NEVER_SET")
    assert s.run("--setenv", "=x").returncode == 255
    s.ts("--setenv", "KEPT=over a kill")
    with contextlib.suppress(ProcessLookupError):
        s.kill()
    assert s.ts("--getenv", "KEPT") == "over a kill"
    assert s.ended(s.add("true")) == 0
    assert b"KEPT=over a kill" in Path(f"/proc/{s.pid()}/environ").read_bytes().split(b"\0")


def test_s4_1_a_server_that_has_just_started_can_be_ended(spooler: Callable[..., Spooler]) -> None:
    """S4.1: -K ends a server that the first call has just started: no server and no waiting job is left."""
    s = spooler()
    for _ in range(3):
        assert s.add("sleep", "600") == 0
        life = Path(s.server.home)
        s.ts("-K")
        pid = int((life / "started").read_text().split()[0])
        assert not alive(pid), "a server that nobody would ever end"
        assert s.states() == {}


def test_s4_28_a_killed_server_is_not_mistaken_for_the_next_one(spooler: Callable[..., Spooler]) -> None:
    """S4.28: The `daemon.json` that a killed server left is not taken for the `daemon.json` of the next server.

    This also holds if the next server already holds the lock, but has not written its `daemon.json` yet.
    """
    s = spooler()
    assert s.ended(s.add("true")) == 0
    killed = s.pid()
    s.kill()
    assert holder(s.server.places)["pid"] == killed, "what the killed one said of itself still lies there"
    house = os.open(s.server.places.state_dir, os.O_RDONLY | os.O_DIRECTORY)
    with open(s.server.places.daemon_lock, "rb+") as lock:
        for held in (lock.fileno(), house):
            fcntl.flock(held, fcntl.LOCK_EX)
        assert s.server.alive() and s.server.in_office() == 0
    os.close(house)
    assert s.states() == {0: "finished"} and s.pid() != killed
