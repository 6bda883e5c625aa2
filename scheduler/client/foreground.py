"""Waits for a foreground job and passes Ctrl-C on to it. `foreground_caller.py` gives the job its streams."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import FrameType

from scheduler.client.client import SchedulerClient
from scheduler.client.foreground_caller import Caller
from scheduler.core.errors import NoDaemon, SchedulerError
from scheduler.core.job import Outcome
from scheduler.core.requests import Cancel
from scheduler.system.proc import ticks_of

EVERY_S = 0.1  # seconds between attempts to find a daemon


class Interrupts:
    """Context manager for the time in which this process waits for a job.

    Ctrl-C then does not end this process. It cancels the job if the job waits, or sends SIGINT to the processes of the
    job if the job runs.
    """

    def __init__(self, client: SchedulerClient, number: int) -> None:
        self.client, self.number = client, number
        self._passing_on = False
        self.cancel_sent = False  # True once Ctrl-C has sent a cancel request, which may have come too late

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def cancelled(self) -> bool:
        """Return whether Ctrl-C has cancelled the job before it ran. To be called after the job has ended."""
        job = self.client.known((self.number,)).get(self.number) if self.cancel_sent else None
        return self.cancel_sent and (job is None or job.outcome is Outcome.CANCELLED)

    def _pass_on(self, _number: int, _frame: FrameType | None) -> None:
        from scheduler.client.send_request import do

        if self._passing_on:  # a second Ctrl-C: it would wait for a lock that the first one holds
            return
        self._passing_on = True
        try:
            job = self.client.begun(self.number)
            if job is None or job.state.ended:
                return
            if job.process is not None and ticks_of(job.process.pid) == job.process.ticks:
                os.killpg(job.process.pid, signal.SIGINT)  # the process leads its own process group
                return
            self.cancel_sent = True
            do(self.client, Cancel((self.number,)))
        except SchedulerError as error:  # a daemon is just starting or ending; the user can press Ctrl-C again
            print(f"gpujob: {error}", file=sys.stderr)
        finally:
            self._passing_on = False


def stay(client: SchedulerClient, number: int, caller: Caller) -> int:
    """Wait for a foreground job; return its exit code, or 130 if Ctrl-C cancelled it before it ran. Closes ``caller``.

    The wait continues if the daemon ends: either the job already has the descriptors of this process, or the next
    supervisor will ask this process for them.
    """
    from scheduler.client.wait import wait_for

    said = False
    with contextlib.closing(caller), Interrupts(client, number) as interrupts:
        while True:
            try:
                code = wait_for(client, (number,), None, time.monotonic())
                break
            except NoDaemon:
                if not said:
                    said_once = (
                        f"gpujob: no scheduler is running; job {number} waits until a scheduler starts (gpujob start)"
                    )
                    print(said_once, file=sys.stderr)
                said = True
                time.sleep(EVERY_S)
    return 130 if interrupts.cancelled() else code
