"""Two real users: a user cannot read, change, start, stop or signal the scheduler of another user."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stories.harness import wait_for
from tests.stories.people import ROOT_ONLY, Daemon, User, belongs
from tests.stories.test_cli_faults import VERBS as all_verbs

pytestmark = ROOT_ONLY
VERBS = (
    "status",
    "status --json",
    "plan",
    "jobs",
    "submit -- true",
    "pause 0",
    "resume 0",
    "cancel 1",
    "retry 1",
    "hold 1",
    "logs 1",
    "show 1",
    "why 1",
    "reset",
    "edit 1 --label x",
    "add x.py",
    "queue pause",
    "screens",
    "attach 1",
    "wait 1",
    "swap 1 2",
    "recover --dry-run",
    "recover",
    "release 1",
    "first 1",
    "report",
    "needs",
    "needs --apply",
    "run jobs.txt",
    "web --port 0",
)
# Verbs that the test tries separately, or that work without a scheduler.
NOT_OF_ONE = {"start", "doctor", "demo", "help", "version", "config", "ts", "track", "who", "lease", "service", "system", "token", "watch"}  # fmt: skip
HOLD = '#!/bin/sh\necho secret > out.txt\nwhile [ ! -e "$0.go" ]; do sleep 0.05; done\n'


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return owner, mode and contents of every file. Files that a daemon changes by itself are left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(("history.db", "store.db-")):
            continue
        with contextlib.suppress(FileNotFoundError):  # a temporary file of the daemon
            status = path.lstat()
            data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found[str(path.relative_to(folder))] = (status.st_uid, status.st_mode, data)
    return found


def owned(user: User, *folders: str) -> set[str]:
    """Return the paths in these shared folders that belong to this user."""
    found = set()
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a file of another test, just removed
                    if entry.stat(follow_symlinks=False).st_uid == user.uid:
                        found.add(entry.path)
    return found


def test_s7_p9_another_user_cannot_read_change_or_signal_anything(
    users: tuple[User, User], place: Path, daemon_of: Callable[..., Daemon]
) -> None:
    """S7, P9, S9: Another user has no access by any verb, nor to any file, process or environment of the scheduler."""
    me, other = users
    shared = owned(me, "/tmp", "/var/tmp", "/dev/shm")
    script = place / "hold"
    script.write_text(HOLD)
    belongs(script, me, 0o755)
    (place / "jobs.txt").write_text("0,hold,,,0\n")
    belongs(place / "jobs.txt", me)
    mine = daemon_of(me, place, API_KEY="of mine").ready()
    wait_for(lambda: (place / "out.txt").exists() and (place / "out.txt").read_text(), f"the job runs\n{mine.said()}")
    # The supervisor records the pid of the job after the start of the job. After that, the files do not change.
    wait_for(lambda: "1 running" in me.gpujob(place, "status")[1], "the job is recorded as running")
    assert owned(me, "/tmp", "/var/tmp", "/dev/shm") == shared, "files in folders that all share"
    pids = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _owner(p) == me.uid]
    assert len(pids) >= 3 and mine.pid in pids  # scheduler, supervisor, job
    for pid in pids:
        for number in (0, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            assert not other.can(lambda p=pid, n=number: os.kill(p, n))
        for name in ("environ", "fd/1", "cwd", "mem"):
            assert not other.can(lambda p=pid, n=name: os.close(os.open(f"/proc/{p}/{n}", os.O_RDONLY)))
    before = snapshot(place)
    for words in VERBS:
        code, said = other.gpujob(place, *words.split())
        assert code == 1 and said.count("\n") == 1, (words, code, said)
        assert f"{place}/.gpujob: " in said and f"belongs to user {me.name}" in said, (words, said)
    assert {words.split()[0] for words in VERBS} | NOT_OF_ONE == {words[0] for words in all_verbs}
    code, said = other.gpujob(place, "start", "--gpus", "1")
    assert code == 1 and said.count("\n") == 1, said
    for words in (("doctor",), ("doctor", "--json"), ("config", "show"), ("config", "check")):
        code, said = other.gpujob(place, *words)
        assert "Traceback" not in said and "of mine" not in said and "hold" not in said, (words, said)
    files = [path for path in place.rglob("*") if path.name not in ("jobs.txt", "hold", "out.txt")]
    assert len(files) > 10
    for path in files:
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
            if path.is_dir():
                assert not other.can(lambda p=path: os.listdir(p)), path
            else:
                assert not other.can(lambda p=path, f=flags: os.close(os.open(p, f))), path
        assert not other.can(lambda p=path: p.rename(place / "theirs")) and not other.can(lambda p=path: p.chmod(0o777))
    for name in ("jobs.txt", ".gpujob/wakeup", "config.yaml"):
        assert not other.can(lambda n=name: (place / n).open("a"))
    with open("/proc/net/unix", encoding="utf-8") as stream:  # socket name by which schedulers find each other
        flag = next(line.split("@")[1].strip() for line in stream if f"@gpujob/{me.uid}/{mine.pid}/" in line)
    assert not other.can(lambda: socket.socket(socket.AF_UNIX).connect(f"\0{flag}"))
    after = snapshot(place)
    assert {k: v for k, v in before.items() if "gpu_scheduler" not in k} == {
        k: v for k, v in after.items() if "gpu_scheduler" not in k
    }
    code, said = me.gpujob(place, "status")
    assert code == 0 and "1 running" in said


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["sticky", "open"])
def test_s9_start_refuses_files_of_another_user(users: tuple[User, User], place: Path, mode: int) -> None:
    """S9, S8: `start` refuses a state folder, log folder or main log of another user, and leaves it unchanged."""
    me, other = users
    place.chmod(mode)
    hidden = place / "theirs"
    assert other.can(lambda: hidden.mkdir(0o777)) and other.can(lambda: hidden.chmod(0o777))
    for name, says in (
        (".gpujob", ""),
        ("gpu_scheduler_logs", ""),
        ("gpu_scheduler.log", "cannot open the main log"),
    ):
        path = place / name
        for make in (
            lambda p=path: p.mkdir(0o777),
            lambda p=path: p.symlink_to(hidden),
            lambda p=path: p.symlink_to(hidden / "new"),
            lambda p=path: (p.touch(), p.chmod(0o666)),
        ):
            assert other.can(make)
            before = snapshot(hidden)
            code, said = me.gpujob(place, "start", "--gpus", "1", GPUJOB_SET_GPU_INTERVAL="0")
            assert (code, said.count("\n")) == (1, 1), (name, said)
            if mode == 0o1777:
                assert name in said and says in said, said
            else:
                assert name in said or f"all users may write to it: chmod o-w {place}" in said, said
            if path.is_file() and not path.is_symlink():
                assert path.stat().st_size == 0
            assert snapshot(hidden) == before
            for verb in (("submit", "--", "true"), ("pause", "0")) if name == ".gpujob" else ():
                code, said = me.gpujob(place, *verb)
                assert code == 1 and said.count("\n") == 1 and name in said, (verb, said)
            assert other.can(lambda p=path: p.rmdir() if p.is_dir() and not p.is_symlink() else p.unlink())


def test_s9_a_state_file_of_another_user_is_not_obeyed(
    users: tuple[User, User], place: Path, daemon_of: Callable[..., Daemon]
) -> None:
    """S9, P9: In a sticky folder, the daemon ignores a state file that belongs to another user, at its start and later.

    The daemon also ignores a file of that user that has the name of one of the daemon's temporary files.
    """
    me, other = users
    os.chown(place, 0, 0)  # like /tmp: no user can move files of another user
    place.chmod(0o1777)
    state = place / "gpu_scheduler_state.json"
    wish = '{"paused_gpus": [0], "paused": true}'
    assert other.can(lambda: state.write_text(wish)) and other.can(lambda: state.chmod(0o644))
    assert other.can(lambda: (place / f".{state.name}.new-77").write_text(wish))
    mine = daemon_of(me, place, "--state-interval", "1").ready()
    wait_for(lambda: f"belongs to user {other.uid}: ignored and overwritten" in mine.said(), mine.said)
    code, said = me.gpujob(place, "submit", "--gpus", "1", "--wait", "--", "/bin/true")
    assert code == 0, (said, mine.said())
    assert other.can(state.unlink)
    code, said = me.gpujob(place, "pause", "0")
    assert code == 0, said
    # The daemon may first write the state file without the pause.
    wait_for(
        lambda: state.exists() and state.stat().st_uid == me.uid and '"paused_gpus": [0]' in state.read_text(),
        f"ours is painted\n{mine.said()}",
    )
    assert state.stat().st_mode & 0o777 == 0o600


def test_h17_root_leaves_nothing_in_a_users_folder(users: tuple[User, User], place: Path) -> None:
    """H17, S8: If root works in a user's folder, commands that change something are refused with the advice `sudo -u`.

    root leaves no file in this folder. Under sudo, the environment names the user's runtime folder and home folder;
    root leaves no file in these folders either.
    """
    me, _ = users
    (place / "home").mkdir()
    belongs(place / "home", me, 0o755)
    root = User("root", 0, 0)

    def tried(*words: str) -> tuple[int, str]:
        return root.gpujob(place, *words, GPUJOB_SET_GPU_INTERVAL="0", XDG_STATE_HOME=str(place / "home"))

    def of_root() -> list[Path]:
        return [path for path in place.rglob("*") if path.lstat().st_uid == 0]

    for words in ("start --gpus 1", "submit -- true", "pause 0", "reset", "recover", "add x.py", "queue pause",
                  f"start --gpus 1 --state-file {place}/x.json"):  # fmt: skip
        code, said = tried(*words.split())
        assert code in (1, 5) and said.count("\n") == 1 and of_root() == [], (words, code, said)
        assert f"sudo -u {me.name}" in said or code == 5, (words, said)
    own = place.parent / f"{place.name}-root"
    own.mkdir(mode=0o700)
    try:
        for words in (f"--log-dir {place}/logs", ""):
            code, said = root.gpujob(own, "start", "--gpus", "1", "--drain", *words.split(), GPUJOB_SET_GPU_INTERVAL="0",
                                     XDG_RUNTIME_DIR=str(place), XDG_STATE_HOME=str(place / "home"))  # fmt: skip
            assert code == (1 if words else 0) and of_root() == [], (words, said)
        code, said = me.gpujob(place, "submit", "--", "true")
        assert code == 0, said
        code, said = tried("status")
        assert code == 0 and "1 pending" in said, "root may look"
        for words in ("submit -- true", "cancel 1", "hold 1", "pause 0"):
            code, said = tried(*words.split())
            assert code == 1 and f"sudo -u {me.name}" in said and of_root() == [], (words, said)
    finally:
        import shutil

        shutil.rmtree(own)


@pytest.mark.parametrize("words", [(), ("--screen",)], ids=["direct", "screen"])
def test_f12_jobs_run_under_umask_0777(
    users: tuple[User, User], place: Path, daemon_of: Callable[..., Daemon], words: tuple[str, ...]
) -> None:
    """F12: Under umask 0777 a user's jobs run, also after kill -9: the modes of all files are set explicitly."""
    me, _ = users
    old = os.umask(0o777)
    try:
        assert me.gpujob(place, "submit", "--cpu", "--", "/bin/true")[0] == 0  # creates the state folder
        for number in range(2):
            mine = daemon_of(me, place, "--assign-retry-wait", "0.2", *words).ready()
            for more in ("x", "x" * 120_000):  # the supervisor gets a long start message in a file
                code, said = me.gpujob(place, "submit", "--cpu", "--wait", "--", "/bin/true", more, f"{number}")
                assert code == 0, (said, mine.said())
            os.kill(mine.pid, signal.SIGKILL)
            wait_for(mine.ended, "its end")
    finally:
        os.umask(old)
    made = [path for path in (place / ".gpujob").rglob("*") if not path.is_socket()]
    assert len(made) > 10
    for path in made:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
