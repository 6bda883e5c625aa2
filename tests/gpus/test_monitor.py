"""Tests of `GpuMonitor`: GPU indices after restarts, intervals between readings, and names of other schedulers."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from scheduler.core.gpu import Gpu
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.observations import Readings
from scheduler.gpus import monitor
from scheduler.gpus.monitor import DECLARED, UNREAD, GpuMonitor, moved_gpus, other_schedulers


def stored(**numbers: int) -> list[Gpu]:
    """Return GPUs as the last start of the scheduler stored them: ``a=0`` is GPU-a with index 0."""
    return [Gpu(number, f"GPU-{name}", "a card") for name, number in numbers.items()]


def shown(*names: str) -> Readings:
    """Return a reading that lists these GPUs in the driver's order. ``-`` is a lost GPU without a UUID."""
    return Readings(
        1.0,
        tuple(
            GpuSnapshot("" if name == "-" else f"GPU-{name}", i, "a card", 80_000, lost=name == "-")
            for i, name in enumerate(names)
        ),
    )


@pytest.mark.parametrize(
    ("before", "now", "numbers"),
    [
        # no GPU at the last start: the driver's indices
        ({}, "abc", {"a": 0, "b": 1, "c": 2}),
        # no GPU has vanished: the driver's indices, also if they have changed
        ({"a": 0, "b": 1, "c": 2}, "abc", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1, "c": 2}, "cab", {"a": 1, "b": 2, "c": 0}),
        ({"b": 1}, "abc", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1}, "abc", {"a": 0, "b": 1, "c": 2}),
        # a GPU has vanished: all keep their indices, and the vanished one is listed
        ({"a": 0, "b": 1, "c": 2}, "ac", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1, "c": 2}, "bc", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1, "c": 2}, "ca", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1, "c": 2}, "ab", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1, "c": 2}, "c", {"a": 0, "b": 1, "c": 2}),
        ({"a": 0, "b": 2}, "b", {"a": 0, "b": 2}),
        # a new GPU gets a free index
        ({"a": 0, "b": 1, "c": 2}, "adc", {"a": 0, "b": 1, "c": 2, "d": 3}),
        ({"a": 0, "b": 1, "c": 2}, "acd", {"a": 0, "b": 1, "c": 2, "d": 3}),
        ({"a": 0, "b": 1, "c": 2}, "acde", {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}),
        ({"a": 0, "c": 5}, "xc", {"a": 0, "c": 5, "x": 1}),
        ({"a": 0, "b": 1}, "xy", {"a": 0, "b": 1, "x": 2, "y": 3}),
        # a lost GPU without a UUID is the GPU that had its index before, so none has vanished
        ({"a": 0, "b": 1, "c": 2}, "a-c", {"a": 0, "b": 1, "c": 2}),
    ],
)
def test_gpus_keep_their_indices_if_one_has_disappeared(
    before: dict[str, int], now: str, numbers: Mapping[str, int]
) -> None:
    notes: list[str] = []
    found = monitor._numbered(shown(*now), stored(**before), notes)
    assert {gpu.uuid[4:]: index for index, gpu in found.items()} == numbers
    assert all(index == gpu.index for index, gpu in found.items())
    vanished = [number for name, number in before.items() if name not in now and "-" not in now]
    assert bool(notes) == bool(vanished)
    for number in vanished:
        assert str(number) in notes[0] and "the driver no longer shows GPU" in notes[0]


def test_declared_and_unread_gpus_are_not_reported_as_disappeared() -> None:
    before = [Gpu(0, f"{DECLARED}0"), Gpu(1, f"{UNREAD}1"), Gpu(2, f"{DECLARED}2")]
    notes: list[str] = []
    assert sorted(monitor._numbered(shown("a", "b"), before, notes)) == [0, 1] and notes == []


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}, {}),
        ({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 1, "b": 2}, {0: 1, 1: 2, 2: 0}),
        ({"a": 0, "b": 1}, {"a": 0}, {}),
        ({"a": 0, "b": 1}, {"b": 0}, {1: 0}),
        ({}, {"a": 0}, {}),
    ],
)
def test_a_changed_gpu_index_counts_as_a_move(
    before: dict[str, int], after: dict[str, int], moved: dict[int, int]
) -> None:
    assert moved_gpus(stored(**before), stored(**after)) == moved


def test_the_loss_of_a_gpu_does_not_count_as_a_move_of_the_others() -> None:
    before = stored(a=0, b=1, c=2)
    assert moved_gpus(before, monitor._numbered(shown("a", "c"), before, []).values()) == {}


# -- reading intervals ------------------------------------------------------------------------------------


class OneAnswer:
    """A GPU reader. The test sets the reading that it returns next."""

    absent = False

    def __init__(self) -> None:
        self.answer: Readings | None = None
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1

    def look(self) -> Readings | None:
        found, self.answer = self.answer, None
        return found

    def next_look(self) -> float | None:
        return None


@pytest.mark.parametrize(
    ("interval", "waits"),
    [
        (5.0, [5, 10, 20, 30, 30]),
        (0.25, [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]),
        (30.0, [30, 30]),
        (60.0, [60, 60, 60]),
        (30.0, [30] * 1100),  # a night with a driver that does not answer
    ],
)
def test_a_failing_driver_is_read_less_often_until_it_answers(interval: float, waits: list[float]) -> None:
    probe = OneAnswer()
    eyes = GpuMonitor(probe, "/s", list)  # type: ignore[arg-type]
    now = 1000.0
    eyes.look(now, interval)
    assert probe.asked == 1, "at once"
    for i, wait in enumerate([*waits, None]):
        probe.answer = Readings(now, problem="" if wait is None else "no answer")
        eyes.look(now, interval)
        wait = interval if wait is None else wait
        assert eyes.next_look(interval) == now + wait
        eyes.look(now + wait - 0.01, interval)
        assert probe.asked == i + 1, "not before"
        now += wait
        eyes.look(now, interval)
        assert probe.asked == i + 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user, and read its environment")
def test_variables_that_another_user_sets_make_a_process_part_of_no_job() -> None:
    """With `on_trespass: kill`, such a process would otherwise end a job of this scheduler."""
    for user, owner in ((None, "7.2"), (65534, "")):
        variables = {"GPUJOB_STATE_FILE": "/s", "GPUJOB_ID": "7", "GPUJOB_ATTEMPT": "2"}
        process = subprocess.Popen(["sleep", "1000"], env=variables, user=user, start_new_session=True)
        try:
            reading = GpuSnapshot("GPU-a", 0, processes=(GpuProcess(process.pid, 300),))
            told = GpuMonitor(OneAnswer(), "/s", list).identified(Readings(0.0, (reading,)))  # type: ignore[arg-type]
            (found,) = told.gpus[0].processes or ()
            assert found.visible and found.owner == owner
        finally:
            process.kill()
            process.wait()


# -- other schedulers -------------------------------------------------------------------------------------


@pytest.fixture
def named() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def test_a_forged_scheduler_name_is_neither_accepted_nor_printed(named: list[socket.socket]) -> None:
    """Any user can bind a socket name that looks like that of a scheduler.

    Such a name is not accepted and not printed.
    """
    me, other = os.getuid(), os.getppid()
    tail = f"{other:0>7}"  # leading zeros: no scheduler binds this name
    good = f"gpujob/{me}/{tail}/0,2-3"
    forged = [
        f"gpujob/{me}/{tail}/\x1b[31mRED\x07",
        f"gpujob/{me}/{tail}/1 `x`",
        f"gpujob/{me}/{tail}/1 \n2",
        f"gpujob/{me + 1}/{tail}/77",  # not the user id of the process
        f"gpujob/99999999999999999999/{tail}/77",
        f"gpujob/{me}/99999999999999999999/77",
        f"gpujob/{me}/4194305/77",  # above the highest possible pid
        f"gpujob/{me}/{tail}/77/more",
        f"gpujob/{me}/{tail}/",
        f"gpujob/{me}/\u0663/77",
        f"gpujob/{me}/{os.getpid()}/77",
    ]
    for name in (good, *forged):
        named.append(socket.socket(socket.AF_UNIX))
        try:
            named[-1].bind(f"\0{name}")
        except OSError as error:  # another run of the tests has bound this name: the effect is the same
            assert error.errno == errno.EADDRINUSE
    told = other_schedulers()
    assert [text for text in told if "GPUs 0,2-3;" in text], told
    assert all(text.isprintable() for text in told), told
    assert not [text for text in told if "77" in text.partition("GPUs")[2] or "RED" in text or "`" in text], told
    assert len([text for text in told if f"pid {tail} " in text]) == 1, told


def test_declared_gpus_never_count_as_moved() -> None:
    before = [replace(gpu, uuid=f"{DECLARED}{gpu.index}") for gpu in stored(a=0, b=1)]
    assert moved_gpus(before, stored(a=1, b=0)) == {}
