"""Tests of the search for interpreters, environments and programs of jobs on disk, without running conda."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.launch import Found
from scheduler.environments.resolve import Environments, Missing, names_devices
from tests.prefixes import conda_prefix, executable


def job(**values: object) -> Job:
    return Job(1, JobSpec(**values), ResourceRequest(1, 1000))  # type: ignore[arg-type]


def conda_env(prefix: Path) -> Path:
    executable(prefix / "bin" / "python")
    return conda_prefix(prefix)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "a.py"
    path.write_text("print(1)\n")
    return str(path)


def found(environments: Environments, wanted: Job) -> Found:
    answer = environments.find(wanted)
    assert isinstance(answer, Found), answer
    return answer


def missing(environments: Environments, wanted: Job) -> str:
    answer = environments.find(wanted)
    assert isinstance(answer, Missing), answer
    return answer.sentence


# -- by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda"])
def test_an_environment_is_found_by_name_in_the_usual_folders(home: Path, script: str, root: str) -> None:
    """S3.26: An environment is found by name under the usual installation folders in the home folder."""
    prefix = conda_env(home / root / "envs" / "e")
    answer = found(Environments({"HOME": str(home), "PATH": "/bin"}), job(script=script, conda_env="e"))
    assert answer.program == str(prefix / "bin" / "python")
    assert answer.prefix == str(prefix)
    assert answer.environment["PATH"] == f"{prefix}/bin:/bin"
    assert answer.environment["CONDA_PREFIX"] == str(prefix)
    assert answer.environment["CONDA_DEFAULT_ENV"] == "e"


@pytest.mark.parametrize("variable", ["CONDA_ENVS_PATH", "MAMBA_ROOT_PREFIX", "CONDA_ROOT", "CONDA_EXE"])
def test_an_environment_is_found_by_name_in_the_folders_of_conda_variables(
    tmp_path: Path, home: Path, script: str, variable: str
) -> None:
    """S3.26: An environment is found by name in the folders that the variables of conda and mamba name."""
    root = tmp_path / "root"
    conda_env(root / "envs" / "e")
    value = {"CONDA_ENVS_PATH": f"/nowhere:{root}/envs", "CONDA_EXE": f"{root}/bin/conda"}.get(variable, str(root))
    answer = found(Environments({"HOME": str(home), variable: value}), job(script=script, conda_env="e"))
    assert answer.prefix == str(root / "envs" / "e")


def test_an_environment_is_found_by_name_in_the_list_of_conda(tmp_path: Path, home: Path, script: str) -> None:
    """S3.26: An environment is found by name in conda's list of environments, ~/.conda/environments.txt."""
    prefix = conda_env(tmp_path / "elsewhere" / "e")
    (home / ".conda").mkdir()
    (home / ".conda" / "environments.txt").write_text(f"\n/gone/x\n{prefix}\n")
    answer = found(Environments({"HOME": str(home)}), job(script=script, conda_env="e"))
    assert answer.prefix == str(prefix)


def test_a_path_that_is_not_utf8_in_the_list_of_conda_causes_no_error(tmp_path: Path, home: Path, script: str) -> None:
    """P8: A path that is not UTF-8 in conda's list of environments causes no error: a file name may be any bytes."""
    (home / ".conda").mkdir()
    (home / ".conda" / "environments.txt").write_bytes(b"/home/jos\xe9/envs/e\n")
    assert "no environment e" in missing(Environments({"HOME": str(home)}), job(script=script, conda_env="e"))


def test_environment_base_is_the_folder_of_the_installation(home: Path, script: str) -> None:
    """S3.26: The environment `base` is the folder of the installation."""
    root = conda_env(home / "miniconda3")
    assert found(Environments({"HOME": str(home)}), job(script=script, conda_env="base")).prefix == str(root)


def test_a_job_with_an_unknown_environment_waits_until_it_exists(home: Path, script: str) -> None:
    """S3.26, contract 3: A job with an unknown environment waits until the environment exists."""
    environments = Environments({"HOME": str(home)})
    wanted = job(script=script, conda_env="nosuch-env-here")
    assert "nosuch-env-here" in missing(environments, wanted)
    conda_env(home / "miniconda3" / "envs" / "nosuch-env-here")
    assert found(environments, wanted).prefix.endswith("nosuch-env-here")


# -- by path ----------------------------------------------------------------------------------------------


def test_an_environment_is_found_by_the_path_of_its_folder(tmp_path: Path, home: Path, script: str) -> None:
    """S3.26: An environment is found by the path of its folder."""
    prefix = conda_env(tmp_path / "my env")
    answer = found(Environments({"HOME": str(home)}), job(script=script, conda_env=str(prefix)))
    assert answer.program == str(prefix / "bin" / "python")


def test_a_virtual_environment_is_accepted(tmp_path: Path, home: Path, script: str) -> None:
    """S3.26: The folder of a virtual environment (venv) is accepted as an environment."""
    prefix = tmp_path / "venv"
    executable(prefix / "bin" / "python")
    (prefix / "pyvenv.cfg").touch()
    answer = found(Environments({"HOME": str(home), "PATH": "/bin"}), job(script=script, conda_env=str(prefix)))
    assert answer.environment == {"PATH": f"{prefix}/bin:/bin", "VIRTUAL_ENV": str(prefix), "PYTHONHOME": None}


def test_a_job_with_a_missing_or_incomplete_environment_folder_waits(tmp_path: Path, home: Path, script: str) -> None:
    """Contract 3: A job whose environment folder is missing or incomplete waits until the folder is complete."""
    prefix = tmp_path / "e"
    environments, wanted = Environments({"HOME": str(home)}), job(script=script, conda_env=str(prefix))
    assert f"no environment {prefix}: there is no such folder" in missing(environments, wanted)
    prefix.mkdir()
    assert f"environment {prefix} is incomplete" in missing(environments, wanted)
    (prefix / "conda-meta").mkdir()
    assert f"environment {prefix} is incomplete" in missing(environments, wanted)
    (prefix / "conda-meta" / "history").touch()
    assert f"no python in environment {prefix}" in missing(environments, wanted)
    conda_env(prefix)
    found(environments, wanted)


# -- scripts and interpreters -----------------------------------------------------------------------------


def test_a_job_with_a_missing_script_waits_until_it_exists(tmp_path: Path, home: Path) -> None:
    """Contract 3: If a job's script is missing or is a folder, the job waits until the script exists."""
    environments = Environments({"HOME": str(home), "PATH": os.environ["PATH"]})
    path = tmp_path / "x.py"
    assert f"no such file {path}" in missing(environments, job(script=str(path)))
    path.mkdir()
    assert "folder" in missing(environments, job(script=str(path)))
    path.rmdir()
    path.touch()
    found(environments, job(script=str(path)))


def test_a_script_that_is_not_python_is_started_directly(tmp_path: Path, home: Path) -> None:
    """Contract 3: A script that is not a Python script is started directly, without a Python interpreter."""
    path = executable(tmp_path / "run.sh")
    answer = found(Environments({"HOME": str(home)}), job(script=str(path)))
    assert (answer.program, answer.runs_by_itself) == (str(path), True)


def test_scripts_run_with_the_python_setting_else_with_python_of_path(tmp_path: Path, home: Path, script: str) -> None:
    """Contract 3: Scripts run with the interpreter that the setting `python` names.

    Without the setting, they run with `python` in PATH, or with `python3` if PATH has no `python`.
    """
    folder = tmp_path / "bin"
    third = executable(folder / "python3")
    environ = {"HOME": str(home), "PATH": str(folder)}
    assert found(Environments(environ), job(script=script)).program == str(third)
    own = executable(tmp_path / "own" / "python3.12")
    assert found(Environments(environ, str(own)), job(script=script)).program == str(own)
    named = executable(folder / "pypy")
    assert found(Environments(environ, "pypy"), job(script=script)).program == str(named)
    other = tmp_path / "both"
    first = executable(other / "python")
    executable(other / "python3")
    assert found(Environments({"HOME": str(home), "PATH": str(other)}), job(script=script)).program == str(first)


def test_a_job_without_any_python_waits_and_the_reason_says_so(tmp_path: Path, home: Path, script: str) -> None:
    """Contract 3: If no interpreter is found, the job waits. The reason names PATH or the setting `python`."""
    assert "no python in PATH" in missing(Environments({"HOME": str(home), "PATH": str(tmp_path)}), job(script=script))
    environments = Environments({"HOME": str(home), "PATH": str(tmp_path)}, "/nowhere/python")
    assert "no python at /nowhere/python (setting python)" in missing(environments, job(script=script))


def test_a_leading_tilde_in_the_python_setting_is_the_home_folder(
    home: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 3: "~" at the start of the setting `python` is the home folder."""
    own = executable(home / "py" / "python")
    monkeypatch.setenv("HOME", str(home))
    assert found(Environments({"HOME": str(home)}, "~/py/python"), job(script=script)).program == str(own)


# -- commands ---------------------------------------------------------------------------------------------


def test_a_command_is_searched_for_in_the_path_that_the_job_will_have(tmp_path: Path, home: Path) -> None:
    """S4: A command is searched for in the PATH that the job will have.

    This is the PATH of the job's environment, or of the user who submitted the job.
    """
    tool = executable(tmp_path / "bin" / "tool")
    environments = Environments({"HOME": str(home), "PATH": "/nowhere"})
    stored = tmp_path / "env"
    stored.write_bytes(b"A=1\0PATH=" + str(tool.parent).encode() + b"\0B=2")
    assert found(environments, job(arguments=("tool",), env_file=str(stored))).program == str(tool)
    assert found(environments, job(arguments=("tool",))).program == "tool", "a missing one fails when started"
    assert found(environments, job(arguments=("bin/tool",), cwd=str(tmp_path))).program == str(tool)
    assert found(environments, job(arguments=(str(tool), "x"))).program == str(tool)
    prefix = conda_env(tmp_path / "e")
    inside = executable(prefix / "bin" / "tool")
    wanted = job(arguments=("tool",), conda_env=str(prefix), env_file=str(stored))
    assert found(environments, wanted).program == str(inside)


def test_a_script_that_sets_cuda_visible_devices_itself_is_recognized(tmp_path: Path) -> None:
    """Contract 4: `names_devices` recognizes a script that sets CUDA_VISIBLE_DEVICES itself.

    With the setting `cuda_ids: auto`, this decides which GPU ids the script gets.
    """
    path = tmp_path / "a.py"
    path.write_text('os.environ["CUDA_VISIBLE_DEVICES"] = a.cuda\n')
    assert names_devices(str(path))
    path.write_text('torch.device("cuda:" + a.cuda)\n')
    assert not names_devices(str(path))
    assert not names_devices(str(tmp_path / "nosuch.py"))


# -- on the nodes of a cluster ------------------------------------------------------------------------------


def test_on_a_cluster_an_environment_that_is_not_here_is_entered_on_the_node(home: Path, script: str) -> None:
    environments = Environments({"HOME": str(home), "PATH": "/usr/bin:/bin"})
    assert "e" in missing(environments, job(script=script, conda_env="e"))
    environments.on_nodes = True
    run = ("conda", "run", "--no-capture-output", "-n", "e")
    answer = found(environments, job(script=script, conda_env="e"))
    assert (answer.program, answer.wrapper) == ("python", run)
    answer = found(environments, job(arguments=("train", "-x"), conda_env="e"))
    assert (answer.program, answer.wrapper) == ("train", run)
    missing(environments, job(script=script, conda_env=str(home / "no" / "folder")))


def test_on_a_cluster_an_environment_that_is_here_is_used_from_here(home: Path, script: str) -> None:
    prefix = conda_env(home / "miniconda3" / "envs" / "e")
    environments = Environments({"HOME": str(home), "PATH": "/bin"})
    environments.on_nodes = True
    answer = found(environments, job(script=script, conda_env="e"))
    assert (answer.program, answer.wrapper) == (str(prefix / "bin" / "python"), ())
    environments.mode = "activate"  # the activation scripts are run where the job runs
    assert found(environments, job(script=script, conda_env="e")).wrapper[:2] == ("conda", "run")


def test_on_a_cluster_programs_are_searched_on_the_node(home: Path, script: str) -> None:
    environments = Environments({"HOME": str(home), "PATH": os.environ["PATH"]})
    environments.on_nodes = True
    assert found(environments, job(script=script)).program in ("python", "python3")
    assert found(environments, job(arguments=("sh", "-c", "true"))).program == "sh"
    assert found(environments, job(arguments=("/bin/sh", "-c", "true"))).program == "/bin/sh"
