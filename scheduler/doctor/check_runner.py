"""Runs checks in parallel, so that a check that hangs affects only its own findings."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

from scheduler.doctor.finding import Finding, Mark, not_determined

IN_TURN_S = 2.0  # seconds for a check that runs without a thread


class _Late(BaseException):
    """Raised inside a check when the time limit of the check has passed.

    It is a BaseException, so that no ``except Exception`` in the check catches it.
    """


class Running:
    """A check that runs in its own thread. It always has findings, even if it raises an error or hangs.

    If no thread can be started (a limit on processes or memory), the check runs in the constructor. SIGALRM then
    interrupts it after `IN_TURN_S` seconds. If the check waits for a disk access that no signal can interrupt, it
    delays the other checks for longer.
    """

    def __init__(self, check: str, what: str, look: Callable[[], list[Finding]]) -> None:
        self.check, self._what, self._look = check, what, look
        self._found: list[Finding] | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError):
            self._thread = None
            self._run_in_turn()

    def _run_in_turn(self) -> None:
        def late(_number: int, _frame: object) -> None:
            raise _Late

        before = signal.signal(signal.SIGALRM, late)
        with contextlib.suppress(_Late):
            signal.setitimer(signal.ITIMER_REAL, IN_TURN_S)
            try:
                self._run()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def _run(self) -> None:
        try:
            self._found = self._look()
        except Exception as error:  # noqa: BLE001  an error in one check must not stop the others
            said = str(error) or type(error).__name__
            self._found = [not_determined(self.check, self._what, " ".join(said.split()))]

    @property
    def ended(self) -> bool:
        return self._found is not None

    @property
    def in_turn(self) -> bool:
        """Whether the check ran in the constructor, because no thread could be started."""
        return self._thread is None

    def wait(self, until: float) -> None:
        """Wait until the check has ended, but not after ``until`` (monotonic seconds)."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def result(self, until: float) -> list[Finding]:
        """Wait for the end of the check and return its findings.

        If the check has not ended at ``until`` (monotonic seconds), return one finding, marked UNKNOWN.
        """
        self.wait(until)
        return (
            [not_determined(self.check, self._what, "no answer within the time limit")]
            if self._found is None
            else self._found
        )


def crowded(processes: tuple[int, int], memory: tuple[int, int]) -> Finding:
    """Return the finding which says that no thread could be started.

    ``processes``: (soft limit, hard limit) on the number of this user's processes; -1: no limit. ``memory``: (soft
    limit, hard limit) on the bytes of memory of one process; -1: no limit.
    """
    limits = [f"{processes[0]} processes and threads at most (ulimit -u)"] if processes[0] >= 0 else []
    limits += [f"{memory[0] >> 10} KiB of memory at most (ulimit -v)"] if memory[0] >= 0 else []
    raised = [f"ulimit -{letter} {'unlimited' if hard < 0 else hard >> shift}"
              for letter, (soft, hard), shift in (("u", processes, 0), ("v", memory, 10)) if soft != hard]  # fmt: skip
    wrong = "this user cannot start more threads or processes: jobs fail, and these checks ran one after another"
    return Finding("processes", Mark.BAD, " and ".join(limits) or "no limit found", wrong, "; ".join(raised))
