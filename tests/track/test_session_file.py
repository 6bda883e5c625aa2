"""Tests of session files: they are changed under a lock, replaced as a whole, private, and found from subfolders."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from scheduler.core.errors import NotFound
from scheduler.system.locks import try_lock
from scheduler.track import session_file as sessions
from scheduler.track.plan import added
from scheduler.track.session_file import NoSession, SessionDamaged, SessionFiles, find_root

T0 = 1_700_000_000.0


@pytest.fixture
def files(tmp_path: Path) -> SessionFiles:
    return SessionFiles(str(tmp_path))


def test_s0_2_sessions_are_found_in_the_nearest_folder_above(files: SessionFiles, tmp_path: Path) -> None:
    """S0.2: Sessions are found in the current folder. If it has none, they are found in the nearest folder above it."""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    with pytest.raises(NoSession):
        find_root(str(below))
    files.create("n", T0)
    assert find_root(str(below)) == find_root(str(tmp_path)) == str(tmp_path)
    SessionFiles(str(below)).create("n", T0)
    assert find_root(str(below)) == str(below)


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_s0_2_session_files_are_private_under_any_umask(files: SessionFiles, mask: int) -> None:
    """S0.2: Under any umask only the owner of a session can read and write the files of the session."""
    before = os.umask(mask)
    try:
        name = files.create("n", T0).id
        with files.changing(name) as session:
            added(session, "x", ".", T0)
        with files.running_all(name) as turn:
            assert turn.come() and turn.whose() == str(os.getpid())
    finally:
        os.umask(before)
    assert len(files.read(name).commands) == 1
    for path in (Path(files.sessions_dir), *Path(files.sessions_dir).rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == 0o700 if path.is_dir() else not mode & 0o077, path


def test_an_unchanged_session_is_not_written(files: SessionFiles) -> None:
    """The session file is not written if nothing has changed, or if the change has failed."""
    name = files.create("n", T0).id

    def written() -> tuple[int, int, int]:
        status = os.stat(files.path(name))  # not the whole status: reading changes the access time
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    before = written()
    with files.changing(name):
        pass
    with pytest.raises(ZeroDivisionError), files.changing(name) as session:
        added(session, "x", ".", T0)
        raise ZeroDivisionError
    assert written() == before and not files.read(name).commands


def test_s0_9_a_reader_gets_one_complete_file_during_a_change(files: SessionFiles) -> None:
    """S0.9: A change replaces the session file and never overwrites it.

    A reader of the old file reads it to its end.
    """
    name = files.create("n", T0).id
    with open(files.path(name)) as old:
        with files.changing(name) as session:
            added(session, "x", ".", T0)
        assert json.load(old)["commands"] == []
    assert len(files.read(name).commands) == 1


def test_s0_9_the_error_for_a_busy_session_lock_names_the_cause(
    files: SessionFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S0.9: If another process holds the lock for too long, a change fails. The error names the cause.

    When the lock is released, the next change succeeds.
    """
    name = files.create("n", T0).id
    monkeypatch.setattr(sessions, "LOCK_WAIT_S", 0.05)
    fd = os.open(os.path.join(files.sessions_dir, "lock"), os.O_RDWR)
    try:
        assert try_lock(fd)
        with pytest.raises(Exception, match="another gpujob track has held the lock"), files.changing(name):
            raise AssertionError
    finally:
        os.close(fd)
    with files.changing(name):
        pass


def test_s0_9_a_removed_session_lock_is_created_again(files: SessionFiles) -> None:
    """S0.9: If the lock file was removed, a change creates and locks a new one.

    It does not wait for the removed file.
    """
    name = files.create("n", T0).id
    path = os.path.join(files.sessions_dir, "lock")
    with files.changing(name):
        os.unlink(path)
        with files.changing(name) as session:  # `changing` locks a new file and does not wait
            added(session, "x", ".", T0)
        assert os.path.exists(path)


def test_other_files_are_no_sessions_and_existing_folders_reserve_their_id(files: SessionFiles) -> None:
    """A file whose name is not the name of a session is not read as a session.

    If the folder of an id exists, a new session gets another id.
    """
    first = files.create("a", T0).id
    second = files.create("b", T0).id
    assert second == f"{first}-2" and files.names() == [first, second] and files.newest() == second
    for name in ("notes.json", ".20261122-091500.json.new-5", "20261122-0915.json"):
        Path(files.sessions_dir, name).write_text("{}")
    assert files.names() == [first, second]
    files.delete(second)
    os.mkdir(files.folder(second))
    assert files.create("c", T0).id == f"{first}-3"
    for name in (second, "nothing", "../x", ""):
        with pytest.raises(NotFound):
            files.delete(name)
        with pytest.raises(NotFound):
            files.read(name)


def test_s0_14_a_session_that_is_no_regular_file_is_reported_as_damaged(files: SessionFiles, tmp_path: Path) -> None:
    """S0.14: A session file that is a pipe, folder, link or invalid JSON raises SessionDamaged without waiting."""
    name = files.create("n", T0).id
    path = Path(files.path(name))
    text = path.read_text()
    for make in (lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to(tmp_path / "real")):
        path.unlink(missing_ok=True)
        (tmp_path / "real").write_text(text)
        make()
        with pytest.raises(SessionDamaged, match="cannot read the session"):
            files.read(name)
        if path.is_dir():
            path.rmdir()
    path.unlink()
    path.write_text("[" * 100_000)
    with pytest.raises(SessionDamaged):
        files.read(name)


def test_a_full_disk_keeps_the_old_session_file(files: SessionFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a write fails on a full disk, the old file stays and no temporary file remains."""
    name = files.create("n", T0).id

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("scheduler.system.atomic_files.write_all", full)
        with pytest.raises(OSError), files.changing(name) as session:
            added(session, "x", ".", T0)
    assert files.read(name).commands == []
    assert sorted(os.listdir(files.sessions_dir)) == sorted([name, f"{name}.json", "lock"])


def test_leftover_files_of_killed_trackers_are_removed(files: SessionFiles) -> None:
    """If a tracker was killed, the files that it left are removed. The socket of a living tracker is kept.

    A change removes temporary files, and `make_folder` removes sockets.
    """
    name = files.create("n", T0).id
    half = Path(files.sessions_dir, f".{name}.json.new-99")
    half.touch()
    dead, living = f"caller-{1 << 23}-ab", f"caller-{os.getpid()}-ab"
    for each in (dead, living):
        Path(files.folder(name), each).touch()
    with files.changing(name) as session:
        added(session, "x", ".", T0)
    files.make_folder(name)
    assert not half.exists() and os.listdir(files.folder(name)) == [living]


def test_s0_10_only_one_process_at_a_time_has_the_run_all_lock(files: SessionFiles) -> None:
    """S0.10: Only one process at a time has the lock of `run-all`. The lock is free when this process has closed it."""
    name = files.create("n", T0).id
    with files.running_all(name) as one, files.running_all(name) as two:
        assert one.come() and one.come() and not two.come() and two.whose() == str(os.getpid())
    with files.running_all(name) as three:
        assert three.come()
