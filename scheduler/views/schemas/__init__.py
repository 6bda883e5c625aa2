"""The published forms of our JSON, as JSON Schemas."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def schema(name: str) -> dict[str, Any]:
    """The schema of ``name`` (`job`, `status`…)."""
    found: dict[str, Any] = json.loads(files(__name__).joinpath(f"{name}.schema.json").read_text("utf-8"))
    return found
