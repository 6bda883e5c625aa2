"""Tests of the settings: each has a default and a type, and the error for a wrong value names its key."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.config import OPTIONS, PATHS, RELOADABLE, Config, config_from, defaults, read_option, written
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.job_options import priority_of


@pytest.mark.parametrize("name", OPTIONS)
def test_each_setting_can_be_read_from_its_default(name: str) -> None:
    default = defaults()[name]
    assert read_option(name, default, "config.yaml") == default == getattr(Config(), name)
    if default is not None:
        assert read_option(name, str(default), "environment") == default


@pytest.mark.parametrize("name", OPTIONS)
def test_each_setting_has_a_help_text(name: str) -> None:
    assert OPTIONS[name].metadata["help"]


def test_settings_have_their_documented_defaults() -> None:
    """S3.1: File names, intervals and limits have their documented defaults."""
    config = Config()
    assert config.jobs_file == "jobs.txt"
    assert config.llm_config == "llm_config.json"
    assert config.state_file == "gpu_scheduler_state.json"
    assert config.log_file == "gpu_scheduler.log"
    assert (config.monitor_interval, config.state_interval) == (30, 20)
    assert (config.max_assign_attempts, config.assign_retry_wait) == (5, 5)
    assert (config.kill_grace, config.oom_retries, config.cuda_ids, config.max_overtakes) == (15, 2, "physical", 10)


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("job_file", "jobs_file"),
        ("monitor-interval", "monitor_interval"),
        ("Gpus", "gpus"),
        ("kill_graze", "kill_grace"),
    ],
)
def test_the_error_for_an_unknown_key_names_the_most_similar_key(written: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"^config.yaml: unknown key '{written}'; did you mean {nearest}\\?$"):
        read_option(written, "x", "config.yaml")


def test_the_error_for_an_unknown_key_lists_the_known_keys() -> None:
    with pytest.raises(UsageError, match="known: activation_limit, aging, assign_retry_wait"):
        read_option("zzzzzz", "x", "config.yaml")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("monitor_interval", "5m", 300.0),
        ("monitor_interval", 2, 2.0),
        ("kill_grace", 0, 0.0),
        ("max_assign_attempts", "3", 3),
        ("max_assign_attempts", 3.0, 3),
        ("oom_retries", 0, 0),
        ("gpus", "", None),
        ("gpus", "auto", None),
        ("gpus", "4", 4),
        ("gpu_ids", [2, 0, 2], (0, 2)),
        ("gpu_ids", "0-1,5", (0, 1, 5)),
        ("gpu_ids", "", None),
        ("gpu_ids", 3, (3,)),
        ("trust_group", "yes", True),
        ("trust_group", "Off", False),
        ("trust_group", 1, True),
        ("cuda_ids", "local", "local"),
        ("aging", "168", 168.0),
        ("jobs_file", None, ""),
        ("python", 3, "3"),
    ],
)
def test_a_value_is_converted_to_the_type_of_its_setting(name: str, value: Any, read: Any) -> None:
    found = read_option(name, value, "config.yaml")
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("monitor_interval", "soon", "is not a duration"),
        ("monitor_interval", -1, "must be a duration of 0 or more"),
        ("monitor_interval", True, "must be a duration"),
        ("monitor_interval", None, "must be a duration"),
        ("monitor_interval", float("nan"), "must be a duration of 0 or more"),
        ("monitor_interval", float("inf"), "must be a duration of 0 or more"),
        ("max_assign_attempts", 0, "must be 1 or more"),
        ("max_assign_attempts", 2.5, "must be a whole number"),
        ("max_assign_attempts", "many", "must be a whole number"),
        ("max_assign_attempts", True, "must be a whole number"),
        ("max_assign_attempts", None, "must be a whole number"),
        ("max_assign_attempts", float("nan"), "must be a whole number"),
        ("oom_retries", -1, "must be 0 or more"),
        ("gpus", -1, "must be 0 or more"),
        ("gpu_ids", "3-1", "write 1-3"),
        ("gpu_ids", [-1], "must be 0 or more"),
        ("gpu_ids", ["a"], "is not a GPU list"),
        ("gpu_ids", [1.5], "must be a whole number"),
        ("gpu_ids", "0-999999999", "there is no GPU"),
        ("trust_group", "perhaps", "must be true or false"),
        ("cuda_ids", "locl", "did you mean local?"),
        ("cuda_ids", None, "must be one of physical, local, unset, auto"),
        ("order", "long", "must be one of fifo, short"),
        ("watch", ["poll"], "must be one of auto"),
        ("aging", -1, "must be 0 or more"),
        ("aging", "old", "must be a number"),
        ("aging", float("nan"), "must be 0 or more"),
        ("log_dir", ["a"], "must be a text"),
        ("log_dir", True, "must be a text"),
    ],
)
def test_the_error_for_a_wrong_value_names_file_and_key(name: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_option(name, value, "config.yaml")
    assert str(caught.value).startswith(f"config.yaml: {name}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_assign_attempts", float("inf")),
        ("gpus", float("inf")),
        ("gpu_ids", [float("-inf")]),
        ("kill_grace", "9" * 400 + ":00"),
        ("gpu_ids", [10**9]),
        ("gpus", 10**9),
    ],
)
def test_an_extreme_value_is_refused_without_a_crash(name: str, value: Any) -> None:
    with pytest.raises(SchedulerError):
        read_option(name, value, "config.yaml")


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 5).map(lambda n: n * 10**5000),
    st.floats(),
    st.text(max_size=12),
    st.text(alphabet="0123456789.-+eExX_ %naif:,smhd\0\ud800", max_size=12),
    st.sampled_from(["inf", "-inf", "nan", "1e400", "-1e400", "1e-400", "9" * 5000, "-" + "9" * 5000, "", " ", "True", "None",
                     "0x10", "1_0", "٣", "0-4095," * 900, "\ud800", "\0"]),
    st.binary(max_size=4),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none(), st.lists(st.integers())), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@given(st.sampled_from(sorted(OPTIONS)), ANYTHING)
def test_any_value_is_read_or_refused_with_a_usage_error(name: str, value: Any) -> None:
    """P3: Any value is read as a value of the right type, or refused with one short UsageError."""
    try:
        read = read_option(name, value, "config.yaml")
    except UsageError as error:
        assert error.where == "config.yaml" and error.what.startswith(f"{name}: ")
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert getattr(config_from({name: read}), name) == read
        assert read_option(name, read, "again") == read
        assert type(read) in (str, int, float, bool, tuple, type(None))
        if isinstance(read, (int, float)):
            assert 0 <= read <= 10**9


@given(st.text(max_size=30))
def test_any_unknown_key_is_refused_with_one_short_error(name: str) -> None:
    """P3: Any unknown key is refused with one short error."""
    if name not in OPTIONS:
        with pytest.raises(UsageError) as caught:
            read_option(name, "x", "config.yaml")
        assert "unknown key" in caught.value.what and "\n" not in str(caught.value)


def test_an_error_names_a_command_line_option_once() -> None:
    """S3.1: The error for a command-line option names this option once."""
    with pytest.raises(UsageError) as caught:
        read_option("mem_threshold", "8", "--mem-threshold", named=True)
    assert str(caught.value) == "--mem-threshold: must be a share between 0 and 1, not 8; write 0.8 for 80 %"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (30.0, "30"), (0.02, "0.02"), (1e-7, "1e-07"), ((0, 2), "[0, 2]"), ("", '""'), ("fifo", "fifo"),
        ("/a/b_c.json", "/a/b_c.json"), ("yes", '"yes"'), ("Null", '"Null"'), ("a b", '"a b"'), ("3.10", '"3.10"'), ("~", '"~"'),
        ("a: b # c", '"a: b # c"'), ("it's \"x\"", '"it\'s \\"x\\""'), ("/ä/ö", '"/ä/ö"'), ("a\nb", '"a\\nb"'),
        ("a\x85b\x7f", '"a\\U00000085b\\U0000007f"'),
    ],
)  # fmt: skip
def test_config_values_are_written_as_yaml(value: Any, text: str) -> None:
    """Contract 2: `config show` prints values as YAML."""
    assert written(value) == text


def test_a_config_is_immutable_and_lists_all_settings() -> None:
    config = config_from({"gpus": 2})
    assert config.gpus == 2
    assert set(config.policy_values()) == set(OPTIONS)
    with pytest.raises(FrozenInstanceError):
        config.gpus = 3  # type: ignore[misc]


def test_path_settings_and_reloadable_settings_are_known_and_disjoint() -> None:
    assert set(OPTIONS) > PATHS > {"state_file", "jobs_file", "log_dir"}
    assert {"kill_grace", "oom_retries", "cuda_ids"} < RELOADABLE
    assert not RELOADABLE & PATHS


@pytest.mark.parametrize("text", ["5\x1f", "\x1c5", " 5 "])
def test_a_number_may_have_any_white_space_around_it(text: str) -> None:
    """A number may have any white space around it, also control characters that `float` does not accept."""
    assert read_option("kill_grace", text, "x") == 5.0 and priority_of(text) == 5
