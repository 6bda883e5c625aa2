"""The engine that the settings name."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from scheduler.core.config import Config
from scheduler.core.engine import Engine


def engine_of(config: Callable[[], Config], environ: Mapping[str, str], limit_s: float | None = None) -> Engine:
    """Return the engine of the setting `engine`.

    ``config``: returns the settings in force, because some may change while the engine is used; ``environ``: environment
    of the scheduler; ``limit_s``: time limit of one question, in place of that of the engine. Raises SchedulerError if the engine's commands, its address or its token cannot be used.
    """
    first = config()
    limits = {"limit_s": limit_s} if limit_s else {}
    if first.engine == "slurm":
        from scheduler.runners.slurm import Slurm

        slurm = Slurm(environ, lambda: shlex.split(config().sbatch_args), lambda: config().nice_step, **limits)
        slurm.check()
        return slurm
    from scheduler.runners.ray import Ray, checked, token_of  # takes 70 ms

    token = token_of(first.engine_token_file, environ)
    return Ray(checked(first.engine_url, token, first.insecure_engine), token, **limits)
