"""Tests of the journal's file: appends, rewrites, lines that were cut off, lines of other programs, and full disks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.journal import KEYS, line_of
from scheduler.store import journal_file
from scheduler.store.journal_file import JournalFile


def record(job: int, status: str = "pending", **changes: Any) -> bytes:
    history = [[changes.pop("accepted", "now"), "pending"]]
    return line_of(dict.fromkeys(KEYS) | {"id": job, "command": "x", "status": status, "history": history} | changes)


class Store:
    """A journal, and a simulated store: it has the jobs 1 to 9, all of them accepted at the time "now".

    ``lines``: job id → the line that a rewrite writes for this job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[int, bytes] = {}
        self.file = JournalFile(
            str(path), lambda who: who[0] < 10 and who[1] == "now", lambda torn: record(3).startswith(torn)
        )

    def write_new_file(self) -> None:
        for _ in self.file.write_new_file(self.lines[job] for job in sorted(self.lines)):
            continue

    def bad(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.name}.torn-*"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "queue.jsonl")
    made.lines = {1: record(1), 3: record(3, "running")}
    yield made
    made.file.close()
    assert not list(tmp_path.glob(".*.new-*"))


def test_s1_6_a_rewritten_journal_is_private_and_has_one_line_for_each_job(store: Store) -> None:
    """S1.6: Lines are appended. After a rewrite the journal has one line for each job, and is private at any umask."""
    old = os.umask(0o777)
    try:
        store.write_new_file()
    finally:
        os.umask(old)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert store.path.read_bytes() == record(1) + record(3, "running") and not store.file.appended
    assert store.file.append(record(3, "completed") + record(4))
    assert store.file.appended and not store.file.grown
    assert store.path.read_bytes() == record(1) + record(3, "running") + record(3, "completed") + record(4)
    store.lines |= {3: record(3, "completed"), 4: record(4)}
    store.write_new_file()
    assert store.path.read_bytes() == record(1) + record(3, "completed") + record(4)


def test_s1_6_a_rewrite_of_the_journal_keeps_lines_of_other_programs_first(store: Store) -> None:
    """S1.6: A rewrite keeps the lines of other programs, and the last line of each job that was deleted from the store.

    These lines come first. The lines of the jobs in the store follow.
    """
    foreign = b'{"note": "mine"}\n[1, 2]\n{"id": 3}\n"text"\n'
    store.path.write_bytes(
        record(1, "failed") + foreign + b"\n \n" + record(77) + record(88) + record(77, "completed") + record(3)
    )
    store.write_new_file()
    expected = foreign + record(88) + record(77, "completed")
    assert store.path.read_bytes() == expected + record(1) + record(3, "running")
    assert not store.bad() and not store.file.told
    store.write_new_file()
    assert store.path.read_bytes() == expected + record(1) + record(3, "running")


def test_a_rewrite_of_the_journal_keeps_lines_of_an_earlier_scheduler_with_the_same_ids(store: Store) -> None:
    """A rewrite keeps lines of jobs of an earlier scheduler.

    These jobs have the same ids as jobs in the store, but were accepted at other times.
    """
    store.path.write_bytes(record(1, "failed", accepted="then") + record(1, "running") + record(3, accepted="before"))
    for _ in range(2):
        store.write_new_file()
        before = record(1, "failed", accepted="then") + record(3, accepted="before")
        assert store.path.read_bytes() == before + record(1) + record(3, "running")


def test_s1_12_a_cut_off_journal_line_of_the_scheduler_is_rewritten(store: Store) -> None:
    """S1.12: If a line of the scheduler was cut off, the complete line replaces it.

    The lines of other jobs are kept.
    """
    for cut in range(1, len(record(3)) - 1):
        store.path.write_bytes(record(1) + b'{"mine": 1}\n' + record(3)[:cut])
        store.write_new_file()
        assert store.path.read_bytes() == b'{"mine": 1}\n' + record(1) + record(3, "running")
    assert not store.bad() and store.file.told[0] == (f"{store.path}: an incomplete line was completed", 20)


@pytest.mark.parametrize("torn", [b'{"id": 50, "comm', b"\0" * 5000, b"note", b'{"mine": [1, 2', b"\xff\xfe"])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_s1_12_a_cut_off_journal_line_of_another_program_is_moved_aside(store: Store, torn: bytes, end: bytes) -> None:
    """S1.12: A damaged line that the scheduler did not write is moved to a private file, and this is reported."""
    store.path.write_bytes(b'{"mine": 1}\n' + record(1) + torn + end)
    store.write_new_file()
    assert store.path.read_bytes() == b'{"mine": 1}\n' + record(1) + record(3, "running")
    (bad,) = store.bad()
    assert bad.read_bytes() == torn + b"\n" and stat.S_IMODE(bad.stat().st_mode) == 0o600
    assert store.file.told == [(f"{store.path}: 1 line is not JSON and was moved to {bad}", 30)]


def test_s1_12_damaged_journal_lines_are_moved_to_one_new_file_for_each_rewrite(store: Store) -> None:
    """S1.12: Each rewrite moves all damaged lines to one new file, also if two rewrites run in the same second."""
    for _ in range(2):
        store.path.write_bytes(b"one\n" + record(1) + b"two\n" + record(99) + record(3)[:30] + b"\n" + record(3))
        store.write_new_file()
        assert store.path.read_bytes() == record(99) + record(1) + record(3, "running")
    assert [bad.read_bytes() for bad in store.bad()] == [b"one\ntwo\n"] * 2


def test_a_complete_last_journal_line_without_newline_is_kept(store: Store) -> None:
    """A complete last line without a newline is kept, because some editors remove the last newline."""
    store.path.write_bytes(record(1) + b'{"mine": 1}')
    store.write_new_file()
    assert store.path.read_bytes() == b'{"mine": 1}\n' + record(1) + record(3, "running")
    store.path.write_bytes(store.path.read_bytes().rstrip(b"\n"))
    store.write_new_file()
    assert store.path.read_bytes() == b'{"mine": 1}\n' + record(1) + record(3, "running")
    assert not store.bad() and not store.file.told


def test_an_overlong_journal_line_is_moved_piece_by_piece(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line longer than ``LONGEST`` is moved aside in pieces. The lines after it are read."""
    monkeypatch.setattr(journal_file, "LONGEST", 1000)
    monkeypatch.setattr(journal_file, "PIECE", 700)
    store.path.write_bytes(b'["' + b"x" * 4000 + b'"]\n' + b"[1]\n")
    store.write_new_file()
    assert store.path.read_bytes() == b"[1]\n" + record(1) + record(3, "running")
    assert store.bad()[0].read_bytes() == b'["' + b"x" * 4000 + b'"]\n'


def test_an_append_to_a_removed_cut_or_replaced_journal_returns_false(store: Store) -> None:
    """If the journal's file was removed, cut or replaced, an append writes nothing and returns False."""
    assert not store.file.append(record(4))
    store.write_new_file()

    def replaced() -> None:
        store.path.rename(store.path.with_name("moved"))
        store.path.write_bytes(b'{"mine": 1}\n')

    for meddle in (store.path.unlink, lambda: os.truncate(store.path, 10), replaced):
        meddle()
        before = store.path.read_bytes() if store.path.exists() else b""
        assert not store.file.append(record(4))
        assert (store.path.read_bytes() if store.path.exists() else b"") == before
        store.write_new_file()
        assert store.path.read_bytes().endswith(record(1) + record(3, "running"))
        assert store.file.append(b"")


def test_an_append_first_completes_an_unfinished_line_of_another_program(store: Store) -> None:
    """If the last line is an unfinished line of another program, an append first adds a newline to it."""
    store.write_new_file()
    with store.path.open("ab") as stream:
        stream.write(b'{"half": ')
    assert store.file.append(record(4))
    assert store.path.read_bytes().endswith(b'\n{"half": \n' + record(4))


def test_lines_appended_during_a_rewrite_of_the_journal_are_kept(store: Store) -> None:
    """Lines of other programs are kept if they are appended during a rewrite.

    If a line of a job in the store is appended during the rewrite, it is dropped: the rewrite writes the line of this
    job from the store.
    """
    store.path.write_bytes(b'{"mine": 1}\n' + record(1))
    steps = store.file.write_new_file(iter([record(1), record(3)]))
    next(steps)
    assert store.path.read_bytes() == b'{"mine": 1}\n' + record(1), "the old one stays until then"
    with store.path.open("ab") as stream:
        stream.write(record(1, "running") + b'{"mine": 2}\n{"ha')
    for _ in steps:
        continue
    assert store.path.read_bytes() == b'{"mine": 1}\n' + record(1) + record(3) + b'{"mine": 2}\n'
    assert store.bad()[0].read_bytes() == b'{"ha\n'


def test_a_file_created_during_a_rewrite_of_the_journal_is_not_overwritten(store: Store) -> None:
    for was_there in (False, True):
        steps = store.file.write_new_file(iter([record(1)]))
        next(steps)
        if was_there:
            store.path.unlink()
        store.path.write_bytes(b"precious")
        with pytest.raises(OSError, match="another file was put in its place"):
            next(steps)
        assert store.path.read_bytes() == b"precious"
        store.path.write_bytes(b"")


def test_an_abandoned_rewrite_of_the_journal_leaves_no_temporary_file(store: Store) -> None:
    store.write_new_file()
    before = store.path.read_bytes()
    steps: Any = store.file.write_new_file(iter([record(5)]))
    next(steps)
    steps.close()
    assert store.path.read_bytes() == before and store.file.append(b"")


def test_a_temporary_journal_file_of_a_killed_process_is_removed(store: Store) -> None:
    (store.path.parent / ".queue.jsonl.new-1").write_text("half")
    store.write_new_file()
    assert os.listdir(store.path.parent) == ["queue.jsonl"]


def in_the_way(path: Path, what: str) -> None:
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        (path.parent / "victim").write_text("precious")
        path.symlink_to("victim")
    elif what == "device":
        path.symlink_to("/dev/full")
    else:
        path.write_text("")
        os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("what", "said"),
    [("fifo", "not a regular file"), ("folder", "not a regular file"), ("link", "a symbolic link"), ("device", "a symbolic link"),
     ("another's", "another user")],
)  # fmt: skip
def test_a_journal_path_that_is_no_regular_file_is_refused_and_not_replaced(store: Store, what: str, said: str) -> None:
    """If there is a FIFO, folder, link, device or another user's file at the path, it is not used and not replaced.

    The journal does not wait for it either.
    """
    if what == "another's" and os.geteuid() != 0:
        pytest.skip("needs root")
    in_the_way(store.path, what)
    with pytest.raises(OSError, match=said) as caught:
        store.write_new_file()
    assert caught.value.filename == str(store.path)
    assert not store.file.append(record(4))
    kind = stat.S_IFMT(store.path.lstat().st_mode)
    (store.path.rmdir if what == "folder" else store.path.unlink)()
    store.write_new_file()
    store.path.unlink()
    if what != "another's":
        (store.path.parent / "victim").unlink(missing_ok=True)
        in_the_way(store.path, what)
        assert not store.file.append(record(4))
        assert stat.S_IFMT(store.path.lstat().st_mode) == kind
    if what == "link":
        assert (store.path.parent / "victim").read_text() == "precious"


def test_two_schedulers_cannot_write_the_same_journal(store: Store) -> None:
    """Two schedulers cannot write the same journal. The second one can write it after the first one has closed it."""
    store.write_new_file()
    other = Store(store.path)
    with pytest.raises(OSError, match="another scheduler"):
        other.write_new_file()
    store.file.close()
    other.write_new_file()
    other.file.close()
    with store.path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_error_for_a_missing_journal_folder_names_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "no" / "queue.jsonl")
    with pytest.raises(FileNotFoundError) as caught:
        store.write_new_file()
    assert caught.value.filename == str(store.path)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 64 KiB. If the test may not mount a disk, skip the test."""
    words = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("may not mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    return filler


def test_a_full_disk_takes_no_half_line(small: Path) -> None:
    """P4: On a full disk neither an append nor a rewrite changes the file. When there is room, an append succeeds."""
    store = Store(small / "queue.jsonl")
    store.lines = {1: record(1)}
    store.write_new_file()
    filler = fill(small)
    long = record(4, command="y" * 9000)
    attempts: list[Callable[[], object]] = [lambda: store.file.append(long), store.write_new_file]
    for attempt in attempts:
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.ENOSPC and store.path.read_bytes() == record(1)
    assert sorted(os.listdir(small)) == ["filler", "queue.jsonl"]
    filler.unlink()
    assert store.file.append(long)
    assert store.path.read_bytes() == record(1) + long
    store.file.close()


def test_on_a_full_disk_damaged_lines_stay_in_the_journal(small: Path) -> None:
    """P4: While the disk is full, damaged lines stay in the journal.

    When there is room, a rewrite moves them to one file.
    """
    store = Store(small / "queue.jsonl")
    store.path.write_bytes(b"bad " * 1500 + b"\n")
    store.lines = {1: record(1)}
    filler = fill(small)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            store.write_new_file()
        assert sorted(os.listdir(small)) == ["filler", "queue.jsonl"]
    filler.unlink()
    store.write_new_file()
    assert len(store.bad()) == 1 and store.bad()[0].read_bytes() == b"bad " * 1500 + b"\n"
    assert json.loads(store.path.read_bytes())["id"] == 1
    store.file.close()
