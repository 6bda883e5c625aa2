"""The facts about the code of a run: the script, the commit of its folder, and the packages of its interpreter."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from scheduler.environments.run_code import RunCode


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def older(path: Path) -> None:
    """Make a file look as if it was written a minute ago: what was just written is not cached."""
    os.utime(path, (time.time() - 60, time.time() - 60))


def test_a_changed_script_has_another_digest(tmp_path: Path) -> None:
    """The digest is cached until the file changes; without a repository there is no commit."""
    script, reader = tmp_path / "t.py", RunCode()
    script.write_text("a = 1\n")
    first = reader.code_of(str(script))
    assert first is not None and first == reader.code_of(str(script))
    assert (first.path, first.size, first.commit) == (str(script), 6, "")
    script.write_text("a = 2\n")
    second = reader.code_of(str(script))
    assert second is not None and second.size == 6 and second.digest != first.digest


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    """A FIFO, a folder, a device, or a missing file in place of the script is not compared, and blocks nobody."""
    os.mkfifo(tmp_path / "fifo")
    reader = RunCode()
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "none"):
        assert reader.code_of(str(path)) is None


@pytest.mark.parametrize("packed", [False, True])
def test_the_commit_of_a_repository_is_read_from_its_files(tmp_path: Path, packed: bool) -> None:
    """Loose and packed references, a detached head and a worktree are read without running git."""
    repository = tmp_path / "r"
    (repository / "sub").mkdir(parents=True)
    script = repository / "sub" / "t.py"
    script.write_text("")
    git(repository, "init", "-q")
    assert RunCode().code_of(str(script)).commit == ""  # type: ignore[union-attr]  # no commit yet
    git(repository, "commit", "-q", "--allow-empty", "-m", "one")
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "w"))
    git(tmp_path / "w", "commit", "-q", "--allow-empty", "-m", "two")
    if packed:
        git(repository, "pack-refs", "--all")
    reader = RunCode()
    assert reader.code_of(str(script)).commit == git(repository, "rev-parse", "HEAD")  # type: ignore[union-attr]
    (tmp_path / "w" / "t.py").write_text("")
    commit = git(tmp_path / "w", "rev-parse", "HEAD")
    assert reader.code_of(str(tmp_path / "w" / "t.py")).commit == commit  # type: ignore[union-attr]
    git(repository, "checkout", "-q", "--detach", commit)
    assert reader.code_of(str(script)).commit == commit  # type: ignore[union-attr]


@pytest.mark.parametrize("told", ["ref: ../../secret\n", "gitdir: /nowhere\n", "\xff\0", ""])
def test_a_strange_git_folder_tells_no_commit(tmp_path: Path, told: str) -> None:
    """Whatever the files of a git folder say, only a commit is read from them."""
    (tmp_path / "secret").write_text("not a commit")
    (tmp_path / "t.py").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(told)
    assert RunCode().code_of(str(tmp_path / "t.py")).commit == ""  # type: ignore[union-attr]
    (tmp_path / ".git" / "HEAD").unlink()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    assert RunCode().code_of(str(tmp_path / "t.py")).commit == ""  # type: ignore[union-attr]


def test_the_packages_of_an_environment_are_its_installed_distributions(tmp_path: Path) -> None:
    """The names of the folders tell names and versions; names that are none are left out."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_text("")
    for name in (
        "torch-2.4.0.dist-info",
        "Py_YAML-6.0.dist-info",
        "old-1.egg-info",
        "torch",
        "-.dist-info",
        "a;b-1.dist-info",
    ):
        (site / name).mkdir()
    older(site)
    packages = RunCode().packages_of(str(tmp_path / "bin" / "torchrun"), False)
    assert packages == {"torch": "2.4.0", "py-yaml": "6.0", "old": "1"}
    (tmp_path / "pyvenv.cfg").unlink()
    assert RunCode().packages_of(str(tmp_path / "bin" / "tool"), False) == {}
    assert RunCode().packages_of(str(tmp_path / "bin" / "python"), True) == packages
    assert RunCode().packages_of("python", True) == {}
