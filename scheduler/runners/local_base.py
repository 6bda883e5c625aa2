"""Base class of the runners: watches, adopts and stops attempts on this machine, and tracks leftover processes."""

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
from scheduler.runners.supervisor import OomCounter
from scheduler.system.proc import boot_id
from scheduler.system.process_search import ProcessTable, Target, members, signal_all
from scheduler.system.processes import (
    JOB_NAMES,
    Mark,
    Seen,
    become_subreaper,
    carries,
    environment_of,
    lives,
    open_pidfd,
    own_children,
    seen,
    seen_as,
    session_of,
    stands,
)

ZOMBIE_PATIENCE_S = 10.0
LOOK_AGAIN_S = 0.005
LONGEST_LOOK_S = 0.5
MOST_LOOKS = 8
KEPT_FREE = 64  # descriptors that are not used to watch processes
# A process with one of these variables in its environment is a helper of the scheduler and belongs to no job.
HELPERS = (b"GPUJOB_SESSION=", b"GPUJOB_READER=", b"GPUJOB_SUPERVISOR=", b"GPUJOB_WEB_CHILD=")


@dataclass(slots=True)
class WatchedAttempt:
    """An attempt that the runner watches.

    ``path``: path of the attempt record; ``process``: the leader, None while it is unknown; ``ours``: whether this
    daemon started the attempt. If so, orphans of the attempt become children of the daemon; otherwise they do not.
    """

    job: int
    attempt: int
    path: str
    process: Process | None = None
    ours: bool = False
    session: Process | None = None  # leader of the session: ``process`` itself, in screen mode the shim

    @property
    def key(self) -> str:
        """Name of the attempt record, ``<job>.<attempt>``."""
        return f"{self.job}.{self.attempt}"


@dataclass(slots=True)
class _Zombie:
    """An attempt that the runner checks repeatedly.

    Either the leader has ended and its ending may not be recorded yet, or the runner has no pidfd of the leader.

    ``since``: start of the checks (monotonic seconds). ``due``: time of the next check (monotonic seconds). ``wait``:
    seconds between two checks.
    """

    attempt: WatchedAttempt
    since: float
    wait: float = LOOK_AGAIN_S
    due: float = 0.0


@dataclass(slots=True)
class _Claim:
    """An adopted attempt that may just be starting: its record has no pid, and its supervisor or shim lives.

    ``due``: time of the next check (monotonic seconds); ``wait``: seconds between two checks.
    """

    job: Job
    wait: float
    due: float


def _session_leader(process: Process) -> Process | None:
    found = seen_as(process)
    leader = seen(found.session) if found is not None else None
    return Process(leader.pid, leader.ticks) if leader is not None else None


def _leads(attempt: WatchedAttempt, orphan: Seen) -> bool:
    """Return whether ``orphan`` is in the POSIX session of ``attempt`` and started no earlier than the session's leader."""
    leader = attempt.session or attempt.process
    return leader is not None and orphan.session == leader.pid and orphan.ticks >= leader.ticks


class LocalRunner:
    """Base class of the runners of this machine: watches, adopts and stops attempts, and tracks leftover processes.

    ``attempts``: folder of the attempt records; ``state_file``: its path is part of each job's mark; ``environ``: base
    environment of the jobs; ``names``: environment variables of the jobs' marks. The leader of an attempt is its main
    process. Raises OSError.
    """

    terminal = False  # True: each job has its own terminal, which closes when its shim dies

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
        self._adopted: dict[int, WatchedAttempt] = {}  # pidfd of the leader → attempt whose end it shows
        self._zombies: list[_Zombie] = []
        self._claims: list[_Claim] = []
        self._leftovers: dict[int, tuple[str, Mark, Process]] = {}  # pidfd → key and mark of its attempt, process
        self._held: dict[str, Mark] = {}  # key of an attempt with leftover processes → its mark
        self._shims: set[Process] = set()  # shims of attempts that have ended
        self._past: dict[str, WatchedAttempt] = {}  # key → ended attempt of this daemon with leftover processes
        self._unsure: set[Process] = set()  # orphans that several jobs may have started: hold GPUs, get no signals
        self._strangers: Set[int] = frozenset()  # sessions of the daemon's helper processes
        self._facts: list[Observation] = []
        self._oom = OomCounter()
        become_subreaper()

    def path_of(self, key: str) -> str:
        """Return the path of an attempt record."""
        return os.path.join(self.attempts, key)

    def descriptors(self) -> list[int]:
        """Return the epoll descriptor. It is readable when at least one of the watched descriptors is readable."""
        return [self._epoll.fileno()]

    def _due(self) -> list[float]:
        at_once = [0.0] if self._facts else []
        return at_once + [zombie.due for zombie in self._zombies] + [claim.due for claim in self._claims]

    def _servants(self) -> Iterable[int]:
        """Return the pids of the daemon's children that belong to no job."""
        return ()

    def _unreported(self) -> Iterable[WatchedAttempt]:
        """Return the attempts whose ending is not reported yet. Leave out the attempts in `_zombies` and `_claims`."""
        return self._adopted.values()

    def leave_alone(self, sessions: Set[int]) -> None:
        """Set the POSIX sessions of the daemon's helper processes.

        A process in one of these sessions belongs to no job, even if it becomes a child of the daemon.
        """
        self._strangers = sessions

    def _take_facts(self) -> list[Observation]:
        observations, self._facts = self._facts, []
        return observations

    # -- looking ------------------------------------------------------------------------------------------

    def _watch(self, attempt: WatchedAttempt) -> None:
        """Watch for the end of the leader through a pidfd. Without a pidfd, `look` checks the leader repeatedly.

        If the leader has already ended, the next `look` settles the attempt from its record.
        """
        if attempt.process is not None:
            attempt.session = _session_leader(attempt.process)
        full = len(self._adopted) + len(self._leftovers) >= self._most_watched
        fd = open_pidfd(attempt.process) if attempt.process is not None and not full else -1
        if fd < 0:  # the leader has ended, or the remaining descriptors are needed elsewhere
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

    def _ended(
        self,
        attempt: WatchedAttempt,
        how: str,
        code: int,
        at: float,
        table: ProcessTable | None = None,
        oom_kills: int = 0,
    ) -> None:
        """Report the ending of an attempt.

        ``table``: processes after the ending (see `_left_behind`); ``oom_kills``: see `core.observations.Ended`.
        """
        if attempt.ours and attempt.session not in (None, attempt.process):
            self._shims.add(attempt.session)
        left = self._left_behind(attempt, table)
        observation = ending(attempt.job, attempt.attempt, how, code, at, left, oom_kills)
        if observation.leftovers and attempt.ours:
            self._past[attempt.key] = attempt
        unsure = tuple(process for process in observation.leftovers if process in self._unsure)
        self._facts.append(replace(observation, unsure=unsure) if unsure else observation)

    def _mark(self, attempt: WatchedAttempt) -> Mark:
        return Mark(attempt.job, attempt.attempt, self.state_file, self.names)

    def _left_behind(self, attempt: WatchedAttempt, table: ProcessTable | None = None) -> tuple[Process, ...]:
        """Return the leftover processes of an attempt whose leader has ended.

        If an earlier daemon started the attempt, all processes in ``table`` are searched. ``table`` must have been read
        from /proc after the end of the leader; None: it is read now.

        If this daemon started the attempt, ``table`` is not used. Each leftover process is then an orphan or the
        descendant of an orphan, and the kernel makes each orphan a child of the daemon. So if no child of the daemon
        can belong to the attempt, the attempt has no leftover process. Otherwise all of /proc is searched. An orphan
        that has no mark and leads its own session may belong to any of several jobs. Such an orphan counts as a
        leftover process of each of these jobs.
        """
        if not attempt.ours:
            return tuple(members(self._mark(attempt), attempt.process, table=table))
        for _ in range(MOST_LOOKS):
            orphans = self._orphans_of(attempt)
            if not orphans:
                return ()
            left = members(self._mark(attempt), attempt.process, orphans)
            if left:
                return tuple(left)  # else the orphans have just ended, and may have left orphans: look again
        return tuple(orphans)

    def _orphans_of(self, attempt: WatchedAttempt) -> list[Process]:
        """Return the live children of the daemon that may belong to the attempt.

        A child that is already watched as a leftover process of another attempt is left out. Exceptions: the child has
        the mark of this attempt, or it is not certain that the child belongs to the other attempt.

        If a child dies after the list of children was read, its own children become children of the daemon, but are
        missing from the list. The dead child stays a zombie until it is reaped. So the list is read again until it
        contains an orphan, or until it contains no new zombie.
        """
        # Once its screen process has ended, an exiting shim is the daemon's child, and its environment is unreadable.
        self._shims = {shim for shim in self._shims if lives(shim)}
        servants = {*self._servants(), *(shim.pid for shim in self._shims)}
        held = {p.pid for key, _, p in self._leftovers.values() if key != attempt.key and p not in self._unsure}
        mark = self._mark(attempt)
        dead_before: set[int] = set()
        while True:
            orphans, dead = [], set()
            for pid in own_children():
                # A child that is a leftover of another attempt still counts if it carries this attempt's mark.
                if pid in servants or (pid in held and not carries(pid, mark)):
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
            return False  # for example a shim, a GPU reader, or a user's own screen window
        if _leads(attempt, orphan):
            return True
        if any(held != f"{attempt.job}.{attempt.attempt}" and p.pid == orphan.pid and carries(orphan.pid, m)
               for held, m, p in self._leftovers.values()):  # fmt: skip
            return False
        in_hand = (*self._unreported(), *(zombie.attempt for zombie in self._zombies))
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
        """Yield (pid, whether the child exited by itself, exit code or signal) of each ended child.

        A child is reaped only when the caller asks for the next child. Until then, the caller can read the zombie.
        """
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
        """Settle the watched attempt whose leader is the ended child ``pid``; do nothing if there is no such attempt.

        A leader becomes a child of the daemon when its supervisor or shim dies.
        """
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
        if attempt_record.read(attempt.path).kind is Record.ENDED:  # recorded by its supervisor before it was killed
            self._zombies.append(_Zombie(attempt, time.monotonic()))
        else:
            self._end_of_child(attempt, exited, code)

    def _end_of_child(self, attempt: WatchedAttempt, exited: bool, code: int) -> None:
        """Record and report the ending of a leader whose supervisor or shim is dead. The leader is not reaped yet."""
        at = time.time_ns()
        kills = 0
        how, code = attempt_record.ending_words(exited, code, hangup=self.terminal)
        with contextlib.suppress(OSError):  # the store gets the exit code from this observation
            # A record with another process is the record of another attempt.
            found = attempt_record.read(attempt.path)
            if found.process in (None, attempt.process):
                if code and attempt.ours:  # else its supervisor may have run in another cgroup
                    kills = self._oom.since(found.oom_kills_before)
                attempt_record.write_end(attempt.path, how, code, at, sync=False, oom_kills=kills)
        self._ended(attempt, how, code, at / 1e9, oom_kills=kills)

    def _settle_from_record(self, attempt: WatchedAttempt, now: float) -> None:
        found = attempt_record.read(attempt.path)
        if found.kind is Record.ENDED:
            self._ended(attempt, found.how, found.code, found.ended_at or now, oom_kills=found.oom_kills)
        else:
            left = tuple(members(self._mark(attempt), attempt.process))
            self._facts.append(Lost(attempt.job, attempt.attempt, why_lost(found.kind, True), now, left))

    def _look_at_zombies(self) -> None:
        """Settle the attempts in `_zombies` whose ending is recorded or lost. Check the other attempts again later."""
        now = time.monotonic()
        waiting = []
        ended: list[tuple[_Zombie, attempt_record.AttemptRecord]] = []
        for zombie in self._zombies:
            if zombie.due > now:
                waiting.append(zombie)
                continue
            attempt = zombie.attempt
            # Checked before the record is read: a leader that is reaped by now has its ending in the record.
            still = attempt.process is not None and stands(attempt.process)
            impatient = now - zombie.since > ZOMBIE_PATIENCE_S
            found = read_ending(
                attempt.path, attempt.process, self.state_file, terminal=self.terminal, impatient=impatient
            )
            if found.kind is Record.ENDED or not still:
                ended.append((zombie, found))
            else:
                zombie.wait = min(LONGEST_LOOK_S, zombie.wait * 2)
                zombie.due = now + zombie.wait
                waiting.append(zombie)
        settled = 0
        try:
            # One search for the leftover processes of all attempts that ended before it.
            table = ProcessTable() if len(ended) > 1 else None
            for zombie, found in ended:
                attempt = zombie.attempt
                if found.kind is Record.ENDED:
                    at = found.ended_at or time.time()
                    self._ended(attempt, found.how, found.code, at, table, found.oom_kills)
                else:
                    left = tuple(members(self._mark(attempt), attempt.process, table=table))
                    why = why_lost(found.kind, True)
                    self._facts.append(Lost(attempt.job, attempt.attempt, why, time.time(), left))
                settled += 1
        finally:
            self._zombies = [*waiting, *(zombie for zombie, _ in ended[settled:])]

    # -- after a restart ----------------------------------------------------------------------------------

    def adopt(self, job: Job) -> list[Observation]:
        """Adopt or settle an attempt that was found in the store, and return the observations about it.

        If the attempt still runs, it is watched. An attempt that this runner already handles stays unchanged. While a
        supervisor or shim may just be starting the attempt, the list is empty, and `look` returns the observations
        later. Raises OSError.
        """
        for attempt in self._unreported():
            if attempt.job == job.id and attempt.attempt == job.attempt:  # `key` is slow for 1,000 × 1,000 comparisons
                if attempt.process is not None:
                    return [Started(job.id, job.attempt, attempt.process, job.started_at or time.time())]
                return []
        key = job.attempt_key
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
        if job.runner_kind.terminal:  # a killed daemon may not have stored the session's name: read it from the shim
            return [
                replace(observation, session=session_of(observation.process) or None)
                if isinstance(observation, Started) and observation.process is not None
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
            if self._claims and self._claims[-1].job is claim.job:  # its starter has still not recorded a pid
                self._claims[-1].wait = min(LONGEST_LOOK_S, 2 * claim.wait)
                self._claims[-1].due = now + self._claims[-1].wait

    # -- ending -------------------------------------------------------------------------------------------

    def stop(self, jobs: Iterable[tuple[Job, bool]], soft: int = signal.SIGTERM) -> None:
        """Send a signal to all processes of each job in ``jobs``.

        The signal is SIGKILL if the job is paired with True, and ``soft`` if it is paired with False. A job whose start
        can still be withdrawn gets no signal: its start is withdrawn.
        """
        targets = []
        for job, hard in jobs:
            if self._withdrawn(job):
                continue
            left = [p for held, _, p in self._leftovers.values() if held == job.attempt_key and p not in self._unsure]
            mark = Mark(job.id, job.attempt, self.state_file, self.names)
            targets.append(Target(mark, job.process, tuple(left), hard))
        signal_all(targets, soft)

    def _withdrawn(self, _job: Job) -> bool:
        """Withdraw the start of an attempt if it has not begun; return whether it was withdrawn."""
        return False

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Watch leftover processes of the attempt ``key``.

        When no process of the attempt lives any more, `look` reports Gone(key).
        """
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
        # A process that the last leftover process started in a new session and without the mark is now our child.
        orphans = self._left_behind(past) if past is not None else ()
        left = members(mark, found.process, [*orphans, *([last] if last else [])])
        if left:
            self.watch_leftovers(key, mark.job, mark.attempt, left)
        else:
            del self._held[key]
            self._past.pop(key, None)
            self._facts.append(Gone(key))

    def supervisors(self) -> list[Process]:
        """Return an empty list: each attempt has its own shim. `DirectRunner` overrides this method."""
        return []

    def trouble(self) -> str:
        """Return an empty text.

        In this runner each attempt has its own shim, so no single failure stops all attempts. `DirectRunner` overrides
        this method, because its attempts share one supervisor.
        """
        return ""

    def close(self) -> None:
        """Close all descriptors; the jobs continue."""
        for fd in (*self._adopted, *self._leftovers):
            os.close(fd)
        self._oom.close()
        self._epoll.close()
