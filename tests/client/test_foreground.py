"""Tests of Ctrl-C in a command that waits for a foreground job."""

from __future__ import annotations

import os
import signal
from typing import cast

from scheduler.client.client import SchedulerClient
from scheduler.client.foreground import Interrupts
from scheduler.core.job import Job


class Client:
    """A client of a scheduler. During each of the first two calls of `begun`, the user presses Ctrl-C.

    `begun` always returns None: it finds no job that could be cancelled.
    """

    def __init__(self) -> None:
        self.looks = 0

    def begun(self, _number: int) -> Job | None:
        self.looks += 1
        if self.looks < 3:
            os.kill(os.getpid(), signal.SIGINT)
        return None


def test_a_second_ctrl_c_does_not_interrupt_the_first_one() -> None:
    """While the first Ctrl-C is passed on to the job, a second Ctrl-C is ignored.

    Otherwise the second Ctrl-C would wait for a lock that the first one holds.
    """
    client = Client()
    with Interrupts(cast("SchedulerClient", client), 1):
        os.kill(os.getpid(), signal.SIGINT)
        assert client.looks == 1
        os.kill(os.getpid(), signal.SIGINT)  # later ones are passed on again
        assert client.looks == 2
