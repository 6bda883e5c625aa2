"""Tests of the supervisor: starts and ends of jobs, descriptors, errors of files, and the death of its daemon."""

from __future__ import annotations

import errno
import marshal
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.recovery import Record
from scheduler.runners import attempt_record
from scheduler.runners import supervisor as supervisor_file
from scheduler.system.proc import boot_id, ticks_of

LIMIT_S = 30.0
Streams = tuple[str, str, tuple[int, int, str] | None]  # path of the stderr log, path of gzip, and the caller


class FakeDaemon:
    """The test in the place of the daemon: it starts a supervisor process and uses the daemon's end of the socket."""

    def __init__(self, folder: Path, **constants: int) -> None:
        """Start a supervisor.

        ``constants``: other values of constants in `supervisor.py`, such as limits in milliseconds.
        """
        self.folder = folder
        text = Path(supervisor_file.__file__).read_text()
        for name, value in constants.items():
            text, found = re.subn(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.M)
            assert found == 1, name
        (folder / "supervisor.py").write_text(text)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(LIMIT_S)
        os.set_inheritable(theirs.fileno(), True)
        with (folder / "supervisor.err").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(folder / "supervisor.py"), str(theirs.fileno()), boot_id(), "1024"],
                pass_fds=[theirs.fileno()],
                stderr=errors,
                start_new_session=True,
            )
        theirs.close()

    def start(self, number: int, *argv: str, streams: Streams = ("", "", None)) -> tuple[object, ...]:
        job = Job(id=number, spec=JobSpec(arguments=argv), need=ResourceRequest(1, 1000), attempt=1)
        log = str(self.folder / f"{number}.log")
        return ("start", f"{number}.1", str(self.folder / f"{number}.1"), attempt_record.blank(job, boot_id()), log,
                str(self.folder), None, argv, "", {"GPUJOB_ID": str(number)}, streams)  # fmt: skip

    def send(self, *messages: tuple[object, ...]) -> None:
        self.socket.send(marshal.dumps(list(messages)))

    def ends(self, most: int) -> dict[str, tuple[str, int]]:
        found: dict[str, tuple[str, int]] = {}
        while len(found) < most:
            for message in marshal.loads(self.socket.recv(1 << 20)):
                if message[0] == "end":
                    found[message[1]] = (message[3], message[4])
        return found


@pytest.fixture
def daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeDaemon]:
    """Yield a FakeDaemon. An indirect parameter of the test gives the ``constants``."""
    made = FakeDaemon(tmp_path, **getattr(request, "param", {}))
    yield made
    made.socket.close()
    try:
        made.process.wait(LIMIT_S)
    finally:
        made.process.kill()
    assert (tmp_path / "supervisor.err").read_text() == ""


def test_starts_in_a_packet_file_that_cannot_be_read_are_refused(daemon: FakeDaemon) -> None:
    """If the supervisor cannot read a packet file with start requests, it refuses these requests.

    Without an answer, the daemon would believe that the jobs are starting, until the supervisor ends.
    """
    daemon.send(("file", str(daemon.folder / "packet"), ["1.1", "2.1"]))
    answers = marshal.loads(daemon.socket.recv(1 << 20))
    assert answers == [("no", "1.1", "packet", errno.ENOENT), ("no", "2.1", "packet", errno.ENOENT)]
    (daemon.folder / "packet").write_bytes(marshal.dumps([daemon.start(4, "/bin/true")]))
    daemon.send(("file", str(daemon.folder / "packet"), ["4.1"]), daemon.start(3, "/bin/true"))
    assert daemon.ends(2) == {"3.1": ("exit", 0), "4.1": ("exit", 0)}
    assert not (daemon.folder / "packet").exists()


def kinds_in_packet(daemon: FakeDaemon) -> list[object]:
    return [message[0] for message in marshal.loads(daemon.socket.recv(1 << 20))]


@pytest.mark.parametrize("daemon", [{"UP_MS": 20_000}], indirect=True)
def test_the_start_and_the_end_of_a_short_job_are_one_packet(daemon: FakeDaemon) -> None:
    """A message about a start waits for the message about the end, so that both wake the daemon only once."""
    daemon.send(daemon.start(1, "/bin/true"))
    assert kinds_in_packet(daemon) == ["up", "end"]


def test_the_start_of_a_long_job_is_reported_while_the_job_runs(daemon: FakeDaemon) -> None:
    hold = daemon.folder / "hold"
    hold.touch()
    daemon.send(daemon.start(1, "/bin/sh", "-c", f"while [ -e {hold} ]; do sleep 0.02; done"))
    assert kinds_in_packet(daemon) == ["up"]
    hold.unlink()
    assert kinds_in_packet(daemon) == ["end"]


def wait_ended(path: Path) -> attempt_record.AttemptRecord:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found = attempt_record.read(str(path))
        if found.how:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{path}: {attempt_record.read(str(path))}")


def test_start_requests_of_a_dead_daemon_are_carried_out(daemon: FakeDaemon, tmp_path: Path) -> None:
    """If the daemon dies, the supervisor still carries out all start requests of this daemon.

    If the daemon has not read all answers, the supervisor gets the error ECONNRESET before the end of file.
    """
    hold = tmp_path / "hold"
    hold.touch()
    daemon.send(*(daemon.start(n, "/bin/sh", "-c", f"exit {n}") for n in range(1, 40)))
    daemon.send(daemon.start(50, "/bin/sh", "-c", f"while [ -e {hold} ]; do sleep 0.02; done; exit 9"))
    for n in range(60, 70):
        daemon.send(daemon.start(n, "/bin/sh", "-c", f"exit {n}"))
    daemon.socket.close()
    for n in (*range(1, 40), *range(60, 70)):
        assert wait_ended(tmp_path / f"{n}.1").code == n
    assert daemon.process.poll() is None  # it runs as long as it has a job
    hold.unlink()
    assert wait_ended(tmp_path / "50.1").code == 9
    assert daemon.process.wait(LIMIT_S) == 0


def test_b01_signals_do_not_end_the_supervisor(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.send(daemon.start(1, "/bin/sh", "-c", "sleep 0.3; exit 5"))
    assert marshal.loads(daemon.socket.recv(1 << 20))[0][0] == "up"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(daemon.process.pid, number)
    assert daemon.ends(1) == {"1.1": ("exit", 5)}


def test_f08_jobs_and_failed_starts_leave_no_descriptor_in_the_supervisor(daemon: FakeDaemon, tmp_path: Path) -> None:
    """F08: 300 jobs and 100 failed starts leave no open file in the supervisor."""
    folder = f"/proc/{daemon.process.pid}/fd"
    daemon.send(daemon.start(1, "/bin/true"))
    daemon.ends(1)
    before = len(os.listdir(folder))
    for first in range(2, 302, 50):
        daemon.send(*(daemon.start(n, "/bin/true") for n in range(first, first + 50)))
    daemon.send(*(daemon.start(n, "/no/such/program") for n in range(1000, 1100)))
    assert len(daemon.ends(300)) == 300
    daemon.send(daemon.start(2000, "/bin/true"))
    daemon.ends(1)
    assert len(os.listdir(folder)) == before


def test_running_jobs_add_no_descriptors_to_the_supervisor(daemon: FakeDaemon, tmp_path: Path) -> None:
    """S2.3 in part: Running jobs add no open files to the supervisor."""
    hold = tmp_path / "hold"
    hold.touch()
    daemon.send(daemon.start(1000, "/bin/true"))
    daemon.ends(1)
    before = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    for first in range(1, 301, 50):
        daemon.send(
            *(
                daemon.start(n, "/bin/sh", "-c", f"while [ -e {hold} ]; do sleep 0.5; done")
                for n in range(first, first + 50)
            )
        )
    ups = 0
    while ups < 300:
        ups += sum(1 for message in marshal.loads(daemon.socket.recv(1 << 20)) if message[0] == "up")
    assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) == before
    hold.unlink()
    assert len(daemon.ends(300)) == 300


def test_the_supervisor_starts_nothing_if_the_record_exists_already(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "1.1").write_text("somebody's")
    daemon.send(daemon.start(1, "/bin/sh", "-c", "touch ran"))
    assert marshal.loads(daemon.socket.recv(1 << 20)) == [("taken", "1.1")]
    assert not (tmp_path / "ran").exists() and (tmp_path / "1.1").read_text() == "somebody's"


def test_p8_fifos_and_huge_files_delay_no_other_job(daemon: FakeDaemon, tmp_path: Path) -> None:
    """If a log, environment or record is a FIFO, or an environment is huge, no other job is delayed."""
    with open(tmp_path / "huge", "wb") as stream:
        stream.truncate(1 << 40)
    for name in ("1.log", "pipe"):
        os.mkfifo(tmp_path / name)
    jobs = [list(daemon.start(number, "/bin/true")) for number in (1, 2, 3)]
    jobs[1][8], jobs[2][8] = str(tmp_path / "pipe"), str(tmp_path / "huge")
    swap = "rm 4.1; mkfifo 4.1; grep flags /proc/self/fdinfo/1"
    daemon.send(*map(tuple, jobs), daemon.start(4, "/bin/sh", "-c", swap), daemon.start(5, "/bin/true"))
    told = []
    while len([message for message in told if message[0] == "end"]) < 2:
        told += marshal.loads(daemon.socket.recv(1 << 20))
    refused = [message[1:] for message in told if message[0] == "no"]
    assert refused == [
        ("1.1", "log", errno.EEXIST),
        ("2.1", "environment", errno.EINVAL),
        ("3.1", "environment", errno.E2BIG),
    ]
    assert {message[1] for message in told if message[0] == "end"} == {"4.1", "5.1"}
    flags = int((tmp_path / "4.log").read_text().split()[-1], 8)
    assert not flags & os.O_NONBLOCK  # the job's stdout stays in blocking mode


def test_f04_a_missing_log_folder_is_created(daemon: FakeDaemon, tmp_path: Path) -> None:
    """F04: A missing log folder is created."""
    job = list(daemon.start(1, "/bin/echo", "there"))
    job[4] = str(tmp_path / "logs" / "1.log")
    daemon.send(tuple(job))
    daemon.ends(1)
    assert (tmp_path / "logs" / "1.log").read_text() == "there\n"
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_f01_the_end_of_a_job_fits_into_its_record_on_a_full_disk(daemon: FakeDaemon, tmp_path: Path) -> None:
    """F01: A record has its final size before the command ends.

    So the end of the job can be recorded on a full disk.
    """
    daemon.send(daemon.start(1, "/bin/sh", "-c", "sleep 0.2; exit 44"))
    end = time.monotonic() + LIMIT_S
    while not ((tmp_path / "1.1").exists() and (tmp_path / "1.1").stat().st_size) and time.monotonic() < end:
        time.sleep(0.005)  # the file is created before it is written
    size = (tmp_path / "1.1").stat().st_size
    blocks = (tmp_path / "1.1").stat().st_blocks
    assert size > attempt_record.SPEC_AT
    assert daemon.ends(1) == {"1.1": ("exit", 44)}
    assert (tmp_path / "1.1").stat().st_size == size and (tmp_path / "1.1").stat().st_blocks >= blocks
    assert attempt_record.read(str(tmp_path / "1.1")).code == 44
    assert attempt_record.spec_of(str(tmp_path / "1.1"))["id"] == 1


@pytest.mark.parametrize("room", [0, 100, 300])
def test_a_record_that_cannot_be_written_is_removed(daemon: FakeDaemon, tmp_path: Path, room: int) -> None:
    """P1, P5, F01: If a record cannot be written, it is removed, so that the attempt can be started again."""
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    daemon.send(daemon.start(1, "/bin/sh", "-c", f"touch {tmp_path}/ran"))
    assert marshal.loads(daemon.socket.recv(1 << 20))[0][:3] == ("no", "1.1", "record")
    assert attempt_record.read(str(tmp_path / "1.1")).kind is Record.NONE
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    daemon.send(daemon.start(1, "/bin/sh", "-c", "exit 4"))
    assert daemon.ends(1) == {"1.1": ("exit", 4)} and not (tmp_path / "ran").exists()


def test_supervisor_and_package_compute_the_same_checksum() -> None:
    for text in (b"", b"exit 0 at 1", b"signal 9 at 123456789"):
        assert supervisor_file.checksum(text) == attempt_record.checksum(text)
    assert (supervisor_file.PID_AT, supervisor_file.END_AT) == (attempt_record.PID_AT, attempt_record.END_AT)


def test_the_recorded_start_time_equals_the_one_in_proc(daemon: FakeDaemon, tmp_path: Path) -> None:
    """The start time in a record equals the start time in /proc, even if the supervisor took it from the clock."""
    numbers = range(1, 151)
    daemon.send(*(daemon.start(n, "/bin/sleep", "600") for n in numbers))
    found: dict[int, int] = {}
    while len(found) < len(numbers):
        for message in marshal.loads(daemon.socket.recv(1 << 20)):
            assert message[0] == "up"
            found[message[2]] = message[3]
    try:
        assert {pid: ticks_of(pid) for pid in found} == found
    finally:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        daemon.ends(len(numbers))
