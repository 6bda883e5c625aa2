"""Tests of the activation launcher: it runs the command in the activated environment, or reports why it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler.environments import activate
from tests.prefixes import BASE_PYTHON, CONDA_SH, activation, conda_prefix, conda_sh, executable

LIMIT_S = 30.0
SHOW = "import json, os; print(json.dumps({k: v for k, v in os.environ.items()}))"


class Bench:
    """An environment in a temporary folder, and the activation launcher, which runs commands in this environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = conda_prefix(folder / "envs" / "e")
        self.conda_sh = ""
        self.limit = 20.0
        self.environ: dict[str, str] = {
            "PATH": os.environ["PATH"], "GPUJOB_ID": "12", "GPUJOB_GPUS": "3", "CUDA_VISIBLE_DEVICES": "3",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OWN": "mine",
        }  # fmt: skip

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-I", "-S", activate.__file__, *words]

    def environment(self) -> dict[str, str]:
        settings = {"PATH": f"{self.prefix}/bin:{self.environ['PATH']}", "CONDA_PREFIX": str(self.prefix), "OWN": None}
        told = {
            "name": "e",
            "prefix": str(self.prefix),
            "conda_sh": self.conda_sh,
            "settings": settings,
            "limit": self.limit,
        }
        return {**self.environ, "GPUJOB_ACTIVATION": json.dumps(told)}

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.words(*words), env=self.environment(), cwd=self.folder, capture_output=True, text=True,
            errors="surrogateescape", timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done

    def shown(self) -> dict[str, str]:
        """Return the environment variables of a command that the launcher runs."""
        found: dict[str, str] = json.loads(self.run(BASE_PYTHON, "-c", SHOW).stdout.splitlines()[-1])
        return found

    def refused(self) -> str:
        """Run the launcher with a command that must not start.

        Return the output; its last line reports the failed activation.
        """
        done = self.run("/bin/sh", "-c", "touch ran; echo ran", code=1)
        assert "ran" not in done.stdout and not (self.folder / "ran").exists()
        last = done.stderr.splitlines()[-1]
        assert last.startswith("gpujob: environment e could not be activated: ")
        return done.stdout + done.stderr


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"


# -- the environment of the command -----------------------------------------------------------------------


def test_activation_scripts_are_sourced_in_order_with_conda_prefix_set(bench: Bench) -> None:
    """S3.26: The environment's scripts for bash are sourced in the order of their names, with CONDA_PREFIX set."""
    activation(bench.prefix, 'export ORDER="${ORDER}b" SEEN="$CONDA_PREFIX"\nfalse\n', "b.sh")
    activation(bench.prefix, 'export ORDER="${ORDER}a"\n', "a.sh")
    activation(bench.prefix, "export ORDER=fish\n", "c.fish")
    found = bench.shown()
    assert found["ORDER"] == "ab" and found["SEEN"] == found["CONDA_PREFIX"] == str(bench.prefix)
    assert found["PATH"] == f"{bench.prefix}/bin:{bench.environ['PATH']}"
    assert "OWN" not in found, "what the environment takes away is gone"


def test_activation_uses_the_conda_function_of_the_installation(bench: Bench) -> None:
    """S3.26: If the installation has a conda.sh, the function `conda` in it activates the environment."""
    bench.conda_sh = str(conda_sh(bench.folder))
    activation(bench.prefix, "export FROM_PACKAGE=1\n")
    found = bench.shown()
    assert found["CONDA_DEFAULT_ENV"] == "by-conda" and found["FROM_PACKAGE"] == "1"
    assert found["OWN"] == "mine", "conda itself says what is set then"


@pytest.mark.parametrize("with_conda", [False, True])
def test_activation_cannot_change_the_variables_of_job_and_gpus(bench: Bench, with_conda: bool) -> None:
    """Contract 4: Activation cannot change GPUJOB_* and CUDA_*, which identify the job's processes and its GPUs."""
    if with_conda:
        bench.conda_sh = str(conda_sh(bench.folder))
    activation(
        bench.prefix,
        "export CUDA_VISIBLE_DEVICES=0,1,2,3 GPUJOB_ID=99 GPUJOB_NEW=1 CUDA_DEVICE_ORDER=FASTEST_FIRST\nunset GPUJOB_GPUS\n",
    )
    found = bench.shown()
    ours = {name: value for name, value in found.items() if name.startswith(("GPUJOB", "CUDA"))}
    assert ours == {
        "GPUJOB_ID": "12",
        "GPUJOB_GPUS": "3",
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    del bench.environ["CUDA_VISIBLE_DEVICES"]  # cuda_ids: unset
    assert "CUDA_VISIBLE_DEVICES" not in bench.shown()


def test_activation_adds_no_variables_of_shell_or_python(bench: Bench) -> None:
    """The command gets no variable that exists only because of the launcher: Python sets LC_CTYPE, the shell SHLVL."""
    (bench.folder / "rc").write_text("export FROM_BASH_ENV=1\n")
    bench.environ.update(LC_ALL="C", SHLVL="4", BASH_ENV=str(bench.folder / "rc"), PWD="/somewhere")
    activation(bench.prefix, "cd /\nexport NEW=1\n")
    environment = bench.environment()
    done = subprocess.run(
        bench.words("/bin/cat", "/proc/self/environ"), env=environment, capture_output=True, timeout=LIMIT_S, check=True
    )
    found = dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if item)
    expected = {**bench.environ, "NEW": "1", "CONDA_PREFIX": str(bench.prefix), "PATH": found["PATH"]}
    del expected["OWN"]
    assert found == expected


def test_large_or_binary_variables_survive_activation(bench: Bench) -> None:
    """Variables reach the command unchanged, even if a value is larger than a pipe, has line breaks or is not UTF-8."""
    bench.environ["OLD"] = "two\nlines \udcff"
    activation(bench.prefix, 'export BIG=$(printf "%090000d" 7) MORE=$(printf "%090000d" 8) TWO="a\nb=c"\n')
    show = "import os; print(len(os.environ['BIG']), len(os.environ['MORE']), ascii(os.environ['TWO'] + os.environ['OLD']))"
    done = bench.run(BASE_PYTHON, "-c", show)
    assert done.stdout == "90000 90000 'a\\nb=ctwo\\nlines \\udcff'\n"


def test_words_of_a_command_are_never_read_as_shell_text(bench: Bench) -> None:
    activation(bench.prefix, "true\n")
    words = ["$(touch hacked)", "; touch hacked", "`touch hacked`", "a\nb", "", "'\"", "\udcff", "-c"]
    done = bench.run(BASE_PYTHON, "-c", "import sys; print(ascii(sys.argv[1:]))", *words)
    assert done.stdout == f"{words!a}\n"
    assert not (bench.folder / "hacked").exists()


def test_activation_keeps_the_pid_exit_code_and_signal_of_the_command(bench: Bench) -> None:
    """The command replaces the process of the launcher.

    So the process id, the exit code and the signal are the command's own.
    """
    activation(bench.prefix, "true\n")
    words = bench.words("/bin/sh", "-c", "echo $$; exit 37")
    process = subprocess.Popen(words, env=bench.environment(), stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (out, process.returncode) == (f"{process.pid}\n", 37)
    bench.run("/bin/sh", "-c", "kill -TERM $$", code=-signal.SIGTERM)


def test_activation_passes_no_extra_descriptors_and_ignored_signals(bench: Bench) -> None:
    """B20: The command has only the descriptors 0, 1 and 2. It ignores the same signals as without activation."""
    activation(bench.prefix, "sleep 1000 >/dev/null 2>&1 &\necho $! >> background\n")  # keeps a pipe open
    text = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])"
    assert bench.run(BASE_PYTHON, "-c", text).stdout == "[0, 1, 2]\n"
    done = bench.run("/bin/grep", "SigIgn", "/proc/self/status")
    without = subprocess.run(["/bin/grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True)
    plain = [
        int(text.split()[1], 16) & 0x7FFFFFFF for text in (done.stdout, without.stdout)
    ]  # without signals 32 and 33, which the C library reserves
    assert plain[0] == plain[1], "as it is without activation (whatever the tests themselves were given)"
    for background in map(int, (bench.folder / "background").read_text().split()):
        assert alive(background), "what activation started on purpose goes on"
        os.kill(background, signal.SIGKILL)


def test_a_command_is_found_in_the_path_set_by_activation(bench: Bench) -> None:
    executable(bench.prefix / "tools" / "special", "#!/bin/sh\necho special $1\n")
    activation(bench.prefix, 'export PATH="$CONDA_PREFIX/tools:$PATH"\n')
    assert bench.run("special", "x").stdout == "special x\n"


# -- when it cannot be activated --------------------------------------------------------------------------


def test_an_activation_script_that_ends_the_shell_prevents_the_command(bench: Bench) -> None:
    """B15: If a script ends the shell, the command does not run, and the error names the exit code or the signal."""
    activation(bench.prefix, "echo this tool has no licence\nexit 3\n")
    text = bench.refused()
    assert "this tool has no licence" in text and "activation ended with code 3" in text
    activation(bench.prefix, "exit 0\n")
    assert "ended the shell" in bench.refused()
    activation(bench.prefix, "kill -9 $$\n")
    assert "activation ended with signal 9" in bench.refused()


def test_a_failed_conda_activate_prevents_the_command(bench: Bench) -> None:
    """B15: If `conda activate` fails, the command does not run, and conda's own message is shown."""
    bench.conda_sh = str(conda_sh(bench.folder, "conda() { echo 'EnvironmentNameNotFound: e' >&2; return 1; }\n"))
    text = bench.refused()
    assert "EnvironmentNameNotFound: e\n" in text and "activation ended with code 1" in text
    bench.conda_sh = str(bench.folder / "nosuch.sh")
    assert "activation ended with code 1" in bench.refused()


def test_activation_of_another_environment_prevents_the_command(bench: Bench) -> None:
    """B15: If activation succeeds but CONDA_PREFIX is not the requested environment, the command does not run."""
    bench.conda_sh = str(conda_sh(bench.folder, CONDA_SH.replace('CONDA_PREFIX="$2"', "CONDA_PREFIX=/opt/base")))
    assert f"CONDA_PREFIX is /opt/base (expected: {bench.prefix})" in bench.refused()
    bench.conda_sh = str(conda_sh(bench.folder, "conda() { return 0; }\n"))
    assert f"CONDA_PREFIX is not set (expected: {bench.prefix})" in bench.refused()


def test_a_link_to_an_environment_counts_as_the_same_environment(bench: Bench) -> None:
    link = bench.folder / "link"
    link.symlink_to(bench.prefix)
    bench.prefix = link
    activation(bench.prefix, 'export CONDA_PREFIX="$(readlink -f "$CONDA_PREFIX")"\n')
    bench.run("/bin/true")


@pytest.mark.parametrize("with_conda", [False, True])
def test_an_activation_beyond_its_time_limit_is_ended_with_all_processes(bench: Bench, with_conda: bool) -> None:
    """B15: If activation exceeds its time limit, all processes of its process group are ended."""
    bench.limit = 2
    hanging = "echo waiting for the network\nsleep 1000 &\necho $$ $! > pids\nwait\n"
    if with_conda:
        bench.conda_sh = str(conda_sh(bench.folder, hanging))
    else:
        activation(bench.prefix, hanging)
    text = bench.refused()
    assert "waiting for the network" in text and "activation took longer than 2 s" in text
    for pid in map(int, (bench.folder / "pids").read_text().split()):
        wait_for(lambda pid=pid: not alive(pid), f"{pid} is dead")


def test_the_launcher_refuses_to_run_without_gpujob(bench: Bench) -> None:
    done = subprocess.run(bench.words("true"), env=bench.environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (2, "gpujob: activate.py can only be started by gpujob\n")


@pytest.mark.parametrize(
    ("text", "word", "said"),
    [
        (None, "nosuch", "gpujob: cannot start nosuch: not found in PATH"),
        (None, "/no/such", "gpujob: cannot start /no/such: No such file or directory"),
        ("#!/no/such\n", "", "its first line names an interpreter that does not exist"),
        ("no first line\n", "", "Exec format error"),
    ],
)
def test_a_failed_start_after_activation_is_reported(bench: Bench, text: str | None, word: str, said: str) -> None:
    """B13: If the command cannot be started after activation, the launcher prints the reason and exits with 1.

    It does not use 126 and 127, the exit codes of a shell in this case.
    """
    if text is not None:
        word = str(executable(bench.folder / "bad", text))
    assert said in bench.run(word, code=1).stderr
