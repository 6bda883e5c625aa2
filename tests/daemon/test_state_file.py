"""Tests of the state file: edits are read, and no edit is lost when the daemon writes a new version."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.requests import StateEdited
from scheduler.daemon.state_file import GONE_S, HALF_SAVED_S, OPEN_S, OUT_S, Edit, StateFile, _Out
from scheduler.system import atomic_files

CARDS = [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]


@pytest.fixture
def painted(tmp_path: Path) -> Iterator[StateFile]:
    """Yield a state file that the daemon has written once."""
    file = StateFile(str(tmp_path / "state.json"))
    assert file.paint(a_picture(), 0.0)
    yield file
    file.close()


def a_picture(*gpus: int, **more: Any) -> dict[str, Any]:
    return {"gpu_status": [0.0, 0.0], "paused_gpus": list(gpus), "paused": False, **more}


def read(file: StateFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(file.path).read_text())
    return found


def wish(edit: Edit | None) -> StateEdited | None:
    return None if edit is None else edit.request


def save(file: StateFile, **changes: Any) -> None:
    """Change these values in the state file, as an editor that saves in place does."""
    Path(file.path).write_text(json.dumps({**read(file), **changes}))


# -- indexes and UUIDs -----------------------------------------------------------------------------------


def test_a_paused_index_in_the_state_file_follows_its_gpu_after_renumbering(tmp_path: Path) -> None:
    """I07: If a user pauses an index in the state file, the GPU whose UUID the file lists for this index is paused.

    This holds even if this GPU has another index now.
    """
    path = tmp_path / "state.json"
    for gpus, meant in (([0], (1,)), ([1], (0,)), ([0, 5], (1, 5))):
        path.write_text(json.dumps({"paused_gpus": gpus, "gpus": CARDS}))
        file = StateFile(str(path), numbers={"GPU-a": 1, "GPU-b": 0})
        assert wish(file.look(0.0)) == StateEdited(meant, None)


def test_a_paused_index_that_belongs_to_another_gpu_now_is_ignored(tmp_path: Path) -> None:
    """I07: A paused index for which the state file lists no UUID is ignored if a renumbered GPU has this index now."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"paused_gpus": [2, 3], "gpus": CARDS}))
    file = StateFile(str(path), numbers={"GPU-a": 0, "GPU-b": 2})
    assert wish(file.look(0.0)) == StateEdited((3,), None)


@pytest.mark.parametrize("cards", [None, [], "x", 3, [3], [{}], [{"index": "0"}], [{"index": [], "uuid": []}], [None]])
def test_without_uuids_in_the_state_file_a_paused_index_means_the_present_index(tmp_path: Path, cards: Any) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"paused_gpus": [0], "gpus": cards}))
    file = StateFile(str(path), numbers={"GPU-a": 1, "GPU-b": 0})
    assert wish(file.look(0.0)) == StateEdited((0,), None)


# -- edits -----------------------------------------------------------------------------------------------


def test_an_edit_is_returned_until_it_is_accepted(painted: StateFile) -> None:
    save(painted, paused_gpus=[1], paused=True)
    edit = painted.look(1.0)
    assert edit is not None and wish(edit) == StateEdited((1,), True, 1)
    assert painted.look(2.0) == edit, "what could not be recorded is not forgotten"
    painted.accept(edit)
    assert painted.look(3.0) is None


def test_d05_an_edit_that_the_daemon_has_overwritten_is_still_read(painted: StateFile) -> None:
    """D05: An edit is not lost if the daemon writes a new version before it has read the edit.

    The daemon reads the edit from the file that the new version has replaced.
    """
    assert painted.look(1.0) is None
    save(painted, paused_gpus=[0])
    assert painted.paint(a_picture(), 1.0)
    edit = painted.look(1.0)
    assert edit is not None and wish(edit) == StateEdited((0,), False, 1)
    painted.accept(edit)
    assert painted.look(1.0) is None and painted.look(1.0 + OUT_S) is None


def test_d05_an_edit_written_into_the_replaced_state_file_is_read(painted: StateFile) -> None:
    """D05: If a program writes an edit into a state file that the daemon has replaced, the edit is read.

    The program still has the replaced file open.
    """
    document = json.dumps({**read(painted), "paused_gpus": [1]})
    with open(painted.path, "w") as stream:
        assert painted.paint(a_picture(), 1.0), "an empty file, seen for the first time by the exchange"
        assert painted.look(1.0) is None and painted.look(5.0) is None, "it is still being written"
        stream.write(document[:20])
        stream.flush()
        assert painted.look(6.0) is None
        stream.write(document[20:])
    edit = painted.look(7.0)
    assert edit is not None and wish(edit) == StateEdited((1,), False, 1)
    painted.accept(edit)
    assert painted.look(7.1) is None and painted.next_look(7.2) is None, "nothing is kept open"
    assert not list(Path(painted.path).parent.glob("*bad*"))


def test_d05_an_incomplete_edit_is_moved_to_a_separate_file(painted: StateFile) -> None:
    with open(painted.path, "w") as stream:
        stream.write('{"paused_gpus": [')
        stream.flush()
        painted.paint(a_picture(), 1.0)
        assert painted.look(1.0 + HALF_SAVED_S) is None and not painted.said, "its writer lives"
    painted.look(2.0 + HALF_SAVED_S)
    (aside,) = Path(painted.path).parent.glob("*.bad-*")
    assert aside.read_text() == '{"paused_gpus": [' and aside.stat().st_mode & 0o777 == 0o600
    assert "line 1, column 18" in painted.said[0] and str(aside) in painted.said[0]


def test_a_program_that_never_closes_the_state_file_blocks_it_only_for_a_limited_time(painted: StateFile) -> None:
    with open(painted.path, "w") as stream:
        stream.write("{")
        stream.flush()
        assert painted.look(0.0) is None
        assert not painted.overdue(HALF_SAVED_S) and painted.overdue(OPEN_S)
        assert not painted.paint(a_picture(), HALF_SAVED_S)
        assert painted.paint(a_picture(), OPEN_S) and painted.look(OPEN_S) is None
    assert list(Path(painted.path).parent.glob("*.bad-*")), painted.said


@pytest.mark.parametrize("mode", ["exchange", "rename"])
def test_d05_each_of_a_thousand_edits_is_read(painted: StateFile, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D05: Each of a thousand edits is read, even on a file system that cannot exchange two file names in one step."""
    if mode == "rename":

        def refuse(*_: object) -> None:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(atomic_files, "_renameat2", lambda: refuse)
    seen = []
    for number in range(1000):
        wanted = [number % 7]
        if number % 2:
            save(painted, paused_gpus=wanted)
        else:
            other = Path(painted.path + ".mine")
            other.write_text(json.dumps({**read(painted), "paused_gpus": wanted}))
            other.rename(painted.path)
        painted.paint(a_picture(), number / 10)
        edit = painted.look(number / 10)
        assert edit is not None
        painted.accept(edit)
        seen.append(list(edit.request.gpus))
        assert painted.look(number / 10) is None
    assert seen == [[number % 7] for number in range(1000)]
    painted.look(200.0)
    assert len(os.listdir(Path(painted.path).parent)) == 1, "nothing is left beside it"


# -- invalid contents ------------------------------------------------------------------------------------

NOT_ONE = {
    "": "line 1, column 1",
    "\0\0\0": "line 1, column 1",
    '{"paused_gpus": [1],}': "line 1",
    '{"paused_gpus": [1] // mine\n}': "line 1, column 21",
    "[]": "it must be a JSON object",
    "3": "it must be a JSON object",
    "null": "it must be a JSON object",
    '{"paused_gpus": 1}': "paused_gpus must be a list",
    '{"paused_gpus": {"0": true}}': "paused_gpus must be a list",
    '{"paused_gpus": ["0"]}': "paused_gpus must be a list",
    '{"paused_gpus": [0.5]}': "paused_gpus must be a list",
    '{"paused_gpus": [true]}': "paused_gpus must be a list",
    '{"paused_gpus": null}': "paused_gpus must be a list",
    '{"paused": "yes"}': "paused must be true or false",
    '{"paused": 1}': "paused must be true or false",
    '{"paused_gpus": [0], "paused_gpus": [1]}': "duplicate key 'paused_gpus'",
    '{"gpu_status": [NaN]}': "NaN is not a JSON number",
    '{"gpu_status": [-Infinity]}': "-Infinity is not a JSON number",
    "[" * 100_000: "",
    "\xff\xfe{}": "",
}


@pytest.mark.parametrize("text", NOT_ONE, ids=lambda text: text[:24].encode("unicode_escape").decode() or "empty")
def test_d01_d02_d03_an_invalid_state_file_changes_no_pause(painted: StateFile, text: str) -> None:
    Path(painted.path).write_bytes(text.encode("latin-1"))
    assert painted.look(0.0) is None and not painted.overdue(0.5)
    assert not painted.paint(a_picture(0), 0.5), "it may be half saved: the user's text stays"
    assert Path(painted.path).read_bytes() == text.encode("latin-1")
    assert painted.overdue(HALF_SAVED_S) and painted.paint(a_picture(0), HALF_SAVED_S)
    painted.look(HALF_SAVED_S)
    assert NOT_ONE[text] in painted.said[0] and "pauses unchanged" in painted.said[0]
    (aside,) = Path(painted.path).parent.glob("*.bad-*")
    assert aside.read_bytes() == text.encode("latin-1")
    assert read(painted)["paused_gpus"] == [0]


def test_an_oversized_state_file_is_refused(painted: StateFile) -> None:
    Path(painted.path).write_text(json.dumps(a_picture(0, more="x" * (2 << 20))))
    painted.look(0.0)
    painted.paint(a_picture(), HALF_SAVED_S)
    painted.look(HALF_SAVED_S)
    assert "larger than 1 MiB" in painted.said[0]


def test_two_invalid_state_files_within_a_second_are_both_kept(painted: StateFile) -> None:
    for number in (1, 2):
        Path(painted.path).write_text("x" * number)
        painted.look(10.0 * number)
        painted.paint(a_picture(), 10.0 * number + HALF_SAVED_S)
        painted.look(10.0 * number + HALF_SAVED_S)
    assert {path.read_text() for path in Path(painted.path).parent.glob("*.bad-*")} == {"x", "xx"}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{}", StateEdited(None, None)),
        ('{"paused": true}', StateEdited(None, True)),
        ('{"paused_gpus": [2]}', StateEdited((2,), None)),
        ('{"paused_gpu": [2], "paused": false}', StateEdited(None, False)),
    ],
)
def test_missing_keys_of_the_state_file_change_nothing(painted: StateFile, text: str, meant: StateEdited) -> None:
    """D03, D04: If a key is missing or misspelt, the setting that it stands for stays unchanged."""
    Path(painted.path).write_text(text)
    assert wish(painted.look(0.0)) == meant


def test_each_key_of_the_state_file_is_on_its_own_line(painted: StateFile) -> None:
    """In the state file each key is on its own line, so that a user or a program such as sed can change it."""
    lines = Path(painted.path).read_text().splitlines()
    assert ' "paused_gpus": [],' in lines and ' "paused": false,' in lines
    assert read(painted) == json.loads(Path(painted.path).read_text())


def test_d05_an_edit_left_in_a_temporary_file_by_a_killed_daemon_is_read(painted: StateFile) -> None:
    """D05: If a killed daemon left an edit in a temporary file, the next daemon applies it and removes the file."""
    folder = Path(painted.path).parent
    theirs, torn, link = (folder / f".{Path(painted.path).name}.new-{n}" for n in (7, 8, 9))
    theirs.write_text(json.dumps({**read(painted), "paused_gpus": [1]}))
    torn.write_text('{"paused_gpus": [')
    link.symlink_to(folder / "elsewhere")
    after = StateFile(painted.path)
    after.begin(was_there=True)
    edit = after.look(0.0)
    assert edit is not None and wish(edit) == StateEdited((1,), False, painted.revision) and theirs.exists()
    again = after.look(0.1)
    assert again is not None and again.data == edit.data, "until it is accepted"
    after.accept(edit)
    wish(after.look(0.2))
    assert not theirs.exists() and not torn.exists() and link.is_symlink()


def test_a_state_file_with_a_byte_order_mark_is_valid(painted: StateFile) -> None:
    Path(painted.path).write_bytes(b"\xef\xbb\xbf" + json.dumps(a_picture(1)).encode())
    assert wish(painted.look(0.0)) == StateEdited((1,), False)


def test_d04_an_unknown_key_is_reported_once_with_the_most_similar_one(painted: StateFile) -> None:
    save(painted, pause_gpus=[1], mine=3)
    painted.look(0.0)
    painted.look(0.1)
    assert len(painted.said) == 2
    assert "'pause_gpus', which is ignored and removed; did you mean paused_gpus?" in painted.said[0]
    assert "keys that can be edited: paused_gpus, paused" in painted.said[1]


# -- missing, replaced by something else -------------------------------------------------------------------


def test_d06_a_deleted_state_file_resets_the_pauses_after_a_moment(painted: StateFile) -> None:
    os.unlink(painted.path)
    assert painted.look(1.0) is None and not painted.paint(a_picture(0), 1.1), "it may be an editor's way of saving"
    edit = painted.look(1.0 + GONE_S)
    assert wish(edit) == StateEdited((), False) and "deleted: all pauses are removed" in painted.said[0]
    assert edit is not None
    painted.accept(edit)
    assert painted.look(3.0) is None and painted.paint(a_picture(), 3.0)


def test_renaming_the_old_state_file_before_a_save_is_not_read_as_a_deletion(painted: StateFile) -> None:
    """C07: If an editor renames the old state file and writes a new one, the daemon reads an edit, not a deletion."""
    os.rename(painted.path, painted.path + "~")
    assert painted.look(1.0) is None
    Path(painted.path).write_text(json.dumps(a_picture(1, revision=1)))
    assert wish(painted.look(1.1)) == StateEdited((1,), False, 1) and not painted.said


def test_a_deletion_of_the_state_file_before_a_rewrite_is_noticed(painted: StateFile) -> None:
    os.unlink(painted.path)
    assert not painted.paint(a_picture(0), 1.0)
    assert not os.path.exists(painted.path) and painted.look(1.0) is None
    assert wish(painted.look(1.0 + GONE_S)) == StateEdited((), False)


def test_d08_a_link_at_the_state_file_path_is_neither_read_nor_written_through(painted: StateFile) -> None:
    other = Path(painted.path).parent / "bashrc"
    other.write_text(json.dumps(a_picture(1)))
    os.unlink(painted.path)
    os.symlink(other, painted.path)
    assert painted.look(1.0) is None and "it is a symbolic link, which is not followed" in painted.said[0]
    with pytest.raises(OSError, match="link"):
        painted.paint(a_picture(), 1.0)
    assert json.loads(other.read_text()) == a_picture(1)


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_a_fifo_or_folder_at_the_state_file_path_does_not_block(painted: StateFile, kind: str) -> None:
    os.unlink(painted.path)
    os.mkdir(painted.path) if kind == "folder" else os.mkfifo(painted.path)
    assert painted.look(1.0) is None and ("not a regular file" in painted.said[0] or "directory" in painted.said[0])
    painted.look(1.1)
    assert len(painted.said) == 1
    with pytest.raises(OSError, match="not a regular file"):
        painted.paint(a_picture(), 1.2)
    assert os.listdir(os.path.dirname(painted.path)) == ["state.json"], "and it stays where it is"


def test_d10_editor_files_beside_the_state_file_are_ignored(painted: StateFile) -> None:
    for name in (".state.json.swp", "state.json~", "#state.json#", ".state.json.new-1"):
        (Path(painted.path).parent / name).write_text(json.dumps(a_picture(1)))
    assert painted.look(1.0) is None


def test_each_state_file_version_is_private_and_numbered(painted: StateFile) -> None:
    os.chmod(painted.path, 0o666)
    painted.paint(a_picture(), 1.0)
    assert os.stat(painted.path).st_mode & 0o777 == 0o600 and read(painted)["revision"] == 2
    again = StateFile(painted.path)
    again.begin(was_there=True)
    assert again.revision == 2, "a new daemon goes on from there"


def test_a_state_file_deleted_while_no_daemon_ran_resets_the_pauses(painted: StateFile) -> None:
    os.unlink(painted.path)
    never, before = StateFile(painted.path), StateFile(painted.path)
    never.begin(was_there=False)
    before.begin(was_there=True)
    assert never.look(9.0) is None and wish(before.look(9.0)) == StateEdited((), False)


def test_e09_a_replaced_state_file_that_cannot_be_read_is_reported_after_retries(tmp_path: Path) -> None:
    """E09: If the state file that the daemon has replaced cannot be read, the daemon tries again for some seconds.

    Then the failure is reported.
    """
    file = StateFile(str(tmp_path / "state.json"))
    file._outs.append(_Out(os.open(tmp_path, os.O_RDONLY), b"", 0.0))  # a folder cannot be read as a file
    assert file.look(0.0) is None and not file.said and file._outs
    assert file.look(OPEN_S) is None and not file._outs
    assert "cannot read the latest edit of " in file.said[0]
