"""Tests of the facts about a job that `show` and the web page show."""

from __future__ import annotations

from scheduler.cli.show import _facts
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.views.job_facts import job_facts

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nc2VjcmV0\nbW9yZSBvZiBpdA==\n-----END OPENSSH PRIVATE KEY-----"


def test_a_secret_of_several_lines_is_masked_completely() -> None:
    """S15: A secret of several lines is masked completely, also in `show`, which prints a text line by line."""
    job = Job(1, JobSpec(arguments=("true",), info=f"first line\n{KEY}\nlast line"), ResourceRequest(0, 0))
    for text in ("\n".join(_facts(job, None)), "\n".join(fact.text for fact in job_facts(job))):
        assert "first line" in text and "last line" in text
        assert "c2VjcmV0" not in text and "bW9yZSBvZiBpdA==" not in text


def test_a_commands_file_job_shows_the_command_that_ran() -> None:
    """For a job of a commands file, the facts contain the command that was run.

    If `{gpus}` was replaced in the command, the facts also contain the command as it was written.
    """
    spec = JobSpec(source="commands", arguments=("sh", "-c", "python t.py --gpu {gpus}"))
    job = Job(1, spec, ResourceRequest(1, 1000), state=JobState.RUNNING, argv=("sh", "-c", "python t.py --gpu 1"))
    told = {fact.name: fact.text for fact in job_facts(job)}
    assert (told["command"], told["as written"]) == ("python t.py --gpu 1", "python t.py --gpu {gpus}")
    same = Job(2, JobSpec(source="commands", arguments=("sh", "-c", "a | b")), ResourceRequest(0, 0))
    told = {fact.name: fact.text for fact in job_facts(same)}
    assert told["command"] == "a | b" and "as written" not in told


def test_facts_without_a_value_are_not_shown() -> None:
    job = Job(1, JobSpec(arguments=("true",)), ResourceRequest(1, 500))
    assert {fact.name for fact in job_facts(job)} == {"command", "from", "priority", "need", "allowed GPUs"}
