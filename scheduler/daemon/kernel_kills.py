"""Finds out whether the kernel ended an attempt because main memory ran out: its log, and the counter of the cgroup."""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Sequence

from scheduler.core.host_oom import KILL_WORDS, Victim, may_be_host_oom, pids_in, victims_in, was_killed, with_host_oom
from scheduler.core.job import Failure, Job, Process
from scheduler.core.observations import Ended, Lost, Observation, Started
from scheduler.core.own_classes import OwnClass
from scheduler.system.kernel_log import KernelLog, shows_pids
from scheduler.system.proc import boot_id

MOST_VICTIMS = 1000
TICKS_A_SECOND = 100
SLACK_S = 5.0
LEAST_FILES = 256  # with a lower limit, the descriptor of the log could be the one that the jobs need
DRIFT = 1e-4  # the clock of the kernel's log is not corrected: it may be wrong by this part of the time since boot


class KernelKills:
    """Judges ends of attempts by what the kernel's log says about processes that it ended because memory ran out.

    The log is read only after an attempt was ended by SIGKILL, or failed while a process of its cgroup was ended.
    ``log``: None: there is no log that names processes by the pids that the scheduler sees.
    """

    def __init__(self, log: KernelLog | None) -> None:
        self._log = log
        self._victims: deque[Victim] = deque(maxlen=MOST_VICTIMS)
        # Victims that are known to be processes of an attempt → its key, and when it ended (seconds since 1970)
        self._of_job: dict[Victim, tuple[str, float]] = {}
        self._leaders: dict[int, tuple[str, Process]] = {}  # job → key and main process of its running attempt

    def note(self, observation: Observation) -> None:
        """Remember the main processes of running attempts, also of those whose start is not recorded yet."""
        if isinstance(observation, Started) and observation.process is not None:
            key = f"{observation.job}.{observation.attempt}"
            self._leaders[observation.job] = (key, observation.process)
        elif isinstance(observation, (Ended, Lost)):
            self._leaders.pop(observation.job, None)

    def cause(self, job: Job, ended: Ended, found: Failure | None, own: Sequence[OwnClass] = ()) -> Failure | None:
        """Return the cause of an end that no request and no time limit brought about.

        ``found``: the cause that its log shows; ``own``: the user's classes.
        """
        killed = was_killed(ended.exit_code, ended.signal)
        if not (killed or ended.oom_kills) or not may_be_host_oom(found, ended.exit_code):
            return found
        victim, of_others = self._word(job, ended, found) if self._read() else (None, False)
        return with_host_oom(found, ended.exit_code, 0 if of_others else ended.oom_kills, victim, own)

    def _read(self) -> bool:
        records = None if self._log is None else self._log.read(KILL_WORDS)
        if records is None:
            return False
        self._victims.extend(victims_in(records))
        known = set(self._victims)
        self._of_job = {victim: told for victim, told in self._of_job.items() if victim in known}
        return True

    def _word(self, job: Job, ended: Ended, found: Failure | None) -> tuple[Victim | None, bool]:
        """Return the victim that is a process of the attempt, and whether the counter rose only because of other jobs."""
        key, process = self._leaders.get(job.id, (job.attempt_key, job.process))
        if process is None or job.boot not in ("", boot_id()):
            return None, False  # it ran on another machine, or before this one was restarted
        pids = {process.pid, *pids_in(found)}
        others = {leader.pid: (name, leader) for name, leader in self._leaders.values() if name != key}
        mine = None
        for victim in self._victims:
            name, leader = others.get(victim.pid, ("", None))
            if victim.pid in pids and _in_life(victim, process, ended.at):
                self._of_job[victim], mine = (key, ended.at), victim
            elif leader is not None and _in_life(victim, leader, ended.at):
                self._of_job.setdefault(victim, (name, math.inf))
        begun = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.ticks / TICKS_A_SECOND
        of_others = [owner for owner, end in self._of_job.values() if owner != key and end >= begun]
        return mine, mine is None and len(of_others) >= max(1, ended.oom_kills)


def open_kernel_kills() -> KernelKills:
    """Return a judge with the kernel's log of this machine; without it if this process may open few files."""
    spare = resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= LEAST_FILES
    return KernelKills(KernelLog() if spare and shows_pids() else None)


def _in_life(victim: Victim, process: Process, ended_at: float) -> bool:
    """Return whether the kernel ended ``victim`` while the attempt of this main process ran.

    A pid may have been used before and after it. ``ended_at``: end of the attempt in seconds since 1970.
    """
    boot, mono = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
    slack = SLACK_S + DRIFT * boot
    asleep = boot - mono  # the log's clock stands still while the machine sleeps
    since = process.ticks / TICKS_A_SECOND - asleep - slack
    return since <= victim.at <= mono - (time.time() - ended_at) + slack
