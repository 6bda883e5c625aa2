"""Executable scripts that are not Python, odd names, long arguments, and torchrun, with a real scheduler."""

from __future__ import annotations

import hashlib
import json
import re
import sys

from scheduler.core.command_limits import LONGEST_COMMAND, LONGEST_WORD
from tests.prefixes import executable, site_packages, venv_prefix
from tests.stories.harness import wait_for

WORDS = '#!/bin/sh\nprintf "<%s>" "$0" "$@"; echo " $CUDA_VISIBLE_DEVICES"\n'
# Prints a hash of its arguments, joined by NUL bytes, and their number.
HASH = "import hashlib, os, sys; print(hashlib.sha256(b'\\0'.join(map(os.fsencode, sys.argv[1:]))).hexdigest(), len(sys.argv) - 1)\n"
# Imitation of torchrun: it passes the same options and variables to a script as the real one.
FAKE_TORCH = """\
import os, subprocess, sys
assert __name__ == "__main__" and sys.argv[1] == "--standalone", sys.argv
name, _, number = sys.argv[2].partition("=")
assert name == "--nproc_per_node", sys.argv
world = [subprocess.Popen([sys.executable, "-u", *sys.argv[3:]],
                          env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": number})
         for rank in range(int(number))]
sys.exit(max(abs(process.wait()) for process in world))
"""
RANKED = """\
import json, os, sys
line = json.dumps({**{n: os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}, "words": sys.argv[1:]})
os.write(1, (line + "\\n").encode())
sys.exit(int(os.environ.get("RANK") == "1" and "fail" in sys.argv))
"""


def digest(words):
    return f"{hashlib.sha256(chr(0).join(words).encode()).hexdigest()} {len(words)}\n"


def test_an_executable_file_in_a_jobs_line_is_run_directly(scheduler):
    """S3: An executable file in a jobs line is run directly, with unchanged arguments and without `--cuda`.

    Paths are relative to the jobs file. File names may contain blanks, quotes, commas, semicolons and other alphabets.
    """
    s = scheduler(gpus=2)
    names = ["run.sh", "sub/run", "with space.sh", "größe-模型.sh", "it's.sh", 'say "hi".sh', "a,b.sh", "semi;colon.sh"]
    for name in names:
        executable(s.folder / name, WORDS)
    s.append(
        "0,run.sh,,--lr 1 \"two words\" '$HOME' ,1",
        "0,./sub/../sub/run",
        "0,with space.sh,,x",
        "0,größe-模型.sh,,ä 'ö ü'",
        "0,it's.sh",
        '0,"say ""hi"".sh"',
        '0,"a,b.sh"',
        "0,semi;colon.sh",
    )
    s.start()
    s.wait_ended(8)
    assert set(s.states().values()) == {"done"}, s.said()
    assert s.log(1) == f"<{s.folder}/run.sh><--lr><1><two words><$HOME> 1\n"
    assert s.log(4).startswith(f"<{s.folder}/größe-模型.sh><ä><ö ü> ")
    for job_id, name in enumerate(names, 1):
        assert s.log(job_id).startswith(f"<{s.folder}/{name}>"), name
        assert s.job(job_id)["command"][0] == f"{s.folder}/{name}"
    binary = s.folder / "true"
    binary.symlink_to("/bin/true")
    s.append("0,true")
    s.wait_state(9, "done")


def test_b17_a_job_gets_long_arguments_complete(scheduler):
    """S3, B17: A job gets 100 KB of arguments complete, from a jobs line and from `submit`.

    A jobs line with an argument that is too long for the kernel is refused.
    """
    s = scheduler(gpus=2)
    (s.folder / "hash.py").write_text(HASH)
    executable(s.folder / "hash.sh", f"#!{sys.executable}\n{HASH}")
    many = [f"--option-{n}=größe{n}" for n in range(4500)]
    assert len(" ".join(many)) > 100_000
    s.start()
    s.append(f"0,hash.py,,{' '.join(many)};cuda=none", f"0,hash.sh,,{'x' * 100_000} 'a  b'", "0,hash.sh,,short")
    s.wait_ended(3)
    assert s.log(1) == digest(many)
    assert s.log(2) == digest(["x" * 100_000, "a  b"])
    assert s.cli("submit", "--wait", "--", str(s.folder / "hash.sh"), *many, "y" * 100_000).stdout == "4\n"
    assert s.log(4) == digest([*many, "y" * 100_000])
    too_long = "z" * (LONGEST_WORD + 1)
    s.append(f"0,hash.sh,,{too_long}", f"0,hash.sh,,{'w' * LONGEST_WORD}")
    s.wait_state(5, "done")
    assert s.log(5) == digest(["w" * LONGEST_WORD])
    assert f"the kernel accepts at most {LONGEST_WORD} bytes per argument" in s.cli("status").stdout
    assert len(s.states()) == 5, "the line that is too long is no job"


def test_b17_add_and_submit_refuse_arguments_too_long_for_the_kernel(scheduler, monkeypatch):
    """B17: `add` and `submit` refuse arguments, variables and commands that are too long for the kernel.

    The test calls them as functions, since no process can be started with such arguments.
    """
    from scheduler.cli.add import add, submit
    from scheduler.core.errors import SchedulerError

    s = scheduler(gpus=1)
    monkeypatch.chdir(s.folder)
    state_file = str(s.folder / "gpu_scheduler_state.json")
    for call in (
        lambda: add("a.sh", args="x" * (LONGEST_WORD + 1), state_file=state_file),
        lambda: submit(["true", "x" * (LONGEST_WORD + 1)], state_file=state_file),
        lambda: submit(["true"], env=("BIG=" + "x" * LONGEST_WORD,), state_file=state_file),
        lambda: add("a.sh", args=" ".join(["x" * 100_000] * 11), state_file=state_file),
        lambda: submit(["true", *["x" * 100_000] * 11], state_file=state_file),
    ):
        try:
            call()
        except SchedulerError as error:
            assert error.exit_code == 2 and re.search(
                rf"the kernel accepts at most {LONGEST_WORD} bytes|write at most {LONGEST_COMMAND} bytes|a line may have",
                str(error),
            ), error
        else:
            raise AssertionError("it was taken")
    assert not s.jobs_file.exists() and s.states() == {}


def ranks(s, job_id):
    """Return rank → variables and arguments that the process with this rank printed, for a torchrun job."""
    seen = [json.loads(line) for line in s.log(job_id).splitlines() if line.startswith("{")]
    return {one.pop("RANK"): one for one in seen}


def test_torchrun_starts_one_process_per_gpu(scheduler):
    """`;launch=torchrun` runs the torch of the job's environment with one process per GPU.

    A job without GPUs has one process. If the arguments contain `--cuda`, its value is replaced; otherwise `--cuda` is
    not added.
    """
    s = scheduler(gpus=2)
    venv = venv_prefix(s.folder / "venv")
    package = site_packages(venv) / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(FAKE_TORCH)
    (s.folder / "train.py").write_text(RANKED)
    executable(s.folder / "train.sh")
    s.append(
        f"0,train.py,{venv},--lr 1;gpus=2;launch=torchrun",
        f"0,train.py,{venv},--cuda 7 x;gpus=0.5;launch=torchrun",
        f"0,train.py,{venv},none;gpus=0;launch=torchrun",
        f"0,train.py,{venv},fail;gpus=2;launch=torchrun",
        "0,train.py,,other;gpus=2;launch=torchrun",
        f"0,train.sh,{venv},x;launch=torchrun",
        f"0,train.py,{venv},x;launch=mpirun",
    )
    s.start()
    s.wait_ended(5)
    assert ranks(s, 1) == {
        rank: {"LOCAL_RANK": rank, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1", "words": ["--lr", "1"]}
        for rank in ("0", "1")
    }
    one = ranks(s, 2)["0"]
    assert one["WORLD_SIZE"] == "1" and one["words"] == ["--cuda", one["CUDA_VISIBLE_DEVICES"], "x"]
    one = ranks(s, 3)["0"]
    assert (one["WORLD_SIZE"], one["CUDA_VISIBLE_DEVICES"], one["words"]) == ("1", "", ["none"])
    assert (s.job(4)["state"], s.job(4)["exit_code"]) == ("failed", 1)
    assert s.job(1)["command"] == [
        f"{venv}/bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"{s.folder}/train.py",
        "--lr", "1",
    ]  # fmt: skip
    assert s.job(5)["state"] == "failed" and "No module named" in s.log(5), "there is no torch without the environment"
    said = wait_for(lambda: "mpirun" in s.said() and s.said(), "the refusals")
    assert "torchrun runs only Python scripts, and train.sh does not end in .py" in said
    assert ";launch=: unknown value 'mpirun'; known: python, torchrun" in said
    words = ["--launch", "torchrun", "--conda", "venv", "--gpus", "2", "--wait", "--", "train.py", "a b"]
    assert s.cli("submit", *[w if w != "venv" else "./venv" for w in words]).stdout == "6\n"
    assert sorted(ranks(s, 6)) == ["0", "1"] and ranks(s, 6)["1"]["words"] == ["a b"]
    s.cli("submit", "--launch", "torchrun", "--", "train.sh", code=3)
    assert "known: python, torchrun" in s.cli("submit", "--launch", "mpirun", "--", "train.py", code=2).stderr


def test_submit_launch_python_runs_a_script_as_a_jobs_line_does(scheduler):
    """`submit --launch python -- SCRIPT` runs a script as a jobs line does: with an interpreter and `--cuda`.

    The script runs in the current folder of `submit`.
    """
    s = scheduler(gpus=1)
    (s.folder / "words.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])\n")
    s.start()
    s.cli("submit", "--launch", "python", "--wait", "--", "words.py", "a b")
    assert s.log(1) == f"{s.folder} ['a b', '--cuda', '0']\n"
    s.cli("pause", "0")
    s.cli("submit", "--launch", "torchrun", "--", "words.py")
    assert s.job(2)["command"][1:3] == ["-m", "torch.distributed.run"]
