"""The line about a failure in tables."""

from dataclasses import replace

import pytest

from scheduler.core.endings import Rules, after_run
from scheduler.core.failure_card import LONGEST, failure_line
from scheduler.core.failure_clues import last_error
from scheduler.core.job import Failure, Job, JobState, Outcome
from scheduler.core.states import Move
from tests.builders import OOM, a_job


def failed(found: Failure | None, need: str = "0.25", **changes: object) -> Job:
    fixed = {"state": JobState.FAILED, "outcome": Outcome.EXIT, "exit_code": 1, "log_finding": found}
    return a_job(need=need, **{**fixed, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "need", "line"),
    [
        (Failure("oom", "CUDA out of memory", "", 31 << 10, 20 << 10), "0.25", "oom: asked 0.25 (20 GiB), peaked at 31 GiB"),
        (Failure("oom", "CUDA out of memory", "", 31 << 10, None), "2", "oom: asked 2, peaked at 31 GiB"),
        (Failure("oom", "CUDA out of memory", "", 31 << 10, None), "0", "oom: had no GPU, peaked at 31 GiB"),
        (Failure("oom", "CUDA  out of\nmemory", ""), "1", "oom: CUDA out of memory"),
        (Failure("shape", "ValueError: sizes", "…"), "1", "shape: ValueError: sizes"),
        (Failure("license", "", "ask the admins", error="RuntimeError: no seat"), "1", "license: RuntimeError: no seat"),
        (Failure("license", "", "ask the admins"), "1", "license: ask the admins"),
        (Failure("time_limit"), "1", "time_limit: it reached its time limit"),
        (Failure("mine"), "1", "mine"),
        (Failure("network", "GET https://a:pw123456@h/ failed"), "1", "network: GET https://a:***@h/ failed"),
        (None, "1", ""),
    ],
)  # fmt: skip
def test_the_line_of_a_failed_job_names_its_class(found: Failure | None, need: str, line: str) -> None:
    """The class comes first; then the memory of a job that ran out of it, or else the line that tells the cause."""
    assert failure_line(failed(found, need)) == line


def test_the_line_is_short() -> None:
    """A long line is cut."""
    line = failure_line(failed(Failure("traceback", "x" * 300)))
    assert len(line) == LONGEST and line.endswith("…")


def test_a_job_that_is_tried_again_has_the_note_of_its_retry() -> None:
    """The notes of all retries for a cause are recognized; other notes, and failures of ended jobs, are not shown."""
    rules = Rules(oom_retries=2, most_mib=lambda job: 100)
    runs = [
        after_run(failed(OOM, state=JobState.RUNNING), rules),
        after_run(failed(OOM, "0.001", state=JobState.RUNNING, vram_mib=10), rules),
        after_run(failed(None, state=JobState.RUNNING), replace(rules, gpu_fault=lambda job: "GPU 0 reported XID 79")),
    ]
    for ending in runs:
        assert ending.how is Move.RETRY_SCHEDULED
        for state in (JobState.PENDING, JobState.RUNNING, JobState.DONE):
            job = a_job(state=state, notes=("before", ending.why, "after"))
            assert failure_line(job) == ending.why[: LONGEST - 1] + (
                "…" if len(ending.why) > LONGEST else ending.why[LONGEST - 1 :]
            )
    assert failure_line(a_job(state=JobState.DONE, notes=("a note",), log_finding=OOM)) == ""
    note = "oom: asked 0.25 (20 GiB), peaked at 31 GiB; tried again with 0.5"
    assert failure_line(a_job(state=JobState.RUNNING, notes=(note,))) == note


TRACE = 'Traceback (most recent call last):\n  File "t.py", line 2, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (f"{TRACE}ValueError: bad size\n", "ValueError: bad size"),
        (f"{TRACE}ValueError: bad size\n{TRACE}subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.\n",
         "ValueError: bad size"),
        (f"{TRACE}KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACE}OSError: b\n", "OSError: b"),
        (f"{TRACE}ValueError: {'x' * 400}\n", "ValueError: " + "x" * 288),
        ("ValueError: no traceback\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_last_line_of_the_traceback_is_found(log: str, error: str) -> None:
    """Exceptions that only report another one are left out; the text has at most 300 characters."""
    assert last_error(log) == error
