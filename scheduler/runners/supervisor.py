"""Supervisor: parent of all jobs in direct mode. Starts them, records how they end, and outlives the daemon.

The daemon runs it as ``python -I -S supervisor.py FD BOOT FILES``. It imports nothing of the package, so that it
starts fast, stays small, and is not disturbed by an upgrade of the package. FD: number of the socket to the daemon
(SOCK_SEQPACKET); BOOT: boot id; FILES: the jobs' soft limit on open files. Each packet is a marshalled list of tuples:

    in   ("env", {name: value})                                   base environment of the following jobs
         ("start", key, path, record, log, cwd, umask, argv, env_file, changes, (errors, gzip, caller))
             key, path: of the attempt record; record: its first bytes; changes: {name: value, or None to remove it};
             log: empty for none; errors: path of a separate log for stderr, or empty; gzip: program that packs the
             log, or empty; caller: (pid, ticks, path of its socket) of the process that passes descriptors, or empty
         ("file", path, keys)
             path: file with a packet that is too large for the socket; keys: of the starts in this packet
    out  ("up", key, pid, ticks, at_ns)                           the job runs; sent up to UP_MS later
         ("no", key, stage, errno) · ("taken", key)               could not start · was claimed by another process
         ("end", key, pid, how, code, at_ns[, oom_kills])         the job ended; oom_kills: see `OomCounter`
         ("note", key, text)                                      something failed here; the daemon ignores it
"""

import _signal
import marshal
import os
import resource
import select
import sys
import time

PID_AT, PID_SIZE = 16, 160
END_AT, END_SIZE = 176, 96
PACKET = 1 << 20
UNSENT_MS = 50  # wait before a packet that could not be sent is sent again
UP_MS = 5  # longest wait of an "up" message for other messages: each packet wakes the daemon
NS_A_TICK = 10_000_000  # start times in /proc have this unit on every Linux (USER_HZ is 100)
SAFETY_MS = 10_000  # longest wait between two looks at the children without a SIGCHLD
MOST_PACKED = 60000
LARGEST = 8 << 20  # bytes of a stored environment; the kernel accepts at most 6 MiB, arguments included
ASKED_MS = 10_000  # longest wait for the descriptors of a caller that runs a job in the foreground
PACKED_MS = 5000  # longest wait for the end of a packed log: leftover processes may hold the pipe open
STAGES = ("program", "record", "log", "environment", "folder", "caller", "gzip")  # as in attempt_record.py


def checksum(text):
    total = 7
    for byte in text:
        total = (total * 31 + byte) % 1000003
    return total


def end_bytes(how, code, oom_kills=0):
    body = f"{how} {code} at {time.time_ns()}".encode()
    body += b" sum %d" % checksum(body)
    if oom_kills:
        body += b" oom_kills %d" % oom_kills
        body += b" sum %d" % checksum(body)
    return body.ljust(END_SIZE - 1) + b"\n"


def pid_bytes(pid, since, at, boot, oom_kills):
    """Return the PID field. ``oom_kills``: the counter (`OomCounter`) before the start; -1: unknown."""
    body = f"pid {pid} ticks {since} at {at} supervisor {os.getpid()} boot {boot}"
    if oom_kills >= 0:
        body += f" oom_kills {oom_kills}"
    return body.encode().ljust(PID_SIZE - 1) + b"\n"


def ticks(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            data = stream.read()
        return int(data[data.rindex(b")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def now_ticks():
    """Return the time since boot in clock ticks, the unit of start times in /proc."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // NS_A_TICK


def plain(path, flags):
    """Open a plain file (copy of `plain` in `system/safe_open.py`). A FIFO at this path does not block the caller."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if os.fstat(fd).st_mode & 0o170000 != 0o100000:
        os.close(fd)
        raise OSError(22, "not a regular file")
    return fd


def open_own(path, text):
    """Open the record at ``path``. Return -1 if the file cannot be opened or its PID field is not ``text``.

    A different PID field shows that the file is the record of another attempt.
    """
    try:
        fd = plain(path, os.O_RDWR)
    except OSError:
        return -1
    try:
        own = os.pread(fd, PID_SIZE, PID_AT) == text
    except OSError:
        own = False
    if not own:
        os.close(fd)
        return -1
    return fd


def environment(base, env_file, changes):
    """Return the environment of a job.

    It consists of the variables in the file ``env_file``, or, if ``env_file`` is empty, of the variables in ``base``.
    ``changes`` replaces or adds variables; the value None removes a variable.
    """
    made = base
    if env_file:
        with open(env_file, "rb", opener=plain) as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise OSError(7, "too large")
        made = {}
        for item in data.split(b"\0"):
            name, equals, value = item.partition(b"=")
            if equals:
                made[os.fsdecode(name)] = os.fsdecode(value)
    made = dict(made)
    for name, value in changes.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


class OomCounter:
    """The kernel's counter of processes that it ended in this process's memory cgroup because memory ran out.

    It counts kills at the limit of the cgroup and kills because the memory of the machine ran out. The jobs run in the
    same cgroup. ``cgroups``: where the hierarchies are mounted; ``own``: the file with the paths of the own cgroups.
    """

    def __init__(self, cgroups: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> None:
        self.cgroups, self.own = cgroups, own
        self.fd = self.open()

    def open(self):
        """Open the file with the counter and return its descriptor; -1 if there is none."""
        for path in self.paths():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            if count_in(fd) >= 0:
                return fd
            os.close(fd)
        return -1

    def paths(self):
        """Return the paths at which the file with the counter may be, the most exact one first.

        With v1 beside v2 (hybrid), only one of them has the memory controller. In a container, the path of the cgroup
        may be that outside; the mount's root is then the container's cgroup.
        """
        try:
            with open(self.own, "rb") as stream:
                lines = [line.rstrip(b"\n").split(b":", 2) for line in stream]
        except OSError:
            return []
        found = []
        for line in lines:
            if len(line) < 3:
                continue
            number, controllers, inside = os.fsdecode(line[0]), line[1].split(b","), os.fsdecode(line[2])
            folders = ("", "/") if inside.startswith("/..") else (inside, "/")
            if b"memory" in controllers:
                found += [f"{self.cgroups}/memory{folder}/memory.oom_control" for folder in folders]
            elif number == "0":
                mounts = (self.cgroups, f"{self.cgroups}/unified")
                found += [f"{mount}{folder}/memory.events" for folder in folders for mount in mounts]
        return found

    def read(self) -> int:
        """Return the counter; -1 if it cannot be read. Takes about 1 microsecond."""
        count = count_in(self.fd)
        if count < 0 and self.fd >= 0:  # the cgroup was removed after this process had been moved to another one
            self.close()
            self.fd = self.open()
            return -1  # the counter of another cgroup
        return count

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def since(self, before: int) -> int:
        """Return by how much the counter is higher than ``before``; 0 if it cannot be read, now or then."""
        return max(0, self.read() - before) if before >= 0 else 0


def count_in(fd):
    """Return the field oom_kill of a file memory.events (v2) or memory.oom_control (v1); -1 if it cannot be read."""
    try:
        data = b"\n" + os.pread(fd, 1024, 0)
        return int(data[data.index(b"\noom_kill ") + 10 :].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return -1


class Supervisor:
    def __init__(self, fd, boot):
        self.fd = fd
        self.boot = boot
        self.base = dict(os.environ)
        self.alone = False
        self.jobs = {}  # pid: (key, path of the record, bytes of its PID field, `OomCounter` before the start)
        self.oom = OomCounter()
        self.asked = {}  # descriptor of a caller's socket: (socket, start message, monotonic time limit)
        self.packers = {}  # pid of a gzip process: pid of its job
        self.held = {}  # pid of an ended job whose log is still being packed: (end message, monotonic time limit)
        self.out = []
        self.unsent = False  # the last packet could not be sent for lack of memory
        self.blocked = False  # the last packet could not be sent because the socket was full
        self.up_at = 0.0  # monotonic time at which the first message in `out` was found to be an "up" message
        self.umask = os.umask(0o077)
        os.umask(self.umask)
        self.devnull = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.crash, passes, how = (*os.environ.get("GPUJOB_CRASH_AT", "").split(":"), "", "")[:3]
        self.passes, self.crash_by = int(passes or 1), _signal.SIGSTOP if how else _signal.SIGKILL
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)  # a job that held it would hide the supervisor's death from the daemon
        self.wakeup = read
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGPIPE):
            _signal.signal(number, _signal.SIG_IGN)  # the supervisor ends after its last job
        self.defaults = [n for n in range(1, 32) if n not in (_signal.SIGKILL, _signal.SIGSTOP)]

    def crash_point(self, name):
        self.passes -= self.crash == name
        if self.crash == name and self.passes <= 0:
            os.kill(os.getpid(), self.crash_by)

    def run(self):
        poll = self.poll = select.poll()
        poll.register(self.wakeup, select.POLLIN)
        poll.register(self.fd, select.POLLIN)
        while True:
            self.reap()
            self.let_go()
            self.give_up_asking()
            if self.alone:
                self.out.clear()  # nobody reads the messages
                self.up_at = 0.0
            else:
                self.send(poll)
            if self.alone and not self.jobs and not self.asked:
                return
            if self.up_at:
                limit = UP_MS
            elif self.unsent or self.held or self.asked:
                limit = UNSENT_MS
            else:
                limit = SAFETY_MS if self.jobs else None
            for fd, _ in poll.poll(limit):
                if fd == self.wakeup:
                    try:
                        os.read(self.wakeup, 4096)
                    except BlockingIOError:
                        pass  # the pipe is empty already
                elif fd in self.asked:
                    self.start_with_callers_streams(fd)
                elif fd == self.fd and not self.alone:
                    self.receive()
            if self.alone and self.fd >= 0:
                poll.unregister(self.fd)
                os.close(self.fd)
                self.fd = -1

    def receive(self):
        """Handle all packets received so far, and notice the death of the daemon.

        After the daemon has died, a read gives end of file. Before that, a read may fail with ECONNRESET although there
        are still packets to read.
        """
        resets = 0
        while True:
            try:
                data = os.read(self.fd, PACKET)
            except BlockingIOError:
                return
            except OSError:
                resets += 1
                if resets > 3:
                    self.alone = True
                    return
                continue
            if not data:
                self.alone = True
                return
            self.handle(marshal.loads(data))

    def handle(self, packet):
        for message in packet:
            if message[0] == "start":
                if message[10][2]:
                    self.ask_caller(message[1:])
                else:
                    self.begin(message[1:], {}, 0)
            elif message[0] == "env":
                self.base = message[1]
            elif message[0] == "file":
                try:
                    with open(message[1], "rb", opener=plain) as stream:
                        data = stream.read()
                except OSError as error:
                    self.out += [("no", key, "packet", error.errno or 5) for key in message[2]]
                    continue
                try:
                    os.unlink(message[1])
                except OSError:
                    pass  # the next daemon removes it
                self.handle(marshal.loads(data))

    def begin(self, start, given, trouble):
        """Start a job, and close the descriptors in ``given``.

        ``given``: number (0-2) → descriptor that the caller of a foreground job has passed. ``trouble``: errno if the
        descriptors did not arrive, else 0.
        """
        try:
            self.start(*start[:9], *start[9], given, trouble)
        finally:
            for fd in given.values():
                os.close(fd)

    def start(self, key, path, record, log, cwd, umask, argv, env_file, changes, errors, gzip, _, given, trouble):
        self.crash_point("supervisor.before_claim")
        os.umask(0o077)
        try:
            fd = self.claim(path)
        except FileExistsError:
            self.out.append(("taken", key))
            return
        except OSError as error:
            self.out.append(("no", key, "record", error.errno or 5))
            return
        try:
            if os.write(fd, record) != len(record):
                raise OSError(28, "short write")
        except OSError as error:
            try:
                os.unlink(path)  # a claim that stayed would mean that the job may have run
            except OSError:
                self.write_end(fd, "never", 1000 * STAGES.index("record") + (error.errno or 5))
            os.close(fd)
            self.out.append(("no", key, "record", error.errno or 5))
            return
        opened = []
        log_fd = packer = 0
        stage = "log"
        try:
            self.crash_point("supervisor.claimed")
            log_fd = self.open_log(log) if log else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            opened.append(log_fd)
            files = [self.devnull, log_fd, log_fd]
            if errors:
                files[2] = self.open_log(errors)
                opened.append(files[2])
            stage = "caller"
            if trouble:
                raise OSError(trouble, "no descriptors")
            stage = "gzip"
            if gzip:
                packer, into = self.pack(gzip, log_fd)
                opened.append(into)
                files = [into if fd == log_fd else fd for fd in files]
                log_fd = into
            files = [given.get(number, fd) for number, fd in enumerate(files)]
            for one in opened:
                os.set_blocking(one, True)  # `plain` opens non-blocking; jobs expect blocking streams
            stage = "environment"
            made = environment(self.base, env_file, changes)
            stage = "folder"
            os.chdir(cwd)  # even if this is the current folder, which may have been removed and created again
            stage = "program"
            os.umask(self.umask if umask is None else umask)
            kills = self.oom.read()
            earliest = now_ticks()
            pid = os.posix_spawn(
                argv[0],
                argv,
                made,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(files)],
                setsid=True,
                setsigmask=(),
                setsigdef=self.defaults,
            )
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or 22
            self.write_end(fd, "never", 1000 * STAGES.index(stage) + number)
            if log_fd:
                self.say(log_fd, f"gpujob: cannot start {argv[0]}: {os.strerror(number)} ({stage})\n")
            os.close(fd)
            self.out.append(("no", key, stage, number))
            return
        finally:
            for one in opened:
                os.close(one)
        if packer:
            self.packers[packer] = pid
        at = time.time_ns()
        # The process began between two looks at the clock. If both were in the same tick, that tick is its start time;
        # reading it from /proc takes a quarter of the time of a start.
        since = earliest if now_ticks() == earliest else ticks(pid)
        self.crash_point("supervisor.spawned")
        text = pid_bytes(pid, since, at, self.boot, kills)
        try:
            os.pwrite(fd, text, PID_AT)
        except OSError:
            self.out.append(("note", key, "pid not written"))
            text = b" " * (PID_SIZE - 1) + b"\n"
        self.jobs[pid] = (key, path, text, kills)
        os.close(fd)
        self.crash_point("supervisor.pid_written")
        self.out.append(("up", key, pid, since, at))

    def claim(self, path):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            return os.open(path, flags, 0o600)

    def open_log(self, log):
        # O_EXCL: a file that exists already belongs to another scheduler, whatever its name.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            return plain(log, flags)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(log), 0o700, exist_ok=True)
            return plain(log, flags)

    def ask_caller(self, start):
        """Ask the process that runs this job in the foreground for its descriptors; `start_with_callers_streams` receives them."""
        import _socket

        pid, since, path = start[9][2]
        one = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
        folder = -1
        try:
            # Through a descriptor of its folder: a socket's path may have at most 107 bytes.
            folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            one.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            peer = one.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
            if int.from_bytes(peer[:4], sys.byteorder) != pid or ticks(pid) != since:
                raise OSError(3, "another process")
        except OSError as error:
            one.close()
            self.begin(start, {}, error.errno or 5)
            return
        finally:
            if folder >= 0:
                os.close(folder)
        self.asked[one.fileno()] = (one, start, time.monotonic() + ASKED_MS / 1000)
        self.poll.register(one.fileno(), select.POLLIN)

    def start_with_callers_streams(self, fd):
        """Receive the caller's descriptors and start the job.

        Each byte of the data is the number (0-2) of one descriptor.
        """
        import _socket

        one, start, _ = self.asked[fd]
        number, given, arrived = 0, {}, []
        try:
            data, beside, *_ = one.recvmsg(3, 64, _socket.MSG_CMSG_CLOEXEC)  # else every child inherits them
            arrived = [
                int.from_bytes(held[at : at + 4], sys.byteorder)
                for _, _, held in beside
                for at in range(0, len(held) - 3, 4)
            ]
            given = dict(zip(data, arrived, strict=False))
            number = 0 if data and len(arrived) == len(data) else 104
        except BlockingIOError:
            return
        except OSError as error:
            number = error.errno or 5
        self.forget_asked(fd)
        for extra in set(arrived) - set(given.values()):
            os.close(extra)
        self.begin(start, given, number)

    def forget_asked(self, fd):
        self.poll.unregister(fd)
        self.asked.pop(fd)[0].close()

    def give_up_asking(self):
        """Fail the attempts whose caller has not answered in time. Perhaps the caller is suspended (SIGSTOP)."""
        for fd, (_, start, until) in list(self.asked.items()):
            if time.monotonic() >= until:
                self.forget_asked(fd)
                self.begin(start, {}, 110)

    def pack(self, gzip, log_fd):
        """Start gzip, which writes the packed log. Return its pid and the descriptor of its input. Raises OSError."""
        out, into = os.pipe()
        try:
            packer = os.posix_spawn(
                gzip,
                ("gzip", "-c"),
                {
                    **self.base,
                    "GPUJOB_SUPERVISOR": os.environ.get("GPUJOB_SUPERVISOR", ""),
                },  # marks gzip as a process of no job
                file_actions=((os.POSIX_SPAWN_DUP2, out, 0), (os.POSIX_SPAWN_DUP2, log_fd, 1)),
                # No setsid: after the supervisor's death, the daemon could take a session leader for a job.
                setsigmask=(),
                setsigdef=self.defaults,
            )
        except OSError:
            os.close(into)
            raise
        finally:
            os.close(out)
        return packer, into

    def let_go(self):
        """Queue the end messages of jobs with a packed log.

        The message of a job is queued when its log is complete, or when the time limit for its log has passed.
        """
        for pid, (message, until) in list(self.held.items()):
            if pid not in self.packers.values() or time.monotonic() >= until:
                self.out.append(message)
                del self.held[pid]

    def say(self, fd, text):
        try:
            os.write(fd, text.encode())
        except OSError:
            self.out.append(("note", "", "log not written"))

    def write_end(self, fd, how, code, oom_kills=0):
        try:
            os.pwrite(fd, end_bytes(how, code, oom_kills), END_AT)
            if self.alone:
                os.fdatasync(fd)
        except OSError:
            self.out.append(("note", "", "end not written"))

    def reap(self):
        """Reap ended processes.

        The ending of a job is recorded before the job is reaped, so that a crash in between does not lose the ending.
        """
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            job = self.jobs.get(pid)
            if job is not None:
                key, path, text, kills = job
                how = "exit" if found.si_code == os.CLD_EXITED else "signal"
                code = found.si_status
                at = time.time_ns()
                kills = self.oom.since(kills) if code else 0
                self.crash_point("supervisor.before_record")
                fd = open_own(path, text)  # -1: the record was removed; a living daemon still gets the message
                if fd >= 0:
                    self.write_end(fd, how, code, kills)
                    os.close(fd)
                self.crash_point("supervisor.recorded")
                message = ("end", key, pid, how, code, at, *([kills] if kills else ()))
                if pid in self.packers.values():
                    self.held[pid] = (message, time.monotonic() + PACKED_MS / 1000)
                else:
                    self.out.append(message)
                del self.jobs[pid]
            self.packers.pop(pid, None)
            os.waitpid(pid, 0)

    def may_wait(self):
        """Return whether the messages in `out` need not be sent yet: they are few "up" messages younger than `UP_MS`.

        Many jobs end at once. The daemon then gets the "up" and the "end" message of such a job in one packet. Messages
        that could not be sent before do not wait again.
        """
        now = time.monotonic()
        late = self.blocked or self.unsent
        waits = not late and 0 < len(self.out) < 200 and all(message[0] == "up" for message in self.out)
        if waits and not self.up_at:
            self.up_at = now
        elif not waits or now >= self.up_at + UP_MS / 1000:
            waits, self.up_at = False, 0.0
        return waits

    def send(self, poll):
        if self.may_wait():
            return
        self.unsent = self.blocked = False
        while self.out:
            packet = self.out[:200]
            try:
                sent = os.write(self.fd, marshal.dumps(packet))
            except BlockingIOError:
                self.blocked = True
                poll.modify(self.fd, select.POLLIN | select.POLLOUT)
                return
            except ConnectionError:
                # The daemon is gone. Packets that it sent before are still read, at POLLIN.
                self.out.clear()
                return
            except OSError:
                sent = 0  # the kernel has no memory for it just now
            if not sent:  # a packet is sent completely or not at all
                self.unsent = True
                break
            del self.out[:200]
        poll.modify(self.fd, select.POLLIN)


def close_inherited(keep):
    """Close all inherited descriptors above 2 except ``keep``, so that no job inherits them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing, closed already


if __name__ == "__main__":
    close_inherited(int(sys.argv[1]))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), hard))
    Supervisor(int(sys.argv[1]), sys.argv[2]).run()
