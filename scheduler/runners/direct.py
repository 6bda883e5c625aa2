"""Runner of direct mode: all jobs are children of one supervisor.

If the supervisor dies, the jobs become children of the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.core.backoff import Backoff
from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Observation, Started, Unclaimed
from scheduler.core.recovery import Record
from scheduler.runners import attempt_record
from scheduler.runners import supervisor as supervisor_file
from scheduler.runners.adoption import not_started, start_trouble
from scheduler.runners.local_base import LOOK_AGAIN_S, LocalRunner, WatchedAttempt
from scheduler.system.private_files import new_private
from scheduler.system.processes import JOB_NAMES, environment_of, own_children, seen
from scheduler.system.safe_open import plain

PACKET = 1 << 20
SHORT_LIFE_S = 1.0  # a supervisor that lived for less than this is replaced only after a back-off
SHORTEST_BREAK_S, LONGEST_BREAK_S = 0.05, 10.0
MOST_PACKED = 60_000  # bytes of starts in one packet; the default send buffer of a socket has 212,992 bytes
SUPERVISOR_FD = 3


class DirectRunner(LocalRunner):
    """Runner that starts all attempts through one supervisor; see `core.protocols.Runner` and docs/architecture.md.

    ``attempts``: folder of the attempt records; ``state_file``: its path is part of each job's mark; ``environ``: base
    environment of the jobs; ``errors``: file to which the supervisor's stderr is appended; ``descriptors``: the jobs'
    soft limit on open files (the daemon's own limit is higher); ``names``: environment variables of the jobs' marks
    (see `system.processes.Mark`). Raises OSError if the supervisor cannot be started.
    """

    name = "direct"

    def __init__(
        self,
        attempts: str,
        state_file: str,
        environ: Mapping[str, str],
        errors: str,
        descriptors: int = 1024,
        names: tuple[str, str, str] = JOB_NAMES,
    ) -> None:
        super().__init__(attempts, state_file, environ, names)
        self.errors = errors
        self._soft_limit = descriptors
        self._socket: socket.socket | None = None
        self._supervisor = 0
        self._supervisor_process: Process | None = None
        self._supervisor_since = 0.0
        self._supervisor_due = 0.0  # monotonic seconds: when to start the next supervisor, while none runs
        self._break = Backoff(SHORTEST_BREAK_S, LONGEST_BREAK_S)
        self._received: deque[tuple[Any, ...]] = deque()  # messages of the supervisor that are not handled yet
        self._death_unsettled = False  # the supervisor is dead, and not all of its attempts are settled yet
        self._no_supervisor = ""  # why no supervisor starts or stays alive; empty without such a problem
        self._outbox: list[bytes] = []
        self._starts: list[tuple[Any, ...]] = []
        self._sent: dict[str, WatchedAttempt] = {}
        # By key; the leaders are children of the supervisor, or of the daemon once their supervisor is dead.
        self._running: dict[str, WatchedAttempt] = {}
        self._inherited: dict[int, str] = {}
        self._spawn_supervisor()

    # -- the supervisor ---------------------------------------------------------------------------------------

    def _spawn_supervisor(self) -> None:
        """Start a supervisor. Queue the jobs' base environment as the first packet to this supervisor.

        Raises OSError if the supervisor cannot be started.
        """
        environment = self._packet([("env", self.environ)])
        argv = [
            sys.executable,
            "-I",
            "-S",
            supervisor_file.__file__,
            str(SUPERVISOR_FD),
            self.boot,
            str(self._soft_limit),
        ]
        with contextlib.ExitStack() as passing:
            # Opened here, not by posix_spawn, so that an OSError names the file.
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            passing.callback(os.close, nothing)
            errors = plain(self.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            passing.callback(os.close, errors)
            os.set_blocking(errors, True)  # `plain` opens non-blocking; the supervisor expects a blocking stderr
            os.fchmod(errors, 0o600)  # the umask may have removed permission bits
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            passing.callback(theirs.close)
            ours.setblocking(False)
            actions = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), SUPERVISOR_FD),
                (os.POSIX_SPAWN_DUP2, nothing, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, errors, 2),
            ]
            if theirs.fileno() == SUPERVISOR_FD:
                del actions[0]
            environ = {**os.environ, "GPUJOB_SUPERVISOR": self.state_file}
            try:
                self._supervisor = os.posix_spawn(sys.executable, argv, environ, file_actions=actions, setsid=True)
            except OSError:
                ours.close()
                raise
        self._socket = ours
        self._supervisor_since = time.monotonic()
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        self._outbox.insert(0, environment)

    def _restart_supervisor(self) -> None:
        """Start a new supervisor after the old one has died. Do nothing until the back-off has passed.

        Starts of jobs stay in the queue until a supervisor runs.
        """
        if time.monotonic() < self._supervisor_due:
            return
        try:
            self._spawn_supervisor()
        except OSError as error:
            self._pause()
            self._no_supervisor = f"cannot start the supervisor: {error.strerror} {error.filename or ''}".rstrip()

    def _pause(self) -> None:
        self._supervisor_due = time.monotonic() + self._break.next()

    @property
    def supervisor_pid(self) -> int:
        """Pid of this daemon's supervisor."""
        return self._supervisor

    def start(self, job: Job, launch: Launch) -> None:
        """Queue the start of an attempt; the next `flush` sends it."""
        path = self.path_of(launch.key)
        self._sent[launch.key] = WatchedAttempt(job.id, job.attempt, path, ours=True)
        data = attempt_record.blank(job, self.boot)
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
                (launch.streams.errors, self._program(launch.streams.gzip), launch.streams.caller),
            )
        )

    def _program(self, name: str) -> str:
        """Return the path of program ``name`` in the jobs' PATH; ``name`` itself if it is not found."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath)) or name if name else ""

    def flush(self) -> None:
        """Send the queued starts to the supervisor, several in one packet."""
        starts, self._starts = self._starts, []
        packed: list[tuple[Any, ...]] = []
        size = 0
        for start in starts:
            length = len(marshal.dumps(start))
            if size + length > MOST_PACKED and packed:
                self._pack(packed)
                packed, size = [], 0
            packed.append(start)
            size += length
        if packed:
            self._pack(packed)
        self._send()

    def _pack(self, starts: list[tuple[Any, ...]]) -> None:
        try:
            self._outbox.append(self._packet(starts))
        except OSError as error:  # a full disk: the supervisor never gets these starts
            for start in starts:
                attempt = self._sent.pop(str(start[1]))
                why = start_trouble(attempt.job, attempt.attempt, error.errno or errno.EIO, time.time(), "packet")
                self._facts.append(why)

    def _packet(self, messages: list[tuple[Any, ...]]) -> bytes:
        data = marshal.dumps(messages)
        return self._as_file(data) if len(data) > 2 * MOST_PACKED else data  # a very long command or environment

    def _as_file(self, data: bytes) -> bytes:
        """Write a packet to a file and return a short packet that names the file. Raises OSError.

        The supervisor reads the file and then removes it. The short packet also has the keys of the starts in the file.
        If the supervisor cannot read the file, it answers for each of these keys that the start failed.
        """
        path = os.path.join(os.path.dirname(self.attempts), f"packet-{os.getpid()}-{time.monotonic_ns()}")
        fd = new_private(path)
        try:
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
        except OSError:
            os.unlink(path)
            raise
        starts = [message[1] for message in marshal.loads(data) if message[0] == "start"]
        return marshal.dumps([("file", path, starts)])

    def _send(self) -> None:
        while self._outbox and self._socket is not None:
            try:
                self._socket.send(self._outbox[0])
            except (BlockingIOError, InterruptedError):
                return  # the next `look` sends it
            except OSError as error:
                if error.errno in (errno.EMSGSIZE, errno.ENOBUFS) and len(self._outbox[0]) > 4096:
                    try:
                        self._outbox[0] = self._as_file(self._outbox[0])
                    except OSError:
                        return  # the next `look` tries again
                    continue
                return  # the supervisor is dead; `look` notices that and settles the attempts sent to it
            del self._outbox[0]

    # -- looking ------------------------------------------------------------------------------------------

    def next_look(self) -> float | None:
        """Return the time (monotonic seconds) at which `look` must be called even if no descriptor is readable.

        Return None if `look` need not be called before a descriptor is readable.
        """
        due = self._due()
        if self._socket is None:
            due.append(self._supervisor_due)
        elif self._outbox:
            due.append(time.monotonic() + LOOK_AGAIN_S)
        return min(due, default=None)

    def look(self) -> list[Observation]:
        """Return all observations since the last call."""
        self._death_unsettled |= self._receive()
        self._look_at_descriptors()
        self._reap()
        if self._death_unsettled:
            self._supervisor_died()
        if self._socket is None:
            self._restart_supervisor()
        self._look_at_claims()
        self._look_at_zombies()
        self._send()
        return self._take_facts()

    def _servants(self) -> Iterable[int]:
        return (self._supervisor, *self._inherited)

    def _unreported(self) -> Iterable[WatchedAttempt]:
        return (*self._sent.values(), *self._running.values(), *self._adopted.values())

    def _receive(self) -> bool:
        """Read all packets from the supervisor; return True if the supervisor is dead.

        Raises OSError if a message cannot be handled, for example without a free descriptor. The next call handles it.
        """
        self._handle_received()
        if self._socket is None:
            return False
        resets = 0
        while True:
            try:
                data = self._socket.recv(PACKET)
            except BlockingIOError:
                return False
            except OSError:  # ECONNRESET: it died before it read all our packets; its last packets may still arrive
                resets += 1
                if resets > 3:
                    return True
                continue
            if not data:
                return True
            self._received.extend(marshal.loads(data))
            self._handle_received()

    def _handle_received(self) -> None:
        while self._received:
            self._messages(self._received[0])
            self._received.popleft()

    def _messages(self, message: tuple[Any, ...]) -> None:
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
            attempt = self._running.get(key)
            if attempt is not None:
                how, code, at, *kills = message[3:]
                oom_kills = int(str(kills[0])) if kills else 0
                self._ended(attempt, str(how), int(str(code)), int(str(at)) / 1e9, oom_kills=oom_kills)
                del self._running[key]
        elif kind == "no":
            attempt = self._sent.pop(key, None)
            if attempt is not None:
                number = int(str(message[3]))
                self._facts.append(start_trouble(attempt.job, attempt.attempt, number, time.time(), str(message[2])))
        elif kind == "taken":
            self._sent.pop(key, None)  # claimed before, for example by `stop`, which has already reported it

    def _reap(self) -> None:
        """Reap children of the daemon that ended: orphans of jobs, and leaders inherited from a dead supervisor."""
        for pid, exited, code in self._ended_children():
            key = self._inherited.pop(pid, None)
            if key is None and pid != self._supervisor and self._death_is_unsettled():
                return  # perhaps the leader of a job whose supervisor just died: `_supervisor_died` finds out
            if key is not None:
                self._end_of_child(self._running.pop(key), exited, code)
            else:
                self._orphan_ended(pid, exited, code)

    def _death_is_unsettled(self) -> bool:
        """Return True if the supervisor is dead and `_supervisor_died` has not handled its death yet."""
        if self._death_unsettled:
            return True
        found = seen(self._supervisor)
        return self._socket is not None and (found is None or not found.alive)

    def _supervisor_died(self) -> None:
        """Inherit the dead supervisor's running jobs, settle its other attempts, and start a new supervisor.

        Raises OSError if a record cannot be read or written. The next `look` then calls this method again, so an
        attempt is removed from ``_running`` or ``_sent`` only after it is settled.
        """
        if self._socket is not None:
            self._epoll.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._supervisor, 0)
        self._outbox.clear()
        now = time.time()
        children = set(own_children())
        for key, attempt in list(self._running.items()):
            if attempt.process is None or attempt.process.pid in self._inherited:
                continue
            if attempt.process.pid in children:
                self._inherited[attempt.process.pid] = key
            else:  # the supervisor reaped the leader, so the ending is in the record
                self._settle_from_record(attempt, now)
                del self._running[key]
        unknown = children - set(self._inherited) - {p.pid for _, _, p in self._leftovers.values()}
        named = {
            p.pid for attempt in self._sent.values() if (p := attempt_record.read(attempt.path).process) is not None
        }
        for key, attempt in list(self._sent.items()):
            self._settle_sent(key, attempt, unknown, unknown - named, now)
            del self._sent[key]
        self._death_unsettled = False
        if time.monotonic() - self._supervisor_since < SHORT_LIFE_S:
            again = self._break.tries > 0
            self._pause()
            if again:  # a single early death may be chance
                self._no_supervisor = f"the supervisor ends immediately after its start; see {self.errors}"
        else:
            self._break.reset()
            self._supervisor_due = 0.0
        self._restart_supervisor()
        self._reap()

    def _settle_sent(
        self, key: str, attempt: WatchedAttempt, unknown: set[int], nameless: set[int], now: float
    ) -> None:
        """Settle an attempt that was sent to the supervisor. The supervisor has died without an answer.

        ``unknown``: pids of the daemon's children that belong to no known attempt. ``nameless``: the pids in
        ``unknown`` that are in no attempt record.
        """
        found = attempt_record.read(attempt.path)
        if found.kind is Record.NONE:
            if not attempt_record.give_up(attempt.path, _bare(attempt), self.boot, time.time_ns()):
                found = attempt_record.read(attempt.path)
            else:
                self._facts.append(Unclaimed(attempt.job, attempt.attempt))
                return
        if found.kind is Record.NEVER_RAN:
            self._facts.append(not_started(attempt.job, attempt.attempt, found, now))
            return
        process = found.process
        if process is None and found.kind is Record.CLAIMED:
            # The supervisor starts jobs one after another, so at most one child is missing from the records.
            process = self._child_of_claim(attempt, nameless)
            if process is None:
                with contextlib.suppress(OSError):
                    attempt_record.write_end(attempt.path, "never", 0, time.time_ns(), sync=False)
                self._facts.append(Unclaimed(attempt.job, attempt.attempt))
                return
            with contextlib.suppress(OSError):
                attempt_record.write_pid(attempt.path, process, self.boot, time.time_ns(), 0)
        attempt.process = process
        if process is not None:
            self._facts.append(Started(attempt.job, attempt.attempt, process, found.started_at or now))
        if process is not None and process.pid in unknown:
            self._running[key] = attempt
            self._inherited[process.pid] = key
        else:
            self._settle_from_record(attempt, now)

    def _child_of_claim(self, attempt: WatchedAttempt, nameless: set[int]) -> Process | None:
        """Return the leader of a claimed attempt whose record has no pid; None if no child can be the leader.

        The result is the session leader in ``nameless`` that started last. A process with the mark of another attempt
        is skipped: it is an orphan that created a session. A process whose mark cannot be read is accepted, because the
        process may be a zombie, whose environment cannot be read.
        """
        newest: Process | None = None
        for pid in nameless:
            found = seen(pid)
            if found is None or found.session != pid or pid in self._strangers:
                continue
            number, again, state_file = self._mark(attempt).lines()
            entries = environment_of(pid)
            if state_file in entries and not (number in entries and again in entries):
                continue
            if newest is None or found.ticks >= newest.ticks:
                newest = Process(pid, found.ticks)
        return newest

    def _withdrawn(self, job: Job) -> bool:
        attempt = self._sent.get(job.attempt_key)
        if attempt is not None:
            with contextlib.suppress(OSError):  # a full disk: the job is stopped as soon as it has started
                if attempt_record.give_up(attempt.path, job, self.boot, time.time_ns()):
                    del self._sent[job.attempt_key]
                    self._facts.append(Unclaimed(attempt.job, attempt.attempt))
                    return True
        return False

    def supervisors(self) -> list[Process]:
        """Return the supervisor, if one runs."""
        if self._supervisor_process is None or self._supervisor_process.pid != self._supervisor:
            found = seen(self._supervisor) if self._supervisor else None
            self._supervisor_process = None if found is None else Process(found.pid, found.ticks)
        return [] if self._supervisor_process is None else [self._supervisor_process]

    def trouble(self) -> str:
        """Return why no job can start, and what to do about it; empty if jobs can start.

        No job can start if there is no supervisor, or if the supervisor is suspended by SIGSTOP. A suspended supervisor
        is not continued automatically, because somebody has sent SIGSTOP on purpose.
        """
        if self._socket is not None and time.monotonic() - self._supervisor_since > SHORT_LIFE_S:
            self._no_supervisor = ""
            self._break.reset()
        if self._no_supervisor:
            return f"no job can start: {self._no_supervisor}; the scheduler keeps trying"
        found = seen(self._supervisor)
        if found is None or found.state not in "Tt":
            return ""
        return (
            "no job can start, and the end of a job is not noticed: the supervisor is stopped; continue it with: "
            f"kill -CONT {self._supervisor}"
        )

    def close(self) -> None:
        """Close all descriptors; the jobs continue, and the supervisor ends after its last job."""
        if self._socket is not None:
            self._socket.close()
        super().close()


def _bare(attempt: WatchedAttempt) -> Job:
    """Return a job with only its id and attempt number, which suffice for the record of an attempt that is given up."""
    from scheduler.core.gpu import ResourceRequest
    from scheduler.core.job import JobSpec

    return Job(id=attempt.job, spec=JobSpec(), need=ResourceRequest(0, 0), attempt=attempt.attempt)
