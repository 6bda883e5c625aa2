"""Settings of a running daemon: read again when their file changes, and handed to those who decide."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from scheduler.core.config import OPTIONS, RELOADABLE, Config, written
from scheduler.core.decide import Policy
from scheduler.core.errors import Refused, SchedulerError
from scheduler.core.facts import Arrived, Now, Readings
from scheduler.core.gpu import Gpu
from scheduler.core.job import Job
from scheduler.core.llm import ModelTable, booking_memory, need_of
from scheduler.core.queue import Order
from scheduler.core.telemetry import Limits
from scheduler.engine.gpus import UNREAD, Flag, managed_anew
from scheduler.engine.telling import harmless
from scheduler.intake.settings import DEFAULT, Settings, model_table
from scheduler.opening import tail_of
from scheduler.store import jobs as rows

if TYPE_CHECKING:
    from scheduler.engine.loop import House


UNCHANGED_S = 5.0  # reading can be turned off only at the start
SETTLE_S = 0.3  # a file that is being written is read when it has stood so long


def policy_of(config: Config) -> Policy:
    """The settings that decisions depend on."""
    return Policy(
        Order(config.order, config.aging),
        config.max_assign_attempts,
        config.assign_retry_wait,
        config.oom_retries,
        config.kill_grace,
        config.max_overtakes,
        limits_of(config),
    )


def rebooked(config: Config, gpus: Sequence[Gpu], table: ModelTable, waiting: Iterable[Job]) -> list[Job]:
    """Those of these jobs whose need is another by the settings now: commands of a file say nothing of it themselves."""
    found = []
    for job in waiting:
        if job.spec.source != "commands" or job.attempt or job.spec.edited:
            continue
        wish = replace(job.spec, gpus="", vram_mib=None)
        spec = booking_memory(wish, config.min_free_mem_mb, read=any(gpu.memory_mib for gpu in gpus))
        if spec != job.spec:
            job.spec, job.need = spec, need_of(spec, table, gpus)[0]
            found.append(job)
    return found


def needs_anew(gpus: Sequence[Gpu], table: ModelTable, waiting: Iterable[Job]) -> list[Job]:
    """Those of these jobs whose need is another by the model table and the GPUs now, with it."""
    found = []
    for job in waiting:
        if job.spec.gpus or job.oom_retries:
            continue
        need, _ = need_of(job.spec, table, gpus)
        if need != job.need:
            job.need = need
            found.append(job)
    return found


def cpu_slots_of(config: Config) -> int:
    """How many jobs without GPUs may run at once."""
    return config.cpu_slots if config.cpu_slots is not None else os.cpu_count() or 1


def limits_of(config: Config) -> Limits:
    """The settings that the GPUs' readings are judged by."""
    return Limits(
        config.mem_threshold,
        config.load_threshold,
        config.whole_gpu_tolerance,
        min(config.gpu_interval, config.poll_interval or math.inf) or UNCHANGED_S,
        config.settle,
        config.release,
        config.hold_on_errors,
        bool(config.min_free_mem_mb),
    )


def note_of(settings: Settings) -> str:
    """Value and origin of each setting, as the store keeps them for `config show`."""
    values = settings.config.policy_values()
    return json.dumps({key: [value, settings.origin[key]] for key, value in values.items()})


GPU_KEYS = frozenset({"gpus", "gpu_ids"})


@dataclass(slots=True)
class Rereading:
    """When a running daemon looks at its config and its model table again, and what was said of them.

    ``load`` reads all settings anew, so that flags and environment still win over the file.
    """

    settings: Settings
    load: Callable[[], Settings]
    has_table: bool = False  # a table that was there is not taken for none when it is gone
    config_due: float = math.inf
    table_due: float = math.inf
    config_trouble: str = ""
    table_trouble: str = ""
    gpu_trouble: str = ""
    doubtful_since: float | None = None  # the table cannot be read: somebody may be in the midst of writing it
    waiting: dict[str, Any] = field(default_factory=dict)  # what a restart would change, as it was said last
    noted: str = field(init=False)

    def __post_init__(self) -> None:
        self.noted = note_of(self.settings)

    @property
    def due(self) -> float:
        """When to look by itself (``mono``)."""
        return min(self.config_due, self.table_due)

    def look(self, house: House, now: Now, everything: bool) -> None:
        """Read what has changed; ``everything``: whether it was noticed or not."""
        config_file, table_file = self.settings.config_file, self.settings.config.llm_config
        if config_file and config_file in house.changed:
            # Half of a config can be read as well as the whole, unless its last line says that it is the last.
            self.config_due = now.mono + (0.0 if _says_its_end(config_file) else SETTLE_S)
        elif config_file and everything and self.config_due == math.inf:
            self.config_due = now.mono
        if table_file in house.changed or (table_file and everything and self.table_due == math.inf):
            self.table_due = now.mono  # half a table cannot be read
        if now.mono >= self.config_due:
            self.config_due = math.inf
            self._config(house)
        if now.mono >= self.table_due:
            self.table_due = math.inf
            self._table(house, now)

    def _config(self, house: House) -> None:
        """Read the config again; what may change while running, changes."""
        path = self.settings.config_file
        try:
            fresh = self.load()
        except SchedulerError as error:
            text = harmless(str(error)) if os.path.lexists(path) else f"{harmless(path)}: the config file is gone"
            if text != self.config_trouble:
                house.say(f"{text}; the settings in force stay", 30, kind="config")
            self.config_trouble = text
            return
        changes = self._take(fresh, house)
        if changes or self.config_trouble:
            house.say(f"config read again: {'; '.join(changes) or 'nothing has changed'}", 20, kind="config")
        self.config_trouble = ""
        note = note_of(self.settings)
        if note != self.noted:
            with house.db.writing(sync=False) as connection:
                rows.set_meta(connection, "settings", note)
            self.noted = note

    def _take(self, fresh: Settings, house: House) -> list[str]:
        """Take over what may change; what has changed, and what waits for a restart, in words."""
        old, new = self.settings.config, fresh.config
        values = {key: (getattr(old, key), getattr(new, key)) for key in OPTIONS}
        changed = {key for key, (before, after) in values.items() if before != after}
        words, refused, gpus = [], "", house.gpus
        if changed & GPU_KEYS:
            try:
                gpus = managed_anew(new, house.gpus, house.shown, house.environ)
                _save_gpus(house, gpus)
            except Refused as error:
                refused = str(error)
                words += [f"{refused}; the GPUs stay as they are"] if refused != self.gpu_trouble else []
        self.gpu_trouble = refused
        left = GPU_KEYS if refused else frozenset()
        taken = {key: values[key][1] for key in changed - left if _may_change(key, *values[key])}
        waiting = {
            key: values[key][1]
            for key in OPTIONS
            # Paths that only follow the state file to its new folder are not named one by one.
            if key in changed - set(taken) - left and (fresh.origin[key] != DEFAULT or old.state_file == new.state_file)
        }
        origin = {key: (self.settings if key in changed and key not in taken else fresh).origin[key] for key in OPTIONS}
        self.settings = Settings(replace(old, **taken), origin, self.settings.config_file)
        words += [
            f"{key} {written(before)} -> {written(after)}" for key, (before, after) in values.items() if key in taken
        ]
        unsaid = [key for key, value in waiting.items() if key not in self.waiting or self.waiting[key] != value]
        if unsaid:
            words.append(f"{', '.join(unsaid)} need{'s' if len(unsaid) == 1 else ''} a restart")
        self.waiting = waiting
        if taken:
            house.config = self.settings.config
            house.world.policy = policy_of(house.config)
            house.world.fleet.resize(cpu_slots_of(house.config))
            house.set_modes()
            house.rung = True  # what waits is looked at by the new settings
            if gpus != house.gpus:
                _manage(house, gpus)
        return words

    def _table(self, house: House, now: Now) -> None:
        """Read the model table again; a broken one, or none, leaves the last good one in force."""
        config = house.config
        try:
            table = model_table(config.llm_config, config.trust_group, needed=self.has_table)
        except SchedulerError as error:
            self.doubtful_since = now.mono if self.doubtful_since is None else self.doubtful_since
            if now.mono < self.doubtful_since + SETTLE_S:
                self.table_due = self.doubtful_since + SETTLE_S
                return
            text = harmless(str(error))
            if text != self.table_trouble:
                house.say(f"{text}; the last good model table stays in force", 30, kind="table")
            self.table_trouble = text
            return
        self.has_table, self.doubtful_since = os.path.exists(config.llm_config), None
        if table != house.table:
            _use_table(house, table, now)
        elif self.table_trouble:
            house.say(f"{harmless(config.llm_config)}: can be read again; nothing has changed", 20, kind="table")
        self.table_trouble = ""


def _says_its_end(path: str) -> bool:
    """Whether a YAML file ends with the mark of a document's end."""
    try:
        return tail_of(path, 5) == b"\n...\n"
    except OSError:
        return False


def _may_change(key: str, before: Any, after: Any) -> bool:
    if key == "gpu_interval" and not (before and after):
        return False  # readings are turned on and off at the start
    return key in RELOADABLE


def _use_table(house: House, table: ModelTable, now: Now) -> None:
    changed = needs_anew(house.gpus, table, rows.pending(house.db.connection))
    with house.db.writing() as connection:
        rows.set_meta(connection, "model_table", table.as_json())
        rows.save(connection, changed)
    house.table = table
    house.say(f"model table read: {len(table.models)} models, default need {table.default}", 20, kind="table")
    house.kept.update({job.id: job for job in changed if job.id in house.kept})
    if changed:
        house.turn([Arrived(job) for job in changed], [], now, sync=True)
        house.say(f"{len(changed)} waiting jobs have another need now", 20, kind="table")


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
    _save_gpus(house, gpus)
    house.gpus = gpus
    return True


def _manage(house: House, gpus: list[Gpu]) -> None:
    """Manage these GPUs from now on. Jobs on one that is taken away go on, and it gets no other. Raises StoreTrouble."""
    house.gpus = gpus
    house.judged.clear()  # lines that were refused may be jobs now
    if house.flag is not None:
        house.flag.close()
        house.flag = Flag(gpus)
    house.open()


def _save_gpus(house: House, gpus: Sequence[Gpu]) -> None:
    changed = needs_anew(gpus, house.table, rows.pending(house.db.connection))
    with house.db.writing() as connection:
        rows.save_gpus(connection, gpus)
        rows.save(connection, changed)
