"""Zombies of other users."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from scheduler.core.job import Process
from scheduler.system.processes import seen, zombie_status
from tests.stories.harness import wait_for


def _child(run: Callable[[], int], uid: int) -> int:
    """Fork a child that runs ``run`` as this user and group, and exits with its result; return its pid."""
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
def test_p5_the_status_of_a_zombie_of_another_user_is_unknown() -> None:
    """P5: The kernel shows 0 as the status of a process that we may not trace; that is no exit code 0."""
    pid = _child(lambda: os.execv("/bin/sh", ["sh", "-c", "exit 7"]), 65533)
    try:
        wait_for(lambda: (found := seen(pid)) is not None and not found.alive, "a zombie")
        found = seen(pid)
        assert found is not None
        process = Process(pid, found.ticks)

        def status() -> int:
            """Return the exit code of the zombie, 50 if it is unknown."""
            read = zombie_status(process)
            return 50 if read is None else os.waitstatus_to_exitcode(read)

        codes = [os.waitstatus_to_exitcode(os.waitpid(_child(status, uid), 0)[1]) for uid in (65533, 65532)]
        assert codes == [7, 50]
        assert status() == 7, "root may trace all processes"
    finally:
        os.waitpid(pid, 0)
