"""Tests of the command line: help, errors and exit codes of all verbs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from scheduler import command_line
from scheduler.cli.app import app
from tests import fork_server
from tests.environ import clean

ROOT = str(Path(__file__).parents[2])
GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands


def options_of(command: Any) -> list[str]:
    """Return the flags of all options that a Typer command declares."""
    options = [param for param in command.params if param.param_type_name == "option"]
    return [flag for param in options for flag in (*param.opts, *param.secondary_opts)]


def environment(folder: Path) -> dict[str, str]:
    kept = clean("XDG")
    return {
        **kept,
        "PYTHONPATH": ROOT,
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "PYTHONIOENCODING": "utf-8",
    }


def gpujob(folder: Path, *words: str | bytes, **more: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run(list(map(os.fsdecode, words)), folder, {**environment(folder), **more}, "", 60)


# -- the declaration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_command_and_every_option_has_help(verb: str) -> None:
    """P3: Each command and each option has a help text."""
    command = COMMANDS[verb]
    assert (command.help or "").strip().endswith(".")
    for param in command.params:
        if param.param_type_name == "option":
            assert (param.help or "").strip(), param.opts


@pytest.mark.parametrize("name", [f"--{name}" for name in (
    "gpus", "jobs-file", "llm-config", "state-file", "monitor-interval", "state-interval", "max-assign-attempts",
    "assign-retry-wait", "config", "commands-file", "drain", "detach",
)])  # fmt: skip
def test_start_has_the_documented_options(name: str) -> None:
    """S3.1: `start` has the documented options."""
    assert name in options_of(COMMANDS["start"])


# -- exit codes and one line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("stauts", 2, "status"), ("cancle 1", 2, "cancel"), ("xyzzy", 2, "xyzzy"), ("--nope", 2, "--nope"),
        ("status --jsonn", 2, "--json"), ("submit", 2, "COMMAND"), ("add", 2, "SCRIPT"), ("cancel", 2, "JOB"), ("pause", 2, "GPU"),
        ("queue", 2, "pause|resume"), ("pause x", 2, "GPU list"), ("pause 3-1", 2, "1-3"), ("queue stop", 2, "queue pause"),
        ("jobs --state runing", 2, "running"), ("why 99", 6, "there are no jobs"), ("cancel 1", 6, "there are no jobs"), ("show nosuch", 6, "there are no jobs"),
        ("wait 5", 6, "there are no jobs"), ("logs 1", 6, "there are no jobs"), ("submit --gpus a -- x", 2, "number"), ("submit --gpus -1 -- x", 3, "below 0"),
        ("submit --cpu --gpus 1 -- x", 2, "exclude"), ("submit --env A -- x", 2, "NAME=VALUE"), ("submit --time soon -- x", 2, "4h"),
        ("submit --priority x -- x", 2, "--priority"), ("submit --after 7 -- x", 6, "7"), ("add --priority 1.5 a.py", 2, "--priority"),
        ("add --gpus 3-1 a.py", 2, "backwards"), ("add -- -rf", 2, "./-rf"), ("add --args 'x a.py", 2, "quote"), ("status --watch --json x", 2, "x"),
        ("status 5", 2, "write gpujob status --watch 5"), ("status --watch --json", 2, "leave out --json"),
        ("--config nosuch.yaml status", 2, "nosuch.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_prints_one_line_on_stderr_and_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, code: int, text: str
) -> None:
    """S3.41, contract 6, P3: A mistake prints one line on stderr and nothing on stdout.

    The exit code depends on the kind of mistake.
    """
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("GPUJOB", "XDG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    got = command_line.main(line.split())
    out, err = capfd.readouterr()
    errors = [part for part in err.splitlines() if part != "gpujob: no scheduler is running"]
    assert (got, out) == (code, "")
    assert len(errors) == 1 and errors[0].startswith("gpujob: "), err
    assert text in errors[0]


@pytest.mark.parametrize("line", ["stauts", "--nope", "status --jsonn", "pause 3-1"])
def test_a_mistake_prints_no_traceback_in_a_real_process(tmp_path: Path, line: str) -> None:
    """P3: A mistake in a command that runs as a process gives exit code 2 and one line on stderr."""
    ran = gpujob(tmp_path, *line.split())
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", COMMANDS)
def test_verb_help_prints_usage_and_all_options(tmp_path: Path, verb: str) -> None:
    """P3: `VERB --help` prints usage and all options, and creates no file."""
    ran = gpujob(tmp_path, verb, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ("usage: ts " if verb == "ts" else "Usage: gpujob " + verb) in ran.stdout
    for name in options_of(COMMANDS[verb]):
        assert name in ran.stdout
    assert os.listdir(tmp_path) == [], "asking for help makes nothing"


def test_gpujob_help_names_every_command(tmp_path: Path) -> None:
    """P3: `gpujob --help` names every command. `gpujob --version` prints the version."""
    ran = gpujob(tmp_path, "--help")
    assert ran.returncode == 0
    assert all(verb in ran.stdout for verb in COMMANDS)
    assert gpujob(tmp_path, "--version").stdout.startswith("gpujob ")


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    """P3: If the reader closes stdout early, as in `gpujob jobs | head -1`, the exit code is 0 and stderr is empty."""
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "scheduler", "status"], cwd=tmp_path, env=environment(tmp_path), stdout=write,
        stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    os.close(write)
    assert ran.stderr == "gpujob: no scheduler is running\n"
    assert ran.returncode == 0


def test_an_interrupted_command_exits_with_130_and_prints_nothing(tmp_path: Path) -> None:
    """Contract 6: An interrupted command exits with 130 and prints nothing."""
    code = "import sys, scheduler.command_line as f\ndef stop(words): raise KeyboardInterrupt\nf._run = stop\nsys.exit(f.main(['status']))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


# -- add, submit and reading without a daemon -------------------------------------------------------------


def test_add_appends_a_line_to_the_jobs_file_and_prints_it(tmp_path: Path) -> None:
    """S3.6, S3.40: `add` appends a line to the jobs file and prints the line.

    `add --output-file -` only prints the line.
    """
    ran = gpujob(
        tmp_path, "add", "/a.py", "--conda", "e", "--args", "--layers 1,2", "--priority", "-3", "--gpus", "0,1"
    )
    line = '-3,/a.py,e,"--layers 1,2",0,1\n'
    assert (ran.returncode, ran.stdout) == (0, line)
    assert (tmp_path / "jobs.txt").read_text() == line
    ran = gpujob(tmp_path, "add", "/b.py", "--output-file", "-")
    assert ran.stdout == "0,/b.py,,,\n"
    assert (tmp_path / "jobs.txt").read_text() == line
    gpujob(tmp_path, "add", "/b.py", "--output-file", "other.txt")
    assert (tmp_path / "other.txt").read_text() == "0,/b.py,,,\n"


def test_add_refuses_bad_lines_and_unsafe_files(tmp_path: Path) -> None:
    """S3.41, contract 3: `add` refuses an unreadable line, a missing folder, and a jobs file that others can write."""
    (tmp_path / "llm_config.json").write_text('{"models": {"big": 4}}')
    ran = gpujob(tmp_path, "add", "/a.py", "--args", "it's")
    assert ran.returncode == 2 and "quote" in ran.stderr
    ran = gpujob(tmp_path, "add", "/a.py", "--output-file", "nosuch/jobs.txt")
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1
    (tmp_path / "jobs.txt").touch()
    (tmp_path / "jobs.txt").chmod(0o666)
    ran = gpujob(tmp_path, "add", "/a.py")
    assert ran.returncode == 1 and "chmod o-w" in ran.stderr
    assert (tmp_path / "jobs.txt").read_text() == ""


def test_submit_prints_the_id_and_reading_verbs_work_without_a_daemon(tmp_path: Path) -> None:
    """Contract 6: `submit` prints the job's id on stdout. Verbs that only read the store work without a scheduler."""
    ran = gpujob(tmp_path, "submit", "--label", "base", "--", "echo", "a b", "--json")
    assert (ran.returncode, ran.stdout) == (0, "1\n")
    assert "no scheduler is running" in ran.stderr
    for words in (("status",), ("jobs",), ("show", "base"), ("why", "@"), ("show", "1-1")):
        ran = gpujob(tmp_path, *words)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr == "gpujob: no scheduler is running\n"
        assert "1" in ran.stdout


@pytest.mark.parametrize("verb", ["status", "jobs", "show", "add"])
def test_words_that_are_not_utf8_cause_no_traceback(tmp_path: Path, verb: str) -> None:
    """P3, P8: Words that are not UTF-8 cause no traceback.

    The test sets stdout to the strict mode of a locale such as en_US.UTF-8. In this mode, Python cannot print such
    words unchanged.
    """
    assert gpujob(tmp_path, "submit", "--", b"/tmp/jos\xe9", b"\xff").stdout == "1\n"
    words = {"show": ["show", "1"], "add": ["add", b"jos\xe9.py", "--output-file", "-"]}.get(verb, [verb])
    ran = gpujob(tmp_path, *words, PYTHONIOENCODING="utf-8:strict")
    assert "Traceback" not in ran.stderr
    assert ran.returncode == (2 if verb == "add" else 0)
    assert ("cannot write the line: it is not UTF-8" in ran.stderr) is (verb == "add")


@pytest.mark.parametrize("line", ["", "--json", "--state-file x.json", "--json --state-file x.json"])
def test_gpujob_without_a_verb_prints_the_status(tmp_path: Path, line: str) -> None:
    """S3.38: `gpujob` without a verb does the same as `gpujob status`, also with common options and with --json."""
    words = line.split()
    short, long = gpujob(tmp_path, *words), gpujob(tmp_path, "status", *words)
    assert (short.returncode, short.stdout, short.stderr) == (0, long.stdout, long.stderr)


@pytest.mark.parametrize(
    "text", ["echo hi; sleep 1", "a && b", "sleep 5", "ls|wc", "$HOME/x", "no 'such thing'", "/tmp/no such/program"]
)
def test_a_shell_command_in_one_word_is_refused_with_the_correct_spelling(tmp_path: Path, text: str) -> None:
    """P3: A shell command given as one word is refused. The error shows the same command line with `sh -c`."""
    ran = gpujob(tmp_path, "submit", "--", text)
    assert (ran.returncode, ran.stdout) == (2, "") and len(ran.stderr.splitlines()) == 1
    told = shlex.split(ran.stderr.partition("write: gpujob submit -- ")[2])
    assert told == ["sh", "-c", text]
    assert not (tmp_path / ".gpujob").exists()


def test_a_program_whose_name_looks_like_a_shell_command_is_accepted(tmp_path: Path) -> None:
    """P3: An existing program is accepted even if its name looks like a shell command."""
    program = tmp_path / "my program;v2"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gpujob(tmp_path, "submit", "--", str(program)).returncode == 0
    assert gpujob(tmp_path, "submit", "--", "./my program;v2").returncode == 0
    assert gpujob(tmp_path, "submit", "--", "my program;v2", PATH=f"{tmp_path}:{os.environ['PATH']}").returncode == 0
    assert gpujob(tmp_path, "submit", "--", "true", "a; b").returncode == 0


def test_help_and_version_also_work_as_verbs(tmp_path: Path) -> None:
    """P3: `gpujob help` prints the same as `gpujob --help`, and `gpujob version` the same as `gpujob --version`."""
    assert gpujob(tmp_path, "help").stdout == gpujob(tmp_path, "--help").stdout
    assert gpujob(tmp_path, "help", "cancel").stdout == gpujob(tmp_path, "cancel", "--help").stdout
    assert gpujob(tmp_path, "version").stdout == gpujob(tmp_path, "--version").stdout


def test_jobs_state_waiting_lists_pending_jobs(tmp_path: Path) -> None:
    """P3: `jobs --state waiting` lists the jobs that `status` shows as waiting."""
    gpujob(tmp_path, "submit", "--", "true")
    waiting, pending = (gpujob(tmp_path, "jobs", "--state", word).stdout for word in ("waiting", "pending"))
    assert waiting == pending and "true" in waiting


@pytest.mark.parametrize(
    ("verb", "said"), [("stop", "kill PID"), ("squeue", "did you mean status"), ("kill", "gpujob cancel JOB")]
)
def test_the_error_for_a_verb_of_another_program_names_the_right_verb(tmp_path: Path, verb: str, said: str) -> None:
    ran = gpujob(tmp_path, verb)
    assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1


def test_hints_for_verbs_of_other_programs_hide_no_real_verb() -> None:
    from scheduler.cli.verbs import ELSEWHERE

    assert not set(ELSEWHERE) & set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_a_folder_as_state_file_is_refused(tmp_path: Path) -> None:
    """If the state file that a user names is a folder, it is refused. No file is created in the folder or beside it."""
    (tmp_path / "config.yaml").write_text("state_file: inner\n")
    (tmp_path / "inner").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for ran in (
        gpujob(tmp_path, "start", "--gpus", "1"),
        gpujob(tmp_path, "config", "check"),
        gpujob(tmp_path, "status", "--state-file", "inner"),
        gpujob(tmp_path, "status", GPUJOB_STATE_FILE="/"),
    ):
        assert ran.returncode == 2 and "is a folder" in ran.stderr, ran
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_program_name_is_refused(tmp_path: Path) -> None:
    ran = gpujob(tmp_path, "submit", "--", "")
    assert ran.returncode == 2 and "the name of the program is empty" in ran.stderr


def test_p3_errors_in_a_removed_folder_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """P3: If the current folder was removed, each verb that needs it prints one line that names the folder.

    The error of the kernel, "No such file or directory", does not name the folder.
    """
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("GPUJOB_STATE_FILE", "GPUJOB_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    here.rmdir()
    away = f"submit --state-file {tmp_path}/s.json -- true"
    for line in (
        "status", "jobs", "submit -- true", away, "add x.py", "start --gpus 1", "doctor", "config show", "recover",
        "logs 1", "wait", "cancel 1", "pause 0", "reset", "screens",
    ):  # fmt: skip
        assert command_line.main(line.split()) == 1, line
        said = capsys.readouterr()
        assert said.out == "" and said.err.endswith(
            f"the current folder was removed: {here}; cd to another folder\n"
        ), line
        assert said.err.count("\n") == 1, said.err
    here.mkdir()
    assert command_line.main(["status"]) == 1 and "cd into the new folder of this name" in capsys.readouterr().err
    assert command_line.main(["status", "--state-file", f"{tmp_path}/s.json"]) == 0, "which needs no folder"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the package folder of a copy of the program. The test may damage this copy."""
    shutil.copytree(
        Path(ROOT, "scheduler"), tmp_path / "copy" / "scheduler", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path / "copy" / "scheduler"


@pytest.mark.parametrize(("file", "words"), [("store/database.py", "status"), ("core/errors.py", "doctor")])
def test_p3_a_missing_module_of_the_program_prints_one_line(
    copied: Path, tmp_path: Path, file: str, words: str
) -> None:
    """P3: If a module of the program is missing, a command prints one line on stderr and exits with 1.

    A module can be missing after an interrupted upgrade.
    """
    (copied / file).unlink()
    done = from_copy(copied, tmp_path, *words.split())
    module = file.removesuffix(".py").replace("/", ".")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"gpujob: cannot load a part of gpujob: No module named 'scheduler.{module}'; install gpujob again\n"
    )


def from_copy(copied: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**environment(folder), "PYTHONPATH": str(copied.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "scheduler", *words], cwd=folder, env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("verb", ["status", "start", "show", "add"])
def test_e11_a_command_without_a_free_descriptor_prints_one_line(tmp_path: Path, verb: str) -> None:
    """P3: If no file descriptor is free to load modules, a command prints one line and no traceback."""
    program = (
        "import resource, sys; from scheduler import command_line; import scheduler.core.errors, scheduler.system.terminal_text;"
        " resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); sys.exit(command_line.main([sys.argv[1], *sys.argv[2:]]))"
    )
    words = [verb, *({"show": ["1"], "add": ["x.py"]}.get(verb, []))]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be loaded: " in done.stderr or "Too many open files" in done.stderr
