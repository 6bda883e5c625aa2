"""Conda and virtual environments, working folders, scripts and interpreters of jobs, with a real scheduler."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prefixes import (
    BASE_PYTHON,
    CONDA_RUN,
    activation,
    conda_prefix,
    conda_sh,
    executable,
    venv_prefix,
)
from tests.stories.harness import alive, wait_for

SHOW = """\
import json, os, sys
names = ("CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV GPUJOB_ACTIVATION FROM_PACKAGE KEPT CUDA_VISIBLE_DEVICES GPUJOB_ID PYTHONHOME".split())
print(json.dumps({**{name: os.environ.get(name) for name in names}, "path": os.environ["PATH"].split(":")[0],
                  "pid": os.getpid(), "program": sys.argv[0], "python": sys.executable, "words": sys.argv[1:]}))
"""


@pytest.fixture
def make(scheduler):
    """Return a function that makes a scheduler. Each scheduler has its own home folder and the script show.py."""

    def made(gpus=1, **settings):
        s = scheduler(gpus, **settings)
        s.home = s.folder / "home"
        s.home.mkdir()
        for name in [n for n in s.environ if n.startswith(("CONDA", "MAMBA", "VIRTUAL_ENV"))]:
            del s.environ[name]
        s.environ["HOME"] = str(s.home)
        (s.folder / "show.py").write_text(SHOW)
        return s

    return made


def shown(s, job_id):
    """Wait for the job's end, which must be `done`, and return what show.py printed into its log."""
    assert s.wait_state(job_id, "done", "failed") == "done", s.log(job_id)
    return json.loads(s.log(job_id).splitlines()[-1])


def why_missing(s, job_id, text):
    """Wait until the job waits with the code `missing`; assert that ``text`` is in `why` and that nothing started."""
    wait_for(lambda: s.job(job_id)["reason_code"] == "missing", "its reason")
    assert text in s.cli("why", str(job_id)).stdout
    assert s.job(job_id)["attempt"] == 0, "nothing was started"


@pytest.mark.smoke
def test_s3_26_environments_by_name_and_folder_are_active_in_the_job(make):
    """S3.26: A job runs in its venv, or in the conda environment that it names by its name or its folder.

    An environment may also lie in a folder of `envs_dirs`. The job gets the variables that conda stores for the
    environment; a job without an environment gets none of them.
    """
    s = make(gpus=2)
    named = conda_prefix(s.home / "miniconda3" / "envs" / "torch")
    (named / "conda-meta" / "state").write_text('{"env_vars": {"KEPT": "yes"}}')
    listed = conda_prefix(s.folder / "disk" / "jax")
    (s.home / ".condarc").write_text(f"envs_dirs: [{s.folder}/disk]\n")
    venv = venv_prefix(s.folder / "my venv")
    s.append("0,show.py,torch,a", f"0,show.py,{named},b", "0,show.py,jax,c", f'0,show.py,"{venv}",d', "0,show.py,,e")
    s.start(PYTHONHOME="")
    s.wait_ended(5)
    for job_id in (1, 2):
        saw = shown(s, job_id)
        assert (saw["CONDA_PREFIX"], saw["CONDA_DEFAULT_ENV"], saw["KEPT"]) == (str(named), "torch", "yes")
        assert saw["path"] == f"{named}/bin" and saw["PYTHONHOME"] is None and saw["GPUJOB_ACTIVATION"] is None
    assert shown(s, 3)["CONDA_PREFIX"] == str(listed)
    saw = shown(s, 4)
    assert (saw["VIRTUAL_ENV"], saw["CONDA_PREFIX"], saw["python"]) == (str(venv), None, f"{venv}/bin/python")
    assert shown(s, 5)["CONDA_PREFIX"] is None
    assert s.job(1)["command"][0] == f"{named}/bin/python" and s.job(1)["conda_env"] == "torch"


def test_s3_40_add_with_conda_writes_a_line_that_runs_in_that_environment(make):
    """S3.40: `add --conda` writes a line whose job has the interpreter and variables of that environment.

    The job also has the given arguments, priority and GPU.
    """
    s = make(gpus=2)
    named = conda_prefix(s.home / "miniconda3" / "envs" / "torch")
    other = conda_prefix(s.folder / "my envs" / "jax")
    s.start()
    s.cli("add", "show.py", "--conda", "torch", "--args", "-a 'b c' 1,2", "--priority", "3", "--gpus", "1")
    s.cli("add", "show.py", "--conda", str(other), "--output-file", str(s.jobs_file))
    assert s.jobs_file.read_text() == f"3,show.py,torch,\"-a 'b c' 1,2\",1\n0,show.py,{other},,\n"
    s.wait_ended(2)
    for job_id, prefix, name in ((1, named, "torch"), (2, other, str(other))):
        saw = shown(s, job_id)
        assert (saw["CONDA_PREFIX"], saw["CONDA_DEFAULT_ENV"], saw["path"]) == (str(prefix), name, f"{prefix}/bin")
        assert saw["python"] == f"{prefix}/bin/python"
    saw = shown(s, 1)
    assert saw["words"] == ["-a", "b c", "1,2", "--cuda", "1"] and saw["CUDA_VISIBLE_DEVICES"] == "1"
    assert s.job(1)["priority"] == 3 and s.job(1)["allowed_gpus"] == [1]


def test_s3_26_activation_scripts_are_sourced(make):
    """S3.26: The scripts in the environment's activate.d are sourced.

    If the installation has a conda.sh with the shell function `conda`, the function activates the environment.
    Otherwise gpujob itself sources the scripts. The recorded pid is the pid of the job's process. Activation cannot
    change the GPUJOB_ID and the GPUs of the job.
    """
    s = make(gpus=2)
    micro = conda_prefix(s.home / "micromamba" / "envs" / "micro")
    activation(micro, "echo a package says hello\nexport FROM_PACKAGE=1 CUDA_VISIBLE_DEVICES=7 GPUJOB_ID=99\n")
    conda_sh(s.home / "miniconda3")
    big = conda_prefix(s.home / "miniconda3" / "envs" / "big")
    activation(big, "export FROM_PACKAGE=2\n")
    executable(s.folder / "shell.sh", "#!/bin/sh\nexec python show.py from-shell\n")
    s.append("0,show.py,micro,a", "0,show.py,big,b", "0,shell.sh,big,,1")
    s.start()
    s.wait_ended(3)
    saw = shown(s, 1)
    assert (saw["FROM_PACKAGE"], saw["CONDA_PREFIX"], saw["GPUJOB_ACTIVATION"]) == ("1", str(micro), None)
    assert saw["GPUJOB_ID"] == "1" and saw["CUDA_VISIBLE_DEVICES"] in "01", (
        "the job's marks are not activation's to change"
    )
    assert s.log(1).startswith("a package says hello\n")
    assert saw["pid"] == s.rows("SELECT pid FROM jobs WHERE id=1")[0][0]
    assert s.job(1)["command"][0] == f"{micro}/bin/python", "shown without the launcher"
    saw = shown(s, 2)
    assert (saw["FROM_PACKAGE"], saw["CONDA_DEFAULT_ENV"]) == ("2", "by-conda")
    saw = shown(s, 3)
    assert saw["words"] == ["from-shell"] and saw["CUDA_VISIBLE_DEVICES"] == "1" and saw["path"] == f"{big}/bin"


def test_s3_26_after_activation_exit_codes_are_exact_and_cancel_works(make):
    """S3.26, S2: After activation, the command is the main process of the job.

    Its exit code or signal is recorded exactly, and `cancel` ends it.
    """
    s = make(gpus=2)
    activation(conda_prefix(s.home / "miniconda3" / "envs" / "e"), "export FROM_PACKAGE=1\n")
    s.hold("c")
    lines = [s.line("a", 37), s.line("b", "s15"), s.line("c")]
    s.append(*(line.replace(",,", ",e,", 1) for line in lines))
    s.start()
    s.wait_state(1, "failed")
    s.wait_state(2, "failed")
    assert (s.job(1)["exit_code"], s.job(2)["signal"]) == (37, 15)
    wait_for(lambda: s.starts("c"), "it runs")
    s.cli("cancel", "3")
    s.wait_state(3, "cancelled")
    assert not alive(int(next(entry[2] for entry in s.ledger() if entry[1] == "c")))


def test_s3_26_a_job_whose_scheduler_is_killed_during_activation_runs_once(make):
    """S3.26, P1: A job whose scheduler is killed during its activation is adopted, and its command runs once."""
    s = make()
    prefix = conda_prefix(s.home / "micromamba" / "envs" / "e")
    activation(prefix, 'touch "$CONDA_PREFIX/asked"\nwhile [ ! -e "$CONDA_PREFIX/go" ]; do sleep 0.05; done\n')
    s.append(s.line("a", 5).replace(",,", ",e,", 1))
    s.start()
    wait_for((prefix / "asked").exists, "activation has begun")
    s.kill()
    s.start()
    s.wait_state(1, "running")
    (prefix / "go").touch()
    s.wait_state(1, "failed")
    assert s.starts("a") == 1 and s.job(1)["attempt"] == 1
    assert s.job(1)["exit_code"] == 5


def test_s3_26_submit_and_add_accept_an_environment_by_name_or_folder(make):
    """S3.26: `submit` and `add` take an environment by name, or by a folder relative to the current folder."""
    s = make()
    conda_prefix(s.home / "miniconda3" / "envs" / "e")
    executable(s.home / "miniconda3" / "envs" / "e" / "bin" / "tool", "#!/bin/sh\necho tool of $CONDA_PREFIX\n")
    venv = venv_prefix(s.folder / "venv")
    s.start()
    s.cli("submit", "--conda", "e", "--wait", "--", "tool")
    assert s.log(1) == f"tool of {s.home}/miniconda3/envs/e\n"
    s.cli("submit", "--conda", "./venv", "--wait", "--", "python", "show.py")
    assert shown(s, 2)["VIRTUAL_ENV"] == str(venv)
    (s.folder / "inner").mkdir()
    words = ["add", "../show.py", "--conda", "../venv", "--state-file", "../gpu_scheduler_state.json"]
    subprocess.run(
        [sys.executable, "-m", "scheduler", *words], cwd=s.folder / "inner", env=s.environ, check=True, timeout=60
    )
    assert shown(s, 3)["VIRTUAL_ENV"] == str(venv)


def test_s3_26_a_changed_conda_mode_applies_to_later_starts_of_jobs(make):
    """S3.26: A `conda_mode` that is changed while the scheduler runs applies to later starts of jobs.

    `run` starts the command with `conda run`, `activate` sources the scripts of the environment, `direct` sources none.
    """
    s = make()
    root = s.home / "miniconda3"
    prefix = conda_prefix(root / "envs" / "e")
    conda = executable(root / "bin" / "conda", CONDA_RUN)
    activation(prefix, "export FROM_PACKAGE=1\n")
    config = s.folder / "config.yaml"
    config.write_text("conda_mode: run\n")
    s.start()
    s.append("0,show.py,e,a")
    saw = shown(s, 1)
    assert (saw["CONDA_PREFIX"], saw["FROM_PACKAGE"]) == (str(prefix), None)
    show, bin_python = s.folder / "show.py", prefix / "bin" / "python"
    called = (root / "bin" / "called").read_text()
    assert called == f"{conda} run --no-capture-output -p {prefix} {bin_python} -u {show} a --cuda 0\n"
    assert s.job(1)["command"][0] == str(bin_python)

    def change(mode):
        before = s.said().count("config reloaded")
        aside = s.folder / "config.new"
        aside.write_text(f"conda_mode: {mode}\n")
        aside.replace(config)  # in one step: half of a config is valid YAML, too
        wait_for(lambda: s.said().count("config reloaded") > before, "the new mode")

    change("activate")
    s.append("0,show.py,e,b")
    assert shown(s, 2)["FROM_PACKAGE"] == "1"
    change("direct")
    s.append("0,show.py,e,c")
    assert shown(s, 3)["FROM_PACKAGE"] is None


def test_b15_a_job_waits_for_its_environment(make):
    """B15: A job waits while its environment is missing, incomplete, without python, or with a broken python.

    The reason names the problem. The job starts when the environment is complete.
    """
    s = make(gpus=4)
    half, bare, stale = s.folder / "half", s.folder / "bare", venv_prefix(s.folder / "stale")
    (half / "conda-meta").mkdir(parents=True)
    conda_prefix(bare, python=False)
    (stale / "bin" / "python").unlink()
    (stale / "bin" / "python").symlink_to(s.folder / "base" / "python3")
    s.append("0,show.py,late,a", f"0,show.py,{half},b", f"0,show.py,{bare},c", f"0,show.py,{stale},d", s.line("other"))
    s.start()
    s.wait_state(5, "done")
    why_missing(s, 1, "no environment late was found; create it (conda create -n late)")
    why_missing(s, 2, f"environment {half} is incomplete")
    why_missing(s, 3, f"no python in environment {bare}: conda install -p {bare} python")
    why_missing(s, 4, f"its bin/python is a link to {s.folder}/base/python3, which does not exist; restore that file")
    conda_prefix(s.home / "miniconda3" / "envs" / "late")
    conda_prefix(half)
    conda_prefix(bare)
    (s.folder / "base").mkdir()
    (s.folder / "base" / "python3").symlink_to(BASE_PYTHON)
    s.wait_ended(5)
    assert [shown(s, n)["words"][0] for n in (1, 2, 3, 4)] == ["a", "b", "c", "d"]


def test_b15_a_job_with_conda_mode_run_waits_while_no_conda_is_found(make):
    """B15: With `conda_mode: run` a job waits while no conda is found; it does not run outside its environment."""
    s = make(conda_mode="run")
    conda_prefix(s.home / "miniconda3" / "envs" / "e")
    s.append("0,show.py,e")
    s.start()
    why_missing(s, 1, "neither conda nor mamba nor micromamba was found")
    executable(s.home / "miniconda3" / "bin" / "micromamba", CONDA_RUN)
    assert shown(s, 1)["CONDA_PREFIX"] == f"{s.home}/miniconda3/envs/e"


@pytest.mark.waits
def test_b15_activation_that_hangs_or_fails_fails_the_job(make):
    """B15: A job fails without running its command if the activation hangs, fails or sets a wrong CONDA_PREFIX.

    Other jobs run. Log, `show` and `why` name the cause. Processes that the activation started are ended.
    """
    s = make(gpus=3, activation_limit=15)
    slow = conda_prefix(s.home / "micromamba" / "envs" / "slow")
    activation(slow, "echo asking the licence server\nsleep 3600 & echo $! > pid\nwait\n")
    bad = conda_prefix(s.home / "micromamba" / "envs" / "bad")
    activation(bad, "echo no compiler here >&2\nexit 4\n")
    lying = conda_prefix(s.home / "micromamba" / "envs" / "lying")
    activation(lying, "export CONDA_PREFIX=/opt/base\n")
    s.append(*(s.line(key).replace(",,", f",{key},", 1) for key in ("slow", "bad", "lying")), s.line("other"))
    s.start()
    s.wait_ended(4)
    assert [s.starts(key) for key in ("slow", "bad", "lying", "other")] == [0, 0, 0, 1]
    assert s.log(1) == (
        "asking the licence server\ngpujob: environment slow could not be activated: activation took longer than 15 s (activation_limit)\n"
    )
    assert s.log(2).startswith(
        "no compiler here\ngpujob: environment bad could not be activated: activation ended with code 4"
    )
    assert f"CONDA_PREFIX is /opt/base (expected: {lying})" in s.log(3)
    for job_id in (1, 2, 3):
        job = s.job(job_id)
        assert (job["state"], job["exit_code"], job["failure"]["class"]) == ("failed", 1, "environment")
        assert "could not be activated" in s.cli("show", str(job_id)).stdout
        assert "conda_mode: direct" in s.cli("why", str(job_id)).stdout
    assert not alive(int((s.folder / "pid").read_text())), "what activation started was ended with it"


def test_b15_a_conda_run_that_fails_or_exceeds_the_time_limit_ends_the_job(make):
    """B15, conda_mode run: If `conda run` fails, the job fails. If `conda run` hangs, the time limit ends the job."""
    s = make(gpus=2, conda_mode="run", kill_grace=1)
    root = s.home / "miniconda3"
    conda_prefix(root / "envs" / "e")
    conda = executable(root / "bin" / "conda", "#!/bin/sh\necho 'EnvironmentLocationNotFound: broken' >&2\nexit 1\n")
    s.append(s.line("a").replace(",,", ",e,", 1))
    s.start()
    s.wait_state(1, "failed")
    assert s.job(1)["failure"]["class"] == "environment"
    executable(conda, "#!/bin/sh\nsleep 3600\n")
    s.append("0,show.py,e,b;time=1")
    s.wait_state(2, "failed")
    assert s.job(2)["outcome"] == "time_limit"
    assert s.starts("a") == 0


def test_b14_a_job_waits_for_its_working_folder(make):
    """B14: A job waits while its working folder is missing or is a file.

    If the folder is removed after a job and created again, the next job runs in the new folder.
    """
    s = make(gpus=2)
    (s.folder / "pwd.py").write_text("import os; print(os.getcwd(), sorted(os.listdir('.')))\n")
    (s.folder / "file").touch()
    s.append("0,pwd.py,,a;cwd=work", "0,pwd.py,,b;cwd=file", "0,pwd.py,,c;cwd=file/below", s.line("other"))
    s.start()
    s.wait_state(4, "done")
    why_missing(s, 1, f"no such working folder {s.folder}/work; the job waits until it exists")
    why_missing(s, 2, f"working folder {s.folder}/file is a file; the job waits until it is a folder")
    why_missing(s, 3, "no such working folder")
    work = s.folder / "work"
    work.mkdir()
    s.wait_state(1, "done")
    (s.folder / "made" / "below").mkdir(parents=True)
    (s.folder / "file").unlink()
    (s.folder / "made").rename(s.folder / "file")  # job 2 never sees the folder without `below`
    s.wait_ended(4)
    assert s.log(2) == f"{s.folder}/file ['below']\n"
    shutil.rmtree(work)
    work.mkdir()
    (work / "new").touch()
    s.append("0,pwd.py,,again;cwd=work")  # the folder of job 1, created again
    s.wait_state(5, "done")
    assert s.log(5) == f"{work} ['new']\n"
    gone = s.folder / "gone"
    gone.mkdir()
    s.cli("pause", "0-1")
    s.cli("submit", "--cwd", str(gone), "--", "true")
    gone.rmdir()
    s.cli("resume", "0-1")
    why_missing(s, 6, f"no such working folder {gone}")


def test_b16_a_job_runs_the_python_that_is_found_when_it_starts(make):
    """B16: The python of a job is looked up when the job starts, not when the job is queued.

    A job in a venv runs the python to which the link in the venv leads. A job without an environment runs the first
    python in PATH.
    """
    s = make()
    venv = venv_prefix(s.folder / "venv")
    tools = s.folder / "tools"
    tools.mkdir()
    link = venv / "bin" / "python"
    for name in ("one", "two", "three"):
        executable(s.folder / name, f'#!/bin/sh\necho python {name}\nexec {BASE_PYTHON} "$@"\n')
    link.unlink()
    link.symlink_to(s.folder / "one")
    second = s.folder / "later" / "python"
    second.parent.mkdir()
    second.symlink_to(s.folder / "one")
    s.hold("first")
    s.append(s.line("first"), f"0,show.py,{venv},a", "0,show.py,,b")
    s.start(PATH=f"{tools}:{second.parent}:{os.environ['PATH']}")
    s.wait_state(1, "running")
    link.unlink()
    link.symlink_to(s.folder / "two")
    (tools / "python").symlink_to(s.folder / "three")
    s.release("first")
    s.wait_ended(3)
    assert s.log(2).startswith("python two\n") and s.log(3).startswith("python three\n")
    (tools / "python").unlink()
    s.append("0,show.py,,c")
    s.wait_state(4, "done")
    assert s.log(4).startswith("python one\n"), "the next one of PATH"
    assert [s.job(n)["interpreter"].partition(" (")[0] for n in (2, 3, 4)] == [
        str(link),
        f"{tools}/python",
        str(second),
    ]
    version = re.escape(".".join(map(str, sys.version_info[:2])))
    assert re.search(rf"interpreter +{re.escape(str(link))} \({version}", s.cli("show", "2").stdout)


def test_b12_a_job_waits_for_its_script(make):
    """B12: A job waits while its script is missing or a folder, and runs when the script is there.

    In the meantime it holds no GPU, and no attempt starts.
    """
    s = make()
    (s.folder / "folder.py").mkdir()
    s.append("0,late.py", "0,folder.py", "0,no/such/run.sh", s.line("other"))
    s.start()
    s.wait_state(4, "done")
    why_missing(s, 1, f"no such file {s.folder}/late.py")
    why_missing(s, 2, "is a folder, not a script")
    why_missing(s, 3, "no such file")
    assert s.status()["gpus"][0]["state"] == "AVAILABLE"
    (s.folder / "late.py").touch()
    (s.folder / "folder.py").rmdir()
    (s.folder / "folder.py").touch()
    executable(s.folder / "no" / "such" / "run.sh")
    s.wait_ended(4)
    assert set(s.states().values()) == {"done"}


def test_b13_a_program_that_cannot_be_executed_fails_with_a_cause_and_no_exit_code(make):
    """B13: A program that cannot be executed fails its job in the first attempt, without an exit code.

    The cause is named: not executable, a missing interpreter, a first line that ends in CRLF, no `#!` line.
    """
    s = make(gpus=2)
    cases = {
        "off.sh": ("#!/bin/sh\n", "is not executable; run: chmod +x"),
        "bad.sh": ("#!/no/such/shell\n", "names /no/such/shell, which does not exist"),
        "crlf.sh": ("#!/bin/sh\r\necho hello\r\n", "ends in a carriage return"),
        "plain.sh": ("echo no first line\n", "does not begin with a line such as #!/bin/sh"),
    }
    for name, (text, _) in cases.items():
        executable(s.folder / name).write_bytes(text.encode())
    (s.folder / "off.sh").chmod(0o644)
    executable(s.folder / "own.sh", "#!/bin/sh\nexit 127\n")
    s.append(*(f"0,{name}" for name in cases), "0,own.sh")
    s.start()
    s.wait_ended(5)
    for job_id, (_, said) in enumerate(cases.values(), 1):
        job = s.job(job_id)
        assert (job["state"], job["outcome"], job["exit_code"]) == ("failed", "could_not_start", None)
        assert said in s.cli("why", str(job_id)).stdout
        s.says(said)
        assert "gpujob: cannot start" in s.log(job_id)
        assert job["attempt"] == 1, "it would be no better the next time"
    job = s.job(5)
    assert (job["outcome"], job["exit_code"]) == ("exit", 127), "a script's own 127 is its own"


def test_b13_a_program_that_cannot_be_executed_after_activation_fails_the_job(make):
    """B13: A program that cannot be executed after activation fails its job with the class `start`.

    The log has the cause.
    """
    s = make()
    activation(conda_prefix(s.home / "miniconda3" / "envs" / "e"), "export FROM_PACKAGE=1\n")
    executable(s.folder / "bad.sh", "#!/no/such/shell\n")
    s.append("0,bad.sh,e")
    s.start()
    s.wait_state(1, "failed")
    assert s.job(1)["failure"]["class"] == "start" and s.job(1)["exit_code"] == 1
    assert "its first line names an interpreter that does not exist" in s.log(1)


@pytest.mark.skipif(shutil.which("conda") is None, reason="there is no conda here")
@pytest.mark.parametrize("mode", ["direct", "activate", "run"])
def test_s3_26_a_job_runs_in_an_environment_of_a_real_conda(scheduler, mode):
    """S3.26: A job runs in an environment of a real conda, in each `conda_mode`."""
    s = scheduler(1, conda_mode=mode)
    base = subprocess.run(["conda", "info", "--base"], capture_output=True, text=True, check=True).stdout.strip()
    (s.folder / "show.py").write_text(SHOW)
    s.append("0,show.py,base,a")
    s.start()
    saw = shown(s, 1)
    assert Path(saw["CONDA_PREFIX"]).resolve() == Path(base).resolve() == Path(saw["python"]).parents[1].resolve()
