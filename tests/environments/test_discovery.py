"""Tests of environments: they are found by name or folder, jobs can enter them, and unusable ones have a reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.launch import Found
from scheduler.environments.discovery import Prefix, Remembered
from scheduler.environments.resolve import ACTIVATION, Environments, Missing
from tests.prefixes import activation, conda_prefix, conda_sh, executable, venv_prefix

LAUNCHER = ("python", "activate.py")


class Bench:
    """A home folder, a script, and an `Environments` object that searches this home folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        self.script = folder / "a.py"
        self.script.touch()
        self.environ = {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        self.environments = Environments(self.environ, launcher=LAUNCHER)

    def find(self, env: str, **values: object) -> Found | Missing:
        if not values.get("arguments"):
            values.setdefault("script", str(self.script))
        return self.environments.find(Job(1, JobSpec(conda_env=env, **values), ResourceRequest(1, 1000)))  # type: ignore[arg-type]

    def found(self, env: str, **values: object) -> Found:
        answer = self.find(env, **values)
        assert isinstance(answer, Found), answer
        return answer

    def missing(self, env: str, **values: object) -> str:
        answer = self.find(env, **values)
        assert isinstance(answer, Missing), answer
        assert "; the job waits until" in answer.sentence
        return answer.sentence


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- places of environments -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".condarc", ".config/conda/.condarc", ".conda/.condarc", ".mambarc", "CONDARC"])
def test_envs_dirs_of_a_condarc_are_searched_and_a_changed_condarc_is_read_again(bench: Bench, place: str) -> None:
    """S3.26: Environments in `envs_dirs` of a condarc are found, and a changed condarc is read again."""
    rc = bench.folder / "my.rc" if place == "CONDARC" else bench.home / place
    rc.parent.mkdir(parents=True, exist_ok=True)
    if place == "CONDARC":
        bench.environ["CONDARC"] = str(rc)
        bench.environments = Environments(bench.environ)
    prefix = conda_prefix(bench.folder / "big disk" / "e")
    assert "no environment e" in bench.missing("e")
    rc.write_text(f"channels: [x]\nenvs_dirs:\n  - ~/none\n  - {bench.folder}/big disk\n")
    assert bench.found("e").prefix == str(prefix)
    rc.write_text("envs_dirs: [~/other]\n")
    assert "no environment e" in bench.missing("e")
    other = conda_prefix(bench.home / "other" / "e")
    assert bench.found("e").prefix == str(other)


def test_envs_dirs_may_be_one_text_with_variables(bench: Bench) -> None:
    prefix = conda_prefix(bench.folder / "scratch" / "me" / "e")
    bench.environ.update(SCRATCH=str(bench.folder / "scratch"), WHO="me")
    bench.environments = Environments(bench.environ)
    (bench.home / ".condarc").write_text("envs_dirs: $SCRATCH/${WHO}\n")
    assert bench.found("e").prefix == str(prefix)


@pytest.mark.parametrize(
    "text",
    [
        b"envs_dirs: [",
        b"\xff\xfe",
        b"- a list",
        b"envs_dirs: 7",
        b"envs_dirs: [7, null, relative]",
        b"a: 2024-99-99",
        b"",
    ],
)
def test_an_invalid_condarc_causes_no_error(bench: Bench, text: bytes) -> None:
    (bench.home / ".condarc").write_bytes(text)
    assert "no environment e" in bench.missing("e")
    conda_prefix(bench.home / "miniconda3" / "envs" / "e")
    bench.found("e")


def test_the_condarc_of_an_installation_is_read(bench: Bench) -> None:
    prefix = conda_prefix(bench.folder / "shared" / "e")
    root = bench.home / "miniforge3"
    root.mkdir()
    (root / ".condarc").write_text(f"envs_dirs: ['{bench.folder}/shared']\n")
    assert bench.found("e").prefix == str(prefix)


def test_installations_of_mamba_and_of_the_conda_in_path_are_found(bench: Bench) -> None:
    """S3.26: Environments are found in three further places.

    These are the root folder of micromamba, the installation that MAMBA_EXE names, and the installation of the conda
    that is found in PATH.
    """
    one = conda_prefix(bench.home / ".local" / "share" / "mamba" / "envs" / "one")
    assert bench.found("one").prefix == str(one)
    root = conda_prefix(bench.folder / "forge")
    two = conda_prefix(root / "envs" / "two")
    assert "no environment two" in bench.missing("two")
    bench.environments = Environments({**bench.environ, "MAMBA_EXE": f"{root}/bin/mamba"})
    assert bench.found("two").prefix == str(two)
    executable(root / "bin" / "conda")
    bench.environments = Environments({**bench.environ, "PATH": f"{root}/bin"})
    assert bench.found("two").prefix == str(two)


def test_the_folder_of_a_single_micromamba_program_is_no_installation(bench: Bench) -> None:
    conda_prefix(bench.home / ".local" / "envs" / "e")
    bench.environments = Environments({**bench.environ, "MAMBA_EXE": f"{bench.home}/.local/bin/micromamba"})
    assert "no environment e" in bench.missing("e")


def test_the_conda_of_the_submitter_is_searched_first(bench: Bench) -> None:
    """S4: If the submitter's conda and the daemon's conda both have this environment, the submitter's is used."""
    mine = conda_prefix(bench.folder / "mine" / "envs" / "e")
    conda_prefix(bench.home / "miniconda3" / "envs" / "e")
    stored = bench.folder / "env"
    stored.write_bytes(f"PATH=/my/bin\0CONDA_EXE={bench.folder}/mine/bin/conda\0".encode())
    answer = bench.found("e", env_file=str(stored))
    assert answer.prefix == str(mine) and answer.environment["PATH"] == f"{mine}/bin:/my/bin"
    assert bench.found("e").prefix == str(bench.home / "miniconda3" / "envs" / "e")


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_are_not_accepted_as_environment_names(bench: Bench, name: str) -> None:
    """B15: "." and ".." are not accepted as names of environments."""
    conda_prefix(bench.home / "miniconda3" / "envs")
    conda_prefix(bench.home / "miniconda3")
    assert "no environment" in bench.missing(name)


def test_the_first_environment_of_a_name_is_used_even_if_incomplete(bench: Bench) -> None:
    """B15: Of several environments with the same name, the first one is used, even if it is incomplete.

    conda does the same.
    """
    conda_prefix(bench.home / "miniforge3" / "envs" / "e")
    half = bench.home / "miniconda3" / "envs" / "e"
    half.mkdir(parents=True)
    assert f"environment {half} is incomplete" in bench.missing("e")


# -- environments that cannot be used ---------------------------------------------------------------------


def test_each_fault_of_an_environment_has_its_own_reason(bench: Bench) -> None:
    """B15: A missing environment, an incomplete one and one without python have different reasons and remedies."""
    path = bench.home / "envs" / "e"
    assert "create it (conda create -n nosuch)" in bench.missing("nosuch")
    assert f"no environment {path}: there is no such folder; create it" in bench.missing(str(path))
    (path / "conda-meta").mkdir(parents=True)
    assert "remove it and create it again" in bench.missing(str(path))
    conda_prefix(path, python=False)
    assert f"no python in environment {path}: conda install -p {path} python" in bench.missing(str(path))
    shell = executable(bench.folder / "run.sh")
    assert bench.found(str(path), script=str(shell)).runs_by_itself, "it needs no python"
    assert bench.found(str(path), arguments=("true",)).prefix == str(path)
    conda_prefix(path)
    bench.found(str(path))


def test_no_job_uses_an_environment_whose_python_is_a_broken_link(bench: Bench) -> None:
    """B15, B16: If bin/python of an environment is a link to a missing file, no job uses the environment.

    This also holds for a job that runs a command or a shell script. Otherwise the job would run the python of a later
    folder in PATH.
    """
    prefix = venv_prefix(bench.folder / "venv")
    base = executable(bench.folder / "base" / "bin" / "python3.11")
    (prefix / "bin" / "python").unlink()
    (prefix / "bin" / "python").symlink_to(base)
    bench.found(str(prefix))
    shutil.rmtree(bench.folder / "base")
    for values in ({}, {"arguments": ("true",)}, {"script": str(executable(bench.folder / "run.sh"))}):
        sentence = bench.missing(str(prefix), **values)
        assert f"bin/python is a link to {base}" in sentence and "create the environment again" in sentence
    executable(base)
    bench.found(str(prefix))


def test_a_job_waits_for_a_venv_without_python(bench: Bench) -> None:
    prefix = venv_prefix(bench.folder / "venv")
    (prefix / "bin" / "python").unlink()
    told = f"no python in environment {prefix}; the job waits until the environment has a python"
    assert told in bench.missing(str(prefix))


# -- entering an environment ------------------------------------------------------------------------------


def test_mode_direct_sets_the_variables_of_the_environment(bench: Bench) -> None:
    """S3.26: The mode "direct" sets the variables of conda and those of `conda-meta/state` and `env_vars.d`."""
    prefix = conda_prefix(bench.home / "miniconda3" / "envs" / "e")
    (prefix / "conda-meta" / "state").write_text(
        json.dumps(
            {"version": 1, "env_vars": {"TOKEN": "a b", "GONE": "***unset***", "N": 4, "BAD=": "x", "PATH": "/no"}}
        )
    )
    packages = prefix / "etc" / "conda" / "env_vars.d"
    packages.mkdir(parents=True)
    (packages / "tool.json").write_text('{"TOOL": "1", "TOKEN": "overruled"}')
    bench.environments.mode = "direct"
    activation(prefix, "exit 1\n")
    for name in ("e", str(prefix)):
        answer = bench.found(name)
        assert answer.wrapper == ()
        assert answer.environment == {
            "PATH": f"{prefix}/bin:/usr/bin:/bin", "CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": "e",
            "CONDA_SHLVL": "1", "PYTHONHOME": None, "VIRTUAL_ENV": None,
            "TOKEN": "a b", "GONE": None, "N": "4", "TOOL": "1",
        }  # fmt: skip
    (prefix / "conda-meta" / "state").write_text('{"env_vars": {"TOKEN": "new one"}}')
    assert bench.found("e").environment["TOKEN"] == "new one"
    for broken in ("{", "[]", '{"env_vars": []}'):
        (prefix / "conda-meta" / "state").write_text(broken)
        assert bench.found("e").environment["TOKEN"] == "overruled"


@pytest.mark.parametrize(
    ("place", "name"), [("envs/e", "e"), ("elsewhere/e", "{path}"), ("root", "base")], ids=["named", "folder", "base"]
)
def test_an_environment_has_the_name_that_conda_gives_it(bench: Bench, place: str, name: str) -> None:
    prefix = conda_prefix(bench.folder / place)
    if name == "base":
        executable(prefix / "bin" / "conda")
    answer = bench.found(str(prefix))
    assert answer.environment["CONDA_DEFAULT_ENV"] == name.format(path=prefix)


def test_mode_auto_activates_only_environments_with_activation_scripts(bench: Bench) -> None:
    """S3.26: The mode "auto" activates an environment that has scripts in `activate.d`. It enters others directly."""
    prefix = conda_prefix(bench.home / "miniconda3" / "envs" / "e")
    assert bench.found("e").wrapper == ()
    activation(prefix, "", "only.fish")
    assert bench.found("e").wrapper == ()
    activation(prefix, "export A=1\n")
    answer = bench.found("e")
    assert answer.wrapper == LAUNCHER
    assert set(answer.environment) == {"PYTHONHOME", "VIRTUAL_ENV", ACTIVATION}
    told = json.loads(answer.environment[ACTIVATION] or "")
    assert (told["name"], told["prefix"], told["limit"], told["conda_sh"]) == ("e", str(prefix), 60.0, "")
    assert told["settings"]["CONDA_PREFIX"] == str(prefix) and told["settings"]["PYTHONHOME"] is None
    (prefix / "etc" / "conda" / "activate.d" / "a.sh").unlink()
    assert bench.found("e").wrapper == ()


def test_activation_uses_conda_sh_of_the_own_installation_else_of_any_other(bench: Bench) -> None:
    """S3.26: Activation uses the conda.sh of the environment's own installation.

    If this installation has none, activation uses the conda.sh of any other installation.
    """
    conda_prefix(bench.home / "miniforge3" / "envs" / "e")
    bench.environments.mode = "activate"
    bench.environments.limit_s = 5

    def used() -> str:
        told = json.loads(bench.found("e").environment[ACTIVATION] or "")
        assert told["limit"] == 5
        return str(told["conda_sh"])

    assert used() == ""
    other = conda_sh(bench.home / "anaconda3")
    assert used() == str(other)
    own = conda_sh(bench.home / "miniforge3")
    assert used() == str(own)


def test_mode_run_uses_conda_else_mamba_else_micromamba(bench: Bench) -> None:
    """B15: The mode "run" uses conda, otherwise mamba, otherwise micromamba. Without any of them the job waits."""
    root = bench.home / "miniconda3"
    prefix = conda_prefix(root / "envs" / "e")
    bench.environments.mode = "run"
    assert "neither conda nor mamba nor micromamba was found; install one" in bench.missing("e")
    micromamba = executable(bench.folder / "bin" / "micromamba")
    bench.environments = Environments({**bench.environ, "PATH": str(micromamba.parent)}, launcher=LAUNCHER)
    bench.environments.mode = "run"
    assert bench.found("e").wrapper == (str(micromamba), "run", "-p", str(prefix))
    mamba = executable(root / "bin" / "mamba")
    assert bench.found("e").wrapper == (str(mamba), "run", "-p", str(prefix))
    conda = executable(root / "condabin" / "conda")
    answer = bench.found("e")
    assert answer.wrapper == (str(conda), "run", "--no-capture-output", "-p", str(prefix))
    assert answer.environment == {"PYTHONHOME": None, "VIRTUAL_ENV": None}
    assert answer.program == f"{prefix}/bin/python"
    assert bench.found("e", arguments=("tool", "x")).program == "tool", "found in the PATH that conda makes"


@pytest.mark.parametrize("mode", ["auto", "direct", "activate", "run"])
def test_a_venv_is_entered_directly_in_every_mode(bench: Bench, mode: str) -> None:
    prefix = venv_prefix(bench.folder / "venv")
    bench.environments.mode = mode
    answer = bench.found(str(prefix))
    assert answer.wrapper == () and answer.environment["VIRTUAL_ENV"] == str(prefix)


# -- remembered files -------------------------------------------------------------------------------------


def test_a_changed_replaced_or_removed_file_is_read_again(tmp_path: Path) -> None:
    path, files, reads = tmp_path / "f", Remembered(), []

    def read(name: str) -> str:
        reads.append(name)
        return Path(name).read_text()

    def seen() -> str:
        return files.of(str(path), read, "absent")

    assert seen() == "absent"
    path.write_text("one")
    assert seen() == "one"
    path.write_text("two")  # the same length, within the same tick of the clock
    assert seen() == "two"
    aside = tmp_path / "g"
    aside.write_text("six")
    status = os.stat(path)
    os.utime(aside, ns=(status.st_atime_ns, status.st_mtime_ns))
    aside.replace(path)
    assert seen() == "six"
    path.unlink()
    assert seen() == "absent"


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, files, reads = tmp_path / "f", Remembered(), []
    path.write_text("x")
    monkeypatch.setattr("scheduler.environments.discovery.CLOCK_TICK_NS", -1)
    for _ in range(3):
        files.of(str(path), reads.append, None)
    assert len(reads) == 1
    for number in range(1000):
        files.of(str(tmp_path), reads.append, None)
        (tmp_path / str(number)).touch()
    assert len(files._kept) <= 512


def test_a_prefix_gives_the_path_of_its_python() -> None:
    assert Prefix("/opt/e", "e").python == "/opt/e/bin/python"
