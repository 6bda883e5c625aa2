"""Contract of runners (core/protocols.py: Runner), tested with the runners of direct and screen mode."""

from __future__ import annotations

import gzip
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.job import JobState
from scheduler.core.launch import Streams
from scheduler.core.observations import Ended, Gone, Lost, NeverRan, Started, Unclaimed
from scheduler.runners import attempt_record, local_base
from scheduler.system import processes
from scheduler.system.proc import boot_id
from scheduler.system.processes import lives
from tests.bench import Bench, direct_bench, engine_bench, screen_bench
from tests.stories.harness import wait_for


@pytest.fixture(params=[direct_bench, screen_bench, engine_bench], ids=["direct", "screen", "engine"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with request.param(tmp_path) as made:
        yield made


@pytest.fixture(params=[direct_bench, screen_bench], ids=["direct", "screen"])
def local_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Yield a bench whose jobs are processes of this machine, so that the runner tracks leftover processes."""
    with request.param(tmp_path) as made:
        yield made


def test_a_job_is_reported_as_started_and_then_ended_with_its_exit_code(bench: Bench) -> None:
    bench.start(1, "/bin/sh", "-c", "echo out; echo err >&2; exit 7")
    started, ended = bench.until(Started), bench.until(Ended)
    assert (ended.exit_code, ended.signal, ended.leftovers) == (7, None, ())
    assert [type(f) for f in bench.observations] == [Started, Ended]
    assert started.at <= ended.at <= time.time()
    assert bench.text(1) == "out\nerr\n"
    found = attempt_record.read(bench.record(1))
    assert (found.how, found.code) == ("exit", 7) and bench.runner.trouble() == ""


def test_an_end_by_signal_differs_from_exit_code_137(bench: Bench) -> None:
    bench.start(1, "/bin/sh", "-c", "kill -9 $$")
    bench.start(2, "/bin/sh", "-c", "exit 137")
    assert bench.until(Ended, 1).signal == 9
    assert bench.until(Ended, 2).exit_code == 137


def test_a_failed_start_is_reported_with_its_reason(bench: Bench) -> None:
    """B12, B13: If a start fails, the runner reports NeverRan, and the log contains the reason.

    The causes in this test: the program is missing or not executable, its interpreter is missing, or the working folder
    is missing.
    """
    plain = bench.folder / "plain"
    plain.write_text("echo no first line")
    bad = bench.folder / "bad"
    bad.write_text("#!/no/such/interpreter\r\n")
    for path in (plain, bad):
        path.chmod(0o755)
    off = bench.folder / "off"
    off.write_text("#!/bin/sh\n")
    for number, program in enumerate(("/no/such", str(plain), str(bad), str(off)), 1):
        bench.start(number, program)
        observation = bench.until(NeverRan, number)
        assert observation.lasting
        bench.wait(lambda n=number: "cannot start" in bench.text(n), "the reason")
        found = attempt_record.read(bench.record(number))
        assert found.how == "never" and found.code
    bench.start(9, "/bin/true", cwd=str(bench.folder / "gone"))
    assert "working folder" in bench.until(NeverRan, 9).why


def test_an_attempt_whose_record_exists_already_is_not_started(bench: Bench) -> None:
    """P1: If another process has created the record of an attempt, the runner does not start the attempt."""
    job, launch = bench.job(1, "/bin/sh", "-c", "touch ran")
    assert attempt_record.give_up(bench.record(1), job, boot_id(), 1)
    bench.runner.start(job, launch)
    bench.runner.flush()
    bench.start(2, "/bin/true")
    bench.until(Ended, 2)
    assert not (bench.folder / "ran").exists()


def test_f16_p1_a_log_created_by_another_scheduler_is_not_changed(bench: Bench) -> None:
    """F16, P1: An attempt does not start if another scheduler's log already has the name of the attempt's log.

    The other scheduler's log is not changed. The next attempt starts, because the name of its log is different.
    """
    theirs = bench.folder / "logs" / "1.1.log"
    theirs.write_text("CUDA out of memory\n")
    ran = bench.folder / "ran"
    bench.start(1, "/bin/sh", "-c", f"echo x >> {ran}")
    observation = bench.until(NeverRan, 1)
    assert not observation.lasting and "another scheduler" in observation.why, observation
    assert theirs.read_text() == "CUDA out of memory\n" and not ran.exists()
    bench.start(1, "/bin/sh", "-c", f"echo x >> {ran}; echo ours", attempt=2)
    bench.until(Ended, 1)
    assert b"ours" in bench.raw(1, 2) and ran.read_text() == "x\n"


def test_long_arguments_and_environments_arrive_complete(bench: Bench) -> None:
    words = ["x" * 100_000, "ä b\n\"'$;", ""]
    program = "import os,sys,hashlib;print(len(sys.argv[1]), ascii(sys.argv[2:]), len(os.environ['BIG']))"
    bench.start(1, sys.executable, "-c", program, *words, environment={"BIG": "y" * 120_000})
    assert bench.until(Ended).exit_code == 0
    text = bench.text(1)
    assert text == f"100000 {words[1:]!a} 120000\n"


def test_a_job_gets_its_own_folder_umask_and_environment_file(bench: Bench) -> None:
    stored = bench.folder / "environment"
    stored.write_bytes(b"PATH=/usr/bin:/bin\0MINE=a=b\0LINES=two\nlines")
    other = bench.folder / "other"
    other.mkdir()
    bench.start(1, "/bin/sh", "-c", "pwd; umask; env | grep -c .; echo $MINE", cwd=str(other), umask=0o27,
                env_file=str(stored))  # fmt: skip
    bench.start(2, "/bin/sh", "-c", "umask; pwd")
    bench.until(Ended, 1)
    bench.until(Ended, 2)
    lines = bench.text(1).splitlines()
    assert lines[0] == str(other) and lines[1] in ("0027", "027") and lines[-1] == "a=b"
    old = os.umask(0)
    os.umask(old)
    second = bench.text(2).splitlines()
    assert int(second[0], 8) == old and second[1] == str(bench.folder)
    assert (bench.folder / "logs" / "1.1.log").stat().st_mode & 0o777 == 0o600


def test_a_job_has_default_signals_and_inherits_no_descriptor(bench: Bench) -> None:
    program = (
        "import os,signal;print([s for s in signal.valid_signals() if s not in (9,19) and s < 32"
        " and signal.getsignal(s) is signal.SIG_IGN], signal.pthread_sigmask(signal.SIG_BLOCK, []),"
        " sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))"
    )
    bench.start(1, sys.executable, "-I", "-c", program)
    bench.until(Ended)
    text = bench.text(1)
    # Python ignores SIGPIPE and SIGXFSZ at its start; the fourth descriptor is that of `listdir`.
    assert text == f"[{signal.SIGPIPE!r}, {signal.SIGXFSZ!r}] set() ['0', '1', '2'] 4\n"


def test_stop_signals_all_processes_of_the_job(bench: Bench) -> None:
    job = bench.start(
        1, "/bin/sh", "-c", "setsid sleep 600 & sleep 600 & echo ready; wait; exec sleep 600"
    )  # Slurm may signal the shell last
    bench.until(Started)
    job.process = bench.leaders[0]
    bench.wait(lambda: "ready" in bench.text(1), "ready")
    bench.runner.stop([(job, False)])
    ended = bench.until(Ended)
    assert ended.signal == signal.SIGTERM
    if ended.leftovers:
        bench.runner.watch_leftovers("1.1", 1, 1, ended.leftovers)
        bench.until(Gone)


def test_leftover_processes_are_named_and_their_end_is_reported(local_bench: Bench) -> None:
    bench = local_bench
    # Both processes leave the session before the job ends: the end of the terminal ends its foreground processes.
    # The shells create the files themselves: a `touch` could outlive the job and count as another leftover process.
    script = (
        "(setsid sh -c ': > 1; exec sleep 600' &); (env -i $(command -v setsid) sh -c ': > 2; exec sleep 601' &);"
        " until [ -e 1 ] && [ -e 2 ]; do sleep 0.02; done; exit 3"
    )
    bench.start(1, "/bin/sh", "-c", script)
    ended = bench.until(Ended)
    assert ended.exit_code == 3 and len(ended.leftovers) == 2
    bench.runner.watch_leftovers("1.1", 1, 1, ended.leftovers)
    bench.runner.look()
    assert not any(isinstance(f, Gone) for f in bench.observations)
    for process in ended.leftovers:
        assert lives(process)
        os.kill(process.pid, signal.SIGKILL)
    assert bench.until(Gone).key == "1.1"


def test_children_of_an_orphan_that_dies_during_the_search_are_found(
    local_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: If an orphan dies during the search for leftover processes, the children of this orphan are still found."""
    bench = local_bench
    # The inner shell creates the file itself: a `touch` could outlive the job and count as another leftover process.
    orphans = "(setsid sh -c 'sh -c \": > ready; exec sleep 600\" & wait; : middle' &)"
    bench.start(1, "/bin/sh", "-c", f"{orphans}; until [ -e ready ]; do sleep 0.02; done; exit 4")
    real, killed = local_base.seen, []

    def seen(pid: int) -> processes.Seen | None:
        if not killed and b": middle" in Path(f"/proc/{pid}/cmdline").read_bytes():
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: (found := real(pid)) is None or not found.alive, "its death")
        return real(pid)

    monkeypatch.setattr(local_base, "seen", seen)
    ended = bench.until(Ended)
    assert killed and ended.exit_code == 4
    (left,) = ended.leftovers
    assert lives(left) and left.pid not in killed
    os.kill(left.pid, signal.SIGKILL)


def test_a_running_attempt_survives_its_runner_and_is_adopted(bench: Bench) -> None:
    """P6: A running attempt survives its runner.

    Another runner adopts the attempt, and reads its exit code from the record.
    """
    hold = bench.folder / "hold"
    hold.touch()
    job = bench.start(1, "/bin/sh", "-c", f"while [ -e {hold} ]; do sleep 0.02; done; exit 21")
    started = bench.until(Started)
    first = bench.runner
    bench.runner = bench.make()
    job.state, job.started_at = JobState.RUNNING, started.at
    observations = bench.runner.adopt(job)
    if bench.name == "slurm":
        assert observations == []  # the engine is asked first
    else:
        assert [type(f) for f in observations] == [Started] and observations[0].process == started.process
    bench.observations.clear()
    bench.orphan(first)
    hold.unlink()
    assert bench.until(Ended).exit_code == 21


def test_an_adopted_unclaimed_attempt_is_never_started(bench: Bench) -> None:
    job, launch = bench.job(1, "/bin/sh", "-c", "touch ran")
    bench.observations += bench.runner.adopt(job)
    bench.until(Unclaimed)
    assert len(bench.observations) == 1
    bench.runner.start(job, launch)  # too late: the attempt is claimed
    bench.runner.flush()
    bench.start(2, "/bin/true")
    bench.until(Ended, 2)
    assert not (bench.folder / "ran").exists()


def test_an_attempt_with_a_torn_record_is_lost(bench: Bench) -> None:
    job, _ = bench.job(1)
    path = bench.folder / "attempts" / "1.1"
    job.state = JobState.RUNNING
    text = bytearray(attempt_record.blank(job, boot_id()))
    line = attempt_record.end_line("exit", 0, 123)
    text[attempt_record.END_AT : attempt_record.END_AT + len(line)] = line.replace(
        b"exit 0", b"exit 1"
    )  # the checksum is wrong
    path.write_bytes(bytes(text))
    bench.observations += bench.runner.adopt(job)
    bench.until(Lost)
    assert len(bench.observations) == 1


def test_the_log_is_complete_when_the_end_is_reported(bench: Bench) -> None:
    """When the end of a job is reported, its log is complete.

    The diagnosis of a failure reads the last lines of the log.
    """
    for number in range(1, 9):
        bench.start(
            number, "/bin/sh", "-c", "yes 0123456789abcdefghijklmnopqrstuvwxyz | head -c 1000000; echo; echo LAST"
        )
    for number in range(1, 9):
        bench.until(Ended, number)
        assert bench.text(number).endswith("\nLAST\n") and len(bench.text(number)) == 1_000_006


def test_s4_13_s4_14_direct_mode_separates_stderr_and_packs_logs(bench: Bench) -> None:
    """S4.13, S4.14: Direct mode can write stderr to a separate file and compress logs.

    Screen mode writes one plain log.
    """
    errors = str(bench.folder / "logs" / "1.1.log.e")
    bench.start(1, "/bin/sh", "-c", "echo out; echo err >&2; exit 7", streams=Streams(errors=errors))
    assert bench.until(Ended, 1).exit_code == 7
    bench.start(2, "/bin/sh", "-c", "echo out; exit 8", streams=Streams(gzip="gzip"))
    assert bench.until(Ended, 2).exit_code == 8
    if bench.name == "screen":
        assert bench.text(1) == "out\nerr\n" and not os.path.exists(errors)
        assert bench.text(2) == "out\n"
    elif bench.name == "slurm":
        assert bench.text(1) == "out\n" and Path(errors).read_text() == "err\n" and bench.text(2) == "out\n"
    else:
        assert bench.text(1) == "out\n" and Path(errors).read_text() == "err\n"
        assert gzip.decompress(bench.raw(2)) == b"out\n"
