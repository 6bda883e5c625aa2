"""Tests of admission control: missing readings, foreign processes, the start and end of jobs, and hysteresis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from scheduler.core.admission import Admission
from scheduler.core.gpu import ResourceRequest
from scheduler.core.gpu_admission import NOTHING_FORBIDDEN, GpuAdmission, Thresholds, Verdict
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.observations import Now, Readings
from scheduler.core.placement import Fleet
from scheduler.core.tenants import Tenant
from tests.builders import M0, T0, a_gpu, a_kind

TOTAL = 80_000
INTERVAL = 5.0
DRIVER = 800  # MiB in use on an empty GPU


def a_process(pid: int = 4711, mib: int | None = None, **changes: Any) -> GpuProcess:
    """Return a process on the GPU. ``owner``: the attempt to which the process belongs.

    Without an owner, the process belongs to another user.
    """
    changes.setdefault("user", "ours" if changes.get("owner") else "x")
    changes.setdefault("ours", bool(changes.get("owner")))
    return replace(GpuProcess(pid, mib), **changes)


def a_tenant(job: int = 1, parts: int = 500, vram_mib: int = 0, started_at: float | None = 0.0) -> Tenant:
    return Tenant(f"{job}.1", job, parts, vram_mib, started_at)


class Bench:
    """An Admission with a simulated clock, and readings of GPU 0. All other GPUs are idle.

    ``on``: the attempts that run on GPU 0.
    """

    def __init__(self, gpus: int = 1, **limits: Any) -> None:
        self.wall, self.mono = T0, M0
        self.on: list[Tenant] = []
        limits.setdefault("interval_s", INTERVAL)
        self.admission = Admission.of([a_gpu(i) for i in range(gpus)], Thresholds(**limits), self.now)
        self.admission.tenants = lambda gpu: self.on if gpu == 0 else []
        self.admission.judge(self.now)

    @property
    def now(self) -> Now:
        return Now(self.wall, self.mono)

    @property
    def card(self) -> GpuAdmission:
        return self.admission.cards[0]

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds
        self.admission.judge(self.now)

    def read(
        self, used: int | None = DRIVER, *processes: GpuProcess, after: float = INTERVAL, **changes: Any
    ) -> Verdict:
        """Apply a reading in which only GPU 0 is used; return the verdict about GPU 0.

        ``used``: MiB in use; ``processes``: the processes on the GPU; ``after``: seconds since the last reading.
        ``changes``: other values of the reading, such as ``load`` in percent.
        """
        self.wait(after)
        load = changes.pop("load", 0)
        told = GpuSnapshot(
            "declared:0", 0, "a card", TOTAL, used, None if load is None else load / 100, processes=tuple(processes)
        )
        others = [
            GpuSnapshot(f"declared:{i}", i, "a card", TOTAL, DRIVER, 0.0, processes=())
            for i in self.admission.cards
            if i
        ]
        self.admission.take(Readings(self.mono, (replace(told, **changes), *others)), self.now)
        return self.card.verdict

    def trouble(self, text: str = "no answer within 5 s") -> Verdict:
        self.wait(INTERVAL)
        self.admission.take(Readings(self.mono, problem=text), self.now)
        return self.card.verdict

    def forbids(self, need: str = "0.5", free: int | None = None) -> str:
        """Return the code of the reason why GPU 0 takes no job with this need. Empty if GPU 0 takes such a job."""
        promised = sum(tenant.parts for tenant in self.on)
        return self.admission.forbids(
            0, ResourceRequest.parse(need).parts, 1000 - promised if free is None else free
        ).code

    def usable(self) -> bool:
        return not self.admission.blocked_mask & 1


@pytest.fixture
def bench() -> Bench:
    """Return a Bench whose GPU 0 was read once while it was empty."""
    made = Bench()
    assert made.read(after=0.0) == NOTHING_FORBIDDEN
    return made


# -- GPUs that cannot be read are not free ----------------------------------------------------------------


def test_a_gpu_without_a_reading_gets_no_job() -> None:
    made = Bench()
    assert made.card.verdict.code == "stale" and "not been read" in made.card.verdict.sentence
    assert not made.usable() and made.forbids("0.001") == "stale"


def test_a_reading_error_blocks_a_gpu_until_the_next_good_reading(bench: Bench) -> None:
    verdict = bench.trouble("NVML: driver/library version mismatch")
    assert verdict.code == "stale" and "version mismatch" in verdict.sentence and not bench.usable()
    assert bench.card.state == "STALE"
    assert bench.read() == NOTHING_FORBIDDEN and bench.usable()


def test_a_reading_expires_after_three_intervals(bench: Bench) -> None:
    bench.wait(3 * INTERVAL)
    assert bench.usable()
    due = bench.admission.next_look
    assert due is not None and bench.mono < due < bench.mono + 0.1, "nobody would look when it becomes stale"
    bench.wait(0.1)
    assert not bench.usable() and bench.card.verdict == Verdict("stale", "GPU 0 has not been read for 15 s")
    assert bench.admission.next_look is None
    bench.wait(80)
    assert bench.card.verdict.sentence == "GPU 0 has not been read for 95 s"


UNKNOWN = [
    ({"lost": True, "problem": "GPU is lost"}, "gone"),
    ({"problem": "MIG mode is on; gpujob gives out whole cards"}, "unhealthy"),
    ({"memory_used_mib": None}, "unhealthy"),
    ({"memory_total_mib": None}, "unhealthy"),
    ({"memory_total_mib": 0}, "unhealthy"),
    ({"uuid": "GPU-of-somebody-else"}, "gone"),
]


@pytest.mark.parametrize(("changes", "code"), UNKNOWN)
@pytest.mark.parametrize("before", [True, False], ids=["read-before", "first"])
def test_a_gpu_with_unknown_memory_or_health_gets_no_job(changes: dict[str, Any], code: str, before: bool) -> None:
    bench = Bench(gpus=2)
    if before:
        bench.read(after=0.0)
    verdict = bench.read(**changes)
    assert verdict.code == code and "GPU 0" in verdict.sentence
    assert not bench.usable() and bench.forbids("0.001") == code
    assert bench.admission.blocked_mask == 0b01, "the other one is not to blame"
    assert bench.read() == NOTHING_FORBIDDEN and bench.usable()


def test_only_a_gpu_missing_from_the_reading_is_blocked_as_gone() -> None:
    bench = Bench(gpus=3)
    bench.read(after=0.0)
    bench.wait(INTERVAL)
    left = (GpuSnapshot("declared:0", 0, "", TOTAL, 0, 0.0), GpuSnapshot("declared:2", 1, "", TOTAL, 0, 0.0))
    bench.admission.take(Readings(bench.mono, left), bench.now)
    assert bench.admission.blocked_mask == 0b010
    gone = bench.admission.cards[1]
    assert gone.state == "GONE" and "declared:1" in gone.verdict.sentence


def test_memory_errors_block_a_gpu_only_with_hold_on_errors(bench: Bench) -> None:
    """I09: Errors keep jobs away only if ``hold_on_errors`` is set, and until a user resumes the GPU."""
    fault = GpuFault("declared:0", "2 uncorrected memory errors", T0, T0)
    bench.admission.faults = {"declared:0": fault}
    bench.admission.thresholds = replace(bench.admission.thresholds, hold_on_errors=False)
    assert bench.read() == NOTHING_FORBIDDEN and not bench.admission.sick_mask
    bench.admission.thresholds = replace(bench.admission.thresholds, hold_on_errors=True)
    assert bench.read() == Verdict("unhealthy", fault.sentence(0, bench.wall)) and bench.admission.sick_mask == 1
    bench.admission.faults = {"declared:0": replace(fault, active=False)}
    assert bench.read() == NOTHING_FORBIDDEN and not bench.admission.sick_mask


def test_an_unknown_load_does_not_block_a_gpu(bench: Bench) -> None:
    assert bench.read(load=None) == NOTHING_FORBIDDEN
    first, second = (bench.read(int(0.9 * TOTAL), load=None) for _ in range(2))
    assert first.code == second.code == "foreign", (
        "memory alone decides: held at the first sample, blocked at the second"
    )
    assert "the next reading follows shortly" in first.sentence and "next reading" not in second.sentence


@pytest.mark.parametrize("unread", ["lost", "stale", "trouble", "unlisted"])
def test_the_first_reading_after_a_gap_blocks_a_full_gpu_at_once(bench: Bench, unread: str) -> None:
    if unread == "lost":
        bench.read(lost=True)
    elif unread == "unlisted":
        bench.read(uuid="another")
    elif unread == "trouble":
        for _ in range(4):
            bench.trouble()
    else:
        bench.wait(60)
    assert bench.read(72_800, a_process(mib=72_000)).code == "foreign"


# -- own and foreign use ----------------------------------------------------------------------------------


def test_two_jobs_with_half_a_gpu_at_full_load_and_memory_do_not_block_each_other(bench: Bench) -> None:
    """S3.14, S3.16: Two jobs with half a GPU each do not block each other, whatever memory and load they use."""
    bench.on = [a_tenant(1)]
    busy = a_process(11, 38_000, owner="1.1", load=0.95)
    for _ in range(10):
        assert bench.read(DRIVER + 38_000, busy, load=95) == NOTHING_FORBIDDEN
        assert bench.forbids("0.5") == "" and bench.card.foreign_mib == 0 and bench.card.own_mib == 38_000
    bench.on.append(a_tenant(2))
    other = a_process(12, 38_000, owner="2.1", load=0.94)
    for _ in range(10):
        assert bench.read(DRIVER + 76_000, busy, other, load=100) == NOTHING_FORBIDDEN
        assert bench.card.overcommit == 0 and bench.admission.tight_mask == 0


@pytest.mark.parametrize(
    ("mib", "load", "own", "code"),
    [
        (68_000, 0, 0, "foreign"),  # 85 % of the memory
        (1_000, 85, 0, "foreign"),
        (63_000, 0, 0, ""),  # 79 %
        (1_000, 79, 0, ""),
        (1_000, 85, 10, "foreign"),  # a job of this scheduler runs on the GPU too
        (1_000, 79, 95, ""),  # the GPU is 95 % busy, but not with the foreign process
    ],
)
def test_thresholds_apply_to_foreign_use_only(bench: Bench, mib: int, load: int, own: int, code: str) -> None:
    """S3.16: Thresholds apply to the memory and load of foreign processes only."""
    bench.on = [a_tenant()] if own else []
    there = [a_process(4711, mib, load=load / 100)]
    there += [a_process(11, 10_000, owner="1.1", load=own / 100)] if own else []
    used = DRIVER + mib + 10_000 * bool(own)
    for _ in range(2):
        verdict = bench.read(used, *there, load=min(100, max(load + own, own)))
    assert verdict.code == code
    if code:
        assert "(pid 4711, user x)" in verdict.sentence and "foreign processes" in verdict.sentence


def test_load_on_a_gpu_without_our_jobs_blocks_it_even_if_no_process_is_listed(bench: Bench) -> None:
    """S3.16: If no job of this scheduler is on a GPU, its load counts as foreign, even if no process is listed."""
    bench.read(load=90)
    assert bench.read(load=90).sentence == "GPU 0 is 90 % busy with foreign processes; limit 80 %"


def test_a_foreign_graphics_process_does_not_make_our_load_foreign(bench: Bench) -> None:
    bench.on = [a_tenant()]
    there = a_process(900, 300, compute=False), a_process(11, 10_000, owner="1.1", load=0.95)
    for _ in range(3):
        assert bench.read(DRIVER + 10_300, *there, load=95) == NOTHING_FORBIDDEN


def test_an_idle_foreign_process_does_not_make_our_load_foreign(bench: Bench) -> None:
    """If a foreign process on the GPU is idle, the load of our own jobs is not counted as foreign."""
    bench.on = [a_tenant()]
    there = a_process(4711, 500), a_process(11, 10_000, owner="1.1", load=0.95)
    for _ in range(3):
        assert bench.read(DRIVER + 10_500, *there, load=95) == NOTHING_FORBIDDEN
    there = a_process(4711, 500), a_process(11, 10_000, owner="1.1", load=0.10)
    bench.read(DRIVER + 10_500, *there, load=95)
    assert bench.read(DRIVER + 10_500, *there, load=95).code == "foreign", "nobody of ours makes that load"


def test_without_load_per_process_a_foreign_compute_process_makes_all_load_foreign(bench: Bench) -> None:
    bench.on = [a_tenant()]
    there = a_process(4711, 500), a_process(11, 10_000, owner="1.1")
    bench.read(DRIVER + 10_500, *there, load=95)
    assert bench.read(DRIVER + 10_500, *there, load=95).code == "foreign"


def test_the_memory_baseline_is_the_least_use_of_an_empty_gpu(bench: Bench) -> None:
    assert bench.card.baseline_mib == DRIVER and bench.card.foreign_mib == 0
    bench.read(DRIVER + 30_000, a_process(mib=30_000))
    assert bench.card.baseline_mib == DRIVER and bench.card.foreign_mib == 30_000
    bench.read(500)
    assert bench.card.baseline_mib == 500, "the least that was seen"


def test_a_gpu_that_is_full_at_the_first_reading_sets_no_memory_baseline() -> None:
    bench = Bench()
    bench.read(DRIVER + 60_000, after=0.0)
    assert bench.card.baseline_mib is None and bench.card.foreign_mib == DRIVER + 60_000
    bench.read(DRIVER + 60_000, a_process(mib=60_000))
    assert bench.card.baseline_mib == DRIVER and bench.card.foreign_mib == 60_000


def test_foreign_memory_below_the_threshold_reduces_the_room_for_jobs(bench: Bench) -> None:
    """Foreign memory below the threshold does not block a GPU. But jobs get only the memory that is left."""
    assert bench.read(DRIVER + 48_000, a_process(mib=48_000)) == NOTHING_FORBIDDEN
    assert bench.forbids("0.5") == "foreign" and bench.forbids("0.3") == ""
    assert bench.admission.tight_mask == 1 and bench.usable()
    assert "46.9 GiB in use by foreign processes (pid 4711, user x)" in bench.card.why_overcommit.sentence


# -- whole GPUs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("process", "code"),
    [
        (a_process(mib=1_500), ""),
        (a_process(mib=1_700), "foreign"),
        (a_process(mib=None), "foreign"),
        (a_process(mib=3_000, compute=False), "foreign"),  # the memory of a display server is not free either
        (a_process(mib=1_500, compute=False), ""),
    ],
)
def test_a_whole_gpu_request_tolerates_two_percent_foreign_memory(bench: Bench, process: GpuProcess, code: str) -> None:
    bench.read(DRIVER + (process.memory_mib or 0), process)
    assert bench.forbids("1") == code and bench.forbids("0.5") == ""


def test_the_reason_says_that_the_memory_of_a_foreign_process_is_not_known(bench: Bench) -> None:
    """If the driver does not report how much memory a foreign process uses, the reason does not say 0 MiB."""
    bench.read(DRIVER, a_process(pid=7, mib=None), a_process(pid=8, mib=10))
    sentence = bench.admission.forbids(0, 1000, 1000).sentence
    assert sentence == (
        "GPU 0 is used by foreign processes whose memory the driver does not report (pid 7, user x); "
        "a job that needs a whole GPU waits until they end"
    )


def test_a_display_server_does_not_block_a_whole_gpu_request() -> None:
    bench = Bench()
    shown = a_process(900, 3_000, compute=False)
    for _ in range(3):
        bench.read(DRIVER + 3_000, shown, load=5)
    assert not bench.card.whole_blocked and bench.card.baseline_mib == DRIVER + 3_000
    assert bench.forbids("1") == ""


def test_a_gpu_gets_whole_gpu_jobs_again_after_three_readings_without_foreign_use(bench: Bench) -> None:
    bench.read(DRIVER + 4_000, a_process(mib=4_000))
    assert bench.admission.whole_blocked_mask == 1 and "3.9 GiB" in bench.card.whole.sentence
    for left in (2, 1, 0):
        assert bench.forbids("1") == "foreign"
        bench.read()
        assert bool(bench.admission.whole_blocked_mask) == bool(left)
    assert bench.forbids("1") == ""


# -- jobs that use more than their share, jobs that start -------------------------------------------------


def test_a_job_over_its_share_counts_with_its_real_use_and_the_reason_names_it(bench: Bench) -> None:
    bench.on = [a_tenant(12, 250)]
    promised = (TOTAL - DRIVER) // 4
    bench.read(DRIVER + int(1.09 * promised), a_process(11, int(1.09 * promised), owner="12.1"))
    assert bench.card.overcommit == 0 and bench.forbids("0.75") == "", "a tenth is forgiven"
    bench.read(DRIVER + 31_744, a_process(11, 31_744, owner="12.1"))
    assert bench.card.overcommit_mib == 31_744 - promised
    assert bench.forbids("0.75") == "over-share" and bench.forbids("0.5") == ""
    assert bench.card.why_overcommit.sentence == "job 12 uses 31 GiB on GPU 0, more than its share of 19.3 GiB"
    assert bench.card.verdict == NOTHING_FORBIDDEN, "it blocks by what it uses, not the whole card"


def test_use_within_the_requested_memory_is_not_over_the_share(bench: Bench) -> None:
    bench.on = [a_tenant(12, 100, vram_mib=40_000)]
    bench.read(DRIVER + 41_000, a_process(11, 41_000, owner="12.1"))
    assert bench.card.overcommit == 0


def test_a_job_without_memory_use_yet_counts_with_its_whole_share(bench: Bench) -> None:
    """I12: Until a job uses memory, its whole share of the GPU's memory counts as used."""
    bench.on = [a_tenant(1, 600, started_at=None)]
    bench.read()
    assert bench.card.overcommit == 0
    fleet = Fleet([a_gpu(0)])
    fleet.admission = bench.admission
    fleet.take(ResourceRequest.parse("0.6"), (0,))
    assert fleet.find(a_kind("0.5")) is None and fleet.why_not(a_kind("0.5")).code == "no-room"
    assert fleet.find(a_kind("0.4")) == (0,)


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"ours": False}, False),
        ({"started_at": T0 - 10}, False),  # the process started before the job
        ({"visible": False}, False),
    ],
)
def test_an_unknown_process_beside_a_new_job_counts_as_its_own(
    bench: Bench, changes: dict[str, Any], ours: bool
) -> None:
    bench.on = [a_tenant(1, 1000, started_at=bench.wall)]
    process = replace(a_process(77, 20_000, ours=True, started_at=bench.wall + 3), **changes)
    bench.read(DRIVER + 20_000, a_process(70, 10, owner="1.1"), process)
    assert (bench.card.foreign_mib == 0) == ours
    assert bench.card.whole_blocked == (not ours)


def test_an_unknown_process_counts_as_foreign_after_the_settle_time(bench: Bench) -> None:
    bench.on = [a_tenant(1, 500, started_at=bench.wall)]
    process = a_process(77, 20_000, ours=True, started_at=bench.wall + 3)
    bench.read(DRIVER + 20_000, process, after=119)
    assert bench.card.foreign_mib == 0
    bench.read(DRIVER + 20_000, process, after=2)
    assert bench.card.foreign_mib == 20_000


def test_an_unknown_process_counts_for_the_younger_of_two_new_jobs(bench: Bench) -> None:
    bench.on = [a_tenant(1, 250, started_at=bench.wall), a_tenant(2, 250, started_at=bench.wall + 2)]
    bench.read(DRIVER + 30_000, a_process(77, 30_000, ours=True, started_at=bench.wall + 3))
    assert bench.card.why_overcommit.sentence.startswith("job 2 uses 29.3 GiB")


# -- drivers that report little ---------------------------------------------------------------------------


def test_without_a_process_list_jobs_count_with_their_shares(bench: Bench) -> None:
    """Without a list of processes, as with GPUtil, each job is assumed to use its share of the GPU's memory."""
    bench.on = [a_tenant(1, 500)]
    bench.read(DRIVER + 38_000, processes=None, load=95)
    assert bench.card.foreign_mib == 0 and bench.card.own_mib > 37_000
    assert bench.read(DRIVER + 38_000, processes=None, load=95) == NOTHING_FORBIDDEN
    bench.read(DRIVER + 70_000, processes=None)
    assert 29_000 < bench.card.foreign_mib < 32_000 and bench.forbids("0.5") == "foreign"


def test_without_a_process_list_a_full_gpu_without_our_jobs_is_blocked() -> None:
    bench = Bench()
    assert bench.read(70_000, processes=None, after=0.0).code == "foreign"


def test_processes_of_another_pid_namespace_count_as_ours_up_to_the_booking(bench: Bench) -> None:
    bench.on = [a_tenant(1, 500)]
    hidden = a_process(5, 38_000, visible=False, user="")
    bench.read(DRIVER + 38_000, hidden, load=95)
    assert bench.card.foreign_mib == 0 and bench.card.own_mib == 38_000
    bench.read(DRIVER + 68_000, hidden, a_process(6, 30_000, visible=False, user=""))
    assert bench.card.foreign_mib >= 28_000, "more than was promised is somebody's"
    bench.on = []
    bench.read(DRIVER + 68_000, hidden, a_process(6, 30_000, visible=False, user=""))
    assert bench.card.foreign_mib == 68_000


def test_an_empty_process_list_with_memory_in_use_counts_as_no_list(bench: Bench) -> None:
    bench.on = [a_tenant(1, 500)]
    bench.read(DRIVER + 38_000)
    assert bench.card.foreign_mib == 0 and bench.card.own_mib > 37_000


def test_our_processes_without_memory_values_count_with_the_booking(bench: Bench) -> None:
    bench.on = [a_tenant(1, 500)]
    bench.read(DRIVER + 30_000, a_process(11, None, owner="1.1"))
    assert bench.card.foreign_mib == 0 and bench.card.overcommit == 0
    bench.read(DRIVER + 70_000, a_process(11, None, owner="1.1"), a_process(4711, None))
    assert bench.card.foreign_mib > 29_000 and bench.card.whole_blocked


# -- after the end of a job -------------------------------------------------------------------------------


def test_a_gpu_gets_a_new_job_only_after_a_reading_since_the_last_job_ended(bench: Bench) -> None:
    bench.on = [a_tenant(1, 1000)]
    bench.read(DRIVER + 70_000, a_process(11, 70_000, owner="1.1"))
    bench.on = []
    assert bench.admission.left([0, 9], bench.now) and not bench.admission.left([9], bench.now)
    assert bench.card.verdict.code == "releasing" and bench.card.state == "DRAINING" and not bench.usable()
    assert bench.read(after=0.05) == NOTHING_FORBIDDEN and bench.forbids("1") == ""


def test_a_reading_requested_before_a_job_ended_does_not_free_its_gpu(bench: Bench) -> None:
    """A reading that was requested before a job ended does not free the job's GPU.

    Such a reading may still contain the job's process.
    """
    bench.on = [a_tenant(1, 1000)]
    process = a_process(11, 70_000, owner="1.1")
    bench.read(DRIVER + 70_000, process)
    bench.wait(INTERVAL)
    asked = bench.mono
    bench.wait(0.1)
    bench.on = []
    bench.admission.left([0], bench.now)
    late = GpuSnapshot("declared:0", 0, "", TOTAL, DRIVER + 70_000, 1.0, processes=(process,))
    bench.admission.take(Readings(asked, (late,)), bench.now)
    assert bench.card.verdict.code == "releasing"
    assert bench.read(after=0.1) == NOTHING_FORBIDDEN and bench.forbids("1") == "", "the next job waits for nothing"


def test_memory_left_after_a_job_blocks_the_gpu_and_is_foreign_after_release_s(bench: Bench) -> None:
    """I11: After a job's end, its GPU takes no job until the job's memory is released.

    Memory that is not released within ``release_s`` seconds counts as foreign.
    """
    bench.on = [a_tenant(1, 1000)]
    process = a_process(11, 70_000, owner="1.1")
    bench.read(DRIVER + 70_000, process)
    bench.on = []
    bench.admission.left([0], bench.now)
    left = replace(process, visible=False, owner="", user="", ours=False)
    verdict = bench.read(DRIVER + 70_000, left)
    assert verdict == Verdict("releasing", "GPU 0: 68.4 GiB are still in use (pid 11) after the end of a job")
    for _ in range(4):
        assert bench.read(DRIVER + 70_000, left).code == "releasing"
    verdict = bench.read(DRIVER + 70_000, left)
    assert verdict.code == "foreign" and "(pid 11)" in verdict.sentence and bench.card.state == "FOREIGN"
    for _ in range(3):
        verdict = bench.read()
    assert verdict == NOTHING_FORBIDDEN and bench.card.freed_at is None


def test_memory_released_within_release_s_never_counts_as_foreign(bench: Bench) -> None:
    """I11: Memory that is released within ``release_s`` seconds after the end of a job never counts as foreign."""
    bench.on = [a_tenant(1, 1000)]
    process = a_process(11, 70_000, owner="1.1")
    bench.read(DRIVER + 70_000, process)
    bench.on = []
    bench.admission.left([0], bench.now)
    left = replace(process, visible=False, owner="", user="", ours=False)
    for _ in range(5):
        assert bench.read(DRIVER + 70_000, left).code == "releasing"
    assert bench.read() == NOTHING_FORBIDDEN and bench.forbids("1") == ""


def test_a_gpu_waits_for_the_memory_release_of_both_ended_jobs(bench: Bench) -> None:
    """I11: If two jobs on a GPU end one after the other, the GPU waits until the memory of both jobs is released."""
    bench.on = [a_tenant(1), a_tenant(2)]
    one, other = a_process(11, 38_000, owner="1.1"), a_process(12, 38_000, owner="2.1")
    bench.read(DRIVER + 76_000, one, other)
    bench.on = [a_tenant(2)]
    bench.admission.left([0], bench.now)
    left = [replace(each, visible=False, owner="", user="", ours=False) for each in (one, other)]
    assert bench.read(DRIVER + 76_000, left[0], other, after=1).code == "releasing"
    bench.on = []
    bench.admission.left([0], bench.now)
    for _ in range(4):
        assert bench.read(DRIVER + 38_000, left[0]).code == "releasing", "the first one's, though the other's is free"
    assert bench.read() == NOTHING_FORBIDDEN and bench.forbids("1") == ""


def test_gpu_stays_blocked_until_a_reading_after_release_s(bench: Bench) -> None:
    """I11: After ``release_s`` seconds a GPU stays blocked until it is read again."""
    bench.on = [a_tenant(1, 1000)]
    process = a_process(11, 70_000, owner="1.1")
    bench.read(DRIVER + 70_000, process)
    bench.on = []
    bench.admission.left([0], bench.now)
    for _ in range(5):
        bench.read(DRIVER + 70_000, replace(process, visible=False, owner="", ours=False))
    bench.wait(10)
    assert not bench.usable(), "nobody has looked since"
    assert bench.read(DRIVER + 70_000, replace(process, visible=False, owner="", ours=False)).code == "foreign"


def test_the_reason_says_that_a_gpu_needs_more_readings_before_it_is_free(bench: Bench) -> None:
    for _ in range(2):
        bench.read(DRIVER + 70_000, a_process(mib=70_000))
    for _ in range(2):
        assert bench.read().sentence == (
            "GPU 0 was just in use by foreign processes; it gets jobs again when further readings show that it is free"
        )
    assert bench.read() == NOTHING_FORBIDDEN


def test_load_right_after_the_end_of_a_job_does_not_count_as_foreign(bench: Bench) -> None:
    bench.on = [a_tenant(1, 1000)]
    bench.read(DRIVER + 70_000, a_process(11, 70_000, owner="1.1"), load=100)
    bench.on = []
    bench.admission.left([0], bench.now)
    for _ in range(4):
        assert bench.read(after=0.2, load=100) == NOTHING_FORBIDDEN
    bench.read(after=2, load=100)
    assert bench.read(load=100).code == "foreign"


# -- resume --force ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there",
    [(), (a_process(11, 70_000, visible=False, user=""),), (a_process(4711, 70_000, load=0.9),), (a_process(4711),)],
    ids=["nobody", "hidden", "busy", "no-figure"],
)
def test_accepted_foreign_processes_and_memory_do_not_block_a_gpu(bench: Bench, there: tuple[GpuProcess, ...]) -> None:
    """I11: Foreign processes and memory that a user accepted with ``resume --force`` do not block the GPU."""
    load = 90 if there and there[0].load else 0
    for _ in range(2):
        bench.read(DRIVER + 70_000, *there, load=load)
    assert bench.card.state == "FOREIGN" and bench.forbids("1") == "foreign"
    bench.admission.accept([0, 9], bench.now)
    assert bench.usable() and bench.forbids("1") == ""
    for _ in range(5):
        assert bench.read(DRIVER + 70_000, *there, load=load) == NOTHING_FORBIDDEN
        assert bench.forbids("1") == "" and bench.card.foreign_mib == 0


def test_only_the_use_at_the_time_of_acceptance_is_accepted(bench: Bench) -> None:
    there = a_process(4711, 70_000)
    for _ in range(2):
        bench.read(DRIVER + 70_000, there)
    bench.admission.accept([0], bench.now)
    bench.read(DRIVER + 75_000, there, a_process(4712, 5_000))
    assert bench.forbids("1") == "foreign" and "4712" in bench.card.whole.sentence
    bench.read(DRIVER + 75_000, replace(there, memory_mib=75_000))
    assert bench.card.foreign_mib == 5_000, "what it takes beyond"
    for _ in range(3):
        bench.read()
    assert bench.card.baseline_mib == DRIVER
    for _ in range(2):
        verdict = bench.read(DRIVER + 70_000, replace(there, started_at=T0 + 100))
    assert verdict.code == "foreign", "another process of the same number"


def test_resume_force_ends_the_wait_for_memory_release(bench: Bench) -> None:
    """I11: After ``resume --force`` a GPU no longer waits for the release of an ended job's memory."""
    bench.on = [a_tenant(1, 1000)]
    bench.read(DRIVER + 70_000, a_process(11, 70_000, owner="1.1"))
    bench.on = []
    bench.admission.left([0], bench.now)
    left = a_process(11, 70_000, visible=False, user="")
    assert bench.read(DRIVER + 70_000, left).code == "releasing"
    bench.admission.accept([0], bench.now)
    for _ in range(3):
        assert bench.read(DRIVER + 70_000, left) == NOTHING_FORBIDDEN


def test_resume_force_does_not_unblock_a_gone_or_stale_gpu(bench: Bench) -> None:
    bench.read(lost=True)
    bench.admission.accept([0], bench.now)
    assert bench.forbids() == "gone"
    bench.trouble()
    bench.admission.accept([0], bench.now)
    assert bench.forbids() == "stale"


# -- no flapping ------------------------------------------------------------------------------------------


def foreign(bench: Bench, percent: float, load: bool = False) -> bool:
    """Apply a reading in which foreign processes use ``percent`` of GPU 0; return whether the GPU is then blocked.

    If ``load`` is true, they use ``percent`` of the computing time; otherwise they use ``percent`` of the memory.
    """
    if load:
        bench.read(DRIVER + 100, a_process(mib=100), load=percent)
    else:
        bench.read(DRIVER + int(percent * TOTAL / 100), a_process(mib=int(percent * TOTAL / 100)))
    return bench.card.blocked


@pytest.mark.parametrize("load", [False, True], ids=["memory", "load"])
def test_a_gpu_is_blocked_after_two_samples_above_and_free_after_three_below(bench: Bench, load: bool) -> None:
    """I13: After two samples above the threshold a GPU is blocked.

    After three samples well below the threshold, the GPU is free again.
    """
    assert [foreign(bench, each, load) for each in (85, 70, 85, 85)] == [False, False, False, True]
    assert [foreign(bench, each, load) for each in (74, 74, 76, 74, 74, 79, 70, 70, 70)] == [True] * 8 + [False]


def test_the_first_sample_of_a_gpu_blocks_it_at_once() -> None:
    for percent, blocked in ((85, True), (79, False), (81, True)):
        assert foreign(Bench(), percent) is blocked


@pytest.mark.parametrize("load", [False, True], ids=["memory", "load"])
@pytest.mark.parametrize("first", [79, 81])
def test_readings_that_alternate_around_the_threshold_change_the_verdict_at_most_once(first: int, load: bool) -> None:
    """I13: Readings that alternate around the threshold change the verdict at most once."""
    bench = Bench()
    minds = [foreign(bench, first if i % 2 == 0 else 160 - first, load) for i in range(1000)]
    assert sum(one != other for one, other in pairwise(minds)) <= 1
    bench.on = [a_tenant()]
    minds = [foreign(bench, first if i % 2 == 0 else 160 - first, load) for i in range(1000)]
    assert sum(one != other for one, other in pairwise(minds)) <= 1
