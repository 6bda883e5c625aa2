"""Tests of the runner after the death of its supervisor, and of a supervisor that cannot send its messages."""

from __future__ import annotations

import errno
import marshal
import math
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Ended, Lost, Observation, Started, Unclaimed
from scheduler.runners import attempt_record, local_base
from scheduler.runners import supervisor as supervisor_file
from scheduler.runners.direct import DirectRunner
from scheduler.runners.local_base import WatchedAttempt
from scheduler.system.proc import boot_id
from scheduler.system.processes import own_children, seen


def _job(number: int) -> Job:
    return Job(id=number, spec=JobSpec(), need=ResourceRequest(1, 1000), attempt=1)


def _runner(folder: Path) -> DirectRunner:
    """Return a runner that ignores the other children of the test process, such as a browser."""
    runner = DirectRunner(str(folder), str(folder / "state.json"), {}, str(folder / "errors"))
    others = (seen(pid) for pid in own_children() if pid != runner.supervisor_pid)
    runner.leave_alone({found.session for found in others if found is not None})
    return runner


def _ended_child(code: int) -> Process:
    """Return a zombie: a child of this process. The child was the leader of a session, and exited with ``code``."""
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(code)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    found = seen(child)
    assert found is not None and not found.alive
    return Process(child, found.ticks)


def _observed(runner: DirectRunner, number: int) -> list[Observation]:
    """Return the observations of the runner. Wait until there are ``number`` observations, but at most 20 s."""
    observations: list[Observation] = []
    end = time.monotonic() + 20
    while len(observations) < number and time.monotonic() < end:
        observations += runner.look()
        time.sleep(0.01)
    return observations


def test_a21_the_zombie_of_one_job_does_not_give_another_job_its_exit_code(tmp_path: Path) -> None:
    """A21, P5: A claimed attempt without a pid does not get the exit code of another job's zombie.

    Here the supervisor was killed between two starts. The first job had ended, but was not reaped. The second job never
    ran.
    """
    helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    runner = _runner(tmp_path)
    try:
        child = _ended_child(0)
        for number in 1, 2:
            path = tmp_path / f"{number}.1"
            path.write_bytes(attempt_record.blank(_job(number), boot_id()))
            runner._sent[f"{number}.1"] = WatchedAttempt(number, 1, str(path), ours=True)
        attempt_record.write_pid(str(tmp_path / "1.1"), child, boot_id(), time.time_ns(), runner.supervisor_pid)
        os.kill(runner.supervisor_pid, signal.SIGKILL)
        os.waitid(os.P_PID, runner.supervisor_pid, os.WEXITED | os.WNOWAIT)
        observations = _observed(runner, 3)
        assert [observation for observation in observations if isinstance(observation, Unclaimed)] == [Unclaimed(2, 1)]
        assert [(f.job, f.exit_code) for f in observations if isinstance(f, Ended)] == [(1, 0)]
        assert [f.job for f in observations if isinstance(f, Started)] == [1] and not [
            f for f in observations if isinstance(f, Lost)
        ]
    finally:
        runner.close()
        helper.kill()
        helper.wait()


def test_p5_the_exit_code_of_an_unreaped_zombie_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: If a job is a zombie and its supervisor is dead, the runner reads the exit code from the kernel.

    The runner does not wait for a record. If supervisor and daemon of a job in a container were killed, and process 1
    of the container does not reap processes, the job stays a zombie.
    """
    monkeypatch.setattr(local_base, "ZOMBIE_PATIENCE_S", math.inf)
    hold = tmp_path / "hold"
    hold.touch()
    script = f"sh -c 'while [ -e {hold} ]; do sleep 0.02; done; exit 7' & echo $!; exec sleep 600"
    reaps_nobody = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    runner = _runner(tmp_path)
    try:
        assert reaps_nobody.stdout is not None
        pid = int(reaps_nobody.stdout.readline())
        there = seen(pid)
        assert there is not None
        supervisor = subprocess.Popen(["true"])
        supervisor.wait()
        job = replace(_job(1), state=JobState.RUNNING, boot=boot_id())
        path = tmp_path / "1.1"
        path.write_bytes(attempt_record.blank(job, boot_id()))
        attempt_record.write_pid(str(path), Process(pid, there.ticks), boot_id(), time.time_ns(), supervisor.pid)
        assert [type(observation) for observation in runner.adopt(job)] == [Started]
        hold.unlink()
        observations: list[Observation] = []
        end = time.monotonic() + 20
        while not observations and time.monotonic() < end:
            observations += runner.look()
            time.sleep(0.01)
        assert [
            (type(observation), observation.exit_code) for observation in observations if isinstance(observation, Ended)
        ] == [(Ended, 7)]
    finally:
        runner.close()
        reaps_nobody.kill()
        reaps_nobody.communicate()


def test_a_stopped_supervisor_is_reported(tmp_path: Path) -> None:
    """If the supervisor is stopped (SIGSTOP), the runner reports the command that continues it.

    The runner does not continue the supervisor itself.
    """
    runner = _runner(tmp_path)
    try:
        os.kill(runner.supervisor_pid, signal.SIGSTOP)
        os.waitid(os.P_PID, runner.supervisor_pid, os.WSTOPPED | os.WNOWAIT)
        runner.look()
        assert f"the supervisor is stopped; continue it with: kill -CONT {runner.supervisor_pid}" in runner.trouble()
        os.kill(runner.supervisor_pid, signal.SIGCONT)
        os.waitid(os.P_PID, runner.supervisor_pid, os.WCONTINUED | os.WNOWAIT)
        assert runner.trouble() == ""
    finally:
        os.kill(runner.supervisor_pid, signal.SIGKILL)
        runner.close()


def test_p3_a_failed_start_of_the_supervisor_is_retried(tmp_path: Path) -> None:
    """P3, P1: If the supervisor cannot be started, this is reported, and the start is retried with a back-off.

    Jobs start when a later start of the supervisor succeeds.
    """
    house = tmp_path / "house"
    house.mkdir()
    (tmp_path / "attempts").mkdir()
    runner = DirectRunner(
        str(tmp_path / "attempts"), str(tmp_path / "state.json"), dict(os.environ), str(house / "errors")
    )
    job = _job(1)
    try:
        (house / "errors").unlink()
        house.rmdir()
        first = runner.supervisor_pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        end = time.monotonic() + 20
        while not runner.trouble() and time.monotonic() < end:
            assert runner.look() == []
            time.sleep(0.01)
        assert f"cannot start the supervisor: No such file or directory {house / 'errors'}" in runner.trouble()
        launch = Launch("1.1", ("/bin/sh", "-c", "exit 7"), {}, str(tmp_path), str(tmp_path / "log"))
        runner.start(job, launch)
        runner.flush()
        assert runner.look() == [] and (runner.next_look() or 0) > time.monotonic() - 1
        house.mkdir()
        observations = _observed(runner, 2)
        assert [type(observation) for observation in observations] == [Started, Ended] and observations[
            1
        ].exit_code == 7  # type: ignore[attr-defined]
        runner._supervisor_since -= 10  # makes its life longer than SHORT_LIFE_S
        assert runner.trouble() == ""
    finally:
        runner.close()


@pytest.mark.parametrize(("function", "number"), [("read", errno.EMFILE), ("give_up", errno.ENOSPC)])
def test_b02_an_error_after_the_death_of_the_supervisor_loses_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    """B02: If a record cannot be read or written after the supervisor has died, no attempt is lost.

    A later call of `look` settles all attempts of this supervisor.
    """
    runner = _runner(tmp_path)
    supervisor = runner.supervisor_pid
    try:
        runner.start(_job(1), Launch("1.1", ("/bin/sleep", "600"), {}, str(tmp_path), str(tmp_path / "log")))
        runner.flush()
        (started,) = _observed(runner, 1)
        assert isinstance(started, Started)
        os.kill(supervisor, signal.SIGSTOP)
        os.waitid(os.P_PID, supervisor, os.WSTOPPED | os.WNOWAIT)
        runner.start(_job(2), Launch("2.1", ("/bin/true",), {}, str(tmp_path), str(tmp_path / "log")))
        runner.flush()
        os.kill(supervisor, signal.SIGKILL)
        os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOWAIT)

        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as failing:
            failing.setattr(attempt_record, function, fail)
            with pytest.raises(OSError, match=os.strerror(number)):
                runner.look()
        os.kill(started.process.pid, signal.SIGTERM)  # ends before the next look
        os.waitid(os.P_PID, started.process.pid, os.WEXITED | os.WNOWAIT)
        observations = _observed(runner, 2)
        assert [one.signal for one in observations if isinstance(one, Ended)] == [signal.SIGTERM]
        assert Unclaimed(2, 1) in observations
    finally:
        runner.close()


def test_an_error_while_an_ending_is_handled_loses_no_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the ends of two jobs are received together and the first cannot be handled, a later look reports both."""
    runner = _runner(tmp_path)
    supervisor = runner.supervisor_pid
    try:
        for number in 1, 2:
            launch = Launch(f"{number}.1", ("/bin/sleep", "600"), {}, str(tmp_path), str(tmp_path / f"log{number}"))
            runner.start(_job(number), launch)
        runner.flush()
        started = [one for one in _observed(runner, 2) if isinstance(one, Started)]
        os.kill(supervisor, signal.SIGSTOP)
        os.waitid(os.P_PID, supervisor, os.WSTOPPED | os.WNOWAIT)
        for one in started:
            os.kill(one.process.pid, signal.SIGTERM)
        os.kill(supervisor, signal.SIGCONT)

        def fail(*_: object) -> None:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

        with monkeypatch.context() as failing:
            failing.setattr(runner, "_left_behind", fail)
            end = time.monotonic() + 20
            with pytest.raises(OSError, match=os.strerror(errno.ENFILE)):
                while time.monotonic() < end:
                    runner.look()
                    time.sleep(0.01)
        ends = [one.job for one in _observed(runner, 2) if isinstance(one, Ended)]
        assert sorted(ends) == [1, 2]
    finally:
        runner.close()


def test_b05_a_cancel_withdraws_a_start_that_was_not_read_yet(tmp_path: Path) -> None:
    """B05, P1: If a supervisor is suspended (SIGSTOP) before it reads a start request, a cancel withdraws the request.

    The job then never runs, even if the supervisor continues.
    """
    runner = DirectRunner(str(tmp_path), str(tmp_path / "state.json"), dict(os.environ), str(tmp_path / "errors"))
    job = _job(1)
    supervisor = runner.supervisor_pid
    try:
        os.kill(supervisor, signal.SIGSTOP)
        os.waitid(os.P_PID, supervisor, os.WSTOPPED | os.WNOWAIT)
        ran = tmp_path / "ran"
        launch = Launch("1.1", ("/usr/bin/touch", str(ran)), {}, str(tmp_path), str(tmp_path / "log"))
        runner.start(job, launch)
        runner.flush()
        runner.stop([(job, False)])
        assert runner.next_look() == 0.0 and runner.look() == [Unclaimed(1, 1)]
        os.kill(supervisor, signal.SIGCONT)
        second = Launch("2.1", ("/bin/true",), {}, str(tmp_path), str(tmp_path / "log"))
        runner.start(_job(2), second)
        runner.flush()
        observations = _observed(runner, 2)
        assert [type(observation) for observation in observations] == [Started, Ended] and not ran.exists()
    finally:
        runner.close()


def test_e09_unsent_messages_of_the_supervisor_are_sent_again(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """If the supervisor cannot send a message for lack of buffer space, it sends the message again later.

    If the daemon has ended, the message is dropped.
    """
    read, write = os.pipe()
    supervisor = supervisor_file.Supervisor.__new__(supervisor_file.Supervisor)
    supervisor.fd, supervisor.out, supervisor.unsent = write, [("end", "1.1", 5, "exit", 3, 7)], False
    supervisor.blocked = False
    answers = [OSError(105, "no buffer space"), 0, None]
    real = os.write

    def failing(fd: int, data: bytes) -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return real(fd, data) if answer is None else answer

    class Poll:
        modified = 0

        def modify(self, fd: int, events: int) -> None:
            self.modified = events

    poll = Poll()
    monkeypatch.setattr(os, "write", failing)
    for _ in range(2):
        supervisor.send(poll)
        assert supervisor.out and supervisor.unsent
    supervisor.send(poll)
    assert not supervisor.out and not supervisor.unsent
    assert marshal.loads(os.read(read, 4096)) == [("end", "1.1", 5, "exit", 3, 7)]
    os.close(read)
    monkeypatch.undo()
    supervisor.out = [("end", "2.1", 6, "exit", 0, 8)]
    supervisor.send(poll)  # EPIPE: the daemon is gone
    assert not supervisor.out
    os.close(write)


def test_a_start_message_that_did_not_fit_into_the_socket_does_not_wait_again() -> None:
    """If the socket was full, the supervisor sends its messages as soon as there is room, also if they are only starts.

    With another wait, `poll` would report the room again and again during the wait.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    supervisor = supervisor_file.Supervisor.__new__(supervisor_file.Supervisor)
    supervisor.fd, supervisor.out, supervisor.unsent, supervisor.blocked = theirs.fileno(), [], False, False
    supervisor.up_at = 0.0
    poll = select.poll()
    poll.register(theirs.fileno(), select.POLLIN)
    supervisor.out = [("end", "0.1", 5, "exit", 0, 7)]
    while not supervisor.blocked:
        supervisor.send(poll)
        supervisor.out = supervisor.out or [("end", "0.1", 5, "exit", 0, 7)]
    supervisor.out = [("up", "1.1", 6, 1, 2)]
    while True:  # the daemon reads
        packet = marshal.loads(ours.recv(1 << 20))
        if not packet or not select.select([ours], [], [], 0)[0]:
            break
    supervisor.send(poll)
    assert marshal.loads(ours.recv(1 << 20)) == [("up", "1.1", 6, 1, 2)] and not supervisor.blocked
    ours.close()
    theirs.close()
