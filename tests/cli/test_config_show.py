"""Tests of `config show` and `config check`, run as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from scheduler.core.config import OPTIONS, RELOADABLE, read_option
from tests import fork_server
from tests.environ import clean

ROOT = Path(__file__).resolve().parents[2]


class Asked:
    """The result of a command that was run in ``folder``: exit code, stdout and stderr."""

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        kept = clean()
        kept |= {
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_CONFIG_HOME": str(folder / "xdg"),
            **environ,
        }
        done = fork_server.run(words, folder, kept, "", 60)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.err


def test_config_show_prints_a_valid_config_file_with_the_same_settings(tmp_path: Path) -> None:
    """Contract 2, 6: `config show` prints every setting as YAML; used as a config file, it gives the same settings."""
    (tmp_path / "config.yaml").write_text("gpu_ids: [0, 2]\npython: '3.10'\nlog_dir: a b # c\nmem_threshold: 80%\n")
    shown = Asked(tmp_path, "config", "show", "--origin")
    assert shown.code == 0 and shown.err == ""
    values = yaml.safe_load(shown.out)
    assert list(values) == list(OPTIONS)
    assert values["gpu_ids"] == [0, 2] and values["python"] == "3.10" and values["mem_threshold"] == 0.8
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.yaml").write_text(shown.out)
    plain = Asked(again, "config", "show")
    assert plain.out == Asked(tmp_path, "config").out and "#" not in plain.out


def test_config_show_origin_names_the_source_of_each_setting(tmp_path: Path) -> None:
    """Contract 2: --origin names the source of each setting.

    A source is the command line, a variable, a line of the config file, or the default.
    """
    config = tmp_path / "own.yaml"
    config.write_text("# mine\nmem_threshold: 0.9\norder: short\n")
    shown = Asked(
        tmp_path,
        "--state-file",
        "s.json",
        "config",
        "show",
        "--origin",
        "--config",
        "own.yaml",
        GPUJOB_SET_ORDER="fifo",
    )
    lines = {line.split(":")[0]: line.split() for line in shown.out.splitlines()}
    assert lines["state_file"] == ["state_file:", f"{tmp_path}/s.json", "#", "command", "line"]
    assert lines["mem_threshold"] == ["mem_threshold:", "0.9", "#", f"{config}:2"]
    assert lines["order"] == ["order:", "fifo", "#", "GPUJOB_SET_ORDER"]
    assert lines["kill_grace"] == ["kill_grace:", "15", "#", "default"]
    whole = Asked(tmp_path, "config", "show", GPUJOB_STATE_FILE="t.json", GPUJOB_CONFIG=str(config)).out
    assert f"state_file: {tmp_path}/t.json\n" in whole


def test_config_show_json_prints_one_json_value(tmp_path: Path) -> None:
    """Contract 6: `config show --json` prints one JSON value with value, origin and default of each setting."""
    (tmp_path / "config.yaml").write_text("kill_grace: 2m\ngpu_ids: 0-2\n")
    value = json.loads(Asked(tmp_path, "config", "show", "--json").out)
    assert (value["schema"], value["config_file"], value["daemon"]) == (1, str(tmp_path / "config.yaml"), False)
    assert value["settings"]["kill_grace"] == {
        "value": 120.0, "origin": f"{tmp_path}/config.yaml:1", "default": 15.0, "reload": True, "running": None
    }  # fmt: skip
    assert value["settings"]["gpu_ids"]["value"] == [0, 1, 2]
    assert {key for key, shown in value["settings"].items() if shown["reload"]} == RELOADABLE
    for key, shown in value["settings"].items():
        assert read_option(key, shown["default"], "") == OPTIONS[key].default


def test_config_check_prints_one_line_for_each_mistake(tmp_path: Path) -> None:
    """P3: `config check` prints one line for each mistake and exits with 2. Without a mistake, it exits with 0."""
    config = tmp_path / "config.yaml"
    assert Asked(tmp_path, "config", "check").out == "no mistakes; there is no config file\n"
    config.write_text("aging: 1\n")
    assert Asked(tmp_path, "config", "check").out == f"{config}: no mistakes, 1 setting\n"
    config.write_text("aging: x\nagin: 1\n")
    checked = Asked(tmp_path, "config", "check")
    assert (checked.code, checked.out, len(checked.err.splitlines())) == (2, "", 2)
    assert Asked(tmp_path, "config", "show").err == checked.err == Asked(tmp_path, "start").err
    config.write_text("aging: 1\n")
    (tmp_path / "llm_config.json").write_text('{"models": {"a": -1}}')
    wrong = Asked(tmp_path, "config", "check", GPUJOB_SET_ODER="fifo")
    assert wrong.code == 2 and "GPUJOB_SET_ODER" in wrong.err and "did you mean GPUJOB_SET_ORDER" in wrong.err
    wrong = Asked(tmp_path, "config", "check")
    assert wrong.code == 2 and "llm_config.json:1: models.a: " in wrong.err
    assert Asked(tmp_path, "config", "check", "config.yaml", GPUJOB_SET_ODER="fifo").code == 0
    config.chmod(0o666)
    wrong = Asked(tmp_path, "config", "check", "config.yaml")
    assert wrong.code == 1 and f"chmod o-w {config}" in wrong.err
    assert Asked(tmp_path, "config", "check", "nosuch.yaml").code == 2
    assert Asked(tmp_path, "config", "chek").code == 2


@pytest.mark.parametrize("text", ["log_dir: \"a\\e[31mb\"\n", "\"\\e[31m\": 1\n", "order: \"\\e[31m\\n\"\n"])  # fmt: skip
def test_escape_sequences_in_a_config_do_not_reach_the_terminal(tmp_path: Path, text: str) -> None:
    """P3, P9: Escape sequences in a config file never reach the terminal, neither in a setting nor in an error."""
    (tmp_path / "config.yaml").write_text(text)
    for words in (("config", "show", "--origin"), ("start",), ("status",)):
        if words == ("start",) and text.startswith("log_dir"):
            continue
        asked = Asked(tmp_path, *words)
        assert "\x1b" not in asked.out + asked.err
