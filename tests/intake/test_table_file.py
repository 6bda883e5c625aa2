"""Issue 27, 1: needs are written into the file of a model table, with a backup, or nothing happens at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler.core.errors import FileTrouble, Refused, SchedulerError, UsageError
from scheduler.core.needs_to_apply import NeedChange
from scheduler.intake import table_file
from scheduler.intake.table_file import write_needs

WRITTEN = '{\n  "models": {"m": 1.0, "n":0.50}, "default_requirement":1}'
CHANGE = NeedChange("n", "0.5", "0.25")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    path = tmp_path / "llm_config.json"
    path.write_text(WRITTEN)
    path.chmod(0o640)
    return path


def backups(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.before-*"))


@pytest.mark.parametrize("start", ["", "\ufeff", "\r\n \t"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
def test_only_the_value_changes(table: Path, start: str, line_end: str, end: str) -> None:
    """Byte order mark, line ends, layout, order of keys and a missing last newline stay; so does the mode."""
    before = (start + WRITTEN.replace("\n", line_end) + end).encode()
    table.write_bytes(before)
    backup = write_needs(str(table), [CHANGE])
    assert table.read_bytes() == before.replace(b":0.50", b":0.25")
    assert stat.S_IMODE(table.stat().st_mode) == 0o640
    assert [str(path) for path in backups(table)] == [backup]
    assert Path(backup).read_bytes() == before and stat.S_IMODE(os.stat(backup).st_mode) == 0o600


def test_an_older_backup_is_never_overwritten(table: Path) -> None:
    needs = ["0.5", "0.25", "0.3", "0.35"]
    for before, after in pairwise(needs):
        write_needs(str(table), [NeedChange("n", before, after)])
    assert {json.loads(path.read_text())["models"]["n"] for path in backups(table)} == {0.5, 0.25, 0.3}
    assert sorted(os.listdir(table.parent)) == sorted([table.name, *(path.name for path in backups(table))])


def test_a_missing_file_is_made_private(table: Path) -> None:
    table.unlink()
    assert write_needs(str(table), [NeedChange("neu", "", "2x0.5")]) == ""
    assert json.loads(table.read_text()) == {"models": {"neu": "2x0.5"}}
    assert stat.S_IMODE(table.stat().st_mode) == 0o600 and os.listdir(table.parent) == [table.name]
    table.unlink()
    with pytest.raises(UsageError, match="no such model table"):
        write_needs(str(table), [NeedChange("neu", "", "2x0.5")], needed=True)
    with pytest.raises(SchedulerError, match="its folder does not exist"):
        write_needs(str(table.parent / "gone" / "table.json"), [NeedChange("neu", "", "1")])


def test_a_link_stays_and_its_target_is_changed(table: Path) -> None:
    folder = table.parent / "elsewhere"
    folder.mkdir(mode=0o700)
    target = table.rename(folder / "real.json")
    table.symlink_to(target)
    backup = write_needs(str(table), [CHANGE])
    assert table.is_symlink() and '"n":0.25' in target.read_text() and backup.startswith(str(target))


def mistake(path: Path) -> None:
    path.write_text('{\n "models": {"n": 0.5,\n "m": "many"}}')


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def changed(path: Path) -> None:
    path.write_text(WRITTEN.replace("0.50", "0.75"))


def read_only(path: Path) -> None:
    path.chmod(0o400)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (mistake, UsageError, r"llm_config\.json:3: models\.m"), (open_to_all, FileTrouble, "all users may write"),
        (open_folder, FileTrouble, "all users may write"), (changed, SchedulerError, "has changed meanwhile"),
        (read_only, Refused, "it is read-only"), (a_folder, SchedulerError, "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_may_not_be_written_stays(
    table: Path, spoil: Callable[[Path], None], kind: type[SchedulerError], says: str
) -> None:
    spoil(table)
    before = table.read_bytes() if table.is_file() else b""
    with pytest.raises(kind, match=says):
        write_needs(str(table), [CHANGE])
    assert not backups(table) and (not before or table.read_bytes() == before)


@pytest.mark.parametrize("saved", [WRITTEN.replace("1.0", "0.7"), "half a ta", None])
def test_an_edit_at_the_same_moment_is_kept(table: Path, monkeypatch: pytest.MonkeyPatch, saved: str | None) -> None:
    """A file that is saved between the look and the write keeps what was saved, and there is no backup."""
    swap = table_file.swap_file
    saves = iter([saved])

    def later(path: str, data: bytes, **options: object) -> int:
        for text in saves:
            if text is None:
                table.unlink()
            else:
                table.write_text(text)
        return swap(path, data, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(table_file, "swap_file", later)
    with pytest.raises(SchedulerError, match="has changed meanwhile"):
        write_needs(str(table), [CHANGE])
    assert os.listdir(table.parent) == ([] if saved is None else [table.name])
    assert saved is None or (table.read_text() == saved and stat.S_IMODE(table.stat().st_mode) == 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_owner_and_group_stay_and_a_file_of_another_user_is_refused(table: Path) -> None:
    os.chown(table, 0, 4242)
    write_needs(str(table), [CHANGE])
    assert (table.stat().st_uid, table.stat().st_gid) == (0, 4242)
    os.chown(table, 4242, 4242)
    with pytest.raises(FileTrouble, match="it belongs to user 4242"):
        write_needs(str(table), [NeedChange("n", "0.25", "0.5")])
    assert len(backups(table)) == 1
