"""The settings that decisions depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.core.config import Config
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.queue import Order

UNCHANGED_S = 5.0  # replaces an interval of 0, with which GPUs are never read


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on; durations are in seconds. `policy_of` takes them from a Config."""

    order: Order
    max_assign_attempts: int
    assign_retry_wait_s: float
    oom_retries: int
    kill_grace_s: float
    max_overtakes: int  # 0: no limit
    backfill: bool  # reservations in time, where run times are known
    thresholds: Thresholds
    kill_trespassers: bool = False  # whether a job with a process on a GPU that it was not given is ended
    release_ahead: int = 0  # jobs that may wait in the queue of an engine although they do not fit now


def policy_of(config: Config) -> Policy:
    """Return the settings of ``config`` that decisions depend on."""
    return Policy(
        Order(config.order, config.aging),
        config.max_assign_attempts,
        config.assign_retry_wait,
        config.oom_retries,
        config.kill_grace,
        config.max_overtakes,
        config.backfill,
        thresholds_of(config),
        config.on_trespass == "kill",
        config.release_ahead if config.engine == "slurm" else 0,
    )


def thresholds_of(config: Config) -> Thresholds:
    """Return the thresholds by which readings of the GPUs are judged."""
    return Thresholds(
        config.mem_threshold,
        config.load_threshold,
        config.whole_gpu_tolerance,
        min(config.gpu_interval, config.poll_interval or math.inf) or UNCHANGED_S,
        config.settle,
        config.release,
        config.hold_on_errors,
        bool(config.min_free_mem_mb),
        config.min_free_mem_mb or 0,
    )
