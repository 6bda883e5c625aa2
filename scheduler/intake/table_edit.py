"""Changes needs in the text of a model table. Everything else in the text stays as it is, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

_BLANK = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of a JSON object: its key, and where the key and the value begin and end in the text."""

    key: str
    begin: int
    value: int
    end: int


def with_needs(text: str, needs: Mapping[str, str]) -> str:
    """Return the text of a model table with other needs for some models.

    ``text``: a valid model table, or nothing; ``needs``: model name → need. The value of a model in the table is replaced. Other models
    are added after the last one, laid out as the others are.
    """
    if not text.strip("\ufeff \t\r\n"):
        return json.dumps({"models": {name: _value(need) for name, need in needs.items()}}, indent=2) + "\n"
    for name, need in needs.items():
        text = _with_need(text, name, json.dumps(_value(need)))
    return text


def _value(need: str) -> float | int | str:
    if not _NUMBER.fullmatch(need):
        return need  # such as 2x0.5
    return float(need) if "." in need else int(need)


def _with_need(text: str, name: str, value: str) -> str:
    top = _members(text, text.index("{"))
    models = next((one for one in top if one.key == "models"), None)
    if models is None:
        return _added(text, text.index("{"), top, "models", "{" + f"{json.dumps(name)}: {value}" + "}")
    inside = _members(text, models.value)
    for one in inside:
        if one.key == name:
            return text[: one.value] + value + text[one.end :]
    return _added(text, models.value, inside, name, value)


def _members(text: str, brace: int) -> list[_Member]:
    """Return the members of the JSON object that begins at ``brace``."""
    found: list[_Member] = []
    decoder = json.JSONDecoder()
    at = _after_blanks(text, brace + 1)
    while text[at] != "}":
        begin = at
        key, at = decoder.raw_decode(text, at)
        value = _after_blanks(text, _after_blanks(text, at) + 1)  # after the colon
        _, end = decoder.raw_decode(text, value)
        found.append(_Member(key, begin, value, end))
        at = _after_blanks(text, end)
        if text[at] == ",":
            at = _after_blanks(text, at + 1)
    return found


def _after_blanks(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None, "the pattern matches everywhere"
    return match.end()


def _added(text: str, brace: int, members: list[_Member], name: str, value: str) -> str:
    """Return the text with one more member in the object that begins at ``brace``."""
    if not members:
        return f"{text[: brace + 1]}{json.dumps(name, ensure_ascii=False)}: {value}{text[brace + 1 :]}"
    last = members[-1]
    if len(members) > 1:
        between = text[text.index(",", members[-2].end) + 1 : last.begin]
    else:
        between = text[brace + 1 : last.begin] or " "
    return f"{text[: last.end]},{between}{json.dumps(name, ensure_ascii=False)}: {value}{text[last.end :]}"
