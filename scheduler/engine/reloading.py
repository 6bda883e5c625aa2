"""Settings of a running daemon: read again when their file changes, and handed to those who decide."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.core.config import Config
from scheduler.core.decide import Policy
from scheduler.core.errors import SchedulerError
from scheduler.core.facts import Arrived, Now, Readings
from scheduler.core.llm import need_of
from scheduler.core.queue import Order
from scheduler.core.telemetry import Limits
from scheduler.engine.gpus import UNREAD
from scheduler.engine.telling import harmless
from scheduler.intake.settings import model_table
from scheduler.store import jobs as rows

if TYPE_CHECKING:
    from scheduler.engine.loop import House


UNCHANGED_S = 5.0  # reading can be turned off only at the start


def policy_of(config: Config) -> Policy:
    """The settings that decisions depend on."""
    return Policy(
        Order(config.order, config.aging),
        config.max_assign_attempts,
        config.assign_retry_wait,
        config.oom_retries,
        config.kill_grace,
        limits_of(config),
    )


def limits_of(config: Config) -> Limits:
    """The settings that the GPUs' readings are judged by."""
    return Limits(
        config.mem_threshold,
        config.load_threshold,
        config.whole_gpu_tolerance,
        config.gpu_interval or UNCHANGED_S,
        config.settle,
        config.release,
        config.hold_on_errors,
    )


def reload_table(house: House, now: Now) -> None:
    """Read the model table again; a broken one leaves the last good one in force."""
    try:
        table = model_table(house.config.llm_config)
    except SchedulerError as error:
        if str(error) not in {text for text, _ in house.known_refusals}:
            house.known_refusals.add((str(error), ""))
            house.say(f"{harmless(str(error))}; the last good model table stays in force", 30, kind="table")
        return
    house.known_refusals -= {
        known for known in house.known_refusals if known[0].startswith(f"{house.config.llm_config}:")
    }
    if table == house.table:
        return
    house.table = table
    house.say(f"model table read: {len(table.models)} models, default need {table.default}", 20, kind="table")
    changed = []
    for job in rows.pending(house.db.connection):
        if job.spec.gpus or job.oom_retries:
            continue
        need, _ = need_of(job.spec, table)
        if need != job.need:
            job.need = need
            changed.append(job)
            if job.id in house.kept:
                house.kept[job.id] = job
    if changed:
        with house.db.writing() as connection:
            rows.save(connection, changed)
        house.turn([Arrived(job) for job in changed], [], now, sync=True)
        house.say(f"{len(changed)} waiting jobs have another need now", 20, kind="table")


def reload_config(house: House) -> None:
    """Read the config again; what may change while running, changes."""
    if house.reload_config is None:
        return
    try:
        house.config = house.reload_config()
    except SchedulerError as error:
        house.say(f"{harmless(str(error))}; the settings in force stay", 30, kind="config")
        return
    house.world.policy = policy_of(house.config)
    house.set_modes()
    house.say("config read again", 20, kind="config")


def bind_unread(house: House, readings: Readings) -> bool:
    """Name the GPUs that were managed by number alone while the driver did not answer; True if there were any."""
    found = {reading.ordinal: reading for reading in readings.gpus if reading.uuid}
    gpus = [
        replace(
            gpu, uuid=found[gpu.index].uuid, name=found[gpu.index].name, memory_mib=found[gpu.index].memory_total_mib
        )
        if gpu.uuid.startswith(UNREAD) and gpu.index in found
        else gpu
        for gpu in house.gpus
    ]
    if gpus == house.gpus:
        return False
    with house.db.writing() as connection:
        rows.save_gpus(connection, gpus)
    house.gpus = gpus
    return True
