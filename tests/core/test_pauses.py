"""Tests of pauses by commands and by edits of the state file.

An edit does not undo a pause that was made after the user had read the file.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decide import decide
from scheduler.core.gpu import Gpu, ids_of
from scheduler.core.observations import Asked, Now
from scheduler.core.pauses import MOST_REMEMBERED, Pauses
from scheduler.core.placement import Fleet
from scheduler.core.requests import Pause, PauseQueue, Resume, StateEdited
from scheduler.core.scheduler_state import SchedulerState

GPUS = 4


def a_world() -> SchedulerState:
    return SchedulerState(Fleet(Gpu(n, f"GPU-{n}", "x", 0) for n in range(GPUS)), lambda job: None)


def paused(state: SchedulerState) -> tuple[int, ...]:
    return ids_of(state.fleet.paused_mask)


def ask(state: SchedulerState, request: object, at: float = 1.0) -> list[str]:
    """Apply a request; return the messages for the user."""
    plan = decide(state, [Asked(1, request)], Now(at, at))  # type: ignore[arg-type]
    return [text for text, _ in plan.notices]


def test_an_edit_of_the_state_file_sets_exactly_the_pauses_that_it_lists() -> None:
    """S3.32: After an edit of the state file, exactly the GPUs that the file lists are paused."""
    state = a_world()
    assert ask(state, StateEdited((1, 3), False)) == [
        "GPU 1 paused by an edit of the state file", "GPU 3 paused by an edit of the state file",
    ]  # fmt: skip
    assert paused(state) == (1, 3)
    ask(state, StateEdited((), True))
    assert paused(state) == () and state.queue_paused
    assert ask(state, StateEdited((), True)) == [], "nothing new is not said"


def test_d03_an_edit_changes_only_the_keys_that_it_contains() -> None:
    state = a_world()
    ask(state, StateEdited((1,), True))
    assert ask(state, StateEdited(None, None)) == []
    assert ask(state, StateEdited((1, 2), None)) == ["GPU 2 paused by an edit of the state file"]
    assert ask(state, StateEdited(None, False)) == ["the queue is resumed by an edit of the state file"]
    assert paused(state) == (1, 2)


def test_s3_32_an_edit_reports_unknown_gpu_ids_and_pauses_the_valid_ones() -> None:
    state = a_world()
    said = ask(state, StateEdited((2, 99, -1), False))
    assert said[0] == "the state file pauses GPUs 99, -1, which are not managed here (managed: 0-3)"
    assert paused(state) == (2,)


def test_s3_31_saving_an_older_copy_does_not_undo_a_pause_by_a_command() -> None:
    state = a_world()
    state.pauses.revision = 7
    ask(state, Pause((2,)))
    ask(state, StateEdited((1,), False, 7))  # read before the pause, saved after it
    assert paused(state) == (1, 2)
    state.pauses.revision = 8
    ask(state, StateEdited((1,), False, 8))  # read after the pause: the edit resumes GPU 2 on purpose
    assert paused(state) == (1,)


def test_s3_31_saving_an_older_copy_does_not_undo_a_resume_by_a_command() -> None:
    state = a_world()
    ask(state, Pause((0, 1)))
    ask(state, PauseQueue(True))
    state.pauses.revision = 3
    ask(state, Resume((0,)))
    ask(state, PauseQueue(False))
    ask(state, StateEdited((0, 1, 3), True, 3))
    assert paused(state) == (1, 3) and not state.queue_paused


def test_s3_31_a_pause_that_repeats_an_edit_survives_the_save_of_an_older_copy() -> None:
    """S3.31: An edit pauses a GPU, and a command pauses it again. Then a user saves an older copy of the file.

    The GPU stays paused. The older copy was read before the edit and the command.
    """
    state = a_world()
    ask(state, StateEdited((1,), False, 0))
    ask(state, Pause((1,)))
    ask(state, StateEdited((0,), False, 0))
    assert paused(state) == (0, 1)
    state.pauses.revision = 1
    ask(state, StateEdited((0,), False, 1))  # the writer has seen the pause and may undo it
    assert paused(state) == (0,)


def test_the_last_saved_file_decides_between_two_edits() -> None:
    """D11: If two programs save old copies of the state file in turn, the file that was saved last decides."""
    state = a_world()
    for number in range(20):
        wanted = (number % 2,)
        ask(state, StateEdited(wanted, False, 0))
        assert paused(state) == wanted
        state.pauses.revision += 1


def test_a_state_file_without_a_valid_revision_is_applied_completely() -> None:
    state = a_world()
    ask(state, Pause((2,)))
    for read in (None, 99):
        ask(state, Pause((2,)))
        ask(state, StateEdited((1,), False, read))
        assert paused(state) == (1,), read


def test_the_number_of_remembered_pause_changes_is_limited() -> None:
    book = Pauses()
    for number in range(3 * MOST_REMEMBERED):
        book.by_verb(number % 5, before=bool(number % 2))
    assert len(book.changes) == MOST_REMEMBERED


STEP = st.one_of(
    st.tuples(st.just("verb"), st.integers(0, GPUS - 1), st.booleans()),
    st.tuples(st.just("read"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("save"), st.integers(0, 2), st.integers(0, GPUS - 1)),
    st.tuples(st.just("paint"), st.just(0), st.booleans()),
)


@given(st.lists(STEP, max_size=60))
def test_a_save_changes_only_gpus_that_its_writer_or_an_earlier_edit_changed(steps: list[tuple[str, int, int]]) -> None:
    """S3.31, D05: A save of the state file undoes a command only on the GPU that the writer of the file changed.

    Three writers read the file, change the pause of one GPU each, and save the file. Meanwhile, commands pause and
    resume GPUs. A save may change a GPU in two cases only. First: its writer changed this GPU in the file. Second: an
    earlier save, not a command, made the last change of this GPU, and the writer had read the file before that earlier
    save.
    """
    state = a_world()
    picture: tuple[tuple[int, ...], int] = ((), 0)
    held: dict[int, tuple[tuple[int, ...], int]] = {}
    by_edit: dict[int, int] = {}  # GPU → number of the step of the last edit that changed it
    read_at: dict[int, int] = {}
    for number, (what, who, value) in enumerate(steps):
        if what == "verb":
            ask(state, Pause((who,)) if value else Resume((who,)))
            assert (who in paused(state)) is bool(value)
            by_edit.pop(who, None)
        elif what == "paint":
            state.pauses.revision += 1
            picture = paused(state), state.pauses.revision
        elif what == "read":
            held[who], read_at[who] = picture, number
        elif who in held:
            gpus, revision = held[who]
            wanted = tuple(sorted(set(gpus) ^ {value}))
            before = set(paused(state))
            ask(state, StateEdited(wanted, False, revision))
            picture = wanted, revision  # the next reader reads this version
            after = set(paused(state))
            allowed = {gpu for gpu, at in by_edit.items() if at > read_at[who]} | {value}
            assert before ^ after <= allowed
            for gpu in (before ^ after) | {value}:  # also if its own GPU was in that state before
                by_edit[gpu] = number
