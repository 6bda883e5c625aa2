"""Property tests with random histories: the real scheduler decides like the slow one, and its guarantees hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.gpu import WHOLE, ids_of
from scheduler.core.job import Job, JobState, Process
from scheduler.core.observations import Arrived, Asked, Gone, Observation, Unclaimed
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import class_of
from scheduler.core.requests import Cancel, Pause, PauseQueue, Requeue, Resume
from scheduler.core.topology import LINK_WORDS, Link
from tests.builders import OOM, Play, a_job, examples, some_gpus
from tests.core.slow_twin import SlowFleet, SlowScheduler

NEEDS = ("0", "0.1", "0.25", "0.3334", "0.5", "0.7", "1", "1.5", "2", "4", "8", "2x0.5", "3x0.25")
SLOTS = 3
MIXED = 20_000  # MiB of every other GPU; the rest have twice that
OTHER_FORMS: dict[str, dict[str, Any]] = {"2 slots": {"slots": 2}, "GPU 0 by name": {"on": (0,)}}


@dataclass(frozen=True)
class Step:
    """One event. ``pick`` chooses the job or the GPU of the event among those that exist."""

    what: str
    need: str = "1"
    priority: int = 0
    allowed: tuple[int, ...] | None = None
    vram_mib: int = 0
    pick: int = 0
    on: tuple[int, ...] = ()
    slots: int = 1
    link: str = ""


ALLOWED = st.one_of(
    st.none(), st.none(), st.sets(st.integers(0, 15), min_size=1, max_size=8).map(lambda ids: tuple(sorted(ids)))
)
ARRIVE = st.builds(
    Step,
    st.just("arrive"),
    st.sampled_from(NEEDS),
    st.integers(-1, 2),
    ALLOWED,
    st.sampled_from([0, 0, 0, 6_000, 20_000]),
    st.integers(0, 99),
    link=st.sampled_from(["", "", *LINK_WORDS]),
)
BY_NAME = st.builds(
    Step,
    st.just("arrive"),
    priority=st.integers(-1, 2),
    pick=st.integers(0, 99),
    on=st.sets(st.integers(0, 9), min_size=1, max_size=3).map(lambda ids: tuple(sorted(ids))),
)
SLOTTED = st.builds(
    Step,
    st.just("arrive"),
    st.just("0"),
    st.integers(-1, 2),
    pick=st.integers(0, 99),
    slots=st.integers(1, SLOTS + 1),
)
OTHER = st.builds(
    Step,
    st.sampled_from(["end", "end", "end", "fail", "pause", "resume", "queue", "cancel"]),
    pick=st.integers(0, 99),
)
TURN = st.lists(st.one_of(ARRIVE, ARRIVE, ARRIVE, BY_NAME, SLOTTED, OTHER, OTHER), min_size=1, max_size=5)
SERVERS = st.lists(st.integers(1, 8), min_size=1, max_size=3)


class Both:
    """The real scheduler and the slow scheduler. Each event is applied to both of them."""

    def __init__(self, servers: list[int], memory_mib: int | None, links: list[int]) -> None:
        self.gpus = some_gpus(*servers, memory_mib=memory_mib, links=links)
        if memory_mib == MIXED:
            self.gpus = [replace(gpu, memory_mib=MIXED * (1 + gpu.index % 2)) for gpu in self.gpus]
        self.play = Play(Fleet(self.gpus, SLOTS))
        self.twin = SlowScheduler(SlowFleet(self.gpus, SLOTS))
        self.last_id = 0
        self.queue_paused = False

    def facts_of(self, turn: list[Step]) -> list[Observation]:
        """Apply the steps of one pass to the slow scheduler.

        Return the same events as observations for the real scheduler.
        """
        observations: list[Observation] = []
        for step in turn:
            observations += getattr(self, f"_{step.what}")(step)
        return observations

    def _arrive(self, step: Step) -> list[Observation]:
        job = a_job(
            self.last_id + 1,
            step.need,
            priority=step.priority,
            allowed=step.on or step.allowed,
            vram_mib=step.vram_mib or None,
            order=step.pick,
            on=step.on,
            slots=step.slots,
            link=step.link,
        )
        if self.play.scheduler.fleet.can_ever_hold(class_of(job)):
            return []  # the jobs file or `submit` refuses such a job
        self.last_id = job.id
        self.twin.waiting[job.id] = (job.priority, job.order), class_of(job)
        return [Arrived(job)]

    def _chosen(self, step: Step) -> int | None:
        jobs = sorted(self.twin.running)
        return jobs[step.pick % len(jobs)] if jobs else None

    def _end(self, step: Step) -> list[Observation]:
        job = self._chosen(step)
        if job is None:
            return []
        self.twin.end(job)
        return [self.play.ended(job, 0 if step.what == "end" else 1)]

    _fail = _end

    def _cancel(self, step: Step) -> list[Observation]:
        jobs = sorted(job for job in self.twin.waiting if job in self.play.rows)
        if not jobs:
            return []
        job = jobs[step.pick % len(jobs)]
        del self.twin.waiting[job]
        return [Asked(1, Cancel((job,)))]

    def _pause(self, step: Step) -> list[Observation]:
        gpu = step.pick % len(self.gpus)
        self.twin.fleet.paused.add(gpu)
        return [Asked(1, Pause((gpu,)))]

    def _resume(self, step: Step) -> list[Observation]:
        gpu = step.pick % len(self.gpus)
        self.twin.fleet.paused.discard(gpu)
        return [Asked(1, Resume((gpu,)))]

    def _queue(self, step: Step) -> list[Observation]:
        self.twin.paused = step.pick % 3 == 0
        return [Asked(1, PauseQueue(self.twin.paused))]

    def turn(self, observations: list[Observation]) -> None:
        plan = self.play.tell(*observations, after=1.0)
        real = [(job.id, job.gpus) for job in plan.starts]
        assert real == self.twin.start_all(), "the real decision differs from the slow twin's"
        self.play.tell(*(self.play.began(job) for job, _ in real))
        self.check()

    def check(self) -> None:
        play, fleet = self.play, self.play.scheduler.fleet
        assert fleet.free == self.twin.fleet.free
        assert sorted(fleet.claims) == sorted(set(self.twin.fleet.claims))
        assert 0 <= fleet.cpu_free == self.twin.fleet.cpu_free, "slots are over-booked"
        assert set(play.scheduler.live) == set(self.twin.running)
        assert play.scheduler.waiting() == len(self.twin.waiting)
        parts = dict.fromkeys(fleet.free, 0)
        on: dict[int, list[Job]] = {gpu: [] for gpu in fleet.free}
        for job in play.scheduler.live.values():
            assert len(set(job.gpus)) == job.need.count
            servers = {fleet.gpus[gpu].server for gpu in job.gpus}
            assert len(servers) <= 1 or job.need.by_name, "a wide job spans servers"
            assert job.need.by_name or self.twin.fleet.worst(job.gpus) <= class_of(job).link, "not linked as asked"
            assert not job.need.by_name or job.gpus == job.spec.on
            assert job.allowed is None or set(job.gpus) <= set(job.allowed) or not job.gpus
            for gpu in job.gpus:
                parts[gpu] += job.need.parts
                if not job.need.by_name:
                    on[gpu].append(job)
        assert all(taken <= WHOLE for taken in parts.values()), "more than 1000 parts of a GPU"
        for jobs in on.values():
            assert len(jobs) <= 1 or all(job.need.parts < WHOLE for job in jobs), "a whole-GPU job is not alone"
        reasons = play.scheduler.class_reasons()
        for job_id in self.twin.waiting:
            job = play.job(job_id)
            assert job.state is JobState.PENDING
            assert job.reason or reasons[class_of(job).key].sentence, "a job waits without a reason"

    def empty_the_machine(self) -> None:
        """Resume the queue and all GPUs. Then end the running jobs, again and again, until no job runs."""
        self.twin.paused = False
        self.twin.fleet.paused.clear()
        observations: list[Observation] = [
            Asked(1, PauseQueue(False)),
            Asked(2, Resume(tuple(gpu.index for gpu in self.gpus))),
        ]
        for _ in range(self.last_id + 2):
            for job in sorted(self.twin.running):
                self.twin.end(job)
                observations.append(self.play.ended(job))
            self.turn(observations)
            observations = []
        assert not self.twin.running


LINKS = st.one_of(
    st.just([]),  # no topology is known
    st.lists(st.sampled_from(Link), max_size=45),
    st.integers(2, 4).map(
        lambda size: [Link.SYSTEM if a // size != b // size else Link.NVLINK for b in range(24) for a in range(b)]
    ),
)
HISTORY = (SERVERS, st.sampled_from([None, 24_000, MIXED]), LINKS, st.lists(TURN, max_size=20))


@examples(60)
@given(*HISTORY)
def test_the_scheduler_starts_the_same_jobs_on_the_same_gpus_as_the_slow_scheduler(
    servers: list[int], memory_mib: int | None, links: list[int], turns: list[list[Step]]
) -> None:
    """S3.12 S3.14 S3.15 S3.17: The real scheduler starts the same jobs on the same GPUs as the slow scheduler."""
    both = Both(servers, memory_mib, links)
    for turn in turns:
        both.turn(both.facts_of(turn))
    both.empty_the_machine()


@examples(60)
@given(*HISTORY)
def test_each_accepted_job_starts_once_and_all_bookings_are_freed_at_the_end(
    servers: list[int], memory_mib: int | None, links: list[int], turns: list[list[Step]]
) -> None:
    both = Both(servers, memory_mib, links)
    for turn in turns:
        both.turn(both.facts_of(turn))
    both.empty_the_machine()
    play = both.play
    cancelled = {job.id for job in play.rows.values() if job.state is JobState.CANCELLED}
    assert sorted(play.started) == sorted(set(play.rows) - cancelled)
    assert play.scheduler.waiting() == 0 and not play.scheduler.live and not play.scheduler.holdings
    fleet, fresh = play.scheduler.fleet, Fleet(both.gpus, SLOTS)
    assert (fleet.free, fleet.memory_free, fleet.cpu_free) == (fresh.free, fresh.memory_free, fresh.cpu_free)
    assert fleet.claims == {}
    for job in play.rows.values():
        assert fleet.find(class_of(job)) == fresh.find(class_of(job))


@examples(60)
@given(*HISTORY)
def test_no_job_that_fits_waits_behind_a_less_urgent_one_and_paused_gpus_get_no_job(
    servers: list[int], memory_mib: int | None, links: list[int], turns: list[list[Step]]
) -> None:
    """S3.12 S3.30: No job that fits waits while a less urgent job starts, and a paused GPU gets no job."""
    both = Both(servers, memory_mib, links)
    play, gpus = both.play, both.gpus
    for turn in turns:
        observations = both.facts_of(turn)
        plan = play.tell(*observations, after=1.0)
        paused = set(ids_of(play.scheduler.fleet.paused_mask))
        assert not any(paused & set(job.gpus) for job in plan.starts)
        # Repeat the starts of this pass one by one; before each start, no more urgent job may fit.
        slow = SlowFleet(gpus, SLOTS, paused)
        begun = {job.id for job in plan.starts}
        for job in play.scheduler.live.values():
            if job.id not in begun:
                slow.change(job.need, job.gpus, job.spec.vram_mib or 0, -1)
        waiting = [row for row in play.rows.values() if row.state is JobState.PENDING or row.id in begun]
        left = {row.id: row for row in waiting}
        for job in plan.starts:
            for other in left.values():
                if (other.priority, other.order, other.id) < (job.priority, job.order, job.id):
                    assert slow.find(class_of(other)) is None, f"job {other.id} fitted and was passed by {job.id}"
            slow.change(job.need, job.gpus, job.spec.vram_mib or 0, -1)
            del left[job.id]
        if not play.scheduler.queue_paused:
            assert all(slow.find(class_of(other)) is None for other in left.values()), "a job that fits was not started"
        both.twin.start_all()
        play.tell(*(play.began(job.id) for job in plan.starts))


WILD = st.tuples(
    st.sampled_from(
        "arrive began ended failed oom never_ran lasting lost unclaimed gone cancel requeue pause resume wait left".split()
    ),
    st.integers(1, 8),
    st.sampled_from((*NEEDS, *OTHER_FORMS)),
)


def a_fact(play: Play, what: str, number: int, need: str) -> Observation | None:
    """Return an observation of the kind ``what`` about the job or the GPU with this number.

    The observation may be implausible, such as the end of a job that does not run. Return None in three cases. First:
    ``what`` is "wait". Second: ``what`` is "arrive", but the job has arrived before or can never run. Third: ``what``
    is an observation of a runner, but no job with this number has arrived.
    """
    if what == "arrive":
        parents = (number - 1,) if number % 3 == 0 else ()
        limit = 20.0 if number % 2 else None
        form = OTHER_FORMS.get(need, {})
        job = a_job(number, "0" if form else need, retries=number % 2, after_ok=parents, time_limit_s=limit, **form)
        known = number in play.rows or play.scheduler.fleet.can_ever_hold(class_of(job))
        return None if known else Arrived(job)
    if what in ("pause", "resume"):
        return Asked(1, Pause((number,)) if what == "pause" else Resume((number,)))
    if what in ("cancel", "requeue"):
        return Asked(1, Cancel((number,)) if what == "cancel" else Requeue((number,)))
    if number not in play.rows or what == "wait":
        return None
    attempt, left = play.job(number).attempt, (Process(number, 1),)
    told: dict[str, Callable[[], Observation]] = {
        "began": lambda: play.began(number),
        "ended": lambda: play.ended(number),
        "failed": lambda: play.ended(number, 1),
        "oom": lambda: play.ended(number, 1, failure=OOM),
        "never_ran": lambda: play.never_ran(number),
        "lasting": lambda: play.never_ran(number, lasting=True),
        "lost": lambda: play.lost(number, leftovers=left),
        "left": lambda: play.ended(number, leftovers=left),
        "unclaimed": lambda: Unclaimed(number, attempt),
        "gone": lambda: Gone(f"{number}.{attempt}"),
    }
    return told[what]()


@examples(60)
@given(SERVERS, st.lists(st.lists(WILD, min_size=1, max_size=3), max_size=40))
def test_random_observations_in_any_order_lose_no_job_and_keep_the_ledger_right(
    servers: list[int], turns: list[list[tuple[str, int, str]]]
) -> None:
    play = Play(Fleet(some_gpus(*servers), SLOTS))
    for turn in turns:
        observations: list[Observation] = []
        for event in turn:
            observation = a_fact(play, *event)
            if observation is not None and not (
                isinstance(observation, Arrived) and any(isinstance(f, Arrived) for f in observations)
            ):
                observations.append(observation)
        play.tell(*observations, after=sum(7.0 * number for what, number, _ in turn if what == "wait"))
        for job in play.rows.values():
            live = play.scheduler.live.get(job.id)
            assert (live is not None) == job.state.holds_gpus
            assert live is None or live == job, "something was changed and not written down"
            assert job.state.ended == (job.outcome is not None) or live is not None
            assert not job.state.ended or job.finished_at is not None
            if job.state is JobState.PENDING:
                waits = job.id in play.scheduler.queue or job.id in play.scheduler.parked
                assert waits, f"job {job.id} is forgotten"
                assert play.reason(job.id)
                if play.reason(job.id) == "depends":
                    parents = [play.rows.get(parent) for parent in job.spec.after_ok]
                    assert any(parent and not parent.state.ended for parent in parents), "waits for what has ended"
