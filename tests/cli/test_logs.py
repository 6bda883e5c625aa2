"""Tests of the conversion of log bytes into lines, as a terminal shows them.

A simple terminal model is the reference.
"""

from __future__ import annotations

import gzip
import re
import tracemalloc
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.system.log_reader import LogReader
from scheduler.views.log_glance import last_lines
from scheduler.views.terminal_replay import _ODD, Folder, clipped, columns


def folded(data: bytes, colours: bool = False, longest: int = 1 << 20) -> list[str]:
    folder = Folder(colours, longest)
    return [*folder.feed(data), *folder.feed(b"", last=True)]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"  1%\r  2%\r100%\n", ["100%"]),
        (b"long line\rshort\n", ["shortline"]),
        (b"long line\rshort\x1b[K\n", ["short"]),
        (b"long line\r\x1b[2Kshort\n", ["short"]),
        (b"long line\x1b[2K\x1b[1Gshort\n", ["short    "]),  # erasing leaves blanks, as on a terminal
        (b"abc\r", ["abc"]),
        (b"\r\r\r\n", [""]),
        (b"\r", []),
        (b"abc\rX\rY", ["Ybc"]),
        (b"one\ttwo\n", ["one\ttwo"]),
        (b"\x1b[31mred\x1b[0m plain\n", ["red plain"]),
        (b"\x1b[31m", []),
        (b"\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link\n", ["textlink"]),
        (b"\x1b]52;c;" + b"A" * 5000 + b"\n", ["]52;c;" + "A" * 5000]),  # an unended sequence hides no text
        (b"a\x1b[2J\x1b[H\x1bc\x1b(Bb\x1b7\x1b[?25l\x1b[6n\n", ["ab"]),
        (b"\xc2\x9b31mred\xc2\x9b2J\xc2\x85\n", ["red"]),
        (b"bell\x07 null\x00 back\x08 form\x0c del\x7f\n", ["bell null back form del"]),
        (b"caf\xc3\xa9 \xff\xfe \xc3\n", ["café \ufffd\ufffd \ufffd"]),
        (b"h\x00e\x00y\x00\n\x00", ["hey"]),
        ("训练 10%\r训练 20%\n".encode(), ["训练 20%"]),
        ("训练\rab\n".encode(), ["ab练"]),
        ("训练\ra\n".encode(), ["a 练"]),
        (b"  0%|     |\r 50%|" + "██▌".encode() + b"  |\r100%|" + "█████".encode() + b"|\n", ["100%|█████|"]),
    ],
)
def test_s3_20_control_characters_and_escapes_are_folded_as_a_terminal_does(data: bytes, lines: list[str]) -> None:
    """S3.20, S16, S17: Text after a carriage return overwrites the line; escapes and control bytes are removed.

    Invalid bytes become U+FFFD.
    """
    assert folded(data) == lines
    assert all(not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", line) for line in lines)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"\x1b[31mred\x1b[0m plain\n", ["\x1b[31mred\x1b[0m plain\x1b[0m"]),
        (b"\x1b[31mred\nstill\x1b[m\nplain\n", ["\x1b[31mred\x1b[0m", "\x1b[31mstill\x1b[m\x1b[0m", "plain"]),
        (b"\x1b[31mabc\r\x1b[0mx\n", ["\x1b[31m\x1b[0mx\x1b[0m\x1b[31mbc\x1b[0m"]),
        (b"\x1b[31m\n\x1b[0m\n", ["", ""]),
        (b"\x1b[>4;1mx\x1b[2Jy\x1b]0;t\x07z\n", ["xyz"]),
        (b"\xc2\x9b32mgreen\n", ["\x1b[32mgreen\x1b[0m"]),
    ],
)
def test_s17_only_colours_reach_a_terminal_and_are_reset_at_the_end_of_a_line(data: bytes, lines: list[str]) -> None:
    """S17: Colours are the only escape sequences that reach the terminal.

    Each coloured line ends with a colour reset.
    """
    assert folded(data, colours=True) == lines


def test_colours_that_are_never_reset_do_not_accumulate() -> None:
    """S17, K15: Colours that a job never resets do not accumulate from line to line."""
    lines = folded(b"\x1b[1m\x1b[31mx\n" * 1000, colours=True)
    assert len(lines) == 1000 and len(lines[-1]) < 200


def terminal_line(data: bytes) -> list[str]:
    """Return the lines that a simple model of a terminal shows for ``data``.

    The model has a cursor, and one cell for each column; it can erase cells. A wide character takes two cells: the
    second cell is None.
    """
    text = re.sub(r"[\x00-\x06\x08]", "", data.decode("utf-8", "replace"))
    lines: list[str] = []
    cells: list[str | None] = []
    at = position = 0

    def write(char: str | None) -> None:
        nonlocal at
        if at < len(cells):
            if cells[at] is None and at and char is not None:
                cells[at - 1] = " "
            if at + 1 < len(cells) and cells[at + 1] is None:
                cells[at + 1] = " "
            cells[at] = char
        else:
            cells.append(char)
        at += 1

    while position < len(text):
        found = re.compile(r"\x1b\[([0-9;]*)([mKJ])|\x1b\]0;t\x07").match(text, position)
        if found:
            if found.group(2) == "K":
                if found.group(1) in ("", "0"):
                    if at < len(cells) and cells[at] is None:
                        cells[at - 1] = " "
                    del cells[at:]
                elif found.group(1) == "2":
                    cells[:] = [" "] * at
            position = found.end()
            continue
        char = text[position]
        position += 1
        if char == "\n":
            lines.append("".join(cell for cell in cells if cell is not None))
            cells.clear()
            at = 0
        elif char == "\r":
            at = 0
        else:
            write(char)
            if unicodedata.east_asian_width(char) in "WF":
                write(None)
    rest = "".join(cell for cell in cells if cell is not None)
    return [*lines, rest] if rest else lines


PIECES = [
    b"a", b"bc", b"12%", b" ", b"\t", b"\r", b"\r", b"\n", b"\r\n", "é".encode(), "█".encode(), "世".encode(), b"\xff",
    b"\x00", b"\x08", b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[31m", b"\x1b[0m", b"\x1b[2J", b"\x1b]0;t\x07",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=60), st.lists(st.integers(0, 200), max_size=12))
def test_s3_20_folding_agrees_with_the_terminal_model_for_any_split_of_the_bytes(
    pieces: list[bytes], cuts: list[int]
) -> None:
    """S3.20, S17: Folding gives the lines of the terminal model, no matter how the bytes are split into pieces.

    If colours are kept, the text without the colours is the same.
    """
    data = b"".join(pieces)
    wanted = terminal_line(data)
    assert folded(data) == wanted
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[low:high] for low, high in pairwise(edges)]
    for colours in (False, True):
        folder = Folder(colours)
        lines = [line for part in parts for line in folder.feed(part)] + folder.feed(b"", last=True)
        assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines] == wanted
        assert all("\x1b" not in line or (colours and line.endswith("\x1b[0m")) for line in lines)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_s17_no_control_characters_reach_a_line(data: bytes, cuts: list[int]) -> None:
    """S17: The output of a job never puts control characters into a line.

    The split of the bytes does not change the lines.
    """
    wanted = folded(data)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    folder = Folder()
    lines = [line for low, high in pairwise(edges) for line in folder.feed(data[low:high])]
    assert [*lines, *folder.feed(b"", last=True)] == wanted
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", "".join(wanted))


def test_characters_counted_as_one_column_are_narrow() -> None:
    """The pattern `_ODD` matches every character that is wide or takes no column.

    So each character that `_ODD` does not match takes exactly one column. The test also checks a text with wide
    characters: each of them counts as two columns.
    """
    for number in range(0x20, 0x11000):
        char = chr(number)
        if not _ODD.match(char) and unicodedata.category(char) not in ("Cc", "Cs"):
            assert unicodedata.east_asian_width(char) not in "WF", hex(number)
            assert unicodedata.category(char) not in ("Mn", "Me", "Cf"), hex(number)
    assert columns("\x1b[31m世a\x1b[0m") == 3 and clipped("\x1b[31m世界a\x1b[0m", 3) == "\x1b[31m世\x1b[0m"


def test_k15_a_line_that_is_too_long_is_cut_with_a_mark() -> None:
    """K15: A line that is too long is cut, and a mark shows how many characters are missing. The next line is whole."""
    first, second = folded(b"x" * (3 << 20) + b"\nshort\n")
    assert first == "x" * (1 << 20) + f" … (cut here: {2 << 20} more characters)" and second == "short"
    assert folded(b"x" * 50 + b"\rab\n", longest=20) == ["ab" + "x" * 18 + " … (cut here: 30 more characters)"]
    assert folded(b"x" * 50 + b"\r\x1b[Kab\n", longest=20) == ["ab"]
    (coloured,) = folded(b"\x1b[31m" * 10 + b"x" * 50 + b"\n", colours=True, longest=20)
    assert re.fullmatch(r"(\x1b\[31m){4} … \(cut here: \d+ more characters\)\x1b\[0m", coloured)


def test_s3_20_a_large_progress_bar_is_one_line_and_needs_constant_memory() -> None:
    """S3.20, K15: A progress bar of 64 MB is one line. The memory in use does not grow with the length of the output.

    A test in tests/stories repeats this with 1 GB.
    """
    update = "".join(f"\r{n:3d}%|{'█' * (n // 5):20}| {n}/100" for n in range(100)).encode()
    folder = Folder()
    chunk = (update * 64)[: 256 * 1024]
    tracemalloc.start()
    try:
        for _ in range(16):
            assert folder.feed(chunk) == []
        early = tracemalloc.get_traced_memory()[1]
        for _ in range(240):
            assert folder.feed(chunk) == []
        late = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert late < early + 200_000 and late < 16 << 20
    assert folder.feed(b"\r100%\x1b[K\n") == ["100%"]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"ddle of it\nnext\n", ["… ddle of it", "next"]),
        (b"ddle of it\r\nnext\n", ["… ddle of it", "next"]),
        (b"7%|####  | and more\r 98%|\r 99%|\n", [" 99%|"]),
        (b"7%|####  | and more\r\r 98%|\r\r 99%|\r\n", [" 99%|"]),
        ("7%|####  | 世\r\r\x1b[31m 98%|\r".encode(), [" 98%|"]),
        (b"", []),
        (b"\n", ["… "]),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_k15_a_line_read_from_its_middle_is_marked(data: bytes, lines: list[str], step: int) -> None:
    """K15: A line that is read from its middle is shown with the mark "…" at its start.

    If the line contains a carriage return with text after it, this text replaces the mark and the text before the
    carriage return.
    """
    folder = Folder()
    folder.enter()
    found = [line for at in range(0, len(data), step) for line in folder.feed(data[at : at + step])]
    assert [*found, *folder.feed(b"", last=True)] == lines


def test_k15_a_packed_log_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    """K15: `last_lines` reads a gzip log, but refuses one whose unpacked contents are larger than a limit."""
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(b"".join(b"line %d\n" % n for n in range(100_000)) + b"last\rLAST"))
    assert last_lines(str(path), 2) == ["line 99999", "LAST"]
    assert last_lines(str(path), 0) == []
    assert last_lines(str(path), 10**6)[0] > "line 90000"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    assert last_lines(str(path), 9) == ["a", "b"]
    one = gzip.compress(bytes(16 << 20))
    path.write_bytes(one * 17)
    with pytest.raises(OSError, match="too large"):
        last_lines(str(path), 2)


def test_k15_last_lines_are_searched_from_the_end_of_the_log(tmp_path: Path) -> None:
    """K15: `last_lines` searches backwards from the end of the log, also in a file of 4 GB and in a very long line."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)))
    assert last_lines(str(path), 2) == ["line 99998", "line 99999"]
    assert last_lines(str(path), 0) == []
    path.write_bytes(b"one\ntwo\nthree")
    assert last_lines(str(path), 2) == ["two", "three"]
    assert last_lines(str(path), 9) == ["one", "two", "three"]
    with path.open("wb") as stream:
        stream.truncate(4 << 30)
        stream.seek(4 << 30)
        stream.write(b"\nthe end\n")
    with LogReader(str(path)) as log:
        assert log.to_last_lines(1) is False and b"".join(log.new()) == b"the end\n"
        assert log.to_last_lines(5) is True and log.at > (4 << 30) - (10 << 20)
