"""The launcher of gpujobd: it keeps the rights of root. A fork of it stays root for each PAM session, to close it.

It starts the scheduler as the service user, starts an agent as each user who has jobs, sends signals, and reaps. It runs
as a program of its own (``python -I -S launcher.py SETTINGS``) and imports nothing of the package: root runs no other code
of gpujob, and reads no file of a user.

Requests come from the scheduler through a socket pair, one JSON object in each packet. The kernel adds the sender of each
packet (SO_PASSCRED); a packet of any other process than the scheduler is refused. Each request has exactly the keys and
types of `REQUESTS`. Each gets one answer, ``{"id": …, "pid": …, "ticks": …}`` or ``{"id": …, "error": TEXT}``. The end of
an agent is reported as ``{"ended": pid, "code": …}`` or ``{"ended": pid, "signal": …}``.

SETTINGS is a JSON object: ``user`` (the service user), ``folder`` (of the agents; it gets a folder for each user),
``least_uid`` (users below it, and the service user, have no agent), ``scheduler`` and ``agent`` (command lines; their
socket is descriptor 3), ``pam`` (name of the PAM service; empty: no PAM session).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections import deque
from typing import Any

FD = 3  # descriptor of the socket in the scheduler and in an agent
LONGEST = 4096  # bytes of a request
MOST_AGENTS, MOST_OF_A_USER = 4096, 3  # an agent that hangs in the kernel cannot be killed
MOST_WAITING = 1000  # answers and reports that the scheduler has not read; then no more requests are read
AGAIN_S, LONGEST_AGAIN_S = 1.0, 30.0  # between two starts of the scheduler
END_S = 10.0  # from SIGTERM to SIGKILL of the scheduler
SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP, signal.SIGCONT})
REQUESTS: dict[str, dict[str, int]] = {  # kind → key → largest value
    "agent": {"id": 1 << 53, "uid": (1 << 32) - 2},
    "signal": {"id": 1 << 53, "uid": (1 << 32) - 2, "pid": 1 << 22, "ticks": 1 << 62, "number": 64},
}
PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE = 36, 4
PAM_ESTABLISH_CRED, PAM_DELETE_CRED = 2, 4
SCM_CREDENTIALS = 2
CREDENTIALS = struct.Struct("iII")  # pid, user id, group id


class Refused(Exception):
    """A request that is not carried out, with the reason."""


def request_of(packet: bytes) -> dict[str, Any]:
    """Return the request in a packet. Raises Refused unless it has exactly the keys and types of its kind."""
    if len(packet) > LONGEST:
        raise Refused("the request is too long")
    try:
        found = json.loads(packet)
    except (ValueError, RecursionError):
        raise Refused("the request is not JSON") from None
    keys = REQUESTS.get(str(found.get("do"))) if isinstance(found, dict) else None
    if keys is None:
        raise Refused("the request is of no known kind")
    if set(found) != {"do", *keys}:
        raise Refused("the request has other keys")
    for key, most in keys.items():
        if type(found[key]) is not int or not 0 <= found[key] <= most:
            raise Refused(f"{key} is not a number from 0 to {most}")
    return found  # type: ignore[no-any-return]


def start_ticks(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot. Raises OSError if there is no such process."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        return int(stream.read().rpartition(b")")[2].split()[19])


def real_uid(pid: int) -> int:
    """Return the real user id of a process. Raises OSError if there is no such process."""
    with open(f"/proc/{pid}/status", "rb") as stream:
        for line in stream:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    raise ProcessLookupError(pid)


class Pam:
    """A PAM session of a user, opened and closed by a process of root. Raises OSError with the text of PAM."""

    def __init__(self, service: str, user: str) -> None:
        self.pam = ctypes.CDLL("libpam.so.0")
        self.pam.pam_strerror.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        talk = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *_: 19)  # PAM_CONV_ERR: nobody answers

        class Conversation(ctypes.Structure):
            _fields_ = (("talk", type(talk)), ("data", ctypes.c_void_p))

        self.kept = Conversation(talk, None)  # PAM calls it as long as the session lives
        begun = self.pam.pam_start(service.encode(), user.encode(), ctypes.byref(self.kept), ctypes.byref(self.handle))
        self._check("pam_start", begun)
        self._do("pam_acct_mgmt", 0)
        self._do("pam_setcred", PAM_ESTABLISH_CRED)
        self._do("pam_open_session", 0)

    def _do(self, call: str, flags: int) -> None:
        self._check(call, getattr(self.pam, call)(self.handle, flags))

    def _check(self, call: str, code: int) -> None:
        if code:
            text = self.pam.pam_strerror(self.handle, code) or b""
            raise OSError(code, f"{call}: {text.decode(errors='replace')}")

    def environment(self) -> dict[str, str]:
        """Return the variables that PAM sets for the session."""
        self.pam.pam_getenvlist.restype = ctypes.POINTER(ctypes.c_char_p)
        found: dict[str, str] = {}
        for entry in self.pam.pam_getenvlist(self.handle):
            if entry is None:
                return found
            name, _, value = os.fsdecode(entry).partition("=")
            found[name] = value
        return found

    def close(self) -> None:
        """End the session."""
        self.pam.pam_close_session(self.handle, 0)
        self.pam.pam_setcred(self.handle, PAM_DELETE_CRED)
        self.pam.pam_end(self.handle, 0)


class Launcher:
    """The launcher with its children. ``settings``: see the top of this file. Raises KeyError if there is no such user."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.user = pwd.getpwnam(settings["user"])
        self.scheduler = 0  # pid; 0: it does not run
        self.started = self.due = 0.0
        self.wait_s = AGAIN_S
        self.socket: socket.socket | None = None
        self.outbox: deque[tuple[bytes, int]] = deque()  # packet, descriptor to pass (-1: none)
        self.agents: dict[int, int] = {}  # pid → user id
        self.kill_at: float | None = None  # while the launcher is told to end: when the scheduler gets SIGKILL
        self.wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._told(number))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _told(self, number: int) -> None:
        if number != signal.SIGCHLD and self.kill_at is None:
            self.kill_at = time.monotonic() + END_S
            if self.scheduler:
                os.kill(self.scheduler, signal.SIGTERM)

    def run(self) -> None:
        """Run until SIGTERM. The agents and the jobs continue."""
        while self.kill_at is None or self.scheduler:
            now = time.monotonic()
            if not self.scheduler and self.kill_at is None and now >= self.due:
                self._start_scheduler()
            if self.kill_at is not None and self.scheduler and now >= self.kill_at:
                os.kill(self.scheduler, signal.SIGKILL)
            poll = select.poll()
            poll.register(self.wake, select.POLLIN)
            if self.socket is not None:
                reading = 0 if len(self.outbox) >= MOST_WAITING else select.POLLIN
                poll.register(self.socket, reading | (select.POLLOUT if self.outbox else 0))
            poll.poll(None if self.socket is not None and self.kill_at is None else 100)
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)
            self._reap()
            self._receive()
            self._send()

    def _receive(self) -> None:
        for _ in range(64):
            if self.socket is None or len(self.outbox) >= MOST_WAITING:
                return
            try:
                packet, ancillary, flags, _ = self.socket.recvmsg(LONGEST + 1, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            except OSError:
                packet, ancillary, flags = b"", [], 0
            if not packet and not ancillary:  # the scheduler has closed its end: it has ended, or will be ended
                self._drop_scheduler()
                return
            self._handle(b" " * (LONGEST + 1) if flags & socket.MSG_TRUNC else packet, ancillary)

    def _handle(self, packet: bytes, ancillary: list[Any]) -> None:
        senders = [CREDENTIALS.unpack(data) for _, kind, data in ancillary if kind == SCM_CREDENTIALS]
        number: object = None
        try:
            if [sender[:2] for sender in senders] != [(self.scheduler, self.user.pw_uid)]:
                raise Refused("it does not come from the scheduler")
            request = request_of(packet)
            number = request["id"]
            if request["do"] == "agent":
                self._start_agent(request["id"], request["uid"])
            else:
                self._signal(request)
        except Refused as refusal:
            self._answer({"id": number, "error": str(refusal)})
        except OSError as error:
            self._answer({"id": number, "error": f"{error.strerror}{f': {error.filename}' if error.filename else ''}"})

    def _answer(self, answer: dict[str, Any], fd: int = -1) -> None:
        self.outbox.append((json.dumps(answer).encode(), fd))

    def _send(self) -> None:
        while self.outbox and self.socket is not None:
            data, fd = self.outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
            try:
                self.socket.sendmsg([data], rights)
            except BlockingIOError:
                return
            except OSError:
                self._drop_scheduler()
                return
            self.outbox.popleft()
            if fd >= 0:
                os.close(fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.scheduler:
                self.scheduler = 0
                self._drop_scheduler()
                lived = time.monotonic() - self.started
                self.wait_s = AGAIN_S if lived > LONGEST_AGAIN_S else min(2 * self.wait_s, LONGEST_AGAIN_S)
                self.due = time.monotonic() + self.wait_s
                continue
            if self.agents.pop(pid, None) is not None and self.socket is not None:
                code = os.waitstatus_to_exitcode(status)
                self._answer({"ended": pid, "code": code} if code >= 0 else {"ended": pid, "signal": -code})

    def _start_scheduler(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        groups = os.getgrouplist(self.user.pw_name, self.user.pw_gid)
        environ = {"HOME": self.user.pw_dir, "USER": self.user.pw_name, "LOGNAME": self.user.pw_name}
        with theirs:
            self.scheduler = spawn(
                self.settings["scheduler"], theirs.fileno(), self.user.pw_uid, self.user.pw_gid, groups, environ
            )
        self.socket, self.started = ours, time.monotonic()

    def _drop_scheduler(self) -> None:
        """Close the connection to the scheduler, which ends for that reason; end it by SIGKILL if it still lives."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        for _, fd in self.outbox:
            if fd >= 0:
                os.close(fd)
        self.outbox.clear()
        if self.scheduler and self.kill_at is None:
            os.kill(self.scheduler, signal.SIGKILL)

    def _start_agent(self, number: int, uid: int) -> None:
        """Start an agent as a user, and answer with its pid and with a socket to it. Raises Refused, OSError."""
        if uid < self.settings["least_uid"] or uid == self.user.pw_uid:
            raise Refused(f"user {uid} gets no agent")
        old = [pid for pid, owner in self.agents.items() if owner == uid]  # they hang, or their connections are closed
        if len(self.agents) >= MOST_AGENTS or len(old) >= MOST_OF_A_USER:
            raise Refused(f"{len(self.agents)} agents have not ended, {len(old)} of them of user {uid}")
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            raise Refused(f"there is no user {uid}") from None
        environ = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
        environ["GPUJOB_AGENT_FOLDER"] = self._folder_of(uid, user.pw_gid)
        for pid in old:
            os.kill(pid, signal.SIGTERM if self.settings["pam"] else signal.SIGKILL)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            pid = spawn(
                self.settings["agent"], theirs.fileno(), uid, user.pw_gid, groups, environ, self.settings["pam"]
            )
            self.agents[pid] = uid
            self._answer({"id": number, "pid": pid, "ticks": start_ticks(pid)}, os.dup(ours.fileno()))

    def _folder_of(self, uid: int, gid: int) -> str:
        """Return the folder of a user's agent, after creating it if necessary. Raises Refused if it is not the user's."""
        path = os.path.join(self.settings["folder"], str(uid))
        status = os.stat(self.settings["folder"], follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
            raise Refused(f"{self.settings['folder']} must be a folder of root, who alone may write to it")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if os.stat(path, follow_symlinks=False).st_uid == 0:  # new
            os.chown(path, uid, gid, follow_symlinks=False)
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
            raise Refused(f"{path} is not a folder of user {uid}")
        return path

    def _signal(self, request: dict[str, Any]) -> None:
        """Send a signal to a process of a user, by its start time. Raises Refused, OSError."""
        if request["number"] not in SIGNALS:
            raise Refused(f"signal {request['number']} is not sent")
        if request["uid"] < self.settings["least_uid"]:
            raise Refused(f"processes of user {request['uid']} get no signal")
        fd = os.pidfd_open(request["pid"])
        try:
            if start_ticks(request["pid"]) != request["ticks"] or real_uid(request["pid"]) != request["uid"]:
                raise Refused("it is another process now")
            signal.pidfd_send_signal(fd, request["number"])
        finally:
            os.close(fd)
        self._answer({"id": request["id"], "pid": request["pid"], "ticks": request["ticks"]})


def spawn(
    words: list[str], fd: int, uid: int, gid: int, groups: list[int], environ: dict[str, str], pam: str = ""
) -> int:
    """Start a program as a user, in a session of its own, with a socket as descriptor `FD`; return its pid.

    ``pam``: PAM service. Then the returned process stays root: it keeps the PAM session, and ends as the program does.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 127
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.dup(fd), FD)  # a copy: a descriptor that is its own copy would be closed
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.closerange(FD + 1, os.sysconf("SC_OPEN_MAX"))  # also for the process that keeps the PAM session
        environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": os.environ.get("LANG", "C.UTF-8"), **environ}
        os.umask(0o067)  # an agent that finds this one in GPUJOB_UMASK knows that PAM has set none
        if pam:
            session = Pam(pam, environ["USER"])
            environ.update(session.environment())
            child = os.fork()
            if child:
                signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
                os.close(FD)
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its pid stays taken until no signal is sent to it
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                session.close()
                os._exit(code if code >= 0 else 128 - code)
        _become(words, uid, gid, groups, environ)
    except OSError as error:
        os.write(2, f"gpujobd: cannot start {words[0]} as user {uid}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _become(words: list[str], uid: int, gid: int, groups: list[int], environ: dict[str, str]) -> None:
    """Give up all rights of root and execute a program. Raises OSError."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid) or uid == 0:
        raise OSError(f"still has other rights than user {uid}")
    os.chdir("/")
    environ["GPUJOB_UMASK"] = f"{os.umask(0o077):o}"
    os.closerange(FD + 1, os.sysconf("SC_OPEN_MAX"))
    if "GPUJOB_AGENT_FOLDER" in environ:  # an agent: a user gets no output that root has opened
        os.dup2(0, 1), os.dup2(0, 2)
    os.execve(words[0], words, environ)


def main(words: list[str]) -> int:
    """Run the launcher. ``words``: the command line. Return the exit code."""
    if os.geteuid() != 0 or len(words) != 2:
        print("gpujobd: the launcher is started by gpujob system run, as root", file=sys.stderr)
        return 3
    os.umask(0o077)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_DUMPABLE, 0)):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    try:
        launcher = Launcher(json.loads(words[1]))
    except KeyError as error:
        print(f"gpujobd: {error.args[0]}; create the user: gpujob system install", file=sys.stderr)
        return 3
    launcher.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
