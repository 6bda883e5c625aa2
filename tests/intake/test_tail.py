"""Tests of `Follower`: it returns each complete line of a watched file once, whatever happens to the file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.core.file_offsets import Batch, FileMark, LineRead
from scheduler.intake.tail import (
    CHECKED_WHOLE,
    LONGEST_LINE,
    MOST_LINES,
    OPEN_LINE_S,
    SETTLE_S,
    FileTrouble,
    Follower,
    check_private,
    file_id,
)
from tests.builders import examples

OTHER = 65534  # the user nobody
as_root = pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")


class Reading:
    """A Follower with a simulated clock, and the data that it has returned so far.

    ``lines``: all returned lines; ``restarts``: the number of batches that were marked as a restart; ``settled``: the
    number of batches that were marked as settled.
    """

    def __init__(self, path: Path | str, mark: FileMark | None = None) -> None:
        self.path = str(path)
        self.follower = Follower(self.path, mark)
        self.now = 1000.0
        self.lines: list[LineRead] = []
        self.restarts = 0
        self.settled = 0

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def look(self) -> Batch | None:
        """Call `Follower.look` once. If it returns a batch, accept the batch."""
        batch = self.follower.look(self.now)
        if batch is not None:
            self.follower.accept(batch)
            self.lines += batch.lines
            self.restarts += batch.restart
            self.settled += batch.settled
        return batch

    def all(self) -> list[LineRead]:
        """Call `look` until it returns no batch; return the new lines."""
        before = len(self.lines)
        for _ in range(10_000):
            if self.look() is None:
                return self.lines[before:]
        raise AssertionError("looking never comes to rest")

    def later(self, seconds: float) -> list[LineRead]:
        """Advance the clock by ``seconds``. Then call `look` until it returns no batch; return the new lines."""
        self.now += seconds
        return self.all()

    def settle(self) -> list[LineRead]:
        """Call `look` and advance the clock until the Follower waits for nothing any more; return the new lines."""
        before = len(self.lines)
        self.all()
        for _ in range(3):
            self.later(SETTLE_S + 0.01)
        return self.lines[before:]

    def trouble(self) -> str:
        with pytest.raises(FileTrouble) as caught:
            self.all()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def again(self) -> Reading:
        """Return a new Reading that starts at the mark of this one. A restart of the daemon has the same effect."""
        self.follower.close()
        return Reading(self.path, self.follower.mark)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "jobs.txt"


@pytest.fixture
def reading(jobs: Path) -> Reading:
    return Reading(jobs)


def append(path: Path | str, data: bytes | str) -> None:
    with open(path, "ab") as stream:
        stream.write(data.encode() if isinstance(data, str) else data)


def tick(path: Path | str) -> None:
    """Wait until a write to the file certainly changes the file's ctime.

    The clock of file times advances in ticks of some milliseconds.
    """
    probe = f"{path}.tick"
    limit = time.monotonic() + 5
    before = os.stat(path).st_ctime_ns
    while time.monotonic() < limit:
        with open(probe, "w"):
            stamp = os.stat(probe).st_ctime_ns
        os.unlink(probe)
        if stamp > before:
            return
    raise AssertionError("the file system's clock stands still")


# -- appending --------------------------------------------------------------------------------------------


def test_each_appended_line_is_returned_once_with_its_number(jobs: Path, reading: Reading) -> None:
    """S3.10, P2: Each line that is appended is returned once, with its line number."""
    append(jobs, "a\nb\n")
    assert [(line.number, line.text) for line in reading.all()] == [(1, "a"), (2, "b")]
    assert reading.all() == []
    append(jobs, "c\n\n# x\nd\n")
    assert [(line.number, line.text) for line in reading.all()] == [(3, "c"), (4, ""), (5, "# x"), (6, "d")]


def test_an_empty_file_gives_no_lines_and_no_second_batch(jobs: Path, reading: Reading) -> None:
    """For an empty file, `look` returns one batch without lines, and no second batch."""
    jobs.touch()
    assert reading.settle() == []
    assert reading.look() is None


def test_a_batch_that_was_not_accepted_is_returned_again(jobs: Path, reading: Reading) -> None:
    """P4: If a batch was not accepted, because its transaction failed, it is returned again."""
    append(jobs, "a\nb\n")
    first = reading.follower.look(1.0)
    append(jobs, "c\n")
    second = reading.follower.look(2.0)
    assert first is not None and second is not None
    assert [line.text for line in first.lines] == ["a", "b"]
    assert [line.text for line in second.lines] == ["a", "b", "c"]
    reading.follower.accept(first)
    third = reading.follower.look(3.0)
    assert third is not None and [line.text for line in third.lines] == ["c"]


def test_a_restart_batch_that_was_not_accepted_is_returned_again_as_a_restart(jobs: Path, reading: Reading) -> None:
    """P2, P4: Lines read from the start of a replaced file form a batch that is marked as a restart.

    If the caller does not accept the batch, the next call returns it again, with this mark.
    """
    append(jobs, "a\nb\n")
    reading.all()
    tick(jobs)
    jobs.write_text("new 1\nnew 2\n")
    assert reading.follower.look(reading.now + 1) is None
    for wait in (2.1, 3.2, 4.3):
        batch = reading.follower.look(reading.now + wait)
        assert batch is not None and batch.restart
        assert [line.text for line in batch.lines] == ["new 1", "new 2"]


def test_a_batch_has_a_maximum_number_of_lines_and_says_if_there_are_more(jobs: Path, reading: Reading) -> None:
    """C16: A batch has at most 512 lines, so that no pass is long. The batch says whether more lines can be read."""
    append(jobs, "".join(f"line {n}\n" for n in range(1000)))
    batches = []
    while (batch := reading.look()) is not None:
        batches.append(batch)
    assert [len(batch.lines) for batch in batches if batch.lines] == [512, 488]
    assert [batch.more for batch in batches if batch.lines] == [True, False]
    assert reading.texts == [f"line {n}" for n in range(1000)]
    assert [line.number for line in reading.lines] == list(range(1, 1001))


def test_a_line_longer_than_one_read_is_returned_whole(jobs: Path, reading: Reading) -> None:
    """C20: A line longer than one read is returned whole."""
    texts = ["x" * 1000, "y" * 300_000, "z" * 700_000, "é" * 200_000, "end"]
    append(jobs, "".join(text + "\n" for text in texts))
    reading.all()
    assert reading.texts == texts


def test_after_a_restart_only_lines_after_the_mark_are_returned(jobs: Path, reading: Reading) -> None:
    """C40, P2: After a restart of the daemon, only lines after the stored position (mark) are returned."""
    append(jobs, "a\nb\n")
    reading.all()
    append(jobs, "c\n")
    anew = reading.again()
    assert [(line.number, line.text) for line in anew.settle()] == [(3, "c")]
    assert anew.restarts == 0


# -- unfinished last lines --------------------------------------------------------------------------------


def test_an_incomplete_last_line_is_not_returned_before_its_newline(jobs: Path, reading: Reading) -> None:
    """S3.11, C01: A last line without newline is not returned until it gets a newline or is unchanged for 2 seconds."""
    append(jobs, "a\n0,/a")
    reading.all()
    assert reading.texts == ["a"]
    assert reading.follower.look_again_at == reading.now + OPEN_LINE_S
    assert reading.later(1.0) == []
    append(jobs, ".py")
    assert reading.later(1.5) == [], "it was written to: it has not stood for 2 s"
    append(jobs, ",,x\nnext")
    assert [line.text for line in reading.later(0.1)] == ["0,/a.py,,x"]


def test_an_incomplete_last_line_waits_again_after_a_restart(jobs: Path, reading: Reading) -> None:
    """C01: After a restart of the daemon, the waiting time of an incomplete last line begins again."""
    append(jobs, "a\n0,/a")
    reading.later(1.9)
    anew = reading.again()
    assert anew.all() == [], "a new daemon has not seen it stand"
    append(jobs, ".py\n")
    assert [(line.number, line.text) for line in anew.later(0.1)] == [(2, "0,/a.py")]


def test_a_last_line_without_newline_is_returned_after_two_unchanged_seconds(jobs: Path, reading: Reading) -> None:
    """C02: A last line without newline is returned when it has been unchanged for 2 seconds."""
    append(jobs, "a\nb")
    reading.all()
    assert reading.later(1.99) == []
    assert [(line.number, line.text) for line in reading.later(0.02)] == [(2, "b")]
    assert reading.later(10) == []


def test_the_next_look_is_due_when_an_incomplete_last_line_is_final(jobs: Path, reading: Reading) -> None:
    """C02: If a last line without newline follows other lines, the next look is due when this line is final.

    The last line counts as final when it has been unchanged for ``OPEN_LINE_S`` seconds.
    """
    append(jobs, "a\nb")
    assert reading.look() is not None
    assert reading.follower.look_again_at == reading.now + OPEN_LINE_S


@pytest.mark.parametrize("rest", ["  ", "\t", "\ufeff"])
def test_blanks_after_the_last_newline_belong_to_the_next_line(jobs: Path, reading: Reading, rest: str) -> None:
    """C02, P2: Blanks after the last newline are not read as a line. If text is appended to them, the text is a job."""
    append(jobs, rest if rest == "\ufeff" else f"a\n{rest}")
    reading.all()
    assert reading.later(3) == [] and reading.follower.look_again_at is None
    append(jobs, "b\n")
    (line,) = reading.later(3)
    assert (line.text.strip(), line.problem) == ("b", "")


def test_a_replaced_file_that_ends_in_blanks_is_read_to_its_end(jobs: Path, reading: Reading) -> None:
    """C07: A replaced file counts as read to its end if only blanks have not been read."""
    append(jobs, "a\nb\n")
    reading.all()
    jobs.write_text("b\nc\n  ")
    reading.settle()
    reading.later(3)
    assert reading.settled == 1 and not reading.follower.mark.replaying


def test_a_utf16_mark_without_nul_bytes_refuses_only_the_first_line(jobs: Path, reading: Reading) -> None:
    """C13, C11: If a file has the byte order mark of UTF-16 but no NUL byte, only its first line is refused."""
    jobs.write_bytes(b"\xff\xfe\na\n")
    reading.all()
    assert [(line.text, bool(line.problem)) for line in reading.lines][1:] == [("a", False)] and reading.lines[
        0
    ].problem


def test_old_lines_returns_lines_by_number_unless_the_file_was_rewritten(jobs: Path, reading: Reading) -> None:
    """C27: `old_lines` returns the lines whose numbers the caller gives. Lines that were not read before are left out.

    If the file was rewritten, no line is returned.
    """
    append(jobs, "a\nb\r\n" + "x" * (LONGEST_LINE + 10) + "\nd\n")
    assert reading.follower.old_lines([1]) is None
    reading.all()
    append(jobs, "e\n")
    assert [(line.number, line.text) for line in reading.follower.old_lines([2, 3, 4, 5]) or []] == [
        (2, "b"),
        (4, "d"),
    ]
    jobs.write_text(jobs.read_text().replace("d", "D"))
    assert reading.follower.old_lines([1, 2]) == []


def test_a_newline_after_a_returned_last_line_gives_no_new_line(jobs: Path, reading: Reading) -> None:
    """C02: A newline added to a last line that was already read gives no further line."""
    append(jobs, "a")
    reading.all()
    assert [line.text for line in reading.later(2)] == ["a"]
    append(jobs, "\n")
    assert reading.later(3) == []
    append(jobs, "b\n")
    assert [(line.number, line.text) for line in reading.all()] == [(2, "b")]


@pytest.mark.parametrize("growth", ["xyz\n", "xyz"])
def test_text_added_to_a_returned_last_line_is_reported_and_not_run(jobs: Path, reading: Reading, growth: str) -> None:
    """C02: If text is added to a last line that was already read, this is a problem of the line.

    The problem is reported, and no job is made of the added text.
    """
    append(jobs, "a\nb")
    reading.all()
    reading.later(2)
    append(jobs, growth)
    reading.all()
    reading.later(2)
    (line,) = reading.lines[2:]
    assert line.number == 2
    assert "the line was changed after it was read" in line.problem
    append(jobs, "\nc\n")
    fresh = [line for line in reading.later(0.1) if line.text]
    assert [(line.text, line.problem) for line in fresh] == [("c", "")]


def test_text_added_to_a_returned_last_line_is_reported_after_a_restart(jobs: Path, reading: Reading) -> None:
    """C02: Text added to a last line that was already read is also reported if the daemon was restarted meanwhile."""
    append(jobs, "a")
    reading.all()
    reading.later(2)
    append(jobs, "bc\nd\n")
    anew = reading.again()
    lines = anew.settle()
    assert [bool(line.problem) for line in lines] == [True, False]
    assert [(line.number, line.text) for line in lines][1] == (2, "d")


# -- deleted, rotated, replaced, rewritten ----------------------------------------------------------------


def test_a_missing_file_is_reported_and_read_once_it_appears(jobs: Path, reading: Reading) -> None:
    """P3: A missing file raises FileTrouble. When the file appears, it is read."""
    assert "no such file" in reading.trouble()
    append(jobs, "a\n")
    reading.settle()
    assert reading.texts == ["a"]


def test_a_deleted_and_recreated_file_is_read_from_its_start(jobs: Path, reading: Reading) -> None:
    """C03: A file that was deleted and created again is read from its start."""
    append(jobs, "a\nb\n")
    reading.all()
    jobs.unlink()
    assert "no such file" in reading.trouble()
    assert "no such file" in reading.trouble()
    append(jobs, "c\n")
    assert [line.text for line in reading.settle()] == ["c"]
    assert (reading.restarts, reading.settled) == (1, 1)


def test_unread_lines_of_a_deleted_file_are_returned(jobs: Path, reading: Reading) -> None:
    """C03, P2: If a file is deleted, its unread lines are still returned."""
    append(jobs, "a\n")
    reading.all()
    append(jobs, "b\nc")
    jobs.unlink()
    assert [line.text for line in (reading.look() or pytest.fail()).lines] == ["b", "c"]
    assert "no such file" in reading.trouble()


def test_unread_lines_of_a_rotated_file_are_returned_before_those_of_the_new_file(jobs: Path, reading: Reading) -> None:
    """C04, P2: If a file is rotated, its unread lines are returned before the lines of the new file."""
    append(jobs, "a\n")
    reading.all()
    append(jobs, "b\n")
    jobs.rename(f"{jobs}.1")
    append(jobs, "c\n")
    assert [line.text for line in reading.settle()] == ["b", "c"]


def test_unread_lines_of_a_rotated_file_are_returned_in_several_batches(jobs: Path, reading: Reading) -> None:
    """C04, P2: If a rotated file has more unread lines than one batch can contain, all of them are returned."""
    append(jobs, "a\n")
    reading.all()
    append(jobs, "".join(f"{n}\n" for n in range(600)))
    jobs.rename(f"{jobs}.1")
    append(jobs, "c\n")
    assert [line.text for line in reading.settle()] == [*(str(n) for n in range(600)), "c"]


def test_a_file_rotated_while_no_daemon_ran_is_found_by_its_inode(jobs: Path, reading: Reading) -> None:
    """C04, C40, P2: If a file was rotated while no daemon ran, it is found by its inode and read to its end."""
    append(jobs, "a\n")
    reading.all()
    append(jobs, "b\n")
    anew = reading.again()
    jobs.rename(f"{jobs}.1")
    append(jobs, "c\n")
    assert [line.text for line in anew.settle()] == ["b", "c"]


def test_lines_appended_to_a_renamed_file_before_a_new_one_exists_are_returned(jobs: Path, reading: Reading) -> None:
    """C04: Lines that a program appends to the renamed file before the new file exists are returned."""
    append(jobs, "a\n")
    reading.all()
    moved = jobs.rename(f"{jobs}.1")
    reading.trouble()
    append(moved, "late\n")
    append(jobs, "c\n")
    assert [line.text for line in reading.settle()] == ["late", "c"]


def test_a_truncated_and_rewritten_file_is_read_from_its_start_once_unchanged(jobs: Path, reading: Reading) -> None:
    """C05: If a file was truncated and written again, it is read from its start as soon as it no longer changes."""
    append(jobs, "a\nb\nc\n")
    reading.all()
    tick(jobs)
    jobs.write_text("")
    assert reading.all() == []
    append(jobs, "d\n")
    assert reading.later(0.5) == [], "it is not read while it is being rewritten"
    assert [(line.number, line.text) for line in reading.settle()] == [(1, "d")]
    assert (reading.restarts, reading.settled) == (1, 1)


def test_c05_a_replaced_file_is_read_while_lines_are_appended_to_it(jobs: Path, reading: Reading) -> None:
    """C05, P2: The lines of a replaced file are read, even if a program keeps appending lines to the file.

    The replay (reading the file from its start again) ends when the file no longer changes.
    """
    append(jobs, "a\nb\n")
    reading.all()
    tick(jobs)
    jobs.write_text("# edited\na\nb\n")
    for n in range(20):
        append(jobs, f"{n}\n")
        reading.later(SETTLE_S / 2)
    assert reading.texts[-1] == "19" and reading.texts.count("a") == 2
    assert (reading.restarts, reading.settled) == (1, 0) and reading.follower.mark.replaying
    assert reading.follower.look_again_at is not None and reading.later(SETTLE_S) == []
    assert (reading.restarts, reading.settled) == (1, 1) and not reading.follower.mark.replaying


def test_a_file_rewritten_with_more_bytes_between_looks_is_read_from_its_start(jobs: Path, reading: Reading) -> None:
    """C06, P2: If a file is rewritten between two looks, it is read from its start, even if it has more bytes."""
    append(jobs, "a\nb\n")
    reading.all()
    tick(jobs)
    jobs.write_text("new 1\nnew 2\nnew 3\n")
    assert [line.text for line in reading.settle()] == ["new 1", "new 2", "new 3"]
    assert reading.restarts == 1


def test_a_file_rewritten_while_no_daemon_ran_is_read_from_its_start(jobs: Path, reading: Reading) -> None:
    """C06, C40: If a file is rewritten while no daemon runs, it is read from its start."""
    append(jobs, "a\nb\n")
    reading.all()
    anew = reading.again()
    jobs.write_text("new 1\nnew 2\n")
    assert [line.text for line in anew.settle()] == ["new 1", "new 2"]
    assert anew.restarts == 1


def test_an_emptied_file_gives_a_settled_batch(jobs: Path, reading: Reading) -> None:
    """C05: If a file is emptied, the Follower returns a batch that is marked as settled.

    When the daemon gets such a batch, it forgets the lines that the file had before.
    """
    append(jobs, "a\nb\n")
    reading.all()
    tick(jobs)
    jobs.write_text("")
    assert reading.settle() == []
    assert (reading.restarts, reading.settled) == (1, 1)
    assert reading.look() is None


def test_a_file_truncated_and_rewritten_with_the_same_text_is_not_read_again(jobs: Path, reading: Reading) -> None:
    """C07: If a file is truncated and then written with the same text, it is not read again.

    An editor that saves in place does this.
    """
    append(jobs, "a\nb\n")
    reading.all()
    tick(jobs)
    jobs.write_text("")
    reading.all()
    append(jobs, "a\nb\nc\n")
    assert [line.text for line in reading.settle()] == ["c"]
    assert reading.restarts == 0


@pytest.mark.parametrize("size", [10, CHECKED_WHOLE + 20_000], ids=["small", "large"])
def test_a_rewrite_that_keeps_size_and_mtime_is_found_by_content(jobs: Path, reading: Reading, size: int) -> None:
    """C39: A rewrite that changes neither size nor mtime is found.

    In a small file the next look finds the rewrite. In a large file only a look after `check_whole` finds it.
    """
    jobs.write_text("old line\n" + "# pad\n" * (size // 6) + "last\n")
    reading.all()
    status = jobs.stat()
    tick(jobs)
    with open(jobs, "r+b") as stream:
        stream.write(b"new line\n")
    os.utime(jobs, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert jobs.stat().st_size == status.st_size
    reading.follower.check_whole()
    assert reading.settle()[0].text == "new line"
    assert reading.restarts == 1


def test_check_whole_does_not_read_an_unchanged_file_again(jobs: Path, reading: Reading) -> None:
    """C39: If a file is unchanged, `check_whole` does not cause its lines to be returned again."""
    jobs.write_text("# pad\n" * 20_000)
    reading.all()
    for _ in range(3):
        reading.follower.check_whole()
        assert reading.later(30) == []
    assert reading.restarts == 0


_SAME_TICK = """
import os, sys, time
from scheduler.intake.tail import Follower
path = sys.argv[1]
limit = time.monotonic() + 5
tried = 0
while tried < 3 and time.monotonic() < limit:
    with open(path, "w") as stream:
        stream.write("old line\\n")
    follower, now, texts = Follower(path), 0.0, []
    def look():
        global now
        for _ in range(4):
            while (batch := follower.look(now)) is not None:
                follower.accept(batch)
                texts.extend(line.text for line in batch.lines)
            now += 1.1
            follower.check_whole()
    while (batch := follower.look(now)) is not None:
        follower.accept(batch)
    before = os.stat(path).st_ctime_ns
    with open(path, "r+") as stream:
        stream.write("new line\\n")
    same = os.stat(path).st_ctime_ns == before
    time.sleep(0.05)
    look()
    follower.close()
    if same:
        tried += 1
        assert texts == ["new line"], texts
sys.exit(0 if tried else 77)
"""


def test_a_rewrite_within_one_clock_tick_is_found(tmp_path: Path) -> None:
    """C06, C39: A rewrite within one tick of the kernel's clock is found, although the ctime is unchanged.

    File times are as coarse as a tick (4 ms) on ext4 and xfs before Linux 6.13, and on ramfs.
    """
    place = tmp_path / "coarse"
    place.mkdir(mode=0o700)
    mounted = f'mount -t ramfs none {place} && chmod 700 {place} && exec {sys.executable} -c "$CODE" {place}/jobs.txt'
    environment = dict(os.environ, CODE=_SAME_TICK, PYTHONPATH=str(Path(__file__).parents[2]))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted + " || exit $?"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "AssertionError" not in done.stderr and done.returncode not in (0,):
        pytest.skip("no file system with coarse times can be mounted here")
    assert done.returncode == 0, done.stderr


# -- editors ----------------------------------------------------------------------------------------------


def _sed(path: Path) -> None:
    subprocess.run(["sed", "-i", "s/b/B/", str(path)], check=True)


def _rename_over(path: Path) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(path.read_text().replace("b", "B"))
    aside.rename(path)


def _backup_and_new(path: Path) -> None:
    text = path.read_text().replace("b", "B")
    path.rename(f"{path}~")
    path.write_text(text)


def _in_place(path: Path) -> None:
    text = path.read_text().replace("b", "B")
    path.write_text(text)


@pytest.mark.parametrize("save", [_sed, _rename_over, _backup_and_new, _in_place])
def test_a_save_by_an_editor_returns_all_lines_again_as_a_restart(
    jobs: Path, reading: Reading, save: Callable[[Path], None]
) -> None:
    """C07, C08: After an editor has saved the file, all its lines are returned again.

    The first of the batches is marked as a restart.
    """
    append(jobs, "a\nb\nc\n")
    reading.all()
    tick(jobs)
    save(jobs)
    append(jobs, "d\n")
    assert [line.text for line in reading.settle()] == ["a", "B", "c", "d"]
    assert (reading.restarts, reading.settled) == (1, 1)
    append(jobs, "e\n")
    assert [(line.number, line.text) for line in reading.all()] == [(5, "e")]


def test_a_replay_of_several_batches_is_marked_to_its_end(jobs: Path, reading: Reading) -> None:
    """C07: If a replay needs several batches, the stored position is marked as replaying until the replay ends.

    This also holds if the daemon is restarted during the replay.
    """
    append(jobs, "".join(f"{n}\n" for n in range(700)))
    reading.all()
    tick(jobs)
    _rename_over(jobs)
    reading.look()
    reading.now += SETTLE_S
    batch = reading.look()
    assert batch is not None and batch.restart and batch.more and batch.mark.replaying
    anew = reading.again()
    anew.settle()
    assert anew.texts == [str(n) for n in range(MOST_LINES, 700)]
    assert (anew.restarts, anew.settled) == (0, 1)
    assert not anew.follower.mark.replaying


def test_a_file_replaced_during_its_replay_is_read_from_its_start_again(jobs: Path, reading: Reading) -> None:
    """C07: If a file is replaced during its replay, it is read from its start once more."""
    append(jobs, "".join(f"{n}\n" for n in range(700)))
    reading.all()
    tick(jobs)
    _rename_over(jobs)
    reading.look()
    reading.now += SETTLE_S
    reading.look()
    aside = jobs.with_suffix(".tmp")
    aside.write_text("only\n")
    aside.rename(jobs)
    lines = reading.settle()
    assert lines[-1].text == "only" and lines[-1].number == 1
    assert reading.restarts == 2
    assert reading.settled == 1


def test_a_file_that_is_rewritten_repeatedly_is_read_once_unchanged(jobs: Path, reading: Reading) -> None:
    """C05: If a file is rewritten repeatedly, it is read only when it no longer changes."""
    append(jobs, "a\nb\n")
    reading.all()
    for n in range(20):
        tick(jobs)
        jobs.write_text(f"version {n}\n" + "x\n" * n)
        assert reading.later(0.5) == []
    reading.settle()
    assert reading.texts == ["a", "b", "version 19", *["x"] * 19]


# -- encodings and odd bytes ------------------------------------------------------------------------------


def test_a_byte_order_mark_at_the_start_of_the_file_is_removed(jobs: Path, reading: Reading) -> None:
    """C10: A byte order mark at the start of the file is removed."""
    append(jobs, b"\xef\xbb\xbf0,/a.py\n\xef\xbb\xbfb\n")
    reading.all()
    assert reading.texts == ["0,/a.py", "\ufeffb"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le-bom", "utf-16-be-bom"])
def test_a_utf16_file_is_reported_and_its_mark_does_not_move(jobs: Path, reading: Reading, encoding: str) -> None:
    """C11: A UTF-16 file raises FileTrouble, and its stored position (mark) does not move.

    When the file is saved as UTF-8, it is read.
    """
    bom = {"utf-16": b"", "utf-16-le-bom": b"\xff\xfe", "utf-16-be-bom": b"\xfe\xff"}[encoding]
    jobs.write_bytes(bom + "0,/a.py\n".encode(encoding.removesuffix("-bom")))
    assert "UTF-16" in reading.trouble()
    assert reading.follower.mark.offset == 0
    tick(jobs)
    jobs.write_text("0,/a.py\n")
    reading.settle()
    assert reading.texts == ["0,/a.py"]


def test_a_utf8_file_that_replaces_a_utf16_file_is_read(jobs: Path, reading: Reading) -> None:
    """C11, P8: If a UTF-8 file replaces a UTF-16 file, the new file is read."""
    jobs.touch()
    reading.all()
    append(jobs, "0,/a.py\n".encode("utf-16"))
    assert "UTF-16" in reading.trouble()
    aside = jobs.with_suffix(".tmp")
    aside.write_text("0,/a.py\n")
    aside.rename(jobs)
    reading.settle()
    assert reading.texts == ["0,/a.py"]


def test_invalid_utf8_refuses_only_its_own_line(jobs: Path, reading: Reading) -> None:
    """C13: If a line has bytes that are not UTF-8, only this line is refused."""
    append(jobs, b"a\nb\xff\xfec\nd\n\xff\n")
    lines = reading.all()
    assert [bool(line.problem) for line in lines] == [False, True, False, True]
    assert "not UTF-8 at byte 2" in lines[1].problem
    assert [line.number for line in lines] == [1, 2, 3, 4]


def test_a_character_split_between_two_reads_is_decoded_correctly(jobs: Path, reading: Reading) -> None:
    """C13: A character whose bytes arrive in two reads is decoded correctly."""
    append(jobs, b"x\xc3")
    reading.all()
    append(jobs, b"\xa9\n")
    reading.all()
    assert [(line.text, line.problem) for line in reading.lines] == [("xé", "")]


def test_carriage_returns_at_line_ends_are_removed(jobs: Path, reading: Reading) -> None:
    """C09: Carriage returns at line ends are removed."""
    append(jobs, b"a\r\nb\r\n\r\nc\r")
    reading.all()
    reading.later(2)
    assert reading.texts == ["a", "b", "", "c"]


def test_a_nul_byte_stays_in_its_line(jobs: Path, reading: Reading) -> None:
    """C12: A NUL byte is returned as part of its line, and the parser refuses this line.

    The following lines are read.
    """
    append(jobs, b"a\0b\nc\n")
    reading.all()
    assert reading.texts == ["a\0b", "c"]


def test_a_line_of_ten_megabytes_is_refused_with_little_memory(jobs: Path, reading: Reading) -> None:
    """C15: A line of 10 MB is refused, and this needs less than 8 MiB of memory. The following lines are read."""
    with open(jobs, "wb") as stream:
        stream.write(b"a\n")
        for _ in range(160):
            stream.write(b"x" * 65536)
        stream.write(b"\nb\nc\n")
    tracemalloc.start()
    try:
        reading.all()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert [(line.number, bool(line.problem)) for line in reading.lines] == [
        (1, False),
        (2, True),
        (3, False),
        (4, False),
    ]
    assert str(LONGEST_LINE) in reading.lines[1].problem
    assert len(reading.lines[1].text) <= 200
    assert reading.texts[2:] == ["b", "c"]


def test_a_line_that_grows_beyond_the_limit_is_reported_once(jobs: Path, reading: Reading) -> None:
    """C15, P3: If a line grows beyond the limit, this is reported once, even if the daemon is restarted."""
    lines: list[LineRead] = []
    for _ in range(5):
        append(jobs, b"x" * 600_000)
        lines += reading.later(0.1)
        reading = reading.again()
    append(jobs, b"\nnext\n")
    lines += reading.later(0.1)
    assert [(line.number, line.problem[:18]) for line in lines] == [(1, "the line is longer"), (2, "")]


# -- links and files that are no plain files --------------------------------------------------------------


def test_a_link_to_a_file_in_another_folder_is_followed(tmp_path: Path) -> None:
    """C35, C07: A symbolic link is followed, also if its target is replaced or if the link gets another target."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.txt", tmp_path / "here" / "jobs.txt"
    real.write_text("a\n")
    link.symlink_to(real)
    reading = Reading(link)
    reading.all()
    append(real, "b\n")
    reading.all()
    assert reading.texts == ["a", "b"]
    _rename_over(real)
    assert [line.text for line in reading.settle()] == ["a", "B"]
    other = tmp_path / "there" / "other.txt"
    other.write_text("z\n")
    link.unlink()
    link.symlink_to(other)
    assert [line.text for line in reading.settle()] == ["z"]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _fifo_link(path: Path) -> None:
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_fifo, _folder, _dangling, _loop, _device, _fifo_link])
def test_a_path_that_is_no_regular_file_is_reported_without_blocking(
    jobs: Path, reading: Reading, make: Callable[[Path], None]
) -> None:
    """C35: A path that is not a regular file raises FileTrouble and never blocks."""
    make(jobs)
    assert str(jobs) in reading.trouble()
    assert str(jobs) in reading.trouble()
    jobs.rmdir() if jobs.is_dir() else jobs.unlink()
    append(jobs, "a\n")
    reading.settle()
    assert reading.texts == ["a"]


@pytest.mark.timeout(20)
def test_a_watched_file_replaced_by_a_fifo_is_reported(jobs: Path, reading: Reading) -> None:
    """C35: If a FIFO replaces a watched file, FileTrouble is raised."""
    append(jobs, "a\n")
    reading.all()
    jobs.unlink()
    os.mkfifo(jobs)
    assert "not a regular file" in reading.trouble()


# -- owner and mode of the file ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o646])
def test_a_file_that_all_users_may_write_is_not_read_until_corrected(jobs: Path, reading: Reading, mode: int) -> None:
    """C37, P9: A file that all users may write is not read until its mode is corrected."""
    append(jobs, "a\n")
    jobs.chmod(mode)
    assert "chmod o-w" in reading.trouble()
    assert reading.lines == []
    jobs.chmod(0o644)
    reading.settle()
    assert reading.texts == ["a"]


def test_a_file_that_becomes_writable_for_all_users_is_no_longer_read(jobs: Path, reading: Reading) -> None:
    """C37: Each look checks the mode of the file. If the file becomes writable for all users, it is no longer read."""
    append(jobs, "a\n")
    reading.all()
    jobs.chmod(0o666)
    append(jobs, "b\n")
    assert "chmod o-w" in reading.trouble()
    jobs.chmod(0o600)
    assert [line.text for line in reading.all()] == ["b"]


@pytest.mark.parametrize("restarted", [False, True])
def test_p9_c37_unread_lines_of_a_renamed_file_that_others_could_write_are_never_returned(
    tmp_path: Path, jobs: Path, reading: Reading, restarted: bool
) -> None:
    """If a file that other users could write is renamed, its unread lines are never returned.

    This also holds if the mode is corrected after the rename, or if the beginning of the file has changed.
    """
    append(jobs, "a\n")
    reading.all()
    jobs.chmod(0o666)
    jobs.write_text("stranger 1\nstranger 2\n")
    assert "chmod o-w" in reading.trouble()
    old = jobs.rename(tmp_path / "jobs.bad")
    append(jobs, "b\n")
    jobs.chmod(0o600)
    reader = reading.again() if restarted else reading
    batch = reader.look()
    assert batch is not None and not batch.lines
    assert batch.left_out == (
        f"{old}: its unread lines are ignored: all users may write to it; chmod o-w {old}, "
        f"then copy the lines that you need into {jobs}"
    )
    old.chmod(0o600)
    reader = reader.again()  # a restarted daemon knows only the mark
    reader.settle()
    assert [line.text for line in reader.lines][-1:] == ["b"]
    assert not [line.text for line in reader.lines if "stranger" in line.text]


def test_c37_a_file_with_a_corrected_mode_is_read_after_a_rename(tmp_path: Path, jobs: Path, reading: Reading) -> None:
    append(jobs, "a\n")
    reading.all()
    jobs.chmod(0o666)
    append(jobs, "b\n")
    assert "chmod o-w" in reading.trouble()
    jobs.chmod(0o600)
    assert [line.text for line in reading.all()] == ["b"]
    append(jobs, "c\n")
    jobs.rename(tmp_path / "old")
    append(jobs, "d\n")
    assert [line.text for line in reading.settle()] == ["c", "d"]


def test_p9_the_suggested_chmod_command_quotes_any_file_name(tmp_path: Path) -> None:
    """The suggested chmod command quotes the name of the file for a shell, and is a single line."""
    for name in ("a $(touch PWNED);b", "a'b", "a\nb"):
        path = tmp_path / name
        path.touch()
        path.chmod(0o666)
        with pytest.raises(FileTrouble) as caught:
            check_private(str(path), path.stat())
        subprocess.run(["bash", "-c", caught.value.what.partition("may write to it: ")[2]], check=True, cwd=tmp_path)
        assert path.stat().st_mode & 0o777 == 0o664 and "\n" not in caught.value.what
    assert not (tmp_path / "PWNED").exists()


@as_root
def test_a_file_of_another_user_is_not_read(jobs: Path, reading: Reading) -> None:
    """C37, P9: A file that belongs to another user is not read."""
    append(jobs, "a\n")
    os.chown(jobs, OTHER, -1)
    text = reading.trouble()
    assert str(OTHER) in text and "chown" in text
    os.chown(jobs, 0, -1)
    reading.settle()
    assert reading.texts == ["a"]


@as_root
def test_a_file_that_its_group_may_write_is_refused_if_the_group_has_other_users(jobs: Path) -> None:
    """C37, contract 3, settled details: A file is refused if its group may write to it and the group has other users.

    With `trust_group`, the file is accepted.
    """
    append(jobs, "a\n")
    jobs.chmod(0o664)
    status = jobs.stat()
    check_private(str(jobs), status)  # root's group has no other users
    os.chown(jobs, 0, OTHER)
    with pytest.raises(FileTrouble) as caught:
        check_private(str(jobs), jobs.stat())
    assert "chmod g-w" in str(caught.value) and "trust_group" in str(caught.value)
    check_private(str(jobs), jobs.stat(), trust_group=True)
    os.chown(jobs, 0, 54321)
    check_private(str(jobs), jobs.stat())  # a group without members


@pytest.mark.parametrize(("mode", "fine"), [(0o777, False), (0o1777, True), (0o755, True), (0o702, False)])
def test_a_file_in_a_folder_that_other_users_may_write_is_refused(tmp_path: Path, mode: int, fine: bool) -> None:
    """C37, P9: If other users may write to the folder of a file, the file is not read.

    If the folder is sticky, like /tmp, the file is read.
    """
    folder = tmp_path / "open"
    folder.mkdir()
    jobs = folder / "jobs.txt"
    append(jobs, "a\n")
    folder.chmod(mode)
    reading = Reading(jobs)
    if fine:
        reading.settle()
        assert reading.texts == ["a"]
    else:
        assert "folder" in reading.trouble()


@as_root
def test_a_file_in_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """C37, P9: A file in a folder that belongs to another user is not read."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    append(folder / "jobs.txt", "a\n")
    os.chown(folder, OTHER, OTHER)
    assert "folder" in Reading(folder / "jobs.txt").trouble()


# -- several writers --------------------------------------------------------------------------------------


def test_lines_appended_by_twenty_processes_at_once_are_all_read(jobs: Path, reading: Reading) -> None:
    """C19, P2: If 20 processes append lines at the same time, all lines are read.

    Lines of one process stay in their order.
    """
    jobs.touch()
    code = "import sys\nfor n in range(200):\n    with open(sys.argv[1], 'a') as f: f.write(f'{sys.argv[2]} {n}\\n')\n"
    writers = [subprocess.Popen([sys.executable, "-S", "-c", code, str(jobs), str(who)]) for who in range(20)]
    limit = time.monotonic() + 60
    try:
        while any(writer.poll() is None for writer in writers) and time.monotonic() < limit:
            reading.later(0.01)
    finally:
        codes = [writer.wait(30) for writer in writers]
    assert codes == [0] * 20
    reading.later(0.01)
    assert sorted(reading.texts) == sorted(f"{who} {n}" for who in range(20) for n in range(200))
    assert reading.restarts == 0
    for who in range(20):
        own = [text for text in reading.texts if text.split()[0] == str(who)]
        assert own == [f"{who} {n}" for n in range(200)], "each writer's lines in its order"


# -- properties -------------------------------------------------------------------------------------------

CHUNKS = st.lists(
    st.one_of(
        # At least one character: an empty chunk would leave the file unchanged, and an incomplete line would be read.
        st.text(st.sampled_from("ab,\n\n\r é#"), min_size=1, max_size=12),
        st.sampled_from(["\n", "x" * 5000, "line\n" * 300, "\r\n", "\n\n\n"]),
    ),
    max_size=12,
)


@given(chunks=CHUNKS, looks=st.lists(st.integers(0, 3), max_size=12), restarts=st.sets(st.integers(0, 11), max_size=3))
@example(chunks=["a", "\n", "b"], looks=[1, 1, 1], restarts={0, 1, 2})
def test_each_line_is_read_once_however_writes_are_split(
    chunks: list[str], looks: list[int], restarts: set[int]
) -> None:
    """P2, S3.11: Each line is read once, whatever pieces it is written in and however often the daemon restarts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "jobs.txt")
        path.touch()
        reading = Reading(path)
        kept: list[LineRead] = []
        for number, chunk in enumerate(chunks):
            append(path, chunk)
            for _ in range(looks[number] if number < len(looks) else 1):
                reading.now += 0.3
                reading.look()
            if number in restarts:
                kept += reading.lines
                reading = reading.again()
        append(path, "\n")
        reading.settle()
        kept += reading.lines
        reading.follower.close()
        whole = "".join(chunks) + "\n"
        lines = [line.rstrip("\r") for line in whole.split("\n")[:-1]]
        assert [line.text for line in kept] == lines
        assert [line.number for line in kept] == list(range(1, len(lines) + 1))
        assert reading.restarts == 0


@given(
    versions=st.lists(st.lists(st.sampled_from(["a", "b", "c", "long " * 20, ""]), max_size=6), min_size=1, max_size=5),
    ways=st.lists(st.sampled_from(["rename", "in place", "delete", "append", "backup"]), min_size=5, max_size=5),
    looked=st.lists(st.booleans(), min_size=5, max_size=5),
)
@examples(60)
def test_after_any_changes_the_last_state_of_a_file_is_read_completely(
    versions: list[list[str]], ways: list[str], looked: list[bool]
) -> None:
    """C03-C08, P2: After any changes of a file, the lines that the Follower last returned are the lines of the file.

    Only lines returned since the last restart batch, which begins a reading from the start of the file, are compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "jobs.txt")
        path.touch()
        reading = Reading(path)
        since: list[str] = []

        def look() -> None:
            try:
                while (batch := reading.look()) is not None:
                    if batch.restart:
                        since.clear()
                    since.extend(line.text for line in batch.lines)
            except FileTrouble:
                assert not path.exists()

        look()
        for lines, way, seen in zip(versions, ways, looked, strict=False):
            text = "".join(line + "\n" for line in lines)
            tick(Path(folder))
            if path.exists():
                tick(path)
            if way == "append":
                append(path, text)
            elif way == "in place":
                path.write_text(text)
            elif way == "delete":
                path.unlink()
                if seen:
                    look()
                path.write_text(text)
            elif way == "backup":
                path.rename(f"{path}~")
                path.write_text(text)
            else:
                aside = path.with_suffix(".tmp")
                aside.write_text(text)
                aside.rename(path)
            if seen:
                reading.now += 0.4
                look()
        for _ in range(4):
            reading.now += SETTLE_S + 0.01
            look()
        reading.follower.close()
        assert since == path.read_text().split("\n")[:-1]
        assert not reading.follower.mark.replaying


def test_numbers_of_a_file_fit_into_the_store(tmp_path: Path) -> None:
    """File systems such as Gluster have inodes of 64 bits; SQLite has integers of 63 bits."""
    status = os.stat(tmp_path)
    large = os.stat_result((status.st_mode, (1 << 64) - 5, (1 << 63) + 7, *status[3:]))
    assert file_id(large) == (7, (1 << 62) - 5)
    assert file_id(status) == (status.st_dev, status.st_ino)
