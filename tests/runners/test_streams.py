"""Tests of a job's streams under the supervisor: no log, stderr log, compressed log, descriptors of a caller."""

from __future__ import annotations

import contextlib
import errno
import gzip
import marshal
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.launch import Streams
from scheduler.core.observations import Ended, NeverRan, Started
from scheduler.runners import exec_limited
from scheduler.system.processes import seen
from tests.bench import DirectBench, direct_bench
from tests.runners.test_supervisor import LIMIT_S, FakeDaemon, daemon  # noqa: F401  a fixture

GZIP = shutil.which("gzip") or "gzip is missing"
PACKED = ("", GZIP, None)
# ASKED_MS is not shorter, since it also limits callers that answer, which may be slow on a busy machine.
QUICK = pytest.mark.parametrize("daemon", [{"ASKED_MS": 2000, "PACKED_MS": 400}], indirect=True)


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.005)
    return found


def told(daemon: FakeDaemon, kind: str, key: str) -> tuple[object, ...]:  # noqa: F811
    """Receive messages until one of this kind about this attempt arrives; return this message."""
    while True:
        for message in marshal.loads(daemon.socket.recv(1 << 20)):
            if message[:2] == (kind, key):
                return tuple(message)


def unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


# -- no log, stderr log, packed log -----------------------------------------------------------------------


def test_s4_13_s4_16_stderr_can_have_its_own_log_and_output_can_be_discarded(
    daemon: FakeDaemon,  # noqa: F811
    tmp_path: Path,
) -> None:
    """S4.13, S4.16: stderr can have a separate, private log. If a job has no log, its output is discarded."""
    apart = str(tmp_path / "1.log.e")
    daemon.send(daemon.start(1, "/bin/sh", "-c", "echo out; echo err >&2; exit 3", streams=(apart, "", None)))
    silent = list(daemon.start(2, "/bin/sh", "-c", "echo out; echo err >&2; exit 4"))
    silent[4] = ""
    daemon.send(tuple(silent))
    assert daemon.ends(2) == {"1.1": ("exit", 3), "2.1": ("exit", 4)}
    assert (tmp_path / "1.log").read_text() == "out\n" and Path(apart).read_text() == "err\n"
    assert Path(apart).stat().st_mode & 0o777 == 0o600 and not (tmp_path / "2.log").exists()
    both = (str(tmp_path / "3.log.e"), GZIP, None)
    daemon.send(daemon.start(3, "/bin/sh", "-c", "echo out; echo err >&2", streams=both))
    daemon.ends(1)
    assert unpacked(tmp_path / "3.log") == b"out\n" and Path(both[0]).read_text() == "err\n"


def test_s4_13_an_existing_errors_file_is_not_changed(daemon: FakeDaemon, tmp_path: Path) -> None:  # noqa: F811
    """S4.13, P1: If the stderr log of a job exists already, another scheduler owns it.

    The file is not changed, and the start of the job fails.
    """
    theirs = tmp_path / "1.log.e"
    theirs.write_text("theirs")
    daemon.send(daemon.start(1, "/bin/sh", "-c", "touch ran", streams=(str(theirs), "", None)))
    assert told(daemon, "no", "1.1")[2:] == ("log", errno.EEXIST)
    assert theirs.read_text() == "theirs" and not (tmp_path / "ran").exists()


def test_s4_14_a_compressed_log_is_complete_when_the_ending_is_reported(daemon: FakeDaemon, tmp_path: Path) -> None:  # noqa: F811
    """S4.14: When the supervisor reports the end of a job, the compressed log is complete.

    Here twenty jobs run in parallel.
    """
    text = "yes 0123456789abcdef | head -c 300000; echo LAST; echo err >&2; exit 7"
    daemon.send(*(daemon.start(n, "/bin/sh", "-c", text, streams=PACKED) for n in range(1, 21)))
    seen_so_far: dict[str, bytes] = {}
    while len(seen_so_far) < 20:
        for message in marshal.loads(daemon.socket.recv(1 << 20)):
            if message[0] == "end":
                assert message[3:5] == ("exit", 7)
                seen_so_far[message[1]] = unpacked(tmp_path / f"{message[1].split('.')[0]}.log")
    assert all(data.endswith(b"LAST\nerr\n") and len(data) == 300_009 for data in seen_so_far.values())


@QUICK
def test_s4_14_leftover_processes_delay_the_report_of_the_end_only_up_to_a_limit(
    daemon: FakeDaemon,  # noqa: F811
    tmp_path: Path,
) -> None:
    """S4.14: If a leftover process holds a compressed log open, the job's end is reported after a time limit.

    Output that the leftover process writes after the report is in the log.
    """
    hold = tmp_path / "hold"
    hold.touch()
    left = f"(while [ -e {hold} ]; do sleep 0.02; done; echo later) & echo first; exit 5"
    daemon.send(daemon.start(1, "/bin/sh", "-c", left, streams=PACKED))
    assert daemon.ends(1) == {"1.1": ("exit", 5)} and hold.exists()
    daemon.send(daemon.start(2, "/bin/true"))
    assert daemon.ends(1) == {"2.1": ("exit", 0)}
    hold.unlink()

    def whole() -> bool:
        with contextlib.suppress(EOFError, OSError):
            return unpacked(tmp_path / "1.log") == b"first\nlater\n"
        return False

    until(whole, "the rest of the log")


def test_s4_14_a_killed_compressor_loses_only_the_rest_of_the_log(daemon: FakeDaemon, tmp_path: Path) -> None:  # noqa: F811
    """S4.14: If gzip is killed, only the output that gzip has not yet written to the log is lost.

    The exit code of the job is correct, and other jobs run.
    """
    go = tmp_path / "go"
    text = f"while [ ! -e {go} ]; do sleep 0.02; done; exit 6"
    daemon.send(daemon.start(1, "/bin/sh", "-c", text, streams=PACKED))
    told(daemon, "up", "1.1")
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
    packers = [int(pid) for pid in children.read_text().split() if Path(f"/proc/{pid}/comm").read_text() == "gzip\n"]
    os.kill(packers[0], signal.SIGKILL)
    until(lambda: str(packers[0]) not in children.read_text().split(), "the packer is reaped")
    go.touch()
    assert daemon.ends(1) == {"1.1": ("exit", 6)}
    daemon.send(daemon.start(2, "/bin/sh", "-c", "echo fine", streams=PACKED))
    daemon.ends(1)
    assert unpacked(tmp_path / "2.log") == b"fine\n"


def test_s4_14_without_gzip_no_job_starts_and_the_log_contains_the_reason(daemon: FakeDaemon, tmp_path: Path) -> None:  # noqa: F811  # noqa: F811
    """S4.14: If gzip or the job's command cannot be started, the log contains the reason.

    If gzip did not start, the log is plain text; otherwise the log is compressed.
    """
    daemon.send(daemon.start(1, "/bin/sh", "-c", "touch ran", streams=("", "/no/such/gzip", None)))
    assert told(daemon, "no", "1.1")[2:] == ("gzip", errno.ENOENT)
    assert "(gzip)" in (tmp_path / "1.log").read_text() and not (tmp_path / "ran").exists()
    daemon.send(daemon.start(2, "/no/such/program", streams=PACKED))
    assert told(daemon, "no", "2.1")[2:] == ("program", errno.ENOENT)

    def said() -> bool:
        with contextlib.suppress(EOFError, OSError):
            return b"cannot start /no/such/program" in unpacked(tmp_path / "2.log")
        return False

    until(said, "the reason in the packed log")


# -- descriptors of a caller ------------------------------------------------------------------------------


def ticks_of(pid: int) -> int:
    found = seen(pid)
    assert found is not None
    return found.ticks


class Caller:
    """The test process as the caller of a foreground job. It passes its descriptors ``fd0``, ``fd1`` and ``fd2``."""

    def __init__(self, folder: Path, **given: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "caller"
        self.numbers = bytes(int(name[2:]) for name in given)
        self.fds = list(given.values())
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        above = os.open(folder, os.O_PATH)
        self.socket.bind(f"/proc/self/fd/{above}/caller")
        os.close(above)
        self.socket.listen()
        self.asked = 0
        threading.Thread(target=self._give, daemon=True).start()

    def _give(self) -> None:
        while True:
            try:
                asking, _ = self.socket.accept()
            except OSError:
                return  # the socket was closed
            self.asked += 1
            with asking, contextlib.suppress(OSError):  # the supervisor closed it, since it expected another process
                self.give(asking)

    def give(self, asking: socket.socket) -> None:
        socket.send_fds(asking, [self.numbers], self.fds)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    @property
    def streams(self) -> tuple[str, str, tuple[int, int, str]]:
        return ("", "", (os.getpid(), ticks_of(os.getpid()), str(self.path)))


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []

    def make(folder: Path = tmp_path / "c", kind: type[Caller] = Caller, **given: int) -> Caller:
        made.append(kind(folder, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_s4_17_a_job_gets_the_descriptors_of_its_caller(
    daemon: FakeDaemon, tmp_path: Path, caller: Callable[..., Caller], pipe: tuple[int, int]  # noqa: F811
) -> None:  # fmt: skip
    """S4.17: A job gets the stdin of its caller, or all three streams. No other process gets these descriptors."""
    read, write = pipe
    os.write(write, b"from the caller\n")
    look = "read line; echo got $line; ls /proc/self/fd | wc -l"
    daemon.send(daemon.start(1, "/bin/sh", "-c", look, streams=caller(fd0=read).streams))
    daemon.ends(1)
    assert (tmp_path / "1.log").read_text() == "got from the caller\n4\n"  # the fourth is opened by `ls`
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        all_three = caller(tmp_path / "d", fd0=read, fd1=out.fileno(), fd2=err.fileno())
        os.write(write, b"again\n")
        daemon.send(
            daemon.start(2, "/bin/sh", "-c", "read line; echo $line; echo e >&2; exit 9", streams=all_three.streams)
        )
        assert daemon.ends(1) == {"2.1": ("exit", 9)}
    assert (tmp_path / "out").read_text() == "again\n" and (tmp_path / "err").read_text() == "e\n"
    assert (tmp_path / "2.log").read_bytes() == b""
    _, _, who = caller(tmp_path / "e", fd0=read).streams
    os.write(write, b"packed\n")
    held = "read line; echo $line; ls -l /proc/$PPID/fd | grep -c pipe:"
    look = f"{held}; for p in $(cat /proc/$PPID/task/$PPID/children); do ls -l /proc/$p/fd; done | grep -c {os.fstat(read).st_ino}"
    daemon.send(daemon.start(3, "/bin/sh", "-c", look, streams=("", GZIP, who)))
    daemon.ends(1)
    lines = unpacked(tmp_path / "3.log").decode().split()
    assert lines[0] == "packed" and lines[2] == "1", lines  # only the job's stdin
    daemon.send(daemon.start(4, "/bin/sh", "-c", "cat; ls /proc/self/fd | wc -l"))
    daemon.ends(1)
    assert (tmp_path / "4.log").read_text() == "4\n"  # the next job reads nothing


def test_s4_17_a_long_socket_path_works_and_leaves_no_descriptor_open(
    daemon: FakeDaemon, tmp_path: Path, caller: Callable[..., Caller], pipe: tuple[int, int]  # noqa: F811
) -> None:  # fmt: skip
    """S4.17, F08: The path of the caller's socket may be longer than 107 bytes.

    The supervisor leaves no descriptor open.
    """
    folder = tmp_path / ("x" * 120)
    one = caller(folder, fd0=pipe[0])
    assert len(str(one.path)) > 107
    folder_of_supervisor = f"/proc/{daemon.process.pid}/fd"
    daemon.send(daemon.start(1, "/bin/true", streams=one.streams))
    daemon.ends(1)
    before = sorted(os.listdir(folder_of_supervisor))
    packed = ("", GZIP, one.streams[2])
    nobody = ("", "", (*one.streams[2][:2], str(tmp_path / "nobody")))
    for first in range(10, 70, 20):
        daemon.send(*(daemon.start(n, "/bin/true", streams=one.streams) for n in range(first, first + 10)))
        daemon.send(*(daemon.start(n, "/no/such", streams=packed) for n in range(first + 10, first + 15)))
        daemon.send(*(daemon.start(n, "/bin/true", streams=nobody) for n in range(first + 15, first + 20)))
    assert len(daemon.ends(30)) == 30
    daemon.send(daemon.start(99, "/bin/true"))
    daemon.ends(1)
    until(
        lambda: sorted(os.listdir(folder_of_supervisor)) == before, f"{before}, not {os.listdir(folder_of_supervisor)}"
    )
    assert one.asked == 46


def test_s4_17_a_missing_or_wrong_caller_prevents_the_start(
    daemon: FakeDaemon, tmp_path: Path, caller: Callable[..., Caller], pipe: tuple[int, int]  # noqa: F811
) -> None:  # fmt: skip
    """S4.17: A job is not started if the caller's socket is missing or dead, or belongs to another process."""
    one = caller(fd0=pipe[0])
    _, _, (pid, ticks, path) = one.streams
    dead = tmp_path / "dead"
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(dead))
    cases = {
        1: (pid, ticks, str(tmp_path / "none")),
        2: (pid, ticks, str(dead)),
        3: (daemon.process.pid, ticks_of(daemon.process.pid), path),
        4: (pid, ticks + 1, path),
        5: (pid, ticks, str(tmp_path / "no" / "folder")),
    }
    numbers = {1: errno.ENOENT, 2: errno.ECONNREFUSED, 3: errno.ESRCH, 4: errno.ESRCH, 5: errno.ENOENT}
    for number, who in cases.items():
        daemon.send(daemon.start(number, "/bin/sh", "-c", "touch ran", streams=("", "", who)))
        assert told(daemon, "no", f"{number}.1")[2:] == ("caller", numbers[number])
    assert not (tmp_path / "ran").exists()
    daemon.send(daemon.start(9, "/bin/true", streams=one.streams))
    assert daemon.ends(1) == {"9.1": ("exit", 0)}


class Silent(Caller):
    def give(self, asking: socket.socket) -> None:
        asking.recv(1)  # returns when the supervisor closes the connection


class Empty(Caller):
    def give(self, asking: socket.socket) -> None:
        """Pass no descriptors."""


class TooMany(Caller):
    """A caller that passes more descriptors than it announces."""

    def give(self, asking: socket.socket) -> None:
        socket.send_fds(asking, [b"\0"], self.fds * 3)


@QUICK
@pytest.mark.parametrize(
    ("kind", "number"), [(Silent, errno.ETIMEDOUT), (Empty, errno.ECONNRESET), (TooMany, errno.ECONNRESET)]
)
def test_s4_17_a_caller_that_passes_wrong_descriptors_delays_no_other_job(
    daemon: FakeDaemon, tmp_path: Path, caller: Callable[..., Caller], pipe: tuple[int, int], kind: type[Caller], number: int  # noqa: F811
) -> None:  # fmt: skip
    """S4.17, F08: If a caller passes no descriptors or wrong ones, only the job of this caller fails.

    No descriptor stays open in the supervisor.
    """
    daemon.send(daemon.start(9, "/bin/true"))
    daemon.ends(1)
    before = sorted(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    one = caller(kind=kind, fd0=pipe[0])
    daemon.send(daemon.start(1, "/bin/sh", "-c", "touch ran", streams=one.streams), daemon.start(2, "/bin/true"))
    messages: list[tuple[object, ...]] = []
    while not {("no", "1.1"), ("end", "2.1")} <= {message[:2] for message in messages}:
        messages += marshal.loads(daemon.socket.recv(1 << 20))
    assert ("no", "1.1", "caller", number) in messages
    assert not (tmp_path / "ran").exists()
    until(lambda: sorted(os.listdir(f"/proc/{daemon.process.pid}/fd")) == before, "as many descriptors as before")


@QUICK
def test_s4_17_a_start_fails_if_its_caller_stays_stopped(daemon: FakeDaemon, tmp_path: Path) -> None:  # noqa: F811
    """S4.17: If the caller of a job is stopped (SIGSTOP) and does not continue in time, the start of the job fails.

    When the caller continues, a later job gets the stdin of this caller.
    """
    program = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    one, _ = s.accept()\n"
        "    try: socket.send_fds(one, [b'\\0'], [0])\n"
        "    except OSError: pass\n"
        "    one.close()\n"
    )
    path = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        who = (process.pid, ticks_of(process.pid), str(path))
        process.send_signal(signal.SIGSTOP)
        daemon.send(daemon.start(1, "/bin/sh", "-c", "touch ran", streams=("", "", who)))
        assert told(daemon, "no", "1.1")[2:] == ("caller", errno.ETIMEDOUT)
        process.send_signal(signal.SIGCONT)
        process.stdin.write(b"here\n")
        process.stdin.close()
        daemon.send(daemon.start(2, "/bin/cat", streams=("", "", who)))
        assert daemon.ends(1) == {"2.1": ("exit", 0)}
        assert (tmp_path / "2.log").read_text() == "here\n" and not (tmp_path / "ran").exists()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_s4_17_a_supervisor_without_a_daemon_passes_stdin_of_the_caller_to_the_job(
    daemon: FakeDaemon, tmp_path: Path, caller: Callable[..., Caller], pipe: tuple[int, int]  # noqa: F811
) -> None:  # fmt: skip
    """S4.17, P6: After the death of its daemon, a supervisor still starts a foreground job with the caller's stdin."""
    os.write(pipe[1], b"line\n")
    daemon.send(daemon.start(1, "/bin/sh", "-c", "read line; echo $line; exit 8", streams=caller(fd0=pipe[0]).streams))
    daemon.socket.close()
    assert daemon.process.wait(LIMIT_S) == 0
    assert (tmp_path / "1.log").read_text() == "line\n"


# -- through the runner -----------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DirectBench]:
    with direct_bench(tmp_path) as made:
        yield made


def test_s4_14_b02_the_gzip_of_a_dead_supervisor_is_neither_a_job_nor_a_leftover(bench: DirectBench) -> None:
    """S4.14, B02: If a supervisor dies, its gzip process is not mistaken for a job or for a leftover process."""
    hold, other = bench.folder / "hold", bench.folder / "other"
    hold.touch()
    other.touch()
    bench.start(3, "/bin/sh", "-c", f"while [ -e {other} ]; do sleep 0.02; done; exit 13")
    bench.until(Started, 3)
    wait = f"echo begun; while [ -e {hold} ]; do sleep 0.02; done; echo over; exit 11"
    bench.start(1, "/bin/sh", "-c", wait, streams=Streams(gzip="gzip"))
    bench.until(Started, 1)
    supervisor = bench.runner.supervisor_pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    packer = next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "gzip\n")
    os.kill(packer, signal.SIGSTOP)  # keeps it alive until SIGCONT
    os.kill(supervisor, signal.SIGKILL)
    bench.wait(lambda: bench.runner.supervisor_pid != supervisor, "another supervisor")
    bench.start(2, "/bin/sh", "-c", "exit 12")
    ended = bench.until(Ended, 2)
    assert (ended.exit_code, ended.leftovers) == (12, ())
    other.unlink()
    ended = bench.until(Ended, 3)
    assert (ended.exit_code, ended.leftovers) == (13, ()), "it is older than the packer"
    hold.unlink()
    ended = bench.until(Ended, 1)
    assert (ended.exit_code, ended.leftovers) == (11, ())
    os.kill(packer, signal.SIGCONT)
    bench.wait(lambda: (found := seen(packer)) is None or not found.alive, "the packer has ended, and is reaped")
    assert gzip.decompress(bench.raw(1)) == b"begun\nover\n"


def test_s4_17_an_ended_caller_is_reported_in_words(bench: DirectBench) -> None:
    """S4.17: If the caller of a foreground job has ended, the start of the job fails and is not retried.

    The reason says in words that the caller has ended.
    """
    gone = Streams(caller=(os.getpid(), ticks_of(os.getpid()), str(bench.folder / "nobody")))
    bench.start(1, "/bin/true", streams=gone)
    observation = bench.until(NeverRan, 1)
    assert observation.lasting and observation.why == "the command that waited for the job in the foreground has ended"


def test_a_program_runs_if_a_warning_cannot_be_written() -> None:
    """If a resource limit cannot be set, and the warning about this cannot be written, the program still runs."""
    words = [sys.executable, "-I", "-S", exec_limited.__file__, "-", "99:1:1", "/bin/sh", "sh", "-c", "exit 7"]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(words, stderr=full, check=False).returncode == 7
        words[6] = "/no/such/program"
        assert subprocess.run(words, stderr=full, check=False).returncode == 127
