"""The environment of commands that tests start."""

from __future__ import annotations

import os


def clean(*drop: str) -> dict[str, str]:
    """Return this process's environment without variables of gpujob, and without those that begin with ``drop``.

    GPUJOB_WARM stays (see `tests/conftest.py`): a usual warm process would outlive the test that started it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUJOB_", *drop))}
    return {**kept, "GPUJOB_WARM": os.environ["GPUJOB_WARM"]}
