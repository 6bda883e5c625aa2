"""Tests of a store on a file system that several machines share, or that has no locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.core.errors import SchedulerError
from scheduler.store import daemon_lock
from scheduler.store.daemon_lock import DaemonLock, Elsewhere, daemon_alive, registered
from scheduler.store.database import Database, open_for_reading
from scheduler.store.paths import Places
from scheduler.system.filesystems import file_system
from scheduler.system.proc import boot_id


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(str(tmp_path / "gpu_scheduler_state.json"))
    found.make()
    Database(found).close()
    return found


@pytest.mark.parametrize(
    "number, name, shared",
    [(0x6969, "NFS", True), (0xFF534D42, "SMB", True), (-0xACB2BE, "SMB", True), (0x65735546, "FUSE", True),
     (0x0BD00BD0, "Lustre", True), (0x00C36400, "Ceph", True), (0x01021997, "9P", True), (0xEF53, "ext4", False),
     (0x01021994, "tmpfs", False), (0x794C7630, "overlay", False), (0x2FC12FC1, "ZFS", False), (0x4D44, "FAT", False)],
)  # fmt: skip
def test_e16_shared_file_systems_are_recognized_by_their_type_number(number: int, name: str, shared: bool) -> None:
    """E16: A file system is recognized by its type number from statfs(2). The number of SMB may appear negative."""
    found = file_system(number)
    assert (found.name, found.shared, found.known) == (name, shared, True)


def test_e16_an_unknown_file_system_is_reported_as_unknown() -> None:
    found = file_system(0x1234)
    assert not found.known and not found.shared and "0x1234" in found.name


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_e16_without_working_locks_no_daemon_starts(places: Places, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """E16: On a file system without locks the start of a daemon is refused, and the error names a remedy.

    Examples are NFS without its lock service, and some FUSE file systems.
    """

    def flock(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(SchedulerError) as caught:
        DaemonLock(places).take({"pid": 7}, wait_s=0.1)
    assert "its file system has no locks" in str(caught.value) and "--state-file" in str(caught.value)
    assert not os.path.exists(places.daemon_info)
    with pytest.raises(SchedulerError, match="its file system has no locks"):
        daemon_alive(places)
    assert registered({"XDG_RUNTIME_DIR": os.path.dirname(places.state_file)}) == []


def test_e16_a_file_system_with_ineffective_locks_is_refused(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    with pytest.raises(SchedulerError, match="two processes could hold the same lock"):
        DaemonLock(places).take({"pid": 7}, wait_s=0.1)
    assert not os.path.exists(places.daemon_info)


def test_e16_commands_refuse_a_store_whose_daemon_runs_on_another_machine(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E16: While a daemon on another machine runs, commands on this machine neither read nor write the store."""
    other = DaemonLock(places)
    other.take({"pid": 4711, "boot": "another-boot", "host": "gpu2"})
    monkeypatch.setattr(daemon_lock, "TAKING_S", 0.05)
    before = {path.name: path.read_bytes() for path in Path(places.state_dir).iterdir() if path.is_file()}
    for use in (
        lambda: open_for_reading(places),
        lambda: Database(places),
        lambda: SchedulerClient(places.state_file).overview(),
    ):
        with pytest.raises(Elsewhere) as caught:
            use()
        text = str(caught.value)
        assert "runs on gpu2 (pid 4711)" in text and "run the command there" in text
    assert before == {path.name: path.read_bytes() for path in Path(places.state_dir).iterdir() if path.is_file()}
    other.leave()
    open_for_reading(places).close()


def test_e16_a_daemon_json_from_before_a_reboot_does_not_prevent_a_start(places: Places) -> None:
    """H01: If a daemon was killed before a reboot, its `daemon.json` is ignored, because no process holds the lock."""
    Path(places.daemon_info).write_text(json.dumps({"pid": 7, "boot": "another-boot", "host": "gpu2"}))
    open_for_reading(places).close()
    Database(places).close()


def test_e16_a_command_waits_for_the_daemon_json_of_a_daemon_that_is_starting(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E16: If a daemon holds the lock but has not written `daemon.json` yet, a command waits for this file."""
    Path(places.daemon_info).write_text(json.dumps({"pid": 7, "boot": "another-boot", "host": "gpu2"}))
    told = [daemon_lock.holder(places), daemon_lock.holder(places), {"pid": 8, "boot": boot_id()}]
    monkeypatch.setattr(daemon_lock, "daemon_alive", lambda places: True)
    monkeypatch.setattr(daemon_lock, "holder", lambda places: told.pop(0))
    daemon_lock.check_here(places)
    assert told == []
