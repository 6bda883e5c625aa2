"""Tests of runtime estimates: the estimate for a job is the job's time limit.

For a job without a time limit, the estimate is the median of similar runs. If no similar job has run, the estimate is
unknown.
"""

from __future__ import annotations

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.runtime_estimate import Estimates, mode_of
from tests.builders import a_spec

ONE = ResourceRequest.parse("1")


@pytest.mark.parametrize(
    ("words", "mode"),
    [("--mode train", "train"), ("--mode=eval", "eval"), ("--mode a --mode=b", "b"), ("--mode", None), ("", None)],
)
def test_the_mode_is_the_last_mode_argument(words: str, mode: str | None) -> None:
    """S3.22: The mode is the value of the last `--mode`."""
    assert mode_of(tuple(words.split())) == mode


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("sh", "-c", "python a.py --x 1 && date"), ("sh", "-c", "python b.py")),  # lines of a commands file
        (("sh", "-c", "cd x; ./prepare.sh"), ("sh", "-c", "cd x; ./train.sh")),
        (("python3", "a.py"), ("python3", "b.py")),
        (("sh", "-c", "python a.py --mode train"), ("sh", "-c", "python a.py --mode eval")),
    ],
)
def test_commands_that_run_different_scripts_are_not_similar(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """The estimate for a command comes from runs of the same script, not from all runs of `sh` or `python`."""
    estimates = Estimates()
    for words, seconds in ((one, 10.0), (other, 1000.0)):
        estimates.learn(a_spec(source="submit", script="", arguments=words), ONE, seconds)
    for words, seconds in ((one, 10.0), (other, 1000.0)):
        assert estimates.of(a_spec(source="submit", script="", arguments=words), ONE) == seconds


def test_without_runs_there_is_no_estimate() -> None:
    assert Estimates().of(a_spec(), ONE) is None


def test_the_estimate_is_the_time_limit_if_there_is_one() -> None:
    estimates = Estimates()
    estimates.learn(a_spec(), ONE, 5.0)
    assert estimates.of(a_spec(time_limit_s=60.0), ONE) == 60.0


def test_the_estimate_is_the_median_of_the_last_three_runs() -> None:
    estimates = Estimates()
    for seconds in (1000.0, 1.0, 9.0, 3.0):
        estimates.learn(a_spec(), ONE, seconds)
    assert estimates.of(a_spec(), ONE) == 3.0


def test_the_estimate_prefers_runs_of_the_same_signature_then_script_then_request() -> None:
    estimates = Estimates()
    estimates.learn(a_spec(arguments=("--mode", "train")), ONE, 100.0)
    estimates.learn(a_spec(arguments=("--mode", "eval")), ONE, 10.0)
    estimates.learn(a_spec(script="/data/other.py"), ONE, 1000.0)
    assert estimates.of(a_spec(arguments=("--mode=eval", "--lr", "1")), ONE) == 10.0
    assert estimates.of(a_spec(arguments=("--mode", "test")), ONE) == 55.0
    assert estimates.of(a_spec(script="/data/new.py"), ONE) == 100.0
    assert estimates.of(a_spec(script="/data/new.py"), ResourceRequest.parse("2")) is None
