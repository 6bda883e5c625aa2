"""Tests of the JSON Schemas that are generated from typed dictionaries."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest
from jsonschema import Draft202012Validator

from scheduler.core.gpu import GPU_STATES, gpu_state
from scheduler.core.job import EVENT_KINDS, REASON_CODES
from scheduler.doctor.finding import Mark
from scheduler.views.documents import DOCUMENTS, MARKS
from scheduler.views.json_schema import Field, published, schema_of
from scheduler.web.rendering import GLYPHS
from tests.test_docs import ROOT


class _Always(TypedDict):
    id: Annotated[int, Field("Number.", minimum=0)]


class Form(_Always, total=False):
    """A form."""

    word: Annotated[Optional[str], Field("A word.", choices=("a", "b"))]
    other: Optional[_Always]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (bool, {"type": "boolean"}),
        (Any, {}),
        (Optional[str], {"type": ["string", "null"]}),
        (Annotated[Optional[int], Field(minimum=1)], {"type": ["integer", "null"], "minimum": 1}),
        (Literal[1], {"const": 1}),
        (list[Annotated[float, Field(maximum=1)]], {"type": "array", "items": {"type": "number", "maximum": 1}}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Union[int, list[str], None], {"oneOf": [{"type": "null"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}),
        (tuple[str, int], {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2}),
        (Annotated[Optional[str], Field("One.", choices=("a",))], {"enum": ["a", None], "description": "One."}),
    ],
)  # fmt: skip
def test_each_python_type_has_its_json_schema(form: Any, schema: dict[str, Any]) -> None:
    assert schema_of(form) == schema
    Draft202012Validator.check_schema(schema)


def test_an_object_schema_lists_required_keys_and_forbids_others() -> None:
    made = published("form", Form, {})
    assert made["title"] == "form" and made["description"] == "A form." and made["required"] == ["id"]
    validator = Draft202012Validator(made)
    for good in ({"id": 1}, {"id": 1, "word": None, "other": {"id": 2}}, {"id": 1, "word": "b", "other": None}):
        assert validator.is_valid(good), good
    for bad in ({}, {"id": -1}, {"id": 1, "word": "c"}, {"id": 1, "more": 1}, {"id": 1, "other": {}}):
        assert not validator.is_valid(bad), bad


def test_a_type_with_its_own_schema_file_becomes_a_reference() -> None:
    assert schema_of(list[Form], {Form: "form"}) == {"type": "array", "items": {"$ref": "form.schema.json"}}
    assert "$ref" not in str(published("form", Form, {Form: "form"}))


def test_a_type_without_a_json_equivalent_is_refused() -> None:
    with pytest.raises(TypeError, match="no equivalent in JSON"):
        schema_of(set)


def written(pattern: str, *folders: str) -> set[str]:
    """Return the texts that the groups of ``pattern`` match in the Python files of these folders of the program."""
    texts = [path.read_text() for folder in folders for path in (ROOT / "scheduler" / folder).rglob("*.py")]
    return {found for text in texts for found in re.findall(pattern, text)}


def test_the_schema_lists_every_event_kind_reason_code_and_state_of_the_program() -> None:
    """Each event kind, reason code and state that the program writes is listed in the published schema.

    If the schema lacked one of these words, a reader that validates its input would refuse it.
    """
    kinds = written(r"changed\(\s*job,\s*\"(\w+)\"", "core") | written(
        r"\bEvent\([^\"()]*(?:\(\))?[^\"()]*\"(\w+)\"", "core", "runners"
    )
    assert len(kinds) > 14 and kinds <= set(EVENT_KINDS)
    codes = written(r"\b(?:Reason|Verdict)\(\s*\"([a-z-]+)\"|\bcode=\"([a-z-]+)\"", "core")
    assert len(codes) > 10 and {code or other for code, other in codes} <= set(REASON_CODES)
    states = written(r"\"[a-z]+\": \"([A-Z]+)\"", "core") | {
        gpu_state(paused=paused, admission="", booked=booked) for paused in (True, False) for booked in (True, False)
    }
    assert states == set(GPU_STATES) == {name for name in GLYPHS if name.isupper()}
    assert tuple(mark.value for mark in Mark) == MARKS


def test_the_published_schemas_are_valid_json_schemas() -> None:
    for form in DOCUMENTS.values():
        Draft202012Validator.check_schema(schema_of(form))
