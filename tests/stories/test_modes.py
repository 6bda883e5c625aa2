"""Files are private from their creation and never written through links; terminals are private; nothing listens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.core.log_message import LogMessage
from scheduler.daemon.main_log import MainLog
from scheduler.runners.supervisor import Supervisor
from scheduler.system.atomic_files import append_line, replace_file, swap_file
from tests.stories.harness import ROOT, Scheduler, wait_for
from tests.stories.people import ROOT_ONLY, Daemon, User

CALL = re.compile(
    r"^(?:\[pid +)?(?P<pid>\d+)\]? +(?P<name>openat|open|creat|mkdir|mkdirat|mknod|mknodat|umask|bind)\((?P<args>.*)\) += (?P<result>\S+)"
)


def calls_of(trace: Path, folder: Path) -> list[tuple[str, str, int]]:
    """Return (path, system call, permission bits at creation) of each file and folder created in ``folder``."""
    umasks: dict[str, int] = {}
    made: dict[str, tuple[str, str, int]] = {}
    # One file per process: in a single file, strace splits calls that overlap into two lines.
    lines = [
        f"{path.suffix[1:]} {line}"
        for path in sorted(trace.parent.glob(f"{trace.name}.*"))
        for line in path.read_text(errors="replace").splitlines()
    ]
    for line in lines:
        found = CALL.match(line)
        if not found or found["result"].startswith("-1"):
            continue
        name, args = found["name"], found["args"]
        if name == "umask":
            umasks[found["pid"]] = int(args, 8)
            continue
        path = re.search(r'"([^"]*)"', args)
        if path is None or not path[1].startswith(str(folder)) or (name.startswith("open") and "O_CREAT" not in args):
            continue
        mode = re.search(r", (0[0-7]*)$", args)
        now = (int(mode[1], 8) if mode else 0o666) & ~umasks.get(found["pid"], 0)
        made.setdefault(path[1], (path[1], name, now))  # a later O_CREAT of the same file creates nothing
    return list(made.values())


def test_s5_s16_every_file_is_created_private(scheduler: Callable[..., Scheduler]) -> None:
    """S5, S16, F12: Under umask 000, no file or folder is created with rights for others, as strace shows.

    strace watches `submit` and a scheduler. The scheduler runs a job from the jobs file, and renames an invalid state
    file. At the end, files have mode 600 and folders mode 700.
    """
    if shutil.which("strace") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("strace is not installed")
        pytest.skip("strace is not installed")
    s = scheduler(gpus=1)
    trace = s.folder / "trace"
    plain = s.command
    s.command = ["sh", "-c", 'umask 000; exec "$@"', "sh", "strace", "-ff", "-qq", "-o", str(trace),
                 "-e", "trace=open,openat,creat,mkdir,mkdirat,mknod,mknodat,umask,bind", *plain]  # fmt: skip
    s.append(s.line("a"))
    s.start(ready=False)
    wait_for(lambda: "scheduler started" in s.said(), "start")
    s.wait_ended(1)
    state = s.folder / "gpu_scheduler_state.json"
    old = os.umask(0)
    try:
        submit = [
            "strace",
            "-ff",
            "-qq",
            "-o",
            str(s.folder / "trace2"),
            "-e",
            "trace=open,openat,creat,mkdir,mkdirat,umask",
            *plain,
        ]
        subprocess.run(
            [*submit, "submit", "--cpu", "--wait", "--", "true"],
            cwd=s.folder,
            env=s.environ,
            check=True,
            capture_output=True,
        )
        subprocess.run([*plain, "add", "job.py", "-h"], cwd=s.folder, env=s.environ, check=False, capture_output=True)
        state.write_text("[")
        wait_for(lambda: list(s.folder.glob("*.bad-*")), "set aside")
    finally:
        os.umask(old)
    s.cli("pause", "0")
    subprocess.run(["kill", str(json.loads((s.folder / ".gpujob/daemon.json").read_text())["pid"])], check=True)
    assert s.process is not None and s.process.wait(30) == 0
    made = calls_of(trace, s.folder)
    there = {path for path, _, _ in made}
    made += [one for one in calls_of(s.folder / "trace2", s.folder) if one[0] not in there]
    ours = [
        (path, call, mode)
        for path, call, mode in made
        if not path.endswith(("ledger", ".pyc")) and "/trace" not in path
    ]
    assert {"store.db", "daemon.lock", "wakeup", "1.1"} <= {Path(path).name for path, _, _ in ours} and len(ours) > 15
    assert any("store.db-wal" in path for path, _, _ in ours) and any("/env/" in path for path, _, _ in ours)
    assert [one for one in ours if one[2] & 0o077] == []
    for path in [
        *s.folder.rglob(".gpujob/**/*"),
        *s.folder.glob("gpu_scheduler*"),
        *s.folder.glob("gpu_scheduler_logs/*"),
    ]:
        mode = path.lstat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


def _try_to_open(folder: str, got: str) -> None:
    """Try to open each file and folder under ``folder``, in an endless loop.

    If one can be opened, append its path to the file ``got``/opened.
    """
    while True:
        for top, folders, names in os.walk(folder):
            for name in [*folders, *names]:
                path = os.path.join(top, name)
                if name in ("jobs.txt", "got") or top.startswith(got):
                    continue
                for flags in (os.O_RDONLY, os.O_WRONLY):
                    try:
                        fd = os.open(path, flags | os.O_NONBLOCK)
                    except OSError:
                        continue
                    os.close(fd)
                    with open(os.path.join(got, "opened"), "a", encoding="utf-8") as out:
                        out.write(f"{path} {flags}\n")


@ROOT_ONLY
def test_s5_another_user_can_open_no_file_while_the_scheduler_starts(
    users: tuple[User, User], place: Path, daemon_of: Callable[..., Daemon]
) -> None:
    """S5: While a scheduler with umask 000 starts and runs jobs, another user can at no time open one of its files.

    The scheduler is started three times. A process of the other user tries to open every name in a loop.
    """
    me, other = users
    got = place.parent / f"{place.name}-got"
    got.mkdir()
    os.chown(got, other.uid, other.gid)
    (place / "jobs.txt").touch()
    os.chown(place / "jobs.txt", me.uid, me.gid)
    watcher = os.fork()
    if not watcher:
        try:
            os.setgroups([])
            os.setresgid(other.gid, other.gid, other.gid)
            os.setresuid(other.uid, other.uid, other.uid)
            _try_to_open(str(place), str(got))
        finally:
            os._exit(1)
    old = os.umask(0)
    try:
        for _ in range(3):
            daemon = daemon_of(me, place, "--drain", "--state-interval", "1")
            for number in range(2):
                code, said = me.gpujob(place, "submit", "--cpu", "--env", f"N={number}", "--", "/bin/true")
                assert code == 0, said
            wait_for(daemon.ended, f"drained\n{daemon.said()}")
        assert os.waitpid(watcher, os.WNOHANG) == (0, 0)
        assert not (got / "opened").exists(), (got / "opened").read_text()
        (place / "gpu_scheduler.log").chmod(0o604)  # proves that the watcher notices a file that it may open
        wait_for((got / "opened").exists, "the watcher opens what it may")
    finally:
        os.umask(old)
        os.kill(watcher, 9)
        os.waitpid(watcher, 0)
        shutil.rmtree(got)


def _swap(path: str, victim: str, stop: object) -> None:
    """Replace ``path`` by a link to ``victim``, then by a file, then remove it; repeat until ``stop`` is set."""
    link, plain = f"{path}.l", f"{path}.p"
    while not stop.is_set():  # type: ignore[attr-defined]
        try:
            os.symlink(victim, link)
            os.rename(link, path)
            with open(plain, "wb") as out:
                out.write(b"x")
            os.rename(plain, path)
            os.unlink(path)
        except OSError:
            continue


@pytest.mark.parametrize("what", ["picture", "info", "main log", "job log", "add"])
def test_s8_nothing_is_written_through_a_link_that_replaces_a_file(tmp_path: Path, what: str) -> None:
    """S8: If another process replaces a file by a link during a write, the target of the link is not changed.

    There is one exception: `add` may append whole lines to the target. A write may fail, for example because the path
    is a link at that moment. For each kind of write, the test tries at least 2000 writes, and continues until more than
    50 of them have succeeded: many may fail in a row if the other process does not run for a while.
    """
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious\n")
    folder = tmp_path / "ours"
    folder.mkdir()
    path = str(folder / "name")
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    swapper = context.Process(target=_swap, args=(path, str(victim), stop))
    swapper.start()
    refused = written = 0
    limit = time.monotonic() + 60
    try:
        while (round_ := written + refused) < 2000 or written <= 50:
            assert time.monotonic() < limit, f"{written} written, {refused} refused"
            try:
                if what == "picture":
                    out = swap_file(path, b"ours\n", there=bool(round_ % 2))
                    if out >= 0:
                        os.close(out)
                elif what == "info":
                    replace_file(path, b"ours\n", sync=False)
                elif what == "main log":
                    log = MainLog(path)
                    log(LogMessage("ours"))
                    log.close()
                elif what == "job log":
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)  # `open_log` refuses an existing file: it may belong to another scheduler
                    os.close(Supervisor.open_log(None, path))  # type: ignore[arg-type,func-returns-value]
                else:
                    append_line(str(folder / "sub" / ".." / "name") if round_ % 2 else path, "ours", _mine)
                written += 1
            except OSError:
                refused += 1
    finally:
        stop.set()
        swapper.join(30)
    assert victim.read_bytes() == b"precious\n" or what == "add"
    if what == "add":  # `add` resolves links of the same user, then opens the result without following links
        assert set(victim.read_bytes().splitlines()) <= {b"precious", b"ours"}


def _mine(status: os.stat_result) -> None:
    assert status.st_uid == os.getuid()


def test_s10_no_other_user_can_write_to_the_terminal_of_a_job(screens) -> None:
    """S10: No other user can write to the terminal of a job (with `write` or `wall`).

    The screen session does not use screen's multi-user mode.
    """
    s = screens()
    script = s.folder / "look.sh"
    script.write_text(
        '#!/bin/sh\nstat -c "%a %u" "$(tty)" > mode; stat -c %a "$SCREENDIR" > sockets\nwhile [ ! -e go ]; do sleep 0.05; done\n'
    )
    script.chmod(0o755)
    s.append("0,look.sh")
    s.start()
    wait_for(lambda: (s.folder / "sockets").exists() and (s.folder / "sockets").read_text(), "it looks")
    mode, owner = (s.folder / "mode").read_text().split()
    assert int(mode, 8) & 0o022 == 0 and int(owner) == os.getuid(), mode
    assert (s.folder / "sockets").read_text() == "700\n"
    rc = (s.folder / ".gpujob" / "sessions" / "screenrc").read_text()
    assert not re.search(r"multiuser|acladd|aclchg|aclumask|writelock|exec ", rc)
    (s.folder / "go").touch()
    s.wait_ended(1)


@pytest.mark.smoke
def test_s26_the_wheel_contains_only_the_package(tmp_path: Path) -> None:
    """S26: The wheel contains only the package, no tests or secrets, and requires only the agreed packages."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "jobs.example.txt", "llm_config.json"):
        shutil.copy(ROOT / name, source)
    for name in ("scheduler", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "bin", source / "tests")
    for name in ("web-token", "scheduler/.env", "id_rsa", "store.db"):
        (source / name).write_text("secret")
    if importlib.util.find_spec("hatchling") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("hatchling is not installed")
        pytest.skip("hatchling is not installed")
    code = "import sys; from hatchling import build as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
        (meta,) = (wheel.read(name).decode() for name in names if name.endswith("METADATA"))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"scheduler", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [
        n
        for n in names
        if n.startswith("tests/") or re.search(r"test_|conftest|token|secret(?!s\.py)|\.db|\.env|\.pyc|\.key|\.pem", n)
    ]
    needs = {
        re.split(r"[ ;<>=\[!~(]", line[15:])[0].lower()
        for line in meta.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert needs <= {
        "watchdog",
        "pyyaml",
        "typer",
        "filelock",
        "gputil",
        "setuptools",
        "nvidia-ml-py",
        "psutil",
        "rich",
        "msgspec",
    }, needs


@pytest.mark.smoke
def test_s1_without_a_web_page_no_socket_accepts_connections(scheduler: Callable[..., Scheduler]) -> None:
    """S1: Without a web page, scheduler and supervisor have only Unix sockets, and none accepts connections."""
    s = scheduler(gpus=1)
    s.start()
    mine = set()
    for pid in (s.pid, s.supervisor_pid()):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the process has closed it in the meantime
                if (name := os.readlink(fd)).startswith("socket:["):
                    mine.add(name[8:-1])
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    assert mine and mine <= {words[6] for words in local}, "nothing but what stays on this machine"
    assert {words[3] for words in local if words[6] in mine} == {"00000000"}, "none listens (00010000)"
