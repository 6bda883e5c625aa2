"""Shim: parent of one job in a screen session. Claims the attempt, starts the job, and records how it ended.

The program `screen` runs the shim as ``python -I -S shim.py``. GPUJOB_LAUNCH names a private file that holds a
marshalled dict: ``record`` (path of the attempt record), ``data`` (the record's first bytes), ``boot`` (boot id),
``argv``, ``cwd``, ``umask``, ``base`` (environment), ``env_file``, ``changes`` (name → value, or None to remove it),
``files`` (soft limit on open files), ``crash`` (crash point for tests). The only module of the package that the shim
imports is `supervisor.py`, when the shim starts. So an upgrade of the package does not disturb a running shim.
"""

import errno
import marshal
import os
import resource
import signal
import sys
import termios
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import supervisor

END_AT, END_SIZE = supervisor.END_AT, supervisor.END_SIZE
PID_AT, PID_SIZE = supervisor.PID_AT, supervisor.PID_SIZE
BY_SIGNAL = 1000  # as in attempt_record.py
FROM_SCREEN = ("TERM", "STY", "WINDOW")
NOT_FROM_OUTSIDE = ("COLUMNS", "LINES", "TERMCAP")
LINES = 23  # of the window: a terminal has at least 24 lines, and screen's status line takes one
RESIZE = b"\033[8;%d;80t" % LINES
RESIZED_S, LOGGED_S = 0.1, 2.0
KEYBOARD_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class Shim:
    def __init__(self, launch):
        self.launch = launch
        self.server = os.getppid()
        self.hung_up = False
        self.job = 0
        self.fd = -1

    def crash_point(self, name):
        wanted, _, how = self.launch["crash"].partition(":")
        if wanted == name and how:  # wait instead of a stop: screen would continue a stopped shim
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCONT,))
            signal.sigwait((signal.SIGCONT,))
        elif wanted == name:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self):
        """Run the job to its end. Return the exit code of the shim, which no program uses."""
        self.set_signals()
        self.crash_point("shim.before_claim")
        try:
            self.claim(self.launch["record"])
        except FileExistsError:
            return 0  # the attempt was given up: it must not run
        except OSError as error:
            self.say(f"gpujob: cannot write the attempt record: {error.strerror}")
            return 1
        self.crash_point("shim.claimed")
        self.oom = supervisor.OomCounter()
        self.oom_kills = self.oom.read()
        pid = self.start()
        if not pid:
            return 1
        self.job = pid
        if self.hung_up:
            self.hang_up_job()
        at = time.time_ns()
        self.crash_point("shim.spawned")
        ticks = supervisor.ticks(pid)
        text = supervisor.pid_bytes(pid, ticks, at, self.launch["boot"], self.oom_kills)
        try:
            os.pwrite(self.fd, text, PID_AT)
        except OSError as error:
            self.say(f"gpujob: cannot write the attempt record: {error.strerror}")
            text = b" " * (PID_SIZE - 1) + b"\n"
        os.close(self.fd)
        self.crash_point("shim.pid_written")
        self.wait(pid, text)
        return 0

    def terminal_closed(self):
        """Return whether the terminal of the job was closed while the job ran."""
        return self.hung_up or os.getppid() != self.server

    def set_signals(self):
        # The shim ends after its job, not when a user types Ctrl-C or closes the terminal.
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, *KEYBOARD_STOPS):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, self.on_hangup)

    def claim(self, path):
        """Claim the attempt by creating its record.

        Raises FileExistsError if the attempt is claimed already, OSError if the record cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self.fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            self.fd = os.open(path, flags, 0o600)
        try:
            os.fchmod(self.fd, 0o600)  # the umask may have removed permission bits
            if os.write(self.fd, self.launch["data"]) != len(self.launch["data"]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.unlink(path)
            raise

    def on_hangup(self, *_):
        told, self.hung_up = self.hung_up, True
        if not told:
            self.hang_up_job()

    def hang_up_job(self):
        """Send SIGHUP and SIGCONT to the job's process group, as a shell does.

        The kernel and the program `screen` send SIGHUP only to the shim.
        """
        if self.job:
            for number in (signal.SIGHUP, signal.SIGCONT):
                try:
                    os.killpg(self.job, number)
                except OSError:
                    return  # no process of the group is left

    def start(self):
        """Start the job as the foreground process group of the terminal. Return its pid, or 0 if the start failed."""
        stage = "environment"
        try:
            environment = supervisor.environment(self.launch["base"], self.launch["env_file"], self.launch["changes"])
            for name in NOT_FROM_OUTSIDE:
                environment.pop(name, None)
            environment.update((name, os.environ[name]) for name in FROM_SCREEN if name in os.environ)
            stage = "folder"
            os.chdir(self.launch["cwd"])
            self.no_traps()
            self.leave_a_line()
            stage = "program"
            return self.fork(environment)
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            self.say(f"gpujob: cannot start {self.launch['argv'][0]}: {os.strerror(number)} ({stage})")
            self.write_end(self.fd, "never", 1000 * supervisor.STAGES.index(stage) + number)
            os.close(self.fd)
            return 0

    def no_traps(self):
        """Configure the terminal: do not expand tabs, and give Ctrl-S and Ctrl-Z no effect.

        These two keys would halt the job if a user typed them by mistake.
        """
        try:
            settings = termios.tcgetattr(0)
            settings[0] &= ~termios.IXON
            settings[1] &= ~termios.TABDLY
            settings[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(0, termios.TCSANOW, settings)
            os.fchmod(0, 0o600)  # like `mesg n`: messages of other users would get into the job's log
        except (termios.error, OSError) as error:
            self.say(f"gpujob: cannot configure the terminal: {error}")

    def leave_a_line(self):
        """Resize the window to 23 lines before the job prints anything.

        A terminal of 24 lines shows 23 lines of the window, and the status line of the program `screen`. If the window
        had 24 lines, `screen` would hide the top line of the window, which is the job's first line. `screen` resizes a
        detached window only if an escape sequence in the window's output requests this. So this method prints such a
        sequence, and then removes the sequence from the log.
        """
        log = os.path.join(os.environ.get("GPUJOB_LOG_DIR", ""), os.environ.get("GPUJOB_LOG", ""))
        try:
            fd = os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            before = os.fstat(fd).st_size
            os.write(1, RESIZE)
            begun = time.monotonic()
            while os.get_terminal_size(1).lines != LINES and time.monotonic() < begun + RESIZED_S:
                time.sleep(0.001)
            # In the log the sequence would resize the terminal of a user who prints the log.
            while os.fstat(fd).st_size < before + len(RESIZE) and time.monotonic() < begun + LOGGED_S:
                time.sleep(0.001)
            if os.pread(fd, len(RESIZE) + 1, before) == RESIZE:
                os.ftruncate(fd, before)
        except OSError as error:
            self.say(f"gpujob: cannot resize the window: {error.strerror}")
        finally:
            os.close(fd)

    def in_child(self):
        pass

    def fork(self, environment):
        argv = self.launch["argv"]
        read, write = os.pipe()  # both ends close at the exec; a read without data means that it succeeded
        pid = os.fork()
        if pid == 0:
            try:
                self.in_child()
                os.setpgid(0, 0)
                if os.isatty(0):
                    os.tcsetpgrp(0, os.getpid())
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (self.launch["files"], hard))
                old = os.umask(0o077)
                os.umask(old if self.launch["umask"] is None else self.launch["umask"])
                for number in range(1, signal.NSIG):
                    if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not None:
                        signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.execve(argv[0], argv, environment)
            except (OSError, ValueError) as error:
                os.write(write, str(getattr(error, "errno", None) or errno.EINVAL).encode())
            finally:
                os._exit(127)
        os.close(write)
        told = os.read(read, 16)
        os.close(read)
        if told:
            os.waitpid(pid, 0)
            raise OSError(int(told), os.strerror(int(told)))
        return pid

    def wait(self, pid, text):
        """Wait for the end of the job, record the ending, and reap the job. Return the exit code as a shell gives it.

        ``text``: contents of the PID field of this attempt. If the record has another PID field, it is the record of
        another attempt and is not changed.
        """
        while True:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            if found.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
                break
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)  # consume the stop: waitid would repeat it
            if found.si_code == os.CLD_STOPPED and found.si_status in KEYBOARD_STOPS:
                self.say(
                    "gpujob: the job was stopped from the keyboard and is continued: "
                    "a stopped job would hold its GPU without using it"
                )
                os.killpg(pid, signal.SIGCONT)
        exited = found.si_code == os.CLD_EXITED
        code = found.si_status
        self.crash_point("shim.before_record")
        if self.terminal_closed():
            how, number = "hangup", code if exited else BY_SIGNAL + code
        else:
            how, number = "exit" if exited else "signal", code
        fd = supervisor.open_own(self.launch["record"], text)
        if fd < 0:
            self.say("gpujob: cannot record how the job ended: the attempt record was removed")
        else:
            self.write_end(fd, how, number, self.oom.since(self.oom_kills) if number else 0)
            os.close(fd)
        self.crash_point("shim.recorded")
        self.job = 0  # once the job is reaped, its pid may be reused
        os.waitpid(pid, 0)
        return code if exited else 128 + code

    def write_end(self, fd, how, code, oom_kills=0):
        try:
            os.pwrite(fd, supervisor.end_bytes(how, code, oom_kills), END_AT)
            os.fdatasync(fd)
        except OSError as error:
            self.say(f"gpujob: cannot record how the job ended: {error.strerror}")

    def say(self, text):
        """Print a line on the terminal, and thereby into the job's log."""
        try:
            os.write(1, text.encode(errors="replace") + b"\n")
        except OSError:
            self.hung_up = True  # the terminal is gone


def main():
    path = os.environ["GPUJOB_LAUNCH"]
    try:
        with open(path, "rb", opener=supervisor.plain) as stream:
            launch = marshal.loads(stream.read())
        os.unlink(path)
    except FileNotFoundError:
        return 0  # the scheduler gave the attempt up and removed the file
    return Shim(launch).run()


if __name__ == "__main__":
    sys.exit(main())
