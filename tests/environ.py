"""The environment of commands that tests start."""

from __future__ import annotations

import os


def clean(*drop: str) -> dict[str, str]:
    """Return this process's environment without the variables of gpujob.

    Variables whose names begin with one of the texts ``drop`` are left out, too. GPUJOB_WARM and
    GPUJOB_BOOKINGS_FOLDER keep their values (see `tests/conftest.py`).
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUJOB_", *drop))}
    told = {name: os.environ[name] for name in ("GPUJOB_BOOKINGS_FOLDER",) if name in os.environ}
    return {**kept, **told, "GPUJOB_WARM": os.environ.get("GPUJOB_WARM", "0")}
