"""Tests of the readers of plain and compressed logs: `LogReader` follows a log, `LogWindow` reads any part of a log."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.system.log_reader import LogReader, LogWindow

LINES = b"".join(b"line %d\n" % number for number in range(1000))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_bytes(b"one\n")
    return path


def read(reader: LogReader) -> bytes:
    return b"".join(reader.new())


def test_a_log_reader_continues_at_its_place_also_after_close(log: Path) -> None:
    with LogReader(str(log)) as reader:
        assert read(reader) == b"one\n" and read(reader) == b""
        reader.close()
        with log.open("ab") as stream:
            stream.write(b"two\n")
        assert reader.closed
        reader.open()
        assert b"".join(reader.new(until=6)) == b"tw" and read(reader) == b"o\n"


def test_a_log_reader_notices_a_truncated_and_a_replaced_log(log: Path) -> None:
    with LogReader(str(log)) as reader:
        assert read(reader) == b"one\n" and not reader.is_cut() and not reader.is_replaced()
        log.write_bytes(b"a\n")
        assert reader.is_cut() and not reader.is_replaced()
        reader.restart()
        assert read(reader) == b"a\n"
        log.with_name("new").write_bytes(b"b\n")
        log.with_name("new").replace(log)
        assert reader.is_replaced() and not reader.is_cut()
        log.unlink()
        with pytest.raises(FileNotFoundError):
            reader.is_replaced()


def test_a_packed_log_is_unpacked_as_it_grows_and_its_damage_is_reported(tmp_path: Path) -> None:
    path, packed = tmp_path / "job.log.gz", gzip.compress(LINES)
    path.write_bytes(packed[:-20])
    with LogReader(str(path)) as reader:
        before = read(reader)
        assert reader.packed and LINES.startswith(before) and "the compressed log is incomplete" in reader.trouble()
        path.write_bytes(packed)
        assert before + read(reader) == LINES and reader.trouble() == ""
    path.write_bytes(packed[:100] + bytes(200))
    with LogReader(str(path)) as reader:
        read(reader)
        assert "is damaged" in reader.trouble()
    with LogReader(str(path), unpack=False) as reader:
        assert not reader.packed and read(reader) == path.read_bytes()


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_a_log_that_is_no_regular_file_is_refused_without_blocking(tmp_path: Path, what: str) -> None:
    path = tmp_path / "log"
    os.mkfifo(path) if what == "fifo" else path.mkdir()
    for open_it in (lambda: LogReader(str(path)), lambda: LogWindow(str(path), keep=10)):
        with pytest.raises(OSError, match="not a regular file"):
            open_it()


def test_a_link_is_refused_as_a_log_of_this_program(log: Path) -> None:
    link = log.with_name("link")
    link.symlink_to(log)
    with LogReader(str(link)) as reader:
        assert read(reader) == b"one\n"
    with pytest.raises(OSError, match="symbolic"):
        LogReader(str(link), ours=True)


@given(
    text=st.lists(st.sampled_from([b"", b"a", b"bc" * 40]), max_size=30), ended=st.booleans(), most=st.integers(0, 12)
)
def test_to_last_lines_agrees_with_splitting_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, text: list[bytes], ended: bool, most: int
) -> None:
    data = b"\n".join(text) + (b"\n" if ended and text else b"")
    wanted = b"".join(data.splitlines(keepends=True)[-most:]) if most else b""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "log").write_bytes(data)
    (folder / "log.gz").write_bytes(gzip.compress(data))
    with LogReader(str(folder / "log")) as reader:
        assert reader.to_last_lines(most) is False and read(reader) == wanted
    for name in ("log", "log.gz"):
        with LogWindow(str(folder / name), keep=1 << 20) as window:
            start, entered = window.last_lines(most, 1 << 20)
            assert not entered and window.read(start, window.size) == wanted


@pytest.mark.parametrize("name", ["log", "log.gz"])
def test_a_log_window_reads_any_part_of_the_log_up_to_its_size_at_opening(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINES) if name.endswith(".gz") else LINES)
    with LogWindow(str(path), keep=100) as window:
        assert window.size == len(LINES) and not window.cut
        for at, most in ((0, 10), (500, 1000), (len(LINES) - 7, 100), (len(LINES), 5), (len(LINES) + 9, 5)):
            assert window.read(at, most) == LINES[at : at + most]
        start, entered = window.last_lines(10**6, 50)
        assert not entered and 0 < len(LINES) - start <= 50


def test_a_packed_log_that_unpacks_to_too_much_is_cut_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(bytes(4 << 20)))
    with LogWindow(str(path), keep=10, most_unpacked=1 << 20) as window:
        assert window.cut and 1 << 20 <= window.size <= 3 << 20
