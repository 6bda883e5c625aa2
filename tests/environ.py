"""The environment of commands that tests start."""

from __future__ import annotations

import os

NO_CONFIG = "/nonexistent/config.yaml"  # for GPUJOB_MACHINE_CONFIG
APART = frozenset(
    {"GPUJOB_BOOKINGS_FOLDER", "GPUJOB_MACHINE_CONFIG"}
)  # keep tests apart from schedulers of this machine


def clean(*drop: str) -> dict[str, str]:
    """Return this process's environment without the variables of gpujob.

    Variables whose names begin with one of the texts ``drop`` are left out, too. GPUJOB_WARM and the variables in `APART`
    keep their values (see `tests/conftest.py`).
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUJOB_", *drop))}
    told = {name: os.environ[name] for name in APART if name in os.environ}
    return {**kept, **told, "GPUJOB_WARM": os.environ.get("GPUJOB_WARM", "0")}
