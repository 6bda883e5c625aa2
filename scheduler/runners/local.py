"""Attempts that run without our help: adopted after a restart, ended but not yet settled, or outlived by processes."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from scheduler.core.job import Job, Process
from scheduler.core.observations import Gone, Lost, Observation, Started
from scheduler.core.recovery import Record, Verdict
from scheduler.runners import attempt_record
from scheduler.runners.adoption import ending, read_ending, settle, why_lost
from scheduler.system.proc import boot_id
from scheduler.system.processes import (
    JOB_NAMES,
    Mark,
    Seen,
    become_subreaper,
    carries,
    environment_of,
    lives,
    members,
    open_pidfd,
    own_children,
    seen,
    seen_as,
    session_of,
    signal_all,
    stands,
)

ZOMBIE_PATIENCE_S = 10.0
LOOK_AGAIN_S = 0.005
LONGEST_LOOK_S = 0.5
MOST_LOOKS = 8
KEPT_FREE = 64  # descriptors for everything else
# In the environment of what belongs to no job.
HELPERS = (b"GPUJOB_SESSION=", b"GPUJOB_READER=", b"GPUJOB_SUPERVISOR=", b"GPUJOB_WEB_CHILD=")


@dataclass(slots=True)
class WatchedAttempt:
    """An attempt in hand. ``ours``: started below this very daemon, so that its orphans become our children."""

    job: int
    attempt: int
    path: str
    process: Process | None = None
    ours: bool = False
    session: Process | None = None  # who leads the leader's session: itself, or in a terminal its shim

    @property
    def key(self) -> str:
        """Name of its record."""
        return f"{self.job}.{self.attempt}"


@dataclass(slots=True)
class _Zombie:
    """A watched leader that has ended, but whose record is not whole yet; or one that no descriptor could be had for."""

    attempt: WatchedAttempt
    since: float
    wait: float = LOOK_AGAIN_S
    due: float = 0.0


@dataclass(slots=True)
class _Claim:
    """An attempt that may begin this moment: its starter lives, and has not told a pid yet."""

    job: Job
    wait: float
    due: float


def _session_leader(process: Process) -> Process | None:
    found = seen_as(process)
    leader = seen(found.session) if found is not None else None
    return Process(leader.pid, leader.ticks) if leader is not None else None


def _leads(attempt: WatchedAttempt, orphan: Seen) -> bool:
    """Whether a process is of an attempt's session."""
    leader = attempt.session or attempt.process
    return leader is not None and orphan.session == leader.pid and orphan.ticks >= leader.ticks


class LocalRunner:
    """What all runners of this machine share: watching, adopting, ending attempts, and what these leave behind.

    ``attempts``: folder of the records; ``environ``: base environment of the jobs; ``names``: of their marks' variables.
    """

    terminal = False  # each job runs in a terminal of its own, which goes with its supervisor

    def __init__(
        self, attempts: str, state_file: str, environ: Mapping[str, str], names: tuple[str, str, str] = JOB_NAMES
    ) -> None:
        self.attempts, self.state_file, self.names = attempts, state_file, names
        drop = (
            "GPUJOB_CRASH_AT",
            "GPUJOB_SESSION",
            "GPUJOB_LAUNCH",
            "GPUJOB_READER",
            "GPUJOB_SUPERVISOR",
            "GPUJOB_WEB_CHILD",
        )
        self.environ = {name: value for name, value in environ.items() if name not in drop}
        self.boot = boot_id()
        self._epoll = select.epoll()
        self._most_watched = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - KEPT_FREE
        self._adopted: dict[
            int, WatchedAttempt
        ] = {}  # pidfd of the leader → attempt that is no child of our supervisor
        self._zombies: list[_Zombie] = []
        self._claims: list[_Claim] = []
        self._leftovers: dict[int, tuple[str, Mark, Process]] = {}  # pidfd → whose
        self._held: dict[str, Mark] = {}
        self._shims: set[Process] = set()  # of attempts that have ended
        self._past: dict[
            str, WatchedAttempt
        ] = {}  # of ours, ended, something of it lives: its orphans become our children
        self._unsure: set[Process] = set()  # orphans that more than one job may have made: hold GPUs, are never ended
        self._strangers: Set[int] = frozenset()  # sessions of the daemon's other helpers
        self._facts: list[Observation] = []
        become_subreaper()

    def path_of(self, key: str) -> str:
        """Where the record of an attempt stands."""
        return os.path.join(self.attempts, key)

    def descriptors(self) -> list[int]:
        """One descriptor that stands for all."""
        return [self._epoll.fileno()]

    def _due(self) -> list[float]:
        at_once = [0.0] if self._facts else []
        return at_once + [zombie.due for zombie in self._zombies] + [claim.due for claim in self._claims]

    def _servants(self) -> Iterable[int]:
        """Children of ours that belong to no job."""
        return ()

    def _in_hand(self) -> Iterable[WatchedAttempt]:
        """Attempts whose leader runs."""
        return self._adopted.values()

    def leave_alone(self, sessions: Set[int]) -> None:
        """Processes of these sessions belong to no job, though they may become our children."""
        self._strangers = sessions

    def _take_facts(self) -> list[Observation]:
        observations, self._facts = self._facts, []
        return observations

    # -- looking ------------------------------------------------------------------------------------------

    def _watch(self, attempt: WatchedAttempt) -> None:
        """Be told when the leader ends; an ended one is settled from its record at the next look."""
        if attempt.process is not None:
            attempt.session = _session_leader(attempt.process)
        full = len(self._adopted) + len(self._leftovers) >= self._most_watched
        fd = open_pidfd(attempt.process) if attempt.process is not None and not full else -1
        if fd < 0:  # ended; or watched by looking now and then: descriptors are needed for other things too
            self._zombies.append(_Zombie(attempt, time.monotonic()))
        else:
            self._adopted[fd] = attempt
            self._epoll.register(fd, select.EPOLLIN)

    def _look_at_descriptors(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd in self._adopted:
                self._epoll.unregister(fd)
                os.close(fd)
                self._zombies.append(_Zombie(self._adopted.pop(fd), time.monotonic()))
            elif fd in self._leftovers:
                self._leftover_ended(fd)

    def _ended(self, attempt: WatchedAttempt, how: str, code: int, at: float) -> None:
        if attempt.ours and attempt.session not in (None, attempt.process):
            self._shims.add(attempt.session)
        observation = ending(attempt.job, attempt.attempt, how, code, at, self._left_behind(attempt))
        if observation.leftovers and attempt.ours:
            self._past[attempt.key] = attempt
        unsure = tuple(process for process in observation.leftovers if process in self._unsure)
        self._facts.append(replace(observation, unsure=unsure) if unsure else observation)

    def _mark(self, attempt: WatchedAttempt) -> Mark:
        return Mark(attempt.job, attempt.attempt, self.state_file, self.names)

    def _left_behind(self, attempt: WatchedAttempt) -> tuple[Process, ...]:
        """Processes of an attempt whose leader has ended.

        Whatever lives of it hangs below a process whose parent died, and such a one is our child: so one look at
        our own children tells that there is nothing, and only else all processes are searched. An orphan that
        shows no owner (another session, no mark) holds the GPUs of every job that may have made it.
        """
        if not attempt.ours:
            return tuple(members(self._mark(attempt), attempt.process))
        for _ in range(MOST_LOOKS):
            orphans = self._orphans_of(attempt)
            if not orphans:
                return ()
            left = members(self._mark(attempt), attempt.process, orphans)
            if left:
                return tuple(left)  # else they ended this moment, and may have left others
        return tuple(orphans)

    def _orphans_of(self, attempt: WatchedAttempt) -> list[Process]:
        """Live children of ours that may be the attempt's; none that is held for another is.

        One that dies after our children were listed hands its own over to us, and they are not in that list. It stays a zombie
        until we reap it: so the list is complete once nobody has died since the one before.
        """
        # A shim that exits is our child once its server has ended, and shows no environment any more.
        self._shims = {shim for shim in self._shims if lives(shim)}
        servants = {*self._servants(), *(shim.pid for shim in self._shims)}
        held = {p.pid for key, _, p in self._leftovers.values() if key != attempt.key and p not in self._unsure}
        mark = self._mark(attempt)
        dead_before: set[int] = set()
        while True:
            orphans, dead = [], set()
            for pid in own_children():
                if pid in servants or (pid in held and not carries(pid, mark)):  # its own mark proves more
                    continue
                found = seen(pid)
                if found is None or not found.alive:
                    dead.add(pid)
                elif found.session not in self._strangers and self._may_be_of(attempt, found):
                    orphans.append(Process(pid, found.ticks))
            if orphans or dead <= dead_before:
                return orphans
            dead_before = dead

    def _may_be_of(self, attempt: WatchedAttempt, orphan: Seen) -> bool:
        mark, leader = self._mark(attempt), attempt.process
        if carries(orphan.pid, mark):
            return True
        entries = environment_of(orphan.pid)
        if mark.is_of_another(entries):
            return False
        if any(entry.startswith(HELPERS) for entry in entries):
            return False  # a shim, what a user started in a window beside a job's, a reader of the GPUs: no job's
        if _leads(attempt, orphan):
            return True
        if any(held != f"{attempt.job}.{attempt.attempt}" and p.pid == orphan.pid and carries(orphan.pid, m)
               for held, m, p in self._leftovers.values()):  # fmt: skip
            return False
        in_hand = (*self._in_hand(), *(zombie.attempt for zombie in self._zombies))
        others = [other for other in in_hand if other is not attempt]
        for other in others:
            if _leads(other, orphan) or carries(orphan.pid, self._mark(other)):
                return False
        own = leader is None or orphan.ticks >= leader.ticks
        makers = [o for o in others if (first := o.session or o.process) is not None and first.ticks <= orphan.ticks]
        if own and makers:
            self._unsure.add(Process(orphan.pid, orphan.ticks))
        return own

    def _ended_children(self) -> Iterator[tuple[int, bool, int]]:
        """(pid, whether it exited, code or signal) of each child that ended; reaped once the caller has dealt with it."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            yield found.si_pid, found.si_code == os.CLD_EXITED, found.si_status
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.si_pid, os.WNOHANG)

    def _orphan_ended(self, pid: int, exited: bool, code: int) -> None:
        """A child of ours ended: if it led a watched attempt, its supervisor is dead and we were given it."""
        for fd, attempt in self._adopted.items():
            if attempt.process is not None and attempt.process.pid == pid:
                self._epoll.unregister(fd)
                os.close(fd)
                del self._adopted[fd]
                break
        else:
            mine = [z for z in self._zombies if z.attempt.process is not None and z.attempt.process.pid == pid]
            if not mine:
                return
            self._zombies.remove(mine[0])
            attempt = mine[0].attempt
        if (
            attempt_record.read(attempt.path).kind is Record.ENDED
        ):  # its supervisor still wrote it down before it was killed
            self._zombies.append(_Zombie(attempt, time.monotonic()))
        else:
            self._end_of_child(attempt, exited, code)

    def _end_of_child(self, attempt: WatchedAttempt, exited: bool, code: int) -> None:
        """What the supervisor would have done: write the ending down before it is taken from the kernel."""
        at = time.time_ns()
        how, code = attempt_record.ending_words(exited, code, hangup=self.terminal)
        with contextlib.suppress(OSError):  # the commit of this very observation keeps the code as well
            if attempt_record.read(attempt.path).process in (None, attempt.process):  # else the folder was made anew
                attempt_record.write_end(attempt.path, how, code, at, sync=False)
        self._ended(attempt, how, code, at / 1e9)

    def _settle_from_record(self, attempt: WatchedAttempt, now: float) -> None:
        found = attempt_record.read(attempt.path)
        if found.kind is Record.ENDED:
            self._ended(attempt, found.how, found.code, found.ended_at or now)
        else:
            left = tuple(members(self._mark(attempt), attempt.process))
            self._facts.append(Lost(attempt.job, attempt.attempt, why_lost(found.kind, True), now, left))

    def _look_at_zombies(self) -> None:
        """Settle watched leaders that have ended; wait for the ending that a supervisor or shim is about to write down."""
        now = time.monotonic()
        waiting = []
        for zombie in self._zombies:
            if zombie.due > now:
                waiting.append(zombie)
                continue
            attempt = zombie.attempt
            # Looked at before the record is read: who reaps it has written the ending down by then.
            still = attempt.process is not None and stands(attempt.process)
            impatient = now - zombie.since > ZOMBIE_PATIENCE_S
            found = read_ending(
                attempt.path, attempt.process, self.state_file, terminal=self.terminal, impatient=impatient
            )
            if found.kind is Record.ENDED:
                self._ended(attempt, found.how, found.code, found.ended_at or time.time())
            elif not still:
                left = tuple(members(self._mark(attempt), attempt.process))
                self._facts.append(Lost(attempt.job, attempt.attempt, why_lost(found.kind, True), time.time(), left))
            else:
                zombie.wait = min(LONGEST_LOOK_S, zombie.wait * 2)
                zombie.due = now + zombie.wait
                waiting.append(zombie)
        self._zombies = waiting

    # -- after a restart ----------------------------------------------------------------------------------

    def adopt(self, job: Job) -> list[Observation]:
        """Settle an attempt found in the store; observations, after which it is watched if it still lives.

        An attempt that this very runner has in hand is left as it is. While its starter may be in the midst of its
        start nothing is said of it; its observations come by ``look``.
        """
        key = job.attempt_key
        for attempt in self._in_hand():
            if attempt.key == key:
                if attempt.process is not None:
                    return [Started(job.id, job.attempt, attempt.process, job.started_at or time.time())]
                return []
        if any(zombie.attempt.key == key for zombie in self._zombies):
            return []
        if any(claim.job.attempt_key == key for claim in self._claims):
            return []
        return self._settle(job)

    def _settle(self, job: Job) -> list[Observation]:
        path = self.path_of(job.attempt_key)
        verdict, observations, process = settle(path, job, self.state_file, time.time(), self.names)
        if verdict is Verdict.WAIT:
            self._wait_for_starter(job)
            return []
        settled = any(not isinstance(observation, Started) for observation in observations)
        if not settled and process is not None:
            self._watch(WatchedAttempt(job.id, job.attempt, path, process))
        if job.runner == "screen":  # killed before it was written down, its session is known by its name alone
            return [
                replace(observation, session=session_of(observation.process) or None)
                if isinstance(observation, Started)
                else observation
                for observation in observations
            ]
        return observations

    def _wait_for_starter(self, job: Job) -> None:
        self._claims.append(_Claim(job, LOOK_AGAIN_S, time.monotonic() + LOOK_AGAIN_S))

    def _look_at_claims(self) -> None:
        now = time.monotonic()
        claims, self._claims = self._claims, []
        for claim in claims:
            if claim.due > now:
                self._claims.append(claim)
                continue
            self._facts += self._settle(claim.job)
            if self._claims and self._claims[-1].job is claim.job:  # still in the midst of it
                self._claims[-1].wait = min(LONGEST_LOOK_S, 2 * claim.wait)
                self._claims[-1].due = now + self._claims[-1].wait

    # -- ending -------------------------------------------------------------------------------------------

    def stop(self, job: Job, hard: bool, soft: int = signal.SIGTERM) -> None:
        """SIGTERM (or ``soft``) or SIGKILL to the whole tree."""
        known = [p for held, _, p in self._leftovers.values() if held == job.attempt_key and p not in self._unsure]
        signal_all(Mark(job.id, job.attempt, self.state_file, self.names), job.process, known, hard, soft)

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Report Gone(key) when none of these lives, nor any other of the attempt."""
        mark = Mark(job, attempt, self.state_file, self.names)
        self._held[key] = mark
        watched = {process for held, _, process in self._leftovers.values() if held == key}
        for process in processes:
            if process in watched:
                continue
            fd = open_pidfd(process)
            if fd >= 0:
                self._leftovers[fd] = (key, mark, process)
                self._epoll.register(fd, select.EPOLLIN)
        self._check_held(key)

    def _leftover_ended(self, fd: int) -> None:
        key, _mark, process = self._leftovers.pop(fd)
        self._unsure.discard(process)
        self._epoll.unregister(fd)
        os.close(fd)
        if any(held == key for held, _, _ in self._leftovers.values()):
            return
        self._check_held(key, process)

    def _check_held(self, key: str, last: Process | None = None) -> None:
        if key not in self._held or any(held == key for held, _, _ in self._leftovers.values()):
            return
        mark = self._held[key]
        found = attempt_record.read(self.path_of(key))
        past = self._past.get(key)
        # What the last one started, in a session of its own and without the mark, is our child since it ended.
        orphans = self._left_behind(past) if past is not None else ()
        left = members(mark, found.process, [*orphans, *([last] if last else [])])
        if left:
            self.watch_leftovers(key, mark.job, mark.attempt, left)
        else:
            del self._held[key]
            self._past.pop(key, None)
            self._facts.append(Gone(key))

    def trouble(self) -> str:
        """Each attempt has a supervisor of its own: nothing holds up all of them."""
        return ""

    def close(self) -> None:
        """Let go of everything; the jobs live on."""
        for fd in (*self._adopted, *self._leftovers):
            os.close(fd)
        self._epoll.close()
