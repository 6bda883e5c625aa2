"""Tests of the command, environment and folder with which a job is started, for each mode of ``--cuda``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.job import JobSpec
from scheduler.core.launch import CUDA_MODES, Found, Launch, Streams, filled, launch_of, with_cuda
from scheduler.core.log_names import log_name
from tests.builders import a_job

PYTHON = Found("/usr/bin/python")


def launched(mode: str = "physical", *, found: Found = PYTHON, need: str = "2", **changes: Any) -> Launch:
    changes.setdefault("gpus", "")
    changes.setdefault("attempt", 1)
    on = changes.pop("on", (4, 6))
    job = a_job(12, need, log="/logs/12.log", **changes)
    job.gpus = on
    return launch_of(job, found, mode=mode, state_file="/run/state.json", cwd="/home/me")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--cuda 4,6"),
        ("--lr 1", "--lr 1 --cuda 4,6"),
        ("--cuda 0", "--cuda 4,6"),
        ("--cuda=0", "--cuda=4,6"),
        ("--cuda=", "--cuda=4,6"),
        ("--cuda 0 --lr 1", "--cuda 4,6 --lr 1"),
        ("--lr 1 --cuda 0,1", "--lr 1 --cuda 4,6"),
        ("--cuda 0 --cuda=1", "--cuda 4,6 --cuda=4,6"),
        ("--cuda", "--cuda 4,6"),
        ("--cuda --lr 1", "--cuda 4,6 --lr 1"),
        ("--cuda -1", "--cuda 4,6"),
        ("--cuda cpu", "--cuda 4,6"),
        ("--cudaX 1", "--cudaX 1 --cuda 4,6"),
        ("--no-cuda", "--no-cuda --cuda 4,6"),
        ("cuda 3", "cuda 3 --cuda 4,6"),
        ("--lr 1 -- rest", "--lr 1 --cuda 4,6 -- rest"),
        ("--cuda 0 -- --cuda 1", "--cuda 4,6 -- --cuda 1"),
        ("-- --cuda 1", "--cuda 4,6 -- --cuda 1"),
        ("--cuda --", "--cuda 4,6 --"),
        ("--", "--cuda 4,6 --"),
    ],
)
def test_an_existing_cuda_argument_is_replaced_otherwise_one_is_added(before: str, after: str) -> None:
    """S3.18: If a job has a `--cuda` argument, its value is replaced by the job's GPUs. Otherwise `--cuda` is added."""
    assert with_cuda(tuple(before.split()), "4,6") == tuple(after.split())


@given(st.lists(st.sampled_from(["--cuda", "--cuda=1", "--", "0", "--lr", "x", ""]), max_size=7))
def test_adding_cuda_twice_equals_adding_it_once(words: list[str]) -> None:
    once = with_cuda(words, "0")
    assert with_cuda(once, "0") == once
    before = once[: once.index("--")] if "--" in once else once
    assert any(word == "--cuda" or word.startswith("--cuda=") for word in before)


def test_the_five_modes_of_cuda_have_their_names() -> None:
    """S3.19: The modes of `--cuda` are physical, local, unset, auto and none."""
    assert CUDA_MODES == ("physical", "local", "unset", "auto", "none")


@pytest.mark.parametrize(
    ("mode", "argument", "visible"),
    [("physical", "4,6", "4,6"), ("local", "0,1", "4,6"), ("unset", "4,6", None)],
)
def test_cuda_and_cuda_visible_devices_hold_the_ids_of_the_mode(mode: str, argument: str, visible: str | None) -> None:
    """S3.18 S3.19: `--cuda` and CUDA_VISIBLE_DEVICES hold driver ids or local numbers, as the mode says."""
    launch = launched(mode, arguments=("--lr", "1"))
    assert launch.argv == ("/usr/bin/python", "-u", "/data/train.py", "--lr", "1", "--cuda", argument)
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == visible
    assert launch.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("mode", ["physical", "local", "unset"])
def test_a_job_without_a_gpu_sees_no_gpu_and_gets_no_cuda_argument(mode: str) -> None:
    launch = launched(mode, need="0", on=(), arguments=("--lr", "1"))
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launch.environment["GPUJOB_GPUS"] == ""
    assert launch.environment["GPUJOB_SHARE"] == "0"
    assert launch.argv == ("/usr/bin/python", "-u", "/data/train.py", "--lr", "1")


def test_a_cuda_argument_of_the_user_is_kept_if_the_job_has_no_gpu() -> None:
    assert launched(need="0", on=(), arguments=("--cuda", "cpu")).argv[-2:] == ("--cuda", "cpu")


def test_the_environment_of_a_job_contains_its_id_attempt_gpus_and_share() -> None:
    launch = launched(need="2x0.25", attempt=3)
    told = {name: value for name, value in launch.environment.items() if name.startswith("GPUJOB_")}
    assert told == {
        "GPUJOB_ID": "12",
        "GPUJOB_ATTEMPT": "3",
        "GPUJOB_GPUS": "4,6",
        "GPUJOB_SHARE": "0.25",
        "GPUJOB_STATE_FILE": "/run/state.json",
    }
    assert (launch.key, launch.log) == ("12.3", "/logs/12.log")


def test_torchrun_starts_one_process_for_each_gpu_and_gets_no_new_cuda_argument() -> None:
    """No `--cuda` is added to a torchrun job, because its processes use LOCAL_RANK.

    If the job already has a `--cuda` argument, its value is replaced by the job's GPUs.
    """
    start = ("/usr/bin/python", "-m", "torch.distributed.run", "--standalone")
    launch = launched(launch="torchrun", arguments=("--lr", "1"))
    assert launch.argv == (*start, "--nproc_per_node=2", "/data/train.py", "--lr", "1")
    launch = launched("local", launch="torchrun", arguments=("--cuda", "9", "--", "--cuda=9"))
    assert launch.argv[5:] == ("/data/train.py", "--cuda", "0,1", "--", "--cuda=9")
    launch = launched(launch="torchrun", need="0", on=(), arguments=("--cuda", "cpu"))
    assert launch.argv == (*start, "--nproc_per_node=1", "/data/train.py", "--cuda", "cpu")
    assert launched("none", launch="torchrun", arguments=("--cuda=9",)).argv[6:] == ("--cuda=9",)


def test_a_wrapper_is_put_before_the_command_and_is_not_shown() -> None:
    found = Found("/env/bin/python", prefix="/env", wrapper=("conda", "run", "-p", "/env"))
    launch = launched("none", found=found, arguments=("x",))
    assert launch.argv == ("conda", "run", "-p", "/env", "/env/bin/python", "-u", "/data/train.py", "x")
    assert launch.words == ("/env/bin/python", "-u", "/data/train.py", "x")


def test_variables_that_the_python_environment_unsets_are_unset() -> None:
    found = Found("/env/bin/python", prefix="/env", environment={"PYTHONHOME": None})
    assert launched(found=found).environment["PYTHONHOME"] is None


def test_a_script_that_is_not_python_runs_directly_without_a_cuda_argument() -> None:
    launch = launched(found=Found("/data/train.sh", runs_by_itself=True), arguments=("--lr", "1"))
    assert launch.argv == ("/data/train.sh", "--lr", "1")
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_a_command_runs_unchanged_without_a_cuda_argument() -> None:
    launch = launched(found=Found("/bin/nice"), script="", arguments=("nice", "-n", "5", "x"), source="submit")
    assert launch.argv == ("/bin/nice", "-n", "5", "x")
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_variables_of_the_scheduler_override_those_of_conda() -> None:
    found = Found("/env/bin/python", prefix="/env", environment={"PATH": "/env/bin", "CUDA_VISIBLE_DEVICES": "7"})
    environment = launched(found=found).environment
    assert environment["PATH"] == "/env/bin"
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "7"


def test_a_job_uses_its_own_folder_umask_and_environment_file_else_the_daemons_folder() -> None:
    assert launched().cwd == "/home/me"
    launch = launched(cwd="/data", umask=0o27, env_file="/x/12.env")
    assert (launch.cwd, launch.umask, launch.env_file) == ("/data", 0o27, "/x/12.env")


def test_a_launch_does_not_change_the_job() -> None:
    job = a_job(12, arguments=("--cuda", "9"))
    job.gpus = (1,)
    launch_of(job, PYTHON, mode="physical", state_file="", cwd="")
    assert job.spec == JobSpec(script="/data/train.py", arguments=("--cuda", "9"))


@pytest.mark.parametrize(
    ("attempt", "name"), [(1, "job_12_20261121_030405.log"), (2, "job_12_20261121_030405_a2.log"), (11, "job_12_20261121_030405_a11.log")]
)  # fmt: skip
def test_each_attempt_has_its_own_log_name(attempt: int, name: str) -> None:
    assert log_name(a_job(12, attempt=attempt), "20261121_030405") == name


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "job_12_S.log"),
        ({"gzip": True}, "job_12_S.log.gz"),
        ({"gzip": True, "runner": "screen"}, "job_12_S.log"),
        ({"log_name": "ts-out", "source": "ts"}, "ts-out.abc123"),
        ({"log_name": "ts-out", "source": "ts", "gzip": True}, "ts-out.abc123.gz"),
        ({"log_name": "my.log"}, "my.log"),
        ({"log_name": "my.log", "gzip": True}, "my.log.gz"),
        ({"log_name": "my.new.log", "attempt": 3}, "my.new_a3.log"),
        ({"log_name": "a b", "attempt": 3}, "a b_a3"),
        ({"log_name": ".a", "attempt": 2}, ".a_a2"),
        ({"stderr_apart": True}, "job_12_S.log"),
    ],
)
def test_a_job_can_choose_the_name_of_its_log(changes: dict[str, Any], name: str) -> None:
    """S2.1 S4.14 S4.15: A job can choose the name of its log.

    Random letters are added if the job comes from `ts`. The ending `.gz` is added if the log is compressed.
    """
    assert log_name(a_job(12, **changes), "S", letters="abc123") == name


def test_the_log_name_of_an_existing_file_gets_a_number() -> None:
    """S2.15: If the log file exists, a number is added to the name."""
    assert log_name(a_job(12, log_name="my.log"), "S", 2) == "my_2.log"
    assert log_name(a_job(12, log_name="my.log", attempt=2), "S", 3) == "my_a2_3.log"


@pytest.mark.parametrize(
    ("changes", "streams"),
    [
        ({}, Streams()),
        ({"stderr_apart": True}, Streams(errors="/logs/12.log.e")),
        ({"gzip": True}, Streams(gzip="gzip")),
        ({"gzip": True, "stderr_apart": True}, Streams(errors="/logs/12.log.e", gzip="gzip")),
        ({"caller": "77 1234 /run/a b/socket"}, Streams(caller=(77, 1234, "/run/a b/socket"))),
        ({"gzip": True, "stderr_apart": True, "log": ""}, Streams()),
    ],
)
def test_a_job_gets_the_output_streams_that_it_requested(changes: dict[str, Any], streams: Streams) -> None:
    """S4.13 S4.14 S4.17: A job gets a compressed log, a separate stderr file or its caller's descriptors on request."""
    job = a_job(12, **{"log": "/logs/12.log", **changes})
    assert launch_of(job, PYTHON, mode="physical", state_file="/s", cwd="/").streams == streams


def test_variables_of_a_job_do_not_override_those_of_the_environment_and_scheduler() -> None:
    """Contract 3: `;env=A=1` sets a variable of the job.

    If the scheduler or the Python environment sets the same variable, `;env=` has no effect on this variable.
    """
    given = ("A=1", "B=x=y", "C=", "CUDA_VISIBLE_DEVICES=7", "GPUJOB_ID=0", "CONDA_PREFIX=/mine", "VIRTUAL_ENV=/mine")
    found = Found("/opt/e/bin/python", environment={"CONDA_PREFIX": "/opt/e", "VIRTUAL_ENV": None})
    environment = launched(found=found, variables=given).environment
    assert (environment["A"], environment["B"], environment["C"]) == ("1", "x=y", "")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["GPUJOB_ID"]) == ("4,6", "12")
    assert (environment["CONDA_PREFIX"], environment["VIRTUAL_ENV"]) == ("/opt/e", None)


@pytest.mark.parametrize(
    ("source", "on", "mode", "visible"),
    [
        ("ts", (), "physical", "-1"),
        ("ts", (), "unset", "-1"),
        ("ts", (4, 6), "physical", "4,6"),
        ("ts", (4, 6), "unset", None),
        ("submit", (), "physical", ""),
        ("line", (), "unset", ""),
        ("commands", (), "physical", ""),
    ],
)
def test_without_gpus_cuda_visible_devices_is_minus_1_for_ts_jobs_else_empty(
    source: str, on: tuple[int, ...], mode: str, visible: str | None
) -> None:
    """S4.30: A job without GPUs has an empty CUDA_VISIBLE_DEVICES. If it comes from `ts`, the value is -1."""
    launch = launched(mode, need="2" if on else "0", on=on, source=source)
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == visible


def test_a_job_that_names_its_gpus_sees_them_and_a_share_of_0() -> None:
    """S4.31: A job that names its GPUs gets these GPUs in its variables, and GPUJOB_SHARE is 0."""
    job = a_job(12, on=(0, 3), source="ts", arguments=("train",), script="", log="/logs/12.log", attempt=1)
    job.gpus = (0, 3)
    environment = launch_of(job, Found("/bin/train"), mode="physical", state_file="/s", cwd="/").environment
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["GPUJOB_GPUS"]) == ("0,3", "0,3")
    assert environment["GPUJOB_SHARE"] == "0"


def test_i06_cuda_holds_driver_numbers_and_gpujob_gpus_holds_scheduler_ids() -> None:
    """I06: `--cuda` and CUDA_VISIBLE_DEVICES contain the GPU numbers of the driver.

    GPUJOB_GPUS contains the GPU ids of the scheduler.
    """
    job = a_job(1, "2", gpus="", attempt=1)
    job.gpus = (1, 2)
    launch = launch_of(job, PYTHON, mode="physical", state_file="/s.json", cwd="/", ordinals={1: 0, 2: 1})
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "0,1" and launch.environment["GPUJOB_GPUS"] == "1,2"
    assert launch.argv[-2:] == ("--cuda", "0,1")


def test_f16_attempts_of_the_same_second_have_different_logs() -> None:
    """F16: Attempts that start in the same second have different logs, because the name contains job id and attempt."""
    jobs = [a_job(n) for n in (1, 11, 111) for _ in range(4)]
    for n, job in enumerate(jobs):
        job.attempt = (1, 2, 11, 12)[n % 4]
    assert len({log_name(job, "20261121_010203", choice) for job in jobs for choice in (1, 2, 3, 11)}) == 4 * len(jobs)
    assert log_name(jobs[1], "20261121_010203", 2) == "job_1_20261121_010203_a2_2.log"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{gpus}", "4,6"),
        ("--devices={gpus}", "--devices=4,6"),
        ("{share} of {gpus}", "0.5 of 4,6"),
        ("{gpus}{gpus}", "4,64,6"),
        ('{"gpus": [{gpus}], "share": {share}}', '{"gpus": [4,6], "share": 0.5}'),
        ("${gpus}", "${gpus}"),
        ("$${share}", "$${share}"),
        ("$ {gpus}", "$ 4,6"),
        ("${x}{gpus}", "${x}4,6"),
        ("{{gpus}}", "{gpus}"),
        ("{{share}}", "{share}"),
        ("${{gpus}}", "${{gpus}}"),
        ("{{gpus}} is {gpus}", "{gpus} is 4,6"),
        ("{{{gpus}}}", "{{gpus}}"),
        ("{}", "{}"),
        ("{print}", "{print}"),
        ("{print $1}", "{print $1}"),
        ("{gpu}", "{gpu}"),
        ("{GPUS}", "{GPUS}"),
        ("{ gpus }", "{ gpus }"),
        ("{gpus:d}", "{gpus:d}"),
        ("{gpus", "{gpus"),
        ("gpus}", "gpus}"),
        ("{a,gpus}", "{a,gpus}"),
        ("{id}", "{id}"),
        ("", ""),
        ("\n{gpus}\n", "\n4,6\n"),
    ],
)
def test_gpus_and_share_are_filled_into_a_command_and_other_braces_are_kept(before: str, after: str) -> None:
    assert filled((before, "x"), "4,6", "0.5") == (after, "x")


@given(st.lists(st.text("${}gpushare ,'\"\n"), max_size=4))
def test_a_word_without_a_complete_placeholder_stays_unchanged(words: list[str]) -> None:
    whole = [word for word in words if "{gpus}" not in word and "{share}" not in word]
    assert filled(whole, "4,6", "0.5") == tuple(whole)
    assert len(filled(words, "4,6", "0.5")) == len(words)


def words_of(source: str, *arguments: str, **changes: Any) -> tuple[str, ...]:
    return launched(found=Found("/bin/x"), script="", arguments=("x", *arguments), source=source, **changes).argv


def test_placeholders_are_filled_into_commands_but_not_into_scripts_and_ts_jobs() -> None:
    """`{gpus}` and `{share}` are replaced in commands, whatever the mode of `--cuda` is.

    They are not replaced in the arguments of a script, or in a job of `ts`.
    """
    for source in ("submit", "commands"):
        assert words_of(source, "-d{gpus}", "{share}", need="2x0.25") == ("/bin/x", "-d4,6", "0.25")
        for mode in ("physical", "local", "unset", "none"):
            assert words_of(source, "{gpus}", mode=mode) == ("/bin/x", "4,6")
        assert words_of(source, "{gpus}", "{share}", need="0", on=()) == ("/bin/x", "", "0")
    assert words_of("ts", "{gpus}", "{{share}}") == ("/bin/x", "{gpus}", "{{share}}")
    assert launched("none", arguments=("{gpus}",)).argv[-1] == "{gpus}"
    runs_itself = launched(found=Found("/data/train.sh", runs_by_itself=True), arguments=("{gpus}",))
    assert runs_itself.argv == ("/data/train.sh", "{gpus}")


def test_gpu_ids_filled_into_a_command_are_those_of_the_driver() -> None:
    """`{gpus}` in a command is replaced by the driver's current numbers, as in CUDA_VISIBLE_DEVICES."""
    job = a_job(12, "2", script="", arguments=("x", "{gpus}"), source="submit")
    job.gpus = (6, 4)
    launch = launch_of(job, Found("/bin/x"), mode="physical", state_file="/s", cwd="/", ordinals={6: 1})
    assert launch.words == ("/bin/x", "1,4")
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "1,4"


@pytest.mark.parametrize("mode", ["physical", "local", "unset"])
def test_a_job_on_a_mig_instance_gets_its_uuid_and_the_local_id(mode: str) -> None:
    job = a_job(1, "mig-1g.10gb", gpus=(101,))
    launch = launch_of(job, PYTHON, mode=mode, state_file="/s.json", cwd="/", ordinals={101: "MIG-x"})
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "MIG-x" and launch.environment["GPUJOB_GPUS"] == "101"
    assert launch.argv[-2:] == ("--cuda", "0")
