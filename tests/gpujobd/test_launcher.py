"""The launcher of gpujobd with real users: what it starts, what it refuses, and what it survives."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.gpujobd import launcher
from scheduler.gpujobd.agent import UNSET, login_umask
from scheduler.gpujobd.launcher import LONGEST, REQUESTS, Refused, request_of, start_ticks
from tests.stories.harness import alive, wait_for
from tests.stories.people import User

# Passes packets between the launcher and the test, as the scheduler would send and receive them.
RELAY = """
import json, os, select, socket, sys
up, test = socket.socket(fileno=3), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
test.connect(sys.argv[1])
while True:
    for one in select.select([up, test], [], [])[0]:
        data, fds, _, _ = socket.recv_fds(one, 1 << 16, 4)
        if not data:
            sys.exit(0)
        if one is up:
            socket.send_fds(test, [data], fds)
        elif data == b"send a descriptor":
            socket.send_fds(up, [b"{}"], [0])
        elif data == b"send from a child":
            if not os.fork():
                up.send(b'{"do": "agent", "id": 1, "uid": 1000}')
                os._exit(0)
            os.wait()
        elif data == b"read later":
            sent = 0
            up.setblocking(False)
            while sent < 5000:
                try:
                    up.send(b"x")
                    sent += 1
                except BlockingIOError:
                    break  # neither end reads now
            up.setblocking(True)
            test.send(json.dumps({"sent": sent}).encode())
        else:
            up.send(data)
"""
# Writes what it is, and then does what the test asks for.
AGENT = """
import json, os, signal, socket, sys
umask = os.umask(0)
facts = {"uids": os.getresuid(), "gids": os.getresgid(), "groups": sorted(os.getgroups()), "umask": umask,
         "environ": dict(os.environ), "cwd": os.getcwd(), "session": os.getsid(0) == os.getpid(),
         "fds": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
         "output": [os.readlink(f"/proc/self/fd/{n}") for n in (1, 2)],
         "ignored": [n for n in range(1, 32) if signal.getsignal(n) is signal.SIG_IGN]}
s = socket.socket(fileno=3)
s.send(json.dumps(facts).encode())
while True:
    word = s.recv(100)
    if word == b"orphan":
        child = os.fork()
        if not child:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", "100"])
        s.send(str(child).encode())
    elif word.startswith(b"exit"):
        os._exit(int(word[4:]))
    elif not word:
        signal.pause()  # a real agent ends now; this one shows that nobody ends it
"""


class Bench:
    """A launcher with a relay in place of the scheduler. ``service``: its user; ``user``: a user with jobs."""

    def __init__(self, folder: Path, service: User, user: User, *, least_uid: int = 1000) -> None:
        self.folder, self.service, self.user = folder, service, user
        self.path = folder / "s" / "socket"
        self.path.parent.mkdir(exist_ok=True)
        os.chown(self.path.parent, service.uid, service.gid)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        os.chown(self.path, service.uid, service.gid)
        self.listener.listen()
        self.listener.settimeout(60)
        python = "/usr/bin/python3"
        for name, text in (("relay.py", RELAY), ("agent.py", AGENT)):
            (folder / name).write_text(text)
        self.agents = folder / "users"
        self.agents.mkdir(exist_ok=True)
        self.settings = {
            "user": service.name, "folder": str(self.agents), "least_uid": least_uid, "pam": "",
            "scheduler": [python, "-I", "-S", str(folder / "relay.py"), str(self.path)],
            "agent": [python, "-I", "-S", str(folder / "agent.py")],
        }  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.number = 0
        self.reports: list[dict[str, Any]] = []
        self.pids: list[int] = []
        self.sockets: list[socket.socket] = []

    def start(self) -> Bench:
        self.end()
        words = [sys.executable, "-I", "-S", launcher.__file__, json.dumps(self.settings)]
        with (self.folder / "errors").open("ab") as errors:  # no pipe: the agents keep it open
            self.process = subprocess.Popen(words, stderr=errors)
        return self.connected()

    def connected(self) -> Bench:
        """Wait for the next scheduler."""
        self.relay, _ = self.listener.accept()
        self.relay.settimeout(60)
        self.sockets.append(self.relay)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def receive(self) -> tuple[dict[str, Any], int]:
        """Return the next answer, with its descriptor (-1: none). Reports are kept in ``reports``."""
        while True:
            data, fds, _, _ = socket.recv_fds(self.relay, 1 << 16, 4)
            assert data, "the scheduler has ended"
            found = json.loads(data)
            if "ended" not in found:
                return found, fds[0] if fds else -1
            self.reports.append(found)

    def ask(self, **request: Any) -> tuple[dict[str, Any], int]:
        self.number += 1
        self.relay.send(json.dumps({"id": self.number, **request}).encode())
        answer, fd = self.receive()
        assert answer["id"] == self.number
        return answer, fd

    def agent(self) -> tuple[int, socket.socket, dict[str, Any]]:
        """Start an agent; return its pid, its socket and what it says of itself."""
        answer, fd = self.ask(do="agent", uid=self.user.uid)
        assert fd >= 0, answer
        made = socket.socket(fileno=fd)
        made.settimeout(60)
        self.sockets.append(made)
        self.pids.append(answer["pid"])
        assert answer["ticks"] == start_ticks(answer["pid"])
        return answer["pid"], made, json.loads(made.recv(1 << 16))

    def ended(self, pid: int) -> dict[str, Any]:
        """Wait for the report of an end; return it."""
        while not any(one["ended"] == pid for one in self.reports):
            data = self.relay.recv(1 << 16)
            self.reports.append(json.loads(data))
        return next(one for one in self.reports if one["ended"] == pid)

    def end(self) -> None:
        """Kill the launcher, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.end()
        for one in (self.listener, *self.sockets):
            one.close()
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for user in (self.user, self.service):  # a user with processes cannot be deleted
            wait_for(lambda user=user: not kill_all_of(user), f"the end of all processes of {user.name}")  # type: ignore[misc]


def pids_of(user: User) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user.uid and alive(pid):
                found.append(pid)
    return found


def kill_all_of(user: User) -> list[int]:
    found = pids_of(user)
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return found


@pytest.fixture(scope="module")
def two_users() -> Iterator[tuple[User, User]]:
    """Yield the service user and a user, who is in an additional group."""
    if os.getuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("users are made by root")
    base = f"gl{os.getpid() % 100_000}"
    made: list[User] = []
    with contextlib.ExitStack() as stack:
        subprocess.run(["groupadd", f"{base}g"], check=True)
        stack.callback(subprocess.run, ["groupdel", f"{base}g"], check=False)
        group = int(subprocess.check_output(["getent", "group", f"{base}g"]).split(b":")[2])
        for name, more in ((f"{base}s", []), (f"{base}u", ["-G", f"{base}g"])):
            subprocess.run(["useradd", "-M", "-U", "-d", "/nonexistent", *more, name], check=True)
            stack.callback(subprocess.run, ["userdel", name], check=True)
            uid, gid = (int(subprocess.check_output(["id", which, name])) for which in ("-u", "-g"))
            made.append(User(name, uid, gid, (group,) if more else ()))
        yield made[0], made[1]


@pytest.fixture
def bench(two_users: tuple[User, User]) -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="gj-launcher-", dir="/tmp"))
    folder.chmod(0o755)
    made = Bench(folder, *two_users).start()
    yield made
    made.close()
    shutil.rmtree(folder)


# -- what it starts -------------------------------------------------------------------------------------------


def test_an_agent_has_all_rights_of_its_user_and_no_other(bench: Bench) -> None:
    user = bench.user
    _, _, facts = bench.agent()
    assert facts["uids"] == [user.uid] * 3 and facts["gids"] == [user.gid] * 3
    assert facts["groups"] == sorted([user.gid, *user.groups])
    assert facts["fds"] == [0, 1, 2, 3] and facts["session"] and facts["umask"] == 0o077 and facts["cwd"] == "/"
    assert facts["output"] == ["/dev/null"] * 2
    assert facts["ignored"] == [signal.SIGPIPE, signal.SIGXFSZ], "those that every Python ignores"
    environ = facts["environ"]
    known = {"PATH", "LANG", "LC_CTYPE", "HOME", "USER", "LOGNAME", "SHELL", "GPUJOB_AGENT_FOLDER", "GPUJOB_UMASK"}
    assert set(environ) <= known and environ["GPUJOB_UMASK"] == f"{UNSET:o}", environ
    folder = Path(environ["GPUJOB_AGENT_FOLDER"])
    status = folder.stat()
    assert folder == bench.agents / str(user.uid) and (status.st_uid, status.st_mode & 0o777) == (user.uid, 0o700)


@pytest.mark.parametrize(
    ("text", "umask"), [("# UMASK 077\nUMASK\t\t027\n", 0o027), ("UMASK\n", 0o022), ("UMASK 9\n", 0o022), (None, 0o022)]
)
def test_the_umask_of_a_login_is_that_of_login_defs(tmp_path: Path, text: str | None, umask: int) -> None:
    settings = tmp_path / "login.defs"
    if text is not None:
        settings.write_text(text)
    assert login_umask(str(settings)) == umask


def test_an_agent_may_have_a_pam_session(bench: Bench) -> None:
    """The service `runuser` is on every Debian. The launcher gets the end of the agent through the process of the session."""
    bench.end()
    bench.settings["pam"] = "runuser"
    bench.start()
    pid, agent, facts = bench.agent()
    assert facts["uids"] == [bench.user.uid] * 3 and facts["fds"] == [0, 1, 2, 3]
    assert os.stat(f"/proc/{pid}").st_uid == 0, "the process that keeps the session"
    agent.send(b"exit 7")
    assert bench.ended(pid) == {"ended": pid, "code": 7}


def test_a_user_whom_pam_refuses_has_no_agent(bench: Bench) -> None:
    bench.end()
    bench.settings["pam"] = "runuser"
    bench.start()
    subprocess.run(["chage", "-E", "0", bench.user.name], check=True)  # the account has expired
    try:
        answer, fd = bench.ask(do="agent", uid=bench.user.uid)
        bench.sockets.append(socket.socket(fileno=fd))
        assert bench.ended(answer["pid"]) == {"ended": answer["pid"], "code": 127}
    finally:
        subprocess.run(["chage", "-E", "-1", bench.user.name], check=True)
    assert f"as user {bench.user.uid}: " in (bench.folder / "errors").read_text()


def test_ends_of_agents_are_reported_and_their_orphans_are_reaped(bench: Bench) -> None:
    pid, agent, _ = bench.agent()
    agent.send(b"orphan")
    orphan = int(agent.recv(100))
    agent.send(b"exit 7")
    assert bench.ended(pid) == {"ended": pid, "code": 7}
    ticks = start_ticks(orphan)
    answer, _ = bench.ask(do="signal", uid=bench.user.uid, pid=orphan, ticks=ticks, number=signal.SIGKILL)
    assert answer == {"id": bench.number, "pid": orphan, "ticks": ticks}
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), "the end of the orphan")
    bench.agent()
    assert orphan not in [report["ended"] for report in bench.reports]


@pytest.mark.parametrize("pam", ["", "runuser"])
def test_an_agent_takes_the_place_of_the_agent_before(bench: Bench, pam: str) -> None:
    """A user cannot fill the machine with agents that hang or have closed their connection; the PAM session ends, too."""
    bench.settings["pam"] = pam
    bench.start()
    pids = [bench.agent() for _ in range(3)]
    assert bench.ended(pids[0][0])["ended"] == pids[0][0] and bench.ended(pids[1][0])["ended"] == pids[1][0]
    agents = [pid for pid in pids_of(bench.user) if alive(pid)]
    assert len(agents) == 1, agents


def test_agents_outlive_the_scheduler_and_the_launcher(bench: Bench) -> None:
    pid, _, _ = bench.agent()
    (relay,) = (
        int(one) for one in Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split() if int(one) != pid
    )
    os.kill(relay, signal.SIGKILL)
    bench.connected()  # the launcher has started another scheduler
    assert alive(pid)
    pid = bench.agent()[0]
    assert bench.process is not None
    bench.process.kill()
    bench.process.wait()
    assert alive(pid)
    wait_for(lambda: bench.relay.recv(100) == b"", "the end of the scheduler without the launcher")
    bench.start()
    bench.agent()


def test_sigterm_ends_the_launcher_and_the_scheduler_and_no_agent(bench: Bench) -> None:
    pid, _, _ = bench.agent()
    assert bench.process is not None
    bench.process.terminate()
    assert bench.process.wait(60) == 0
    assert alive(pid) and bench.relay.recv(100) == b""


# -- what it refuses ------------------------------------------------------------------------------------------


def test_other_users_get_no_agent(bench: Bench) -> None:
    for uid, why in (
        (0, "gets no agent"),
        (1, "gets no agent"),
        (bench.service.uid, "gets no agent"),
        (4_000_000, "no user"),
    ):
        answer, fd = bench.ask(do="agent", uid=uid)
        assert why in answer["error"] and fd == -1, answer


def test_a_folder_that_was_not_given_to_the_user_yet_is_given(bench: Bench) -> None:
    """The launcher was killed after it had made the folder. Only root can make one there."""
    (bench.agents / str(bench.user.uid)).mkdir()
    bench.agent()
    assert (bench.agents / str(bench.user.uid)).stat().st_uid == bench.user.uid


@pytest.mark.parametrize("fault", ["link", "file", "open to all"])
def test_the_folder_of_an_agent_must_be_the_users_own(bench: Bench, fault: str) -> None:
    path = bench.agents / str(bench.user.uid)
    if fault == "link":
        (bench.folder / "elsewhere").mkdir()
        os.chown(bench.folder / "elsewhere", bench.user.uid, bench.user.gid)
        path.symlink_to(bench.folder / "elsewhere")
    elif fault == "file":
        path.touch()
        os.chown(path, bench.user.uid, bench.user.gid)
    else:
        bench.agents.chmod(0o777)
    answer, fd = bench.ask(do="agent", uid=bench.user.uid)
    assert fd == -1 and (
        "is not a folder of user" in answer["error"] or "must be a folder of root" in answer["error"]
    ), answer


def test_only_the_process_that_was_meant_gets_a_signal(bench: Bench) -> None:
    pid, _, _ = bench.agent()
    uid, ticks = bench.user.uid, start_ticks(pid)
    right = {"do": "signal", "uid": uid, "pid": pid, "ticks": ticks, "number": 9}
    for changes in (
        {"ticks": ticks + 1}, {"uid": uid + 1}, {"uid": 0}, {"number": 11}, {"pid": bench.pid}, {"pid": 1}, {"pid": 0},
        {"pid": bench.pid, "ticks": start_ticks(bench.pid)}, {"pid": bench.pid, "ticks": start_ticks(bench.pid), "uid": 0},
    ):  # fmt: skip
        answer, _ = bench.ask(**{**right, **changes})
        assert "error" in answer, (changes, answer)
    assert alive(pid) and bench.process is not None and bench.process.poll() is None
    bench.ask(**right)
    assert bench.ended(pid) == {"ended": pid, "signal": 9}


def test_packets_of_other_processes_are_refused(bench: Bench) -> None:
    bench.relay.send(b"send from a child")
    answer, fd = bench.receive()
    assert answer == {"id": None, "error": "it does not come from the scheduler"} and fd == -1


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_launcher_survives_garbage(bench: Bench, seed: int) -> None:
    """Packets of random bytes, of wrong JSON, too long, with descriptors: each is refused, and nothing stays open."""
    dice = random.Random(seed)
    bench.agent()
    before = descriptors(bench.pid)
    right = [{"do": do, **dict.fromkeys(keys, 1)} for do, keys in REQUESTS.items()]
    odd = [None, True, -1, 1.5, 1 << 65, "1", [], {}, "\0", "x" * 3000]
    for _ in range(300 if seed == 1 else 3000):
        kind = dice.randrange(5)
        if kind == 0:
            data = dice.randbytes(dice.randrange(1, 300))
        elif kind == 1:
            data = b"send a descriptor"
        elif kind == 2:
            data = json.dumps(
                {**dice.choice(right), dice.choice(["id", "uid", "do", "pid", "more"]): dice.choice(odd)}
            ).encode()
        elif kind == 3:
            whole = json.dumps(dice.choice(right)).encode()
            data = whole[: dice.randrange(1, len(whole))]
        else:
            data = b"[" * dice.randrange(LONGEST, 4 * LONGEST)
        bench.relay.send(data)
        assert "error" in bench.receive()[0], data
    assert descriptors(bench.pid) == before
    bench.agent()


def test_requests_wait_while_the_scheduler_does_not_read_the_answers(bench: Bench) -> None:
    """A full outbox must not end the scheduler: users could fill it."""
    bench.relay.send(b"read later")
    sent, _ = bench.receive()
    for _ in range(sent["sent"]):
        answer, _ = bench.receive()
        assert answer["error"] == "the request is not JSON"
    bench.agent()


# -- requests, without processes ------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["do", "id", "uid", "pid", "ticks", "number", "more"])


@given(st.dictionaries(KEYS, VALUES | st.sampled_from(list(REQUESTS)), max_size=7) | VALUES)
def test_a_request_is_exactly_right_or_refused(value: Any) -> None:
    try:
        found = request_of(json.dumps(value).encode())
    except Refused:
        return
    keys = REQUESTS[found["do"]]
    assert found == value and set(found) == {"do", *keys}
    assert all(type(found[key]) is int and 0 <= found[key] <= most for key, most in keys.items())


@given(st.sampled_from(list(REQUESTS)), st.data())
def test_a_right_request_is_understood(do: str, data: st.DataObject) -> None:
    value = {"do": do, **{key: data.draw(st.integers(0, most)) for key, most in REQUESTS[do].items()}}
    assert request_of(json.dumps(value).encode()) == value


@given(st.binary(max_size=LONGEST + 100))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        request_of(data)


def test_the_launcher_is_short_and_imports_nothing_of_the_package() -> None:
    text = Path(launcher.__file__).read_text()
    assert text.count("\n") <= 400 and "import scheduler" not in text and "from scheduler" not in text
