"""Parent of all direct jobs: starts what it is told, writes each ending into its record, outlives the daemon.

Run as ``python -I -S supervisor.py FD BOOT FILES``: a small process that imports nothing of ours, so that it starts fast, stays
small and runs on unharmed while the program around it is upgraded. FD is a SOCK_SEQPACKET socket, FILES
the soft limit on open files that the jobs get; packets are marshalled lists of tuples.

    in   ("env", {name: value})                                   base environment of the jobs to come
         ("start", key, path, record, log, cwd, umask, argv, env_file, changes, (errors, gzip, caller))
             changes: {name: value or None}; log: empty for none; errors: the log of stderr, if it is kept apart; gzip: the
             program that packs the log; caller: () or (pid, ticks, path of a socket) of who gives the job descriptors of its own
         ("file", path)                                           a packet too large for the socket, as a file
    out  ("up", key, pid, ticks, at_ns) · ("no", key, stage, errno) · ("taken", key)
         ("end", key, pid, how, code, at_ns)
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
UNSENT_MS = 50  # until a packet that could not be sent is tried again
SAFETY_MS = 10_000  # until the children are looked at though no signal came
MOST_PACKED = 60000
LARGEST = 8 << 20  # of a stored environment: the kernel takes no more than 6 MiB with the words of a command
ASKED_MS = 10_000  # so long whoever waits for a job in the foreground may take to give it its descriptors
PACKED_MS = 5000  # so long an ending waits for the rest of its packed log: what outlives a job may hold it open
STAGES = ("program", "record", "log", "environment", "folder", "caller", "gzip")  # as in attempt_record.py


def checksum(text):
    total = 7
    for byte in text:
        total = (total * 31 + byte) % 1000003
    return total


def end_bytes(how, code):
    body = f"{how} {code} at {time.time_ns()}".encode()
    return (body + b" sum %d" % checksum(body)).ljust(END_SIZE - 1) + b"\n"


def ticks(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            data = stream.read()
        return int(data[data.rindex(b")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def plain(path, flags):
    """As in system/safe_open.py: what a job has put in the place of a file must not hold up the others."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if os.fstat(fd).st_mode & 0o170000 != 0o100000:
        os.close(fd)
        raise OSError(22, "not a plain file")
    return fd


def open_own(path, text):
    """The record at ``path``, if ``text`` stands in its PID field; -1 if not: with the folder made anew it may be another's."""
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
    """The whole environment of a job: the base one, or the file's; ``changes`` laid over it, None takes away."""
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


class Supervisor:
    def __init__(self, fd, boot):
        self.fd = fd
        self.boot = boot
        self.base = dict(os.environ)
        self.alone = False
        self.jobs = {}  # pid: (key, path, what stands in its record's PID field)
        self.asked = {}  # descriptor: its socket, what is to be started, and until when an answer is waited for
        self.packers = {}  # pid of what packs a log: pid of its job
        self.held = {}  # pid of a job that has ended: its ending, told when its log is whole; and until when it is held
        self.out = []
        self.unsent = False  # the last packet could not be sent, but the daemon is there
        self.umask = os.umask(0o077)
        os.umask(self.umask)
        self.devnull = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.crash, passes, how = (*os.environ.get("GPUJOB_CRASH_AT", "").split(":"), "", "")[:3]
        self.passes, self.crash_by = int(passes or 1), _signal.SIGSTOP if how else _signal.SIGKILL
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)  # a job that held it would keep our death from the daemon
        self.wakeup = read
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGPIPE):
            _signal.signal(number, _signal.SIG_IGN)  # it ends with its last job, not before
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
            if not self.alone:
                self.send(poll)
            if self.alone and not self.jobs and not self.asked:
                return
            soon = self.unsent or self.held or self.asked
            for fd, _ in poll.poll(UNSENT_MS if soon else SAFETY_MS if self.jobs else None):
                if fd == self.wakeup:
                    try:
                        os.read(self.wakeup, 4096)
                    except BlockingIOError:
                        pass  # another wake-up took the bytes
                elif fd in self.asked:
                    self.told_by_caller(fd)
                elif fd == self.fd and not self.alone:
                    self.receive()
            if self.alone and self.fd >= 0:
                poll.unregister(self.fd)
                os.close(self.fd)
                self.fd = -1

    def receive(self):
        """Read all packets that are there. A dead daemon is seen as an end, or first as ECONNRESET with packets left."""
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
                    os.unlink(message[1])
                except OSError as error:
                    self.out.append(("note", "", f"packet not read: {error}"))
                else:
                    self.handle(marshal.loads(data))

    def begin(self, start, given, trouble):
        """Start a job: ``given`` are descriptors that it takes in place of ours, ``trouble`` an errno instead of these."""
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
                os.unlink(path)  # nobody's again: left claimed, it would look as if it might have run
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
                os.set_blocking(one, True)  # the job knows nothing of how it was opened
            stage = "environment"
            made = environment(self.base, env_file, changes)
            stage = "folder"
            os.chdir(cwd)  # also where we are already: it may have been removed and made anew
            stage = "program"
            os.umask(self.umask if umask is None else umask)
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
        self.crash_point("supervisor.spawned")
        since = ticks(pid)
        text = (
            f"pid {pid} ticks {since} at {at} supervisor {os.getpid()} boot {self.boot}".encode().ljust(PID_SIZE - 1)
            + b"\n"
        )
        try:
            os.pwrite(fd, text, PID_AT)
        except OSError:
            self.out.append(("note", key, "pid not written"))
            text = b" " * (PID_SIZE - 1) + b"\n"
        self.jobs[pid] = (key, path, text)
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
        # O_EXCL: one that stands there is another scheduler's, whatever its name.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            return plain(log, flags)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(log), 0o700, exist_ok=True)
            return plain(log, flags)

    def ask_caller(self, start):
        """Ask whoever waits for this job in the foreground for its descriptors; `begin` goes on when they are here."""
        import _socket

        pid, since, path = start[9][2]
        one = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
        folder = -1
        try:
            # By way of its folder's descriptor: a socket's path must not be longer than 107 bytes.
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

    def told_by_caller(self, fd):
        """Which of 0, 1 and 2 it gives, a byte each, and the descriptors."""
        import _socket

        one, start, _ = self.asked[fd]
        number, given, arrived = 0, {}, []
        try:
            data, beside, *_ = one.recvmsg(3, 64, _socket.MSG_CMSG_CLOEXEC)  # else every child of ours gets them
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
        """Those that do not answer: stopped, perhaps."""
        for fd, (_, start, until) in list(self.asked.items()):
            if time.monotonic() >= until:
                self.forget_asked(fd)
                self.begin(start, {}, 110)

    def pack(self, gzip, log_fd):
        """Pid of what packs into the log, and where to write."""
        out, into = os.pipe()
        try:
            packer = os.posix_spawn(
                gzip,
                ("gzip", "-c"),
                {
                    **self.base,
                    "GPUJOB_SUPERVISOR": os.environ.get("GPUJOB_SUPERVISOR", ""),
                },  # no job's, should we be killed
                file_actions=((os.POSIX_SPAWN_DUP2, out, 0), (os.POSIX_SPAWN_DUP2, log_fd, 1)),
                # No session of its own: should we be killed, one that leads a session is taken for a job.
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
        """Tell the endings whose packed logs are whole, or have been waited for long enough."""
        for pid, (message, until) in list(self.held.items()):
            if pid not in self.packers.values() or time.monotonic() >= until:
                self.out.append(message)
                del self.held[pid]

    def say(self, fd, text):
        try:
            os.write(fd, text.encode())
        except OSError:
            self.out.append(("note", "", "log not written"))

    def write_end(self, fd, how, code):
        try:
            os.pwrite(fd, end_bytes(how, code), END_AT)
            if self.alone:
                os.fdatasync(fd)
        except OSError:
            self.out.append(("note", "", "end not written"))

    def reap(self):
        """Write each ending down first, take it from the kernel after: killed in between, it can still be learned."""
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
                key, path, text = job
                how = "exit" if found.si_code == os.CLD_EXITED else "signal"
                code = found.si_status
                at = time.time_ns()
                self.crash_point("supervisor.before_record")
                fd = open_own(path, text)  # -1: it was removed; the daemon, if there is one, still hears of the ending
                if fd >= 0:
                    self.write_end(fd, how, code)
                    os.close(fd)
                self.crash_point("supervisor.recorded")
                message = ("end", key, pid, how, code, at)
                if pid in self.packers.values():
                    self.held[pid] = (message, time.monotonic() + PACKED_MS / 1000)
                else:
                    self.out.append(message)
                del self.jobs[pid]
            self.packers.pop(pid, None)
            os.waitpid(pid, 0)

    def send(self, poll):
        self.unsent = False
        while self.out:
            packet = self.out[:200]
            try:
                sent = os.write(self.fd, marshal.dumps(packet))
            except BlockingIOError:
                poll.modify(self.fd, select.POLLIN | select.POLLOUT)
                return
            except ConnectionError:
                # The daemon is gone; what it sent before may still wait to be read, and is read at POLLIN.
                self.out.clear()
                return
            except OSError:
                sent = 0  # no memory for it at the moment
            if not sent:  # packets go whole or not at all
                self.unsent = True
                break
            del self.out[:200]
        poll.modify(self.fd, select.POLLIN)


def close_inherited(keep):
    """Nothing that somebody left open for the daemon may reach a job."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:
                continue  # the listing's own descriptor, closed by now


if __name__ == "__main__":
    close_inherited(int(sys.argv[1]))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), hard))
    Supervisor(int(sys.argv[1]), sys.argv[2]).run()
