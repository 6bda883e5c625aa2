"""Tests of the main log: a record is one line, the log is rotated, and it may be moved, removed or replaced."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from scheduler.core.log_message import LogMessage
from scheduler.daemon.main_log import MainLog


def test_each_log_record_is_one_line_and_is_written_at_a_flush(tmp_path: Path) -> None:
    """S17, S18: A text with a line break is one record; records are written only at a flush."""
    log = MainLog(str(tmp_path / "log"))
    log(LogMessage("one\ntwo \x1b[2J"))
    log(LogMessage("three", 30))
    assert (tmp_path / "log").read_text() == ""
    log.flush()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.endswith(r"INFO one\x0atwo \x1b[2J") and second.endswith("WARNING three")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    log.close()


def test_log_rotation_keeps_five_old_logs(tmp_path: Path) -> None:
    log = MainLog(str(tmp_path / "log"), most_bytes=100)
    for n in range(20):
        log(LogMessage(f"record {n} {'x' * 60}"))
        log.flush()
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1", "log.2", "log.3", "log.4", "log.5"]
    assert "record 19" in (tmp_path / "log").read_text() and "record 18" in (tmp_path / "log.1").read_text()


def test_p8_two_processes_that_rotate_one_log_lose_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F16: Two schedulers write the same log.

    If one of them writes while the other rotates the log, no record is lost.
    """
    one, other = (MainLog(str(tmp_path / "log"), most_bytes=400) for _ in range(2))
    move, told, within = os.replace, list[str](), list[int]()

    def say(log: MainLog) -> None:
        told.append(f"record {len(told)} {'x' * 60}")
        log(LogMessage(told[-1]))
        log.flush()

    def replace(old: str, new: str) -> None:
        if within:
            return move(old, new)
        within.append(1)
        try:
            say(other)
            move(old, new)
        finally:
            say(other)
            within.clear()

    monkeypatch.setattr(os, "replace", replace)
    for _ in range(5):
        say(one)
    assert len(told) > 9 and (tmp_path / "log.1").exists() and not (tmp_path / "log.5").exists()
    kept = "".join(path.read_text() for path in tmp_path.iterdir())
    assert [text for text in told if kept.count(text) != 1] == []
    one.close()
    other.close()


def test_s3_42_the_log_is_rotated_at_10_mb_and_five_old_logs_are_kept() -> None:
    """S3.42: The log is rotated at 10 MB, and five old logs are kept, as documented."""
    assert inspect.signature(MainLog).parameters["most_bytes"].default == 10 << 20
    assert inspect.signature(MainLog).parameters["kept"].default == 5


def test_a_removed_log_is_created_again_without_a_lost_descriptor(tmp_path: Path) -> None:
    log = MainLog(str(tmp_path / "log"), most_bytes=200)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(10):
        (tmp_path / "log").unlink()
        log(LogMessage(f"record {n} {'x' * 150}"))
        log.flush()
        assert f"record {n}" in (tmp_path / "log").read_text()
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage collection may close other descriptors
    log.close()


@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\nb", "a\x0bb\x0cc", "a\x85b", "a\u2028b\u2029c", "a\x1b[2Jb\x00", "a\udcffb", "\u202eevil"]
)
def test_s18_any_text_is_logged_as_one_line(tmp_path: Path, text: str) -> None:
    """S17, S18: Any text is written as one line of printable characters."""
    log = MainLog(str(tmp_path / "log"))
    log(LogMessage(text))
    log.close()
    written = (tmp_path / "log").read_text()
    assert written.endswith("\n") and len(written.splitlines()) == 1
    assert all(char.isprintable() for char in written[:-1])


def test_after_logrotate_the_log_is_reopened_under_its_name(tmp_path: Path) -> None:
    log = MainLog(str(tmp_path / "log"))
    log(LogMessage("one"))
    log.flush()
    os.rename(tmp_path / "log", tmp_path / "log.moved")
    log(LogMessage("two"))
    log.flush()
    assert "one" in (tmp_path / "log.moved").read_text() and "two" not in (tmp_path / "log.moved").read_text()
    assert "two" in (tmp_path / "log").read_text() and (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    log._size = log.most_bytes - 1
    os.truncate(tmp_path / "log", 0)  # copytruncate
    log(LogMessage("three"))
    log.close()
    assert (tmp_path / "log").read_bytes().startswith(b"20") and not (tmp_path / "log.1").exists()


def test_log_records_lost_on_a_full_disk_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F01: When the disk has space again, a record states how many records were lost.

    A record that was written only in part has a line of its own.
    """
    log = MainLog(str(tmp_path / "log"))
    write, room = os.write, [10, 0]

    def full(fd: int, data: bytes) -> int:
        left = room.pop(0)
        if not left:
            raise OSError(28, "No space left on device")
        return write(fd, data[:left])

    monkeypatch.setattr("scheduler.daemon.main_log.os.write", full)
    for words in (["one", "two"], ["three"]):
        for word in words:
            log(LogMessage(word))
        with pytest.raises(OSError, match="No space left"):
            log.flush()
    monkeypatch.undo()
    log(LogMessage("four"))
    log.flush()
    log(LogMessage("five"))
    log.close()
    torn, lost, four, five = (tmp_path / "log").read_text().splitlines()
    assert len(torn) == 10
    assert lost.endswith("WARNING lost log records: 3 (No space left on device)")
    assert four.endswith("INFO four") and five.endswith("INFO five")


@pytest.mark.parametrize("what", ["fifo", "folder", "link"])
def test_a_log_path_that_is_no_regular_file_is_refused(tmp_path: Path, what: str) -> None:
    """S8: If a FIFO, folder or link is at the path of the log, the start of the scheduler fails.

    If a FIFO, folder or link replaces the log of a running scheduler, records are lost until a user removes this FIFO,
    folder or link. A new log then states how many records were lost.
    """
    path = tmp_path / "log"
    log = MainLog(str(path))
    path.unlink()
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink(tmp_path / "target", path)}
    make[what](path)
    with pytest.raises(OSError):
        MainLog(str(path))
    log(LogMessage("one"))
    with pytest.raises(OSError):
        log.flush()
    assert not (tmp_path / "target").exists()
    path.rmdir() if what == "folder" else path.unlink()
    log(LogMessage("two"))
    log.close()
    assert "lost log records: 1 (" in path.read_text() and path.read_text().endswith("INFO two\n")


def test_a_log_that_cannot_be_rotated_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the log cannot be renamed, it is not rotated, and records are still written."""
    log = MainLog(str(tmp_path / "log"), most_bytes=100)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("scheduler.daemon.main_log.os.replace", refused)
        for n in range(5):
            log(LogMessage(f"record {n} {'x' * 60}"))
            log.flush()
    assert os.listdir(tmp_path) == ["log"] and len((tmp_path / "log").read_text().splitlines()) == 5
    log(LogMessage("now"))
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"] and "now" in (tmp_path / "log").read_text()
