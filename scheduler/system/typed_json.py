"""Values of our dataclasses as JSON, and back with strict types.

Used between processes that do not trust each other, so nothing is executed, and a value of a wrong type is an error.
"""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any) -> bytes:
    """Return a value as JSON: dataclasses become objects, tuples become arrays, enums their values."""
    import msgspec

    # The encoder of msgspec refuses file names that are not UTF-8; `json` writes them as lone surrogates.
    return json.dumps(msgspec.to_builtins(value, str_keys=True), separators=(",", ":")).encode()


def plain(value: Any) -> Any:
    """Return a value as dicts, lists, texts and numbers, as `to_json` writes them."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)


def from_json(data: bytes | str) -> Any:
    """Return dicts, lists, texts and numbers. Raises ValueError if the data is not JSON."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def typed(value: Any, kind: Any) -> Any:
    """Return a value of `from_json` as a value of the type ``kind``. Raises ValueError if it has another type."""
    import msgspec

    try:
        return msgspec.convert(value, kind, strict=True, str_keys=True)
    except (msgspec.ValidationError, RecursionError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
