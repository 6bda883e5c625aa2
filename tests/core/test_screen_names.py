"""Tests of the names of terminal sessions: safe to type, short enough for GNU Screen, and ending with the job's id."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.screen_names import free_name, mode_of, session_name, shortened

SAFE = re.compile(r"gpujob_[A-Za-z0-9_-]+_[0-9]+")
MOST = 80  # longest name that screen accepts
WORDS = st.lists(st.one_of(st.just("--mode"), st.text(max_size=30), st.text(max_size=30).map("--mode={}".format)))


@pytest.mark.parametrize(
    ("gpus", "arguments", "name"),
    [
        ((0,), (), "gpujob_0_unknown_7"),
        ((0, 1), ("--mode", "train"), "gpujob_0-1_train_7"),
        ((3,), ("--mode=eval",), "gpujob_3_eval_7"),
        ((), ("--mode", "x"), "gpujob_cpu_x_7"),
        ((0,), ("--mode",), "gpujob_0_unknown_7"),
        ((0,), ("--mode", ""), "gpujob_0_unknown_7"),
        ((0,), ("--mode=",), "gpujob_0_unknown_7"),
        ((0,), ("--mode", "a b/c.d:e*f'g\"h$i;j"), "gpujob_0_a_b_c_d_e_f_g_h_i_j_7"),
        ((0,), ("--mode", "ä€"), "gpujob_0_unknown_7"),
        ((0,), ("--mode", "fein-ß-1"), "gpujob_0_fein-_-1_7"),
        ((0,), ("--mode", "../../etc"), "gpujob_0_etc_7"),
        ((0,), ("--mode", "x" * 200), f"gpujob_0_{'x' * 20}_7"),
        ((0,), ("--mode", "%n^C\n\0"), "gpujob_0_n_C_7"),
        ((0,), ("--modes", "no", "--mode-of", "no"), "gpujob_0_unknown_7"),
        ((0,), ("--mode", "first", "--mode", "second"), "gpujob_0_first_7"),
        (tuple(range(12)), ("--mode", "m"), "gpujob_0-1-2-3-4-5-6-7-8-9-10-11_m_7"),
        (tuple(range(64)), ("--mode", "m"), "gpujob_64gpus_m_7"),
    ],
)
def test_a_session_name_contains_gpus_mode_and_job_id(gpus, arguments, name):
    """S3.21, S3.22, J07: A session name contains the GPUs, the mode and the job's id."""
    assert session_name(7, gpus, arguments) == name


@given(st.integers(1, 10**12), st.lists(st.integers(0, 200), max_size=80, unique=True), WORDS)
def test_any_session_name_is_safe_and_short(job, gpus, arguments):
    """J07: Any session name has only safe characters and is short enough, also with the additions for a name in use."""
    name = session_name(job, sorted(gpus), arguments)
    assert SAFE.fullmatch(name) and name.endswith(f"_{job}")
    assert len(name) + len("_abcd_a9999") <= MOST
    mode = mode_of(arguments)
    assert 1 <= len(mode) <= 20 and re.fullmatch("[A-Za-z0-9_-]+", mode)


@given(st.integers(1, 99), st.sets(st.sampled_from(["n", "n_abcd", "n_abcd_a3", "n_abcd_2", "n_abcd_3", "nn", "n_"])))
def test_a_session_name_in_use_is_not_used_again(attempt, taken):
    """J06: If a session name is in use, the scheduler's short id is added to the name.

    If this name is in use too, the attempt or a number is added.
    """
    name = free_name("n", "abcd", attempt, taken)
    assert name not in taken
    assert name == "n" if "n" not in taken else name.startswith("n_abcd")


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ((), "n"),
        (("nn", "n_"), "n"),  # other names that begin with "n" do not count
        (("n",), "n_abcd"),
        (("n", "n_abcd"), "n_abcd_a3"),
        (("n", "n_abcd", "n_abcd_a3"), "n_abcd_2"),
        (("n", "n_abcd", "n_abcd_a3", "n_abcd_2"), "n_abcd_3"),
    ],
)
def test_a_session_name_in_use_gets_a_suffix(taken, name):
    assert free_name("n", "abcd", 3, taken) == name


@pytest.mark.parametrize(
    ("name", "most", "short"),
    [
        ("gpujob_0_train_7", 80, "gpujob_0_train_7"),
        ("gpujob_0_train_7", 16, "gpujob_0_train_7"),
        ("gpujob_0_train_7", 15, "gpujob_0_trai_7"),
        ("gpujob_0_train_7", 11, "gpujob_0__7"),
        ("gpujob_0_train_7", 8, "gpujob_7"),
        ("gpujob_0_train_1234567", 18, "gpujob_0_t_1234567"),
        ("gpujob_0-1-2-3_unknown_12", 24, "gpujob_0-1-2-3_unknow_12"),
    ],
)
def test_a_session_name_that_is_too_long_keeps_the_job_id(name: str, most: int, short: str) -> None:
    """If a session name is too long for the path of a socket, letters before the job's id are removed.

    The job's id stays complete.
    """
    assert shortened(name, most) == short and len(short) <= most


@given(st.integers(1, 10**9), st.lists(st.integers(0, 99), max_size=20, unique=True), WORDS, st.integers(24, 80))
def test_any_shortened_session_name_is_safe_and_fits(job, gpus, arguments, most):
    name = session_name(job, sorted(gpus), arguments)
    short = shortened(name, most)
    assert len(short) <= most and short.endswith(f"_{job}") and re.fullmatch("gpujob[A-Za-z0-9_-]*", short)
    assert short == name or len(name) > most


def test_s11_session_names_have_only_safe_characters() -> None:
    """S11: A session name has only safe characters and ends with the job's id, whatever the mode of the job is."""
    for mode in (
        "-X stuff x",
        "a b",
        "a\nb",
        ";x",
        "$(x)",
        "../..",
        "1234.gpujob",
        "x" * 500,
        "é日本",
        "-S",
        ".",
        "_",
        "\x1b[2J",
        "a_7",
    ):
        for job in (1, 11):
            name = session_name(job, (0,), ("--mode", mode))
            assert re.fullmatch(r"gpujob_0_[A-Za-z0-9_-]{1,20}_\d+", name) and name.endswith(f"_{job}"), (mode, name)
            assert len(shortened(name, 24)) <= 24 and shortened(name, 24).endswith(f"_{job}")
        assert session_name(1, (0,), ("--mode", mode)) != session_name(11, (0,), ("--mode", mode))
