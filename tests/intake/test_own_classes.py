"""Tests of the setting `failure_classes`: the user's own classes of failures in the config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.config import Config, read_option, written
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.own_classes import OwnClass, holds, pieces_of
from scheduler.intake.config_file import read_entries
from scheduler.intake.settings import load
from scheduler.system.typed_json import plain, typed

KEY = "failure_classes"
LICENSE = OwnClass("license", ("License server * not reachable", "no seat"), "ask the admins", (3, 4))


def loaded(folder: Path, text: str, environ: dict[str, str] | None = None) -> tuple[OwnClass, ...] | None:
    (folder / "config.yaml").write_text(text)
    return load({}, {"HOME": str(folder), **(environ or {})}, None, str(folder)).config.failure_classes


def test_classes_are_read_from_the_config_file(tmp_path: Path) -> None:
    text = """\
mem_threshold: 0.9
failure_classes:
  license:
    text: ["License server * not reachable", no seat]
    hint: ask the admins
    after: [3, 4]
  disk: {text: 404}
  oom: {hint: ask Ada}
"""
    assert loaded(tmp_path, text) == (LICENSE, OwnClass("disk", ("404",)), OwnClass("oom", (), "ask Ada"))
    assert loaded(tmp_path, "failure_classes:\n") is None
    assert loaded(tmp_path, "failure_classes: {}\n") is None


def test_a_variable_gives_classes_as_json(tmp_path: Path) -> None:
    value = json.dumps({"license": {"text": "no seat"}})
    assert loaded(tmp_path, "", {"GPUJOB_SET_FAILURE_CLASSES": value}) == (OwnClass("license", ("no seat",)),)


def test_written_classes_are_read_back(tmp_path: Path) -> None:
    """`config show` prints them as one line of YAML, also as the store has them."""
    for value in ((LICENSE, OwnClass("oom", (), "ask: Ada #1")), [list(LICENSE), ["oom", [], "ask: Ada #1", []]]):
        (tmp_path / "c.yaml").write_text(f"{KEY}: {written(value)}  # a comment\n")
        entries, errors = read_entries(str(tmp_path / "c.yaml"))
        assert not errors
        assert read_option(KEY, entries[KEY].value, "") == (LICENSE, OwnClass("oom", (), "ask: Ada #1"))
    assert read_option(KEY, json.loads(json.dumps([LICENSE])), "") == (LICENSE,)


def test_classes_are_sent_to_the_agents_of_users() -> None:
    config = Config(failure_classes=(LICENSE,))
    assert typed(json.loads(json.dumps(plain(config))), Config) == config


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("failure_classes: [a]\n", 1, "must be one value, not a list"),
        ("failure_classes: word\n", 1, "must be a mapping"),
        ("failure_classes:\n  lic: word\n", 2, "lic must be a mapping"),
        ("failure_classes:\n  ok: {text: a}\n  lic: {txt: b}\n", 3, "unknown key txt; did you mean text?"),
        ("failure_classes:\n  lic: {text: ''}\n", 2, "empty text"),
        ("failure_classes:\n  lic: {text: ' * '}\n", 2, "empty text"),
        ("failure_classes:\n  lic: {text: [a, '']}\n", 2, "empty text"),
        ("failure_classes:\n  lic: {}\n", 2, "empty text"),
        ("failure_classes:\n  Lic 1: {text: a}\n", 2, "is not a name of a class"),
        (f"failure_classes:\n  lic: {{text: {'a' * 501}}}\n", 2, "longer than 500 characters"),
        (f"failure_classes:\n  lic: {{text: a, hint: {'a' * 501}}}\n", 2, "longer than 500 characters"),
        ("failure_classes:\n  lic: {text: a, after: [0]}\n", 2, "exit codes from 1 to 255"),
        ("failure_classes:\n  lic: {text: a, after: many}\n", 2, "exit codes from 1 to 255"),
        ("failure_classes:\n  lic: {text: {a: b}}\n", 2, "must be a text or a list of texts"),
        ("failure_classes:\n  lic: {text: a}\n  lic: {text: b}\n", 3, "lic is set twice"),
        ("failure_classes:\n  lic: {text: !!python/name:os.system ''}\n", 2, "not allowed"),
        ("failure_classes:\n  ? [a]\n  : {text: b}\n", 2, "a key must be a plain word"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        loaded(tmp_path, text)
    assert caught.value.where == f"{tmp_path}/config.yaml:{line}"
    assert says in str(caught.value)


def test_there_may_be_a_hundred_classes(tmp_path: Path) -> None:
    lines = [f"  c{number}: {{text: a}}\n" for number in range(101)]
    assert len(loaded(tmp_path, f"{KEY}:\n{''.join(lines[:100])}") or ()) == 100
    with pytest.raises(SchedulerError, match="at most 100 are allowed"):
        loaded(tmp_path, f"{KEY}:\n{''.join(lines)}")


def test_aliases_do_not_make_a_small_file_large(tmp_path: Path) -> None:
    texts = ", ".join(["a"] * 5000)
    rows = "".join(f"  c{number}: {{text: *t}}\n" for number in range(99))
    with pytest.raises(SchedulerError, match="at most 100 are allowed"):
        loaded(tmp_path, f"{KEY}:\n  first: {{text: &t [{texts}]}}\n{rows}")


@pytest.mark.parametrize(
    "value", [True, 3, 1.5, [1], [[1]], "[1]", "{", {"a": 3}, {3: {}}, [["a", "b", "c", "d", "e"]]]
)
def test_a_wrong_value_is_a_usage_error(value: Any) -> None:
    with pytest.raises(UsageError):
        read_option(KEY, value, "x")


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("a*c", "abc", True),
        ("a*c", "ca", False),
        ("a*a", "a", False),
        ("*B*", "abc", True),
        ("ab", "xaby", True),
        ("a**b", "a b", True),
    ],
)
def test_stars_stand_for_any_characters(text: str, line: str, found: bool) -> None:
    assert holds(line, pieces_of(text)) is found
