"""Why an attempt failed, or could not be started, as far as its log and its program tell."""

from __future__ import annotations

import zlib
from dataclasses import replace

from scheduler.core.decide import World
from scheduler.core.facts import Ended, Fact, NeverRan
from scheduler.core.failure import failure_in, quiet_failure_in
from scheduler.core.job import Job
from scheduler.core.log_names import errors_of, is_packed
from scheduler.intake.programs import why_not_started
from scheduler.opening import tail_of

TAIL_BYTES = 16 * 1024
MOST_PACKED, MOST_UNPACKED = 1 << 20, 8 << 20  # of a packed log: more would hold up the loop


def with_causes(world: World, facts: list[Fact]) -> list[Fact]:
    """The same facts; to each ending what the log's end says about it, to a program that was refused what is wrong with it."""
    out: list[Fact] = []
    for fact in facts:
        if isinstance(fact, Ended):
            job = world.live.get(fact.job)
            if job is not None and job.log:
                why = quiet_failure_in if fact.exit_code == 0 else failure_in
                fact = replace(fact, failure=why(_end_of(job)))
        elif isinstance(fact, NeverRan) and fact.lasting:
            job = world.live.get(fact.job)
            cause = why_not_started(job.argv[0]) if job is not None and job.argv else ""
            fact = replace(fact, why=f"{fact.why}: {cause}" if cause else fact.why)
        out.append(fact)
    return out


def _end_of(job: Job) -> str:
    try:
        if job.spec.stderr_apart:
            end = tail_of(errors_of(job.log), TAIL_BYTES)
        elif is_packed(job.log):
            unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
            end = unpack.decompress(tail_of(job.log, MOST_PACKED), MOST_UNPACKED)
            end = b"" if unpack.unconsumed_tail else end[-TAIL_BYTES:]
        else:
            end = tail_of(job.log, TAIL_BYTES)
        return end.decode("utf-8", "replace")
    except (OSError, zlib.error):  # or too large to be unpacked from its beginning
        return ""  # no log, no cause: the exit code stands all the same
