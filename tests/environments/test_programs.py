"""Tests of what gpujob finds out about a program without running it: its version, and why it cannot start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.environments.discovery import Remembered
from scheduler.environments.programs import described, folder_trouble, script_trouble, version_of, why_not_started
from tests.prefixes import conda_prefix, executable

# -- versions ---------------------------------------------------------------------------------------------


def linked(prefix: Path, target: Path) -> str:
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    link = prefix / "bin" / "python"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    return str(link)


@pytest.mark.parametrize(
    ("text", "version"),
    [("version = 3.11.7\n", "3.11.7"), ("home=/x\nversion_info = 3.11.2.final.0\n", "3.11.2"), ("home = /x\n", "3.11")],
)
def test_the_version_of_a_venv_is_read_from_pyvenv_cfg(tmp_path: Path, text: str, version: str) -> None:
    base = executable(tmp_path / "base" / "bin" / "python3.11")
    program = linked(tmp_path / "venv", base)
    (tmp_path / "venv" / "pyvenv.cfg").write_text(text)
    assert version_of(program, Remembered()) == version


def test_the_version_of_a_conda_environment_is_read_from_its_packages(tmp_path: Path) -> None:
    prefix, files = conda_prefix(tmp_path / "e", python=False), Remembered()
    executable(prefix / "bin" / "python3.12")
    program = linked(prefix, Path("python3.12"))
    for name in ("python-dateutil-2.8.2-py_0.json", "python_abi-3.12-4_cp312.json", "python-3.12.4-h955ad1f_0.json"):
        (prefix / "conda-meta" / name).touch()
    assert described(program, files) == f"{program} (3.12.4)"
    (prefix / "conda-meta" / "python-3.12.4-h955ad1f_0.json").rename(
        prefix / "conda-meta" / "python-3.12.9-h0_cpython.json"
    )
    assert version_of(program, files) == "3.12.9"


def test_the_version_is_read_again_if_a_python_link_changes(tmp_path: Path) -> None:
    """B16: If the link bin/python is changed to another program, the version is read again.

    This also holds if the time stamps of both programs are equal.
    """
    files = Remembered()
    old, new = executable(tmp_path / "python3.10"), executable(tmp_path / "python3.12")
    for path in (old, new):
        os.utime(path, ns=(0, 0))
    program = linked(tmp_path / "e", old)
    assert described(program, files) == f"{program} (3.10)"
    linked(tmp_path / "e", new)
    assert described(program, files) == f"{program} (3.12)"


def test_an_outdated_version_in_pyvenv_cfg_is_ignored(tmp_path: Path) -> None:
    """B16: The version in pyvenv.cfg is ignored if bin/python now links to a Python of a different version."""
    files = Remembered()
    old, new = executable(tmp_path / "old" / "bin" / "python3.10"), executable(tmp_path / "new" / "bin" / "python3.12")
    program = linked(tmp_path / "venv", old)
    (tmp_path / "venv" / "pyvenv.cfg").write_text("version = 3.10.4\n")
    assert version_of(program, files) == "3.10.4"
    linked(tmp_path / "venv", new)
    assert version_of(program, files) == "3.12"


@pytest.mark.parametrize("folder", ["versions/3.11.7/bin", "cpython-3.11.7-linux-x86_64-gnu/bin"])
def test_a_version_in_the_folder_name_is_used_only_if_it_fits_the_program(tmp_path: Path, folder: str) -> None:
    real = executable(tmp_path / folder / "python3.11")
    assert version_of(linked(tmp_path / "x", real), Remembered()) == "3.11.7"
    other = executable(tmp_path / folder / "python3.13")
    assert version_of(linked(tmp_path / "x", other), Remembered()) == "3.13"


def test_no_version_is_shown_if_none_is_known(tmp_path: Path) -> None:
    program = str(executable(tmp_path / "python"))
    assert described(program, Remembered()) == program
    assert version_of("/no/such/python", Remembered()) == ""


# -- scripts and folders ----------------------------------------------------------------------------------


def test_the_reason_names_what_is_wrong_with_a_script(tmp_path: Path) -> None:
    """B12: If a script is missing or is no regular file, the reason to wait says so."""
    path = tmp_path / "a.py"
    assert script_trouble(str(path)) == f"no such file {path}; the job waits until it exists"
    path.symlink_to(tmp_path / "gone")
    assert "no such file" in script_trouble(str(path))
    path.unlink()
    path.mkdir()
    assert "is a folder, not a script" in script_trouble(str(path))
    path.rmdir()
    os.mkfifo(path)
    assert "is not a regular file" in script_trouble(str(path))
    path.unlink()
    path.touch()
    assert script_trouble(str(path)) == ""
    assert "no such file" in script_trouble(str(path / "below"))


def test_the_reason_names_what_is_wrong_with_a_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B14: If a working folder is missing, is a file or is not accessible, the reason to wait says so."""
    path = tmp_path / "work"
    assert folder_trouble(str(path)) == f"no such working folder {path}; the job waits until it exists"
    path.touch()
    assert f"working folder {path} is a file; " in folder_trouble(str(path))
    assert "no such working folder" in folder_trouble(str(path / "below"))
    path.unlink()
    path.mkdir()
    assert folder_trouble(str(path)) == ""
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may run these tests and can enter every folder
    assert f"cannot enter working folder {path}: no permission; run: chmod u+x {path};" in folder_trouble(str(path))

    def refused(_: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refused)
    assert f"cannot access working folder {path}: Permission denied;" in folder_trouble(str(path))
    assert f"cannot access script {path}: Permission denied;" in script_trouble(str(path))


# -- programs that the kernel refuses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (b"#!/bin/sh\n", 0o644, "/run is not executable; run: chmod +x /"),
        (b"#!/no/such -x\n", 0o755, "names /no/such, which does not exist"),
        (b"#!/etc/passwd\n", 0o755, "names /etc/passwd, which is not executable"),
        (b"#!/bin/sh\r\necho\r\n", 0o755, "ends in a carriage return (a file from Windows)"),
        (b"#! \n", 0o755, "names no interpreter"),
        (b"echo x\n", 0o755, "does not begin with a line such as #!/bin/sh"),
        (b"", 0o755, "does not begin with a line such as #!/bin/sh"),
        (b"#!/bin/sh\n", 0o755, ""),
        (b"\x7fELF\x02 of another machine", 0o755, ""),
    ],
)
def test_the_reason_names_the_fault_of_an_unusable_script(tmp_path: Path, text: bytes, mode: int, said: str) -> None:
    """B13: For a file that the kernel cannot run, the reason names the file and its fault."""
    path = tmp_path / "run"
    path.write_bytes(text)
    path.chmod(mode)
    cause = why_not_started(str(path))
    assert said in cause and bool(cause) == bool(said)
    if cause:
        assert str(path) in cause


def test_the_reason_for_a_program_that_cannot_run_names_it(tmp_path: Path) -> None:
    """B13: If a program is missing, is a folder or is not accessible, the reason names the program."""
    assert why_not_started("nosuch") == "program nosuch not found in PATH"
    assert why_not_started("/no/such") == "no such file /no/such"
    assert "is a folder" in why_not_started(str(tmp_path))
    (tmp_path / "f").touch()
    assert f"cannot access {tmp_path}/f/x: Not a directory" in why_not_started(str(tmp_path / "f" / "x"))
