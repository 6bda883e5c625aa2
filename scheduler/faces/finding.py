"""Which scheduler a command means: flag, environment, config, here, or the only one alive."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from scheduler.core.errors import UsageError
from scheduler.faces.terminal import safe
from scheduler.intake.settings import Settings, find_config, load
from scheduler.store.office import registered
from scheduler.store.places import Places


def settings_for(flags: Mapping[str, Any], config_file: str | None = None) -> Settings:
    """The settings a command works with. ``flags``: only what was given. Raises UsageError."""
    return load(flags, os.environ, config_file)


def state_file_for(state_file: str | None, config_file: str | None = None) -> str:
    """The state file of the scheduler that is meant; one found only by being alone alive is named on stderr."""
    if state_file:
        return os.path.abspath(os.path.expanduser(state_file))
    if os.environ.get("GPUJOB_STATE_FILE"):
        return os.path.abspath(os.environ["GPUJOB_STATE_FILE"])
    here = os.getcwd()
    configured = bool(os.environ.get("GPUJOB_SET_STATE_FILE")) or bool(find_config(os.environ, config_file, here))
    if configured:
        settings = load({}, os.environ, config_file)
        if settings.origin["state_file"] != "default":
            return settings.config.state_file
    default = os.path.join(here, "gpu_scheduler_state.json")
    if os.path.exists(default) or Places(default).exist():
        return default
    alive = registered(dict(os.environ))
    if len(alive) == 1:
        print(safe(f"gpujob: using the scheduler of {alive[0]}"), file=sys.stderr)
        return alive[0]
    if alive:
        raise UsageError(
            f"{len(alive)} schedulers of yours are running: {', '.join(alive)}", do="name one with --state-file"
        )
    return default
