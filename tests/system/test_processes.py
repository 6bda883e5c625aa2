"""Tests of `processes`: environments of processes during an exec, and exit codes of other users' zombies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from scheduler.core.job import Process
from scheduler.system import proc, processes
from scheduler.system.processes import environment_of, seen, zombie_status
from tests.stories.harness import wait_for


def _child(run: Callable[[], int], uid: int) -> int:
    """Fork a child and return its pid.

    The child runs as user and group ``uid``, calls ``run`` and exits with its result.
    """
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            code = run()
        finally:
            os._exit(code)
    return pid


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_p5_the_exit_status_of_a_zombie_of_another_user_is_unknown() -> None:
    """P5: If a zombie belongs to another user whose processes may not be traced, its exit code is unknown.

    The kernel shows the exit code 0 in this case.
    """
    pid = _child(lambda: os.execv("/bin/sh", ["sh", "-c", "exit 7"]), 65533)
    try:
        wait_for(lambda: (found := seen(pid)) is not None and not found.alive, "a zombie")
        found = seen(pid)
        assert found is not None
        process = Process(pid, found.ticks)

        def status() -> int:
            """Return the exit code of the zombie, or 50 if the exit code is unknown."""
            read = zombie_status(process)
            return 50 if read is None else os.waitstatus_to_exitcode(read)

        codes = [os.waitstatus_to_exitcode(os.waitpid(_child(status, uid), 0)[1]) for uid in (65533, 65532)]
        assert codes == [7, 50]
        assert status() == 7, "root may trace all processes"
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("variables", [1, 2000])
def test_a08_the_environment_of_a_process_in_an_exec_is_read(variables: int) -> None:
    """A08: The environment of a process is read completely right after `posix_spawn`.

    `posix_spawn` returns before the kernel has set up the new environment, which contains the marks of a job. Until the
    environment is set up, the kernel shows the same address for its start and its end, as if it were empty. So a reader
    that does not wait reads about 8 of 100 environments as empty (on 2 cores). The kernel needs longer for more
    variables.
    """
    for number in range(300 if variables == 1 else 100):
        environment = {f"MARK{index}": str(number) for index in range(variables)}
        pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], environment, setsid=True)
        try:
            assert environment_of(pid) == [f"{name}={value}".encode() for name, value in environment.items()]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a08_an_exec_that_completed_while_the_reader_was_paused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A08: If an exec completes while the reader of the environment does not run, the reader notices this."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {"MARK": "1"}, setsid=True)
    looks: list[bytes] = []

    def interrupted(number: int) -> list[bytes]:
        fields = proc.stat_fields(number)
        if not looks:
            fields[24] = fields[47] = fields[48] = b"0"  # as during an exec
            time.sleep(2 * processes.EXEC_LIMIT_S)
        looks.append(fields[47])
        return fields

    try:
        wait_for(lambda: environment_of(pid), "the environment")
        monkeypatch.setattr(processes, "EXEC_LIMIT_S", 0.01)
        monkeypatch.setattr(processes, "stat_fields", interrupted)
        assert processes._exec_completes(pid)
        assert len(looks) == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_process_without_an_environment_has_an_empty_one() -> None:
    """For a process without an environment, a zombie and an ended process, an empty environment is returned."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    try:
        assert environment_of(pid) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: (found := seen(pid)) is not None and not found.alive, "a zombie")
        assert environment_of(pid) == []
        os.waitpid(pid, 0)
    assert environment_of(pid) == []
