"""The scheduler of all users against bad luck and bad users."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler.client.remote_calls import CALLS, Gone, receive, types_of
from scheduler.client.remote_calls import send as send_call
from scheduler.core.job import JobSpec
from scheduler.gpujobd.front import MOST_OF_A_USER
from tests.gpujobd.machine import SOCKET, Machine
from tests.stories.harness import alive, wait_for
from tests.stories.people import ROOT_ONLY

pytestmark = ROOT_ONLY


def connected(machine: Machine) -> socket.socket:
    """Return a connection to the socket of the machine, as root."""
    made = socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM
    )  # blocking: it waits while the queue of connections is full
    try:
        made.connect(f"/proc/{machine.holder.pid}/root{SOCKET}")
    except OSError:
        made.close()
        raise
    made.settimeout(60)
    return made


def call_as(machine: Machine, who: str, name: str, **given: Any) -> dict[str, Any]:
    """Make a call as a user; return the answer."""
    with contextlib.closing(machine.client(who)) as client:
        connection = client._connected()
        send_call(connection, json.dumps({"call": name, "with": given}).encode())
        answer: dict[str, Any] = json.loads(receive(connection, 1 << 20))
    return answer


def test_a_claimed_uid_changes_nothing(machine: Machine) -> None:
    """Issue 25: a user id or name that a client claims, in any field, does not count: the kernel tells who asks."""
    victim = machine.people["ada"]
    spec = {"arguments": ["sleep", "0"], "cwd": "/", "source": "submit", "uid": victim.uid, "user": "ada",
            "log_dir": machine.people["bob"].home}  # fmt: skip
    answer = call_as(machine, "bob", "submit", spec=spec, environment={"USER": "ada", "LOGNAME": "ada"}, table={})
    job = machine.ended(answer["value"]["id"])
    assert job["user"] == "bob"
    held = machine.submit("ada", "--", "sleep", "60")
    machine.in_state(held, "running")
    for arguments in (
        {"jobs": [held]},
        {"jobs": [held], "caller": [victim.uid, "ada", True]},
        {"jobs": [held], "by": "ada"},
    ):
        answer = call_as(machine, "bob", "ask_for", kind="cancel", arguments=arguments)
        assert "belongs to user ada" in json.dumps(answer), answer
    refused = call_as(
        machine, "bob", "ask_for", kind="cancel", arguments={"jobs": [held]}, by={"uid": victim.uid, "user": "ada"}
    )
    assert "unknown arguments" in json.dumps(refused)
    assert machine.job(held)["state"] == "running"


SPEC = {"arguments": ["true"], "cwd": "/", "source": "submit"}
WRONG: dict[str, Any] = {
    "source": "recover", "script": "relative.py", "arguments": [], "conda_env": "a\nb", "priority": 10**12, "allowed": [-1],
    "gpus": "many", "on": [0], "slots": 0, "label": "\x00", "after": [10**17], "after_ok": [-1], "vram_mib": -1, "mem_mib": -1, "cpus": 0,
    "time_limit_s": -5, "retries": -1, "cwd": "tmp", "cuda": "all", "launch": "mpirun", "link": "usb", "env_file": 5, "umask": 8**5,
    "limits": [[999, 0, 0]], "variables": ["novalue"], "output": "socket", "log_dir": "logs", "log_name": "../x",
    "stderr_apart": "yes", "gzip": 7, "hold": 7, "caller": "1 2 relative", "on_finish": "\x00", "mail_to": "a\nb", "info": "\x00",
    "origin": "\x07", "edited": ["x" * 10_000], "user": 5, "uid": "root",
}  # fmt: skip


def test_every_field_of_a_job_has_a_wrong_value() -> None:
    """`WRONG` has a value for each field of JobSpec."""
    assert set(WRONG) == {field.name for field in dataclasses.fields(JobSpec)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_of_any_field_is_refused_with_a_line(machine: Machine, name: str) -> None:
    """Issue 25: no field of a submission can have a value that no option gives; the scheduler continues."""
    answer = call_as(machine, "bob", "submit", spec={**SPEC, name: WRONG[name]}, environment={}, table={})
    assert "error" in answer, answer
    assert "value" in call_as(machine, "bob", "overview")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("edit", {"jobs": [1], "changes": {"uid": 0}}),
        ("edit", {"jobs": [1], "changes": {"gpus": 7}}),
        ("edit", {"jobs": [1], "changes": {"priority": "x"}}),
        ("edit", {"jobs": [1], "changes": {"gpus": "1"}, "needs": [[1, 0, ""]]}),
        ("cancel", {"jobs": [-1]}),
        ("cancel", {"jobs": ["1"]}),
        ("cancel", {"jobs": [1 << 80]}),
        ("pause", {"gpus": [1 << 62]}),
        ("stateedited", {"gpus": [0], "paused": True}),
        ("swap", {"jobs": []}),
        ("requeue", {"jobs": [1], "after": [-5]}),
        ("x" * 100_000, {}),
    ],
)
def test_wrong_requests_change_nothing(machine: Machine, kind: str, arguments: dict[str, Any]) -> None:
    """A request with wrong or additional values is refused, or its additional values do not count."""
    answer = call_as(machine, "bob", "ask_for", kind=kind, arguments=arguments)
    assert "error" in answer or answer["value"][0] != 0 or answer["value"][1] == [], answer
    assert "value" in call_as(machine, "bob", "overview")


def test_a_free_gpu_by_a_wrong_need_is_not_given(machine: Machine) -> None:
    """The needs of an edit are computed by the scheduler: a client cannot say that its job needs nothing."""
    machine.gpujob("eve", "queue", "pause")
    number = machine.submit("bob", "--", "true")
    call_as(
        machine,
        "bob",
        "ask_for",
        kind="edit",
        arguments={"jobs": [number], "changes": {"gpus": "2"}, "needs": [[0, 0, ""]]},
    )
    assert machine.job(number)["need"] == 2.0


def test_garbage_and_silent_connections_keep_nobody_out(machine: Machine) -> None:
    """Issue 25: 200 garbage connections, half-open calls and clients that do not read keep no user out."""
    garbage = [b"", b"\x00", b"\xff\xff\xff\xff", b"\x00\x00\x00\x05hello", b"\x00\x00\x00\x02{}", os.urandom(1000)]
    open_ones: list[socket.socket] = []
    for number in range(200):
        with contextlib.suppress(OSError):
            open_ones.append(connected(machine))
            open_ones[-1].sendall(garbage[number % len(garbage)])
    reader = connected(machine)  # it asks, and does not read the answers
    with contextlib.suppress(OSError, Gone):
        reader.settimeout(0.2)
        for _ in range(2000):
            send_call(reader, json.dumps({"call": "overview", "with": {}}).encode())
    done = machine.gpujob("ada", "submit", "--", "true")
    assert done.code == 0, done
    number = done.out.strip()
    wait_for(lambda: '"exit_code": 0' in machine.gpujob("ada", "show", "--json", number).out, "the end of the job")
    for one in (*open_ones, reader):
        one.close()


def test_one_user_has_a_limited_number_of_connections(machine: Machine) -> None:
    """A user who opens very many connections uses up only their own."""
    text = f"import socket, time\nmade = []\nfor n in range({MOST_OF_A_USER + 20}):\n    s = socket.socket(socket.AF_UNIX)\n"
    text += f"    s.connect('{SOCKET}')\n    made.append(s)\n"
    text += "time.sleep(0.5)\nclosed = 0\nfor s in made:\n    s.setblocking(False)\n    try:\n        closed += s.recv(1) is not None\n"
    text += "    except BlockingIOError:\n        pass\nprint(closed)"
    machine.sh("bob", f"cat > many.py <<'END'\n{text}\nEND")
    assert int(machine.sh("bob", "/usr/bin/env python3 many.py").out) >= 20
    assert machine.gpujob("ada", "status").code == 0


def test_a_user_with_too_many_commands_is_told_so(machine: Machine) -> None:
    opened = [machine.client("bob") for _ in range(MOST_OF_A_USER)]
    try:
        wait_for(lambda: "a user may have 32 at the same time" in machine.gpujob("bob", "status").err, "the message")
    finally:
        for one in opened:
            one.close()


def test_a_machine_that_hides_processes_is_refused(machine: Machine) -> None:
    """With hidepid, the scheduler could not see whether the jobs of others live."""
    folder = machine.stash / "hidden"
    folder.mkdir(mode=0o755)
    told = {"socket": "/nowhere/s", "state_file": f"{folder}/s.json", "config": "/nowhere", "problem": "/nowhere/p"}
    text = (
        "import os, socket, subprocess, sys; ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    )
    text += "os.dup2(theirs.fileno(), 3); "
    text += "subprocess.run(['mount', '-t', 'proc', '-o', 'hidepid=2', 'proc', '/proc'], check=True); "
    text += "sys.exit(subprocess.call(sys.argv[1:], pass_fds=[3]))"
    service = [sys.executable, "-I", "-m", "scheduler.gpujobd.service", json.dumps(told)]
    words = [
        "unshare",
        "-m",
        sys.executable,
        "-c",
        text,
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        *service,
    ]
    done = machine.root(*words, check=False)
    assert done.code == 1 and "hidepid" in done.err, done


def test_user_ids_without_names_count_as_one_user(machine: Machine) -> None:
    """A user may have thousands of them (/etc/subuid). They may look, and change nothing."""
    opened: list[socket.socket] = []
    place = os.open(f"/proc/{machine.holder.pid}/root{SOCKET}", os.O_PATH)
    try:
        for uid in range(7_000_000, 7_000_000 + 20):
            os.seteuid(uid)  # the kernel notes it at the time of `connect`
            try:
                for _ in range(MOST_OF_A_USER):
                    opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    opened[-1].connect(f"/proc/self/fd/{place}")
            finally:
                os.seteuid(0)
        wait_for(lambda: machine.gpujob("bob", "status").code == 0, "an answer for bob")
    finally:
        os.close(place)
        for one in opened:
            one.close()
    machine.people["nobody"] = dataclasses.replace(machine.people["bob"], uid=7_000_000, gid=7_000_000)
    try:
        answer = call_as(machine, "nobody", "submit", spec=SPEC, environment={}, table={})
        assert "there is no user 7000000" in json.dumps(answer), answer
        assert "value" in call_as(machine, "nobody", "tallies") or "value" in call_as(machine, "nobody", "last_id")
    finally:
        del machine.people["nobody"]


def test_a_call_that_is_not_allowed_is_refused(machine: Machine) -> None:
    """Methods of the client that are no calls, and unknown arguments, are refused."""
    for name in ("note", "forget", "_reading", "settle_at_home", "__init__", "caller_folder", "", "x" * 1000):
        assert "unknown call" in json.dumps(call_as(machine, "bob", name))
    assert "unknown arguments" in json.dumps(call_as(machine, "bob", "alive", more=1))
    assert "error" in call_as(machine, "bob", "remembered", key="synced")
    assert all(types_of(name) for name in CALLS)


def test_a_user_who_is_deleted_while_a_job_runs(machine: Machine) -> None:
    """Issue 25: the job of a deleted user continues; it can be cancelled; its end counts as lost if nobody saw it."""
    machine.add_user("dan")
    jobs = [machine.submit("dan", "--", "sleep", "300") for _ in range(2)]
    waiting = machine.submit("dan", "--gpus", "4", "--", "true")
    for number in jobs:
        machine.in_state(number, "running")
    machine.root("userdel", "-f", "dan")
    assert machine.job(jobs[0])["state"] == "running"
    machine.kill_scheduler()  # the agent ends with it, and no other agent can start
    pids = [machine.job(number)["pid"] for number in jobs]
    assert all(map(alive, pids)), machine.log()
    machine.gpujob("eve", "cancel", str(jobs[0]))
    assert machine.ended(jobs[0])["state"] == "cancelled" and not alive(pids[0])
    os.kill(pids[1], 9)
    found = machine.ended(jobs[1])
    assert found["outcome"] == "lost" and "no agent can run for user" in found["notes"][-1]
    machine.gpujob("eve", "cancel", str(waiting))
    assert machine.ended(waiting)["state"] in ("cancelled", "failed")
    del machine.people["dan"]


def test_a_full_home(machine: Machine) -> None:
    """Issue 25: with a full home no log can be made: the job waits and says why, and runs when there is space."""
    machine.add_user("fay")
    options = f"nr_inodes=10,mode=755,uid={machine.people['fay'].uid}"
    machine.root("mount", "-t", "tmpfs", "-o", options, "tmpfs", "/home/fay")
    machine.sh("fay", "mkdir -p gpujob/logs; for n in 1 2 3 4 5 6 7 8 9; do : > big$n; done")
    number = machine.submit("fay", "--", "sh", "-c", "echo it ran")
    wait_for(lambda: machine.job(number)["reason_code"] == "backoff", "a failed start", 60)
    assert "log cannot be opened: No space left on device" in machine.job(number)["reason"]
    machine.sh("fay", "rm big*")
    assert machine.ended(number, 90)["exit_code"] == 0
    assert machine.gpujob("fay", "logs", str(number)).out == "it ran\n"


def test_groups_that_change(machine: Machine) -> None:
    """Issue 25: a job that starts after the groups of its user have changed has the new groups; running jobs keep theirs."""
    machine.add_user("gus")
    machine.root("groupadd", "-f", "club")
    running = machine.submit("gus", "--", "sh", "-c", "sleep 8; id -Gn; exit 2")
    machine.in_state(running, "running")
    machine.root("usermod", "-aG", "club", "gus")

    def has_new_groups() -> bool:
        number = machine.submit("gus", "--", "id", "-Gn")
        machine.ended(number)
        return machine.gpujob("gus", "logs", str(number)).out == "gus club\n"

    wait_for(has_new_groups, "the new group", 60)
    assert machine.ended(running)["exit_code"] == 2
    assert machine.gpujob("gus", "logs", str(running)).out == "gus\n"


def test_a_job_that_leaves_its_session(machine: Machine) -> None:
    """Issue 25: processes that leave the session of their job keep its GPU, and a cancel ends them, too."""
    number = machine.submit("ada", "--", "sh", "-c", "setsid sleep 301 & setsid setsid sleep 302 & sleep 1")
    machine.ended(number)
    wait_for(lambda: "leftover processes" in machine.gpujob("ada", "status").out, "the held GPU", 60)
    kept = machine.submit("ada", "--", "sh", "-c", "setsid sleep 303 & exec sleep 304")
    machine.in_state(kept, "running")
    machine.gpujob("ada", "cancel", str(kept))
    assert machine.ended(kept)["state"] == "cancelled"
    left = machine.root("sh", "-c", "ps -eo uid,args | grep 'sleep 30[34]' | grep -v grep", check=False).out
    assert not left
    machine.sh("ada", "kill $(ps -u ada -o pid,args | awk '/sleep 30[12]/ && !/awk/ {print $1}')")
    wait_for(lambda: "leftover processes" not in machine.gpujob("ada", "status").out, "the free GPU", 60)


def test_a_replaced_socket_is_not_trusted(machine: Machine) -> None:
    """Issue 25: a client does not talk to a socket in a folder that other users can write, nor to another user's process."""
    machine.sh(
        "bob", "mkdir -m 777 open; python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"open/s\")'"
    )
    done = machine.gpujob("ada", "submit", "--", "true", GPUJOB_SYSTEM_SOCKET="/home/bob/open/s")
    assert done.code == 1 and "belongs to user bob" in done.err, done
    machine.root("chown", "gpujob", "/home/bob/open/s")
    done = machine.gpujob("ada", "submit", "--", "true", GPUJOB_SYSTEM_SOCKET="/home/bob/open/s")
    assert done.code == 1 and "cannot trust this socket" in done.err, done
    text = 'import socket; s = socket.socket(socket.AF_UNIX); s.bind("own/s"); s.listen(); s.accept()'
    machine.sh("bob", f"mkdir own; python3 -c '{text}' > /dev/null 2>&1 &")
    wait_for(lambda: machine.root("test", "-S", "/home/bob/own/s", check=False).code == 0, "the socket")
    for words in (["--state-file", "/home/bob/own/s", "status"], ["status", "--state-file", "/home/bob/own/s"]):
        done = machine.gpujob("ada", *words)
        assert done.code != 0, done
    assert "belongs to user bob" in done.err, done
    machine.root("mv", "/run/gpujob", "/run/gpujob-away")
    machine.root("ln", "-s", "/home/bob/open", "/run/gpujob")
    refused = machine.root("sh", "-c", f"'{__import__('sys').executable}' -I -m scheduler system run", check=False)
    assert refused.code == 3 and "must be a folder of user id" in refused.err, refused
    machine.root("rm", "/run/gpujob")
    machine.root("mv", "/run/gpujob-away", "/run/gpujob")
    assert machine.gpujob("ada", "status").code == 0


def test_an_installation_that_users_can_write_is_refused(machine: Machine, tmp_path: Path) -> None:
    """Issue 25: `system run` and `system install` refuse a program that a user can change."""
    import shutil
    import sys

    from tests.gpujobd.machine import PACKAGE

    copy = machine.stash / "copy"
    shutil.copytree(PACKAGE, copy / "scheduler", ignore=shutil.ignore_patterns("__pycache__"))
    run = f"import sys; sys.path.insert(0, '{copy}'); from scheduler.gpujobd.installation import check_installation; check_installation()"
    words = [sys.executable, "-I", "-c", run]
    assert machine.root(*words, check=False).code == 0
    for path, change in (
        ("scheduler/gpujobd/agent.py", "chmod o+w"),
        ("scheduler/core", f"chown {machine.people['bob'].uid}"),
    ):
        machine.root("sh", "-c", f"{change} {copy}/{path}")
        done = machine.root(*words, check=False)
        assert done.code == 1 and "must not run from here" in done.err and path in done.err, done
        machine.root("sh", "-c", f"chmod o-w {copy}/{path}; chown 0 {copy}/{path}")
    for target in (machine.people["bob"].home, f"{machine.people['bob'].home}/later/linked.py"):
        machine.root("ln", "-sfn", target, f"{copy}/scheduler/linked.py")
        done = machine.root(*words, check=False)
        assert done.code == 1 and "must not run from here" in done.err and "/home/bob" in done.err, done
    machine.sh("bob", "ln -sfn /usr/bin/env middle")  # a link between two places of root
    machine.root("ln", "-sfn", f"{machine.people['bob'].home}/middle", f"{copy}/scheduler/linked.py")
    done = machine.root(*words, check=False)
    assert done.code == 1 and "/home/bob" in done.err, done


def test_an_agent_that_lies_harms_only_its_own_jobs(machine: Machine) -> None:
    """An agent is a process of its user: what it says about jobs and processes of others does not count."""
    theirs, mine = machine.submit("ada", "--", "sleep", "300"), machine.submit("bob", "--", "sleep", "300")
    for number in (theirs, mine):
        machine.in_state(number, "running")
    (agent,) = (pid for pid in machine.children("agent") if os.stat(f"/proc/{pid}").st_uid == machine.people["bob"].uid)
    # The socket of bob's agent, taken by bob with pidfd_getfd, as a debugger of bob could do.
    lie = json.dumps(
        {"say": "ended", "value": {"job": theirs, "attempt": 1, "exit_code": 0, "signal": None, "at": 1.0}}
    )
    text = (
        "import ctypes, os, socket\n"
        f"fd = ctypes.CDLL(None).syscall(438, os.pidfd_open({agent}), 3, 0)\n"
        "assert fd >= 0\ns = socket.socket(fileno=fd)\n"
        f"s.send(b'.' + {lie.encode()!r})\n"
    )
    machine.sh("bob", f"cat > lie.py <<'END'\n{text}\nEND")
    done = machine.sh("bob", "python3 lie.py")
    time.sleep(0.5)
    assert machine.job(theirs)["state"] == "running", done


def test_a_user_whose_agent_cannot_begin_is_told_why(machine: Machine) -> None:
    """The user and administrators see the reason; others do not. The jobs run when the cause is gone."""
    folder = f"/var/lib/gpujob/users/{machine.people['ada'].uid}"
    machine.ended(machine.submit("ada", "--", "true"))
    (agent,) = (pid for pid in machine.children("agent") if os.stat(f"/proc/{pid}").st_uid == machine.people["ada"].uid)
    machine.root("sh", "-c", f"mv {folder}/attempts {folder}/kept && touch {folder}/attempts && kill {agent}")
    number = machine.submit("ada", "--", "true")
    wait_for(lambda: "the agent cannot begin" in machine.gpujob("ada", "status").out, "the reason, for its user")
    assert "the agent cannot begin" in machine.gpujob("eve", "status").out, "eve is an administrator"
    assert "the agent cannot begin" not in machine.gpujob("bob", "status").out
    machine.root("sh", "-c", f"rm {folder}/attempts && mv {folder}/kept {folder}/attempts")
    machine.kill_scheduler()  # the next one asks for an agent at once, not after a back-off
    assert machine.ended(number)["exit_code"] == 0
    wait_for(lambda: "the agent cannot begin" not in machine.gpujob("ada", "status").out, "the end of the trouble")


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("watch", {"path": "/tmp/a\udcff", "home": "/", "on": True}, "cannot be shown"),
        ("watch", {"path": "/tmp/a\n", "home": "/", "on": True}, "cannot be shown"),
        (
            "submit",
            {"spec": {**SPEC, "arguments": ["\ud800"]}, "environment": {}, "table": {}},
            "no program can receive",
        ),
        ("submit", {"spec": {**SPEC, "label": "\udfff"}, "environment": {}, "table": {}}, "no program can receive"),
        ("submit", {"spec": {**SPEC, "log_dir": "/tmp/\udcff"}, "environment": {}, "table": {}}, "not UTF-8"),
        ("submit", {"spec": {**SPEC, "log_name": "\udcff"}, "environment": {}, "table": {}}, "not UTF-8"),
        ("submit", {"spec": SPEC, "environment": {"A": "\ud800"}, "table": {}}, "cannot be a variable"),
        ("submit", {"spec": SPEC, "environment": {"A": "x" * (3 << 20)}, "table": {}}, "bytes; 262144 are possible"),
        ("ask_for", {"kind": "cancel", "arguments": {"jobs": [1] * 20_001}}, "20000 jobs at most"),
        ("ask_for", {"kind": "cancel", "arguments": {"jobs": [1, 1]}}, "names a job twice"),
        ("known", {"jobs": [1] * 20_001}, "20000 jobs at most"),
        (
            "submit",
            {"spec": {**SPEC, "arguments": ["x", *[""] * 100_000]}, "environment": {}, "table": {}},
            "bytes; 131072 are possible",
        ),
        ("submit", {"spec": {**SPEC, "after": [1] * 1001}, "environment": {}, "table": {}}, "more than 1000 jobs"),
        ("select", {"words": ["%" * 5000]}, "there is no job"),
        ("report", {"now": 1.0, "label": "%" * 5000}, "there is no job"),
        (
            "ask_for",
            {"kind": "edit", "arguments": {"jobs": [], "changes": {"cwd": "x" * 200_000}}},
            "it is not an absolute path",
        ),
        ("select", {"words": ["1-9"] * 20_001}, "20000 jobs at most"),
        ("select", {"words": [f"label{n}" for n in range(20_000)]}, "there is no job label0"),
        (
            "submit",
            {"spec": {**SPEC, "variables": [f"A{n}={'x' * 999}" for n in range(300)]}, "environment": {}, "table": {}},
            "bytes; 131072 are possible",
        ),
        (
            "ask_for",
            {"kind": "edit", "arguments": {"jobs": [*range(100)], "changes": {"after": [3] * 1000}}},
            "100000 dependencies",
        ),
    ],
)
def test_values_that_could_harm_others_are_refused(
    machine: Machine, name: str, given: dict[str, Any], told: str
) -> None:
    """Such values would keep agents or the reading of all jobs files from working, or use much memory."""
    assert told in json.dumps(call_as(machine, "bob", name, **given))


def test_root_runs_no_jobs(machine: Machine) -> None:
    """Nobody gets a job that runs with the rights of root or of the service."""
    done = machine.root("gpujob", "--system", "submit", "--", "true", check=False)
    assert done.code == 3 and "user root runs no jobs" in done.err, done
    done = machine.root("gpujob", "--system", "watch", "/etc/passwd", check=False)
    assert done.code == 3, done
    assert machine.root("gpujob", "--system", "status").code == 0


def test_limits_count_for_users_who_only_have_a_jobs_file(machine: Machine) -> None:
    """Limits of groups, too, and all files of a user together. After the limit on waiting jobs, at most 64 lines are read."""
    machine.add_user("cat", "lab")
    machine.configure(machine.config + 'limits: {"@lab": {gpus: 1, waiting: 3}}\n')
    machine.kill_scheduler()  # the next one knows the limits from its start
    text = "for n in $(seq 301 390); do echo 0,/bin/sleep,,$n; done > a.txt; sed s/,3/,4/ a.txt > b.txt; gpujob watch a.txt; gpujob watch b.txt"
    machine.sh("cat", text)

    def jobs() -> list[str]:
        with contextlib.closing(machine.client()) as client:
            return [job.state.value for job in client.overview().jobs if job.spec.user == "cat"]

    wait_for(lambda: "running" in jobs(), "a job of cat")
    number = wait_for(
        lambda: [
            job for job in machine.gpujob("cat", "jobs", "--json").json()["jobs"] if job["reason_code"] == "limit"
        ],
        "a job that waits because of the limit",
    )[0]
    assert "group lab has 1 of at most 1 GPUs" in number["reason"]
    assert jobs().count("running") == 1 and jobs().count("pending") <= 3 + 64
    machine.sh("cat", "gpujob watch --stop a.txt; gpujob watch --stop b.txt")


def test_reasons_of_hidden_jobs_are_hidden(machine: Machine) -> None:
    """Also of jobs that are not in the answer: their reasons could name files."""
    machine.configure(machine.config + "hide_commands: true\n")
    machine.sh("ada", "gpujob watch; echo 0,secretplan.py,,x >> gpujob/jobs.txt")
    wait_for(lambda: "secretplan" in json.dumps(call_as(machine, "ada", "jobs")), "the reason")
    machine.ask("pausequeue", on=True)
    machine.submit("bob", "--", "true")
    wait_for(lambda: "secretplan" not in json.dumps(call_as(machine, "bob", "jobs", states=[], most=1)), "the setting")
    for name, given in (("jobs", {}), ("jobs", {"states": [], "most": 1}), ("overview", {"most_waiting": 1})):
        assert "secretplan" not in json.dumps(call_as(machine, "bob", name, **given)), name
    machine.sh("ada", "gpujob watch --stop")


def test_labels_and_at_signs_mean_ones_own_jobs(machine: Machine) -> None:
    mine = machine.submit("ada", "--label", "night", "--", "true")
    theirs = machine.submit("bob", "--label", "night", "--", "sleep", "300")
    assert f" {mine} night\n" in machine.gpujob("ada", "show", "@").out
    assert machine.gpujob("ada", "cancel", "night").code != 3, "bob's job is not meant"
    assert machine.gpujob("ada", "wait").code == 0, "without a job: all jobs of one's own"
    assert machine.job(theirs)["state"] != "cancelled"
    machine.gpujob("bob", "submit", "--label", "secretplan", "--", "true")
    unknown = machine.gpujob("ada", "show", "secretplam")
    assert unknown.code == 6 and "did you mean" not in unknown.err, "labels of others are not suggested"
