"""Tests of shell completion: the words that bash, zsh and fish offer after TAB, requested through the real shells."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.cli import completions
from scheduler.core.config import read_option
from scheduler.core.errors import UsageError
from tests.environ import clean
from tests.stories.harness import ROOT, Scheduler, wait_for

TRAP = "\\$(touch trapped)`touch trapped`'\";touch trapped;[/red]*"


def need(name: str) -> str:
    """Return the path of a shell. If the shell is not installed, skip the test; if CI is set, fail the test."""
    found = shutil.which(name)
    if not found:
        text = f"{name} is not installed; as root: apt-get install -y {name}"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    return found


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    """A scheduler with five jobs: 1 is done, 2 has failed, 3 runs, 4 is held, 5 waits. GPU 1 is paused.

    The label of job 5 is shell code.
    """
    s = Scheduler(tmp_path_factory.mktemp("completion"), 2)
    folder = s.folder / "bin"
    folder.mkdir()
    program = folder / "gpujob"
    patient = folder / "patient.py"  # with the normal limit a busy machine would offer nothing
    patient.write_text(
        "import runpy\nfrom scheduler.cli import shell_completion\nshell_completion.PATIENCE_S = 60.0\n"
        "runpy.run_module('scheduler', run_name='__main__', alter_sys=True)\n"
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {patient} "$@"\n')
    program.chmod(0o755)
    s.environ.update(PATH=f"{folder}:{s.environ['PATH']}", HOME=str(s.folder), TERM="xterm", PYTHONPATH=str(ROOT))
    for name in ("envs/torch", "envs/jax"):
        (s.folder / "miniconda3" / name / "conda-meta").mkdir(parents=True)
        (s.folder / "miniconda3" / name / "conda-meta" / "history").touch()
    (s.folder / "llm_config.json").write_text(json.dumps({"models": {"tiny-7b": 0.5, TRAP: 1}}))
    s.hold("run")
    s.append(s.line("one", gpus="0") + ";label=base")
    s.start()
    s.wait_state(1, "done")
    s.append(s.line("two", code=3, gpus="0") + ";label=sweep-a")
    s.wait_state(2, "failed")
    s.append(s.line("run", gpus="0") + ";label=long")
    s.wait_state(3, "running")
    s.append(s.line("four", gpus="0") + ";label=later")
    wait_for(lambda: len(s.states()) == 4, "four jobs")
    s.cli("submit", "--allowed", "0", "--label", TRAP, "--", "sh", "-c", TRAP)
    s.cli("pause", "1")
    s.cli("hold", "4")
    yield s
    s.end_all()


def run(house: Scheduler, words: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=house.folder, env={**house.environ, **environ}, capture_output=True, text=True, timeout=90
    )


def bash(house: Scheduler, *words: str) -> list[str]:
    """Return the words that bash offers for the last of ``words``."""
    shown = house.folder / "completion.bash"
    if not shown.exists():
        shown.write_text(run(house, [need("bash"), "-c", "gpujob --show-completion; exit $?"]).stdout)
    script = (
        'source ./completion.bash && COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))\n'
        '_gpujob_completion gpujob && printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = run(house, [need("bash"), "--norc", "--noprofile", "-c", script, "bash", "gpujob", *words])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


def fish(house: Scheduler, line: str) -> dict[str, str]:
    """Return the words that fish offers for the end of ``line``, with their descriptions."""
    script = f"gpujob --show-completion | source; complete -C'gpujob {line}'"
    done = run(house, [need("fish"), "--no-config", "-c", script])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return dict(entry.partition("\t")[::2] for entry in done.stdout.splitlines())


def zsh(house: Scheduler, line: str, ready: Callable[[str], object]) -> str:
    """Type ``line`` and TAB into zsh on a terminal.

    Return the terminal's output as soon as ``ready`` accepts the output.
    """
    child, fd = pty.fork()
    if child == 0:
        os.chdir(house.folder)
        os.execve(need("zsh"), ["zsh", "-f", "-i"], {**house.environ, "PS1": "ready> "})
    screen = b""

    def until(found: Callable[[str], object]) -> str:
        nonlocal screen
        end = time.monotonic() + 60
        while not found(screen.decode(errors="replace")):
            left = end - time.monotonic()
            assert left > 0, f"not within 60 s: {screen.decode(errors='replace')!r}"
            if select.select([fd], [], [], left)[0]:
                screen += os.read(fd, 65536)
        return screen.decode(errors="replace")

    try:
        until(lambda text: "ready> " in text)
        load = "autoload -Uz compinit; compinit -u -D; source <(gpujob --show-completion); print load''ed\n"
        os.write(fd, load.encode())
        until(lambda text: "loaded" in text)
        screen = b""
        os.write(fd, line.encode() + b"\t")
        return until(ready)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(fd)


# -- models -----------------------------------------------------------------------------------------------


def test_needs_offers_the_models(house: Scheduler) -> None:
    """Not a name that is shell code."""
    assert bash(house, "needs", "") == ["tiny-7b"]
    assert bash(house, "needs", "--apply", "ti") == ["tiny-7b"]


# -- jobs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "offered"),
    [
        ("cancel", {"3", "4", "5", "long", "later"}),
        ("hold", {"4", "5", "later"}),
        ("release", {"4"}),
        ("retry", {"1", "2", "base", "sweep-a"}),
        ("logs", {"1", "2", "3", "4", "5", "base", "sweep-a", "long", "later"}),
        ("show", {"1", "2", "3", "4", "5", "base", "sweep-a", "long", "later"}),
        ("why", {"1", "2", "3", "4", "5", "base", "sweep-a", "long", "later"}),
        ("wait", {"3", "4", "5", "long", "later"}),
        ("attach", set()),
    ],
)
def test_k09_bash_offers_the_jobs_that_the_verb_applies_to(house: Scheduler, verb: str, offered: set[str]) -> None:
    """K09: Bash offers the ids and labels of the jobs that the verb applies to.

    It leaves out labels that need quoting.
    """
    assert set(bash(house, verb, "")) == offered


def test_k09_bash_completes_prefixes_lists_and_option_values(house: Scheduler) -> None:
    """K09: The completion for bash offers ids and labels, GPUs, environments, option values and verbs.

    It completes a prefix, a list with commas, and the value after `--state=`. Bash itself completes file names.
    """
    assert bash(house, "cancel", "lo") == ["long"]
    assert set(bash(house, "cancel", "3", "l")) == {"long", "later"}
    assert set(bash(house, "jobs", "--state", "")) >= {"pending", "running", "failed", "skipped"}
    assert bash(house, "jobs", "--state", "failed,run") == ["failed,running"]
    assert bash(house, "jobs", "--state", "=", "fa") == ["failed"]  # as bash splits --state=fa
    assert len(bash(house, "jobs", "--state", "=")) == 8
    assert bash(house, "resume", "") == ["1"]
    assert bash(house, "pause", "") == ["0"]
    assert set(bash(house, "submit", "--allowed", "0,")) == {"0,1"}
    assert set(bash(house, "submit", "--gpus", "")) == {"0", "0.25", "0.5", "1", "2"}
    assert set(bash(house, "submit", "--after", "3,")) == {"3,1", "3,2", "3,4", "3,5"}
    assert set(bash(house, "submit", "--conda", "")) == {"torch", "jax"}
    assert set(bash(house, "start", "--cuda-ids", "")) == {"physical", "local", "unset", "auto", "none"}
    assert bash(house, "start", "--conda-mode", "a") == ["auto", "activate"]
    assert bash(house, "start", "--order", "") == ["fifo", "short"]
    assert bash(house, "start", "--watch", "p") == ["poll"]
    assert "time=" in bash(house, "add", "x.py", "--set", "")
    assert bash(house, "queue", "") == ["pause", "resume"]
    assert bash(house, "start", "--jobs-file", "") == [], "bash itself completes files"
    assert (
        "status" in bash(house, "sta")
        and bash(house, "doc") == ["doctor"]
        and bash(house, "help", "scr") == ["screens"]
    )
    assert "--allowed" in bash(house, "submit", "--a")


def test_s15_a_label_that_is_a_secret_is_not_offered(house: Scheduler) -> None:
    """S15: A label that looks like a secret is not offered.

    The error for a mistyped label does not show such a label.
    """
    secret = "hf_s3cr3tValue9xQAbCdEfGhIjKlMnOp123456"
    house.cli("edit", "5", "--label", secret)
    try:
        assert bash(house, "cancel", "hf") == []
        assert secret not in house.cli("cancel", secret[:-1], code=6).stderr
    finally:
        house.cli("edit", "5", "--label", TRAP)
    assert bash(house, "cancel", "lo") == ["long"]


def test_k09_completion_reads_the_scheduler_of_the_state_file_option(house: Scheduler) -> None:
    """K09: Completion reads the scheduler that --state-file names. The option may stand before or after the verb."""
    state_file = str(house.folder / "gpu_scheduler_state.json")
    for words in (["--state-file", state_file, "resume", ""], ["resume", "--state-file", state_file, ""],
                  ["--state-file", "$HOME/gpu_scheduler_state.json", "resume", ""]):  # fmt: skip
        assert bash(house, *words) == ["1"]
    assert bash(house, "--state-file", "/nowhere/state.json", "resume", "") == []


def test_k09_zsh_shows_the_name_of_each_job_and_runs_no_name_as_a_command(house: Scheduler) -> None:
    """K09: zsh shows each job's name beside the job's id. No name or label is run as a command."""
    text = zsh(house, "gpujob cancel ", lambda text: "running long" in text and "later" in text)
    assert "3" in text and "base" not in text
    assert not (house.folder / "trapped").exists()
    zsh(house, "gpujob retry ba", lambda text: "base" in text)


def test_k09_fish_shows_the_name_of_each_job_and_runs_no_name_as_a_command(house: Scheduler) -> None:
    """K09: fish shows each job's name beside the job's id. No name or label is run as a command.

    fish also completes GPUs and states.
    """
    found = fish(house, "cancel ")
    assert set(found) == {"3", "4", "5", "long", "later"}
    assert found["3"].startswith("running long") and found["later"] == "job 4"
    assert set(fish(house, "resume ")) == {"1"} and set(fish(house, "jobs --state fail")) == {"failed"}
    assert "jobs.txt" in fish(house, "start --jobs-file jobs.t"), "files are fish's own"
    assert not (house.folder / "trapped").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_k09_show_completion_prints_a_script_for_the_command_gpujob(house: Scheduler, shell: str) -> None:
    """K09: --show-completion prints a completion script for the command gpujob.

    Even `python -m scheduler --show-completion` prints a script for gpujob, not for python or scheduler.
    """
    done = run(house, [need(shell), "-c", f"{sys.executable} -m scheduler --show-completion; true"])
    assert done.returncode == 0 and "gpujob" in done.stdout and "_GPUJOB_COMPLETE" in done.stdout
    assert "scheduler" not in done.stdout and "main" not in done.stdout


# -- quiet, quick, harmless -------------------------------------------------------------------------------


def ask(folder: Path, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = line.split(" ")
    values = {"_GPUJOB_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    environ = clean()
    environ.update(PYTHONPATH=str(ROOT), XDG_RUNTIME_DIR=str(folder), HOME=str(folder), **values)
    return subprocess.run(
        [sys.executable, "-m", "scheduler"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("damage", ["nothing", "garbage", "newer", "folder", "config", "unknown"])
def test_k09_completion_without_a_usable_store_prints_no_error(tmp_path: Path, damage: str) -> None:
    """K09: Without a usable store, completion offers no jobs or GPUs, prints no error and writes no file."""
    store = tmp_path / ".gpujob" / "store.db"
    if damage != "nothing":
        store.parent.mkdir()
    if damage == "garbage":
        store.write_bytes(os.urandom(9000))
    elif damage == "newer":
        subprocess.run([sys.executable, "-c", f"import sqlite3; sqlite3.connect({str(store)!r}).execute('PRAGMA user_version=99')"], check=True)  # fmt: skip
    elif damage == "folder":
        store.mkdir()
    elif damage == "config":
        (tmp_path / "config.yaml").write_text("nonsense: [")
    before = sorted(tmp_path.rglob("*"))
    for line in ("gpujob cancel ", "gpujob resume ", "gpujob submit --after "):
        done = ask(tmp_path, line, **({"GPUJOB_SET_NONSENSE": "1"} if damage == "unknown" else {}))
        assert (done.stdout.strip(), done.stderr) == ("", ""), line
    assert ask(tmp_path, "gpujob nonsense ").stderr == ""
    assert "failed" in ask(tmp_path, "gpujob jobs --state f").stdout, "what needs no scheduler is offered"
    assert sorted(tmp_path.rglob("*")) == before


def test_k09_completion_offers_the_newest_fifty_jobs(scheduler_with_many: Path) -> None:
    """K09: Completion offers only the newest 50 jobs, the newest first.

    An older job is offered if the word to complete is the beginning of the job's id.
    """
    found = ask(scheduler_with_many, "gpujob cancel ").stdout.split()
    assert found == [str(n) for n in range(300, 250, -1)]
    assert ask(scheduler_with_many, "gpujob cancel 12").stdout.split() == [*map(str, range(129, 119, -1)), "12"]


@pytest.fixture
def scheduler_with_many(tmp_path: Path) -> Path:
    from scheduler.core.gpu import ResourceRequest
    from scheduler.core.job import JobSpec
    from scheduler.store import jobs as rows
    from scheduler.store.database import Database
    from scheduler.store.paths import Places

    places = Places(str(tmp_path / "gpu_scheduler_state.json"))
    places.make()
    database = Database(places)
    with database.writing() as connection:
        for _ in range(300):
            rows.insert(connection, JobSpec(arguments=("true",)), ResourceRequest(1, 1000), "", (), 1.0)
    database.close()
    return tmp_path


def test_k09_completion_gives_up_if_the_scheduler_hangs() -> None:
    """K09: Completion gives up after PATIENCE_S seconds and prints nothing, so that the shell does not hang."""
    code = (
        "import time; from scheduler.cli import shell_completion; shell_completion.PATIENCE_S = 0.2\n"
        "shell_completion.run = lambda words: time.sleep(600); shell_completion.answer([])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("name", completions.CHOICES)
def test_completion_offers_exactly_the_values_that_a_setting_accepts(name: str) -> None:
    """K09: The values offered for a setting are exactly the values that the setting accepts."""
    for value in completions.CHOICES[name]:
        read_option(name, value, "here")
    with pytest.raises(UsageError) as caught:
        read_option(name, "nonsense", "here")
    named = str(caught.value).replace(" or ", ", ").split("must be ")[1].removeprefix("one of ")
    assert named.split(", not ")[0].split(", ") == list(completions.CHOICES[name])
