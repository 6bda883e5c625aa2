"""The entry point: the fast parser reads each command line as the Typer application does; errors and exit codes."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler import entrypoint
from scheduler.cli import add as adding
from scheduler.cli import control, serve, show
from scheduler.cli.app import app
from scheduler.core.config import OPTIONS
from scheduler.core.job_options import JOB_OPTIONS
from tests import fork_server

ROOT = str(Path(__file__).parents[2])
GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands
FUNCTIONS = {
    "add": adding.add, "submit": adding.submit, "status": show.status, "jobs": show.jobs, "why": show.why,
    "hold": control.hold, "release": control.release, "first": control.first, "swap": control.swap,
    "cancel": control.cancel, "retry": control.retry, "pause": control.pause, "resume": control.resume, "wait": control.wait,
    "start": serve.start,
}  # fmt: skip


def options_of(command: Any) -> dict[str, tuple[str, str]]:
    """Return the options that a Typer command declares, in the form of `entrypoint.HOT`."""
    found = {}
    for param in command.params:
        if param.param_type_name == "option":
            kind = entrypoint.FLAG if param.is_flag else entrypoint.MANY if param.multiple else entrypoint.ONE
            for name in param.opts:
                found[name] = (param.name, kind)
            for name in param.secondary_opts:
                found[name] = (param.name, entrypoint.OFF)
    return found


def arguments_of(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "argument"]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUJOB", "XDG"))}
    return {
        **kept,
        "PYTHONPATH": ROOT,
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "PYTHONIOENCODING": "utf-8",
    }


def gpujob(folder: Path, *words: str | bytes, **more: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run(list(map(os.fsdecode, words)), folder, {**environment(folder), **more}, "", 60)


# -- the two declarations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", entrypoint.HOT)
def test_the_quick_door_knows_the_declared_options_with_their_kinds(verb: str) -> None:
    """Contract 6: The fast parser has the options that Typer declares, except `status --watch`.

    `status --watch` is left out because scripts do not call it in loops.
    """
    declared = options_of(COMMANDS[verb])
    quick = entrypoint.options_of(verb)
    left_out = {"--watch"} if verb == "status" else set()
    assert quick == {name: option for name, option in declared.items() if name not in left_out}


@pytest.mark.parametrize("verb", entrypoint.HOT)
def test_the_quick_door_takes_as_many_words_as_are_declared(verb: str) -> None:
    """Contract 6: The fast parser accepts as many words besides the options as Typer declares."""
    takes = entrypoint.HOT[verb][1]
    arguments = arguments_of(COMMANDS[verb])
    if takes == "none":
        assert all(not argument.required for argument in arguments)
        return
    (argument,) = arguments
    assert (argument.nargs, argument.required) == {
        "one": (1, True), "some": (-1, True), "rest": (-1, True), "any": (-1, False)
    }[takes]  # fmt: skip
    assert COMMANDS[verb].context_settings.get("allow_interspersed_args", True) is (takes != "rest")


@pytest.mark.parametrize("verb", entrypoint.HOT)
def test_the_quick_doors_values_are_parameters_of_the_verbs_function(verb: str) -> None:
    """Each option of the fast parser sets a parameter of the verb's function, a setting, or an option of a job."""
    function = FUNCTIONS[verb]
    assert entrypoint._hot(verb) is function
    known = inspect.signature(function).parameters
    for target, kind in entrypoint.options_of(verb).values():
        if target not in known and verb in ("start", "submit"):  # a setting, an option of a job
            assert target in (OPTIONS if verb == "start" else JOB_OPTIONS)
            continue
        assert target in known
        default = known[target].default
        assert {
            entrypoint.FLAG: default is False,
            entrypoint.MANY: default == (),
            entrypoint.ONE: default in ("", None, "0"),
        }[kind]


@pytest.mark.parametrize("verb", entrypoint.HOT)
def test_the_quick_doors_defaults_are_the_declared_ones(verb: str) -> None:
    """Contract 6: An option that is not given has the same default in the fast parser and in Typer."""
    known = inspect.signature(FUNCTIONS[verb]).parameters
    for param in COMMANDS[verb].params:
        if param.param_type_name == "option" and param.name in known and param.name not in ("watch",):
            assert known[param.name].default == (
                param.default or ({"env": (), "pairs": ()}.get(param.name, param.default))
            ), param.name


def test_the_common_options_stand_before_the_verb_as_well() -> None:
    """S3.1: The common options can be given before the verb."""
    declared = options_of(GROUP)
    assert {name: declared[name] for name in entrypoint.COMMON} == entrypoint.COMMON


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
def test_start_takes_the_options_of_its_documents(name: str) -> None:
    """S3.1: `start` has the documented options."""
    assert name in options_of(COMMANDS["start"])


# -- the same reading -------------------------------------------------------------------------------------


def declared_reading(words: list[str]) -> tuple[str, list[str], dict[str, Any]]:
    """Parse a command line with Typer: return verb, words, and the options that differ from their defaults."""
    outer = GROUP.make_context("gpujob", list(words))
    verb, command, rest = GROUP.resolve_command(
        outer, outer.args if _protected(outer) is None else [*_protected(outer), *outer.args]
    )
    inner = command.make_context(verb, list(rest), parent=outer)
    said: list[str] = []
    for argument in arguments_of(command):
        value = inner.params[argument.name]
        said += (
            list(value)
            if isinstance(value, (list, tuple))
            else [value]
            if value not in (None, "") or (argument.nargs == 1 and argument.required)
            else []
        )
    values: dict[str, Any] = {}
    for param in command.params:
        if param.param_type_name == "option":
            value = inner.params[param.name]
            if (value not in (None, False, "", [], ()) or (param.name == "screen" and value is False)) and not (
                param.name == "priority" and value == "0"
            ):
                values[param.name] = tuple(value) if isinstance(value, (list, tuple)) else value
    for name in ("state_file", "config"):
        value = values.get(name) or outer.params[name]
        if value:
            values[name] = value
    return verb, said, values


def _protected(context: Any) -> list[str] | None:
    found = getattr(context, "_protected_args", None)
    return found if found else None


def said(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if (value not in ("", False, ()) or (name, value) == ("screen", False)) and (name, value) != ("priority", "0")
    }


CASES = [
    "add a.py",
    "add a.py --gpus 0,1 --args=--x",
    "add --args --layers a.py",
    "--state-file s add a.py --priority -5",
    "add a.py --state-file s --config c",
    "add -- -a.py",
    "add -",
    "submit echo hi",
    "submit -- echo hi",
    "submit --gpus 0.5 --env A=1 --env B=2 --cpu -- echo --gpus 1",
    "submit echo --gpus 1 -- x",
    "submit -- -- x",
    "submit --label= --wait echo",
    "submit --priority -1 sleep 1",
    "--config c submit --time 4h --after-ok 1,2 x",
    "status",
    "status --json",
    "--state-file=s status --json --state-file=t",
    "jobs --state pending,running --json",
    "jobs --state a --state b",
    "why 3",
    "why -- -3",
    "cancel 1 2 --state-file s 3",
    "cancel @",
    "retry 3-9",
    "pause 0-3 5",
    "resume 1",
    "resume 1 --force --state-file s",
    "resume --force 0-2",
    "wait",
    "wait 1 2 --timeout 5m",
    "wait --timeout=1 -- 3",
    "start",
    "--state-file s start --gpus 2 --drain --no-screen",
    "start --screen --no-screen --keep-logs=90d --config c --detach",
    "start --no-screen --screen --gpus=1 --gpus=2 --state-file=",
]


@pytest.mark.parametrize("line", CASES)
def test_the_quick_door_reads_what_the_declared_one_reads(line: str) -> None:
    """Contract 6: The fast parser and Typer read these command lines equally."""
    words = line.split()
    quick = entrypoint.parse(words)
    assert quick is not None
    verb, rest, values = quick
    assert (verb, rest, said(values)) == declared_reading(words)


@pytest.mark.parametrize(
    "line",
    [
        "", "--help", "status --help", "start x", "start --screen=1", "start --help", "show 3", "logs 3", "demo", "--version", "stauts", "status --jsonn",
        "status --json=1", "status 5", "status --watch", "add", "add a b", "submit", "submit --", "cancel", "why 1 2", "pause -1",
        "submit --gpus", "jobs --state", "-- status", "queue pause", "-x status", "add -x a.py",
    ],
)  # fmt: skip
def test_help_mistakes_and_other_verbs_go_to_the_declared_door(line: str) -> None:
    """P3: The fast parser leaves help, mistakes and all other verbs to Typer, so that errors have one form."""
    assert entrypoint.parse(line.split()) is None


TOKENS = st.sampled_from(
    [*entrypoint.HOT, "--screen", "--no-screen", "--drain", "--settle", "--", "-", "-1", "x", "1", "", "a.py", "--state-file", "--state-file=s", "--config", "--json", "--json=1",
     "--gpus", "--gpus=1", "--env", "--env=A=1", "--wait", "--cpu", "--state", "--timeout", "--args", "--args=-x", "--priority",
     "--help", "--nope", "-h", "--watch"]
)  # fmt: skip


@given(words=st.lists(TOKENS, max_size=7), verb=st.sampled_from(list(entrypoint.HOT)))
@example(words=["--state-file", "--", "x"], verb="add")
@example(words=["--env", "--env", "--", "x"], verb="submit")
def test_whatever_the_quick_door_takes_the_declared_one_reads_alike(words: list[str], verb: str) -> None:
    """Contract 6: The fast parser accepts no command line that Typer refuses or reads differently."""
    line = [verb, *words]
    quick = entrypoint.parse(line)
    if quick is None:
        return
    name, rest, values = quick
    assert (name, rest, said(values)) == declared_reading(line)


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
        ("--config nosuch.yaml status", 2, "nosuch.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_on_stderr_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, code: int, text: str
) -> None:
    """S3.41, contract 6, P3: A mistake prints one line on stderr and nothing on stdout; the exit code fits its kind."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("GPUJOB", "XDG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    got = entrypoint.main(line.split())
    out, err = capfd.readouterr()
    errors = [part for part in err.splitlines() if part != "gpujob: no scheduler is running"]
    assert (got, out) == (code, "")
    assert len(errors) == 1 and errors[0].startswith("gpujob: "), err
    assert text in errors[0]


@pytest.mark.parametrize("line", ["stauts", "--nope", "status --jsonn", "pause 3-1"])
def test_a_mistake_is_no_traceback_in_a_process_of_its_own(tmp_path: Path, line: str) -> None:
    """P3: A mistake in a real process gives exit code 2 and one line on stderr."""
    ran = gpujob(tmp_path, *line.split())
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_works_for_every_command(tmp_path: Path, verb: str) -> None:
    """P3: `VERB --help` prints usage and all options, and creates no file."""
    ran = gpujob(tmp_path, verb, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ("usage: ts " if verb == "ts" else "Usage: gpujob " + verb) in ran.stdout
    for name in options_of(COMMANDS[verb]):
        assert name in ran.stdout
    assert os.listdir(tmp_path) == [], "asking for help makes nothing"


def test_help_of_the_whole_names_every_command(tmp_path: Path) -> None:
    """P3: `gpujob --help` names every command; --version prints the version."""
    ran = gpujob(tmp_path, "--help")
    assert ran.returncode == 0
    assert all(verb in ran.stdout for verb in COMMANDS)
    assert gpujob(tmp_path, "--version").stdout.startswith("gpujob ")


def test_an_output_that_is_closed_early_is_no_error(tmp_path: Path) -> None:
    """P3: A closed stdout, as in `gpujob jobs | head -1`, is no error: exit code 0, no message."""
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "scheduler", "status"], cwd=tmp_path, env=environment(tmp_path), stdout=write,
        stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    os.close(write)
    assert ran.stderr == "gpujob: no scheduler is running\n"
    assert ran.returncode == 0


def test_an_interrupt_ends_with_130_and_says_nothing(tmp_path: Path) -> None:
    """Contract 6: An interrupted command exits with 130 and prints nothing."""
    code = "import sys, scheduler.entrypoint as f\ndef stop(words): raise KeyboardInterrupt\nf._run = stop\nsys.exit(f.main(['status']))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


# -- add, submit and reading without a daemon -------------------------------------------------------------


def test_add_writes_a_line_and_prints_it(tmp_path: Path) -> None:
    """S3.6, S3.40: `add` appends a line to the jobs file and prints it; `--output-file -` only prints it."""
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


def test_submit_prints_the_id_and_reading_verbs_need_no_daemon(tmp_path: Path) -> None:
    """Contract 6: `submit` prints the job's id on stdout; reading verbs work without a scheduler."""
    ran = gpujob(tmp_path, "submit", "--label", "base", "--", "echo", "a b", "--json")
    assert (ran.returncode, ran.stdout) == (0, "1\n")
    assert "no scheduler is running" in ran.stderr
    for words in (("status",), ("jobs",), ("show", "base"), ("why", "@"), ("show", "1-1")):
        ran = gpujob(tmp_path, *words)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr == "gpujob: no scheduler is running\n"
        assert "1" in ran.stdout


@pytest.mark.parametrize("verb", ["status", "jobs", "show", "add"])
def test_words_that_are_no_utf8_are_shown_somehow(tmp_path: Path, verb: str) -> None:
    """P3, P8: Words that are not UTF-8 cause no traceback, though stdout is strict in a locale like en_US.UTF-8."""
    assert gpujob(tmp_path, "submit", "--", b"/tmp/jos\xe9", b"\xff").stdout == "1\n"
    words = {"show": ["show", "1"], "add": ["add", b"jos\xe9.py", "--output-file", "-"]}.get(verb, [verb])
    ran = gpujob(tmp_path, *words, PYTHONIOENCODING="utf-8:strict")
    assert "Traceback" not in ran.stderr
    assert ran.returncode == (2 if verb == "add" else 0)
    assert ("cannot write the line: it is not UTF-8" in ran.stderr) is (verb == "add")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {}),
        ("--json", {"json": True}),
        ("--state-file x --config=y", {"state_file": "x", "config": "y"}),
        ("--json --state-file x", {"json": True, "state_file": "x"}),
    ],
)
def test_without_a_verb_it_is_the_status(tmp_path: Path, line: str, values: dict[str, Any]) -> None:
    """S3.38: `gpujob` without a verb is `gpujob status`, also with common options and --json."""
    assert entrypoint.bare(line.split()) == ("status", [], values)
    if "config" not in values:
        quick, told = gpujob(tmp_path, *line.split()), gpujob(tmp_path, "status", *line.split())
        assert (quick.returncode, quick.stdout, quick.stderr) == (0, told.stdout, told.stderr)


@pytest.mark.parametrize("line", ["status", "--help", "--state-file", "--json=1", "--nope", "--", "x", "--json x"])
def test_anything_else_is_not_the_bare_status(line: str) -> None:
    """P3: A command line with a verb, a mistake or --help is not read as `status` without a verb."""
    assert entrypoint.bare(line.split()) is None


@pytest.mark.parametrize(
    "text", ["echo hi; sleep 1", "a && b", "sleep 5", "ls|wc", "$HOME/x", "no 'such thing'", "/tmp/no such/program"]
)
def test_a_shell_text_is_no_program(tmp_path: Path, text: str) -> None:
    """P3: A shell command given as one word is refused; the error shows the command line with `sh -c` that runs it."""
    ran = gpujob(tmp_path, "submit", "--", text)
    assert (ran.returncode, ran.stdout) == (2, "") and len(ran.stderr.splitlines()) == 1
    told = shlex.split(ran.stderr.partition("write: gpujob submit -- ")[2])
    assert told == ["sh", "-c", text]
    assert not (tmp_path / ".gpujob").exists()


def test_a_program_whose_name_looks_like_a_shell_text_is_one(tmp_path: Path) -> None:
    """P3: An existing program is accepted even if its name looks like a shell command."""
    program = tmp_path / "my program;v2"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gpujob(tmp_path, "submit", "--", str(program)).returncode == 0
    assert gpujob(tmp_path, "submit", "--", "./my program;v2").returncode == 0
    assert gpujob(tmp_path, "submit", "--", "my program;v2", PATH=f"{tmp_path}:{os.environ['PATH']}").returncode == 0
    assert gpujob(tmp_path, "submit", "--", "true", "a; b").returncode == 0


def test_help_and_version_are_verbs_too(tmp_path: Path) -> None:
    """P3: `help` and `version` as verbs print what --help and --version print."""
    assert gpujob(tmp_path, "help").stdout == gpujob(tmp_path, "--help").stdout
    assert gpujob(tmp_path, "help", "cancel").stdout == gpujob(tmp_path, "cancel", "--help").stdout
    assert gpujob(tmp_path, "version").stdout == gpujob(tmp_path, "--version").stdout


@pytest.mark.parametrize(
    ("verb", "said"), [("stop", "kill PID"), ("squeue", "did you mean status"), ("kill", "gpujob cancel JOB")]
)
def test_words_of_other_programs_are_answered(tmp_path: Path, verb: str, said: str) -> None:
    ran = gpujob(tmp_path, verb)
    assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") == 1


def test_no_word_of_other_programs_hides_a_verb() -> None:
    from scheduler.cli.verbs import ELSEWHERE

    assert not set(ELSEWHERE) & set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_a_folder_is_no_state_file(tmp_path: Path) -> None:
    """A folder given as the state file is refused, and no file is created in it or beside it."""
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


def test_a_program_without_a_name_is_refused(tmp_path: Path) -> None:
    ran = gpujob(tmp_path, "submit", "--", "")
    assert ran.returncode == 2 and "the name of the program is empty" in ran.stderr


def test_p3_in_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """P3: In a removed current folder each verb prints one line that names the folder.

    The kernel's error, "No such file or directory", names no folder.
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
        assert entrypoint.main(line.split()) == 1, line
        said = capsys.readouterr()
        assert said.out == "" and said.err.endswith(
            f"the current folder was removed: {here}; cd to another folder\n"
        ), line
        assert said.err.count("\n") == 1, said.err
    here.mkdir()
    assert entrypoint.main(["status"]) == 1 and "cd into the new folder of this name" in capsys.readouterr().err
    assert entrypoint.main(["status", "--state-file", f"{tmp_path}/s.json"]) == 0, "which needs no folder"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the package folder of a copy of the program, which a test may damage."""
    shutil.copytree(
        Path(ROOT, "scheduler"), tmp_path / "copy" / "scheduler", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path / "copy" / "scheduler"


@pytest.mark.parametrize(("file", "words"), [("store/database.py", "status"), ("core/errors.py", "doctor")])
def test_p3_a_file_of_the_program_that_is_missing_is_one_line(
    copied: Path, tmp_path: Path, file: str, words: str
) -> None:
    """P3: A missing module, as after an interrupted upgrade, gives one line on stderr and exit code 1."""
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
def test_e11_no_descriptor_is_left_to_load_the_program_with(tmp_path: Path, verb: str) -> None:
    """P3: Without a free file descriptor to load modules, a command prints one line and no traceback."""
    program = (
        "import resource, sys; from scheduler import entrypoint; import scheduler.core.errors, scheduler.system.terminal_text;"
        " resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); sys.exit(entrypoint.main([sys.argv[1], *sys.argv[2:]]))"
    )
    words = [verb, *({"show": ["1"], "add": ["x.py"]}.get(verb, []))]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be loaded: " in done.stderr or "Too many open files" in done.stderr
