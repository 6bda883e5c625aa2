"""Which scheduler a command means if nothing names one, on a machine with a scheduler of all users."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.client import locate
from scheduler.client.locate import check_no_socket, state_file_for
from scheduler.core.errors import NoDaemon, UsageError
from scheduler.store.paths import Places


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, an empty one. No scheduler of the user runs."""
    for name in ("GPUJOB_STATE_FILE", "GPUJOB_CONFIG", locate.SYSTEM_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(locate, "SYSTEM_SOCKET", str(tmp_path / "sock"))
    monkeypatch.setattr(locate, "SYSTEM_UNIT", str(tmp_path / "unit"))
    monkeypatch.setattr(locate, "registered", lambda environ: [])
    found = tmp_path / "here"
    found.mkdir()
    monkeypatch.chdir(found)
    return found


@pytest.fixture
def everybodys(here: Path) -> Iterator[str]:
    """Yield the path of the socket of the scheduler of all users."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(here.parent / "sock"))
        yield str(here.parent / "sock")


def test_without_any_scheduler_it_is_the_state_file_of_the_folder(here: Path) -> None:
    assert state_file_for(None) == str(here / "gpu_scheduler_state.json")


def test_the_scheduler_of_all_users_is_used_and_said(everybodys: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert state_file_for(None) == everybodys
    assert "using the scheduler of all users" in capsys.readouterr().err


def test_a_state_folder_without_a_scheduler_does_not_count(here: Path, everybodys: str) -> None:
    """A `gpujob run` that has failed leaves such a folder: later jobs would wait in it for a scheduler that never comes."""
    Path(Places(str(here / "gpu_scheduler_state.json")).state_dir).mkdir()
    assert state_file_for(None) == everybodys


def test_a_state_file_in_the_folder_counts(here: Path, everybodys: str) -> None:
    (here / "gpu_scheduler_state.json").write_text("{}")
    assert state_file_for(None) == str(here / "gpu_scheduler_state.json")


def test_a_socket_in_the_folder_does_not_count(here: Path, everybodys: str) -> None:
    """Another user can put it there: the command would send its variables to this user."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("gpu_scheduler_state.json")
        assert state_file_for(None) == everybodys


def test_schedulers_of_ts_do_not_count(here: Path, everybodys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spooler = here / "spooler"
    (spooler / "3").mkdir(parents=True)
    (spooler / "current").write_text("3")
    own = str(here / "elsewhere" / "gpu_scheduler_state.json")
    monkeypatch.setattr(locate, "registered", lambda environ: [str(spooler / "3" / "gpu_scheduler_state.json")])
    assert state_file_for(None) == everybodys
    monkeypatch.setattr(locate, "registered", lambda environ: [str(spooler / "3" / "gpu_scheduler_state.json"), own])
    assert state_file_for(None) == own


def test_a_scheduler_of_all_users_that_does_not_run_is_said(here: Path) -> None:
    """A job must not be added unnoticed to a queue that nobody works on."""
    (here.parent / "unit").write_text("")
    with pytest.raises(NoDaemon, match="does not run"):
        state_file_for(None)


def test_a_scheduler_cannot_run_with_the_socket_as_its_state_file(everybodys: str) -> None:
    with pytest.raises(UsageError, match="leave out --system"):
        check_no_socket(everybodys)
