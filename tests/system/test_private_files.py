"""Tests of `private_files`, which creates files that only their owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from scheduler.system.private_files import new_beside, new_private


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_a_new_private_file_has_mode_0600_with_any_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = (
            tmp_path if mask == 0o777 else tmp_path / "made"
        )  # a folder created with umask 777 could not be entered
        os.close(new_private(str(folder / "x"), make_folder=True))
    finally:
        os.umask(before)
    (made,) = tmp_path.rglob("x")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_new_private_refuses_an_existing_file_or_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            new_private(str(tmp_path / name))
    with pytest.raises(FileNotFoundError):
        new_private(str(tmp_path / "no" / "folder"))
    assert not (tmp_path / "nowhere").exists()


def test_new_beside_gives_each_file_a_different_name(tmp_path: Path) -> None:
    made = [new_beside(str(tmp_path / "state.json"), "bad") for _ in range(3)]
    for _, fd in made:
        os.close(fd)
    names = [name for name, _ in made]
    assert len(set(names)) == 3 and all(name.startswith(f"{tmp_path}/state.json.bad-2") for name in names)
