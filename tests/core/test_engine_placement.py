"""Tests of placement on a cluster: what is released to the engine, and how bookings follow its choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.admission import Admission
from scheduler.core.config import Config
from scheduler.core.engine_placement import EngineFleet, EngineRules, numbered
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Job, JobState
from scheduler.core.observations import EnginePlace, Readings, Started
from scheduler.core.policy import thresholds_of
from scheduler.core.requests import Cancel, Pause, Resume
from tests.builders import Play, a_job, a_kind, a_policy, examples, some_gpus

S = JobState


def cluster(*servers: int, shards: int | None = 4, ahead: int = 0, ignore_ids: bool = False, **more: Any) -> Play:
    """Return a Play on a cluster. Each argument is the number of GPUs of one node: g1, g2, …; all have the type a100."""
    gpus = [
        replace(
            gpu,
            uuid=f"g{gpu.server + 1}/{gpu.index - sum(servers[: gpu.server])}",
            node=f"g{gpu.server + 1}",
            name="a100",
        )
        for gpu in some_gpus(*servers)
    ]
    fleet = EngineFleet(gpus, EngineRules("Slurm", shards, ignore_ids), 8)
    return Play(fleet, policy=a_policy(release_ahead=ahead, **more))


def on_slurm(id: int, need: str = "1", **changes: Any) -> Job:
    """Return a waiting job whose attempts run on Slurm."""
    return a_job(id, need, runner="slurm", **changes)


def started(play: Play, job: int, *gpus: int) -> Started:
    """Return the observation that Slurm has started a job on these GPUs."""
    found = [play.scheduler.fleet.gpus[gpu] for gpu in gpus]
    place = EnginePlace(found[0].node if found else "g1", tuple(gpu.uuid for gpu in found), "17", "main")
    return Started(job, play.job(job).attempt, None, play.wall, place=place)


@pytest.mark.parametrize(
    ("shards", "need", "booked", "number"),
    [
        (4, "0.5", "0.5", 2), (4, "0.3", "0.5", 2), (4, "0.01", "0.25", 1), (4, "1", "1", 0), (4, "2x0.5", "2", 0),
        (3, "0.3", "0.333", 1), (0, "0.5", "1", 0), (0, "0", "0", 0), (None, "0.3", "0.3", 0), (None, "2x0.5", "2", 0),
    ],
)  # fmt: skip
def test_a_share_is_rounded_up_to_what_the_engine_can_grant(
    shards: int | None, need: str, booked: str, number: int
) -> None:
    rules, asked = EngineRules("Slurm", shards), ResourceRequest.parse(need)
    assert str(rules.booked(asked)) == booked and rules.shards_of(asked) == number
    assert rules.booked(asked).total >= asked.total


def test_the_gpus_of_a_job_are_those_that_the_engine_tells() -> None:
    play = cluster(2, 2)
    play.arrive(on_slurm(1, "0.5"))
    assert play.job(1).gpus == () and play.scheduler.released == {1: (0,)}
    play.tell(started(play, 1, 3))
    job = play.job(1)
    assert (job.state, job.gpus, job.node, job.partition, job.engine_job) == (S.RUNNING, (3,), "g2", "main", "17")
    assert play.scheduler.fleet.free == {0: 1000, 1: 1000, 2: 1000, 3: 500}
    play.tell(play.ended(1))
    assert play.state(1) is S.DONE and set(play.scheduler.fleet.free.values()) == {1000}


def test_a_start_that_is_told_twice_counts_once() -> None:
    play = cluster(2)
    play.arrive(on_slurm(1))
    play.tell(started(play, 1, 1))
    play.tell(started(play, 1, 0))
    assert play.job(1).gpus == (1,) and play.journal.count((1, "started")) == 1


def test_a_job_takes_the_place_that_was_expected_for_another() -> None:
    """The other job gets a new booking if there is room; else it is expected to wait in the queue of the engine."""
    play = cluster(2)
    play.arrive(on_slurm(1), on_slurm(2), on_slurm(3))
    assert play.scheduler.released == {1: (0,), 2: (1,)}
    play.tell(started(play, 1, 1))
    assert play.scheduler.released == {2: (0,)} and play.started == [1, 2]
    one = cluster(1, ahead=2)
    one.arrive(on_slurm(1), on_slurm(2), on_slurm(3), on_slurm(4))
    assert one.scheduler.released == {1: (0,), 2: None, 3: None}
    one.tell(started(one, 2, 0))
    assert one.scheduler.released == {1: None, 3: None} and one.job(2).gpus == (0,)
    one.tell(one.ended(2))
    assert one.scheduler.released == {1: (0,), 3: None, 4: None}


def test_two_running_jobs_on_one_gpu_are_noted() -> None:
    play = cluster(2)
    play.arrive(on_slurm(1), on_slurm(2))
    play.tell(started(play, 1, 0), started(play, 2, 0))
    assert "also allocated to other jobs" in play.job(2).notes[-1]
    play.tell(play.ended(1), play.ended(2))
    assert set(play.scheduler.fleet.free.values()) == {1000}


def test_only_release_ahead_jobs_wait_in_the_engine() -> None:
    play = cluster(1, ahead=2)
    play.arrive(*(on_slurm(n) for n in range(1, 7)))
    assert play.started == [1, 2, 3] and play.scheduler.released == {1: (0,), 2: None, 3: None}
    play.tell(started(play, 1, 0))
    assert play.started == [1, 2, 3]
    play.tell(play.ended(1))  # job 2 is expected on its GPU, so one more may wait
    assert play.started == [1, 2, 3, 4]


def test_without_release_ahead_a_job_is_released_only_if_it_fits() -> None:
    play = cluster(1)
    play.arrive(on_slurm(1), on_slurm(2))
    assert play.started == [1] and play.reason(2) == "no-room"


def test_a_job_that_has_not_started_is_stopped_in_the_engine() -> None:
    play = cluster(1, ahead=1)
    play.arrive(on_slurm(1), on_slurm(2))
    plan = play.ask(Cancel((1, 2)))
    assert [stop.job.id for stop in plan.stops] == [1, 2] and not any(stop.hard for stop in plan.stops)


def test_pauses_count_gpus_and_bind_jobs_to_nodes() -> None:
    play = cluster(2, 1, ahead=4)
    play.ask(Pause((0,)))
    play.arrive(on_slurm(1), on_slurm(2), on_slurm(3))
    assert play.started == [1, 2], "no job waits in the engine while a GPU is paused"
    bound = sorted(play.scheduler.bound_to(play.scheduler.live[n]) for n in (1, 2))
    assert bound == ["g1", "g2"]
    on_g1 = next(n for n in (1, 2) if play.scheduler.bound_to(play.scheduler.live[n]) == "g1")
    play.tell(started(play, on_g1, 0))  # the engine chose the paused GPU: the other one of the node stays free for it
    assert play.started == [1, 2]
    play.ask(Resume((0,)))
    assert 3 in play.started and play.scheduler.bound_to(play.scheduler.live[3]) == ""


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"allowed": (0,)}, "Slurm chooses the GPUs"), ({"on": (0,)}, "names its GPUs (on=)"),
        ({"allowed": ("g9",)}, "the nodes with GPUs are g1, g2"), ({"allowed": ("type=h100",)}, "the types are a100"),
        ({"allowed": ("type=a100", "type=a100 ")}, "the types are a100"), ({"need": "3"}, "at most 2 GPUs of one server"),
        ({"allowed": ("g2",), "need": "2"}, "only g2 is allowed"),
    ],
)  # fmt: skip
def test_a_job_that_the_cluster_can_never_run_is_told_why(job: dict[str, Any], why: str) -> None:
    play = cluster(2, 1, ahead=4)
    play.arrive(on_slurm(1, **job))
    assert play.started == [] and play.reason(1) == "never"
    assert why in play.scheduler.class_reasons()[next(iter(play.scheduler.class_reasons()))].sentence


def test_several_types_are_refused_because_an_engine_can_be_asked_for_one() -> None:
    fleet = EngineFleet([Gpu(0, "g1/0", "a100", node="g1"), Gpu(1, "g1/1", "h100", node="g1")], EngineRules("Slurm", 4))
    kind = replace(a_kind(), allowed=("type=a100", "type=h100"))
    assert "only one type" in fleet.can_ever_hold(kind)
    assert fleet.find(replace(kind, allowed=("type=h100",))) == (1,)


def test_ids_are_ignored_if_the_settings_say_so() -> None:
    play = cluster(1, 1, ignore_ids=True)
    play.arrive(on_slurm(1, allowed=(7,)), on_slurm(2, allowed=(7,)))
    assert play.started == [1, 2]


def reading(gpu: Gpu, **changes: Any) -> GpuSnapshot:
    return GpuSnapshot(gpu.uuid, gpu.index, "a100", by_engine=True, node=gpu.node, **changes)


def test_drained_nodes_and_gpus_of_others_get_no_job_and_readings_never_become_stale() -> None:
    play = cluster(2, 1, ahead=1)
    state, gpus = play.scheduler, play.scheduler.fleet.managed
    state.fleet.admission = Admission.of(gpus, thresholds_of(Config()), play.now)
    state.watch_admission()
    play.arrive(on_slurm(1))
    assert play.started == [], "no node has been reported, so nothing is released, not even ahead"
    play.tell(
        Readings(
            play.mono, (reading(gpus[0], in_use=True), reading(gpus[1]), reading(gpus[2], problem="node g2 is drained"))
        )
    )
    assert state.released == {1: (1,)}
    assert [card.state for card in state.fleet.admission.cards.values()] == ["FOREIGN", "", "DRAINING"]
    play.tell(started(play, 1, 1), after=3600.0)
    play.arrive(on_slurm(2))
    assert state.released == {2: None}
    play.tell(Readings(play.mono, (), "Slurm does not answer"))
    play.arrive(on_slurm(3, "0.5"))
    assert play.reason(3) == "stale"


def test_gpus_keep_their_numbers_and_nodes_are_sorted_by_number() -> None:
    def report(*nodes: str) -> Readings:
        return Readings(
            0.0, tuple(GpuSnapshot(f"{n}/{i}", i, "a100", by_engine=True, node=n) for n in nodes for i in range(2))
        )

    first = numbered(report("g10", "g2"), ())
    assert [(gpu.index, gpu.uuid, gpu.server) for gpu in first] == [
        (0, "g2/0", 0),
        (1, "g2/1", 0),
        (2, "g10/0", 1),
        (3, "g10/1", 1),
    ]
    later = numbered(report("g1", "g10"), first)
    assert [(gpu.index, gpu.uuid, gpu.server) for gpu in later] == [
        (2, "g10/0", 1),
        (3, "g10/1", 1),
        (4, "g1/0", 2),
        (5, "g1/1", 2),
    ]


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "start", "end", "pause", "resume", "cancel"]),
            st.integers(0, 99),
            st.integers(0, 99),
        ),
        max_size=60,
    ),
    st.sampled_from([None, 0, 2, 4]),
    st.integers(0, 3),
)
def test_the_ledger_is_right_whatever_the_engine_chooses(
    steps: list[tuple[str, int, int]], shards: int | None, ahead: int
) -> None:
    """`Play.tell` checks the ledger after each pass. The engine places jobs where they fit by its own account."""
    play = cluster(2, 3, 1, shards=shards, ahead=ahead)
    state = play.scheduler
    rules = state.fleet.rules  # type: ignore[attr-defined]
    real = dict.fromkeys(state.fleet.gpus, WHOLE)
    placed: dict[int, tuple[int, ...]] = {}
    number = 0
    for what, pick, where in steps:
        waiting = [job for job in state.live.values() if job.id not in placed]
        running = sorted(placed)
        if what == "arrive":
            number += 1
            play.arrive(
                on_slurm(
                    number, ["0.3", "0.5", "1", "2", "0"][pick % 5], allowed=[None, ("g2",), ("type=a100",)][where % 3]
                )
            )
        elif what == "start" and waiting:
            job = waiting[pick % len(waiting)]
            need = rules.booked(job.need)
            nodes = [server for server in range(3) if job.allowed != ("g2",) or server == 1]
            server = nodes[where % len(nodes)]
            fitting = [i for i, gpu in state.fleet.gpus.items() if gpu.server == server and real[i] >= need.parts]
            if len(fitting) >= need.count:
                placed[job.id] = tuple(fitting[-need.count :] if need.count else ())
                for gpu in placed[job.id]:
                    real[gpu] -= need.parts
                play.tell(started(play, job.id, *placed[job.id]))
                assert play.job(job.id).gpus == placed[job.id] and job.attempt_key not in state.unbooked
        elif what == "end" and running:
            job_id = running[pick % len(running)]
            for gpu in placed.pop(job_id):
                real[gpu] += rules.booked(play.job(job_id).need).parts
            play.tell(play.ended(job_id))
        elif what in ("pause", "resume"):
            play.ask((Pause if what == "pause" else Resume)((pick % 6,)))
        elif what == "cancel" and waiting:
            job = waiting[pick % len(waiting)]
            play.ask(Cancel((job.id,)))
            if job.id in state.live:
                play.tell(replace(play.never_ran(job.id), lasting=True))
        assert all(job_id in state.live for job_id in state.released)
        if what == "arrive":  # later an engine may place jobs on GPUs that were expected for others
            assert sum(gpus is None for gpus in state.released.values()) <= ahead + len(placed)
