"""Tests of previews: while nothing else happens, a preview predicts what happens to the job after its submission."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.client import SchedulerClient
from scheduler.client.dry_run import preview
from scheduler.core.config import Config
from scheduler.core.errors import NotFound, Refused
from scheduler.core.job import JobSpec
from scheduler.core.model_table import ModelTable
from scheduler.gpus.declared import declared
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.paths import Places
from tests.builders import examples
from tests.stories.conftest import scheduler
from tests.stories.harness import Scheduler, wait_for
from tests.stories.machine import Machine, machine

__all__ = ["machine", "scheduler"]
ENVIRON = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
CONFIG = Config(state_file="", jobs_file="", llm_config="", log_dir="", gpus=2)


def spec(*words: str, **options: object) -> JobSpec:
    made = JobSpec(source="submit", arguments=words or ("true",))
    return replace(made, **options)  # type: ignore[arg-type]


def look(s: Scheduler, wish: JobSpec) -> tuple[str, tuple[int, ...], str, str]:
    client = SchedulerClient(str(s.folder / "gpu_scheduler_state.json"))
    try:
        found = preview(client.places, CONFIG, wish, ENVIRON, ModelTable(), alive=client.alive())
    except Refused as error:
        return "never", (), "never", str(error)
    return found.would, found.gpus, found.reason_code, found.reason


def submitted(s: Scheduler, wish: JobSpec) -> int:
    return SchedulerClient(str(s.folder / "gpu_scheduler_state.json")).submit(wish, ENVIRON, ModelTable()).id


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    """A scheduler with four GPUs and two CPU slots, which nobody else uses."""
    folder = tmp_path_factory.mktemp("quiet")
    folder.chmod(0o700)
    made = Scheduler(folder, 4)
    made.environ["GPUJOB_SET_HISTORY"] = "false"  # the scheduler would write its history between two looks
    made.start("--cpu-slots=2", "--jobs-file=")
    yield made
    made.end_all()


NEEDS = st.sampled_from(["0", "0.25", "0.5", "0.75", "1", "2", "4", "5"])
ALLOWED = st.one_of(
    st.none(), st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(lambda ids: tuple(sorted(ids)))
)
WISHES = st.builds(
    lambda gpus, allowed, priority, slots: spec("sleep", "600", gpus=gpus, allowed=allowed, priority=priority, slots=slots),
    NEEDS, ALLOWED, st.integers(-2, 2), st.integers(1, 3),
)  # fmt: skip


@examples(6)
@given(wishes=st.lists(WISHES, min_size=3, max_size=6), paused=st.sets(st.integers(0, 3), max_size=2))
def test_a_preview_predicts_what_the_submission_does(quiet: Scheduler, wishes: list[JobSpec], paused: set[int]) -> None:
    """A preview predicts whether the job starts or waits, its GPUs, the reason code and the reason.

    The test then submits the job, and waits until the job has started or has a reason to wait.
    """
    s, ids = quiet, []
    if paused:
        s.cli("pause", *map(str, sorted(paused)))
    try:
        for wish in wishes:
            told = look(s, wish)
            if told[0] == "never":
                with pytest.raises(Refused):
                    submitted(s, wish)
                continue
            number = submitted(s, wish)
            ids.append(number)
            if told[0] == "start":
                s.wait_state(number, "running")
                assert (told, tuple(s.job(number)["gpus"])) == (told, told[1])
            else:
                job = wait_for(lambda number=number: (j := s.job(number))["reason_code"] != "new" and j, "its reason")
                assert (told[2], told[3]) == (job["reason_code"], job["reason"]), (told, job["state"])
    finally:
        for number in reversed(ids):  # newest first, so that no waiting job starts when a running one is cancelled
            s.cli("cancel", str(number), code=None)
        s.cli("resume", "0-3")
        wait_for(lambda: not {"pending", "starting", "running", "stopping"} & set(s.states().values()), "quiet")


def test_a_preview_reports_dependencies_pauses_and_missing_folders(quiet: Scheduler) -> None:
    """A preview reports dependencies, missing folders and environments, and a paused queue as reasons to wait.

    If a job in `after_ok` has failed, the preview's verdict is ``never``. If the job depends on a job that does not
    exist, the preview raises NotFound.
    """
    s = quiet
    failed, running = submitted(s, spec("false")), submitted(s, spec("sleep", "600", gpus="0.5"))
    s.wait_state(failed, "failed")
    s.wait_state(running, "running")
    try:
        assert look(s, spec(after=(running,)))[2] == "depends"
        assert look(s, spec(after=(failed,)))[0] == "start"
        never = look(s, spec(after_ok=(failed,)))
        assert never[0] == "never" and f"job {failed} had to succeed" in never[3]
        with pytest.raises(NotFound):
            look(s, spec(after=(99_999,)))
        assert look(s, spec(cwd="/nonexistent"))[2] == "missing"
        assert look(s, spec(conda_env="nosuchenv"))[2] == "missing"
        beside = tuple(s.job(running)["gpus"])
        assert look(s, spec(gpus="0.5"))[:2] == ("start", beside)  # the other half of the same GPU
        assert look(s, spec(on=(0,), allowed=(0,)))[:2] == ("start", (0,))
        s.cli("queue", "pause")
        assert look(s, spec())[2] == "paused"
        s.cli("queue", "resume")
    finally:
        s.cli("cancel", str(running))
        s.wait_state(running, "cancelled")


def test_a_preview_writes_nothing(quiet: Scheduler) -> None:
    """A preview writes no row to the store and creates no file."""
    s = quiet

    def picture() -> tuple[object, ...]:
        tables = [name for (name,) in s.rows("SELECT name FROM sqlite_master WHERE type='table'")]
        files = sorted(path.name for path in (s.folder / ".gpujob").rglob("*") if not path.name.endswith("-shm"))
        # The row "blocked" is left out: the scheduler itself updates these counts, up to a second after a change.
        found = [s.rows(f"SELECT * FROM {name}") for name in tables]
        return [[row for row in rows if row[0] != "blocked"] for rows in found], files

    before = picture()
    for wish in (spec(), spec(gpus="9"), spec(cwd="/nonexistent"), spec(gpus="0")):
        look(s, wish)
    assert picture() == before


def test_a_preview_without_a_scheduler_says_that_the_job_waits_for_one(tmp_path: Path) -> None:
    """Without a running scheduler a preview says that the job waits for a scheduler.

    If the job needs more GPUs than exist, the preview's verdict is ``never``.
    """
    places = Places(str(tmp_path / "gpu_scheduler_state.json"))
    found = preview(places, CONFIG, spec(gpus="0.5"), ENVIRON, ModelTable(), alive=False)
    assert (found.would, found.reason_code, found.need) == ("wait", "no-scheduler", 0.5)
    database = Database(places)
    with database.writing() as connection:
        rows.save_gpus(connection, declared((0, 1)))
    database.close()
    found = preview(places, CONFIG, spec(gpus="0.5"), ENVIRON, ModelTable(), alive=False)
    assert (found.would, found.reason_code) == ("wait", "no-scheduler")
    assert preview(places, CONFIG, spec(gpus="3"), ENVIRON, ModelTable(), alive=False).would == "never"


def test_a_preview_does_not_allocate_a_gpu_with_foreign_processes(machine: Callable[..., Machine]) -> None:
    """A preview does not allocate a GPU with foreign processes. Its reason code equals that of the later submission."""
    m = machine()
    m.cards("GPU-a", "GPU-b")
    m.use("GPU-b", m.foreign_process(), 70_000, load=90)
    m.s.start()
    m.state(1, "FOREIGN")
    m.state(0, "AVAILABLE")
    assert look(m.s, spec(gpus="1"))[:2] == ("start", (0,))
    told = look(m.s, spec(gpus="1", allowed=(1,)))
    assert (told[0], told[2]) == ("wait", "foreign")
    number = submitted(m.s, spec(gpus="1", allowed=(1,)))
    job = wait_for(lambda: (j := m.s.job(number))["reason_code"] != "new" and j, "its reason")
    assert job["reason_code"] == "foreign"


def test_a_preview_chooses_the_linked_gpus_that_the_scheduler_chooses(machine: Callable[..., Machine]) -> None:
    """The links between GPUs are in the store, so a preview, which reads no GPU, prefers the same GPUs."""
    m = machine()
    m.cards("GPU-a", "GPU-b", "GPU-c")
    m.driver.no_links()
    m.driver.nvlink("GPU-b", "GPU-c")
    m.s.start()
    m.state(0, "AVAILABLE")
    assert look(m.s, spec(gpus="2"))[:2] == ("start", (1, 2))
    assert look(m.s, spec(gpus="3", link="numa"))[0] == "never"
    m.add("b", gpus="1")
    m.running("b")
    assert look(m.s, spec(gpus="2"))[:2] == ("start", (0, 2))
    told = look(m.s, spec(gpus="2", link="nvlink"))
    assert (told[0], told[2]) == ("wait", "no-link")
