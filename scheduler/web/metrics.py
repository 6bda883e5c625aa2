"""Metrics of a scheduler in Prometheus' text format.

The values come only from the scheduler's files, so the metrics work even if the daemon or a GPU hangs. Labels name
states, outcomes, reason codes, GPUs, parts of memory and the version of gpujob. No label names a job, script, command
or user.
See docs/metrics.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from scheduler import __version__
from scheduler.core import counters as counts
from scheduler.core.admission import LEAST_STALE_S, STALE_AFTER
from scheduler.core.errors import SchedulerError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from scheduler.client.client import SchedulerClient
    from scheduler.client.overview import GpuView, Overview

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOT_HEALTHY = frozenset({"GONE", "UNHEALTHY"})
GPU = ("gpu", "uuid")
NODE = ("gpu", "uuid", "node", "partition")  # of a cluster
MIB = 1 << 20


def metrics(client: SchedulerClient) -> bytes:
    """Return all metrics. Raises SchedulerError if prometheus-client is not installed or the store cannot be read."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise SchedulerError(
            f"cannot create metrics: importing prometheus-client failed: {error}", do="pip install 'gpujob[web]'"
        ) from None
    view = client.overview(most_waiting=0)
    tallied, blocked = client.tallies()
    interval_s = float(client.settings().get("gpu_interval", (0.0, ""))[0])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(view, tallied, blocked, client.ticks(), interval_s, time.time()))
    return generate_latest(registry)


class _Figures:
    """A collector for prometheus-client: the metrics of a scheduler at one time.

    ``tallied``: the counters of `core/counters.py`. ``blocked``: reason code → number of waiting jobs. ``ticks``: the
    number of passes by duration, and the sum of the durations in seconds; None if no history is kept. ``interval_s``:
    the interval of the GPU readings in seconds. ``now``: seconds since 1970.
    """

    def __init__(
        self,
        view: Overview,
        tallied: Mapping[str, Mapping[str, float]],
        blocked: Mapping[str, int],
        ticks: tuple[dict[str, float], float] | None,
        interval_s: float,
        now: float,
    ) -> None:
        self.view, self.tallied, self.blocked, self.ticks = view, tallied, blocked, ticks
        self.stale_s, self.now = max(LEAST_STALE_S, STALE_AFTER * interval_s), now

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. If the values of a metric are unknown, the metric has a type but no samples."""
        yield from self._scheduler()
        yield from self._jobs()
        yield from self._gpus()

    def _scheduler(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        view = self.view
        yield _gauge("gpujob_up", "1 while the scheduler runs.", (), [((), float(view.alive))])
        yield _gauge("gpujob_build_info", "Version of gpujob; always 1.", ("version",), [((__version__,), 1.0)])
        yield _gauge("gpujob_queue_paused", "1 while the whole queue is paused.", (), [((), float(view.queue_paused))])
        ticks = HistogramMetricFamily("gpujob_tick_seconds", "Duration of each pass of the main loop in seconds.")
        if self.ticks is not None:
            found, total = self.ticks
            ticks.add_metric([], counts.cumulative(counts.TICK_BUCKETS, found), total)
        yield ticks

    def _jobs(self) -> Iterator[Metric]:
        view, tallied = self.view, self.tallied
        states = [((state,), float(number)) for state, number in view.counts.items()]
        yield _gauge("gpujob_jobs", "Jobs in the store, by state.", ("state",), states)
        yield _counter(
            "gpujob_jobs_finished_total", "Ended jobs by outcome, including jobs that were removed from the store.", "outcome",
            counts.OUTCOMES, tallied.get(counts.FINISHED, {}),
        )  # fmt: skip
        yield _counter(
            "gpujob_jobs_ended_total", "Ended jobs by final state.", "state", counts.ENDINGS,
            tallied.get(counts.ENDED, {}),
        )  # fmt: skip
        yield _counter(
            "gpujob_retries_total", "Retries that were scheduled, by reason.", "reason", counts.RETRIES,
            tallied.get(counts.RETRIED, {}),
        )  # fmt: skip
        yield _histogram(
            "gpujob_job_wait_seconds", "Time from the submission of a job to its first start in seconds.", counts.WAIT_BUCKETS,
            tallied.get(counts.WAITED, {}),
        )  # fmt: skip
        yield _histogram(
            "gpujob_job_run_seconds", "Run time of each attempt in seconds.", counts.RUN_BUCKETS,
            tallied.get(counts.RAN, {}),
        )  # fmt: skip
        blocked = [((code,), float(number)) for code, number in sorted(self.blocked.items())] if view.alive else []
        yield _gauge("gpujob_queue_blocked", "Waiting jobs by the reason why they wait.", ("reason",), blocked)

    def _gpus(self) -> Iterator[Metric]:
        """Yield the metrics of the GPUs. If no daemon runs, they have no samples, since stored readings may be old."""
        gpus = self.view.gpus if self.view.alive else ()
        labels: tuple[str, ...] = GPU
        who: dict[int, tuple[str, ...]] = {gpu.gpu.index: (str(gpu.gpu.index), gpu.gpu.uuid) for gpu in gpus}
        if any(gpu.gpu.node for gpu in gpus):
            labels = NODE
            who = {gpu.gpu.index: (*who[gpu.gpu.index], gpu.gpu.node, gpu.gpu.partition) for gpu in gpus}

        def each(value: Mapping[int, float | None]) -> list[tuple[tuple[str, ...], float]]:
            return [(who[index], number) for index, number in value.items() if number is not None]

        memory = [((*who[gpu.gpu.index], part), mib * MIB) for gpu in gpus for part, mib in _parts(gpu)]
        read = {gpu.gpu.index: gpu.reading for gpu in gpus if gpu.reading is not None}
        yield _gauge("gpujob_gpu_memory_bytes", "Memory of the GPU by part: ours (jobs), foreign (foreign processes), reserved (driver, display, accepted), free.",
                     (*labels, "part"), memory)  # fmt: skip
        yield _gauge("gpujob_gpu_utilization_ratio", "Share of the time in which the GPU was busy.", labels,
                     each({i: r.load for i, r in read.items()}))  # fmt: skip
        yield _gauge("gpujob_gpu_allocated_ratio", "Share of the GPU that is allocated to jobs.", labels,
                     each({gpu.gpu.index: gpu.allocated for gpu in gpus}))  # fmt: skip
        yield _gauge("gpujob_gpu_paused", "1 while the GPU is paused.", labels,
                     each({gpu.gpu.index: float(gpu.paused) for gpu in gpus}))  # fmt: skip
        ages = {i: None if r.read_at is None else max(0.0, self.now - r.read_at) for i, r in read.items()}
        stale = {i: r.state == "STALE" or (ages[i] or 0.0) > self.stale_s for i, r in read.items()}
        bad = {i for i, r in read.items() if stale[i] or r.state in NOT_HEALTHY}
        healthy = {gpu.gpu.index: float(gpu.gpu.index not in bad) for gpu in gpus}
        yield _gauge("gpujob_gpu_healthy", "0 while the GPU is gone, unhealthy or stale.", labels,
                     each(healthy))  # fmt: skip
        yield _gauge("gpujob_gpu_stale", "1 while the GPU does not answer: its other values are old.", labels,
                     each({i: float(silent) for i, silent in stale.items()}))  # fmt: skip
        yield _gauge(
            "gpujob_gpu_reading_age_seconds", "Age of the last reading of the GPU in seconds.", labels, each(ages)
        )
        yield _gauge(
            "gpujob_gpu_power_watts", "Power that the GPU draws.", labels, each({i: r.power_w for i, r in read.items()})
        )
        energy = each({i: r.energy_j for i, r in read.items()})
        yield _labelled_counter("gpujob_gpu_energy_joules_total", "Energy since the driver was loaded.", labels, energy)
        yield _gauge("gpujob_gpu_temperature_celsius", "Temperature of the GPU.", labels,
                     each({i: r.temperature_c for i, r in read.items()}))  # fmt: skip


def _parts(gpu: GpuView) -> list[tuple[str, int]]:
    """Return the parts of a GPU's memory in MiB. The parts add up to the GPU's memory. Empty if a part is unknown."""
    read = gpu.reading
    if read is None or read.foreign_mib is None or read.reserved_mib is None or not read.memory_total_mib:
        return []
    taken = read.own_mib + read.foreign_mib + read.reserved_mib
    return [
        ("ours", read.own_mib),
        ("foreign", read.foreign_mib),
        ("reserved", read.reserved_mib),
        ("free", max(0, read.memory_total_mib - taken)),
    ]


def _gauge(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for words, number in values:
        family.add_metric(words, number)
    return family


def _labelled_counter(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=labels)
    for words, number in values:
        family.add_metric(words, number)
    return family


def _counter(name: str, text: str, label: str, known: Sequence[str], tallied: Mapping[str, float]) -> Metric:
    """Return a counter with one sample for every label value in ``known``, even if the sample is 0.

    If a counter had no sample before its first increase, the function `rate` of Prometheus would miss that increase.
    """
    names = (*known, *sorted(tallied.keys() - set(known)))
    return _labelled_counter(name, text, (label,), [((one,), tallied.get(one, 0.0)) for one in names])


def _histogram(name: str, text: str, bounds: Sequence[float], tallied: Mapping[str, float]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text)
    family.add_metric([], counts.cumulative(bounds, tallied), tallied.get(counts.SUM, 0.0))
    return family
