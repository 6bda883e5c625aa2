"""The routes of the HTTP API that return the recorded curves of GPUs and jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from scheduler.client.client import SCHEMA
from scheduler.core.errors import UsageError
from scheduler.web.routes import Ask, as_json

SPAN_S = 3600
POINTS = 360  # approximate maximum for a curve if the request has no step
LONGEST_S = 90 * 86_400
MIB = 1 << 20
# Key in the JSON → (field of the sample, factor to base units).
OF_GPU: Mapping[str, tuple[str, float]] = {
    "memory_used": ("used_mib", MIB), "memory_own": ("own_mib", MIB), "memory_foreign": ("foreign_mib", MIB),
    "memory_reserved": ("reserved_mib", MIB), "load": ("load", 1), "temperature": ("temperature_c", 1), "power": ("power_w", 1),
    "allocated": ("booked", 1), "memory_used_max": ("used_max_mib", MIB), "load_max": ("load_max", 1),
}  # fmt: skip
OF_JOB: Mapping[str, tuple[str, float]] = {
    "memory": ("memory_mib", MIB), "load": ("load", 1), "memory_max": ("memory_max_mib", MIB), "load_max": ("load_max", 1),
}  # fmt: skip


def gpus(ask: Ask) -> Response:
    """Return curves and pauses of all GPUs (times: seconds since 1970). Raises UsageError for an invalid time range."""
    end = ask.whole("to", int(time.time()) + 1, 1, 1 << 40)
    start = ask.whole("from", max(0, end - SPAN_S), 0, 1 << 40)
    if not 0 < end - start <= LONGEST_S:
        raise UsageError(f"must be a time before the value of to, at most {LONGEST_S} s before it", where="from")
    step = ask.whole("step", max(10, (end - start) // POINTS), 1, LONGEST_S)
    client = ask.source.client
    found = client.gpu_history(start, end, step)  # type: ignore[attr-defined,unused-ignore]
    spans = client.pause_spans(start, end)  # type: ignore[attr-defined,unused-ignore]
    return as_json(
        {
            "schema": SCHEMA,
            "gpus": [
                {"index": index, "samples": [{**_point(one, OF_GPU), "paused": one.paused} for one in samples]}
                for index, samples in sorted(found.items())
            ],
            "pauses": [{"gpu": span.gpu, "from": span.start, "to": span.end} for span in spans],
        }
    )


def job(ask: Ask) -> Response:
    """Return the curves of a job, one for each attempt. Raises NotFound if there is no such job."""
    number = ask.numbers["id"]
    ask.source.client.states([number])
    found = ask.source.client.job_history(number)  # type: ignore[attr-defined,unused-ignore]
    attempts = [
        {"attempt": attempt, "samples": [_point(one, OF_JOB) for one in samples]}
        for attempt, samples in sorted(found.items())
    ]
    return as_json({"schema": SCHEMA, "attempts": attempts})


def _point(sample: Any, fields: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """Return a sample as JSON in base units (bytes, shares 0 to 1); None for a value that was not measured."""
    point: dict[str, Any] = {"at": sample.at}
    for key, (name, factor) in fields.items():
        value = getattr(sample, name)
        point[key] = None if value is None else int(value * factor) if factor == MIB else value
    return point
