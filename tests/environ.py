"""The environment of commands that tests start."""

from __future__ import annotations

import os


def clean(*drop: str) -> dict[str, str]:
    """Return this process's environment without the variables of gpujob.

    Variables whose names begin with one of the texts ``drop`` are left out, too. GPUJOB_WARM keeps its value (see
    `tests/conftest.py`).
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUJOB_", *drop))}
    return {**kept, "GPUJOB_WARM": os.environ.get("GPUJOB_WARM", "0")}
