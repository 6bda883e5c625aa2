"""Direct mode: attempts are children of the keeper; daemon and keeper cover for each other."""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.core.facts import Ended, Fact, Gone, Lost, Started, Unclaimed
from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch
from scheduler.core.recovery import Record
from scheduler.runners import keeper as keeper_file
from scheduler.runners import record
from scheduler.runners.adoption import settle, start_trouble, why_lost
from scheduler.runners.processes import (
    Mark,
    Seen,
    become_subreaper,
    boot_id,
    carries,
    environment_of,
    members,
    open_pidfd,
    own_children,
    seen,
    signal_all,
    stands,
    zombie_status,
)

PACKET = 1 << 20
MOST_PACKED = 60_000  # bytes in one packet; wmem_max is 212,992 on a common kernel
ZOMBIE_PATIENCE_S = 10.0
LOOK_AGAIN_S = 0.005
KEEPER_FD = 3


@dataclass(slots=True)
class _Attempt:
    job: int
    attempt: int
    path: str
    process: Process | None = None


@dataclass(slots=True)
class _Zombie:
    """An adopted leader that has ended, but whose record is not whole yet."""

    attempt: _Attempt
    since: float
    wait: float = LOOK_AGAIN_S
    due: float = 0.0


class DirectRunner:
    """Runs attempts through one keeper; see `core.ports.Runner` and docs/architecture.md.

    ``attempts``: folder of the records; ``environ``: base environment of the jobs; ``errors``: file that takes
    what a dying keeper says; ``descriptors``: soft limit on open files that the jobs get (the daemon's own is higher).
    """

    def __init__(
        self, attempts: str, state_file: str, environ: Mapping[str, str], errors: str, descriptors: int = 1024
    ) -> None:
        self.attempts, self.state_file, self.errors = attempts, state_file, errors
        self.environ = {name: value for name, value in environ.items() if name != "GPUJOB_CRASH_AT"}
        self.boot = boot_id()
        self._soft_limit = descriptors
        self._epoll = select.epoll()
        self._socket: socket.socket | None = None
        self._keeper = 0
        self._keeper_since = 0.0
        self._outbox: list[bytes] = []
        self._starts: list[tuple[Any, ...]] = []
        self._sent: dict[str, _Attempt] = {}
        self._running: dict[str, _Attempt] = {}
        self._inherited: dict[int, str] = {}
        self._adopted: dict[int, _Attempt] = {}  # pidfd → attempt of an earlier keeper
        self._zombies: list[_Zombie] = []
        self._leftovers: dict[int, tuple[str, Mark, Process]] = {}  # pidfd → whose
        self._held: dict[str, Mark] = {}
        self._unsure: set[Process] = set()  # orphans that more than one job may have made: hold GPUs, are never ended
        self._facts: list[Fact] = []
        become_subreaper()
        self._spawn_keeper()

    # -- the keeper ---------------------------------------------------------------------------------------

    def _spawn_keeper(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        errors = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        argv = [sys.executable, "-I", "-S", keeper_file.__file__, str(KEEPER_FD), self.boot, str(self._soft_limit)]
        try:
            self._keeper = os.posix_spawn(
                sys.executable,
                argv,
                dict(os.environ),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), KEEPER_FD),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                    (os.POSIX_SPAWN_DUP2, 0, 1),
                    (os.POSIX_SPAWN_DUP2, errors, 2),
                ]
                if theirs.fileno() != KEEPER_FD
                else [
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                    (os.POSIX_SPAWN_DUP2, 0, 1),
                    (os.POSIX_SPAWN_DUP2, errors, 2),
                ],
                setsid=True,
            )
        finally:
            theirs.close()
            os.close(errors)
        self._socket = ours
        self._keeper_since = time.monotonic()
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        self._outbox = []
        self._pack([("env", self.environ)])

    @property
    def keeper_pid(self) -> int:
        """Pid of the keeper in office."""
        return self._keeper

    def path_of(self, key: str) -> str:
        """Where the record of an attempt stands."""
        return os.path.join(self.attempts, key)

    def start(self, job: Job, launch: Launch) -> None:
        """Queue a start for the next flush."""
        path = self.path_of(launch.key)
        self._sent[launch.key] = _Attempt(job.id, job.attempt, path)
        data = record.blank(job, self.boot)
        changes = dict(launch.environment)
        self._starts.append(
            (
                "start",
                launch.key,
                path,
                data,
                launch.log,
                launch.cwd,
                launch.umask,
                launch.argv,
                launch.env_file,
                changes,
            )
        )

    def flush(self) -> None:
        """Send the queued starts, in as few packets as fit."""
        packed: list[tuple[Any, ...]] = []
        size = 0
        for start in self._starts:
            length = len(marshal.dumps(start))
            if size + length > MOST_PACKED and packed:
                self._pack(packed)
                packed, size = [], 0
            packed.append(start)
            size += length
        if packed:
            self._pack(packed)
        self._starts.clear()
        self._send()

    def _pack(self, messages: list[tuple[Any, ...]]) -> None:
        data = marshal.dumps(messages)
        if len(data) > 2 * MOST_PACKED:  # a very long command or environment
            data = self._as_file(data)
        self._outbox.append(data)

    def _as_file(self, data: bytes) -> bytes:
        """A packet that names a file in which the real one stands; the keeper removes it."""
        path = os.path.join(self.attempts, f"packet-{os.getpid()}-{time.monotonic_ns()}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
        return marshal.dumps([("file", path)])

    def _send(self) -> None:
        while self._outbox and self._socket is not None:
            try:
                self._socket.send(self._outbox[0])
            except (BlockingIOError, InterruptedError):
                return  # sent at the next look
            except OSError as error:
                if error.errno in (errno.EMSGSIZE, errno.ENOBUFS) and len(self._outbox[0]) > 4096:
                    self._outbox[0] = self._as_file(self._outbox[0])
                    continue
                return  # the keeper is dead; `look` finds out and settles what it was sent
            del self._outbox[0]

    # -- looking ------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """One descriptor that stands for all."""
        return [self._epoll.fileno()]

    def next_look(self) -> float | None:
        """When to look again without a readable descriptor."""
        due = [zombie.due for zombie in self._zombies]
        if self._outbox:
            due.append(time.monotonic() + LOOK_AGAIN_S)
        return min(due, default=None)

    def look(self) -> list[Fact]:
        """All facts since the last look."""
        dead = self._receive()
        for fd, _ in self._epoll.poll(0):
            if fd in self._adopted:
                self._epoll.unregister(fd)
                os.close(fd)
                attempt = self._adopted.pop(fd)
                self._zombies.append(_Zombie(attempt, time.monotonic()))
            elif fd in self._leftovers:
                self._leftover_ended(fd)
        self._reap()
        if dead:
            self._keeper_died()
        self._look_at_zombies()
        self._send()
        facts, self._facts = self._facts, []
        return facts

    def _receive(self) -> bool:
        """Read the keeper's packets; True when it is dead."""
        if self._socket is None:
            return True
        resets = 0
        while True:
            try:
                data = self._socket.recv(PACKET)
            except BlockingIOError:
                return False
            except OSError:  # ECONNRESET: it died with packets of ours unread; its own may still be there
                resets += 1
                if resets > 3:
                    return True
                continue
            if not data:
                return True
            for message in marshal.loads(data):
                self._heard(message)

    def _heard(self, message: tuple[Any, ...]) -> None:
        kind, key = str(message[0]), str(message[1])
        if kind == "up":
            attempt = self._sent.pop(key, None)
            if attempt is None:
                return
            _, _, pid, ticks, at = message
            attempt.process = Process(int(str(pid)), int(str(ticks)))
            self._running[key] = attempt
            self._facts.append(Started(attempt.job, attempt.attempt, attempt.process, int(str(at)) / 1e9))
        elif kind == "end":
            attempt = self._running.pop(key, None)
            if attempt is not None:
                _, _, _, how, code, at = message
                self._ended(attempt, str(how), int(str(code)), int(str(at)) / 1e9)
        elif kind == "no":
            attempt = self._sent.pop(key, None)
            if attempt is not None:
                number = int(str(message[3]))
                self._facts.append(start_trouble(attempt.job, attempt.attempt, number, time.time(), str(message[2])))
        elif kind == "taken":
            self._sent.pop(key, None)  # settled already by whoever claimed it

    def _ended(self, attempt: _Attempt, how: str, code: int, at: float) -> None:
        left = self._left_behind(attempt)
        exit_code, number = (code, None) if how == "exit" else (None, code)
        self._facts.append(Ended(attempt.job, attempt.attempt, exit_code, number, at, left))

    def _mark(self, attempt: _Attempt) -> Mark:
        return Mark(attempt.job, attempt.attempt, self.state_file)

    def _left_behind(self, attempt: _Attempt) -> tuple[Process, ...]:
        """Processes of an attempt whose leader has ended.

        Whatever lives of it hangs below a process whose parent died, and such a one is our child: so one look at
        our own children tells that there is nothing, and only else all processes are searched. An orphan that
        shows no owner (another session, no mark) holds the GPUs of every job that may have made it.
        """
        known = {self._keeper, *self._inherited}
        orphans = []
        for pid in own_children():
            if pid in known:
                continue
            found = seen(pid)
            if found is not None and found.alive and self._may_be_of(attempt, found):
                orphans.append(Process(pid, found.ticks))
        if not orphans:
            return ()
        return tuple(members(self._mark(attempt), attempt.process, orphans))

    def _may_be_of(self, attempt: _Attempt, orphan: Seen) -> bool:
        mark, leader = self._mark(attempt), attempt.process
        if (leader is not None and orphan.session == leader.pid) or carries(orphan.pid, mark):
            return True
        if any(held != f"{attempt.job}.{attempt.attempt}" and p.pid == orphan.pid and carries(orphan.pid, m)
               for held, m, p in self._leftovers.values()):  # fmt: skip
            return False
        others = (*self._running.values(), *self._adopted.values())
        for other in others:
            if (other.process is not None and orphan.session == other.process.pid) or carries(
                orphan.pid, self._mark(other)
            ):
                return False
        own = leader is None or orphan.ticks >= leader.ticks
        makers = [o for o in others if o.process is not None and o.process.ticks <= orphan.ticks]
        if own and makers:
            self._unsure.add(Process(orphan.pid, orphan.ticks))
        return own

    def _reap(self) -> None:
        """Children of ours that ended: orphans of jobs, and leaders inherited from a dead keeper."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            key = self._inherited.pop(found.si_pid, None)
            if key is None and found.si_pid not in (self._keeper,) and self._socket_is_dead():
                return  # perhaps a leader of the keeper that just died: `_keeper_died` tells them apart
            if key is not None:
                attempt = self._running.pop(key)
                self._end_of_child(attempt, found.si_code == os.CLD_EXITED, found.si_status)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.si_pid, os.WNOHANG)

    def _socket_is_dead(self) -> bool:
        found = seen(self._keeper)
        return found is None or not found.alive

    def _end_of_child(self, attempt: _Attempt, exited: bool, code: int) -> None:
        """What the keeper would have done: write the ending down before it is taken from the kernel."""
        how, at = "exit" if exited else "signal", time.time_ns()
        with contextlib.suppress(OSError):  # the commit of this very fact keeps the code as well
            record.write_end(attempt.path, how, code, at, sync=False)
        self._ended(attempt, how, code, at / 1e9)

    def _keeper_died(self) -> None:
        """Take over the dead keeper's jobs (they are our children now) and have another one."""
        if self._socket is not None:
            self._epoll.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._keeper, 0)
        self._outbox.clear()
        now = time.time()
        children = set(own_children())
        for key, attempt in list(self._running.items()):
            if attempt.process is None or attempt.process.pid in self._inherited:
                continue
            if attempt.process.pid in children:
                self._inherited[attempt.process.pid] = key
            else:  # the keeper had reaped it: then the record is whole
                del self._running[key]
                self._settle_from_record(attempt, now)
        unknown = children - set(self._inherited) - {p.pid for _, _, p in self._leftovers.values()}
        for key, attempt in list(self._sent.items()):
            del self._sent[key]
            self._settle_sent(key, attempt, unknown, now)
        if time.monotonic() - self._keeper_since < 1.0:
            time.sleep(0.05)  # a keeper that dies at once must not turn this into a busy loop
        self._spawn_keeper()
        self._reap()

    def _settle_from_record(self, attempt: _Attempt, now: float) -> None:
        found = record.read(attempt.path)
        if found.kind is Record.ENDED:
            self._ended(attempt, found.how, found.code, found.ended_at or now)
        else:
            left = tuple(members(self._mark(attempt), attempt.process))
            self._facts.append(Lost(attempt.job, attempt.attempt, why_lost(found.kind, True), now, left))

    def _settle_sent(self, key: str, attempt: _Attempt, unknown: set[int], now: float) -> None:
        """An attempt that the dead keeper was told to start and never spoke of."""
        found = record.read(attempt.path)
        if found.kind is Record.NONE:
            if not record.give_up(attempt.path, _bare(attempt), self.boot, time.time_ns()):
                found = record.read(attempt.path)
            else:
                self._facts.append(Unclaimed(attempt.job, attempt.attempt))
                return
        if found.kind is Record.NEVER_RAN:
            self._facts.append(start_trouble(attempt.job, attempt.attempt, found.code, now))
            return
        process = found.process
        if process is None and found.kind is Record.CLAIMED:
            # Starts are made one after another, so at most one child can be without a known pid.
            process = self._child_of_claim(attempt, unknown)
            if process is None:
                with contextlib.suppress(OSError):
                    record.write_end(attempt.path, "never", 0, time.time_ns(), sync=False)
                self._facts.append(Unclaimed(attempt.job, attempt.attempt))
                return
            with contextlib.suppress(OSError):
                record.write_pid(attempt.path, process, self.boot, time.time_ns(), 0)
        attempt.process = process
        if process is not None:
            self._facts.append(Started(attempt.job, attempt.attempt, process, found.started_at or now))
        if process is not None and process.pid in unknown:
            self._running[key] = attempt
            self._inherited[process.pid] = key
        else:
            self._settle_from_record(attempt, now)

    def _child_of_claim(self, attempt: _Attempt, unknown: set[int]) -> Process | None:
        """The one child of the dead keeper that no record names: it leads its session and is the newest such child.

        Its mark is not asked for: a zombie has none to show, nor has a process in the midst of its exec. What
        carries another attempt's mark is left out (an orphan of a job that made a session of its own).
        """
        newest: Process | None = None
        for pid in unknown:
            found = seen(pid)
            if found is None or found.session != pid:
                continue
            number, again, state_file = self._mark(attempt).lines()
            entries = environment_of(pid)
            if state_file in entries and not (number in entries and again in entries):
                continue
            if newest is None or found.ticks >= newest.ticks:
                newest = Process(pid, found.ticks)
        return newest

    def _look_at_zombies(self) -> None:
        """Adopted leaders that ended: their own keeper writes the record before it reaps them."""
        now = time.monotonic()
        waiting = []
        for zombie in self._zombies:
            if zombie.due > now:
                waiting.append(zombie)
                continue
            attempt = zombie.attempt
            found = record.read(attempt.path)
            still = attempt.process is not None and stands(attempt.process)
            if found.kind is not Record.ENDED and not still:
                found = record.read(attempt.path)  # written between the two looks
            if found.kind is Record.ENDED:
                left = tuple(members(self._mark(attempt), attempt.process))
                code, number = (found.code, None) if found.how == "exit" else (None, found.code)
                self._facts.append(
                    Ended(attempt.job, attempt.attempt, code, number, found.ended_at or time.time(), left)
                )
            elif still and attempt.process is not None and now - zombie.since > ZOMBIE_PATIENCE_S:
                status = zombie_status(attempt.process)  # its keeper is stopped or stuck: the kernel still knows
                if status is None:
                    zombie.due = now + zombie.wait
                    waiting.append(zombie)
                    continue
                ended = os.waitstatus_to_exitcode(status)
                self._ended(attempt, "exit" if ended >= 0 else "signal", abs(ended), time.time())
            elif not still:
                left = tuple(members(self._mark(attempt), attempt.process))
                self._facts.append(Lost(attempt.job, attempt.attempt, why_lost(found.kind, True), time.time(), left))
            else:
                zombie.wait = min(0.5, zombie.wait * 2)
                zombie.due = now + zombie.wait
                waiting.append(zombie)
        self._zombies = waiting

    # -- after a restart ----------------------------------------------------------------------------------

    def adopt(self, job: Job) -> list[Fact]:
        """Settle an attempt found in the store; facts, after which it is watched if it still lives.

        An attempt that this very runner has in hand is left as it is.
        """
        key = job.attempt_key
        if (
            key in self._sent
            or key in self._running
            or any(a.path == self.path_of(key) for a in self._adopted.values())
        ):
            attempt = self._running.get(key)
            if attempt is not None and attempt.process is not None:
                return [Started(job.id, job.attempt, attempt.process, job.started_at or time.time())]
            return []
        if any(zombie.attempt.path == self.path_of(key) for zombie in self._zombies):
            return []
        path = self.path_of(key)
        _, facts, process = settle(path, job, self.state_file, time.time())
        settled = any(not isinstance(fact, Started) for fact in facts)
        if not settled and process is not None:
            attempt = _Attempt(job.id, job.attempt, path, process)
            fd = open_pidfd(process)
            if fd < 0:
                self._zombies.append(_Zombie(attempt, time.monotonic()))
            else:
                self._adopted[fd] = attempt
                self._epoll.register(fd, select.EPOLLIN)
        return facts

    # -- ending -------------------------------------------------------------------------------------------

    def stop(self, job: Job, hard: bool) -> None:
        """SIGTERM or SIGKILL to the whole tree."""
        known = [p for held, _, p in self._leftovers.values() if held == job.attempt_key and p not in self._unsure]
        signal_all(Mark(job.id, job.attempt, self.state_file), job.process, known, hard)

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Report Gone(key) when none of these lives, nor any other of the attempt."""
        mark = Mark(job, attempt, self.state_file)
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
        self._epoll.unregister(fd)
        os.close(fd)
        if any(held == key for held, _, _ in self._leftovers.values()):
            return
        self._check_held(key, process)

    def _check_held(self, key: str, last: Process | None = None) -> None:
        if key not in self._held or any(held == key for held, _, _ in self._leftovers.values()):
            return
        mark = self._held[key]
        found = record.read(self.path_of(key))
        left = members(mark, found.process, [last] if last else [])
        if left:
            self.watch_leftovers(key, mark.job, mark.attempt, left)
        else:
            del self._held[key]
            self._facts.append(Gone(key))

    def close(self) -> None:
        """Let go of everything; the keeper drains, the jobs live on."""
        for fd in (*self._adopted, *self._leftovers):
            os.close(fd)
        if self._socket is not None:
            self._socket.close()
        self._epoll.close()


def _bare(attempt: _Attempt) -> Job:
    """The little that a record taken only to be given up has to say."""
    from scheduler.core.gpu import Need
    from scheduler.core.job import JobSpec

    return Job(id=attempt.job, spec=JobSpec(), need=Need(0, 0), attempt=attempt.attempt)
