"""Tests of the settings: the source of each value, and the errors for values that cannot be read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.config import OPTIONS, PATHS, defaults, read_option, written
from scheduler.core.errors import Mistakes, SchedulerError, UsageError
from scheduler.core.model_table import ModelTable
from scheduler.intake.config_file import read_entries
from scheduler.intake.settings import PREFIX, Settings, find_config, load, model_table, named_state_file
from tests.builders import examples

OTHER = 65534  # the user nobody
as_root = pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")


def given_by(
    folder: Path,
    *,
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    config: str | None = None,
) -> Settings:
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return load(flags or {}, {"HOME": str(folder), **(environ or {})}, None, str(folder))


def error_of(folder: Path, **values: Any) -> SchedulerError:
    with pytest.raises(SchedulerError) as caught:
        given_by(folder, **values)
    assert "\n" not in str(caught.value)
    return caught.value


# -- order of the sources ---------------------------------------------------------------------------------


def test_flags_override_variables_config_file_and_defaults_in_this_order(tmp_path: Path) -> None:
    """Contract 2: A flag overrides a variable. A variable overrides the config file, which overrides the default."""
    config = "kill_grace: 1\n"
    variables = {f"{PREFIX}KILL_GRACE": "2"}
    for flags, environ, text, value, origin in (
        ({}, {}, None, 15.0, "default"),
        ({}, {}, config, 1.0, f"{tmp_path / 'config.yaml'}:1"),
        ({}, variables, config, 2.0, f"{PREFIX}KILL_GRACE"),
        ({"kill_grace": "3"}, variables, config, 3.0, "command line"),
    ):
        found = given_by(tmp_path, flags=flags, environ=environ, config=text)
        assert found.config.kill_grace == value
        assert found.origin["kill_grace"] == origin


def test_every_setting_has_an_origin_and_a_help_text(tmp_path: Path) -> None:
    """Contract 2: Every setting has a help text, and an origin that `config show --origin` prints."""
    found = given_by(tmp_path)
    assert set(found.origin) == set(OPTIONS) == set(found.config.policy_values())
    assert set(found.origin.values()) == {"default"}
    assert all(option.metadata["help"] for option in OPTIONS.values())


def test_defaults_are_those_of_the_readme(tmp_path: Path) -> None:
    """S3.1: The defaults are those given in the README."""
    config = given_by(tmp_path).config
    assert config.jobs_file == str(tmp_path / "jobs.txt")
    assert config.llm_config == str(tmp_path / "llm_config.json")
    assert config.state_file == str(tmp_path / "gpu_scheduler_state.json")
    assert config.log_file == str(tmp_path / "gpu_scheduler.log")
    assert (config.monitor_interval, config.state_interval) == (30.0, 20.0)
    assert (config.max_assign_attempts, config.assign_retry_wait) == (5, 5.0)
    assert (config.oom_retries, config.kill_grace, config.cuda_ids) == (2, 15.0, "physical")
    assert config.gpus is None and config.gpu_ids is None and config.commands_file == ""


def test_the_state_file_variable_overrides_the_config_file_but_not_the_flag(tmp_path: Path) -> None:
    """Contract 2, finding it: GPUJOB_STATE_FILE overrides the config file. The flag overrides GPUJOB_STATE_FILE."""
    environ = {"GPUJOB_STATE_FILE": "/v/s.json"}
    found = given_by(tmp_path, environ=environ, config="state_file: c.json\n")
    assert (found.config.state_file, found.origin["state_file"]) == ("/v/s.json", "GPUJOB_STATE_FILE")
    found = given_by(tmp_path, environ=environ, flags={"state_file": "f.json"})
    assert (found.config.state_file, found.origin["state_file"]) == (str(tmp_path / "f.json"), "command line")


def test_the_base_folder_of_a_relative_path_depends_on_its_source(tmp_path: Path) -> None:
    """Contract 3, settled details: The folder at which a relative path starts depends on the path's source.

    A path in a flag or variable starts at the current folder, a path in the config file at the folder of the config
    file, and a default path at the folder of the state file.
    """
    there = tmp_path / "there"
    there.mkdir()
    (there / "c.yaml").write_text("jobs_file: in/config.txt\n")
    found = load(
        {"log_dir": "of/flag", "state_file": "s/state.json"},
        {"HOME": "/h", f"{PREFIX}LLM_CONFIG": "of/env.json"},
        str(there / "c.yaml"),
        str(tmp_path),
    ).config
    assert found.jobs_file == str(there / "in/config.txt")
    assert found.log_dir == str(tmp_path / "of/flag")
    assert found.llm_config == str(tmp_path / "of/env.json")
    assert found.log_file == str(tmp_path / "s/gpu_scheduler.log")
    assert all(os.path.isabs(getattr(found, key)) for key in PATHS if getattr(found, key))


def test_with_an_empty_jobs_file_setting_no_jobs_file_is_watched(tmp_path: Path) -> None:
    """S3.44: If the setting `jobs_file` is an empty text, no jobs file is watched."""
    assert given_by(tmp_path, flags={"jobs_file": ""}).config.jobs_file == ""
    assert given_by(tmp_path, environ={f"{PREFIX}JOBS_FILE": ""}).config.jobs_file == ""
    assert given_by(tmp_path, config='jobs_file: ""\n').config.jobs_file == ""


def test_a_leading_tilde_in_a_path_is_the_home_folder(tmp_path: Path) -> None:
    """Contract 3: A leading `~` in a path stands for the home folder."""
    assert given_by(tmp_path, flags={"log_dir": "~/logs"}).config.log_dir == os.path.expanduser("~/logs")


def test_the_config_file_is_found_by_flag_variable_folder_and_home_in_this_order(tmp_path: Path) -> None:
    """Contract 2: If --config names a config file, this file is used; otherwise the file that GPUJOB_CONFIG names.

    If neither names a file, ./config.yaml is used if it exists, otherwise the user's config.

    The user's config is $XDG_CONFIG_HOME/gpujob/config.yaml. If XDG_CONFIG_HOME is not set, it is
    ~/.config/gpujob/config.yaml.
    """
    places = {name: tmp_path / name for name in ("flag", "variable", "here", "xdg/gpujob", "home/.config/gpujob")}
    for place in places.values():
        place.mkdir(parents=True)
        (place / "config.yaml").touch()
    environ = {
        "GPUJOB_CONFIG": str(places["variable"] / "config.yaml"),
        "XDG_CONFIG_HOME": str(tmp_path / "xdg"),
        "HOME": str(tmp_path / "home"),
    }
    here = str(places["here"])
    assert find_config(environ, str(places["flag"] / "config.yaml"), here) == str(places["flag"] / "config.yaml")
    assert find_config(environ, None, here) == environ.pop("GPUJOB_CONFIG")
    assert find_config(environ, None, here) == str(places["here"] / "config.yaml")
    empty = str(tmp_path)
    assert find_config(environ, None, empty) == str(places["xdg/gpujob"] / "config.yaml")
    del environ["XDG_CONFIG_HOME"]
    assert find_config(environ, None, empty) == str(places["home/.config/gpujob"] / "config.yaml")
    assert find_config({"HOME": "/nowhere"}, None, empty) == ""


def test_a_named_config_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    """P3: If a user names a config file that does not exist, this is a usage error."""
    with pytest.raises(UsageError) as caught:
        load({}, {"HOME": "/h"}, "nosuch.yaml", str(tmp_path))
    assert str(tmp_path / "nosuch.yaml") in str(caught.value)


# -- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("gpus", "4", 4), ("gpus", "", None), ("gpus", "auto", None), ("gpu_ids", "0,2", (0, 2)), ("gpu_ids", "0-3", (0, 1, 2, 3)),
        ("monitor_interval", "5m", 300.0), ("monitor_interval", "1.5", 1.5), ("trust_group", "yes", True),
        ("trust_group", "off", False), ("order", "short", "short"), ("aging", "0.5", 0.5), ("cpu_slots", "0", 0),
    ],
)  # fmt: skip
def test_a_text_has_the_same_value_from_each_source(tmp_path: Path, key: str, text: str, value: object) -> None:
    """Contract 2: A text has the same value in a flag, in a variable and in the config file."""
    assert getattr(given_by(tmp_path, flags={key: text}).config, key) == value
    assert getattr(given_by(tmp_path, environ={PREFIX + key.upper(): text}).config, key) == value
    assert getattr(given_by(tmp_path, config=f"{key}: '{text}'\n").config, key) == value


def test_a_yaml_list_is_read_as_a_gpu_list(tmp_path: Path) -> None:
    """Contract 4: A YAML list is accepted as a GPU list. The list is sorted, and duplicates are removed."""
    assert given_by(tmp_path, config="gpu_ids: [2, 0, 2]\n").config.gpu_ids == (0, 2)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("gpus", "-1"), ("gpus", "1.5"), ("gpus", "many"), ("gpu_ids", "a"), ("gpu_ids", "3-1"), ("gpu_ids", "0-999999999"),
        ("monitor_interval", "soon"), ("monitor_interval", "-1"), ("monitor_interval", ""), ("max_assign_attempts", "0"),
        ("max_assign_attempts", "x"), ("cuda_ids", "physicla"), ("order", "lifo"), ("aging", "-1"), ("aging", "nan"),
        ("trust_group", "perhaps"), ("watch", "always"), ("oom_retries", "-1"),
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_setting_names_its_source_and_key(tmp_path: Path, key: str, text: str) -> None:
    """P3: An invalid value gives exit code 2. The error names the source and the key of the value."""
    for place, values in (
        (f"--{key.replace('_', '-')}", {"flags": {key: text}}),
        (PREFIX + key.upper(), {"environ": {PREFIX + key.upper(): text}}),
        ("config.yaml", {"config": f"{key}: '{text}'\n"}),
    ):
        error = error_of(tmp_path, **values)
        assert error.exit_code == 2
        assert place in error.where
        assert (f"{key}: " in error.what) == (place == "config.yaml")  # `where` already names an option or variable
        (tmp_path / "config.yaml").unlink(missing_ok=True)


def test_the_error_for_a_misspelt_value_names_the_most_similar_one(tmp_path: Path) -> None:
    """Contract 2: The error for a misspelt value names the most similar valid value."""
    assert "physical" in error_of(tmp_path, flags={"cuda_ids": "physicla"}).do


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "true", "[1]", "{a: 1}", "2024-01-01"])
@pytest.mark.parametrize("key", ["monitor_interval", "aging", "log_dir", "order", "trust_group"])
def test_a_yaml_value_of_a_wrong_type_is_an_error(tmp_path: Path, key: str, text: str) -> None:
    """P3: A YAML value of the wrong type is an error with exit code 2, unless its text is a valid value of the setting.

    For example, `log_dir: 2024-01-01` is a date in YAML, but its text is the name of a folder.
    """
    if (key, text) == ("trust_group", "true"):
        assert given_by(tmp_path, config="trust_group: true\n").config.trust_group is True
    elif key == "log_dir" and text in (".inf", "-.inf", ".nan", "2024-01-01"):
        assert given_by(tmp_path, config=f"{key}: {text}\n").config.log_dir  # the text is valid as the name of a folder
    else:
        assert error_of(tmp_path, config=f"{key}: {text}\n").exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "max_assign_attempts: .inf\n", "gpus: .inf\n", "gpu_ids: [0, .inf]\n", "oom_retries: -.inf\n",
        "aging: 2024-13-45\n", "[" * 20_000, f"monitor_interval: '{'9' * 400}:00'\n",
    ],
    ids=["inf attempts", "inf gpus", "inf in a list", "-inf retries", "impossible date", "deep nesting", "huge clock"],
)  # fmt: skip
def test_extreme_values_and_deep_nesting_in_a_config_file_are_an_error(tmp_path: Path, text: str) -> None:
    """P3: Extreme values and deep nesting give a SchedulerError with exit code 2, not a traceback."""
    assert error_of(tmp_path, config=text).exit_code == 2


@pytest.mark.parametrize(
    "key", ["gpus", "max_assign_attempts", "aging", "monitor_interval", "cuda_ids", "trust_group", "python"]
)
@given(text=st.text(max_size=20))
@examples(40)
def test_any_text_is_a_valid_setting_value_or_a_usage_error(key: str, text: str) -> None:
    """P3: Any text is either a valid value or raises UsageError that names the source."""
    try:
        read_option(key, text, "x")
    except UsageError as error:
        assert error.where == "x"


# -- unknown keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "near"), [("gpuz", "gpus"), ("job_file", "jobs_file"), ("kill-grace", "kill_grace")])
def test_the_error_for_an_unknown_config_key_names_line_and_similar_key(tmp_path: Path, key: str, near: str) -> None:
    """Contract 2: The error for an unknown key names its line and the most similar known key."""
    error = error_of(tmp_path, config=f"# mine\ngpus: 2\n\n{key}: 3\n")
    assert isinstance(error, UsageError)
    assert error.where == f"{tmp_path / 'config.yaml'}:4"
    assert near in error.do


def test_the_error_for_an_unknown_config_key_in_quotes_names_its_line(tmp_path: Path) -> None:
    """Contract 2: The error for an unknown key in quotes names its line."""
    assert error_of(tmp_path, config='gpus: 2\n\n"gpuz": 3\n').where.endswith(":3")


def test_the_error_for_an_unknown_gpujob_variable_names_the_most_similar_one(tmp_path: Path) -> None:
    """Contract 2: The error for an unknown variable with the program's prefix names the most similar variable."""
    error = error_of(tmp_path, environ={f"{PREFIX}GPUZ": "1"})
    assert str(error) == f"{PREFIX}GPUZ: unknown setting; did you mean {PREFIX}GPUS?"


def test_the_error_for_an_unknown_config_key_without_a_similar_one_lists_all(tmp_path: Path) -> None:
    """Contract 2: If no known key is similar to an unknown key, the error lists all known keys."""
    do = error_of(tmp_path, config="xyzzy: 1\n").do
    assert all(key in do for key in defaults())


# -- files that are no config -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [("gpus: 2\na: b: c\n", 2), ("gpus: [1\n", 2), ("\tgpus: 1\n", 1), ("gpus: 1\n  x: 2\n", 2), ('a: "\n', 2)],
)
def test_the_error_for_invalid_yaml_names_its_line(tmp_path: Path, text: str, line: int) -> None:
    """P3: The error for invalid YAML names the line of the mistake and has exit code 2."""
    error = error_of(tmp_path, config=text)
    assert error.where == f"{tmp_path / 'config.yaml'}:{line}"
    assert error.exit_code == 2


@pytest.mark.parametrize("text", ["- gpus\n", "gpus\n", "42\n"])
def test_a_config_file_without_a_yaml_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """P3: A config file that is not a YAML mapping is refused. The error shows the form `key: value`."""
    assert "key: value" in error_of(tmp_path, config=text).what


@pytest.mark.parametrize("text", ["", "# only this\n", "---\n", "\n\n"])
def test_an_empty_config_file_leaves_all_defaults(tmp_path: Path, text: str) -> None:
    """P3: With an empty config file, every setting has its default."""
    assert set(given_by(tmp_path, config=text).origin.values()) == {"default"}


@pytest.mark.parametrize(
    "value",
    ["!!python/object/apply:os.system ['touch PROOF']", "!!python/object:os.X {}", "!!python/name:os.system", "!x y"],
)
def test_yaml_tags_in_a_config_file_create_no_objects(tmp_path: Path, value: str) -> None:
    """P9: A YAML tag cannot create Python objects or run code; it is an error."""
    error = error_of(tmp_path, config=f"log_dir: {value.replace('PROOF', str(tmp_path / 'proof'))}\n")
    assert error.exit_code == 2
    assert not (tmp_path / "proof").exists()


def test_a_config_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """P3: A config file that is not UTF-8 is an error with exit code 2."""
    (tmp_path / "config.yaml").write_bytes(b"log_dir: \xff\xfe\n")
    assert error_of(tmp_path).exit_code == 2


def test_a_folder_as_config_file_is_refused(tmp_path: Path) -> None:
    """P3: A folder given as the config file is a usage error."""
    with pytest.raises(UsageError):
        load({}, {"HOME": "/h"}, str(tmp_path), str(tmp_path))


# -- owner and mode of the config -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_config_file_that_all_users_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """C37, P9: A config file that all users may write is refused with exit code 1.

    The error shows a command that fixes it.
    """
    (tmp_path / "config.yaml").write_text("gpus: 2\n")
    (tmp_path / "config.yaml").chmod(mode)
    error = error_of(tmp_path)
    assert error.exit_code == 1
    assert "chmod o-w" in error.what
    (tmp_path / "config.yaml").chmod(0o644)
    assert given_by(tmp_path).config.gpus == 2


@as_root
def test_a_config_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """P9: A config file that belongs to another user is refused."""
    (tmp_path / "config.yaml").write_text("trust_group: true\n")
    os.chown(tmp_path / "config.yaml", OTHER, -1)
    assert str(OTHER) in error_of(tmp_path).what


@as_root
def test_a_config_file_that_its_group_may_write_is_refused_without_trust_group(tmp_path: Path) -> None:
    """Contract 3, settled details: Without `trust_group`, a config file that its group may write is refused.

    `trust_group` in the config file itself does not count: it must be set by a flag or a variable.
    """
    path = tmp_path / "config.yaml"
    path.write_text("gpus: 2\n")
    path.chmod(0o664)
    os.chown(path, 0, OTHER)
    assert f"chmod g-w {path}" in error_of(tmp_path).what
    path.write_text("gpus: 2\ntrust_group: true\n")
    assert error_of(tmp_path).exit_code == 1  # a user who can write the file could have added this
    assert given_by(tmp_path, environ={f"{PREFIX}TRUST_GROUP": "true"}).config.gpus == 2
    assert given_by(tmp_path, flags={"trust_group": "true"}).config.gpus == 2
    path.chmod(0o644)
    tmp_path.chmod(0o770)
    os.chown(tmp_path, 0, OTHER)
    assert given_by(tmp_path).config.gpus == 2  # the file is private, so its `trust_group` counts for the folder
    path.write_text("gpus: 2\n")
    assert "its folder is not safe: its group may write to it" in error_of(tmp_path).what


# -- the model table --------------------------------------------------------------------------------------


def test_the_model_table_gives_the_default_and_the_need_of_each_model(tmp_path: Path) -> None:
    """S3.13: The model table contains the default need, and the need of each model."""
    path = tmp_path / "m.json"
    path.write_text('\ufeff{"default_requirement": 0.5, "models": {"a": 2, "b": "2x0.5", "c": 0}}')
    assert model_table(str(path)) == ModelTable("0.5", {"a": "2", "b": "2x0.5", "c": "0"})


def test_without_a_model_table_every_job_needs_one_gpu(tmp_path: Path) -> None:
    """S3.13: Without a model table, every job requests one GPU."""
    assert model_table(str(tmp_path / "nosuch.json")) == model_table("") == ModelTable("1", {})


@pytest.mark.parametrize(
    ("text", "place"),
    [('{"models": {"a": 1}', ":1:20"), ("", ":1:1"), ('{\n "models": {\n "a": x}}', ":3:7"), ("[1,", ":1:4")],
)
def test_the_error_for_an_invalid_json_model_table_names_the_position(tmp_path: Path, text: str, place: str) -> None:
    """C31, P3: If the model table is invalid JSON, the error names the line and the column."""
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        model_table(str(path))
    assert caught.value.where == f"{path}{place}"


@pytest.mark.parametrize(
    "text",
    [
        "[]", '"x"', '{"models": []}', '{"models": {"a": null}}', '{"models": {"a": true}}', '{"models": {"a": -1}}',
        '{"models": {"a": "x"}}', '{"models": {"a": NaN}}', '{"models": {"a": 1e999}}', '{"model": {}}', "[" * 100_000,
        '{"models": {"a": "2x1.5"}}', '{"default_requirement": []}',
    ],
    ids=range(13),
)  # fmt: skip
def test_the_error_for_an_invalid_model_table_names_the_file(tmp_path: Path, text: str) -> None:
    """C31, P3: If JSON is not a valid model table, one UsageError is raised, which names the file."""
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        model_table(str(path))
    assert str(path) in caught.value.where


def test_a_number_of_5000_digits_in_the_model_table_is_a_usage_error(tmp_path: Path) -> None:
    """C31, P8: A number of 5000 digits in the model table raises UsageError, so a running daemon continues."""
    path = tmp_path / "m.json"
    path.write_text('{"models": {"a": ' + "9" * 5000 + "}}")
    with pytest.raises(UsageError):
        model_table(str(path))


def test_an_unreadable_model_table_is_a_usage_error(tmp_path: Path) -> None:
    """C31: A model table raises UsageError if it is a folder or not UTF-8."""
    with pytest.raises(UsageError):
        model_table(str(tmp_path))
    (tmp_path / "m.json").write_bytes(b"\xff\xfe{\0}\0")
    with pytest.raises(UsageError):
        model_table(str(tmp_path / "m.json"))


def test_a_path_setting_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """F15: A path that is not UTF-8 is refused when the settings are read, because the store can contain only text."""
    with pytest.raises(UsageError, match="is not UTF-8"):
        load({"log_dir": "/home/jos\udce9/logs"}, {"HOME": str(tmp_path)}, None, str(tmp_path))


# -- line numbers, and several mistakes together ----------------------------------------------------------


def lines_of(folder: Path, text: str) -> list[str]:
    """Return the lines of the error for this config text: one line for each mistake.

    The path of the config file's folder is removed from these lines.
    """
    return [line.replace(f"{folder}/", "") for line in error_of(folder, config=text).lines]


def test_one_error_lists_all_mistakes_of_a_config_file_with_their_lines(tmp_path: Path) -> None:
    """Contract 2, P3: One error lists all mistakes of a config file, each with its line."""
    text = "# mine\nmem_threshold: 8\njob_file: a\ngpus: 2\n\nkill_grace: soon\ngpus: 2\norder: [fifo]\nwatch: {a: 1}\n[1]: 2\n"
    assert lines_of(tmp_path, text) == [
        "config.yaml:2: mem_threshold: must be a share between 0 and 1, not 8; write 0.8 for 80 %",
        "config.yaml:3: unknown key 'job_file'; did you mean jobs_file?",
        "config.yaml:6: kill_grace: 'soon' is not a duration; write 90, 4s, 30m, 4h, 2d or 1-12:00:00",
        "config.yaml:7: gpus is set in line 4 already; keep one of them",
        "config.yaml:8: order: must be one value, not a list",
        "config.yaml:9: watch: must be one value, not a mapping",
        "config.yaml:10: a key must be a plain word",
    ]
    assert str(error_of(tmp_path)).endswith("write 0.8 for 80 %; and 6 more mistakes")


def test_one_error_lists_the_mistakes_of_flags_variables_and_config_file(tmp_path: Path) -> None:
    """S3.1, P3: One error lists the mistakes in all flags, in all variables and in the config file.

    It also lists an invalid value that another source overrides.
    """
    error = error_of(
        tmp_path,
        flags={"gpus": "x", "aging": "1"},
        environ={f"{PREFIX}ORDER": "fio", f"{PREFIX}gpus": "1"},
        config="aging: old\n",
    )
    assert [line.replace(f"{tmp_path}/", "") for line in error.lines] == [
        f"environment variable {PREFIX}ORDER: must be one of fifo, short, not fio; did you mean fifo?",
        f"{PREFIX}gpus: unknown setting; did you mean {PREFIX}GPUS?",
        "--gpus: must be a whole number, not x",
        "config.yaml:1: aging: must be a number, not old",
    ]


def test_the_origin_of_a_config_value_includes_its_line(tmp_path: Path) -> None:
    """Contract 2: The origin of a value from the config file includes its line number."""
    found = given_by(tmp_path, config="\ufeff# one\r\n\r\naging: 2\r\n? order\r\n: short\r\n")
    assert found.config.aging == 2 and found.config.order == "short"
    assert [found.origin[key].rpartition(":")[2] for key in ("aging", "order")] == ["3", "4"]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("python: 3.10", "python", "3.10"), ("log_dir: 010", "log_dir", "HERE/010"), ("log_dir: 1_000", "log_dir", "HERE/1_000"),
        ("log_dir: 'yes'", "log_dir", "HERE/yes"), ("jobs_file: ''", "jobs_file", ""), ("jobs_file:", "jobs_file", "HERE/jobs.txt"),
        ("mem_threshold: null", "mem_threshold", 0.8), ("mem_threshold:", "mem_threshold", 0.8), ("mem_threshold: '0.5'", "mem_threshold", 0.5),
        ("mem_threshold: 50%", "mem_threshold", 0.5), ("kill_grace: 010", "kill_grace", 10.0), ("kill_grace: 1:30", "kill_grace", 90.0),
        ("kill_grace: 1e1", "kill_grace", 10.0), ("screen: yes", "screen", True), ("screen: off", "screen", False), ("screen: 'on'", "screen", True),
        ("gpu_ids: 0-1,5", "gpu_ids", (0, 1, 5)), ("gpu_ids: [0-1, '5']", "gpu_ids", (0, 1, 5)), ("gpu_ids: 2", "gpu_ids", (2,)),
        ("gpu_ids:\n- 2\n- 0", "gpu_ids", (0, 2)), ("settle: &a 3\nrelease: *a", "release", 3.0), ("gpu_ids: []", "gpu_ids", None),
        ("aging: !!str 2", "aging", 2.0), ("python: ./v/bin/python", "python", "HERE/v/bin/python"), ("python: py", "python", "py"),
        ("{aging: 2, order: short}", "aging", 2.0), ("log_dir: >\n  a\n", "log_dir", "HERE/a\n"),
    ],
)  # fmt: skip
def test_a_config_value_is_read_as_its_literal_text(tmp_path: Path, text: str, key: str, value: Any) -> None:
    """Contract 2: A value is read as the text in the file. An empty value or null stands for the default.

    YAML itself would convert values such as 010, 3.10 and yes.
    """
    expected = value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
    assert getattr(given_by(tmp_path, config=f"{text}\n").config, key) == expected


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"gpus: 2\n\tx: 1\n", ":2: not YAML: found character '\\t' that cannot start any token; indent with spaces"),
        (b"log_dir: a: b\n", ":1: not YAML: mapping values are not allowed here; check the indentation, or quote the value"),
        (b"aging: 1\n---\naging: 2\n", ":2: not YAML: but found another document"),
        (b"- a\n", ":1: must contain `key: value` lines; see config.example.yaml"),
        (b"log_dir: yes\n", ":1: log_dir: must be a text, not yes; put quotes around the value"),
        (b"<<: {aging: 1}\n", ":1: unknown key '<<'; known: "),
        (b"aging: *nobody\n", ":1: not YAML: found undefined alias 'nobody'"),
        (b"gpu_ids: &a [*a]\n", ":1: gpu_ids: must be a list of GPU ids; write [0, 2] or 0-3"),
        (b"gpu_ids: {0: 1}\n", ":1: gpu_ids: must be one value, not a mapping"),
        (b"log_dir: !!python/object:os.X {}\n", ":1: log_dir: the YAML tag '!!python/object:os.X' is not allowed; write a plain value"),
        (b"gpus: !!binary aGk=\n", ":1: gpus: the YAML tag '!!binary' is not allowed; write a plain value"),
        (b"a: 1\nlog_dir: \xff\n", ":2: not UTF-8; save it as UTF-8"),
        ("aging: 1\n".encode("utf-16"), ": not UTF-8 but UTF-16; save it as UTF-8"),
        (b"aging: 1\nlog_dir: a\0b\n", ":2: contains the character 0x0000; save it as plain text"),
        (b'log_dir: "a\\0b"\n', ":1: log_dir: contains a NUL character; remove it"),
        (b"state_file: ''\n", ":1: state_file: must name a file or folder"),
        (b"[" * 20_000, ": nested too deeply"),
        (b"# " + b"x" * (64 << 10), ": larger than 64 KiB, so it is not read as a config file"),
        (b"gpus: 2\ngpu_ids: [0]\n", ":1: gpus: 2 and gpu_ids: 0 contradict each other; leave one of them out"),
    ],
    ids=range(19),
)  # fmt: skip
def test_the_error_for_an_invalid_config_file_has_line_reason_and_fix(tmp_path: Path, data: bytes, says: str) -> None:
    """P3, S14: For each invalid config file, the error has a line, a reason, a remedy and exit code 2."""
    (tmp_path / "config.yaml").write_bytes(data)
    error = error_of(tmp_path)
    assert str(error).startswith(f"{tmp_path}/config.yaml{says}") and error.exit_code == 2


def test_s14_yaml_aliases_are_not_expanded(tmp_path: Path) -> None:
    """S14: YAML aliases that would expand to 10**12 values are refused without expansion."""
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    assert len(error_of(tmp_path, config=text).lines) == 12


@pytest.mark.parametrize("make", ["fifo", "folder", "device", "dangling", "loop"])
@pytest.mark.parametrize("named", [True, False])
def test_a_config_file_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: str, named: bool) -> None:
    """P3: A config file that is not a regular file is a usage error. Reading it never blocks.

    This holds for a file that a flag names, and for a file that is found in the current folder.
    """
    path = tmp_path / "config.yaml"
    says = "cannot be read: not a regular file"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "folder":
        path.mkdir()
    elif make == "device":
        path.symlink_to("/dev/zero")
    elif make == "dangling":
        path.symlink_to("nowhere")
        says = "the target of this link does not exist; name another file with --config"
    else:
        path.symlink_to(path)
        says = "cannot be read: Too many levels of symbolic links"
    with pytest.raises(UsageError) as caught:
        load({}, {"HOME": str(tmp_path)}, str(path) if named else None, str(tmp_path))
    assert str(caught.value) == f"{path}: {says}"


# -- both gpus and gpu_ids --------------------------------------------------------------------------------


def test_the_stronger_source_decides_between_gpus_and_gpu_ids(tmp_path: Path) -> None:
    """Contract 2, 4: If `gpus` and `gpu_ids` come from different sources, the value from the stronger source is used.

    If both come from the same source, their values must agree.
    """
    found = given_by(tmp_path, flags={"gpu_ids": "0,2"}, config="gpus: 8\n")
    assert (found.config.gpus, found.config.gpu_ids) == (None, (0, 2))
    assert found.origin["gpus"] == "overridden by gpu_ids (command line)"
    found = given_by(tmp_path, flags={"gpus": "1"}, environ={f"{PREFIX}GPU_IDS": "0,2"})
    assert (found.config.gpus, found.config.gpu_ids) == (1, None)
    assert given_by(tmp_path, flags={"gpus": "2", "gpu_ids": "0,2"}).config.gpu_ids == (0, 2)
    error = error_of(tmp_path, environ={f"{PREFIX}GPUS": "3", f"{PREFIX}GPU_IDS": "0,2"})
    assert str(error).startswith(f"{PREFIX}GPUS 3 and {PREFIX}GPU_IDS 0,2 contradict each other")


# -- state file of the scheduler --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("state_file: s.json\n", "HERE/s.json"), ("aging: 1\n", ""), ("state_file: s.json\nxyzzy: 1\n", "HERE/s.json"), ("xyzzy: 1\n", ""),
        ("a: [\n", ""), ("mem_threshold: 9\nmem_threshold: 8\nstate_file: s.json\n", "HERE/s.json"), ("state_file:\nxyzzy: 1\n", ""),
    ],
)  # fmt: skip
def test_a_command_finds_the_state_file_in_a_faulty_config_file(tmp_path: Path, text: str, found: str) -> None:
    """P3: A command finds the state file in a config file that has other mistakes. The mistakes are returned too."""
    (tmp_path / "config.yaml").write_text(text)
    said, trouble = named_state_file({"HOME": "/h"}, None, str(tmp_path))
    assert said == found.replace("HERE", str(tmp_path))
    assert (trouble is None) == (text in ("state_file: s.json\n", "aging: 1\n"))


def test_a_config_mistake_that_leaves_the_state_file_unknown_is_an_error(tmp_path: Path) -> None:
    """P3: If a mistake leaves the state file unknown, UsageError is raised, so that no wrong scheduler is used."""
    for text in ("state_file: [1]\n", "a: [\nstate_file: s.json\n", "state_file: ''\n"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UsageError):
            named_state_file({"HOME": "/h"}, None, str(tmp_path))
    assert named_state_file({"HOME": "/h", f"{PREFIX}STATE_FILE": "/s.json"}, None, str(tmp_path))[0] == "/s.json"
    with pytest.raises(UsageError):
        named_state_file({"HOME": "/h"}, "nosuch.yaml", str(tmp_path))
    (tmp_path / "config.yaml").write_text("aging: 1\n")
    said, trouble = named_state_file({"HOME": "/h", "GPUJOB_CONFIG": "/nosuch.yaml"}, None, str(tmp_path))
    assert said == "" and "no such config file; correct or unset GPUJOB_CONFIG" in str(trouble)


# -- mistakes in the model table --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n"models": {\n"qwen": -1}}', ":3: models.qwen: the need for GPUs cannot be below 0: -1; write 0.5, 1, 2 or 2x0.5"),
        ('{"model": {}}', ":1: unknown key 'model'; did you mean models?"),
        ('{"models": {"a": 1,\n"a": 2}}', ":2: duplicate key a; keep one of them"),
        ('{"models": {},\n"models": {}}', ":2: duplicate key models; keep one of them"),
        ('{"models":\n{"a": NaN}}', ":2: NaN is not a JSON number; write a number such as 0.5"),
        ('{"default_requirement":\n\n-Infinity}', ":3: -Infinity is not a JSON number; write a number such as 0.5"),
        ('{"models": {"a": 1e999}}', ":1: models.a: the need for GPUs must be a number, not 'inf'; write 0.5, 1, 2 or 2x0.5"),
        ('{"models": {"a": 99999999999}}', ":1: models.a: the need for GPUs cannot be 99999999999; write 0.5, 1 or 2"),
        ('{"models": {"\\ud800": 1}}', ": 'models.\\ud800': the name is not UTF-8"),
        ('{"models": {"a": 1,,}}', ":1:20: not JSON: "),
        ("{} {}", ":1:4: not JSON: Extra data"),
        (" " * (4 << 20) + "{}", ": larger than 4 MiB, so it is not read as a model table"),
    ],
    ids=range(12),
)  # fmt: skip
def test_i15_c31_a_model_table_mistake_is_reported_with_line_and_fix(tmp_path: Path, text: str, says: str) -> None:
    """I15, C31, S14: The error for a mistake in the model table names the line, a reason and a remedy."""
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        model_table(str(path))
    assert str(caught.value).startswith(f"{path}{says}")


def test_c31_one_error_lists_all_mistakes_of_a_model_table(tmp_path: Path) -> None:
    """C31, P3: One error lists all mistakes of the model table, each with its line."""
    path = tmp_path / "m.json"
    path.write_text('{"default": 1,\n"models": {"a": "x",\n"b": null, "c": 0.5}}')
    with pytest.raises(Mistakes) as caught:
        model_table(str(path))
    assert [line.split(": ")[:2] for line in caught.value.lines] == [
        [f"{path}:1", "unknown key 'default'; known"], [f"{path}:2", "models.a"], [f"{path}:3", "models.b"]
    ]  # fmt: skip


def test_c31_a_required_model_table_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """C31: If a model table is required, a missing one raises UsageError.

    A link without a target raises UsageError in any case.
    """
    with pytest.raises(UsageError, match="no such model table"):
        model_table(str(tmp_path / "m.json"), needed=True)
    (tmp_path / "m.json").symlink_to("nowhere")
    with pytest.raises(UsageError, match="no such model table"):
        model_table(str(tmp_path / "m.json"))


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_c37_a_model_table_that_all_users_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """C37: A model table that all users may write is refused with exit code 1."""
    path = tmp_path / "m.json"
    path.write_text("{}")
    path.chmod(mode)
    with pytest.raises(SchedulerError, match="chmod o-w") as caught:
        model_table(str(path))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("key", sorted(OPTIONS))
@given(st.data())
@examples(40)
def test_a_value_written_by_config_show_is_read_back_unchanged(key: str, data: st.DataObject) -> None:
    """Contract 2: A value written by `config show` is read back unchanged from a config file."""
    texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
    value = data.draw(
        st.one_of(st.floats(0, 1), st.integers(0, 4000), st.sampled_from(["short", "local", "poll", "true"]), texts)
    )
    try:
        value = read_option(key, value, "")
    except SchedulerError:
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "c.yaml").write_text(f"{key}: {written(value)}  # where it comes from\n", newline="")
        entries, errors = read_entries(f"{folder}/c.yaml")
    read = read_option(key, entries[key].value, "") if entries[key].value is not None else defaults()[key]
    assert not errors and read == value
