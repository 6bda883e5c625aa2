"""Generates JSON Schemas from types: a document is a TypedDict whose annotations describe its keys."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


class Field:
    """Description and limits of a value: ``Annotated[int, Field("Number of the GPU.", minimum=0)]``.

    ``choices``: the allowed texts. ``limits``: further keywords of JSON Schema.
    """

    def __init__(self, about: str = "", *, choices: tuple[str, ...] = (), **limits: Any) -> None:
        self.about, self.choices, self.limits = about, choices, limits


def schema_of(form: Any, named: Mapping[Any, str] | None = None) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a type. The type None becomes null.

    A TypedDict becomes an object that allows only the keys of the TypedDict.
    ``named``: type → name of the schema file of this type. Where such a type occurs, the schema refers to that file.
    Raises TypeError for a type without a JSON equivalent.
    """
    named = named or {}
    if form in named:
        return {"$ref": f"{named[form]}.schema.json"}
    fields: list[Field] = []
    while (extra := getattr(form, "__metadata__", None)) is not None:
        fields += [one for one in extra if isinstance(one, Field)]
        form = form.__origin__
    made = _type(form, named)
    for field in fields:
        if field.choices:
            made = {"enum": [*field.choices, *([None] if _nullable(form) else [])]}
        made |= field.limits
        if field.about:
            made["description"] = field.about
    return made


def published(name: str, form: Any, named: Mapping[Any, str]) -> dict[str, Any]:
    """Return the contents of the schema file ``name`` for the type ``form``. ``named``: see `schema_of`."""
    others = {other: file for other, file in named.items() if other is not form}
    about = {"$schema": DIALECT, "title": name}
    return about | ({"description": form.__doc__} if is_typeddict(form) else {}) | schema_of(form, others)


def _nullable(form: Any) -> bool:
    return get_origin(form) in (Union, types.UnionType) and type(None) in get_args(form)


def _type(form: Any, named: Mapping[Any, str]) -> dict[str, Any]:
    origin, inner = get_origin(form), get_args(form)
    if form is Any:
        return {}
    if form in _PLAIN:
        return {"type": _PLAIN[form]}
    if is_typeddict(form):
        hints = get_type_hints(form, include_extras=True)
        return {
            "type": "object",
            "properties": {key: schema_of(hint, named) for key, hint in hints.items()},
            "required": [key for key in hints if key in form.__required_keys__],
            "additionalProperties": False,
        }
    if origin is Literal:
        return {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": schema_of(inner[0], named)}
    if origin is tuple:
        items = [schema_of(one, named) for one in inner]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(inner[1], named)}
    if origin in (Union, types.UnionType):
        return _one_of([schema_of(one, named) for one in inner if one is not type(None)], _nullable(form))
    raise TypeError(f"{form!r} has no equivalent in JSON")


def _one_of(kinds: list[dict[str, Any]], nullable: bool) -> dict[str, Any]:
    if not nullable:
        return {"oneOf": kinds}
    if len(kinds) == 1 and isinstance(kinds[0].get("type"), str) and kinds[0]["type"] != "object":
        return {**kinds[0], "type": [kinds[0]["type"], "null"]}
    return {"oneOf": [{"type": "null"}, *kinds]}
