"""The GPUs that the daemon manages, and their readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.core.admission import FRESH_S, Admission
from scheduler.core.engine_placement import numbered
from scheduler.core.gpu import Gpu
from scheduler.core.observations import Now, Readings
from scheduler.core.policy import thresholds_of
from scheduler.core.topology import with_links
from scheduler.daemon.context import Context
from scheduler.daemon.parts import NEVER
from scheduler.daemon.rebooking import update_needs
from scheduler.gpus.monitor import UNREAD, Flag, GpuMonitor
from scheduler.store import jobs as rows


class ManagedGpus:
    """The managed GPUs with their GPU reader, their latest readings and their admission (`core/admission.py`).

    ``shown``: all GPUs that the driver showed when the daemon started, managed or not. ``monitor``: the GPU reader;
    None for declared GPUs, which are not read. ``first``: the readings taken when the daemon started.
    """

    def __init__(
        self, context: Context, gpus: list[Gpu], shown: list[Gpu], monitor: GpuMonitor | None, first: Readings | None
    ) -> None:
        self._context, self.gpus, self.shown, self.monitor, self._first = context, gpus, shown, monitor, first
        self._flag = Flag(() if context.config.share_bookings else gpus)
        self.admission = Admission()
        self.readings: Readings | None = None

    def step(self, now: Now) -> None:
        """Set ``readings`` to the new readings, or to None if there are none.

        Request the next readings if they are due.
        """
        self.readings = self.monitor.look(now.mono, self._interval()) if self.monitor is not None else None

    def first_readings(self) -> Readings | None:
        """Return the readings taken at the daemon's start, with the owners of GPU processes.

        The second and all later calls return None.
        """
        found, self._first = self._first, None
        return self.monitor.identified(found) if self.monitor is not None and found is not None else None

    def admission_now(self, now: Now) -> Admission | None:
        """Return the admission of the managed GPUs, for use when the state is rebuilt; None for declared GPUs.

        While the managed GPUs stay the same, each call returns the same object. After a change of the managed GPUs, the
        result is a new object, which takes over only what attempts were seen to use.
        """
        if self.monitor is None:
            return None
        if [card.gpu for card in self.admission.cards.values()] != self.gpus:
            measured = self.admission.measured
            self.admission = Admission.of(self.gpus, thresholds_of(self._context.config), now)
            self.admission.measured = measured
        return self.admission

    def read_if_old(self, now: Now) -> None:
        """Request a reading unless all GPUs were read within the last ``FRESH_S`` seconds."""
        if self.monitor is not None and not self.admission.fresh(self.admission.cards, now):
            self.monitor.read(now.mono - FRESH_S)

    def read(self, since: float) -> None:
        """Request a reading, unless a reading is under way that began at ``since`` (monotonic seconds) or later."""
        if self.monitor is not None:
            self.monitor.read(since)

    def manage(self, gpus: list[Gpu]) -> None:
        """Replace the managed GPUs, and announce the new ones if they are not shared (`share_bookings`)."""
        self.gpus = gpus
        self._flag.close()
        self._flag = Flag(() if self._context.config.share_bookings else gpus)

    def learn_gpus(self, readings: Readings) -> bool:
        """Set UUID, name, memory and links of the GPUs where they were unknown, because the driver did not answer earlier.

        Return whether a GPU has changed. Also add the GPUs of new nodes of a cluster. Raises StoreTrouble, sqlite3.Error.
        """
        if any(reading.by_engine for reading in readings.gpus):
            return self._add_new(readings)
        found = {reading.ordinal: reading for reading in readings.gpus if reading.uuid and not reading.mig}
        gpus = [
            replace(
                gpu,
                uuid=found[gpu.index].uuid,
                name=found[gpu.index].name,
                memory_mib=found[gpu.index].memory_total_mib,
            )
            if gpu.uuid.startswith(UNREAD) and gpu.index in found
            else gpu
            for gpu in self.gpus
        ]
        gpus = with_links(gpus, readings.gpus, {gpu.uuid: gpu.index for gpu in (*self.shown, *gpus)})
        if gpus == self.gpus:
            return False
        self.save(gpus)
        self.gpus = gpus
        return True

    def _add_new(self, readings: Readings) -> bool:
        known = {gpu.uuid for gpu in self.gpus}
        if all(reading.uuid in known for reading in readings.gpus):
            return False
        listed = numbered(readings, self.gpus)
        gone = [gpu for gpu in self.gpus if gpu.uuid not in {new.uuid for new in listed}]  # shown as gone
        gpus = sorted([*listed, *gone], key=lambda gpu: gpu.index)
        self.save(gpus)
        self.gpus = gpus
        return True

    def save(self, gpus: Sequence[Gpu]) -> None:
        """Store these GPUs, and recompute and store the needs of waiting jobs. Raises StoreTrouble, sqlite3.Error."""
        with self._context.db.writing() as connection:
            rows.save_gpus(connection, gpus)
            update_needs(connection, gpus, self._context.needs)

    def sessions(self) -> set[int]:
        """Return the POSIX sessions of the processes that read the GPUs. These processes belong to no job."""
        return self.monitor.probe.sessions() if self.monitor is not None else set()

    def due(self) -> float:
        """Return when the next step is due even without an event (monotonic seconds); ``NEVER`` for declared GPUs."""
        return self.monitor.next_look(self._interval()) if self.monitor is not None else NEVER

    def close(self) -> None:
        """End the GPU reader, and no longer announce the GPUs to other schedulers."""
        self._flag.close()
        if self.monitor is not None:
            self.monitor.probe.close()

    def _interval(self) -> float:
        """Return the seconds between two readings.

        This time is at most ``FRESH_S`` while the next reading decides whether a GPU is blocked
        (`Admission.uncertain`).
        """
        interval = thresholds_of(self._context.config).interval_s
        return min(FRESH_S, interval) if self.admission.uncertain else interval
