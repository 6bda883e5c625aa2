"""Tests of `atomic_files`: a file is written completely or not at all, and only its owner can read it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scheduler.system.atomic_files import append_line, replace_file, swap_file


def test_replace_file_writes_the_new_content_with_mode_0600(tmp_path: Path) -> None:
    """S3.33, P9: A replaced file has the new content and mode 0600, whatever the umask and the file's old mode are."""
    path = tmp_path / "state.json"
    path.write_text("old")
    path.chmod(0o666)
    old = os.umask(0)
    try:
        replace_file(str(path), b"new")
    finally:
        os.umask(old)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_replace_file_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    """P9: If there is a link at the path of the file, the link is replaced. The target of the link is unchanged."""
    victim, path = tmp_path / "victim", tmp_path / "state.json"
    victim.write_text("precious")
    path.symlink_to(victim)
    replace_file(str(path), b"new")
    assert victim.read_text() == "precious"
    assert not path.is_symlink() and path.read_bytes() == b"new"


def test_replace_file_does_not_follow_a_link_at_its_temporary_path(tmp_path: Path) -> None:
    """P9: The path of the temporary file can be guessed. A link at this path is not followed."""
    victim, path = tmp_path / "victim", tmp_path / "state.json"
    victim.write_text("precious")
    (tmp_path / f".state.json.new-{os.getpid()}").symlink_to(victim)
    replace_file(str(path), b"new")
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["state.json", "victim"]


@pytest.mark.parametrize("sync", [True, False])
def test_replace_file_overwrites_a_temporary_file_of_a_killed_process(tmp_path: Path, sync: bool) -> None:
    """P8: `replace_file` succeeds although a killed process has left a temporary file at the path that it uses.

    Afterwards there is no temporary file.
    """
    path = tmp_path / "state.json"
    (tmp_path / f".state.json.new-{os.getpid()}").write_text("half")
    replace_file(str(path), b"new", sync=sync)
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_failed_rename_keeps_the_old_file_and_removes_the_temporary_one(tmp_path: Path) -> None:
    """F, P4: If the rename fails, the old file stays and the temporary file is removed."""
    path = tmp_path / "state.json"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        replace_file(str(path), b"new")
    assert os.listdir(tmp_path) == ["state.json"]
    assert (path / "inside").is_dir()


def test_a_failed_write_keeps_the_old_file_and_removes_the_temporary_one(tmp_path: Path) -> None:
    """F, P4: If the write fails (here at a limit of the file size), the old file stays.

    The error names the file's path.
    """
    path = tmp_path / "state.json"
    path.write_text("old")
    code = """
import resource, signal, sys
from scheduler.system.atomic_files import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    replace_file(sys.argv[1], b"x" * 1000)
except OSError as error:
    print(error.errno, error.filename == sys.argv[1])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.stdout.strip() == "27 True", ran.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_reader_gets_the_old_or_the_new_file_completely(tmp_path: Path) -> None:
    """S3.33: While a file is replaced, a reader gets either the complete old content or the complete new content."""
    path = str(tmp_path / "state.json")
    versions = [bytes([65 + n]) * (1000 * (n + 1)) for n in range(5)]
    replace_file(path, versions[0], sync=False)
    over = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not over.is_set():
            with open(path, "rb") as stream:
                data = stream.read()
            if data not in versions:
                seen.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(500):
        replace_file(path, versions[n % 5], sync=False)
    over.set()
    reader.join()
    assert seen == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "x\n"),
        ("", "x\n"),
        ("a\n", "a\nx\n"),
        ("a", "a\nx\n"),
        ("a\nb", "a\nb\nx\n"),
        ("\n", "\nx\n"),
        ("a\r\n", "a\r\nx\n"),
    ],
)
def test_append_line_completes_a_last_line_without_newline(tmp_path: Path, before: str | None, after: str) -> None:
    """S3.40, C20: If the last line has no newline, `append_line` adds one before its own line."""
    path = tmp_path / "jobs.txt"
    if before is not None:
        path.write_bytes(before.encode())
    append_line(str(path), "x")
    assert path.read_bytes() == after.encode()


def test_append_line_creates_a_file_with_mode_0600(tmp_path: Path) -> None:
    """P9: A file that `append_line` creates has mode 0600 whatever the umask."""
    old = os.umask(0)
    try:
        append_line(str(tmp_path / "jobs.txt"), "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "jobs.txt").stat().st_mode) == 0o600


def test_append_line_keeps_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """`append_line` writes bytes that are not UTF-8 unchanged. File names may contain such bytes."""
    append_line(str(tmp_path / "jobs.txt"), "0,/é\udcff.py")
    assert (tmp_path / "jobs.txt").read_bytes() == b"0,/\xc3\xa9\xff.py\n"


def test_append_line_raises_an_error_for_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    """S3.41: `append_line` raises OSError if the path is a folder or the file's folder is missing."""
    with pytest.raises(OSError):
        append_line(str(tmp_path), "x")
    with pytest.raises(OSError):
        append_line(str(tmp_path / "nosuch" / "jobs.txt"), "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_takes_no_half_line(tmp_path: Path) -> None:
    """P4: On a full disk no part of a line is written.

    A part would be read as a job whose last arguments are missing.
    """
    options = "size=16k,mode=0700"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount")
    try:
        path = tmp_path / "jobs.txt"
        path.write_text("0,a.py,,\n" + "#" * 3990 + "\n")
        before = path.read_bytes()
        with (tmp_path / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(b"x" * 4096)
        with pytest.raises(OSError) as caught:
            append_line(str(path), "0,b.py,," + "y" * 300)
        assert caught.value.errno == errno.ENOSPC and path.read_bytes() == before
        (tmp_path / "filler").unlink()
        append_line(str(path), "0,b.py,," + "y" * 300)
        assert path.read_bytes() == before + b"0,b.py,," + b"y" * 300 + b"\n"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("before", ["", "0,a.py,,\n", "0,a.py,,--half"])
@pytest.mark.parametrize("room", [1, 2, 12])
@pytest.mark.parametrize("others", ["", "0,c.py,,\n"])
def test_a_partly_written_line_becomes_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, room: int, others: str
) -> None:
    """P4, S3.7: If a line is written only in part, it is made a comment. Lines of other writers are unchanged.

    In this test another process uses up the reserved space, and appends a line before or after the incomplete line.
    """
    path = tmp_path / "jobs.txt"
    path.write_text(before)
    write = os.write

    def full_disk(fd: int, data: bytes) -> int:
        with path.open("a") as stream:  # the reserved space is then no longer at the end of the file
            stream.write(others if not before.endswith("half") else "")
        written = write(fd, data[:room])
        with path.open("a") as stream:
            stream.write(others)
        return written

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError) as caught:
        append_line(str(path), "0,b.py,,--lr 1 --epochs 5")
    assert caught.value.errno == errno.ENOSPC
    lines = path.read_text().split("\n")
    left = [line for line in lines if line and not line.startswith("#")]
    written_before = 2 if others and not before.endswith("half") else bool(others)
    assert left == [line for line in before.split("\n") if line] + ["0,c.py,,"] * written_before
    assert path.read_text().endswith("\n")


def test_long_lines_appended_by_several_threads_are_not_mixed(tmp_path: Path) -> None:
    """C19, C20: Long lines that several threads append at the same time are not mixed."""
    path = str(tmp_path / "jobs.txt")

    def write(who: str) -> None:
        for _ in range(50):
            append_line(path, who * 20_000)

    threads = [threading.Thread(target=write, args=(who,)) for who in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for line in Path(path).read_text().split("\n") if line]
    assert sorted(lines) == sorted(who * 20_000 for who in "abcd" for _ in range(50))


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_swap_file_keeps_a_folder_link_or_pipe_that_it_finds(tmp_path: Path, kind: str) -> None:
    """If a folder, link or pipe is in the place of the file, `swap_file` raises OSError and does not change it.

    Such an entry may appear after the caller's check and before the swap. No temporary file is left.
    """
    path = tmp_path / "state.json"
    if kind == "folder":
        path.mkdir()
        (path / "kept").write_text("kept")
    elif kind == "link":
        (tmp_path / "elsewhere").write_text("kept")
        path.symlink_to("elsewhere")
    else:
        os.mkfifo(path)
    before = path.lstat().st_ino
    with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
        swap_file(str(path), b"ours\n", there=True)
    assert path.lstat().st_ino == before
    assert {one.name for one in tmp_path.iterdir()} <= {"state.json", "elsewhere"}
