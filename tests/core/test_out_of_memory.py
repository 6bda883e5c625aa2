"""Issue 27, 2: a lack of GPU memory is a job's own fault or that of others, and decides the need of its next attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.core.endings import Rules, after_run
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.job import Failure, Job, JobState
from scheduler.core.learned_needs import DONE
from scheduler.core.learned_needs import OTHERWISE as OTHER_END
from scheduler.core.memory_at_end import with_memory
from scheduler.core.out_of_memory import OWN, VICTIM, MemorySeen, demand_of, next_need, whose_fault
from scheduler.core.placement import Fleet
from scheduler.core.states import Move
from tests.builders import OOM, Play, a_job, a_policy, some_gpus
from tests.core.test_admission import Bench, a_process, a_tenant

GIB = 1024
S = JobState


@pytest.mark.parametrize(
    ("whose", "seen"),
    [
        # It wanted more than it had asked for.
        (OWN, MemorySeen(20 * GIB, 19 * GIB, 4 * GIB, 80 * GIB, 1 * GIB, 60 * GIB)),
        (OWN, MemorySeen(20 * GIB, 31 * GIB, None, 80 * GIB, None, None)),
        (OWN, MemorySeen(20 * GIB, None, 32 * GIB, 80 * GIB, None, None)),
        # It wanted less, and others used more than their part of the GPU.
        (VICTIM, MemorySeen(20 * GIB, 10 * GIB, 2 * GIB, 80 * GIB, 0, 70 * GIB)),
        (VICTIM, MemorySeen(20 * GIB, 10 * GIB, 2 * GIB, None, None, None)),
        (VICTIM, MemorySeen(20 * GIB, 10 * GIB, None, 80 * GIB, None, 70 * GIB)),
        # It wanted less, and others used no more than their part.
        (OWN, MemorySeen(20 * GIB, 10 * GIB, 2 * GIB, 80 * GIB, 0, 60 * GIB)),
        # There was room: it limits itself, or its memory is fragmented.
        (OWN, MemorySeen(20 * GIB, 10 * GIB, 2 * GIB, 80 * GIB, 8 * GIB, 70 * GIB)),
        # A whole GPU that is full to the last MiB; the driver's part is no other process.
        (OWN, MemorySeen(80 * GIB, 79 * GIB, 1 * GIB, 80 * GIB, 200, 300)),
        # Nothing was seen.
        (OWN, MemorySeen(20 * GIB)),
        (OWN, MemorySeen(20 * GIB, 10 * GIB)),
        (OWN, MemorySeen(None, 10 * GIB, 1 * GIB, None, None, 70 * GIB)),
    ],
)
def test_others_are_at_fault_only_if_they_used_the_memory_that_the_job_had_asked_for(
    whose: str, seen: MemorySeen
) -> None:
    assert whose_fault(seen) == whose


SIZES = [80 * GIB]


def failed(need: str, peak: int | None = None, tried: int | None = None, **changes: object) -> tuple[Job, Failure]:
    """Return a job that ran out of memory. ``peak``, ``tried``: GiB."""
    size = int(str(changes.pop("size", 80))) * GIB
    job = a_job(1, need, **changes)
    asked = (job.spec.vram_mib or 0) or size * job.need.parts // WHOLE
    failure = Failure(
        "oom", peak_mib=None if peak is None else peak * GIB, tried_mib=None if tried is None else tried * GIB,
        asked_mib=asked or None, oom=OWN,
    )  # fmt: skip
    return job, failure


@pytest.mark.parametrize(
    ("need", "peak", "tried", "again"),
    [
        ("0.25", 31, None, "0.5"), ("0.25", 18, 4, "0.35"), ("0.25", 10, None, "0.3"), ("0.25", None, 30, "0.45"),
        ("0.25", None, None, "0.5"), ("0.9", 75, None, "1"), ("1", 79, 4, None), ("0.25", 100, None, "1"),
        ("2x0.25", 31, None, "2x0.5"), ("2", 79, None, None), ("0", None, None, None),
    ],
)  # fmt: skip
def test_the_next_attempt_gets_the_memory_that_was_seen_and_a_margin(
    need: str, peak: int | None, tried: int | None, again: str | None
) -> None:
    after = next_need(*failed(need, peak, tried), SIZES, 80 * GIB)
    assert (None if after is None else str(after.need)) == again
    assert after is None or not after.vram_mib


def test_a_share_of_a_larger_gpu_is_booked_as_memory() -> None:
    """On a machine with GPUs of 24 and 80 GiB, a share alone could place the job on the small GPU again."""
    sizes = [24 * GIB, 80 * GIB]
    after = next_need(*failed("1", 23, 5, size=24), sizes, 80 * GIB)
    assert after is not None and (str(after.need), after.vram_mib) == ("0.45", 34407)
    after = next_need(*failed("0.5", 12, 2, size=24), sizes, 80 * GIB)
    assert after is not None and (str(after.need), after.vram_mib) == ("0.75", 0)
    after = next_need(*failed("0.5", 29, 2), [40 * GIB, 80 * GIB], 80 * GIB)  # it had half of the large GPU
    assert after is not None and (str(after.need), after.vram_mib) == ("0.55", 45056)
    after = next_need(*failed("1", 23, 70, size=24), sizes, 80 * GIB)
    assert after is not None and (str(after.need), after.vram_mib) == ("1", 80 * GIB)
    assert next_need(*failed("1", 79, 5, vram_mib=80 * GIB), sizes, 80 * GIB) is None


@given(
    st.integers(1, 999), st.integers(0, 100 * GIB), st.integers(0, 100 * GIB),
    st.lists(st.integers(GIB, 100 * GIB), min_size=1, max_size=4),
)  # fmt: skip
def test_a_raised_need_has_more_memory_than_before_and_what_was_seen_if_a_gpu_has_it(
    parts: int, peak: int, tried: int, sizes: list[int]
) -> None:
    size = min(sizes)
    job = a_job(1)
    job.need = ResourceRequest(1, parts)
    failure = Failure(
        "oom", peak_mib=peak or None, tried_mib=tried or None, asked_mib=size * parts // WHOLE or None, oom=OWN
    )
    after = next_need(job, failure, sizes, 0)
    assume(after is not None)
    assert after is not None and after.need is not None
    able = [one for one in sizes if one >= after.vram_mib]
    gets = min(able) * after.need.parts // WHOLE
    assert able and 0 < after.need.parts <= WHOLE and max(gets, after.vram_mib) > size * parts // WHOLE
    wanted = demand_of(failure, ())
    if wanted and max(sizes) >= wanted * 1.2 + 1 and failure.asked_mib:
        assert max(gets, after.vram_mib) >= wanted


def test_a_job_that_books_memory_gets_what_was_seen_at_least_a_step_more_or_twice_as_much() -> None:
    for peak, tried, after in ((12, None, 14746), (None, None, 8 * GIB), (1, None, 4300), (None, 100, 20 * GIB)):
        job, failure = failed("0.001", peak, tried, vram_mib=4 * GIB)
        found = next_need(job, failure, SIZES, 20 * GIB)
        assert found is not None and (found.need, found.vram_mib) == (None, after)
    assert next_need(*failed("0.001", 12, None, vram_mib=20 * GIB), SIZES, 20 * GIB) is None


@pytest.mark.parametrize(
    ("need", "again", "words"),
    [("0.25", "1", "alone on its GPU"), ("1", "1", "alone on its GPU"), ("2x0.5", "2", "alone on its GPUs")],
)
def test_a_victim_is_tried_again_alone(need: str, again: str, words: str) -> None:
    job, failure = failed(need, 10, 1)
    after = next_need(job, replace(failure, oom=VICTIM), SIZES, 80 * GIB)
    assert after is not None and (str(after.need), after.vram_mib, after.words) == (again, 0, words)


def test_a_victim_that_books_memory_gets_all_memory_of_a_gpu() -> None:
    job, failure = failed("0.001", 2, 1, vram_mib=4 * GIB)
    after = next_need(job, replace(failure, oom=VICTIM), SIZES, 20 * GIB)
    assert after is not None and (after.need, after.vram_mib) == (None, 20 * GIB)


def test_the_attempts_with_more_memory_come_before_the_job_s_own_retries() -> None:
    job, failure = failed("0.25", 31, retries=3)
    job.state, job.exit_code, job.log_finding = S.RUNNING, 1, failure
    ending = after_run(job, Rules(oom_retries=2))
    assert (ending.how, ending.cause) == (Move.RETRY_SCHEDULED, "out_of_memory")
    job.oom_retries = 2
    assert after_run(job, Rules(oom_retries=2)).cause == "failed"


@pytest.mark.parametrize(
    ("used", "own", "whose"), [(79_000, 10_000, VICTIM), (45_000, 10_000, OWN), (79_000, 60_000, OWN)]
)
def test_the_last_reading_tells_what_others_used(used: int, own: int, whose: str) -> None:
    bench = Bench()
    bench.read()
    bench.on = [a_tenant(1), a_tenant(2)]
    rest = used - own - 800
    bench.read(used, a_process(1, own, owner="1.1"), a_process(2, rest, owner="2.1"))
    job = a_job(1, "0.5", state=S.RUNNING, attempt=1, gpus=(0,))
    gpus = {0: Gpu(0, "declared:0", memory_mib=80_000)}
    found = with_memory(job, Failure("oom", "CUDA out of memory"), gpus, bench.admission)
    assert found is not None and (found.oom, found.peak_mib, found.asked_mib, found.others_mib) == (
        whose,
        own,
        40_000,
        rest,
    )
    other = with_memory(job, Failure("import"), gpus, bench.admission)
    assert other is not None and (other.oom, other.peak_mib) == ("", own)
    assert with_memory(job, None, gpus, bench.admission) is None


def a_large_gpu() -> Play:
    """Return a world with one GPU of 80 GiB."""
    return Play(Fleet(some_gpus(1, memory_mib=80 * GIB), 8), policy=a_policy(oom_retries=2))


def oom(used: int, tried: int, free: int, others: int) -> Failure:
    return replace(OOM, peak_mib=used * GIB, tried_mib=tried * GIB, free_mib=free * GIB, others_mib=others * GIB)


def test_a_victim_runs_alone_next_and_its_run_is_no_reason_to_raise_the_need_of_its_model() -> None:
    play = a_large_gpu()
    play.run(a_job(1, "0.25", arguments=("--llm", "m")), a_job(2, "0.5"))
    plan = play.tell(play.ended(1, 1, failure=oom(10, 2, 0, 69)))
    assert [(run.ended, run.peak_mib) for _, run in plan.measured] == [(OTHER_END, None)]
    job = play.job(1)
    assert (job.state, str(job.need), job.oom_retries) == (S.PENDING, "1", 1)
    assert job.notes == (
        "oom: used 10 GiB of the 20 GiB that it asked for; other processes used the rest; tried again alone on its GPU",
    )
    play.tell(play.ended(2, 0))
    assert play.state(1) is S.STARTING
    play.tell(play.began(1))
    play.tell(play.ended(1, 0))
    assert play.state(1) is S.DONE


def test_an_own_lack_of_memory_raises_the_need_and_is_remembered() -> None:
    play = a_large_gpu()
    play.run(a_job(1, "0.25", arguments=("--llm", "m"), retries=1))
    plan = play.tell(play.ended(1, 1, failure=oom(19, 12, 1, 60)))
    assert [(run.ended, run.peak_mib) for _, run in plan.measured] == [(OUT_OF_MEMORY, 31 * GIB)]
    job = play.job(1)
    assert (job.state, str(job.need), job.oom_retries, job.runs_failed) == (S.STARTING, "0.5", 1, 0)
    assert job.notes == ("oom: asked 0.25 (20 GiB), peaked at 19 GiB, tried to get 12 GiB more; tried again with 0.5",)
    play.tell(play.began(1))
    plan = play.tell(play.ended(1, 0))
    assert [run.ended for _, run in plan.measured] == [DONE]
