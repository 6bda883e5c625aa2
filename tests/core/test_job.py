"""Tests of JobSpec (it is stored as JSON and read back unchanged, and has a short name for display) and of errors."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.errors import NoDaemon, NoGpuData, NotFound, Refused, SchedulerError, UsageError
from scheduler.core.job import JobSpec
from tests.builders import a_job, a_spec

WORDS = st.lists(st.text(max_size=5), max_size=3).map(tuple)
IDS = st.lists(st.integers(0, 99), max_size=3).map(tuple)
SPECS = st.builds(
    JobSpec,
    source=st.sampled_from(["line", "commands", "submit"]),
    script=st.text(max_size=5),
    arguments=WORDS,
    conda_env=st.text(max_size=5),
    priority=st.integers(-9, 9),
    allowed=st.one_of(st.none(), IDS),
    gpus=st.sampled_from(["", "0.5", "2x0.5"]),
    after=IDS,
    after_ok=IDS,
    vram_mib=st.one_of(st.none(), st.integers(0, 10**6)),
    time_limit_s=st.one_of(st.none(), st.floats(0, 1e6)),
    retries=st.integers(0, 5),
    umask=st.one_of(st.none(), st.integers(0, 0o777)),
)


@given(SPECS)
def test_a_job_spec_can_be_read_back_from_json(spec: JobSpec) -> None:
    assert JobSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec


def test_a_job_spec_stores_only_values_that_differ_from_the_default() -> None:
    assert JobSpec().as_dict() == {}
    assert a_spec(arguments=("--lr", "1")).as_dict() == {"script": "/data/train.py", "arguments": ["--lr", "1"]}


def test_what_a_newer_version_added_is_left_out() -> None:
    assert JobSpec.from_dict({"script": "/x", "colour": "red"}) == JobSpec(script="/x")


def test_a_job_spec_has_no_field_for_environment_values() -> None:
    assert not {f.name for f in fields(JobSpec)} & {"environment", "environ", "env"}


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (a_spec(), "train.py"),
        (a_spec(label="base"), "base"),
        (JobSpec(arguments=("/bin/sleep", "1")), "sleep"),
        (JobSpec(), ""),
    ],
)
def test_the_shown_name_of_a_job_is_its_label_script_or_command(spec: JobSpec, name: str) -> None:
    assert spec.shown_name == name


def test_the_key_of_an_attempt_is_job_id_and_attempt_number() -> None:
    assert a_job(12, attempt=3).attempt_key == "12.3"


@pytest.mark.parametrize(
    ("kind", "code"), [(SchedulerError, 1), (UsageError, 2), (Refused, 3), (NoGpuData, 4), (NoDaemon, 5), (NotFound, 6)]
)
def test_an_error_names_place_problem_and_remedy_and_has_an_exit_code(kind: type[SchedulerError], code: int) -> None:
    """S3.41: The text of an error names place, problem and remedy, and each kind of error has its exit code."""
    assert str(kind("no such thing", where="jobs.txt:7", do="write it")) == "jobs.txt:7: no such thing; write it"
    assert str(kind("no such thing")) == "no such thing"
    assert kind("x").exit_code == code
