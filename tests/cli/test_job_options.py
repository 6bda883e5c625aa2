"""Tests of job options (JOB_OPTIONS): an option means the same on the command line, in a jobs file and in the API."""

from __future__ import annotations

import pytest
import typer

from scheduler.cli import completions
from scheduler.cli.app import app
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.job import JobSpec
from scheduler.core.job_options import (
    EDITABLE,
    JOB_OPTIONS,
    LINE_KEYS,
    JobOption,
    changed_fields,
    read_line_keys,
    read_options,
)
from scheduler.intake.jobs_file import LineContext, parse
from scheduler.web.commands import SUBMITTED
from scheduler.web.pages import FORM_OPTIONS

OPTIONS = pytest.mark.parametrize("option", JOB_OPTIONS.values(), ids=lambda option: option.name)


def flags_of(verb: str) -> dict[str, str]:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return {name: param.help for param in command.params for name in param.opts if name.startswith("--")}


@OPTIONS
def test_each_job_option_names_a_job_field_or_the_key_that_it_sets(option: JobOption) -> None:
    key, text = option.sets
    assert (option.field in JobSpec.__init__.__kwdefaults__) != bool(key)  # type: ignore[misc]
    if key:
        LINE_KEYS[key].read(text)
    assert option.help.endswith(".")
    assert not option.completion or callable(getattr(completions, option.completion))
    assert bool(option.key) == bool(option.example) == bool(option.meaning)


@OPTIONS
def test_a_submit_option_has_the_same_text_on_the_command_line_and_in_the_api(option: JobOption) -> None:
    described = SUBMITTED["properties"].get(option.name, {}).get("description")
    assert option.submit == (described == option.help) == (flags_of("submit").get(option.flag) == option.help)
    assert option.edit == (option.flag in flags_of("edit"))
    assert not option.form or (option.submit and option in FORM_OPTIONS)


@pytest.mark.parametrize("option", LINE_KEYS.values(), ids=lambda option: option.key)
def test_a_key_of_a_jobs_file_line_gives_the_same_value_as_the_option(option: JobOption) -> None:
    parsed = parse(f"0,/a.py,,;{option.key}={option.example}", LineContext("/jobs"))
    assert parsed is not None
    assert getattr(parsed.spec, option.field) != getattr(JobSpec(), option.field)
    values = read_line_keys([(option.key, option.example.strip('"'))])
    assert values[option.field] == getattr(parsed.spec, option.field)
    if option.submit:
        assert read_options({option.name: option.example.strip('"')}) == values


def test_a_flag_sets_the_key_of_its_job_option() -> None:
    given = {"cpu": "yes", "no_output": "yes", "stderr_apart": "yes", "gzip": "yes", "label": ""}
    assert read_options(given) == {"gpus": "0", "output": "none", "stderr_apart": True, "gzip": True}
    with pytest.raises(UsageError, match="--cpu and --gpus exclude each other"):
        read_options({"cpu": "yes", "gpus": "1"})


def test_an_error_names_an_option_as_the_caller_wrote_it() -> None:
    for named, called in ((None, "--after-ok"), (str, "after_ok")):
        with pytest.raises(UsageError, match=f"^{called}: 'x' is not a list of job ids; write 12"):
            read_options({"after_ok": "x"}, *([named] if named else []))
    with pytest.raises(UsageError, match=r"^--label: must be valid UTF-8"):
        read_options({"label": "\udcff"})


def test_an_empty_value_in_edit_restores_the_default_of_a_field() -> None:
    assert changed_fields(dict.fromkeys((option.name for option in EDITABLE.values()), "")) == {
        name: getattr(JobSpec(), name) for name in EDITABLE
    }
    assert changed_fields({"priority": "-5", "allowed": "any", "time": "90s"}) == {
        "priority": -5, "allowed": None, "time_limit_s": 90.0
    }  # fmt: skip
    with pytest.raises(SchedulerError):
        changed_fields({"gpus": "none"})
