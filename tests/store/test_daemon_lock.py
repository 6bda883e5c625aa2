"""Tests of the lock that allows one daemon for each state file, and of the register in which commands find daemons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.errors import SchedulerError
from scheduler.store.daemon_lock import DaemonLock, daemon_alive, holder, register, register_folder, registered
from scheduler.store.paths import Places

_HOLD = """
import os, sys
from scheduler.store.daemon_lock import DaemonLock, register
from scheduler.store.paths import Places
places = Places(sys.argv[1])
places.make()
daemon_lock = DaemonLock(places)
daemon_lock.take({"pid": os.getpid()})
register({"XDG_RUNTIME_DIR": sys.argv[2]}, sys.argv[1])
print("running", flush=True)
sys.stdin.readline()
daemon_lock.leave()
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(str(tmp_path / "gpu_scheduler_state.json"))
    found.make()
    return found


@pytest.fixture
def daemon(places: Places, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, places.state_file, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(places: Places, daemon: subprocess.Popen[str]) -> None:
    """S3.37: A second daemon is refused and changes nothing. The message names the pid of the first daemon."""
    assert daemon_alive(places)
    with pytest.raises(SchedulerError) as caught:
        DaemonLock(places).take({"pid": os.getpid()}, wait_s=0.1)
    assert f"pid {daemon.pid}" in str(caught.value) and places.state_file in str(caught.value)
    assert caught.value.exit_code == 1 and caught.value.do
    assert holder(places) == {"pid": daemon.pid}, "the refused one wrote nothing"
    assert daemon_alive(places)


def test_the_lock_is_free_after_its_holder_was_killed(places: Places, daemon: subprocess.Popen[str]) -> None:
    """S3.37: If a daemon was killed, a new daemon gets the lock, although `daemon.json` still contains the old pid."""
    daemon.kill()
    daemon.wait(30)
    assert not daemon_alive(places)
    assert holder(places) == {"pid": daemon.pid}
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": 7}, wait_s=5)
    assert daemon_alive(places)
    assert holder(places) == {"pid": 7}
    daemon_lock.leave()
    assert not daemon_alive(places)
    assert holder(places) == {}


def test_a_waiting_daemon_gets_the_released_lock(places: Places, daemon: subprocess.Popen[str]) -> None:
    """H: If a daemon waits for the lock, it gets the lock when the previous daemon ends. A quick restart needs this."""
    assert daemon.stdin is not None
    daemon.stdin.write("leave\n")
    daemon.stdin.flush()
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": 7}, wait_s=20)
    assert holder(places) == {"pid": 7}
    daemon_lock.leave()


def test_checking_for_a_daemon_leaves_no_descriptor_or_lock(places: Places, daemon: subprocess.Popen[str]) -> None:
    """If `daemon_alive` is called a thousand times, each call finds the living daemon, and no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    assert all(daemon_alive(places) for _ in range(1000))
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage collection may close other descriptors


def test_checks_for_a_daemon_do_not_prevent_a_start(places: Places) -> None:
    """H: A check whether a daemon lives holds the lock for a moment.

    A daemon that starts in this moment waits, then starts.
    """
    looker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom scheduler.store.daemon_lock import daemon_alive\nfrom scheduler.store.paths import Places\n"
            "print('looking', flush=True)\nwhile True: daemon_alive(Places(sys.argv[1]))",
            places.state_file,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert looker.stdout is not None and looker.stdout.readline() == "looking\n"
        for _ in range(50):
            daemon_lock = DaemonLock(places)
            daemon_lock.take({"pid": 7}, wait_s=30)  # the checking process may be descheduled while it holds the lock
            daemon_lock.leave()
    finally:
        looker.kill()
        looker.communicate(timeout=30)


def test_without_a_state_folder_no_daemon_is_alive(tmp_path: Path) -> None:
    """Contract 6: Without a state folder no daemon is alive, and the check creates nothing."""
    places = Places(str(tmp_path / "never.json"))
    assert not daemon_alive(places)
    assert holder(places) == {}
    assert not places.exist()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\x00"])
def test_an_unreadable_daemon_json_is_ignored(places: Places, text: str) -> None:
    """If `daemon.json` is invalid, it is ignored. Only the lock shows whether a daemon lives."""
    Path(places.daemon_info).write_text(text)
    assert holder(places) == {}
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": 7})
    with pytest.raises(SchedulerError):
        DaemonLock(places).take({"pid": 8}, wait_s=0.05)
    daemon_lock.leave()


def test_a_daemon_json_that_is_not_utf8_is_ignored(places: Places) -> None:
    """D: A `daemon.json` that is not UTF-8 counts as empty."""
    Path(places.daemon_info).write_bytes(b"\xff\xfe")
    assert holder(places) == {}


def test_the_register_lists_running_schedulers_only(
    places: Places, tmp_path: Path, daemon: subprocess.Popen[str]
) -> None:
    """Contract 2: The register lists the running schedulers. Ended schedulers and invalid entries are left out."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = Path(register_folder(environ))
    assert registered(environ) == [places.state_file]
    (folder / "1.json").write_text("{")
    (folder / "2.json").write_text("[]")
    (folder / "3.json").write_text(json.dumps({"state_file": str(tmp_path / "gone.json")}))
    (folder / "4.json").write_text(json.dumps({"state_file": places.state_file}))
    assert registered(environ) == [places.state_file]
    daemon.kill()
    daemon.wait(30)
    limit = time.monotonic() + 10
    while registered(environ) and time.monotonic() < limit:
        time.sleep(0.01)
    assert registered(environ) == []


def test_a_register_that_cannot_be_written_does_not_prevent_a_start(tmp_path: Path) -> None:
    """P8: If the register cannot be written, the scheduler still runs. Commands then need --state-file to find it."""
    (tmp_path / "gpujob").touch()
    assert register({"XDG_RUNTIME_DIR": str(tmp_path)}, "/x.json") == ""
    assert registered({"XDG_RUNTIME_DIR": str(tmp_path)}) == []


def test_the_register_has_private_modes(tmp_path: Path) -> None:
    """P9: At umask 000 the register's folder has mode 0700, and its files 0600."""
    old = os.umask(0)
    try:
        path = register({"XDG_RUNTIME_DIR": str(tmp_path)}, "/x.json")
    finally:
        os.umask(old)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700


def test_a17_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """A17, L7: Temporary files of dead processes, old start messages, and entries of dead daemons are removed."""
    places = Places(str(tmp_path / "state.json"))
    places.make()
    dead = subprocess.Popen(["true"])
    dead.wait()
    house, runtime = Path(places.state_dir), tmp_path / "run"
    gone = [house / f".daemon.json.new-{dead.pid}", house / f"packet-{dead.pid}-12"]
    stays = [house / f".daemon.json.new-{os.getppid()}", house / f"packet-{dead.pid}-13", house / "packet-notes"]
    for path in (*gone, *stays):
        path.touch()
    os.utime(gone[1], (1, 1))
    folder = runtime / "gpujob"
    folder.mkdir(parents=True)
    for name in (f"{dead.pid}.json", f".{dead.pid}.json.new-{dead.pid}", "notes.txt"):
        (folder / name).touch()
    daemon_lock = DaemonLock(places)
    daemon_lock.take({"pid": os.getpid()})
    mine = register({"XDG_RUNTIME_DIR": str(runtime)}, places.state_file)
    assert not any(path.exists() for path in gone) and all(path.exists() for path in stays)
    assert sorted(os.listdir(folder)) == sorted([os.path.basename(mine), "notes.txt"])
    daemon_lock.leave()


def test_a_fifo_at_the_path_of_daemon_json_does_not_block(tmp_path: Path) -> None:
    places = Places(str(tmp_path / "state.json"))
    places.make()
    os.mkfifo(places.daemon_info)
    assert holder(places) == {}
